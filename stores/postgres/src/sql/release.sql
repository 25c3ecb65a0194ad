-- The terms that a lingering hold keeps after its release: the other names of its grant.
CREATE OR REPLACE FUNCTION @S.lingering_terms(_terms jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN _terms ? 'names' THEN jsonb_build_object('names', _terms->'names') END
$$;

-- Until when a released hold lingers: the end of its min-hold, which a revoked hold does not keep.
CREATE OR REPLACE FUNCTION @S.min_hold_end(_since bigint, _terms jsonb) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN _terms ? 'revoked' THEN 0 ELSE _since + coalesce((_terms->>'min')::bigint, 0) END
$$;

-- Releases a hold, or removes a request from the queue. A hold whose min-hold is not over lingers without an attempt. Replies `+`, or `-` if
-- there was neither.
CREATE OR REPLACE FUNCTION @S.release(_names text[], _attempt bytea) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _name text; _lock @S.lock; _hold @S.hold; _now bigint; _end bigint; _done bool := false;
BEGIN
  PERFORM FROM @S.lock WHERE name = ANY (_names) ORDER BY name FOR NO KEY UPDATE;
  IF NOT FOUND THEN RETURN '-'; END IF;
  _now := @S.now_us();
  FOREACH _name IN ARRAY _names LOOP
    _lock := @S.end_expired(_name, _now);
    IF _lock.attempt = _attempt THEN
      _done := true;
      _end := @S.min_hold_end(_lock.since, _lock.terms);
      UPDATE @S.lock SET attempt = NULL, expires = CASE WHEN _end > _now THEN _end ELSE 0 END,
          free_at = greatest(CASE WHEN _end > _now THEN _end END, delayed_until), ttl = greatest(_end - _now, 0),
          terms = CASE WHEN _end > _now THEN @S.lingering_terms(terms) END
        WHERE name = _name;
      PERFORM @S.emit(_now, _name, 'released', _lock.fence, _lock.holder, NULL);
      IF _end <= _now AND _lock.flags & 1 = 1 THEN PERFORM @S.wake_first(_name, _now); END IF;
    ELSIF _lock.flags & 2 = 2 THEN
      SELECT * INTO _hold FROM @S.hold WHERE name = _name AND attempt = _attempt AND NOT lingers;
      IF FOUND THEN
        _done := true;
        PERFORM @S.release_hold(_hold, _now);
        IF _lock.flags & 1 = 1 THEN PERFORM @S.wake_first(_name, _now); END IF;
      END IF;
    END IF;
  END LOOP;
  IF NOT _done THEN _done := @S.dequeue(_names, _attempt, _now); END IF;
  RETURN CASE WHEN _done THEN '+' ELSE '-' END;
END $$;

-- Releases one row of `hold`.
CREATE OR REPLACE FUNCTION @S.release_hold(_hold @S.hold, _now bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
DECLARE _end bigint := @S.min_hold_end(_hold.since, _hold.terms);
BEGIN
  IF _end > _now THEN
    -- The row lingers under a hash that is no client's attempt, so that no request matches it.
    UPDATE @S.hold SET lingers = true, expires = _end, ttl = _end - _now, terms = @S.lingering_terms(terms), attempt = sha256(_hold.attempt)
      WHERE name = _hold.name AND attempt = _hold.attempt;
  ELSE
    DELETE FROM @S.hold WHERE name = _hold.name AND attempt = _hold.attempt;
    UPDATE @S.lock SET flags = flags & ~2 WHERE name = _hold.name AND NOT EXISTS (SELECT FROM @S.hold h WHERE h.name = _hold.name);
  END IF;
  PERFORM @S.emit(_now, _hold.name, 'released', _hold.fence, _hold.holder, NULL);
END $$;
