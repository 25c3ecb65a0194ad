INSERT INTO reservations (order_id, item, amount) VALUES ('order-17', 42, 3);   -- order_id is unique: a retry fails here
UPDATE stock SET amount = amount - 3 WHERE item = 42 AND amount >= 3;
-- 1 row: reserved. 0 rows: too few are left. Roll back.
