//! `lockkeeper verify`: the laws on the user's own store, and a verdict for each promise.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use lockkeeper::{Guarantee, Lockkeeper, Outcome};
use lockkeeper_testkit::verify::{
    LawOutcome, LawResult, PromiseVerdict, Verdict, Verification, VerifiedPromise, judge,
};
use rustix::process::Signal;
use serde_json::json;

use crate::args::CommonArgs;
use crate::exit::{self, ExitFailure};
use crate::message_writer;
use crate::output;
use crate::signals::SignalStream;
use crate::text::plain;

/// How long the removal of locks and records may take after a signal. A lock or a record that remains ends by itself.
const LEAVING: Duration = Duration::from_secs(10);

/// Check that a store keeps its promises, with names of its own.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct VerifyArgs {
    /// How many connections to open
    #[arg(long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u8).range(2..=16), allow_hyphen_values = true)]
    pub connections: u8,
    /// Print no progress
    #[arg(long, short)]
    pub quiet: bool,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper verify --store redis://HOST           about a minute; a verdict for each promise
  lockkeeper verify --json | jq .promises          the same for programs
  lockkeeper verify --quiet || mail ops            exit code 0: every promise was kept

Safe beside other users of the store: it uses only names below lockkeeper-verify/, at most N
connections and eight laws at a time, injects no fault and changes no setting. It leaves nothing
behind, also after Ctrl-C; if it is killed, its locks and records end within 50 seconds.

No verification sees a crash, a failover or a clock that jumps: for these it repeats what the store
declares. Exit codes: 0 every promise was kept, 1 one could not be decided, 2 one was broken; 64 bad
call, 69 the store is unreachable, 128+n ended by a signal.";

/// The result of a verification.
struct Verified {
    store: String,
    prefix: String,
    connections: u8,
    seconds: u64,
    promises: Vec<PromiseVerdict>,
    results: Vec<LawResult>,
    /// Why something is left in the store.
    left: Option<String>,
}

impl VerifyArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let url = self.common.url()?;
        let mut keepers = vec![Lockkeeper::open(url.expose()).await?];
        let mut signals = SignalStream::ending()?;
        // The locks of memory: are private to what opened them.
        let in_memory = keepers[0].profile().store == "memory";
        while !in_memory && keepers.len() + 1 < usize::from(self.connections) {
            keepers.push(Lockkeeper::open(url.expose()).await?);
        }
        let clients = keepers.iter().cycle().take(usize::from(self.connections) - 1);
        let verification = Verification::new(clients.map(|keeper| keeper.store().clone()));
        let begun = Instant::now();
        // A law says by a panic what it has found, and the report has it.
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let checked = self.check(&verification, &keepers[0], url.expose(), in_memory, &mut signals).await;
        std::panic::set_hook(hook);
        let (results, ended) = checked;
        let left = tokio::select! {
            cleaned = verification.clean() => cleaned.err().map(|error| error.to_string()),
            () = tokio::time::sleep(LEAVING), if ended.is_some() => Some("the store does not answer".to_owned()),
        };
        let profile = keepers[0].profile();
        let verified = Verified {
            promises: judge(&profile, &results),
            store: profile.store,
            prefix: verification.prefix().to_owned(),
            connections: self.connections,
            seconds: begun.elapsed().as_secs(),
            results,
            left,
        };
        if let Some(signal) = ended {
            let left =
                verified.left.map_or("nothing is left in the store".to_owned(), |left| left_behind(&left));
            return Err(ExitFailure::new(Outcome::Unknown, format!("ended by a signal; {left}"))
                .with_code(exit::by_signal(signal.as_raw())));
        }
        output::line(&match self.common.json {
            true => verified.json().to_string(),
            false => verified.text(),
        })?;
        Ok(verified.verdict() as i32)
    }

    /// Runs everything, until a signal ends it.
    async fn check(
        &self,
        verification: &Verification,
        keeper: &Lockkeeper,
        url: &str,
        in_memory: bool,
        signals: &mut SignalStream,
    ) -> (Vec<LawResult>, Option<Signal>) {
        let progress = Progress::new(self.quiet || self.common.json, Verification::law_count());
        let work = async {
            let mut results = verification.laws(|result| progress.ended(result)).await;
            let later = async || match in_memory {
                true => Ok(keeper.store().clone()),
                false => Lockkeeper::open(url).await.map(|keeper| keeper.store().clone()),
            };
            results.extend(verification.durability(later).await);
            results
        };
        let mut work = std::pin::pin!(work);
        let ended = tokio::select! {
            biased;
            results = &mut work => Ok(results),
            signal = signals.next_ending() => Err(signal),
        };
        let checked = match ended {
            Ok(results) => (results, None),
            Err(signal) => {
                verification.stop();
                let stopped = tokio::time::timeout(LEAVING, work).await;
                (stopped.unwrap_or_default(), Some(signal))
            }
        };
        progress.clear();
        checked
    }
}

