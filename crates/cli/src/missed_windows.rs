//! The windows that no host has run: counted, and the newest of them listed.

/// The windows between two others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissedWindows {
    /// Their number, which may be huge.
    pub count: u64,
    /// When the first of them begins.
    pub first_ms: u64,
    /// The newest of them, as many as are to be run, the oldest first.
    pub newest: Vec<u64>,
}

impl MissedWindows {
    /// Of windows that are all known: `most` are to be run.
    pub fn of(all: &[u64], most: usize) -> MissedWindows {
        let newest = all[all.len().saturating_sub(most.max(1))..].to_vec();
        MissedWindows { count: all.len() as u64, first_ms: all.first().copied().unwrap_or_default(), newest }
    }

    /// Of windows of one size: those after `newest` and before `at`. They are counted, and not made: a window of a second
    /// after a run in 1970 has 1.7 billion before it.
    pub fn of_size(size: u64, newest: u64, at: u64, most: usize) -> MissedWindows {
        let count = at.saturating_sub(newest).div_ceil(size).saturating_sub(1);
        let listed = count.min(most.max(1) as u64);
        MissedWindows {
            count,
            first_ms: at.saturating_sub(count.saturating_mul(size)),
            newest: (1..=listed).rev().map(|n| at - n * size).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_counted_and_not_made() {
        let after_1970 = MissedWindows::of_size(1000, 0, 1_700_000_000_000, 2);
        assert_eq!(after_1970.count, 1_699_999_999);
        assert_eq!(
            (after_1970.first_ms, after_1970.newest),
            (1000, vec![1_699_999_998_000, 1_699_999_999_000])
        );
        assert_eq!(
            MissedWindows::of_size(1000, 5000, 6000, 9),
            MissedWindows { count: 0, first_ms: 6000, newest: vec![] }
        );
        // A newest window that is not one of this size: the size was changed.
        let changed = MissedWindows::of_size(1000, 5500, 8000, 9);
        assert_eq!((changed.count, changed.newest), (2, vec![6000, 7000]));
    }
}
