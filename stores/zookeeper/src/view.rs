//! What others may see of the locks.

use futures_util::future::join_all;
use lockkeeper_core::{LockName, LockPage, LockView, Page, Result};

use crate::fault::Failure;
use crate::layout;
use crate::line::{Line, One};
use crate::link::Session;
use crate::store::Shared;

/// How many lines are looked at together.
const TOGETHER: usize = 64;

impl Shared {
    pub async fn view(&self, name: &LockName) -> Result<Option<LockView>> {
        let session = self.link.session().await?;
        self.fresh_base(&session).await?;
        Ok(self.view_at(&session, name).await?)
    }

    /// What is shown is of now, and made with the base as it is now.
    async fn fresh_base(&self, session: &Session) -> Result<(), Failure> {
        let base = self.layout.base(self.base().number);
        let (caught_up, found) = tokio::join!(session.catch_up(), session.get(&base));
        caught_up?;
        match found {
            Ok(_) => Ok(()),
            Err(failure) if failure.is(&zookeeper_client::Error::NoNode) => {
                self.learn_base(session, false).await
            }
            Err(failure) => Err(failure),
        }
    }

    async fn view_at(&self, session: &Session, name: &LockName) -> Result<Option<LockView>, Failure> {
        let mut line = self.list(session, name).await?;
        // Those at its beginning, those that may have passed the line, and as many as are shown.
        self.read(session, &mut line, |i, one| i <= LockView::LINE || one.owned).await?;
        self.read_backs(session, &mut line).await?;
        Ok(self.show(&line))
    }

    fn show(&self, line: &Line) -> Option<LockView> {
        let base = self.base().number;
        let mut held: Vec<_> = line.holders().map(|one| one.held(base)).collect();
        held.extend(line.backs.iter().filter_map(|back| back.held()));
        let delayed = line.backs.iter().filter(|back| !back.lingers()).map(|back| back.left.max(1)).max();
        let waiting = line.waiters().count();
        let queue: Vec<_> = line.waiters().take(LockView::LINE).map(One::queued).collect();
        let nothing = held.is_empty() && waiting == 0 && delayed.is_none();
        let name = line.name.clone();
        (!nothing).then_some(LockView { name, held, line: queue, waiting, delayed_ms: delayed })
    }

    pub async fn page(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let session = self.link.session().await?;
        self.fresh_base(&session).await?;
        let found = Failure::gone(session.children(self.layout.root()).await)?;
        let children = found.map_or(Vec::new(), |(children, _)| children);
        let mut names: Vec<LockName> = children.iter().filter_map(|child| layout::decode(child)).collect();
        names.retain(|name| {
            name.as_str().starts_with(prefix) && page.after.as_ref().is_none_or(|after| name > after)
        });
        names.sort();
        let mut locks: Vec<LockView> = Vec::new();
        // Nodes of lines that are empty stay for a while: they are no locks.
        for some in names.chunks(TOGETHER) {
            for view in join_all(some.iter().map(|name| self.view_at(&session, name))).await {
                locks.extend(view?);
            }
            if locks.len() > page.size() {
                break;
            }
        }
        let more = locks.len() > page.size();
        locks.truncate(page.size());
        let next = if more { locks.last().map(|view| view.name.clone()) } else { None };
        Ok(LockPage { locks, next })
    }
}
