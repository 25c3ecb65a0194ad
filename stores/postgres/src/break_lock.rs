//! Revoking and breaking a lock.

use lockkeeper_core::{Fence, LockName, Result};

use crate::codec;
use crate::connection::Connection;
use crate::session::first;
use crate::statements::{BREAK, REVOKE};

pub(crate) async fn revoke(connection: &Connection, name: &LockName, reason: &str) -> Result<Fence> {
    let rows = connection.rows(&REVOKE, &[&name.as_str(), &reason]).await?;
    codec::fence(first(&rows, 0)?)
}

pub(crate) async fn break_lock(connection: &Connection, name: &LockName, reason: &str) -> Result<Fence> {
    let rows = connection.rows(&BREAK, &[&name.as_str(), &reason]).await?;
    codec::fence(first(&rows, 0)?)
}
