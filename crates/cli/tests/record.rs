//! Values on the command line: what is written comes back, what others changed is not overwritten.

mod common;
use std::process::{Command, Output, Stdio};

use common::*;
use serde_json::Value;

fn run(place: &Place, words: &[&str]) -> Output {
    place.lk(words).output().unwrap()
}

fn fence(output: &Output) -> String {
    json(output)["fence"].as_u64().unwrap().to_string()
}

#[test]
fn what_is_written_comes_back_byte_for_byte() {
    let place = Place::new("record_bytes");
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let mut set = place.lk(["record", "set", "blob", "--stdin"]);
    let mut child = set.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &bytes).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(run(&place, &["record", "get", "blob"]).stdout == bytes);
    let shown = json(&run(&place, &["record", "get", "blob", "--json"]));
    assert!(shown["value_hex"].as_str().unwrap().starts_with("000102"));
    assert!(run(&place, &["record", "set", "text", "two\nlines"]).status.success());
    assert_eq!(text(&run(&place, &["record", "get", "text"])), "two\nlines");
    let all = json(&run(&place, &["record", "ls", "--json"]));
    let keys: Vec<&Value> = all["records"].as_array().unwrap().iter().map(|r| &r["key"]).collect();
    assert_eq!(keys, ["blob", "text"]);
    assert!(text(&run(&place, &["record", "ls", "te"])).contains("two"));
}

#[test]
fn a_change_of_somebody_else_is_not_overwritten() {
    let place = Place::new("record_cas");
    let made = run(&place, &["record", "cas", "r", "one", "--absent", "--json"]);
    let one = fence(&made);
    let again = run(&place, &["record", "cas", "r", "uno", "--absent"]);
    assert_eq!(code(again.status), 65);
    assert!(errors(&again).contains("changed by others"), "{}", errors(&again));
    let two = fence(&run(&place, &["record", "cas", "r", "two", "--fence", &one, "--json"]));
    assert!(two.parse::<u64>().unwrap() > one.parse().unwrap());
    assert_eq!(code(run(&place, &["record", "cas", "r", "late", "--fence", &one]).status), 65);
    assert_eq!(code(run(&place, &["record", "rm", "r", "--fence", &one]).status), 65);
    assert_eq!(text(&run(&place, &["record", "get", "r"])), "two");
    assert_eq!(code(run(&place, &["record", "rm", "r", "--fence", &two]).status), 0);
    for gone in [vec!["get", "r"], vec!["rm", "r"], vec!["cas", "r", "x", "--fence", &two]] {
        let output = run(&place, &[&["record"], &gone[..]].concat());
        assert_eq!(code(output.status), 66, "{gone:?}");
        assert!(errors(&output).contains("there is no record"), "{}", errors(&output));
        let output = run(&place, &[&["record"], &gone[..], &["--json"]].concat());
        let error: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!(
            (&error["error"]["outcome"], &error["error"]["exit_code"]),
            (&"absent".into(), &66.into())
        );
    }
}

#[test]
fn bad_calls_are_told_and_write_nothing() {
    let place = Place::new("record_bad");
    for (words, says) in [
        (&["record", "set", "", "x"][..], "empty"),
        (&["record", "set", "k"], "required"),
        (&["record", "set", "k", "x", "--stdin"], "cannot be used with"),
        (&["record", "set", "k", "x", "--ttl", "5"], "add a unit"),
        (&["record", "cas", "k", "x"], "required"),
        (&["record", "cas", "k", "x", "--fence", "0"], "not a fence"),
        (&["record", "cas", "k", "x", "--fence", "many"], "a number"),
        (&["record", "get", "a\nb"], "control character"),
        (&["record", "frobnicate"], "unrecognized"),
    ] {
        let output = run(&place, words);
        assert_eq!(code(output.status), 64, "{words:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{words:?}: {}", errors(&output));
    }
    assert!(!place.db().exists(), "a bad call made a store");
    let huge = Command::new("head").args(["-c", "1100000", "/dev/zero"]).stdout(Stdio::piped()).spawn();
    let mut set = place.lk(["record", "set", "k", "--stdin"]);
    let output = set.stdin(huge.unwrap().stdout.unwrap()).output().unwrap();
    assert_eq!(code(output.status), 72, "{}", errors(&output));
    assert!(!place.db().exists());
}

#[test]
fn a_watcher_prints_what_is_there_and_every_change_after() {
    let place = Place::new("record_watch");
    let mut watch = Running::new(place.lk(["record", "watch", "r", "--poll", "100ms"]));
    assert_eq!(watch.line(), "there is none");
    for value in ["one", "two"] {
        run(&place, &["record", "set", "r", value]);
        assert!(watch.line().ends_with(value));
    }
    run(&place, &["record", "rm", "r"]);
    assert_eq!(watch.line(), "there is none");
    watch.signal(rustix::process::Signal::INT);
    let (ended, rest, _) = watch.end();
    assert_eq!((ended, rest.as_str()), (130, ""));
}
