//! Each checker passes what is right and catches what is wrong.

#[path = "history/sim.rs"]
mod sim;

use std::time::Duration;

use lockkeeper_core::Fence;
use lockkeeper_testkit::history::{
    self, Demand, History, HistoryEvent, HistoryRecorder, HistoryVerdict, Pause, Rule, Violation, contended,
    exclusion, fences, laws, linearizability, no_signals, owners, residue, resource, signals, stale_writes,
    verdict,
};
use lockkeeper_testkit::resource::Accepted;
use lockkeeper_testkit::servers::TempDir;

/// A history from lines such as `20 p1 acquire ok a1 fence=1 deadline=100`; the lock is `x` unless it is named.
fn story(text: &str) -> History {
    History::new(text.lines().filter(|line| !line.trim().is_empty()).map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut json = serde_json::json!({
            "t": words[0].parse::<u64>().unwrap(),
            "proc": words[1], "op": words[2], "phase": words[3], "attempt": words[4], "lock": "x",
        });
        for (key, value) in words[5..].iter().map(|word| word.split_once('=').unwrap()) {
            let text = matches!(key, "lock" | "owner" | "mode" | "error" | "value");
            json[key] = if text { value.into() } else { value.parse::<u64>().unwrap().into() };
        }
        serde_json::from_value::<HistoryEvent>(json).unwrap()
    }))
}

#[track_caller]
fn assert_clean(found: &[Violation]) {
    assert!(found.is_empty(), "{}", found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
}

#[track_caller]
fn assert_one(found: &[Violation], rule: Rule, text: &str, times: &[u64]) {
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].rule, rule);
    assert!(found[0].text.contains(text), "{}", found[0]);
    assert_eq!(found[0].events.iter().map(|event| event.t).collect::<Vec<_>>(), times, "{}", found[0]);
}

/// One holder after the other, with an expiry, a renewal, an unknown outcome and a busy answer on the way.
const GOOD: &str = "
    10 p1 acquire invoke a1
    20 p1 acquire ok a1 fence=1 deadline=100
    30 p2 acquire invoke a2
    40 p2 acquire fail a2 error=busy
    50 p1 renew invoke a1
    60 p1 renew ok a1 deadline=150
    70 p3 acquire invoke a3
    151 p1 signal info a1
    160 p3 acquire ok a3 fence=2 deadline=260
    170 p1 release invoke a1
    175 p1 release fail a1 error=lost
    180 p3 release invoke a3
    190 p2 acquire invoke a4
    200 p2 acquire info a4 error=unknown
    210 p3 release ok a3
    220 p2 acquire invoke a4
    230 p2 acquire ok a4 fence=3 deadline=320
    240 p2 release invoke a4
    250 p2 release ok a4";

#[test]
fn a_good_history_is_clean() {
    let history = story(GOOD);
    assert_clean(&laws(&history));
    assert_clean(&signals(&history, &[], Duration::from_nanos(5)));
    assert_clean(&residue(&history, []));
    assert_eq!(contended(&history), 2);
    let demand = Demand { operations: 9, faults: 2, contended: 2 };
    verdict(&history, demand, 2, laws(&history)).assert_green();
}

#[test]
fn exclusion_finds_two_holders_but_not_two_after_each_other() {
    let overlap = "
        10 p1 acquire invoke a1
        20 p1 acquire ok a1 fence=1 deadline=100
        30 p2 acquire invoke a2
        99 p2 acquire ok a2 fence=2 deadline=200";
    assert_one(&exclusion(&story(overlap)), Rule::Exclusion, "held twice", &[20, 99]);
    assert_clean(&exclusion(&story(&overlap.replace("        99 ", "        100 "))));
    for end in ["90 p1 release invoke a1", "90 p1 signal info a1", "90 p1 renew fail a1 error=lost"] {
        assert_clean(&exclusion(&story(&format!("{overlap}\n{end}"))));
    }
    let unknown = overlap.replace("p1 acquire ok", "p1 acquire info");
    assert_clean(&exclusion(&story(&unknown)));
    // An error says nothing about the lease; and a renewal that comes too late does not bring it back.
    assert_eq!(exclusion(&story(&format!("{overlap}\n90 p1 renew fail a1 error=unavailable"))).len(), 1);
    let late = overlap.replace("        99 ", "        105 ") + "\n102 p1 renew ok a1 deadline=200";
    assert_clean(&exclusion(&story(&late)));
    let in_time = late.replace("102 p1", "98 p1");
    assert_one(&exclusion(&story(&in_time)), Rule::Exclusion, "held twice", &[20, 105]);
    assert_clean(&exclusion(&story(&overlap.replace("fence=2", "fence=2 lock=y"))));
}

