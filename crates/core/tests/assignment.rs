//! The assignment of partitions to members, and the hash of keys: properties over random groups, and shipped examples.
//!
//! A failure prints the smallest group that was found and the seed; `LOCKKEEPER_SEED=<it>` runs the same again.

use std::collections::BTreeMap;
use std::process::Command;

use lockkeeper_core::assignment::{WeightedMember, assign, partition_of};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

const CASES: u32 = 1000;

/// A group as it changes: each step is a set of members with weights.
type Steps = Vec<BTreeMap<u8, u32>>;

fn seed() -> [u8; 16] {
    use std::hash::{BuildHasher, RandomState};
    let given = std::env::var("LOCKKEEPER_SEED").ok().and_then(|s| u128::from_str_radix(&s, 16).ok());
    let state = RandomState::new();
    given.unwrap_or_else(|| u128::from(state.hash_one(1)) << 64 | u128::from(state.hash_one(2))).to_be_bytes()
}

fn check<S: Strategy>(strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>)
where
    S::Value: std::fmt::Debug,
{
    let seed = seed();
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::XorShift, &seed));
    if let Err(TestError::Fail(why, smallest)) = runner.run(&strategy, test) {
        panic!("{why}\nLOCKKEEPER_SEED={:032x}\n{smallest:?}", u128::from_be_bytes(seed));
    }
}

/// The owners by number of the member, so that indices of two steps can be compared.
struct Group {
    owners: Vec<Option<u8>>,
}

impl Group {
    fn new(count: usize) -> Group {
        Group { owners: vec![None; count] }
    }

    /// Assigns anew to these members; returns how many partitions changed their owner.
    fn step(&mut self, members: &BTreeMap<u8, u32>) -> usize {
        let names: Vec<String> = members.keys().map(|number| format!("worker-{number}")).collect();
        let weighted: Vec<WeightedMember<'_>> = names
            .iter()
            .zip(members.values())
            .map(|(name, weight)| WeightedMember { name, weight: *weight })
            .collect();
        let numbers: Vec<u8> = members.keys().copied().collect();
        let previous: Vec<Option<usize>> = self
            .owners
            .iter()
            .map(|owner| numbers.iter().position(|number| Some(*number) == *owner))
            .collect();
        let next = assign(&weighted, &previous);
        let owners: Vec<Option<u8>> = next.iter().map(|owner| owner.map(|index| numbers[index])).collect();
        let moves = owners.iter().zip(&self.owners).filter(|(new, old)| new != old).count();
        self.owners = owners;
        moves
    }

    fn owned(&self, number: u8) -> usize {
        self.owners.iter().filter(|owner| **owner == Some(number)).count()
    }
}

fn members(most: u32) -> impl Strategy<Value = BTreeMap<u8, u32>> {
    proptest::collection::btree_map(0..24_u8, 1..=most, 1..12)
}

fn steps(most: u32) -> impl Strategy<Value = (usize, Steps)> {
    (1..300_usize, proptest::collection::vec(members(most), 1..8))
}

#[test]
fn every_partition_has_an_owner_and_every_member_its_share_rounded() {
    check(steps(100), |(count, steps)| {
        let mut group = Group::new(count);
        for members in steps {
            group.step(&members);
            prop_assert!(group.owners.iter().all(|owner| owner.is_some_and(|o| members.contains_key(&o))));
            let total: u32 = members.values().sum();
            for (number, weight) in &members {
                let share = count as f64 * f64::from(*weight) / f64::from(total);
                let owned = group.owned(*number) as f64;
                prop_assert!((owned - share).abs() < 1.0, "{number} has {owned} for a share of {share}");
            }
        }
        Ok(())
    });
}

#[test]
fn weights_are_kept_within_a_tenth_at_256_partitions() {
    check(proptest::collection::vec(members(4), 1..8), |steps| {
        let mut group = Group::new(256);
        for members in steps {
            group.step(&members);
            let total: u32 = members.values().sum();
            for (number, weight) in &members {
                let share = 256.0 * f64::from(*weight) / f64::from(total);
                let off = (group.owned(*number) as f64 - share).abs() / share;
                // A share of less than ten partitions cannot be met within a tenth of it by whole partitions.
                prop_assert!(share < 10.0 || off <= 0.1, "{number} is off by {off}");
            }
        }
        Ok(())
    });
}

/// The least number of moves to any assignment in which each member has its share rounded down or up, counted without the code under test.
fn fewest_moves(group: &Group, members: &BTreeMap<u8, u32>) -> usize {
    let (count, total) = (group.owners.len() as u64, members.values().map(|w| u64::from(*w)).sum::<u64>());
    let orphans = group.owners.iter().filter(|o| !o.is_some_and(|o| members.contains_key(&o))).count();
    let (mut too_many, mut too_few) = (0, 0);
    for (number, weight) in members {
        let share = count * u64::from(*weight);
        let (least, most) = (share / total, share.div_ceil(total));
        let owned = group.owned(*number) as u64;
        too_many += owned.saturating_sub(most);
        too_few += least.saturating_sub(owned);
    }
    // Partitions without an owner, and those above a share, have to move; and so have those that are missing below a share.
    (orphans + too_many as usize).max(too_few as usize)
}

