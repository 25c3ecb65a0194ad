//! Cached values in Redis: plain bytes that other clients read, and that no late writer replaces.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper::cached::{Cached, CachedStart, FencedValue, PutOutcome, RedisCache, ValueCache, ValueState};
use lockkeeper::{Error, Fence, Lockkeeper};
use lockkeeper_testkit::laws::soon;
use lockkeeper_testkit::servers::{self, RedisOptions, Server, redis_call};
use tokio::sync::Notify;

async fn cache(url: &str) -> Arc<RedisCache> {
    Arc::new(RedisCache::open(url, "page:").await.unwrap())
}

fn home(keeper: &Lockkeeper, cache: &Arc<RedisCache>) -> Cached {
    let long = Duration::from_secs(600);
    keeper.cached("home").ttl(long).stale_while(long).lease(long).early_refresh(0.0).in_cache(cache.clone())
}

/// What another client sees.
fn call(server: &Server, command: &[&str]) -> String {
    redis_call(server.addr(), command).unwrap()
}

fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

#[tokio::test]
async fn a_value_is_plain_bytes_and_comes_back_after_an_eviction() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    // An eviction policy that a store refuses is fine for a cache.
    call(&server, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let cache = cache(&format!("redis://{}", server.addr())).await;
    let render = |text: &'static str| move |_| async move { Ok::<_, String>(text.as_bytes().to_vec()) };
    let first = home(&keeper, &cache).get_bytes(render("<h1>first</h1>")).await.unwrap();
    assert_eq!((first.state, first.not_stored), (ValueState::Computed, None));
    assert_eq!(call(&server, &["GET", "page:home"]), "<h1>first</h1>");
    let found = home(&keeper, &cache).get_bytes(render("second")).await.unwrap();
    assert_eq!((&found.value[..], found.state), (&b"<h1>first</h1>"[..], ValueState::Fresh));

    // The server evicts the value: one caller computes it again, although it would still be fresh.
    call(&server, &["DEL", "page:home"]);
    let again = home(&keeper, &cache).get_bytes(render("third")).await.unwrap();
    assert_eq!((&again.value[..], again.state), (&b"third"[..], ValueState::Computed));
    assert!(again.fence > first.fence);
    assert_eq!(call(&server, &["GET", "page:home"]), "third");

    // A caller that does not name the cache cannot read the value, and says so.
    let elsewhere = keeper.cached("home").claim().await;
    assert!(matches!(&elsewhere, Err(Error::Invalid(why)) if why.contains("in_cache")), "{elsewhere:?}");
}

#[tokio::test]
async fn a_late_refresher_replaces_nothing_in_the_cache() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let cache = cache(&format!("redis://{}", server.addr())).await;
    let permit = async || match home(&keeper, &cache).claim().await.unwrap() {
        CachedStart::Refresh(permit) => permit,
        other => panic!("it was to be computed: {other:?}"),
    };
    let late = permit().await;
    keeper.break_lock("cached/home", "a test").await.unwrap();
    permit().await.finish(b"new").await.unwrap();
    let told = late.finish(b"late").await;
    assert!(matches!(told, Err(Error::Stale { .. })), "{told:?}");
    assert_eq!(call(&server, &["GET", "page:home"]), "new");
}

/// A cache that stores a value, says so, and never returns: the refresher ends between the write of the value and that of the record.
#[derive(Debug)]
struct NeverReturns(Arc<RedisCache>, Notify);

#[async_trait]
impl ValueCache for NeverReturns {
    async fn get(&self, key: &str) -> Result<Option<FencedValue>, Error> {
        self.0.get(key).await
    }

    async fn put(&self, key: &str, value: &[u8], fence: Fence, ttl: Duration) -> Result<PutOutcome, Error> {
        assert_eq!(self.0.put(key, value, fence, ttl).await?, PutOutcome::Stored);
        self.1.notify_one();
        std::future::pending().await
    }
}

