//! The registry when calls of the same attempt overlap, without a server.

use super::*;

const NOW: BootInstant = BootInstant::from_nanos(1_000_000_000);
const TTL: Duration = Duration::from_secs(10);
const ATTEMPT: KeyId = [7; 16];

fn names() -> Names {
    lockkeeper_core::LockName::new("orders/42").unwrap().into()
}

fn end(registry: &HoldRegistry, caller: &Arc<CancelSignal>, got_nothing: bool) {
    let names = names();
    registry.end(&EndedCall { attempt: ATTEMPT, names: &names, ttl: TTL, caller, got_nothing }, NOW);
}

/// A caller drops a call and sends the attempt again while etcd may still apply the first one. The second call finds
/// no key, because there is none yet, and ends with *busy*. The registry forgot the attempt: a key that etcd created
/// afterwards held the lock for as long as the process lived.
#[test]
fn a_dropped_call_that_was_replaced_is_cleaned_up() {
    let registry = HoldRegistry::default();
    let first = registry.begin(ATTEMPT, &names(), TTL, NOW);
    let second = registry.begin(ATTEMPT, &names(), TTL, NOW);
    end(&registry, &first, false);
    end(&registry, &second, true);
    let (due, _) = registry.take_due(NOW + TTL);
    assert_eq!(due.len(), 1, "the process looks for the keys of the first call");
}

#[test]
fn a_call_without_any_key_leaves_no_entry() {
    let registry = HoldRegistry::default();
    let first = registry.begin(ATTEMPT, &names(), TTL, NOW);
    let second = registry.begin(ATTEMPT, &names(), TTL, NOW);
    end(&registry, &first, true);
    end(&registry, &second, true);
    assert!(registry.lock().holds.is_empty());
}

/// The cleanup of an attempt has begun, and the caller sends the attempt again: the new call is registered before it
/// sends anything, so the cleanup leaves to it what it finds.
#[test]
fn a_repeated_call_is_wanted_while_its_cleanup_runs() {
    let registry = HoldRegistry::default();
    let first = registry.begin(ATTEMPT, &names(), TTL, NOW);
    end(&registry, &first, false);
    assert_eq!(registry.take_due(NOW + TTL).0.len(), 1);
    assert!(!registry.is_wanted(&ATTEMPT));
    let _second = registry.begin(ATTEMPT, &names(), TTL, NOW);
    assert!(registry.is_wanted(&ATTEMPT));
}
