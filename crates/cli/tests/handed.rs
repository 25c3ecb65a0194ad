//! A command whose lock was granted while it waited, by a store that gives waiters a short first lease.

mod common;
use common::*;
use lockkeeper_testkit::servers::{self, RedisOptions};

/// The lead with which a command is ended was counted in the ttl: longer than all of the first lease, so that the command was
/// ended as it began. With a long ttl the watchdog heard of the first deadline, and of the next one much too late.
#[test]
fn a_command_that_is_handed_the_lock_runs_to_its_end() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let place = Place::new("handed");
    // A first lease that is no longer than the grace, and a command that outlasts it.
    for (ttl, claim, work) in [("30s", "5s", 1), ("30s", "1s", 2), ("10m", "1s", 2), ("10m", "5s", 6)] {
        let x = format!("x --store redis://{}?claim={claim}&poll=200ms", server.addr());
        let mut first = place.start(&format!("{x} --ttl {ttl}"), "echo in; cat");
        assert_eq!(first.line(), "in");
        let second = place.start(&format!("{x} --ttl {ttl} --quiet"), &format!("sleep {work}; echo done"));
        place.until(&x, |seen| seen["lock"]["waiting"] == 1);
        assert_eq!(first.end().0, 0);
        assert_eq!(second.end(), (0, "done\n".into(), String::new()), "ttl {ttl}, claim {claim}");
    }
}
