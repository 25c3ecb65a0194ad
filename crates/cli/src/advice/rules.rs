//! The rules, as a table: the first row that fits decides. Each row says the mechanism, why, what to paste, the promise, and the risk.

use std::time::Duration;

use lockkeeper::Purpose;
use lockkeeper::Purpose::{Correctness, Efficiency};

use super::stores::StateHome;
use super::ttl::LeaseKind;
use super::{ConflictRate, ResourceKind, Situation};

/// Text to paste, and its language: `sh`, `sql` or `rust`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paste {
    pub language: &'static str,
    pub text: &'static str,
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdviceRule {
    pub resource: ResourceKind,
    /// Only for this purpose.
    pub purpose: Option<Purpose>,
    /// Only for work that takes longer than [`LONG`] (true), or not (false).
    pub long: Option<bool>,
    /// Only for this rate of conflicts.
    pub conflicts: Option<ConflictRate>,
    pub mechanism: &'static str,
    /// Whether the mechanism is a lock that the caller holds.
    pub is_lock: bool,
    pub why: &'static str,
    pub keeps: StateHome,
    pub lease: LeaseKind,
    pub paste: &'static [Paste],
    pub promised: &'static str,
    pub risk: &'static str,
    /// The page about it, below docs/.
    pub page: &'static str,
}

/// No transaction should be open for longer than this.
pub const LONG: Duration = Duration::from_secs(5);

/// The first row that fits.
pub fn find(situation: &Situation) -> &'static AdviceRule {
    let fits = |rule: &&AdviceRule| {
        rule.resource == situation.resource
            && rule.purpose.is_none_or(|purpose| purpose == situation.purpose)
            && rule.long.is_none_or(|long| long == (situation.work > LONG))
            && rule.conflicts.is_none_or(|rate| rate == situation.conflicts)
    };
    RULES.iter().find(fits).expect("the last row of each resource fits every situation")
}

const fn sh(text: &'static str) -> Paste {
    Paste { language: "sh", text }
}

const fn sql(text: &'static str) -> Paste {
    Paste { language: "sql", text }
}

const fn rust(text: &'static str) -> Paste {
    Paste { language: "rust", text }
}

/// A row that fits every situation of a resource; the others change what they need.
const ANY: AdviceRule = AdviceRule {
    resource: ResourceKind::Device,
    purpose: None,
    long: None,
    conflicts: None,
    mechanism: "",
    is_lock: false,
    why: "",
    keeps: StateHome::Store,
    lease: LeaseKind::None,
    paste: &[],
    promised: "",
    risk: "",
    page: "",
};

