//! The help texts, word for word: a change of one shows up in a review.

mod common;
use common::*;

const COMMANDS: [&str; 48] = [
    "",
    "run",
    "hold",
    "ls",
    "show",
    "status",
    "watch",
    "metrics",
    "doctor",
    "advise",
    "break",
    "cron",
    "elect",
    "once",
    "claim",
    "jobs",
    "jobs install",
    "jobs uninstall",
    "jobs sql",
    "jobs run",
    "jobs status",
    "jobs failed",
    "jobs retry",
    "cached",
    "partitions",
    "limit",
    "record",
    "record get",
    "record set",
    "record cas",
    "record rm",
    "record ls",
    "record watch",
    "store",
    "store init",
    "verify",
    "fence",
    "fence check",
    "fence install",
    "fence uninstall",
    "fence status",
    "gate",
    "fenced-write",
    "lab",
    "lab ls",
    "lab run",
    "completions",
    "man",
];

#[test]
fn the_help_texts_match_help_txt() {
    let place = Place::new("help_texts");
    let mut all = String::new();
    for command in COMMANDS {
        let words = command.split(' ').filter(|word| !word.is_empty()).chain(["--help"]);
        let output = place.lk(words).env("COLUMNS", "100").output().unwrap();
        let too_long = text(&output).lines().find(|line| line.chars().count() > 100).map(str::to_owned);
        assert_eq!(too_long, None);
        all +=
            &format!("$ lockkeeper {command} --help\n{}\n", text(&output)).replace("  --help\n", " --help\n");
    }
    let agreed = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help.txt");
    if std::env::var_os("UPDATE_HELP").is_some() {
        std::fs::write(&agreed, &all).unwrap();
    }
    let agreed = std::fs::read_to_string(&agreed).unwrap_or_default();
    assert!(agreed == all, "if this is meant, set UPDATE_HELP=1 and look at the difference:\n{all}");
}
