//! One half of a scenario while it runs: its director starts processes, breaks things, and waits for events.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use crate::actor::ActorProcess;
use crate::event::{LabEvent, LabEventKind, now};
use crate::lab::{LabError, Setup, interrupted};
use crate::naive_lock::NaiveLock;
use crate::outcome::{HalfReport, LabCount};
use crate::timeline::Timeline;
use crate::worker::WorkerPlan;

/// Far beyond what a step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);
/// How often a wait looks for an interrupt.
const LOOK: Duration = Duration::from_millis(50);

/// One half of a scenario while it runs.
#[derive(Debug)]
pub struct LabHalf {
    setup: Arc<Setup>,
    index: usize,
    beat: Duration,
    way: String,
    how: String,
    /// The files of this half.
    pub dir: PathBuf,
    /// The URL of the store of its processes.
    pub store: String,
    /// The ttl of its locks.
    pub ttl: Duration,
    /// How long the work takes.
    pub work: Duration,
    /// How many processes believe to hold a lock at once without that being an error. 0: the timeline shows no overlap.
    pub holders: usize,
    actors: BTreeMap<String, ActorProcess>,
    events: Vec<LabEvent>,
    inbox: Receiver<LabEvent>,
    outbox: Sender<LabEvent>,
    counts: Vec<LabCount>,
    start: u64,
}

impl LabHalf {
    /// `beat`: see [`LabHalf::beat`].
    pub(crate) fn new(
        setup: Arc<Setup>,
        index: usize,
        beat: Duration,
        way: &str,
        how: &str,
    ) -> Result<LabHalf, LabError> {
        let dir = setup.root.join(&format!("{}-{index}", setup.scenario));
        std::fs::create_dir_all(&dir)?;
        let store = setup.store.clone();
        let store = store.unwrap_or_else(|| format!("sqlite:{}", dir.join("locks.db").display()));
        let (outbox, inbox) = mpsc::channel();
        let (ttl, work) = (Duration::from_secs(5), Duration::ZERO);
        let (way, how) = (way.to_owned(), how.to_owned());
        setup.view.add_half(index, &way, &how);
        let (actors, events, counts) = (BTreeMap::new(), Vec::new(), Vec::new());
        let start = now().as_nanos();
        let holders = 1;
        Ok(LabHalf {
            setup,
            index,
            beat,
            way,
            how,
            dir,
            store,
            ttl,
            work,
            holders,
            actors,
            events,
            inbox,
            outbox,
            counts,
            start,
        })
    }

    /// The name of the way.
    pub fn way(&self) -> &str {
        &self.way
    }

    /// The path of a file of this half.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The events so far, in the order in which they arrived.
    pub fn events(&self) -> &[LabEvent] {
        &self.events
    }

    /// The time axis begins now.
    pub fn begin(&mut self) {
        self.start = now().as_nanos();
        self.setup.view.begin(self.index, self.start);
    }

    /// Starts a worker with this part.
    pub fn start(&mut self, actor: &str, role: &str) -> Result<(), LabError> {
        self.start_many(actor, role, 0)
    }

    /// Starts a process that plays so many workers, named `ACTOR.1` and so on.
    pub fn start_many(&mut self, actor: &str, role: &str, instances: u32) -> Result<(), LabError> {
        let plan = WorkerPlan {
            scenario: self.setup.scenario.clone(),
            role: role.to_owned(),
            way: self.way.clone(),
            actor: actor.to_owned(),
            instances,
            store: self.store.clone(),
            dir: self.dir.clone(),
            prefix: format!("{}{}/", self.setup.prefix, self.index),
            ttl: self.ttl,
            work: self.work,
        };
        let process = ActorProcess::start(&self.setup.program, &plan, self.outbox.clone())?;
        self.actors.insert(actor.to_owned(), process);
        Ok(())
    }

    /// Starts so many processes with so many workers each, named `NAME 1.1` and so on, and waits until all say that they are ready. The part
    /// of each process is its number, if `role` is empty.
    ///
    /// # Errors
    /// If a process cannot be started.
    pub fn start_crew(&mut self, name: &str, role: &str, processes: u32, each: u32) -> Result<(), LabError> {
        for number in 1..=processes {
            let own = number.to_string();
            self.start_many(&format!("{name} {number}"), if role.is_empty() { &own } else { role }, each)?;
        }
        self.expect_notes("ready", (processes * each) as usize)
    }

