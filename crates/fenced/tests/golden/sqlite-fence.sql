CREATE TABLE lockkeeper_fence (resource TEXT PRIMARY KEY, fence INTEGER NOT NULL, value BLOB);
INSERT INTO lockkeeper_fence VALUES('applied',42,NULL);
INSERT INTO lockkeeper_fence VALUES('deleted',42,NULL);
INSERT INTO lockkeeper_fence VALUES('value',42,X'746865');
