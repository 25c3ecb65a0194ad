//! Ten thousand rounds of requests that meet each other in a random order.

use std::sync::{Arc, Mutex};

use lockkeeper::{Lockkeeper, SystemClock};
use lockkeeper_fenced::http::FenceLayer;

use super::shaky::{Dice, Shaky};
use super::tools::*;

const ROUNDS: u64 = 10_000;

fn seed() -> u64 {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) * 7919 + 1_763_000_000);
    println!("SEED={seed}");
    seed
}

async fn keeper(seed: u64) -> Lockkeeper {
    let store = Lockkeeper::open("memory:").await.unwrap().store().clone();
    let shaky = Shaky { store, dice: Mutex::new(Dice::new(seed)), doubts: 12 };
    Lockkeeper::with_store(Arc::new(shaky), Arc::new(SystemClock))
}

/// What came of one request.
#[derive(Debug)]
struct Told {
    fence: u64,
    status: u16,
    seen: Option<u64>,
}

/// Two to six requests with low fences, so that many are equal; each starts, writes and ends when the dice say.
async fn round(layers: &[FenceLayer], dice: &mut Dice, path: &str) -> (Ledger, Vec<Told>) {
    let ledger = Ledger::default();
    let app = app(&ledger);
    let requests = (0..2 + dice.below(5)).map(|_| {
        let (fence, start, layer) = (1 + dice.below(4), dice.below(12), dice.below(layers.len() as u64));
        let path = format!("{path}?{},{}", dice.below(8), dice.below(8));
        let (layer, app) = (layers[layer as usize].clone(), app.clone());
        tokio::spawn(async move {
            pause(start as usize).await;
            let (status, body) = put(&layer, &app, &path, fence).await;
            Told { fence, status, seen: body["seen"].as_u64() }
        })
    });
    let mut told = Vec::new();
    for request in requests.collect::<Vec<_>>() {
        told.push(request.await.unwrap());
    }
    (ledger, told)
}

#[tokio::test(start_paused = true)]
async fn what_is_accepted_never_goes_back() {
    let seed = seed();
    let (mut dice, layer) = (Dice::new(seed), by_path(&keeper(seed).await));
    let (mut refused, mut taken) = (0, 0);
    for n in 0..ROUNDS {
        let (ledger, told) = round(std::slice::from_ref(&layer), &mut dice, &format!("/{n}")).await;
        let context = || format!("SEED={seed} round {n}: {:?} {told:?}", ledger.read());
        assert!(!ledger.goes_back(), "{}", context());
        // Who was told that it is written has written once, and who was refused has not.
        let mut written = ledger.read();
        let mut accepted: Vec<u64> =
            told.iter().filter(|told| told.status == 201).map(|told| told.fence).collect();
        written.sort_unstable();
        accepted.sort_unstable();
        assert_eq!(written, accepted, "{}", context());
        // No process is refused but for a higher fence that another process really sent; so the highest is always accepted.
        for told in told.iter().filter(|told| told.status != 201) {
            assert_eq!(told.status, 412, "{}", context());
            assert!(told.seen > Some(told.fence), "{}", context());
        }
        for seen in told.iter().filter_map(|told| told.seen) {
            assert!(told.iter().any(|other| other.fence == seen), "{}", context());
        }
        taken += accepted.len();
        refused += told.len() - accepted.len();
    }
    assert!(taken > 10_000 && refused > 5_000, "{taken} taken, {refused} refused: the dice are loaded");
}

#[tokio::test(start_paused = true)]
async fn one_after_the_other_exactly_those_are_accepted_that_do_not_go_back() {
    let seed = seed();
    let (mut dice, keeper) = (Dice::new(seed), keeper(seed).await);
    // Two processes that take turns: the marks are in the store.
    let layers = [by_path(&keeper), by_path(&keeper)];
    let ledger = Ledger::default();
    let app = app(&ledger);
    for n in 0..ROUNDS / 10 {
        let mut mark = 0;
        for _ in 0..10 {
            let (fence, layer) = (1 + dice.below(20), &layers[dice.below(2) as usize]);
            let (status, body) = put(layer, &app, &format!("/{n}"), fence).await;
            if fence >= mark {
                assert_eq!(status, 201, "SEED={seed}: {fence} after {mark}");
                mark = fence;
            } else {
                assert_eq!(
                    (status, body["seen"].as_u64()),
                    (412, Some(mark)),
                    "SEED={seed}: {fence} after {mark}"
                );
                assert_eq!(body["presented"].as_u64(), Some(fence));
            }
        }
    }
}

/// The twins: without the check, and with a check by two processes that do not know what the other one has under way. The
/// same rounds must go back on both, or the test above proves nothing. (The page says that a resource belongs to one process.)
#[tokio::test(start_paused = true)]
async fn without_the_check_and_without_the_wait_the_same_rounds_go_back() {
    let seed = seed();
    let keeper = keeper(seed).await;
    let mut dice = Dice::new(seed);
    let two = [by_path(&keeper), by_path(&keeper)];
    let mut went_back = 0;
    for n in 0..1000 {
        went_back += u32::from(round(&two, &mut dice, &format!("/{n}")).await.0.goes_back());
    }
    assert!(went_back > 0, "checking alone was enough?");
    let mut went_back = 0;
    for _ in 0..1000 {
        let ledger = Ledger::default();
        let app = app(&ledger);
        let requests = (0..4).map(|_| {
            let (fence, start) = (1 + dice.below(4), dice.below(12) as usize);
            let (mut app, path) = (app.clone(), format!("/?{},{}", dice.below(8), dice.below(8)));
            tokio::spawn(async move {
                pause(start).await;
                tower_service::Service::call(&mut app, request("PUT", &path, &[&fence.to_string()]))
                    .await
                    .unwrap();
            })
        });
        for request in requests.collect::<Vec<_>>() {
            request.await.unwrap();
        }
        went_back += u32::from(ledger.goes_back());
    }
    assert!(went_back > 100, "{went_back}");
}
