//! The story that all of this is for: a holder is paused, another one takes over and writes, and the first wakes up and writes.

use std::process::{Command, Stdio};
use std::time::Duration;

use lockkeeper::Lockkeeper;
use rustix::process::Signal;

use super::common::*;
use super::tools::*;

/// Not a test: a process that takes the lock, sees that it holds it, and then writes when the file `go` is there.
#[test]
#[ignore = "the holder of the other tests"]
fn holder() {
    let Ok(store) = std::env::var("HOLDER_STORE") else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let keeper = Lockkeeper::open(&store).await.unwrap();
        let guard = keeper.lock("settings").ttl(Duration::from_secs(2)).acquire().await.unwrap();
        assert!(guard.is_held());
        println!("\nholds {}", guard.fence());
        let go = std::env::var("HOLDER_GO").unwrap();
        while !std::path::Path::new(&go).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // It has looked before, and knows nothing of what happened since: that is the whole trouble.
        let fence = format!("Lock-Fence: {}", guard.fence());
        let value = std::env::var("HOLDER_VALUE").unwrap();
        let answer = curl(&["-X", "PUT", "-H", &fence, "-d", &value, &std::env::var("HOLDER_URL").unwrap()]);
        println!("\nwrote {}", answer.status);
    });
}

fn start(place: &Place, url: &str, value: &str) -> Running {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["pause::holder", "--exact", "--ignored", "--nocapture"]).stdin(Stdio::null());
    command.env("HOLDER_STORE", place.url()).env("HOLDER_URL", url).env("HOLDER_VALUE", value);
    command.env("HOLDER_GO", place.dir.join(format!("go-{value}")));
    Running::new(command)
}

/// The rest of the line that begins with a word.
fn says(running: &mut Running, word: &str) -> String {
    loop {
        let line = running.line();
        if let Some(rest) = line.strip_prefix(word) {
            return rest.trim().to_owned();
        }
    }
}

/// Plays it, and returns what A and B were answered.
fn play(place: &Place, url: &str) -> (String, String) {
    let go = |value: &str| std::fs::write(place.dir.join(format!("go-{value}")), "").unwrap();
    let mut a = start(place, url, "a");
    let first: u64 = says(&mut a, "holds ").parse().unwrap();
    a.stop(place);
    // The lease of A runs out while it is stopped.
    let mut b = start(place, url, "b");
    let second: u64 = says(&mut b, "holds ").parse().unwrap();
    assert!(second > first);
    go("b");
    let b_was_told = says(&mut b, "wrote ");
    go("a");
    a.signal(Signal::CONT);
    (says(&mut a, "wrote "), b_was_told)
}

#[test]
fn a_paused_holder_that_wakes_up_is_refused() {
    let (place, service) = (Place::new("gate_pause"), Service::start());
    let gate = Gate::start(&place, &service.url(), "");
    assert_eq!(play(&place, &gate.url("/settings")), ("412".into(), "200".into()));
    assert_eq!(service.written(), ["b"]);
}

/// The same without the gate: if this does not corrupt, the test above proves nothing.
#[test]
fn without_the_gate_it_overwrites_its_successor() {
    let (place, service) = (Place::new("gate_pause_twin"), Service::start());
    assert_eq!(play(&place, &format!("{}/settings", service.url())), ("200".into(), "200".into()));
    assert_eq!(service.written(), ["b", "a"], "the late writer did no harm?");
}
