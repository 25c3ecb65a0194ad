-- The queue of waiters.

-- The first waiter whose process is alive. Waiters before it, whose processes are not, lose their queue entries.
CREATE OR REPLACE FUNCTION @S.first_waiter(_name text, _now bigint) RETURNS @S.waiter LANGUAGE plpgsql @PATH AS $$
DECLARE _first @S.waiter;
BEGIN
  SELECT w.* INTO _first FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.alive_until > _now
    WHERE w.name = _name ORDER BY w.position LIMIT 1;
  DELETE FROM @S.waiter WHERE name = _name AND position < coalesce(_first.position, 9223372036854775807);
  RETURN _first;
END $$;

-- Notifies the process of the first waiter. If no waiter is alive, the queue ends.
CREATE OR REPLACE FUNCTION @S.wake_first(_name text, _now bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
BEGIN
  PERFORM pg_notify('lockkeeper_' || w.client, encode(w.attempt, 'hex')) FROM @S.waiter w
    JOIN @S.client c ON c.id = w.client AND c.alive_until > _now WHERE w.name = _name ORDER BY w.position LIMIT 1;
  IF NOT FOUND THEN
    DELETE FROM @S.waiter WHERE name = _name;
    UPDATE @S.lock SET flags = flags & ~1 WHERE name = _name AND flags & 1 = 1;
  END IF;
END $$;

-- Appends a request to the queue of each name; returns NULL, or why not. A request that would wait for its own owner is refused.
CREATE OR REPLACE FUNCTION @S.enqueue(_client text, _epoch int, _claim bigint, _names text[], _attempt bytea, _mode int, _owner text,
  _ttl bigint, _terms jsonb, _holder text, _now bigint) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _position bigint; _name text; _common text[];
BEGIN
  IF _owner IS NOT NULL THEN
    SELECT array_agg(w.name) INTO _common FROM @S.waiter w WHERE w.owner = _owner AND w.name = ANY (_names)
      GROUP BY w.attempt, w.mode HAVING count(*) < cardinality(_names) OR NOT @S.covers(w.mode, _mode) LIMIT 1;
    IF FOUND THEN RETURN jsonb_build_object('refused', 'self', 'names', _common); END IF;
  END IF;
  IF @S.heartbeat(_client, _epoch, _claim, NULL, _now) IS NULL THEN RETURN '{"refused": "stale"}'; END IF;
  _position := nextval('@S.queue_position');
  FOREACH _name IN ARRAY _names LOOP
    INSERT INTO @S.waiter(name, position, attempt, client, mode, owner, since, terms, holder, ttl)
      VALUES (_name, _position, _attempt, _client, _mode, _owner, _now, _terms, _holder,
        CASE WHEN _terms IS NULL AND cardinality(_names) = 1 THEN _ttl END);
    UPDATE @S.lock SET flags = flags | 1 WHERE name = _name AND flags & 1 = 0;
    PERFORM @S.emit(_now, _name, 'waiting', NULL, _holder, NULL);
  END LOOP;
  RETURN NULL;
END $$;

-- Removes a request from its queues. The waiter behind it may be the first now.
CREATE OR REPLACE FUNCTION @S.dequeue(_names text[], _attempt bytea, _now bigint) RETURNS bool LANGUAGE plpgsql @PATH AS $$
DECLARE _removed @S.waiter; _any bool := false;
BEGIN
  FOR _removed IN DELETE FROM @S.waiter WHERE name = ANY (_names) AND attempt = _attempt RETURNING * LOOP
    _any := true;
    PERFORM @S.emit(_now, _removed.name, 'left', NULL, _removed.holder, NULL);
    PERFORM @S.wake_first(_removed.name, _now);
  END LOOP;
  RETURN _any;
END $$;
