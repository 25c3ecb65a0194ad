//! The status of a guarded table.

use lockkeeper_core::Result;
use tokio_postgres::Client;

use super::find::get;
use super::own_path;
use super::registry::is_there;
use crate::postgres::error::to_error;

/// Whether a table is really guarded now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TriggerState {
    /// It is.
    On,
    /// A trigger is disabled or dropped, or the table shares its marks with another: nothing, or not everything, is checked.
    Off,
    /// Other tables inherit from it: nothing checks their rows, which reading, UPDATE and DELETE of this table reach.
    Inherited,
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
    pub state: TriggerState,
    /// How many deleted rows have left their mark.
    pub marks: i64,
}

/// All tables of this database that were guarded.
///
/// # Errors
/// [`lockkeeper_core::Error::Denied`] or [`lockkeeper_core::Error::Unavailable`].
pub async fn status(client: &mut Client) -> Result<Vec<Status>> {
    let client = &client.transaction().await.map_err(|e| to_error(&e, false))?;
    own_path(client).await?;
    if !is_there(client).await? {
        return Ok(Vec::new());
    }
    // By its triggers, a table is found also under another name. `to_regclass` would want rights on every schema.
    let sql = "SELECT coalesce(now.name, g.name), fence_column, g.key, allow_unfenced, now.name IS NOT NULL OR EXISTS (SELECT FROM pg_class c \
        JOIN pg_namespace n ON n.oid = c.relnamespace WHERE quote_ident(n.nspname) || '.' || quote_ident(c.relname) = g.name), \
        coalesce(now.triggers, 0) = 4 AND count(*) OVER (PARTITION BY g.name) = 1, \
        (SELECT count(*) FROM ONLY lockkeeper_fence.mark m WHERE m.guarded = g.name), coalesce(now.heirs, false) \
        FROM ONLY lockkeeper_fence.guarded g LEFT JOIN LATERAL (SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS name, \
        count(*) FILTER (WHERE t.tgenabled IN ('O', 'A')) AS triggers, \
        bool_or(EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid)) AS heirs FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid \
        JOIN pg_namespace s ON s.oid = p.pronamespace JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
        WHERE s.nspname = 'lockkeeper_fence' AND p.proname = g.function GROUP BY 1) now ON true ORDER BY 1";
    let rows = client.query_typed(sql, &[]).await.map_err(|e| to_error(&e, false))?;
    let each = rows.iter().map(|row| {
        let state = match (get(row, 4)?, get(row, 5)?) {
            (false, _) => TriggerState::Gone,
            (true, false) => TriggerState::Off,
            (true, true) if get(row, 7)? => TriggerState::Inherited,
            (true, true) => TriggerState::On,
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
