-- Version 3: a grant waits for the disk though it travels with a release. Only functions changed for that.
-- `since` of a client: it has been there without a gap since then. A place that it took before may be lost.
ALTER TABLE @S.client ADD COLUMN IF NOT EXISTS since bigint NOT NULL DEFAULT 0;
-- Clearing away is done in portions.
DROP FUNCTION IF EXISTS @S.tidy();
DROP FUNCTION IF EXISTS @S.sweep(bigint, bigint);
