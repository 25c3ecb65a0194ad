-- The rule of admission, as in core::admission.

CREATE OR REPLACE FUNCTION @S.covers(_held int, _requested int) RETURNS bool LANGUAGE sql IMMUTABLE AS $$
  SELECT _held = 0 OR (_held = -1 AND _requested = -1) OR (_held > 0 AND _requested >= _held)
$$;

-- The holds of a name. The caller has locked the row of the lock and ended what has expired (see `end_expired`).
CREATE OR REPLACE FUNCTION @S.active_holds(_name text) RETURNS TABLE(fence bigint, seq bigint, mode int, owner text) LANGUAGE sql STABLE AS $$
  SELECT l.fence, 0, 0, l.terms->>'owner' FROM @S.lock l WHERE l.name = _name AND l.expires > 0
  UNION ALL SELECT h.fence, h.seq, h.mode, h.terms->>'owner' FROM @S.hold h WHERE h.name = _name
  ORDER BY 1, 2
$$;

-- Whether a request may be granted: 0 yes, above 0 yes as a re-entry with this fence, -1 another holder blocks it, -2 its own owner
-- blocks it with a weaker mode than requested.
CREATE OR REPLACE FUNCTION @S.evaluate(_name text, _mode int, _owner text) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE
  _held record; _own bool := false; _blocked bool := false; _permits int := 0; _last bigint := 0;
  _limit int := CASE WHEN _mode > 0 THEN _mode ELSE 2147483647 END;
BEGIN
  FOR _held IN SELECT * FROM @S.active_holds(_name) LOOP
    IF _owner = _held.owner THEN
      IF @S.covers(_held.mode, _mode) THEN RETURN _held.fence; END IF;
      _own := true;
    ELSIF _mode > 0 AND _held.mode > 0 THEN
      _limit := least(_limit, _held.mode);
      -- The re-entries of an owner follow each other and share a fence: together they are one permit.
      IF _held.fence <> _last THEN _permits := _permits + 1; END IF;
      _last := _held.fence;
    ELSIF NOT (_mode = -1 AND _held.mode = -1) THEN
      _blocked := true;
    END IF;
  END LOOP;
  RETURN CASE WHEN _own THEN -2 WHEN _blocked OR _permits >= _limit THEN -1 ELSE 0 END;
END $$;
