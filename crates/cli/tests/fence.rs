//! Sequencers on the command line: a grant that holds, one that was given back, one whose lock another process holds now.

mod common;
use common::*;

fn check(place: &Place, sequencer: &str, more: &[&str]) -> (i32, String, String) {
    let output = place.lk(["fence", "check", sequencer]).args(more).output().unwrap();
    (code(output.status), text(&output), errors(&output))
}

#[test]
fn a_sequencer_is_good_for_as_long_as_the_grant_and_not_longer() {
    let place = Place::new("fence_check");
    let say = "echo $LOCKKEEPER_SEQUENCER; echo $LOCKKEEPER_FENCE; read line";
    let mut first = place.start("orders/42 --also b", say);
    let (sequencer, fence) = (first.line(), first.line());
    let (ended, out, _) = check(&place, &sequencer, &[]);
    assert_eq!((ended, out.contains(&fence)), (0, true), "{out}");
    let (_, out, _) = check(&place, &sequencer, &["--json"]);
    let said: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(said["fence"].to_string(), fence);
    assert_eq!((&said["mode"], &said["holds"]), (&"exclusive".into(), &true.into()));
    assert_eq!(said["names"], serde_json::json!(["b", "orders/42"]));
    // Released: no process holds it.
    first.say("\n");
    assert_eq!(first.end().0, 0);
    assert_eq!(check(&place, &sequencer, &[]).0, 76);
    // Another process holds one of the names now, with a newer fence.
    let mut second = place.start("orders/42", say);
    let newer = second.line();
    let (ended, _, err) = check(&place, &sequencer, &[]);
    assert_eq!((ended, err.contains("stale")), (65, true), "{err}");
    assert_eq!(check(&place, &newer, &[]).0, 0);
    let broken = place.run("break orders/42 --now --reason test --yes");
    assert_eq!(code(broken.status), 0);
    assert_eq!(check(&place, &newer, &[]).0, 76, "its holder may not know yet");
    drop(second);
}

#[test]
fn what_is_no_sequencer_is_told_before_a_store_is_made() {
    let place = Place::new("fence_bad");
    for bad in ["", "17", "lk1.x.17.a", "lk1.x.17.a.00000000", "lk2.x.17.a.00000000"] {
        let (ended, _, err) = check(&place, bad, &[]);
        assert_eq!((ended, err.contains("this is no sequencer")), (64, true), "{bad}: {err}");
    }
    assert!(!place.db().exists());
}

#[test]
fn a_store_that_cannot_be_asked_is_no_yes() {
    let place = Place::new("fence_away");
    let mut held = place.start("a", "echo $LOCKKEEPER_SEQUENCER; read line");
    let sequencer = held.line();
    let (ended, _, err) = check(&place, &sequencer, &["--store", "redis://127.0.0.1:1"]);
    assert_eq!(ended, 69, "{err}");
}
