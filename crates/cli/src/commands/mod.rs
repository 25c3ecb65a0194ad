//! One file per subcommand, and the one place that picks among them.

pub mod break_lock;
pub mod completions;
pub mod cron;
pub mod elect;
pub mod fence;
pub mod fence_check;
#[cfg(feature = "postgres")]
pub mod fence_table;
pub mod fenced_write;
#[cfg(feature = "gate")]
pub mod gate;
pub mod hold;
pub mod ls;
pub mod man;
pub mod once;
pub mod record;
pub mod run;
pub mod show;
pub mod status;
pub mod store;
pub mod watch;

use std::future::Future;

use clap::Subcommand;

use crate::exit::{Failure, OK};
use crate::log;

/// Every subcommand.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command under a lock
    Run(Box<run::Run>),
    /// Hold a lock until stdin closes or a signal comes
    Hold(Box<hold::Hold>),
    /// List the locks that are held or waited for
    Ls(ls::Ls),
    /// Show everything about one lock
    Show(show::Show),
    /// Say whether a job of `run --window` or `cron` runs as it should
    Status(status::Status),
    /// Print what happens to locks, as it happens
    Watch(watch::Watch),
    /// Take a lock away from whoever holds it
    Break(break_lock::Break),
    /// Run a command on schedule, each time by one of many hosts
    Cron(Box<cron::Cron>),
    /// Run a command while this process is the leader
    Elect(Box<elect::Elect>),
    /// Run a command once; later calls get the same output and exit code
    Once(Box<once::Once>),
    /// Keep small values that many change
    Record(record::Record),
    /// Set up a store
    Store(store::Store),
    /// Ask whether a grant still holds, or make a database table refuse late writers
    Fence(fence::Fence),
    /// Check fences in front of a service that cannot be changed
    #[cfg(feature = "gate")]
    Gate(Box<gate::Gate>),
    /// Replace a file, unless a newer fence has written it
    FencedWrite(fenced_write::FencedWrite),
    /// Print shell completions
    Completions(completions::Completions),
    /// Print the manual page
    Man(man::Man),
}

impl Command {
    fn json(&self) -> bool {
        match self {
            Command::Run(run) => run.common.json,
            Command::Hold(hold) => hold.common.json,
            Command::Ls(ls) => ls.common.json,
            Command::Show(show) => show.common.json,
            Command::Status(status) => status.common.json,
            Command::Watch(watch) => watch.common.json,
            Command::Break(break_lock) => break_lock.common.json,
            Command::Cron(cron) => cron.common.json,
            Command::Elect(elect) => elect.common.json,
            Command::Once(once) => once.common.json,
            Command::Record(record) => record.json(),
            Command::Store(store) => store.json(),
            Command::Fence(fence) => fence.json(),
            #[cfg(feature = "gate")]
            Command::Gate(gate) => gate.common.json,
            Command::FencedWrite(write) => write.json,
            Command::Completions(_) | Command::Man(_) => false,
        }
    }

    /// The lock that it is about, if it is about one.
    fn lock(&self) -> Option<String> {
        match self {
            Command::Run(run) => Some(run.ask.name().to_string()),
            Command::Hold(hold) => Some(hold.ask.name().to_string()),
            Command::Show(show) => Some(show.name.to_string()),
            Command::Break(break_lock) => Some(break_lock.name.to_string()),
            Command::Cron(cron) => Some(cron.named.get().to_string()),
            _ => None,
        }
    }

    fn quiet(&self) -> bool {
        match self {
            Command::Run(run) => run.quiet,
            Command::Cron(cron) => cron.quiet,
            Command::Elect(elect) => elect.quiet,
            Command::Once(once) => once.quiet,
            _ => false,
        }
    }
}

/// Does it, says what went wrong, and returns the exit code.
pub fn run(command: Command) -> i32 {
    let (json, lock) = (command.json(), command.lock());
    log::start(json, command.quiet());
    let result = match command {
        Command::Run(run) => block_on(run.go()),
        Command::Hold(hold) => block_on(hold.go()),
        Command::Ls(ls) => block_on(ls.go()),
        Command::Show(show) => block_on(show.go()),
        Command::Status(status) => block_on(status.go()),
        Command::Watch(watch) => block_on(watch.go()),
        Command::Break(break_lock) => block_on(break_lock.go()),
        Command::Cron(cron) => block_on(cron.go()),
        Command::Elect(elect) => block_on(elect.go()),
        Command::Once(once) => block_on(once.go()),
        Command::Record(record) => block_on(record.go()),
        Command::Store(store) => block_on(store.go()),
        Command::Fence(fence) => block_on(fence.go()),
        #[cfg(feature = "gate")]
        Command::Gate(gate) => gate.go(),
        Command::FencedWrite(write) => write.go(),
        Command::Completions(completions) => completions.go().map(|()| OK),
        Command::Man(man) => man.go().map(|()| OK),
    };
    result.unwrap_or_else(|failure| {
        let failure = failure.about(lock.as_deref());
        failure.tell(json);
        failure.code
    })
}

/// Runs it on this thread. One thread is enough here, and the child's parent must be the thread that lives longest.
fn block_on<F: Future<Output = Result<i32, Failure>>>(work: F) -> Result<i32, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| {
        Failure::new(
            lockkeeper::Outcome::Unavailable,
            format!("the operating system gives no event queue: {e}"),
        )
    })?;
    let result = runtime.block_on(work);
    // Waiting for its helper threads would only delay the exit.
    runtime.shutdown_background();
    result
}
