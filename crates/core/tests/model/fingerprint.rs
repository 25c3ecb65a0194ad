//! Two states that differ only in what cannot matter are one: in how late it is, in what the fences are beyond their
//! order, and in which client is called which.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;

const ORDERS: [[u8; CLIENTS]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

impl World {
    /// 128 bits: with some millions of states, two different ones with the same bits are not to be expected.
    pub fn fingerprint(&self) -> u128 {
        let mut fences: Vec<Fence> = self.written.iter().map(|(fence, _)| *fence).collect();
        for client in &self.clients {
            if let Phase::Holding { fence, .. } = &client.phase {
                fences.push(*fence);
            }
        }
        for message in &self.soup {
            if let Body::Granted(fence) = message.body {
                fences.push(fence);
            }
        }
        // At its beginning nothing is over yet: everything that the table has is shown, with its absolute end.
        let view = self.table.inspect(Moment::default(), &NAME);
        let held = view.as_ref().map_or(&[][..], |view| &view.held);
        fences.extend(held.iter().map(|held| held.fence));
        fences.sort();
        fences.dedup();
        let rank = |fence: Fence| fences.binary_search(&fence).unwrap_or(usize::MAX) as u8;

        let now = self.now.as_nanos() / 1_000_000;
        let line = view.as_ref().map_or(&[][..], |view| &view.line);
        let write = |order: &[u8; CLIENTS]| {
            let mut out = Vec::with_capacity(96);
            let name = |id: Id| order[usize::from(id.client)] * 16 + id.nth;
            let mut clients: Vec<Vec<u8>> =
                self.clients.iter().map(|c| self.client(c, name(c.id), &rank)).collect();
            clients.sort();
            out.extend(clients.into_iter().flatten());
            for held in held {
                let left = (held.expires_in_ms as i64 - now as i64).max(-1);
                out.extend([100, name(Id::of_pid(held.holder.pid)), rank(held.fence)]);
                out.extend(left.to_be_bytes());
            }
            for queued in line {
                let id = Id::of_pid(queued.holder.pid);
                let sent = self.asked.iter().find(|(other, _)| *other == id).map(|(_, sent)| *sent);
                out.extend([101, name(id), self.age(sent.unwrap())]);
            }
            let mut soup: Vec<[u8; 6]> =
                self.soup.iter().map(|m| self.message(m, name(m.id), &rank)).collect();
            soup.sort();
            out.extend(soup.into_iter().flatten());
            out.push(self.written.map_or(255, |(fence, _)| rank(fence)));
            out
        };
        let smallest = ORDERS.iter().map(write).min().unwrap();
        let hash = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            (salt, &smallest).hash(&mut hasher);
            u128::from(hasher.finish())
        };
        hash(0) << 64 | hash(1)
    }

    /// In ticks. Beyond a lease all ages are the same: whatever was sent then is over.
    fn age(&self, sent: Moment) -> u8 {
        (self.now.since(sent).as_millis() / TICK.as_millis()).min(3) as u8
    }

    fn client(&self, client: &Client, name: u8, rank: &impl Fn(Fence) -> u8) -> Vec<u8> {
        let mut out = vec![name];
        match &client.phase {
            Phase::Idle => out.push(0),
            Phase::Asking => out.push(1),
            Phase::Crashed => out.push(2),
            Phase::Holding { lease, fence, renewing, told } => {
                let state = match lease.state(self.now) {
                    lease::State::Valid => 3,
                    lease::State::Jeopardy => 4,
                    lease::State::Lost(_) => 5,
                };
                out.extend([state, rank(*fence), u8::from(*renewing), u8::from(*told)]);
                // What is due is due, however long since.
                let from_now = |at: Moment| (at.since(self.now).as_millis() as u64).to_be_bytes();
                if state < 5 {
                    out.extend(from_now(lease.deadline()));
                }
                out.extend(lease.poll_timeout().into_iter().flat_map(from_now));
            }
        }
        out
    }

    fn message(&self, message: &Message, name: u8, rank: &impl Fn(Fence) -> u8) -> [u8; 6] {
        let (kind, fence) = match message.body {
            Body::Ask => (0, 0),
            Body::Renew => (1, 0),
            Body::Release => (2, 0),
            Body::Granted(fence) => (3, rank(fence)),
            Body::Renewed(Renewal::Renewed) => (4, 0),
            Body::Renewed(Renewal::Lost) => (5, 0),
        };
        // Nobody looks at the age of a release.
        let age = if message.body == Body::Release { 0 } else { self.age(message.sent) };
        [102, kind, name, fence, age, u8::from(message.copy)]
    }
}
