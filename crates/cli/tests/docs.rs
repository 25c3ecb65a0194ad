//! Every command in a document is run: the `sh` blocks of a page, one after the other, in a directory of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The README's way to the program before it is installed; `scripts/test` runs that one to the letter.
const FROM_SOURCE: &str = "cargo run --release --quiet --bin lockkeeper --";

fn pages(root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut open =
        vec![root.to_path_buf(), root.join("docs"), root.join("docs/stores"), root.join("docs/fenced")];
    while let Some(dir) = open.pop() {
        let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        found.extend(entries.map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    found.sort();
    found
}

fn shell_blocks(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut block: Option<String> = None;
    for line in text.lines() {
        match &mut block {
            None if line.trim() == "```sh" => block = Some(String::new()),
            Some(done) if line.trim() == "```" => {
                blocks.push(std::mem::take(done));
                block = None;
            }
            Some(open) => *open += &format!("{line}\n"),
            None => {}
        }
    }
    blocks
}

#[test]
fn the_commands_in_the_documents_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let bin = Path::new(env!("CARGO_BIN_EXE_lockkeeper")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut run = 0;
    for page in pages(&root) {
        let blocks = shell_blocks(&fs::read_to_string(&page).unwrap());
        if blocks.is_empty() {
            continue;
        }
        let dir = std::env::temp_dir().join(format!("lk-docs-{}-{run}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let script = format!("set -euo pipefail\n{}", blocks.join("\n")).replace(FROM_SOURCE, "lockkeeper");
        let done = Command::new("timeout")
            .args(["60", "bash", "-c", &script])
            .current_dir(&dir)
            .env("PATH", &path)
            .env("HOME", &dir)
            .env("XDG_STATE_HOME", dir.join("state"))
            // Root's locks would go to the machine's own file otherwise.
            .env("LOCKKEEPER_STORE", format!("sqlite:{}", dir.join("locks.db").display()))
            .output()
            .unwrap();
        let out = String::from_utf8_lossy(&done.stdout);
        let err = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{}: {}\n{script}\n{out}\n{err}", page.display(), done.status);
        fs::remove_dir_all(&dir).unwrap();
        run += 1;
    }
    assert!(run >= 2, "only {run} pages have commands");
}
