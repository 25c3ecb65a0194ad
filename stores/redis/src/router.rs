//! Chooses the server of a request: the only one, the primary that the sentinels report, or the node that serves the slot.
//! Follows the redirects of a cluster, and sends a request again only where the server has refused it.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::IgnorePoison;
use redis::{Cmd, Pipeline, Value, cmd};
use tokio::runtime::Handle;

use crate::config::Servers;
use crate::connection::{ConnectHandshake, ConnectOptions, Connection, Endpoint, Listener};
use crate::error::Failure;
use crate::sentinel;
use crate::topology::{SlotRange, Topology, no_owner, parse_endpoint};

/// The replies to a pipeline.
pub type Replies = Vec<Result<Value, Failure>>;

/// The connections of a store to its servers, and what it knows about them.
pub struct Router {
    servers: Servers,
    access: Arc<ConnectOptions>,
    io: Handle,
    listener: Option<Listener>,
    handshake: Option<ConnectHandshake>,
    connections: Mutex<HashMap<Endpoint, Arc<Connection>>>,
    sentinels: Vec<Arc<Connection>>,
    /// Shared by all routers of a store, so that a grant and its release go to the same server.
    topology: Arc<Mutex<Topology>>,
    /// Held by the task that reads the topology; other tasks wait for its result.
    reading: tokio::sync::Mutex<()>,
    /// The epoch of the topology at which this router last closed connections.
    pruned_at: AtomicU64,
}

/// After this time without a reply the router asks one more node for the slot map.
const NEXT_NODE: Duration = Duration::from_millis(50);
/// The longest pause before a redirected request is sent again.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// One command, or a pipeline whose first command decides which node it is for.
enum Payload<'a> {
    One(&'a Cmd),
    Many(&'a Pipeline),
}

impl Payload<'_> {
    async fn send(&self, connection: &Connection, as_asking: bool) -> Result<Replies, Failure> {
        match self {
            Payload::One(command) if !as_asking => Ok(vec![connection.call(command).await]),
            Payload::Many(commands) if !as_asking => connection.calls(commands).await,
            _ => {
                let mut all = Pipeline::new();
                all.cmd("ASKING");
                match self {
                    Payload::One(command) => _ = all.add_command((*command).clone()),
                    Payload::Many(commands) => {
                        commands.cmd_iter().for_each(|command| _ = all.add_command(command.clone()));
                    }
                }
                let mut replies = connection.calls(&all).await?;
                replies.remove(0)?;
                Ok(replies)
            }
        }
    }
}

/// How the router handles a request whose keys are on two nodes, because their slot is being migrated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSplitKeys {
    /// Sends it again until the timeout: the migration may end soon.
    Retry,
    /// Returns the failure at once: the caller has scripts of one key (`slot_migration.rs`).
    Report,
}

/// How often a request was redirected, and until when the router sends it again.
struct RedirectState {
    split: OnSplitKeys,
    until: Instant,
    moved: u32,
    asked: u32,
    pauses: u32,
}

impl Router {
    pub fn new(
        servers: Servers,
        access: ConnectOptions,
        io: Handle,
        listener: Option<Listener>,
        handshake: Option<ConnectHandshake>,
    ) -> Self {
        let sentinels = match &servers {
            Servers::Sentinel { sentinels, user, password, .. } => {
                // Sentinels have no databases, and users of their own.
                let (user, password) = (user.clone(), password.clone());
                let login = Arc::new(ConnectOptions { db: 0, user, password, ..access.clone() });
                let connection =
                    |endpoint: &Endpoint| Connection::new(endpoint.clone(), login.clone(), io.clone(), None);
                sentinels.iter().map(|endpoint| Arc::new(connection(endpoint))).collect()
            }
            _ => Vec::new(),
        };
        Router {
            servers,
            access: Arc::new(access),
            io,
            listener,
            handshake,
            connections: Mutex::default(),
            sentinels,
            topology: Arc::default(),
            reading: tokio::sync::Mutex::default(),
            pruned_at: AtomicU64::new(0),
        }
    }

