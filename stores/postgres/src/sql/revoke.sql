-- Why a hold of this attempt is revoked; nothing if it is not, or is over.
CREATE OR REPLACE FUNCTION @S.revoked(_name text, _attempt bytea, _now bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT l.terms->>'revoked' FROM @S.lock l WHERE l.name = _name AND l.attempt = _attempt AND l.expires > _now
  UNION ALL SELECT h.terms->>'revoked' FROM @S.hold h
    WHERE h.name = _name AND h.attempt = _attempt AND h.expires > _now AND NOT h.lingers
  LIMIT 1
$$;

-- Why a hold with this fence is revoked: its owner cannot enter again. Nothing if none is.
CREATE OR REPLACE FUNCTION @S.revoked_fence(_names text[], _fence bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT t.reason FROM unnest(_names) AS n(name) CROSS JOIN LATERAL (
    SELECT l.terms->>'revoked' AS reason FROM @S.lock l WHERE l.name = n.name AND l.expires > 0 AND l.fence = _fence
    UNION ALL SELECT h.terms->>'revoked' FROM @S.hold h WHERE h.name = n.name AND h.fence = _fence) t
  WHERE t.reason IS NOT NULL LIMIT 1
$$;

-- Renews one hold of one name: an empty text if it is renewed, the reason if it is revoked, nothing if it is lost.
CREATE OR REPLACE FUNCTION @S.extend(_name text, _attempt bytea) RETURNS text LANGUAGE plpgsql @PATH AS $$
BEGIN
  UPDATE @S.lock SET expires = @S.us() + ttl, free = greatest(@S.us() + ttl + @S.delay(terms), back)
    WHERE name = _name AND attempt = _attempt AND expires > @S.us() AND terms->>'revoked' IS NULL;
  IF FOUND THEN RETURN ''; END IF;
  UPDATE @S.hold SET expires = @S.us() + ttl
    WHERE name = _name AND attempt = _attempt AND expires > @S.us() AND NOT lingers AND terms->>'revoked' IS NULL;
  IF FOUND THEN RETURN ''; END IF;
  RETURN @S.revoked(_name, _attempt, @S.us());
END $$;

-- The same for clients of before version 5, to which a revoked hold is lost.
CREATE OR REPLACE FUNCTION @S.renew(_name text, _attempt bytea) RETURNS bool LANGUAGE sql @PATH AS $$
  SELECT coalesce(@S.extend(_name, _attempt) = '', false)
$$;

-- Asks the holders of a lock to give it back: their leases are not renewed any more. A hold that only lingers ends, and a lock that is
-- only held back is freed. A grant of several names is revoked as a whole, so all of them are locked first, as in `break_lock`. The
-- counter is brought above the fences of all these names, because the rows keep the fences of their holders.
CREATE OR REPLACE FUNCTION @S.revoke(_name text, _reason text) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _names text[]; _held record; _now bigint; _fence bigint; _one text;
BEGIN
  LOOP
    _names := @S.bound_to(_name);
    PERFORM @S.seize(_names);
    EXIT WHEN @S.bound_to(_name) <@ _names;
  END LOOP;
  _now := @S.us();
  FOREACH _one IN ARRAY _names LOOP PERFORM @S.settle(_one, _now); END LOOP;
  SELECT @S.next_fence(greatest(_now, max(fence) + 1)) INTO _fence FROM @S.lock WHERE name = ANY (_names);
  UPDATE @S.lock SET back = 0, free = CASE WHEN expires = 0 THEN 0 ELSE expires + @S.delay(terms) END WHERE name = _name;
  FOR _held IN SELECT * FROM @S.holds(_name) LOOP
    IF _held.lingers THEN
      PERFORM @S.strike(n.name, _held.attempt, _held.fence, 0) FROM unnest(_held.bound) AS n(name);
    ELSE
      UPDATE @S.lock SET terms = coalesce(terms, '{}') || jsonb_build_object('revoked', _reason)
        WHERE name = ANY (_held.bound) AND attempt = _held.attempt;
      UPDATE @S.hold SET terms = coalesce(terms, '{}') || jsonb_build_object('revoked', _reason)
        WHERE name = ANY (_held.bound) AND attempt = _held.attempt;
    END IF;
  END LOOP;
  FOREACH _one IN ARRAY _names LOOP
    PERFORM @S.tell(_now, _one, 'revoked', _fence, NULL, _reason);
    PERFORM @S.wake(_one, _now);
  END LOOP;
  RETURN _fence;
END $$;
