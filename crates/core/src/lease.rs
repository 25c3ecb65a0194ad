//! The lease of a guard: a state machine that decides until when the lock is held, when to renew it, and why it is lost.
//!
//! The caller passes in the time. The deadline counts from the moment the client *sent* the request: the store cannot have started the
//! lease before that, however late the reply comes. A margin covers clocks that run at slightly different rates. A lost lease stays lost.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::{BootInstant, RenewOutcome};

/// Whether a guard's lock is held.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum LeaseState {
    /// The lock is held until the deadline, and renewals move the deadline.
    Valid,
    /// The lock is held until the deadline, but the last renewal got no reply. A later one may succeed.
    Jeopardy,
    /// The lock is not held.
    Lost(LossReason),
}

/// Why a lock was lost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum LossReason {
    /// The store says that the grant is gone: it expired, or an operator broke it.
    Taken,
    /// An operator revoked it, for this reason: the holder must stop and release it. The store grants it to no other request before that, or
    /// before the deadline.
    Revoked(Arc<str>),
    /// The deadline came, and no renewal had got a reply.
    Silence,
    /// The deadline came and every renewal had failed; the last one with this error.
    Unreachable(Arc<str>),
    /// It was held for as long as it may be.
    MaxHold,
    /// Its holder showed no progress for too long, so it was not renewed.
    Stalled,
    /// The thread that renews it has ended.
    Abandoned,
    /// It belongs to another process, of which this one is a fork.
    Forked,
    /// It belongs to a partition that the group assigned to another member, and the grace to finish is over.
    Reassigned,
}

impl std::fmt::Display for LossReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LossReason::Taken => "the store has no such grant any more: it expired, or was broken",
            LossReason::Revoked(reason) => return write!(f, "it was broken: {reason}"),
            LossReason::Silence => "no renewal was answered in time",
            LossReason::Unreachable(error) => return write!(f, "it could not be renewed in time: {error}"),
            LossReason::MaxHold => "it was held for as long as max-hold allows",
            LossReason::Stalled => "no progress was shown, so it was not renewed",
            LossReason::Abandoned => "the renewing thread has ended",
            LossReason::Forked => "it belongs to another process, of which this one is a fork",
            LossReason::Reassigned => {
                "its partition was assigned to another member, and the grace to finish is over"
            }
        })
    }
}

/// A step that the driver has to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseEffect {
    /// Send a renewal now, and report its answer with the moment it was sent.
    SendRenew,
    /// Report this state to the holder.
    Tell(LeaseState),
}

/// The terms of a lease.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// How long it lasts from each good renewal.
    pub ttl: Duration,
    /// How long it may be held altogether.
    pub max_hold: Option<Duration>,
    /// The longest time between two signs of progress.
    pub progress_within: Option<Duration>,
    /// 0 to 255, random per lease: spreads the renewals of many holders.
    pub jitter: u8,
}

/// How much earlier than in the store a lease ends for its holder: 1 % of the ttl and 50 ms, at most a quarter of the ttl.
pub fn margin(ttl: Duration) -> Duration {
    (ttl / 100 + Duration::from_millis(50)).min(ttl / 4)
}

/// The state machine of a guard's lease.
#[derive(Clone, Debug)]
pub struct Lease {
    terms: Terms,
    state: LeaseState,
    deadline: BootInstant,
    /// No renewal can move the deadline past this.
    end: BootInstant,
    renew_at: BootInstant,
    /// A renewal was due, and withheld until there is progress again.
    parked: bool,
    /// When a renewal in flight counts as one without a reply.
    give_up_at: Option<BootInstant>,
    unanswered: u32,
    /// How the last renewal failed, if that was reported.
    failure: Option<Arc<str>>,
    progress: BootInstant,
    effects: VecDeque<LeaseEffect>,
}

