-- Rows of schema version 6 as that version's functions wrote them: an exclusive hold with a waiter, a shared hold with a lock-delay, a record.
-- The attempts are the bytes 01, 02 and 03, sixteen times each. Do not edit: a change of the format is a new version with a fixture of its own.
-- written_at 1795020976495159
CREATE SCHEMA lockkeeper;
CREATE TABLE lockkeeper.lock (
    name text NOT NULL COLLATE pg_catalog."C",
    fence bigint NOT NULL,
    attempt bytea,
    since bigint NOT NULL,
    ttl bigint NOT NULL,
    expires bigint NOT NULL,
    free bigint NOT NULL,
    back bigint DEFAULT 0 NOT NULL,
    flags integer DEFAULT 0 NOT NULL,
    terms jsonb,
    holder text
)
WITH (fillfactor='50');
CREATE TABLE lockkeeper.waiter (
    name text NOT NULL COLLATE pg_catalog."C",
    place bigint NOT NULL,
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
    turn bigint NOT NULL,
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
    gone bigint NOT NULL,
    hears boolean DEFAULT false NOT NULL,
    since bigint DEFAULT 0 NOT NULL
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
CREATE SEQUENCE lockkeeper.place
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE lockkeeper.record (
    key text NOT NULL COLLATE pg_catalog."C",
    value bytea NOT NULL,
    version bigint NOT NULL,
    expires bigint
)
WITH (fillfactor='70');
CREATE TABLE lockkeeper.state (
    watched bigint NOT NULL,
    tidied bigint NOT NULL,
    one boolean DEFAULT true NOT NULL,
    channel text,
    CONSTRAINT state_one_check CHECK (one)
)
WITH (fillfactor='10');
INSERT INTO lockkeeper.client VALUES ('00000000000000bb', 1, 1795020981422311, false, 1795020976422311);
INSERT INTO lockkeeper.hold VALUES ('orders/shared', '\x292afde3b64e6636d68f1120d9242f1f', -1, 1795020976504448, 1, 1795020976417617, 30000000, 1795021006417617, false, '{"mode": -1, "delay": 1000000}', '{"host":"db-1","pid":4711,"label":"nightly"}');
INSERT INTO lockkeeper.lock VALUES ('orders/shared', 1795020976504448, NULL, 1795020976417617, 0, 0, 0, 0, 2, NULL, NULL);
INSERT INTO lockkeeper.lock VALUES ('orders/held', 1795020976504447, '\xcc8cd41cef907c4d216069122c4b8993', 1795020976404446, 30000000, 1795021006404446, 1795021006404446, 0, 1, NULL, '{"host":"db-1","pid":4711,"label":"nightly"}');
INSERT INTO lockkeeper.migration VALUES (1, '2026-11-18 16:56:16.101327+00');
INSERT INTO lockkeeper.migration VALUES (2, '2026-11-18 16:56:16.117429+00');
INSERT INTO lockkeeper.migration VALUES (3, '2026-11-18 16:56:16.125392+00');
INSERT INTO lockkeeper.migration VALUES (4, '2026-11-18 16:56:16.137394+00');
INSERT INTO lockkeeper.migration VALUES (5, '2026-11-18 16:56:16.141371+00');
INSERT INTO lockkeeper.migration VALUES (6, '2026-11-18 16:56:16.161287+00');
INSERT INTO lockkeeper.record VALUES ('once/42', '\x646f6e65', 1795020976504450, NULL);
INSERT INTO lockkeeper.state VALUES (0, 1795020975985821, true, NULL);
INSERT INTO lockkeeper.waiter VALUES ('orders/held', 2, '\x6399f6d863b08f4652b342c2e1350b4c', '00000000000000bb', 0, NULL, 1795020976422311, NULL, '{"host":"db-1","pid":4711,"label":"nightly"}', 30000000);
SELECT pg_catalog.setval('lockkeeper.fence', 1795020976504450, true);
SELECT pg_catalog.setval('lockkeeper.place', 2, true);
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
    ADD CONSTRAINT state_pkey PRIMARY KEY (one);
ALTER TABLE ONLY lockkeeper.waiter
    ADD CONSTRAINT waiter_name_attempt_key UNIQUE (name, attempt);
ALTER TABLE ONLY lockkeeper.waiter
    ADD CONSTRAINT waiter_pkey PRIMARY KEY (name, place);
CREATE INDEX waiter_owner ON lockkeeper.waiter USING btree (owner) WHERE (owner IS NOT NULL);
