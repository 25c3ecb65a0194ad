//! `run --metrics FILE`, `lockkeeper metrics` and `show --for`: numbers that Prometheus takes, and that are true.

mod common;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use lockkeeper_testkit::servers::{self, RedisOptions, require};
use rustix::process::Signal;

/// Checks a text with Prometheus's own parser and its rules for names. `false`: the tests run without it.
fn promtool(args: &[&str], dir: &Path, input: &str) -> bool {
    let Ok(promtool) = require("prometheus", "promtool", "prometheus") else { return false };
    let mut command = Command::new(promtool);
    command.args(args).current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = text(&output) + &errors(&output);
    assert!(output.status.success(), "promtool {args:?}: {said}\n{input}");
    true
}

/// The value of a series.
fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
    Some(line.parse().unwrap())
}

/// The value of a series of a job that `run x` has written.
fn of_job(text: &str, name: &str) -> Option<f64> {
    value(text, &format!("lockkeeper_job_{name}{{kind=\"run\",lock=\"x\"}}"))
}

fn calls(text: &str, outcome: &str) -> f64 {
    let series = format!("lockkeeper_job_calls_total{{kind=\"run\",lock=\"x\",outcome=\"{outcome}\"}}");
    value(text, &series).unwrap_or_else(|| panic!("no {series} in {text}"))
}

fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
fn a_job_writes_its_numbers_and_counts_on() {
    let place = Place::new("job_numbers");
    let before = now();
    assert_eq!(code(place.run("run x --metrics x.prom -- sleep 0.3").status), 0);
    let first = place.read("x.prom");
    promtool(&["check", "metrics"], &place.dir, &first);
    for name in ["last_start", "last_end", "last_success"] {
        let at = of_job(&first, &format!("{name}_timestamp_seconds")).unwrap();
        assert!((before..=now()).contains(&at), "{name}: {at} in {first}");
    }
    assert!(of_job(&first, "hold_seconds").unwrap() >= 0.3, "{first}");
    assert!(of_job(&first, "wait_seconds").is_some() && of_job(&first, "running") == Some(0.0), "{first}");
    assert_eq!((of_job(&first, "exit_code"), calls(&first, "succeeded")), (Some(0.0), 1.0));
    let fence = of_job(&first, "fence").unwrap();

    assert_eq!(code(place.run("run x --metrics x.prom -- false").status), 1);
    let failed = place.read("x.prom");
    assert_eq!((of_job(&failed, "exit_code"), calls(&failed, "failed")), (Some(1.0), 1.0));
    assert_eq!(calls(&failed, "succeeded"), 1.0, "the count of before goes on: {failed}");
    let success = "last_success_timestamp_seconds";
    assert_eq!(of_job(&failed, success), of_job(&first, success), "a failure is no success");
    assert!(of_job(&failed, "fence").unwrap() > fence);

    // While another process holds the lock, a call with --skip changes neither the last run nor its exit code.
    let held = place.hold("x");
    assert_eq!(code(place.run("run x --skip --metrics x.prom -- true").status), 75);
    drop(held);
    let busy = place.read("x.prom");
    assert_eq!((calls(&busy, "busy"), of_job(&busy, "exit_code")), (1.0, Some(1.0)), "{busy}");
    let outcome = "lockkeeper_job_last_outcome{kind=\"run\",lock=\"x\",outcome=\"busy\"}";
    assert_eq!(value(&busy, outcome), Some(1.0));
    // Nothing is left beside the file.
    let files: Vec<_> = fs::read_dir(&place.dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(files.iter().all(|name| !name.to_string_lossy().contains(".prom.")), "{files:?}");
}

#[test]
fn many_calls_at_once_lose_no_count() {
    let place = Place::new("job_numbers_crowd");
    let running: Vec<Running> = (0..4)
        .map(|_| Running::new(place.lk(["run", "x", "--permits", "4", "--metrics", "x.prom", "--", "true"])))
        .collect();
    for run in running {
        assert_eq!(run.end().0, 0);
    }
    assert_eq!(calls(&place.read("x.prom"), "succeeded"), 4.0);
}

#[test]
fn the_file_keeps_its_mode_and_its_link() {
    let place = Place::new("job_numbers_mode");
    fs::create_dir(place.dir.join("textfile")).unwrap();
    let file = place.dir.join("textfile/x.prom");
    fs::write(&file, "").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink("textfile/x.prom", place.dir.join("link.prom")).unwrap();
    assert_eq!(code(place.run("run x --metrics link.prom -- true").status), 0);
    assert!(place.dir.join("link.prom").is_symlink());
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(calls(&place.read("textfile/x.prom"), "succeeded"), 1.0);
}

/// A rename over a device or a pipe would remove it, for root also /dev/null.
#[test]
fn a_file_that_cannot_be_written_is_a_warning() {
    let place = Place::new("job_numbers_bad");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        place.dir.join("pipe.prom"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    for (file, code_of, command) in
        [("pipe.prom", 0, "true"), ("missing/x.prom", 1, "false"), (".", 0, "true")]
    {
        let output = place.run(&format!("run x --metrics {file} -- {command}"));
        assert_eq!(code(output.status), code_of, "{file}: {}", errors(&output));
        assert!(errors(&output).contains("the metrics were not written to"), "{file}: {}", errors(&output));
    }
    let kind = fs::symlink_metadata(place.dir.join("pipe.prom")).unwrap().file_type();
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&kind), "the pipe is replaced");
}

