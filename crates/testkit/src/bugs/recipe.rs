//! Recipes that forget a check of their own, on a store that is fine: what they read or write is changed on the way, so that it is
//! as if the check were not there.

use lockkeeper_core::assignment::{WeightedMember, assign};
use lockkeeper_core::{Attempt, Expect, Fence, LockName, Record};
use lockkeeper_host::random_128;
use serde_json::{Value, json};

use super::Bug;

/// The line of the recipes' own, if there is one, and what follows it.
fn split(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|b| *b == b'\n') {
        Some(end) if bytes.starts_with(b"lk1 ") => bytes.split_at(end + 1),
        _ => (&[], bytes),
    }
}

/// The same bytes with another mark of 16 digits, which follows `lk1 `.
fn with_mark(bytes: &[u8], mark: &str) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.starts_with(b"lk1 ") {
        bytes[4..20].copy_from_slice(mark.as_bytes());
    }
    bytes
}

/// The same bytes with marks that no writer has.
fn forget_marks(bytes: &[u8]) -> Vec<u8> {
    let (trail, value) = split(bytes);
    let forgotten = |word: &str| match word.split_once(':') {
        Some((_, version)) => format!("0:{version}"),
        None => word.to_owned(),
    };
    let line: Vec<String> = String::from_utf8_lossy(trail).split(' ').map(forgotten).collect();
    let mut line = line.join(" ");
    if !trail.is_empty() && !line.ends_with('\n') {
        line.push('\n');
    }
    [line.as_bytes(), value].concat()
}

/// Changes the page of a recipe: its first line, or all of it.
fn edit(bytes: &[u8], change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let (trail, page) = split(bytes);
    let end = page.iter().position(|b| *b == b'\n').unwrap_or(page.len());
    let Ok(mut value) = serde_json::from_slice(&page[..end]) else { return bytes.to_vec() };
    change(&mut value);
    [trail, value.to_string().as_bytes(), &page[end..]].concat()
}

fn is_done(bytes: &[u8]) -> bool {
    let mut done = false;
    edit(bytes, |page| done = page["done"].is_object() || page["done"] == true);
    done
}

/// The state that the record of a claimed item has.
fn state(bytes: &[u8]) -> String {
    let mut state = String::new();
    edit(bytes, |page| state = page["state"].as_str().unwrap_or_default().to_owned());
    state
}

fn has_value(bytes: &[u8]) -> bool {
    let mut has = false;
    edit(bytes, |page| has = page["value"].is_object());
    has
}

/// Whether a record that is called like a recipe's own is something else.
pub(super) fn is_foreign(record: &Record) -> bool {
    let page = split(&record.value).1;
    let line = page.split(|b| *b == b'\n').next().unwrap_or_default();
    let recipe = ["once/", "claim/", "cached/"].iter().any(|recipe| belongs(&record.key, recipe));
    recipe && !serde_json::from_slice::<Value>(line).is_ok_and(|page| page.is_object())
}

/// Whether this is the marker that the lease of a claimed item leaves.
pub(super) fn is_lease_tombstone(key: &LockName, value: &[u8]) -> bool {
    belongs(key, "claim-lease/") && value.windows(10).any(|part| part == b"\"free_at\":")
}

fn belongs(key: &LockName, recipe: &str) -> bool {
    key.as_str().starts_with(recipe)
}

/// The assignment to the members of a group that own nothing yet.
fn owners_from_nothing(page: &Value) -> Vec<Option<usize>> {
    let members = page["members"].as_array().into_iter().flatten();
    let members: Vec<WeightedMember<'_>> = members
        .filter_map(|member| Some(WeightedMember { name: member["name"].as_str()?, weight: 1 }))
        .collect();
    assign(&members, &vec![None; page["count"].as_u64().unwrap_or(0) as usize])
}

/// The record of a group in which each partition has the owner of the one before it.
pub(super) fn with_owners_moved(mut record: Record) -> Record {
    if belongs(&record.key, "partition-group/") {
        record.value = edit(&record.value, |page| {
            if let Some(owners) = page["owners"].as_array_mut() {
                owners.rotate_right(1);
            }
        });
    }
    record
}

