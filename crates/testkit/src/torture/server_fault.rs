//! Faults of the servers of a cell: killed, without power, failed over, on another clock, with a bad disk.

use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::reset::run;
use super::site::{SiteServers, TortureSite};
use crate::proxy::Proxy;
use crate::servers::{ClockShim, Server};

impl TortureSite {
    /// The servers, to kill and restart them.
    pub fn servers_mut(&mut self) -> Vec<&mut Server> {
        match &mut self.servers {
            SiteServers::File(_) => Vec::new(),
            SiteServers::Alone(servers) => servers.iter_mut().collect(),
            SiteServers::RedisPair(pair) => vec![pair.primary_mut()],
            SiteServers::PostgresPair(pair) => vec![&mut pair[0]],
            SiteServers::Cluster(cluster) => cluster.nodes_mut().iter_mut().collect(),
        }
    }

    /// Kills all servers that know nothing of each other, or the leader of a cluster, and starts them again after `outage`.
    pub fn kill_and_restart(&mut self, outage: Duration) -> io::Result<()> {
        if let SiteServers::Cluster(cluster) = &mut self.servers {
            let leader = cluster.leader();
            cluster.node_mut(leader).kill9();
            std::thread::sleep(outage);
            cluster.node_mut(leader).restart();
            cluster.settle();
            return Ok(());
        }
        // Of a quorum, a minority: the page of the store says that a majority that forgets lets a second holder in.
        let count = self.servers_mut().len().div_ceil(2).max(1);
        let minority = if count > 1 { count - 1 } else { 1 };
        let mut servers = self.servers_mut();
        servers.iter_mut().take(minority).for_each(|server| server.kill9());
        std::thread::sleep(outage);
        servers.iter_mut().take(minority).for_each(|server| server.restart());
        Ok(())
    }

    /// Starts the servers that have ended, as a supervisor does.
    pub fn restart_ended(&mut self) {
        for server in self.servers_mut() {
            if server.ready().is_err() {
                server.restart();
            }
        }
    }

    /// Cuts the power of the host of the servers, and turns it on again.
    pub fn cut_power(&mut self) -> io::Result<()> {
        let no_disk = || io::Error::other("the servers have no disk of their own");
        self.disk.as_ref().ok_or_else(no_disk)?.cut_power()?;
        self.servers_mut().into_iter().for_each(Server::kill9);
        self.disk.as_ref().ok_or_else(no_disk)?.power_on()?;
        self.servers_mut().into_iter().for_each(Server::restart);
        Ok(())
    }

    /// From here on the server that will take over gets no more writes.
    pub fn cut_replication(&mut self) -> io::Result<()> {
        match &self.servers {
            SiteServers::RedisPair(pair) => {
                pair.cut_replication();
                Ok(())
            }
            SiteServers::PostgresPair(pair) => {
                sql(pair[1].addr(), "ALTER SYSTEM SET primary_conninfo = ''")?;
                sql(pair[1].addr(), "SELECT pg_reload_conf()")
            }
            _ => Ok(()),
        }
    }

    /// The leader fails, and another server takes over; clients reach it where they reached the old one.
    pub fn fail_over(&mut self, outage: Duration) -> io::Result<()> {
        let next = match &mut self.servers {
            SiteServers::RedisPair(pair) => {
                pair.promote();
                pair.replica().addr()
            }
            SiteServers::PostgresPair(pair) => {
                pair[0].kill9();
                sql(pair[1].addr(), "SELECT pg_promote()")?;
                pair[1].addr()
            }
            _ => return self.kill_and_restart(outage),
        };
        self.proxies.iter().flatten().for_each(|proxy: &Proxy| proxy.redirect(next));
        Ok(())
    }

    /// Moves the wall clock of all servers.
    pub fn jump_clock(&self, hours: i64) -> io::Result<()> {
        let clock =
            self.clock.as_ref().ok_or_else(|| io::Error::other("the servers have no clock of their own"))?;
        clock.jump(hours * 3600 * ClockShim::SECOND);
        Ok(())
    }

    /// The processes whose disk is made bad: the servers, of a cluster its leader.
    pub fn disk_users(&self) -> Vec<u32> {
        match &self.servers {
            SiteServers::File(_) => Vec::new(),
            SiteServers::Alone(servers) => servers.iter().filter_map(Server::pid).collect(),
            SiteServers::RedisPair(pair) => pair.primary().pid().into_iter().collect(),
            SiteServers::PostgresPair(pair) => pair[0].pid().into_iter().collect(),
            SiteServers::Cluster(cluster) => cluster.nodes()[cluster.leader()].pid().into_iter().collect(),
        }
    }
}

fn sql(addr: SocketAddr, text: &str) -> io::Result<()> {
    let (host, port) = (addr.ip().to_string(), addr.port().to_string());
    run("psql", &["-h", &host, "-p", &port, "-U", "postgres", "-qtAc", text])
}

/// `strace`, which makes the syncs of processes fail, or slow. Dropping it ends that.
pub(super) struct SyncFault {
    strace: Child,
    said: Option<std::thread::JoinHandle<usize>>,
}

impl SyncFault {
    /// Begins: `inject` is how strace says it, such as `error=EIO` or `delay_enter=2000000`.
    pub fn begin(processes: &[u32], inject: &str) -> io::Result<SyncFault> {
        let mut command = Command::new("strace");
        command.args([
            "-f",
            "-e",
            "trace=fsync,fdatasync",
            "-e",
            &format!("inject=fsync,fdatasync:{inject}"),
        ]);
        for process in processes {
            for thread in tree(*process) {
                command.args(["-p", &thread.to_string()]);
            }
        }
        let mut strace = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        let lines = BufReader::new(strace.stderr.take().ok_or(io::ErrorKind::BrokenPipe)?).lines();
        let said = std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .filter(|line| line.contains("INJECTED") || line.contains("DELAYED"))
                .count()
        });
        Ok(SyncFault { strace, said: Some(said) })
    }

    /// Ends it, and returns how many syncs it hit.
    pub fn end(mut self) -> usize {
        self.interrupt();
        self.said.take().and_then(|said| said.join().ok()).unwrap_or(0)
    }

    fn interrupt(&mut self) {
        if let Some(pid) = i32::try_from(self.strace.id()).ok().and_then(Pid::from_raw) {
            _ = kill_process(pid, Signal::INT);
        }
        _ = self.strace.wait();
    }
}

impl Drop for SyncFault {
    fn drop(&mut self) {
        self.interrupt();
    }
}

/// A process and its children: PostgreSQL syncs in processes of their own.
fn tree(root: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{root}/task/{root}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    std::iter::once(root).chain(children).collect()
}
