//! Decides what happens when a server program is missing: fail, or skip loudly.

use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Proof that the user asked to run without this, and that the output says that nothing was tested.
#[derive(Clone, Debug)]
#[must_use = "return from the test"]
pub struct Skip(String);

impl Skip {
    /// The line that was printed.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Says it: to people, and to the file that is shown after the whole run.
    fn say(word: &str) -> Skip {
        Skip::print(&format!("needs {word}, and LOCKKEEPER_WITHOUT names it"))
    }

    fn print(why: &str) -> Skip {
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        let text = format!("SKIPPED: {test} {why}");
        eprintln!("{text}");
        if let Some(path) = env::var_os("LOCKKEEPER_SKIPPED") {
            let file = File::options().create(true).append(true).open(&path);
            let written = file.and_then(|mut file| file.write_all(format!("{text}\n").as_bytes()));
            written.unwrap_or_else(|e| panic!("cannot write to {}: {e}", Path::new(&path).display()));
        }
        Skip(text)
    }
}

/// Where the program of a server is. A missing one is never a silent pass.
///
/// `word` is what `--without` and `LOCKKEEPER_WITHOUT` (a comma list) call it, `package` what Debian does.
///
/// # Errors
/// [`Skip`], said aloud, if the tests are to run without it.
///
/// # Panics
/// If the program is missing and the user did not ask to run without it.
pub fn require(word: &str, program: &str, package: &str) -> Result<PathBuf, Skip> {
    if left_out(word) {
        return Err(Skip::say(word));
    }
    Ok(find(program).unwrap_or_else(|| {
        panic!("{program} is missing: install Debian package {package}, or run with --without {word}")
    }))
}

/// The same for what is no program: a right, a kind of file system.
///
/// # Errors
/// [`Skip`], said aloud, if the tests are to run without it.
///
/// # Panics
/// If it is not `present` and the user did not ask to run without it.
pub fn demand(word: &str, present: bool, what: &str) -> Result<(), Skip> {
    if left_out(word) {
        return Err(Skip::say(word));
    }
    assert!(present, "this test needs {what}; to go without it, run with --without {word}");
    Ok(())
}

/// For a test that takes too long for every change.
///
/// # Errors
/// [`Skip`], said aloud, if this is no run with `--full`.
pub fn only_with_full() -> Result<(), Skip> {
    match env::var_os("LOCKKEEPER_FULL") {
        Some(_) => Ok(()),
        None => Err(Skip::print("runs with ./scripts/test --full only")),
    }
}

fn left_out(word: &str) -> bool {
    env::var("LOCKKEEPER_WITHOUT").unwrap_or_default().split(',').any(|one| one.trim() == word)
}

/// Looks in the places of `PATH`, in those of programs for administrators, and where Debian hides PostgreSQL.
fn find(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(|path| path.is_file());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let usual = env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    let hidden = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut hidden: Vec<PathBuf> = hidden.map(|version| version.path().join("bin")).collect();
    hidden.sort();
    usual.chain(hidden.into_iter().rev()).map(|dir| dir.join(program)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_found() {
        assert!(find("sh").is_some());
        assert!(find("/bin/sh").is_some());
        assert!(find("/no/such/thing").is_none());
    }

    #[test]
    #[should_panic = "install Debian package nothing-server, or run with --without nothing"]
    fn a_missing_program_is_not_a_silent_pass() {
        let _ = require("nothing", "no-such-server", "nothing-server");
    }
}
