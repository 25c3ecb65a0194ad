-- Removing rows that have been idle for an hour. Each function covers the next 1000 rows and returns the key of the last one, or NULL at the
-- end: so requests and renewals on the same connection do not wait for long. Fences do not need the rows: the counter goes on.
CREATE OR REPLACE FUNCTION @S.sweep_locks(_after text, _old bigint) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _now bigint := @S.now_us(); _last text; _idle text[];
BEGIN
  SELECT max(name) INTO _last FROM (SELECT name FROM @S.lock WHERE name > _after ORDER BY name LIMIT 1000) t;
  SELECT array_agg(name) INTO _idle FROM (SELECT name FROM @S.lock WHERE name > _after AND name <= _last
    AND expires < _old AND free_at < _old AND since < _old ORDER BY name FOR UPDATE SKIP LOCKED) t;
  -- Expired holds that no request has ended yet are ended here.
  PERFORM @S.end_expired(name, _now) FROM @S.lock WHERE name = ANY (_idle) AND (attempt IS NOT NULL OR flags & 2 = 2);
  DELETE FROM @S.waiter w WHERE name = ANY (_idle) AND NOT EXISTS (SELECT FROM @S.client c WHERE c.id = w.client AND c.alive_until >= _old);
  DELETE FROM @S.lock l WHERE name = ANY (_idle) AND expires = 0 AND free_at < _old AND flags & 2 = 0
    AND NOT EXISTS (SELECT FROM @S.waiter w WHERE w.name = l.name);
  RETURN _last;
END $$;

CREATE OR REPLACE FUNCTION @S.sweep_records(_after text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _now bigint := @S.now_us(); _last text;
BEGIN
  SELECT max(key) INTO _last FROM (SELECT key FROM @S.record WHERE key > _after ORDER BY key LIMIT 1000) t;
  DELETE FROM @S.record WHERE key IN (SELECT key FROM @S.record WHERE key > _after AND key <= _last AND expires < _now
    FOR UPDATE SKIP LOCKED);
  RETURN _last;
END $$;

CREATE OR REPLACE FUNCTION @S.sweep_clients(_after text, _old bigint) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _last text;
BEGIN
  SELECT max(id) INTO _last FROM (SELECT id FROM @S.client WHERE id > _after ORDER BY id LIMIT 1000) t;
  DELETE FROM @S.client WHERE id IN (SELECT id FROM @S.client WHERE id > _after AND id <= _last AND alive_until < _old
    FOR UPDATE SKIP LOCKED);
  RETURN _last;
END $$;

CREATE OR REPLACE FUNCTION @S.sweep_buckets(_after text) RETURNS text LANGUAGE plpgsql @PATH AS $$
BEGIN
  -- Those that are full come first, so there is no key to go on from.
  RETURN CASE WHEN @S.remove_full_buckets(@S.now_us() * 1000, 1000) < 1000 THEN NULL ELSE '' END;
END $$;
