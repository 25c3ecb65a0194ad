//! Every situation has advice, and the advice keeps the rules that no table row may break.

use super::stores::StateHome;
use super::*;

/// Every combination of answers that makes a difference.
fn every_situation() -> Vec<Situation> {
    let mut all = Vec::new();
    for purpose in [Purpose::Efficiency, Purpose::Correctness] {
        for resource in ResourceKind::value_variants() {
            for running in RunningSystem::value_variants() {
                for work in [1, 50, 5_000, 5_001, 3_600_000].map(Duration::from_millis) {
                    for conflicts in ConflictRate::value_variants() {
                        for hosts in HostCount::value_variants() {
                            let (resource, running) = (*resource, vec![*running]);
                            let (conflicts, hosts) = (*conflicts, *hosts);
                            all.push(Situation { purpose, resource, running, work, conflicts, hosts });
                        }
                    }
                }
            }
        }
    }
    all
}

#[test]
fn every_situation_has_complete_advice() {
    let mut used = std::collections::HashSet::new();
    for situation in every_situation() {
        let advice = advise(&situation);
        let rule = advice.rule;
        assert_eq!(rule.resource, situation.resource);
        for text in [rule.mechanism, rule.why, rule.promised, rule.risk, rule.page] {
            assert!(!text.is_empty() && !text.contains("  "), "{situation:?}: {text:?}");
        }
        assert!(!rule.paste.is_empty(), "{situation:?}");
        used.insert(rule.mechanism);
    }
    let all: std::collections::HashSet<_> = rules::RULES.iter().map(|rule| rule.mechanism).collect();
    assert_eq!(used, all, "a row of the table that no situation reaches");
}

#[test]
fn correctness_is_never_advised_on_a_store_that_forgets() {
    for situation in every_situation() {
        let store = advise(&situation).store;
        let Some(url) = store.url else { continue };
        assert!(!url.starts_with("redlock") && !url.starts_with("memory"), "{situation:?}");
        if situation.purpose == Purpose::Correctness {
            assert!(!url.starts_with("redis"), "{situation:?}");
        }
        let for_one_host = url.starts_with("sqlite");
        assert_eq!(for_one_host, situation.hosts == HostCount::One, "{situation:?}");
    }
}

#[test]
fn a_lease_has_a_ttl_and_a_statement_has_none() {
    for situation in every_situation() {
        let advice = advise(&situation);
        match advice.rule.keeps {
            StateHome::OwnDatabase => assert!(!advice.rule.is_lock, "{situation:?}"),
            StateHome::Store => assert!(advice.store.url.is_some(), "{situation:?}"),
        }
        if let Some(ttl) = advice.ttl.ttl {
            assert!(
                ttl >= Duration::from_secs(5),
                "{situation:?}: a pause of a healthy host would end the lease"
            );
        }
    }
}

/// The answers that the issue asks for, by the mechanism's first words.
#[test]
fn the_worked_examples_get_the_known_answers() {
    let expected = [
        ("Cache stampede guard", "`cached`", Some("redis")),
        ("Seat checkout", "a reservation in the row", None),
        ("Nightly billing", "a window", Some("postgres")),
        ("One scheduler per cluster", "an election", Some("etcd")),
        ("Rate limit", "a rate limit", Some("redis")),
        ("Payment refund", "`once`", Some("postgres")),
        ("Profile updates", "compare-and-swap", None),
        ("Inventory reservation", "one conditional", None),
    ];
    for (example, (title, mechanism, store)) in examples::EXAMPLES.iter().zip(expected) {
        let advice = advise(&example.situation());
        assert_eq!(example.title, title);
        assert!(advice.rule.mechanism.starts_with(mechanism), "{title}: {}", advice.rule.mechanism);
        assert_eq!(advice.store.url.and_then(|url| url.split(':').next()), store, "{title}");
    }
}

#[test]
fn the_page_is_made_by_the_command() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/choosing.md");
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(there, page(), "make it anew: lockkeeper advise --examples > docs/guide/choosing.md");
}

/// The statements are for PostgreSQL. SQLite reads all of them but `FOR UPDATE`.
#[test]
fn the_sql_of_the_advice_works() {
    let schema = "CREATE TABLE seats (id integer PRIMARY KEY, sold_to text);
        CREATE TABLE profiles (id integer PRIMARY KEY, name text);
        CREATE TABLE stock (item integer PRIMARY KEY, amount integer);
        CREATE TABLE reservations (order_id text UNIQUE, item integer, amount integer);
        CREATE TABLE accounts (id integer PRIMARY KEY, balance integer);
        INSERT INTO seats VALUES (42, NULL); INSERT INTO profiles VALUES (42, 'Eve');
        INSERT INTO stock VALUES (42, 5); INSERT INTO accounts VALUES (42, 100);";
    let db = rusqlite::Connection::open_in_memory().unwrap();
    db.execute_batch(schema).unwrap();
    let mut run = 0;
    for paste in rules::RULES.iter().flat_map(|rule| rule.paste).filter(|paste| paste.language == "sql") {
        db.execute_batch(&paste.text.replace(" FOR UPDATE", ""))
            .unwrap_or_else(|e| panic!("{e}: {}", paste.text));
        run += 1;
    }
    assert_eq!(run, 4);
    let one = |sql: &str| db.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(one("SELECT count(*) FROM seats WHERE sold_to = 'cart-17'"), 1, "reserved, and bought");
    assert_eq!(one("SELECT amount FROM stock"), 2);
    assert_eq!(one("SELECT balance FROM accounts"), 90);
    assert_eq!(
        one("SELECT count(*) FROM profiles WHERE name = 'Ada'"),
        0,
        "version 7 was not there: no row changed"
    );
}
