-- All that is left of the terms of a hold that was given back: which other names it is bound to.
CREATE OR REPLACE FUNCTION @S.bonds(_terms jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN _terms ? 'names' THEN jsonb_build_object('names', _terms->'names') END
$$;

-- Until when a hold that is given back stays: its minimum is not kept if it is revoked, because it is to be free.
CREATE OR REPLACE FUNCTION @S.stays(_since bigint, _terms jsonb) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN _terms ? 'revoked' THEN 0 ELSE _since + coalesce((_terms->>'min')::bigint, 0) END
$$;

-- Gives back a hold, or leaves the line. A hold whose minimum is not over stays, and is nobody's.
CREATE OR REPLACE FUNCTION @S.release(_names text[], _attempt bytea) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _name text; _lock @S.lock; _hold @S.hold; _now bigint; _stays bigint; _done bool := false;
BEGIN
  PERFORM FROM @S.lock WHERE name = ANY (_names) ORDER BY name FOR NO KEY UPDATE;
  IF NOT FOUND THEN RETURN '-'; END IF;
  _now := @S.us();
  FOREACH _name IN ARRAY _names LOOP
    _lock := @S.settle(_name, _now);
    IF _lock.attempt = _attempt THEN
      _done := true;
      _stays := @S.stays(_lock.since, _lock.terms);
      UPDATE @S.lock SET attempt = NULL, expires = CASE WHEN _stays > _now THEN _stays ELSE 0 END,
          free = greatest(CASE WHEN _stays > _now THEN _stays END, back), ttl = greatest(_stays - _now, 0),
          terms = CASE WHEN _stays > _now THEN @S.bonds(terms) END
        WHERE name = _name;
      PERFORM @S.tell(_now, _name, 'released', _lock.fence, _lock.holder, NULL);
      IF _stays <= _now AND _lock.flags & 1 = 1 THEN PERFORM @S.wake(_name, _now); END IF;
    ELSIF _lock.flags & 2 = 2 THEN
      SELECT * INTO _hold FROM @S.hold WHERE name = _name AND attempt = _attempt AND NOT lingers;
      IF FOUND THEN
        _done := true;
        PERFORM @S.let_go(_hold, _now);
        IF _lock.flags & 1 = 1 THEN PERFORM @S.wake(_name, _now); END IF;
      END IF;
    END IF;
  END LOOP;
  IF NOT _done THEN _done := @S.leave(_names, _attempt, _now); END IF;
  RETURN CASE WHEN _done THEN '+' ELSE '-' END;
END $$;

CREATE OR REPLACE FUNCTION @S.let_go(_hold @S.hold, _now bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
DECLARE _stays bigint := @S.stays(_hold.since, _hold.terms);
BEGIN
  IF _stays > _now THEN
    -- Under a key that nobody can have: the attempt is not its own any more.
    UPDATE @S.hold SET lingers = true, expires = _stays, ttl = _stays - _now, terms = @S.bonds(terms), attempt = sha256(_hold.attempt)
      WHERE name = _hold.name AND attempt = _hold.attempt;
  ELSE
    DELETE FROM @S.hold WHERE name = _hold.name AND attempt = _hold.attempt;
    UPDATE @S.lock SET flags = flags & ~2 WHERE name = _hold.name AND NOT EXISTS (SELECT FROM @S.hold h WHERE h.name = _hold.name);
  END IF;
  PERFORM @S.tell(_now, _hold.name, 'released', _hold.fence, _hold.holder, NULL);
END $$;

-- Takes an ask out of its lines. Whoever stood behind it may be the first now.
CREATE OR REPLACE FUNCTION @S.leave(_names text[], _attempt bytea, _now bigint) RETURNS bool LANGUAGE plpgsql @PATH AS $$
DECLARE _gone @S.waiter; _left bool := false;
BEGIN
  FOR _gone IN DELETE FROM @S.waiter WHERE name = ANY (_names) AND attempt = _attempt RETURNING * LOOP
    _left := true;
    PERFORM @S.tell(_now, _gone.name, 'left', NULL, _gone.holder, NULL);
    PERFORM @S.wake(_gone.name, _now);
  END LOOP;
  RETURN _left;
END $$;