/// The table.
pub const RULES: [AdviceRule; 15] = [
    AdviceRule {
        resource: ResourceKind::Cache,
        mechanism: "`cached`: one caller computes, the others use the old value or wait",
        why: "a lock around a cache makes every caller wait for it, also those that could use the old value",
        lease: LeaseKind::Renewed,
        paste: &[
            sh("lockkeeper cached report --ttl 5m --stale 1h -- echo \"computed by one caller\""),
            rust(include_str!("paste/cached.rs.txt")),
        ],
        promised: "one computation at a time in the whole fleet, and a failed one keeps the old value",
        risk: "a caller that is paused past its lease computes a second time, which is a waste and no harm: its late value is refused",
        page: "cached.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Row,
        long: Some(true),
        mechanism: "a reservation in the row: who has it, and until when",
        why: "a lock or a transaction that waits for a person blocks others for minutes, and is gone when the process restarts; a row is not",
        keeps: StateHome::OwnDatabase,
        lease: LeaseKind::Reservation,
        paste: &[sql(include_str!("paste/reservation.sql"))],
        promised: "one holder for each row, and one row to the buyer whose reservation is still theirs when they pay",
        risk: "a payment may arrive after the reservation has ended: the second statement then changes 0 rows, and you refund",
        page: "guide/do-i-need-a-fence.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Row,
        conflicts: Some(ConflictRate::Often),
        mechanism: "`SELECT … FOR UPDATE` in one transaction",
        why: "with frequent conflicts a compare-and-swap does its work in vain too often; the database has a queue for each row",
        keeps: StateHome::OwnDatabase,
        paste: &[sql(include_str!("paste/for_update.sql"))],
        promised: "the transactions of one row run one after the other, and a crash rolls back",
        risk: "what the transaction does outside of the database is not rolled back: keep it out, or give it an idempotency key",
        page: "guide/do-i-need-a-fence.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Row,
        mechanism: "compare-and-swap: a version column",
        why: "conflicts are rare, so a lock would cost every writer two more round trips for nothing",
        keeps: StateHome::OwnDatabase,
        paste: &[sql(include_str!("paste/version.sql"))],
        promised: "no update is lost: a writer whose copy is old changes 0 rows, reads again and tries again",
        risk: "a writer that ignores the number of changed rows believes that it has written",
        page: "register.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Stock,
        mechanism: "one conditional `UPDATE`",
        why: "the check and the change are one statement, so there is no moment between them that a lock could protect",
        keeps: StateHome::OwnDatabase,
        paste: &[sql(include_str!("paste/stock.sql"))],
        promised: "the number never goes below zero, whatever the number of writers",
        risk: "a retry after a lost reply takes a second time: write the order's key in the same transaction, with a unique index",
        page: "guide/do-i-need-a-fence.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Job,
        mechanism: "a window: `run --window`, one run per day across all hosts",
        is_lock: true,
        why: "a lock alone lets a host whose clock is late run the job a second time after the first has finished; a window remembers that it was run",
        lease: LeaseKind::Renewed,
        paste: &[sh(
            "lockkeeper run billing --window 1d --retry-failed 1 --correctness -- sh -c 'echo \"bill with fence $LOCKKEEPER_FENCE\"'",
        )],
        promised: "one run per window, on one host at a time; if the host dies, another one runs the window again",
        risk: "a run that dies half-way is repeated: give each invoice a unique key in the database, so that the second run skips it",
        page: "cron.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Service,
        mechanism: "an election: `elect`, one leader at a time",
        is_lock: true,
        why: "the program runs all the time, so its place is a role and not a job; the term is a fence for its writes",
        lease: LeaseKind::Renewed,
        paste: &[
            sh("lockkeeper elect scheduler -- sh -c 'echo \"leading in term $LOCKKEEPER_TERM\"'"),
            rust(include_str!("paste/election.rs.txt")),
        ],
        promised: "the leader is ended before another one can be elected, and terms grow",
        risk: "a leader that is paused may write after its term: only a resource that checks the term refuses that write",
        page: "election.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Rate,
        mechanism: "a rate limit: `limit`, a token bucket that all processes share",
        why: "a lock per user around a counter takes four round trips, and callers wait for each other; a take is one, and no caller waits",
        paste: &[
            sh("lockkeeper limit api --rate 100/s --burst 200 -- echo \"one token taken\""),
            rust(include_str!("paste/limit.rs.txt")),
        ],
        promised: "at most rate × time + burst, exact, by the store's clock",
        risk: "when the store is down, you decide whether calls pass or not",
        page: "limit.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Call,
        purpose: Some(Correctness),
        mechanism: "`once`, with its key sent along as the idempotency key of the other system",
        why: "a lock is over when its holder dies, and does not know whether the call was made; a key with a stored result does",
        lease: LeaseKind::Renewed,
        paste: &[
            sh(
                "lockkeeper once refund-4711 --correctness -- echo \"POST /refunds, Idempotency-Key: refund-4711\"",
            ),
            rust(include_str!("paste/once.rs.txt")),
        ],
        promised: "one result per key: later callers get the stored one, and nothing is sent again",
        risk: "a process may die after the call and before the result is stored; the next one calls again. Only a system that takes the idempotency \
               key makes that harmless. Without one, look there before you repeat (exit code 74)",
        page: "once.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Call,
        purpose: Some(Efficiency),
        mechanism: "`once`: the first caller calls, later callers get the stored result",
        why: "a lock would make callers wait, and then make the same call again",
        lease: LeaseKind::Renewed,
        paste: &[sh("lockkeeper once welcome-4711 -- echo \"sent once\"")],
        promised: "one result per key, for as long as it is kept",
        risk: "a process may die after the call and before the result is stored; then the call is made twice",
        page: "once.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Items,
        mechanism: "`claim`: workers take items from a list, each to one worker at a time",
        why: "a lock per item costs a round trip for each item that another worker has; a claim takes the next free one",
        lease: LeaseKind::Renewed,
        paste: &[sh(
            "seq 3 > ids.txt\nlockkeeper claim thumbnails --from ids.txt --skip -- sh -c 'echo \"image $LOCKKEEPER_ITEM\"'",
        )],
        promised: "every item is done, by one worker at a time; an item whose worker died goes to the next one",
        risk: "an item may be begun twice if its worker dies: make the work repeatable, or check the fence",
        page: "claim.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Value,
        mechanism: "a register: compare-and-swap on one value",
        why: "reading, changing and writing under a lock are four round trips, and a late writer still overwrites; compare-and-swap refuses it",
        paste: &[
            sh("lockkeeper record set release/current v17\nlockkeeper record get release/current"),
            rust(include_str!("paste/register.rs.txt")),
        ],
        promised: "no change is lost, and each version has a fence",
        risk: "with many writers most of them try again: split the value",
        page: "register.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::File,
        mechanism: "a lock, and `fenced-write` for the file",
        is_lock: true,
        why: "a file takes every write; `fenced-write` refuses one with an older fence than it has seen",
        lease: LeaseKind::Renewed,
        paste: &[sh("lockkeeper run report -- sh -c 'echo content | lockkeeper fenced-write report.txt'")],
        promised: "no late writer replaces what a newer one has written",
        risk: "a program that writes the file without `fenced-write` is not stopped",
        page: "fenced/file.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Device,
        purpose: Some(Correctness),
        mechanism: "a lock with a lock-delay; and a check of the fence in front of the resource, if you can put one there",
        is_lock: true,
        why: "the resource cannot refuse a late writer, so the lock is the only protection, and it is not complete",
        lease: LeaseKind::Renewed,
        paste: &[sh(
            "lockkeeper run terminal-3 --correctness --lock-delay 10s -- echo \"one process at a time\"",
        )],
        promised: "one process at a time, while none is paused for longer than its ttl",
        risk: "a process that is paused past its ttl acts beside the next one. No lock system can prevent that: put a service that checks fences \
               in front (`lockkeeper gate` for HTTP), or plan how to find and mend what was done twice",
        page: "fenced/does-my-resource-check.md",
        ..ANY
    },
    AdviceRule {
        resource: ResourceKind::Device,
        mechanism: "a lock",
        is_lock: true,
        why: "doing it twice is a waste and no harm, so a lock is enough",
        lease: LeaseKind::Renewed,
        paste: &[sh("lockkeeper run terminal-3 -- echo \"one process at a time\"")],
        promised: "one process at a time, while none is paused for longer than its ttl",
        risk: "a process that is paused past its ttl works beside the next one",
        page: "cli.md",
        ..ANY
    },
];
