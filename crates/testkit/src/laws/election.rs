//! One leader among many.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use futures_util::StreamExt;
use lockkeeper::election::{Leader, Proclamation};
use lockkeeper::{Error, ReleaseOutcome};

use super::lossy::{self, LossyStore};
use super::register::has_records;
use super::*;

/// Whether the store has records; if not, an election must be refused.
async fn has(keeper: &Lockkeeper) -> bool {
    if has_records(keeper).await {
        return true;
    }
    let refused = keeper.election("e").campaign("me").await;
    assert!(matches!(refused, Err(Error::Unsupported(_))), "undeclared and not refused: {refused:?}");
    false
}

async fn elected<H: Harness>(h: &H, keeper: &Lockkeeper, value: &str) -> Leader {
    elected_after(h, keeper, value, "nothing").await
}

/// The same; `what` is what the law says that the candidate waits for.
async fn elected_after<H: Harness>(h: &H, keeper: &Lockkeeper, value: &str, what: &str) -> Leader {
    let election = keeper.election("e").ttl(LONG);
    let what = format!("a candidate is elected after {what}");
    soon(&what, while_time_passes(h, election.campaign(value))).await.unwrap()
}

async fn leads(keeper: &Lockkeeper) -> Option<String> {
    keeper.election("e").leader().await.unwrap().and_then(|leader| leader.value)
}

pub async fn there_is_one_leader_at_a_time<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    assert_eq!(leads(&b).await, None, "no leader is elected yet");
    let leader = elected(&h, &a, "a").await;
    let rival = tokio::spawn({
        let b = b.clone();
        async move { b.election("e").ttl(LONG).campaign("b").await }
    });
    waits_or_ends(&h.client().await, &name("election/e"), &rival).await;
    assert!(!rival.is_finished(), "two lead at once");
    assert_eq!(leads(&b).await.as_deref(), Some("a"));
    assert_eq!(leader.resign().await.unwrap(), ReleaseOutcome::Released);
    let next = soon("the rival is elected", while_time_passes(&h, rival)).await.unwrap().unwrap();
    assert_eq!(leads(&a).await.as_deref(), Some("b"));
    drop(next);
    is_free(&h.client().await, "election/e").await;
    assert_eq!(leads(&a).await, None, "it leads no more, and has not said so");
}

pub async fn terms_grow_from_leader_to_leader<H: Harness>(h: H) {
    let keepers = [h.keeper().await, h.keeper().await];
    if !has(&keepers[0]).await {
        return;
    }
    let mut last = None;
    for round in 0..6 {
        let leader = elected(&h, &keepers[round % 2], "me").await;
        assert!(Some(leader.term()) > last, "a term is not newer: {} after {last:?}", leader.term());
        last = Some(leader.term());
        match round % 3 {
            0 => _ = leader.resign().await.unwrap(),
            1 => drop(leader),
            _ => {
                h.client().await.break_lock(&name("election/e"), "a law").await.unwrap();
                drop(leader);
            }
        }
    }
}

pub async fn a_resignation_lets_the_next_one_in<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    for round in 0..3 {
        let (this, next) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        elected(&h, this, "one").await.resign().await.unwrap();
        assert_eq!(leads(next).await, None);
        elected_after(&h, next, "two", "a resignation").await.resign().await.unwrap();
    }
}

pub async fn a_silent_leader_is_replaced<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    // One that was elected and is never heard of again.
    let store = h.client().await;
    let dead = take(&store, &with(request("election/e"), |request| request.ttl = SHORT)).await;
    let next = elected_after(&h, &keeper, "alive", "a silent leader's ttl").await;
    assert!(next.term() > dead.fence);
    assert_eq!(leads(&keeper).await.as_deref(), Some("alive"));
}

pub async fn a_late_leader_cannot_proclaim<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let late = elected(&h, &a, "late").await;
    late.proclaim("still me").await.unwrap();
    // It is broken and does not know it yet, as after a pause.
    h.client().await.break_lock(&name("election/e"), "a law").await.unwrap();
    let newer = elected(&h, &b, "newer").await;
    match late.proclaim("me again").await {
        Err(Error::Stale { presented, seen }) => assert_eq!((presented, seen), (late.term(), newer.term())),
        Err(Error::Lost(_)) => {}
        other => panic!("a late leader was to be refused: {other:?}"),
    }
    assert_eq!(leads(&a).await.as_deref(), Some("newer"));
    assert_eq!(late.resign().await.unwrap(), ReleaseOutcome::AlreadyGone);
    assert_eq!(
        leads(&a).await.as_deref(),
        Some("newer"),
        "the resignation of a late leader changed something"
    );
    newer.proclaim("goes on").await.unwrap();
}

fn said(news: &Proclamation) -> &str {
    news.value.as_deref().unwrap_or("resigned")
}

