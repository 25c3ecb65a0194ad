//! Prints a diagnosis: for a person at night, the verdicts first and every setting to change at the end; or as JSON.

use lockkeeper::{Profile, Purpose, Severity};
use serde_json::{Value, json};

use super::verdict::{DoctorVerdict, Standing, verdicts};
use super::{Diagnosis, LockCounts};
use crate::duration;
use crate::exit::ExitFailure;
use crate::output::{self, bold};
use crate::text::{columns, plain};

/// Prints the diagnosis of the store `shown`.
pub fn print(found: &Diagnosis, shown: &str, exit_code: i32, as_json: bool) -> Result<(), ExitFailure> {
    if as_json {
        return output::line(&json_of(found, shown, exit_code).to_string());
    }
    let mut lines = vec![bold(&plain(shown))];
    lines.extend(server_lines(found));
    lines.extend(measured_lines(found));
    lines.push(String::new());
    lines.extend(verdict_lines(found));
    lines.extend(finding_lines(found));
    lines.extend(change_lines(found));
    lines.push(String::new());
    lines.push(conclusion(found));
    lines.iter().try_for_each(|line| output::line(line))
}

fn server_lines(found: &Diagnosis) -> Vec<String> {
    let ways = found.ways.iter().map(|way| format!("  {}", plain(&way.text())));
    let servers = found.examination.servers.iter().map(|server| {
        let parts = [server.version.as_deref(), server.role.as_deref()];
        let about = parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
        let facts: Vec<String> = server.facts.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let about = if about.is_empty() { String::new() } else { format!(" is {about}") };
        let facts = if facts.is_empty() { String::new() } else { format!(": {}", facts.join(", ")) };
        format!("  {}{}{}", plain(&server.address), plain(&about), plain(&facts))
    });
    ways.chain(servers).collect()
}

fn measured_lines(found: &Diagnosis) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(trips) = found.round_trips {
        let (median, worst) = (duration::measured(trips.median), duration::measured(trips.worst));
        lines.push(format!("  round trip {median} (median of {}), {worst} (worst)", trips.count));
    }
    for clock in &found.clocks {
        let rate = clock.rate_ppm.map_or("its rate could not be measured".to_owned(), |(ppm, bound)| {
            format!("its rate differs by {:.2} % (± {:.2} %)", ppm.abs() / 1e4, bound / 1e4)
        });
        lines.push(format!("  the clock of {} is {}; {rate}", plain(&clock.server), clock.offset_text()));
    }
    if let Some(LockCounts { held, waiting, more }) = found.locks {
        let page = if more { " on the first page of the list" } else { "" };
        lines.push(format!("  {held} locks are held, {waiting} requests wait{page}"));
    }
    if let Some(host) = &found.host {
        let (longest, time) = (duration::measured(host.longest), duration::measured(host.measured));
        lines.push(format!("  this host paused for {longest} at most, within {time}"));
    }
    lines
}

fn verdict_lines(found: &Diagnosis) -> Vec<String> {
    let rows: Vec<Vec<String>> = verdicts(found.profile.as_ref(), &found.findings)
        .iter()
        .map(|DoctorVerdict { promise, standing, text }| {
            let word = match standing {
                Standing::AtRisk | Standing::Broken => standing.as_str().to_uppercase(),
                _ => standing.as_str().to_owned(),
            };
            vec![promise.as_str().to_owned(), word, text.clone()]
        })
        .collect();
    columns(&rows)
}

fn finding_lines(found: &Diagnosis) -> Vec<String> {
    let mut lines = Vec::new();
    if !found.findings.is_empty() {
        lines.push(String::new());
    }
    for finding in &found.findings {
        let (severity, promise) = (finding.severity.as_str(), finding.promise.as_str());
        lines.push(format!("{severity} ({promise}): {}", plain(&finding.text)));
    }
    lines
}

/// Every setting to change, each once, with the step that changes it.
fn change_lines(found: &Diagnosis) -> Vec<String> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for change in found.findings.iter().flat_map(|finding| &finding.changes) {
        let from = change.from.as_ref().map_or(String::new(), |from| format!("from {from}"));
        let how = change.how.clone().unwrap_or_default();
        let row = [format!("  {}", change.what), from, format!("to {}", change.to), how];
        let row: Vec<String> = row.iter().map(|cell| plain(cell).into_owned()).collect();
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return Vec::new();
    }
    [String::new(), bold("change")].into_iter().chain(columns(&rows)).collect()
}

fn conclusion(found: &Diagnosis) -> String {
    let count = |severity| found.findings.iter().filter(|finding| finding.severity == severity).count();
    let (harms, risks) = (count(Severity::Harm), count(Severity::Risk));
    let correctness = match found.profile.as_ref().map(is_good) {
        Some(true) => "good for correctness: yes",
        Some(false) => "good for correctness: no",
        None => "good for correctness: unknown",
    };
    match (harms, risks) {
        (0, 0) => format!("nothing to change. {correctness}"),
        _ => format!("harms: {harms}, risks: {risks}. {correctness}"),
    }
}

fn is_good(profile: &Profile) -> bool {
    profile.allows(Purpose::Correctness).is_ok()
}

fn json_of(found: &Diagnosis, shown: &str, exit_code: i32) -> Value {
    let ms = |time: std::time::Duration| time.as_micros() as f64 / 1000.0;
    let ways = found.ways.iter().map(|way| {
        json!({
            "server": way.server.to_string(),
            "connect_ms": way.outcome.as_ref().ok().map(|took| ms(*took)),
            "error": way.outcome.as_ref().err(),
        })
    });
    let steps = found.trial.steps.iter().map(|step| {
        let text = step.outcome.as_ref().map_or_else(|finding| finding.text.clone(), Clone::clone);
        json!({ "operation": step.operation, "ok": step.outcome.is_ok(), "ms": ms(step.took), "text": text })
    });
    let verdicts = verdicts(found.profile.as_ref(), &found.findings);
    let verdicts = verdicts.iter().map(|verdict| {
        json!({ "promise": verdict.promise, "standing": verdict.standing.as_str(), "text": verdict.text })
    });
    let correctness = found.profile.as_ref().map(|profile| {
        let why = profile.allows(Purpose::Correctness).err().map(|error| error.to_string());
        json!({ "good": why.is_none(), "why": why })
    });
    json!({
        "store": shown,
        "exit_code": exit_code,
        "severity": found.severity(),
        "verdicts": verdicts.collect::<Vec<_>>(),
        "findings": found.findings,
        "correctness": correctness,
        "reach": ways.collect::<Vec<_>>(),
        "servers": found.examination.servers,
        "round_trips": found.round_trips.map(|trips| json!({
            "count": trips.count, "median_ms": ms(trips.median), "worst_ms": ms(trips.worst),
        })),
        "clocks": found.clocks.iter().map(super::ClockEstimate::json).collect::<Vec<_>>(),
        "locks": found.locks.map(|locks| json!({ "held": locks.held, "waiting": locks.waiting, "more": locks.more })),
        "host": found.host.as_ref().map(super::HostPauses::json),
        "trial": steps.collect::<Vec<_>>(),
        "profile": found.profile,
    })
}
