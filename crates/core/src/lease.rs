//! The lease of a guard: what its holder may believe, and until when. Told the time, never asks for it.
//!
//! The deadline counts from the moment a request was *sent*: however late its answer comes, the store cannot have
//! started counting before that. A margin covers clocks that run at slightly different rates. Once lost, always lost.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::{Moment, Renewal};

/// What a holder may believe.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// It is yours until the deadline, and the deadline keeps moving.
    Valid,
    /// It is yours until the deadline, but the last renewal was not answered. It may still come right.
    Jeopardy,
    /// It is not yours.
    Lost(Why),
}

/// Why a lock was lost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// The store says that it is somebody else's, or nobody's: it expired there, or was broken.
    Taken,
    /// It was revoked, for this reason: the holder is to stop and to give it back. Until it does, or its deadline is over, nobody else has it.
    Revoked(Arc<str>),
    /// The deadline came and no renewal had been answered.
    Silence,
    /// The deadline came and every renewal had failed; the last one with this error.
    Unreachable(Arc<str>),
    /// It was held for as long as it may be.
    MaxHold,
    /// Its holder showed no progress for too long, so it was not renewed.
    Stalled,
    /// The part of the program that renews it is gone.
    Abandoned,
    /// It belongs to another process, of which this one is a fork.
    Forked,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Why::Taken => "the store gave it away: it had expired there, or was broken",
            Why::Revoked(reason) => return write!(f, "it was broken: {reason}"),
            Why::Silence => "no renewal was answered in time",
            Why::Unreachable(error) => return write!(f, "it could not be renewed in time: {error}"),
            Why::MaxHold => "it was held for as long as max-hold allows",
            Why::Stalled => "no progress was shown, so it was not renewed",
            Why::Abandoned => "the renewing thread has ended",
            Why::Forked => "it belongs to another process, of which this one is a fork",
        })
    }
}

/// Something the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send a renewal now, and report its answer with the moment it was sent.
    SendRenew,
    /// Tell the holder what it may believe from now on.
    Tell(State),
}

/// What a lease is to keep to.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// How long it lasts from each good renewal.
    pub ttl: Duration,
    /// How long it may be held altogether.
    pub max_hold: Option<Duration>,
    /// The longest time between two signs of progress.
    pub progress_within: Option<Duration>,
    /// 0 to 255, thrown once per lease: spreads the renewals of many holders.
    pub jitter: u8,
}

/// How much earlier than the store a holder stops believing: 1 % of the ttl and 50 ms, at most a quarter of the ttl.
pub fn margin(ttl: Duration) -> Duration {
    (ttl / 100 + Duration::from_millis(50)).min(ttl / 4)
}

/// The machine behind a guard.
#[derive(Clone, Debug)]
pub struct Lease {
    terms: Terms,
    state: State,
    deadline: Moment,
    /// No renewal can move the deadline past this.
    end: Moment,
    renew_at: Moment,
    /// A renewal was due, and withheld until there is progress again.
    parked: bool,
    /// When a renewal that is under way counts as unanswered.
    give_up_at: Option<Moment>,
    unanswered: u32,
    /// How the last renewal failed, if that was reported.
    failure: Option<Arc<str>>,
    progress: Moment,
    effects: VecDeque<Effect>,
}

impl Lease {
    /// A lease that was won by a request sent at `sent_at`, and lasts for `first` from there unless it is renewed.
    pub fn new(sent_at: Moment, first: Duration, terms: Terms) -> Self {
        let end = terms.max_hold.map_or(Moment::NEVER, |max| sent_at + max);
        let mut lease = Lease {
            terms,
            state: State::Valid,
            deadline: sent_at,
            end,
            renew_at: sent_at,
            parked: false,
            give_up_at: None,
            unanswered: 0,
            failure: None,
            progress: sent_at,
            effects: VecDeque::new(),
        };
        lease.count_from(sent_at, first.min(terms.ttl));
        lease
    }

    fn count_from(&mut self, sent_at: Moment, ttl: Duration) {
        let deadline = (sent_at + (ttl - margin(ttl))).min(self.end);
        if deadline >= self.deadline {
            self.deadline = deadline;
            // A third of it, up to an eighth of that earlier.
            let third = ttl / 3;
            self.renew_at = sent_at + (third - third / 8 * u32::from(self.terms.jitter) / 255);
        }
    }

