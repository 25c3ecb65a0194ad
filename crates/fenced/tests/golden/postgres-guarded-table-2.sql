-- What all guarded tables share. Every role may count the marks; only the installer reads the keys of deleted rows.
SET LOCAL lock_timeout = '10s';
SET LOCAL search_path = pg_catalog, pg_temp;
SELECT pg_advisory_xact_lock(hashtextextended('lockkeeper fence'::text, 0::bigint));
CREATE SCHEMA IF NOT EXISTS lockkeeper_fence;
CREATE TABLE IF NOT EXISTS lockkeeper_fence.guarded (name text PRIMARY KEY, fence_column text NOT NULL, key text NOT NULL,
    allow_unfenced boolean NOT NULL, function text NOT NULL, since timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS lockkeeper_fence.mark (guarded text NOT NULL, key text COLLATE "C" NOT NULL, fence bigint NOT NULL,
    PRIMARY KEY (guarded, key));
-- What follows runs with the installer's rights, now and in each guarded table: it must not meet code of another role. Nothing
-- above runs any: what was there already was left as it is.
DO $own$
DECLARE
    _schema oid := (SELECT oid FROM pg_namespace WHERE nspname = 'lockkeeper_fence');
    _me oid := (SELECT oid FROM pg_roles WHERE rolname = current_user);
    _foreign text;
BEGIN
    SELECT format('the %s belongs to %s', o.what, pg_get_userbyid(o.owner)) INTO _foreign FROM (
        SELECT 1 AS at, 'schema lockkeeper_fence' AS what, nspowner AS owner FROM pg_namespace WHERE oid = _schema
        UNION ALL SELECT 2, format('relation lockkeeper_fence.%I', relname), relowner FROM pg_class WHERE relnamespace = _schema
        UNION ALL SELECT 3, format('function lockkeeper_fence.%I', proname), proowner FROM pg_proc WHERE pronamespace = _schema
    ) o WHERE o.owner <> _me ORDER BY o.at LIMIT 1;
    IF _foreign IS NULL THEN
        SELECT format('lockkeeper_fence.%I has a %s that lockkeeper has not made', c.relname, o.what) INTO _foreign FROM (
            SELECT tgrelid AS rel, 'trigger' AS what FROM pg_trigger WHERE NOT tgisinternal
            UNION ALL SELECT ev_class, 'rule' FROM pg_rewrite
            UNION ALL SELECT polrelid, 'policy' FROM pg_policy
            UNION ALL SELECT conrelid, 'constraint' FROM pg_constraint WHERE contype IN ('c', 'x', 'f')
            UNION ALL SELECT indrelid, 'index' FROM pg_index WHERE indexprs IS NOT NULL OR indpred IS NOT NULL
            UNION ALL SELECT d.adrelid, 'default' FROM pg_attrdef d WHERE pg_get_expr(d.adbin, d.adrelid) <> 'now()'
        ) o JOIN pg_class c ON c.oid = o.rel WHERE c.relnamespace = _schema LIMIT 1;
    END IF;
    IF _foreign IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('%s: its code would run with the rights of %I. Install as the '
            'role that owns it, or drop it if it is not lockkeeper''s', _foreign, current_user);
    END IF;
END $own$;
GRANT USAGE ON SCHEMA lockkeeper_fence TO PUBLIC;
GRANT SELECT ON lockkeeper_fence.guarded TO PUBLIC;
REVOKE ALL ON lockkeeper_fence.mark FROM PUBLIC;
GRANT SELECT (guarded) ON lockkeeper_fence.mark TO PUBLIC;
DO $same$ DECLARE _other text; BEGIN
  SELECT string_agg(t.tgrelid::regclass::text, ', ') INTO _other FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
    WHERE p.pronamespace = 'lockkeeper_fence'::regnamespace AND (p.proname = E'guard_63296a8cd0acbc2a97c7317b11ffd03f') <> (t.tgrelid = E'golden.orders'::regclass)
    AND (p.proname = E'guard_63296a8cd0acbc2a97c7317b11ffd03f' OR t.tgrelid = E'golden.orders'::regclass);
  IF _other IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55006', MESSAGE = format('%s was guarded or renamed meanwhile: look again and install again', _other);
  END IF;
END $same$;
CREATE OR REPLACE FUNCTION lockkeeper_fence.guard_63296a8cd0acbc2a97c7317b11ffd03f() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' SET bytea_output = 'hex' AS $guard0$
-- One function for each guarded table. It is called by two triggers before each row: the first only when the statement names the
-- column of the fence, and it tells the second so by a minus sign, which no fence has. A third comes after each row that has a new key.
DECLARE
    _text text := nullif(current_setting('lockkeeper.fence', true), '');
    _setting bigint;
    _presented bigint;
    _seen bigint;
    _measured bool;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = 'TRUNCATE would forget which fences were seen',
            HINT = 'DELETE the rows instead';
    END IF;
    -- This runs with the rights of the installer, so it must not meet a type with casts or operators of another role. A DELETE has a NEW
    -- without values, and with the same types.
    IF pg_typeof(NEW.fence) <> 'bigint'::regtype OR pg_typeof(NEW.id) <> '23'::oid::regtype THEN
        RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('%s or a column of its key has another type than when it was guarded', E'fence'),
            HINT = 'run lockkeeper fence install again';
    END IF;
    IF TG_ARGV[0] = 'came' THEN
        -- The row is there. A mark with the minus sign was measured before a row came, and goes; another INSERT that was not done may have
        -- measured it, so the number counts here too. One without was written since: by a DELETE that was committed while the INSERT
        -- waited for its row, or by another trigger that has deleted the new row again. It is written to, and not only looked for: a
        -- snapshot may be older than it.
        INSERT INTO lockkeeper_fence.mark AS m VALUES (E'golden.orders', jsonb_build_array(NEW.id)::text, 0)
            ON CONFLICT (guarded, key) DO UPDATE SET fence = m.fence RETURNING abs(m.fence), m.fence <= 0 INTO _seen, _measured;
        _presented := coalesce(NEW.fence, 0);
        IF _seen > _presented AND _presented > 0 THEN
            RAISE EXCEPTION USING ERRCODE = 'LK065', MESSAGE = format('fence %s is stale: %s was seen already', _presented, _seen),
                DETAIL = format('presented=%s seen=%s table=%s key=%s', _presented, _seen, format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), jsonb_build_array(NEW.id)::text);
        ELSIF _seen > _presented AND NOT false THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064',
                MESSAGE = format('no fence is presented to %s, and %s was seen before the row was deleted', format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), _seen),
                HINT = format('set the column %s to your fence, or say SET LOCAL lockkeeper.fence = ''N'' first', E'fence');
        ELSIF _seen > _presented THEN
            RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE = format('the row was deleted meanwhile, with fence %s: try again', _seen);
        END IF;
        -- The same number may be that of the new row, deleted again: then it stays, which does no harm beside a row.
        IF _seen < _presented OR _measured THEN
            DELETE FROM lockkeeper_fence.mark WHERE guarded = E'golden.orders' AND key = jsonb_build_array(NEW.id)::text;
        END IF;
        RETURN NULL;
    END IF;
    IF TG_ARGV[0] = 'named' THEN
        IF NEW.fence IS NULL OR NEW.fence NOT BETWEEN 1 AND 9007199254740991 THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('%s is not a fence', coalesce(NEW.fence::text, 'NULL')),
                HINT = 'fences are 1 to 9007199254740991';
        END IF;
        NEW.fence := -NEW.fence;
        RETURN NEW;
    END IF;
    IF _text IS NOT NULL THEN
        IF _text !~ '^[0-9]{1,16}$' OR _text::bigint NOT BETWEEN 1 AND 9007199254740991 THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('lockkeeper.fence is %L, and that is not a fence', _text),
                HINT = 'fences are 1 to 9007199254740991';
        END IF;
        _setting := _text::bigint;
    END IF;

    IF TG_OP = 'INSERT' THEN
        _presented := nullif(NEW.fence, 0);
    ELSIF TG_OP = 'UPDATE' AND NEW.fence < 0 AND NEW.fence IS DISTINCT FROM OLD.fence THEN
        _presented := -NEW.fence;
    END IF;
    IF _presented <> _setting THEN
        RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('two fences are presented: %s and %s', _presented, _setting),
            HINT = 'the column and SET LOCAL lockkeeper.fence must say the same, or one of them nothing';
    END IF;
    _presented := coalesce(_presented, _setting);
    IF _presented NOT BETWEEN 1 AND 9007199254740991 THEN
        RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('%s is not a fence', _presented),
            HINT = 'fences are 1 to 9007199254740991';
    END IF;

    -- An INSERT without a fence is taken where none was ever seen: see below.
    IF TG_OP <> 'INSERT' THEN
        IF _presented IS NULL AND NOT false THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('no fence is presented to %s', format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME)),
                HINT = format('set the column %s to your fence, or say SET LOCAL lockkeeper.fence = ''N'' first', E'fence');
        END IF;
        _seen := coalesce(OLD.fence, 0);
        IF _presented < _seen THEN
            RAISE EXCEPTION USING ERRCODE = 'LK065', MESSAGE = format('fence %s is stale: %s was seen already', _presented, _seen),
                DETAIL = format('presented=%s seen=%s table=%s key=%s', _presented, _seen, format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), jsonb_build_array(OLD.id)::text);
        END IF;
        IF TG_OP = 'UPDATE' THEN
            NEW.fence := coalesce(_presented, OLD.fence);
        END IF;
    END IF;

    -- The row goes from its key: its mark stays behind.
    IF TG_OP = 'DELETE' OR TG_OP = 'UPDATE' AND (ROW(NEW.id)) IS DISTINCT FROM (ROW(OLD.id)) THEN
        _seen := greatest(coalesce(OLD.fence, 0), coalesce(_presented, 0));
        IF _seen > 0 THEN
            INSERT INTO lockkeeper_fence.mark AS m VALUES (E'golden.orders', jsonb_build_array(OLD.id)::text, _seen)
                ON CONFLICT (guarded, key) DO UPDATE SET fence = greatest(abs(m.fence), excluded.fence);
        END IF;
    END IF;
    IF TG_OP = 'DELETE' THEN
        RETURN OLD;
    END IF;

    -- The row is to come to its key: the mark there counts. It gets a minus sign, and goes when the row is there: an INSERT may still meet
    -- another row and do nothing (ON CONFLICT). An INSERT writes to a mark only where it finds one: a lock on the mark of a row that exists,
    -- before the lock on the row, would be a deadlock with a transaction that has the row. The mark of a DELETE that is not committed yet
    -- is met after the row is there. An UPDATE of the key has its row, and writes a 0 where there is no mark, which goes at once.
    IF TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND (ROW(NEW.id)) IS DISTINCT FROM (ROW(OLD.id)) THEN
        IF TG_OP = 'INSERT' THEN
            UPDATE lockkeeper_fence.mark m SET fence = -abs(m.fence) WHERE guarded = E'golden.orders' AND key = jsonb_build_array(NEW.id)::text RETURNING abs(m.fence) INTO _seen;
            _seen := coalesce(_seen, 0);
        ELSE
            INSERT INTO lockkeeper_fence.mark AS m VALUES (E'golden.orders', jsonb_build_array(NEW.id)::text, 0)
                ON CONFLICT (guarded, key) DO UPDATE SET fence = -abs(m.fence) RETURNING abs(m.fence) INTO _seen;
        END IF;
        IF _presented < _seen THEN
            RAISE EXCEPTION USING ERRCODE = 'LK065', MESSAGE = format('fence %s is stale: %s was seen already', _presented, _seen),
                DETAIL = format('presented=%s seen=%s table=%s key=%s', _presented, _seen, format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), jsonb_build_array(NEW.id)::text);
        END IF;
        IF _presented IS NULL AND _seen > 0 AND NOT false THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064',
                MESSAGE = format('no fence is presented to %s, and %s was seen before the row was deleted', format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), _seen),
                HINT = format('set the column %s to your fence, or say SET LOCAL lockkeeper.fence = ''N'' first', E'fence');
        END IF;
        IF _seen = 0 AND TG_OP = 'UPDATE' THEN
            DELETE FROM lockkeeper_fence.mark WHERE guarded = E'golden.orders' AND key = jsonb_build_array(NEW.id)::text;
        END IF;
        IF greatest(_presented, _seen) > 0 THEN
            NEW.fence := greatest(NEW.fence, _presented, _seen);
        END IF;
    END IF;
    RETURN NEW;
