-- Acquires one name or several, with every kind of terms. Replies: a fence; `{"queued": true, ...}` it waits in the queue;
-- `{"refused": "upgrade" | "mixed" | "self" | "stale" | "revoked", ...}`; else it is busy, and the reply shows the holders (see `inspect`).
CREATE OR REPLACE FUNCTION @S.acquire(_client text, _epoch int, _claim bigint, _enqueue bool, _names text[], _attempt bytea, _ttl bigint,
  _terms jsonb, _holder text) RETURNS text LANGUAGE plpgsql @PATH AS $$
DECLARE
  _mode int := coalesce((_terms->>'mode')::int, 0); _owner text := _terms->>'owner';
  _name text; _lock @S.lock; _now bigint; _fence bigint; _verdict bigint; _position bigint; _first @S.waiter;
  _own int := 0; _blocked bool := false; _reentry bigint; _text text; _highest bigint := 0; _in_transaction bool := false;
BEGIN
  PERFORM @S.lock_rows(_names);
  _now := @S.now_us();
  -- A newer connection of the same process has taken over: the process has released by now what an older connection still delivers.
  IF EXISTS (SELECT FROM @S.client WHERE id = _client AND epoch > _epoch) THEN RETURN '{"refused": "stale"}'; END IF;
  _text := @S.revocation(_names[1], _attempt, _now);
  IF _text IS NOT NULL THEN RETURN jsonb_build_object('refused', 'revoked', 'reason', _text); END IF;
  _fence := @S.repeat_grant(_names, _attempt, _now);
  IF _fence IS NOT NULL THEN RETURN _fence; END IF;
  SELECT w.position INTO _position FROM @S.waiter w WHERE w.name = _names[1] AND w.attempt = _attempt;
  FOREACH _name IN ARRAY _names LOOP
    _lock := @S.end_expired(_name, _now);
    _highest := greatest(_highest, _lock.fence);
    _verdict := @S.evaluate(_name, _mode, _owner);
    IF _verdict = -2 THEN RETURN '{"refused": "upgrade"}'; END IF;
    IF _verdict = 0 AND _lock.free_at > _now THEN _verdict := -1; END IF;
    IF _verdict = 0 AND NOT pg_try_advisory_xact_lock_shared(@S.advisory_key('lock', _name)) THEN
      _verdict := -1;
      _in_transaction := true;
    END IF;
    IF _verdict = 0 AND _lock.flags & 1 = 1 THEN
      _first := @S.first_waiter(_name, _now);
      IF _first.position < coalesce(_position, 9223372036854775807) THEN _verdict := -1; END IF;
    END IF;
    IF _verdict > 0 THEN
      _own := _own + 1;
      _blocked := _blocked OR coalesce(_reentry <> _verdict, false);
      _reentry := _verdict;
    ELSIF _verdict = -1 THEN
      _blocked := true;
      _text := coalesce(_text, _name);
    END IF;
  END LOOP;
  IF _own > 0 AND (_blocked OR _own < cardinality(_names)) THEN
    IF _position IS NULL THEN RETURN '{"refused": "mixed"}'; END IF;
    _blocked := true;
  END IF;
  IF NOT _blocked THEN
    IF _reentry IS NOT NULL THEN
      _text := @S.revocation_of_fence(_names, _reentry);
      IF _text IS NOT NULL THEN RETURN jsonb_build_object('refused', 'revoked', 'reason', _text); END IF;
    END IF;
    _fence := coalesce(_reentry, greatest(@S.next_fence(_now), _highest + 1));
    PERFORM @S.write_grant(_names, _attempt, _mode, _fence, _ttl, _terms, _holder, _now, _position);
    RETURN _fence;
  END IF;
  IF NOT _enqueue THEN
    IF _position IS NOT NULL THEN PERFORM @S.dequeue(_names, _attempt, _now); END IF;
    RETURN @S.inspect(coalesce(_text, _names[1]), _now, 3, 0);
  END IF;
  IF _position IS NULL THEN
    _text := @S.enqueue(_client, _epoch, _claim, _names, _attempt, _mode, _owner, _ttl, _terms, _holder, _now);
    IF _text IS NOT NULL THEN RETURN _text; END IF;
  END IF;
  -- The end of a user's transaction sends no notification: the client tries again ten times a second.
  RETURN jsonb_build_object('queued', true, 'changes_in', least(@S.changes_in(_names, _now), CASE WHEN _in_transaction THEN 100000 END),
    'alive_since', (SELECT alive_since FROM @S.client WHERE id = _client));
