//! What the library has to say while it works, such as a renewal that failed and will be tried again: on stderr, warnings
//! and worse. `LOCKKEEPER_LOG=debug` (or `info`, `error`, `off`) changes that.

use std::fmt::{Debug, Write as _};
use std::sync::atomic::Ordering;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::text::plain;
use crate::{daily, outlet};

/// Begins to pass it on. Small on purpose: a command that runs a thousand times an hour should not pay for a logger.
pub fn start(json: bool, quiet: bool) {
    let level = match std::env::var("LOCKKEEPER_LOG").ok().and_then(|level| level.parse().ok()) {
        Some(level) => level,
        None if quiet => LevelFilter::ERROR,
        None => LevelFilter::WARN,
    };
    outlet::JSON.store(json, Ordering::Relaxed);
    // Only fails if there is one already, and nobody else makes one here.
    let _ = tracing::subscriber::set_global_default(Stderr { json, level });
}

struct Stderr {
    json: bool,
    level: LevelFilter,
}

#[derive(Default)]
struct Words {
    message: String,
    fields: Map<String, Value>,
}

impl Visit for Words {
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

impl Subscriber for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn event(&self, event: &Event<'_>) {
        let mut words = Words::default();
        event.record(&mut words);
        // What a store found when it was opened is the same at every call.
        if *event.metadata().level() == Level::WARN
            && event.metadata().target().ends_with("::open")
            && daily::was_said(&words.message)
        {
            return;
        }
        let level = event.metadata().level().as_str().to_lowercase();
        let line = if self.json {
            json!({ "event": "log", "level": level, "message": words.message, "fields": words.fields })
                .to_string()
        } else {
            let mut line = format!("lockkeeper: {level}: {}", words.message);
            for (name, value) in &words.fields {
                let _ = write!(line, "; {name}: {}", value.as_str().unwrap_or_default());
            }
            plain(&line).into_owned()
        };
        // Called on the thread that renews, too: a full pipe must not stop it.
        outlet::ERR.post(line + "\n");
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
