//! Which server to talk to: the only one, the one the sentinels name, or the one that has the slot.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Pipeline, Value, cmd};
use tokio::runtime::Handle;

use crate::config::Servers;
use crate::fault::Failure;
use crate::link::{Access, Door, Greeting, Link, Listener};
use crate::sentinel;
use crate::topology::{Range, Topology, no_owner, parse_door};

/// The answers to a pipeline.
pub type Answers = Vec<Result<Value, Failure>>;

/// The servers of a store.
pub struct Fleet {
    servers: Servers,
    access: Arc<Access>,
    reactor: Handle,
    listener: Option<Listener>,
    greeting: Option<Greeting>,
    links: Mutex<HashMap<Door, Arc<Link>>>,
    sentinels: Vec<Arc<Link>>,
    /// One for all connections of a store: a grant and its release go to the same server.
    topology: Arc<Mutex<Topology>>,
    /// Held by the one that asks who serves what; the others wait for it.
    reading: tokio::sync::Mutex<()>,
}

/// After this time without an answer the map is asked for at one more node.
const NEXT_NODE: Duration = Duration::from_millis(50);
/// How long a redirected request pauses at most before it is sent again.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// What is sent as one: a command, or several behind each other of which the first decides where they belong.
enum Payload<'a> {
    One(&'a Cmd),
    Many(&'a Pipeline),
}

impl Payload<'_> {
    async fn send(&self, link: &Link, asking: bool) -> Result<Answers, Failure> {
        match self {
            Payload::One(command) if !asking => Ok(vec![link.call(command).await]),
            Payload::Many(commands) if !asking => link.calls(commands).await,
            _ => {
                let mut all = Pipeline::new();
                all.cmd("ASKING");
                match self {
                    Payload::One(command) => _ = all.add_command((*command).clone()),
                    Payload::Many(commands) => {
                        commands.cmd_iter().for_each(|command| _ = all.add_command(command.clone()));
                    }
                }
                let mut answers = link.calls(&all).await?;
                answers.remove(0)?;
                Ok(answers)
            }
        }
    }
}

/// What is to be done with a request whose keys are on two nodes, because their slot is being moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// It is sent again until the timeout is over: the move may end soon.
    SendAgain,
    /// The caller is told at once, and has another way.
    Report,
}

/// How often a request was sent on, and until when that goes on.
struct Redirects {
    split: Split,
    until: Instant,
    moved: u32,
    asked: u32,
    pauses: u32,
}

impl Fleet {
    pub fn new(
        servers: Servers,
        access: Access,
        reactor: Handle,
        listener: Option<Listener>,
        greeting: Option<Greeting>,
    ) -> Self {
        let sentinels = match &servers {
            Servers::Sentinel { sentinels, user, password, .. } => {
                // Sentinels have no databases, and users of their own.
                let (user, password) = (user.clone(), password.clone());
                let login = Arc::new(Access { db: 0, user, password, ..access.clone() });
                let link = |door: &Door| Link::new(door.clone(), login.clone(), reactor.clone(), None);
                sentinels.iter().map(|door| Arc::new(link(door))).collect()
            }
            _ => Vec::new(),
        };
        Fleet {
            servers,
            access: Arc::new(access),
            reactor,
            listener,
            greeting,
            links: Mutex::default(),
            sentinels,
            topology: Arc::default(),
            reading: tokio::sync::Mutex::default(),
        }
    }

    /// Other connections to the same servers.
    pub fn sibling(&self) -> Self {
        Fleet {
            servers: self.servers.clone(),
            access: self.access.clone(),
            reactor: self.reactor.clone(),
            listener: None,
            greeting: None,
            links: Mutex::default(),
            sentinels: self.sentinels.clone(),
            topology: self.topology.clone(),
            reading: tokio::sync::Mutex::default(),
        }
    }

    pub fn is_cluster(&self) -> bool {
        matches!(self.servers, Servers::Cluster(_))
    }

    /// The thread that our connections live on.
    pub fn reactor(&self) -> &Handle {
        &self.reactor
    }

