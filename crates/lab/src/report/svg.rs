//! The timeline of one half as SVG.

use std::fmt::Write;

use super::escape;
use crate::timeline::{FAULTS, Mark, MarkKind, Overlap, RESOURCE, SpanKind, Timeline, Track};

/// The width of the picture, of the names, and of the free room at the right.
const WIDTH: f64 = 1040.0;
const NAMES: f64 = 104.0;
const RIGHT: f64 = 12.0;
/// About the width of a letter.
const LETTER: f64 = 6.3;
/// The height of a row of labels.
const LABEL: f64 = 15.0;
/// More tracks than this are drawn thin, without names.
const NAMED: usize = 14;

/// The signs of the pictures, explained once per page.
pub const LEGEND: &str = concat!(
    "<svg class=\"legend\" viewBox=\"0 0 1040 26\" role=\"img\" aria-label=\"Legend\">",
    "<rect x=\"0\" y=\"6\" width=\"26\" height=\"14\" rx=\"3\" fill=\"var(--holds)\"/><text x=\"32\" y=\"18\" fill=\"var(--fg)\">believes that it holds</text>",
    "<line x1=\"172\" x2=\"198\" y1=\"13\" y2=\"13\" stroke=\"var(--waits)\" stroke-width=\"6\" stroke-dasharray=\"3 3\"/><text x=\"204\" y=\"18\" fill=\"var(--fg)\">waits</text>",
    "<rect x=\"254\" y=\"6\" width=\"26\" height=\"14\" fill=\"var(--stopped)\"/><text x=\"286\" y=\"18\" fill=\"var(--fg)\">is stopped</text>",
    "<circle cx=\"370\" cy=\"13\" r=\"6\" fill=\"var(--good)\"/><text x=\"382\" y=\"18\" fill=\"var(--fg)\">the resource took a write</text>",
    "<circle cx=\"552\" cy=\"13\" r=\"5.5\" fill=\"none\" stroke=\"var(--fault)\" stroke-width=\"2.5\"/><text x=\"563\" y=\"18\" fill=\"var(--fg)\">refused one</text>",
    "<path d=\"M643 7l12 12M655 7l-12 12\" stroke=\"var(--bad)\" stroke-width=\"3.5\"/><text x=\"662\" y=\"18\" fill=\"var(--fg)\">damage, or a kill</text>",
    "<path d=\"M780 6l7 7l-7 7l-7 -7z\" fill=\"var(--fault)\"/><text x=\"792\" y=\"18\" fill=\"var(--fg)\">fault</text>",
    "<rect x=\"842\" y=\"4\" width=\"26\" height=\"18\" fill=\"var(--bad)\" opacity=\"0.25\"/><text x=\"874\" y=\"18\" fill=\"var(--fg)\">two believe that they hold</text>",
    "</svg>\n"
);

/// Draws a timeline. All halves of a scenario have the same `length`, so that their times can be compared.
pub fn draw(title: &str, timeline: &Timeline, length: f64) -> String {
    let scale = Scale { length: length * 1.02 };
    let thin = timeline.tracks.len() > NAMED;
    let mut body = String::new();
    let mut y = 4.0;
    let faults = fault_labels(&mut body, timeline, &scale, &mut y);
    let top = y;
    for track in timeline.tracks.iter().filter(|track| track.name != FAULTS) {
        y += if track.name == RESOURCE {
            resource(&mut body, track, &scale, y)
        } else if thin {
            thin_track(&mut body, track, &scale, y)
        } else {
            named_track(&mut body, track, timeline, &scale, y)
        };
    }
    let bottom = y;
    let mut back = String::new();
    timeline.overlaps.iter().for_each(|overlap| shade(&mut back, overlap, &scale, top, bottom));
    axis(&mut back, &scale, top, bottom);
    for x in faults {
        let _ = write!(
            back,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top:.1}\" y2=\"{bottom:.1}\" stroke=\"var(--fault)\" stroke-dasharray=\"4 3\"/>"
        );
        sign(&mut body, MarkKind::Fault, x, top);
    }
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {:.0}\" role=\"img\" aria-label=\"Timeline: {}\">{back}{body}</svg>\n",
        bottom + 22.0,
        escape(title)
    )
}

/// From seconds to the x axis.
#[derive(Debug)]
struct Scale {
    length: f64,
}

impl Scale {
    fn x(&self, at: f64) -> f64 {
        NAMES + (at / self.length).clamp(0.0, 1.0) * (WIDTH - NAMES - RIGHT)
    }
}

