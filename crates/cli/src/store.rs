//! Finds the store that a call names, and opens it, also one that is unreachable for a while.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use lockkeeper::{BootInstant, Clock, Lockkeeper, Outcome, SystemClock};
use lockkeeper_core::Secret;

use crate::args::SecretUrl;
use crate::daily_warnings;
use crate::exit::ExitFailure;
use crate::report::Report;
use crate::text::plain;

/// The most bytes that are read from a file with a URL.
const URL_BYTES: u64 = 64 << 10;
/// The shortest and the longest pause before an unreachable store is tried again.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

const URL: &str = "LOCKKEEPER_STORE";
const FILE: &str = "LOCKKEEPER_STORE_FILE";
const POSTGRES: &str = "LOCKKEEPER_POSTGRES";

/// The environment of a command that does not see which store it is, or which database its jobs are in.
pub const HIDDEN: [(&str, Option<String>); 3] = [(URL, None), (FILE, None), (POSTGRES, None)];

/// The `--store` before the subcommand.
pub static BEFORE: OnceLock<SecretUrl> = OnceLock::new();

/// A store, and where it was named.
#[derive(Clone, Debug)]
pub struct StoreSource {
    pub url: Secret,
    /// The file that it is written in.
    file: Option<PathBuf>,
    /// Whether the user named it; if not, it is the default.
    named: bool,
}

impl StoreSource {
    /// Whether the user named it; if not, it is the default.
    pub fn is_named(&self) -> bool {
        self.named
    }

    /// The environment of a command that runs under a lock of this store: the file if there is one, because the
    /// URL may have a password in it.
    pub fn environment(&self, hidden: bool) -> [(&'static str, Option<String>); 2] {
        let file = self.file.as_ref().map(|file| file.to_string_lossy().into_owned());
        match file {
            _ if hidden => [(URL, None), (FILE, None)],
            Some(file) => [(URL, None), (FILE, Some(file))],
            None => [(URL, Some(self.url.expose().to_owned())), (FILE, None)],
        }
    }
}

/// Warns of a job for many hosts that names no store: the default is a file that each host has for itself, so each host runs the job.
/// With --quiet once a day on each host, because a crontab has that option and nothing else would tell.
pub fn warn_of_one_host(source: &StoreSource, report: &Report) {
    if source.named {
        return;
    }
    let why = format!(
        "no store is named, and the default is a file of this host: every other host runs this, too. Name one store for all, with \
         --store or LOCKKEEPER_STORE; if this is the only host, name its file: LOCKKEEPER_STORE={}",
        source.url.expose()
    );
    let warning = format!("warning: {why}");
    if !report.is_quiet() {
        report.say(&warning);
    } else if !daily_warnings::dir()
        .is_some_and(|dir| daily_warnings::was_printed_today(&dir, &(&why, report.what())))
    {
        report.say_though_quiet(&format!("{}: {warning}", report.what()));
    }
    report.event("warning", serde_json::json!({ "why": why }));
}

/// The store of the command line, else that of the environment, else the default.
pub fn find_source(url: Option<&SecretUrl>, file: Option<&Path>) -> Result<StoreSource, ExitFailure> {
    let named = |url: &str| Ok(StoreSource { url: url.into(), file: None, named: true });
    if BEFORE.get().is_some() && (url.is_some() || file.is_some()) {
        let twice = bad("the store is named before the subcommand and after it".into());
        return Err(twice.next("remove one of the two"));
    }
    match (url, file) {
        (Some(url), _) => return named(url.expose()?),
        (None, Some(file)) => return read(file),
        (None, None) => {}
    }
    if let Some(url) = BEFORE.get() {
        return named(url.expose()?);
    }
    // An empty variable is as good as none.
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    match (set(URL), set(FILE)) {
        (Some(_), Some(_)) => Err(bad(format!("{URL} and {FILE} are both set")).next("unset one of them")),
        (Some(url), None) => {
            named(url.to_str().ok_or_else(|| bad(format!("the store URL in {URL} is not UTF-8")))?)
        }
        (None, Some(file)) => read(Path::new(&file)),
        (None, None) => {
            Ok(StoreSource { url: lockkeeper::default_url()?.as_str().into(), file: None, named: false })
        }
    }
}

fn bad(message: String) -> ExitFailure {
    ExitFailure::new(Outcome::Invalid, message)
}

/// Reads the URL from a file. Refuses a file that all users may read.
fn read(path: &Path) -> Result<StoreSource, ExitFailure> {
    let shown = plain(&path.to_string_lossy()).into_owned();
    let cannot = |e: std::io::Error| bad(format!("--store-file {shown}: {e}"));
    let path = std::path::absolute(path).map_err(cannot)?;
    let file = std::fs::File::open(&path).map_err(cannot)?;
    let about = file.metadata().map_err(cannot)?;
    if about.is_file() && about.mode() & 0o007 != 0 {
        let found = bad(format!("--store-file {shown}: every user of this machine may read or change it"));
        return Err(found.next(format!("chmod 600 {shown}, or 640 for a group")));
    }
    let mut text = String::new();
    file.take(URL_BYTES).read_to_string(&mut text).map_err(cannot)?;
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    match (lines.next(), lines.next()) {
        (Some(url), None) => Ok(StoreSource { url: url.into(), file: Some(path), named: true }),
        (None, _) => Err(bad(format!("--store-file {shown}: there is no URL in it"))),
        (_, Some(_)) => Err(bad(format!("--store-file {shown}: there is more than one line in it"))),
    }
}

/// Opens the store. With a `wait`, one that is unreachable is waited for; returns what is left of the wait, too.
pub async fn open(
    url: &str,
    wait: Option<Duration>,
    report: &Report,
) -> Result<(Lockkeeper, Option<Duration>), ExitFailure> {
    let end = wait.map(|wait| SystemClock.now() + wait);
    let mut pause = PAUSE.0;
    loop {
        let error = match Lockkeeper::open(url).await {
            Ok(keeper) => return Ok((keeper, end.map(left))),
            Err(error) => error,
        };
        let passes = matches!(error.outcome(), Outcome::Unavailable | Outcome::Unknown);
        let left = end.map(left).unwrap_or_default();
        if !passes || left <= LEAST {
            return Err(error.into());
        }
        if pause == PAUSE.0 {
            report
                .say(&format!("the store is unreachable, and is waited for: {}", plain(&error.to_string())));
            report.event("retry", serde_json::json!({ "why": error.to_string() }));
        }
        tokio::time::sleep(pause.min(left)).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

/// A store is asked for at least this long, however late it was opened.
pub const LEAST: Duration = Duration::from_millis(1);

/// The rest of a wait.
pub fn left(end: BootInstant) -> Duration {
    end.since(SystemClock.now()).max(LEAST)
}