    /// A router with connections of its own to the same servers.
    pub fn sibling(&self) -> Self {
        Router {
            servers: self.servers.clone(),
            access: self.access.clone(),
            io: self.io.clone(),
            listener: None,
            handshake: None,
            connections: Mutex::default(),
            sentinels: self.sentinels.clone(),
            topology: self.topology.clone(),
            reading: tokio::sync::Mutex::default(),
            pruned_at: AtomicU64::new(0),
        }
    }

    pub fn is_cluster(&self) -> bool {
        matches!(self.servers, Servers::Cluster(_))
    }

    /// The thread that runs the connections.
    pub fn io(&self) -> &Handle {
        &self.io
    }

    fn topology(&self) -> MutexGuard<'_, Topology> {
        self.topology.lock().ignore_poison()
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<Endpoint, Arc<Connection>>> {
        self.connections.lock().ignore_poison()
    }

    fn connection_to(&self, endpoint: &Endpoint) -> Arc<Connection> {
        let make = || {
            let connection = Connection::new(
                endpoint.clone(),
                self.access.clone(),
                self.io.clone(),
                self.listener.clone(),
            );
            Arc::new(match &self.handshake {
                Some(handshake) => connection.with_handshake(handshake.clone()),
                None => connection,
            })
        };
        self.connections().entry(endpoint.clone()).or_insert_with(make).clone()
    }

    /// The server of a slot, as far as the client knows.
    async fn server_of(&self, slot: u16) -> Result<Arc<Connection>, Failure> {
        match &self.servers {
            Servers::Single(endpoint) => Ok(self.connection_to(endpoint)),
            Servers::Sentinel { name, .. } => {
                let primary = self.topology().primary.clone();
                match primary {
                    Some(primary) => Ok(self.connection_to(&primary)),
                    None => self.find_primary(name).await,
                }
            }
            Servers::Cluster(seeds) => {
                let (known, epoch) = self.topology().trusted(slot);
                if let Some(endpoint) = known {
                    return Ok(self.connection_to(&endpoint));
                }
                let read = self.read_slot_map(seeds, epoch).await;
                // A node that is unreachable for now may still serve the slot, also while no node sends a slot map.
                match (self.topology().node_of(slot), read) {
                    (Some(endpoint), _) => Ok(self.connection_to(&endpoint)),
                    (None, Err(failure)) => Err(failure),
                    (None, Ok(())) => Err(no_owner(slot)),
                }
            }
        }
    }

    /// The endpoints of the servers that take writes, as far as the client knows.
    pub fn serving(&self) -> Vec<Endpoint> {
        let topology = self.topology();
        match &self.servers {
            Servers::Single(endpoint) => vec![endpoint.clone()],
            Servers::Sentinel { .. } => topology.primary.iter().cloned().collect(),
            Servers::Cluster(_) => {
                let endpoints: HashSet<&Arc<Endpoint>> = topology.slots.iter().flatten().collect();
                let mut endpoints: Vec<Endpoint> =
                    endpoints.into_iter().map(|endpoint| (**endpoint).clone()).collect();
                endpoints.sort_by_key(Endpoint::to_string);
                endpoints
            }
        }
    }

    /// Connections to all servers that take writes.
    pub async fn all(&self) -> Result<Vec<Arc<Connection>>, Failure> {
        let Servers::Cluster(seeds) = &self.servers else { return Ok(vec![self.server_of(0).await?]) };
        if self.topology().slots.is_empty() {
            self.read_slot_map(seeds, 0).await?;
        }
        Ok(self.serving().iter().map(|endpoint| self.connection_to(endpoint)).collect())
    }

    /// Sends PING to each sentinel.
    pub async fn ping_sentinels(&self) -> Vec<(Endpoint, Result<Value, Failure>)> {
        let ping = &cmd("PING");
        let all = self.sentinels.iter();
        join_all(all.map(|sentinel| async move { (sentinel.endpoint().clone(), sentinel.call(ping).await) }))
            .await
    }

    /// Sends one command to the server of `slot`.
    pub async fn call(&self, slot: u16, command: &Cmd) -> Result<Value, Failure> {
        self.call_when(slot, command, OnSplitKeys::Retry).await
    }

