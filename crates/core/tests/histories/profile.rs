//! What histories are made of. Each profile leans towards one kind of trouble.

use std::time::Duration;

use lockkeeper_core::{Mode, Wait};

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Ask,
    Renew,
    Release,
    Break,
    Wait,
}

pub struct Profile {
    pub kinds: &'static [Kind],
    /// Which names go together in one ask.
    pub names: &'static [&'static [usize]],
    /// How many explicit owners there are beside none.
    pub owners: u8,
    pub modes: &'static [Mode],
    pub waits: &'static [Wait],
    /// Time stands nearly still: nothing is saved by a lease that ends.
    pub still: bool,
    /// Milliseconds: ttl, lock delay, minimum hold.
    pub terms: &'static [(u64, u64, u64)],
}

const SOON: Wait = Wait::For(Duration::from_millis(100));
const LATER: Wait = Wait::For(Duration::from_millis(450));
const AT_ONCE: Wait = Wait::For(Duration::ZERO);

use Kind::*;
use Mode::{Exclusive, Permit, Shared};

/// A bit of everything.
pub const BROAD: Profile = Profile {
    kinds: &[Ask, Ask, Ask, Ask, Ask, Ask, Release, Release, Release, Renew, Renew, Break, Wait],
    names: &[&[0], &[1], &[2], &[0, 1], &[0], &[1, 2], &[3], &[0, 1, 2], &[0, 3]],
    owners: 3,
    modes: &[Exclusive, Exclusive, Exclusive, Shared, Shared, Permit(2), Permit(1), Permit(3)],
    waits: &[Wait::Forever, Wait::Forever, Wait::No, SOON, LATER, AT_ONCE],
    still: false,
    terms: &[
        (100, 0, 0),
        (400, 0, 0),
        (400, 0, 0),
        (200, 150, 0),
        (400, 0, 250),
        (100, 50, 333),
        (1000, 1000, 0),
    ],
};

/// Owners that hold one thing and want another; time hardly matters.
pub const DEADLOCKS: Profile = Profile {
    kinds: &[Ask, Ask, Ask, Ask, Ask, Ask, Ask, Release, Release, Renew],
    names: &[&[0], &[1], &[2], &[3], &[0], &[1], &[2], &[3], &[0, 1], &[2, 3], &[1, 2], &[0, 3]],
    owners: 4,
    modes: &[Exclusive, Exclusive, Exclusive, Shared, Permit(2), Permit(2), Permit(3), Permit(1)],
    waits: &[Wait::Forever, Wait::Forever, Wait::Forever, Wait::No],
    still: true,
    terms: &[(20_000, 0, 0)],
};

/// Short leases, delays and minimum holds that end at the same moments.
pub const EXPIRY: Profile = Profile {
    kinds: &[Ask, Ask, Ask, Wait, Renew, Release, Wait, Break],
    names: &[&[0], &[1], &[0, 1], &[2], &[1, 2]],
    owners: 2,
    modes: &[Exclusive, Exclusive, Shared, Permit(2)],
    waits: &[Wait::Forever, LATER, SOON, Wait::No],
    still: false,
    terms: &[(100, 0, 0), (100, 50, 0), (100, 0, 150), (100, 100, 100), (150, 500, 0), (200, 50, 200)],
};

/// Few names, many holders at once.
pub const PERMITS: Profile = Profile {
    kinds: &[Ask, Ask, Ask, Ask, Release, Release, Wait, Renew, Break],
    names: &[&[0], &[0], &[1], &[0, 1]],
    owners: 3,
    modes: &[Permit(2), Permit(3), Permit(1), Permit(4), Shared, Exclusive, Permit(2), Permit(3)],
    waits: &[Wait::Forever, Wait::Forever, LATER, Wait::No],
    still: false,
    terms: &[(400, 0, 0), (1000, 0, 0), (400, 0, 200), (200, 100, 0)],
};
