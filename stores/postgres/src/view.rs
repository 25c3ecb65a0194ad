//! What others may see of the locks.

use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};

use crate::entry::{Shown, odd};
use crate::link::first;
use crate::script::{INSPECT, LIST};
use crate::store::Shared;

impl Shared {
    pub(crate) async fn view(&self, name: &LockName) -> Result<Option<LockView>> {
        let rows = self.link.rows(&INSPECT, &[&name.as_str(), &(LockView::LINE as i32)]).await?;
        Shown::read(&first::<String>(&rows, 0)?)?.view()
    }

    pub(crate) async fn page(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let mut after = page.after.as_ref().map_or("", LockName::as_str).to_owned();
        let (mut locks, size) = (Vec::new(), page.size());
        // What ended without a word has nothing to show: then one more step is needed to fill the page.
        loop {
            let wanted = (size + 1 - locks.len()) as i64;
            let rows = self.link.rows(&LIST, &[&prefix, &after, &wanted, &(LockView::LINE as i32)]).await?;
            let more = rows.len() as i64 == wanted;
            for row in &rows {
                let shown = Shown::read(row.try_get(0).map_err(|_| odd())?)?;
                after = shown.name().to_owned();
                locks.extend(shown.view()?);
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
}
