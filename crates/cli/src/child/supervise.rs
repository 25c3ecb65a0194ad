//! Keeps an eye on a command for as long as it runs: passes signals on, and ends it before its lock is gone.

use std::time::Duration;

use lockkeeper::{Clock, Guard, LockName, Moment, SystemClock};
use lockkeeper_host::sleep_until;
use rustix::process::{Signal, getpid};
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use super::cgroup::{self, Cgroup};
use super::terminal::Terminal;
use super::watchdog::Watchdog;
use super::{Change, Child};
use crate::signals::Signals;

/// How much time before the deadline things are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leads {
    /// The command is asked to end (TERM).
    pub term: Duration,
    /// It is not asked any more (KILL).
    pub kill: Duration,
    /// The watchdog acts, should we not have.
    pub watchdog: Duration,
}

impl Leads {
    /// `grace`, but never more than a quarter of the time there is at most. `lease`: of which the deadline is the end.
    pub fn new(grace: Duration, lease: Duration, max_hold: Option<Duration>) -> Self {
        let term = grace.min(lease / 4).min(max_hold.map_or(Duration::MAX, |max| max / 4));
        // Without any grace there is nothing to ask for: the same lead as with little.
        let term = term.max((lease / 50).min(Duration::from_millis(50)));
        let kill = Duration::from_millis(200).max(lease / 50).min(term / 2);
        Leads { term, kill, watchdog: kill / 2 }
    }
}

/// How it ended.
#[derive(Debug)]
pub enum End {
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
    },
}

/// The command under its lock.
pub struct Watch<'a> {
    child: Child,
    guard: &'a Guard,
    name: &'a LockName,
    grace: Duration,
    max_hold: Option<Duration>,
    changes: Stream,
    terminal: Option<Terminal>,
    interrupts: u32,
    /// The last signal that was passed on and usually ends a program.
    asked: Option<Signal>,
    /// When Ctrl-Z was passed on last.
    stop_asked: Option<Moment>,
}

impl<'a> Watch<'a> {
    /// Catches the news about children: to be called before there is one.
    pub fn changes() -> std::io::Result<Stream> {
        signal(SignalKind::child())
    }

    pub fn new(
        child: Child,
        changes: Stream,
        guard: &'a Guard,
        name: &'a LockName,
        grace: Duration,
        max_hold: Option<Duration>,
    ) -> Self {
        Watch {
            child,
            guard,
            name,
            grace,
            max_hold,
            changes,
            terminal: None,
            interrupts: 0,
            asked: None,
            stop_asked: None,
        }
    }

    /// As they are for the lease that runs now.
    fn leads(&self) -> Leads {
        Leads::new(self.grace, self.guard.lease(), self.max_hold)
    }

    /// Until the command has ended, or has been ended.
    pub async fn until_end(mut self, signals: &mut Signals, tell_lost: impl FnOnce(&str)) -> End {
        let term = Leads::new(self.grace, self.guard.ttl(), self.max_hold).term;
        let mut wake = self.next_wake();
        let ended = loop {
            tokio::select! {
                biased;
                _ = self.changes.recv() => {}
                () = self.guard.nearly_lost(term) => break None,
                signal = signals.next() => self.pass_on(signal),
                () = sleep_until(&SystemClock, wake) => {
                    let act = self.guard.deadline().before(self.leads().watchdog);
                    self.child.keep_watched(act, || Watchdog::start(self.name, self.guard.fence()));
                    wake = self.next_wake();
                }
            }
            // Looked for at every turn: a signal of the kernel's is a hint, and may be lost.
            match self.child.change() {
                Some(Change::Ended(code)) => break Some(code),
                Some(Change::Stopped(signal)) => self.handle_stop(signal),
                None => {}
            }
            wake = self.child.watchdog_due().map_or(wake, |due| wake.min(due));
        };
        let end = match ended {
            Some(code) if self.guard.is_held() => End::Itself { code, asked: self.asked },
            // Too late to be told apart: it may have run on without its lock, or the watchdog ended it.
            code => self.lose(code, tell_lost).await,
        };
        self.child.dismiss_watchdog();
        end
    }

    /// Of what is left, not of the ttl: the first lease may be much shorter.
    fn next_wake(&self) -> Moment {
        SystemClock.now() + (self.guard.remaining() / 8).max(Duration::from_millis(10))
    }

    /// Signals first and tells afterwards, because the one who is told may be slow.
    async fn lose(&mut self, code: Option<i32>, tell_lost: impl FnOnce(&str)) -> End {
        let why = self.guard.loss_reason().to_string();
        let now = SystemClock.now();
        let kill_at = (now + self.grace).min(self.guard.deadline().before(self.leads().kill));
        if kill_at > now {
            self.child.signal_all(Signal::TERM);
            // A stopped process hears nothing until it goes on.
            self.child.signal_all(Signal::CONT);
        }
        tell_lost(&why);
        let all_gone = self.gone_before(kill_at).await || self.kill().await;
        End::Lost { why, code, all_gone }
    }

    /// Kills the command and everything that it started.
    async fn kill(&mut self) -> bool {
        let tag = cgroup::tag(getpid(), &self.guard.fence().to_string());
        // What cannot be killed in two seconds hangs in the kernel; we cannot wait for it for ever.
        let give_up = SystemClock.now() + Duration::from_secs(2);
        while SystemClock.now() < give_up {
            self.child.signal_group(Signal::KILL);
            if let Some(cgroup) = Cgroup::find(&tag) {
                cgroup.kill();
            }
            self.child.signal_all(Signal::KILL);
            if self.gone_before((SystemClock.now() + Duration::from_millis(20)).min(give_up)).await {
                return true;
            }
        }
        false
    }

    async fn gone_before(&mut self, end: Moment) -> bool {
        loop {
            self.child.change();
            if self.child.all_gone() {
                return true;
            }
            if SystemClock.now() >= end {
                return false;
            }
            // Children that are not ours end without a word to us: look every now and then.
            let look = (SystemClock.now() + Duration::from_millis(20)).min(end);
            tokio::select! {
                _ = self.changes.recv() => {}
                () = sleep_until(&SystemClock, look) => {}
            }
        }
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

    /// The command was stopped. If it only wants the terminal it gets it; if it is Ctrl-Z, we stop as well, so that the
    /// shell goes on. Nothing is renewed meanwhile.
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

    /// We go on after a stop. The command does too, but only if its lock is still there: if not, it is killed where
    /// it stands.
    fn go_on(&mut self) {
        if self.guard.remaining() > self.leads().term {
            self.child.signal_group(Signal::CONT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leads_fit_into_every_lease() {
        let ms = Duration::from_millis;
        let leads = |grace, ttl, max| Leads::new(grace, ttl, max);
        assert_eq!(
            leads(ms(5000), ms(30_000), None),
            Leads { term: ms(5000), kill: ms(600), watchdog: ms(300) }
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
