//! Servers on networks of their own, so that a test can cut one off from its peers and its clients, both ways.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::process::Launch;
use super::{Skip, demand, require};
use crate::port::try_claim;

/// A few islands that reach each other, and the test, over one bridge. It needs root, and goes when the last is dropped.
#[derive(Debug)]
pub struct NetNamespaces {
    program: PathBuf,
    /// The process and a number: part of all names, so that a later test can find and remove the remains of a killed one.
    id: String,
    net: [u8; 3],
    // Dropped last: until then no other test may use the network.
    _claim: File,
    count: u8,
}

/// One of them.
#[derive(Clone, Debug)]
pub struct NetNamespace {
    sea: Arc<NetNamespaces>,
    nth: u8,
}

impl NetNamespaces {
    /// Makes so many.
    ///
    /// # Errors
    /// [`Skip`] if the tests are to run without `root` or `iproute2`.
    ///
    /// # Panics
    /// If the kernel does not do it.
    pub fn raise(count: u8) -> Result<Vec<NetNamespace>, Skip> {
        demand("root", rustix::process::geteuid().is_root(), "to be run by root")?;
        let program = require("iproute2", "ip", "iproute2")?;
        static NEXT: AtomicU8 = AtomicU8::new(0);
        sweep();
        let id = format!("{:06x}{:02x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let (net, _claim) = free_net();
        let sea = Arc::new(NetNamespaces { program, net, _claim, id, count });
        let bridge = sea.bridge();
        ip(&["link", "add", &bridge, "type", "bridge"]);
        ip(&["addr", "add", &format!("{}/24", sea.addr(254)), "dev", &bridge]);
        ip(&["link", "set", &bridge, "up"]);
        let islands: Vec<NetNamespace> =
            (0..count).map(|nth| NetNamespace { sea: sea.clone(), nth }).collect();
        islands.iter().for_each(NetNamespace::rise);
        Ok(islands)
    }

    fn bridge(&self) -> String {
        format!("lkb{}", self.id)
    }

    fn addr(&self, last: u8) -> Ipv4Addr {
        let [a, b, c] = self.net;
        Ipv4Addr::new(a, b, c, last)
    }
}

impl Drop for NetNamespaces {
    fn drop(&mut self) {
        for nth in 0..self.count {
            try_ip(&["netns", "del", &format!("lkn{}{nth}", self.id)]);
        }
        try_ip(&["link", "del", &self.bridge()]);
    }
}

impl NetNamespace {
    /// Its address.
    pub fn addr(&self) -> Ipv4Addr {
        self.sea.addr(self.nth + 1)
    }

    /// Nothing goes in or out any more, and no peer notices.
    pub fn cut(&self) {
        ip(&["link", "set", &self.link(), "down"]);
    }

    /// Undoes [`NetNamespace::cut`].
    pub fn mend(&self) {
        ip(&["link", "set", &self.link(), "up"]);
    }

    /// Runs something there instead of here.
    pub fn launch(&self, launch: Launch) -> Launch {
        let words = ["netns".into(), "exec".into(), self.space().into(), launch.program.into_os_string()];
        let args = words.into_iter().chain(launch.args).collect();
        Launch { program: self.sea.program.clone(), args, ..launch }
    }

    fn space(&self) -> String {
        format!("lkn{}{}", self.sea.id, self.nth)
    }

    fn link(&self) -> String {
        format!("lkv{}{}", self.sea.id, self.nth)
    }

    fn rise(&self) {
        let (space, link, addr) = (self.space(), self.link(), format!("{}/24", self.addr()));
        ip(&["netns", "add", &space]);
        ip(&["link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &space]);
        ip(&["link", "set", &link, "master", &self.sea.bridge(), "up"]);
        ip(&["-n", &space, "link", "set", "lo", "up"]);
        ip(&["-n", &space, "addr", "add", &addr, "dev", "eth0"]);
        ip(&["-n", &space, "link", "set", "eth0", "up"]);
    }
}

/// One of the networks that are set aside for tests (RFC 2544), which no test uses, and the reservation of it. Without the claim two
/// clusters that start at once would both find it free, and only one of them could be reached.
fn free_net() -> ([u8; 3], File) {
    let start = std::process::id() as u8;
    let free = |c: u8| {
        let claim =
            try_claim(&format!("net-{c}")).expect("networks can be claimed in the temporary directory")?;
        let unused = try_ip(&["route", "show", &format!("198.18.{c}.0/24")])?.is_empty();
        unused.then_some(([198, 18, c], claim))
    };
    let found = (0..=u8::MAX).map(|offset| start.wrapping_add(offset)).find_map(free);
    found.expect("one of 256 networks is free")
}

/// Removes what tests left that were killed.
fn sweep() {
    let dead = |name: &str| {
        let id = name.strip_prefix("lkn").or_else(|| name.strip_prefix("lkb"))?.get(..6)?;
        let pid = u32::from_str_radix(id, 16).ok()?;
        (!Path::new(&format!("/proc/{pid}")).exists()).then_some(())
    };
    let names = |dir: &str| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    for space in names("/run/netns").iter().filter(|name| dead(name).is_some()) {
        try_ip(&["netns", "del", space]);
    }
    for link in names("/sys/class/net").iter().filter(|name| dead(name).is_some()) {
        try_ip(&["link", "del", link]);
    }
}

fn ip(args: &[&str]) {
    assert!(try_ip(args).is_some(), "ip {} did not work", args.join(" "));
}

fn try_ip(args: &[&str]) -> Option<String> {
    let done = Command::new("ip").args(args).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").output().ok()?;
    if !done.status.success() {
        eprintln!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&done.stderr).trim());
        return None;
    }
    Some(String::from_utf8_lossy(&done.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Three clusters that started at once had one network: the servers of two of them could not be reached, and "did not start".
    #[test]
    fn islands_that_are_raised_at_once_have_networks_of_their_own() {
        let raising: Vec<_> = (0..6).map(|_| std::thread::spawn(|| NetNamespaces::raise(1))).collect();
        let raised: Vec<_> = raising.into_iter().map(|one| one.join().expect("it is raised")).collect();
        let Ok(raised) = raised.into_iter().collect::<Result<Vec<_>, Skip>>() else { return };
        let nets: HashSet<[u8; 3]> = raised.iter().map(|islands| islands[0].sea.net).collect();
        assert_eq!(nets.len(), raised.len(), "{nets:?}");
    }
}
