//! The registry when calls of the same attempt overlap, without a server.

use lockkeeper_core::{Attempt, Holder, LockName};

use super::*;

const NOW: BootInstant = BootInstant::from_nanos(1_000_000_000);
const TTL: Duration = Duration::from_secs(10);
const HASH: AttemptHash = [7; 16];

fn request() -> LockRequest {
    let name = LockName::new("orders/42").unwrap();
    LockRequest::new(Attempt::from_bytes([7; 16]), name, TTL, Arc::new(Holder::new("host", 1, None).unwrap()))
}

fn end(registry: &HoldRegistry, caller: &Arc<CancelSignal>, left_nothing: bool) {
    registry.end(HASH, &request().key.names, caller, left_nothing, NOW);
}

/// A caller drops a call and sends the attempt again while a server may still apply the first one. The second call
/// finds no node, because there is none yet, and ends with *busy*. The registry forgot the attempt: a node that the
/// servers created afterwards held the lock for as long as the process lived.
#[test]
fn a_dropped_call_that_was_replaced_is_cleaned_up() {
    let registry = HoldRegistry::default();
    let (first, _) = registry.begin(HASH, &request(), NOW);
    let (second, _) = registry.begin(HASH, &request(), NOW);
    end(&registry, &first, false);
    end(&registry, &second, true);
    let (due, _) = registry.take_due(NOW + TTL);
    assert_eq!(due.len(), 1, "the process looks for the nodes of the first call");
}

#[test]
fn a_call_without_any_node_leaves_no_entry() {
    let registry = HoldRegistry::default();
    let (first, _) = registry.begin(HASH, &request(), NOW);
    let (second, _) = registry.begin(HASH, &request(), NOW);
    end(&registry, &first, true);
    end(&registry, &second, true);
    assert!(registry.table().holds.is_empty());
}

/// The cleanup of an attempt has begun, and the caller sends the attempt again: the new call knows that nodes of the
/// attempt may exist and that the cleanup still runs, so it waits for the cleanup before it creates a node.
#[test]
fn a_repeated_call_knows_that_its_cleanup_runs() {
    let registry = HoldRegistry::default();
    let (first, before) = registry.begin(HASH, &request(), NOW);
    assert_eq!(before, None);
    end(&registry, &first, false);
    assert_eq!(registry.take_due(NOW + TTL).0.len(), 1);
    let (_second, before) = registry.begin(HASH, &request(), NOW);
    assert_eq!(before, Some(NOW), "nodes of the first call may exist");
    assert!(registry.table().ending.contains(&HASH));
}
