-- Writes a record, or deletes it if there is no value, if the expectation is met: -2 any state, -1 absent, else this version. Returns the new
-- version, 0 for a delete; or NULL, and the record that was found.
CREATE OR REPLACE FUNCTION @S.put_record(_key text, _value bytea, _expect bigint, _ttl bigint, OUT _version bigint, OUT _found bytea,
  OUT _found_version bigint)
LANGUAGE plpgsql @PATH AS $$
DECLARE _now bigint;
BEGIN
  PERFORM pg_advisory_xact_lock(@S.advisory_key('record', _key));
  _now := @S.now_us();
  SELECT value, version INTO _found, _found_version FROM @S.record WHERE key = _key AND (expires IS NULL OR expires > _now) FOR UPDATE;
  IF _expect <> -2 AND _expect <> coalesce(_found_version, -1) THEN RETURN; END IF;
  IF _value IS NULL THEN
    IF _found_version IS NULL THEN RETURN; END IF;
    DELETE FROM @S.record WHERE key = _key;
    _version := 0;
    RETURN;
  END IF;
  _version := greatest(@S.next_fence(_now), _found_version + 1);
  INSERT INTO @S.record VALUES (_key, _value, _version, _now + _ttl)
    ON CONFLICT (key) DO UPDATE SET value = _value, version = greatest(_version, record.version + 1), expires = _now + _ttl
    RETURNING version INTO _version;
END $$;
