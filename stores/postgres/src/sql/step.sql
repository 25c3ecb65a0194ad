-- Two functions that are inlined where they are called, also in statements of the client's: they name exact types, so that no function or
-- operator in a schema of the caller's search_path fits better. All others have a search_path of their own (@PATH).
CREATE OR REPLACE FUNCTION @S.us() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT (pg_catalog.date_part('epoch'::text, pg_catalog.clock_timestamp()) * 1000000::double precision)::bigint
$$;

-- An advisory key. `_kind`: `lock` for what a transaction of the user's locks (see `enter`), and a grant of a lease looks at; `record` for
-- the writers of a record; `fence` for the counter. Without the kind a lock called `fence` would hold up all grants.
CREATE OR REPLACE FUNCTION @S.key(_kind text, _name text) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT pg_catalog.hashtextextended((_kind || ' '::text) || _name, pg_catalog.hashtext('@S'::text)::bigint)
$$;

-- The next fence, and not below `_least` (the clock, mostly). A counter that is behind (it was idle, lost, or restored) is set to a tenth of a
-- second ahead of it, by one session at a time: two could set it back. The subtransaction ends with an error so that its advisory lock
-- ends at once: sequences keep what was set. A clock beyond all fences is broken, and not believed.
CREATE OR REPLACE FUNCTION @S.next_fence(_least bigint) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _most constant bigint := 9007199254740991; _fence bigint := nextval('@S.fence');
BEGIN
  IF _fence < _least AND _least < _most - 100000 THEN
    BEGIN
      PERFORM pg_advisory_xact_lock(@S.key('fence', ''));
      _fence := nextval('@S.fence');
      IF _fence < _least THEN
        PERFORM setval('@S.fence', _least + 100000);
        _fence := nextval('@S.fence');
      END IF;
      RAISE 'set' USING ERRCODE = 'LK000';
    EXCEPTION WHEN SQLSTATE 'LK000' THEN NULL;
    END;
  END IF;
  IF _fence > _most THEN RAISE 'the fences of this store are used up' USING ERRCODE = 'LK001'; END IF;
  RETURN _fence;
END $$;

-- One step on one name: an ask (0 hasty, 1 patient, 3 called while it stands in line) or a release (2). What is usual is done
-- by one upsert or update, which whoever asks alone says without this around it; the rest by `ask` and `release`.
CREATE OR REPLACE FUNCTION @S.step(_client text, _epoch int, _claim bigint, _kind int, _name text, _attempt bytea, _ttl bigint, _terms jsonb,
  _holder text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _answer text;
BEGIN
  IF _kind < 2 THEN
    @TAKE INTO _answer;
    IF FOUND THEN RETURN _answer; END IF;
  ELSIF _kind = 2 THEN
    @GIVE RETURNING CASE flags WHEN 0 THEN '+' ELSE '+' || @S.pass_on(name, @S.us())::text END INTO _answer;
    IF FOUND THEN RETURN _answer; END IF;
    RETURN @S.release(ARRAY[_name], _attempt);
  ELSIF NOT EXISTS (SELECT FROM @S.client WHERE id = _client AND epoch > _epoch) THEN
    _answer := @S.take_turn(_name, _attempt, _ttl, _terms, _holder);
    IF _answer IS NOT NULL THEN RETURN _answer; END IF;
  END IF;
  RETURN @S.ask(_client, _epoch, _claim, _kind <> 0, ARRAY[_name], _attempt, _ttl, _terms, _holder);
END $$;

-- A release hands the lock to the first waiter of the queue and wakes it, but for no longer than the waiter's process is thought to
-- live; the waiter's guard renews in time for that. If anything is unusual, the waiter is only woken. The message names the waiter
-- and nothing else, because every role may send one: the waiter reads its grant from the row (see `take_turn`).
CREATE OR REPLACE FUNCTION @S.pass_on(_name text, _now bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
DECLARE _first @S.waiter; _left bigint; _fence bigint;
BEGIN
  SELECT w.* INTO _first FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.gone > _now
    WHERE w.name = _name ORDER BY w.place LIMIT 1;
  SELECT least(_first.ttl, gone - _now) INTO _left FROM @S.client
    WHERE id = _first.client AND hears AND _first.ttl IS NOT NULL;
  IF _left IS NULL THEN PERFORM @S.wake(_name, _now); RETURN; END IF;
  _fence := @S.next_fence(_now);
  UPDATE @S.lock l SET fence = greatest(_fence, l.fence + 1), attempt = _first.attempt, since = _now, ttl = _first.ttl,
      expires = _now + _left, free = _now + _left, back = 0, terms = NULL, holder = _first.holder,
      flags = CASE WHEN EXISTS (SELECT FROM @S.waiter w WHERE w.name = _name AND w.place <> _first.place) THEN 1 ELSE 0 END
    WHERE l.name = _name AND l.free <= _now AND _left >= least(_first.ttl, 1000000)
      AND pg_try_advisory_xact_lock_shared(@S.key('lock', _name))
    RETURNING l.fence INTO _fence;
  IF NOT FOUND THEN PERFORM @S.wake(_name, _now); RETURN; END IF;
  DELETE FROM @S.waiter WHERE name = _name AND place = _first.place;
  PERFORM pg_notify('lockkeeper_' || _first.client, encode(_first.attempt, 'hex'));
END $$;

-- The usual turn of a waiter: a release handed it the lock, which costs a read and no wait for the disk (the fence and what is left of
-- the lease); or it is the first, wants the lock for itself, and the lock is free.
CREATE OR REPLACE FUNCTION @S.take_turn(_name text, _attempt bytea, _ttl bigint, _terms jsonb, _holder text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _fence bigint; _now bigint := @S.us(); _left bigint;
BEGIN
  SELECT fence, expires - _now INTO _fence, _left FROM @S.lock
    WHERE name = _name AND attempt = _attempt AND expires > _now AND _terms IS NULL;
  IF FOUND AND current_setting('synchronous_standby_names') <> '' THEN
    -- The release that handed it over may be here and not at the standby, if its wait was cancelled. A write of our own waits for both.
    UPDATE @S.lock SET expires = expires WHERE name = _name AND attempt = _attempt AND expires > _now;
  END IF;
  IF FOUND THEN RETURN _fence::text || ' ' || _left::text; END IF;
  UPDATE @S.lock l SET fence = greatest(s.fence, l.fence + 1), attempt = _attempt, since = s.now, ttl = _ttl,
      expires = s.now + _ttl, free = s.now + _ttl, back = 0, terms = NULL, holder = _holder
    FROM (SELECT nextval('@S.fence') AS fence, @S.us() AS now
      WHERE _terms IS NULL AND pg_try_advisory_xact_lock_shared(@S.key('lock', _name))) s
    WHERE l.name = _name AND l.free <= s.now AND l.flags = 1 AND s.fence BETWEEN s.now AND 9007199254740991
      AND s.now > (SELECT watched FROM @S.state)
      AND _attempt = (SELECT w.attempt FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.gone > s.now
        WHERE w.name = _name ORDER BY w.place LIMIT 1)
    RETURNING l.fence INTO _fence;
  IF NOT FOUND THEN RETURN NULL; END IF;
  DELETE FROM @S.waiter WHERE name = _name AND attempt = _attempt;
  UPDATE @S.lock SET flags = 0 WHERE name = _name AND NOT EXISTS (SELECT FROM @S.waiter WHERE name = _name);
  RETURN _fence;
END $$;

CREATE OR REPLACE FUNCTION @S.delay(_terms jsonb) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce((_terms->>'delay')::bigint, 0)
$$;
