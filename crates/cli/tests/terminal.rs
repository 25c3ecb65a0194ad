//! On a terminal: the spinner, keys that reach the command, a command that reads, Ctrl-Z. The terminal is one that
//! script(1) makes.

mod common;
use std::io::Read;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};

use common::*;
use lockkeeper_testkit::servers::require;

/// A terminal with a program on it.
struct Screen {
    script: Child,
    out: Receiver<String>,
    seen: String,
}

impl Screen {
    /// `None`, loudly, where the run was told to go without script(1).
    fn new(place: &Place, line: &str) -> Option<Screen> {
        let mut command = with_default_signals(require("script", "script", "bsdutils").ok()?);
        command.args(["-qefc", line, "/dev/null"]).current_dir(&place.dir);
        command.env("LOCKKEEPER_STORE", place.url()).env("SHELL", "/bin/sh").env("TERM", "xterm");
        let mut script = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut shown = script.stdout.take().unwrap();
        let (tell, out) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n) = shown.read(&mut bytes)
                && n > 0
                && tell.send(String::from_utf8_lossy(&bytes[..n]).into_owned()).is_ok()
            {}
        });
        Some(Screen { script, out, seen: String::new() })
    }

    fn press(&mut self, keys: &str) {
        use std::io::Write;
        let keyboard = self.script.stdin.as_mut().unwrap();
        keyboard.write_all(keys.as_bytes()).unwrap();
        keyboard.flush().unwrap();
    }

    /// Reads until `text` has appeared after what was waited for before.
    fn until(&mut self, text: &str) -> String {
        loop {
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            match self.out.recv_timeout(LONG / 2) {
                Ok(more) => self.seen += &more,
                Err(_) => panic!("{text:?} is not in {:?}", self.seen),
            }
        }
    }

    /// Reads until one of both has appeared, and returns whether that is the first.
    fn until_one_of(&mut self, one: &str, other: &str) -> bool {
        loop {
            if let Some(at) = self.seen.find(one) {
                self.seen = self.seen.split_off(at + one.len());
                return true;
            }
            if let Some(at) = self.seen.find(other) {
                self.seen = self.seen.split_off(at + other.len());
                return false;
            }
            match self.out.recv_timeout(LONG / 2) {
                Ok(more) => self.seen += &more,
                Err(_) => panic!("neither {one:?} nor {other:?} is in {:?}", self.seen),
            }
        }
    }

    /// The exit code of the program, and the rest of what it showed.
    fn end(mut self) -> (i32, String) {
        self.seen.extend(self.out.iter());
        (code(self.script.wait().unwrap()), std::mem::take(&mut self.seen))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Its end hangs the terminal up, and with it everything on it.
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

#[test]
fn a_waiter_turns_a_spinner_and_wipes_it_away() {
    let place = Place::new("spinner");
    let held = place.hold("x --label boss");
    let line = format!("exec {PROGRAM} run x -- echo mine");
    let Some(mut screen) = Screen::new(&place, &line) else { return };
    screen.until("waiting for \"x\": held by boss (");
    drop(held);
    let before = screen.until("mine");
    assert!(before.ends_with("\r\x1b[2Kmine"), "{before:?}");
    assert_eq!(screen.end().0, 0);
}

#[test]
fn control_c_ends_a_wait() {
    let place = Place::new("ctrl_c_wait");
    let _held = place.hold("x");
    let Some(mut screen) = Screen::new(&place, &format!("exec {PROGRAM} run x -- true")) else { return };
    screen.until("waiting for");
    screen.press("\x03");
    assert_eq!(screen.end().0, 130);
    assert_eq!(place.show("x")["lock"]["waiting"], 0);
}

#[test]
fn control_c_reaches_the_command_and_twice_kills_it() {
    let place = Place::new("ctrl_c");
    let line = format!("exec {PROGRAM} run x -- sh -c 'echo up; exec sleep 60'");
    let Some(mut screen) = Screen::new(&place, &line) else { return };
    screen.until("up");
    screen.press("\x03");
    assert_eq!(screen.end().0, 130);

    let script = "trap \"echo no\" INT; echo up; while :; do sleep 0.05; done";
    let Some(mut screen) = Screen::new(&place, &format!("exec {PROGRAM} run x -- sh -c '{script}'")) else {
        return;
    };
    screen.until("up");
    screen.press("\x03");
    screen.until("no");
    screen.press("\x03");
    assert_eq!(screen.end().0, 137);
}

#[test]
fn a_command_that_reads_gets_the_terminal() {
    let place = Place::new("reads");
    let line = format!(
        "{PROGRAM} run x -- sh -c 'read -r a; echo \"got $a\"; read -r b; echo \"and $b\"'; read -r c; echo \"last $c\""
    );
    let Some(mut screen) = Screen::new(&place, &line) else { return };
    screen.press("one\n");
    screen.until("got one");
    screen.press("two\n");
    screen.until("and two");
    // And it is given back: the shell before us reads again.
    screen.press("three\n");
    screen.until("last three");
    assert_eq!(screen.end().0, 0);
}

#[test]
fn an_interactive_commands_control_c_is_its_own() {
    let place = Place::new("interactive");
    // Once it reads, every key is the command's: twice Ctrl-C must not kill an editor.
    let script = "trap \"echo no\" INT; read -r a; echo got $a; while ! read -r b; do :; done; echo and $b";
    let Some(mut screen) = Screen::new(&place, &format!("exec {PROGRAM} run x -- sh -c '{script}'")) else {
        return;
    };
    screen.press("one\n");
    screen.until("got one");
    // A shell that is just about to read runs its trap only after the next line: so its word is not waited for.
    screen.press("\x03");
    screen.press("\x03");
    screen.press("two\n");
    screen.until("and two");
    assert_eq!(screen.end().0, 0);
}

/// An interactive shell, which has job control, with this typed into it.
fn shell(place: &Place, line: &str) -> Option<Screen> {
    let mut screen = Screen::new(place, "exec bash --norc --noprofile -i")?;
    screen.press(&format!("PS1='> '; {line}\n"));
    Some(screen)
}

#[test]
fn control_z_gives_the_shell_back_and_fg_goes_on() {
    let place = Place::new("ctrl_z");
    // What is typed is shown, too: the empty quotes tell the one from the other.
    let script = "echo u\"\"p; read -r a; echo \"g\"\"ot $a\"; read -r b; echo \"a\"\"nd $b\"";
    let Some(mut screen) = shell(&place, &format!("{PROGRAM} run x --ttl 10m -- sh -c '{script}'")) else {
        return;
    };
    screen.until("up\r\n");
    // From its first line on the terminal is the command's.
    screen.press("one\n");
    screen.until("got one");
    screen.press("\x1a");
    screen.until("Stopped");
    screen.press("echo sh''ell\n");
    screen.until("shell");
    screen.press("fg\n");
    screen.until("run x");
    screen.press("two\n");
    screen.until("and two");
    screen.press("exit\n");
    screen.end();
}

/// Only the subcommands that run a command took Ctrl-Z. `hold` renews all the time: the kernel stopped it inside a transaction, and no process
/// could lock anything in that file until `fg`.
#[test]
fn control_z_stops_no_subcommand_inside_a_transaction() {
    let place = Place::new("ctrl_z_transaction");
    assert_eq!(code(place.run("run x -- true").status), 0);
    let Some(mut screen) = shell(&place, "echo re''ady") else { return };
    screen.until("ready");
    for round in 0..20 {
        // On a busy machine a grant may come too late for so short a ttl: then once more.
        let mut tries = 0..;
        loop {
            let failed = format!("failed {round}-{}", tries.next().unwrap());
            screen.press(&format!("{PROGRAM} hold x{round} --ttl 100ms || echo ''{failed}\n"));
            if screen.until_one_of(&format!("held \"x{round}\""), &format!("\n{failed}")) {
                break;
            }
        }
        // Each time at another moment between two renewals.
        std::thread::sleep(std::time::Duration::from_millis(40 + 3 * round));
        screen.press("\x1a");
        screen.until("Stopped");
        let other = place.run("run y --wait 2s -- true");
        assert_eq!(code(other.status), 0, "round {round}: {}", errors(&other));
        screen.press(&format!("kill -KILL %%; wait; echo go''ne {round}\n"));
        screen.until(&format!("gone {round}"));
    }
    screen.press("exit\n");
    screen.end();
}

#[test]
fn control_z_past_the_deadline_ends_the_command() {
    let place = Place::new("ctrl_z_late");
    // It must not fork just then: a shell in the middle of a vfork cannot be stopped, with us or without.
    let script = "echo u\"\"p $$; exec sleep 60";
    let Some(mut screen) = shell(&place, &format!("{PROGRAM} run x --ttl 1s -- sh -c '{script}'")) else {
        return;
    };
    screen.until("up ");
    let pid = screen.until("\r\n");
    screen.press("\x1a");
    screen.until("Stopped");
    place.until("x", |seen| seen["lock"].is_null());
    screen.press("fg; echo co''de $?\n");
    screen.until("code 76");
    assert!(!runs(&pid));
    screen.press("exit\n");
    screen.end();
}

#[test]
fn break_asks_first() {
    let place = Place::new("asks");
    let mut held = place.hold("x --label boss --ttl 1s");
    let line = format!("exec {PROGRAM} break x --reason because");
    let Some(mut screen) = Screen::new(&place, &line) else { return };
    screen.until("Take it away? [y/N]");
    screen.press("n\n");
    assert_eq!(screen.end().0, 77);
    assert_eq!(place.show("x")["lock"]["held"][0]["holder"]["label"], "boss");
    let mut screen = Screen::new(&place, &line).unwrap();
    screen.until("Take it away? [y/N]");
    screen.press("y\n");
    screen.until("asked to stop: boss");
    assert_eq!(screen.end().0, 0);
    let _open = held.child.stdin.take();
    assert_eq!(code(held.child.wait().unwrap()), 76);
}

#[test]
fn an_empty_list_says_so() {
    let place = Place::new("empty");
    let Some(screen) = Screen::new(&place, &format!("exec {PROGRAM} ls")) else { return };
    let (code, seen) = screen.end();
    assert_eq!((code, seen.trim()), (0, "no locks are held"));
}

/// A person is asked one question after the other, and a wrong answer is asked for again.
#[test]
fn advise_asks_what_no_option_answers() {
    let place = Place::new("advise_asks");
    let line = format!("{PROGRAM} advise --purpose correctness --running postgres");
    let Some(mut screen) = Screen::new(&place, &line) else { return };
    screen.until("What is to be protected?");
    screen.press("seats\n");
    screen.until("a number from 1 to");
    screen.press("stock\n");
    screen.until("On how many hosts");
    screen.press("2\n");
    screen.until("How often");
    screen.press("often\n");
    screen.until("How long does the work take?");
    screen.press("20\n");
    screen.until("add a unit");
    screen.press("20ms\n");
    screen.until("one conditional UPDATE");
    assert_eq!(screen.end().0, 0);
}
