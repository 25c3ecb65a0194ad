//! What the tests on real servers share.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper_core::{Result, Store};
use lockkeeper_host::SystemClock;
use lockkeeper_zookeeper::{Options, ZooKeeperStore};
use zookeeper_client::Client;

pub async fn try_open(url: &str) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(ZooKeeperStore::open(Options::from_url(url)?).await?))
}

pub async fn open(hosts: impl std::fmt::Display) -> Arc<dyn Store> {
    try_open(&format!("zk://{hosts}")).await.expect("it opens")
}

pub fn keeper(store: &Arc<dyn Store>) -> Lockkeeper {
    Lockkeeper::with_store(store.clone(), Arc::new(SystemClock))
}

/// A client without restrictions.
pub async fn admin(addr: SocketAddr) -> Client {
    Client::connect(&addr.to_string()).await.expect("a session")
}

/// All nodes below a path and the path itself, parents first.
pub async fn tree(admin: &Client, path: &str) -> Vec<String> {
    let (mut found, mut next) = (Vec::new(), vec![path.to_owned()]);
    while let Some(path) = next.pop() {
        let Ok(children) = admin.list_children(&path).await else { continue };
        next.extend(children.iter().map(|child| format!("{}/{child}", path.trim_end_matches('/'))));
        found.push(path);
    }
    found
}

/// Deletes a path and everything below it.
pub async fn wipe(admin: &Client, path: &str) {
    while !tree(admin, path).await.is_empty() {
        for node in tree(admin, path).await.iter().rev() {
            _ = admin.delete(node, None).await;
        }
    }
}

/// The reply of a server to a four-letter word.
pub fn four_letter(addr: SocketAddr, word: &str) -> String {
    let mut stream = TcpStream::connect(addr).expect("a connection");
    stream.write_all(word.as_bytes()).expect("a word");
    let mut answer = String::new();
    _ = stream.read_to_string(&mut answer);
    answer
}

/// A number in a file. To add one, a test reads it, sleeps, and writes it: two holders at once lose a count.
pub struct Counter(PathBuf);

impl Counter {
    pub fn new(dir: &std::path::Path) -> Counter {
        let path = dir.join("counter");
        std::fs::write(&path, "0").expect("a counter");
        Counter(path)
    }

    pub fn path(&self) -> &std::path::Path {
        &self.0
    }

    pub fn get(&self) -> u64 {
        std::fs::read_to_string(&self.0).unwrap().trim().parse().expect("a number")
    }

    pub async fn add_one(&self) {
        let n = self.get();
        tokio::time::sleep(Duration::from_millis(2)).await;
        std::fs::write(&self.0, (n + 1).to_string()).expect("a counter");
    }
}

/// Ends a session as an administrator can: with its id and its password, which the server derives from the id.
pub fn close_session(addr: SocketAddr, id: i64) {
    let mut stream = TcpStream::connect(addr).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a limit");
    let mut connect = Vec::new();
    connect.extend(0_i32.to_be_bytes());
    connect.extend(0_i64.to_be_bytes());
    connect.extend(4000_i32.to_be_bytes());
    connect.extend(id.to_be_bytes());
    connect.extend(16_i32.to_be_bytes());
    connect.extend(password(id));
    connect.push(0);
    let close = [1_i32.to_be_bytes(), (-11_i32).to_be_bytes()].concat();
    for message in [connect, close] {
        // The server may close the connection: the session is gone then, or its client has resumed it.
        _ = stream.write_all(&(message.len() as i32).to_be_bytes());
        _ = stream.write_all(&message);
    }
    _ = stream.read_to_end(&mut Vec::new());
}

/// Java's `new Random(id ^ 0xB3415C00L).nextBytes(16)`.
fn password(id: i64) -> [u8; 16] {
    const MULTIPLIER: u64 = 0x5_DEEC_E66D;
    let mask = (1_u64 << 48) - 1;
    let mut seed = (id as u64 ^ 0xB341_5C00 ^ MULTIPLIER) & mask;
    let mut bytes = [0; 16];
    for four in bytes.chunks_mut(4) {
        seed = seed.wrapping_mul(MULTIPLIER).wrapping_add(0xB) & mask;
        let n = (seed >> 16) as u32;
        four.copy_from_slice(&n.to_le_bytes());
    }
    bytes
}
