UPDATE @S.lock SET attempt = NULL, expires = 0, free = back
  WHERE name = $5 AND attempt = $6 AND expires > @S.us() AND flags < 2 AND terms IS NULL
    AND since > (SELECT watched FROM @S.state)
