-- Version 5: a lock can be revoked. The reason is in `terms` of the hold, as `revoked`, so no table changed.
DROP FUNCTION IF EXISTS @S.holds(text);