#[test]
fn exclusion_knows_shared_permits_and_owners() {
    let two = |first: &str, second: &str| {
        story(&format!(
            "10 p1 acquire invoke a1 {first}
             20 p1 acquire ok a1 fence=1 deadline=100 {first}
             30 p2 acquire invoke a2 {second}
             40 p2 acquire ok a2 fence=2 deadline=100 {second}"
        ))
    };
    for (first, second) in [
        ("mode=shared", "mode=shared"),
        ("mode=permit permits=2", "mode=permit permits=2"),
        ("owner=o1", "owner=o1"),
        ("owner=o1 mode=permit permits=1", "owner=o1 mode=permit permits=1"),
    ] {
        assert_clean(&exclusion(&two(first, second)));
    }
    for (first, second) in [
        ("mode=shared", "mode=exclusive"),
        ("mode=exclusive", "mode=shared"),
        ("mode=shared", "mode=permit permits=5"),
        ("mode=permit permits=5", "mode=shared"),
        ("mode=permit permits=5", "mode=permit permits=1"),
        ("owner=o1", "owner=o2"),
    ] {
        assert_one(&exclusion(&two(first, second)), Rule::Exclusion, "", &[20, 40]);
    }
}

#[test]
fn fences_must_grow_and_be_given_once() {
    let two = |b_asks: u64, a: u64, b: u64, more: &str| {
        story(&format!(
            "10 p1 acquire invoke a1 owner=o1
             20 p1 acquire ok a1 fence={a} deadline=25
             {b_asks} p2 acquire invoke a2 {more}
             40 p2 acquire ok a2 fence={b} deadline=100"
        ))
    };
    assert_clean(&fences(&two(30, 1, 2, "")));
    assert_clean(&fences(&two(15, 2, 1, "")));
    assert_one(&fences(&two(30, 2, 1, "")), Rule::Fence, "went back from 2 to 1", &[20, 40]);
    assert_one(&fences(&two(30, 7, 7, "")), Rule::Fence, "have the fence 7", &[20, 40]);
    assert_one(&fences(&two(15, 7, 7, "")), Rule::Fence, "have the fence 7", &[20, 40]);
    assert_clean(&fences(&two(30, 7, 7, "owner=o1")));
    let released = |t: u64| {
        let mut events = two(30, 7, 7, "owner=o1").events().to_vec();
        events.extend(story(&format!("{t} p1 release ok a1")).events().to_vec());
        History::new(events)
    };
    assert_one(&fences(&released(28)), Rule::Fence, "released before", &[20, 40]);
    assert_clean(&fences(&released(32)));
    let repeated = GOOD.to_owned() + "\n235 p2 acquire ok a4 fence=4 deadline=330";
    assert_one(&fences(&story(&repeated)), Rule::Fence, "one attempt", &[230, 235]);
    let without = story("10 p1 acquire invoke a1\n20 p1 acquire ok a1");
    assert_eq!(fences(&without).len(), 1);
}

#[test]
fn only_the_owner_renews_and_releases_and_only_once() {
    let with = |more: &str| owners(&story(&format!("{GOOD}\n{more}")));
    assert_one(&with("165 p9 release invoke zz\n170 p9 release ok zz"), Rule::Owner, "never asked", &[170]);
    assert_one(&with("165 p9 renew invoke zz\n170 p9 renew ok zz"), Rule::Owner, "never asked", &[170]);
    assert_one(
        &with("260 p2 release invoke a4\n270 p2 release ok a4"),
        Rule::Owner,
        "after it had",
        &[250, 270],
    );
    assert_one(&with("260 p2 renew invoke a4\n270 p2 renew ok a4"), Rule::Owner, "after it had", &[250, 270]);
    // p1 lost it, p3 has it, and the store lets p1 renew or release it.
    assert_one(&with("165 p1 renew invoke a1\n168 p1 renew ok a1"), Rule::Owner, "did not hold", &[160, 168]);
    let stale = GOOD.replace("175 p1 release fail a1 error=lost", "175 p1 release ok a1");
    assert_one(&owners(&story(&stale)), Rule::Owner, "did not hold", &[160, 175]);
    // While the holder changes, both may be told the truth.
    assert_clean(&with("155 p1 renew invoke a1\n168 p1 renew ok a1"));
    // A request that was never granted leaves the queue while another client holds the lock.
    assert_clean(&with("162 p2 release invoke a2\n165 p2 release ok a2"));
}

#[test]
fn a_fingerprint_that_comes_again_is_another_ask() {
    let again = GOOD.to_owned()
        + "
        300 p2 acquire invoke a4
        310 p2 acquire ok a4 fence=9 deadline=400
        320 p2 release invoke a4
        330 p2 release ok a4";
    assert_clean(&laws(&story(&again)));
}

