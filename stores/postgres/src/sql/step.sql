CREATE FUNCTION @S.us() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
$$;

-- What a transaction of the user's locks (see `enter`), and whoever grants a lease looks at.
CREATE FUNCTION @S.key(_name text) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT hashtextextended(_name, hashtext('@S'))
$$;

-- The next fence. If it is behind the clock, the base is raised to a tenth of a second ahead of it: so that row is written ten
-- times a second at most. Nobody waits for whoever does that: the clock itself will do meanwhile. A clock beyond all fences is
-- broken, and not believed.
CREATE FUNCTION @S.next_fence(_now bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE _most constant bigint := 9007199254740991; _number bigint := nextval('@S.number'); _fence bigint;
BEGIN
  SELECT base + _number INTO _fence FROM @S.state;
  IF _fence < _now AND _now < _most - 100000 THEN
    UPDATE @S.state SET base = greatest(base, _now + 100000 - _number)
      WHERE one IN (SELECT one FROM @S.state FOR UPDATE SKIP LOCKED) RETURNING base + _number INTO _fence;
    IF NOT FOUND THEN _fence := _now; END IF;
  END IF;
  IF _fence IS NULL THEN RAISE undefined_table USING MESSAGE = 'the row of state is gone'; END IF;
  IF _fence > _most THEN RAISE 'the fences of this store are used up' USING ERRCODE = 'LK001'; END IF;
  RETURN _fence;
END $$;

-- One step on one name: an ask (0 hasty, 1 patient) or a release (2). What is usual is done here, at the price of one upsert;
-- the rest by `ask` and `release`.
CREATE FUNCTION @S.step(_client text, _epoch int, _claim bigint, _kind int, _name text, _attempt bytea, _ttl bigint, _terms jsonb,
  _holder text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE _fence bigint;
BEGIN
  IF _kind = 2 THEN
    UPDATE @S.lock l SET attempt = NULL, expires = 0, free = 0 FROM @S.state s
      WHERE l.name = _name AND l.attempt = _attempt AND l.expires > @S.us() AND l.flags = 0 AND l.terms IS NULL
        AND s.watched < l.since;
    IF FOUND THEN RETURN '+'; END IF;
    RETURN @S.release(ARRAY[_name], _attempt);
  END IF;
  INSERT INTO @S.lock AS l (name, fence, attempt, since, ttl, expires, free, holder)
    SELECT _name, s.fence, _attempt, s.now, _ttl, s.now + _ttl, s.now + _ttl, _holder
      FROM (SELECT base + nextval('@S.number') AS fence, @S.us() AS now, watched FROM @S.state
        WHERE _terms IS NULL AND pg_try_advisory_xact_lock_shared(@S.key(_name))) s
      WHERE s.fence BETWEEN s.now AND 9007199254740991 AND s.watched < s.now
    ON CONFLICT (name) DO UPDATE SET fence = greatest(excluded.fence, l.fence + 1), attempt = excluded.attempt,
      since = excluded.since, ttl = excluded.ttl, expires = excluded.expires, free = excluded.free, terms = NULL,
      holder = excluded.holder
      WHERE l.free <= excluded.since AND l.flags = 0
    RETURNING l.fence INTO _fence;
  IF FOUND THEN RETURN _fence; END IF;
  RETURN @S.ask(_client, _epoch, _claim, _kind = 1, ARRAY[_name], _attempt, _ttl, _terms, _holder);
END $$;

-- Renews one hold of one name.
CREATE FUNCTION @S.renew(_name text, _attempt bytea) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
  UPDATE @S.lock SET expires = @S.us() + ttl, free = @S.us() + ttl + (free - expires)
    WHERE name = _name AND attempt = _attempt AND expires > @S.us();
  IF FOUND THEN RETURN true; END IF;
  UPDATE @S.hold SET expires = @S.us() + ttl
    WHERE name = _name AND attempt = _attempt AND expires > @S.us() AND NOT lingers;
  RETURN FOUND;
END $$;
