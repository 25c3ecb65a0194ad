//! The view of a run in the terminal: live tracks for a person, one line per event for a pipe.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::event::{LabEvent, now};
use crate::outcome::{LabVerdict, ScenarioOutcome};
use crate::scenario::Scenario;
use crate::timeline::{FAULTS, MarkKind, RESOURCE, Span, SpanKind, Timeline, Track, fence_name};

/// How often the live view is drawn.
const FRAME: Duration = Duration::from_millis(100);
/// The width of the names.
const NAMES: usize = 14;
/// The most tracks of one half that the live view shows.
const TRACKS: usize = 7;

/// How the terminal shows a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewMode {
    /// Live tracks if stdout is a terminal, else one line per event.
    Shown,
    /// Nothing until the end.
    Hidden,
}

/// One half, as the view knows it.
#[derive(Debug)]
struct ViewedHalf {
    way: String,
    how: String,
    start: u64,
    events: Vec<LabEvent>,
}

/// The view of one run.
#[derive(Debug)]
pub struct View {
    mode: ViewMode,
    live: bool,
    length: f64,
    title: String,
    halves: Mutex<Vec<ViewedHalf>>,
}

/// Draws the live view until it is dropped.
#[derive(Debug)]
pub struct Drawing {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Drawing {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl View {
    pub(crate) fn new(mode: ViewMode, scenario: &Scenario) -> View {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let live = mode == ViewMode::Shown && std::io::stdout().is_terminal() && !dumb;
        let view = View {
            mode,
            live,
            length: f64::from(scenario.seconds.1),
            title: format!("{}: {}", scenario.name, scenario.title),
            halves: Mutex::default(),
        };
        view.say(&format!("{}\n  watch: {}\n", bold(&view.title), scenario.watch));
        view
    }

    fn say(&self, text: &str) {
        if self.mode == ViewMode::Shown {
            // A reader that has gone ends nothing here: the run still cleans up.
            let _ = writeln!(std::io::stdout(), "{text}");
        }
    }

    fn halves(&self) -> std::sync::MutexGuard<'_, Vec<ViewedHalf>> {
        self.halves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_half(&self, index: usize, way: &str, how: &str) {
        let half =
            ViewedHalf { way: way.into(), how: how.into(), start: now().as_nanos(), events: Vec::new() };
        if !self.live {
            self.say(&format!("  {way}: {how}"));
        }
        let mut halves = self.halves();
        let place = index.min(halves.len());
        halves.insert(place, half);
    }

    pub(crate) fn begin(&self, index: usize, start: u64) {
        self.halves()[index].start = start;
    }

    pub(crate) fn event(&self, index: usize, event: &LabEvent) {
        if self.mode == ViewMode::Hidden {
            return;
        }
        let mut halves = self.halves();
        let half = &mut halves[index];
        half.events.push(event.clone());
        if !self.live {
            let fences = Timeline::of(&half.events, half.start, event.t, 0).fences;
            if let Some(words) = event.words(|n| fence_name(&fences, n)) {
                let at = event.t.saturating_sub(half.start) as f64 / 1e9;
                self.say(&format!("{at:8.3} s  [{}]  {:<10} {words}", half.way, event.actor));
            }
        }
    }

    /// Draws the live view, if there is one, until the answer is dropped.
    pub(crate) fn start(self: &Arc<Self>) -> Drawing {
        let ended = Arc::new(AtomicBool::new(false));
        let (view, stop) = (self.clone(), ended.clone());
        let draw = move || {
            let mut rows = 0;
            loop {
                let last = stop.load(Ordering::Relaxed);
                rows = view.draw(rows);
                if last {
                    return;
                }
                std::thread::sleep(FRAME);
            }
        };
        Drawing { ended, thread: self.live.then(|| std::thread::spawn(draw)) }
    }

