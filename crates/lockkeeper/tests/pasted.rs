//! What a new user does: paste the `[dependencies]` and the Rust of a page into a project of their own, outside of the workspace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The workspace's settings for dependencies, so that what the tests have built is used again.
const AS_BUILT: [&str; 3] = [
    "profile.dev.debug='line-tables-only'",
    "profile.dev.package.'*'.debug=false",
    "profile.dev.package.libsqlite3-sys.opt-level=2",
];

/// A `[dependencies]` block of a page and the Rust blocks behind it, up to the next `[dependencies]` block.
struct Paste<'a> {
    dependencies: &'a str,
    programs: Vec<&'a str>,
}

fn pastes(page: &str) -> Vec<Paste<'_>> {
    let mut pastes: Vec<Paste<'_>> = Vec::new();
    for block in page.split("\n```").skip(1).step_by(2) {
        let (language, text) = block.split_once('\n').unwrap_or((block, ""));
        match language {
            "toml" => pastes.push(Paste { dependencies: text, programs: Vec::new() }),
            "rust" | "rust,no_run" => {
                pastes
                    .last_mut()
                    .expect("a [dependencies] block before the first program")
                    .programs
                    .push(text);
            }
            _ => {}
        }
    }
    pastes
}

/// A program of a block: rustdoc puts a `main` around a block that has none, and a user has one already.
fn program(block: &str) -> String {
    match block.trim_end() {
        text if text.contains("fn main()") => text.to_owned(),
        text if text.ends_with("(())") => format!(
            "#![allow(unused)]\nfn main() {{\nfn run() -> Result<(), impl std::fmt::Debug> {{\n{text}\n}}\nrun().unwrap()\n}}\n"
        ),
        text => format!("#![allow(unused)]\nfn main() {{\n{text}\n}}\n"),
    }
}

/// Makes a project, with the crates as they are here instead of their versions, which are not released yet.
fn project(name: &str, paste: &Paste<'_>) -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (ours, fenced, testkit) = (crates.join("lockkeeper"), crates.join("fenced"), crates.join("testkit"));
    let dependencies = paste
        .dependencies
        .replace("lockkeeper = \"0.1\"", &format!("lockkeeper = {{ path = {ours:?} }}"))
        .replace("lockkeeper = { version = \"0.1\"", &format!("lockkeeper = {{ path = {ours:?}"))
        .replace(
            "lockkeeper-fenced = { version = \"0.1\"",
            &format!("lockkeeper-fenced = {{ path = {fenced:?}"),
        )
        .replace("lockkeeper-fenced = \"0.1\"", &format!("lockkeeper-fenced = {{ path = {fenced:?} }}"))
        .replace("lockkeeper-testkit = \"0.1\"", &format!("lockkeeper-testkit = {{ path = {testkit:?} }}"));
    assert!(!dependencies.contains("\"0.1\""), "a version that is not released: {dependencies}");
    let dir = std::env::temp_dir().join(format!("lk-{name}-{}", std::process::id()));
    fs::create_dir_all(dir.join("src")).unwrap();
    let package = format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n");
    fs::write(dir.join("Cargo.toml"), format!("{package}\n{dependencies}\n")).unwrap();
    // Crates for tests are not there for the program itself.
    let programs = if dependencies.contains("[dev-dependencies]") { "examples" } else { "src/bin" };
    fs::create_dir_all(dir.join(programs)).unwrap();
    fs::write(dir.join("src/lib.rs"), "").unwrap();
    for (number, block) in paste.programs.iter().enumerate() {
        fs::write(dir.join(programs).join(format!("program{number}.rs")), program(block)).unwrap();
    }
    dir
}

/// Cargo in that project, as in a shell of the user's.
fn cargo(dir: &Path, arguments: &[&str]) -> Output {
    // Cargo has released its lock on the directory before it runs tests, and keeps what differs apart.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let done = Command::new(env!("CARGO"))
        .args(arguments)
        .args(AS_BUILT.iter().flat_map(|setting| ["--config", setting]))
        .current_dir(dir)
        .env("CARGO_TARGET_DIR", target)
        .env_remove("RUSTFLAGS")
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && !err.contains("warning"), "{}\n{err}", done.status);
    done
}

#[test]
fn the_readme_runs_in_a_project_of_its_own() {
    let pastes = pastes(include_str!("../../../README.md"));
    assert!(matches!(&pastes[..], [paste] if paste.programs.len() == 1), "which one runs?");
    let dir = project("pasted-readme", &pastes[0]);
    // The versions that were downloaded for this workspace are enough.
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock"), dir.join("Cargo.lock")).unwrap();
    let out = cargo(&dir, &["run", "--offline"]).stdout;
    assert!(out.starts_with(b"every write carries fence "), "{}", String::from_utf8_lossy(&out));
    assert!(dir.join("locks.db").exists());
    fs::remove_dir_all(&dir).unwrap();
}

// Other crates with their default features, as users have them: sqlx and the SQLite store were once not to be had together.
#[test]
fn the_guide_builds_in_a_project_of_its_own() {
    if std::env::var_os("LOCKKEEPER_FULL").is_none() {
        return println!("left out: only with LOCKKEEPER_FULL, because it downloads crates");
    }
    for (nth, paste) in pastes(include_str!("../../../docs/guide/rust-service.md")).iter().enumerate() {
        let dir = project(&format!("pasted-guide-{nth}"), paste);
        cargo(&dir, &["build"]);
        fs::remove_dir_all(&dir).unwrap();
    }
}

/// Each program of a page builds with the crates of the `[dependencies]` block before it and no others, in the versions of this workspace.
#[test]
fn each_page_builds_in_a_project_of_its_own() {
    if std::env::var_os("LOCKKEEPER_FULL").is_none() {
        return println!(
            "left out: only with LOCKKEEPER_FULL, because each page builds its crates with other features"
        );
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let only = std::env::var("LOCKKEEPER_PAGE").ok();
    let mut built = 0;
    for folder in ["docs", "docs/fenced", "docs/guide"] {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            if path.extension().is_none_or(|end| end != "md")
                || only.as_ref().is_some_and(|only| *only != name)
            {
                continue;
            }
            let page = fs::read_to_string(&path).unwrap();
            // That one has a test of its own, because it downloads crates.
            if name == "rust-service" {
                continue;
            }
            for (nth, paste) in pastes(&page).iter().enumerate() {
                println!("{}: {} programs", path.display(), paste.programs.len());
                let dir = project(&format!("pasted-{name}-{nth}"), paste);
                fs::copy(root.join("Cargo.lock"), dir.join("Cargo.lock")).unwrap();
                cargo(&dir, &["check", "--offline", "--all-targets"]);
                fs::remove_dir_all(&dir).unwrap();
                built += paste.programs.len();
            }
        }
    }
    assert!(only.is_some() || built >= 22, "only {built} programs");
}
