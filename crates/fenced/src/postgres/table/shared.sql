-- What all guarded tables share. Every role may count the marks; only the installer reads the keys of deleted rows.
SET LOCAL lock_timeout = '10s';
SET LOCAL search_path = pg_catalog, pg_temp;
SELECT pg_advisory_xact_lock(hashtextextended('lockkeeper fence'::text, 0::bigint));
CREATE SCHEMA IF NOT EXISTS lockkeeper_fence;
CREATE TABLE IF NOT EXISTS lockkeeper_fence.guarded (name text PRIMARY KEY, fence_column text NOT NULL, key text NOT NULL,
    allow_unfenced boolean NOT NULL, function text NOT NULL, since timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS lockkeeper_fence.mark (guarded text NOT NULL, key text COLLATE "C" NOT NULL, fence bigint NOT NULL,
    PRIMARY KEY (guarded, key));
