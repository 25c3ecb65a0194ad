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
    IF @NEWTYPES THEN
        RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('%s or a column of its key has another type than when it was guarded', @CT),
            HINT = 'run lockkeeper fence install again';
    END IF;
    IF TG_ARGV[0] = 'came' THEN
        -- The row is there. A mark with the minus sign was measured before a row came, and goes; another INSERT that was not done may have
        -- measured it, so the number counts here too. One without was written since: by a DELETE that was committed while the INSERT
        -- waited for its row, or by another trigger that has deleted the new row again. It is written to, and not only looked for: a
        -- snapshot may be older than it.
        INSERT INTO lockkeeper_fence.mark AS m VALUES (@T, @NEWKEY, 0)
            ON CONFLICT (guarded, key) DO UPDATE SET fence = m.fence RETURNING abs(m.fence), m.fence <= 0 INTO _seen, _measured;
        _presented := coalesce(NEW.@C, 0);
        IF _seen > _presented AND _presented > 0 THEN
            RAISE EXCEPTION USING ERRCODE = 'LK065', MESSAGE = format('fence %s is stale: %s was seen already', _presented, _seen),
                DETAIL = format('presented=%s seen=%s table=%s key=%s', _presented, _seen, @TABLE, @NEWKEY);
        ELSIF _seen > _presented AND NOT @ALLOW THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064',
                MESSAGE = format('no fence is presented to %s, and %s was seen before the row was deleted', @TABLE, _seen),
                HINT = format('set the column %s to your fence, or say SET LOCAL lockkeeper.fence = ''N'' first', @CT);
        ELSIF _seen > _presented THEN
            RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE = format('the row was deleted meanwhile, with fence %s: try again', _seen);
        END IF;
        -- The same number may be that of the new row, deleted again: then it stays, which does no harm beside a row.
        IF _seen < _presented OR _measured THEN
            DELETE FROM lockkeeper_fence.mark WHERE guarded = @T AND key = @NEWKEY;
        END IF;
        RETURN NULL;
    END IF;
    IF TG_ARGV[0] = 'named' THEN
        IF NEW.@C IS NULL OR NEW.@C NOT BETWEEN 1 AND 9007199254740991 THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('%s is not a fence', coalesce(NEW.@C::text, 'NULL')),
                HINT = 'fences are 1 to 9007199254740991';
        END IF;
        NEW.@C := -NEW.@C;
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
        _presented := nullif(NEW.@C, 0);
    ELSIF TG_OP = 'UPDATE' AND NEW.@C < 0 AND NEW.@C IS DISTINCT FROM OLD.@C THEN
        _presented := -NEW.@C;
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
        IF _presented IS NULL AND NOT @ALLOW THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064', MESSAGE = format('no fence is presented to %s', @TABLE),
                HINT = format('set the column %s to your fence, or say SET LOCAL lockkeeper.fence = ''N'' first', @CT);
        END IF;
        _seen := coalesce(OLD.@C, 0);
        IF _presented < _seen THEN
            RAISE EXCEPTION USING ERRCODE = 'LK065', MESSAGE = format('fence %s is stale: %s was seen already', _presented, _seen),
                DETAIL = format('presented=%s seen=%s table=%s key=%s', _presented, _seen, @TABLE, @OLDKEY);
        END IF;
        IF TG_OP = 'UPDATE' THEN
            NEW.@C := coalesce(_presented, OLD.@C);
        END IF;
    END IF;

    -- The row goes from its key: its mark stays behind.
    IF TG_OP = 'DELETE' OR TG_OP = 'UPDATE' AND (@NEWCOLS) IS DISTINCT FROM (@OLDCOLS) THEN
        _seen := greatest(coalesce(OLD.@C, 0), coalesce(_presented, 0));
        IF _seen > 0 THEN
            INSERT INTO lockkeeper_fence.mark AS m VALUES (@T, @OLDKEY, _seen)
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
    IF TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND (@NEWCOLS) IS DISTINCT FROM (@OLDCOLS) THEN
        IF TG_OP = 'INSERT' THEN
            UPDATE lockkeeper_fence.mark m SET fence = -abs(m.fence) WHERE guarded = @T AND key = @NEWKEY RETURNING abs(m.fence) INTO _seen;
            _seen := coalesce(_seen, 0);
        ELSE
            INSERT INTO lockkeeper_fence.mark AS m VALUES (@T, @NEWKEY, 0)
                ON CONFLICT (guarded, key) DO UPDATE SET fence = -abs(m.fence) RETURNING abs(m.fence) INTO _seen;
        END IF;
        IF _presented < _seen THEN
            RAISE EXCEPTION USING ERRCODE = 'LK065', MESSAGE = format('fence %s is stale: %s was seen already', _presented, _seen),
                DETAIL = format('presented=%s seen=%s table=%s key=%s', _presented, _seen, @TABLE, @NEWKEY);
        END IF;
        IF _presented IS NULL AND _seen > 0 AND NOT @ALLOW THEN
            RAISE EXCEPTION USING ERRCODE = 'LK064',
                MESSAGE = format('no fence is presented to %s, and %s was seen before the row was deleted', @TABLE, _seen),
                HINT = format('set the column %s to your fence, or say SET LOCAL lockkeeper.fence = ''N'' first', @CT);
        END IF;
        IF _seen = 0 AND TG_OP = 'UPDATE' THEN
            DELETE FROM lockkeeper_fence.mark WHERE guarded = @T AND key = @NEWKEY;
        END IF;
        IF greatest(_presented, _seen) > 0 THEN
            NEW.@C := greatest(NEW.@C, _presented, _seen);
        END IF;
    END IF;
    RETURN NEW;
END