END $$;

-- The same attempt again is the same request: its hold keeps the fence, and its lease counts from now. A grant that lost one of its names is lost.
CREATE OR REPLACE FUNCTION @S.repeat_grant(_names text[], _attempt bytea, _now bigint) RETURNS bigint LANGUAGE plpgsql @PATH AS $$
DECLARE _fence bigint; _name text; _renewed int := 0;
BEGIN
  SELECT fence INTO _fence FROM @S.lock WHERE name = _names[1] AND attempt = _attempt AND expires > _now;
  IF NOT FOUND THEN
    SELECT fence INTO _fence FROM @S.hold WHERE name = _names[1] AND attempt = _attempt AND expires > _now AND NOT lingers;
  END IF;
  IF _fence IS NULL THEN RETURN NULL; END IF;
  FOREACH _name IN ARRAY _names LOOP
    IF @S.renew(_name, _attempt) = '' THEN _renewed := _renewed + 1; END IF;
  END LOOP;
  IF _renewed = cardinality(_names) THEN RETURN _fence; END IF;
  PERFORM @S.drop_hold(n.name, _attempt) FROM unnest(_names) AS n(name);
  RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION @S.drop_hold(_name text, _attempt bytea) RETURNS void LANGUAGE plpgsql @PATH AS $$
BEGIN
  UPDATE @S.lock SET attempt = NULL, expires = 0, free_at = delayed_until WHERE name = _name AND attempt = _attempt;
  DELETE FROM @S.hold WHERE name = _name AND attempt = _attempt;
END $$;

-- Writes a grant, and removes its request from the queue. The row of the lock takes an exclusive hold if it has none.
CREATE OR REPLACE FUNCTION @S.write_grant(_names text[], _attempt bytea, _mode int, _fence bigint, _ttl bigint, _terms jsonb, _holder text,
  _now bigint, _position bigint) RETURNS void LANGUAGE plpgsql @PATH AS $$
DECLARE _name text; _flags int;
BEGIN
  FOREACH _name IN ARRAY _names LOOP
    UPDATE @S.lock SET fence = _fence, attempt = _attempt, since = _now, ttl = _ttl, expires = _now + _ttl,
        free_at = greatest(_now + _ttl + @S.lock_delay(_terms), delayed_until), terms = _terms, holder = _holder
      WHERE name = _name AND _mode = 0 AND expires = 0 AND flags & 2 = 0;
    IF NOT FOUND THEN
      INSERT INTO @S.hold(name, attempt, mode, fence, seq, since, ttl, expires, terms, holder)
        VALUES (_name, _attempt, _mode, _fence, nextval('@S.queue_position'), _now, _ttl, _now + _ttl, _terms, _holder);
      -- The row keeps this fence too: a session that drew a fence before this one, and locks the row after it, must exceed it.
      UPDATE @S.lock SET flags = flags | 2, fence = greatest(fence, _fence), since = CASE expires WHEN 0 THEN _now ELSE since END
        WHERE name = _name;
    END IF;
    IF _position IS NOT NULL THEN DELETE FROM @S.waiter w WHERE w.name = _name AND w.position = _position; END IF;
    SELECT flags INTO _flags FROM @S.lock WHERE name = _name;
    -- The next waiter may be granted beside this hold; if there is none, the queue ends.
    IF _flags & 1 = 1 AND (_mode <> 0 OR NOT EXISTS (SELECT FROM @S.waiter WHERE name = _name)) THEN
      PERFORM @S.wake_first(_name, _now);
    END IF;
    PERFORM @S.emit(_now, _name, 'granted', _fence, _holder, NULL);
  END LOOP;
END $$;

-- How long until the state changes by itself, without a request; NULL if it will not.
CREATE OR REPLACE FUNCTION @S.changes_in(_names text[], _now bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT min(at) - _now FROM (
    SELECT CASE WHEN expires > _now THEN expires ELSE free_at END AS at FROM @S.lock WHERE name = ANY (_names)
    UNION ALL SELECT min(expires) FROM @S.hold WHERE name = ANY (_names)) t WHERE at > _now
$$;