    /// Waits until so many workers have said this.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_notes(&mut self, note: &str, count: usize) -> Result<(), LabError> {
        let is = |event: &LabEvent| matches!(&event.kind, LabEventKind::Note { text } if text == note);
        self.expect_count(note, count, is).map(drop)
    }

    /// The naive lock of this half, for an operator.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn naive_lock(&self) -> Result<NaiveLock, LabError> {
        Ok(NaiveLock::open(&self.store, &self.dir)?)
    }

    /// The full name of a lock, as the workers have it.
    pub fn name(&self, lock: &str) -> String {
        format!("{}{}/{lock}", self.setup.prefix, self.index)
    }

    fn actor(&mut self, name: &str) -> &mut ActorProcess {
        self.actors.get_mut(name).unwrap_or_else(|| panic!("the half has no {name}"))
    }

    /// Sends a command to a worker. One that has ended gets none, which a later wait reports.
    pub fn send(&mut self, actor: &str, line: &str) {
        let _ = self.actor(actor).send(line);
    }

    /// Sends a command to every worker.
    pub fn send_all(&mut self, line: &str) {
        self.actors.values_mut().for_each(|actor| drop(actor.send(line)));
    }

    /// Stops a worker where that harms no other process.
    pub fn stop(&mut self, actor: &str) {
        let database = self.store.strip_prefix("sqlite:").map(PathBuf::from);
        self.actor(actor).stop(database.as_deref());
        self.record(actor, LabEventKind::Stopped);
    }

    /// Lets a stopped worker continue.
    pub fn resume(&mut self, actor: &str) {
        self.record(actor, LabEventKind::Continued);
        self.actor(actor).resume();
    }

    /// Kills a worker.
    pub fn kill(&mut self, actor: &str) {
        self.record(actor, LabEventKind::Killed);
        self.actor(actor).kill();
    }

    /// Records a fault that the director made.
    pub fn fault(&mut self, actor: &str, text: impl Into<String>) {
        self.record(actor, LabEventKind::Fault { text: text.into() });
    }

    /// Records damage that the director found, at the moment at which it came about.
    pub fn damage(&mut self, at: u64, text: impl Into<String>) {
        let kind = LabEventKind::Damage { text: text.into() };
        self.accept(LabEvent { t: at, actor: "resource".into(), kind });
    }

    fn record(&mut self, actor: &str, kind: LabEventKind) {
        self.accept(LabEvent::now(actor, kind));
    }

    fn accept(&mut self, event: LabEvent) {
        self.setup.view.event(self.index, &event);
        self.events.push(event);
    }

    /// Waits for an event, or finds it among the earlier ones.
    ///
    /// # Errors
    /// [`LabError::Invalid`] if it does not come: then the run proves nothing.
    pub fn expect(&mut self, what: &str, is: impl Fn(&LabEvent) -> bool) -> Result<LabEvent, LabError> {
        Ok(self.expect_count(what, 1, is)?.remove(0))
    }

    /// Waits for so many events of a kind.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_count(
        &mut self,
        what: &str,
        count: usize,
        is: impl Fn(&LabEvent) -> bool,
    ) -> Result<Vec<LabEvent>, LabError> {
        let mut found: Vec<LabEvent> = self.events.iter().filter(|event| is(event)).cloned().collect();
        let deadline = Instant::now() + PATIENCE;
        while found.len() < count {
            match self.receive(LOOK)? {
                Some(event) if is(&event) => found.push(event),
                Some(_) => {}
                None if Instant::now() > deadline => {
                    let half = &self.way;
                    return Err(LabError::Invalid(format!("{half}: not seen within {PATIENCE:?}: {what}")));
                }
                None => {}
            }
        }
        Ok(found)
    }

    /// Waits until a worker says this.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_note(&mut self, actor: &str, note: &str) -> Result<LabEvent, LabError> {
        self.expect(&format!("{actor}: {note}"), |event| {
            event.is_by(actor) && matches!(&event.kind, LabEventKind::Note { text } if text == note)
        })
    }

    /// Waits until a worker believes that it holds a lock.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_hold(&mut self, actor: &str) -> Result<LabEvent, LabError> {
        self.expect(&format!("{actor} holds"), |event| {
            event.is_by(actor) && matches!(event.kind, LabEventKind::Holds { .. })
        })
    }

    /// Waits until a worker waits for a lock.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_wait(&mut self, actor: &str) -> Result<LabEvent, LabError> {
        self.expect(&format!("{actor} waits"), |event| {
            event.is_by(actor) && matches!(event.kind, LabEventKind::Waits { .. })
        })
    }

    /// Waits until a worker no longer believes that it holds its lock.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_release(&mut self, actor: &str) -> Result<LabEvent, LabError> {
        self.expect(&format!("{actor} releases"), |event| {
            event.is_by(actor) && matches!(event.kind, LabEventKind::Ends { .. })
        })
    }

    /// Waits until the resource has answered a write of a worker.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_write(&mut self, actor: &str) -> Result<LabEvent, LabError> {
        self.expect(&format!("a write of {actor}"), |event| event.is_by(actor) && event.is_write())
    }

    /// Waits until a process has ended.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_end(&mut self, actor: &str) -> Result<LabEvent, LabError> {
        self.expect(&format!("the end of {actor}"), |event| {
            event.is_by(actor) && event.kind == LabEventKind::Gone
        })
    }

    /// Waits until all processes that were not killed have ended.
    ///
    /// # Errors
    /// As [`LabHalf::expect`].
    pub fn expect_all_ended(&mut self) -> Result<(), LabError> {
        let names: Vec<String> = self.actors.keys().cloned().collect();
        names.iter().try_for_each(|name| self.expect_end(name).map(drop))
    }

    /// Lets a moment pass between two steps, for the eyes of the reader. No step depends on its length.
    ///
    /// # Errors
    /// If a worker fails meanwhile.
    pub fn beat(&mut self) -> Result<(), LabError> {
        self.pass(self.beat)
    }

    /// Lets time pass.
    ///
    /// # Errors
    /// If a worker fails meanwhile.
    pub fn pass(&mut self, time: Duration) -> Result<(), LabError> {
        let end = Instant::now() + time;
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            self.receive(left.min(LOOK))?;
        }
        Ok(())
    }

    /// Declares the run invalid if the machine was too slow for a lease: a lock that was lost for that reason says nothing about a way.
    ///
    /// # Errors
    /// [`LabError::Invalid`] if `lost` is true.
    pub fn need_lease(&self, actor: &str, lost: bool) -> Result<(), LabError> {
        if !lost {
            return Ok(());
        }
        let (way, ttl) = (&self.way, self.ttl);
        Err(LabError::Invalid(format!(
            "{way}: {actor} lost a lease of {ttl:?}, because this machine is too busy"
        )))
    }

    /// Whether a worker reported that it had lost its lock.
    pub fn has_lost(&self, actor: &str) -> bool {
        let lost =
            |kind: &LabEventKind| matches!(kind, LabEventKind::Ends { how, .. } if how.contains("lost"));
        self.events.iter().any(|event| event.is_by(actor) && lost(&event.kind))
    }

    fn receive(&mut self, wait: Duration) -> Result<Option<LabEvent>, LabError> {
        if interrupted() {
            return Err(LabError::Interrupted);
        }
        let event = match self.inbox.recv_timeout(wait) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => unreachable!("the half keeps a sender"),
        };
        self.accept(event.clone());
        if let LabEventKind::Failed { error } = &event.kind {
            return Err(LabError::Broken(format!("{}: {} failed: {error}", self.way, event.actor)));
        }
        let gone = event.kind == LabEventKind::Gone;
        if gone && self.actors.get_mut(&event.actor).is_some_and(ActorProcess::has_failed) {
            return Err(LabError::Broken(format!("{}: {} ended: {}", self.way, event.actor, self.stderr())));
        }
        Ok(Some(event))
    }

    fn stderr(&self) -> String {
        let text = std::fs::read_to_string(self.dir.join("stderr")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join(" | ")
    }

    /// Counts something that is harm if there is any. `words` are those of [`LabCount::new`](crate::LabCount::new).
    pub fn harm(&mut self, key: &'static str, number: impl Into<f64>, words: impl Into<String>) {
        self.counts.push(LabCount::new(key, number.into(), &words.into(), true));
    }

    /// Counts something that is no harm.
    pub fn count(&mut self, key: &'static str, number: impl Into<f64>, words: impl Into<String>) {
        self.counts.push(LabCount::new(key, number.into(), &words.into(), false));
    }

    /// Counts something that the checks need, and that tells a reader nothing more.
    pub fn evidence(&mut self, key: &'static str, number: impl Into<f64>) {
        self.count(key, number, "");
    }

    /// The values of a figure that the workers reported, in the order in which they did.
    pub fn figures(&self, wanted: &str) -> Vec<f64> {
        let value = |event: &LabEvent| match &event.kind {
            LabEventKind::Figure { name, value } if name == wanted => Some(*value),
            _ => None,
        };
        self.events.iter().filter_map(value).collect()
    }

    /// How often a second worker believed to hold a lock that another one believed to hold.
    pub fn overlaps(&self) -> u32 {
        self.timeline().overlaps.len() as u32
    }

    /// The tracks so far.
    pub fn timeline(&self) -> Timeline {
        Timeline::of(&self.events, self.start, now().as_nanos(), self.holders)
    }

    /// The report of the half, after its end. Its processes end.
    pub(crate) fn report(mut self) -> HalfReport {
        self.actors.clear();
        let end = self.events.iter().map(|event| event.t).max().unwrap_or(self.start);
        let timeline = Timeline::of(&self.events, self.start, end, self.holders);
        HalfReport { way: self.way, how: self.how, counts: self.counts, timeline }
    }
}

/// The seconds between two events.
pub fn seconds_between(earlier: &LabEvent, later: &LabEvent) -> f64 {
    later.t.saturating_sub(earlier.t) as f64 / 1e9
}

/// The number of lines of a file; 0 if there is none.
pub fn lines_of(path: &Path) -> u32 {
    std::fs::read_to_string(path).unwrap_or_default().lines().count() as u32
}
