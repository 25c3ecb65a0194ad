//! The laws themselves, each a small function with a sentence for a name.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::{Fenced, GuardedValue};

use super::FencedHarness;

pub(super) fn fence(n: u64) -> Fence {
    Fence::new(n).expect("a good fence")
}

async fn pair<H: FencedHarness>(h: &H) -> (Arc<dyn Fenced>, Arc<dyn Fenced>) {
    let address = h.address();
    (H::client(&address).await, H::client(&address).await)
}

/// Asserts the mark and the value of a resource.
async fn is(resource: &dyn Fenced, name: &str, mark: u64, value: Option<&str>) {
    let seen = resource.read(name).await.expect("it can be read");
    let wanted = GuardedValue { fence: fence(mark), value: value.map(|value| value.as_bytes().to_vec()) };
    assert_eq!(seen, Some(wanted), "what is in {name}");
}

/// It has to be refused, with these numbers.
fn refused(answer: Result<()>, presented: u64, seen: u64) {
    match answer {
        Err(Error::Stale { presented: p, seen: s }) => {
            assert_eq!((p.get(), s.get()), (presented, seen), "the numbers of the refusal")
        }
        other => panic!("fence {presented} after {seen} was to be refused: {other:?}"),
    }
}

pub async fn a_late_write_is_refused_and_changes_nothing<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    assert_eq!(a.read("orders/42").await.unwrap(), None, "no writer has written yet");
    b.put("orders/42", fence(7), b"new").await.unwrap();
    refused(a.put("orders/42", fence(6), b"late").await, 6, 7);
    is(&*b, "orders/42", 7, Some("new")).await;
    refused(a.put("orders/42", Fence::MIN, b"later").await, 1, 7);
    is(&*a, "orders/42", 7, Some("new")).await;
    is(&*b, "orders/42", 7, Some("new")).await;
}

pub async fn a_refusal_says_what_was_presented_and_what_was_seen<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    for (mark, late) in [(10, 9), (1_000_000, 17), (1_780_000_000_000_000, 1_779_999_999_999_999)] {
        a.put("orders/42", fence(mark), b"new").await.unwrap();
        refused(b.put("orders/42", fence(late), b"late").await, late, mark);
        refused(b.delete("orders/42", fence(late)).await, late, mark);
    }
}

pub async fn the_mark_rises_with_every_higher_fence<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    for mark in [1, 2, 5, 9, 10, 11, 100] {
        a.put("orders/42", fence(mark), mark.to_string().as_bytes()).await.unwrap();
        is(&*b, "orders/42", mark, Some(&mark.to_string())).await;
        if mark > 1 {
            refused(b.put("orders/42", fence(mark - 1), b"late").await, mark - 1, mark);
        }
    }
}

pub async fn the_same_fence_is_taken_again<H: FencedHarness>(h: H) {
    // A holder writes more than once under one grant, also from another connection.
    let (a, b) = pair(&h).await;
    a.put("orders/42", fence(5), b"one").await.unwrap();
    b.put("orders/42", fence(5), b"two").await.expect("the same fence is taken again");
    is(&*a, "orders/42", 5, Some("two")).await;
    a.delete("orders/42", fence(5)).await.unwrap();
    is(&*b, "orders/42", 5, None).await;
    b.put("orders/42", fence(5), b"three").await.unwrap();
    is(&*a, "orders/42", 5, Some("three")).await;
}

pub async fn a_retry_is_harmless_and_a_late_one_is_refused<H: FencedHarness>(h: H) {
    // A writer without a reply sends the same write again.
    let (a, b) = pair(&h).await;
    for _ in 0..3 {
        a.put("orders/42", fence(5), b"same").await.expect("the retry is taken");
        is(&*a, "orders/42", 5, Some("same")).await;
    }
    b.put("orders/42", fence(6), b"next").await.unwrap();
    refused(a.put("orders/42", fence(5), b"same").await, 5, 6);
    for _ in 0..3 {
        b.delete("orders/42", fence(7)).await.unwrap();
        is(&*a, "orders/42", 7, None).await;
    }
}

pub async fn a_late_delete_is_refused<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    b.put("orders/42", fence(7), b"new").await.unwrap();
    refused(a.delete("orders/42", fence(6)).await, 6, 7);
    is(&*b, "orders/42", 7, Some("new")).await;
}

pub async fn deleting_keeps_the_mark<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    a.put("orders/42", fence(5), b"old").await.unwrap();
    b.delete("orders/42", fence(7)).await.unwrap();
    is(&*b, "orders/42", 7, None).await;
    // To a resource that forgot, this would look like the first write of all.
    refused(a.put("orders/42", fence(6), b"late").await, 6, 7);
    refused(a.delete("orders/42", fence(6)).await, 6, 7);
    is(&*a, "orders/42", 7, None).await;
    b.put("orders/42", fence(8), b"again").await.unwrap();
    is(&*a, "orders/42", 8, Some("again")).await;
}

pub async fn deleting_nothing_counts_as_a_write<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    b.delete("orders/42", fence(7)).await.unwrap();
    is(&*a, "orders/42", 7, None).await;
    refused(a.put("orders/42", fence(6), b"late").await, 6, 7);
}

pub async fn every_resource_has_a_mark_of_its_own<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    a.put("orders/42", fence(9), b"nine").await.unwrap();
    b.put("orders/43", fence(3), b"three").await.expect("another resource has a mark of its own");
    is(&*a, "orders/42", 9, Some("nine")).await;
    is(&*a, "orders/43", 3, Some("three")).await;
    assert_eq!(b.read("orders/4").await.unwrap(), None);
}

