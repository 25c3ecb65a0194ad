//! The job table as the catalogue of the database knows it: its name, its primary key, and whether it has our columns.

use lockkeeper_core::{Error, Result};
use lockkeeper_postgres::tokio_postgres::types::{FromSqlOwned, Type};
use lockkeeper_postgres::tokio_postgres::{Client, Row, Transaction};

use super::connection::JobParameter;
use super::error::{to_error, unexpected};

/// The columns that `install` adds. Each has its meaning in docs/jobs.md.
pub(super) const COLUMNS: [&str; 6] =
    ["lk_state", "lk_run_at", "lk_fence", "lk_attempts", "lk_holder", "lk_error"];
/// The comment of `lk_state`, by which the columns are known to be ours. Raise the number with every change that older
/// programs would get wrong.
pub(super) const MARK: &str = "lockkeeper jobs, format 1";

/// A table of jobs. All names in it come from the catalogue of the database, and are quoted by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobTable {
    /// `schema.table`, quoted where that is needed.
    pub table: String,
    /// The columns of the primary key, in order, with their types.
    pub(super) key: Vec<JobKeyColumn>,
    /// Whether the table has the columns that [`super::install`] adds.
    pub installed: bool,
}

/// A column of the primary key, quoted, and its type as SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JobKeyColumn {
    pub name: String,
    pub kind: String,
}

const RESOLVE: &str = "SELECT pg_catalog.to_regclass($1)::pg_catalog.oid";
const TABLE: &str = "SELECT c.oid, quote_ident(n.nspname) || '.' || quote_ident(c.relname), c.relkind::text, \
    EXISTS (SELECT FROM pg_inherits i WHERE c.oid IN (i.inhparent, i.inhrelid)), \
    n.nspname LIKE 'pg\\_%' OR n.nspname = 'information_schema' OR c.relpersistence = 't' \
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1";
/// The columns of the primary key; and whether a value of the type is found again by its text.
const KEY: &str = "SELECT quote_ident(a.attname), format_type(a.atttypid, a.atttypmod), t.typtype = 'e' OR \
    coalesce(nullif(t.typbasetype, 0), t.oid) = ANY ('{int2,int4,int8,numeric,oid,bool,uuid,text,varchar,bpchar,name,date,timestamp,\
    timestamptz}'::regtype[]::oid[]) FROM pg_index i CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, at) \
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum JOIN pg_type t ON t.oid = a.atttypid \
    WHERE i.indrelid = $1 AND i.indisprimary AND k.at <= i.indnkeyatts ORDER BY k.at";
/// The job columns that the table has, and the comment of the first.
const OURS: &str = "SELECT count(*), max(CASE a.attname WHEN 'lk_state' THEN col_description(a.attrelid, a.attnum) END) \
    FROM pg_attribute a WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped AND a.attname = ANY ($2)";

impl JobTable {
    /// Looks the table up. `name` is a name as in SQL: `jobs`, `shop.jobs`, `"Jobs"`.
    ///
    /// # Errors
    /// [`Error::Invalid`] or [`Error::Unsupported`] with what is in the way, and what to do.
    pub async fn find(client: &mut Client, name: &str) -> Result<JobTable> {
        let tx = client.transaction().await.map_err(|e| to_error(&e, false))?;
        // The name means what it means in this session. After that, no function of another role is to be found.
        let oid: Option<u32> = match rows(&tx, RESOLVE, &[(&name, Type::TEXT)]).await?.first() {
            Some(row) => get(row, 0)?,
            None => None,
        };
        let own_path = "SET LOCAL search_path = pg_catalog, pg_temp";
        tx.batch_execute(own_path).await.map_err(|e| to_error(&e, false))?;
        let found = rows(&tx, TABLE, &[(&oid, Type::OID)]).await?;
        let Some(found) = found.first() else {
            return Err(Error::invalid(format!(
                "there is no table {name}: name it as in SQL, with its schema"
            )));
        };
        let (oid, table): (u32, String) = (get(found, 0)?, get(found, 1)?);
        check(&table, &get::<String>(found, 2)?, get(found, 3)?, get(found, 4)?)?;
        let key = key(&tx, oid, &table).await?;
        let names: Vec<&str> = COLUMNS.to_vec();
        let ours = rows(&tx, OURS, &[(&oid, Type::OID), (&names, Type::TEXT_ARRAY)]).await?;
        let row = ours.first().ok_or_else(|| unexpected("no row"))?;
        let installed = installed(&table, get(row, 0)?, get(row, 1)?)?;
        Ok(JobTable { table, key, installed })
    }

