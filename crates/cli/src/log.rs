//! The logger of the command: prints the library's warnings and errors to stderr, such as a renewal that failed and is retried.
//! `LOCKKEEPER_LOG=debug` (or `info`, `error`, `off`) changes that.

use std::fmt::{Debug, Write as _};
use std::sync::atomic::Ordering;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

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
    let _ = tracing::subscriber::set_global_default(StderrLogger { json, level });
}

struct StderrLogger {
    json: bool,
    level: LevelFilter,
}

#[derive(Default)]
struct EventFields {
    message: String,
    fields: Map<String, Value>,
}

impl Visit for EventFields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.fields.insert(field.name().to_owned(), text.into());
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
        let mut fields = EventFields::default();
        event.record(&mut fields);
        // A warning of a store about its server is the same at every call. The stores check their servers in `open.rs` or `profile.rs`.
        let target = event.metadata().target();
        if *event.metadata().level() == Level::WARN
            && (target.ends_with("::open") || target.ends_with("::profile"))
            && daily_warnings::was_printed_today(&fields.message)
        {
            return;
        }
        let level = event.metadata().level().as_str().to_lowercase();
        let line = if self.json {
            json!({ "event": "log", "level": level, "message": fields.message, "fields": fields.fields })
                .to_string()
        } else {
            let mut line = format!("lockkeeper: {level}: {}", fields.message);
            for (name, value) in &fields.fields {
                let _ = write!(line, "; {name}: {}", value.as_str().unwrap_or_default());
            }
            plain(&line).into_owned()
        };
        // Called on the thread that renews, too: a full pipe must not stop it.
        message_writer::STDERR.enqueue(line + "\n");
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
