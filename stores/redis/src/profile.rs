//! The settings of the servers, and the guarantees of the store that follow from them. Every new connection reads the settings before
//! any request is sent on it, and a task reads them again from time to time: an operator may change settings or add replicas.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use futures_util::future::join_all;
use lockkeeper_core::faults::Deployment;
use lockkeeper_core::{Error, Finding, IgnorePoison, LimitSupport, Profile, Promise, Result, WaitOrder};
use redis::{Pipeline, Value};

use crate::config::Servers;
use crate::connection::{ConnectHandshake, Connection, Endpoint, text_of};
use crate::error::Failure;
use crate::router::Router;
use crate::runner::ScriptRunner;
use crate::statements;

/// How many polls pass between two readings of the settings.
const POLLS: u32 = 10;

/// The settings of one server that decide on the guarantees.
#[derive(Clone, Debug)]
pub(crate) struct ServerSettings {
    info: HashMap<String, String>,
    /// The reply to `CONFIG GET`; `None` if the user has no right to it.
    config: Option<HashMap<String, String>>,
    /// Whether the server has, or had while the store was open, a replica that may be promoted.
    replicated: bool,
}

impl ServerSettings {
    fn is(&self, key: &str, value: &str) -> bool {
        self.info.get(key).is_some_and(|found| found == value)
    }

    fn config(&self, key: &str) -> Option<&str> {
        self.config.as_ref()?.get(key).map(String::as_str)
    }

    /// Whether a replica is connected, or was lately: the server keeps its backlog for a replica whose link is cut, and that replica
    /// is promoted with the fewest grants.
    fn has_replica(&self) -> bool {
        !self.is("connected_slaves", "0") || self.is("repl_backlog_active", "1")
    }

    /// The column of the table of faults. A server that does not report a setting may have the worse one.
    fn persistence(&self, syncs_always: bool) -> Deployment {
        match syncs_always {
            true => Deployment::RedisAlways,
            false if self.is("aof_enabled", "1") => Deployment::RedisEverySecond,
            false => Deployment::RedisVolatile,
        }
    }

    fn evicts(&self) -> bool {
        !self.is("maxmemory", "0") && !self.is("maxmemory_policy", "noeviction")
    }

    /// Why a crash of this server may lose grants, with every setting to change; `None` if it does not.
    fn durability_gap(&self, endpoint: &Endpoint) -> Option<Finding> {
        let (mut why, mut changes) = (Vec::new(), Vec::new());
        if !self.is("aof_enabled", "1") {
            why.push("keeps no append-only file: a restart loses grants".into());
            changes.push(("appendonly", "no", "yes"));
        }
        match self.config("appendfsync") {
            Some("always") => {}
            Some(when) => {
                why.push(format!("has appendfsync {when}: a crash loses the last grants"));
                changes.push(("appendfsync", when, "always"));
            }
            None => why.push("does not report its appendfsync: a crash may lose grants".into()),
        }
        match self.config("no-appendfsync-on-rewrite") {
            Some("no") => {}
            Some(_) => {
                let text = "has no-appendfsync-on-rewrite yes: a crash while it saves or rewrites loses the last grants";
                why.push(text.into());
                changes.push(("no-appendfsync-on-rewrite", "yes", "no"));
            }
            None => why.push("does not report its no-appendfsync-on-rewrite: a crash may lose grants".into()),
        }
        let gap = Finding::risk(Promise::Durability, format!("{endpoint} {}", why.first()?));
        let set = |gap: Finding, (what, from, to)| {
            gap.change(what, from, to).how(format!("CONFIG SET {what} {to}, then CONFIG REWRITE"))
        };
        Some(changes.into_iter().fold(gap, set))
    }

    fn read(answers: Vec<Result<Value, Failure>>) -> Result<ServerSettings, Failure> {
        let mut answers = answers.into_iter();
        let mut next =
            || answers.next().unwrap_or_else(|| Err(Failure::NotSent("a reply is missing".into())));
        let info = text_of(&next()?).unwrap_or_default();
        let pairs = info.lines().filter_map(|line| line.split_once(':'));
        let info = pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect();
        let config = next().ok().and_then(|config| pairs_of(&config));
        let mut settings = ServerSettings { info, config, replicated: false };
        settings.replicated = settings.has_replica();
        Ok(settings)
    }
}

fn pairs_of(value: &Value) -> Option<HashMap<String, String>> {
    match value {
        Value::Map(pairs) => {
            pairs.iter().map(|(key, value)| Some((text_of(key)?, text_of(value)?))).collect()
        }
        Value::Array(parts) => {
            parts.chunks_exact(2).map(|pair| Some((text_of(&pair[0])?, text_of(&pair[1])?))).collect()
        }
        _ => None,
    }
}

