//! Objects that were there before, names, answers of the store, and stores that cannot.

use std::sync::Arc;

use lockkeeper_core::Error;
use lockkeeper_fenced::object::object_store::local::LocalFileSystem;
use lockkeeper_fenced::object::object_store::memory::InMemory;
use lockkeeper_fenced::object::object_store::{ObjectStore, ObjectStoreExt};
use lockkeeper_fenced::object::{ObjectFenced, parse};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::servers::TempDir;

use crate::shaky::{Shaky, Trouble};
use crate::{bytes, fence, open, plain, stale};

#[tokio::test]
async fn an_object_from_before_is_taken_over_and_a_damaged_mark_is_left_alone() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let fenced = open(&store, "a/b").await;
    for old in [&b"theirs"[..], b""] {
        plain(&store, "a/b/x", old).await;
        assert!(matches!(fenced.read("x").await, Err(Error::Invalid(text)) if text.contains("no mark")));
        fenced.put("x", fence(7), b"ours").await.unwrap();
        stale(&fenced.put("x", fence(6), b"late").await, 6, 7);
        let whole = bytes(&store, "a/b/x").await;
        assert_eq!(whole, b"lockkeeper-fence 7\nours");
        assert_eq!(
            parse(&whole).unwrap(),
            Some(GuardedValue { fence: fence(7), value: Some(b"ours".to_vec()) })
        );
    }
    fenced.delete("x", fence(8)).await.unwrap();
    assert_eq!(bytes(&store, "a/b/x").await, b"lockkeeper-fence 8 deleted\n");
    plain(&store, "a/b/d", b"lockkeeper-fence many\nvalue").await;
    for told in [fenced.put("d", fence(9), b"x").await, fenced.delete("d", fence(9)).await] {
        assert!(matches!(&told, Err(Error::Invalid(text)) if text.contains("damaged")), "{told:?}");
    }
    assert_eq!(bytes(&store, "a/b/d").await, b"lockkeeper-fence many\nvalue");
    for name in ["", "/x", "x/", "x//y", "..", "x/../y", "a\nb"] {
        let told = fenced.put(name, fence(9), b"x").await;
        assert!(matches!(told, Err(Error::Invalid(_))), "{name:?}: {told:?}");
    }
}

#[tokio::test]
async fn local_files_are_refused_where_nobody_takes_turns() {
    let dir = TempDir::new("objects");
    let files = dir.join("files");
    std::fs::create_dir(&files).unwrap();
    let store = Arc::new(LocalFileSystem::new_with_prefix(&files).unwrap());
    let told = ObjectFenced::open(store, "").await.unwrap_err();
    assert!(matches!(&told, Error::Unsupported(text) if text.contains("ObjectFenced::local")), "{told}");
    assert_eq!(std::fs::read_dir(&files).unwrap().count(), 0);
}

#[tokio::test]
async fn a_local_object_is_what_another_store_would_have() {
    let dir = TempDir::new("objects");
    let fenced = ObjectFenced::local(dir.path()).unwrap();
    fenced.put("2026/11.csv", fence(9), b"new").await.unwrap();
    assert_eq!(std::fs::read(dir.join("2026/11.csv")).unwrap(), b"lockkeeper-fence 9\nnew");
    stale(&fenced.put("2026/11.csv", fence(7), b"late").await, 7, 9);
    std::fs::write(dir.join("old"), "theirs").unwrap();
    fenced.put("old", fence(7), b"ours").await.unwrap();
    assert_eq!(
        fenced.read("old").await.unwrap(),
        Some(GuardedValue { fence: fence(7), value: Some(b"ours".to_vec()) })
    );
    // What cannot be written is told, and changes nothing.
    for name in ["", "../x", "x//y", &"n".repeat(241)] {
        let told = fenced.put(name, fence(9), b"x").await;
        assert!(matches!(told, Err(Error::Invalid(_))), "{name:?}: {told:?}");
    }
    assert!(fenced.put("old/below", fence(9), b"x").await.is_err(), "a file is no directory");
    assert_eq!(fenced.read("old").await.unwrap().unwrap().fence, fence(7));
    for (missing, said) in [(dir.join("none"), "Make it first"), (dir.join("old"), "no directory")] {
        let told = ObjectFenced::local(missing).unwrap_err();
        assert!(matches!(&told, Error::Invalid(text) if text.contains(said)), "{told}");
    }
}

/// Writers of one file who call different directories theirs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directories_inside_each_other_have_the_same_turns() {
    let dir = TempDir::new("objects");
    std::fs::create_dir(dir.join("in")).unwrap();
    let (outer, inner) =
        (ObjectFenced::local(dir.path()).unwrap(), ObjectFenced::local(dir.join("in")).unwrap());
    for n in 1..=100 {
        let (late, new) = tokio::join!(
            tokio::spawn({
                let outer = outer.clone();
                async move { outer.put("in/x", fence(n * 2 - 1), b"late").await }
            }),
            inner.put("x", fence(n * 2), b"new"),
        );
        new.unwrap();
        assert!(matches!(late.unwrap(), Ok(()) | Err(Error::Stale { .. })));
        assert_eq!(inner.read("x").await.unwrap().unwrap().fence, fence(n * 2));
    }
}

