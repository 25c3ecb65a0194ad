//! Finds the process that holds a lock now, in the history that the clients are writing.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use lockkeeper_host::{Clock, SystemClock};

use super::traffic::history_path;
use crate::history::{HistoryEvent, Operation, OperationPhase};

/// How much of the history is read: a hold of a few seconds is in there.
const TAIL: u64 = 512 << 10;

/// Waits for a hold of `lock` whose age is in this range, and returns the process that has it; `None` if there is none for so long.
pub(super) fn find_holder(
    dir: &Path,
    lock: &str,
    age: Range<Duration>,
    patience: Duration,
) -> io::Result<Option<String>> {
    let end = Instant::now() + patience;
    loop {
        if let Some((proc, since)) = holder(dir, lock)?
            && age.contains(&Duration::from_nanos(SystemClock.now().as_nanos().saturating_sub(since)))
        {
            return Ok(Some(proc));
        }
        if Instant::now() > end {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn holder(dir: &Path, lock: &str) -> io::Result<Option<(String, u64)>> {
    let mut file = match File::open(history_path(dir)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut open: HashMap<(String, String), (u64, u64)> = HashMap::new();
    // The first line and the last one may be cut.
    for event in text.lines().filter_map(|line| serde_json::from_str::<HistoryEvent>(line).ok()) {
        let (true, Some(attempt)) = (event.lock == lock, event.attempt) else { continue };
        let key = (event.proc, attempt);
        match (event.op, event.phase) {
            (Operation::Acquire, OperationPhase::Ok) => {
                _ = open.insert(key, (event.t, event.deadline.unwrap_or(u64::MAX)))
            }
            (Operation::Renew, OperationPhase::Ok) => {
                open.entry(key).and_modify(|hold| hold.1 = event.deadline.unwrap_or(hold.1));
            }
            (Operation::Release, OperationPhase::Invoke) | (Operation::Signal, _) => _ = open.remove(&key),
            _ => {}
        }
    }
    let now = SystemClock.now().as_nanos();
    let valid = open.into_iter().filter(|(_, (_, deadline))| *deadline > now);
    Ok(valid.max_by_key(|(_, (since, _))| *since).map(|((proc, _), (since, _))| (proc, since)))
}