    /// Draws over the last frame, which had so many rows, and returns the number of rows.
    fn draw(&self, rows: usize) -> usize {
        let size = rustix::termios::tcgetwinsize(std::io::stdout());
        let (width, height) = size.map_or((100, 40), |size| (size.ws_col.max(40), size.ws_row.max(12)));
        let halves = self.halves();
        let most = (usize::from(height).saturating_sub(3) / halves.len().max(1)).saturating_sub(4);
        let now = now().as_nanos();
        let seconds = |half: &ViewedHalf| now.saturating_sub(half.start) as f64 / 1e9;
        let length = halves.iter().map(seconds).fold(self.length, f64::max);
        let frames =
            halves.iter().map(|half| half_rows(half, now, length, width.into(), most.clamp(2, TRACKS)));
        let lines: Vec<String> = frames.flatten().collect();
        let up = if rows > 0 { format!("\x1b[{rows}A") } else { String::new() };
        let text: String = lines.iter().map(|line| format!("\x1b[2K{line}\n")).collect();
        let mut out = std::io::stdout().lock();
        let _ = write!(out, "{up}{text}\x1b[0J").and_then(|()| out.flush());
        lines.len()
    }
}

fn half_rows(half: &ViewedHalf, now: u64, length: f64, width: usize, most: usize) -> Vec<String> {
    let timeline = Timeline::of(&half.events, half.start, now, 0);
    let cells = width.saturating_sub(NAMES + 3).max(10);
    let mut rows = vec![cut(&format!("{}: {}", half.way, half.how), width - 1)];
    rows[0] = bold(&rows[0]);
    let (resource, processes): (Vec<&Track>, Vec<&Track>) =
        timeline.tracks.iter().partition(|track| [RESOURCE, FAULTS].contains(&track.name.as_str()));
    let hidden = processes.len().saturating_sub(most);
    let shown = processes.iter().take(most).copied();
    rows.extend(shown.map(|track| track_row(track, length, cells)));
    if hidden > 0 {
        rows.push(format!("  {:NAMES$}… and {hidden} more", ""));
    }
    rows.extend(resource.iter().map(|track| track_row(track, length, cells)));
    let last = timeline.log.last().map(|(at, actor, words)| format!("{at:7.2} s  {actor} {words}"));
    rows.push(cut(&format!("  {}", last.unwrap_or_default()), width - 1));
    rows.push(String::new());
    rows
}

/// A track as one row of cells. Shapes differ as well as colours.
fn track_row(track: &Track, length: f64, cells: usize) -> String {
    let cell = |at: f64| ((at / length * cells as f64) as usize).min(cells - 1);
    let mut row = vec![(' ', ""); cells];
    let layers = [SpanKind::Waits, SpanKind::Holds, SpanKind::Stopped];
    for kind in layers {
        let look = match kind {
            SpanKind::Waits => ('·', "2"),
            SpanKind::Holds => ('█', "34"),
            SpanKind::Stopped => ('▒', "33"),
        };
        let spans = track.spans.iter().filter(|span: &&Span| span.kind == kind);
        spans.for_each(|span| row[cell(span.from)..=cell(span.to)].fill(look));
    }
    for mark in &track.marks {
        let look = match mark.kind {
            MarkKind::Took => ('●', "32"),
            MarkKind::Refused => ('○', "33"),
            MarkKind::Damage => ('✖', "1;31"),
            MarkKind::Fault => ('!', "1;33"),
            MarkKind::Killed => ('†', "1;31"),
            MarkKind::Ended | MarkKind::Note => continue,
        };
        row[cell(mark.at)] = look;
    }
    let mut text = format!("  {:<NAMES$}", cut(&track.name, NAMES - 1));
    for chunk in row.chunk_by(|a, b| a.1 == b.1) {
        let cells: String = chunk.iter().map(|(c, _)| c).collect();
        text += &colored(&cells, chunk[0].1);
    }
    text
}

/// Prints the outcome of a scenario: the counts of the halves, the conclusion and the verdict.
pub fn print_outcome(out: &mut impl Write, outcome: &ScenarioOutcome) -> std::io::Result<()> {
    let width = outcome.halves.iter().map(|half| half.way.chars().count()).max().unwrap_or(0);
    for half in &outcome.halves {
        let counts = half.counts.iter().filter(|count| !count.words.is_empty());
        for (i, count) in counts.enumerate() {
            let way = if i == 0 { half.way.as_str() } else { "" };
            let text = format!("{:>8}  {}", count.shown(), count.words);
            let text = if count.hurts() { colored(&text, "1;31") } else { text };
            writeln!(out, "  {way:<width$} {text}")?;
        }
    }
    writeln!(out, "\n  {}", outcome.conclusion)?;
    for check in outcome.checks.iter().filter(|check| !check.holds) {
        writeln!(out, "  {}", colored(&format!("not so: {}", check.expected), "1;31"))?;
    }
    let verdict = match outcome.verdict() {
        LabVerdict::Expected => "as expected",
        LabVerdict::Otherwise => "NOT as expected",
        LabVerdict::Invalid => "INVALID: the fault did not fire, so the run proves nothing",
    };
    writeln!(out, "  verdict: {}", bold(verdict))
}

fn colored(text: &str, color: &str) -> String {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    if color.is_empty() || plain || !std::io::stdout().is_terminal() {
        return text.to_owned();
    }
    format!("\x1b[{color}m{text}\x1b[0m")
}

fn bold(text: &str) -> String {
    colored(text, "1")
}

fn cut(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
        None => text.to_owned(),
    }
}
