//! What the layer answers, what it lets wait, and what it remembers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::Response;
use axum::routing::any;
use futures_util::FutureExt;
use http_body_util::BodyExt;
use lockkeeper::{Error, LockName, Lockkeeper, SystemClock};
use lockkeeper_core::Expect;
use lockkeeper_fenced::http::{FenceLayer, Require, WriteAdmission};
use lockkeeper_testkit::laws::interposed::{Fate, Interposed};
use lockkeeper_testkit::laws::{eventually, soon};
use lockkeeper_testkit::servers::{self, AppendOnly, RedisOptions, TempDir};
use tokio::sync::{Notify, mpsc};
use tower_layer::Layer;
use tower_service::Service;

use super::tools::*;

async fn fresh() -> (FenceLayer, Ledger, Router) {
    let ledger = Ledger::default();
    let app = app(&ledger);
    let layer = by_path(&Lockkeeper::open("memory:").await.unwrap());
    // The lock of the marks is held, so that a request that waits for nothing is passed on in one step.
    layer.owned().await;
    (layer, ledger, app)
}

#[tokio::test]
async fn every_answer_says_what_to_do_next() {
    let (layer, ledger, app) = fresh().await;
    assert_eq!(put(&layer, &app, "/a", 5).await.0, 201);
    let (status, body) = put(&layer, &app, "/a", 4).await;
    assert_eq!((status, &body["type"]), (412, &"urn:lockkeeper:fence:stale".into()));
    assert_eq!((&body["presented"], &body["seen"], &body["status"]), (&4.into(), &5.into(), &412.into()));
    assert_eq!(put(&layer, &app, "/b", 4).await.0, 201, "another resource");
    let (status, body) = send(&layer, &app, request("PUT", "/a", &[])).await;
    assert_eq!((status, &body["type"]), (428, &"urn:lockkeeper:fence:missing".into()));
    for bad in [&["x"][..], &[""], &["0"], &["5", "5"], &["9007199254740992"]] {
        let (status, body) = send(&layer, &app, request("PUT", "/a", bad)).await;
        assert_eq!((status, &body["type"]), (400, &"urn:lockkeeper:fence:malformed".into()), "{bad:?}");
    }
    let (status, body) = put(&layer, &app, &format!("/{}", "x".repeat(5000)), 9).await;
    assert_eq!((status, &body["type"]), (400, &"urn:lockkeeper:fence:no-resource".into()));
    assert_eq!(ledger.read(), [5, 4], "what was refused was not passed on");
}

#[tokio::test]
async fn who_must_have_a_fence_is_a_choice_and_who_has_one_is_checked() {
    let (layer, ledger, app) = fresh().await;
    put(&layer, &app, "/a", 5).await;
    for method in ["GET", "HEAD", "OPTIONS"] {
        assert_eq!(send(&layer, &app, request(method, "/a", &[])).await.0, 201, "{method}");
        assert_eq!(send(&layer, &app, request(method, "/a", &["4"])).await.0, 412, "{method}");
    }
    for method in ["PUT", "POST", "PATCH", "DELETE", "BREW"] {
        assert_eq!(send(&layer, &app, request(method, "/a", &[])).await.0, 428, "{method}");
    }
    let all = layer.clone().require(Require::All);
    assert_eq!(send(&all, &app, request("GET", "/a", &[])).await.0, 428);
    let none = layer.clone().require(Require::None);
    assert_eq!(send(&none, &app, request("PUT", "/a", &[])).await.0, 201);
    assert_eq!(send(&none, &app, request("PUT", "/a", &["4"])).await.0, 412);
    assert_eq!(ledger.read(), [5, 0, 0, 0, 0]);
}

#[tokio::test]
async fn the_same_request_again_is_harmless() {
    let (layer, ledger, app) = fresh().await;
    for _ in 0..3 {
        assert_eq!(put(&layer, &app, "/a", 5).await.0, 201);
    }
    assert_eq!(ledger.read(), [5, 5, 5]);
}

