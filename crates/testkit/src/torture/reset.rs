//! An operator deletes the data of a store, with the tools of that store.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use lockkeeper_core::faults::Deployment;

use super::site::{SiteServers, TortureSite};
use crate::servers::redis_call;

impl TortureSite {
    /// Deletes all locks and counters.
    pub fn delete_data(&self) -> io::Result<()> {
        if let SiteServers::File(_) = self.servers {
            return self.database_files().iter().try_for_each(|file| delete_file(file));
        }
        for addr in self.addrs() {
            match self.deployment {
                Deployment::Postgres => run(
                    "psql",
                    &[
                        "-h",
                        &addr.ip().to_string(),
                        "-p",
                        &addr.port().to_string(),
                        "-U",
                        "postgres",
                        "-qc",
                        "TRUNCATE lockkeeper.lock",
                    ],
                )?,
                Deployment::Etcd | Deployment::EtcdOld => {
                    run("etcdctl", &[&format!("--endpoints=http://{addr}"), "del", "--prefix", "lock/"])?;
                }
                Deployment::ZooKeeper | Deployment::ZooKeeperOld => delete_nodes(addr)?,
                _ => _ = redis_call(addr, &["FLUSHALL"])?,
            }
        }
        Ok(())
    }
}

fn delete_file(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// The locks of Lockkeeper are below `/locks`. Clients delete and create nodes meanwhile, which ends the command: it runs until it succeeds.
fn delete_nodes(addr: SocketAddr) -> io::Result<()> {
    let jars = "/usr/share/java/zookeeper.jar:/usr/share/java/slf4j-nop.jar:/usr/share/java/commons-cli.jar";
    let main = "org.apache.zookeeper.ZooKeeperMain";
    let delete = || run("java", &["-cp", jars, main, "-server", &addr.to_string(), "deleteall", "/locks"]);
    (0..4).map(|_| delete()).find(Result::is_ok).unwrap_or_else(delete)
}

pub(super) fn run(program: &str, args: &[&str]) -> io::Result<()> {
    let output = Command::new(program).args(args).env("ETCDCTL_API", "3").output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("{program}: {said}")))
}
