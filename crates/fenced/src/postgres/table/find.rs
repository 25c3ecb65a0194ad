//! The table to guard: its columns, its key, and what keeps it from being guarded.

use lockkeeper_core::{Error, Result};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row, Transaction};

use super::registry::{Registered, place};
use super::{TableGuardSpec, one, own_path};
use crate::postgres::error::to_error;

/// A table that can be guarded. All names in it come from the catalogue of the database and are quoted by it.
#[derive(Clone, Debug)]
pub struct GuardedTable {
    /// `schema.table`, quoted where that is needed.
    pub table: String,
    /// The column of the fence, likewise.
    pub column: String,
    /// The columns of the key, likewise.
    pub key: Vec<KeyColumn>,
    /// Whether writes without any fence are let through.
    pub allow_unfenced: bool,
    /// The name that its marks are kept under: the table's name when it was first guarded, or that with a number if another table has it.
    pub(super) name: String,
    /// Its function, without the schema.
    pub(super) function: String,
}

/// A column of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyColumn {
    /// Its name, quoted where that is needed.
    pub name: String,
    pub(super) kind: KeyKind,
}

/// How the type of a key column is recognised later. The numbers are those of types of PostgreSQL itself, which a dump keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyKind {
    BuiltIn(u32),
    Domain(u32),
    Enum,
}

const RESOLVE: &str = "SELECT pg_catalog.to_regclass($1)::pg_catalog.oid";
const TABLE: &str = "SELECT c.oid, quote_ident(n.nspname) || '.' || quote_ident(c.relname), c.relkind::text, \
    EXISTS (SELECT FROM pg_inherits i WHERE c.oid IN (i.inhparent, i.inhrelid)), n.nspname LIKE 'pg\\_%' OR c.relpersistence = 't' \
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1";
const COLUMN: &str = "SELECT quote_ident(attname), format_type(atttypid, NULL), attgenerated::text, attidentity::text FROM pg_attribute \
    WHERE attrelid = $1 AND attname = $2 AND attnum > 0 AND NOT attisdropped";
/// The columns of every index that allows each key once, whether it is the primary key, and which it is.
const KEYS: &str = "SELECT i.indisprimary, i.indexrelid, (SELECT array_agg(quote_ident(a.attname) ORDER BY a.attname) FROM pg_attribute a \
    WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])) FROM pg_index i WHERE i.indrelid = $1 AND i.indisunique \
    AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL ORDER BY i.indisprimary DESC";

/// The columns of an index whose values cannot name the row that has left a mark: their types, and why. A domain is what it is made of.
const UNFIT: &str = "SELECT quote_ident(a.attname), format_type(a.atttypid, a.atttypmod), CASE WHEN a.attgenerated <> '' THEN 'generated' \
    WHEN c.oid IS NOT NULL THEN 'collation' ELSE 'type' END FROM pg_index i CROSS JOIN unnest(i.indkey::int2[], i.indcollation::oid[]) \
    WITH ORDINALITY AS k(attnum, compared, at) JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum \
    JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_collation c ON c.oid IN (a.attcollation, k.compared) AND NOT c.collisdeterministic \
    WHERE i.indexrelid = $1 AND k.at <= i.indnkeyatts AND (a.attgenerated <> '' OR c.oid IS NOT NULL OR NOT (t.typtype = 'e' \
    OR t.oid = 'bpchar'::regtype AND a.atttypmod > 0 OR coalesce(nullif(t.typbasetype, 0), t.oid) = ANY ('{int2,int4,int8,oid,bool,\
    uuid,text,varchar,name,date,time,timestamp,timestamptz,bytea,inet,cidr,macaddr}'::regtype[]::oid[]))) ORDER BY k.at LIMIT 1";

/// The columns of an index, and what they are.
const KINDS: &str = "SELECT quote_ident(a.attname), t.typtype::text, CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.oid END \
    FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]) \
    JOIN pg_type t ON t.oid = a.atttypid WHERE i.indexrelid = $1 ORDER BY quote_ident(a.attname) COLLATE \"C\"";

