//! Warnings that are printed once a day on a host: an operator stops reading a cron job that prints the same every minute.

use std::fs::{self, DirBuilder, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Where it is kept what was printed: beside the default store of this user.
pub fn dir() -> Option<PathBuf> {
    let store = lockkeeper::default_url().unwrap_or_default();
    store.strip_prefix("sqlite:").and_then(|path| Path::new(path).parent()).map(Path::to_owned)
}

/// Whether this user's processes printed `warning`, its text and all that belongs to it, on this host within a day; if not, it counts as
/// printed from now on. If that cannot be found out, it was not printed.
pub fn was_printed_today(dir: &Path, warning: &impl Hash) -> bool {
    was_printed_today_at(dir, warning, SystemTime::now())
}

fn was_printed_today_at(dir: &Path, warning: &impl Hash, now: SystemTime) -> bool {
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

fn stamp(dir: &Path, warning: &impl Hash) -> PathBuf {
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
        assert!(!was_printed_today_at(&dir, &"old etcd", now), "for the first time");
        assert!(was_printed_today_at(&dir, &"old etcd", now + Duration::from_secs(60)));
        assert!(!was_printed_today_at(&dir, &"old ZooKeeper", now), "another one");
        assert!(!was_printed_today_at(&dir, &"old etcd", now + DAY), "the next day");
        assert!(!was_printed_today_at(&dir, &"old etcd", now), "the clock was set back");
        assert!(
            !was_printed_today_at(Path::new("/proc/nowhere"), &"old etcd", now),
            "it cannot be written down"
        );
        fs::remove_dir_all(dir).unwrap();
    }
}
