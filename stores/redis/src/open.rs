//! What a server says about itself, and what that means for the promises of the store. Every new connection asks before
//! anything else is sent on it, and a task asks again now and then: settings change, and replicas come.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures_util::future::join_all;
use lockkeeper_core::{Error, Profile, Promise, Result, Waiting};
use redis::{Pipeline, Value};

use crate::config::Servers;
use crate::fault::Failure;
use crate::fleet::text;
use crate::link::{Door, Greeting};
use crate::script;
use crate::store::Shared;

/// How many polls pass between two looks at the settings.
const POLLS: u32 = 10;

/// What matters of one server.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    info: HashMap<String, String>,
    /// What `CONFIG GET` tells; `None`: we may not look.
    config: Option<HashMap<String, String>>,
}

impl Found {
    fn is(&self, key: &str, value: &str) -> bool {
        self.info.get(key).is_some_and(|found| found == value)
    }

    fn config(&self, key: &str) -> Option<&str> {
        self.config.as_ref()?.get(key).map(String::as_str)
    }

    fn evicts(&self) -> bool {
        !self.is("maxmemory", "0") && !self.is("maxmemory_policy", "noeviction")
    }

    /// Why a crash of this server may lose grants; `None` if it does not.
    fn forgets(&self) -> Option<String> {
        if !self.is("aof_enabled", "1") {
            return Some("keeps no append-only file: a restart loses grants".into());
        }
        match (self.config("appendfsync"), self.config("no-appendfsync-on-rewrite")) {
            (Some("always"), Some("no")) => None,
            (Some("always"), Some(_)) => Some(
                "has no-appendfsync-on-rewrite yes: a crash while it saves or rewrites loses the last grants. Set no"
                    .into(),
            ),
            (Some(when), _) if when != "always" => {
                Some(format!("has appendfsync {when}: a crash loses the last grants"))
            }
            _ => Some("does not tell its appendfsync: a crash may lose grants".into()),
        }
    }

    fn read(answers: Vec<Result<Value, Failure>>) -> Result<Found, Failure> {
        let mut answers = answers.into_iter();
        let mut next = || answers.next().unwrap_or_else(|| Err(Failure::Away("an answer is missing".into())));
        let info = text(&next()?).unwrap_or_default();
        let pairs = info.lines().filter_map(|line| line.split_once(':'));
        let info = pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect();
        let config = next().ok().and_then(|config| pairs_of(&config));
        Ok(Found { info, config })
    }
}

fn pairs_of(value: &Value) -> Option<HashMap<String, String>> {
    match value {
        Value::Map(pairs) => pairs.iter().map(|(key, value)| Some((text(key)?, text(value)?))).collect(),
        Value::Array(parts) => {
            parts.chunks_exact(2).map(|pair| Some((text(&pair[0])?, text(&pair[1])?))).collect()
        }
        _ => None,
    }
}

fn questions() -> Pipeline {
    let mut questions = Pipeline::with_capacity(2);
    questions.cmd("INFO");
    questions.cmd("CONFIG").arg("GET").arg("appendfsync").arg("no-appendfsync-on-rewrite");
    questions
}

/// What was found at each server, and the profile that follows.
#[derive(Default)]
pub(crate) struct Settings {
    found: Mutex<HashMap<Door, Found>>,
    profile: Mutex<Option<Profile>>,
}

impl Settings {
    fn found(&self) -> MutexGuard<'_, HashMap<Door, Found>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Profile>> {
        self.profile.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn profile(&self) -> Option<Profile> {
        self.slot().clone()
    }
}

/// What every new connection asks.
pub(crate) fn greeting(shared: Weak<Shared>) -> Greeting {
    let answered = move |door: &Door, answers| {
        let found = Found::read(answers)?;
        if let Some(shared) = shared.upgrade() {
            learn(&shared, door, found);
        }
        Ok(())
    };
    Greeting { questions: Arc::new(questions()), answered: Arc::new(answered) }
}

/// Notes what was found. Once the store is open its profile changes with it.
fn learn(shared: &Shared, door: &Door, found: Found) {
    shared.settings.found().insert(door.clone(), found);
    let mut slot = shared.settings.slot();
    if let Some(before) = &*slot {
        let now = profile_of(shared);
        if now.durable != before.durable || now.fence != before.fence {
            tracing::warn!(server = %door, notes = ?now.notes, "the server keeps other promises than before");
        }
        *slot = Some(now);
    }
}

/// Looks at every server and refuses what cannot work. From here on there is a profile.
pub(crate) async fn open(shared: &Shared) -> Result<()> {
    for server in shared.fleet.all().await? {
        // To ask for the scripts to be kept is to connect, and to connect is to look.
        script::teach(&server).await?;
        let found = shared.settings.found().get(server.door()).cloned();
        let unseen = || Error::Unavailable(format!("{} does not say what it is", server.door()));
        check(&found.ok_or_else(unseen)?, &server.door().to_string(), shared)?;
    }
    let profile = profile_of(shared);
    *shared.settings.slot() = Some(profile);
    Ok(())
}

/// Follows what changes for as long as the store is open: who the primary is, and how the servers are set up.
pub(crate) async fn attend(shared: Arc<Shared>) {
    for turn in 1_u32.. {
        tokio::time::sleep(shared.options.poll).await;
        shared.fleet.follow_primary().await;
        if turn.is_multiple_of(POLLS) {
            look_again(&shared).await;
        }
    }
}

async fn look_again(shared: &Shared) {
    let Ok(servers) = shared.fleet.all().await else { return };
    let questions = &questions();
    join_all(servers.iter().map(|server| async move {
        match server.calls(questions).await.and_then(Found::read) {
            Ok(found) => learn(shared, server.door(), found),
            Err(failure) => tracing::debug!(?failure, server = %server.door(), "its settings are read later"),
        }
    }))
    .await;
    let serving = shared.fleet.serving();
    shared.settings.found().retain(|door, _| serving.contains(door));
}

/// What follows from what was found.
fn profile_of(shared: &Shared) -> Profile {
    let (mut grave, mut notes) = (Vec::new(), Vec::new());
    let (mut durable, mut evicts, mut replicas) = (true, false, false);
    let all = shared.settings.found();
    for door in shared.fleet.serving() {
        let Some(found) = all.get(&door) else {
            durable = false;
            grave.push(format!("{door} has not been asked yet how it is set up"));
            continue;
        };
        replicas |= !found.is("connected_slaves", "0");
        if found.evicts() {
            evicts = true;
            let policy = found.info.get("maxmemory_policy").cloned().unwrap_or_default();
            grave.insert(0, format!(
                "{door} may throw locks away when its memory is full: its maxmemory-policy is {policy}. Set noeviction"
            ));
        }
        match found.forgets() {
            Some(why) => {
                durable = false;
                grave.push(format!("{door} {why}"));
            }
            None => notes.push(format!("{door} writes every grant to its disk before it answers")),
        }
    }
    drop(all);
    let fails_over = replicas || !matches!(shared.options.servers, Servers::Single(_));
    if fails_over {
        grave.push(match shared.options.wait_replicas {
            0 => "a fail-over to a replica may lose the last grants; ?wait_replicas=1 makes that rare".into(),
            n => format!(
                "a grant or a renewal counts once {n} replicas have it; a fail-over to another one may still lose it"
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
    Profile {
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
        revoke: true,
        records: true,
        notes: grave,
    }
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