/// Places labels in rows so that none covers another one.
#[derive(Debug, Default)]
struct LabelRows {
    ends: Vec<f64>,
}

impl LabelRows {
    /// The row, the x of the text, and its anchor, for a text that belongs to `x`.
    fn place(&mut self, x: f64, text: &str) -> (usize, f64, &'static str) {
        let width = text.chars().count() as f64 * LETTER + 8.0;
        let (left, anchor, at) =
            if x + width < WIDTH { (x, "start", x) } else { (WIDTH - width, "end", WIDTH - 4.0) };
        let row = self.ends.iter().position(|end| *end <= left).unwrap_or(self.ends.len());
        let end = left + width;
        match self.ends.get_mut(row) {
            Some(old) => *old = end,
            None => self.ends.push(end),
        }
        (row, at, anchor)
    }
}

fn fault_labels(body: &mut String, timeline: &Timeline, scale: &Scale, y: &mut f64) -> Vec<f64> {
    let faults = timeline.tracks.iter().flat_map(|track| &track.marks);
    let mut faults: Vec<&Mark> = faults.filter(|mark| mark.kind == MarkKind::Fault).collect();
    faults.sort_by(|a, b| a.at.total_cmp(&b.at));
    let mut rows = LabelRows::default();
    for fault in &faults {
        let x = scale.x(fault.at);
        let (row, at, anchor) = rows.place(x, &fault.text);
        text(body, at, *y + row as f64 * LABEL + 11.0, anchor, "var(--fault)", "600", &fault.text);
    }
    *y += rows.ends.len() as f64 * LABEL + if faults.is_empty() { 0.0 } else { 8.0 };
    faults.iter().map(|fault| scale.x(fault.at)).collect()
}

fn text(body: &mut String, x: f64, y: f64, anchor: &str, fill: &str, weight: &str, words: &str) {
    let words = escape(words);
    let _ = write!(
        body,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{fill}\" font-weight=\"{weight}\">{words}</text>"
    );
}

fn bars(body: &mut String, track: &Track, scale: &Scale, y: f64, height: f64) {
    let order = [SpanKind::Waits, SpanKind::Holds, SpanKind::Stopped];
    let spans = order.iter().flat_map(|kind| track.spans.iter().filter(move |span| span.kind == *kind));
    for span in spans {
        let (x, to) = (scale.x(span.from), scale.x(span.to));
        let width = (to - x).max(1.5);
        let middle = y + height / 2.0;
        let _ = match span.kind {
            SpanKind::Waits => write!(
                body,
                "<line x1=\"{x:.1}\" x2=\"{to:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\" stroke=\"var(--waits)\" stroke-width=\"{:.1}\" stroke-dasharray=\"3 3\"/>",
                (height / 3.0).max(1.0)
            ),
            SpanKind::Holds => write!(
                body,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"{:.1}\" fill=\"var(--holds)\"/>",
                (height / 6.0).min(3.0)
            ),
            SpanKind::Stopped => write!(
                body,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"var(--stopped)\"/>"
            ),
        };
    }
}

fn named_track(body: &mut String, track: &Track, timeline: &Timeline, scale: &Scale, y: f64) -> f64 {
    let height = 22.0;
    text(body, NAMES - 8.0, y + 16.0, "end", "var(--fg)", "600", &shorten(&track.name, 15));
    bars(body, track, scale, y, height);
    for span in track.spans.iter().filter(|span| span.kind != SpanKind::Waits) {
        let words = match (span.kind, span.fence) {
            (SpanKind::Holds, Some(fence)) => format!("{}, fence {}", span.lock, timeline.fence_name(fence)),
            (SpanKind::Holds, None) => span.lock.clone(),
            _ => "stopped".to_owned(),
        };
        let stops =
            track.spans.iter().filter(|stop| stop.kind == SpanKind::Stopped && stop.from >= span.from);
        // A stop covers the end of a hold, and its label.
        let end = match span.kind {
            SpanKind::Holds => stops.map(|stop| stop.from).fold(span.to, f64::min),
            _ => span.to,
        };
        let (x, room) = (scale.x(span.from), scale.x(end) - scale.x(span.from));
        let fits = [words.as_str(), words.rsplit(", ").next().unwrap_or("")]
            .into_iter()
            .find(|words| words.chars().count() as f64 * LETTER + 14.0 < room);
        let fill = if span.kind == SpanKind::Holds { "var(--onholds)" } else { "var(--onstopped)" };
        if let Some(words) = fits {
            text(body, x + 9.0, y + 15.5, "start", fill, "400", words);
        }
    }
    for mark in &track.marks {
        sign(body, mark.kind, scale.x(mark.at), y + height / 2.0);
    }
    height + 8.0
}

