//! Values in a guarded PostgreSQL table, for the trait [`crate::Fenced`].

use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_core::{Fence, Result};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::error::to_error;
use super::fences::{Fences, mark, text};
use crate::sql::parameter;
use crate::{Fenced, GuardedValue, verdict};

/// Small values in a table, each with its mark: for those who have no table of their own.
#[derive(Clone)]
pub struct PostgresFenced {
    client: Arc<Client>,
    fences: Fences,
    put: String,
    read: String,
}

impl PostgresFenced {
    /// The values in the table of `fences`, over this connection. Call [`Fences::install`] once before.
    pub fn new(client: impl Into<Arc<Client>>, fences: Fences) -> Self {
        let table = fences.name();
        let put = format!(
            "INSERT INTO {table} AS f (resource, fence, value) VALUES ($1, $2, $3) ON CONFLICT (resource) DO UPDATE SET \
             value = CASE WHEN excluded.fence >= f.fence THEN excluded.value ELSE f.value END, \
             fence = greatest(f.fence, excluded.fence) RETURNING f.fence"
        );
        let read = format!("SELECT fence, value FROM {table} WHERE resource = $1");
        PostgresFenced { client: client.into(), put, read, fences }
    }

    async fn write(&self, resource: &str, fence: Fence, value: Option<&[u8]>) -> Result<()> {
        let (resource, number) = (text(resource)?, parameter(fence));
        let params: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] =
            [(&resource, Type::TEXT), (&number, Type::INT8), (&value, Type::BYTEA)];
        let rows = self.client.query_typed(&self.put, &params).await;
        let rows = rows.map_err(|e| self.fences.missing(to_error(&e, true)))?;
        verdict("postgres", fence, mark(&rows)?)
    }
}

#[async_trait]
impl Fenced for PostgresFenced {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        self.write(resource, fence, Some(value)).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.write(resource, fence, None).await
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let rows = self.client.query_typed(&self.read, &[(&text(resource)?, Type::TEXT)]).await;
        let rows = rows.map_err(|e| self.fences.missing(to_error(&e, false)))?;
        let Some(row) = rows.first() else { return Ok(None) };
        let value = row.try_get(1).map_err(|e| to_error(&e, false))?;
        Ok(Some(GuardedValue { fence: mark(&rows)?, value }))
    }
}
