//! The stored marks of files: `golden/file-mark` is read, and written the same. The marks of databases, of objects, of HTTP resources and of
//! Redis have their tests beside those of their adapters; `golden/README.md` says why a mark has no version.
#![cfg(feature = "file")]

use lockkeeper_core::{Error, Fence};
use lockkeeper_fenced::GuardedValue;
use lockkeeper_fenced::file::FencedFile;
use lockkeeper_testkit::servers::TempDir;

const MARK: &[u8] = include_bytes!("golden/file-mark");

fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

#[test]
fn the_mark_of_a_file_is_read() {
    let dir = TempDir::new("golden");
    std::fs::write(dir.join("data"), b"the value").unwrap();
    std::fs::write(dir.join(".data.fence"), MARK).unwrap();
    let file = FencedFile::new(dir.join("data"));
    let found = file.read().unwrap();
    assert_eq!(found, Some(GuardedValue { fence: fence(42), value: Some(b"the value".to_vec()) }));
    assert!(matches!(file.write(fence(41), b"late"), Err(Error::Stale { .. })));
    file.write(fence(43), b"next").unwrap();
}

#[test]
fn the_mark_of_a_file_is_written_the_same() {
    let dir = TempDir::new("golden");
    FencedFile::new(dir.join("data")).write(fence(42), b"the value").unwrap();
    assert_eq!(std::fs::read(dir.join(".data.fence")).unwrap(), MARK);
    assert_eq!(std::fs::read(dir.join("data")).unwrap(), b"the value");
}