fn settings_commands() -> Pipeline {
    let mut commands = Pipeline::with_capacity(2);
    commands.cmd("INFO");
    commands.cmd("CONFIG").arg("GET").arg("appendfsync").arg("no-appendfsync-on-rewrite");
    commands
}

/// The settings of each server, and the profile that follows.
#[derive(Default)]
pub(crate) struct KnownSettings {
    found: Mutex<HashMap<Endpoint, ServerSettings>>,
    profile: Mutex<Option<Profile>>,
}

impl KnownSettings {
    fn found(&self) -> MutexGuard<'_, HashMap<Endpoint, ServerSettings>> {
        self.found.lock().ignore_poison()
    }

    fn slot(&self) -> MutexGuard<'_, Option<Profile>> {
        self.profile.lock().ignore_poison()
    }

    pub fn profile(&self) -> Option<Profile> {
        self.slot().clone()
    }
}

/// Keeps the profile of a store up to date. Clones share the store's state.
#[derive(Clone)]
pub(crate) struct ProfileMonitor {
    pub runner: Arc<ScriptRunner>,
    pub settings: Arc<KnownSettings>,
}

/// The commands that every new connection sends first.
pub(crate) fn handshake(runner: Weak<ScriptRunner>, settings: Arc<KnownSettings>) -> ConnectHandshake {
    let on_replies = move |endpoint: &Endpoint, answers| {
        let found = ServerSettings::read(answers)?;
        if let Some(runner) = runner.upgrade() {
            let monitor = ProfileMonitor { runner, settings: settings.clone() };
            record_settings(&monitor, endpoint, found);
        }
        Ok(())
    };
    ConnectHandshake { commands: Arc::new(settings_commands()), on_replies: Arc::new(on_replies) }
}

/// Records the settings of a server. Once the store is open, its profile changes with them.
fn record_settings(monitor: &ProfileMonitor, endpoint: &Endpoint, found: ServerSettings) {
    let mut all = monitor.settings.found();
    let replicated = found.replicated || all.get(endpoint).is_some_and(|before| before.replicated);
    all.insert(endpoint.clone(), ServerSettings { replicated, ..found });
    drop(all);
    let mut slot = monitor.settings.slot();
    if let Some(before) = &*slot {
        let now = profile_of(monitor);
        if now.durable != before.durable || now.fence != before.fence {
            tracing::warn!(server = %endpoint, findings = %now.grave_findings(), "the settings of the server have changed, and the guarantees of the store with them");
        }
        *slot = Some(now);
    }
}

/// Checks all servers at once, and refuses servers that cannot keep locks. From here on there is a profile.
///
/// A node of a cluster that sends no reply is left out: its locks are unavailable until it replies, and those of the other nodes
/// are not. Every new connection reads its settings before anything else is sent to it.
pub(crate) async fn check_servers(monitor: &ProfileMonitor) -> Result<()> {
    let router = &monitor.runner.router;
    let servers = router.all().await?;
    let outcomes = join_all(servers.iter().map(|server| check_connection(server, monitor))).await;
    let some_reply = outcomes.iter().any(Result::is_ok);
    for (server, outcome) in servers.iter().zip(outcomes) {
        match outcome {
            Err(error @ (Error::Unavailable(_) | Error::Unknown(_))) if router.is_cluster() && some_reply => {
                tracing::warn!(
                    server = %server.endpoint(), %error,
                    "a node of the cluster sends no reply; its locks are unavailable until it does"
                );
            }
            outcome => outcome?,
        }
    }
    let profile = profile_of(monitor);
    *monitor.settings.slot() = Some(profile);
    Ok(())
}

async fn check_connection(server: &Connection, monitor: &ProfileMonitor) -> Result<()> {
    // The handshake of the new connection reads the settings. If only the scripts are not loaded, their first calls do that.
    let loaded = statements::load_scripts(server).await;
    let found = monitor.settings.found().get(server.endpoint()).cloned();
    match (found, loaded) {
        (Some(found), _) => check_server(&found, &server.endpoint().to_string(), monitor),
        (None, Err(failure)) => Err(failure.into()),
        (None, Ok(())) => {
            Err(Error::Unavailable(format!("{} does not report its settings", server.endpoint())))
        }
    }
}

/// Follows changes for as long as the store is open: another primary, other settings, new replicas.
pub(crate) async fn run(monitor: ProfileMonitor) {
    // A silent server delays only the reading of its settings: the store goes on asking the sentinels for another primary.
    tokio::join!(follow_topology(&monitor.runner), refresh_regularly(&monitor));
}

async fn follow_topology(runner: &ScriptRunner) {
    loop {
        tokio::time::sleep(runner.options.poll).await;
        runner.router.follow_primary().await;
        for router in [Some(&runner.router), runner.grant_router.as_ref()] {
            router.into_iter().for_each(Router::prune);
        }
    }
}

