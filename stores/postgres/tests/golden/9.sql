-- Rows of schema version 9 as that version's functions wrote them: an exclusive hold with a waiter, a shared hold with a lock-delay, a record, and
-- the bucket of a rate limit of one token per hour and a burst of 5, all taken, whose full_at was moved to the year 2100.
-- The attempts are the bytes 01, 02 and 03, sixteen times each. Do not edit: a change of the format is a new version with a fixture of its own.
-- written_at 1795021297000285
CREATE SCHEMA lockkeeper;
CREATE TABLE lockkeeper.lock (
    name text NOT NULL COLLATE pg_catalog."C",
    fence bigint NOT NULL,
    attempt bytea,
    since bigint NOT NULL,
    ttl bigint NOT NULL,
    expires bigint NOT NULL,
    free_at bigint NOT NULL,
    delayed_until bigint DEFAULT 0 NOT NULL,
    flags integer DEFAULT 0 NOT NULL,
    terms jsonb,
    holder text
)
WITH (fillfactor='50');
CREATE TABLE lockkeeper.waiter (
    name text NOT NULL COLLATE pg_catalog."C",
    "position" bigint NOT NULL,
    attempt bytea NOT NULL,
    client text NOT NULL,
    mode integer NOT NULL,
    owner text,
    since bigint NOT NULL,
    terms jsonb,
    holder text,
    ttl bigint
);
CREATE TABLE lockkeeper.hold (
    name text NOT NULL COLLATE pg_catalog."C",
    attempt bytea NOT NULL,
    mode integer NOT NULL,
    fence bigint NOT NULL,
    seq bigint NOT NULL,
    since bigint NOT NULL,
    ttl bigint NOT NULL,
    expires bigint NOT NULL,
    lingers boolean DEFAULT false NOT NULL,
    terms jsonb,
    holder text
)
WITH (fillfactor='70');
CREATE TABLE lockkeeper.client (
    id text NOT NULL,
    epoch integer NOT NULL,
    alive_until bigint NOT NULL,
    listens boolean DEFAULT false NOT NULL,
    alive_since bigint DEFAULT 0 NOT NULL
)
WITH (fillfactor='50');
CREATE SEQUENCE lockkeeper.fence
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE lockkeeper.migration (
    version integer NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE SEQUENCE lockkeeper.queue_position
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE lockkeeper.bucket (
    key text NOT NULL COLLATE pg_catalog."C",
    full_at bigint NOT NULL,
    due bigint NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE lockkeeper.record (
    key text NOT NULL COLLATE pg_catalog."C",
    value bytea NOT NULL,
    version bigint NOT NULL,
    expires bigint
)
WITH (fillfactor='70');
CREATE TABLE lockkeeper.state (
    watched_until bigint NOT NULL,
    swept_at bigint NOT NULL,
    singleton boolean DEFAULT true NOT NULL,
    channel text,
    CONSTRAINT state_singleton_check CHECK (singleton)
)
WITH (fillfactor='10');
INSERT INTO lockkeeper.bucket VALUES ('limit/mail', 4102444800000000000, 256402801);
INSERT INTO lockkeeper.client VALUES ('00000000000000bb', 1, 1795021301893501, false, 1795021296893501);
INSERT INTO lockkeeper.hold VALUES ('orders/shared', '\x292afde3b64e6636d68f1120d9242f1f', -1, 1795021296976676, 1, 1795021296886551, 30000000, 1795021326886551, false, '{"mode": -1, "delay": 1000000}', '{"host":"db-1","pid":4711,"label":"nightly"}');
INSERT INTO lockkeeper.lock VALUES ('orders/shared', 1795021296976676, NULL, 1795021296886551, 0, 0, 0, 0, 2, NULL, NULL);
INSERT INTO lockkeeper.lock VALUES ('orders/held', 1795021296976675, '\xcc8cd41cef907c4d216069122c4b8993', 1795021296876674, 30000000, 1795021326876674, 1795021326876674, 0, 1, NULL, '{"host":"db-1","pid":4711,"label":"nightly"}');
INSERT INTO lockkeeper.migration VALUES (9, '2026-11-18 17:01:36.746322+00');
INSERT INTO lockkeeper.record VALUES ('once/42', '\x646f6e65', 1795021296976678, NULL);
INSERT INTO lockkeeper.state VALUES (0, 1795021296707944, true, NULL);
INSERT INTO lockkeeper.waiter VALUES ('orders/held', 2, '\x6399f6d863b08f4652b342c2e1350b4c', '00000000000000bb', 0, NULL, 1795021296893501, NULL, '{"host":"db-1","pid":4711,"label":"nightly"}', 30000000);
SELECT pg_catalog.setval('lockkeeper.fence', 1795021296976678, true);
SELECT pg_catalog.setval('lockkeeper.queue_position', 2, true);
ALTER TABLE ONLY lockkeeper.bucket
    ADD CONSTRAINT bucket_pkey PRIMARY KEY (key);
ALTER TABLE ONLY lockkeeper.client
    ADD CONSTRAINT client_pkey PRIMARY KEY (id);
ALTER TABLE ONLY lockkeeper.hold
    ADD CONSTRAINT hold_pkey PRIMARY KEY (name, attempt);
ALTER TABLE ONLY lockkeeper.lock
    ADD CONSTRAINT lock_pkey PRIMARY KEY (name);
ALTER TABLE ONLY lockkeeper.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (version);
ALTER TABLE ONLY lockkeeper.record
    ADD CONSTRAINT record_pkey PRIMARY KEY (key);
ALTER TABLE ONLY lockkeeper.state
    ADD CONSTRAINT state_pkey PRIMARY KEY (singleton);
ALTER TABLE ONLY lockkeeper.waiter
    ADD CONSTRAINT waiter_name_attempt_key UNIQUE (name, attempt);
ALTER TABLE ONLY lockkeeper.waiter
    ADD CONSTRAINT waiter_pkey PRIMARY KEY (name, "position");
CREATE INDEX waiter_owner ON lockkeeper.waiter USING btree (owner) WHERE (owner IS NOT NULL);
CREATE INDEX bucket_due ON lockkeeper.bucket USING btree (due);