#[tokio::test]
async fn marks_outlive_the_process_and_spaces_have_their_own() {
    let dir = TempDir::new("fenced-http");
    let url = format!("sqlite:{}", dir.join("marks.db").display());
    let ledger = Ledger::default();
    let app = app(&ledger);
    let open = async || by_path(&Lockkeeper::open(&url).await.unwrap()).for_correctness().unwrap();
    assert_eq!(put(&open().await, &app, "/a", 5).await.0, 201);
    let layer = open().await;
    assert_eq!(put(&layer, &app, "/a", 4).await.0, 412);
    assert_eq!(put(&layer, &app, "/a", 5).await.0, 201);
    let other = layer.clone().space("other").unwrap();
    assert_eq!(put(&other, &app, "/a", 4).await.0, 201);
    for bad in ["", "a/b", "a=b", "a#b", "ä"] {
        assert!(matches!(layer.clone().space(bad), Err(Error::Invalid(_))), "{bad}");
    }
    // The mark can be seen, and is a plain record.
    let keeper = Lockkeeper::open(&url).await.unwrap();
    let mark = keeper.register_bytes("fence/http=/a").read().await.unwrap().unwrap();
    assert_eq!(mark.value, b"5");
    let memory = by_path(&Lockkeeper::open("memory:").await.unwrap());
    assert!(matches!(memory.for_correctness(), Err(Error::Unsupported(_))));
}

/// A service that says when it has begun, and answers when it is told to.
struct Slow {
    app: Router,
    begun: mpsc::UnboundedReceiver<String>,
    go: Arc<Notify>,
}

fn slow(answer: impl Fn(Request) -> Response + Clone + Send + Sync + 'static) -> Slow {
    let (tell, begun) = mpsc::unbounded_channel();
    let go = Arc::new(Notify::new());
    let wait = go.clone();
    let app = Router::new().fallback(any(move |request: Request| async move {
        tell.send(request.headers()["lock-fence"].to_str().unwrap().to_owned()).unwrap();
        wait.notified().await;
        answer(request)
    }));
    Slow { app, begun, go }
}

#[tokio::test]
async fn the_newer_waits_for_the_older_that_is_under_way_and_later_older_ones_are_refused() {
    let (layer, ..) = fresh().await;
    let mut slow = slow(|_| Response::new(Body::empty()));
    let mut five = Box::pin(put(&layer, &slow.app, "/a", 5));
    assert!(five.as_mut().now_or_never().is_none());
    assert_eq!(slow.begun.recv().await.unwrap(), "5");
    let mut six = Box::pin(put(&layer, &slow.app, "/a", 6));
    assert!(six.as_mut().now_or_never().is_none());
    assert!(slow.begun.try_recv().is_err(), "it was passed on while an older one was under way");
    assert_eq!(put(&layer, &slow.app, "/a", 5).await.0, 412, "the mark is raised before the wait");
    // It does not wait for ever, and nothing was passed on.
    let hasty = layer.clone().wait(Duration::from_millis(20));
    let (status, body) = put(&hasty, &slow.app, "/a", 7).await;
    assert_eq!((status, &body["type"]), (503, &"urn:lockkeeper:fence:waiting".into()));
    assert_eq!(put(&layer, &slow.app, "/a", 6).await.0, 412, "but its mark counts");
    slow.go.notify_one();
    assert_eq!(five.await.0, 200);
    // While it waited the mark went on, and it looks again.
    assert_eq!(six.await.0, 412);
    let mut eight = Box::pin(put(&layer, &slow.app, "/a", 8));
    assert!(eight.as_mut().now_or_never().is_none());
    assert_eq!(slow.begun.recv().await.unwrap(), "8");
    slow.go.notify_one();
    assert_eq!(eight.await.0, 200);
}