/// The old numbers stay whole, and no half of a file is left behind.
#[test]
fn a_full_disk_costs_a_warning_and_no_job() {
    if require("root", "true", "coreutils").is_err() || require("unshare", "unshare", "util-linux").is_err() {
        return;
    }
    let place = Place::new("job_numbers_full");
    fs::create_dir(place.dir.join("full")).unwrap();
    let script = format!(
        "set -e; mount -t tmpfs -o size=64k none full; {PROGRAM} run x --metrics full/x.prom -- true; cp full/x.prom before\n\
         cat /dev/zero > full/filler 2>/dev/null || true\n\
         {PROGRAM} run x --metrics full/x.prom -- sh -c 'exit 7' && exit 99; test $? = 7; cmp full/x.prom before; ls -A full > left"
    );
    let mut command = with_default_signals("unshare");
    command
        .args(["--mount", "sh", "-c", &script])
        .current_dir(&place.dir)
        .env("LOCKKEEPER_STORE", place.url());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output), errors(&output));
    assert!(errors(&output).contains("the metrics were not written to"), "{}", errors(&output));
    assert_eq!(place.read("left"), "filler\nx.prom\n");
}

#[test]
fn a_killed_run_is_seen_as_running_and_the_next_one_goes_on() {
    let place = Place::new("job_numbers_killed");
    let run = place.start("x --metrics x.prom", "sleep 1000");
    let started = Instant::now();
    while of_job(&place.read("x.prom"), "running") != Some(1.0) {
        assert!(started.elapsed() < LONG, "{}", place.read("x.prom"));
        std::thread::sleep(Duration::from_millis(10));
    }
    run.signal(Signal::KILL);
    assert_eq!(run.end().0, -9);
    assert_eq!(of_job(&place.read("x.prom"), "running"), Some(1.0));
    assert_eq!(code(place.run("run x --metrics x.prom -- true").status), 0);
    assert_eq!(of_job(&place.read("x.prom"), "running"), Some(0.0));
}

#[test]
fn a_lost_lock_is_counted() {
    let place = Place::new("job_numbers_lost");
    let run = place.start("x --ttl 1s --metrics x.prom", "sleep 1000");
    place.until("x", |seen| seen["lock"]["held"].as_array().is_some_and(|held| held.len() == 1));
    assert_eq!(code(place.run("break x --yes --reason test").status), 0);
    assert_eq!(run.end().0, 76);
    let numbers = place.read("x.prom");
    assert_eq!((of_job(&numbers, "losses_total"), calls(&numbers, "lost")), (Some(1.0), 1.0), "{numbers}");
    assert_eq!(of_job(&numbers, "exit_code"), Some(76.0));
}

#[test]
fn once_elect_and_cron_have_numbers_too() {
    let place = Place::new("job_numbers_others");
    let mut cron = place.lk(["cron", "c", "--every", "* * * * *", "--metrics", "cron.prom", "--", "true"]);
    cron.stderr(Stdio::null());
    let cron = cron.spawn().unwrap();
    for _ in 0..2 {
        let line = "once k --metrics once.prom --metrics-name k-* -- echo done";
        assert_eq!(text(&place.run(line)), "done\n");
    }
    let once =
        |outcome| format!("lockkeeper_job_calls_total{{kind=\"once\",lock=\"k-*\",outcome=\"{outcome}\"}}");
    let numbers = place.read("once.prom");
    promtool(&["check", "metrics"], &place.dir, &numbers);
    assert_eq!(value(&numbers, &once("succeeded")), Some(1.0), "{numbers}");
    assert_eq!(value(&numbers, &once("not_run")), Some(1.0), "the second call gets the stored result");
    assert_eq!(code(place.run("elect e --metrics elect.prom -- true").status), 0);
    let led = "lockkeeper_job_calls_total{kind=\"elect\",lock=\"e\",outcome=\"succeeded\"}";
    assert_eq!(value(&place.read("elect.prom"), led), Some(1.0));
    // cron comes with the next minute.
    let started = Instant::now();
    let run = "lockkeeper_job_calls_total{kind=\"cron\",lock=\"c\",outcome=\"succeeded\"}";
    while value(&place.read("cron.prom"), run) != Some(1.0) {
        assert!(started.elapsed() < LONG * 6, "{}", place.read("cron.prom"));
        std::thread::sleep(Duration::from_millis(200));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&cron), Signal::TERM).unwrap();
    let mut cron = cron;
    assert_eq!(code(cron.wait().unwrap()), 143);
    let held = "lockkeeper_job_hold_seconds{kind=\"cron\",lock=\"c\"}";
    assert!(value(&place.read("cron.prom"), held).is_some(), "{}", place.read("cron.prom"));
}

