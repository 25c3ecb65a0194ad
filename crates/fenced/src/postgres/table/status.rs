use lockkeeper_core::Result;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Transaction};

use super::find::get;
use super::{one, own_path};
use crate::postgres::fault::fault;

/// Whether a table is really guarded now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is.
    On,
    /// Somebody has disabled or dropped a trigger: nothing is checked.
    Off,
    /// The table is gone.
    Gone,
}

/// One guarded table.
#[derive(Clone, Debug)]
pub struct Status {
    /// `schema.table` as it is called now, quoted where that is needed.
    pub table: String,
    /// The column of the fence.
    pub column: String,
    /// The columns that name a row.
    pub key: String,
    /// Whether UPDATE and DELETE without any fence are let through.
    pub allow_unfenced: bool,
    /// Whether it is guarded now.
    pub state: State,
    /// How many deleted rows have left their mark.
    pub marks: i64,
}

/// All tables of this database that were guarded.
///
/// # Errors
/// [`lockkeeper_core::Error::Denied`] or [`lockkeeper_core::Error::Unavailable`].
pub async fn status(client: &mut Client) -> Result<Vec<Status>> {
    let client = &client.transaction().await.map_err(|e| fault(&e, false))?;
    own_path(client).await?;
    if !is_there(client).await? {
        return Ok(Vec::new());
    }
    // By its triggers, a table is found also under another name. `to_regclass` would want rights on every schema.
    let sql = "SELECT coalesce(now.name, g.name), fence_column, g.key, allow_unfenced, now.name IS NOT NULL OR EXISTS (SELECT FROM pg_class c \
        JOIN pg_namespace n ON n.oid = c.relnamespace WHERE quote_ident(n.nspname) || '.' || quote_ident(c.relname) = g.name), \
        coalesce(now.triggers, 0) = 4, (SELECT count(*) FROM lockkeeper_fence.mark m WHERE m.guarded = g.name) \
        FROM lockkeeper_fence.guarded g LEFT JOIN LATERAL (SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS name, \
        count(*) FILTER (WHERE t.tgenabled IN ('O', 'A')) AS triggers FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid \
        JOIN pg_namespace s ON s.oid = p.pronamespace JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
        WHERE s.nspname = 'lockkeeper_fence' AND p.proname = g.function GROUP BY 1) now ON true ORDER BY 1";
    let rows = client.query_typed(sql, &[]).await.map_err(|e| fault(&e, false))?;
    let each = rows.iter().map(|row| {
        let state = match (get(row, 4)?, get(row, 5)?) {
            (false, _) => State::Gone,
            (true, false) => State::Off,
            (true, true) => State::On,
        };
        Ok(Status {
            table: get(row, 0)?,
            column: get(row, 1)?,
            key: get(row, 2)?,
            allow_unfenced: get(row, 3)?,
            state,
            marks: get(row, 6)?,
        })
    });
    each.collect()
}

async fn is_there(client: &Transaction<'_>) -> Result<bool> {
    let sql = "SELECT pg_catalog.to_regclass($1) IS NOT NULL";
    Ok(one(client, sql, "lockkeeper_fence.guarded").await? == Some(true))
}

/// The name under which a table was guarded. One that is gone is found by the name that `status` shows.
pub(super) async fn registered(client: &mut Client, table: &str) -> Result<Option<String>> {
    let client = &client.transaction().await.map_err(|e| fault(&e, false))?;
    if !is_there(client).await? {
        return Ok(None);
    }
    let oid: Option<u32> = one(client, "SELECT pg_catalog.to_regclass($1)::pg_catalog.oid", table).await?;
    own_path(client).await?;
    let sql = "SELECT g.name FROM lockkeeper_fence.guarded g WHERE g.name = $1 OR g.function IN (SELECT p.proname FROM pg_trigger t \
        JOIN pg_proc p ON p.oid = t.tgfoid WHERE t.tgrelid = $2) OR g.name = (SELECT quote_ident(n.nspname) || '.' || \
        quote_ident(c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $2) \
        ORDER BY g.name = $1 DESC LIMIT 1";
    let rows = client.query_typed(sql, &[(&table, Type::TEXT), (&oid, Type::OID)]).await;
    rows.map_err(|e| fault(&e, false))?.first().map(|row| get(row, 0)).transpose()
}