#[tokio::test]
async fn who_hangs_up_does_not_end_what_was_begun() {
    let (layer, ..) = fresh().await;
    let ledger = Ledger::default();
    let noted = ledger.clone();
    let mut slow = slow(move |request| {
        noted.write(&request);
        Response::new(Body::empty())
    });
    let mut five = Box::pin(put(&layer, &slow.app, "/a", 5));
    assert!(five.as_mut().now_or_never().is_none());
    slow.begun.recv().await.unwrap();
    drop(five);
    let mut six = Box::pin(put(&layer, &slow.app, "/a", 6));
    for _ in 0..20 {
        tokio::task::yield_now().await;
        assert!(six.as_mut().now_or_never().is_none());
    }
    assert!(slow.begun.try_recv().is_err(), "the newer one began before the older one had ended");
    slow.go.notify_one();
    let go = slow.go.clone();
    let (status, _) = tokio::join!(six, async {
        assert_eq!(slow.begun.recv().await.unwrap(), "6");
        go.notify_one();
    })
    .0;
    assert_eq!((status, ledger.read()), (200, vec![5, 6]));
}

#[tokio::test]
async fn an_answer_is_under_way_until_its_body_ends_and_a_service_may_hold_on_for_longer() {
    let (layer, ..) = fresh().await;
    let (keep, mut kept) = mpsc::unbounded_channel::<WriteAdmission>();
    let app = Router::new().fallback(any(move |request: Request| async move {
        keep.send(request.extensions().get::<WriteAdmission>().unwrap().clone()).unwrap();
        Body::from(Bytes::from_static(b"some"))
    }));
    let response = layer.layer(app.clone()).call(request("PUT", "/a", &["5"])).await.unwrap();
    let five = kept.recv().await.unwrap();
    assert_eq!(five.fence().get(), 5);
    assert!(five.overtaken().now_or_never().is_none());
    let mut six = Box::pin(put(&layer, &app, "/a", 6));
    assert!(six.as_mut().now_or_never().is_none(), "its body has not been read");
    assert!(five.overtaken().now_or_never().is_some());
    response.into_body().collect().await.unwrap();
    assert!(six.as_mut().now_or_never().is_none(), "the service still works on it");
    drop(five);
    assert_eq!(six.await.0, 200);
}

/// The account ended with the head once the client was gone: a service that answers while it works was still at it when the next
/// fence came.
#[tokio::test]
async fn who_hangs_up_in_the_middle_of_an_answer_does_not_end_what_was_begun() {
    for (method, waits) in [("PUT", true), ("GET", false)] {
        let (layer, ..) = fresh().await;
        let (works, mut said) = mpsc::unbounded_channel::<Bytes>();
        let parts =
            futures_util::stream::poll_fn(move |cx| said.poll_recv(cx).map(|part| part.map(Ok::<_, Error>)));
        let answer = Arc::new(Mutex::new(Some(Body::from_stream(parts))));
        let app = Router::new()
            .fallback(any(move || async move { answer.lock().unwrap().take().unwrap_or_default() }));
        works.send(Bytes::from_static(b"some")).unwrap();
        let mut five = layer.layer(app.clone()).call(request(method, "/a", &["5"])).await.unwrap();
        assert!(five.body_mut().frame().await.unwrap().is_ok());
        drop(five);
        if waits {
            let mut six = Box::pin(put(&layer, &app, "/a", 6));
            for _ in 0..20 {
                tokio::task::yield_now().await;
                assert!(six.as_mut().now_or_never().is_none(), "the service is still at it");
            }
            assert!(works.send(Bytes::from_static(b"more")).is_ok(), "it was cut off");
            drop(works);
            assert_eq!(six.await.0, 200);
        } else {
            assert!(works.is_closed(), "what is only read need not be read to the end");
            assert_eq!(put(&layer, &app, "/a", 6).await.0, 200);
        }
    }
}

