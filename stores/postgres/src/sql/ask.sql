-- An ask for one name or several, in all its variety. The answers: a fence; `{"waits": true, ...}` it stands in line;
-- `{"refused": "upgrade" | "mixed" | "self" | "stale", ...}`; else it is busy, and this is who is in the way.
CREATE OR REPLACE FUNCTION @S.ask(_client text, _epoch int, _claim bigint, _patient bool, _names text[], _attempt bytea, _ttl bigint,
  _terms jsonb, _holder text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE
  _mode int := coalesce((_terms->>'mode')::int, 0); _owner text := _terms->>'owner';
  _name text; _lock @S.lock; _now bigint; _fence bigint; _verdict bigint; _place bigint; _first @S.waiter;
  _mine int := 0; _blocked bool := false; _again bigint; _way text; _highest bigint := 0; _entered bool := false;
BEGIN
  PERFORM @S.seize(_names);
  _now := @S.us();
  -- A newer connection of the same process has taken over: the process has released by now what an older one still brings.
  IF EXISTS (SELECT FROM @S.client WHERE id = _client AND epoch > _epoch) THEN RETURN '{"refused": "stale"}'; END IF;
  _way := @S.revoked(_names[1], _attempt, _now);
  IF _way IS NOT NULL THEN RETURN jsonb_build_object('refused', 'revoked', 'reason', _way); END IF;
  _fence := @S.again(_names, _attempt, _now);
  IF _fence IS NOT NULL THEN RETURN _fence; END IF;
  SELECT place INTO _place FROM @S.waiter WHERE name = _names[1] AND attempt = _attempt;
  FOREACH _name IN ARRAY _names LOOP
    _lock := @S.settle(_name, _now);
    _highest := greatest(_highest, _lock.fence);
    _verdict := @S.judge(_name, _mode, _owner);
    IF _verdict = -2 THEN RETURN '{"refused": "upgrade"}'; END IF;
    IF _verdict = 0 AND _lock.free > _now THEN _verdict := -1; END IF;
    IF _verdict = 0 AND NOT pg_try_advisory_xact_lock_shared(@S.key('lock', _name)) THEN
      _verdict := -1;
      _entered := true;
    END IF;
    IF _verdict = 0 AND _lock.flags & 1 = 1 THEN
      _first := @S.front(_name, _now);
      IF _first.place < coalesce(_place, 9223372036854775807) THEN _verdict := -1; END IF;
    END IF;
    IF _verdict > 0 THEN
      _mine := _mine + 1;
      _blocked := _blocked OR coalesce(_again <> _verdict, false);
      _again := _verdict;
    ELSIF _verdict = -1 THEN
      _blocked := true;
      _way := coalesce(_way, _name);
    END IF;
  END LOOP;
  IF _mine > 0 AND (_blocked OR _mine < cardinality(_names)) THEN
    IF _place IS NULL THEN RETURN '{"refused": "mixed"}'; END IF;
    _blocked := true;
  END IF;
  IF NOT _blocked THEN
    IF _again IS NOT NULL THEN
      _way := @S.revoked_fence(_names, _again);
      IF _way IS NOT NULL THEN RETURN jsonb_build_object('refused', 'revoked', 'reason', _way); END IF;
    END IF;
    _fence := coalesce(_again, greatest(@S.next_fence(_now), _highest + 1));
    PERFORM @S.admit(_names, _attempt, _mode, _fence, _ttl, _terms, _holder, _now, _place);
    RETURN _fence;
  END IF;
  IF NOT _patient THEN
    IF _place IS NOT NULL THEN PERFORM @S.leave(_names, _attempt, _now); END IF;
    RETURN @S.view(coalesce(_way, _names[1]), _now, 3, 0);
  END IF;
  IF _place IS NULL THEN
    _way := @S.join_line(_client, _epoch, _claim, _names, _attempt, _mode, _owner, _ttl, _terms, _holder, _now);
    IF _way IS NOT NULL THEN RETURN _way; END IF;
  END IF;
  -- Nobody tells when a transaction of a user's is over: that is looked for ten times a second.
  RETURN jsonb_build_object('waits', true, 'ends', least(@S.ends(_names, _now), CASE WHEN _entered THEN 100000 END),
    'since', (SELECT since FROM @S.client WHERE id = _client));
END $$;

-- The same attempt again is the same ask: a hold keeps its fence and counts its lease anew. One that is lost in part is lost.
CREATE OR REPLACE FUNCTION @S.again(_names text[], _attempt bytea, _now bigint) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _fence bigint; _name text; _renewed int := 0;
BEGIN
  SELECT fence INTO _fence FROM @S.lock WHERE name = _names[1] AND attempt = _attempt AND expires > _now;
  IF NOT FOUND THEN
    SELECT fence INTO _fence FROM @S.hold WHERE name = _names[1] AND attempt = _attempt AND expires > _now AND NOT lingers;
  END IF;
  IF _fence IS NULL THEN RETURN NULL; END IF;
  FOREACH _name IN ARRAY _names LOOP
    IF @S.renew(_name, _attempt) THEN _renewed := _renewed + 1; END IF;
  END LOOP;
  IF _renewed = cardinality(_names) THEN RETURN _fence; END IF;
  PERFORM @S.drop_hold(n.name, _attempt) FROM unnest(_names) AS n(name);
  RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION @S.drop_hold(_name text, _attempt bytea) RETURNS void LANGUAGE plpgsql @PATH AS $$
BEGIN
  UPDATE @S.lock SET attempt = NULL, expires = 0, free = back WHERE name = _name AND attempt = _attempt;
  DELETE FROM @S.hold WHERE name = _name AND attempt = _attempt;
END $$;

-- Writes a grant down, and takes its ask out of the line. An exclusive one is in the row of the lock if there is room.
CREATE OR REPLACE FUNCTION @S.admit(_names text[], _attempt bytea, _mode int, _fence bigint, _ttl bigint, _terms jsonb, _holder text,
  _now bigint, _place bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
DECLARE _name text; _flags int;
BEGIN
  FOREACH _name IN ARRAY _names LOOP
    UPDATE @S.lock SET fence = _fence, attempt = _attempt, since = _now, ttl = _ttl, expires = _now + _ttl,
        free = greatest(_now + _ttl + @S.delay(_terms), back), terms = _terms, holder = _holder
      WHERE name = _name AND _mode = 0 AND expires = 0 AND flags & 2 = 0;
    IF NOT FOUND THEN
      INSERT INTO @S.hold(name, attempt, mode, fence, turn, since, ttl, expires, terms, holder)
        VALUES (_name, _attempt, _mode, _fence, nextval('@S.place'), _now, _ttl, _now + _ttl, _terms, _holder);
      -- Also here: whoever drew a fence before this, and gets the row after it, must not come out below.
      UPDATE @S.lock SET flags = flags | 2, fence = greatest(fence, _fence), since = CASE expires WHEN 0 THEN _now ELSE since END
        WHERE name = _name;
    END IF;
    IF _place IS NOT NULL THEN DELETE FROM @S.waiter WHERE name = _name AND place = _place; END IF;
    SELECT flags INTO _flags FROM @S.lock WHERE name = _name;
    -- Whoever is next may fit in beside it; if nobody is, the line is over.
    IF _flags & 1 = 1 AND (_mode <> 0 OR NOT EXISTS (SELECT FROM @S.waiter WHERE name = _name)) THEN
      PERFORM @S.wake(_name, _now);
    END IF;
    PERFORM @S.tell(_now, _name, 'granted', _fence, _holder, NULL);
  END LOOP;
END $$;

-- A place at the end of each line; or why not. An ask that would wait for its own owner is refused.
CREATE OR REPLACE FUNCTION @S.join_line(_client text, _epoch int, _claim bigint, _names text[], _attempt bytea, _mode int, _owner text,
  _ttl bigint, _terms jsonb, _holder text, _now bigint) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _place bigint; _name text; _common text[];
BEGIN
  IF _owner IS NOT NULL THEN
    SELECT array_agg(w.name) INTO _common FROM @S.waiter w WHERE w.owner = _owner AND w.name = ANY (_names)
      GROUP BY w.attempt, w.mode HAVING count(*) < cardinality(_names) OR NOT @S.covers(w.mode, _mode) LIMIT 1;
    IF FOUND THEN RETURN jsonb_build_object('refused', 'self', 'names', _common); END IF;
  END IF;
  IF @S.there(_client, _epoch, _claim, NULL, _now) IS NULL THEN RETURN '{"refused": "stale"}'; END IF;
  _place := nextval('@S.place');
  FOREACH _name IN ARRAY _names LOOP
    INSERT INTO @S.waiter VALUES (_name, _place, _attempt, _client, _mode, _owner, _now, _terms, _holder,
      CASE WHEN _terms IS NULL AND cardinality(_names) = 1 THEN _ttl END);
    UPDATE @S.lock SET flags = flags | 1 WHERE name = _name AND flags & 1 = 0;
    PERFORM @S.tell(_now, _name, 'waiting', NULL, _holder, NULL);
  END LOOP;
  RETURN NULL;
END $$;

-- How long until something changes by itself, if nobody says anything; nothing if it will not.
CREATE OR REPLACE FUNCTION @S.ends(_names text[], _now bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT min(at) - _now FROM (
    SELECT CASE WHEN expires > _now THEN expires ELSE free END AS at FROM @S.lock WHERE name = ANY (_names)
    UNION ALL SELECT min(expires) FROM @S.hold WHERE name = ANY (_names)) t WHERE at > _now
$$;