/// The cache has one value per key. A reader that wanted the value of exactly the record's fence had none from the moment the refresher
/// put the new value there, and if the refresher died then, all callers waited for its lease although there was an old value and a new one.
#[tokio::test]
async fn a_refresher_that_dies_after_its_put_takes_no_value_away() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let cache = cache(&format!("redis://{}", server.addr())).await;
    let brief = |cached: Cached| cached.ttl(Duration::from_millis(100));
    let current = async || brief(home(&keeper, &cache)).current().await.unwrap();
    let first = brief(home(&keeper, &cache)).get_bytes(async |_| Ok::<_, String>(b"old".to_vec())).await;
    let first = first.unwrap();
    while current().await.expect("an old value is kept").state == ValueState::Fresh {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let dying = Arc::new(NeverReturns(cache.clone(), Notify::new()));
    let CachedStart::Refresh(permit) =
        brief(home(&keeper, &cache)).in_cache(dying.clone()).claim().await.unwrap()
    else {
        panic!("an old value is to be refreshed")
    };
    let fence = permit.fence();
    let refresh = tokio::spawn(permit.finish(b"a newer one"));
    dying.1.notified().await;

    // Another caller gets a value at once, and waits for nothing.
    let found = soon("no caller waits for the lease", brief(home(&keeper, &cache)).claim()).await.unwrap();
    assert!(matches!(&found, CachedStart::Value(found) if found.value == b"a newer one"), "{found:?}");
    refresh.abort();
    assert!(refresh.await.unwrap_err().is_cancelled());
    let found = current().await.expect("the refresher has taken the value away");
    assert_eq!((&found.value[..], found.state), (&b"a newer one"[..], ValueState::Stale));
    assert!(found.fence == fence && fence > first.fence, "{found:?}");

    // The record refers to the next value again, of any size.
    let next = home(&keeper, &cache).wait(Duration::from_secs(60));
    let next = next.get_bytes(async |_| Ok::<_, String>(b"next".to_vec())).await.unwrap();
    assert_eq!((next.state, next.not_stored), (ValueState::Computed, None));
    let found = current().await.expect("it was stored");
    assert_eq!((&found.value[..], found.fence), (&b"next"[..], next.fence));
}

async fn puts_and_gets(cache: &RedisCache) {
    let ttl = Duration::from_secs(60);
    for key in ["k", "{a}b", "x y"] {
        assert_eq!(cache.get(key).await.unwrap(), None);
        assert_eq!(cache.put(key, b"two\0\xff", fence(2), ttl).await.unwrap(), PutOutcome::Stored);
        assert_eq!(cache.put(key, b"one", fence(1), ttl).await.unwrap(), PutOutcome::Stale(fence(2)));
        let found = cache.get(key).await.unwrap().unwrap();
        assert_eq!((&found.bytes[..], found.fence), (&b"two\0\xff"[..], fence(2)));
        // The same fence again, as after a reply that was lost; and a newer one, which has more digits.
        assert_eq!(cache.put(key, b"again", fence(2), ttl).await.unwrap(), PutOutcome::Stored);
        assert_eq!(cache.put(key, b"ten", fence(10), ttl).await.unwrap(), PutOutcome::Stored);
        assert_eq!(cache.put(key, b"nine", fence(9), ttl).await.unwrap(), PutOutcome::Stale(fence(10)));
    }
}

#[tokio::test]
async fn an_older_fence_is_refused_also_when_its_value_has_ended() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let cache = cache(&format!("redis://{}", server.addr())).await;
    puts_and_gets(&cache).await;
    cache.put("brief", b"new", fence(7), Duration::from_millis(100)).await.unwrap();
    while cache.get("brief").await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let late = cache.put("brief", b"late", fence(6), Duration::from_secs(60)).await.unwrap();
    assert_eq!(late, PutOutcome::Stale(fence(7)));
    assert_eq!(call(&server, &["GET", "page:brief"]), "(nil)");
    assert!(matches!(cache.put("", b"x", fence(1), Duration::from_secs(1)).await, Err(Error::Invalid(_))));
}

#[tokio::test]
async fn a_cluster_keeps_values_too() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let nodes: Vec<String> = cluster.addrs().iter().map(ToString::to_string).collect();
    puts_and_gets(&*cache(&format!("redis+cluster://{}", nodes.join(","))).await).await;
}
