-- What the other functions share: the clock, advisory keys, the counter of fences, and the lock-delay.

-- `now_us` and `advisory_key` are inlined where they are called, also in statements of the client: they name exact types, so that no function or
-- operator in a schema of the caller's search_path fits better. Functions in plpgsql, and those that statements of the client call, have a search_path
-- of their own (@PATH). The other helpers in SQL have none, so that PostgreSQL can inline them: only functions with @PATH call them.
CREATE OR REPLACE FUNCTION @S.now_us() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT (pg_catalog.date_part('epoch'::text, pg_catalog.clock_timestamp()) * 1000000::double precision)::bigint
$$;

-- `_kind`: `lock` for the lock that a user's transaction takes (see `lock_in_transaction`), and that every grant of a lease tests; `record` for the
-- writers of a record; `fence` for the counter. Without the kind, a lock called `fence` would block all grants.
CREATE OR REPLACE FUNCTION @S.advisory_key(_kind text, _name text) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT pg_catalog.hashtextextended((_kind || ' '::text) || _name, pg_catalog.hashtext('@S'::text)::bigint)
$$;

-- The next fence, at least `_least` (mostly the clock). A counter that is behind (it was idle, lost or restored) is set to a tenth of a second
-- ahead of it, by one session at a time: two could set it back. The subtransaction ends with an error so that its advisory lock ends
-- at once; sequences keep what was set. A clock beyond the highest fence is broken, and the function ignores it.
CREATE OR REPLACE FUNCTION @S.next_fence(_least bigint) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _most constant bigint := 9007199254740991; _fence bigint := nextval('@S.fence');
BEGIN
  IF _fence < _least AND _least < _most - 100000 THEN
    BEGIN
      PERFORM pg_advisory_xact_lock(@S.advisory_key('fence', ''));
      _fence := nextval('@S.fence');
      IF _fence < _least THEN
        PERFORM setval('@S.fence', _least + 100000);
        _fence := nextval('@S.fence');
      END IF;
      RAISE 'set' USING ERRCODE = 'LK000';
    EXCEPTION WHEN SQLSTATE 'LK000' THEN NULL;
    END;
  END IF;
  IF _fence > _most THEN RAISE 'the fences of this store are used up' USING ERRCODE = 'LK001'; END IF;
  RETURN _fence;
END $$;

CREATE OR REPLACE FUNCTION @S.lock_delay(_terms jsonb) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce((_terms->>'delay')::bigint, 0)
$$;
