//! Asks the sentinels which server is the primary.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Pipeline, Value, cmd};

use crate::connection::{Connection, Endpoint, text_of};
use crate::error::Failure;

/// The primary that a sentinel reports, and the epoch in which the sentinels agreed on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedPrimary {
    pub endpoint: Endpoint,
    pub epoch: u64,
}

/// The newest report of the sentinels that replied.
pub struct SentinelReport {
    pub primary: ReportedPrimary,
    /// Whether more than half of the sentinels have replied.
    pub majority: bool,
}

/// Asks all sentinels at once and returns as soon as more than half of them have replied. The newest epoch counts, because a
/// sentinel that is cut off from the others goes on reporting the old primary.
pub async fn query_all(sentinels: &[impl AsRef<Connection>], name: &str) -> Result<SentinelReport, Failure> {
    let mut queries: FuturesUnordered<_> =
        sentinels.iter().map(|sentinel| query_one(sentinel.as_ref(), name)).collect();
    let mut why = Failure::NotSent("there are no sentinels".into());
    let mut reports: Vec<ReportedPrimary> = Vec::new();
    let majority = |reports: &Vec<ReportedPrimary>| 2 * reports.len() > sentinels.len();
    while let Some(reply) = queries.next().await {
        match reply {
            Ok(primary) => reports.push(primary),
            Err(Failure::NoReply(text)) => why = Failure::NotSent(text),
            Err(failure) => why = failure,
        }
        if majority(&reports) {
            break;
        }
    }
    let majority = majority(&reports);
    let newest = reports.into_iter().max_by_key(|primary| primary.epoch);
    newest.map(|primary| SentinelReport { primary, majority }).ok_or(why)
}

async fn query_one(sentinel: &Connection, name: &str) -> Result<ReportedPrimary, Failure> {
    let mut commands = Pipeline::with_capacity(2);
    commands.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    commands.cmd("SENTINEL").arg("MASTER").arg(name);
    let mut replies = sentinel.calls(&commands).await?.into_iter();
    let missing =
        || Failure::NotSent(format!("the sentinel at {} knows no master {name:?}", sentinel.endpoint()));
    let address = replies.next().ok_or_else(missing)??;
    let endpoint = address_of(&address).ok_or_else(missing)?;
    let epoch = replies.next().and_then(Result::ok).and_then(|state| epoch_of(&state)).unwrap_or(0);
    Ok(ReportedPrimary { endpoint, epoch })
}

fn address_of(reply: &Value) -> Option<Endpoint> {
    let Value::Array(parts) = reply else { return None };
    let [host, port] = &parts[..] else { return None };
    Some(Endpoint::Tcp(text_of(host)?, text_of(port)?.parse().ok()?))
}

/// `SENTINEL MASTER` replies with a list of names and values, or with a map of them.
fn epoch_of(state: &Value) -> Option<u64> {
    let is_epoch = |key: &Value| text_of(key).as_deref() == Some("config-epoch");
    let value = match state {
        Value::Map(pairs) => &pairs.iter().find(|(key, _)| is_epoch(key))?.1,
        Value::Array(parts) => parts.chunks_exact(2).find(|pair| is_epoch(&pair[0])).map(|pair| &pair[1])?,
        _ => return None,
    };
    text_of(value)?.parse().ok()
}

/// Whether a server itself reports the role of a primary: a sentinel's report may be out of date.
pub async fn is_primary(server: &Connection) -> Result<bool, Failure> {
    match server.call(&cmd("ROLE")).await? {
        Value::Array(role) => Ok(role.first().and_then(text_of).as_deref() == Some("master")),
        _ => Ok(false),
    }
}
