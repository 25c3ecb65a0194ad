//! The text format of Prometheus: families of series, each with its HELP and TYPE lines.

use std::fmt::Write as _;

/// A text that grows by families.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
    family: &'static str,
}

impl Exposition {
    /// Begins a family. `kind` is gauge or counter.
    pub fn family(&mut self, name: &'static str, kind: &str, help: &str) -> &mut Self {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        self.family = name;
        self
    }

    /// Adds a series to the family.
    pub fn series(&mut self, labels: &[(&str, &str)], value: f64) -> &mut Self {
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let braces = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.text, "{}{braces} {value}", self.family);
        self
    }

    /// A family with one series, which has no labels.
    pub fn single(&mut self, name: &'static str, help: &str, value: f64) {
        self.family(name, "gauge", help).series(&[], value);
    }

    pub fn into_text(self) -> String {
        self.text
    }
}

/// The value of a label between its quotes.
pub fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_numbers_are_exact() {
        let mut text = Exposition::default();
        text.family("f", "gauge", "A fence.").series(&[("lock", "a\"b\\c")], 1_794_775_452_413_713.0);
        text.single("up", "Up.", 1.0);
        let expected = "# HELP f A fence.\n# TYPE f gauge\nf{lock=\"a\\\"b\\\\c\"} 1794775452413713\n\
                        # HELP up Up.\n# TYPE up gauge\nup 1\n";
        assert_eq!(text.into_text(), expected);
    }
}
