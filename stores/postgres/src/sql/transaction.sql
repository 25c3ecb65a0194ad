-- Takes a lock for the rest of the calling transaction and returns NULL; or returns who holds the lock by a lease, and takes nothing. Waits
-- for other transactions that have the lock. Writes nothing: the counter of fences must not be locked for so long.
CREATE OR REPLACE FUNCTION @S.lock_in_transaction(_name text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _now bigint; _lock @S.lock; _busy text;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE 'a lock is taken in a READ COMMITTED transaction: any other does not see who holds it now' USING ERRCODE = 'LK002';
  END IF;
  BEGIN
    PERFORM pg_advisory_xact_lock(@S.advisory_key('lock', _name));
    BEGIN
      -- Waits for a renewal or release in progress. The error below rolls back to the savepoint, which unlocks the row at once.
      PERFORM FROM @S.lock WHERE name = _name FOR NO KEY UPDATE;
      _now := @S.now_us();
      SELECT * INTO _lock FROM @S.lock WHERE name = _name;
      IF _lock.expires > _now OR _lock.free_at > _now OR @S.delay_left(_lock, _now) IS NOT NULL
          OR EXISTS (SELECT FROM @S.hold h WHERE h.name = _name AND h.expires > _now)
          OR EXISTS (SELECT FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.alive_until > _now WHERE w.name = _name) THEN
        _busy := @S.inspect(_name, _now, 3, 0);
      END IF;
      RAISE 'seen' USING ERRCODE = 'LK000';
    EXCEPTION WHEN SQLSTATE 'LK000' THEN NULL;
    END;
    IF _busy IS NOT NULL THEN RAISE 'busy' USING ERRCODE = 'LK000'; END IF;
  EXCEPTION WHEN SQLSTATE 'LK000' THEN NULL;
  END;
  RETURN _busy;
END $$;

-- The fence of the transaction that has the lock. The fence of the row may be ahead of the counter, which is raised then: a number that did
-- not come from the counter could be drawn again.
CREATE OR REPLACE FUNCTION @S.fence_in_transaction(_name text) RETURNS bigint LANGUAGE sql @PATH AS $$
  SELECT @S.next_fence(greatest(@S.now_us(), (SELECT fence + 1 FROM @S.lock WHERE name = _name)))
$$;
