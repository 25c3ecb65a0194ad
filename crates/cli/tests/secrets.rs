//! The command never shows a password: whatever is wrong with the address of a store, and at every level of the log.

mod common;

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::ffi::OsStringExt;

use common::*;

const CANARY: &str = "K4n4r13nv0g3l";

/// Runs the command with its log at trace level, for people and for machines; it must fail, and not show the canary.
fn silent(place: &Place, args: &[OsString]) {
    for json in [false, true] {
        let mut args = args.to_vec();
        let at = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
        args.splice(at..at, json.then(|| "--json".into()));
        let mut command = place.lk(&args);
        command.env("LOCKKEEPER_LOG", "trace");
        let output = command.output().unwrap();
        let said = format!("{}{}", errors(&output), text(&output));
        assert_ne!(code(output.status), 0, "{args:?}");
        assert!(!said.contains(CANARY), "{args:?}: {said}");
        assert!(said.contains("lockkeeper") || said.contains("error"), "{args:?} says nothing: {said:?}");
    }
}

/// A port without a listener.
fn closed_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

#[test]
fn the_address_of_a_store_is_not_shown() {
    let place = Place::new("secrets");
    let gone = closed_port();
    let urls = [
        format!("redis://me:{CANARY}@{gone}?timeout=200ms"),
        format!("redlock://me:{CANARY}@{gone},127.0.0.2:1,127.0.0.3:1?timeout=200ms"),
        format!("postgres://me:{CANARY}@{gone}/db?timeout=200ms"),
        format!("etcd://me:{CANARY}@{gone}?timeout=200ms"),
        format!("zk://me:{CANARY}@{gone}?timeout=200ms"),
        format!("dynamodb://me:{CANARY}@eu-central-1/locks?endpoint=http://{gone}&timeout=200ms"),
        format!("redis://:{CANARY}/ret@h"),
        format!("redis://:sec/{CANARY}@h"),
        format!("redis://:12?{CANARY}@h"),
        format!("redis://:{CANARY}"),
        format!("me:{CANARY}@h"),
        format!("{CANARY}@h"),
        CANARY.to_owned(),
    ];
    for url in &urls {
        silent(&place, &words(&["ls", "--store", url]));
        silent(&place, &words(&["run", "x", "--skip", "--store", url, "--", "true"]));
        silent(&place, &words(&["store", "init", url]));
        silent(&place, &words(&["fence", "status", "--postgres", url]));
    }
    // One that is not UTF-8: clap would repeat the value of an argument that it refuses.
    let odd = OsString::from_vec([b"redis://me:", CANARY.as_bytes(), b"@h\xff"].concat());
    for before in [&["ls", "--store"][..], &["store", "init"], &["fence", "status", "--postgres"]] {
        let mut args = words(before);
        args.push(odd.clone());
        silent(&place, &args);
    }
}
