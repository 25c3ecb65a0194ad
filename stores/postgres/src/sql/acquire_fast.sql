INSERT INTO @S.lock AS l (name, fence, attempt, since, ttl, expires, free_at, holder)
  SELECT $5, s.fence, $6, s.now, $7, s.now + $7, s.now + $7, $9
    FROM (SELECT pg_catalog.nextval('@S.fence'::regclass) AS fence, @S.now_us() AS now
      WHERE $8 IS NULL AND pg_try_advisory_xact_lock_shared(@S.advisory_key('lock', $5))
        AND NOT EXISTS (SELECT FROM @S.client c WHERE c.id = $1 AND c.epoch > $2)) s
    WHERE s.fence BETWEEN s.now AND 9007199254740991 AND s.now > (SELECT watched_until FROM @S.state)
  ON CONFLICT (name) DO UPDATE SET fence = greatest(excluded.fence, l.fence + 1), attempt = excluded.attempt,
    since = excluded.since, ttl = excluded.ttl, expires = excluded.expires, free_at = excluded.free_at, delayed_until = 0, terms = NULL,
    holder = excluded.holder
    WHERE l.free_at <= excluded.since AND l.flags = 0
  RETURNING l.fence::text
