//! Which table is guarded under which name: a table keeps its function and its marks under whatever name it has later.

use lockkeeper_core::{Error, Result};
use tokio_postgres::{Client, Transaction};

use super::find::get;
use super::{one, own_path, script};
use crate::postgres::error::to_error;

/// One entry, and a table that has its function in a trigger now.
#[derive(Clone, Debug)]
pub(super) struct Registered {
    pub name: String,
    pub function: String,
    pub table: Option<u32>,
}

/// Whether each of our tables is a plain one, with types of PostgreSQL itself: reading anything else could run code of the role that made it.
const PLAIN: &str = "SELECT bool_and(c.relkind = 'r' AND NOT c.relrowsecurity AND NOT EXISTS (SELECT FROM pg_attribute a WHERE \
    a.attrelid = c.oid AND a.atttypid >= 16384)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
    WHERE n.nspname = $1 AND c.relname IN ('guarded', 'mark')";

const ALL: &str = "SELECT g.name, g.function, t.tgrelid FROM ONLY lockkeeper_fence.guarded g LEFT JOIN (SELECT DISTINCT t.tgrelid, p.proname \
    FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace s ON s.oid = p.pronamespace \
    WHERE s.nspname = 'lockkeeper_fence') t ON t.proname = g.function ORDER BY g.name, t.tgrelid";

/// Whether any table is guarded in this database. The transaction must have [`own_path`].
pub(super) async fn is_there(client: &Transaction<'_>) -> Result<bool> {
    match one::<bool>(client, PLAIN, "lockkeeper_fence").await? {
        Some(false) => {
            Err(Error::Denied("the tables in the schema lockkeeper_fence are not those of lockkeeper".into()))
        }
        plain => Ok(plain.is_some()),
    }
}

async fn all(client: &Transaction<'_>) -> Result<Vec<Registered>> {
    if !is_there(client).await? {
        return Ok(Vec::new());
    }
    let rows = client.query_typed(ALL, &[]).await.map_err(|e| to_error(&e, false))?;
    let each = rows
        .iter()
        .map(|row| Ok(Registered { name: get(row, 0)?, function: get(row, 1)?, table: get(row, 2)? }));
    each.collect()
}

/// Where a table is registered, or is to be.
pub(super) async fn place(client: &Transaction<'_>, oid: u32, table: &str) -> Result<Registered> {
    let all = all(client).await?;
    if let Some(own) = all.iter().find(|one| one.table == Some(oid)) {
        if all.iter().any(|one| one.name == own.name && one.table != own.table) {
            return Err(Error::invalid(format!(
                "{table} shares its marks with another table, which took its name before: uninstall both, and install both again"
            )));
        }
        return Ok(own.clone());
    }
    // The first name that no other table has: a name by itself, then with a number, which no quoted name ends with.
    let names = (1u64..).map(|n| if n == 1 { table.to_owned() } else { format!("{table} ({n})") });
    let mut free = names.filter(|name| !all.iter().any(|one| one.name == *name && one.table.is_some()));
    let name = free.next().expect("one is free");
    let function = script::function(&name);
    Ok(Registered { name, function, table: None })
}

/// The entry of a table. One that is gone is found by the name that `status` shows.
pub(super) async fn registered(client: &mut Client, table: &str) -> Result<Option<Registered>> {
    const RESOLVE: &str = "SELECT pg_catalog.to_regclass($1)::pg_catalog.oid";
    const NAME: &str = "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_class c \
        JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid::text = $1";
    let client = &client.transaction().await.map_err(|e| to_error(&e, false))?;
    // Not the name of a table, but of an entry whose table is gone.
    let numbered = table.ends_with(')');
    let oid: Option<u32> = if numbered { None } else { one(client, RESOLVE, table).await? };
    own_path(client).await?;
    let all = all(client).await?;
    if let Some(own) = all.iter().find(|one| oid.is_some() && one.table == oid) {
        return Ok(Some(own.clone()));
    }
    let name: Option<String> = match oid {
        Some(oid) => one(client, NAME, &oid.to_string()).await?,
        None => None,
    };
    let gone = all.into_iter().filter(|one| one.table.is_none());
    let mut named = gone.filter(|one| one.name == table || Some(&one.name) == name.as_ref());
    Ok(named.next())
}
