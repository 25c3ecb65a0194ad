//! Every command in a document is run: the `sh` blocks of a page, one after the other, in a directory of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The README's way to the program before it is installed; `scripts/test` runs that one to the letter.
const FROM_SOURCE: &str = "cargo run --release --bin lockkeeper --";

fn pages(root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    let below = ["", "docs", "docs/guide", "docs/stores", "docs/fenced"];
    for dir in below.map(|dir| root.join(dir)) {
        let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        found.extend(entries.map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    found.sort();
    found
}

/// What a page shows between ```` ```LANGUAGE ```` and ```` ``` ````.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let opening = format!("```{language}");
    let mut blocks = Vec::new();
    let mut block: Option<String> = None;
    for line in text.lines() {
        match &mut block {
            None if line.trim() == opening => block = Some(String::new()),
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

/// Runs a script as a user would, in a directory and with a store of its own.
fn run_script(page: &Path, script: &str) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let bin = Path::new(env!("CARGO_BIN_EXE_lockkeeper")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("lk-docs-{}-{count}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let done = Command::new("timeout")
        .args(["60", "bash", "-c", &format!("set -euo pipefail\n{script}")])
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
}

#[test]
fn the_commands_in_the_documents_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut run = 0;
    for page in pages(&root) {
        let blocks = blocks(&fs::read_to_string(&page).unwrap(), "sh");
        if blocks.is_empty() {
            continue;
        }
        run_script(&page, &blocks.join("\n").replace(FROM_SOURCE, "lockkeeper"));
        run += 1;
    }
    assert!(run >= 2, "only {run} pages have commands");
}

/// The lines of a crontab, without the five fields of the time and the user, and with another command behind `--`.
fn jobs(crontab: &str) -> Vec<String> {
    let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let lines = crontab.lines().filter(|line| !line.starts_with('#') && !line.contains("LOCKKEEPER_STORE"));
    lines
        .map(fields)
        .filter(|words| words.len() > 6)
        .map(|words| {
            let command = words[6..].join(" ");
            let (ours, _) = command.split_once(" -- ").expect("a command of the user's");
            format!("{ours} -- true")
        })
        .collect()
}

/// The pages with a crontab to copy.
const CRONTABS: [&str; 3] = ["README.md", "docs/cron.md", "docs/guide/cron-on-many-hosts.md"];

#[test]
fn the_crontabs_in_the_documents_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for page in pages(&root) {
        let name = page.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        let tabs = blocks(&fs::read_to_string(&page).unwrap(), "crontab");
        assert_eq!(!tabs.is_empty(), CRONTABS.contains(&name.as_str()), "{name}: {tabs:?}");
        for tab in tabs {
            complete(&name, &tab);
            for job in jobs(&tab) {
                assert!(job.starts_with("lockkeeper run "), "{name}: {job}");
                run_script(&page, &job);
            }
        }
    }
}

/// Copied to many hosts, a crontab without a store runs the job on each of them; without the rest of this it fails, or mails every night.
fn complete(page: &str, tab: &str) {
    let sets =
        |name: &str| tab.lines().any(|line| line.strip_prefix(name).is_some_and(|value| value.len() > 1));
    assert!(sets("LOCKKEEPER_STORE=") || sets("LOCKKEEPER_STORE_FILE="), "{page}: no store in {tab}");
    assert!(sets("PATH=") && sets("MAILTO="), "{page}: no PATH or no MAILTO in {tab}");
    let jobs = jobs(tab);
    assert!(
        !jobs.is_empty() && jobs.iter().all(|job| job.contains(" --quiet ")),
        "{page}: no --quiet in {tab}"
    );
}

/// The `text` blocks with commands that no test runs: page, a line of the block, why.
const NOT_RUN: [(&str, &str, &str); 7] = [
    (
        "docs/fenced/postgres.md",
        "lockkeeper fence install",
        "needs a database; crates/cli/tests/fence_table.rs runs the commands",
    ),
    (
        "docs/stores/dynamodb.md",
        "lockkeeper store init dynamodb:",
        "needs an account of AWS; crates/cli/tests/store.rs runs it on moto",
    ),
    ("docs/stores/redlock.md", "lockkeeper run --store 'redlock:", "needs three servers"),
    ("docs/stores/etcd.md", "etcdctl role grant-permission", "needs a cluster with users"),
    ("docs/cron.md", "lockkeeper cron settle", "runs for ever"),
    (
        "docs/verify.md",
        "lockkeeper verify --store",
        "needs a server; crates/cli/tests/verify.rs runs it on six stores",
    ),
    (
        "docs/jobs.md",
        "lockkeeper jobs install",
        "needs a database; crates/cli/tests/jobs.rs runs the commands",
    ),
];

/// The languages of blocks. A test looks into each of them: a block of another one could hide a command.
const LANGUAGES: [&str; 7] = ["sh", "text", "rust", "rust,no_run", "toml", "sql", "crontab"];

#[test]
fn every_block_has_a_language_that_tests_look_into() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for page in pages(&root) {
        let text = fs::read_to_string(&page).unwrap();
        let fences = text.lines().filter_map(|line| line.trim().strip_prefix("```"));
        for (number, language) in fences.enumerate() {
            let known = if number % 2 == 0 { LANGUAGES.contains(&language) } else { language.is_empty() };
            assert!(known, "{}: a block in {language:?}", page.display());
        }
    }
}

/// A command in a `text` block is run by no test, so it is an exception with a reason.
#[test]
fn no_text_block_hides_a_command() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let programs = ["lockkeeper ", "psql ", "etcdctl ", "redis-cli ", "aws ", "cargo ", "curl "];
    for page in pages(&root) {
        let name = page.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        for block in blocks(&fs::read_to_string(&page).unwrap(), "text") {
            let command = block
                .lines()
                .find(|line| programs.iter().any(|program| line.trim_start().starts_with(program)));
            let Some(command) = command else { continue };
            let listed = NOT_RUN.iter().any(|(page, line, _)| *page == name && block.contains(line));
            assert!(listed, "{name}: make it an `sh` block, or list it with a reason: {command}");
        }
    }
    for (page, line, _) in NOT_RUN {
        let text = fs::read_to_string(root.join(page)).unwrap();
        assert!(text.contains(line), "{page} has no such command any more: {line}");
    }
}

/// A site that renders a page shows the lines that rustdoc hides, and a program that is copied with them does not compile.
#[test]
fn no_rust_block_has_hidden_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut seen = 0;
    for page in pages(&root) {
        let text = fs::read_to_string(&page).unwrap();
        for block in ["rust", "rust,no_run"].iter().flat_map(|language| blocks(&text, language)) {
            seen += 1;
            let hidden = block.lines().any(|line| line == "#" || line.starts_with("# "));
            assert!(!hidden, "{}: {block}", page.display());
        }
    }
    assert!(seen >= 20, "only {seen} blocks");
}

