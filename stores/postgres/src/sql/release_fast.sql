UPDATE @S.lock SET attempt = NULL, expires = 0, free_at = delayed_until
  WHERE name = $5 AND attempt = $6 AND expires > @S.now_us() AND flags < 2 AND terms IS NULL
    AND since > (SELECT watched_until FROM @S.state)
