//! Prints advice: as text, as JSON, and the worked examples as a page of the documentation.

use clap::ValueEnum;
use lockkeeper::Purpose;
use serde_json::{Value, json};

use super::examples::{EXAMPLES, WorkedExample};
use super::{Advice, Situation, advise};
use crate::duration;
use crate::exit::ExitFailure;
use crate::output::{self, bold};

/// Prints the advice for a situation.
pub fn print(situation: &Situation, as_json: bool) -> Result<(), ExitFailure> {
    let advice = advise(situation);
    if as_json {
        return output::line(&json_of(situation, &advice).to_string());
    }
    let plain = |text: &str| text.replace('`', "");
    let mut lines = Vec::new();
    for (what, text) in rows(&advice) {
        lines.push(format!("{}  {}", bold(&format!("{what:<9}")), plain(&text)));
    }
    for paste in advice.rule.paste {
        lines.push(String::new());
        lines.extend(paste.text.trim_end().lines().map(str::to_owned));
    }
    lines.push(String::new());
    lines.push(format!("more: docs/{}, and `lockkeeper doctor` examines the store", advice.rule.page));
    lines.iter().try_for_each(|line| output::line(line))
}

/// The advice, line by line.
fn rows(advice: &Advice) -> Vec<(&'static str, String)> {
    let (rule, store, ttl) = (advice.rule, &advice.store, &advice.ttl);
    let store =
        store.url.map_or_else(|| format!("none: {}", store.why), |url| format!("`{url}`: {}", store.why));
    let ttl = ttl
        .ttl
        .map_or_else(|| format!("none: {}", ttl.why), |t| format!("{}: {}", duration::exact(t), ttl.why));
    let lock = if rule.is_lock { "" } else { " (no lock)" };
    vec![
        ("use", format!("{}{lock}", rule.mechanism)),
        ("because", rule.why.to_owned()),
        ("store", store),
        ("ttl", ttl),
        ("promised", rule.promised.to_owned()),
        ("risk", rule.risk.to_owned()),
    ]
}

/// The word of an answer on the command line.
pub fn word<E: ValueEnum>(value: E) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

pub const fn purpose_word(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Efficiency => "efficiency",
        Purpose::Correctness => "correctness",
    }
}

fn json_of(situation: &Situation, advice: &Advice) -> Value {
    let running: Vec<String> = situation.running.iter().map(|system| word(*system)).collect();
    let paste =
        advice.rule.paste.iter().map(|paste| json!({ "language": paste.language, "text": paste.text }));
    json!({
        "situation": {
            "purpose": situation.purpose,
            "resource": word(situation.resource),
            "running": running,
            "work_ms": situation.work.as_millis() as u64,
            "conflicts": word(situation.conflicts),
            "hosts": word(situation.hosts),
        },
        "mechanism": advice.rule.mechanism,
        "is_lock": advice.rule.is_lock,
        "why": advice.rule.why,
        "store": { "url": advice.store.url, "why": advice.store.why },
        "ttl": { "ms": advice.ttl.ttl.map(|ttl| ttl.as_millis() as u64), "why": advice.ttl.why },
        "paste": paste.collect::<Vec<_>>(),
        "promised": advice.rule.promised,
        "risk": advice.rule.risk,
        "page": format!("docs/{}", advice.rule.page),
    })
}

/// The command that gives the advice of an example.
fn command(example: &WorkedExample) -> String {
    let running: Vec<String> = example.running.iter().map(|system| word(*system)).collect();
    format!(
        "lockkeeper advise --purpose {} --resource {} --running {} --work {} --conflicts {} --hosts many",
        purpose_word(example.purpose),
        word(example.resource),
        running.join(","),
        duration::exact(example.work),
        word(example.conflicts),
    )
}

const HEAD: &str = "\
# Choosing a mechanism: eight worked examples

The best lock is often none. `lockkeeper advise` asks six questions and says which mechanism fits, in which store, with which ttl, what is promised, and
which risk stays. On a terminal it asks; a script answers with options. This page is made by `lockkeeper advise --examples`, and a test compares them.
[Choosing a store](choosing-a-store.md) has the stores, [Do I need a fence?](do-i-need-a-fence.md) the fence (the fencing token), [the glossary](../GLOSSARY.md) the terms.

The Rust below needs:

```toml
[dependencies]
lockkeeper = \"0.1\"
tokio = { version = \"1\", features = [\"macros\", \"rt\"] }
```
";

const FOOT: &str = "
---
[All pages](../README.md) · [Glossary](../GLOSSARY.md)
";

/// The page with all examples.
pub fn page() -> String {
    let mut text = HEAD.to_owned();
    for example in &EXAMPLES {
        let advice = advise(&example.situation());
        text += &format!("\n## {}\n{}\n\n```sh\n{}\n```\n\n", example.title, example.story, command(example));
        for (what, line) in rows(&advice) {
            text += &format!("- **{what}**: {line}.\n");
        }
        for paste in advice.rule.paste {
            text += &format!("\n```{}\n{}\n```\n", paste.language, paste.text.trim_end());
        }
        // The page is in docs/guide.
        let link = match advice.rule.page.strip_prefix("guide/") {
            Some(beside) => beside.to_owned(),
            None => format!("../{}", advice.rule.page),
        };
        text += &format!("\n[More about it]({link}).\n");
    }
    text + FOOT
}