/// Looks whether a table can be guarded as the specification says.
///
/// # Errors
/// [`Error::Invalid`] or [`Error::Unsupported`] with what is in the way, and what to do.
pub async fn find(client: &mut Client, spec: &TableGuardSpec) -> Result<GuardedTable> {
    let client = &client.transaction().await.map_err(|e| to_error(&e, false))?;
    // The name means what it means in this session. After that, no function of another role is to be found.
    let rows =
        client.query_typed(RESOLVE, &[(&spec.table, Type::TEXT)]).await.map_err(|e| to_error(&e, false))?;
    let oid: Option<u32> = rows.first().map(|row| get(row, 0)).transpose()?.flatten();
    own_path(client).await?;
    let rows = client.query_typed(TABLE, &[(&oid, Type::OID)]).await.map_err(|e| to_error(&e, false))?;
    let Some(found) = rows.first() else {
        return Err(Error::invalid(format!(
            "there is no table {}: name it as in SQL, with its schema",
            spec.table
        )));
    };
    let (oid, table): (u32, String) = (get(found, 0)?, get(found, 1)?);
    check(&table, &get::<String>(found, 2)?, get(found, 3)?, get(found, 4)?)?;
    let column = column(client, oid, &table, &spec.column).await?;
    let mut wanted = Vec::new();
    for part in &spec.key {
        wanted.push(quoted(client, oid, &table, part).await?.0);
    }
    wanted.sort();
    wanted.dedup();
    let rows = client.query_typed(KEYS, &[(&oid, Type::OID)]).await.map_err(|e| to_error(&e, false))?;
    for row in &rows {
        let (primary, mut columns): (bool, Vec<String>) = (get(row, 0)?, get(row, 2)?);
        columns.sort();
        if if wanted.is_empty() { primary } else { columns == wanted } {
            fit(client, get(row, 1)?, &table).await?;
            let key = key_columns(client, get(row, 1)?).await?;
            let Registered { name, function, .. } = place(client, oid, &table).await?;
            return Ok(GuardedTable {
                table,
                column,
                key,
                allow_unfenced: spec.allow_unfenced,
                name,
                function,
            });
        }
    }
    Err(Error::invalid(match wanted.is_empty() {
        true => format!("{table} has no primary key: say with --key which unique columns name a row"),
        false => format!(
            "{} is not unique in {table}: the mark of a deleted row is kept by its key",
            wanted.join(", ")
        ),
    }))
}

async fn key_columns(client: &Transaction<'_>, index: u32) -> Result<Vec<KeyColumn>> {
    let rows = client.query_typed(KINDS, &[(&index, Type::OID)]).await.map_err(|e| to_error(&e, false))?;
    let each = rows.iter().map(|row| {
        let kind = match &*get::<String>(row, 1)? {
            "e" => KeyKind::Enum,
            "d" => KeyKind::Domain(get(row, 2)?),
            _ => KeyKind::BuiltIn(get(row, 2)?),
        };
        Ok(KeyColumn { name: get(row, 0)?, kind })
    });
    each.collect()
}

/// The mark of a deleted row is found by its key as text: values that are equal must have one text.
async fn fit(client: &Transaction<'_>, index: u32, table: &str) -> Result<()> {
    let rows = client.query_typed(UNFIT, &[(&index, Type::OID)]).await.map_err(|e| to_error(&e, false))?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (column, kind): (String, String) = (get(row, 0)?, get(row, 1)?);
    let why = match &*get::<String>(row, 2)? {
        "generated" => "is generated, and a trigger before the row does not see its value".to_owned(),
        "collation" => "has a collation that takes different texts for equal".to_owned(),
        _ => format!("is of type {kind}, whose equal values can have different texts"),
    };
    Err(Error::Unsupported(format!(
        "{column} of {table} {why}: say with --key which other unique columns name a row, \
         or guard the rows with Fences::apply in your transactions"
    )))
}

fn check(table: &str, kind: &str, inherits: bool, passing: bool) -> Result<()> {
    let why = match kind {
        "p" => "is partitioned: guard the rows with Fences::apply in your transactions instead",
        "r" if inherits => "inherits, or is inherited from: a trigger would not see all of its rows",
        "r" if passing => "is temporary, or belongs to the system",
        "r" => return Ok(()),
        _ => "is no plain table",
    };
    Err(Error::Unsupported(format!("{table} {why}")))
}

async fn column(client: &Transaction<'_>, oid: u32, table: &str, name: &str) -> Result<String> {
    let add = |quoted: &str| format!("ALTER TABLE {table} ADD COLUMN {quoted} bigint NOT NULL DEFAULT 0;");
    let (column, kind, made) = match quoted(client, oid, table, name).await {
        Err(Error::Invalid(text)) => {
            let name: Option<String> = one(client, "SELECT quote_ident($1)", name).await?;
            let next = add(&name.unwrap_or_default());
            return Err(Error::invalid(format!("{text}. Make it first: {next}")));
        }
        other => other?,
    };
    if kind != "bigint" || made {
        return Err(Error::invalid(format!(
            "{column} of {table} is to be a plain bigint: fences go up to 2^53"
        )));
    }
    Ok(column)
}

/// A column's name, quoted; its type; and whether the database makes its values.
async fn quoted(
    client: &Transaction<'_>,
    oid: u32,
    table: &str,
    name: &str,
) -> Result<(String, String, bool)> {
    let rows = client.query_typed(COLUMN, &[(&oid, Type::OID), (&name, Type::TEXT)]).await;
    let rows = rows.map_err(|e| to_error(&e, false))?;
    let Some(row) = rows.first() else {
        return Err(Error::invalid(format!("{table} has no column {name:?}")));
    };
    let made = !get::<String>(row, 2)?.is_empty() || !get::<String>(row, 3)?.is_empty();
    Ok((get(row, 0)?, get(row, 1)?, made))
}

pub(super) fn get<T: tokio_postgres::types::FromSqlOwned>(row: &Row, at: usize) -> Result<T> {
    row.try_get(at)
        .map_err(|e| Error::Unavailable(format!("PostgreSQL gave an answer that makes no sense: {e}")))
}
