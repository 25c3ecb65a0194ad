//! Exactly what we say to the database. Every name in it has been quoted by the database itself.

use super::{GuardedTable, KeyColumn, KeyKind};

/// The objects that all guarded tables share.
const SHARED: &str = include_str!("shared.sql");
/// The refusal of what another role has prepared in its place.
const OWN: &str = include_str!("own.sql");
/// Every role may count the marks; only the installer reads the keys of deleted rows.
const GRANTS: &str = "GRANT USAGE ON SCHEMA lockkeeper_fence TO PUBLIC;
GRANT SELECT ON lockkeeper_fence.guarded TO PUBLIC;
REVOKE ALL ON lockkeeper_fence.mark FROM PUBLIC;
GRANT SELECT (guarded) ON lockkeeper_fence.mark TO PUBLIC;";

/// The first two come after the triggers of others, and in this order.
const NAMED: &str = "zz_lockkeeper_fence_1";
const CHECK: &str = "zz_lockkeeper_fence_2";
const EMPTY: &str = "zz_lockkeeper_fence_3";
const CAME: &str = "zz_lockkeeper_fence_4";

pub(super) fn install(guarded: &GuardedTable) -> String {
    let GuardedTable { table, column, key, allow_unfenced, name, function } = guarded;
    let (name, bare, table_text) = (literal(name), literal(function), literal(table));
    let function = format!("lockkeeper_fence.{function}");
    let body = body(guarded);
    let tag =
        (0..).map(|n| format!("$guard{n}$")).find(|tag| !body.contains(tag.as_str())).expect("one is free");
    // A key has one text, however the session of the client writes times and bytes: its mark is found by that.
    //
    // A role that may execute the function could attach it to a table of its own, and forge marks there. A writer to the guarded table needs no
    // right to: it is asked for when a trigger is made, not when it fires.
    format!(
        "{SHARED}{OWN}{GRANTS}
DO $same$ DECLARE _other text; BEGIN
  SELECT string_agg(t.tgrelid::regclass::text, ', ') INTO _other FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
    WHERE p.pronamespace = 'lockkeeper_fence'::regnamespace AND (p.proname = {bare}) <> (t.tgrelid = {table_text}::regclass)
    AND (p.proname = {bare} OR t.tgrelid = {table_text}::regclass);
  IF _other IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55006', MESSAGE = format('%s was guarded or renamed meanwhile: look again and install again', _other);
  END IF;
END $same$;
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp \
SET TimeZone = 'UTC' SET bytea_output = 'hex' AS {tag}
{body}{tag};
REVOKE ALL ON FUNCTION {function}() FROM PUBLIC;
{drops}
CREATE TRIGGER {NAMED} BEFORE UPDATE OF {column} ON {table} FOR EACH ROW EXECUTE FUNCTION {function}('named');
CREATE TRIGGER {CHECK} BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}('check');
CREATE TRIGGER {EMPTY} BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {function}('check');
CREATE TRIGGER {CAME} AFTER INSERT OR UPDATE OF {columns} ON {table} FOR EACH ROW EXECUTE FUNCTION {function}('came');
INSERT INTO lockkeeper_fence.guarded (name, fence_column, key, allow_unfenced, function) VALUES ({name}, {column_text}, {key_text}, {allow_unfenced}, {bare}) \
ON CONFLICT (name) DO UPDATE SET fence_column = excluded.fence_column, key = excluded.key, allow_unfenced = excluded.allow_unfenced;",
        drops = drops(table),
        columns = names(key).join(", "),
        column_text = literal(column),
        key_text = literal(&names(key).join(", ")),
    )
}

/// The triggers go with the function, whatever the table is called by now, and also when it is gone.
pub(super) fn uninstall(name: &str, function: &str) -> String {
    let name = literal(name);
    format!(
        "SET LOCAL lock_timeout = '10s';
SET LOCAL search_path = pg_catalog, pg_temp;
SELECT pg_advisory_xact_lock(hashtextextended('lockkeeper fence'::text, 0::bigint));
{OWN}DROP FUNCTION IF EXISTS lockkeeper_fence.{function}() CASCADE;
DELETE FROM lockkeeper_fence.mark WHERE guarded = {name};
DELETE FROM lockkeeper_fence.guarded WHERE name = {name};
DO $uninstall$ BEGIN
  IF NOT EXISTS (SELECT FROM lockkeeper_fence.guarded) THEN
    DROP TABLE lockkeeper_fence.mark, lockkeeper_fence.guarded;
    DROP SCHEMA lockkeeper_fence;
  END IF;
END $uninstall$;"
    )
}

