//! Supervises a running command: passes signals on to it, and ends it before its lease ends.

use std::pin::Pin;
use std::time::Duration;

use lockkeeper::{BootInstant, Clock, SystemClock};
use lockkeeper_host::sleep_until;
use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use super::lease::CommandLease;
use super::terminal::Terminal;
use super::{CommandProcess, ProcessChange};
use crate::signals::SignalStream;

/// How long before the deadline of the lease each step happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeadTimes {
    /// The supervisor sends TERM.
    pub term: Duration,
    /// The supervisor sends KILL.
    pub kill: Duration,
    /// The watchdog kills, if the supervisor has not.
    pub watchdog: Duration,
}

impl LeadTimes {
    /// `grace`, but never more than a quarter of the time there is at most. `lease`: of which the deadline is the end.
    pub fn new(grace: Duration, lease: Duration, max_hold: Option<Duration>) -> Self {
        let term = grace.min(lease / 4).min(max_hold.map_or(Duration::MAX, |max| max / 4));
        // Without any grace there is nothing to ask for: the same lead as with little.
        let term = term.max((lease / 50).min(Duration::from_millis(50)));
        let kill = Duration::from_millis(200).max(lease / 50).min(term / 2);
        LeadTimes { term, kill, watchdog: kill / 2 }
    }
}

/// How a command ended.
#[derive(Debug)]
pub enum CommandEnd {
    /// By itself, or by a signal that was passed on.
    Itself {
        code: i32,
        /// A signal that ends programs was passed on to it, whatever it made of that.
        asked: Option<Signal>,
    },
    /// Its lock was lost or about to be.
    Lost {
        why: String,
        /// Its own exit code, if it ended before it was ended.
        code: Option<i32>,
        /// Whether everything it started is really gone.
        all_gone: bool,
        /// A signal that ends programs had been passed on to it before.
        asked: Option<Signal>,
    },
}

/// The command under its lock.
pub struct Supervisor<'a, L> {
    child: CommandProcess,
    lease: &'a L,
    grace: Duration,
    max_hold: Option<Duration>,
    changes: Stream,
    terminal: Option<Terminal>,
    interrupts: u32,
    /// The last signal that was passed on and usually ends a program.
    asked: Option<Signal>,
    /// When Ctrl-Z was passed on last.
    stop_asked: Option<BootInstant>,
    /// Completes when the command is to finish, while its lock is still held.
    finish: Option<Finish<'a>>,
    /// The command has the order to finish.
    finishing: bool,
}

/// A future that completes when a command is to finish.
pub type Finish<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Subscribes to SIGCHLD. Call it before a child is started.
pub fn changes() -> std::io::Result<Stream> {
    signal(SignalKind::child())
}

impl<'a, L: CommandLease> Supervisor<'a, L> {
    pub fn new(
        child: CommandProcess,
        changes: Stream,
        lease: &'a L,
        grace: Duration,
        max_hold: Option<Duration>,
    ) -> Self {
        Supervisor {
            child,
            lease,
            grace,
            max_hold,
            changes,
            terminal: None,
            interrupts: 0,
            asked: None,
            stop_asked: None,
            finish: None,
            finishing: false,
        }
    }

    /// Sends the command TERM when `finish` completes. It may take its time until the lock is lost, and is killed then.
    pub fn until(mut self, finish: Option<Finish<'a>>) -> Self {
        self.finish = finish;
        self
    }

    /// The lead times for the current lease.
    fn lead_times(&self) -> LeadTimes {
        LeadTimes::new(self.grace, self.lease.lease(), self.max_hold)
    }

    /// Supervises until the command has ended by itself or was ended.
    pub async fn until_end(
        mut self,
        signals: &mut SignalStream,
        report_loss: impl FnOnce(&str),
    ) -> CommandEnd {
        let term = LeadTimes::new(self.grace, self.lease.ttl(), self.max_hold).term;
        let mut wake = self.next_wake();
        let ended = loop {
            tokio::select! {
                biased;
                _ = self.changes.recv() => {}
                () = self.lease.nearly_lost(term) => break None,
                () = completed(&mut self.finish), if self.finish.is_some() => {
                    self.finish = None;
                    self.finishing = true;
                    self.child.request_end();
                }
                signal = signals.next() => self.pass_on(signal),
                () = self.lease.changed() => {
                    // The watchdog learns of a new deadline before the command learns of new work.
                    self.keep_watched();
                    self.lease.tell(&self.child);
                }
                () = sleep_until(&SystemClock, wake) => {
                    self.keep_watched();
                    wake = self.next_wake();
                }
            }
            // Checked after every wake-up: SIGCHLD is only a hint, because signals coalesce.
            match self.child.change() {
                Some(ProcessChange::Ended(code)) => break Some(code),
                Some(ProcessChange::Stopped(signal)) => self.handle_stop(signal),
                None => {}
            }
            wake = self.child.watchdog_due().map_or(wake, |due| wake.min(due));
        };
        let end = match ended {
            Some(code) if self.lease.is_held() => CommandEnd::Itself { code, asked: self.asked },
            // Too late to be told apart: it may have run on without its lock, or the watchdog ended it.
            code => self.lose(code, report_loss).await,
        };
        self.child.end_watchdog(self.lease.tag());
        end
    }

