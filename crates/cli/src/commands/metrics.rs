//! `lockkeeper metrics`: the numbers of a store for Prometheus, once or over HTTP.

#[cfg(feature = "exporter")]
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use clap::Args;
use lockkeeper::metrics::PatternRules;
use lockkeeper::{LockName, Outcome};
#[cfg(feature = "exporter")]
use serde_json::json;

use crate::args::{CommonArgs, lock_name, utf8};
use crate::duration;
use crate::exit::{ExitFailure, OK};
use crate::exporter::{ScrapeOptions, StoreScraper};
use crate::output;

/// Print the numbers of a store for Prometheus, or serve them.
///
/// How many locks are held and waited for, how long the oldest holder and the oldest waiter have been there, how the last windows
/// ended, and whether the store answers.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct MetricsArgs {
    /// Serve /metrics and /healthz at this address; a port alone is one of 127.0.0.1, port 0 a free one [default: print once]
    #[cfg(feature = "exporter")]
    #[arg(long, value_name = "ADDR", value_parser = listen_address)]
    pub listen: Option<SocketAddr>,
    /// A pattern for the names of locks, and the label of their numbers; may be repeated, the first that matches counts
    #[arg(long, value_name = "PATTERN", value_parser = utf8("pattern"), allow_hyphen_values = true)]
    pub pattern: Vec<String>,
    /// A job of run --window or cron whose last windows are shown; may be repeated
    #[arg(long, value_name = "NAME", value_parser = lock_name(), allow_hyphen_values = true)]
    pub window: Vec<LockName>,
    /// Only locks whose names begin with this
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true, value_parser = utf8("prefix"), allow_hyphen_values = true)]
    pub prefix: String,
    /// The most locks that are looked at
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_locks: u32,
    /// How long the store may take to answer; then lockkeeper_up is 0
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub timeout: Duration,
    /// How long one look at the store serves all clients
    #[cfg(feature = "exporter")]
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub max_age: Duration,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper metrics                                              print the numbers once
  lockkeeper metrics --pattern 'orders/*' --window nightly
  lockkeeper metrics --listen 9790 --window nightly               serve /metrics at this port

A lock that no pattern matches counts under its recipe, such as once/*, or under other. The numbers
name no lock, only patterns and the jobs of --window. With --json the line that says where the
command listens is JSON; the numbers are always in the text format of Prometheus.

Exit codes: 0 printed, or ended by a signal; 64 bad call, 69 the store is unreachable (then
lockkeeper_up 0 is printed) or the command cannot listen.";

/// The most windows: each is a read from the store.
const WINDOWS: usize = 100;

impl MetricsArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        if self.window.len() > WINDOWS {
            let message = format!("--window is given more than {WINDOWS} times");
            return Err(ExitFailure::new(Outcome::Invalid, message));
        }
        let options = ScrapeOptions {
            url: self.common.url()?,
            prefix: self.prefix.clone(),
            rules: PatternRules::new(&self.pattern)?,
            windows: self.window.clone(),
            max_locks: usize::try_from(self.max_locks).unwrap_or(usize::MAX),
            timeout: self.timeout,
        };
        let mut scraper = StoreScraper::new(options);
        #[cfg(feature = "exporter")]
        if let Some(addr) = self.listen {
            return self.serve(addr, scraper).await;
        }
        let numbers = scraper.scrape().await;
        output::line(numbers.text.trim_end())?;
        match numbers.down {
            None => Ok(OK),
            Some(why) => {
                Err(ExitFailure::new(Outcome::Unavailable, format!("the store cannot be asked: {why}")))
            }
        }
    }

    #[cfg(feature = "exporter")]
    async fn serve(&self, addr: SocketAddr, scraper: StoreScraper) -> Result<i32, ExitFailure> {
        use crate::exporter::{ScrapeCache, serve};
        use std::io::Write;

        let mut signals = crate::signals::SignalStream::ending()?;
        let listener = tokio::net::TcpListener::bind(addr).await.map_err(|e| {
            let message = format!("cannot listen on {addr}: {e}");
            ExitFailure::new(Outcome::Unavailable, message).next("choose a free port, or 0 for any")
        })?;
        let addr = listener.local_addr().unwrap_or(addr);
        let line = match self.common.json {
            true => json!({ "event": "ready", "listen": addr.to_string() }).to_string(),
            false => format!("lockkeeper: serving http://{addr}/metrics"),
        };
        // If stderr is closed, the numbers are served all the same.
        let _ = writeln!(std::io::stderr(), "{line}");
        tokio::select! {
            biased;
            _ = signals.next_ending() => Ok(OK),
            () = serve(listener, ScrapeCache::new(scraper, self.max_age)) => Ok(OK),
        }
    }
}

/// Parses an address, or a port of the loopback interface: the numbers are for the host itself unless the user says otherwise.
#[cfg(feature = "exporter")]
fn listen_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.trim_start_matches(':').parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    text.parse().map_err(|_| "an address is HOST:PORT with a numeric host, or a port alone".into())
}
