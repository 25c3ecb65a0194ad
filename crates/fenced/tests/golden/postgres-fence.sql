CREATE TABLE lockkeeper_fence (resource text COLLATE "C" PRIMARY KEY, fence bigint NOT NULL, value bytea) WITH (fillfactor = 50);
INSERT INTO lockkeeper_fence VALUES ('applied', 42, NULL);
INSERT INTO lockkeeper_fence VALUES ('deleted', 42, NULL);
INSERT INTO lockkeeper_fence VALUES ('value', 42, '\x746865');