    /// What the holder may believe, if it is `now` and nothing else has been heard.
    pub fn state(&self, now: Moment) -> State {
        match &self.state {
            State::Lost(why) => State::Lost(why.clone()),
            _ if now >= self.deadline => State::Lost(self.why_at_deadline()),
            state => state.clone(),
        }
    }

    /// Until when the lock may be believed held, as things stand.
    pub fn deadline(&self) -> Moment {
        self.deadline
    }

    /// The holder shows that it gets on.
    pub fn handle_progress(&mut self, now: Moment) {
        self.progress = self.progress.max(now);
        if std::mem::take(&mut self.parked) {
            self.renew_at = now;
        }
    }

    /// The holder learns from elsewhere that the lock is lost.
    pub fn handle_loss(&mut self, why: Why) {
        self.enter(State::Lost(why));
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Moment) {
        if now >= self.deadline {
            self.enter(State::Lost(self.why_at_deadline()));
        }
        if matches!(self.state, State::Lost(_)) {
            return;
        }
        if self.give_up_at.is_some_and(|at| now >= at) {
            self.failure = None;
            self.unanswered(now);
        }
        if self.give_up_at.is_some() || now < self.renew_at {
            return;
        }
        if self.may_renew(now) {
            self.give_up_at = Some(now + self.terms.ttl / 3);
            self.effects.push_back(Effect::SendRenew);
        } else {
            // Left as it is, a time that is past would wake the driver at once, again and again.
            self.parked = true;
        }
    }

    /// A renewal is sent before it is due, in the company of others.
    pub fn renew_early(&mut self, now: Moment) -> bool {
        let soon = now + self.terms.ttl / 12;
        let joins = self.state(now) == State::Valid
            && self.give_up_at.is_none()
            && self.renew_at <= soon
            && self.may_renew(now);
        if joins {
            self.give_up_at = Some(now + self.terms.ttl / 3);
        }
        joins
    }

    /// The answer to a renewal sent at `sent_at`; `None` if nothing was heard or the outcome is unknown.
    pub fn handle_renewal(&mut self, sent_at: Moment, now: Moment, answer: Option<Renewal>) {
        if matches!(self.state(now), State::Lost(_)) {
            // Too late, whatever it says: the holder may have been told already.
            return self.handle_timeout(now);
        }
        match answer {
            Some(Renewal::Renewed) => {
                self.give_up_at = None;
                self.unanswered = 0;
                self.failure = None;
                self.count_from(sent_at, self.terms.ttl);
                self.enter(State::Valid);
            }
            Some(Renewal::Lost) => self.enter(State::Lost(Why::Taken)),
            Some(Renewal::Revoked(reason)) => self.enter(State::Lost(Why::Revoked(reason))),
            Some(Renewal::Unknown) | None => {
                self.failure = None;
                self.unanswered(now);
            }
        }
    }

    /// A renewal failed with `error`: it is tried again until the deadline.
    pub fn handle_failure(&mut self, now: Moment, error: Arc<str>) {
        if matches!(self.state(now), State::Lost(_)) {
            return self.handle_timeout(now);
        }
        self.failure = Some(error);
        self.unanswered(now);
    }

    fn unanswered(&mut self, now: Moment) {
        self.give_up_at = None;
        // Quickly at first, for a blip; then at most a sixth of the ttl apart.
        let pause = (self.terms.ttl / 48 * 2_u32.pow(self.unanswered.min(5))).min(self.terms.ttl / 6);
        self.unanswered += 1;
        self.renew_at = now + pause;
        self.enter(State::Jeopardy);
    }

    /// When [`Lease::handle_timeout`] wants to be called next. `None`: nothing is left to wait for.
    pub fn poll_timeout(&self) -> Option<Moment> {
        if matches!(self.state, State::Lost(_)) {
            return None;
        }
        let renew = match self.give_up_at {
            Some(at) => at,
            None if self.deadline == self.end || self.parked => Moment::NEVER,
            None => self.renew_at,
        };
        Some(renew.min(self.deadline))
    }

