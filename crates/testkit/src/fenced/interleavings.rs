//! Many holders, in every order: what is taken is exactly what never goes back.

use std::sync::Arc;

use lockkeeper_core::{Error, Fence};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_host::random_128;

use super::FencedHarness;
use super::laws::fence;

/// Numbers that are the same for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides
    }
}

/// Counts the outcomes, so that a run in which nothing happened does not pass.
#[derive(Clone, Copy, Default)]
struct InterleavingTally {
    taken: u64,
    refused: u64,
    repeated: u64,
}

#[derive(Clone)]
struct ResourceOp {
    fence: Fence,
    value: Option<Vec<u8>>,
    again: bool,
}

/// The writes of two to four holders, shuffled. Their fences are few, so that there are higher, equal and lower ones.
fn schedule(dice: &mut Dice) -> Vec<ResourceOp> {
    let mut ops = Vec::new();
    for holder in 0..2 + dice.roll(3) {
        let fence = fence(1 + dice.roll(5));
        for write in 0..1 + dice.roll(3) {
            let value = (dice.roll(5) > 0).then(|| format!("{holder}.{write}").into_bytes());
            ops.push(ResourceOp { fence, value, again: dice.roll(4) == 0 });
        }
    }
    for left in (1..ops.len()).rev() {
        ops.swap(left, dice.roll(left as u64 + 1) as usize);
    }
    ops
}

async fn send(resource: &dyn Fenced, name: &str, op: &ResourceOp) -> lockkeeper_core::Result<()> {
    match &op.value {
        Some(value) => resource.put(name, op.fence, value).await,
        None => resource.delete(name, op.fence).await,
    }
}

/// Runs one schedule with two clients in turn, beside the rule in its simplest form.
async fn play(clients: &[Arc<dyn Fenced>; 2], seed: u64) -> InterleavingTally {
    let (mut dice, mut tally) = (Dice(seed), InterleavingTally::default());
    let (name, mut model) = (format!("schedule/{seed}"), None::<GuardedValue>);
    for op in schedule(&mut dice) {
        for turn in 0..1 + u64::from(op.again) {
            let answer = send(&*clients[dice.roll(2) as usize], &name, &op).await;
            match &model {
                Some(seen) if op.fence < seen.fence => {
                    let (presented, seen) = (op.fence, seen.fence);
                    let refusal = matches!(answer, Err(Error::Stale { presented: p, seen: s }) if (p, s) == (presented, seen));
                    assert!(
                        refusal,
                        "against the rule: {presented} after {seen} was to be refused: {answer:?}"
                    );
                    tally.refused += 1;
                }
                _ => {
                    answer.unwrap_or_else(|e| {
                        panic!("against the rule: {} after {model:?} was to be taken: {e}", op.fence)
                    });
                    model = Some(GuardedValue { fence: op.fence, value: op.value.clone() });
                    (tally.taken, tally.repeated) = (tally.taken + 1, tally.repeated + turn);
                }
            }
        }
    }
    let seen = clients[dice.roll(2) as usize].read(&name).await.expect("it can be read");
    assert_eq!(seen, model, "against the rule: what is there is not what was taken last");
    tally
}

/// Ten thousand of them, or as many as the harness wants by day; `LOCKKEEPER_SEED` begins with the one that failed.
///
/// # Panics
/// If the law does not hold. The seed has been printed before.
pub async fn taken_is_exactly_what_never_goes_back<H: FencedHarness>(h: H) {
    const SIDE_BY_SIDE: u64 = 8;
    let count = if std::env::var_os("LOCKKEEPER_FULL").is_some() { 10_000 } else { H::INTERLEAVINGS };
    let given = std::env::var("LOCKKEEPER_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed =
        given.unwrap_or_else(|| u64::from_be_bytes(random_128()[..8].try_into().expect("eight bytes")) >> 12);
    println!("LOCKKEEPER_SEED={seed}");
    let mut players = Vec::new();
    for player in 0..SIDE_BY_SIDE {
        let clients = [H::client(&h.address()).await, H::client(&h.address()).await];
        players.push(tokio::spawn(async move {
            let mut sum = InterleavingTally::default();
            for nth in (player..count).step_by(SIDE_BY_SIDE as usize) {
                let tally = play(&clients, seed + nth).await;
                sum = sum + tally;
            }
            sum
        }));
    }
    let mut sum = InterleavingTally::default();
    for player in players {
        sum = sum + player.await.expect("the law holds in every interleaving");
    }
    let InterleavingTally { taken, refused, repeated } = sum;
    println!("{count} interleavings: {taken} taken, {refused} refused, {repeated} taken again");
    assert!(taken > count && refused > count / 2 && repeated > count / 10, "too little happened");
}

impl std::ops::Add for InterleavingTally {
    type Output = InterleavingTally;
    fn add(self, other: InterleavingTally) -> InterleavingTally {
        InterleavingTally {
            taken: self.taken + other.taken,
            refused: self.refused + other.refused,
            repeated: self.repeated + other.repeated,
        }
    }
}