pub async fn every_name_is_a_resource_of_its_own<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    let long = "n".repeat(512);
    let names = [
        "orders/42",
        "orders_42",
        "orders:42",
        "Orders/42",
        "orders/42 ",
        " orders/42",
        "orders//42",
        "ümläut/☃",
        "u\u{308}ml",
        "a'b\"c;--",
        "{a}b",
        "{a",
        "a}",
        "}{",
        "{}a",
        "..",
        ".",
        "../../etc/passwd",
        "-rf",
        "$HOME`x`",
        "a\\b",
        "%2F",
        "%",
        "null",
        "line\nbreak",
        "a.fence",
        ".a.fence",
        "fence",
        &long,
    ];
    let mut taken = Vec::new();
    for (nth, name) in names.iter().enumerate() {
        let mark = 1 + nth as u64;
        match a.put(name, fence(mark), name.as_bytes()).await {
            Ok(()) => taken.push((mark, *name)),
            // The resource refuses a name that it cannot keep apart from another one, and writes nothing.
            Err(Error::Invalid(_)) => assert!(nth > 0, "{name} is nothing special"),
            Err(e) => panic!("{name:?}: {e}"),
        }
    }
    for (mark, name) in taken {
        is(&*b, name, mark, Some(name)).await;
    }
}

pub async fn every_value_comes_back_whole<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    let bytes: Vec<u8> = (0..=255).collect();
    let large = bytes.repeat(400);
    for (nth, value) in [&b""[..], b"\0", b"a\0b", b"\r\n", &bytes, &large, b""].into_iter().enumerate() {
        let mark = fence(1 + nth as u64);
        a.put("orders/42", mark, value).await.unwrap();
        let seen = b.read("orders/42").await.unwrap();
        assert!(
            seen == Some(GuardedValue { fence: mark, value: Some(value.to_vec()) }),
            "value {nth} came back as another"
        );
    }
}

pub async fn fences_are_compared_as_whole_numbers<H: FencedHarness>(h: H) {
    let (a, b) = pair(&h).await;
    let max = Fence::MAX.get();
    // As text 9 is above 10, and a float does not tell the last two apart.
    for (nth, (low, high)) in
        [(9, 10), (99, 1000), (max / 2, max / 2 + 1), (max - 1, max)].into_iter().enumerate()
    {
        let name = format!("orders/{nth}");
        a.put(&name, fence(low), b"low").await.unwrap();
        b.put(&name, fence(high), b"high").await.expect("the higher fence is taken");
        refused(a.put(&name, fence(low), b"late").await, low, high);
        is(&*b, &name, high, Some("high")).await;
    }
}

pub async fn racing_writers_never_take_the_mark_back<H: FencedHarness>(h: H) {
    const WRITERS: u64 = 4;
    const ROUNDS: u64 = 25;
    let acknowledged = Arc::new(AtomicU64::new(0));
    let mut writers = Vec::new();
    for me in 0..WRITERS {
        let (acknowledged, resource) = (acknowledged.clone(), H::client(&h.address()).await);
        writers.push(tokio::spawn(async move {
            for round in 1..=ROUNDS {
                // They take their fences in turn, and use them out of turn.
                race(&*resource, &acknowledged, round * WRITERS + me).await;
            }
        }));
    }
    for writer in writers {
        writer.await.expect("a writer saw nothing wrong");
    }
    let highest = ROUNDS * WRITERS + WRITERS - 1;
    let seen = H::client(&h.address()).await.read("orders/42").await.unwrap().expect("there was a write");
    assert_eq!(seen.fence, fence(highest), "{} was seen after {highest}", seen.fence);
    assert_eq!(seen.value, Some(highest.to_string().into_bytes()), "a value and another's mark");
}

async fn race(resource: &dyn Fenced, acknowledged: &AtomicU64, mine: u64) {
    match resource.put("orders/42", fence(mine), mine.to_string().as_bytes()).await {
        Ok(()) => _ = acknowledged.fetch_max(mine, Ordering::SeqCst),
        Err(Error::Stale { presented, seen }) => assert!(presented == fence(mine) && presented < seen),
        Err(e) => panic!("{e}"),
    }
    // A read shows at least every write that was acknowledged before it.
    let least = fence(acknowledged.load(Ordering::SeqCst).max(mine));
    let seen = resource.read("orders/42").await.unwrap().expect("there was a write");
    assert!(seen.fence >= least, "{} was seen after {least}", seen.fence);
    assert_eq!(seen.value, Some(seen.fence.to_string().into_bytes()), "a value and another's mark");
}

pub async fn a_write_that_was_given_up_does_no_harm_later<H: FencedHarness>(h: H) {
    // Dropped after some steps, it may happen or not, but never over a newer one.
    let (a, b) = pair(&h).await;
    for steps in 0..6 {
        let name = format!("orders/{steps}");
        {
            let mut write = pin!(a.put(&name, fence(5), b"given up"));
            for _ in 0..steps {
                let ended = poll_fn(|context| Poll::Ready(write.as_mut().poll(context).is_ready())).await;
                if ended {
                    break;
                }
                tokio::time::sleep(Duration::from_micros(300)).await;
            }
        }
        b.put(&name, fence(6), b"new").await.unwrap();
        for _ in 0..10 {
            is(&*b, &name, 6, Some("new")).await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        refused(a.put(&name, fence(5), b"given up").await, 5, 6);
    }
}
