//! The terminal: whether this process or its command may read from it.
//!
//! The command has its own process group, so for the terminal it is in the background: Ctrl-C goes to this process, which passes
//! it on (twice means kill). A command that wants to *read* is stopped by the kernel (SIGTTIN). Then it is an
//! interactive one: it gets the terminal, with all its keys, until it ends.

use std::fs::File;

use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Pid, getpgrp};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp};

/// The terminal of this session, if it has one.
#[derive(Debug)]
pub struct Terminal {
    tty: File,
    /// How it was set when it was given away; `None` while it is ours.
    lent: Option<Option<Termios>>,
}

impl Terminal {
    pub fn open() -> Option<Self> {
        let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
        // Writing a message or taking the terminal back from the background would stop us, and with us every renewal.
        let mut ttou = SigSet::empty();
        ttou.add(Signal::SIGTTOU);
        ttou.thread_block().ok()?;
        Some(Terminal { tty, lent: None })
    }

    /// Gives it to `group`, if it is ours to give.
    pub fn lend(&mut self, group: Pid) -> bool {
        if tcgetpgrp(&self.tty).ok() != Some(getpgrp()) {
            return false;
        }
        let settings = tcgetattr(&self.tty).ok();
        let done = tcsetpgrp(&self.tty, group).is_ok();
        if done {
            self.lent = Some(settings);
        }
        done
    }

    /// Takes it back, set as it was. Returns whether it had been given away.
    pub fn take_back(&mut self) -> bool {
        let Some(settings) = self.lent.take() else { return false };
        let _ = tcsetpgrp(&self.tty, getpgrp());
        if let Some(settings) = settings {
            let _ = tcsetattr(&self.tty, OptionalActions::Drain, &settings);
        }
        true
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.take_back();
    }
}
