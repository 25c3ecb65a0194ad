//! The registry when calls of the same attempt overlap, without a server.

use lockkeeper_core::{LockName, ReleaseOutcome};
use lockkeeper_host::VirtualClock;

use super::*;

const TTL: Duration = Duration::from_secs(10);
const ATTEMPT: AttemptHash = [7; 16];

/// A grant with this fence.
#[derive(Clone, Copy, Debug)]
struct Granted(u64);

impl KnownGrant for Granted {
    fn fence(&self) -> Fence {
        Fence::new(self.0).unwrap()
    }
}

#[derive(Default)]
struct Process {
    registry: HoldRegistry<Granted>,
    clock: VirtualClock,
}

impl Process {
    fn begin<'a>(&'a self, names: &'a Names) -> RegisteredCall<'a, Granted> {
        self.registry.begin(&self.clock, ATTEMPT, names, TTL)
    }

    /// Registers a grant of a request that was sent just now.
    fn grant(&self, fence: u64) {
        self.registry.insert(ATTEMPT, OwnHold::granted(&names(), TTL, self.clock.now(), Granted(fence)));
    }

    fn due_after(&self, time: Duration) -> Vec<OwnHold<Granted>> {
        self.clock.jump(time);
        self.registry.take_due(self.clock.now()).0.into_iter().map(|(_, hold)| hold).collect()
    }

    fn hold(&self) -> OwnHold<Granted> {
        self.registry.table().holds[&ATTEMPT].clone()
    }
}

fn names() -> Names {
    LockName::new("orders/42").unwrap().into()
}

fn end(mut call: RegisteredCall<'_, Granted>, left_nothing: bool) {
    call.left_nothing = left_nothing;
}

/// A caller drops a call and sends the attempt again while the store may still apply the first one. The second call finds nothing,
/// because there is nothing yet, and ends with *busy*. The registry forgot the attempt: a queue entry that the store created afterwards
/// held the lock for as long as the process lived.
#[test]
fn a_dropped_call_that_was_replaced_is_cleaned_up() {
    let (process, names) = (Process::default(), names());
    let (first, second) = (process.begin(&names), process.begin(&names));
    end(first, false);
    end(second, true);
    assert_eq!(process.due_after(TTL).len(), 1, "the process looks for the entries of the first call");
}

#[test]
fn a_call_that_left_nothing_leaves_no_entry() {
    let (process, names) = (Process::default(), names());
    let (first, second) = (process.begin(&names), process.begin(&names));
    end(first, true);
    end(second, true);
    assert!(process.registry.table().holds.is_empty());
}

/// The cleanup of an attempt has begun, and the caller sends the attempt again. The new call is registered before it sends anything, so
/// the cleanup can leave to it what it finds; and it knows that the cleanup still runs, so it can wait for it.
#[test]
fn a_repeated_call_and_its_cleanup_know_of_each_other() {
    let (process, names) = (Process::default(), names());
    let first = process.begin(&names);
    assert_eq!(first.known_expiry, None);
    end(first, false);
    assert_eq!(process.due_after(TTL).len(), 1);
    assert!(process.registry.table().holds.is_empty());
    let second = process.begin(&names);
    assert_eq!(second.known_expiry, Some(process.clock.now()), "entries of the first call may exist");
    let table = process.registry.table();
    assert!(table.ending.contains(&ATTEMPT) && table.holds[&ATTEMPT].caller.is_some());
}

/// ZooKeeper's registry forgot here that an earlier request had no reply.
#[test]
fn a_grant_proves_nothing_about_an_earlier_request_without_a_reply() {
    let (process, names) = (Process::default(), names());
    let (first, second) = (process.begin(&names), process.begin(&names));
    end(first, false);
    process.grant(5);
    assert!(process.hold().outcome_unknown);
    end(second, false);
}

#[test]
fn a_grant_that_is_found_again_keeps_the_start_of_its_minimum_hold() {
    let process = Process::default();
    process.grant(5);
    let began = process.hold().since;
    process.clock.jump(Duration::from_secs(3));
    process.grant(5);
    assert_eq!(process.hold().since, began);
    process.grant(6);
    assert_eq!(process.hold().since, Some(process.clock.now()), "another grant");
}

#[test]
fn a_call_for_a_revoked_grant_does_not_extend_it() {
    let (process, names) = (Process::default(), names());
    process.grant(5);
    let expires = process.hold().expires;
    process.clock.jump(Duration::from_secs(3));
    let call = process.begin(&names);
    assert!(process.hold().expires > expires);
    call.restore_expiry();
    assert_eq!(process.hold().expires, expires);
}

/// etcd's registry did so only if it knew a hold of the attempt: an entry that it had given up stayed.
#[test]
fn a_release_that_is_not_confirmed_is_repeated_by_the_registry() {
    let (process, names) = (Process::default(), names());
    for is_known in [true, false] {
        if is_known {
            process.grant(5);
        }
        let mut release = process.registry.begin_release(&process.clock, ATTEMPT, &names);
        assert_eq!(release.hold.is_some(), is_known);
        assert_eq!(release.finish(Err("no reply")), Err("no reply"));
        drop(release);
        assert_eq!(process.due_after(Duration::ZERO).len(), 1);
    }
    process.grant(5);
    let mut release = process.registry.begin_release(&process.clock, ATTEMPT, &names);
    assert_eq!(release.finish(Ok::<_, ()>(ReleaseOutcome::Released)), Ok(ReleaseOutcome::Released));
    drop(release);
    assert!(process.registry.table().holds.is_empty());
}

#[test]
fn a_release_cancels_the_call_that_waits() {
    let (process, names) = (Process::default(), names());
    let call = process.begin(&names);
    let mut release = process.registry.begin_release(&process.clock, ATTEMPT, &names);
    assert!(call.caller.is_cancelled());
    call.caller.note_left_queue();
    assert_eq!(release.finish(Ok::<_, ()>(ReleaseOutcome::AlreadyGone)), Ok(ReleaseOutcome::Released));
}

#[tokio::test(start_paused = true)]
async fn an_expired_hold_is_ended_until_the_store_confirms_it() {
    let (registry, clock) = (Arc::new(HoldRegistry::default()), VirtualClock::default());
    registry.insert(ATTEMPT, OwnHold::granted(&names(), Duration::ZERO, clock.now(), Granted(5)));
    let (tries, mut tried) = tokio::sync::mpsc::unbounded_channel();
    let end = move |attempt, hold: Arc<OwnHold<Granted>>| {
        let confirmed = tries.send((attempt, hold.grant.is_some())).is_err();
        async move { if confirmed { Ok(EndOutcome::Confirmed) } else { Err("no reply") } }
    };
    let task = tokio::spawn(registry.clone().end_expired(Arc::new(clock), end));
    for _ in 0..3 {
        assert_eq!(tried.recv().await, Some((ATTEMPT, true)));
        assert!(registry.table().ending.contains(&ATTEMPT));
    }
    drop(tried);
    while registry.table().ending.contains(&ATTEMPT) {
        tokio::time::sleep(END_AGAIN_AFTER).await;
    }
    task.abort();
}
