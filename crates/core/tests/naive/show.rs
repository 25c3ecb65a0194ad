//! What the naive table tells and shows of itself.

use super::*;
use lockkeeper_core::{Busy, Grant, Holder, HolderView, LockPage, LockView, Page, WaiterView};

impl Hold {
    pub fn grant(&self, now: Now) -> Grant {
        let LockRequest { key, mode, ttl, .. } = self.request.clone();
        Grant { key, fence: self.fence, mode, ttl, sent_at: now.moment, lease: ttl }
    }

    fn show(&self, now: BootInstant) -> HolderView {
        HolderView {
            holder: (*self.request.holder).clone(),
            fence: self.fence,
            mode: self.request.mode,
            since: self.since,
            expires_in_ms: ms(now, self.ends),
            lingering: self.lingering,
            revoked: None,
        }
    }
}

fn ms(now: BootInstant, then: BootInstant) -> u64 {
    (then.as_nanos() - now.as_nanos()) / 1_000_000
}

impl Naive {
    pub fn event(&mut self, now: Now, request: &LockRequest, kind: EventKind) {
        for name in &request.key.names {
            self.news(now, name, kind.clone(), Some(&request.holder));
        }
    }

    pub fn news(&mut self, now: Now, name: &LockName, kind: EventKind, holder: Option<&Holder>) {
        let event = Event { at: now.wall, name: name.clone(), kind, holder: holder.cloned() };
        self.told.push(Told::Event(event));
    }

    /// Oldest fence first; within one fence, in the order of the grants.
    fn holders(&self, name: &LockName) -> Vec<&Hold> {
        let mut holds: Vec<&Hold> = self.holds.iter().filter(|h| has(&h.request, name)).collect();
        holds.sort_by_key(|h| h.fence);
        holds
    }

    pub fn busy(&self, now: Now, request: &LockRequest, ahead: &[Waiter]) -> Busy {
        let names = &request.key.names;
        let name = names.iter().find(|n| self.in_the_way(request, n, ahead)).unwrap_or(names.first());
        Busy {
            name: name.clone(),
            held: self.holders(name).iter().take(3).map(|h| h.show(now.moment)).collect(),
            waiting: self.line.iter().filter(|w| has(&w.request, name)).count(),
        }
    }

    pub fn inspect(&self, now: BootInstant, name: &LockName) -> Option<LockView> {
        let live = |h: &&&Hold| h.ends > now;
        let held: Vec<HolderView> = self.holders(name).iter().filter(live).map(|h| h.show(now)).collect();
        let show = |w: &Waiter| WaiterView {
            holder: (*w.request.holder).clone(),
            mode: w.request.mode,
            since: w.since,
        };
        let line: Vec<WaiterView> = self.line.iter().filter(|w| has(&w.request, name)).map(show).collect();
        let delays = self.delays.iter().filter(|(n, until)| n == name && *until > now);
        let delayed_ms = delays.map(|(_, until)| ms(now, *until)).max();
        if held.is_empty() && line.is_empty() && delayed_ms.is_none() {
            return None;
        }
        let waiting = line.len();
        Some(LockView { name: name.clone(), held, queue: line, waiting, delayed_ms })
    }

    /// `names`: all there are, in order.
    pub fn list(&self, now: BootInstant, names: &[LockName], prefix: &str, page: &Page) -> LockPage {
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
    pub fn due(&self) -> Option<BootInstant> {
        let holds = self.holds.iter().map(|h| h.ends);
        // Of several delays of one name the longest counts.
        let last = |(name, until): &&(LockName, BootInstant)| {
            !self.delays.iter().any(|(other, later)| other == name && later > until)
        };
        let delays = self.delays.iter().filter(last).map(|(_, until)| *until);
        let patience = self.line.iter().map(|w| w.until).filter(|until| *until < BootInstant::NEVER);
        holds.chain(delays).chain(patience).min()
    }
}
