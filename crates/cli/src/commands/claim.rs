//! `lockkeeper claim`: workers on many hosts share a list of items, each item for one worker at a time.

use std::io::Read;
use std::path::PathBuf;

use clap::Args;
use lockkeeper::claim::{ClaimGroup, FailedItem};
use lockkeeper::{LockName, Lockkeeper, Outcome};
use serde_json::{Value, json};

use crate::args::{JobArgs, NameArgs, utf8};
use crate::child::item::ItemCommand;
use crate::exit::{ExitFailure, OK};
use crate::output::{self, bold};
use crate::signals::SignalStream;
use crate::store;
use crate::text::{columns, cut, plain, quoted, rfc3339};
use crate::work::{ItemWorker, WorkSource, WorkerArgs};

/// The longest list that is read.
const LIST_BYTES: u64 = 256 << 20;

/// Run a command for each item of a list, shared with workers on other hosts.
///
/// Each item goes to one worker at a time, without a lock per item. If a worker dies, its items go to others after the lease, with
/// a higher fence; its late completion is refused. A command that fails is tried again later, a few times.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
#[command(mut_arg("command", |command| command.required(false)
    .required_unless_present_any(["status", "failed", "retry", "forget"])))]
pub struct ClaimArgs {
    #[command(flatten)]
    pub named: NameArgs,
    /// The list: a file with one id in each line, of 1 to 320 bytes; - is stdin
    #[arg(long, value_name = "FILE", required_unless_present_any = ["status", "failed", "retry", "forget"])]
    pub from: Option<PathBuf>,
    /// End when no item is free, instead of waiting for those that other workers have
    #[arg(long)]
    pub skip: bool,
    /// How long a done item is recorded; a worker whose list has it after that does it again
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = crate::duration::parse_long, allow_hyphen_values = true)]
    pub keep: std::time::Duration,
    /// Print how many items are in which state
    #[arg(long, conflicts_with_all = ["from", "command"])]
    pub status: bool,
    /// List the items that have failed for good
    #[arg(long, conflicts_with_all = ["from", "command", "status"])]
    pub failed: bool,
    /// Let an item that has failed for good be tried again
    #[arg(long, value_name = "ID", value_parser = utf8("id"), conflicts_with_all = ["from", "command", "status", "failed"])]
    pub retry: Option<String>,
    /// Forget an item that has failed for good
    #[arg(long, value_name = "ID", value_parser = utf8("id"), conflicts_with_all = ["from", "command", "status", "failed", "retry"])]
    pub forget: Option<String>,
    /// Refuse a store that may forget a record: for work that does harm if it is done twice
    #[arg(long)]
    pub correctness: bool,
    #[command(flatten)]
    pub worker: WorkerArgs,
    #[command(flatten)]
    pub job: JobArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper claim invoices --from ids.txt -- ./send-invoice     on every host, with the same list
  lockkeeper claim thumbs --from - --parallel 4 -- ./thumb.sh    ids from stdin, four at a time
  lockkeeper claim invoices --failed                             what failed for good
  lockkeeper claim invoices --retry 4711

The command gets LOCKKEEPER_ITEM (the id), LOCKKEEPER_FENCE (the fencing token), LOCKKEEPER_ATTEMPT (1
at first), LOCKKEEPER_TTL_MS and the store. It should send the fence with every write: a worker that
was paused may still try. Exit code 0 of the command means done, every other one that it failed.

Exit codes: 0 every item is settled and none failed for good here, else the code of the last command
whose item did; 66 --retry or --forget found no such item, 64 bad call, 69 the store is unreachable
at the start, 78 the store has no records, 128+n a signal.";

impl ClaimArgs {
    fn name(&self) -> &LockName {
        self.named.get()
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        self.worker.check()?;
        let manages = self.status || self.failed || self.retry.is_some() || self.forget.is_some();
        if manages {
            let keeper = self.job.common.open().await?;
            return self.manage(&keeper.claim(self.name().as_str())?).await;
        }
        self.job.check()?;
        let ids = self.ids()?;
        let report = self.job.report(std::iter::once(self.name()));
        let source = self.job.common.source()?;
        store::warn_of_one_host(&source, &report);
        let (keeper, _) = store::open(source.url.expose(), None, &report).await?;
        let list = self.group(&keeper)?.from(ids)?;
        let command = ItemCommand {
            command: &self.job.command,
            grace: self.job.grace,
            env: source.environment(self.job.hide_store).to_vec(),
            json: report.is_json(),
        };
        let group = format!("claim/{}", self.name());
        let worker = ItemWorker { args: &self.worker, command, report: &report, group, skip: self.skip };
        let mut signals = SignalStream::ending()?;
        worker.run(WorkSource::List(list), &mut signals).await
    }

