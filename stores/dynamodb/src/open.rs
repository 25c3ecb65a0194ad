//! What the table is like, and what that means for the promises of the store.

use aws_sdk_dynamodb::types::{KeyType, ScalarAttributeType, TableDescription, TableStatus};
use lockkeeper_core::{Error, Profile, Promise, Result, Waiting};

use crate::config::Options;
use crate::fault::Failure;
use crate::script::{KEY, Script};

/// Looks at the table, refuses what cannot work, and writes down what is promised.
pub(crate) async fn profile(script: &Script, options: &Options) -> Result<Profile> {
    let table = look(script).await?.ok_or(Failure::NoTable)?;
    check(&table, &options.table)?;
    let mut notes = Vec::new();
    // Two tables that copy each other take both of two writes that exclude each other.
    let replicated = !table.replicas().is_empty();
    if replicated {
        notes.push(
            "this is a global table: locks exclude each other in one region only. Let all clients use the same one, or use a \
             table without replicas"
                .into(),
        );
    }
    notes.push(
        "a holder that is paused past its ttl may still write: only a resource that checks the fence refuses that"
            .into(),
    );
    notes.push(
        "the lock of a dead holder is free for whoever has watched it for a whole ttl, and not before".into(),
    );
    notes.push(
        "fences grow for each name; those of different names are ordered by DynamoDB's clock only".into(),
    );
    notes.push("a record with a ttl goes by DynamoDB's clock, which is told in whole seconds".into());
    notes.push("circles of waiting owners are not found: let asks end by a wait time".into());
    let kept = |kept: bool| if kept { Promise::Kept } else { Promise::Likely };
    Ok(Profile {
        store: "dynamodb".into(),
        exclusion: kept(!replicated),
        fence: kept(!replicated),
        durable: kept(!replicated),
        waiting: Waiting::Poll,
        wake: options.poll + options.timeout,
        shared: true,
        permits: true,
        several: true,
        reentry: true,
        deadlocks: false,
        lock_delay: true,
        min_hold: true,
        watch: false,
        revoke: true,
        records: true,
        notes,
    })
}

/// The table, if there is one.
pub(crate) async fn look(script: &Script) -> Result<Option<TableDescription>, Failure> {
    match script.client.describe_table().table_name(&script.table).send().await.map_err(Failure::of) {
        Ok(answer) => Ok(answer.table),
        Err(Failure::NoTable) => Ok(None),
        Err(Failure::Unheard(text)) => Err(Failure::Away(text)),
        Err(failure) => Err(failure),
    }
}

/// Whether it can be used: one key, a text, called as we call it.
pub(crate) fn check(table: &TableDescription, name: &str) -> Result<()> {
    match table.table_status() {
        Some(TableStatus::Active | TableStatus::Updating) => {}
        status => {
            let status = status.map_or("unknown", TableStatus::as_str);
            return Err(Error::Unavailable(format!("the table {name:?} cannot be used now: it is {status}")));
        }
    }
    let keys = table.key_schema();
    let ours = matches!(keys, [one] if one.attribute_name() == KEY && *one.key_type() == KeyType::Hash);
    let text = table.attribute_definitions().iter().any(|attribute| {
        attribute.attribute_name() == KEY && *attribute.attribute_type() == ScalarAttributeType::S
    });
    if ours && text {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the table {name:?} is not one to keep locks in: its only key must be {KEY:?}, a string. Make another with \
         `lockkeeper store init URL`"
    )))
}