#[test]
fn a_loss_is_told_by_the_deadline_or_right_after_a_pause() {
    let slack = Duration::from_nanos(10);
    let told = |t: u64| {
        story(&format!(
            "10 p1 acquire invoke a1\n20 p1 acquire ok a1 fence=1 deadline=100\n{t} p1 signal info a1"
        ))
    };
    assert_clean(&signals(&told(50), &[], slack));
    assert_clean(&signals(&told(110), &[], slack));
    assert_one(&signals(&told(111), &[], slack), Rule::Signal, "too late", &[20, 111]);
    let pause = Pause { proc: "p1".into(), from: 90, to: 500 };
    assert_clean(&signals(&told(505), std::slice::from_ref(&pause), slack));
    assert_eq!(signals(&told(511), &[pause], slack).len(), 1);
    assert_eq!(no_signals(&told(50)).len(), 1);

    let silent = "10 p1 acquire invoke a1\n20 p1 acquire ok a1 fence=1 deadline=100";
    assert_clean(&signals(&story(silent), &[], slack));
    let alive = format!("{silent}\n200 p1 acquire invoke a2");
    assert_one(&signals(&story(&alive), &[], slack), Rule::Signal, "never told", &[20]);
    assert_clean(&signals(&story(&format!("{alive}\n90 p1 release invoke a1")), &[], slack));
}

fn log(writes: &[(u64, &str)]) -> Vec<Accepted> {
    let accepted = |(fence, value): &(u64, &str)| Accepted {
        fence: Fence::new(*fence).unwrap(),
        value: (*value).to_owned(),
    };
    writes.iter().map(accepted).collect()
}

#[test]
fn a_resource_takes_writes_in_the_order_of_fences_and_loses_none() {
    let history = story(
        "10 p1 write invoke a1 fence=1 value=one
         20 p1 write ok a1 fence=1 value=one
         30 p2 write invoke a2 fence=2 value=two
         40 p2 write ok a2 fence=2 value=two
         50 p1 write invoke a1 fence=1 value=late
         60 p1 write fail a1 fence=1 value=late error=stale
         70 p3 write invoke a3 fence=3 value=maybe
         80 p3 write info a3 fence=3 value=maybe error=unknown",
    );
    let check = |writes: &[(u64, &str)]| resource(&history, "x", &log(writes));
    assert_clean(&check(&[(1, "one"), (2, "two")]));
    assert_clean(&check(&[(1, "one"), (2, "two"), (3, "maybe")]));
    assert_one(&check(&[(2, "two"), (1, "one")]), Rule::Resource, "after fence 2", &[40, 20]);
    assert_one(&check(&[(1, "one")]), Rule::Resource, "is lost", &[40]);
    assert_one(&check(&[(1, "one"), (2, "two"), (2, "two")]), Rule::Resource, "taken 2 times", &[]);
    assert_one(&check(&[(1, "one"), (2, "two"), (9, "who")]), Rule::Resource, "no client wrote", &[]);
    assert_one(&check(&[(1, "one"), (1, "late"), (2, "two")]), Rule::Resource, "taken all the same", &[60]);
    assert_eq!(stale_writes(&log(&[(1, "a"), (3, "b"), (2, "c"), (3, "d"), (1, "e")])).count(), 2);
}

#[test]
fn what_is_left_is_told_with_the_last_that_was_heard_of_it() {
    let found = residue(&story(GOOD), [("x", "a queue row")]);
    assert_one(&found, Rule::Residue, "a queue row is left of \"x\"", &[250]);
}

#[test]
fn a_run_in_which_nothing_happened_is_invalid_and_not_green() {
    let history = story(GOOD);
    for (demand, fired, missing) in [
        (Demand { operations: 10, faults: 0, contended: 0 }, 0, "9 of at least 10 operations"),
        (Demand { operations: 0, faults: 3, contended: 0 }, 2, "2 of at least 3 faults"),
        (Demand { operations: 0, faults: 0, contended: 3 }, 0, "2 of at least 3 asks"),
    ] {
        let HistoryVerdict::Invalid(text) = verdict(&history, demand, fired, vec![]) else {
            panic!("{demand:?}")
        };
        assert!(text.len() == 1 && text[0].contains(missing), "{text:?}");
        let red = verdict(&history, demand, fired, residue(&history, [("x", "a key")]));
        assert!(matches!(red, HistoryVerdict::Red(_)), "a violation counts all the same");
    }
    let empty = verdict(&History::default(), Demand { operations: 1, faults: 1, contended: 1 }, 0, vec![]);
    assert!(matches!(empty, HistoryVerdict::Invalid(missing) if missing.len() == 3));
}

