-- The entry point of the client, and the hand-off of a lock from a release to the first waiter.

-- Runs one request for one name: an acquire (0 try once, 1 enqueue, 3 woken in the queue) or a release (2). The fast path is one upsert or
-- update, which a client with one request in flight sends without this function around it; `acquire` and `release` do the rest.
CREATE OR REPLACE FUNCTION @S.run_request(_client text, _epoch int, _claim bigint, _kind int, _name text, _attempt bytea, _ttl bigint, _terms jsonb,
  _holder text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _reply text;
BEGIN
  IF _kind < 2 THEN
    @ACQUIRE_FAST INTO _reply;
    IF FOUND THEN RETURN _reply; END IF;
  ELSIF _kind = 2 THEN
    @RELEASE_FAST RETURNING CASE flags WHEN 0 THEN '+' ELSE '+' || @S.hand_off(name, @S.now_us())::text END INTO _reply;
    IF FOUND THEN RETURN _reply; END IF;
    RETURN @S.release(ARRAY[_name], _attempt);
  ELSIF NOT EXISTS (SELECT FROM @S.client WHERE id = _client AND epoch > _epoch) THEN
    _reply := @S.acquire_woken(_name, _attempt, _ttl, _terms, _holder);
    IF _reply IS NOT NULL THEN RETURN _reply; END IF;
  END IF;
  RETURN @S.acquire(_client, _epoch, _claim, _kind <> 0, ARRAY[_name], _attempt, _ttl, _terms, _holder);
END $$;

-- A release grants the lock to the first waiter of the queue and wakes the waiter, for no longer than the waiter's process is known to be
-- alive; the waiter's guard renews before that. If the waiter has no `ttl`, or its process does not listen, the waiter is only woken. The
-- notification names the waiter and nothing else, because every role may send one: the waiter reads its grant from the row (see `acquire_woken`).
CREATE OR REPLACE FUNCTION @S.hand_off(_name text, _now bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
DECLARE _first @S.waiter; _left bigint; _fence bigint;
BEGIN
  SELECT w.* INTO _first FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.alive_until > _now
    WHERE w.name = _name ORDER BY w.position LIMIT 1;
  SELECT least(_first.ttl, alive_until - _now) INTO _left FROM @S.client
    WHERE id = _first.client AND listens AND _first.ttl IS NOT NULL;
  IF _left IS NULL THEN PERFORM @S.wake_first(_name, _now); RETURN; END IF;
  _fence := @S.next_fence(_now);
  UPDATE @S.lock l SET fence = greatest(_fence, l.fence + 1), attempt = _first.attempt, since = _now, ttl = _first.ttl,
      expires = _now + _left, free_at = _now + _left, delayed_until = 0, terms = NULL, holder = _first.holder,
      flags = CASE WHEN EXISTS (SELECT FROM @S.waiter w WHERE w.name = _name AND w.position <> _first.position) THEN 1 ELSE 0 END
    WHERE l.name = _name AND l.free_at <= _now AND _left >= least(_first.ttl, 1000000)
      AND pg_try_advisory_xact_lock_shared(@S.advisory_key('lock', _name))
    RETURNING l.fence INTO _fence;
  IF NOT FOUND THEN PERFORM @S.wake_first(_name, _now); RETURN; END IF;
  DELETE FROM @S.waiter WHERE name = _name AND position = _first.position;
  PERFORM pg_notify('lockkeeper_' || _first.client, encode(_first.attempt, 'hex'));
END $$;

-- The acquire of a waiter that was woken. Either a release handed it the lock: then the reply is the fence and the rest of the lease, for a
-- read and no wait for the disk. Or the waiter is the first in the queue, its request has no terms, and the lock is free. NULL in any other case.
CREATE OR REPLACE FUNCTION @S.acquire_woken(_name text, _attempt bytea, _ttl bigint, _terms jsonb, _holder text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _fence bigint; _now bigint := @S.now_us(); _left bigint;
BEGIN
  SELECT fence, expires - _now INTO _fence, _left FROM @S.lock
    WHERE name = _name AND attempt = _attempt AND expires > _now AND _terms IS NULL;
  IF FOUND AND current_setting('synchronous_standby_names') <> '' THEN
    -- If its wait was cancelled, the release that handed the lock over may be missing at the standby. This write waits for both.
    UPDATE @S.lock SET expires = expires WHERE name = _name AND attempt = _attempt AND expires > _now;
  END IF;
  IF FOUND THEN RETURN _fence::text || ' ' || _left::text; END IF;
  UPDATE @S.lock l SET fence = greatest(s.fence, l.fence + 1), attempt = _attempt, since = s.now, ttl = _ttl,
      expires = s.now + _ttl, free_at = s.now + _ttl, delayed_until = 0, terms = NULL, holder = _holder
    FROM (SELECT nextval('@S.fence') AS fence, @S.now_us() AS now
      WHERE _terms IS NULL AND pg_try_advisory_xact_lock_shared(@S.advisory_key('lock', _name))) s
    WHERE l.name = _name AND l.free_at <= s.now AND l.flags = 1 AND s.fence BETWEEN s.now AND 9007199254740991
      AND s.now > (SELECT watched_until FROM @S.state)
      AND _attempt = (SELECT w.attempt FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.alive_until > s.now
        WHERE w.name = _name ORDER BY w.position LIMIT 1)
    RETURNING l.fence INTO _fence;
  IF NOT FOUND THEN RETURN NULL; END IF;
  DELETE FROM @S.waiter WHERE name = _name AND attempt = _attempt;
  UPDATE @S.lock SET flags = 0 WHERE name = _name AND NOT EXISTS (SELECT FROM @S.waiter WHERE name = _name);
  RETURN _fence;
END $$;
