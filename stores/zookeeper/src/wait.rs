//! Standing in line: what is worth waiting for.

use std::future::pending;
use std::pin::Pin;
use std::time::Duration;

use futures_util::future::select_all;
use lockkeeper_core::Mode;

use crate::acquire::{Asking, PAUSE};
use crate::judge;
use crate::line::Line;
use crate::link::Session;

type News<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl Asking<'_> {
    /// Waits until something happened that may let this one in: as a rule the end of the one before it.
    pub async fn news(&self, lines: &[Line]) {
        let Some(session) = &self.session else { return };
        let worth = self.worth_watching(session, lines);
        if worth.is_empty() {
            // Nobody is in the way any more.
            return;
        }
        // Whatever it is: the line is looked at again.
        select_all(worth).await;
    }

    fn worth_watching<'a>(&'a self, session: &'a Session, lines: &'a [Line]) -> Vec<News<'a>> {
        let mut worth: Vec<News<'a>> = Vec::new();
        for back in lines.iter().flat_map(|line| &line.backs) {
            worth.push(Box::pin(changes(session, &back.path, None)));
            worth.push(Box::pin(tokio::time::sleep(Duration::from_millis(back.left + 1))));
        }
        let before = lines
            .iter()
            .zip(&self.own)
            .filter_map(|(line, own)| Some((line, judge::awaited(self.ask.mode, line, own)?)));
        // Who wants to be alone waits for everybody, so for one after the other. Where several may hold, the one before need not
        // be in the way at all, and then somebody in another line is.
        let lines_at_once = if self.ask.mode == Mode::Exclusive { 1 } else { usize::MAX };
        for (line, before) in before.take(lines_at_once) {
            let counted = matches!(self.ask.mode, Mode::Permit(_));
            worth.push(if counted && line.holds(before) {
                // The first in line for a permit: any of those who hold one may be the next to let go.
                Box::pin(self.line_changes(session, line))
            } else if judge::may_share(self.ask.mode, before) {
                Box::pin(changes(session, &before.path, before.written()))
            } else {
                Box::pin(ends(session, &before.path))
            });
        }
        // An ask of the same owner that is served lets this one in, past the line.
        if let Some(owner) = self.ask.owner.as_ref().map(crate::layout::owner_mark) {
            let siblings = lines.iter().flat_map(|line| &line.all).filter(|one| one.owner() == Some(owner));
            let siblings = siblings.filter(|one| !self.own.contains(&one.path));
            worth.extend(
                siblings.take(8).map(|one| Box::pin(changes(session, &one.path, one.written())) as News<'a>),
            );
        }
        worth
    }

    async fn line_changes(&self, session: &Session, line: &Line) {
        let dir = self.shared.layout.line(&line.name);
        let Some(_room) = session.room_to_watch(&dir) else { return pending().await };
        match session.hear(session.client.get_and_watch_children(&dir)).await {
            // What happened between the look and this is seen at once.
            Ok((_, stat, watcher)) if stat.pzxid == line.changed => _ = watcher.changed().await,
            Ok(_) => {}
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Waits for the end of a node, and for nothing else. A node in line has no nodes below it: so the watch for those tells
/// only of its end, and not of its being granted.
async fn ends(session: &Session, path: &str) {
    let Some(_room) = session.room_to_watch(path) else { return pending().await };
    match session.hear(session.client.list_and_watch_children(path)).await {
        Ok((_, watcher)) => _ = watcher.changed().await,
        Err(failure) if failure.is(&zookeeper_client::Error::NoNode) => {}
        Err(_) => tokio::time::sleep(PAUSE).await,
    }
}

/// Waits for the end of a node, or for another write of it than `seen`, the one that was judged. A write between that read and this
/// watch is found in the answer: the watch does not report it.
async fn changes(session: &Session, path: &str, seen: Option<i64>) {
    let Some(_room) = session.room_to_watch(path) else { return pending().await };
    match session.hear(session.client.get_and_watch_data(path)).await {
        Ok((_, stat, _)) if seen.is_some_and(|seen| seen != stat.mzxid) => {}
        Ok((_, _, watcher)) => _ = watcher.changed().await,
        Err(failure) if failure.is(&zookeeper_client::Error::NoNode) => {}
        Err(_) => tokio::time::sleep(PAUSE).await,
    }
}
