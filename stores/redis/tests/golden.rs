//! The stored format: the bytes of a plain hold that this version writes, and that every later version must read.

mod common;

use lockkeeper_core::{LockName, ReleaseOutcome};
use lockkeeper_testkit::laws::{give_back, name, request, take};
use lockkeeper_testkit::servers::{self, RedisOptions};

/// The layout of a hold: attempt, flags, fence, end, start, end of the minimum hold, owner, ttl, delay, mode, names, holder.
#[tokio::test]
async fn a_plain_hold_is_stored_in_the_layout_of_format_0() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = common::open(&format!("redis://{}", server.addr())).await;
    let request_sent = request("jobs");
    let held = take(&store, &request_sent).await;
    let script = "return #redis.call('GET', KEYS[1]) .. ' ' .. string.sub(redis.call('GET', KEYS[1]), 1, 32) \
                  .. string.byte(redis.call('GET', KEYS[1]), 33) .. string.sub(redis.call('GET', KEYS[1]), 66, 97)";
    let stored = servers::redis_call(server.addr(), &["EVAL", script, "1", "lock:jobs"]).unwrap();
    let attempt = request_sent.key.attempt.to_hex();
    assert!(
        stored.ends_with(&format!("{attempt}0{}", "-".repeat(32))),
        "the layout changed without a new format: {stored}"
    );
    let seen = store.inspect(&LockName::new("jobs").unwrap()).await.unwrap().unwrap();
    assert_eq!(seen.held[0].fence, held.fence);
    assert_eq!(seen.name, name("jobs"));
    assert_eq!(give_back(&store, &held.key).await, ReleaseOutcome::Released);
}
