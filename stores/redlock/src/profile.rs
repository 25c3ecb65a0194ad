//! The check of the nodes when the store is opened, and the guarantees that follow from it.

use std::collections::HashMap;
use std::sync::Arc;

use lockkeeper_core::faults::Deployment;
use lockkeeper_core::{Error, Finding, Profile, Promise, Result};
use lockkeeper_redis::{Endpoint, Failure};
use redis::Value;

use crate::config::Options;
use crate::connection::RedlockNode;
use crate::error::unexpected_reply;
use crate::keys::Keys;
use crate::quorum::Quorum;

type NodeInfo = HashMap<String, String>;

/// Checks every node and returns the profile of the store.
pub async fn profile(quorum: &Quorum, keys: &Keys) -> Result<Profile> {
    // No waiter subscribes to this channel: the call shows whether this user may publish.
    let mut questions = redis::pipe();
    questions.cmd("INFO").cmd("PUBLISH").arg(keys.channel("")).arg("");
    let work = |node: Arc<RedlockNode>| {
        let questions = questions.clone();
        async move {
            let [info, published] = <[_; 2]>::try_from(node.connection.calls(&questions).await?)
                .map_err(|_| reply_count_mismatch())?;
            Ok(Value::Array(vec![info?, Value::Boolean(published.is_ok())]))
        }
    };
    // Opening may take the whole timeout of a connection, because no caller waits for a lock yet.
    let answers = quorum.call_all(quorum.options.access.timeout * 2, work, |_| false).await;
    let answered: Vec<bool> = answers.iter().map(|answer| matches!(answer, Some(Ok(_)))).collect();
    let good = quorum.require_majority(answers)?;
    let mut findings = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (index, answer) in good {
        let Value::Array(parts) = answer else { return Err(unexpected_reply()) };
        let [info, Value::Boolean(publishes)] = &parts[..] else { return Err(unexpected_reply()) };
        let (endpoint, info) = (quorum.nodes[index].connection.endpoint(), read(info));
        check(&info, &endpoint.to_string())?;
        let run = info.get("run_id").cloned().unwrap_or_default();
        if let Some(other) = known.insert(run, index) {
            let other = quorum.nodes[other].connection.endpoint();
            return Err(Error::invalid(format!(
                "{endpoint} and {other} are one server: it would vote twice"
            )));
        }
        findings.extend(node_findings(&info, endpoint, *publishes));
    }
    for node in quorum.nodes.iter().filter(|node| !answered[node.index]) {
        let text = format!("{} did not answer when the store was opened", node.connection.endpoint());
        findings.push(Finding::risk(Promise::Availability, text));
    }
    Ok(declare(&quorum.options, findings))
}

fn node_findings(info: &NodeInfo, endpoint: &Endpoint, publishes: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let policy = info.get("maxmemory_policy").map_or("", String::as_str);
    if !is(info, "maxmemory", "0") && policy != "noeviction" {
        let text =
            format!("{endpoint} may evict locks when its memory is full: its maxmemory-policy is {policy}");
        findings.push(
            Finding::harm(Promise::Exclusion, text)
                .change("maxmemory-policy", policy, "noeviction")
                .how("CONFIG SET maxmemory-policy noeviction, then CONFIG REWRITE"),
        );
    }
    if !publishes {
        let text = format!(
            "this user may not publish to the channels lockkeeper:* of {endpoint}: waiters poll, and are not notified of a \
             release"
        );
        findings.push(
            Finding::risk(Promise::Waiting, text)
                .set("the rights of the user", "also &lockkeeper:*")
                .how("ACL SETUSER USER +publish +subscribe &lockkeeper:*"),
        );
    }
    if !is(info, "connected_slaves", "0") {
        let text = format!(
            "{endpoint} has a replica: if the replica takes over, it may lack locks and is not young"
        );
        findings.push(
            Finding::risk(Promise::Exclusion, text)
                .set("the replica", "a server of its own, or none")
                .how("REPLICAOF NO ONE on the replica"),
        );
    }
    findings
}

fn declared_findings(options: &Options) -> Vec<Finding> {
    let mut findings = vec![
        Finding::hint(
            Promise::Fence,
            "efficiency only: a majority of nodes that forget, or whose clocks jump, lets two in, and can let the fence go \
             back",
        ),
        Finding::hint(
            Promise::Fence,
            "fences grow from grant to grant of a lock; two locks that are taken at the same moment may have the same one",
        ),
        Finding::hint(
            Promise::Waiting,
            "waiters have no order: they are notified of a release and try again",
        ),
    ];
    if options.young_node < options.max_ttl {
        let text = "young_node is shorter than max_ttl: a node that restarts empty lets a second holder in while the first \
                    still holds";
        let (young, max) = (format!("{:?}", options.young_node), format!("{:?}", options.max_ttl));
        findings.push(Finding::risk(Promise::Exclusion, text).change("young_node in the URL", young, max));
    }
    findings
}

fn declare(options: &Options, mut findings: Vec<Finding>) -> Profile {
    findings.extend(declared_findings(options));
    findings.sort_by_key(|finding| finding.severity);
    Profile {
        // A try, if no message comes; and the time it takes if a node says nothing in each of its three steps.
        wake: options.poll + options.node_timeout * 3,
        revoke: true,
        findings,
        ..Profile::deployed("redlock", vec![Deployment::Redlock])
    }
}

fn reply_count_mismatch() -> Failure {
    Failure::NoReply("a node sent another number of replies than there were commands".into())
}

fn read(answer: &Value) -> NodeInfo {
    let text = match answer {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => text.clone(),
        _ => String::new(),
    };
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect()
}

fn is(info: &NodeInfo, key: &str, value: &str) -> bool {
    info.get(key).is_some_and(|found| found == value)
}

fn check(info: &NodeInfo, endpoint: &str) -> Result<()> {
    let version = info.get("redis_version").map_or("", String::as_str);
    let major: u32 = version.split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    if major < 7 {
        return Err(Error::Unsupported(format!(
            "{endpoint} is Redis {version}: version 7.0 or a compatible server is needed"
        )));
    }
    if !is(info, "role", "master") {
        return Err(Error::invalid(format!(
            "{endpoint} is a replica: the nodes of a vote are independent primaries"
        )));
    }
    if is(info, "cluster_enabled", "1") {
        return Err(Error::invalid(format!(
            "{endpoint} is a node of a cluster: use redis+cluster:// for that"
        )));
    }
    Ok(())
}