#[test]
fn the_numbers_of_a_store_are_those_of_its_locks() {
    let place = Place::new("store_numbers");
    assert_eq!(code(place.run("run nightly --window 1d -- false").status), 1);
    let held: Vec<Running> = ["orders/1", "orders/2", "stock"].map(|name| place.hold(name)).into();
    let waits = place.start("orders/1", "true");
    place.until("orders/1", |seen| seen["lock"]["waiting"] == 1);
    let output = place.run("metrics --pattern orders/* --pattern unused --window nightly --window never");
    let numbers = text(&output);
    assert_eq!(code(output.status), 0, "{}", errors(&output));
    promtool(&["check", "metrics"], &place.dir, &numbers);
    let labelled =
        |name: &str, pattern: &str| value(&numbers, &format!("lockkeeper_{name}{{pattern=\"{pattern}\"}}"));
    assert_eq!(
        (labelled("held", "orders/*"), labelled("waiting", "orders/*")),
        (Some(2.0), Some(1.0)),
        "{numbers}"
    );
    assert_eq!((labelled("held", "other"), labelled("held", "unused")), (Some(1.0), Some(0.0)), "{numbers}");
    assert!(labelled("oldest_waiter_age_seconds", "orders/*") > Some(0.0), "{numbers}");
    assert!(labelled("oldest_holder_age_seconds", "other") > Some(0.0), "{numbers}");
    assert_eq!(value(&numbers, "lockkeeper_up"), Some(1.0));
    assert!(value(&numbers, "lockkeeper_store_round_trip_seconds") > Some(0.0), "{numbers}");
    let window = |name: &str| value(&numbers, &format!("lockkeeper_window_{name}{{window=\"nightly\"}}"));
    assert_eq!(
        (window("exit_code"), window("last_success_timestamp_seconds")),
        (Some(1.0), None),
        "{numbers}"
    );
    assert!(window("last_end_timestamp_seconds") > Some(now() - 600.0), "{numbers}");
    for (name, state) in [("nightly", "ended"), ("never", "never")] {
        let state = format!("lockkeeper_window_state{{window=\"{name}\",state=\"{state}\"}}");
        assert_eq!(value(&numbers, &state), Some(1.0), "{numbers}");
    }
    assert!(!numbers.contains("orders/1") && !numbers.contains("stock"), "no name is a label: {numbers}");
    // A store with more locks than are looked at says so.
    let cut = text(&place.run("metrics --max-locks 2"));
    let held_by = |pattern| value(&cut, &format!("lockkeeper_held{{pattern=\"{pattern}\"}}"));
    assert_eq!(
        (value(&cut, "lockkeeper_locks_truncated"), held_by("other")),
        (Some(1.0), Some(2.0)),
        "{cut}"
    );
    // The waiter ends when the lock is free.
    drop(held);
    drop(waits);
}

/// One request over HTTP: the status line and the body.
fn get(addr: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {response:?}"));
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// Starts `lockkeeper metrics` on a free port, and returns it with its address.
fn serve(place: &Place, store: &str, options: &str) -> (std::process::Child, String) {
    let mut command = place.lk(["metrics", "--listen", "0", "--json", "--store", store]);
    command.args(options.split_whitespace()).stderr(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stderr.take().unwrap()), &mut line)
        .unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
    let addr = ready["listen"].as_str().unwrap().to_owned();
    assert!(addr.starts_with("127.0.0.1:"), "not on the loopback interface: {addr}");
    (child, addr)
}

fn end(mut child: std::process::Child) {
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(code(child.wait().unwrap()), 0);
}