    fn keep_watched(&mut self) {
        let act = self.lease.deadline().before(self.lead_times().watchdog);
        self.child.keep_watched(act, || self.lease.start_watchdog());
    }

    /// Of what is left, not of the ttl: the first lease may be much shorter.
    fn next_wake(&self) -> BootInstant {
        SystemClock.now() + (self.lease.remaining() / 8).max(Duration::from_millis(10))
    }

    /// Ends the command because of the loss. Signals first and reports afterwards, because reporting may be slow.
    async fn lose(&mut self, code: Option<i32>, report_loss: impl FnOnce(&str)) -> CommandEnd {
        let why = self.lease.loss_reason();
        let now = SystemClock.now();
        // A command with the order to finish has had its grace.
        let grace = if self.finishing { Duration::ZERO } else { self.grace };
        let kill_at = (now + grace).min(self.lease.deadline().before(self.lead_times().kill));
        if kill_at > now {
            self.child.request_end();
        }
        report_loss(&why);
        let all_gone = self.child.end_before(&mut self.changes, kill_at, self.lease.tag()).await;
        CommandEnd::Lost { why, code, all_gone, asked: self.asked }
    }

    fn pass_on(&mut self, signal: Signal) {
        match signal {
            Signal::INT if self.interrupts > 0 => self.child.signal_all(Signal::KILL),
            Signal::CONT => self.go_on(),
            _ => {
                if [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT].contains(&signal) {
                    self.asked = Some(signal);
                }
                self.interrupts += u32::from(signal == Signal::INT);
                if signal == Signal::TSTP {
                    self.stop_asked = Some(SystemClock.now());
                }
                self.child.signal_group(signal);
            }
        }
    }

    /// Handles a stop of the command. If the command waits for the terminal, it gets it. After Ctrl-Z this process stops as well, so
    /// that the shell continues; it renews nothing while it is stopped.
    fn handle_stop(&mut self, signal: i32) {
        let wants_terminal = [Signal::TTIN, Signal::TTOU].map(Signal::as_raw).contains(&signal);
        if !wants_terminal && signal != Signal::TSTP.as_raw() {
            return;
        }
        if self.terminal.is_none() {
            self.terminal = Terminal::open();
        }
        // Without a terminal there is no shell that would let us go on again.
        let Some(terminal) = &mut self.terminal else { return };
        // Ctrl-Z may come in the moment in which the command wants the terminal: it is not forgotten over that.
        let asked =
            self.stop_asked.take().is_some_and(|at| SystemClock.now().since(at) < Duration::from_secs(1));
        if wants_terminal && !asked && terminal.lend(self.child.pid()) {
            return self.child.signal_group(Signal::CONT);
        }
        terminal.take_back();
        lockkeeper_host::stop_this_process();
    }

    /// Continues after a stop of this process. The command continues only if its lease is still valid; otherwise it stays stopped
    /// until it is killed.
    fn go_on(&mut self) {
        if self.lease.remaining() > self.lead_times().term {
            self.child.signal_group(Signal::CONT);
        }
    }
}

async fn completed(finish: &mut Option<Finish<'_>>) {
    if let Some(finish) = finish {
        finish.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leads_fit_into_every_lease() {
        let ms = Duration::from_millis;
        let leads = |grace, ttl, max| LeadTimes::new(grace, ttl, max);
        assert_eq!(
            leads(ms(5000), ms(30_000), None),
            LeadTimes { term: ms(5000), kill: ms(600), watchdog: ms(300) }
        );
        assert_eq!(leads(ms(5000), ms(1000), None).term, ms(250));
        assert_eq!(leads(ms(5000), ms(30_000), Some(ms(2000))).term, ms(500));
        for ttl in [100, 300, 1000, 86_400_000] {
            for grace in [0, 1, 5000] {
                let l = leads(ms(grace), ms(ttl), None);
                assert!(
                    l.term <= ms(ttl) / 4 && l.kill < l.term && l.watchdog < l.kill && !l.watchdog.is_zero(),
                    "{l:?}"
                );
            }
        }
    }
}
