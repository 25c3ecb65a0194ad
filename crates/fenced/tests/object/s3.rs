//! What only a real client and a server can show.

use std::sync::Arc;

use lockkeeper_core::{Error, Result};
use lockkeeper_fenced::object::ObjectFenced;
use lockkeeper_fenced::object::object_store::path::Path;
use lockkeeper_fenced::object::object_store::{
    Attribute, Attributes, ObjectStore, ObjectStoreExt, PutOptions,
};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::proxy::{At, Fault, Framing, Proxy, every_point};

use crate::{bucket, fence, open, plain, s3, server, stale};

/// Another process looks, and is paused before the write arrives. Meanwhile `other` happens. What does the late one hear?
async fn late(name: &str, other: impl AsyncFnOnce()) -> Option<Result<()>> {
    let server = server().await?;
    let proxy = Proxy::start(server.addr(), Framing::Http1);
    let slow = open(&s3(&proxy.addr().to_string()), "late").await;
    // The look is the first request, the write the second.
    let held = proxy.inject(Fault::at_request(2).hold());
    let name = name.to_owned();
    let write = tokio::spawn(async move { slow.put(&name, fence(5), b"late").await });
    held.until_fired().await;
    other().await;
    held.release();
    Some(write.await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_bytes_with_a_newer_fence_are_another_object() {
    let Some(server) = server().await else { return };
    let store = s3(&server.addr().to_string());
    // Why the mark is not in the metadata: the ETag does not see it there, and a late If-Match would pass.
    let mut tags = Vec::new();
    for mark in ["3", "7"] {
        let attributes = Attributes::from_iter([(Attribute::Metadata("lockkeeper-fence".into()), mark)]);
        let options = PutOptions { attributes, ..Default::default() };
        let put = store.put_opts(&Path::from("meta"), "same".into(), options).await;
        tags.push(put.unwrap().e_tag);
    }
    assert_eq!(tags[0], tags[1]);

    let fenced = open(&store, "late").await;
    fenced.put("same", fence(3), b"same").await.unwrap();
    let told = late("same", async || fenced.put("same", fence(7), b"same").await.unwrap()).await.unwrap();
    stale(&told, 5, 7);
    let seen = GuardedValue { fence: fence(7), value: Some(b"same".to_vec()) };
    assert_eq!(fenced.read("same").await.unwrap(), Some(seen));
    // Nor are two deleted ones the same.
    fenced.delete("gone", fence(3)).await.unwrap();
    stale(&late("gone", async || fenced.delete("gone", fence(7)).await.unwrap()).await.unwrap(), 5, 7);
    // The first of all writes is as late as any.
    stale(&late("first", async || fenced.put("first", fence(7), b"new").await.unwrap()).await.unwrap(), 5, 7);
    // A lower one in between only costs another try.
    late("lower", async || fenced.put("lower", fence(4), b"low").await.unwrap()).await.unwrap().unwrap();
    assert_eq!(fenced.read("lower").await.unwrap().unwrap().fence, fence(5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_somebody_deletes_meanwhile_is_told_apart_and_not_made_again() {
    let Some(server) = server().await else { return };
    let store = s3(&server.addr().to_string());
    plain(&store, "late/deleted", b"lockkeeper-fence 3\nthree").await;
    let path = Path::from("late/deleted");
    let told = late("deleted", async || store.delete(&path).await.unwrap()).await.unwrap();
    assert!(matches!(&told, Err(Error::Lost(text)) if text.contains("deleted")), "{told:?}");
    assert!(store.head(&path).await.is_err(), "it was made again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_is_not_there_is_told() {
    let Some(server) = server().await else { return };
    let addr = server.addr().to_string();
    let fenced = open(&bucket(&addr, "nowhere"), "").await;
    for told in [fenced.put("x", fence(1), b"x").await, fenced.read("x").await.map(|_| ())] {
        assert!(matches!(told, Err(Error::Invalid(_))), "{told:?}");
    }
}

/// Sends the same until there is an answer.
async fn until_heard(store: &Arc<dyn ObjectStore>, prefix: &str, name: &str) -> Result<()> {
    for _ in 0..5 {
        let write =
            async { ObjectFenced::open(store.clone(), prefix).await?.put(name, fence(5), b"five").await };
        match write.await {
            Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
            heard => return heard,
        }
    }
    panic!("five times nothing was heard of {name}");
}

/// A client behind a proxy writes with 5, and the reply may get lost. Sent again, the write is done once; after a newer write it is refused.
async fn break_everywhere(word: &str, fault: fn(At) -> Fault) {
    let Some(server) = server().await else { return };
    let other = open(&s3(&server.addr().to_string()), word).await;
    let points = every_point(50, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::Http1);
        let through = s3(&proxy.addr().to_string());
        let injected = proxy.inject(fault(Fault::at_request(n)));
        let name = format!("r{n}");
        until_heard(&through, word, &name).await.unwrap();
        assert_eq!(proxy.trouble(), None);
        let seen = GuardedValue { fence: fence(5), value: Some(b"five".to_vec()) };
        assert_eq!(other.read(&name).await.unwrap(), Some(seen));
        other.put(&name, fence(6), b"six").await.unwrap();
        stale(&until_heard(&through, word, &name).await, 5, 6);
        assert_eq!(other.read(&name).await.unwrap().unwrap().value, Some(b"six".to_vec()));
        injected.fired()
    })
    .await;
    assert!(points >= 3, "only {points} points");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_whose_answer_is_lost_is_done_once_and_can_be_repeated() {
    break_everywhere("no reply", At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_never_arrives_is_told_and_can_be_repeated() {
    break_everywhere("reset", At::reset).await;
}

/// The client says only in the text of its errors that it has sent a request again. If an upgrade of the client changes that text, a write that
/// was applied and overtaken would be reported as stale: as one that did not happen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_the_client_repeats_after_a_newer_one_is_unknown() {
    let Some(server) = server().await else { return };
    let other = open(&s3(&server.addr().to_string()), "repeated").await;
    let proxy = Proxy::start(server.addr(), Framing::Http1);
    let slow = open(&s3(&proxy.addr().to_string()), "repeated").await;
    // The look is the first request. The write is the second: the server applies it, and the reply is lost. The third is the client's retry.
    let no_reply = proxy.inject(Fault::at_request(2).cut_before_reply());
    let repeated = proxy.inject(Fault::at_request(3).hold());
    let write = tokio::spawn(async move { slow.put("x", fence(5), b"five").await });
    repeated.until_fired().await;
    assert!(no_reply.fired(), "the first try was answered");
    assert_eq!(other.read("x").await.unwrap().unwrap().fence, fence(5), "the first try was not applied");
    other.put("x", fence(7), b"seven").await.unwrap();
    repeated.release();
    let told = write.await.unwrap();
    assert!(matches!(told, Err(Error::Unknown(_))), "it was applied: {told:?}");
}
