//! Failures of locks that anyone can watch: `lockkeeper lab`.
//!
//! A [`Scenario`] runs a naive and a safe way beside each other, with real processes ([`worker_main`]) and a real store, counts the
//! damage of both, and says what follows from the numbers of the run. A run in which the fault did not fire is *invalid*, never
//! good. [`HtmlReport`] writes the timelines to an HTML file.

mod actor;
mod event;
mod half;
mod lab;
mod naive_lock;
mod needs;
mod outcome;
mod report;
mod scenario;
mod scenarios;
mod servers;
mod terminal;
mod timeline;
mod worker;

pub use actor::WORKER_SUBCOMMAND;
pub use event::{LabEvent, LabEventKind};
pub use half::LabHalf;
pub use lab::{Lab, LabError, LabOptions, interrupt};
pub use needs::Need;
pub use outcome::{
    ChartSeries, CheckSubject, HalfReport, LabChart, LabCheck, LabCount, LabVerdict, ScenarioOutcome,
};
pub use report::HtmlReport;
pub use scenario::{Scenario, all, find};
pub use terminal::{ViewMode, print_outcome};
pub use timeline::{Mark, MarkKind, Overlap, Span, SpanKind, Timeline, Track};
pub use worker::{LabWorker, worker_main};