/// A client that reads slowly, or not at all, kept newer fences out for as long as it liked: a response counted until its client had
/// read it.
#[tokio::test]
async fn a_client_that_does_not_read_its_response_does_not_keep_newer_fences_out() {
    for (method, works_on) in [("PUT", true), ("GET", false)] {
        let (layer, ..) = fresh().await;
        let layer = layer.wait(Duration::from_secs(8));
        let (works, mut said) = mpsc::unbounded_channel::<Bytes>();
        let parts =
            futures_util::stream::poll_fn(move |cx| said.poll_recv(cx).map(|part| part.map(Ok::<_, Error>)));
        let answer = Arc::new(Mutex::new(Some(Body::from_stream(parts))));
        let app = Router::new()
            .fallback(any(move || async move { answer.lock().unwrap().take().unwrap_or_default() }));
        works.send(Bytes::from_static(b"some")).unwrap();
        let mut five = layer.layer(app.clone()).call(request(method, "/a", &["5"])).await.unwrap();
        let mut six = Box::pin(async { put(&layer, &app, "/a", 6).await.0 });
        if works_on {
            // A client that waits for the rest is woken, and sees that it got no whole response.
            assert!(five.body_mut().frame().await.unwrap().is_ok());
            tokio::select! {
                status = &mut six => panic!("{status}: it was passed on while the service was still at it"),
                end = five.body_mut().frame() => assert!(end.unwrap().is_err(), "the response seems whole"),
            }
            assert!(works.send(Bytes::from_static(b"more")).is_ok(), "the service was cut off");
            drop(works);
        }
        assert_eq!(six.await, 200, "{method}: a client that does not read kept a newer fence out");
        assert!(five.body_mut().collect().await.is_err() || works_on, "the response seems whole");
    }
}

/// A response that begins when a newer fence has waited for longer than a client has to read it.
#[tokio::test]
async fn a_response_that_begins_late_and_is_not_read_does_not_keep_newer_fences_out() {
    let (layer, ..) = fresh().await;
    let mut slow = slow(|_| Response::new(Body::from("some")));
    let hasty = layer.clone().wait(Duration::from_millis(20));
    let mut service = hasty.layer(slow.app.clone());
    let mut five = Box::pin(service.call(request("PUT", "/a", &["5"])));
    assert!(five.as_mut().now_or_never().is_none());
    slow.begun.recv().await.unwrap();
    assert_eq!(put(&hasty, &slow.app, "/a", 6).await.0, 503);
    slow.go.notify_one();
    let five = five.await.unwrap();
    let go = slow.go.clone();
    let (status, _) = tokio::join!(put(&layer, &slow.app, "/a", 6), async {
        slow.begun.recv().await.unwrap();
        go.notify_one();
    })
    .0;
    assert_eq!(status, 200, "a response that its client does not read kept a newer fence out");
    assert!(five.into_body().collect().await.is_err(), "the response seems whole");
}

#[tokio::test]
async fn a_store_that_is_away_lets_nobody_through_and_everybody_when_it_is_back() {
    let Ok(mut redis) =
        servers::redis(RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() })
    else {
        return;
    };
    let keeper = Lockkeeper::open(&format!("redis://{}", redis.addr())).await.unwrap();
    let (layer, ledger) = (by_path(&keeper), Ledger::default());
    let app = app(&ledger);
    assert_eq!(put(&layer, &app, "/a", 5).await.0, 201);
    redis.kill9();
    for fence in [4, 5, 6] {
        let (status, body) = put(&layer, &app, "/a", fence).await;
        assert_eq!((status, &body["type"]), (503, &"urn:lockkeeper:fence:unavailable".into()));
    }
    assert_eq!(
        send(&layer, &app, request("GET", "/a", &[])).await.0,
        201,
        "what has no fence needs no store"
    );
    assert_eq!(ledger.read(), [5, 0]);
    redis.restart();
    while put(&layer, &app, "/a", 6).await.0 == 503 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(put(&layer, &app, "/a", 5).await.0, 412);
    assert_eq!(ledger.read(), [5, 0, 6]);
}

