//! Warnings that are printed once a day on a host: an operator stops reading a cron job that prints the same every minute.

use std::fs::{self, DirBuilder, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Whether this user's processes printed `warning` on this host within a day; if not, it counts as printed from now on. If that cannot
/// be found out, it was not printed.
pub fn was_printed_today(warning: &str) -> bool {
    let store = lockkeeper::default_url().unwrap_or_default();
    let dir = store.strip_prefix("sqlite:").and_then(|path| Path::new(path).parent());
    dir.is_some_and(|dir| was_printed_today_in(dir, warning, SystemTime::now()))
}

/// The same, by the time of a file in `dir`.
fn was_printed_today_in(dir: &Path, warning: &str, now: SystemTime) -> bool {
    let file = stamp(dir, warning);
    let said = fs::metadata(&file).and_then(|about| about.modified()).ok();
    // A time in the future is that of a clock that was set.
    if said.and_then(|at| now.duration_since(at).ok()).is_some_and(|age| age < DAY) {
        return true;
    }
    // Others may have no business in it: the default store will be there.
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    if let Ok(file) = File::create(&file) {
        let _ = file.set_modified(now);
    }
    false
}

fn stamp(dir: &Path, warning: &str) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    warning.hash(&mut hasher);
    dir.join(format!("said-{:016x}", hasher.finish()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_said_once_a_day() {
        let dir = std::env::temp_dir().join(format!("lockkeeper-daily-{}", std::process::id()));
        let now = SystemTime::now();
        assert!(!was_printed_today_in(&dir, "old etcd", now), "for the first time");
        assert!(was_printed_today_in(&dir, "old etcd", now + Duration::from_secs(60)));
        assert!(!was_printed_today_in(&dir, "old ZooKeeper", now), "another one");
        assert!(!was_printed_today_in(&dir, "old etcd", now + DAY), "the next day");
        assert!(!was_printed_today_in(&dir, "old etcd", now), "the clock was set back");
        assert!(
            !was_printed_today_in(Path::new("/proc/nowhere"), "old etcd", now),
            "it cannot be written down"
        );
        fs::remove_dir_all(dir).unwrap();
    }
}
