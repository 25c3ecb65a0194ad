-- The processes that have waiters: their heartbeat, their poll, and their connections.

-- A process reports that it is alive. Returns since when it has been alive without a gap; NULL if a newer connection took over.
CREATE OR REPLACE FUNCTION @S.heartbeat(_client text, _epoch int, _claim bigint, _listens bool, _now bigint) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _until bigint; _since bigint; _most constant bigint := 600000000;
BEGIN
  SELECT alive_until INTO _until FROM @S.client WHERE id = _client;
  INSERT INTO @S.client AS c (id, epoch, alive_until, listens, alive_since) VALUES (_client, _epoch, _now + _claim, coalesce(_listens, false), _now)
    ON CONFLICT (id) DO UPDATE SET epoch = _epoch, alive_until = _now + _claim, listens = coalesce(_listens, c.listens),
      alive_since = CASE WHEN c.alive_until > _now THEN c.alive_since ELSE _now END
    WHERE c.epoch <= _epoch
    RETURNING c.alive_since INTO _since;
  IF _until BETWEEN _now AND _now + _claim AND _since <= _now THEN RETURN _since; END IF;
  -- The clock was set back, or may have been while this process was silent. No claim is longer than ten minutes: a process with a longer one
  -- wrote it before that, and is dead unless it reports soon. A heartbeat that read the clock before may be written later, so a process that
  -- was alive when the clock was set back looks each time until the clock has caught up.
  UPDATE @S.client SET alive_until = _now + _most
    WHERE id IN (SELECT id FROM @S.client WHERE alive_until > _now + _most FOR UPDATE SKIP LOCKED);
  RETURN _since;
END $$;

-- The poll of a process with waiters, in case notifications were lost: a heartbeat that returns which of its waiters are first in the queue of a
-- lock that may be free, which attempts were granted a lock lately (also a waiter whose notification was lost), and when the state
-- changes by itself.
CREATE OR REPLACE FUNCTION @S.poll(_client text, _epoch int, _claim bigint, _listens bool, _names text[]) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _now bigint := @S.now_us(); _since bigint := @S.heartbeat(_client, _epoch, _claim, _listens, _now);
BEGIN
  RETURN jsonb_build_object('alive_since', _since, 'granted', (
    SELECT coalesce(jsonb_agg(encode(l.attempt, 'hex')), '[]') FROM @S.lock l
    WHERE l.name = ANY (_names) AND l.attempt IS NOT NULL AND l.expires > _now AND l.since > _now - _claim), 'first', (
    SELECT coalesce(jsonb_agg(jsonb_build_object('attempt', encode(f.attempt, 'hex'), 'ready', f.ready,
      'changes_in', @S.changes_in(ARRAY[n.name], _now))), '[]')
    FROM unnest(_names) AS n(name) CROSS JOIN LATERAL (
      SELECT w.attempt, coalesce(l.expires, 0) <= _now AND coalesce(l.free_at, 0) <= _now AND (w.mode <> 0 OR NOT EXISTS (
          SELECT FROM @S.hold h WHERE h.name = n.name AND h.expires > _now)) AS ready, w.client
      FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND (c.alive_until > _now OR c.id = _client)
        LEFT JOIN @S.lock l ON l.name = w.name
      WHERE w.name = n.name ORDER BY w.position LIMIT 1) f
    WHERE f.client = _client));
END $$;

-- The first statement of a new connection: requests that older connections still deliver are refused from now on. It is no heartbeat.
CREATE OR REPLACE FUNCTION @S.begin_epoch(_client text, _epoch int) RETURNS void LANGUAGE sql @PATH AS $$
  INSERT INTO @S.client AS c (id, epoch, alive_until) VALUES (_client, _epoch, @S.now_us())
    ON CONFLICT (id) DO UPDATE SET epoch = _epoch WHERE c.epoch < _epoch
$$;
