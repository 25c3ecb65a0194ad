//! What a server says about itself, and what that means for the promises of the store.

use std::collections::HashMap;

use lockkeeper_core::{Error, Profile, Promise, Result, Waiting};
use redis::{Value, cmd};

use crate::config::Servers;
use crate::fleet::text;
use crate::link::Link;
use crate::script;
use crate::store::Shared;

/// What matters of one server.
struct Found {
    info: HashMap<String, String>,
    /// `None`: we may not look.
    appendfsync: Option<String>,
}

impl Found {
    fn is(&self, key: &str, value: &str) -> bool {
        self.info.get(key).is_some_and(|found| found == value)
    }

    fn evicts(&self) -> bool {
        !self.is("maxmemory", "0") && !self.is("maxmemory_policy", "noeviction")
    }

    fn durable(&self) -> bool {
        self.is("aof_enabled", "1") && self.appendfsync.as_deref() == Some("always")
    }
}

async fn look(server: &Link) -> Result<Found> {
    let info = server.call(&cmd("INFO")).await?;
    let info = text(&info).unwrap_or_default();
    let pairs = info.lines().filter_map(|line| line.split_once(':'));
    let info = pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect();
    let asked = server.call(cmd("CONFIG").arg("GET").arg("appendfsync")).await;
    let appendfsync = match asked {
        Ok(Value::Map(pairs)) => pairs.first().and_then(|(_, value)| text(value)),
        Ok(Value::Array(pair)) => pair.get(1).and_then(text),
        _ => None,
    };
    Ok(Found { info, appendfsync })
}

/// Looks at every server, refuses what cannot work, and writes down what is promised.
pub(crate) async fn profile(shared: &Shared) -> Result<Profile> {
    let (mut grave, mut notes) = (Vec::new(), Vec::new());
    let mut durable = true;
    let mut evicts = false;
    let mut replicas = false;
    for server in shared.fleet.all().await? {
        let (found, door) = (look(&server).await?, server.door());
        check(&found, &door.to_string(), shared)?;
        script::teach(&server).await?;
        durable &= found.durable();
        replicas |= !found.is("connected_slaves", "0");
        if found.evicts() {
            evicts = true;
            let policy = found.info.get("maxmemory_policy").cloned().unwrap_or_default();
            grave.insert(0, format!(
                "{door} may throw locks away when its memory is full: its maxmemory-policy is {policy}. Set noeviction"
            ));
        }
        match (&found.appendfsync, found.is("aof_enabled", "1")) {
            (Some(when), true) if when == "always" => {
                notes.push(format!("{door} writes every grant to its disk before it answers"));
            }
            (Some(when), true) => {
                grave.push(format!("{door} has appendfsync {when}: a crash loses the last grants"))
            }
            (None, true) => {
                grave.push(format!("{door} does not tell its appendfsync: a crash may lose grants"))
            }
            (_, false) => grave.push(format!("{door} keeps no append-only file: a restart loses grants")),
        }
    }
    let fails_over = replicas || !matches!(shared.options.servers, Servers::Single(_));
    if fails_over {
        grave.push(match shared.options.wait_replicas {
            0 => "a fail-over to a replica may lose the last grants; ?wait_replicas=1 makes that rare".into(),
            n => format!(
                "a grant counts once {n} replicas have it; a fail-over to another one may still lose it"
            ),
        });
    }
    notes.push(
        "leases follow the server's wall clock: set forward, they end early. The fence is what protects you"
            .into(),
    );
    notes.push("circles of waiting owners are not found: let asks end by a wait time".into());
    grave.append(&mut notes);
    let kept = durable && !evicts && !fails_over;
    let promise = if kept { Promise::Kept } else { Promise::Likely };
    Ok(Profile {
        store: shared.scheme().into(),
        exclusion: Promise::Likely,
        fence: promise,
        durable: if evicts { Promise::No } else { promise },
        waiting: Waiting::Line,
        wake: shared.options.poll + shared.options.claim,
        shared: true,
        permits: true,
        several: true,
        reentry: true,
        deadlocks: false,
        lock_delay: true,
        min_hold: true,
        watch: true,
        records: true,
        notes: grave,
    })
}

fn check(found: &Found, door: &str, shared: &Shared) -> Result<()> {
    let version = found.info.get("redis_version").map_or("", String::as_str);
    let major: u32 = version.split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    if major < 7 {
        return Err(Error::Unsupported(format!(
            "{door} is Redis {version}: version 7.0 or a compatible server is needed"
        )));
    }
    if !found.is("role", "master") {
        return Err(Error::invalid(format!(
            "{door} is a replica: locks are taken at the primary. Name that, or use redis+sentinel://"
        )));
    }
    if found.is("cluster_enabled", "1") != shared.fleet.is_cluster() {
        return Err(Error::invalid(format!(
            "{door} is a node of a cluster: use redis+cluster://{door} to reach all of it"
        )));
    }
    Ok(())
}
