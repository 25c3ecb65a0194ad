-- The holds of a name: its own, and those beside each other. `bound`: all names of the grant.
CREATE OR REPLACE FUNCTION @S.holds(_name text) RETURNS TABLE(attempt bytea, fence bigint, mode int, turn bigint, since bigint, expires bigint,
  lingers bool, delay bigint, bound text[], holder text, revoked text) LANGUAGE sql STABLE AS $$
  SELECT t.attempt, t.fence, t.mode, t.turn, t.since, t.expires, t.lingers, @S.delay(t.terms),
    CASE WHEN t.terms ? 'names' THEN ARRAY(SELECT jsonb_array_elements_text(t.terms->'names')) ELSE ARRAY[_name] END, t.holder, t.terms->>'revoked'
  FROM (
    SELECT l.attempt, l.fence, 0 AS mode, 0 AS turn, l.since, l.expires, l.attempt IS NULL AS lingers, l.terms, l.holder
      FROM @S.lock l WHERE l.name = _name AND l.expires > 0
    UNION ALL SELECT h.attempt, h.fence, h.mode, h.turn, h.since, h.expires, h.lingers, h.terms, h.holder
      FROM @S.hold h WHERE h.name = _name) t
  ORDER BY t.fence, t.turn
$$;

CREATE OR REPLACE FUNCTION @S.bound_to(_name text) RETURNS text[] LANGUAGE sql STABLE AS $$
  SELECT array_agg(DISTINCT n COLLATE "C") FROM (SELECT _name AS n UNION SELECT unnest(bound) FROM @S.holds(_name)) t
$$;

-- Takes a lock away from whoever holds it; what is only held back is freed. A grant of several names is lost as a whole, so all
-- of them are locked first: again, if they turn out to be others by then.
CREATE OR REPLACE FUNCTION @S.break_lock(_name text, _reason text) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _names text[]; _victim record; _now bigint; _fence bigint; _one text;
BEGIN
  LOOP
    _names := @S.bound_to(_name);
    PERFORM @S.seize(_names);
    EXIT WHEN @S.bound_to(_name) <@ _names;
  END LOOP;
  _now := @S.us();
  FOREACH _one IN ARRAY _names LOOP PERFORM @S.settle(_one, _now); END LOOP;
  SELECT greatest(@S.next_fence(_now), max(fence) + 1) INTO _fence FROM @S.lock WHERE name = ANY (_names);
  UPDATE @S.lock SET back = 0, free = CASE WHEN expires = 0 THEN 0 ELSE free END WHERE name = _name;
  FOR _victim IN SELECT * FROM @S.holds(_name) LOOP
    PERFORM @S.strike(n.name, _victim.attempt, _victim.fence, CASE WHEN _victim.lingers OR _victim.delay = 0 THEN 0 ELSE _now + _victim.delay END)
      FROM unnest(_victim.bound) AS n(name);
  END LOOP;
  UPDATE @S.lock SET fence = greatest(fence, _fence) WHERE name = _name AND expires = 0;
  FOREACH _one IN ARRAY _names LOOP
    PERFORM @S.tell(_now, _one, 'broken', _fence, NULL, _reason);
    PERFORM @S.wake(_one, _now);
  END LOOP;
  RETURN _fence;
END $$;

-- Ends one hold of one name, and holds the name back until then.
CREATE OR REPLACE FUNCTION @S.strike(_name text, _attempt bytea, _fence bigint, _until bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
BEGIN
  DELETE FROM @S.hold WHERE name = _name AND attempt = _attempt;
  UPDATE @S.lock SET attempt = NULL, expires = 0, free = back, terms = NULL
    WHERE name = _name AND expires > 0 AND fence = _fence AND attempt IS NOT DISTINCT FROM _attempt;
  UPDATE @S.lock SET back = greatest(back, _until), free = greatest(free, _until),
      flags = CASE WHEN EXISTS (SELECT FROM @S.hold h WHERE h.name = _name) THEN flags ELSE flags & ~2 END
    WHERE name = _name;
END $$;