#[tokio::test]
async fn one_alone_with_its_marks_asks_the_store_once_and_lets_nothing_through_when_they_are_not_its_own() {
    let dir = TempDir::new("fenced-alone");
    let url = format!("sqlite:{}", dir.join("marks.db").display());
    let (ledger, ttl) = (Ledger::default(), Duration::from_secs(15));
    let app = app(&ledger);
    let open = async || by_path(&Lockkeeper::open(&url).await.unwrap()).alone(ttl, Duration::ZERO).unwrap();
    let first = open().await;
    first.owned().await;
    assert_eq!(put(&first, &app, "/a", 5).await.0, 201);
    // A process without the lock raises the mark. The layer does not see that: no process should do it.
    let keeper = Lockkeeper::open(&url).await.unwrap();
    keeper.register_bytes("fence/http=/a").update(|_| b"9".to_vec()).await.unwrap();
    assert_eq!(put(&first, &app, "/a", 5).await.0, 201, "the store was asked for what was known");
    keeper.register_bytes("fence/http=/a").update(|_| b"5".to_vec()).await.unwrap();
    assert_eq!(put(&first, &app, "/a", 4).await.0, 412);
    // A second one stands by.
    let second = open().await;
    assert!(first.is_owner() && !second.is_owner());
    assert_eq!(put(&second, &app, "/a", 6).await.0, 503);
    assert_eq!(send(&second, &app, request("GET", "/a", &[])).await.0, 201, "what has no fence passes");
    // It is taken away: the first one lets nothing through from when it knows, and remembers nothing afterwards.
    first.let_go().await;
    assert_eq!(put(&first, &app, "/a", 6).await.0, 503);
    second.owned().await;
    assert_eq!(put(&second, &app, "/a", 4).await.0, 412);
    assert_eq!(put(&second, &app, "/a", 6).await.0, 201);
    // The lock is broken. Until it hears of that it goes by what it knows; then it asks for the lock again, and looks at the mark anew. How
    // long it is without the lock no process can tell: it may have it back before any process looks.
    keeper.register_bytes("fence/http=/a").update(|_| b"8".to_vec()).await.unwrap();
    keeper.break_lock("fence/http", "to see what happens").await.unwrap();
    let refused = async {
        loop {
            match put(&second, &app, "/a", 6).await.0 {
                201 | 503 => tokio::time::sleep(Duration::from_millis(5)).await,
                status => break status,
            }
        }
    };
    let status = tokio::time::timeout(Duration::from_secs(60), refused).await.expect("it looks at the mark");
    assert_eq!(status, 412);
    let all = ledger.read();
    let (before, since) = all.split_at(4);
    assert!(before == [5, 5, 0, 6] && since.iter().all(|fence| *fence == 6), "{before:?} {since:?}");
}

/// A clone from before `alone` asks the store for every mark: beside a layer that remembers them it would raise one unseen.
#[tokio::test]
async fn a_clone_from_before_alone_lets_nothing_through_beside_it() {
    let (ledger, shared) = (Ledger::default(), by_path(&Lockkeeper::open("memory:").await.unwrap()));
    let app = app(&ledger);
    let alone = shared.clone().alone(Duration::from_secs(60), Duration::ZERO).unwrap();
    alone.owned().await;
    assert_eq!(put(&alone, &app, "/a", 6).await.0, 201);
    assert_eq!(put(&shared, &app, "/a", 7).await.0, 503, "both let requests through at once");
    assert_eq!(put(&alone, &app, "/a", 6).await.0, 201);
    alone.let_go().await;
    shared.owned().await;
    assert_eq!(put(&shared, &app, "/a", 7).await.0, 201);
    assert_eq!(ledger.read(), [6, 6, 7]);
}

