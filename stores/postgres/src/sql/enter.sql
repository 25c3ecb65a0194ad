-- Takes a lock for the rest of the transaction that calls this; or answers with who holds it by a lease, and takes nothing. Waits
-- for other transactions that are in. Nothing is written here: the counter of fences must not be held up for so long.
CREATE OR REPLACE FUNCTION @S.enter(_name text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _now bigint; _lock @S.lock; _way text;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE 'a lock is taken in a READ COMMITTED transaction: any other does not see who holds it now' USING ERRCODE = 'LK002';
  END IF;
  BEGIN
    PERFORM pg_advisory_xact_lock(@S.key('lock', _name));
    BEGIN
      -- Whoever renews or gives back just now is waited for. The row is let go of at once, by going back.
      PERFORM FROM @S.lock WHERE name = _name FOR NO KEY UPDATE;
      _now := @S.us();
      SELECT * INTO _lock FROM @S.lock WHERE name = _name;
      IF _lock.expires > _now OR _lock.free > _now OR @S.delayed(_lock, _now) IS NOT NULL
          OR EXISTS (SELECT FROM @S.hold h WHERE h.name = _name AND h.expires > _now)
          OR EXISTS (SELECT FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.gone > _now WHERE w.name = _name) THEN
        _way := @S.view(_name, _now, 3, 0);
      END IF;
      RAISE 'seen' USING ERRCODE = 'LK000';
    EXCEPTION WHEN SQLSTATE 'LK000' THEN NULL;
    END;
    IF _way IS NOT NULL THEN RAISE 'busy' USING ERRCODE = 'LK000'; END IF;
  EXCEPTION WHEN SQLSTATE 'LK000' THEN NULL;
  END;
  RETURN _way;
END $$;

-- The fence of the transaction that is in. The fence of the lock may be ahead of the counter, which is brought up then: a number that is not
-- of the counter could come again.
CREATE OR REPLACE FUNCTION @S.fence_inside(_name text) RETURNS bigint LANGUAGE sql @PATH AS $$
  SELECT @S.next_fence(greatest(@S.us(), (SELECT fence + 1 FROM @S.lock WHERE name = _name)))
$$;