END
$guard0$;
REVOKE ALL ON FUNCTION lockkeeper_fence.guard_63296a8cd0acbc2a97c7317b11ffd03f() FROM PUBLIC;
DROP TRIGGER IF EXISTS zz_lockkeeper_fence_1 ON golden.orders;
DROP TRIGGER IF EXISTS zz_lockkeeper_fence_2 ON golden.orders;
DROP TRIGGER IF EXISTS zz_lockkeeper_fence_3 ON golden.orders;
DROP TRIGGER IF EXISTS zz_lockkeeper_fence_4 ON golden.orders;
CREATE TRIGGER zz_lockkeeper_fence_1 BEFORE UPDATE OF fence ON golden.orders FOR EACH ROW EXECUTE FUNCTION lockkeeper_fence.guard_63296a8cd0acbc2a97c7317b11ffd03f('named');
CREATE TRIGGER zz_lockkeeper_fence_2 BEFORE INSERT OR UPDATE OR DELETE ON golden.orders FOR EACH ROW EXECUTE FUNCTION lockkeeper_fence.guard_63296a8cd0acbc2a97c7317b11ffd03f('check');
CREATE TRIGGER zz_lockkeeper_fence_3 BEFORE TRUNCATE ON golden.orders FOR EACH STATEMENT EXECUTE FUNCTION lockkeeper_fence.guard_63296a8cd0acbc2a97c7317b11ffd03f('check');
CREATE TRIGGER zz_lockkeeper_fence_4 AFTER INSERT OR UPDATE OF id ON golden.orders FOR EACH ROW EXECUTE FUNCTION lockkeeper_fence.guard_63296a8cd0acbc2a97c7317b11ffd03f('came');
INSERT INTO lockkeeper_fence.guarded (name, fence_column, key, allow_unfenced, function) VALUES (E'golden.orders', E'fence', E'id', false, E'guard_63296a8cd0acbc2a97c7317b11ffd03f') ON CONFLICT (name) DO UPDATE SET fence_column = excluded.fence_column, key = excluded.key, allow_unfenced = excluded.allow_unfenced;
