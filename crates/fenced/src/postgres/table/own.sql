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
