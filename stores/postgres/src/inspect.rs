//! Views of locks, one by name or a page of them.

use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};

use crate::codec::{ViewJson, unexpected_reply};
use crate::connection::Connection;
use crate::session::first;
use crate::statements::{INSPECT, LIST};

pub(crate) async fn inspect(connection: &Connection, name: &LockName) -> Result<Option<LockView>> {
    let rows = connection.rows(&INSPECT, &[&name.as_str(), &(LockView::QUEUE_SHOWN as i32)]).await?;
    ViewJson::parse(&first::<String>(&rows, 0)?)?.into_view()
}

pub(crate) async fn list(connection: &Connection, prefix: &str, page: &Page) -> Result<LockPage> {
    let mut after = page.after.as_ref().map_or("", LockName::as_str).to_owned();
    let (mut locks, size) = (Vec::new(), page.size());
    // A row of an expired hold yields no view: then one more statement is needed to fill the page.
    loop {
        let wanted = (size + 1 - locks.len()) as i64;
        let rows =
            connection.rows(&LIST, &[&prefix, &after, &wanted, &(LockView::QUEUE_SHOWN as i32)]).await?;
        let more = rows.len() as i64 == wanted;
        for row in &rows {
            let view = ViewJson::parse(row.try_get(0).map_err(|_| unexpected_reply())?)?;
            after = view.name().to_owned();
            locks.extend(view.into_view()?);
        }
        if !more || locks.len() > size {
            break;
        }
    }
    let more = locks.len() > size;
    locks.truncate(size);
    let next = locks.last().filter(|_| more).map(|last| last.name.clone());
    Ok(LockPage { locks, next })
}
