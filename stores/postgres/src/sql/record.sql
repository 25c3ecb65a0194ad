-- Writes or deletes (no value) a record if the expectation is met: -2 anything, -1 nothing there, else the version. Answers with the
-- new version, 0 for a delete; or with nothing, and what is there.
CREATE OR REPLACE FUNCTION @S.put(_key text, _value bytea, _expect bigint, _ttl bigint, OUT _version bigint, OUT _found bytea, OUT _found_version bigint)
LANGUAGE plpgsql @PATH AS $$
DECLARE _now bigint;
BEGIN
  PERFORM pg_advisory_xact_lock(@S.key('record', _key));
  _now := @S.us();
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
