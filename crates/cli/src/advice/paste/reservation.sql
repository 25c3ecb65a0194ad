ALTER TABLE seats ADD COLUMN reserved_by text;
ALTER TABLE seats ADD COLUMN reserved_until bigint NOT NULL DEFAULT 0;   -- seconds since 1970
-- Reserve: 1 row is yours, 0 rows is another buyer's.
UPDATE seats SET reserved_by = 'cart-17', reserved_until = 1794776000
 WHERE id = 42 AND sold_to IS NULL AND (reserved_until < 1794775400 OR reserved_by = 'cart-17');
-- Buy: 1 row is sold, 0 rows: the reservation ended, or the seat is gone. Refund.
UPDATE seats SET sold_to = 'cart-17'
 WHERE id = 42 AND sold_to IS NULL AND reserved_by = 'cart-17' AND reserved_until >= 1794775400;
