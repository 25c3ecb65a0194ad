//! Bad input: a message that names the fault, exit code 64, and nothing written.

mod common;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use common::*;

fn refused(place: &Place, args: Vec<OsString>, fault: &str) {
    let output = place.lk(&args).output().unwrap();
    let err = errors(&output);
    assert_eq!(code(output.status), 64, "{args:?}: {err}");
    assert!(err.starts_with("lockkeeper: ") && err.contains(fault), "{args:?}: {err}");
    assert!(!err.contains('\u{1b}') && !err.contains("panicked"), "{err:?}");
    assert_eq!(text(&output), "");
    assert_eq!(std::fs::read_dir(&place.dir).unwrap().count(), 0, "{args:?} left something behind");
}

fn words(line: &[&str]) -> Vec<OsString> {
    line.iter().map(OsString::from).collect()
}

#[test]
fn bad_names() {
    let place = Place::new("bad_names");
    let long = "x".repeat(513);
    let names: [(OsString, &str); 5] = [
        ("".into(), "empty"),
        (long.into(), "513 bytes"),
        ("a\nb".into(), "control character"),
        ("\u{1b}[31mred".into(), "control character"),
        (OsString::from_vec(b"a\xffb".to_vec()), "not UTF-8"),
    ];
    for (name, fault) in &names {
        let with = |before: &[&str], after: &[&str]| {
            let mut line = words(before);
            line.push(name.clone());
            line.extend(words(after));
            line
        };
        refused(&place, with(&["run"], &["--", "true"]), fault);
        refused(&place, with(&["run", "good", "--also"], &["--", "true"]), fault);
        refused(&place, with(&["hold"], &[]), fault);
        refused(&place, with(&["show"], &[]), fault);
        refused(&place, with(&["break"], &["--reason", "r", "--yes"]), fault);
    }
}

#[test]
fn bad_spans_and_numbers() {
    let place = Place::new("bad_spans");
    for (flag, value, fault) in [
        ("--ttl", "0s", "100ms to 24h"),
        ("--ttl", "-5s", "negative"),
        ("--ttl", "30", "add a unit"),
        ("--ttl", "-30", "add a unit"),
        ("--ttl", "25h", "100ms to 24h"),
        ("--ttl", "99999999999999999999999s", "absurdly long"),
        ("--ttl", "soon", "not a span of time"),
        ("--ttl", "", "not a span of time"),
        ("--wait", "0s", "--skip"),
        ("--wait", "99999h", "are possible"),
        ("--min-hold", "25h", "0s to 24h"),
        ("--max-hold", "1ms", "100ms to"),
        ("--lock-delay", "-1s", "negative"),
        ("--grace", "-1s", "negative"),
        ("--permits", "0", "--permits"),
        ("--permits", "-1", "--permits"),
        ("--permits", "9999999999", "--permits"),
    ] {
        refused(&place, words(&["run", "x", flag, value, "--", "true"]), fault);
        refused(&place, words(&["run", "x", flag, value, "--", "true"]), flag);
    }
    refused(&place, words(&["run", "x", "--max-hold", "1s", "--min-hold", "2s", "--", "true"]), "--min-hold");
    refused(&place, words(&["run", "x", "--label", "a\nb", "--", "true"]), "label");
    let many: Vec<String> = (0..64).map(|n| format!("--also=n{n}")).collect();
    let mut line = words(&["run", "x"]);
    line.extend(many.iter().map(OsString::from));
    line.extend(words(&["--", "true"]));
    refused(&place, line, "64 names");
}

#[test]
fn bad_stores() {
    let place = Place::new("bad_stores");
    for (url, fault) in [
        ("", "scheme"),
        ("nonsense", "scheme"),
        ("carrier-pigeon://coop", "carrier-pigeon"),
        ("memory:something", "memory:"),
        ("sqlite:", "path"),
        ("sqlite:?x=1", "sqlite"),
    ] {
        for line in [&["run", "x", "--", "true"][..], &["ls"], &["show", "x"], &["watch"], &["hold", "x"]] {
            let mut args = words(&line[..1]);
            args.extend(words(&["--store", url]));
            args.extend(words(&line[1..]));
            refused(&place, args, fault);
        }
    }
    let output = place.lk(["ls"]).env("LOCKKEEPER_STORE", "pigeon:").output().unwrap();
    assert_eq!(code(output.status), 64);
}

#[test]
fn bad_calls() {
    let place = Place::new("bad_calls");
    for (line, fault) in [
        (&["bogus"][..], "bogus"),
        (&["run"], "NAME"),
        (&["run", "x"], "CMD"),
        (&["run", "x", "true"], "true"),
        (&["run", "x", "--skip", "--wait", "1s", "--", "true"], "--skip"),
        (&["run", "x", "--shared", "--permits", "2", "--", "true"], "--permits"),
        (&["break", "x"], "--reason"),
        (&["break", "x", "--yes", "--reason", " "], "reason is empty"),
        (&["break", "x", "--yes", "--reason", "two\nlines"], "one line"),
        (&["completions", "edlin"], "edlin"),
        (&["man", "bogus"], "bogus"),
    ] {
        refused(&place, words(line), fault);
    }
    // A line break in a word forged a message of the program.
    for words in [
        &["x\nlockkeeper: forged"][..],
        &["help", "x\nlockkeeper: forged"],
        &["ls", "-x\nlockkeeper: forged"],
    ] {
        let output = place.lk(words).output().unwrap();
        assert_eq!(code(output.status), 64, "{words:?}");
        let said = errors(&output).lines().filter(|line| line.starts_with("lockkeeper: ")).count();
        assert_eq!(said, 1, "{words:?}: {}", errors(&output));
    }
    let output = place.lk(["run", "x", "--json", "--ttl", "0s", "--", "true"]).output().unwrap();
    let error: serde_json::Value = serde_json::from_str(errors(&output).trim()).unwrap();
    assert_eq!(error["error"]["outcome"], "invalid");
    assert!(error["error"]["message"].as_str().unwrap().contains("--ttl"));
}

#[test]
fn a_store_that_cannot_be_trusted_is_refused_for_correctness() {
    let place = Place::new("correctness");
    let output = place.run("run x --store memory: --correctness -- touch ran");
    assert_eq!(code(output.status), 78);
    assert!(errors(&output).contains("sqlite:PATH"), "{}", errors(&output));
    assert!(!place.dir.join("ran").exists());
    let output = place.run("run x --store memory: -- touch ran");
    assert!(errors(&output).contains("warning") && place.dir.join("ran").exists());
    assert_eq!(code(place.run("run x --correctness -- true").status), 0);
}

#[test]
fn help_and_version_are_no_errors() {
    let place = Place::new("help");
    for line in ["--help", "-h", "--version", "run --help", "break -h"] {
        let output = place.run(line);
        assert_eq!((code(output.status), errors(&output).as_str()), (0, ""));
        assert!(!text(&output).is_empty() && !text(&output).contains('\u{1b}'));
    }
    let output = place.lk([] as [&str; 0]).output().unwrap();
    assert_eq!(code(output.status), 64);
}