impl Lease {
    /// A lease whose request was sent at `sent_at`, and which lasts for `first` from there unless it is renewed.
    pub fn new(sent_at: BootInstant, first: Duration, terms: Terms) -> Self {
        let end = terms.max_hold.map_or(BootInstant::NEVER, |max| sent_at + max);
        let mut lease = Lease {
            terms,
            state: LeaseState::Valid,
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

    fn count_from(&mut self, sent_at: BootInstant, ttl: Duration) {
        let deadline = (sent_at + (ttl - margin(ttl))).min(self.end);
        if deadline >= self.deadline {
            self.deadline = deadline;
            // A third of it, up to an eighth of that earlier.
            let third = ttl / 3;
            self.renew_at = sent_at + (third - third / 8 * u32::from(self.terms.jitter) / 255);
        }
    }

    /// The state at `now`.
    pub fn state(&self, now: BootInstant) -> LeaseState {
        match &self.state {
            LeaseState::Lost(why) => LeaseState::Lost(why.clone()),
            _ if now >= self.deadline => LeaseState::Lost(self.why_at_deadline()),
            state => state.clone(),
        }
    }

    /// Until when the lock is held, without a further renewal.
    pub fn deadline(&self) -> BootInstant {
        self.deadline
    }

    /// The holder reports progress.
    pub fn handle_progress(&mut self, now: BootInstant) {
        self.progress = self.progress.max(now);
        if std::mem::take(&mut self.parked) {
            self.renew_at = now;
        }
    }

    /// The driver learns by other means that the lock is lost.
    pub fn handle_loss(&mut self, why: LossReason) {
        self.enter(LeaseState::Lost(why));
    }

    /// Does everything that is due at `now`.
    pub fn handle_timeout(&mut self, now: BootInstant) {
        if now >= self.deadline {
            self.enter(LeaseState::Lost(self.why_at_deadline()));
        }
        if matches!(self.state, LeaseState::Lost(_)) {
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
            self.effects.push_back(LeaseEffect::SendRenew);
        } else {
            // Left as it is, a time that is past would wake the driver at once, again and again.
            self.parked = true;
        }
    }

    /// Whether to renew before it is due, in a batch with other leases.
    pub fn renew_early(&mut self, now: BootInstant) -> bool {
        let soon = now + self.terms.ttl / 12;
        let joins = self.state(now) == LeaseState::Valid
            && self.give_up_at.is_none()
            && self.renew_at <= soon
            && self.may_renew(now);
        if joins {
            self.give_up_at = Some(now + self.terms.ttl / 3);
        }
        joins
    }

    /// The answer to a renewal sent at `sent_at`; `None` if there is no reply or its outcome is unknown.
    pub fn handle_renewal(&mut self, sent_at: BootInstant, now: BootInstant, answer: Option<RenewOutcome>) {
        if matches!(self.state(now), LeaseState::Lost(_)) {
            // The reply is too late: the loss may have been reported already.
            return self.handle_timeout(now);
        }
        match answer {
            Some(RenewOutcome::Renewed) => {
                self.give_up_at = None;
                self.unanswered = 0;
                self.failure = None;
                self.count_from(sent_at, self.terms.ttl);
                self.enter(LeaseState::Valid);
            }
            Some(RenewOutcome::Lost) => self.enter(LeaseState::Lost(LossReason::Taken)),
            Some(RenewOutcome::Revoked(reason)) => self.enter(LeaseState::Lost(LossReason::Revoked(reason))),
            Some(RenewOutcome::Unknown) | None => {
                self.failure = None;
                self.unanswered(now);
            }
        }
    }

    /// A renewal failed with `error`: it is tried again until the deadline.
    pub fn handle_failure(&mut self, now: BootInstant, error: Arc<str>) {
        if matches!(self.state(now), LeaseState::Lost(_)) {
            return self.handle_timeout(now);
        }
        self.failure = Some(error);
        self.unanswered(now);
    }

    fn unanswered(&mut self, now: BootInstant) {
        self.give_up_at = None;
        // Quickly at first, for a blip; then at most a sixth of the ttl apart.
        let pause = (self.terms.ttl / 48 * 2_u32.pow(self.unanswered.min(5))).min(self.terms.ttl / 6);
        self.unanswered += 1;
        self.renew_at = now + pause;
        self.enter(LeaseState::Jeopardy);
    }

    /// When [`Lease::handle_timeout`] wants to be called next. `None`: nothing is left to wait for.
    pub fn poll_timeout(&self) -> Option<BootInstant> {
        if matches!(self.state, LeaseState::Lost(_)) {
            return None;
        }
        let renew = match self.give_up_at {
            Some(at) => at,
            None if self.deadline == self.end || self.parked => BootInstant::NEVER,
            None => self.renew_at,
        };
        Some(renew.min(self.deadline))
    }

    /// The next step to take, oldest first.
    pub fn poll_effect(&mut self) -> Option<LeaseEffect> {
        self.effects.pop_front()
    }

    fn may_renew(&self, now: BootInstant) -> bool {
        self.deadline < self.end && !self.stalled(now)
    }

    fn stalled(&self, now: BootInstant) -> bool {
        self.terms.progress_within.is_some_and(|within| now.since(self.progress) > within)
    }

    /// Why the lock is lost at its deadline, if no reply comes until then.
    pub fn why_at_deadline(&self) -> LossReason {
        if self.deadline == self.end {
            LossReason::MaxHold
        } else if self.stalled(self.deadline) {
            LossReason::Stalled
        } else {
            self.failure.clone().map_or(LossReason::Silence, LossReason::Unreachable)
        }
    }

    fn enter(&mut self, state: LeaseState) {
        if self.state != state && !matches!(self.state, LeaseState::Lost(_)) {
            self.state = state.clone();
            self.effects.push_back(LeaseEffect::Tell(state));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn at(ms: u64) -> BootInstant {
        BootInstant::from_nanos(ms * 1_000_000)
    }

    fn lease(terms: impl FnOnce(&mut Terms)) -> Lease {
        let mut t = Terms { ttl: TTL, max_hold: None, progress_within: None, jitter: 0 };
        terms(&mut t);
        Lease::new(at(0), t.ttl, t)
    }

    #[test]
    fn each_reason_of_a_loss_has_a_sentence_of_its_own() {
        let reasons = [
            LossReason::Taken,
            LossReason::Revoked("the host is drained".into()),
            LossReason::Silence,
            LossReason::Unreachable("connection refused".into()),
            LossReason::MaxHold,
            LossReason::Stalled,
            LossReason::Abandoned,
            LossReason::Forked,
            LossReason::Reassigned,
        ];
        let told: std::collections::BTreeSet<String> = reasons.iter().map(LossReason::to_string).collect();
        assert!(told.len() == reasons.len() && told.iter().all(|text| text.len() > 20), "{told:?}");
        for given in ["the host is drained", "connection refused"] {
            assert!(told.iter().any(|text| text.contains(given)), "{given:?} is not told: {told:?}");
        }
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
        lease.handle_renewal(at(2_000), at(2_001), Some(RenewOutcome::Renewed));
        assert_eq!(lease.deadline(), at(2_000) + (TTL - margin(TTL)));
    }

    fn effects(lease: &mut Lease) -> Vec<LeaseEffect> {
        std::iter::from_fn(|| lease.poll_effect()).collect()
    }

    #[test]
    fn it_renews_at_a_third_and_counts_from_the_sending() {
        let mut lease = lease(|_| ());
        assert_eq!(lease.deadline(), at(29_650));
        assert_eq!(lease.poll_timeout(), Some(at(10_000)));
        lease.handle_timeout(at(10_000));
        assert_eq!(effects(&mut lease), [LeaseEffect::SendRenew]);
        // The answer takes five seconds; they are not given to the holder.
        lease.handle_renewal(at(10_000), at(15_000), Some(RenewOutcome::Renewed));
        assert_eq!(lease.deadline(), at(39_650));
        assert_eq!(effects(&mut lease), []);
    }

    #[test]
    fn a_renewal_of_unknown_outcome_is_tried_again_and_is_no_loss() {
        let mut lease = lease(|_| ());
        lease.handle_timeout(at(10_000));
        assert_eq!(effects(&mut lease), [LeaseEffect::SendRenew]);
        lease.handle_renewal(at(10_000), at(12_000), Some(RenewOutcome::Unknown));
        assert_eq!(effects(&mut lease), [LeaseEffect::Tell(LeaseState::Jeopardy)]);
        assert_eq!(lease.deadline(), at(29_650), "a renewal without a reply counts for nothing");
        assert!(lease.poll_timeout().is_some_and(|next| next < at(13_000)), "it is tried again soon");
    }

    #[test]
    fn a_hung_renewal_is_jeopardy_then_a_retry_then_loss_at_the_deadline() {
        let mut lease = lease(|_| ());
        lease.handle_timeout(at(10_000));
        assert_eq!(effects(&mut lease), [LeaseEffect::SendRenew]);
        assert_eq!(lease.poll_timeout(), Some(at(20_000)));
        lease.handle_timeout(at(20_000));
        assert_eq!(effects(&mut lease), [LeaseEffect::Tell(LeaseState::Jeopardy)]);
        lease.handle_timeout(at(20_625));
        assert_eq!(effects(&mut lease), [LeaseEffect::SendRenew]);
        assert_eq!(lease.poll_timeout(), Some(at(29_650)));
        lease.handle_timeout(at(29_650));
        assert_eq!(effects(&mut lease), [LeaseEffect::Tell(LeaseState::Lost(LossReason::Silence))]);
        assert_eq!(lease.poll_timeout(), None);
        // A late good reply does not make it valid again.
        lease.handle_renewal(at(20_625), at(29_651), Some(RenewOutcome::Renewed));
        assert_eq!(lease.state(at(29_651)), LeaseState::Lost(LossReason::Silence));
        assert_eq!(effects(&mut lease), []);
    }

    #[test]
    fn a_renewal_that_failed_says_how_and_one_that_was_not_answered_does_not() {
        let mut cut_off = lease(|_| ());
        cut_off.handle_timeout(at(10_000));
        cut_off.handle_failure(at(10_100), "no server".into());
        let unreachable = LeaseState::Lost(LossReason::Unreachable("no server".into()));
        assert_eq!(cut_off.state(at(29_650)), unreachable);
        cut_off.handle_timeout(at(10_725));
        cut_off.handle_timeout(at(20_725));
        assert_eq!(
            cut_off.state(at(29_650)),
            LeaseState::Lost(LossReason::Silence),
            "the last one was not answered"
        );
        cut_off.handle_failure(at(21_000), "no server".into());
        cut_off.handle_timeout(at(29_650));
        cut_off.handle_failure(at(29_651), "still no server".into());
        assert_eq!(cut_off.state(at(29_651)), unreachable, "once lost, always lost, for one reason");
    }

    #[test]
    fn a_blip_comes_right_again() {
        let mut lease = lease(|_| ());
        lease.handle_timeout(at(10_000));
        lease.handle_renewal(at(10_000), at(10_100), None);
        lease.handle_timeout(at(10_725));
        lease.handle_renewal(at(10_725), at(10_730), Some(RenewOutcome::Renewed));
        let expected = [
            LeaseEffect::SendRenew,
            LeaseEffect::Tell(LeaseState::Jeopardy),
            LeaseEffect::SendRenew,
            LeaseEffect::Tell(LeaseState::Valid),
        ];
        assert_eq!(effects(&mut lease), expected);
    }

    #[test]
    fn the_state_is_a_comparison_with_the_deadline_before_any_timer_runs() {
        // The process was stopped past its deadline: the first look says lost, before any timer has run.
        let lease = lease(|_| ());
        assert_eq!(lease.state(at(29_649)), LeaseState::Valid);
        assert_eq!(lease.state(at(29_650)), LeaseState::Lost(LossReason::Silence));
    }

    #[test]
    fn taken_is_lost_at_once() {
        let mut lease = lease(|_| ());
        lease.handle_timeout(at(10_000));
        lease.handle_renewal(at(10_000), at(10_001), Some(RenewOutcome::Lost));
        assert_eq!(
            effects(&mut lease),
            [LeaseEffect::SendRenew, LeaseEffect::Tell(LeaseState::Lost(LossReason::Taken))]
        );
    }

    #[test]
    fn max_hold_and_missing_progress_end_it() {
        let mut capped = lease(|t| t.max_hold = Some(Duration::from_secs(35)));
        capped.handle_timeout(at(10_000));
        capped.handle_renewal(at(10_000), at(10_001), Some(RenewOutcome::Renewed));
        assert_eq!(capped.deadline(), at(35_000));
        assert_eq!(capped.poll_timeout(), Some(at(35_000)), "nothing is left to renew");
        assert_eq!(capped.state(at(35_000)), LeaseState::Lost(LossReason::MaxHold));

        let mut stuck = lease(|t| t.progress_within = Some(Duration::from_secs(15)));
        stuck.handle_timeout(at(10_000));
        stuck.handle_renewal(at(10_000), at(10_001), Some(RenewOutcome::Renewed));
        effects(&mut stuck);
        stuck.handle_timeout(at(20_000));
        assert_eq!(effects(&mut stuck), [], "a stalled holder is not renewed");
        assert_eq!(stuck.poll_timeout(), Some(at(39_650)));
        assert_eq!(stuck.state(at(39_650)), LeaseState::Lost(LossReason::Stalled));
        stuck.handle_progress(at(20_500));
        assert_eq!(stuck.poll_timeout(), Some(at(20_500)), "progress is renewed at once");
        stuck.handle_timeout(at(20_500));
        assert_eq!(effects(&mut stuck), [LeaseEffect::SendRenew]);
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
        assert_eq!(effects(&mut late), [LeaseEffect::SendRenew]);
    }
}
