//! The events of one half as tracks: one for each process, one for the resource, and the times at which two processes believed to hold.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::event::{LabEvent, LabEventKind};

/// The name of the resource's track.
pub const RESOURCE: &str = "resource";
/// The name of the track with the faults that the director made.
pub const FAULTS: &str = "faults";
/// The number that the first fence of a half is shown as. The story of the late writer commonly has 33 and 34.
const FIRST_FENCE: usize = 33;

/// The state of a process for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SpanKind {
    /// It waits for a lock.
    Waits,
    /// It believes that it holds a lock.
    Holds,
    /// It is stopped.
    Stopped,
}

/// A stretch of a track.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    /// The state.
    pub kind: SpanKind,
    /// Its begin and its end, in seconds since the begin of the half.
    pub from: f64,
    /// See `from`.
    pub to: f64,
    /// The lock, if it is about one.
    pub lock: String,
    /// The fence of the grant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
}

/// The meaning of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MarkKind {
    /// The resource took a write.
    Took,
    /// The resource refused a write.
    Refused,
    /// Damage.
    Damage,
    /// A fault.
    Fault,
    /// The process was killed.
    Killed,
    /// The end of a hold.
    Ended,
    /// Something that a process said.
    Note,
}

/// A moment of a track.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mark {
    /// The meaning.
    pub kind: MarkKind,
    /// When, in seconds since the begin of the half.
    pub at: f64,
    /// In words.
    pub text: String,
}

/// The track of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Track {
    /// The name of the process.
    pub name: String,
    /// Its states, one after the other.
    pub spans: Vec<Span>,
    /// The moments to see.
    pub marks: Vec<Mark>,
}

/// A time at which more processes believed to hold a lock than may.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overlap {
    /// The lock.
    pub lock: String,
    /// Its begin and its end, in seconds since the begin of the half.
    pub from: f64,
    /// See `from`.
    pub to: f64,
}

/// One half as it is drawn.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Timeline {
    /// How long it took, in seconds.
    pub length: f64,
    /// The tracks: those of the processes in the order of their first event, then that of the resource.
    pub tracks: Vec<Track>,
    /// When too many processes believed to hold a lock.
    pub overlaps: Vec<Overlap>,
    /// The fences of the grants, the lowest first.
    pub fences: Vec<u64>,
    /// All events, in words.
    pub log: Vec<(f64, String, String)>,
}

impl Timeline {
    /// The tracks of these events. `holders`: how many may hold a lock at once; 0: no overlap is looked for.
    pub fn of(events: &[LabEvent], start: u64, end: u64, holders: usize) -> Timeline {
        let mut events: Vec<&LabEvent> = events.iter().collect();
        events.sort_by_key(|event| event.t);
        let at = |t: u64| t.saturating_sub(start) as f64 / 1e9;
        let fences = fences(&events);
        let mut tracks: Vec<TrackBuilder> = Vec::new();
        let mut index: BTreeMap<&str, usize> = BTreeMap::new();
        for event in events.iter().filter(|event| has_track(event)) {
            let i = *index.entry(&event.actor).or_insert_with(|| {
                tracks.push(TrackBuilder::new(&event.actor));
                tracks.len() - 1
            });
            tracks[i].add(event, at(event.t), &fences);
        }
        let resource = resource_track(&events, &at, &fences);
        let faults = fault_track(&events, &at);
        let length = at(end);
        let mut tracks: Vec<Track> = tracks.into_iter().map(|track| track.finish(length)).collect();
        sort_crew(&mut tracks);
        let overlaps = if holders == 0 { Vec::new() } else { overlaps(&tracks, holders) };
        tracks.extend([faults, resource].into_iter().filter(|track| !track.marks.is_empty()));
        let name = |n| fence_name(&fences, n);
        let log =
            events.iter().filter_map(|event| Some((at(event.t), event.actor.clone(), event.words(name)?)));
        let log = log.collect();
        Timeline { length, tracks, overlaps, fences, log }
    }

    /// The short name of a fence: 33 for the first one of the half.
    pub fn fence_name(&self, fence: u64) -> String {
        fence_name(&self.fences, fence)
    }
}

