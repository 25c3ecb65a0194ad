//! A chart of curves as SVG.

use std::fmt::Write;

use super::escape;
use crate::outcome::LabChart;

const WIDTH: f64 = 1040.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 34.0;
const RIGHT: f64 = 190.0;
const BOTTOM: f64 = 46.0;
/// The colour and the dashes of each curve: no two differ by colour alone.
const LOOKS: [(&str, &str); 4] =
    [("var(--holds)", ""), ("var(--bad)", "8 4"), ("var(--good)", "2 4"), ("var(--fault)", "10 3 2 3")];

/// Draws a chart. The x axis has a place for each x that occurs, at equal distances.
pub fn draw(chart: &LabChart) -> String {
    let mut xs: Vec<f64> =
        chart.series.iter().flat_map(|series| &series.points).map(|point| point.0).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let ys = chart.series.iter().flat_map(|series| &series.points).map(|point| point.1);
    let top = round_up(ys.fold(0.0, f64::max));
    let x = |value: f64| {
        let place = xs.iter().position(|x| *x == value).unwrap_or(0) as f64;
        LEFT + place / (xs.len().max(2) - 1) as f64 * (WIDTH - LEFT - RIGHT)
    };
    let y = |value: f64| HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);
    let mut out = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\
         <text x=\"{LEFT}\" y=\"16\" fill=\"var(--fg)\" font-weight=\"700\">{title}</text>\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\" fill=\"var(--dim)\">{}</text>\
",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 8.0,
        escape(&chart.x),
        title = escape(&format!("{}, {}", chart.title, chart.y)),
    );
    for value in &xs {
        let (at, low) = (x(*value), HEIGHT - BOTTOM + 16.0);
        let _ = write!(
            out,
            "<text x=\"{at:.1}\" y=\"{low:.0}\" text-anchor=\"middle\" fill=\"var(--dim)\">{value}</text>"
        );
    }
    for part in 0..=4 {
        let value = top * f64::from(part) / 4.0;
        let (at, right) = (y(value), WIDTH - RIGHT);
        let places = if top < 4.0 { 2 } else { 0 };
        let _ = write!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{right:.0}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"var(--line)\"/>\
             <text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"var(--dim)\">{value:.places$}</text>",
            LEFT - 8.0,
            at + 4.0
        );
    }
    // The names stand at the ends of the curves, and do not cover each other.
    let mut ends: Vec<(usize, f64)> =
        chart.series.iter().enumerate().filter_map(|(i, s)| Some((i, y(s.points.last()?.1)))).collect();
    ends.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut above = f64::MIN;
    for (i, at) in ends {
        above = (above + 16.0).max(at);
        let (series, (color, dashes)) = (&chart.series[i], LOOKS[i % LOOKS.len()]);
        let points: Vec<String> =
            series.points.iter().map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1))).collect();
        let _ = write!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"3\" stroke-dasharray=\"{dashes}\"/>\
             <text x=\"{:.0}\" y=\"{:.1}\" fill=\"{color}\" font-weight=\"700\">{}</text>",
            points.join(" "),
            WIDTH - RIGHT + 10.0,
            above + 4.0,
            escape(&series.name)
        );
    }
    out + "</svg>\n"
}

/// A number at or above `value` that four steps divide evenly.
fn round_up(value: f64) -> f64 {
    let unit = 10f64.powf(value.max(1e-3).log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0];
    steps.into_iter().map(|step| step * unit).find(|top| *top >= value).unwrap_or(value)
}
