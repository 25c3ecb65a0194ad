-- Raises LK077 if the schema, or something in it, belongs to a role whose code must not run with the rights of this client. Trusted are
-- the client's own role and superusers; for a client that is no superuser also the owner of the database and the roles it is a member of.
DO $trust$
DECLARE
    _schema oid := (SELECT oid FROM pg_namespace WHERE nspname = '@S');
    _super bool := (SELECT rolsuper FROM pg_roles WHERE rolname = current_user);
    _database oid := (SELECT datdba FROM pg_database WHERE datname = current_database());
    _foreign text;
BEGIN
    SELECT format('%s belongs to %s', o.what, pg_get_userbyid(o.owner)) INTO _foreign FROM (
        SELECT 1 AS at, 'the schema @S' AS what, nspowner AS owner FROM pg_namespace WHERE oid = _schema
        UNION ALL SELECT 2, format('@S.%I', relname), relowner FROM pg_class WHERE relnamespace = _schema AND relkind NOT IN ('i', 'I')
        UNION ALL SELECT 3, format('the function @S.%I', proname), proowner FROM pg_proc WHERE pronamespace = _schema
        UNION ALL SELECT 4, format('the function of the trigger %I on @S.%I', t.tgname, c.relname), p.proowner FROM pg_class c
            JOIN pg_trigger t ON t.tgrelid = c.oid JOIN pg_proc p ON p.oid = t.tgfoid WHERE c.relnamespace = _schema
    ) o JOIN pg_roles r ON r.oid = o.owner WHERE NOT (r.rolname = current_user OR r.rolsuper
        OR NOT _super AND (o.owner = _database OR pg_has_role(current_user, o.owner, 'MEMBER'))) ORDER BY o.at LIMIT 1;
    IF _foreign IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'LK077', MESSAGE = _foreign;
    END IF;
END $trust$;
