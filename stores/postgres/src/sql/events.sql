-- Emits an event to the watchers, if there are any, on a channel whose name only clients of the store can know (see `state` in tables.sql).
CREATE OR REPLACE FUNCTION @S.emit(_now bigint, _name text, _kind text, _fence bigint, _holder text, _reason text) RETURNS void
LANGUAGE plpgsql @PATH AS $$
BEGIN
  PERFORM pg_notify('lockkeeper_events_' || channel, jsonb_build_object('at', _now, 'name', _name, 'kind', _kind, 'fence', _fence,
    'holder', _holder, 'reason', _reason)::text) FROM @S.state WHERE watched_until >= _now AND channel IS NOT NULL;
END $$;
