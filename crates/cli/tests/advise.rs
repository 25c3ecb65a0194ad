//! `lockkeeper advise` without a terminal: answers as options, JSON, and a call that lacks an answer. Its table is tested beside it.

mod common;
use common::*;

const STOCK: &str = "advise --purpose correctness --resource stock --running postgres --work 20ms --conflicts often --hosts many";

#[test]
fn options_answer_the_questions() {
    let place = Place::new("advise");
    let done = place.run(STOCK);
    assert_eq!(code(done.status), 0, "{}", errors(&done));
    for words in [
        "one conditional UPDATE (no lock)",
        "amount >= 3",
        "promised",
        "a retry after a lost reply takes a second time",
    ] {
        assert!(text(&done).contains(words), "{words}: {}", text(&done));
    }
    let report = json(&place.run(&format!("{STOCK} --json")));
    assert_eq!(
        (&report["is_lock"], &report["store"]["url"]),
        (&false.into(), &serde_json::Value::Null),
        "{report}"
    );
    let lock = "advise --purpose correctness --resource device --running redis,etcd --work 1m --conflicts rarely --hosts many --json";
    let report = json(&place.run(lock));
    assert_eq!((&report["is_lock"], &report["ttl"]["ms"]), (&true.into(), &30_000.into()), "{report}");
    assert_eq!(report["store"]["url"], "etcd://HOST,HOST,HOST", "Redis is not for correctness");
}

#[test]
fn a_missing_answer_is_named_where_no_terminal_is() {
    let place = Place::new("advise_missing");
    let refused = place.run("advise --purpose correctness --resource stock --json");
    assert_eq!(code(refused.status), 64);
    assert!(errors(&refused).contains("--hosts is missing"), "{}", errors(&refused));
    assert!(text(&place.run("advise --examples")).starts_with("# Choosing a mechanism"));
    assert_eq!(code(place.run("advise --resource nonsense").status), 64);
}
