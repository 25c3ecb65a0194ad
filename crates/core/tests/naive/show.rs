//! What the naive table tells and shows of itself.

use super::*;
use lockkeeper_core::{Busy, Grant, Held, Holder, LockPage, LockView, Page, Queued};

impl Hold {
    pub fn grant(&self, now: Now) -> Grant {
        let Ask { claim, mode, ttl, .. } = self.ask.clone();
        Grant { claim, fence: self.fence, mode, ttl, sent_at: now.moment, lease: ttl }
    }

    fn show(&self, now: Moment) -> Held {
        Held {
            holder: (*self.ask.holder).clone(),
            fence: self.fence,
            mode: self.ask.mode,
            since: self.since,
            expires_in_ms: ms(now, self.ends),
            lingering: self.lingering,
            revoked: None,
        }
    }
}

fn ms(now: Moment, then: Moment) -> u64 {
    (then.as_nanos() - now.as_nanos()) / 1_000_000
}

impl Naive {
    pub fn event(&mut self, now: Now, ask: &Ask, kind: EventKind) {
        for name in &ask.claim.names {
            self.news(now, name, kind.clone(), Some(&ask.holder));
        }
    }

    pub fn news(&mut self, now: Now, name: &LockName, kind: EventKind, holder: Option<&Holder>) {
        let event = Event { at: now.wall, name: name.clone(), kind, holder: holder.cloned() };
        self.told.push(Told::Event(event));
    }

    /// Oldest fence first; within one fence, in the order of the grants.
    fn holders(&self, name: &LockName) -> Vec<&Hold> {
        let mut holds: Vec<&Hold> = self.holds.iter().filter(|h| has(&h.ask, name)).collect();
        holds.sort_by_key(|h| h.fence);
        holds
    }

    pub fn busy(&self, now: Now, ask: &Ask, ahead: &[Waiter]) -> Busy {
        let names = &ask.claim.names;
        let name = names.iter().find(|n| self.in_the_way(ask, n, ahead)).unwrap_or(names.first());
        Busy {
            name: name.clone(),
            held: self.holders(name).iter().take(3).map(|h| h.show(now.moment)).collect(),
            waiting: self.line.iter().filter(|w| has(&w.ask, name)).count(),
        }
    }

    pub fn inspect(&self, now: Moment, name: &LockName) -> Option<LockView> {
        let live = |h: &&&Hold| h.ends > now;
        let held: Vec<Held> = self.holders(name).iter().filter(live).map(|h| h.show(now)).collect();
        let show = |w: &Waiter| Queued { holder: (*w.ask.holder).clone(), mode: w.ask.mode, since: w.since };
        let line: Vec<Queued> = self.line.iter().filter(|w| has(&w.ask, name)).map(show).collect();
        let delays = self.delays.iter().filter(|(n, until)| n == name && *until > now);
        let delayed_ms = delays.map(|(_, until)| ms(now, *until)).max();
        if held.is_empty() && line.is_empty() && delayed_ms.is_none() {
            return None;
        }
        let waiting = line.len();
        Some(LockView { name: name.clone(), held, line, waiting, delayed_ms })
    }

    /// `names`: all there are, in order.
    pub fn list(&self, now: Moment, names: &[LockName], prefix: &str, page: &Page) -> LockPage {
        let mut locks: Vec<LockView> = names
            .iter()
            .filter(|n| n.as_str().starts_with(prefix) && page.after.as_ref().is_none_or(|after| *n > after))
            .filter_map(|n| self.inspect(now, n))
            .collect();
        let more = locks.len() > page.limit;
        locks.truncate(page.limit);
        let next = if more { locks.last().map(|l| l.name.clone()) } else { None };
        LockPage { locks, next }
    }

    /// The next moment at which something is due.
    pub fn due(&self) -> Option<Moment> {
        let holds = self.holds.iter().map(|h| h.ends);
        // Of several delays of one name the longest counts.
        let last = |(name, until): &&(LockName, Moment)| {
            !self.delays.iter().any(|(other, later)| other == name && later > until)
        };
        let delays = self.delays.iter().filter(last).map(|(_, until)| *until);
        let patience = self.line.iter().map(|w| w.until).filter(|until| *until < Moment::NEVER);
        holds.chain(delays).chain(patience).min()
    }
}