#[test]
fn a_crowd_of_scrapers_costs_the_store_one_look() {
    let Ok(redis) = servers::redis(RedisOptions::default()) else { return };
    let place = Place::new("store_numbers_crowd");
    let (child, addr) = serve(&place, &format!("redis://{}", redis.addr()), "--max-age 1h");
    let (status, first) = get(&addr, "/metrics");
    assert!(status.contains("200") && value(&first, "lockkeeper_up") == Some(1.0), "{status} {first}");
    promtool(&["check", "metrics"], &place.dir, &first);
    assert!(get(&addr, "/healthz").0.contains("200") && get(&addr, "/x").0.contains("404"));
    let commands = || -> String {
        let stats = servers::redis_call(redis.addr(), &["INFO", "commandstats"]).unwrap();
        // The client may check its connection meanwhile; scripts are what a look at the locks needs.
        stats.lines().filter(|line| line.contains("eval") || line.contains("scan")).collect()
    };
    let before = commands();
    let crowd: Vec<_> = (0..100)
        .map(|_| {
            let addr = addr.clone();
            std::thread::spawn(move || get(&addr, "/metrics"))
        })
        .collect();
    for scraper in crowd {
        assert_eq!(scraper.join().unwrap().1, first, "the same look");
    }
    assert_eq!(commands(), before);
    end(child);
}

#[test]
fn a_silent_store_is_down_and_comes_back() {
    let Ok(redis) = servers::redis(RedisOptions::default()) else { return };
    let place = Place::new("store_numbers_silent");
    let store = format!("redis://{}", redis.addr());
    let (child, addr) = serve(&place, &store, "--max-age 1ms --timeout 500ms");
    let until = |up: f64| {
        let started = Instant::now();
        loop {
            let (_, numbers) = get(&addr, "/metrics");
            if value(&numbers, "lockkeeper_up") == Some(up) {
                return numbers;
            }
            assert!(started.elapsed() < LONG * 2, "{numbers}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    until(1.0);
    redis.pause();
    let down = until(0.0);
    assert!(!down.contains("lockkeeper_held"), "no number of before is repeated: {down}");
    assert!(get(&addr, "/healthz").0.contains("503"));
    redis.resume();
    until(1.0);
    end(child);
    // Without a server at all, the numbers say so, too.
    drop(redis);
    let output = place.run(&format!("metrics --timeout 2s --store {store}"));
    assert_eq!(
        (code(output.status), value(&text(&output), "lockkeeper_up")),
        (69, Some(0.0)),
        "{}",
        errors(&output)
    );
}

#[test]
fn the_rules_load_into_prometheus_and_fire() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide");
    promtool(&["check", "rules", "alerts.yml"], &guide, "");
    promtool(&["test", "rules", "alerts_test.yml"], &guide, "");
    // Each metric of a rule is one that some program has.
    let rules = fs::read_to_string(guide.join("alerts.yml")).unwrap();
    let root = guide.join("../..");
    let sources: String = [
        "crates/lockkeeper/src/metrics/pattern_metrics.rs",
        "crates/fenced/src/stale_counter.rs",
        "crates/cli/src/job_metrics/numbers.rs",
        "crates/cli/src/exporter/scrape.rs",
    ]
    .iter()
    .map(|file| fs::read_to_string(root.join(file)).unwrap())
    .collect();
    let words = rules.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let mut metrics: Vec<&str> = words.filter(|word| word.starts_with("lockkeeper_")).collect();
    metrics.sort_unstable();
    metrics.dedup();
    assert!(metrics.len() > 15, "{metrics:?}");
    for metric in metrics {
        assert!(sources.contains(&format!("\"{metric}\"")), "no program has {metric}");
    }
}

#[test]
fn show_says_whether_waiting_or_holding_is_the_problem() {
    let place = Place::new("show_for");
    // Twelve clients that hold for a moment each, over and over, and one lock for all of them.
    let stop = place.dir.join("stop");
    let script = format!("while ! test -e {}; do {PROGRAM} run x --quiet -- sleep 0.3; done", stop.display());
    let clients: Vec<_> = (0..12)
        .map(|_| {
            let mut command = with_default_signals("sh");
            command.args(["-c", &script]).env("LOCKKEEPER_STORE", place.url()).stdin(Stdio::null());
            command.spawn().unwrap()
        })
        .collect();
    place.until("x", |seen| seen["lock"]["waiting"].as_u64() >= Some(6));
    assert!(text(&place.run("show x")).contains("show --for 10s x"), "it says how to measure");
    let started = Instant::now();
    let measured = loop {
        let seen = json(&place.run("show x --for 3s --json"));
        if seen["measured"]["dominates"] != "too_few" || started.elapsed() > LONG * 2 {
            break seen["measured"].clone();
        }
    };
    fs::write(&stop, "").unwrap();
    for mut client in clients {
        client.wait().unwrap();
    }
    assert!(measured["dominates"] == "waiting" || measured["dominates"] == "hand_over", "{measured}");
    let median = |what: &str| measured[what]["median_ms"].as_u64().unwrap();
    assert!(median("wait") > 2 * median("hold"), "{measured}");
    let quiet = text(&place.run("show x --for 100ms"));
    assert!(quiet.contains("too few grants"), "{quiet}");
}
