//! Two states that differ only in what cannot matter are one: in how late it is, in what the fences are beyond their
//! order, and in which client is called which.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;

const ORDERS: [[usize; CLIENTS]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

/// The parts of a state, each as a number without the name of its client, and that name.
#[derive(Default)]
struct Parts {
    clients: [(Id, u64); CLIENTS],
    table: Vec<(Id, u64)>,
    soup: Vec<(Id, u64)>,
    written: u64,
}

impl Parts {
    /// Written down with the clients in this order.
    fn write(&self, order: &[usize; CLIENTS], out: &mut Vec<u64>) {
        let named = |(id, part): &(Id, u64)| {
            let name = order[usize::from(id.client)] as u64 * 16 + u64::from(id.nth);
            name << 56 | part
        };
        out.clear();
        out.resize(CLIENTS, 0);
        for (i, client) in self.clients.iter().enumerate() {
            out[order[i]] = named(client);
        }
        out.extend(self.table.iter().map(named));
        out.push(self.written);
        let messages = out.len();
        out.extend(self.soup.iter().map(named));
        out[messages..].sort_unstable();
    }
}

impl World {
    /// 128 bits: with some millions of states, two different ones with the same bits are not to be expected.
    pub fn fingerprint(&self) -> u128 {
        let parts = self.parts();
        let (mut smallest, mut other) = (Vec::with_capacity(16), Vec::with_capacity(16));
        parts.write(&ORDERS[0], &mut smallest);
        for order in &ORDERS[1..] {
            parts.write(order, &mut other);
            if other < smallest {
                std::mem::swap(&mut other, &mut smallest);
            }
        }
        let hash = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            (salt, &smallest).hash(&mut hasher);
            u128::from(hasher.finish())
        };
        hash(0) << 64 | hash(1)
    }

    fn parts(&self) -> Parts {
        // At its beginning nothing is over yet: everything that the table has is shown, with its absolute end.
        let view = self.table.inspect(BootInstant::default(), &NAME);
        let held = view.as_ref().map_or(&[][..], |view| &view.held);
        let line = view.as_ref().map_or(&[][..], |view| &view.queue);
        let mut fences: Vec<Fence> = self.written.iter().map(|(fence, _)| *fence).collect();
        fences.extend(self.clients.iter().filter_map(|client| match &client.phase {
            Phase::Holding { fence, .. } => Some(*fence),
            _ => None,
        }));
        fences.extend(self.soup.iter().filter_map(|message| match message.body {
            Body::Granted(fence) => Some(fence),
            _ => None,
        }));
        fences.extend(held.iter().map(|held| held.fence));
        fences.sort_unstable();
        fences.dedup();
        let rank = |fence: Fence| fences.binary_search(&fence).map_or(255, |at| at as u64);

        let mut parts = Parts::default();
        for (part, client) in parts.clients.iter_mut().zip(&self.clients) {
            *part = (client.id, self.client(client, &rank));
        }
        let now = self.now.as_nanos() / 1_000_000;
        parts.table.extend(held.iter().map(|held| {
            let left = held.expires_in_ms.saturating_sub(now);
            (Id::of_pid(held.holder.pid), 1 << 48 | rank(held.fence) << 32 | left)
        }));
        parts.table.extend(line.iter().map(|queued| {
            let id = Id::of_pid(queued.holder.pid);
            let sent = self.asked.iter().find(|(other, _)| *other == id).map(|(_, sent)| *sent);
            (id, 2 << 48 | self.age(sent.unwrap()))
        }));
        parts.soup.extend(self.soup.iter().map(|message| (message.id, self.message(message, &rank))));
        parts.written = self.written.map_or(255, |(fence, _)| rank(fence));
        parts
    }

    /// In ticks. Beyond a lease all ages are the same: whatever was sent then is over.
    fn age(&self, sent: BootInstant) -> u64 {
        (self.now.since(sent).as_millis() / TICK.as_millis()).min(3) as u64
    }

    fn client(&self, client: &Client, rank: &impl Fn(Fence) -> u64) -> u64 {
        let Phase::Holding { lease, fence, renewing, .. } = &client.phase else {
            return match &client.phase {
                Phase::Idle => 1,
                Phase::Asking => 2,
                _ => 3,
            };
        };
        let state = match lease.state(self.now) {
            lease::LeaseState::Valid => 4,
            lease::LeaseState::Jeopardy => 5,
            // Lost is lost. When and why does not matter any more.
            lease::LeaseState::Lost(_) => return 6 | rank(*fence) << 8,
        };
        // In milliseconds, all below one lease. What is due is due, however long since.
        let from_now = |at: BootInstant| at.since(self.now).as_millis() as u64;
        let wakes = lease.poll_timeout().map_or(0xfff, from_now);
        state
            | rank(*fence) << 8
            | from_now(lease.deadline()) << 16
            | wakes << 32
            | u64::from(*renewing) << 48
    }

    fn message(&self, message: &Message, rank: &impl Fn(Fence) -> u64) -> u64 {
        let age = self.age(message.sent);
        let (kind, fence, age) = match message.body {
            Body::Ask => (0, 0, age),
            Body::Renew => (1, 0, age),
            // The age of a release does not matter.
            Body::Release => (2, 0, 0),
            Body::Granted(fence) => (3, rank(fence), age),
            Body::Renewed(true) => (4, 0, age),
            Body::Renewed(false) => (5, 0, age),
        };
        kind | fence << 8 | age << 16 | u64::from(message.copy) << 24
    }
}