/// The turn is not over with the future that waits for it, nor with its runtime.
#[test]
fn who_gives_up_keeps_the_turn_until_the_object_is_in_place() {
    let dir = TempDir::new("objects");
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    for n in 1..=20 {
        let (late, value) = (ObjectFenced::local(dir.path()).unwrap(), vec![b'x'; 1 << 20]);
        let gone = runtime();
        gone.block_on(async {
            let put = late.put("x", fence(n * 2 - 1), &value);
            tokio::select! { biased; _ = put => {} () = tokio::task::yield_now() => {} }
        });
        drop(gone);
        let fenced = ObjectFenced::local(dir.path()).unwrap();
        runtime().block_on(fenced.put("x", fence(n * 2), b"new")).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(
            std::fs::read(dir.join("x")).unwrap(),
            format!("lockkeeper-fence {}\nnew", n * 2).as_bytes()
        );
    }
}

#[tokio::test]
async fn a_store_that_does_not_heed_conditions_is_found_out() {
    let store = Arc::new(Shaky::new(Trouble::Careless, usize::MAX));
    let told = ObjectFenced::open(store.clone(), "a").await.unwrap_err();
    assert!(matches!(told, Error::Unsupported(_)), "{told}");
    let probe = store.inner.get(&"a/lockkeeper-probe".into()).await;
    assert!(probe.is_err(), "what it took was left behind");
}

/// A store that is opened while it is well, and then goes wrong.
async fn troubled(trouble: Trouble, times: usize) -> (Arc<Shaky>, ObjectFenced) {
    let store = Arc::new(Shaky::new(trouble, 0));
    let fenced = ObjectFenced::open(store.clone(), "").await.unwrap();
    fenced.put("x", fence(3), b"old").await.unwrap();
    store.next.lock().unwrap().1 = times;
    (store, fenced)
}

#[tokio::test]
async fn a_conflict_is_tried_again_and_unknown_if_it_does_not_end() {
    let five = Some(GuardedValue { fence: fence(5), value: Some(b"five".to_vec()) });
    let (_, fenced) = troubled(Trouble::Conflict, 5).await;
    fenced.put("x", fence(5), b"five").await.unwrap();
    assert_eq!(fenced.read("x").await.unwrap(), five);
    let (store, fenced) = troubled(Trouble::Conflict, usize::MAX).await;
    for name in ["x", "new"] {
        let told = fenced.put(name, fence(5), b"five").await;
        assert!(matches!(told, Err(Error::Unknown(_))), "{name}: {told:?}");
    }
    // What is unknown is sent again.
    store.next.lock().unwrap().1 = 0;
    fenced.put("x", fence(5), b"five").await.unwrap();
    assert_eq!(fenced.read("x").await.unwrap(), five);
}

#[tokio::test]
async fn a_write_that_meets_itself_is_its_own() {
    let (store, fenced) = troubled(Trouble::DoneThenRefused, 1).await;
    fenced.put("x", fence(5), b"five").await.unwrap();
    // It was written once: what it met was not written over.
    let tag = store.inner.head(&"x".into()).await.unwrap().e_tag;
    assert_eq!(store.next.lock().unwrap().1, 0);
    let (other, again) = troubled(Trouble::DoneThenRefused, 0).await;
    again.put("x", fence(5), b"five").await.unwrap();
    assert_eq!(tag, other.inner.head(&"x".into()).await.unwrap().e_tag);
}

/// The write was refused because a try before it was done, and the look that would show that fails: the outcome is unknown, and "it did not
/// happen" would be false.
#[tokio::test]
async fn a_refused_write_that_cannot_be_looked_up_is_unknown() {
    let (_, fenced) = troubled(Trouble::DoneThenSilent, 1).await;
    let told = fenced.put("x", fence(5), b"five").await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    let five = Some(GuardedValue { fence: fence(5), value: Some(b"five".to_vec()) });
    assert_eq!(fenced.read("x").await.unwrap(), five);
}

/// A try before the refused one was done, and then overtaken: "stale, nothing has changed" would be false.
#[tokio::test]
async fn a_write_that_was_retried_and_overtaken_is_unknown() {
    let (_, fenced) = troubled(Trouble::DoneThenOvertaken, 1).await;
    let told = fenced.put("x", fence(5), b"five").await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    stale(&fenced.put("x", fence(5), b"five").await, 5, 6);
}

/// A try before the refused one was done. Then the look is denied, or another program has deleted the object: "denied" and "lost" would say that
/// nothing was written.
#[tokio::test]
async fn a_write_that_was_retried_and_cannot_be_found_is_unknown() {
    for trouble in [Trouble::DoneThenDenied, Trouble::DoneThenDeleted] {
        let (_, fenced) = troubled(trouble, 1).await;
        let told = fenced.put("x", fence(5), b"five").await;
        assert!(matches!(told, Err(Error::Unknown(_))), "{trouble:?}: {told:?}");
    }
}

/// A try before the refused one was done, and a program that checks no fence has written over it. The next try is denied, and "denied" would
/// say that nothing was written.
#[tokio::test]
async fn a_write_that_was_retried_and_is_then_denied_is_unknown() {
    let (_, fenced) = troubled(Trouble::DoneThenOvertakenByALower, 1).await;
    let told = fenced.put("x", fence(5), b"five").await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    let four = Some(GuardedValue { fence: fence(4), value: Some(b"four".to_vec()) });
    assert_eq!(fenced.read("x").await.unwrap(), four);
    fenced.put("x", fence(5), b"five").await.unwrap();
}

#[tokio::test]
async fn an_answer_that_is_lost_is_unknown_and_the_repeat_is_harmless() {
    let (_, fenced) = troubled(Trouble::DoneThenNoReply, 1).await;
    let told = fenced.delete("x", fence(5)).await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    fenced.delete("x", fence(5)).await.unwrap();
    assert_eq!(fenced.read("x").await.unwrap(), Some(GuardedValue { fence: fence(5), value: None }));
    stale(&fenced.put("x", fence(4), b"late").await, 4, 5);
}