fn drops(table: &str) -> String {
    [NAMED, CHECK, EMPTY, CAME]
        .map(|trigger| format!("DROP TRIGGER IF EXISTS {trigger} ON {table};"))
        .join("\n")
}

/// The name of the function of a registered name, however long that is.
pub(super) fn function(name: &str) -> String {
    // FNV-1a with 128 bits: no two tables of one database meet by chance.
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let begin = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    let hash = name.bytes().fold(begin, |hash, b| (hash ^ u128::from(b)).wrapping_mul(PRIME));
    format!("guard_{hash:032x}")
}

fn names(key: &[KeyColumn]) -> Vec<&str> {
    key.iter().map(|key| &*key.name).collect()
}

/// The function runs with the installer's rights, and a conversion to JSON runs a cast that the owner of a type has made for it. So only
/// types of PostgreSQL itself are converted; an enum is written by its output function, which has no casts.
impl KeyColumn {
    fn json(&self, row: &str) -> String {
        match self.kind {
            KeyKind::Enum => {
                format!("CASE WHEN {row}.{0} IS NOT NULL THEN format('%s', {row}.{0}) END", self.name)
            }
            KeyKind::BuiltIn(_) | KeyKind::Domain(_) => format!("{row}.{}", self.name),
        }
    }

    /// Whether the column of this name has another type by now: the table's owner may give the name to another column.
    fn changed(&self) -> Option<String> {
        let name = &self.name;
        match self.kind {
            KeyKind::Enum => None,
            KeyKind::BuiltIn(oid) => Some(format!("pg_typeof(NEW.{name}) <> '{oid}'::oid::regtype")),
            KeyKind::Domain(base) => Some(format!(
                "(SELECT typbasetype FROM pg_type WHERE oid = pg_typeof(NEW.{name})::oid) IS DISTINCT FROM '{base}'::oid"
            )),
        }
    }
}

fn body(guarded: &GuardedTable) -> String {
    let GuardedTable { column, key, allow_unfenced, name, .. } = guarded;
    let all = |each: &dyn Fn(&KeyColumn) -> String| key.iter().map(each).collect::<Vec<_>>().join(", ");
    let text = |row: &str| format!("jsonb_build_array({})::text", all(&|key| key.json(row)));
    let row = |row: &str| format!("ROW({})", all(&|key| format!("{row}.{}", key.name)));
    let changed = std::iter::once(format!("pg_typeof(NEW.{column}) <> 'bigint'::regtype"));
    let changed = changed.chain(key.iter().filter_map(KeyColumn::changed)).collect::<Vec<_>>().join(" OR ");
    let allow = if *allow_unfenced { "true" } else { "false" };
    // The longer words first.
    let words = [
        ("@NEWTYPES", changed),
        ("@NEWCOLS", row("NEW")),
        ("@OLDCOLS", row("OLD")),
        ("@NEWKEY", text("NEW")),
        ("@OLDKEY", text("OLD")),
        ("@ALLOW", allow.to_owned()),
        ("@CT", literal(column)),
        ("@TABLE", "format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME)".to_owned()),
        ("@T", literal(name)),
        ("@C", column.clone()),
    ];
    fill(include_str!("guard.sql"), &words)
}

/// Puts each word's meaning in its place, in one pass: what was put in is not looked at again.
fn fill(text: &str, words: &[(&str, String)]) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('@') {
        out += &rest[..at];
        rest = &rest[at..];
        let (word, meaning) =
            words.iter().find(|(word, _)| rest.starts_with(word)).expect("every word has a meaning");
        out += meaning;
        rest = &rest[word.len()..];
    }
    out + rest
}

/// A literal that means the same whatever `standard_conforming_strings` says.
fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}
