//! The list of scenarios.

use futures_util::future::LocalBoxFuture;
use lockkeeper::Result;

use crate::lab::{Lab, LabError};
use crate::needs::Need;
use crate::outcome::ScenarioOutcome;
use crate::scenarios::ALL;
use crate::worker::LabWorker;

/// A failure that anyone can watch.
#[derive(Debug)]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// The scenario in one line.
    pub title: &'static str,
    /// The story.
    pub story: &'static str,
    /// The part of the timeline to watch.
    pub watch: &'static str,
    /// The servers that it starts.
    pub needs: &'static [Need],
    /// Whether it runs on any store. One that needs servers of its own does not.
    pub any_store: bool,
    /// About how many seconds it takes, and with `--fast`.
    pub seconds: (u32, u32),
    /// The director.
    pub run: fn(&Lab) -> Result<ScenarioOutcome, LabError>,
    /// The workers.
    pub work: fn(LabWorker) -> LocalBoxFuture<'static, Result<()>>,
}

impl Scenario {
    /// The servers and tools that it needs and that are not installed.
    pub fn missing(&self) -> Vec<Need> {
        self.needs.iter().copied().filter(|need| !need.is_installed()).collect()
    }
}

/// All scenarios, in the order in which the page tells them.
pub fn all() -> &'static [Scenario] {
    ALL
}

/// The scenario with this name.
pub fn find(name: &str) -> Option<&'static Scenario> {
    ALL.iter().find(|scenario| scenario.name == name)
}
