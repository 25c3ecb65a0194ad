INSERT INTO @S.lock AS l (name, fence, attempt, since, ttl, expires, free, holder)
  SELECT $5, s.fence, $6, s.now, $7, s.now + $7, s.now + $7, $9
    FROM (SELECT pg_catalog.nextval('@S.fence'::regclass) AS fence, @S.us() AS now
      WHERE $8 IS NULL AND pg_try_advisory_xact_lock_shared(@S.key('lock', $5))
        AND NOT EXISTS (SELECT FROM @S.client c WHERE c.id = $1 AND c.epoch > $2)) s
    WHERE s.fence BETWEEN s.now AND 9007199254740991 AND s.now > (SELECT watched FROM @S.state)
  ON CONFLICT (name) DO UPDATE SET fence = greatest(excluded.fence, l.fence + 1), attempt = excluded.attempt,
    since = excluded.since, ttl = excluded.ttl, expires = excluded.expires, free = excluded.free, back = 0, terms = NULL,
    holder = excluded.holder
    WHERE l.free <= excluded.since AND l.flags = 0
  RETURNING l.fence::text