/// The workers of a crew in the order of their first hold: a queue looks like a staircase.
fn sort_crew(tracks: &mut [Track]) {
    let is_crew = |track: &Track| track.name.contains('.');
    let first_hold = |track: &Track| {
        let holds = track.spans.iter().filter(|span| span.kind == SpanKind::Holds);
        holds.map(|span| span.from).fold(f64::INFINITY, f64::min)
    };
    if tracks.iter().all(is_crew) {
        tracks.sort_by(|a, b| first_hold(a).total_cmp(&first_hold(b)));
    }
}

fn has_track(event: &LabEvent) -> bool {
    let other =
        matches!(event.kind, LabEventKind::Gone | LabEventKind::Figure { .. } | LabEventKind::Fault { .. });
    event.actor != RESOURCE && !other
}

fn fences(events: &[&LabEvent]) -> Vec<u64> {
    let fence = |event: &&LabEvent| match event.kind {
        LabEventKind::Holds { fence, .. } => fence,
        _ => None,
    };
    let mut fences: Vec<u64> = events.iter().filter_map(fence).collect();
    fences.sort_unstable();
    fences.dedup();
    fences
}

/// The short name of a fence among those of a half.
pub fn fence_name(fences: &[u64], fence: u64) -> String {
    match fences.binary_search(&fence) {
        Ok(nth) => (FIRST_FENCE + nth).to_string(),
        Err(_) => fence.to_string(),
    }
}

/// The writes that the resource took and refused, and the damage.
fn resource_track(events: &[&LabEvent], at: &impl Fn(u64) -> f64, fences: &[u64]) -> Track {
    let named = |text: &str, fence: &Option<u64>| match fence {
        Some(fence) => format!("{text}, fence {}", fence_name(fences, *fence)),
        None => text.to_owned(),
    };
    let mark = |event: &&LabEvent| {
        let (kind, text) = match &event.kind {
            LabEventKind::Wrote { text, fence } => (MarkKind::Took, named(text, fence)),
            LabEventKind::Refused { text, fence } => (MarkKind::Refused, named(text, fence)),
            LabEventKind::Damage { text } => (MarkKind::Damage, text.clone()),
            _ => return None,
        };
        Some(Mark { kind, at: at(event.t), text })
    };
    let marks: Vec<Mark> = events.iter().filter_map(mark).collect();
    Track { name: RESOURCE.to_owned(), spans: Vec::new(), marks }
}

fn fault_track(events: &[&LabEvent], at: &impl Fn(u64) -> f64) -> Track {
    let mark = |event: &&LabEvent| match &event.kind {
        LabEventKind::Fault { text } => {
            Some(Mark { kind: MarkKind::Fault, at: at(event.t), text: text.clone() })
        }
        _ => None,
    };
    let marks: Vec<Mark> = events.iter().filter_map(mark).collect();
    Track { name: FAULTS.to_owned(), spans: Vec::new(), marks }
}

/// A track while its events are read.
#[derive(Debug)]
struct TrackBuilder {
    track: Track,
    open: Vec<Span>,
}

impl TrackBuilder {
    fn new(name: &str) -> Self {
        TrackBuilder { track: Track { name: name.to_owned(), ..Track::default() }, open: Vec::new() }
    }

    fn add(&mut self, event: &LabEvent, at: f64, fences: &[u64]) {
        let mark = |kind, text: &str| Mark { kind, at, text: text.to_owned() };
        match &event.kind {
            LabEventKind::Waits { lock } => self.begin(SpanKind::Waits, lock, None, at),
            LabEventKind::Holds { lock, fence } => {
                self.close(|span| span.kind == SpanKind::Waits && span.lock == *lock, at);
                self.begin(SpanKind::Holds, lock, *fence, at);
            }
            LabEventKind::Ends { lock, how } => {
                self.close(|span| span.kind != SpanKind::Stopped && span.lock == *lock, at);
                self.track.marks.push(mark(MarkKind::Ended, how));
            }
            LabEventKind::Stopped => self.begin(SpanKind::Stopped, "", None, at),
            LabEventKind::Continued => self.close(|span| span.kind == SpanKind::Stopped, at),
            LabEventKind::Killed => {
                self.close(|_| true, at);
                self.track.marks.push(mark(MarkKind::Killed, "killed"));
            }
            LabEventKind::Wrote { text, .. } => self.track.marks.push(mark(MarkKind::Took, text)),
            LabEventKind::Refused { text, .. } => self.track.marks.push(mark(MarkKind::Refused, text)),
            LabEventKind::Note { .. } | LabEventKind::Damage { .. } | LabEventKind::Failed { .. } => {
                let text = event.words(|n| fence_name(fences, n)).unwrap_or_default();
                self.track.marks.push(mark(MarkKind::Note, &text));
            }
            LabEventKind::Fault { .. } | LabEventKind::Figure { .. } | LabEventKind::Gone => {}
        }
    }

