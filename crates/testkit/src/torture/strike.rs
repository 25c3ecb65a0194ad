//! One strike of a fault: it waits for a good moment, injects the fault, and heals it.

use std::io;
use std::time::Duration;

use lockkeeper_core::faults::{Deployment, FaultKind};

use super::cell::CellRun;
use super::holder_search::find_holder;
use super::server_fault::SyncFault;
use super::site::{SiteFailure, SiteServers, not_here};
use crate::proxy::{Direction, Fault};
use crate::stop::stop_without_locks;

const MS: fn(u64) -> Duration = Duration::from_millis;

impl CellRun {
    /// Injects the fault once, and heals it. Returns how often it really fired.
    pub(super) fn strike(&mut self) -> Result<u64, SiteFailure> {
        let ttl = self.ttl;
        let longer = self.rng.duration(ttl * 6 / 5, ttl * 2);
        match self.plan.fault {
            FaultKind::HolderKilled => self.kill_holder(),
            FaultKind::HolderStopped => self.stop_holder(longer),
            FaultKind::RuntimeStarved => {
                let victim = self.holder(MS(50)..ttl * 2)?;
                self.clients[victim].starve(longer)?;
                self.clients[victim].wait_for("starved", super::site::PATIENCE)?;
                Ok(1)
            }
            FaultKind::HolderCutOff => self.cut_off(&[Direction::Requests, Direction::Replies], longer),
            FaultKind::OneWayCut => {
                let way = if self.rng.percent(50) { Direction::Requests } else { Direction::Replies };
                self.cut_off(&[way], longer)
            }
            FaultKind::SlowNetwork => self.slow_network(),
            FaultKind::ReplyLost => self.lose_reply(),
            FaultKind::LateReplies => self.hold_messages(),
            FaultKind::StoreKilled => {
                self.holder(MS(0)..ttl)?;
                let outage = self.rng.duration(MS(0), MS(1000));
                self.site.kill_and_restart(outage)?;
                Ok(1)
            }
            FaultKind::PowerCut => self.cut_power(),
            FaultKind::FailOver => {
                self.site.cut_replication()?;
                // The holds of before have ended for the server that takes over, too: it knows nothing of the next one.
                std::thread::sleep(ttl + self.rng.duration(MS(300), MS(700)));
                self.holder(MS(0)..MS(300))?;
                self.site.fail_over(self.rng.duration(MS(0), MS(1000)))?;
                Ok(1)
            }
            FaultKind::StoreClockForward | FaultKind::StoreClockBack => {
                self.holder(MS(0)..ttl)?;
                self.site.jump_clock(if self.plan.fault == FaultKind::StoreClockForward { 1 } else { -1 })?;
                std::thread::sleep(ttl);
                Ok(1)
            }
            FaultKind::DiskFull => self.fill_disk(longer),
            FaultKind::SyncFails => self.bad_syncs("error=EIO", longer),
            // A leader that hangs for longer than an election and a lease.
            FaultKind::SlowDisk => {
                let clustered = matches!(self.site.servers, SiteServers::Cluster(_));
                let delay = if clustered { "delay_enter=6000000" } else { "delay_enter=1500000" };
                self.bad_syncs(delay, if clustered { MS(12_000) } else { longer + MS(2000) })
            }
            FaultKind::ManyWaiters => {
                std::thread::sleep(MS(200));
                Ok(1)
            }
            FaultKind::DataDeleted => {
                self.holder(MS(0)..ttl)?;
                self.site.delete_data()?;
                std::thread::sleep(ttl);
                Ok(1)
            }
            FaultKind::ClientClock => Err(not_here(
                "the clock of a process cannot be set without that of the machine; the laws do it on a virtual clock",
            )),
            FaultKind::ManyLocks | FaultKind::MemoryLimit | FaultKind::MalformedReplies => {
                Err(not_here("the runner does not inject this yet"))
            }
        }
    }

    /// The client that holds the hot lock, for a time in this range; any client if there is none soon.
    fn holder(&mut self, age: std::ops::Range<Duration>) -> io::Result<usize> {
        let lock = format!("{}hot", super::cell::PREFIX);
        let found = find_holder(self.dir.path(), &lock, age, MS(3000))?;
        let named = found.and_then(|proc| self.clients.iter().position(|client| client.proc() == proc));
        Ok(named.unwrap_or_else(|| self.rng.below(self.clients.len() as u64) as usize))
    }

    fn kill_holder(&mut self) -> Result<u64, SiteFailure> {
        let victim = self.holder(MS(50)..self.ttl * 3)?;
        self.kill(victim)?;
        self.start_again(victim)?;
        std::thread::sleep(self.rng.duration(MS(100), self.ttl / 2));
        Ok(1)
    }