    fn group(&self, keeper: &Lockkeeper) -> Result<ClaimGroup, ExitFailure> {
        let rules = &self.worker;
        let group = keeper.claim(self.name().as_str())?.lease(rules.lease).max_attempts(rules.max_attempts);
        let group = group.backoff(rules.backoff, rules.backoff_max).keep(self.keep).poll(rules.poll);
        Ok(if self.correctness { group.for_correctness() } else { group })
    }

    /// The ids of the list: one in each line that is not empty.
    fn ids(&self) -> Result<Vec<String>, ExitFailure> {
        let path = self.from.as_ref().expect("clap requires it");
        let shown = plain(&path.to_string_lossy()).into_owned();
        let bad = |why: String| ExitFailure::new(Outcome::Invalid, format!("--from {shown}: {why}"));
        let mut text = String::new();
        let read = match path.as_os_str() == "-" {
            true => std::io::stdin().lock().take(LIST_BYTES + 1).read_to_string(&mut text),
            false => std::fs::File::open(path).and_then(|f| f.take(LIST_BYTES + 1).read_to_string(&mut text)),
        };
        let size = read.map_err(|e| bad(e.to_string()))?;
        if size as u64 > LIST_BYTES {
            return Err(bad(format!("it has more than {LIST_BYTES} bytes: split it")));
        }
        let lines = text.lines().map(|line| line.strip_suffix('\r').unwrap_or(line));
        Ok(lines.filter(|line| !line.is_empty()).map(str::to_owned).collect())
    }

    async fn manage(&self, group: &ClaimGroup) -> Result<i32, ExitFailure> {
        if self.status {
            return self.print_counts(group).await;
        }
        if self.failed {
            return self.print_failed(&group.failed().await?);
        }
        let (id, found, done) = match (&self.retry, &self.forget) {
            (Some(id), _) => (id, group.retry(id).await?, "is tried again"),
            (_, Some(id)) => (id, group.forget(id).await?, "is forgotten"),
            _ => unreachable!("one of them is given"),
        };
        if !found {
            let message = format!("{} has not failed for good", quoted(id));
            return Err(ExitFailure::new(Outcome::Absent, message).next(format!(
                "see which have: lockkeeper claim {} --failed",
                crate::text::shell(self.name().as_str())
            )));
        }
        output::line(&match self.job.common.json {
            true => json!({ "group": self.name(), "item": id, "done": done }).to_string(),
            false => format!("{} {done}", quoted(id)),
        })?;
        Ok(OK)
    }

    async fn print_counts(&self, group: &ClaimGroup) -> Result<i32, ExitFailure> {
        let counts = group.counts().await?;
        let (taken, waiting, done, failed) = (counts.taken, counts.waiting, counts.done, counts.failed);
        output::line(&match self.job.common.json {
            true => json!({
                "group": self.name(), "taken": taken, "waiting": waiting, "done": done, "failed": failed,
            })
            .to_string(),
            false => format!("{taken} taken, {waiting} waiting, {done} done, {failed} failed for good"),
        })?;
        Ok(OK)
    }

    fn print_failed(&self, failed: &[FailedItem]) -> Result<i32, ExitFailure> {
        if self.job.common.json {
            let items: Vec<Value> = failed.iter().map(shown).collect();
            output::line(&json!({ "group": self.name(), "failed": items }).to_string())?;
        } else if !failed.is_empty() {
            let mut rows = vec![["ITEM", "ATTEMPTS", "SINCE", "WORKER", "ERROR"].map(String::from).to_vec()];
            rows.extend(failed.iter().map(|item| {
                let [id, by, error] = [&item.id, &item.by, &item.error].map(|text| plain(text).into_owned());
                vec![cut(&id, 60), item.attempts.to_string(), rfc3339(item.at), by, cut(&error, 80)]
            }));
            for (i, line) in columns(&rows).iter().enumerate() {
                output::line(&if i == 0 { bold(line) } else { line.clone() })?;
            }
        }
        Ok(OK)
    }
}

fn shown(item: &FailedItem) -> Value {
    json!({
        "item": item.id, "attempts": item.attempts, "error": item.error, "fence": item.fence, "at_us": item.at, "by": item.by,
    })
}
