//! Log events of the threads that locks depend on, recorded by another thread: a subscriber may block for as long as it likes, for instance
//! on a pipe that no process reads, and must not keep a lock from being renewed or its loss from being reported.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use lockkeeper_core::IgnorePoison;
use tracing::field::{Field, Value, Visit, display};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, Interest};
use tracing::{Dispatch, Event, Metadata, Subscriber, dispatcher};

use crate::per_process::PerProcess;

/// Events that wait for a subscriber that blocks. Further ones are dropped and counted.
const CAPACITY: usize = 256;
/// Fields of an event that are kept, which is as many as an event can have.
const FIELDS: usize = 32;

/// From now on, until the guard is dropped, events of this thread are passed to the process's global subscriber by another thread.
/// A subscriber that was set for this thread alone does not see them.
#[must_use = "dropping it lets events be recorded on this thread again"]
pub fn log_elsewhere() -> DefaultGuard {
    static RELAY: OnceLock<Dispatch> = OnceLock::new();
    dispatcher::set_default(RELAY.get_or_init(|| Dispatch::new(Relay)))
}

/// Starts the thread that records events. Without it they are dropped, and nothing else is the worse for it.
fn recorder() -> Option<&'static Arc<Recorder>> {
    static RECORDER: PerProcess<Arc<Recorder>> = PerProcess::new();
    let start = || {
        let recorder = Arc::new(Recorder::default());
        let thread = recorder.clone();
        std::thread::Builder::new().name("lockkeeper-log".into()).spawn(move || thread.run())?;
        Ok::<_, std::io::Error>(recorder)
    };
    RECORDER.get_or_try_init(start).ok()
}

/// Makes a call on the thread that records the log events: for what may block, such as a metrics recorder of the user's. Returns false if
/// that thread has too much to do already, or cannot be started; then the call is not made.
pub fn call_elsewhere(call: impl FnOnce() + Send + 'static) -> bool {
    recorder().is_some_and(|recorder| recorder.add(RelayEntry::Call(Box::new(call))))
}

/// The subscriber of the threads that must not block.
struct Relay;

impl Subscriber for Relay {
    // The global subscriber decides, on the thread that may wait for it. Its level is known here already: see the hint.
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    /// Nothing by itself: what is wanted is up to the others.
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::OFF)
    }

    fn event(&self, event: &Event<'_>) {
        let mut noted = Noted { metadata: event.metadata(), fields: Vec::new() };
        event.record(&mut noted);
        if let Some(recorder) = recorder() {
            recorder.add(RelayEntry::Event(noted));
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// An event with its values as text.
struct Noted {
    metadata: &'static Metadata<'static>,
    fields: Vec<(Field, String)>,
}

impl Visit for Noted {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.push((field.clone(), format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.push((field.clone(), value.to_owned()));
    }
}

impl Noted {
    /// Records it with the subscriber of this thread.
    fn record(&self) {
        let texts: Vec<_> = self.fields.iter().map(|(field, text)| (field, display(text))).collect();
        // A set of values is made of an array of a fixed size: what is left of it repeats a field without a value.
        let Some(any) = self.metadata.fields().iter().next() else { return };
        let mut values: [(&Field, Option<&dyn Value>); FIELDS] = [(&any, None); FIELDS];
        for (value, (field, text)) in values.iter_mut().zip(&texts) {
            *value = (field, Some(text));
        }
        dispatcher::get_default(|subscriber| {
            if subscriber.enabled(self.metadata) {
                subscriber.event(&Event::new(self.metadata, &self.metadata.fields().value_set(&values)));
            }
        });
    }
}

/// A piece of work for the thread that may block.
enum RelayEntry {
    Event(Noted),
    Call(Box<dyn FnOnce() + Send>),
}

#[derive(Default)]
struct Recorder {
    /// The work in order, and the number of log events that were dropped.
    queue: Mutex<(VecDeque<RelayEntry>, u64)>,
    added: Condvar,
}

impl Recorder {
    fn add(&self, entry: RelayEntry) -> bool {
        let mut queue = self.queue.lock().ignore_poison();
        let fits = queue.0.len() < CAPACITY;
        if fits {
            queue.0.push_back(entry);
            self.added.notify_one();
        } else {
            queue.1 += u64::from(matches!(entry, RelayEntry::Event(_)));
        }
        fits
    }

    fn run(&self) {
        loop {
            let mut queue = self.queue.lock().ignore_poison();
            while queue.0.is_empty() {
                queue = self.added.wait(queue).ignore_poison();
            }
            let (entry, dropped) = (queue.0.pop_front(), std::mem::take(&mut queue.1));
            drop(queue);
            // A subscriber's panic is its own.
            let record = std::panic::AssertUnwindSafe(|| {
                match entry {
                    Some(RelayEntry::Event(noted)) => noted.record(),
                    Some(RelayEntry::Call(call)) => call(),
                    None => {}
                }
                if dropped > 0 {
                    tracing::warn!(
                        dropped,
                        "log events were dropped, because recording the ones before took too long"
                    );
                }
            });
            let _ = std::panic::catch_unwind(record);
        }
    }
}