    fn stop_holder(&mut self, span: Duration) -> Result<u64, SiteFailure> {
        let victim = self.holder(MS(100)..self.ttl * 3)?;
        // A process that is stopped inside a transaction, or a write to a resource, keeps the file from all others.
        let files: Vec<_> = self.site.database_files().into_iter().chain(self.resource_files()?).collect();
        stop_without_locks(self.clients[victim].pid(), &files);
        std::thread::sleep(span);
        self.clients[victim].resume();
        std::thread::sleep(MS(200));
        Ok(1)
    }

    fn cut_off(&mut self, ways: &[Direction], span: Duration) -> Result<u64, SiteFailure> {
        let victim = self.holder(MS(50)..self.ttl * 3)?;
        for proxy in &self.site.proxies[victim] {
            ways.iter().for_each(|way| proxy.hold(*way));
        }
        std::thread::sleep(span);
        self.site.proxies[victim].iter().for_each(crate::proxy::Proxy::heal);
        std::thread::sleep(MS(300));
        Ok(1)
    }

    fn slow_network(&mut self) -> Result<u64, SiteFailure> {
        let proxies = self.site.proxies.iter().flatten();
        let fired: u64 = proxies.clone().map(crate::proxy::Proxy::fired).sum();
        for proxy in proxies.clone() {
            let nth = 1 + self.rng.below(40);
            proxy.inject(Fault::at_reply(nth).delay(MS(3000)));
            proxy.inject(Fault::at_reply(1).and_every_later_one().delay(MS(100)));
        }
        std::thread::sleep(MS(5000));
        proxies.clone().for_each(crate::proxy::Proxy::heal);
        Ok(proxies.map(crate::proxy::Proxy::fired).sum::<u64>() - fired)
    }

    fn lose_reply(&mut self) -> Result<u64, SiteFailure> {
        let client = self.rng.below(self.site.proxies.len() as u64) as usize;
        let proxies = &self.site.proxies[client];
        let proxy = &proxies[self.rng.below(proxies.len() as u64) as usize];
        let injected = proxy.inject(Fault::at_request(1 + self.rng.below(6)).reset_before_reply());
        std::thread::sleep(self.rng.duration(MS(150), MS(400)));
        Ok(u64::from(injected.fired()))
    }

    /// A request, or a reply, is held for longer than the client waits for it; then it arrives.
    fn hold_messages(&mut self) -> Result<u64, SiteFailure> {
        let client = self.rng.below(self.site.proxies.len() as u64) as usize;
        let proxies = &self.site.proxies[client];
        let proxy = &proxies[self.rng.below(proxies.len() as u64) as usize];
        let nth = 1 + self.rng.below(4);
        let fault = match self.rng.percent(50) {
            true => Fault::at_request(nth).deliver_late(),
            false => Fault::at_reply(nth).hold(),
        };
        let injected = proxy.inject(fault);
        std::thread::sleep(self.rng.duration(MS(1200), MS(1800)));
        injected.release();
        std::thread::sleep(MS(100));
        Ok(u64::from(injected.fired()))
    }

    fn cut_power(&mut self) -> Result<u64, SiteFailure> {
        self.holder(MS(0)..MS(250))?;
        if !matches!(self.site.servers, SiteServers::File(_)) {
            self.site.cut_power()?;
            return Ok(1);
        }
        // The clients run on the host whose power is cut.
        let disk = self.site.disk.as_ref().ok_or_else(|| not_here("no disk"))?;
        disk.cut_power()?;
        (0..self.clients.len()).try_for_each(|client| self.kill(client))?;
        self.site.disk.as_ref().ok_or_else(|| not_here("no disk"))?.power_on()?;
        (0..self.clients.len()).try_for_each(|client| self.start_again(client))?;
        Ok(1)
    }

    fn fill_disk(&mut self, span: Duration) -> Result<u64, SiteFailure> {
        self.site.disk.as_ref().ok_or_else(|| not_here("no disk"))?.fill()?;
        std::thread::sleep(span);
        self.site.disk.as_ref().ok_or_else(|| not_here("no disk"))?.free()?;
        if matches!(self.plan.deployment, Deployment::Etcd | Deployment::EtcdOld) {
            // It does not go on by itself after an operator has made room.
            std::thread::sleep(MS(500));
        }
        self.site.restart_ended();
        Ok(1)
    }

    fn bad_syncs(&mut self, inject: &str, span: Duration) -> Result<u64, SiteFailure> {
        let mut processes = self.site.disk_users();
        if processes.is_empty() {
            processes = vec![self.clients[0].pid()];
        }
        let fault = SyncFault::begin(&processes, inject)?;
        std::thread::sleep(span);
        let hits = fault.end();
        self.site.restart_ended();
        Ok(hits as u64)
    }
}