fn left_behind(why: &str) -> String {
    let seconds = lockkeeper_testkit::verify::LONGEST.as_secs();
    format!("something may be left in the store for {seconds} s: {why}")
}

impl Verified {
    fn verdict(&self) -> Verdict {
        self.promises.iter().map(|judged| judged.verdict).max().unwrap_or(Verdict::Unclear)
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "store": self.store,
            "verdict": self.verdict().as_str(),
            "promises": self.promises,
            "laws": self.results,
            "prefix": self.prefix,
            "connections": self.connections,
            "seconds": self.seconds,
            "left": self.left,
        })
    }

    fn text(&self) -> String {
        let mut lines: Vec<String> = self.promises.iter().map(line).collect();
        for result in &self.results {
            let (word, why) = match &result.outcome {
                LawOutcome::Kept => continue,
                LawOutcome::LeftOut(why) => ("left out", why.as_str()),
                LawOutcome::Stopped => ("stopped", "the verification was ended"),
                LawOutcome::Unclear(why) => ("unclear", why.as_str()),
                LawOutcome::Broken(why) => ("broken", why.as_str()),
            };
            let law = result.law.replace('_', " ");
            lines.push(format!("{word}: {}: {law}: {}", result.promise.as_str(), plain(why)));
        }
        if self.store == "memory" {
            lines.push(
                "memory: is private to one process: this is the verdict on the memory of this one".into(),
            );
        }
        let left = self.left.as_deref().map_or("nothing is left in it".to_owned(), left_behind);
        let grants: u64 = self.results.iter().map(|result| result.grants).sum();
        lines.push(format!(
            "The {} store: {}, after {grants} grants in {} s below {}; {left}.",
            self.store,
            self.verdict().as_str(),
            self.seconds,
            self.prefix
        ));
        lines.join("\n")
    }
}

/// The line for one promise.
fn line(judged: &PromiseVerdict) -> String {
    let declared = match (judged.promise, judged.declared) {
        (_, None) => String::new(),
        (VerifiedPromise::Durability, Some(declared)) => {
            format!("; over a crash, which is not seen from here: {}", declares(declared))
        }
        (_, Some(declared)) => format!("; over crashes and jumps of clocks: {}", declares(declared)),
    };
    let (promise, verdict) = (judged.promise.as_str(), judged.verdict.as_str());
    format!("{promise:<11} {verdict:<8} {} of {} laws{declared}", judged.kept, judged.run)
}

fn declares(declared: Guarantee) -> &'static str {
    match declared {
        Guarantee::Kept => "declared as kept",
        Guarantee::Likely => "declared as likely",
        Guarantee::No => "not promised",
    }
}

/// A bar on the terminal.
struct Progress {
    shown: bool,
    all: usize,
    done: Cell<usize>,
}

impl Progress {
    const WIDTH: usize = 30;

    fn new(quiet: bool, all: usize) -> Self {
        let progress = Progress { shown: !quiet && std::io::stderr().is_terminal(), all, done: Cell::new(0) };
        progress.show("");
        progress
    }

    fn ended(&self, result: &LawResult) {
        self.done.set(self.done.get() + 1);
        self.show(&result.law.replace('_', " "));
    }

    fn show(&self, law: &str) {
        if self.shown {
            let full = Self::WIDTH * self.done.get() / self.all.max(1);
            let bar = format!("{}{}", "#".repeat(full), "-".repeat(Self::WIDTH - full));
            let law: String = law.chars().take(40).collect();
            message_writer::STDERR.enqueue(format!(
                "\r\x1b[K[{bar}] {}/{} laws  {law}",
                self.done.get(),
                self.all
            ));
        }
    }

    fn clear(&self) {
        if self.shown {
            message_writer::STDERR.enqueue("\r\x1b[K".to_owned());
        }
    }
}
