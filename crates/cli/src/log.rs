//! The logger of the command: prints the library's warnings and errors to stderr, such as a renewal that failed and is retried.
//! `LOCKKEEPER_LOG=debug` (or `info`, `error`, `off`) changes that.

use std::fmt::{Debug, Write as _};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::text::plain;
use crate::{daily_warnings, message_writer};

/// Begins to pass it on. Small on purpose: a command that runs a thousand times an hour should not pay for a logger.
pub fn start(json: bool, quiet: bool) {
    let level = match std::env::var("LOCKKEEPER_LOG").ok().and_then(|level| level.parse().ok()) {
        Some(level) => level,
        None if quiet => LevelFilter::ERROR,
        None => LevelFilter::WARN,
    };
    message_writer::JSON.store(json, Ordering::Relaxed);
    // Only fails if there is a subscriber already, and this is the only place that sets one.
    let _ =
        tracing::subscriber::set_global_default(StderrLogger { json, level, stamps: daily_warnings::dir() });
}

struct StderrLogger {
    json: bool,
    level: LevelFilter,
    /// Where it is kept which daily warnings were printed.
    stamps: Option<PathBuf>,
}

#[derive(Default)]
struct EventFields {
    message: String,
    fields: Map<String, Value>,
    /// It is the same at every call, by the word of the one who warns. An alarm that is new each time does not say so.
    daily: bool,
}

/// The field that marks a warning which is printed once a day.
const DAILY: &str = "daily";

impl Visit for EventFields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.fields.insert(field.name().to_owned(), text.into());
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == DAILY {
            self.daily = value;
        } else {
            self.record_debug(field, &value);
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

impl Subscriber for StderrLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn event(&self, event: &Event<'_>) {
        // Called on the thread that renews, too: a full pipe must not stop it.
        self.line(event).into_iter().for_each(|line| message_writer::STDERR.enqueue(line + "\n"));
    }

    // Spans are of no use on a few lines of stderr.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl StderrLogger {
    /// The text for an event; `None` for a daily warning that was printed today.
    fn line(&self, event: &Event<'_>) -> Option<String> {
        let mut fields = EventFields::default();
        event.record(&mut fields);
        if fields.daily
            && let Some(dir) = &self.stamps
            && daily_warnings::was_printed_today(dir, &(&fields.message, &fields.fields))
        {
            return None;
        }
        let level = event.metadata().level().as_str().to_lowercase();
        if self.json {
            let line =
                json!({ "event": "log", "level": level, "message": fields.message, "fields": fields.fields });
            return Some(line.to_string());
        }
        let mut line = format!("lockkeeper: {level}: {}", fields.message);
        for (name, value) in &fields.fields {
            let _ = write!(line, "; {name}: {}", value.as_str().unwrap_or_default());
        }
        Some(plain(&line).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    struct Lines(StderrLogger, Arc<Mutex<Vec<String>>>);

    impl Subscriber for Lines {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            self.0.enabled(metadata)
        }
        fn event(&self, event: &Event<'_>) {
            self.1.lock().unwrap().extend(self.0.line(event));
        }
        fn new_span(&self, span: &Attributes<'_>) -> Id {
            self.0.new_span(span)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    /// The text that `work` logs and the command prints.
    fn printed(work: impl FnOnce()) -> Vec<String> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("lockkeeper-log-{}-{number}", std::process::id()));
        let logger = StderrLogger { json: false, level: LevelFilter::WARN, stamps: Some(dir.clone()) };
        let lines = Arc::new(Mutex::new(Vec::new()));
        tracing::subscriber::with_default(Lines(logger, lines.clone()), work);
        let _ = std::fs::remove_dir_all(dir);
        lines.lock().unwrap().clone()
    }

    /// Every warning of a module that is called `profile` was printed once a day, also that a Redis server keeps other promises than
    /// before; and all servers counted as one.
    #[test]
    fn only_what_says_so_is_printed_once_a_day() {
        let lines = printed(|| {
            for _ in 0..2 {
                for server in ["a:6379", "b:6379"] {
                    tracing::warn!(target: "lockkeeper_redis::profile", %server, "other promises");
                    tracing::warn!(target: "lockkeeper_etcd::profile", daily = true, %server, "old");
                }
            }
        });
        let alarm = |server: &str| format!("lockkeeper: warn: other promises; server: {server}:6379");
        let old = |server: &str| format!("lockkeeper: warn: old; server: {server}:6379");
        assert_eq!(lines, [alarm("a"), old("a"), alarm("b"), old("b"), alarm("a"), alarm("b")]);
    }
}