    fn begin(&mut self, kind: SpanKind, lock: &str, fence: Option<u64>, at: f64) {
        self.open.push(Span { kind, from: at, to: at, lock: lock.to_owned(), fence });
    }

    fn close(&mut self, which: impl Fn(&Span) -> bool, at: f64) {
        let (closed, open) = self.open.drain(..).partition(|span| which(span));
        self.open = open;
        self.track.spans.extend(Vec::into_iter(closed).map(|span| Span { to: at, ..span }));
    }

    fn finish(mut self, end: f64) -> Track {
        self.close(|_| true, end);
        self.track.spans.sort_by(|a, b| a.from.total_cmp(&b.from));
        self.track
    }
}

/// Sweeps over the holds of each lock.
fn overlaps(tracks: &[Track], holders: usize) -> Vec<Overlap> {
    let mut changes: BTreeMap<&str, Vec<(f64, i32)>> = BTreeMap::new();
    let spans = tracks.iter().flat_map(|track| &track.spans).filter(|span| span.kind == SpanKind::Holds);
    for span in spans {
        let changes = changes.entry(&span.lock).or_default();
        changes.extend([(span.from, 1), (span.to, -1)]);
    }
    let mut found = Vec::new();
    for (lock, mut changes) in changes {
        // At the same moment an end comes before a begin.
        changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let (mut count, mut since) = (0, None);
        for (at, change) in changes {
            count += change;
            match since {
                None if count > holders as i32 => since = Some(at),
                Some(from) if count <= holders as i32 => {
                    found.push(Overlap { lock: lock.to_owned(), from, to: at });
                    since = None;
                }
                _ => {}
            }
        }
    }
    found.sort_by(|a, b| a.from.total_cmp(&b.from));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(t: u64, actor: &str, kind: LabEventKind) -> LabEvent {
        LabEvent { t: t * 1_000_000_000, actor: actor.into(), kind }
    }

    fn holds(t: u64, actor: &str, fence: u64) -> LabEvent {
        event(t, actor, LabEventKind::Holds { lock: "x".into(), fence: Some(fence) })
    }

    fn ends(t: u64, actor: &str) -> LabEvent {
        event(t, actor, LabEventKind::Ends { lock: "x".into(), how: "releases".into() })
    }

    #[test]
    fn two_holders_at_once_are_an_overlap_and_one_after_the_other_are_none() {
        let one_after_the_other = [holds(1, "a", 7), ends(2, "a"), holds(2, "b", 9), ends(3, "b")];
        assert_eq!(Timeline::of(&one_after_the_other, 0, 4_000_000_000, 1).overlaps, []);
        let at_once = [holds(1, "a", 7), holds(2, "b", 9), ends(3, "a"), ends(5, "b")];
        let overlap = Overlap { lock: "x".into(), from: 2.0, to: 3.0 };
        assert_eq!(Timeline::of(&at_once, 0, 6_000_000_000, 1).overlaps, [overlap]);
        assert_eq!(Timeline::of(&at_once, 0, 6_000_000_000, 2).overlaps, []);
    }

    #[test]
    fn a_killed_process_holds_and_waits_no_longer() {
        let events = [holds(1, "a", 7), event(2, "a", LabEventKind::Killed), holds(3, "b", 8)];
        let timeline = Timeline::of(&events, 0, 4_000_000_000, 1);
        assert_eq!(timeline.tracks[0].spans[0].to, 2.0);
        assert_eq!(timeline.tracks[1].spans[0].to, 4.0, "a span without an end lasts to the end of the half");
        assert_eq!((timeline.fence_name(7), timeline.fence_name(8)), ("33".into(), "34".into()));
    }
}
