//! Which server is the primary, according to the sentinels.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Pipeline, Value, cmd};

use crate::fault::Failure;
use crate::fleet::text;
use crate::link::{Door, Link};

/// What a sentinel says: where the primary is, and in which epoch that was agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub door: Door,
    pub epoch: u64,
}

/// What most of the sentinels know, or what the ones that reply do.
pub struct Verdict {
    pub named: Named,
    /// Whether more than half of the sentinels have replied.
    pub majority: bool,
}

/// Asks all sentinels at once. The newest epoch counts: a sentinel that is cut off from the others goes on naming the old
/// primary. The answer is there as soon as more than half of the sentinels have replied.
pub async fn ask(sentinels: &[impl AsRef<Link>], name: &str) -> Result<Verdict, Failure> {
    let mut asked: FuturesUnordered<_> = sentinels.iter().map(|link| ask_one(link.as_ref(), name)).collect();
    let mut why = Failure::Away("there are no sentinels".into());
    let mut replies: Vec<Named> = Vec::new();
    let majority = |replies: &Vec<Named>| 2 * replies.len() > sentinels.len();
    while let Some(reply) = asked.next().await {
        match reply {
            Ok(named) => replies.push(named),
            Err(Failure::Unheard(text)) => why = Failure::Away(text),
            Err(failure) => why = failure,
        }
        if majority(&replies) {
            break;
        }
    }
    let majority = majority(&replies);
    replies.into_iter().max_by_key(|named| named.epoch).map(|named| Verdict { named, majority }).ok_or(why)
}

async fn ask_one(sentinel: &Link, name: &str) -> Result<Named, Failure> {
    let mut questions = Pipeline::with_capacity(2);
    questions.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    questions.cmd("SENTINEL").arg("MASTER").arg(name);
    let mut answers = sentinel.calls(&questions).await?.into_iter();
    let missing = || Failure::Away(format!("the sentinel at {} knows no master {name:?}", sentinel.door()));
    let address = answers.next().ok_or_else(missing)??;
    let door = address_of(&address).ok_or_else(missing)?;
    let epoch = answers.next().and_then(Result::ok).and_then(|state| epoch_of(&state)).unwrap_or(0);
    Ok(Named { door, epoch })
}

fn address_of(answer: &Value) -> Option<Door> {
    let Value::Array(parts) = answer else { return None };
    let [host, port] = &parts[..] else { return None };
    Some(Door::Tcp(text(host)?, text(port)?.parse().ok()?))
}

/// The state of a master is a list of names and values, or a map of them.
fn epoch_of(state: &Value) -> Option<u64> {
    let is_epoch = |key: &Value| text(key).as_deref() == Some("config-epoch");
    let value = match state {
        Value::Map(pairs) => &pairs.iter().find(|(key, _)| is_epoch(key))?.1,
        Value::Array(parts) => parts.chunks_exact(2).find(|pair| is_epoch(&pair[0])).map(|pair| &pair[1])?,
        _ => return None,
    };
    text(value)?.parse().ok()
}

/// Whether a server says of itself that it is a primary: a sentinel may be behind the times.
pub async fn is_primary(server: &Link) -> Result<bool, Failure> {
    match server.call(&cmd("ROLE")).await? {
        Value::Array(role) => Ok(role.first().and_then(text).as_deref() == Some("master")),
        _ => Ok(false),
    }
}
