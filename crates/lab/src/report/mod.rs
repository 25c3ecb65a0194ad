//! The report: one HTML file without scripts, with the timelines as SVG, in light and dark.

mod chart;
mod style;
mod svg;

use std::fmt::Write;

use crate::outcome::{HalfReport, LabVerdict, ScenarioOutcome};
use crate::scenario::Scenario;

/// A self-contained HTML page about the scenarios of a run.
#[derive(Debug, Default)]
pub struct HtmlReport {
    body: String,
    scenarios: usize,
}

impl HtmlReport {
    /// Adds a scenario. `command` is the call that repeats it, `store` the kind of its store.
    pub fn add(&mut self, scenario: &Scenario, outcome: &ScenarioOutcome, store: &str) {
        self.scenarios += 1;
        let (class, words) = match outcome.verdict() {
            LabVerdict::Expected => ("good", "as expected"),
            LabVerdict::Otherwise => ("bad", "not as expected"),
            LabVerdict::Invalid => ("bad", "invalid: the fault did not fire"),
        };
        let out = &mut self.body;
        let _ = write!(
            out,
            "<article id=\"{name}\">\n<header><h1><span class=\"name\">{name}</span> {title}</h1>\n\
             <p class=\"conclusion\">{conclusion}</p>\n\
             <p class=\"facts\"><span class=\"verdict {class}\">{words}</span> store: {store} · \
             <code>lockkeeper lab run {name}</code> · Lockkeeper {version}</p></header>\n\
             <p class=\"story\">{story}</p>\n<p class=\"watch\"><b>Watch:</b> {watch}.</p>\n",
            name = escape(scenario.name),
            title = escape(scenario.title),
            conclusion = escape(&outcome.conclusion),
            store = escape(store),
            version = env!("CARGO_PKG_VERSION"),
            story = prose(scenario.story),
            watch = prose(scenario.watch),
        );
        let length = outcome.halves.iter().map(|half| half.timeline.length).fold(0.1, f64::max);
        outcome.halves.iter().for_each(|half| add_half(out, half, length));
        outcome.charts.iter().for_each(|chart| {
            let _ = writeln!(out, "<section>{}</section>", chart::draw(chart));
        });
        out.push_str("<details><summary>What was checked</summary><ul>");
        for check in &outcome.checks {
            let (class, word) = if check.holds { ("good", "yes") } else { ("bad", "NO") };
            let _ = write!(
                out,
                "<li><span class=\"verdict {class}\">{word}</span> {}</li>",
                escape(&check.expected)
            );
        }
        out.push_str("</ul></details>\n</article>\n");
    }

    /// The page.
    pub fn html(&self) -> String {
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>Lockkeeper lab</title>\n<style>\n{}{}</style>\n</head>\n<body>\n<main>\n{}{}</main>\n</body>\n</html>\n",
            style::COLORS,
            style::PAGE,
            svg::LEGEND,
            self.body
        )
    }
}

fn add_half(out: &mut String, half: &HalfReport, length: f64) {
    let hurts = half.counts.iter().any(|count| count.hurts());
    let class = if hurts { "half hurt" } else { "half" };
    let _ = write!(
        out,
        "<section class=\"{class}\">\n<h2>{}</h2>\n<p>{}</p>\n",
        escape(&half.way),
        escape(&half.how)
    );
    out.push_str("<ul class=\"counts\">");
    for count in half.counts.iter().filter(|count| !count.words.is_empty()) {
        let class = match (count.harm, count.hurts()) {
            (_, true) => "bad",
            (true, false) => "good",
            (false, false) => "plain",
        };
        let _ = write!(
            out,
            "<li class=\"{class}\"><b>{}</b> {}</li>",
            escape(&count.shown()),
            escape(&count.words)
        );
    }
    out.push_str("</ul>\n");
    if !half.timeline.tracks.is_empty() {
        out.push_str(&svg::draw(&half.way, &half.timeline, length));
    }
    let fences = half.timeline.fences.iter().take(8);
    let fences: Vec<String> =
        fences.map(|n| format!("fence {} is {n}", half.timeline.fence_name(*n))).collect();
    // Of many grants the numbers tell nothing more.
    if !fences.is_empty() && half.timeline.fences.len() <= 4 {
        let _ = writeln!(out, "<p class=\"facts\">{}</p>", fences.join(" · "));
    }
    out.push_str("<details><summary>All events</summary><table>");
    for (at, actor, words) in half.timeline.log.iter().take(400) {
        let _ =
            write!(out, "<tr><td>{at:.3} s</td><td>{}</td><td>{}</td></tr>", escape(actor), escape(words));
    }
    out.push_str("</table></details>\n</section>\n");
}

/// Text as it may stand in HTML and SVG, also in an attribute. Control characters have no place in either.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Prose with code in backticks.
fn prose(text: &str) -> String {
    let parts = text.split('`').enumerate();
    parts
        .map(|(i, part)| if i % 2 == 0 { escape(part) } else { format!("<code>{}</code>", escape(part)) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::LabCount;
    use crate::timeline::{Mark, MarkKind, Timeline, Track};

    #[test]
    fn no_text_of_a_run_becomes_markup() {
        let evil = "<script>alert('x')</script>\" onload=\"x\u{1b}[2J";
        let marks = vec![Mark { kind: MarkKind::Damage, at: 0.5, text: evil.into() }];
        let tracks = vec![Track { name: evil.into(), spans: Vec::new(), marks }];
        let log = vec![(0.1, evil.to_owned(), evil.to_owned())];
        let timeline = Timeline { length: 1.0, tracks, log, ..Timeline::default() };
        let counts = vec![LabCount { key: "x", number: 1.0, words: evil.into(), harm: true }];
        let half = HalfReport { way: evil.into(), how: evil.into(), counts, timeline };
        let mut out = String::new();
        add_half(&mut out, &half, 1.0);
        assert!(!out.contains("<script") && !out.contains('\u{1b}') && !out.contains("\" onload"), "{out}");
        assert!(out.contains("&lt;script&gt;"), "the text is there, as text: {out}");
    }
}