    pub async fn call_when(&self, slot: u16, command: &Cmd, split: OnSplitKeys) -> Result<Value, Failure> {
        let answer = self.send(slot, &Payload::One(command), split).await?.pop();
        answer.unwrap_or_else(|| Err(Failure::NoReply("the reply is missing".into())))
    }

    /// Sends a pipeline to the server of `slot`. If that server redirects the first command, the router sends all of them to
    /// the other node.
    pub async fn calls(
        &self,
        slot: u16,
        commands: &Pipeline,
        split: OnSplitKeys,
    ) -> Result<Replies, Failure> {
        self.send(slot, &Payload::Many(commands), split).await
    }

    /// Subscribes at any server that replies, and cancels the subscriptions at the others, which would bring every message once more.
    pub async fn subscribe_at_one(&self, channel: &str) -> Result<(), Failure> {
        let here = self.call_some(cmd("SUBSCRIBE").arg(channel)).await?.0;
        let others: Vec<Arc<Connection>> = self.connections().values().cloned().collect();
        let others = others.iter().filter(|other| other.endpoint() != here.endpoint() && other.is_open());
        let cancel = &cmd("UNSUBSCRIBE").arg(channel).to_owned();
        // A connection on which this fails is about to be closed.
        join_all(others.map(|other| other.call(cancel))).await;
        Ok(())
    }

    /// Sends one command to any server that replies, connected servers first.
    pub async fn call_any(&self, command: &Cmd) -> Result<Value, Failure> {
        self.call_some(command).await.map(|(_, reply)| reply)
    }

    async fn call_some(&self, command: &Cmd) -> Result<(Arc<Connection>, Value), Failure> {
        let mut connections = self.all().await?;
        let suspects = self.topology().suspects.clone();
        connections
            .sort_by_key(|connection| (suspects.contains(connection.endpoint()), !connection.is_open()));
        let mut answer = Err(Failure::NotSent("there are no servers".into()));
        for connection in connections {
            answer = connection.call(command).await.map(|reply| (connection.clone(), reply));
            match &answer {
                Err(failure @ (Failure::NotSent(_) | Failure::NoReply(_))) => {
                    self.mark_suspect(connection.endpoint(), failure)
                }
                _ => break,
            }
        }
        answer
    }

    async fn send(&self, slot: u16, payload: &Payload<'_>, split: OnSplitKeys) -> Result<Replies, Failure> {
        let until = Instant::now() + self.access.timeout;
        let mut redirects = RedirectState { split, until, moved: 0, asked: 0, pauses: 0 };
        let (mut connection, mut as_asking) = (self.server_of(slot).await?, false);
        loop {
            let replies = match payload.send(&connection, as_asking).await {
                Ok(replies) => replies,
                Err(failure) => {
                    self.mark_suspect(connection.endpoint(), &failure);
                    return Err(failure);
                }
            };
            for failure in replies.iter().filter_map(|answer| answer.as_ref().err()) {
                self.mark_suspect(connection.endpoint(), failure);
            }
            let Some(Err(failure)) = replies.first() else { return Ok(replies) };
            match self.redirect(slot, &connection, failure, &mut redirects).await? {
                Some(next) => (connection, as_asking) = next,
                None => return Ok(replies),
            }
        }
    }

