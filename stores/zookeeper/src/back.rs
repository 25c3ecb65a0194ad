//! What holds a lock back after its holder is gone: the rest of a minimum hold, a lock-delay, and the rest of a ttl that is
//! longer than the session lasts. It is a node that stays when the session ends. Whoever sees it waits for its time on a clock of its own. Who
//! comes when that should be over asks the ensemble: the time of the node's last write, against that of our own writes. But one server that
//! leads may have another time than the one before, so that counts only when it is over by far.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::Moment;
use zookeeper_client as zk;

use crate::entry::{Entry, Kind, Note, millis};
use crate::fault::Failure;
use crate::line::{Back, Line};
use crate::link::Session;
use crate::store::Shared;

/// How far the clocks of servers that lead one after the other may be apart, in milliseconds.
const APART: u64 = 10_000;
/// How many notes are remembered before those that are over are forgotten.
const MANY: usize = 1024;

/// When a note was seen for the first time: its path, which write of it, and until when it holds the lock back.
#[derive(Default)]
pub struct Sights(Mutex<HashMap<(String, i64), Moment>>);

impl Sights {
    /// For how much longer a note holds the lock back, on our own clock.
    fn left(&self, path: &str, zxid: i64, ms: u64, now: Moment) -> u64 {
        let mut sights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sights.len() >= MANY {
            sights.retain(|_, until| *until > now);
        }
        let until = *sights.entry((path.to_owned(), zxid)).or_insert(now + Duration::from_millis(ms));
        u64::try_from(until.since(now).as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
    }
}

/// The note of a grant, if it needs one: for how long the lock is to be held back when the session of its holder ends. A guard
/// believes for its whole ttl, and the session may end before that.
pub fn note_of(session: &Session, entry: &Entry) -> Option<Vec<u8>> {
    let rest = entry.ttl_ms.saturating_sub(millis(session.lasts()));
    (rest > 0 || entry.lock_delay_ms > 0).then(|| Note::of_lease(entry, rest))
}

impl Shared {
    /// Looks at the notes whose holders are gone. What is over is removed; what nobody has noticed before counts from now.
    pub async fn read_backs(&self, session: &Session, line: &mut Line) -> Result<(), Failure> {
        if line.orphans.is_empty() {
            return Ok(());
        }
        let time = self.ensemble_time(session).await?;
        let orphans = std::mem::take(&mut line.orphans);
        let reads = orphans.into_iter().map(|(path, _)| async move {
            let Some((data, stat)) = Failure::gone(session.get(&path).await)? else { return Ok(None) };
            let note: Option<Note> = serde_json::from_slice(&data).ok();
            let ms = note.as_ref().map_or(0, |note| note.ms);
            if note.as_ref().is_some_and(|note| note.kind == Kind::Held) {
                let note = note.map(|note| Note { kind: Kind::Delayed, ..note });
                let data = note.as_ref().map(|note| note.of_kind(Kind::Delayed)).unwrap_or_default();
                match session.set(&path, &data, stat.version).await {
                    Ok(stat) => {
                        self.link.heard(stat.mtime);
                        self.sights.left(&path, stat.mzxid, ms, self.clock.now());
                    }
                    Err(Failure::Refused(_, zk::Error::BadVersion | zk::Error::NoNode)) => {}
                    Err(failure) => return Err(failure),
                }
                return Ok(Some(Back { path, note, left: ms }));
            }
            let end = stat.mtime.unsigned_abs() + ms;
            let left = match note.as_ref().map(|note| note.kind) {
                // Its holder is done with the lock.
                Some(Kind::Lingering) | None => end.saturating_sub(time),
                _ => {
                    let seen = self.sights.left(&path, stat.mzxid, ms, self.clock.now());
                    seen.min((end + APART).saturating_sub(time))
                }
            };
            if left == 0 {
                // Whoever finds it first removes it; what was written anew stays.
                let gone = session.hear(session.client.delete(&path, Some(stat.version))).await;
                if !matches!(gone, Ok(()) | Err(Failure::Refused(..))) {
                    gone?;
                }
                return Ok(None);
            }
            Ok(Some(Back { path, note, left: left.min(ms) }))
        });
        for back in join_all(reads).await {
            line.backs.extend(back?);
        }
        Ok(())
    }

    /// Removes what holds a lock back by itself, when its time is over: somebody may wait who does not know how.
    pub fn remove_later(self: &std::sync::Arc<Self>, paths: Vec<String>, after: Duration) {
        let shared = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let Ok(session) = shared.link.session().await else { return };
            for path in paths {
                let Ok((data, stat)) = session.get(&path).await else { continue };
                let time = shared.link.tide().unwrap_or(0);
                let over = serde_json::from_slice::<Note>(&data)
                    .is_ok_and(|note| note.kind != Kind::Held && stat.mtime.unsigned_abs() + note.ms <= time);
                if over {
                    _ = session.hear(session.client.delete(&path, Some(stat.version))).await;
                }
            }
        });
    }
}