#[test]
fn a_change_moves_only_what_must_move() {
    check(steps(100), |(count, steps)| {
        let mut group = Group::new(count);
        for members in steps {
            let least = fewest_moves(&group, &members);
            let moves = group.step(&members);
            prop_assert_eq!(moves, least, "moves, and the least that there can be");
            prop_assert_eq!(group.step(&members), 0, "the same members again: nothing moves");
        }
        Ok(())
    });
}

#[test]
fn a_join_takes_only_for_the_new_one_and_a_leave_gives_only_what_was_left() {
    let changes = (1..300_usize, proptest::collection::vec((0..12_u8, any::<bool>()), 1..20));
    check(changes, |(count, changes)| {
        let (mut group, mut members) = (Group::new(count), BTreeMap::from([(20, 1)]));
        group.step(&members);
        for (number, joins) in changes {
            let before = group.owners.clone();
            let changed =
                if joins { members.insert(number, 1).is_none() } else { members.remove(&number).is_some() };
            let moves = group.step(&members);
            for (new, old) in group.owners.iter().zip(&before).filter(|(new, old)| new != old) {
                let why = if joins { *new == Some(number) } else { *old == Some(number) };
                prop_assert!(why, "{number} joins: {joins}, and a partition goes from {old:?} to {new:?}");
            }
            prop_assert!(changed || moves == 0);
        }
        Ok(())
    });
}

/// The favourites of weighted rendezvous hashing itself show when there is nothing to keep: two groups that share members agree on more
/// than chance would give.
#[test]
fn groups_that_share_members_agree_on_most_partitions() {
    let owners = |numbers: std::ops::Range<u8>| {
        let mut group = Group::new(256);
        group.step(&numbers.map(|n| (n, 1)).collect());
        group.owners
    };
    let (eight, nine) = (owners(0..8), owners(0..9));
    let same = eight.iter().zip(&nine).filter(|(a, b)| a == b).count();
    assert!(same > 170, "only {same} of 256 are where they were, computed from nothing");
}

#[test]
fn keys_spread_evenly() {
    let mut found = [0_u32; 32];
    (0..32_000).for_each(|n| found[partition_of(format!("job-{n}"), 32) as usize] += 1);
    // 1000 each, and a standard deviation of 31.
    assert!(found.iter().all(|n| (850..1150).contains(n)), "{found:?}");
}

fn examples() -> Vec<(Vec<u8>, u32, u32)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/partition-vectors.tsv");
    let text = std::fs::read_to_string(path).expect("the shipped examples");
    let line = |line: &str| {
        let [key, count, partition] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line:?}") };
        let bytes = (0..key.len()).step_by(2).map(|i| u8::from_str_radix(&key[i..i + 2], 16).unwrap());
        (bytes.collect(), count.parse().unwrap(), partition.parse().unwrap())
    };
    text.lines().filter(|line| !line.starts_with('#')).map(line).collect()
}

#[test]
fn the_shipped_examples_are_what_the_hash_gives() {
    let examples = examples();
    assert!(examples.len() > 100);
    for (key, count, partition) in examples {
        assert_eq!(partition_of(&key, count), partition, "{key:02x?} of {count}");
    }
}

/// What a program in another language does; the shell line is the one that the documentation has.
#[test]
fn other_languages_compute_the_same() {
    const PYTHON: &str = "import hashlib,sys\n\
        for line in sys.stdin.read().split():\n\
        \x20   key, count = line.split(',')\n\
        \x20   print(int.from_bytes(hashlib.sha256(bytes.fromhex(key)).digest()[:4], 'big') % int(count))\n";
    let mut child = match Command::new("python3")
        .args(["-c", PYTHON])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
    {
        Ok(child) => child,
        Err(error) => return eprintln!("SKIPPED: python3 cannot be started: {error}"),
    };
    let examples = examples();
    let lines: String = examples
        .iter()
        .map(|(key, count, _)| {
            let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{hex},{count}\n")
        })
        .collect();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said: Vec<u32> =
        String::from_utf8(output.stdout).unwrap().lines().map(|n| n.parse().unwrap()).collect();
    let ours: Vec<u32> = examples.iter().map(|(_, _, partition)| *partition).collect();
    assert_eq!(said, ours);
    let shell = r#"echo $(( 0x$(printf %s "$KEY" | sha256sum | cut -c1-8) % COUNT ))"#;
    let said =
        Command::new("sh").args(["-c", shell]).env("KEY", "order/4711").env("COUNT", "32").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), partition_of("order/4711", 32).to_string());
}
