//! Real processes that contend, are killed, and are stopped past their ttl.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use lockkeeper::{Lockkeeper, Page};
use lockkeeper_testkit::history::{self, Demand, History, HistoryEvent, HistoryRecorder, Operation};
use lockkeeper_testkit::resource::{Accepted, CheckedFile, CounterFile, UncheckedFile};
use lockkeeper_testkit::servers::TempDir;
use lockkeeper_testkit::stop::stop_between_transactions;
use rustix::process::{Pid, Signal, kill_process};

struct ServerSite {
    dir: TempDir,
}

impl ServerSite {
    fn new() -> Self {
        ServerSite { dir: TempDir::new("processes") }
    }

    fn store(&self) -> String {
        format!("sqlite:{}", self.dir.join("locks.db").display())
    }

    fn contender(&self, what: &str, more: &[String]) -> Child {
        let history = self.dir.join("history.jsonl");
        Command::new(env!("CARGO_BIN_EXE_contender"))
            .args([what, &format!("store={}", self.store()), "name=orders/42"])
            .arg(format!("history={}", history.display()))
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a contender starts")
    }

    fn history(&self) -> History {
        History::read(self.dir.join("history.jsonl")).expect("a history")
    }

    /// What is left in the store, as the checker of residue wants it.
    async fn left(&self, keeper: &Lockkeeper) -> Vec<(String, String)> {
        let page = keeper.list("", &Page::FIRST).await.unwrap();
        page.locks.iter().map(|lock| (lock.name.to_string(), format!("{lock:?}"))).collect()
    }
}

/// A contender that takes the lock and then waits to be told to go on.
struct Late {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Late {
    fn start(place: &ServerSite, ttl: Duration) -> Self {
        let file = |key: &str| format!("{key}={}", place.dir.join(key).display());
        let mut child = place
            .contender("late", &[format!("ttl_ms={}", ttl.as_millis()), file("fenced"), file("unfenced")]);
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut late = Late { child, input, output: BufReader::new(output) };
        assert!(late.says().starts_with("held "));
        late
    }

    fn says(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }
}

#[tokio::test]
async fn forty_processes_count_to_twenty_thousand_and_lose_none() {
    const PROCESSES: usize = 40;
    let times = 500;
    let place = ServerSite::new();
    let counter = CounterFile::new(place.dir.join("counter"));
    let more = [format!("times={times}"), format!("counter={}", counter.path().display())];
    let children: Vec<Child> = (0..PROCESSES).map(|_| place.contender("count", &more)).collect();
    for child in children {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }
    assert_eq!(counter.get().unwrap(), (PROCESSES * times) as u64, "increments were lost");

    let keeper = Lockkeeper::open(&place.store()).await.unwrap();
    let history = place.history();
    let mut violations = history::laws(&history);
    let left = place.left(&keeper).await;
    violations.extend(history::residue(&history, left.iter().map(|(lock, what)| (&**lock, &**what))));
    let demand = Demand { operations: PROCESSES * times * 2, faults: 0, contended: PROCESSES * times / 10 };
    history::verdict(&history, demand, 0, violations).assert_green();
}

#[tokio::test]
async fn without_the_lock_the_same_counting_loses_some() {
    // The twin that shows that the test above can fail: each process has a lock of its own.
    let place = ServerSite::new();
    let counter = CounterFile::new(place.dir.join("counter"));
    let children: Vec<Child> = (0..8)
        .map(|i| {
            let own = format!("store=sqlite:{}", place.dir.join(&format!("own-{i}.db")).display());
            place.contender(
                "count",
                &[own, "times=200".into(), format!("counter={}", counter.path().display())],
            )
        })
        .collect();
    for child in children {
        assert!(child.wait_with_output().unwrap().status.success());
    }
    assert!(counter.get().unwrap() < 1600, "nothing was lost: the counter does not race");
}

#[tokio::test]
async fn a_killed_holder_frees_its_lock_at_once() {
    // A ttl so long that waiting for it would be noticed.
    let place = ServerSite::new();
    let mut holder = Late::start(&place, Duration::from_secs(3600));
    let keeper = Lockkeeper::open(&place.store()).await.unwrap();
    let waiting = keeper.clone();
    let waiter = tokio::spawn(async move { waiting.lock("orders/42").acquire().await });
    while keeper.inspect("orders/42").await.unwrap().unwrap().waiting == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    holder.signal(Signal::KILL);
    let guard =
        tokio::time::timeout(Duration::from_secs(60), waiter).await.expect("not after an hour").unwrap();
    guard.unwrap().release().await.unwrap();
    holder.child.wait().unwrap();
    let freed = keeper.lock("orders/42").try_acquire().await.unwrap();
    assert!(freed.is_some());
}

#[tokio::test]
async fn a_holder_stopped_past_its_ttl_knows_it_and_its_write_is_refused() {
    let place = ServerSite::new();
    let mut late = Late::start(&place, Duration::from_secs(2));
    stop_between_transactions(late.child.id(), &place.dir.join("locks.db"));

    // Another process gets the lock once the ttl is over, and writes.
    let keeper = Lockkeeper::open(&place.store()).await.unwrap();
    let rival = keeper.lock("orders/42").acquire().await.unwrap();
    let recorder = HistoryRecorder::new(place.dir.join("history.jsonl"), "rival").unwrap();
    let (fenced, unfenced) =
        (CheckedFile::new(place.dir.join("fenced")), UncheckedFile::new(place.dir.join("unfenced")));
    recorder.record(HistoryEvent::invoke(Operation::Write, "orders/42").fence(rival.fence()).value("rival"));
    fenced.write(rival.fence(), "rival").unwrap();
    unfenced.write(rival.fence(), "rival").unwrap();
    recorder.record(HistoryEvent::ok(Operation::Write, "orders/42").fence(rival.fence()).value("rival"));

    late.signal(Signal::CONT);
    writeln!(late.input, "go on").unwrap();
    assert_eq!(late.says(), "believes false");
    assert_eq!(late.says(), "fenced stale");
    assert_eq!(late.says(), "unfenced taken");
    assert!(late.child.wait().unwrap().success());
    assert!(rival.is_held());

    let history = place.history();
    let accepted: Vec<Accepted> = fenced.accepted().unwrap();
    let mut violations = history::laws(&history);
    violations.extend(history::resource(&history, "orders/42", &accepted));
    let demand = Demand { operations: 3, faults: 1, contended: 0 };
    history::verdict(&history, demand, 1, violations).assert_green();
    // The fault really bit: the twin without a fence took the late write.
    let twin = unfenced.accepted().unwrap();
    assert_eq!(history::stale_writes(&twin).count(), 1);
}
