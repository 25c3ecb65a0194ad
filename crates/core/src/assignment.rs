//! Which member owns which partition: weighted rendezvous hashing under quotas, and the hash from a key to its partition.
//!
//! Plain weighted rendezvous hashing ([Schindelhauer and Schomaker 2005](https://doi.org/10.1145/1073970.1074008),
//! [Wang and others](https://datatracker.ietf.org/doc/html/draft-ietf-bess-weighted-hrw)) moves only what must move, but its shares are
//! random: with four members and 256 partitions a member is off by more than 10 % in every second group. So each member has a
//! *quota*, its exact share rounded down or up, members keep what they own up to their quota, and the rendezvous score only
//! decides which partitions a member gives up, and which member gets a free one.

use sha2::{Digest, Sha256};

/// The most partitions of a group.
pub const PARTITIONS_MAX: u32 = 1024;
/// The largest weight of a member.
pub const WEIGHT_MAX: u32 = 10_000;

/// A member as the assignment sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightedMember<'a> {
    /// Its name: no two members of a group have the same.
    pub name: &'a str,
    /// Its share of the partitions, relative to the weights of the others: 1 to [`WEIGHT_MAX`].
    pub weight: u32,
}

/// The partition of `key` in a group of `count` partitions: the first four bytes of SHA-256 of the key, as a big-endian number,
/// modulo `count`.
///
/// This never changes, and every language can compute it; `docs/partition-vectors.tsv` has examples. In a shell:
/// `echo $(( 0x$(printf %s "$KEY" | sha256sum | cut -c1-8) % COUNT ))`.
///
/// # Panics
/// If `count` is zero.
pub fn partition_of(key: impl AsRef<[u8]>, count: u32) -> u32 {
    let [a, b, c, d, ..]: [u8; 32] = Sha256::digest(key).into();
    u32::from_be_bytes([a, b, c, d]) % count
}

/// Assigns each of `previous.len()` partitions to a member: the index of its owner in `members`, or `None` if there are no members.
/// `previous` has the owners until now; `None` for a partition without one, or whose owner is no member any more.
///
/// Each member owns its exact share of the partitions, rounded down or up, and no partition moves that could have stayed: the number
/// of moves is the least that any assignment with such shares has. Between members of equal weight, a join moves partitions only to the
/// new member, and a leave only those of the member that left. The same arguments give the same result on every machine.
pub fn assign(members: &[WeightedMember<'_>], previous: &[Option<usize>]) -> Vec<Option<usize>> {
    let mut owners: Vec<Option<usize>> =
        previous.iter().map(|owner| owner.filter(|owner| *owner < members.len())).collect();
    if members.is_empty() {
        return owners;
    }
    let seeds: Vec<u64> = members.iter().map(|member| seed(member.name)).collect();
    let score = |member: usize, partition: usize| score(seeds[member], partition, members[member].weight);
    let mut spare = quotas(members, &owners);
    for (member, spare) in spare.iter_mut().enumerate() {
        let mut owned: Vec<usize> = (0..owners.len()).filter(|p| owners[*p] == Some(member)).collect();
        owned.sort_by(|a, b| score(member, *b).total_cmp(&score(member, *a)));
        for given_up in owned.iter().skip(*spare) {
            owners[*given_up] = None;
        }
        *spare = spare.saturating_sub(owned.len());
    }
    for (partition, owner) in owners.iter_mut().enumerate().filter(|(_, owner)| owner.is_none()) {
        let open = (0..members.len()).filter(|member| spare[*member] > 0);
        *owner = open.max_by(|a, b| score(*a, partition).total_cmp(&score(*b, partition)));
        spare[owner.expect("the quotas add up to the number of partitions")] -= 1;
    }
    owners
}

/// How many partitions each member is to own: its share rounded down, or up where that saves a move. Members that have to receive
/// partitions anyway come next, so that no member that stays gets a partition which the new one could have taken.
fn quotas(members: &[WeightedMember<'_>], owners: &[Option<usize>]) -> Vec<usize> {
    let count = owners.len() as u64;
    let total: u64 = members.iter().map(|member| u64::from(member.weight)).sum();
    let share = |member: usize| count * u64::from(members[member].weight);
    let mut quotas: Vec<usize> = (0..members.len()).map(|member| (share(member) / total) as usize).collect();
    let mut owned = vec![0_usize; members.len()];
    owners.iter().flatten().for_each(|owner| owned[*owner] += 1);
    // Without a remainder the share is a whole number, and one more would be too many.
    let mut rounded: Vec<usize> = (0..members.len()).filter(|member| share(*member) % total > 0).collect();
    let rank = |member: usize| match owned[member].cmp(&quotas[member]) {
        std::cmp::Ordering::Greater => 0,
        std::cmp::Ordering::Less => 1,
        std::cmp::Ordering::Equal => 2,
    };
    rounded.sort_by_key(|member| {
        (rank(*member), std::cmp::Reverse(share(*member) % total), seed(members[*member].name))
    });
    let left = owners.len() - quotas.iter().sum::<usize>();
    rounded.into_iter().take(left).for_each(|member| quotas[member] += 1);
    quotas
}

/// The first eight bytes of SHA-256 of the member's name.
fn seed(name: &str) -> u64 {
    let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = Sha256::digest(name).into();
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// The rendezvous score of a member for a partition: of all members the one with the highest score is the favourite, each with the
/// probability of its share of the weights.
fn score(seed: u64, partition: usize, weight: u32) -> f64 {
    let hash = mix(seed ^ mix(partition as u64));
    // In (0, 1), so that the logarithm is below zero.
    let uniform = ((hash >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    f64::from(weight) / -uniform.ln()
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