async fn refresh_regularly(monitor: &ProfileMonitor) {
    loop {
        tokio::time::sleep(monitor.runner.options.poll * POLLS).await;
        refresh(monitor).await;
    }
}

async fn refresh(monitor: &ProfileMonitor) {
    let Ok(servers) = monitor.runner.router.all().await else { return };
    let commands = &settings_commands();
    join_all(servers.iter().map(|server| async move {
        match server.calls(commands).await.and_then(ServerSettings::read) {
            Ok(found) => record_settings(monitor, server.endpoint(), found),
            Err(failure) => {
                tracing::debug!(?failure, server = %server.endpoint(), "cannot read the settings of the server; the store reads them again later")
            }
        }
    }))
    .await;
    let serving = monitor.runner.router.serving();
    monitor.settings.found().retain(|endpoint, _| serving.contains(endpoint));
}

/// The profile that follows from the settings.
fn profile_of(monitor: &ProfileMonitor) -> Profile {
    let mut findings = Vec::new();
    let (mut deployments, mut replicas) = (Vec::new(), false);
    let all = monitor.settings.found();
    for endpoint in monitor.runner.router.serving() {
        let Some(found) = all.get(&endpoint) else {
            deployments.push(Deployment::RedisEverySecond);
            let text = format!("{endpoint} has not reported its settings yet");
            findings.push(Finding::risk(Promise::Durability, text));
            continue;
        };
        replicas |= found.replicated;
        if found.evicts() {
            deployments.push(Deployment::RedisEvicting);
            findings.push(eviction(found, &endpoint));
        }
        let gap = found.durability_gap(&endpoint);
        deployments.push(found.persistence(gap.is_none()));
        findings.push(gap.unwrap_or_else(|| {
            let text = format!("{endpoint} writes every grant to its disk before it replies");
            Finding::hint(Promise::Durability, text)
        }));
    }
    drop(all);
    let fails_over = replicas || !matches!(monitor.runner.options.servers, Servers::Single(_));
    if fails_over {
        deployments.push(Deployment::RedisReplicated);
        findings.push(fail_over(monitor.runner.options.wait_replicas));
    }
    findings.push(Finding::hint(
        Promise::Exclusion,
        "leases follow the server's wall clock: set forward, they end early. The fence is what protects you",
    ));
    findings.push(Finding::hint(
        Promise::Waiting,
        "cycles of waiting owners are not found: give requests a wait time",
    ));
    findings.sort_by_key(|finding| finding.severity);
    deployments.sort_unstable();
    deployments.dedup();
    Profile {
        waiting: WaitOrder::Queue,
        wake: monitor.runner.options.poll + monitor.runner.options.claim,
        shared: true,
        permits: true,
        multi_name: true,
        reentry: true,
        deadlocks: false,
        lock_delay: true,
        min_hold: true,
        watch: true,
        revoke: true,
        records: true,
        limits: LimitSupport::Native,
        findings,
        ..Profile::deployed(monitor.runner.scheme(), deployments)
    }
}

fn eviction(found: &ServerSettings, endpoint: &Endpoint) -> Finding {
    let policy = found.info.get("maxmemory_policy").map_or("", String::as_str);
    let text =
        format!("{endpoint} may evict locks when its memory is full: its maxmemory-policy is {policy}");
    Finding::harm(Promise::Durability, text)
        .change("maxmemory-policy", policy, "noeviction")
        .how("CONFIG SET maxmemory-policy noeviction, then CONFIG REWRITE")
}

fn fail_over(wait_replicas: u32) -> Finding {
    match wait_replicas {
        0 => Finding::risk(
            Promise::Durability,
            "a fail-over to a replica may lose the last grants; wait_replicas=1 makes that rare",
        )
        .change("wait_replicas in the URL of the store", "0", "1"),
        n => Finding::risk(
            Promise::Durability,
            format!(
                "a grant or a renewal counts once {n} replicas have it; a fail-over to another one may still lose it"
            ),
        ),
    }
}

fn check_server(found: &ServerSettings, endpoint: &str, monitor: &ProfileMonitor) -> Result<()> {
    let version = found.info.get("redis_version").map_or("", String::as_str);
    let major: u32 = version.split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    if major < 7 {
        return Err(Error::Unsupported(format!(
            "{endpoint} is Redis {version}: version 7.0 or a compatible server is needed"
        )));
    }
    // In a cluster a fail-over may have made this server a replica since another node sent the slot map: it redirects requests.
    if !found.is("role", "master") && !monitor.runner.router.is_cluster() {
        return Err(Error::invalid(format!(
            "{endpoint} is a replica: locks are taken at the primary. Name that, or use redis+sentinel://"
        )));
    }
    if found.is("cluster_enabled", "1") != monitor.runner.router.is_cluster() {
        return Err(Error::invalid(format!(
            "{endpoint} is a node of a cluster: use redis+cluster://{endpoint} to reach all of it"
        )));
    }
    Ok(())
}
