-- Locking the rows of names, and bringing a row up to date.

-- Creates the missing rows of these names and locks all of them, in the order of the names: so sessions do not deadlock.
CREATE OR REPLACE FUNCTION @S.lock_rows(_names text[]) RETURNS void LANGUAGE plpgsql @PATH AS $$
DECLARE _name text;
BEGIN
  FOREACH _name IN ARRAY _names LOOP
    LOOP
      PERFORM FROM @S.lock WHERE name = _name FOR NO KEY UPDATE;
      EXIT WHEN FOUND;
      INSERT INTO @S.lock(name, fence, since, ttl, expires, free_at) VALUES (_name, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING;
    END LOOP;
  END LOOP;
END $$;

-- Ends the expired holds of one name, whose row is locked. A lease that ends later than its ttl allows was granted before the clock was set
-- back: the lease counts from now.
CREATE OR REPLACE FUNCTION @S.end_expired(_name text, _now bigint) RETURNS @S.lock LANGUAGE plpgsql @PATH AS $$
DECLARE _lock @S.lock; _hold @S.hold; _most constant bigint := 86400000000;
BEGIN
  SELECT * INTO _lock FROM @S.lock WHERE name = _name;
  IF _lock.flags & 2 = 2 THEN
    UPDATE @S.hold SET expires = _now + ttl WHERE name = _name AND expires > _now + ttl;
    FOR _hold IN DELETE FROM @S.hold WHERE name = _name AND expires <= _now RETURNING * LOOP
      IF NOT _hold.lingers THEN
        _lock.delayed_until := greatest(_lock.delayed_until, _hold.expires + @S.lock_delay(_hold.terms));
        PERFORM @S.emit(_now, _name, 'expired', _hold.fence, _hold.holder, NULL);
      END IF;
    END LOOP;
    IF NOT EXISTS (SELECT FROM @S.hold WHERE name = _name) THEN _lock.flags := _lock.flags & ~2; END IF;
  END IF;
  IF _lock.expires > _now + _lock.ttl THEN
    _lock.expires := _now + _lock.ttl;
  ELSIF _lock.expires <= _now THEN
    IF _lock.attempt IS NOT NULL THEN
      _lock.delayed_until := greatest(_lock.delayed_until, _lock.expires + @S.lock_delay(_lock.terms));
      PERFORM @S.emit(_now, _name, 'expired', _lock.fence, _lock.holder, NULL);
    END IF;
    _lock.attempt := NULL;
    _lock.expires := 0;
  END IF;
  -- A lock-delay that is over is cleared, or it would begin again with a clock that is set back.
  _lock.delayed_until := CASE WHEN _lock.delayed_until > _now THEN least(_lock.delayed_until, _now + _most) ELSE 0 END;
  _lock.free_at := greatest(_lock.delayed_until, CASE WHEN _lock.expires > 0 THEN _lock.expires + @S.lock_delay(_lock.terms) END);
  UPDATE @S.lock l SET attempt = _lock.attempt, expires = _lock.expires, free_at = _lock.free_at, delayed_until = _lock.delayed_until,
      flags = _lock.flags
    WHERE l.name = _name AND (l.expires, l.free_at, l.delayed_until, l.flags)
      IS DISTINCT FROM (_lock.expires, _lock.free_at, _lock.delayed_until, _lock.flags);
  RETURN _lock;
END $$;
