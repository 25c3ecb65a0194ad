ALTER TABLE profiles ADD COLUMN version bigint NOT NULL DEFAULT 0;
SELECT name, version FROM profiles WHERE id = 42;           -- version 7
UPDATE profiles SET name = 'Ada', version = version + 1 WHERE id = 42 AND version = 7;
-- 1 row: done. 0 rows: another writer was first. Read again, and try again.