/// A layer that is to be alone waits for an exclusive hold, and a process that shares the marks is granted the lock first: the wait ends,
/// so that other processes that share them are let in. It used to stay in front of them for as long as the first one lived.
#[tokio::test]
async fn one_that_is_to_be_alone_does_not_keep_those_out_that_share() {
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let lock = || keeper.lock("fence/http").ttl(Duration::from_secs(600));
    let waiting = async |count: usize| {
        let name = lockkeeper::LockName::new("fence/http").unwrap();
        eventually("the requests wait", || async {
            keeper.inspect(&name).await.unwrap().is_some_and(|view| view.waiting == count)
        })
        .await;
    };
    let held = lock().acquire().await.unwrap();
    let first = tokio::spawn(lock().shared().acquire());
    waiting(1).await;
    let alone = by_path(&keeper).alone(Duration::from_secs(60), Duration::ZERO).unwrap();
    waiting(2).await;
    held.release().await.unwrap();
    let first = soon("the first one shares the lock", first).await.unwrap().unwrap();
    let second = soon("the second one shares the lock", lock().shared().acquire()).await.unwrap();
    assert!(!alone.is_owner());
    drop((first, second));
    soon("it is alone in the end", alone.owned()).await;
}

/// The lock of the marks is broken while a mark is raised, another process raises it higher, and the layer has the lock again when it
/// gets the reply: that was given under an earlier grant, and must neither let the request through nor be remembered.
#[tokio::test]
async fn a_mark_that_was_raised_under_an_earlier_grant_counts_for_nothing_under_the_next() {
    let (give, layer) = tokio::sync::oneshot::channel::<FenceLayer>();
    let other = Lockkeeper::open("memory:").await.unwrap();
    let store = other.store().clone();
    let others = async move {
        let layer = layer.await.expect("the layer");
        let [lock, mark] = ["fence/http", "fence/http=/a"].map(|name| LockName::new(name).unwrap());
        let holder = async || other.inspect(&lock).await.unwrap()?.held.first().map(|held| held.fence);
        let before = holder().await;
        other.break_lock(&lock, "to see what happens").await.unwrap();
        other.store().write(&mark, b"9", Expect::Any, None).await.unwrap();
        // A new holder in the store: the layer has noticed its loss by then.
        eventually("the layer has the lock again", || async {
            holder().await.is_some_and(|now| Some(now) != before) && layer.is_owner()
        })
        .await;
    };
    let store = Arc::new(Interposed::new(store, Fate::AnsweredLate, others));
    let (ledger, keeper) = (Ledger::default(), Lockkeeper::with_store(store, Arc::new(SystemClock)));
    let app = app(&ledger);
    // The layer notices a break when it renews its lease.
    let layer = by_path(&keeper).alone(Duration::from_secs(10), Duration::ZERO).unwrap();
    layer.owned().await;
    assert!(give.send(layer.clone()).is_ok());
    assert_eq!(put(&layer, &app, "/a", 5).await.0, 503, "it was passed on under another grant");
    layer.owned().await;
    assert_eq!(put(&layer, &app, "/a", 5).await.0, 412, "the mark of the earlier grant was remembered");
    assert!(ledger.read().is_empty());
}

/// The lock of the marks goes to another process while a mark is raised: what was raised under the old grant says nothing under the next one.
#[tokio::test]
async fn a_mark_that_was_raised_while_the_lock_went_lets_nothing_through() {
    let (give, layer) = tokio::sync::oneshot::channel::<FenceLayer>();
    let others = async move { layer.await.expect("the layer").let_go().await };
    let store = Lockkeeper::open("memory:").await.unwrap().store().clone();
    let store = Arc::new(Interposed::new(store, Fate::Late, others));
    let (ledger, keeper) = (Ledger::default(), Lockkeeper::with_store(store, Arc::new(SystemClock)));
    let layer = by_path(&keeper).alone(Duration::from_secs(60), Duration::ZERO).unwrap();
    layer.owned().await;
    assert!(give.send(layer.clone()).is_ok());
    assert_eq!(put(&layer, &app(&ledger), "/a", 5).await.0, 503);
    assert!(!layer.is_owner(), "the lock did not go: the test shows nothing");
    assert!(ledger.read().is_empty(), "it was passed on");
}
