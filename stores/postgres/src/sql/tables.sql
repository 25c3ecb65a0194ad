-- Times are microseconds since 1970 of the database's own clock. `mode` is 0 for exclusive, -1 for shared, and the number of
-- permits otherwise. `attempt` is a hash: whoever reads these tables cannot act as a holder with it.

CREATE TABLE IF NOT EXISTS @S.migration(version int PRIMARY KEY, at timestamptz NOT NULL DEFAULT now());

-- The one counter of fences, in microseconds like the clock (see `next_fence`). Nobody waits for a sequence.
CREATE SEQUENCE IF NOT EXISTS @S.fence;

-- Until when somebody watches, and when it was last tidied up.
CREATE TABLE IF NOT EXISTS @S.state(watched bigint NOT NULL, tidied bigint NOT NULL) WITH (fillfactor = 10);
INSERT INTO @S.state SELECT 0, 0 WHERE NOT EXISTS (SELECT FROM @S.state);

-- One row for each name, which is updated in place: no column but the name is indexed, and each page has room to spare. An
-- exclusive hold is in the row itself. `expires`: it is held until then. `back`: it is held back until then, because of an unclean
-- end. `free`: nobody else gets it before this, because of `back`, the hold and its lock-delay. `flags`: 1 somebody waits, 2 there
-- are rows in `hold`. `terms`: what is unusual about the hold, if anything.
CREATE TABLE IF NOT EXISTS @S.lock(name text COLLATE "C" PRIMARY KEY, fence bigint NOT NULL, attempt bytea, since bigint NOT NULL,
  ttl bigint NOT NULL, expires bigint NOT NULL, free bigint NOT NULL, back bigint NOT NULL DEFAULT 0, flags int NOT NULL DEFAULT 0, terms jsonb, holder text)
  WITH (fillfactor = 50);

-- Holds beside each other: shared ones, permits, and those by which an owner entered again.
CREATE TABLE IF NOT EXISTS @S.hold(name text COLLATE "C" NOT NULL, attempt bytea NOT NULL, mode int NOT NULL, fence bigint NOT NULL,
  turn bigint NOT NULL, since bigint NOT NULL, ttl bigint NOT NULL, expires bigint NOT NULL, lingers bool NOT NULL DEFAULT false,
  terms jsonb, holder text, PRIMARY KEY (name, attempt)) WITH (fillfactor = 70);

-- The line of each name, in order of `place`; an ask for several names has the same place in each.
CREATE SEQUENCE IF NOT EXISTS @S.place;
CREATE TABLE IF NOT EXISTS @S.waiter(name text COLLATE "C" NOT NULL, place bigint NOT NULL, attempt bytea NOT NULL, client text NOT NULL,
  mode int NOT NULL, owner text, since bigint NOT NULL, terms jsonb, holder text, PRIMARY KEY (name, place), UNIQUE (name, attempt));
CREATE INDEX IF NOT EXISTS waiter_owner ON @S.waiter(owner) WHERE owner IS NOT NULL;

-- The processes that wait. One that says nothing is `gone` after its claim. `epoch` counts its connections: what an older one
-- still brings is not let into a line any more.
CREATE TABLE IF NOT EXISTS @S.client(id text PRIMARY KEY, epoch int NOT NULL, gone bigint NOT NULL) WITH (fillfactor = 50);

CREATE TABLE IF NOT EXISTS @S.record(key text COLLATE "C" PRIMARY KEY, value bytea NOT NULL, version bigint NOT NULL, expires bigint)
  WITH (fillfactor = 70);
