-- The tables of this version. The script may run again: it creates what is missing and leaves the rest alone.
-- Times are microseconds since 1970 of the database's own clock. `mode` is 0 for exclusive, -1 for shared, and the number of permits
-- otherwise. `attempt` is a hash: a role that reads these tables cannot act as a holder with it.

CREATE TABLE IF NOT EXISTS @S.migration(version int PRIMARY KEY, at timestamptz NOT NULL DEFAULT now());

-- The one counter of fences (fencing tokens), in microseconds like the clock (see `next_fence`). Sessions never wait for a sequence.
CREATE SEQUENCE IF NOT EXISTS @S.fence;

-- One row. `watched_until`: until then the functions emit events, on the channel with the random digits of `channel` in its name. Every role of
-- a database may LISTEN and NOTIFY on a channel that it can name; only a role that may read this table knows the digits. `swept_at`: when
-- a process last removed idle rows.
CREATE TABLE IF NOT EXISTS @S.state(watched_until bigint NOT NULL, swept_at bigint NOT NULL,
  singleton bool PRIMARY KEY DEFAULT true CHECK (singleton), channel text) WITH (fillfactor = 10);
INSERT INTO @S.state(watched_until, swept_at) SELECT 0, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
  WHERE NOT EXISTS (SELECT FROM @S.state);

-- One row for each name, which is updated in place: no column but the name is indexed, and each page has spare room. The row itself holds an
-- exclusive hold. `expires`: the end of the lease, 0 if there is no hold. `delayed_until`: the lock-delay after a holder that ended without
-- a release. `free_at`: no other request is granted before it; the latest of `delayed_until` and the end of the hold with its lock-delay. `flags`:
-- 1 there are waiters, 2 there are rows in `hold`. `terms`: what the fast path does not handle (mode, owner, lock-delay, min-hold, names, revoked).
CREATE TABLE IF NOT EXISTS @S.lock(name text COLLATE "C" PRIMARY KEY, fence bigint NOT NULL, attempt bytea, since bigint NOT NULL,
  ttl bigint NOT NULL, expires bigint NOT NULL, free_at bigint NOT NULL, delayed_until bigint NOT NULL DEFAULT 0,
  flags int NOT NULL DEFAULT 0, terms jsonb, holder text)
  WITH (fillfactor = 50);

-- Holds that exist beside each other: shared ones, permits, and re-entries of an owner. `seq`: the order in which they were granted.
-- `lingers`: released before its min-hold was over; it blocks others until then.
CREATE TABLE IF NOT EXISTS @S.hold(name text COLLATE "C" NOT NULL, attempt bytea NOT NULL, mode int NOT NULL, fence bigint NOT NULL,
  seq bigint NOT NULL, since bigint NOT NULL, ttl bigint NOT NULL, expires bigint NOT NULL, lingers bool NOT NULL DEFAULT false,
  terms jsonb, holder text, PRIMARY KEY (name, attempt)) WITH (fillfactor = 70);

-- The queue of each name, in order of `position`; a request for several names has the same position in each queue. `ttl` is set only if
-- a release may hand the lock to the waiter directly (see `hand_off`): an exclusive request for one name without terms.
CREATE SEQUENCE IF NOT EXISTS @S.queue_position;
CREATE TABLE IF NOT EXISTS @S.waiter(name text COLLATE "C" NOT NULL, position bigint NOT NULL, attempt bytea NOT NULL, client text NOT NULL,
  mode int NOT NULL, owner text, since bigint NOT NULL, terms jsonb, holder text, ttl bigint, PRIMARY KEY (name, position), UNIQUE (name, attempt));
CREATE INDEX IF NOT EXISTS waiter_owner ON @S.waiter(owner) WHERE owner IS NOT NULL;

-- The processes with waiters. `alive_until`: the queue entries of a process that sends nothing until then are removed. `alive_since`: the process has
-- been alive without a gap since then; entries from before may be lost. `epoch` counts its connections: a request that an older connection
-- still delivers is refused. `listens`: notifications reach the process.
CREATE TABLE IF NOT EXISTS @S.client(id text PRIMARY KEY, epoch int NOT NULL, alive_until bigint NOT NULL, listens bool NOT NULL DEFAULT false,
  alive_since bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50);

CREATE TABLE IF NOT EXISTS @S.record(key text COLLATE "C" PRIMARY KEY, value bytea NOT NULL, version bigint NOT NULL, expires bigint)
  WITH (fillfactor = 70);

-- One row for each bucket of a rate limit that is not full. `full_at`: the instant at which it is, in nanoseconds since 1970. `due`: when the row may
-- be removed, in units of 16 s.
CREATE TABLE IF NOT EXISTS @S.bucket(key text COLLATE "C" PRIMARY KEY, full_at bigint NOT NULL, due bigint NOT NULL) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS bucket_due ON @S.bucket(due);
