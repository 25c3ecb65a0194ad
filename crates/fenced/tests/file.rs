//! Files: the laws, and what is special about files.
#![cfg(feature = "file")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::file::{FencedDir, FencedFile};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::fenced::FencedHarness;
use lockkeeper_testkit::servers::TempDir;

fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

struct Dir(TempDir);

#[async_trait]
impl FencedHarness for Dir {
    async fn start() -> Option<Self> {
        Some(Dir(TempDir::new("files")))
    }

    fn address(&self) -> String {
        self.0.path().display().to_string()
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        Arc::new(FencedDir::new(address))
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        Arc::new(Plain(address.to_owned()))
    }
}

/// What people do without a fence.
struct Plain(String);

#[async_trait]
impl Fenced for Plain {
    async fn put(&self, resource: &str, _: Fence, value: &[u8]) -> Result<()> {
        fs::write(format!("{}/{resource}", self.0), value).map_err(|e| Error::Unavailable(e.to_string()))
    }

    async fn delete(&self, resource: &str, _: Fence) -> Result<()> {
        fs::remove_file(format!("{}/{resource}", self.0)).map_err(|e| Error::Unavailable(e.to_string()))
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let value = fs::read(format!("{}/{resource}", self.0)).ok();
        Ok(value.map(|value| GuardedValue { fence: Fence::MIN, value: Some(value) }))
    }
}

mod laws {
    use super::*;
    lockkeeper_testkit::fenced_laws!(Dir);
}

#[test]
fn it_stays_a_plain_file_with_its_rights_and_nothing_is_left_beside_it_but_the_mark() {
    let dir = TempDir::new("file");
    let path = dir.join("report.csv");
    fs::write(&path, "from before").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let file = FencedFile::new(&path);
    assert_eq!(
        (file.read().unwrap(), file.mark().unwrap()),
        (None, None),
        "no writer has written with a fence"
    );
    file.write(fence(7), b"new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    assert_eq!(fs::read_to_string(dir.join(".report.csv.fence")).unwrap(), "7\n");
    assert!(matches!(file.write(fence(6), b"late"), Err(Error::Stale { .. })));
    let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".report.csv.fence", "report.csv"]);
}

#[test]
fn all_paths_to_one_file_lead_to_one_mark() {
    let dir = TempDir::new("file");
    fs::create_dir(dir.join("sub")).unwrap();
    let real = FencedFile::new(dir.join("sub/real"));
    real.write(fence(7), b"seven").unwrap();
    symlink("sub/real", dir.join("link")).unwrap();
    let link = FencedFile::new(dir.join("link"));
    assert!(matches!(link.write(fence(6), b"late"), Err(Error::Stale { .. })));
    link.write(fence(8), b"eight").unwrap();
    assert!(dir.join("link").is_symlink(), "the link was replaced");
    assert_eq!(real.read().unwrap(), Some(GuardedValue { fence: fence(8), value: Some(b"eight".to_vec()) }));
    fs::hard_link(dir.join("sub/real"), dir.join("second")).unwrap();
    for path in ["second", "sub/real"] {
        let refused = FencedFile::new(dir.join(path)).write(fence(9), b"x");
        assert!(
            matches!(refused, Err(Error::Invalid(ref text)) if text.contains("hard links")),
            "{refused:?}"
        );
    }
}

#[test]
fn what_is_no_file_or_has_a_damaged_mark_is_refused_and_left_alone() {
    let dir = TempDir::new("file");
    let try_at = |path: &str| FencedFile::new(dir.join(path)).write(fence(9), b"x");
    fs::create_dir(dir.join("d")).unwrap();
    symlink("nowhere", dir.join("dangling")).unwrap();
    for (path, says) in
        [("d", "not a plain file"), (".x.fence", "choose another"), ("no/such/dir", "directory")]
    {
        let refused = try_at(path).unwrap_err();
        assert!(refused.to_string().contains(says), "{refused}");
    }
    assert!(try_at("dangling").is_err());
    assert!(matches!(try_at(&"n".repeat(250)), Err(Error::Invalid(_))));
    for damage in ["seven\n", "7", "7\n8\n", "0\n", "99999999999999999999\n"] {
        fs::write(dir.join(".f.fence"), damage).unwrap();
        let refused = try_at("f").unwrap_err();
        assert!(matches!(&refused, Error::Invalid(text) if text.contains("damaged")), "{refused}");
        assert!(!dir.join("f").exists(), "written under a damaged mark");
        assert!(
            FencedFile::new(dir.join("f")).read().is_err()
                && FencedFile::new(dir.join("f")).delete(fence(9)).is_err()
        );
    }
}

#[test]
fn a_reader_never_sees_half_of_it() {
    let dir = TempDir::new("file");
    let file = FencedFile::new(dir.join("f"));
    file.write(fence(1), &[b'a'; 100_000]).unwrap();
    let ends = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 2..60u64 {
                file.write(fence(n), &vec![b'a' + (n % 26) as u8; 100_000]).unwrap();
            }
            ends.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        while !ends.load(std::sync::atomic::Ordering::SeqCst) {
            let bytes = fs::read(dir.join("f")).unwrap();
            assert!(bytes.len() == 100_000 && bytes.iter().all(|b| *b == bytes[0]), "torn");
        }
    });
}

/// Contents that look, while they are read, at who else could read what was written of them so far.
struct Watching<'a>(&'a std::path::Path, usize);

impl std::io::Read for Watching<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let new = fs::read_dir(self.0)?
            .flatten()
            .find(|entry| entry.path().extension().is_some_and(|e| e == "new"));
        let mode = new.expect("it is written beside the old one").metadata()?.mode() & 0o777;
        assert_eq!(mode & 0o077, 0, "others can read the new contents of a private file: {mode:o}");
        self.1 += 1;
        let part: &[u8] = if self.1 < 3 { b"secret" } else { b"" };
        to[..part.len()].copy_from_slice(part);
        Ok(part.len())
    }
}

#[test]
fn the_new_contents_of_a_private_file_are_private_while_they_are_written() {
    let dir = TempDir::new("private");
    let path = dir.join("key");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let file = FencedFile::new(&path);
    assert_eq!(file.write_from(fence(5), Watching(dir.path(), 0)).unwrap(), 12);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    // One for all stays one for all, and a new one is as the process makes its files.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    file.write(fence(6), b"open").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
    fs::write(dir.join("usual"), "").unwrap();
    FencedFile::new(dir.join("new")).write(fence(1), b"x").unwrap();
    let mode = |name: &str| fs::metadata(dir.join(name)).unwrap().mode() & 0o777;
    assert_eq!(mode("new"), mode("usual"));
}
