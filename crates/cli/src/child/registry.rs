//! The children of this process, where several commands run at once: which change belongs to which command.
//!
//! The kernel reports a change of any child to any call of `wait`, so one place calls it and keeps what belongs to another command.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use lockkeeper_core::IgnorePoison;
use rustix::process::{Pid, WaitOptions, WaitStatus, wait};

/// The commands and watchdogs of this process, and the changes that they have not read.
static CHILDREN: Mutex<BTreeMap<i32, VecDeque<WaitStatus>>> = Mutex::new(BTreeMap::new());
/// Whether several commands may run at once.
static SEVERAL: AtomicBool = AtomicBool::new(false);

/// Declares that several commands will run under this process at once. Without that, every descendant belongs to the one command.
pub fn expect_several() {
    SEVERAL.store(true, Ordering::Relaxed);
}

/// Whether several commands may run at once.
pub fn are_several() -> bool {
    SEVERAL.load(Ordering::Relaxed)
}

fn children() -> MutexGuard<'static, BTreeMap<i32, VecDeque<WaitStatus>>> {
    CHILDREN.lock().ignore_poison()
}

/// Keeps the changes of this child from now on. Called right after its start, before any call of [`next_change`].
pub fn add(pid: Pid) {
    children().insert(pid.as_raw_pid(), VecDeque::new());
}

/// Forgets the child: its end is collected, and not reported.
pub fn remove(pid: Pid) {
    children().remove(&pid.as_raw_pid());
}

/// The next change of this child. Also collects the ends of all other children, those of orphans among them.
pub fn next_change(pid: Pid) -> Option<WaitStatus> {
    let mut children = children();
    while let Ok(Some((changed, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
        if let Some(changes) = children.get_mut(&changed.as_raw_pid()) {
            changes.push_back(status);
        }
    }
    children.get_mut(&pid.as_raw_pid())?.pop_front()
}

/// The commands and watchdogs of this process but for those of one command, `own`.
pub fn others(own: [Option<Pid>; 3]) -> Vec<i32> {
    let own = own.map(|pid| pid.map(Pid::as_raw_pid));
    children().keys().copied().filter(|pid| !own.contains(&Some(*pid))).collect()
}