    /// The node to which a request is sent next, and whether behind `ASKING`; `None` if the failure is final.
    async fn redirect(
        &self,
        slot: u16,
        from: &Connection,
        failure: &Failure,
        redirects: &mut RedirectState,
    ) -> Result<Option<(Arc<Connection>, bool)>, Failure> {
        let Failure::Rejected { code, detail } = failure else { return Ok(None) };
        let there =
            || detail.split_whitespace().last().and_then(|text| parse_endpoint(text, from.endpoint()));
        match (code.as_str(), &self.servers) {
            ("MOVED", Servers::Cluster(seeds)) => {
                let Some(endpoint) = there() else { return Ok(None) };
                self.topology().set_node(slot, endpoint.clone());
                redirects.moved += 1;
                if redirects.moved == 1 {
                    return Ok(Some((self.connection_to(&endpoint), false)));
                }
                // The nodes do not agree on the slot's owner, or it has none: gossip has to settle that first.
                if !self.pause_before_next(redirects).await {
                    return Err(no_owner(slot));
                }
                let epoch = self.topology().epoch;
                _ = self.read_slot_map(seeds, epoch).await;
                Ok(Some((self.server_of(slot).await?, false)))
            }
            ("ASK", Servers::Cluster(_)) => {
                redirects.asked += 1;
                if redirects.asked > 1 && !self.pause_before_next(redirects).await {
                    return Ok(None);
                }
                Ok(there().map(|endpoint| (self.connection_to(&endpoint), true)))
            }
            // Some keys of the request are on this node and some on the other.
            ("TRYAGAIN", Servers::Cluster(_))
                if redirects.split == OnSplitKeys::Retry && self.pause_before_next(redirects).await =>
            {
                Ok(Some((self.server_of(slot).await?, false)))
            }
            _ => Ok(None),
        }
    }

    /// Waits with back-off. Returns whether there is time left to send the request again.
    async fn pause_before_next(&self, redirects: &mut RedirectState) -> bool {
        let pause = (Duration::from_millis(5) * 2_u32.pow(redirects.pauses.min(10))).min(LONGEST_PAUSE);
        redirects.pauses += 1;
        let left = redirects.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        self.pause(pause.min(left)).await;
        true
    }

    /// Sleeps. The timer runs on the store's own thread, because the caller's runtime may have no timers.
    pub async fn pause(&self, time: Duration) {
        _ = self.io.spawn(async move { tokio::time::sleep(time).await }).await;
    }

    /// Marks a server as suspect if the failure may mean that the topology is out of date.
    fn mark_suspect(&self, endpoint: &Endpoint, failure: &Failure) {
        let stale = match failure {
            Failure::NotSent(_) | Failure::NoReply(_) => true,
            Failure::Rejected { code, .. } => matches!(code.as_str(), "READONLY" | "CLUSTERDOWN"),
        };
        if stale {
            let mut topology = self.topology();
            topology.suspects.insert(endpoint.clone());
            if topology.primary.as_ref() == Some(endpoint) {
                topology.primary = None;
            }
        }
    }

    /// Asks the sentinels again which server is the primary: an old primary that they cannot reach may still reply to this client.
    pub async fn follow_primary(&self) {
        let Servers::Sentinel { name, .. } = &self.servers else { return };
        let _reading = self.reading.lock().await;
        if let Err(failure) = self.query_sentinels(name).await {
            tracing::debug!(
                ?failure,
                "the sentinels report no primary; the store keeps the one it knows and asks again at the next poll"
            );
        }
    }

    async fn find_primary(&self, name: &str) -> Result<Arc<Connection>, Failure> {
        let _reading = self.reading.lock().await;
        let known = self.topology().primary.clone();
        match known {
            Some(primary) => Ok(self.connection_to(&primary)),
            None => self.query_sentinels(name).await,
        }
    }

    async fn query_sentinels(&self, name: &str) -> Result<Arc<Connection>, Failure> {
        let sentinel::SentinelReport { primary: reported, majority } =
            sentinel::query_all(&self.sentinels, name).await?;
        let (known, newest) = {
            let topology = self.topology();
            (topology.primary.clone(), topology.primary_epoch)
        };
        if reported.epoch < newest && !majority {
            let behind = || Failure::NotSent("the sentinels that reply know an older epoch only".into());
            return known.map(|primary| self.connection_to(&primary)).ok_or_else(behind);
        }
        let connection = self.connection_to(&reported.endpoint);
        if known.as_ref() == Some(&reported.endpoint) {
            self.topology().primary_epoch = reported.epoch;
            return Ok(connection);
        }
        match sentinel::is_primary(&connection).await {
            Ok(true) => {}
            Ok(false) => {
                return Err(Failure::NotSent(format!("{} is not the primary any more", reported.endpoint)));
            }
            Err(Failure::NoReply(text)) => return Err(Failure::NotSent(text)),
            Err(failure) => return Err(failure),
        }
        if let Some(old) = &known {
            tracing::warn!(%old, new = %reported.endpoint, "the sentinels report another primary; the store uses it from now on");
        }
        self.topology().set_primary(reported.endpoint, reported.epoch);
        self.prune();
        Ok(connection)
    }

