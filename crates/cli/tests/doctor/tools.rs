//! The examination of a store, and what a test expects of it.

use serde_json::Value;

use crate::common::{Place, errors, json, text};

/// Limits that no busy machine exceeds: pauses and round trips count as slow above a tenth of the ttl.
pub const PATIENT: [&str; 4] = ["--ttl", "10m", "--timeout", "60s"];

/// The report of `doctor --json` about a store.
pub struct Report(pub Value);

/// Examines a store.
pub fn examine(place: &Place, url: &str) -> Report {
    examine_with(place, url, &PATIENT)
}

/// Examines a store with these options. The exit code must be that of the gravest finding, and the text must say the same.
pub fn examine_with(place: &Place, url: &str, options: &[&str]) -> Report {
    let words = [&["doctor", "--json", "--store", url], options].concat();
    let done = place.lk(words).output().unwrap();
    let report = json(&done);
    assert_eq!(report["exit_code"], done.status.code().unwrap(), "{report}");
    let expected = match (report["severity"].as_str().unwrap(), report["profile"].is_null()) {
        ("harm", true) => [2, 3],
        ("harm", false) => [2, 2],
        ("risk", _) => [1, 1],
        _ => [0, 0],
    };
    assert!(expected.contains(&done.status.code().unwrap()), "{report}");
    // A store may warn of a known bug on stderr.
    assert!(!text(&done).contains("secret") && !errors(&done).contains("secret"), "{done:?}");
    Report(report)
}

impl Report {
    pub fn exit_code(&self) -> i64 {
        self.0["exit_code"].as_i64().unwrap()
    }

    /// The text of every finding of this severity.
    pub fn findings(&self, severity: &str) -> Vec<String> {
        let all = self.0["findings"].as_array().unwrap().iter();
        let all = all.filter(|finding| finding["severity"] == severity);
        all.map(|finding| finding["text"].as_str().unwrap().to_owned()).collect()
    }

    /// Every setting to change: `what to value`.
    pub fn changes(&self) -> Vec<String> {
        let all = self.0["findings"].as_array().unwrap().iter();
        let changes = all.flat_map(|finding| finding["changes"].as_array().unwrap());
        let text = |change: &Value, key: &str| change[key].as_str().unwrap_or_default().to_owned();
        changes.map(|change| format!("{} to {}", text(change, "what"), text(change, "to"))).collect()
    }

    pub fn standing(&self, promise: &str) -> String {
        let all = self.0["verdicts"].as_array().unwrap();
        let found = all.iter().find(|verdict| verdict["promise"] == promise).unwrap();
        found["standing"].as_str().unwrap().to_owned()
    }

    /// Nothing is wrong but risks that contain one of these texts, and every operation of the trial went well.
    pub fn is_healthy_but(&self, risks: &[&str]) -> &Self {
        assert_eq!(self.findings("harm"), [""; 0], "{}", self.0);
        for risk in self.findings("risk") {
            assert!(risks.iter().any(|known| risk.contains(known)), "{risk}: {}", self.0);
        }
        for known in risks {
            self.has("risk", known);
        }
        let steps = self.0["trial"].as_array().unwrap();
        assert!(steps.len() >= 4 && steps.iter().all(|step| step["ok"] == true), "{}", self.0);
        assert_eq!(self.standing("availability"), "kept");
        assert!(self.0["round_trips"]["count"].as_u64().unwrap() >= 1);
        assert!(self.0["host"]["measured_ms"].as_u64().unwrap() >= 1000, "{}", self.0);
        self
    }

    /// There is a finding of this severity with this text.
    pub fn has(&self, severity: &str, words: &str) -> &Self {
        let found = self.findings(severity);
        assert!(found.iter().any(|text| text.contains(words)), "no {severity} {words:?}: {}", self.0);
        self
    }

    /// This setting is to be changed.
    pub fn advises(&self, change: &str) -> &Self {
        assert!(self.changes().iter().any(|known| known.contains(change)), "{change}: {:?}", self.changes());
        self
    }
}
