-- Version 2: whoever gives a lock back gives it to the first in line. `ttl` of a waiter: it wants one lock for itself, and may be given
-- it so (see `pass_on`). `hears` of a client: messages reach it.
ALTER TABLE @S.waiter ADD COLUMN IF NOT EXISTS ttl bigint;
ALTER TABLE @S.client ADD COLUMN IF NOT EXISTS hears bool NOT NULL DEFAULT false;
DROP FUNCTION IF EXISTS @S.look(text, int, bigint, text[]);
DROP FUNCTION IF EXISTS @S.join_line(text, int, bigint, text[], bytea, int, text, jsonb, text, bigint);
