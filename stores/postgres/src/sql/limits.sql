-- Removes buckets that are full, those that were full first, and returns how many. A row that another client uses now is left for later.
CREATE OR REPLACE FUNCTION @S.remove_full_buckets(_now bigint, _most int) RETURNS bigint LANGUAGE sql @PATH AS $$
  WITH gone AS (DELETE FROM @S.bucket WHERE full_at <= _now AND key IN (SELECT key FROM @S.bucket WHERE due <= _now / 16000000000
    ORDER BY due LIMIT _most FOR UPDATE SKIP LOCKED) RETURNING 1) SELECT count(*) FROM gone
$$;

-- Decides about the buckets of a rate limit, and keeps the instant (nanoseconds since 1970) at which each is full. `_operation`: 0 takes, 1 peeks,
-- 2 resets, 3 refunds. `_wait`: how long a take may wait. For each bucket: what the tokens cost, how long an empty bucket needs to become full,
-- and for a refund the instant that the take returned. `core::limit` has the same arithmetic, and says why.
--
-- The clock is read under the locks, so it does not go back from one decision to the next unless an operator sets it. The commit does not wait for the disk: a crash
-- of the server may forget the takes of its last moments.
CREATE OR REPLACE FUNCTION @S.limit_buckets(_operation int, _wait bigint, _keys text[], _costs bigint[], _fills bigint[], _taken bigint[],
  OUT _allowed bool, OUT _now bigint, OUT _full_at bigint[])
LANGUAGE plpgsql @PATH AS $$
DECLARE _lock bigint; _after bigint[]; _at bigint;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  -- In one order for all requests: so they do not deadlock.
  FOR _lock IN SELECT DISTINCT @S.advisory_key('bucket', k) AS n FROM unnest(_keys) AS k ORDER BY n LOOP
    PERFORM pg_advisory_xact_lock(_lock);
  END LOOP;
  _now := @S.now_us() * 1000;
  SELECT array_agg(greatest(b.full_at, _now) ORDER BY u.i) INTO _full_at
    FROM unnest(_keys) WITH ORDINALITY AS u(k, i) LEFT JOIN @S.bucket b ON b.key = u.k;
  _allowed := true;
  _after := _full_at;
  FOR i IN 1 .. array_length(_keys, 1) LOOP
    _at := _full_at[i];
    IF _operation <= 1 THEN
      _at := _at + _costs[i];
      _allowed := _allowed AND _at - _fills[i] <= _now + _wait;
    ELSIF _operation = 2 THEN
      _at := _now;
    ELSE
      -- Only the last take comes back.
      IF _at = _taken[i] THEN _at := greatest(_at - _costs[i], _now); END IF;
    END IF;
    _after[i] := _at;
  END LOOP;
  IF _operation = 1 OR NOT _allowed THEN RETURN; END IF;
  _full_at := _after;
  -- `due` changes every 16 s at most, so that most updates of a busy bucket touch no index.
  INSERT INTO @S.bucket AS b (key, full_at, due) SELECT u.k, u.at, u.at / 16000000000 + 1
    FROM ROWS FROM (unnest(_keys), unnest(_after)) AS u(k, at) WHERE u.at > _now
    ON CONFLICT (key) DO UPDATE SET full_at = excluded.full_at, due = excluded.due;
  DELETE FROM @S.bucket b USING ROWS FROM (unnest(_keys), unnest(_after)) AS u(k, at) WHERE b.key = u.k AND u.at <= _now;
  -- Buckets that are full leave nothing. Without other work one in eight takes would do all of it.
  IF random() < 0.125 THEN PERFORM @S.remove_full_buckets(_now, 32); END IF;
END $$;