    /// Reads the slot map from the first node that sends one, unless it was read since `epoch`. Connected nodes come first, and
    /// the router asks the next one after [`NEXT_NODE`], so an unreachable node delays no caller for long.
    async fn read_slot_map(&self, seeds: &[Endpoint], epoch: u64) -> Result<(), Failure> {
        let _reading = self.reading.lock().await;
        if self.topology().epoch > epoch {
            return Ok(());
        }
        let mut endpoints = self.candidates(seeds).into_iter();
        let mut queries = FuturesUnordered::new();
        let mut why = Failure::NotSent("the cluster has no nodes".into());
        loop {
            if let Some(endpoint) = endpoints.next() {
                queries.push(async move { self.fetch_slot_map(&endpoint).await });
            }
            let next = match endpoints.len() {
                0 => queries.next().await,
                _ => tokio::select! {
                    next = queries.next() => next,
                    () = self.pause(NEXT_NODE) => continue,
                },
            };
            match next {
                Some(Ok((endpoint, ranges))) => {
                    self.topology().replace(ranges, endpoint);
                    self.prune();
                    return Ok(());
                }
                Some(Err(failure)) => why = failure,
                None if endpoints.len() == 0 => return Err(why),
                None => {}
            }
        }
    }

    /// The nodes to ask for the slot map: connected ones, then the others, then suspects.
    fn candidates(&self, seeds: &[Endpoint]) -> Vec<Endpoint> {
        let topology = self.topology();
        let mut endpoints: HashSet<Endpoint> = topology.nodes.iter().chain(seeds).cloned().collect();
        let suspects = topology.suspects.clone();
        drop(topology);
        let connections = self.connections();
        endpoints.extend(connections.keys().cloned());
        let mut endpoints: Vec<Endpoint> = endpoints.into_iter().collect();
        endpoints.sort_by_key(|endpoint| {
            (suspects.contains(endpoint), !connections.get(endpoint).is_some_and(|l| l.is_open()))
        });
        endpoints
    }

    async fn fetch_slot_map(&self, endpoint: &Endpoint) -> Result<(Endpoint, Vec<SlotRange>), Failure> {
        let answer = match self.connection_to(endpoint).call(cmd("CLUSTER").arg("SLOTS")).await {
            Ok(Value::Array(ranges)) => ranges,
            Ok(_) => return Err(Failure::NotSent(format!("{endpoint} does not report its slots"))),
            Err(Failure::NoReply(text)) => return Err(Failure::NotSent(text)),
            Err(failure) if failure.is("ERR") => {
                return Err(Failure::NotSent(format!(
                    "{endpoint} is no node of a cluster: use redis:// for one server"
                )));
            }
            Err(failure) => return Err(failure),
        };
        let ranges: Vec<SlotRange> =
            answer.iter().filter_map(|range| SlotRange::parse(range, endpoint)).collect();
        match ranges.is_empty() {
            true => Err(Failure::NotSent(format!("the cluster at {endpoint} has no slots yet"))),
            false => Ok((endpoint.clone(), ranges)),
        }
    }

    /// Closes the connections to servers that have left the topology since the last call. Each router of a store has connections of
    /// its own, and another one may have read the topology.
    pub fn prune(&self) {
        let topology = self.topology();
        if self.pruned_at.swap(topology.epoch, Ordering::Relaxed) == topology.epoch {
            return;
        }
        let keeps = |endpoint: &Endpoint| match &self.servers {
            Servers::Single(_) => true,
            Servers::Sentinel { .. } => topology.primary.as_ref().is_none_or(|primary| primary == endpoint),
            Servers::Cluster(seeds) => topology.nodes.contains(endpoint) || seeds.contains(endpoint),
        };
        self.connections().retain(|endpoint, _| keeps(endpoint));
    }
}
