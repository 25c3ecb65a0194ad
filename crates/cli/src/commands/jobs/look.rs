//! `lockkeeper jobs status`, `failed` and `retry`: what an operator sees of a job table.

use clap::Args;
use lockkeeper::Outcome;
use lockkeeper::jobs::FailedJob;
use serde_json::{Value, json};

use super::JobTableArgs;
use crate::args::utf8;
use crate::exit::{ExitFailure, OK};
use crate::output::{self, bold};
use crate::text::{columns, cut, plain, quoted, rfc3339};

#[derive(Args, Debug)]
pub struct JobsStatusArgs {
    #[command(flatten)]
    pub table: JobTableArgs,
}

#[derive(Args, Debug)]
pub struct JobsFailedArgs {
    #[command(flatten)]
    pub table: JobTableArgs,
    /// How many at most, the oldest first
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
}

#[derive(Args, Debug)]
pub struct JobsRetryArgs {
    #[command(flatten)]
    pub table: JobTableArgs,
    /// The primary key of the job; if it has several columns, a JSON array of texts
    #[arg(value_parser = utf8("key"), required_unless_present = "all", conflicts_with = "all")]
    pub key: Option<String>,
    /// All jobs that have failed for good
    #[arg(long)]
    pub all: bool,
}

impl JobsStatusArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let jobs = self.table.open().await?;
        let counts = jobs.counts().await?;
        output::line(&match self.table.database.json {
            true => json!({
                "table": jobs.table().table, "due": counts.due, "waiting": counts.waiting, "taken": counts.taken,
                "done": counts.done, "failed": counts.failed,
            })
            .to_string(),
            false => format!(
                "{}: {} due, {} waiting, {} taken, {} done, {} failed for good",
                plain(&jobs.table().table),
                counts.due,
                counts.waiting,
                counts.taken,
                counts.done,
                counts.failed
            ),
        })?;
        Ok(OK)
    }
}

impl JobsFailedArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let jobs = self.table.open().await?;
        let failed = jobs.failed(self.limit as usize).await?;
        if self.table.database.json {
            let all: Vec<Value> = failed.iter().map(shown).collect();
            output::line(&json!({ "table": jobs.table().table, "failed": all }).to_string())?;
        } else if !failed.is_empty() {
            let mut rows = vec![["JOB", "ATTEMPTS", "SINCE", "ERROR"].map(String::from).to_vec()];
            rows.extend(failed.iter().map(|job| {
                let (key, error) = (plain(&job.key), plain(&job.error));
                vec![cut(&key, 60), job.attempts.to_string(), rfc3339(job.at), cut(&error, 80)]
            }));
            for (i, line) in columns(&rows).iter().enumerate() {
                output::line(&if i == 0 { bold(line) } else { line.clone() })?;
            }
        }
        Ok(OK)
    }
}

fn shown(job: &FailedJob) -> Value {
    json!({ "job": job.key, "attempts": job.attempts, "error": job.error, "fence": job.fence, "at_us": job.at })
}

impl JobsRetryArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let jobs = self.table.open().await?;
        let count = match &self.key {
            None => jobs.retry_all().await?,
            Some(key) if jobs.retry(key).await? => 1,
            Some(key) => {
                let message = format!("{} has not failed for good", quoted(key));
                let next = format!(
                    "see which have: lockkeeper jobs failed --table {}",
                    crate::text::shell(&self.table.table)
                );
                return Err(ExitFailure::new(Outcome::Absent, message).next(next));
            }
        };
        output::line(&match self.table.database.json {
            true => json!({ "table": jobs.table().table, "retried": count }).to_string(),
            false if count == 1 => "1 job is tried again".into(),
            false => format!("{count} jobs are tried again"),
        })?;
        Ok(OK)
    }
}