fn thin_track(body: &mut String, track: &Track, scale: &Scale, y: f64) -> f64 {
    let height = 4.0;
    bars(body, track, scale, y, height);
    for mark in track.marks.iter().filter(|mark| mark.kind == MarkKind::Killed) {
        sign(body, mark.kind, scale.x(mark.at), y + height / 2.0);
    }
    height + 2.0
}

/// The track of the resource, with the words of its marks in rows below. Of many marks of a kind, the first ones have words.
fn resource(body: &mut String, track: &Track, scale: &Scale, y: f64) -> f64 {
    let height = 22.0;
    let middle = y + 6.0 + height / 2.0;
    text(body, NAMES - 8.0, middle + 4.0, "end", "var(--fg)", "600", "the resource");
    let _ = write!(
        body,
        "<line x1=\"{NAMES}\" x2=\"{:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\" stroke=\"var(--line)\"/>",
        WIDTH - RIGHT
    );
    let mut rows = LabelRows::default();
    for mark in &track.marks {
        sign(body, mark.kind, scale.x(mark.at), middle);
    }
    // Damage first: its words matter most.
    let mut named: Vec<&Mark> = track.marks.iter().collect();
    named.sort_by_key(|mark| mark.kind != MarkKind::Damage);
    named.truncate(8);
    named.sort_by(|a, b| a.at.total_cmp(&b.at));
    for mark in named {
        let (fill, weight, words) = match mark.kind {
            MarkKind::Damage => ("var(--bad)", "700", format!("✖ {}", mark.text)),
            MarkKind::Refused => ("var(--fault)", "600", format!("refused: {}", mark.text)),
            _ => ("var(--dim)", "400", mark.text.clone()),
        };
        let (row, at, anchor) = rows.place(scale.x(mark.at), &words);
        text(body, at, middle + 24.0 + row as f64 * LABEL, anchor, fill, weight, &words);
    }
    height + 14.0 + rows.ends.len() as f64 * LABEL
}

fn sign(body: &mut String, kind: MarkKind, x: f64, y: f64) {
    let _ = match kind {
        MarkKind::Took => write!(
            body,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"6\" fill=\"var(--good)\" stroke=\"var(--card)\" stroke-width=\"1.5\"/>"
        ),
        MarkKind::Refused => write!(
            body,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5.5\" fill=\"var(--card)\" stroke=\"var(--fault)\" stroke-width=\"2.5\"/>"
        ),
        MarkKind::Damage | MarkKind::Killed => {
            let (left, right, up, down) = (x - 7.0, x + 7.0, y - 7.0, y + 7.0);
            write!(
                body,
                "<path d=\"M{left:.1} {up:.1}L{right:.1} {down:.1}M{right:.1} {up:.1}L{left:.1} {down:.1}\" stroke=\"var(--bad)\" stroke-width=\"4\"/>"
            )
        }
        MarkKind::Fault => {
            write!(body, "<path d=\"M{x:.1} {:.1}l7 7l-7 7l-7 -7z\" fill=\"var(--fault)\"/>", y - 7.0)
        }
        MarkKind::Ended | MarkKind::Note => Ok(()),
    };
}

fn shade(back: &mut String, overlap: &Overlap, scale: &Scale, top: f64, bottom: f64) {
    let (x, to) = (scale.x(overlap.from), scale.x(overlap.to));
    let _ = write!(
        back,
        "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"var(--bad)\" opacity=\"0.2\"/>",
        (to - x).max(2.0),
        bottom - top
    );
}

fn axis(back: &mut String, scale: &Scale, top: f64, bottom: f64) {
    let step = step(scale.length);
    let mut at = 0.0;
    while at <= scale.length {
        let x = scale.x(at);
        let _ = write!(
            back,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top:.1}\" y2=\"{bottom:.1}\" stroke=\"var(--line)\"/>"
        );
        let places = usize::from(step < 1.0);
        text(back, x, bottom + 15.0, "middle", "var(--dim)", "400", &format!("{at:.places$} s"));
        at += step;
    }
}

/// The distance of the lines of the axis: about ten of them.
pub fn step(length: f64) -> f64 {
    let steps = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0];
    steps.into_iter().find(|step| length / step <= 12.0).unwrap_or(length)
}

fn shorten(name: &str, letters: usize) -> String {
    match name.char_indices().nth(letters) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}
