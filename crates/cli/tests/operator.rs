//! What an operator meets in the first hour: which store is meant, names with a dash, text that plays with the terminal, and
//! what the messages say to do next.

mod common;
use std::os::unix::fs::PermissionsExt;

use common::*;
use serde_json::Value;

fn line(place: &Place, line: &[&str]) -> std::process::Output {
    place.lk(line).output().unwrap()
}

/// A file with the URL of the store of `place` in it, that only we may read.
fn store_file(place: &Place, url: &str) -> String {
    let path = place.dir.join("store.url");
    std::fs::write(&path, format!("# the store\n{url}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path.display().to_string()
}

#[test]
fn a_store_can_be_named_by_a_file_and_the_command_sees_only_the_file() {
    let place = Place::new("store_file");
    let url = format!("sqlite:{}", place.dir.join("secret.db").display());
    let file = store_file(&place, &url);
    let script = "echo \"${LOCKKEEPER_STORE-none} ${LOCKKEEPER_STORE_FILE-none}\"";
    let run = |args: &[&str], env: Option<&str>| {
        let mut command = place.lk(["run", "x"]);
        command.args(args).args(["--", "sh", "-c", script]).env_remove("LOCKKEEPER_STORE");
        if let Some(file) = env {
            command.env("LOCKKEEPER_STORE_FILE", file);
        }
        let output = command.output().unwrap();
        assert_eq!(code(output.status), 0, "{}", errors(&output));
        text(&output).trim().to_owned()
    };
    let by_file = format!("none {file}");
    assert_eq!(run(&["--store-file", &file], None), by_file);
    assert_eq!(run(&["--store-file", "store.url"], None), by_file, "a relative path is made absolute");
    assert_eq!(run(&[], Some(&file)), by_file);
    assert!(place.dir.join("secret.db").exists() && !place.db().exists());
    // Switched off, the command sees nothing of it; named by its URL, it sees that.
    assert_eq!(run(&["--store-file", &file, "--hide-store"], None), "none none");
    assert_eq!(run(&["--store", &url, "--hide-store"], None), "none none");
    assert_eq!(run(&["--store", &url], Some("/nowhere")), format!("{url} none"));
}

#[test]
fn a_store_file_that_is_not_as_it_should_be_is_refused() {
    let place = Place::new("store_file_bad");
    let file = store_file(&place, "sqlite:/tmp/never.db");
    let refused = |args: &[&str], says: &str| {
        let output = place.lk(["ls"]).args(args).env_remove("LOCKKEEPER_STORE").output().unwrap();
        assert_eq!(code(output.status), 64, "{args:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{args:?}: {}", errors(&output));
    };
    refused(&["--store-file", "missing"], "No such file");
    refused(&["--store-file", &file, "--store", "memory:"], "cannot be used with");
    std::fs::write(&file, "sqlite:/a.db\nsqlite:/b.db\n").unwrap();
    refused(&["--store-file", &file], "more than one line");
    std::fs::write(&file, "\n").unwrap();
    refused(&["--store-file", &file], "no URL in it");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    refused(&["--store-file", &file], "every user of this machine may read");
    let mut both = place.lk(["ls"]);
    let both = both.env("LOCKKEEPER_STORE_FILE", &file).output().unwrap();
    assert_eq!(code(both.status), 64);
    assert!(errors(&both).contains("both set"), "{}", errors(&both));
}

#[test]
fn a_store_can_be_named_before_the_subcommand_and_an_empty_variable_is_none() {
    let place = Place::new("store_before");
    let url = format!("sqlite:{}", place.dir.join("before.db").display());
    let output = line(&place, &["--store", &url, "run", "x", "--", "true"]);
    assert_eq!(code(output.status), 0, "{}", errors(&output));
    assert!(place.dir.join("before.db").exists() && !place.db().exists());
    let empty =
        place.lk(["ls"]).env("LOCKKEEPER_STORE", "").env("LOCKKEEPER_STORE_FILE", "").output().unwrap();
    assert_eq!(code(empty.status), 0, "{}", errors(&empty));
    // The one before the subcommand was left out of account.
    let file = store_file(&place, "memory:");
    for second in [&["--store-file", &file][..], &["--store", "memory:"]] {
        let twice = line(&place, &[&["--store", &url, "ls"], second].concat());
        assert_eq!(code(twice.status), 64, "{}", text(&twice));
        assert!(errors(&twice).contains("before the subcommand and after it"), "{}", errors(&twice));
    }
}

/// It took its store from an argument or LOCKKEEPER_STORE alone.
#[test]
fn store_init_finds_its_store_as_every_subcommand_does() {
    let place = Place::new("store_init");
    let (url, db) = (place.url(), place.db());
    let file = store_file(&place, &url);
    let init = |before: &[&str], words: &[&str], variable: &str| {
        let mut command = place.lk([before, &["store", "init"], words].concat());
        command.env_remove("LOCKKEEPER_STORE").env("LOCKKEEPER_STORE_FILE", variable).output().unwrap()
    };
    let ways: [(&[&str], &[&str], &str); 5] = [
        (&["--store", &url], &[], ""),
        (&[], &["--store", &url], ""),
        (&[], &["--store-file", &file], ""),
        (&[], &[], &file),
        (&[], &[&url], &file),
    ];
    for (before, words, variable) in ways {
        let made = init(before, words, variable);
        assert_eq!(code(made.status), 0, "{before:?} {words:?} {variable:?}: {}", errors(&made));
        assert!(db.exists(), "{before:?} {words:?} {variable:?}");
        std::fs::remove_file(&db).unwrap();
    }
    let refused: [(&[&str], &[&str], &str); 3] = [
        (&[], &[], "no store is named"),
        (&["--store", "memory:"], &[&url], "before the subcommand and after it"),
        (&[], &[&url, "--store-file", &file], "cannot be used with"),
    ];
    for (before, words, says) in refused {
        let refused = init(before, words, "");
        assert_eq!(code(refused.status), 64, "{before:?} {words:?}");
        assert!(errors(&refused).contains(says), "{before:?} {words:?}: {}", errors(&refused));
        assert!(!db.exists());
    }
}

#[test]
fn a_name_may_begin_with_a_dash() {
    let place = Place::new("dash");
    for subcommand in ["run", "once"] {
        let output = line(&place, &[subcommand, "--name=-x", "--", "printenv", "LOCKKEEPER_NAME"]);
        assert_eq!(code(output.status), 0, "{}", errors(&output));
        assert!(text(&output).trim().ends_with("-x"), "{}", text(&output));
    }
    let mut held = Running::new(place.lk(["hold", "--name=--rf", "--also=-y"]));
    assert!(held.line().starts_with("held \"--rf\" and \"-y\", fence "));
    assert_eq!(
        json(&line(&place, &["show", "--json", "--", "--rf"]))["lock"]["held"].as_array().unwrap().len(),
        1
    );
    assert_eq!(held.end().0, 0);
    // What is said about `run -x` leads there.
    for (words, says) in [
        (&["run", "-x", "--", "true"][..], "lockkeeper run --name='-x' -- CMD"),
        (&["hold", "-x"], "lockkeeper hold --name='-x'"),
        (&["once", "--rf", "--json", "--", "true"], "lockkeeper once --name='--rf' -- CMD"),
        (&["limit", "-x", "--rate", "1/s", "--", "true"], "lockkeeper limit --name='-x' --rate 10/s -- CMD"),
        (&["claim", "-x", "--from", "ids", "--", "true"], "lockkeeper claim --name='-x' --from FILE -- CMD"),
        (
            &["partitions", "-x", "--count", "2", "--", "true"],
            "lockkeeper partitions --name='-x' --count N -- CMD",
        ),
    ] {
        let output = line(&place, words);
        assert_eq!(code(output.status), 64);
        assert!(errors(&output).contains(says) && !errors(&output).contains("'-- -"), "{}", errors(&output));
    }
    let typo = line(&place, &["run", "x", "--wiat", "1s", "--", "true"]);
    assert!(errors(&typo).contains("--wait") && !errors(&typo).contains("--name"), "{}", errors(&typo));
    let both = line(&place, &["run", "a", "--name=b", "--", "true"]);
    assert_eq!(code(both.status), 64);
    assert_eq!(code(line(&place, &["run", "--", "true"]).status), 64);
}

/// Labels, names and paths were written by others: nothing of them may reach the terminal as it is.
#[test]
fn no_error_plays_with_the_terminal() {
    let place = Place::new("plays");
    let held = place.hold("x --label boss\u{202e}");
    let busy = place.lk(["run", "x", "--wait", "300ms", "--", "true"]).output().unwrap();
    assert_eq!(code(busy.status), 75);
    assert!(!errors(&busy).contains('\u{202e}'), "{}", errors(&busy));
    drop(held);
    // Executable, and no program: the shim finds out.
    let path = place.dir.join("esc\u{1b}[31m");
    std::fs::write(&path, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let command = path.display().to_string();
    let output = line(&place, &["run", "x", "--", &command]);
    assert!(
        errors(&output).contains("cannot be started") && !errors(&output).contains('\u{1b}'),
        "{output:?}"
    );
    let output = line(&place, &["run", "x", "--json", "--", &command]);
    assert!(errors(&output).contains("cannot be started"), "{}", errors(&output));
    errors(&output).lines().for_each(|line| drop(serde_json::from_str::<Value>(line).expect(line)));
}

#[test]
fn a_bad_name_is_quoted_escaped_and_cut() {
    let place = Place::new("bad_name");
    let name = format!("a\u{1b}[31m\nlockkeeper: all is well\n{}", "x".repeat(2000));
    for json in [false, true] {
        let mut words = vec!["run", &name];
        if json {
            words.push("--json");
        }
        let output = line(&place, &[&words[..], &["--", "true"]].concat());
        let err = errors(&output);
        assert_eq!(code(output.status), 64);
        assert!(!err.contains('\u{1b}') && !err.contains("\nlockkeeper: all is well"), "{err}");
        assert!(err.len() < 700, "{} bytes: {err}", err.len());
        assert!(err.contains("a\\u{1b}") || err.contains("a\\\\u{1b}"), "{err}");
    }
}

#[test]
fn what_to_do_next_fits_what_was_asked() {
    let place = Place::new("next_fits");
    let mut held = Running::new(place.lk(["hold", "my lock"]));
    held.line();
    let busy = line(&place, &["run", "my lock", "--wait", "300ms", "--", "true"]);
    assert_eq!(code(busy.status), 75);
    assert!(
        errors(&busy).contains("next: wait longer, or look who has it: lockkeeper show 'my lock'"),
        "{busy:?}"
    );
    // Not a word, where none is wanted.
    let skipped = line(&place, &["run", "my lock", "--skip", "--quiet", "--", "true"]);
    assert_eq!((code(skipped.status), errors(&skipped).as_str()), (75, ""));
    for words in [&["run", "x", "true"][..], &["run", "x"], &["once", "k", "./send"]] {
        let output = line(&place, words);
        assert_eq!(code(output.status), 64);
        let next = format!("put -- before the command: lockkeeper {} NAME -- CMD", words[0]);
        assert!(errors(&output).contains(&next), "{}", errors(&output));
    }
    let help = line(&place, &["help", "run"]);
    assert_eq!(code(help.status), 0);
    assert!(text(&help).contains("--correctness"));
}

#[test]
fn break_of_a_free_lock_says_so() {
    let place = Place::new("break_free");
    let output = line(&place, &["break", "x", "--reason", "test", "--yes"]);
    assert_eq!(code(output.status), 0);
    assert!(text(&output).starts_with("\"x\" had no holder"), "{}", text(&output));
}

#[test]
fn show_says_whether_the_store_is_good_for_correctness() {
    let place = Place::new("good");
    let shown = text(&line(&place, &["show", "x", "--store", "memory:"]));
    assert!(shown.contains("good for correctness: no, because "), "{shown}");
    let seen = json(&line(&place, &["show", "x", "--store", "memory:", "--json"]));
    assert_eq!(seen["correctness"]["good"], false);
    assert!(seen["correctness"]["why"].as_str().unwrap().contains("not for correctness"), "{seen}");
    let shown = text(&line(&place, &["show", "x"]));
    assert!(shown.contains("good for correctness: yes, because it keeps grants and fences"), "{shown}");
    let seen = json(&line(&place, &["show", "x", "--json"]));
    assert_eq!(seen["correctness"]["good"], true, "{seen}");
}

/// Recipes have locks of their own, which `show` knows by another name. Their advice named none.
#[test]
fn the_advice_of_a_recipe_names_its_lock() {
    let place = Place::new("advice");
    let recipes: [(&[&str], &str); 2] = [(&["once"], "once/$k"), (&["cached", "--ttl", "1h"], "cached/$k")];
    for (recipe, lock) in recipes {
        let mut holder = Running::new(place.lk(["hold", lock]));
        assert!(holder.line().starts_with("held "));
        let busy = line(&place, &[recipe, &["$k", "--skip", "--", "true"]].concat());
        assert_eq!(code(busy.status), 75, "{}", errors(&busy));
        assert!(errors(&busy).contains(&format!("lockkeeper show '{lock}'")), "{}", errors(&busy));
        let shown = line(&place, &["show", lock]);
        assert!(text(&shown).contains("is held"), "{}", text(&shown));
        assert_eq!(holder.end().0, 0);
    }
}

#[test]
fn granted_says_what_a_machine_needs() {
    let place = Place::new("granted");
    let mut held = Running::new(place.lk(["hold", "x", "--json", "--ttl", "10s"]));
    let granted: Value = serde_json::from_str(&held.line()).unwrap();
    assert_eq!((&granted["event"], &granted["ttl_ms"]), (&"granted".into(), &10_000.into()), "{granted}");
    let sequencer = granted["sequencer"].as_str().unwrap().to_owned();
    assert_eq!(code(line(&place, &["fence", "check", &sequencer]).status), 0, "{granted}");
    let left = granted["deadline_in_ms"].as_u64().unwrap();
    assert!(left > 0 && left < 10_000, "{granted}");
    assert!(granted["deadline_us"].as_u64().unwrap() > 1_700_000_000_000_000, "{granted}");
    assert_eq!(held.end().0, 0);
}

/// Root has its locks in /var/lib whatever HOME is, so this is for all other users.
#[test]
fn a_relative_home_is_refused() {
    let mut command = std::process::Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", PROGRAM, "ls"]);
    command.env_remove("LOCKKEEPER_STORE").env_remove("XDG_STATE_HOME").env("HOME", "here").current_dir("/");
    match command.output() {
        // 126 and 127: setpriv(1) may not run the program.
        Ok(output) if rustix::process::geteuid().is_root() && !matches!(code(output.status), 126 | 127) => {
            assert_eq!(code(output.status), 64, "{}", errors(&output));
            assert!(errors(&output).contains("not an absolute path"), "{}", errors(&output));
        }
        other => eprintln!("SKIPPED: cannot run as another user here: {other:?}"),
    }
}

/// Debian's etcd has a known fault, which was told at every call, and of which the test is: once a day, and never with --quiet.
#[test]
fn a_fault_of_the_server_is_told_once_a_day() {
    let Ok(etcd) = lockkeeper_testkit::servers::etcd(Default::default()) else { return };
    let place = Place::new("daily");
    std::fs::set_permissions(&place.dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    let call = |words: &[&str]| {
        // Root has its locks in /var/lib whatever HOME is.
        let mut command = match rustix::process::geteuid().is_root() {
            true => std::process::Command::new("setpriv"),
            false => std::process::Command::new("env"),
        };
        if rustix::process::geteuid().is_root() {
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        }
        command.arg(PROGRAM).args(words).args(["--store", &format!("etcd://{}", etcd.addr())]);
        command.env("HOME", &place.dir).env_remove("XDG_STATE_HOME").current_dir("/").output()
    };
    let quiet = match call(&["run", "x", "--quiet", "--", "true"]) {
        Ok(output) if code(output.status) == 0 => output,
        other => return eprintln!("SKIPPED: cannot run as another user here: {other:?}"),
    };
    assert_eq!(errors(&quiet), "");
    let (first, second) = (call(&["show", "x"]).unwrap(), call(&["show", "x"]).unwrap());
    if !errors(&first).contains("warn:") {
        return eprintln!("SKIPPED: this etcd has no fault to warn of");
    }
    assert!(errors(&first).contains(&etcd.addr().to_string()), "{}", errors(&first));
    assert_eq!(errors(&second), "");
}

/// With `--wait` a store that is down at the start is waited for; without it that is told at once.
#[test]
fn a_store_that_is_down_at_the_start_is_waited_for() {
    let Ok(mut redis) = lockkeeper_testkit::servers::redis(Default::default()) else { return };
    let (place, url) = (Place::new("down_at_start"), format!("redis://{}", redis.addr()));
    redis.stop();
    let at_once = line(&place, &["run", "x", "--store", &url, "--", "true"]);
    assert_eq!(code(at_once.status), 69, "{}", errors(&at_once));
    let too_short = line(&place, &["run", "x", "--store", &url, "--wait", "300ms", "--", "true"]);
    assert_eq!(code(too_short.status), 69, "{}", errors(&too_short));
    for words in [&["run", "x"][..], &["once", "k"]] {
        let mut command = place.lk(words);
        command.args(["--store", &url, "--wait", "60s", "--", "sh", "-c", "echo done"]);
        let mut running = Running::new(command);
        let mut said = String::new();
        let mut errors = std::io::BufReader::new(running.child.stderr.take().unwrap());
        std::io::BufRead::read_line(&mut errors, &mut said).unwrap();
        assert!(said.contains("is waited for"), "{said}");
        redis.restart();
        assert_eq!(running.line(), "done");
        assert_eq!(code(running.child.wait().unwrap()), 0);
        redis.stop();
    }
}

/// A request that is queued survives an outage of three times its ttl.
#[test]
fn an_outage_within_the_wait_is_waited_for() {
    use lockkeeper_testkit::proxy::Framing;
    use lockkeeper_testkit::servers::{PostgresOptions, postgres};
    let Ok(server) = postgres(PostgresOptions::default()) else { return };
    let url = |addr| format!("postgres://postgres@{addr}/postgres");
    outage_while_queued("outage_in_wait", server.addr(), Framing::Postgres, url, &["--wait", "60s"]);
}

/// Without --wait a request waits for ever; it gave up with 74 a ttl after its first unknown outcome.
#[test]
fn an_outage_does_not_end_a_wait_for_ever() {
    use lockkeeper_testkit::proxy::Framing;
    let Ok(server) = lockkeeper_testkit::servers::redis(Default::default()) else { return };
    let url = |addr| format!("redis://{addr}?timeout=300ms");
    outage_while_queued("outage_for_ever", server.addr(), Framing::Resp, url, &[]);
}

fn outage_while_queued(
    test: &str,
    server: std::net::SocketAddr,
    framing: lockkeeper_testkit::proxy::Framing,
    url: impl Fn(std::net::SocketAddr) -> String,
    wait: &[&str],
) {
    let place = Place::new(test);
    let proxy = lockkeeper_testkit::proxy::Proxy::start(server, framing);
    let mut held = Running::new(place.lk(["hold", "x", "--store", &url(server)]));
    assert!(held.line().starts_with("held "));
    let mut command = place.lk(["run", "x", "--store", &url(proxy.addr()), "--ttl", "1s", "--json"]);
    command.args(wait).args(["--", "echo", "done"]);
    let mut waiter = Running::new(command);
    let mut events = std::io::BufReader::new(waiter.child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("\"event\":\"waiting\"") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut events, &mut line).unwrap() > 0, "it ended");
    }
    proxy.cut_all();
    // The outage: three times the ttl.
    std::thread::sleep(std::time::Duration::from_secs(3));
    proxy.heal();
    assert_eq!(held.end().0, 0);
    let out = waiter.line();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut events, &mut rest).unwrap();
    assert_eq!((code(waiter.child.wait().unwrap()), out.as_str()), (0, "done"), "{rest}");
}

/// `--wait` had time left, and nothing had run: the exit code was 74 or 69, because the store went away for longer than a ttl
/// while it was opened or asked. Each run loses its store at another one of its first requests.
#[test]
fn a_store_that_goes_away_at_any_request_is_waited_for() {
    use lockkeeper_testkit::proxy::{Fault, Framing, Proxy};
    let Ok(redis) = lockkeeper_testkit::servers::redis(Default::default()) else { return };
    let place = Place::new("goes_away");
    let start = |subcommand: &'static str, ttl: &str, n: u64| {
        let proxy = Proxy::start(redis.addr(), Framing::Resp);
        let fault = proxy.inject(Fault::at_request(n).and_every_later_one().cut());
        let (url, name) = (format!("redis://{}", proxy.addr()), format!("x{n}"));
        let words = [subcommand, &name, "--store", &url, "--ttl", ttl, "--wait", "60s", "--", "echo", "done"];
        (proxy, fault, Running::new(place.lk(words)), format!("{subcommand}, request {n}"))
    };
    // `once` sends some requests after it has opened the store, before anything runs.
    let mut runs: Vec<_> = (1..=12).map(|n| start("run", "1s", n)).collect();
    runs.extend((13..=24).map(|n| start("once", "30s", n)));
    // As soon as its fault has come, nothing gets through any more; some have fewer requests than that, and end.
    let (mut gone, started) = (0, std::time::Instant::now());
    let mut settled = vec![false; runs.len()];
    while settled.contains(&false) {
        assert!(started.elapsed() < LONG, "neither cut nor ended: {settled:?}");
        for ((proxy, fault, run, _), settled) in
            runs.iter_mut().zip(&mut settled).filter(|(_, settled)| !**settled)
        {
            if fault.fired() {
                proxy.cut_all();
                (*settled, gone) = (true, gone + 1);
            } else {
                *settled = run.child.try_wait().unwrap().is_some();
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // The outage lasts for longer than the ttl of `run`.
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(gone > 3, "only {gone} lost their store");
    runs.iter().for_each(|(proxy, ..)| proxy.heal());
    for (_proxy, _, run, what) in runs.drain(..) {
        let (code, out, err) = run.end();
        assert_eq!((code, out.as_str()), (0, "done\n"), "{what}: {err}");
    }
}
