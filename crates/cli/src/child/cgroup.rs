//! A control group (cgroup v2) for a command and everything that it starts, where this user may make one.
//!
//! The kernel kills a control group in one step (`cgroup.kill`, Linux 5.14), whatever process group, session, environment or
//! user its processes have. See <https://docs.kernel.org/admin-guide/cgroup-v2.html>.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

/// The control group of one command.
#[derive(Debug)]
pub struct Cgroup {
    dir: PathBuf,
    /// The one that this process is in, and that the command started in.
    home: PathBuf,
}

/// The name of the control group of the command of `run`: both processes that watch the command know it.
pub fn tag(run: Pid, fence: &str) -> String {
    format!("lockkeeper-{}-{fence}", run.as_raw_pid())
}

impl Cgroup {
    /// Makes it, or finds the one that a watchdog before this one has made. `None` where it may not be used.
    pub fn make(tag: &str) -> Option<Self> {
        let home = home()?;
        let dir = home.join(tag);
        let made = fs::create_dir(&dir).is_ok();
        // Missing in kernels that are too old.
        if !dir.join("cgroup.kill").exists() {
            if made {
                let _ = fs::remove_dir(&dir);
            }
            return None;
        }
        Some(Cgroup { dir, home })
    }

    /// The one that a watchdog has made.
    pub fn find(tag: &str) -> Option<Self> {
        let home = home()?;
        let dir = home.join(tag);
        dir.exists().then_some(Cgroup { dir, home })
    }

    /// Moves every process that `outside` names into it, until there is none: some may be forking right now. Processes that they
    /// start from then on are in it from its first instruction.
    pub fn adopt(&self, outside: impl Fn() -> Vec<i32>) {
        for _ in 0..16 {
            let inside: HashSet<i32> = members(&self.dir).into_iter().collect();
            let new: Vec<i32> = outside().into_iter().filter(|pid| !inside.contains(pid)).collect();
            if new.is_empty() {
                return;
            }
            // One that has ended meanwhile is refused, and needs nothing.
            new.iter().for_each(|pid| drop(admit(&self.dir, *pid)));
        }
    }

    /// Kills everything in it.
    pub fn kill(&self) {
        let _ = fs::write(self.dir.join("cgroup.kill"), "1");
    }

    /// Whether no process is in it.
    pub fn is_empty(&self) -> bool {
        let events = fs::read_to_string(self.dir.join("cgroup.events")).unwrap_or_default();
        !events.lines().any(|line| line == "populated 1")
    }

    /// Removes it. Processes that the command left behind go back to the group that the command came from.
    pub fn remove(self) {
        for _ in 0..16 {
            remove_empty(&self.dir);
            if !self.dir.exists() {
                return;
            }
            members(&self.dir).into_iter().for_each(|pid| drop(admit(&self.home, pid)));
        }
    }
}

/// The directory of the control group that this process is in, if a new one below it changes nothing but that it can be
/// killed: with controllers for its children, a new one would get its own share of the CPU.
fn home() -> Option<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let (root, at) = mounts.lines().find_map(cgroup2)?;
    let below = Path::new(path).strip_prefix(root).ok()?;
    // Outside of our namespace, or with characters that are written as escapes.
    if path.contains("/..") || at.contains('\\') || root.contains('\\') {
        return None;
    }
    let home = Path::new(at).join(below);
    let controllers = fs::read_to_string(home.join("cgroup.subtree_control")).ok()?;
    controllers.trim().is_empty().then_some(home)
}

/// The root and the mount point, if this line of `mountinfo` is of the file system of cgroup v2.
fn cgroup2(line: &str) -> Option<(&str, &str)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(3);
    kind.starts_with("cgroup2 ").then_some((fields.next()?, fields.next()?))
}

fn members(dir: &Path) -> Vec<i32> {
    let pids = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    pids.lines().filter_map(|pid| pid.parse().ok()).collect()
}

fn admit(dir: &Path, pid: i32) -> std::io::Result<()> {
    fs::write(dir.join("cgroup.procs"), pid.to_string())
}

/// Removes the group, and the groups below it that nested commands may have made, as far as no process is in them.
fn remove_empty(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_is_found_among_the_mounts() {
        let hybrid = "41 33 0:36 / /sys/fs/cgroup/unified rw,relatime shared:7 - cgroup2 cgroup2 rw";
        assert_eq!(cgroup2(hybrid), Some(("/", "/sys/fs/cgroup/unified")));
        let old = "42 33 0:37 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu";
        assert_eq!(cgroup2(old), None);
    }
}
