-- Version 4: messages are wake-ups; functions have a search_path of their own, and advisory keys a kind.
DROP FUNCTION IF EXISTS @S.key(text);
DROP FUNCTION IF EXISTS @S.next_fence(bigint);
-- One row, whatever is restored into it: with two, every statement that reads `watched` failed.
DELETE FROM @S.state a USING @S.state b WHERE a.ctid < b.ctid;
ALTER TABLE @S.state ADD COLUMN IF NOT EXISTS one bool PRIMARY KEY DEFAULT true CHECK (one);
