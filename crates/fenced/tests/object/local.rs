//! What is special about a local directory: what its files, names and turns can do to a write.

use std::fs;

use lockkeeper_core::Error;
use lockkeeper_fenced::Fenced;
use lockkeeper_fenced::object::ObjectFenced;
use lockkeeper_testkit::servers::TempDir;

use crate::fence;

/// Each of them was `Unknown` or `Unavailable` once: send it again, and again, and nothing will ever happen.
#[tokio::test]
async fn what_will_never_work_is_not_told_as_if_it_might() {
    let dir = TempDir::new("objects");
    let fenced = ObjectFenced::local(dir.path()).unwrap();
    fs::write(dir.join("file"), "theirs").unwrap();
    fs::create_dir(dir.join("dir")).unwrap();
    for name in ["dir", "file/below", "file/far/below", "a#1", "d/a#22"] {
        for told in [fenced.put(name, fence(9), b"x").await, fenced.delete(name, fence(9)).await] {
            assert!(matches!(told, Err(Error::Invalid(_))), "{name}: {told:?}");
        }
    }
    for name in ["a#1", &"n".repeat(300)] {
        assert!(matches!(fenced.read(name).await, Err(Error::Invalid(_))), "{name}");
    }
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"theirs");
    // Nobody can make files there, whoever they are.
    let denied = ObjectFenced::local("/sys").unwrap();
    for name in ["lockkeeper", "lockkeeper/below"] {
        let told = denied.put(name, fence(9), b"x").await;
        assert!(matches!(told, Err(Error::Denied(_))), "{name}: {told:?}");
    }
}