pub async fn an_observer_sees_everything_once_in_order<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let first = elected(&h, &a, "first").await;
    let mut news = b.election("e").poll(Duration::from_millis(20)).observe();
    let heard = soon("it sees the leader", news.next()).await.unwrap().unwrap();
    assert_eq!(said(&heard), "first");
    first.resign().await.unwrap();
    let speak = async {
        for term in 0..3 {
            let leader = elected(&h, &a, &format!("{term}.0")).await;
            for word in 1..3 {
                leader.proclaim(format!("{term}.{word}")).await.unwrap();
            }
            leader.resign().await.unwrap();
        }
    };
    let listen = async {
        let mut heard: Vec<Proclamation> = Vec::new();
        for _ in 0..13 {
            heard.push(news.next().await.unwrap().unwrap());
        }
        heard
    };
    let both = async { tokio::join!(speak, listen).1 };
    let heard = soon("all is heard", while_time_passes(&h, both)).await;
    let order: Vec<_> = heard.iter().map(|p| (p.term, p.number)).collect();
    assert!(order.is_sorted_by(|a, b| a < b), "something came twice, or out of order: {heard:?}");
    let mut all = vec!["resigned".to_owned()];
    all.extend(
        (0..3).flat_map(|t| [format!("{t}.0"), format!("{t}.1"), format!("{t}.2"), "resigned".into()]),
    );
    assert_eq!(heard.iter().map(said).collect::<Vec<_>>(), all, "there are gaps");
    assert!(heard.iter().all(|p| !p.missed));
    // Also where the leader's requests and their replies get lost, or come late.
    for seed in lossy::seeds() {
        let network = LossyStore::new(h.client().await, seed);
        let lossy = Lockkeeper::with_store(network.clone(), h.clock());
        let words = [format!("{seed}.0"), format!("{seed}.1"), format!("{seed}.2"), "resigned".into()];
        let leader = elected(&h, &lossy, &words[0]).await;
        for word in &words[1..3] {
            soon("it is proclaimed", while_time_passes(&h, leader.proclaim(word.clone()))).await.unwrap();
        }
        soon("it resigns", while_time_passes(&h, leader.resign())).await.unwrap();
        network.deliver().await;
        for word in &words {
            let next =
                soon("what was said over a lossy network is heard", while_time_passes(&h, news.next()));
            assert_eq!(said(&next.await.unwrap().unwrap()), word, "something is missing, or came twice");
        }
    }
}

pub async fn an_observer_that_was_away_sees_the_truth<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let leader = elected(&h, &a, "first").await;
    let mut news = b.election("e").poll(Duration::from_millis(20)).observe();
    let first = soon("it sees the leader", news.next()).await.unwrap().unwrap();
    assert_eq!((said(&first), first.term, first.missed), ("first", leader.term(), false));
    // Away for a little: nothing is left out.
    for word in ["second", "third"] {
        soon("it is proclaimed", leader.proclaim(word)).await.unwrap();
    }
    for word in ["second", "third"] {
        let next = soon("what was said meanwhile is told", while_time_passes(&h, news.next()))
            .await
            .unwrap()
            .unwrap();
        assert_eq!((said(&next), next.missed), (word, false));
    }
    // An observer that was disconnected for long gets Missed, and then the present state.
    for word in 0..40 {
        leader.proclaim(format!("word {word}")).await.unwrap();
    }
    let mut missed = 0;
    loop {
        let next = soon("it is told", while_time_passes(&h, news.next())).await.unwrap().unwrap();
        missed += u32::from(next.missed);
        if said(&next) == "word 39" {
            break;
        }
    }
    assert_eq!(missed, 1, "a gap is told once");
}

pub async fn a_leader_resumes_its_term_with_its_attempt<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    // A process that wrote its attempt down, was elected, and then was killed.
    let attempt = Lockkeeper::new_attempt();
    let store = h.client().await;
    let before = with(request("election/e"), |request| request.key.attempt = attempt);
    let term = take(&store, &before).await.fence;
    let again = a.election("e").ttl(LONG).resume(attempt);
    let resumed = soon("a leader resumes its term", again.campaign("me")).await.unwrap();
    match H::RESUMES {
        true => assert_eq!(resumed.term(), term, "within the lease it is the same term"),
        false => assert!(resumed.term() > term, "it is a term of its own"),
    }
    assert!(resumed.guard().is_held());
    // No other candidate is elected by that.
    refused(&store, &request("election/e")).await;
    resumed.resign().await.unwrap();
    // After its lease it is a candidate like others, with the same attempt.
    let kept = Lockkeeper::new_attempt();
    let before = with(request("election/e"), |request| (request.key.attempt, request.ttl) = (kept, SHORT));
    let term = take(&store, &before).await.fence;
    h.pass(SHORT * 2).await;
    let other = elected(&h, &b, "other").await;
    assert!(other.term() > term);
    let late = tokio::spawn(async move { a.election("e").ttl(LONG).resume(kept).campaign("me").await });
    queue_reaches(&store, &name("election/e"), 1).await;
    let old = other.term();
    other.resign().await.unwrap();
    let late = soon("it is elected", while_time_passes(&h, late)).await.unwrap().unwrap();
    assert!(late.term() > old);
}

pub async fn bad_input_to_an_election_leaves_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    for bad in ["", "a\nb", &"x".repeat(lockkeeper::KEY_BYTES + 1)] {
        let refused = keeper.election(bad).campaign("me").await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{bad:?}: {refused:?}");
    }
    let refused = keeper.election("e").campaign("x".repeat(8193)).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    let refused = keeper.election("e").ttl(Duration::from_millis(1)).campaign("me").await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    is_free(&h.client().await, "election/e").await;
    assert!(keeper.registers("", &lockkeeper::Page::FIRST).await.unwrap().0.is_empty());
    // A record of another program is reported and not overwritten; and the lock is free again.
    keeper.register::<u64>("election/e").update(|_| 7).await.unwrap();
    let named = |told: &Error| told.to_string().contains("the record election/e was");
    let refused = keeper.election("e").campaign("me").await;
    assert!(matches!(&refused, Err(told @ Error::Invalid(_)) if named(told)), "{refused:?}");
    is_free(&h.client().await, "election/e").await;
    let refused = keeper.election("e").leader().await;
    assert!(matches!(&refused, Err(told @ Error::Invalid(_)) if named(told)), "{refused:?}");
    assert_eq!(keeper.register::<u64>("election/e").read().await.unwrap().unwrap().value, 7);
}
