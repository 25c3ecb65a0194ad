//! `lockkeeper doctor`: whether a store keeps its promises as it is set up, and every setting to change.

use std::time::Duration;

use clap::Args;
use lockkeeper::Severity;
use lockkeeper_core::StoreUrl;

use crate::args::CommonArgs;
use crate::doctor::{self, Diagnosis, DoctorOptions};
use crate::duration;
use crate::exit::{ExitFailure, OK};

/// Examine a store: reachability, rights, settings, clocks, and one verdict for each promise.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct DoctorArgs {
    /// The ttl that you mean to use: it is compared with the pauses of this host and the round trips to the store
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse_ttl, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// How long each step may take, so that a silent server cannot stop the examination
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub timeout: Duration,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper doctor                                    the default store
  lockkeeper doctor --store redis://10.0.0.7 --ttl 10s
  lockkeeper doctor --json | jq '.findings[] | select(.severity != \"hint\")'

It takes and releases a lock below lockkeeper-doctor/, and writes and deletes a record there. It changes
no setting, and disturbs no other lock.

Exit codes: 0 nothing has to change, 1 a promise is at risk, 2 a promise is broken, 3 the store
cannot be asked; 64 bad call.";

/// A promise is at risk.
const AT_RISK: i32 = 1;
/// A promise is broken.
const BROKEN: i32 = 2;
/// The store cannot be asked.
const UNREACHABLE: i32 = 3;

impl DoctorArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let url = self.common.url()?;
        let options = DoctorOptions { ttl: self.ttl, timeout: self.timeout };
        let found = doctor::examine(url.expose(), options).await;
        if let Some(error) = found.refused.as_ref().filter(|_| !doctor::is_store(url.expose())) {
            return Err(error.clone().into());
        }
        let code = exit_code(&found);
        doctor::print(&found, &shown(url.expose()), code, self.common.json)?;
        Ok(code)
    }
}

fn exit_code(found: &Diagnosis) -> i32 {
    match found.severity() {
        _ if found.is_unreachable() => UNREACHABLE,
        Severity::Harm => BROKEN,
        Severity::Risk => AT_RISK,
        Severity::Hint => OK,
    }
}

/// The URL without user, password and options, which may be secrets.
fn shown(url: &str) -> String {
    let Ok(parsed) = StoreUrl::parse(url) else {
        let scheme = url.split(':').next().unwrap_or_default();
        return match scheme {
            "sqlite" => url.split('?').next().unwrap_or_default().to_owned(),
            scheme => format!("{scheme}:"),
        };
    };
    let hosts: Vec<String> = parsed
        .hosts
        .iter()
        .map(|(host, port)| port.map_or_else(|| host.clone(), |port| format!("{host}:{port}")))
        .collect();
    let path = if parsed.path.is_empty() {
        String::new()
    } else {
        format!("/{}", parsed.path.trim_start_matches('/'))
    };
    format!("{}://{}{path}", parsed.scheme, hosts.join(","))
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn no_secret_of_the_url_is_shown() {
        for (url, text) in [
            ("redis://user:secret@a:1,b/2?prefix=secret", "redis://a:1,b/2"),
            ("sqlite:/srv/locks.db?sync=full", "sqlite:/srv/locks.db"),
            ("postgres://u:secret@db/app", "postgres://db/app"),
            ("memory:", "memory:"),
        ] {
            assert_eq!(shown(url), text);
        }
        assert!(!shown("postgres:host=secret password=secret").contains("secret"));
    }
}