#[test]
fn many_threads_write_one_history_and_no_line_is_torn() {
    let dir = TempDir::new("history");
    let path = dir.join("run.jsonl");
    std::thread::scope(|scope| {
        for n in 0..8 {
            let recorder = HistoryRecorder::new(&path, format!("p{n}")).unwrap();
            scope.spawn(move || {
                for k in 0..200 {
                    recorder
                        .record(HistoryEvent::invoke(history::Operation::Write, "x").value("long".repeat(k)));
                }
            });
        }
    });
    let history = History::read(&path).unwrap();
    assert_eq!(history.events().len(), 1600);
    assert!(history.events().is_sorted_by_key(|event| event.t));
    assert!(History::parse("{}\n").unwrap_err().to_string().contains("line 1"));
}

#[test]
fn a_correct_lock_breaks_no_rule_and_every_bug_is_caught_by_its_rule() {
    for seed in 0..100 {
        let run = sim::run(seed, None);
        assert!(run.history.events().len() > 200, "seed {seed}: too little happened");
        assert!(contended(&run.history) > 10, "seed {seed}: no client had to wait");
        let found = run.violations();
        assert!(found.is_empty(), "seed {seed}: {}", found[0]);
    }
    for (bug, rule) in sim::Bug::ALL {
        let caught = (0..20).filter(|seed| run_breaks(*seed, bug, rule)).count();
        assert!(caught >= 5, "{bug:?} was caught by {rule:?} in {caught} of 20 runs");
    }
}

#[test]
fn a_search_for_an_order_finds_what_the_sweeps_find() {
    use sim::Bug::{DeadlineFromReply, FenceIsGivenTwice, FenceStartsAgain, GrantsWhatIsHeld};
    for bug in [GrantsWhatIsHeld, DeadlineFromReply, FenceStartsAgain, FenceIsGivenTwice] {
        let caught = (0..20).filter(|seed| run_breaks(*seed, bug, Rule::Linearizability)).count();
        assert!(caught >= 5, "{bug:?} was caught in {caught} of 20 runs");
    }
}

#[test]
fn an_order_that_explains_the_history_is_found_or_missed() {
    assert_clean(&linearizability(&story(GOOD)));
    // Both are granted while both ask: the order of their fences explains it, if the first was released in time.
    let race = "
        10 p1 acquire invoke a1
        11 p2 acquire invoke a2
        40 p1 acquire ok a1 fence=2 deadline=200
        41 p2 acquire ok a2 fence=1 deadline=200";
    let explained = "
        10 p1 acquire invoke a1
        11 p2 acquire invoke a2
        40 p2 acquire ok a2 fence=1 deadline=200
        42 p2 release invoke a2
        50 p1 acquire ok a1 fence=2 deadline=200
        60 p2 release ok a2
        70 p1 release invoke a1
        80 p1 release ok a1";
    assert_clean(&linearizability(&story(explained)));
    assert_one(
        &linearizability(&story(race)),
        Rule::Linearizability,
        "no order of the 2 operations",
        &[40, 41],
    );
    // The planted overlap: the second has the lock before the first begins to release it.
    let overlap = explained.replace("        42 p2 release invoke", "        55 p2 release invoke");
    assert_one(&linearizability(&story(&overlap)), Rule::Linearizability, "no order of the", &[50, 40]);
    // Two windows: a fence that goes back from one to the next.
    let back = format!("{explained}\n90 p3 acquire invoke a3\n95 p3 acquire ok a3 fence=2 deadline=300");
    assert_one(&linearizability(&story(&back)), Rule::Linearizability, "no order of the 1", &[95]);
}

fn run_breaks(seed: u64, bug: sim::Bug, rule: Rule) -> bool {
    sim::run(seed, Some(bug)).violations().iter().any(|violation| violation.rule == rule)
}

#[test]
fn a_hundred_thousand_events_are_judged_at_once() {
    let rounds = (0..25_000_u64).map(|n| {
        let (t, fence) = (n * 10, n + 1);
        format!(
            "{t} p{p} acquire invoke {n}\n{a} p{p} acquire ok {n} fence={fence} deadline={d}\n\
             {b} p{p} release invoke {n}\n{c} p{p} release ok {n}",
            p = n % 7,
            a = t + 1,
            b = t + 2,
            c = t + 3,
            d = t + 9
        )
    });
    let history = story(&rounds.collect::<Vec<_>>().join("\n"));
    let start = std::time::Instant::now();
    assert_clean(&laws(&history));
    // Anything quadratic would take minutes.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}
