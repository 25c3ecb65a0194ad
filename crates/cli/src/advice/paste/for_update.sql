BEGIN;
SELECT balance FROM accounts WHERE id = 42 FOR UPDATE;     -- others wait here
UPDATE accounts SET balance = balance - 10 WHERE id = 42;
COMMIT;
