//! What the nodes say about themselves, and what that means for the promises of the store.

use std::collections::HashMap;
use std::sync::Arc;

use lockkeeper_core::{Error, Profile, Promise, Result, Waiting};
use lockkeeper_redis::Failure;
use redis::Value;

use crate::node::Node;
use crate::quorum::odd;
use crate::store::Shared;

type Info = HashMap<String, String>;

/// Looks at every node, refuses what cannot work, and writes down what is promised.
pub(crate) async fn profile(shared: &Arc<Shared>) -> Result<Profile> {
    // Published to no waiter: it tells whether this user may.
    let mut questions = redis::pipe();
    questions.cmd("INFO").cmd("PUBLISH").arg(shared.channel("")).arg("");
    let work = |node: Arc<Node>| {
        let questions = questions.clone();
        async move {
            let [info, published] =
                <[_; 2]>::try_from(node.link.calls(&questions).await?).map_err(|_| two_answers())?;
            Ok(Value::Array(vec![info?, Value::Boolean(published.is_ok())]))
        }
    };
    // A connection has all of its time here: nobody waits for a lock yet.
    let answers = shared.hear(shared.options.access.timeout * 2, work, |_| false).await;
    let answered: Vec<bool> = answers.iter().map(|answer| matches!(answer, Some(Ok(_)))).collect();
    let good = shared.majority_of(answers)?;
    let mut notes = notes(shared);
    let mut known: HashMap<String, usize> = HashMap::new();
    for (index, answer) in good {
        let Value::Array(parts) = answer else { return Err(odd()) };
        let [info, Value::Boolean(publishes)] = &parts[..] else { return Err(odd()) };
        let (door, info) = (shared.nodes[index].link.door(), read(info));
        check(&info, &door.to_string())?;
        let run = info.get("run_id").cloned().unwrap_or_default();
        if let Some(other) = known.insert(run, index) {
            let other = shared.nodes[other].link.door();
            return Err(Error::invalid(format!("{door} and {other} are one server: it would vote twice")));
        }
        if !is(&info, "maxmemory", "0") && !is(&info, "maxmemory_policy", "noeviction") {
            notes.push(format!(
                "{door} may throw locks away when its memory is full: set maxmemory-policy noeviction"
            ));
        }
        if !publishes {
            notes.push(format!(
                "this user may not publish to the channels lockkeeper:* of {door}: waiters poll, and are not notified of a \
                 release"
            ));
        }
        if !is(&info, "connected_slaves", "0") {
            notes.push(format!(
                "{door} has a replica: if that takes over, it may have forgotten locks, and is not young"
            ));
        }
    }
    for node in shared.nodes.iter().filter(|node| !answered[node.index]) {
        notes.push(format!("{} did not answer when the store was opened", node.link.door()));
    }
    Ok(promises(shared, notes))
}

fn notes(shared: &Shared) -> Vec<String> {
    let mut notes = vec![
        "efficiency only: a majority of nodes that forget, or whose clocks jump, lets two in, and can let the fence go \
         back"
            .to_owned(),
        "fences grow from grant to grant of a lock; two locks that are taken at the same moment may have the same one".into(),
        "nobody stands in line: those who wait are told of a release, and try again, in no order".into(),
    ];
    if shared.options.young_node < shared.options.max_ttl {
        notes.push(
            "young_node is shorter than max_ttl: a node that restarts empty lets a second holder in while the first still \
             holds"
                .into(),
        );
    }
    notes
}

fn promises(shared: &Shared, notes: Vec<String>) -> Profile {
    Profile {
        store: "redlock".into(),
        exclusion: Promise::Likely,
        fence: Promise::Likely,
        durable: Promise::No,
        waiting: Waiting::Poll,
        // A try, if no message comes; and the time it takes if a node says nothing in each of its three steps.
        wake: shared.options.poll + shared.options.node_timeout * 3,
        shared: false,
        permits: false,
        several: false,
        reentry: false,
        deadlocks: false,
        lock_delay: false,
        min_hold: false,
        watch: false,
        revoke: true,
        records: false,
        notes,
    }
}

fn two_answers() -> Failure {
    Failure::Unheard("a node gave another number of answers than there were questions".into())
}

fn read(answer: &Value) -> Info {
    let text = match answer {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => text.clone(),
        _ => String::new(),
    };
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect()
}

fn is(info: &Info, key: &str, value: &str) -> bool {
    info.get(key).is_some_and(|found| found == value)
}

fn check(info: &Info, door: &str) -> Result<()> {
    let version = info.get("redis_version").map_or("", String::as_str);
    let major: u32 = version.split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    if major < 7 {
        return Err(Error::Unsupported(format!(
            "{door} is Redis {version}: version 7.0 or a compatible server is needed"
        )));
    }
    if !is(info, "role", "master") {
        return Err(Error::invalid(format!(
            "{door} is a replica: the nodes of a vote are independent primaries"
        )));
    }
    if is(info, "cluster_enabled", "1") {
        return Err(Error::invalid(format!("{door} is a node of a cluster: use redis+cluster:// for that")));
    }
    Ok(())
}
