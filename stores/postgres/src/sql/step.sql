CREATE OR REPLACE FUNCTION @S.us() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
$$;

-- What a transaction of the user's locks (see `enter`), and whoever grants a lease looks at.
CREATE OR REPLACE FUNCTION @S.key(_name text) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT hashtextextended(_name, hashtext('@S'))
$$;

-- The next fence. A counter that is behind the clock (it was idle, lost, or restored) is set to a tenth of a second ahead of it,
-- by one at a time: two could set it back. Nobody waits for that one; the clock itself will do meanwhile. A clock beyond all
-- fences is broken, and not believed.
CREATE OR REPLACE FUNCTION @S.next_fence(_now bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE _most constant bigint := 9007199254740991; _fence bigint := nextval('@S.fence');
BEGIN
  IF _fence < _now AND _now < _most - 100000 THEN
    IF pg_try_advisory_xact_lock(@S.key('fence')) THEN
      IF nextval('@S.fence') < _now THEN PERFORM setval('@S.fence', _now + 100000); END IF;
      _fence := nextval('@S.fence');
    ELSE
      _fence := greatest(_now, nextval('@S.fence'));
    END IF;
  END IF;
  IF _fence > _most THEN RAISE 'the fences of this store are used up' USING ERRCODE = 'LK001'; END IF;
  RETURN _fence;
END $$;

-- One step on one name: an ask (0 hasty, 1 patient, 3 called while it stands in line) or a release (2). What is usual is done
-- by one upsert or update, which whoever asks alone says without this around it; the rest by `ask` and `release`.
CREATE OR REPLACE FUNCTION @S.step(_client text, _epoch int, _claim bigint, _kind int, _name text, _attempt bytea, _ttl bigint, _terms jsonb,
  _holder text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE _answer text;
BEGIN
  IF _kind < 2 THEN
    @TAKE INTO _answer;
    IF FOUND THEN RETURN _answer; END IF;
  ELSIF _kind = 2 THEN
    @GIVE RETURNING CASE flags WHEN 0 THEN '+' ELSE '+' || @S.pass_on(name, @S.us())::text END INTO _answer;
    IF FOUND THEN RETURN _answer; END IF;
    RETURN @S.release(ARRAY[_name], _attempt);
  ELSE
    _answer := @S.take_turn(_name, _attempt, _ttl, _terms, _holder);
    IF _answer IS NOT NULL THEN RETURN _answer; END IF;
  END IF;
  RETURN @S.ask(_client, _epoch, _claim, _kind <> 0, ARRAY[_name], _attempt, _ttl, _terms, _holder);
END $$;

-- Whoever gives a lock back gives it to the first in line, and tells it the fence, when, and for how long: but not for longer
-- than that one's process is thought to be there. Its guard renews in time for that. If anything is unusual, it is only called.
CREATE OR REPLACE FUNCTION @S.pass_on(_name text, _now bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE _first @S.waiter; _left bigint; _fence bigint;
BEGIN
  SELECT w.* INTO _first FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.gone > _now
    WHERE w.name = _name ORDER BY w.place LIMIT 1;
  SELECT least(_first.ttl, gone - _now) INTO _left FROM @S.client
    WHERE id = _first.client AND hears AND _first.ttl IS NOT NULL;
  IF _left IS NULL THEN PERFORM @S.wake(_name, _now); RETURN; END IF;
  _fence := @S.next_fence(_now);
  UPDATE @S.lock l SET fence = greatest(_fence, l.fence + 1), attempt = _first.attempt, since = _now, ttl = _first.ttl,
      expires = _now + _left, free = _now + _left, back = 0, terms = NULL, holder = _first.holder,
      flags = CASE WHEN EXISTS (SELECT FROM @S.waiter w WHERE w.name = _name AND w.place <> _first.place) THEN 1 ELSE 0 END
    WHERE l.name = _name AND l.free <= _now AND _left >= least(_first.ttl, 1000000)
      AND pg_try_advisory_xact_lock_shared(@S.key(_name))
    RETURNING l.fence INTO _fence;
  IF NOT FOUND THEN PERFORM @S.wake(_name, _now); RETURN; END IF;
  DELETE FROM @S.waiter WHERE name = _name AND place = _first.place;
  PERFORM pg_notify('lockkeeper_' || _first.client, concat_ws(' ', encode(_first.attempt, 'hex'), _fence, _now, _left));
END $$;

-- The usual turn of one that stands in line: it is the first, it wants the lock for itself, and nobody has it.
CREATE OR REPLACE FUNCTION @S.take_turn(_name text, _attempt bytea, _ttl bigint, _terms jsonb, _holder text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE _fence bigint;
BEGIN
  UPDATE @S.lock l SET fence = greatest(s.fence, l.fence + 1), attempt = _attempt, since = s.now, ttl = _ttl,
      expires = s.now + _ttl, free = s.now + _ttl, back = 0, terms = NULL, holder = _holder
    FROM (SELECT nextval('@S.fence') AS fence, @S.us() AS now
      WHERE _terms IS NULL AND pg_try_advisory_xact_lock_shared(@S.key(_name))) s
    WHERE l.name = _name AND l.free <= s.now AND l.flags = 1 AND s.fence BETWEEN s.now AND 9007199254740991
      AND s.now > (SELECT watched FROM @S.state)
      AND _attempt = (SELECT w.attempt FROM @S.waiter w JOIN @S.client c ON c.id = w.client AND c.gone > s.now
        WHERE w.name = _name ORDER BY w.place LIMIT 1)
    RETURNING l.fence INTO _fence;
  IF NOT FOUND THEN RETURN NULL; END IF;
  DELETE FROM @S.waiter WHERE name = _name AND attempt = _attempt;
  UPDATE @S.lock SET flags = 0 WHERE name = _name AND NOT EXISTS (SELECT FROM @S.waiter WHERE name = _name);
  RETURN _fence;
END $$;

CREATE OR REPLACE FUNCTION @S.delay(_terms jsonb) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce((_terms->>'delay')::bigint, 0)
$$;

-- Renews one hold of one name.
CREATE OR REPLACE FUNCTION @S.renew(_name text, _attempt bytea) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
  UPDATE @S.lock SET expires = @S.us() + ttl, free = greatest(@S.us() + ttl + @S.delay(terms), back)
    WHERE name = _name AND attempt = _attempt AND expires > @S.us();
  IF FOUND THEN RETURN true; END IF;
  UPDATE @S.hold SET expires = @S.us() + ttl
    WHERE name = _name AND attempt = _attempt AND expires > @S.us() AND NOT lingers;
  RETURN FOUND;
END $$;
