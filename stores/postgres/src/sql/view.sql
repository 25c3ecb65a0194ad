-- One lock as others may see it; nothing if it is free. Nothing is changed here.
CREATE OR REPLACE FUNCTION @S.view(_name text, _now bigint, _some int, _line int) RETURNS text LANGUAGE plpgsql @PATH STABLE AS $$
DECLARE _held jsonb; _waiting bigint := 0; _shown jsonb; _lock @S.lock;
BEGIN
  SELECT * INTO _lock FROM @S.lock WHERE name = _name;
  SELECT coalesce(jsonb_agg(t.one), '[]') INTO _held FROM (
    SELECT jsonb_build_object('holder', h.holder, 'fence', h.fence, 'mode', h.mode, 'since', h.since, 'left', h.expires - _now,
      'lingers', h.lingers, 'revoked', h.revoked) AS one
    FROM @S.holds(_name) h WHERE h.expires > _now ORDER BY h.fence, h.turn LIMIT _some) t;
  IF _lock.flags & 1 = 1 THEN
    SELECT count(*) INTO _waiting FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.gone > _now WHERE w.name = _name;
    SELECT jsonb_agg(t.one) INTO _shown FROM (
      SELECT jsonb_build_object('holder', w.holder, 'mode', w.mode, 'since', w.since) AS one
      FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.gone > _now WHERE w.name = _name ORDER BY w.place LIMIT _line) t;
  END IF;
  RETURN jsonb_build_object('name', _name, 'held', _held, 'waiting', _waiting, 'line', coalesce(_shown, '[]'),
    'delayed', @S.delayed(_lock, _now));
END $$;

-- For how much longer a lock is held back after an unclean end, also of one that nobody has noticed yet.
CREATE OR REPLACE FUNCTION @S.delayed(_lock @S.lock, _now bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT nullif(greatest(0, CASE WHEN _lock.expires <= _now THEN _lock.free ELSE _lock.back END - _now,
    (SELECT max(expires + @S.delay(terms)) - _now FROM @S.hold
      WHERE _lock.flags & 2 = 2 AND name = _lock.name AND expires <= _now AND NOT lingers)), 0)
$$;

-- A process says that it is there, and learns since when it has been, without a gap; nothing if a newer connection took over.
CREATE OR REPLACE FUNCTION @S.there(_client text, _epoch int, _claim bigint, _hears bool, _now bigint) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _gone bigint; _since bigint; _most constant bigint := 600000000;
BEGIN
  SELECT gone INTO _gone FROM @S.client WHERE id = _client;
  INSERT INTO @S.client AS c (id, epoch, gone, hears, since) VALUES (_client, _epoch, _now + _claim, coalesce(_hears, false), _now)
    ON CONFLICT (id) DO UPDATE SET epoch = _epoch, gone = _now + _claim, hears = coalesce(_hears, c.hears),
      since = CASE WHEN c.gone > _now THEN c.since ELSE _now END
    WHERE c.epoch <= _epoch
    RETURNING c.since INTO _since;
  -- The clock was set back, or may have been while we were away. No claim is longer than ten minutes: who says so was there before
  -- that, and is dead unless it says something soon.
  IF _gone BETWEEN _now AND _now + _claim THEN RETURN _since; END IF;
  UPDATE @S.client SET gone = _now + _most
    WHERE id IN (SELECT id FROM @S.client WHERE gone > _now + _most FOR UPDATE SKIP LOCKED);
  RETURN _since;
END $$;

-- What a process that waits looks at now and then, whatever it is told: it says that it is there, and learns who of its own is
-- first in line where nobody is in the way (perhaps), which attempts were granted a lock lately (one of its own whose message was
-- lost is among them), and when something changes by itself.
CREATE OR REPLACE FUNCTION @S.look(_client text, _epoch int, _claim bigint, _hears bool, _names text[]) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE _now bigint := @S.us(); _since bigint := @S.there(_client, _epoch, _claim, _hears, _now);
BEGIN
  RETURN jsonb_build_object('since', _since, 'granted', (
    SELECT coalesce(jsonb_agg(encode(l.attempt, 'hex')), '[]') FROM @S.lock l
    WHERE l.name = ANY (_names) AND l.attempt IS NOT NULL AND l.expires > _now AND l.since > _now - _claim), 'names', (
    SELECT coalesce(jsonb_agg(jsonb_build_object('first', encode(f.attempt, 'hex'), 'ready', f.ready, 'ends', @S.ends(ARRAY[n.name], _now))), '[]')
    FROM unnest(_names) AS n(name) CROSS JOIN LATERAL (
      SELECT w.attempt, coalesce(l.expires, 0) <= _now AND coalesce(l.free, 0) <= _now AND (w.mode <> 0 OR NOT EXISTS (
          SELECT FROM @S.hold h WHERE h.name = n.name AND h.expires > _now)) AS ready, w.client
      FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND (c.gone > _now OR c.id = _client)
        LEFT JOIN @S.lock l ON l.name = w.name
      WHERE w.name = n.name ORDER BY w.place LIMIT 1) f
    WHERE f.client = _client));
END $$;

-- The first words of a new connection: what older ones still bring comes too late to stand in line. It is not there for that yet.
CREATE OR REPLACE FUNCTION @S.hello(_client text, _epoch int) RETURNS void LANGUAGE sql @PATH AS $$
  INSERT INTO @S.client AS c (id, epoch, gone) VALUES (_client, _epoch, @S.us())
    ON CONFLICT (id) DO UPDATE SET epoch = _epoch WHERE c.epoch < _epoch
$$;
