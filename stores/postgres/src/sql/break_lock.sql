-- The holds of a name, from the row of the lock and from `hold`. `bound`: all names of the grant.
CREATE OR REPLACE FUNCTION @S.holds(_name text) RETURNS TABLE(attempt bytea, fence bigint, mode int, seq bigint, since bigint, expires bigint,
  lingers bool, delay bigint, bound text[], holder text, revoked text) LANGUAGE sql STABLE AS $$
  SELECT t.attempt, t.fence, t.mode, t.seq, t.since, t.expires, t.lingers, @S.lock_delay(t.terms),
    CASE WHEN t.terms ? 'names' THEN ARRAY(SELECT jsonb_array_elements_text(t.terms->'names')) ELSE ARRAY[_name] END, t.holder, t.terms->>'revoked'
  FROM (
    SELECT l.attempt, l.fence, 0 AS mode, 0 AS seq, l.since, l.expires, l.attempt IS NULL AS lingers, l.terms, l.holder
      FROM @S.lock l WHERE l.name = _name AND l.expires > 0
    UNION ALL SELECT h.attempt, h.fence, h.mode, h.seq, h.since, h.expires, h.lingers, h.terms, h.holder
      FROM @S.hold h WHERE h.name = _name) t
  ORDER BY t.fence, t.seq
$$;

-- The name and all names that are held with it.
CREATE OR REPLACE FUNCTION @S.bound_names(_name text) RETURNS text[] LANGUAGE sql STABLE AS $$
  SELECT array_agg(DISTINCT n COLLATE "C") FROM (SELECT _name AS n UNION SELECT unnest(bound) FROM @S.holds(_name)) t
$$;

-- Takes a lock away from its holders, and ends lock-delays and lingering holds. A grant of several names is lost as a whole, so all
-- of them are locked first; again, if they have changed by then.
CREATE OR REPLACE FUNCTION @S.break_lock(_name text, _reason text) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _names text[]; _held record; _now bigint; _fence bigint; _one text;
BEGIN
  LOOP
    _names := @S.bound_names(_name);
    PERFORM @S.lock_rows(_names);
    EXIT WHEN @S.bound_names(_name) <@ _names;
  END LOOP;
  _now := @S.now_us();
  FOREACH _one IN ARRAY _names LOOP PERFORM @S.end_expired(_one, _now); END LOOP;
  SELECT greatest(@S.next_fence(_now), max(fence) + 1) INTO _fence FROM @S.lock WHERE name = ANY (_names);
  UPDATE @S.lock SET delayed_until = 0, free_at = CASE WHEN expires = 0 THEN 0 ELSE free_at END WHERE name = _name;
  FOR _held IN SELECT * FROM @S.holds(_name) LOOP
    PERFORM @S.end_hold(n.name, _held.attempt, _held.fence, CASE WHEN _held.lingers OR _held.delay = 0 THEN 0 ELSE _now + _held.delay END)
      FROM unnest(_held.bound) AS n(name);
  END LOOP;
  UPDATE @S.lock SET fence = greatest(fence, _fence) WHERE name = _name AND expires = 0;
  FOREACH _one IN ARRAY _names LOOP
    PERFORM @S.emit(_now, _one, 'broken', _fence, NULL, _reason);
    PERFORM @S.wake_first(_one, _now);
  END LOOP;
  RETURN _fence;
END $$;

-- Ends one hold of one name, and delays the next grant of the name until `_until`.
CREATE OR REPLACE FUNCTION @S.end_hold(_name text, _attempt bytea, _fence bigint, _until bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
BEGIN
  DELETE FROM @S.hold WHERE name = _name AND attempt = _attempt;
  UPDATE @S.lock SET attempt = NULL, expires = 0, free_at = delayed_until, terms = NULL
    WHERE name = _name AND expires > 0 AND fence = _fence AND attempt IS NOT DISTINCT FROM _attempt;
  UPDATE @S.lock SET delayed_until = greatest(delayed_until, _until), free_at = greatest(free_at, _until),
      flags = CASE WHEN EXISTS (SELECT FROM @S.hold h WHERE h.name = _name) THEN flags ELSE flags & ~2 END
    WHERE name = _name;
END $$;
