//! The planted bugs, and what a run has seen: a comparison that cannot fail, or never meets anything, proves nothing.

/// A way in which the naive table can be wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A request passes the queue.
    Barges,
    /// The youngest waiter is granted first.
    LastComeFirst,
    /// A break does not use up a fence.
    BreakKeepsTheFence,
    /// Any client that names the lock releases it.
    ReleaseByAnyone,
    /// A renewal that comes late enough to find the lease over revives it.
    RenewsTheExpired,
    /// A clean release is followed by a delay.
    DelayAfterCleanEnd,
    /// The delay counts from the moment at which the end of the lease was noticed.
    DelayFromNotice,
    /// There are always more permits.
    PermitLimitIgnored,
    /// The minimum hold is not kept.
    LingeringIgnored,
    /// No deadlock is reported.
    DeadlockNeverTold,
    /// Re-entry gets a new fence.
    ReentryNewFence,
    /// A queued attempt that is sent again is queued twice.
    RetryDoubles,
    /// A granted attempt that asks again does not count its lease anew.
    RetryLeavesTheLease,
    /// One free name of several is enough.
    PartIsEnough,
}

impl Bug {
    pub const ALL: [Bug; 14] = [
        Bug::Barges,
        Bug::LastComeFirst,
        Bug::BreakKeepsTheFence,
        Bug::ReleaseByAnyone,
        Bug::RenewsTheExpired,
        Bug::DelayAfterCleanEnd,
        Bug::DelayFromNotice,
        Bug::PermitLimitIgnored,
        Bug::LingeringIgnored,
        Bug::DeadlockNeverTold,
        Bug::ReentryNewFence,
        Bug::RetryDoubles,
        Bug::RetryLeavesTheLease,
        Bug::PartIsEnough,
    ];
}

macro_rules! seen {
    ($($what:ident),* $(,)?) => {
        /// How often things happened.
        #[derive(Clone, Debug, Default)]
        pub struct Seen {
            $(pub $what: usize,)*
        }

        impl Seen {
            pub fn add(&mut self, other: &Seen) {
                $(self.$what += other.$what;)*
            }

            /// Every count with its name.
            pub fn all(&self) -> Vec<(&'static str, usize)> {
                vec![$((stringify!($what), self.$what),)*]
            }
        }
    };
}

seen! {
    grants,
    from_the_line,
    several,
    reentries,
    reentries_from_line,
    asked_again_when_held,
    asked_again_in_line,
    renewals,
    busy,
    out_of_patience,
    left,
    expiries,
    delays,
    lingerings,
    breaks,
    upgrades,
    deadlocks,
}
