//! The check of the table when the store is opened, and the guarantees that follow from it.

use aws_sdk_dynamodb::types::{KeyType, ScalarAttributeType, TableDescription, TableStatus};
use lockkeeper_core::faults::Deployment;
use lockkeeper_core::{Error, Finding, LimitSupport, Profile, Promise, Result, WaitOrder};

use crate::attributes::KEY;
use crate::config::Options;
use crate::error::Failure;
use crate::statements::TableClient;

/// Checks the table and returns the profile of the store.
pub(crate) async fn profile(table: &TableClient, options: &Options) -> Result<Profile> {
    let table = describe_table(table).await?.ok_or(Failure::NoTable)?;
    check(&table, &options.table)?;
    // Each replica of a global table decides conditions for itself, so two regions can grant the same lock.
    let replicated = !table.replicas().is_empty();
    let findings = findings(replicated);
    let deployment = if replicated { Deployment::DynamoDbGlobal } else { Deployment::DynamoDb };
    Ok(Profile {
        waiting: WaitOrder::Poll,
        wake: options.poll + options.timeout,
        shared: true,
        permits: true,
        multi_name: true,
        reentry: true,
        deadlocks: false,
        lock_delay: true,
        min_hold: true,
        watch: false,
        revoke: true,
        records: true,
        limits: LimitSupport::CompareAndSwap,
        findings,
        ..Profile::deployed("dynamodb", vec![deployment])
    })
}

fn findings(replicated: bool) -> Vec<Finding> {
    let global = Finding::risk(
        Promise::Exclusion,
        "this is a global table: locks exclude each other in one region only, and fences of two regions have no order",
    )
    .set("the table", "one without replicas, or the same region in the URL of every client");
    let mut findings: Vec<Finding> = replicated.then_some(global).into_iter().collect();
    findings.extend([
        Finding::hint(
            Promise::Exclusion,
            "a holder that is paused past its ttl may still write: only a resource that checks the fence refuses that",
        ),
        Finding::hint(
            Promise::Waiting,
            "a waiter gets the lock of a dead holder when it has observed the lock for a whole ttl, and not before",
        ),
        Finding::hint(
            Promise::Fence,
            "fences grow for each name; those of different names are ordered by DynamoDB's clock only",
        ),
        Finding::hint(
            Promise::Durability,
            "a record with a ttl expires by DynamoDB's clock, which has whole seconds in its replies",
        ),
        Finding::hint(
            Promise::Waiting,
            "deadlocks between owners are not found: give every request a wait time",
        ),
    ]);
    findings
}

/// The description of the table; `None`: it does not exist.
pub(crate) async fn describe_table(table: &TableClient) -> Result<Option<TableDescription>, Failure> {
    match table.client.describe_table().table_name(&table.table).send().await.map_err(Failure::of) {
        Ok(answer) => Ok(answer.table),
        Err(Failure::NoTable) => Ok(None),
        Err(Failure::NoReply(text)) => Err(Failure::NotSent(text)),
        Err(failure) => Err(failure),
    }
}

/// Refuses a table that is not ready, or whose only key is not the string `k`.
pub(crate) fn check(table: &TableDescription, name: &str) -> Result<()> {
    match table.table_status() {
        Some(TableStatus::Active | TableStatus::Updating) => {}
        status => {
            let status = status.map_or("unknown", TableStatus::as_str);
            return Err(Error::Unavailable(format!(
                "the table {name:?} is not ready: its status is {status}"
            )));
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
        "the table {name:?} cannot keep locks: its only key must be {KEY:?}, a string. Create another with \
         `lockkeeper store init URL`"
    )))
}
