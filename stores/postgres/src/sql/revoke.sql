-- Why the hold of this attempt is revoked; NULL if it is not revoked, or has ended.
CREATE OR REPLACE FUNCTION @S.revocation(_name text, _attempt bytea, _now bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT l.terms->>'revoked' FROM @S.lock l WHERE l.name = _name AND l.attempt = _attempt AND l.expires > _now
  UNION ALL SELECT h.terms->>'revoked' FROM @S.hold h
    WHERE h.name = _name AND h.attempt = _attempt AND h.expires > _now AND NOT h.lingers
  LIMIT 1
$$;

-- Why a hold with this fence is revoked, so that its owner cannot re-enter; NULL if none is.
CREATE OR REPLACE FUNCTION @S.revocation_of_fence(_names text[], _fence bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT t.reason FROM unnest(_names) AS n(name) CROSS JOIN LATERAL (
    SELECT l.terms->>'revoked' AS reason FROM @S.lock l WHERE l.name = n.name AND l.expires > 0 AND l.fence = _fence
    UNION ALL SELECT h.terms->>'revoked' FROM @S.hold h WHERE h.name = n.name AND h.fence = _fence) t
  WHERE t.reason IS NOT NULL LIMIT 1
$$;

-- Renews one hold of one name. Replies an empty text if it is renewed, the reason if it is revoked, NULL if it is lost.
CREATE OR REPLACE FUNCTION @S.renew(_name text, _attempt bytea) RETURNS text LANGUAGE plpgsql @PATH AS $$
BEGIN
  UPDATE @S.lock SET expires = @S.now_us() + ttl, free_at = greatest(@S.now_us() + ttl + @S.lock_delay(terms), delayed_until)
    WHERE name = _name AND attempt = _attempt AND expires > @S.now_us() AND terms->>'revoked' IS NULL;
  IF FOUND THEN RETURN ''; END IF;
  UPDATE @S.hold SET expires = @S.now_us() + ttl
    WHERE name = _name AND attempt = _attempt AND expires > @S.now_us() AND NOT lingers AND terms->>'revoked' IS NULL;
  IF FOUND THEN RETURN ''; END IF;
  RETURN @S.revocation(_name, _attempt, @S.now_us());
END $$;

-- Requests that the holders release the lock: their leases are no longer renewed. Lingering holds and lock-delays end. A grant of several
-- names is revoked as a whole, so all of them are locked first, as in `break_lock`. The counter is raised above the fences of all
-- these names, because the rows keep the fences of their holders.
CREATE OR REPLACE FUNCTION @S.revoke(_name text, _reason text) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _names text[]; _held record; _now bigint; _fence bigint; _one text;
BEGIN
  LOOP
    _names := @S.bound_names(_name);
    PERFORM @S.lock_rows(_names);
    EXIT WHEN @S.bound_names(_name) <@ _names;
  END LOOP;
  _now := @S.now_us();
  FOREACH _one IN ARRAY _names LOOP PERFORM @S.end_expired(_one, _now); END LOOP;
  SELECT @S.next_fence(greatest(_now, max(fence) + 1)) INTO _fence FROM @S.lock WHERE name = ANY (_names);
  UPDATE @S.lock SET delayed_until = 0, free_at = CASE WHEN expires = 0 THEN 0 ELSE expires + @S.lock_delay(terms) END WHERE name = _name;
  FOR _held IN SELECT * FROM @S.holds(_name) LOOP
    IF _held.lingers THEN
      PERFORM @S.end_hold(n.name, _held.attempt, _held.fence, 0) FROM unnest(_held.bound) AS n(name);
    ELSE
      UPDATE @S.lock SET terms = coalesce(terms, '{}') || jsonb_build_object('revoked', _reason)
        WHERE name = ANY (_held.bound) AND attempt = _held.attempt;
      UPDATE @S.hold SET terms = coalesce(terms, '{}') || jsonb_build_object('revoked', _reason)
        WHERE name = ANY (_held.bound) AND attempt = _held.attempt;
    END IF;
  END LOOP;
  FOREACH _one IN ARRAY _names LOOP
    PERFORM @S.emit(_now, _one, 'revoked', _fence, NULL, _reason);
    PERFORM @S.wake_first(_one, _now);
  END LOOP;
  RETURN _fence;
END $$;
