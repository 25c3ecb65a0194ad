//! The view of a lock that other clients get.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use futures_util::StreamExt;
use lockkeeper_core::{EventKind, Holder, Page};

use super::*;

pub async fn inspect_tells_who_holds_and_who_waits<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let labelled = |label: &str| {
        let holder = Holder::new("host-7", 4711, Some(label.into())).unwrap();
        with(request("orders/42"), |request| request.holder = Arc::new(holder))
    };
    assert_eq!(a.inspect(&name("orders/42")).await.unwrap(), None);
    let held = take(&a, &labelled("first")).await;
    let _second = join_queue(&b, &labelled("second"), 1).await;
    let _third = join_queue(&b, &labelled("third"), 2).await;
    let view = b.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert_eq!(view.held.len(), 1, "the holder is not seen");
    assert_eq!(view.held[0].holder, *labelled("first").holder);
    assert_eq!(view.held[0].fence, held.fence);
    assert!(view.held[0].expires_in_ms > 0 && view.held[0].expires_in_ms <= LONG.as_millis() as u64);
    if polls(&a) {
        assert_eq!((view.queue.len(), view.waiting), (0, 0), "a line where there is none");
        return;
    }
    let line: Vec<_> = view.queue.iter().map(|queued| queued.holder.label.clone().unwrap()).collect();
    assert_eq!((line, view.waiting), (vec!["second".to_owned(), "third".to_owned()], 2));
}

pub async fn list_pages_through_all_in_order<H: Harness>(h: H) {
    let a = h.client().await;
    let mut wanted: Vec<String> = (0..25).map(|i| format!("list/{i:02}")).collect();
    wanted.push("list/é".into());
    for text in wanted.iter().rev() {
        take(&a, &request(text)).await;
    }
    for text in ["lisu", "lis", "list", "LIST/03", "lisz/"] {
        take(&a, &request(text)).await;
    }
    let mut found = Vec::new();
    let mut page = Page { after: None, limit: 7 };
    for _ in 0..10 {
        let got = a.list("list/", &page).await.unwrap();
        assert!(got.locks.len() <= 7);
        found.extend(got.locks.into_iter().map(|view| view.name.to_string()));
        match got.next {
            Some(after) => page.after = Some(after),
            None => break,
        }
    }
    assert_eq!(found, wanted, "the pages are not the whole");
    assert!(a.list("nothing/", &Page::FIRST).await.unwrap().locks.is_empty());
}

pub async fn watch_tells_what_happens_in_order<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    if !a.profile().watch {
        assert!(matches!(a.watch("").await, Err(lockkeeper_core::Error::Unsupported(_))));
        return;
    }
    let mut events = a.watch("watched/").await.unwrap();
    take(&b, &request("elsewhere")).await;
    let first = take(&b, &request("watched/1")).await;
    give_back(&b, &first.key).await;
    let second = take(&b, &request("watched/1")).await;
    let broken = b.break_lock(&name("watched/1"), "because").await.unwrap();
    let wanted = [
        EventKind::Granted { fence: first.fence },
        EventKind::Released { fence: first.fence },
        EventKind::Granted { fence: second.fence },
        EventKind::Broken { fence: broken, reason: "because".into() },
    ];
    for kind in wanted {
        let event = soon("an event comes", events.next()).await.unwrap().unwrap();
        assert_eq!((event.name.as_str(), &event.kind), ("watched/1", &kind), "an event is missing");
    }
}

/// A store may tell it only when the next client looks at the lock.
pub async fn watch_tells_of_a_hold_that_expired<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    if !a.profile().watch {
        return;
    }
    let mut events = a.watch("watched/").await.unwrap();
    let dead = take(&b, &with(request("watched/1"), |request| request.ttl = SHORT)).await;
    h.pass(SHORT * 2).await;
    let next = take(&b, &request("watched/1")).await;
    let wanted = [
        EventKind::Granted { fence: dead.fence },
        EventKind::Expired { fence: dead.fence },
        EventKind::Granted { fence: next.fence },
    ];
    for kind in wanted {
        let event = soon("an event comes", events.next()).await.unwrap().unwrap();
        assert_eq!((event.name.as_str(), &event.kind), ("watched/1", &kind), "the expiry was not told");
    }
}

pub async fn the_attempt_is_never_shown<H: Harness>(h: H) {
    let (a, b) = (h.client().await, h.client().await);
    let secret = request("orders/42");
    take(&a, &secret).await;
    let waiting = request("orders/42");
    let _waiter = join_queue(&b, &waiting, 1).await;
    let busy = refused(&b, &request("orders/42")).await;
    let view = b.inspect(&name("orders/42")).await.unwrap();
    let page = b.list("", &Page::FIRST).await.unwrap();
    let seen = format!("{busy:?} {view:?} {page:?} {:?} {:?}", secret, b.profile());
    for request in [&secret, &waiting] {
        let hex = request.key.attempt.to_hex();
        let plain = format!("{:?}", request.key.attempt.as_bytes());
        assert!(!seen.contains(&hex) && !seen.contains(&plain), "the proof of ownership is shown");
    }
}
