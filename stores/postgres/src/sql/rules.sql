-- The rule of admission, as in core::rules. Answers: 0 free, above 0 the fence to enter again with, -1 others are in the way,
-- -2 its own owner is, with less than is asked for.

CREATE OR REPLACE FUNCTION @S.covers(_held int, _asked int) RETURNS bool LANGUAGE sql IMMUTABLE AS $$
  SELECT _held = 0 OR (_held = -1 AND _asked = -1) OR (_held > 0 AND _asked >= _held)
$$;

-- Whoever holds a name now. The row of the lock is locked, and what is over was ended (see `settle`).
CREATE OR REPLACE FUNCTION @S.stakes(_name text) RETURNS TABLE(fence bigint, turn bigint, mode int, owner text) LANGUAGE sql STABLE AS $$
  SELECT l.fence, 0, 0, l.terms->>'owner' FROM @S.lock l WHERE l.name = _name AND l.expires > 0
  UNION ALL SELECT h.fence, h.turn, h.mode, h.terms->>'owner' FROM @S.hold h WHERE h.name = _name
  ORDER BY 1, 2
$$;

CREATE OR REPLACE FUNCTION @S.judge(_name text, _mode int, _owner text) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE
  _stake record; _mine bool := false; _blocked bool := false; _permits int := 0; _last bigint := 0;
  _limit int := CASE WHEN _mode > 0 THEN _mode ELSE 2147483647 END;
BEGIN
  FOR _stake IN SELECT * FROM @S.stakes(_name) LOOP
    IF _owner = _stake.owner THEN
      IF @S.covers(_stake.mode, _mode) THEN RETURN _stake.fence; END IF;
      _mine := true;
    ELSIF _mode > 0 AND _stake.mode > 0 THEN
      _limit := least(_limit, _stake.mode);
      -- Holds by which an owner entered again stand beside each other and share a fence: they are one permit.
      IF _stake.fence <> _last THEN _permits := _permits + 1; END IF;
      _last := _stake.fence;
    ELSIF NOT (_mode = -1 AND _stake.mode = -1) THEN
      _blocked := true;
    END IF;
  END LOOP;
  RETURN CASE WHEN _mine THEN -2 WHEN _blocked OR _permits >= _limit THEN -1 ELSE 0 END;
END $$;

-- The first in line whose process is there. Those before it that are gone lose their places.
CREATE OR REPLACE FUNCTION @S.front(_name text, _now bigint) RETURNS @S.waiter LANGUAGE plpgsql @PATH AS $$
DECLARE _first @S.waiter;
BEGIN
  SELECT w.* INTO _first FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.gone > _now
    WHERE w.name = _name ORDER BY w.place LIMIT 1;
  DELETE FROM @S.waiter WHERE name = _name AND place < coalesce(_first.place, 9223372036854775807);
  RETURN _first;
END $$;

-- Calls the first in line: one process, one waiter. If there is none, the line is over.
CREATE OR REPLACE FUNCTION @S.wake(_name text, _now bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
BEGIN
  PERFORM pg_notify('lockkeeper_' || w.client, encode(w.attempt, 'hex')) FROM @S.waiter w
    JOIN @S.client c ON c.id = w.client AND c.gone > _now WHERE w.name = _name ORDER BY w.place LIMIT 1;
  IF NOT FOUND THEN
    DELETE FROM @S.waiter WHERE name = _name;
    UPDATE @S.lock SET flags = flags & ~1 WHERE name = _name AND flags & 1 = 1;
  END IF;
END $$;

-- Tells those who watch.
CREATE OR REPLACE FUNCTION @S.tell(_now bigint, _name text, _kind text, _fence bigint, _holder text, _reason text) RETURNS void
LANGUAGE plpgsql @PATH AS $$
BEGIN
  PERFORM pg_notify('lockkeeper_events_@S', jsonb_build_object('at', _now, 'name', _name, 'kind', _kind, 'fence', _fence,
    'holder', _holder, 'reason', _reason)::text) FROM @S.state WHERE watched >= _now;
END $$;

-- Makes sure that each name has a row, and locks all of them, in order: nobody waits in a circle.
CREATE OR REPLACE FUNCTION @S.seize(_names text[]) RETURNS void LANGUAGE plpgsql @PATH AS $$
DECLARE _name text;
BEGIN
  FOREACH _name IN ARRAY _names LOOP
    LOOP
      PERFORM FROM @S.lock WHERE name = _name FOR NO KEY UPDATE;
      EXIT WHEN FOUND;
      INSERT INTO @S.lock(name, fence, since, ttl, expires, free) VALUES (_name, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING;
    END LOOP;
  END LOOP;
END $$;

-- Ends what is over of one name, whose row is locked. A lease that ends later than it can have been given was given by a clock
-- that has been set back: it counts from now.
CREATE OR REPLACE FUNCTION @S.settle(_name text, _now bigint) RETURNS @S.lock LANGUAGE plpgsql @PATH AS $$
DECLARE _lock @S.lock; _hold @S.hold; _most constant bigint := 86400000000;
BEGIN
  SELECT * INTO _lock FROM @S.lock WHERE name = _name;
  IF _lock.flags & 2 = 2 THEN
    UPDATE @S.hold SET expires = _now + ttl WHERE name = _name AND expires > _now + ttl;
    FOR _hold IN DELETE FROM @S.hold WHERE name = _name AND expires <= _now RETURNING * LOOP
      IF NOT _hold.lingers THEN
        _lock.back := greatest(_lock.back, _hold.expires + @S.delay(_hold.terms));
        PERFORM @S.tell(_now, _name, 'expired', _hold.fence, _hold.holder, NULL);
      END IF;
    END LOOP;
    IF NOT EXISTS (SELECT FROM @S.hold WHERE name = _name) THEN _lock.flags := _lock.flags & ~2; END IF;
  END IF;
  IF _lock.expires > _now + _lock.ttl THEN
    _lock.expires := _now + _lock.ttl;
  ELSIF _lock.expires <= _now THEN
    IF _lock.attempt IS NOT NULL THEN
      _lock.back := greatest(_lock.back, _lock.expires + @S.delay(_lock.terms));
      PERFORM @S.tell(_now, _name, 'expired', _lock.fence, _lock.holder, NULL);
    END IF;
    _lock.attempt := NULL;
    _lock.expires := 0;
  END IF;
  -- What is over is forgotten, or it would come back with a clock that is set back.
  _lock.back := CASE WHEN _lock.back > _now THEN least(_lock.back, _now + _most) ELSE 0 END;
  _lock.free := greatest(_lock.back, CASE WHEN _lock.expires > 0 THEN _lock.expires + @S.delay(_lock.terms) END);
  UPDATE @S.lock l SET attempt = _lock.attempt, expires = _lock.expires, free = _lock.free, back = _lock.back, flags = _lock.flags
    WHERE l.name = _name AND (l.expires, l.free, l.back, l.flags) IS DISTINCT FROM (_lock.expires, _lock.free, _lock.back, _lock.flags);
  RETURN _lock;
END $$;