/// The record that a client with the fence `own` reads.
pub(super) fn twist_read(bug: Bug, own: Option<Fence>, mut record: Record) -> Record {
    let value = match bug {
        Bug::PrintUnchecked if belongs(&record.key, "once/") => edit(&record.value, |page| {
            page.as_object_mut().map(|page| page.remove("print"));
        }),
        Bug::WindowForgotten if belongs(&record.key, "window/") => {
            edit(&record.value, |page| page["done"] = json!(false))
        }
        // The owners are computed anew from the members, whatever they own.
        Bug::OwnersForgotten if belongs(&record.key, "partition-group/") => {
            edit(&record.value, |page| page["owners"] = json!(owners_from_nothing(page)))
        }
        // No term is above that of the caller.
        Bug::TermUnchecked if belongs(&record.key, "election/") => edit(&record.value, |page| {
            let said = page["proclaimed"].as_array_mut().into_iter().flatten();
            for (term, own) in said.map(|said| &mut said["term"]).filter_map(|term| Some((term, own?))) {
                *term = json!(term.as_u64().map_or(own.get(), |term| term.min(own.get())));
            }
        }),
        // As much as whole parts have is enough.
        Bug::SizeUnchecked if belongs(&record.key, "once/") => edit(&record.value, |page| {
            if let Some(size) = page["done"]["size"].as_u64() {
                page["done"]["size"] = json!(size - size % (768 << 10));
            }
        }),
        Bug::SizeUnchecked if belongs(&record.key, "cached/") => edit(&record.value, |page| {
            if let Some(size) = page["value"]["size"].as_u64() {
                page["value"]["size"] = json!(size - size % (768 << 10));
            }
        }),
        Bug::DurationForgotten if belongs(&record.key, "cached/") => {
            edit(&record.value, |page| page["value"]["took_ms"] = json!(0))
        }
        // Whether a value is fresh is not read again under the lock, and so on.
        Bug::FreshnessUnchecked if belongs(&record.key, "cached-fresh/") => {
            edit(&record.value, |page| page["fence"] = json!(1))
        }
        // The versions of earlier writes are known, and whose they were is not.
        Bug::MarksForgotten => forget_marks(&record.value),
        _ => return record,
    };
    record.value = value;
    record
}

/// The write that the store gets instead.
pub(super) fn twist_write(bug: Bug, key: &LockName, value: &[u8], expect: Expect) -> (Vec<u8>, Expect) {
    let recipe =
        ["once/", "once-part/", "election/", "window/", "claim/", "claim-lease/", "partition-group/"]
            .iter()
            .any(|recipe| belongs(key, recipe));
    match bug {
        Bug::UpdateUnchecked if !recipe => (value.to_vec(), Expect::Any),
        Bug::LateResultKept if belongs(key, "once/") && is_done(value) => (value.to_vec(), Expect::Any),
        Bug::LateEndKept if belongs(key, "window/") && is_done(value) => (value.to_vec(), Expect::Any),
        Bug::LateValueKept if belongs(key, "cached/") => (value.to_vec(), Expect::Any),
        // A refresher writes over nothing as well, without a version that it could compare with.
        Bug::FirstClaimForgotten if belongs(key, "cached/") && has_value(value) => match expect {
            Expect::Version(_) => (value.to_vec(), Expect::Any),
            expect => (value.to_vec(), expect),
        },
        Bug::WriteLogForgotten => (split(value).1.to_vec(), expect),
        Bug::TooLargeForgotten if belongs(key, "once/") => (
            edit(value, |page| {
                if page["done"]["unkept"].is_string() {
                    page.as_object_mut().map(|page| page.remove("done"));
                }
            }),
            expect,
        ),
        Bug::BeatsForgotten if belongs(key, "partition-group/") => (
            edit(value, |page| {
                let members = page["members"].as_array_mut().into_iter().flatten();
                members.for_each(|member| member["beat"] = json!(0));
            }),
            expect,
        ),
        Bug::EndForgotten if belongs(key, "window/") => (
            edit(value, |page| {
                page.as_object_mut().map(|page| page.remove("ended"));
            }),
            expect,
        ),
        Bug::LeaseUnchecked if belongs(key, "claim-lease/") => (value.to_vec(), Expect::Any),
        Bug::LeaseRevived if belongs(key, "claim-lease/") && expect != Expect::Absent => {
            (value.to_vec(), Expect::Any)
        }
        Bug::LateCompletionKept if belongs(key, "claim/") && state(value) == "done" => {
            (value.to_vec(), Expect::Any)
        }
        Bug::AttemptUnchecked if belongs(key, "claim/") && state(value) == "taken" => {
            (value.to_vec(), Expect::Any)
        }
        Bug::AttemptsUncounted if belongs(key, "claim/") => {
            (edit(value, |page| page["attempts"] = json!(1)), expect)
        }
        // Each try carries a mark of its own, so that none is found again.
        Bug::RetryIsANewWrite => {
            (with_mark(value, &Attempt::from_bytes(random_128()).to_hex()[..16]), expect)
        }
        Bug::OnlyTheNewestIsKept if belongs(key, "election/") => {
            let newest = edit(value, |page| {
                let last = page["proclaimed"].as_array().and_then(|said| said.last()).cloned();
                page["proclaimed"] = json!(last.into_iter().collect::<Vec<_>>());
            });
            (newest, expect)
        }
        _ => (value.to_vec(), expect),
    }
}