/// The pages with the decisions behind a crate.
fn design_pages(root: &Path) -> Vec<PathBuf> {
    let crates = ["crates", "stores"].map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let pages = crates.into_iter().flatten().map(|dir| dir.unwrap().path().join("DESIGN.md"));
    let pages: Vec<_> = pages.filter(|page| page.exists()).collect();
    assert!(pages.len() >= 12, "only {pages:?}");
    pages
}

/// A reader who searches for "fencing token" finds every page and crate that has a *fence*, which is our word for it.
#[test]
fn every_page_that_says_fence_says_fencing_token() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // Measurements and a list of tests, for readers who know the word.
    let contributors = ["CHANGELOG.md", "CONTRIBUTING.md", "BENCHMARKS.md", "MUTANTS.md"];
    let mut texts: Vec<(PathBuf, String)> = pages(&root)
        .into_iter()
        .filter(|page| !contributors.iter().any(|name| page.ends_with(name)))
        .map(|page| (page.clone(), fs::read_to_string(page).unwrap()))
        .collect();
    for folder in ["crates", "stores"].map(|folder| fs::read_dir(root.join(folder)).unwrap()) {
        for file in folder.map(|dir| dir.unwrap().path().join("src/lib.rs")).filter(|file| file.exists()) {
            let text = fs::read_to_string(&file).unwrap();
            texts.push((file, text.lines().take_while(|line| line.starts_with("//!")).collect()));
        }
    }
    let mut checked = 0;
    for (file, text) in texts {
        let text = text.to_lowercase().replace("```", "");
        if text.contains("fence") {
            assert!(text.contains("fencing token"), "{}: say \"fencing token\" once", file.display());
            checked += 1;
        }
    }
    assert!(checked >= 45, "only {checked} pages have fences");
}

/// A reader who looks up a term must not have to search the whole page.
#[test]
fn the_glossary_is_in_order() {
    let text =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/GLOSSARY.md")).unwrap();
    let terms = text.lines().filter_map(|line| line.strip_prefix("| **")?.split("**").next());
    let terms: Vec<String> = terms.map(str::to_lowercase).collect();
    assert!(terms.len() >= 30, "only {terms:?}");
    assert!(terms.is_sorted(), "{terms:?}");
}

/// Markdown takes the rows of a table right below a list or a paragraph as the text of that paragraph.
#[test]
fn every_table_follows_an_empty_line() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for page in pages(&root).into_iter().chain(design_pages(&root)) {
        let text = fs::read_to_string(&page).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (number, pair) in lines.windows(2).enumerate() {
            let swallowed = pair[0].starts_with(['-', '*']) || pair[0].starts_with("  ");
            assert!(!(swallowed && pair[1].starts_with('|')), "{}:{}", page.display(), number + 2);
        }
    }
}

/// Every page can be reached, and leads on: relative links name files that are there.
#[test]
fn the_links_in_the_documents_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = pages(&root);
    pages.push(root.join("examples/README.md"));
    pages.extend(design_pages(&root));
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        let explains = text.contains("GLOSSARY.md)") || page.ends_with("GLOSSARY.md");
        let is_front_page = page.parent() == Some(root.as_path()) && !page.ends_with("CHANGELOG.md");
        assert!(explains || is_front_page, "{}: no link to the glossary", page.display());
        let texts = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let images = ["src=\"", "srcset=\""]
            .map(|mark| text.split(mark).skip(1).filter_map(|rest| rest.split('"').next()));
        for link in texts.chain(images.into_iter().flatten()) {
            let file = link.split('#').next().unwrap();
            if file.is_empty() || file.contains("://") || file.contains(' ') {
                continue;
            }
            let target = page.parent().unwrap().join(file);
            assert!(target.exists(), "{}: {link} leads nowhere", page.display());
        }
    }
}
