-- One lock as a view, as JSON. Changes nothing. `_holders` and `_waiters`: how many of them the view lists at most.
CREATE OR REPLACE FUNCTION @S.inspect(_name text, _now bigint, _holders int, _waiters int) RETURNS text LANGUAGE plpgsql @PATH STABLE AS $$
DECLARE _held jsonb; _waiting bigint := 0; _queue jsonb; _lock @S.lock;
BEGIN
  SELECT * INTO _lock FROM @S.lock WHERE name = _name;
  SELECT coalesce(jsonb_agg(t.one), '[]') INTO _held FROM (
    SELECT jsonb_build_object('holder', h.holder, 'fence', h.fence, 'mode', h.mode, 'since', h.since, 'expires_in', h.expires - _now,
      'lingers', h.lingers, 'revoked', h.revoked) AS one
    FROM @S.holds(_name) h WHERE h.expires > _now ORDER BY h.fence, h.seq LIMIT _holders) t;
  IF _lock.flags & 1 = 1 THEN
    SELECT count(*) INTO _waiting FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.alive_until > _now WHERE w.name = _name;
    SELECT jsonb_agg(t.one) INTO _queue FROM (
      SELECT jsonb_build_object('holder', w.holder, 'mode', w.mode, 'since', w.since) AS one
      FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.alive_until > _now WHERE w.name = _name ORDER BY w.position LIMIT _waiters) t;
  END IF;
  RETURN jsonb_build_object('name', _name, 'held', _held, 'waiting', _waiting, 'queue', coalesce(_queue, '[]'),
    'delayed', @S.delay_left(_lock, _now));
END $$;

-- The rest of the lock-delay of a lock, also after a hold that has expired and was not ended yet.
CREATE OR REPLACE FUNCTION @S.delay_left(_lock @S.lock, _now bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT nullif(greatest(0, CASE WHEN _lock.expires <= _now THEN _lock.free_at ELSE _lock.delayed_until END - _now,
    (SELECT max(expires + @S.lock_delay(terms)) - _now FROM @S.hold
      WHERE _lock.flags & 2 = 2 AND name = _lock.name AND expires <= _now AND NOT lingers)), 0)
$$;
