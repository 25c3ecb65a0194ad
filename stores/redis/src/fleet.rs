//! Which server to talk to: the only one, the one the sentinels name, or the one that has the slot.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Cmd, Pipeline, Value, cmd};
use tokio::runtime::Handle;

use crate::config::Servers;
use crate::fault::Failure;
use crate::layout::SLOTS;
use crate::link::{Access, Door, Link, Listener};

/// The answers to a pipeline.
pub type Answers = Vec<Result<Value, Failure>>;

/// The servers of a store.
pub struct Fleet {
    servers: Servers,
    access: Arc<Access>,
    /// Sentinels have no databases, and users of their own.
    to_sentinels: Arc<Access>,
    reactor: Handle,
    listener: Option<Listener>,
    map: Mutex<Map>,
}

#[derive(Default)]
struct Map {
    links: HashMap<Door, Arc<Link>>,
    /// The one to talk to, if there is only one at a time.
    chief: Option<Arc<Link>>,
    /// Where each slot is; empty if not known.
    slots: Vec<Option<Door>>,
}

/// How often a request is sent on to another node before it is told to be impossible.
const HOPS: usize = 8;

impl Fleet {
    pub fn new(servers: Servers, access: Access, reactor: Handle, listener: Option<Listener>) -> Self {
        let to_sentinels = Arc::new(Access { db: 0, user: None, password: None, ..access.clone() });
        Fleet { servers, access: Arc::new(access), to_sentinels, reactor, listener, map: Mutex::default() }
    }

    pub fn is_cluster(&self) -> bool {
        matches!(self.servers, Servers::Cluster(_))
    }

    /// The thread that our connections live on.
    pub fn reactor(&self) -> &Handle {
        &self.reactor
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self, door: &Door) -> Arc<Link> {
        let make = || {
            let link =
                Link::new(door.clone(), self.access.clone(), self.reactor.clone(), self.listener.clone());
            Arc::new(link)
        };
        self.map().links.entry(door.clone()).or_insert_with(make).clone()
    }

    /// The server that has a slot now, as far as we know.
    async fn server_of(&self, slot: u16) -> Result<Arc<Link>, Failure> {
        match &self.servers {
            Servers::Single(door) => Ok(self.link(door)),
            Servers::Sentinel { sentinels, name } => {
                let chief = self.map().chief.clone();
                match chief {
                    Some(chief) => Ok(chief),
                    None => self.ask_sentinels(sentinels, name).await,
                }
            }
            Servers::Cluster(seeds) => {
                let known = self.map().slots.get(usize::from(slot)).cloned().flatten();
                match known {
                    Some(door) => Ok(self.link(&door)),
                    None => {
                        self.ask_cluster(seeds).await?;
                        let known = self.map().slots.get(usize::from(slot)).cloned().flatten();
                        let door = known.ok_or_else(|| {
                            Failure::Away(format!("no node of the cluster has slot {slot} now"))
                        })?;
                        Ok(self.link(&door))
                    }
                }
            }
        }
    }

    /// All servers that take writes.
    pub async fn all(&self) -> Result<Vec<Arc<Link>>, Failure> {
        let Servers::Cluster(seeds) = &self.servers else { return Ok(vec![self.server_of(0).await?]) };
        if self.map().slots.is_empty() {
            self.ask_cluster(seeds).await?;
        }
        let mut doors: Vec<Door> = self.map().slots.iter().flatten().cloned().collect();
        doors.sort_by_key(Door::to_string);
        doors.dedup();
        Ok(doors.iter().map(|door| self.link(door)).collect())
    }

