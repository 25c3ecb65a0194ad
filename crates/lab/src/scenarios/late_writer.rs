//! The choreography that several scenarios share: a holder is stopped before its write, and writes when it continues.

use std::fs;
use std::path::Path;

use lockkeeper::{Error, Fence, Result};
use lockkeeper_fenced::file::FencedFile;
use lockkeeper_testkit::resource::{CheckedFile, UncheckedFile};

use crate::event::{LabEvent, LabEventKind};
use crate::half::LabHalf;
use crate::lab::LabError;
use crate::worker::{LabWorker, unavailable};

/// The note of a holder that has just checked its lock.
pub const ABOUT_TO_WRITE: &str = "has checked the lock, and is about to write";
/// The lock of the story.
const LOCK: &str = "settlement";

/// A resource, by the way of a half.
pub const UNCHECKED: &str = "no check";
/// A resource that refuses a fence that is lower than one it has seen.
pub const CHECKED: &str = "fence check";
/// A plain file that each writer replaces.
pub const PLAIN_FILE: &str = "plain file";
/// The same file, replaced by `fenced-write`.
pub const FENCED_WRITE: &str = "fenced-write";

/// A worker of the choreography. "first" checks its lock, and writes when the director says so; "second" writes at once.
pub async fn work(mut worker: LabWorker) -> Result<()> {
    let keeper = worker.keeper().await?;
    let guard = worker.acquire(&keeper, LOCK).await?;
    if worker.plan.role == "first" {
        if !guard.is_held() {
            return Err(Error::Lost("before the pause".into()));
        }
        worker.note(ABOUT_TO_WRITE);
        worker.until("write").await;
        worker.figure("held_at_write", f64::from(u8::from(guard.is_held())));
        write(&worker, guard.fence())?;
        // The check that came too late: the guard knows it by its clock, in the first instruction after the pause.
        let lost = !guard.is_held();
        worker.figure("lost", f64::from(u8::from(lost)));
        worker.ends(LOCK, if lost { "finds that it has lost" } else { "leaves" });
        // Its store may be gone in some of the stories: the lease ends the hold.
        return Ok(());
    }
    write(&worker, guard.fence())?;
    worker.until("release").await;
    worker.release(guard, LOCK).await
}

fn write(worker: &LabWorker, fence: Fence) -> Result<()> {
    let text = worker.actor.clone();
    let path = worker.path("resource");
    // The name of a half ends with that of its resource.
    let is = |way: &str| worker.plan.way.ends_with(way);
    let answer = match () {
        () if is(CHECKED) => CheckedFile::new(path).write(fence, &text),
        () if is(PLAIN_FILE) => replace(&path, &text),
        () if is(FENCED_WRITE) => FencedFile::new(path).write_from(fence, text.as_bytes()).map(drop),
        () => UncheckedFile::new(path).write(fence, &text),
    };
    worker.wrote(&format!("written by {text}"), Some(fence), answer)
}

/// Replaces a file as careful programs do: a new file, renamed over the old one.
fn replace(path: &Path, text: &str) -> Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, text).and_then(|()| fs::rename(&new, path)).map_err(unavailable)
}

/// Directs both workers. The first one is stopped until the second one has written.
pub fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let (first, second) = ("worker A", "worker B");
    half.start(first, "first")?;
    half.expect_note(first, ABOUT_TO_WRITE)?;
    half.start(second, "second")?;
    half.expect_wait(second)?;
    half.beat()?;
    half.stop(first);
    let written = half.expect_write(second)?;
    half.beat()?;
    half.send(first, "write");
    half.resume(first);
    let late = half.expect_write(first)?;
    half.expect_end(first)?;
    half.beat()?;
    half.send(second, "release");
    half.expect_end(second)?;
    count(half, &written, &late);
    Ok(())
}

fn fence_of(event: &LabEvent) -> u64 {
    match event.kind {
        LabEventKind::Wrote { fence, .. } | LabEventKind::Refused { fence, .. } => fence.unwrap_or(0),
        _ => 0,
    }
}

/// Counts what the write of the first worker, who is late, did to the write of the second one.
pub fn count(half: &mut LabHalf, written: &LabEvent, late: &LabEvent) {
    let stale = matches!(late.kind, LabEventKind::Wrote { .. }) && fence_of(late) < fence_of(written);
    if stale {
        half.damage(late.t, "the late write replaced the newer one");
    }
    // The order of the events and of the fences: the second grant came while the first holder was stopped.
    let fired = fence_of(late) < fence_of(written) && written.t < late.t;
    let last = last_writer(half);
    half.harm("stale_writes", u8::from(stale), "stale {write|writes} that the resource took");
    half.count("refused", u8::from(!stale), "late {write|writes} that the resource refused");
    half.harm("wrong_value", u8::from(last != "worker B"), format!("wrong value at the end: by {last}"));
    half.evidence("fired", u8::from(fired));
    let lost = half.figures("lost").iter().sum::<f64>();
    half.evidence("late_check", lost);
}

/// The worker whose value the resource has at the end.
fn last_writer(half: &LabHalf) -> String {
    let text = fs::read_to_string(half.path("resource")).unwrap_or_default();
    let last = text.lines().last().unwrap_or_default();
    if last.contains("worker A") { "worker A".into() } else { "worker B".into() }
}