    /// What is to be done, oldest first.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    fn may_renew(&self, now: Moment) -> bool {
        self.deadline < self.end && !self.stalled(now)
    }

    fn stalled(&self, now: Moment) -> bool {
        self.terms.progress_within.is_some_and(|within| now.since(self.progress) > within)
    }

    /// The reason for which the lock is lost at its deadline, if nothing is heard until then.
    pub fn why_at_deadline(&self) -> Why {
        if self.deadline == self.end {
            Why::MaxHold
        } else if self.stalled(self.deadline) {
            Why::Stalled
        } else {
            self.failure.clone().map_or(Why::Silence, Why::Unreachable)
        }
    }

    fn enter(&mut self, state: State) {
        if self.state != state && !matches!(self.state, State::Lost(_)) {
            self.state = state.clone();
            self.effects.push_back(Effect::Tell(state));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn at(ms: u64) -> Moment {
        Moment::from_nanos(ms * 1_000_000)
    }

    fn lease(terms: impl FnOnce(&mut Terms)) -> Lease {
        let mut t = Terms { ttl: TTL, max_hold: None, progress_within: None, jitter: 0 };
        terms(&mut t);
        Lease::new(at(0), t.ttl, t)
    }

    #[test]
    fn a_first_lease_may_be_shorter() {
        let terms = Terms { ttl: TTL, max_hold: None, progress_within: None, jitter: 0 };
        let mut lease = Lease::new(at(0), TTL / 6, terms);
        assert_eq!(lease.deadline(), at(5_000 - 100));
        assert_eq!(
            lease.poll_timeout(),
            Some(at(1_666) + Duration::from_nanos(666_666)),
            "it is renewed as soon"
        );
        lease.handle_renewal(at(2_000), at(2_001), Some(Renewal::Renewed));
        assert_eq!(lease.deadline(), at(2_000) + (TTL - margin(TTL)));
    }

    fn effects(lease: &mut Lease) -> Vec<Effect> {
        std::iter::from_fn(|| lease.poll_effect()).collect()
    }

    #[test]
    fn it_renews_at_a_third_and_counts_from_the_sending() {
        let mut lease = lease(|_| ());
        assert_eq!(lease.deadline(), at(29_650));
        assert_eq!(lease.poll_timeout(), Some(at(10_000)));
        lease.handle_timeout(at(10_000));
        assert_eq!(effects(&mut lease), [Effect::SendRenew]);
        // The answer takes five seconds; they are not given to the holder.
        lease.handle_renewal(at(10_000), at(15_000), Some(Renewal::Renewed));
        assert_eq!(lease.deadline(), at(39_650));
        assert_eq!(effects(&mut lease), []);
    }

    #[test]
    fn a_renewal_of_unknown_outcome_is_tried_again_and_is_no_loss() {
        let mut lease = lease(|_| ());
        lease.handle_timeout(at(10_000));
        assert_eq!(effects(&mut lease), [Effect::SendRenew]);
        lease.handle_renewal(at(10_000), at(12_000), Some(Renewal::Unknown));
        assert_eq!(effects(&mut lease), [Effect::Tell(State::Jeopardy)]);
        assert_eq!(lease.deadline(), at(29_650), "what nobody has heard of counts for nothing");
        assert!(lease.poll_timeout().is_some_and(|next| next < at(13_000)), "it is tried again soon");
    }

    #[test]
    fn a_hung_renewal_is_jeopardy_then_a_retry_then_loss_at_the_deadline() {
        let mut lease = lease(|_| ());
        lease.handle_timeout(at(10_000));
        assert_eq!(effects(&mut lease), [Effect::SendRenew]);
        assert_eq!(lease.poll_timeout(), Some(at(20_000)));
        lease.handle_timeout(at(20_000));
        assert_eq!(effects(&mut lease), [Effect::Tell(State::Jeopardy)]);
        lease.handle_timeout(at(20_625));
        assert_eq!(effects(&mut lease), [Effect::SendRenew]);
        assert_eq!(lease.poll_timeout(), Some(at(29_650)));
        lease.handle_timeout(at(29_650));
        assert_eq!(effects(&mut lease), [Effect::Tell(State::Lost(Why::Silence))]);
        assert_eq!(lease.poll_timeout(), None);
        // The late good news does not bring it back.
        lease.handle_renewal(at(20_625), at(29_651), Some(Renewal::Renewed));
        assert_eq!(lease.state(at(29_651)), State::Lost(Why::Silence));
        assert_eq!(effects(&mut lease), []);
    }

    #[test]
    fn a_renewal_that_failed_says_how_and_one_that_was_not_answered_does_not() {
        let mut cut_off = lease(|_| ());
        cut_off.handle_timeout(at(10_000));
        cut_off.handle_failure(at(10_100), "nobody is there".into());
        let unreachable = State::Lost(Why::Unreachable("nobody is there".into()));
        assert_eq!(cut_off.state(at(29_650)), unreachable);
        cut_off.handle_timeout(at(10_725));
        cut_off.handle_timeout(at(20_725));
        assert_eq!(cut_off.state(at(29_650)), State::Lost(Why::Silence), "the last one was not answered");
        cut_off.handle_failure(at(21_000), "nobody is there".into());
        cut_off.handle_timeout(at(29_650));
        cut_off.handle_failure(at(29_651), "still nobody".into());
        assert_eq!(cut_off.state(at(29_651)), unreachable, "once lost, always lost, for one reason");
    }

    #[test]
    fn a_blip_comes_right_again() {
        let mut lease = lease(|_| ());
        lease.handle_timeout(at(10_000));
        lease.handle_renewal(at(10_000), at(10_100), None);
        lease.handle_timeout(at(10_725));
        lease.handle_renewal(at(10_725), at(10_730), Some(Renewal::Renewed));
        let expected =
            [Effect::SendRenew, Effect::Tell(State::Jeopardy), Effect::SendRenew, Effect::Tell(State::Valid)];
        assert_eq!(effects(&mut lease), expected);
    }

    #[test]
    fn the_state_is_a_comparison_with_the_deadline_even_before_anybody_acts() {
        // The process was stopped past its deadline: the first look says lost, before any timer has run.
        let lease = lease(|_| ());
        assert_eq!(lease.state(at(29_649)), State::Valid);
        assert_eq!(lease.state(at(29_650)), State::Lost(Why::Silence));
    }

    #[test]
    fn taken_is_lost_at_once() {
        let mut lease = lease(|_| ());
        lease.handle_timeout(at(10_000));
        lease.handle_renewal(at(10_000), at(10_001), Some(Renewal::Lost));
        assert_eq!(effects(&mut lease), [Effect::SendRenew, Effect::Tell(State::Lost(Why::Taken))]);
    }

    #[test]
    fn max_hold_and_missing_progress_end_it() {
        let mut capped = lease(|t| t.max_hold = Some(Duration::from_secs(35)));
        capped.handle_timeout(at(10_000));
        capped.handle_renewal(at(10_000), at(10_001), Some(Renewal::Renewed));
        assert_eq!(capped.deadline(), at(35_000));
        assert_eq!(capped.poll_timeout(), Some(at(35_000)), "nothing is left to renew");
        assert_eq!(capped.state(at(35_000)), State::Lost(Why::MaxHold));

        let mut stuck = lease(|t| t.progress_within = Some(Duration::from_secs(15)));
        stuck.handle_timeout(at(10_000));
        stuck.handle_renewal(at(10_000), at(10_001), Some(Renewal::Renewed));
        effects(&mut stuck);
        stuck.handle_timeout(at(20_000));
        assert_eq!(effects(&mut stuck), [], "a stalled holder is not renewed");
        assert_eq!(stuck.poll_timeout(), Some(at(39_650)));
        assert_eq!(stuck.state(at(39_650)), State::Lost(Why::Stalled));
        stuck.handle_progress(at(20_500));
        assert_eq!(stuck.poll_timeout(), Some(at(20_500)), "progress is renewed at once");
        stuck.handle_timeout(at(20_500));
        assert_eq!(effects(&mut stuck), [Effect::SendRenew]);
    }

    #[test]
    fn a_stall_that_is_noticed_late_does_not_keep_the_driver_awake() {
        // The renewal was due at ten seconds, before the holder stalled; the driver looks at sixteen, after it.
        let mut late = lease(|t| t.progress_within = Some(Duration::from_secs(15)));
        late.handle_timeout(at(16_000));
        assert_eq!(effects(&mut late), []);
        assert_eq!(
            late.poll_timeout(),
            Some(at(29_650)),
            "a time that is past would wake it at once, for ever"
        );
        late.handle_progress(at(17_000));
        assert_eq!(late.poll_timeout(), Some(at(17_000)));
        late.handle_timeout(at(17_000));
        assert_eq!(effects(&mut late), [Effect::SendRenew]);
    }
}