    /// The columns of the primary key, quoted where that is needed.
    pub fn key_columns(&self) -> Vec<&str> {
        self.key.iter().map(|column| &*column.name).collect()
    }

    /// The values of a key, from the text that [`super::TakenJob::key`] returns.
    pub(super) fn parse_key(&self, text: &str) -> Result<Vec<String>> {
        if self.key.len() == 1 {
            return Ok(vec![text.to_owned()]);
        }
        let values: Option<Vec<String>> = serde_json::from_str(text).ok();
        values.filter(|values| values.len() == self.key.len()).ok_or_else(|| {
            Error::invalid(format!(
                "{text:?} is no key of {}: it is a JSON array of the texts of {}",
                self.table,
                self.key_columns().join(", ")
            ))
        })
    }

    /// A key as one text: the value itself, or a JSON array if the key has several columns.
    pub(super) fn show_key(&self, values: &[String]) -> String {
        match values {
            [one] => one.clone(),
            all => serde_json::to_string(all).expect("texts are JSON"),
        }
    }
}

fn check(table: &str, kind: &str, inherits: bool, passing: bool) -> Result<()> {
    let why = match kind {
        "p" => "is partitioned",
        "r" if inherits => "inherits, or is inherited from",
        "r" if passing => "is temporary, or belongs to the system",
        "r" => return Ok(()),
        _ => "is no plain table",
    };
    Err(Error::Unsupported(format!("{table} {why}: keep the jobs in a plain table of their own")))
}

async fn key(tx: &Transaction<'_>, oid: u32, table: &str) -> Result<Vec<JobKeyColumn>> {
    let (mut key, all) = (Vec::new(), rows(tx, KEY, &[(&oid, Type::OID)]).await?);
    for row in &all {
        let column = JobKeyColumn { name: get(row, 0)?, kind: get(row, 1)? };
        if !get::<bool>(row, 2)? {
            return Err(Error::Unsupported(format!(
                "{} of {table} is of type {}: a key is of numbers, texts, uuids, enums, dates and times",
                column.name, column.kind
            )));
        }
        key.push(column);
    }
    if key.is_empty() {
        return Err(Error::invalid(format!("{table} has no primary key: a job is named by it")));
    }
    Ok(key)
}

/// Whether our columns are there: all of them, or none.
fn installed(table: &str, count: i64, mark: Option<String>) -> Result<bool> {
    match (count, mark) {
        (0, _) => Ok(false),
        (6, Some(mark)) if mark == MARK => Ok(true),
        (_, Some(mark)) if mark.starts_with("lockkeeper jobs, format") => Err(Error::Unsupported(format!(
            "the columns of {table} are of {mark:?}, and this program knows format 1: upgrade this program"
        ))),
        _ => Err(Error::invalid(format!(
            "{table} has columns that begin with lk_ and are not lockkeeper's: rename or drop them ({})",
            COLUMNS.join(", ")
        ))),
    }
}

async fn rows(tx: &Transaction<'_>, sql: &str, parameters: &[JobParameter<'_>]) -> Result<Vec<Row>> {
    tx.query_typed(sql, parameters).await.map_err(|e| to_error(&e, false))
}

pub(super) fn get<T: FromSqlOwned>(row: &Row, at: usize) -> Result<T> {
    row.try_get(at).map_err(unexpected)
}
