-- Brings a schema of version 1 to 6 to the names of version 7. Holds, waiters, records and fences stay. The old functions are dropped by name:
-- the schema may contain functions of its owner.
DO $upgrade$
DECLARE _function regprocedure;
BEGIN
  FOR _function IN SELECT oid FROM pg_proc WHERE pronamespace = '@S'::regnamespace AND proname = ANY ('{admit,again,ask,bonds,bound_to,break_lock,
      covers,delay,delayed,drop_hold,ends,enter,extend,fence_inside,front,hello,holds,join_line,judge,key,leave,let_go,look,next_fence,pass_on,
      put,release,renew,revoke,revoked,revoked_fence,seize,settle,stakes,stays,step,strike,sweep,sweep_clients,sweep_locks,sweep_records,
      take_turn,tell,there,tidy,us,view,wake}') LOOP
    EXECUTE 'DROP FUNCTION ' || _function || ' CASCADE';
  END LOOP;
END $upgrade$;
-- Versions 2 to 6 added these columns. Of two rows in `state`, as a restored dump could leave them, one stays.
ALTER TABLE @S.waiter ADD COLUMN IF NOT EXISTS ttl bigint;
ALTER TABLE @S.client ADD COLUMN IF NOT EXISTS hears bool NOT NULL DEFAULT false, ADD COLUMN IF NOT EXISTS since bigint NOT NULL DEFAULT 0;
DELETE FROM @S.state a USING @S.state b WHERE a.ctid < b.ctid;
ALTER TABLE @S.state ADD COLUMN IF NOT EXISTS one bool PRIMARY KEY DEFAULT true CHECK (one), ADD COLUMN IF NOT EXISTS channel text;
ALTER TABLE @S.state RENAME COLUMN watched TO watched_until;
ALTER TABLE @S.state RENAME COLUMN tidied TO swept_at;
ALTER TABLE @S.state RENAME COLUMN one TO singleton;
ALTER TABLE @S.lock RENAME COLUMN free TO free_at;
ALTER TABLE @S.lock RENAME COLUMN back TO delayed_until;
ALTER TABLE @S.hold RENAME COLUMN turn TO seq;
ALTER TABLE @S.waiter RENAME COLUMN place TO position;
ALTER TABLE @S.client RENAME COLUMN gone TO alive_until;
ALTER TABLE @S.client RENAME COLUMN since TO alive_since;
ALTER TABLE @S.client RENAME COLUMN hears TO listens;
ALTER SEQUENCE @S.place RENAME TO queue_position;