    /// Sends one command to the server that has `slot`.
    pub async fn call(&self, slot: u16, command: &Cmd) -> Result<Value, Failure> {
        let mut link = self.server_of(slot).await?;
        for hop in 0..HOPS {
            let failure = match link.call(command).await {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            match self.next(&failure, hop).await? {
                Next::Elsewhere(door) => link = self.link(&door),
                Next::Again => link = self.server_of(slot).await?,
                Next::Ask(door) => {
                    let mut both = Pipeline::with_capacity(2);
                    both.cmd("ASKING").add_command(command.clone());
                    match self.link(&door).calls(&both).await?.pop() {
                        Some(answer) => return answer,
                        None => return Err(Failure::Unheard("the answer is missing".into())),
                    }
                }
            }
        }
        Err(Failure::Away("the cluster sends the request from node to node".into()))
    }

    /// Sends many commands to the server that has `slot`, behind each other.
    pub async fn calls(&self, slot: u16, commands: &Pipeline) -> Result<Answers, Failure> {
        let link = self.server_of(slot).await?;
        let answers = match link.calls(commands).await {
            Ok(answers) => answers,
            Err(failure) => {
                self.forget(&failure);
                return Err(failure);
            }
        };
        for failure in answers.iter().filter_map(|answer| answer.as_ref().err()) {
            self.forget(failure);
        }
        Ok(answers)
    }

    /// What to do about a failure; it is an error if there is nothing to do.
    async fn next(&self, failure: &Failure, hop: usize) -> Result<Next, Failure> {
        self.forget(failure);
        let Failure::Refused { code, detail } = failure else { return Err(failure.clone()) };
        let there = || detail.split_whitespace().last().and_then(parse_door).ok_or_else(|| failure.clone());
        match code.as_str() {
            "MOVED" if self.is_cluster() => Ok(Next::Elsewhere(there()?)),
            "ASK" if self.is_cluster() => Ok(Next::Ask(there()?)),
            // Half of the keys are here and half are there. It does not take long.
            "TRYAGAIN" if hop + 1 < HOPS => {
                self.pause(Duration::from_millis(5 << hop)).await;
                Ok(Next::Again)
            }
            _ => Err(failure.clone()),
        }
    }

    /// Timers are made and run on our own thread: the caller may be on a runtime that has none, or on none.
    pub async fn pause(&self, time: Duration) {
        _ = self.reactor.spawn(async move { tokio::time::sleep(time).await }).await;
    }

    /// Forgets what a failure proves wrong.
    fn forget(&self, failure: &Failure) {
        let stale = match failure {
            Failure::Away(_) | Failure::Unheard(_) => true,
            Failure::Refused { code, .. } => matches!(code.as_str(), "READONLY" | "MOVED" | "CLUSTERDOWN"),
        };
        if stale {
            let mut map = self.map();
            map.chief = None;
            map.slots.clear();
        }
    }

    async fn ask_sentinels(&self, sentinels: &[Door], name: &str) -> Result<Arc<Link>, Failure> {
        let mut why = Failure::Away("there are no sentinels".into());
        for door in sentinels {
            let sentinel = Link::new(door.clone(), self.to_sentinels.clone(), self.reactor.clone(), None);
            let question = cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name).to_owned();
            match sentinel.call(&question).await.map(texts) {
                Ok(Some(answer)) if answer.len() == 2 => {
                    let Ok(port) = answer[1].parse() else { continue };
                    let chief = self.link(&Door::Tcp(answer[0].clone(), port));
                    // A sentinel may be behind the times; the server itself knows what it is.
                    match chief.call(&cmd("ROLE")).await {
                        Ok(Value::Array(role))
                            if role.first().and_then(text).as_deref() == Some("master") =>
                        {
                            self.map().chief = Some(chief.clone());
                            return Ok(chief);
                        }
                        Ok(_) => why = Failure::Away(format!("{} is not the primary any more", chief.door())),
                        Err(failure) => why = failure,
                    }
                }
                Ok(_) => why = Failure::Away(format!("the sentinel at {door} knows no master {name:?}")),
                Err(failure) => why = failure,
            }
        }
        Err(match why {
            Failure::Unheard(text) => Failure::Away(text),
            other => other,
        })
    }

    async fn ask_cluster(&self, seeds: &[Door]) -> Result<(), Failure> {
        let mut doors: Vec<Door> = self.map().links.keys().cloned().collect();
        doors.extend(
            seeds.iter().filter(|seed| !self.map().links.contains_key(*seed)).cloned().collect::<Vec<_>>(),
        );
        let mut why = Failure::Away("the cluster has no nodes".into());
        for door in doors {
            match self.link(&door).call(cmd("CLUSTER").arg("SLOTS")).await {
                Ok(Value::Array(ranges)) => {
                    let mut slots = vec![None; usize::from(SLOTS)];
                    for (first, last, node) in ranges.iter().filter_map(|range| parse_range(range, &door)) {
                        slots[usize::from(first)..=usize::from(last)].fill(Some(node));
                    }
                    if slots.iter().any(Option::is_some) {
                        self.map().slots = slots;
                        return Ok(());
                    }
                    why = Failure::Away(format!("the cluster at {door} has no slots yet"));
                }
                Ok(_) => why = Failure::Away(format!("{door} does not say what its slots are")),
                Err(Failure::Unheard(text)) => why = Failure::Away(text),
                Err(failure) if failure.is("ERR") => {
                    why =
                        Failure::Away(format!("{door} is no node of a cluster: use redis:// for one server"));
                }
                Err(failure) => why = failure,
            }
        }
        Err(why)
    }
}

enum Next {
    Elsewhere(Door),
    Ask(Door),
    Again,
}

fn parse_door(text: &str) -> Option<Door> {
    let (host, port) = text.rsplit_once(':')?;
    Some(Door::Tcp(host.trim_matches(['[', ']']).to_owned(), port.parse().ok()?))
}

/// One line of CLUSTER SLOTS: from, to, the primary. A node that does not know its own host is where we found it.
fn parse_range(range: &Value, asked: &Door) -> Option<(u16, u16, Door)> {
    let Value::Array(parts) = range else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(node), ..] = &parts[..] else { return None };
    let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
    let (Some(Value::Int(port)), true) = (node.get(1), first <= last && last < SLOTS) else { return None };
    let host = node.first().and_then(text).filter(|host| !host.is_empty() && host != "?");
    let host = match (host, asked) {
        (Some(host), _) => host,
        (None, Door::Tcp(host, _)) => host.clone(),
        (None, Door::Unix(_)) => return None,
    };
    Some((first, last, Door::Tcp(host, u16::try_from(*port).ok()?)))
}

/// An answer that is a text.
pub fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        Value::VerbatimString { text, .. } => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        _ => None,
    }
}

fn texts(value: Value) -> Option<Vec<String>> {
    match value {
        Value::Array(parts) => parts.iter().map(text).collect(),
        _ => None,
    }
}