    fn topology(&self) -> MutexGuard<'_, Topology> {
        self.topology.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn links(&self) -> MutexGuard<'_, HashMap<Door, Arc<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self, door: &Door) -> Arc<Link> {
        let make = || {
            let link =
                Link::new(door.clone(), self.access.clone(), self.reactor.clone(), self.listener.clone());
            Arc::new(match &self.greeting {
                Some(greeting) => link.greet_with(greeting.clone()),
                None => link,
            })
        };
        self.links().entry(door.clone()).or_insert_with(make).clone()
    }

    /// The server that has a slot now, as far as we know.
    async fn server_of(&self, slot: u16) -> Result<Arc<Link>, Failure> {
        match &self.servers {
            Servers::Single(door) => Ok(self.link(door)),
            Servers::Sentinel { name, .. } => {
                let chief = self.topology().chief.clone();
                match chief {
                    Some(chief) => Ok(self.link(&chief)),
                    None => self.find_primary(name).await,
                }
            }
            Servers::Cluster(seeds) => {
                let (known, epoch) = self.topology().trusted(slot);
                if let Some(door) = known {
                    return Ok(self.link(&door));
                }
                let read = self.read_map(seeds, epoch).await;
                // A node that is unreachable for now may still be the one, also while no node tells.
                match (self.topology().door_of(slot), read) {
                    (Some(door), _) => Ok(self.link(&door)),
                    (None, Err(failure)) => Err(failure),
                    (None, Ok(())) => Err(no_owner(slot)),
                }
            }
        }
    }

    /// Where those are that take writes, as far as is known.
    pub fn serving(&self) -> Vec<Door> {
        let topology = self.topology();
        match &self.servers {
            Servers::Single(door) => vec![door.clone()],
            Servers::Sentinel { .. } => topology.chief.iter().cloned().collect(),
            Servers::Cluster(_) => {
                let doors: HashSet<&Arc<Door>> = topology.slots.iter().flatten().collect();
                let mut doors: Vec<Door> = doors.into_iter().map(|door| (**door).clone()).collect();
                doors.sort_by_key(Door::to_string);
                doors
            }
        }
    }

    /// All servers that take writes.
    pub async fn all(&self) -> Result<Vec<Arc<Link>>, Failure> {
        let Servers::Cluster(seeds) = &self.servers else { return Ok(vec![self.server_of(0).await?]) };
        if self.topology().slots.is_empty() {
            self.read_map(seeds, 0).await?;
        }
        Ok(self.serving().iter().map(|door| self.link(door)).collect())
    }

    /// Sends one command to the server that has `slot`.
    pub async fn call(&self, slot: u16, command: &Cmd) -> Result<Value, Failure> {
        self.call_when(slot, command, Split::SendAgain).await
    }

    pub async fn call_when(&self, slot: u16, command: &Cmd, split: Split) -> Result<Value, Failure> {
        let answer = self.send(slot, &Payload::One(command), split).await?.pop();
        answer.unwrap_or_else(|| Err(Failure::Unheard("the answer is missing".into())))
    }

    /// Sends many commands to the server that has `slot`, behind each other. If that server says of the first that it belongs
    /// elsewhere, all of them are sent there.
    pub async fn calls(&self, slot: u16, commands: &Pipeline, split: Split) -> Result<Answers, Failure> {
        self.send(slot, &Payload::Many(commands), split).await
    }

    /// Sends one command to any server: those that we are connected with first, then the others.
    pub async fn call_any(&self, command: &Cmd) -> Result<Value, Failure> {
        let mut links = self.all().await?;
        let suspects = self.topology().suspects.clone();
        links.sort_by_key(|link| (suspects.contains(link.door()), !link.is_open()));
        let mut answer = Err(Failure::Away("there are no servers".into()));
        for link in links {
            answer = link.call(command).await;
            match &answer {
                Err(failure @ (Failure::Away(_) | Failure::Unheard(_))) => self.suspect(link.door(), failure),
                _ => break,
            }
        }
        answer
    }

    async fn send(&self, slot: u16, payload: &Payload<'_>, split: Split) -> Result<Answers, Failure> {
        let until = Instant::now() + self.access.timeout;
        let mut redirects = Redirects { split, until, moved: 0, asked: 0, pauses: 0 };
        let (mut link, mut asking) = (self.server_of(slot).await?, false);
        loop {
            let answers = match payload.send(&link, asking).await {
                Ok(answers) => answers,
                Err(failure) => {
                    self.suspect(link.door(), &failure);
                    return Err(failure);
                }
            };
            for failure in answers.iter().filter_map(|answer| answer.as_ref().err()) {
                self.suspect(link.door(), failure);
            }
            let Some(Err(failure)) = answers.first() else { return Ok(answers) };
            match self.redirect(slot, &link, failure, &mut redirects).await? {
                Some(next) => (link, asking) = next,
                None => return Ok(answers),
            }
        }
    }

    /// Where a request is to be sent next, and whether as one that asks; `None` if the failure is the answer.
    async fn redirect(
        &self,
        slot: u16,
        from: &Link,
        failure: &Failure,
        redirects: &mut Redirects,
    ) -> Result<Option<(Arc<Link>, bool)>, Failure> {
        let Failure::Refused { code, detail } = failure else { return Ok(None) };
        let there = || detail.split_whitespace().last().and_then(|text| parse_door(text, from.door()));
        match (code.as_str(), &self.servers) {
            ("MOVED", Servers::Cluster(seeds)) => {
                let Some(door) = there() else { return Ok(None) };
                self.topology().learn(slot, door.clone());
                redirects.moved += 1;
                if redirects.moved == 1 {
                    return Ok(Some((self.link(&door), false)));
                }
                // The nodes do not agree who has the slot, or nobody has it: that takes gossip to settle.
                if !self.pause_before_next(redirects).await {
                    return Err(no_owner(slot));
                }
                let epoch = self.topology().epoch;
                _ = self.read_map(seeds, epoch).await;
                Ok(Some((self.server_of(slot).await?, false)))
            }
            ("ASK", Servers::Cluster(_)) => {
                redirects.asked += 1;
                if redirects.asked > 1 && !self.pause_before_next(redirects).await {
                    return Ok(None);
                }
                Ok(there().map(|door| (self.link(&door), true)))
            }
            // Some of the keys are here and some are there.
            ("TRYAGAIN", Servers::Cluster(_))
                if redirects.split == Split::SendAgain && self.pause_before_next(redirects).await =>
            {
                Ok(Some((self.server_of(slot).await?, false)))
            }
            _ => Ok(None),
        }
    }

    /// Pauses, longer each time; says whether there is time left to send again.
    async fn pause_before_next(&self, redirects: &mut Redirects) -> bool {
        let pause = (Duration::from_millis(5) * 2_u32.pow(redirects.pauses.min(10))).min(LONGEST_PAUSE);
        redirects.pauses += 1;
        let left = redirects.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        self.pause(pause.min(left)).await;
        true
    }

    /// Timers are made and run on our own thread: the caller may be on a runtime that has none, or on none.
    pub async fn pause(&self, time: Duration) {
        _ = self.reactor.spawn(async move { tokio::time::sleep(time).await }).await;
    }

    /// Doubts what a failure may prove wrong: what was known of this server, and nothing else.
    fn suspect(&self, door: &Door, failure: &Failure) {
        let stale = match failure {
            Failure::Away(_) | Failure::Unheard(_) => true,
            Failure::Refused { code, .. } => matches!(code.as_str(), "READONLY" | "CLUSTERDOWN"),
        };
        if stale {
            let mut topology = self.topology();
            topology.suspects.insert(door.clone());
            if topology.chief.as_ref() == Some(door) {
                topology.chief = None;
            }
        }
    }

    /// Asks the sentinels again who the primary is: an old primary that they cannot reach answers us all the same.
    pub async fn follow_primary(&self) {
        let Servers::Sentinel { name, .. } = &self.servers else { return };
        let _reading = self.reading.lock().await;
        if let Err(failure) = self.ask_sentinels(name).await {
            tracing::debug!(?failure, "the sentinels do not say who is the primary, will ask again");
        }
    }

    async fn find_primary(&self, name: &str) -> Result<Arc<Link>, Failure> {
        let _reading = self.reading.lock().await;
        let known = self.topology().chief.clone();
        match known {
            Some(chief) => Ok(self.link(&chief)),
            None => self.ask_sentinels(name).await,
        }
    }

    async fn ask_sentinels(&self, name: &str) -> Result<Arc<Link>, Failure> {
        let sentinel::Verdict { named, majority } = sentinel::ask(&self.sentinels, name).await?;
        let (known, newest) = {
            let topology = self.topology();
            (topology.chief.clone(), topology.chief_epoch)
        };
        if named.epoch < newest && !majority {
            let behind = || Failure::Away("the sentinels that reply are behind the others".into());
            return known.map(|chief| self.link(&chief)).ok_or_else(behind);
        }
        let link = self.link(&named.door);
        if known.as_ref() == Some(&named.door) {
            self.topology().chief_epoch = named.epoch;
            return Ok(link);
        }
        match sentinel::is_primary(&link).await {
            Ok(true) => {}
            Ok(false) => return Err(Failure::Away(format!("{} is not the primary any more", named.door))),
            Err(Failure::Unheard(text)) => return Err(Failure::Away(text)),
            Err(failure) => return Err(failure),
        }
        if let Some(old) = &known {
            tracing::warn!(%old, new = %named.door, "the sentinels name another primary; following it");
        }
        let mut topology = self.topology();
        (topology.chief, topology.chief_epoch) = (Some(named.door.clone()), named.epoch);
        self.links().retain(|door, _| *door == named.door);
        Ok(link)
    }

    /// Reads the slot map from the first node that gives one, unless it was read since `epoch`. Nodes that we have a
    /// connection to are asked first, and the next one soon after: a node that is unreachable holds nobody up.
    async fn read_map(&self, seeds: &[Door], epoch: u64) -> Result<(), Failure> {
        let _reading = self.reading.lock().await;
        if self.topology().epoch > epoch {
            return Ok(());
        }
        let mut doors = self.candidates(seeds).into_iter();
        let mut asked = FuturesUnordered::new();
        let mut why = Failure::Away("the cluster has no nodes".into());
        loop {
            if let Some(door) = doors.next() {
                asked.push(async move { self.ask_for_map(&door).await });
            }
            let next = match doors.len() {
                0 => asked.next().await,
                _ => tokio::select! {
                    next = asked.next() => next,
                    () = self.pause(NEXT_NODE) => continue,
                },
            };
            match next {
                Some(Ok((door, ranges))) => {
                    self.topology().replace(ranges);
                    self.prune(seeds, &door);
                    return Ok(());
                }
                Some(Err(failure)) => why = failure,
                None if doors.len() == 0 => return Err(why),
                None => {}
            }
        }
    }

    /// Whom to ask for the map: those that we are connected with, then the others, then those that failed lately.
    fn candidates(&self, seeds: &[Door]) -> Vec<Door> {
        let topology = self.topology();
        let mut doors: HashSet<Door> = topology.nodes.iter().chain(seeds).cloned().collect();
        let suspects = topology.suspects.clone();
        drop(topology);
        let links = self.links();
        doors.extend(links.keys().cloned());
        let mut doors: Vec<Door> = doors.into_iter().collect();
        doors.sort_by_key(|door| (suspects.contains(door), !links.get(door).is_some_and(|l| l.is_open())));
        doors
    }

    async fn ask_for_map(&self, door: &Door) -> Result<(Door, Vec<Range>), Failure> {
        let answer = match self.link(door).call(cmd("CLUSTER").arg("SLOTS")).await {
            Ok(Value::Array(ranges)) => ranges,
            Ok(_) => return Err(Failure::Away(format!("{door} does not say what its slots are"))),
            Err(Failure::Unheard(text)) => return Err(Failure::Away(text)),
            Err(failure) if failure.is("ERR") => {
                return Err(Failure::Away(format!(
                    "{door} is no node of a cluster: use redis:// for one server"
                )));
            }
            Err(failure) => return Err(failure),
        };
        let ranges: Vec<Range> = answer.iter().filter_map(|range| Range::parse(range, door)).collect();
        match ranges.is_empty() {
            true => Err(Failure::Away(format!("the cluster at {door} has no slots yet"))),
            false => Ok((door.clone(), ranges)),
        }
    }

    /// Closes the connections to nodes that have left the cluster.
    fn prune(&self, seeds: &[Door], asked: &Door) {
        let topology = self.topology();
        let keeps = |door: &Door| topology.nodes.contains(door) || seeds.contains(door) || door == asked;
        self.links().retain(|door, _| keeps(door));
    }
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
