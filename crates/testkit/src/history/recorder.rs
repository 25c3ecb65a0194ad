//! Writes the events of a process to a file.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use lockkeeper_core::BootInstant;
use lockkeeper_host::{Clock, SystemClock};

use super::HistoryEvent;

/// Writes down what happens, one line of JSON per event. Any number of processes may share one file.
#[derive(Clone, Debug)]
pub struct HistoryRecorder {
    file: Arc<File>,
    proc: String,
    clock: Arc<dyn Clock>,
}

impl HistoryRecorder {
    /// Appends to `path` in the name of `proc`, on the clock that all processes of this machine share.
    pub fn new(path: impl AsRef<Path>, proc: impl Into<String>) -> io::Result<HistoryRecorder> {
        HistoryRecorder::with_clock(path, proc, Arc::new(SystemClock))
    }

    /// The same on another clock, for a world in which time stands still.
    pub fn with_clock(
        path: impl AsRef<Path>,
        proc: impl Into<String>,
        clock: Arc<dyn Clock>,
    ) -> io::Result<HistoryRecorder> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(HistoryRecorder { file: Arc::new(file), proc: proc.into(), clock })
    }

    /// The same file in another name.
    pub fn by(&self, proc: impl Into<String>) -> HistoryRecorder {
        HistoryRecorder { proc: proc.into(), ..self.clone() }
    }

    /// Writes down that this happens now. Record a beginning before anything is sent, and an end after the answer: so
    /// the history never claims more than was true.
    ///
    /// # Panics
    /// If the event cannot be written: a history with holes proves nothing.
    pub fn record(&self, event: HistoryEvent) {
        self.record_at(self.clock.now(), event);
    }

    /// Writes down that this happened at a moment of before, of which the caller learned only now.
    ///
    /// # Panics
    /// As [`HistoryRecorder::record`].
    pub fn record_at(&self, at: BootInstant, event: HistoryEvent) {
        let event = HistoryEvent { t: at.as_nanos(), proc: self.proc.clone(), ..event };
        let mut line = serde_json::to_vec(&event).expect("an event can be written as JSON");
        line.push(b'\n');
        // One call, at the end of the file: lines of several processes do not mix, and a kill does not tear one.
        let written = (&*self.file).write(&line).expect("the history can be written");
        assert_eq!(written, line.len(), "the history is torn: is the disk full?");
    }
}

/// The events, in the order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History(Vec<HistoryEvent>);

impl History {
    /// Sorts the events by time; those of one moment stay in their order.
    pub fn new(events: impl IntoIterator<Item = HistoryEvent>) -> History {
        let mut events: Vec<HistoryEvent> = events.into_iter().collect();
        events.sort_by_key(|event| event.t);
        History(events)
    }

    /// From lines of JSON.
    ///
    /// # Errors
    /// If a line is not an event; which one, is in the message.
    pub fn parse(text: &str) -> io::Result<History> {
        let events = text.lines().enumerate().map(|(n, line)| {
            serde_json::from_str(line).map_err(|e| {
                io::Error::new(io::ErrorKind::InvalidData, format!("line {} of the history: {e}", n + 1))
            })
        });
        Ok(History::new(events.collect::<io::Result<Vec<HistoryEvent>>>()?))
    }

    /// From the file of a [`HistoryRecorder`].
    ///
    /// # Errors
    /// If it cannot be read or understood.
    pub fn read(path: impl AsRef<Path>) -> io::Result<History> {
        History::parse(&fs::read_to_string(path)?)
    }

    /// The events, in the order of time.
    pub fn events(&self) -> &[HistoryEvent] {
        &self.0
    }
}
