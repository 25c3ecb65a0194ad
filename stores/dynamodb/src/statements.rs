//! The calls to DynamoDB. Every read is strongly consistent, and every write has a condition on the revision of an item.

use std::collections::HashMap;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::put_item::PutItemError;
use aws_sdk_dynamodb::operation::transact_get_items::TransactGetItemsError;
use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::types::{
    AttributeValue, CancellationReason, Delete, Get, Put, ReturnValuesOnConditionCheckFailure,
    TransactGetItem, TransactWriteItem,
};

use crate::attributes::{AttributeMap, KEY, number};
use crate::error::Failure;

/// One write to the table.
#[derive(Clone, Debug)]
pub enum TableWrite {
    /// Replaces an item that was read as revision `over`; `None`: the item did not exist.
    Put { item: AttributeMap, over: Option<u64> },
    /// Writes a chunk. The record's item in the same transaction has the condition.
    PutChunk(AttributeMap),
    /// Deletes a chunk. The record's item in the same transaction has the condition.
    DeleteChunk(String),
}

/// The SDK's client and the table.
#[derive(Clone, Debug)]
pub struct TableClient {
    pub client: Client,
    pub table: String,
}

const ABSENT: &str = "attribute_not_exists(k)";
const UNCHANGED: &str = "rev = :rev";

fn key(key: &str) -> AttributeMap {
    HashMap::from([(KEY.to_owned(), AttributeValue::S(key.to_owned()))])
}

impl TableClient {
    pub async fn get(&self, of: &str) -> Result<Option<AttributeMap>, Failure> {
        let request =
            self.client.get_item().table_name(&self.table).set_key(Some(key(of))).consistent_read(true);
        Ok(request.send().await.map_err(read_failure)?.item)
    }

    /// Several items, read in one transaction.
    pub async fn get_all(&self, keys: &[String]) -> Result<Vec<Option<AttributeMap>>, Failure> {
        let mut request = self.client.transact_get_items();
        for one in keys {
            let get = Get::builder().table_name(&self.table).set_key(Some(key(one)));
            let get = get.build().map_err(|error| Failure::Rejected(error.to_string()))?;
            request = request.transact_items(TransactGetItem::builder().get(get).build());
        }
        // A cancelled transaction had a conflict with a write in flight, or was throttled: the caller repeats it.
        let found = request.send().await.map_err(|error| match &error {
            SdkError::ServiceError(answer) => match answer.err() {
                TransactGetItemsError::TransactionCanceledException(cancelled) => {
                    worst_reason(cancelled.cancellation_reasons())
                }
                _ => read_failure(error),
            },
            _ => read_failure(error),
        })?;
        Ok(found.responses.unwrap_or_default().into_iter().map(|one| one.item).collect())
    }

    /// Executes all writes or none.
    pub async fn write(&self, writes: Vec<TableWrite>) -> Result<(), Failure> {
        match &writes[..] {
            [TableWrite::Put { item, over }] => self.put(item.clone(), *over).await,
            _ => self.write_all(writes).await,
        }
    }

    async fn put(&self, item: AttributeMap, over: Option<u64>) -> Result<(), Failure> {
        let request = self.client.put_item().table_name(&self.table).set_item(Some(item));
        let request = match over {
            None => request.condition_expression(ABSENT),
            Some(rev) => {
                request.condition_expression(UNCHANGED).expression_attribute_values(":rev", number(rev))
            }
        };
        // The rejection returns the current item, which saves a read.
        let request =
            request.return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match request.send().await {
            Ok(_) => Ok(()),
            Err(SdkError::ServiceError(answer)) if is_condition(answer.err()) => {
                let PutItemError::ConditionalCheckFailedException(refusal) = answer.into_err() else {
                    return Err(Failure::Conflict(None));
                };
                Err(Failure::Conflict(Some(refusal.item)))
            }
            Err(error) => Err(Failure::of(error)),
        }
    }

    async fn write_all(&self, writes: Vec<TableWrite>) -> Result<(), Failure> {
        let mut request = self.client.transact_write_items();
        for write in writes {
            request = request.transact_items(self.transact_item(write)?);
        }
        let Err(error) = request.send().await else { return Ok(()) };
        if let SdkError::ServiceError(answer) = &error
            && let TransactWriteItemsError::TransactionCanceledException(cancelled) = answer.err()
        {
            return Err(worst_reason(cancelled.cancellation_reasons()));
        }
        Err(Failure::of(error))
    }

    fn transact_item(&self, write: TableWrite) -> Result<TransactWriteItem, Failure> {
        let bad = |error: aws_sdk_dynamodb::error::BuildError| Failure::Rejected(error.to_string());
        let put = |item| Put::builder().table_name(&self.table).set_item(Some(item));
        let one = TransactWriteItem::builder();
        Ok(match write {
            TableWrite::Put { item, over: None } => {
                one.put(put(item).condition_expression(ABSENT).build().map_err(bad)?).build()
            }
            TableWrite::Put { item, over: Some(rev) } => {
                let put = put(item).condition_expression(UNCHANGED);
                one.put(put.expression_attribute_values(":rev", number(rev)).build().map_err(bad)?).build()
            }
            TableWrite::PutChunk(item) => one.put(put(item).build().map_err(bad)?).build(),
            TableWrite::DeleteChunk(of) => {
                let delete = Delete::builder().table_name(&self.table).set_key(Some(key(&of)));
                one.delete(delete.build().map_err(bad)?).build()
            }
        })
    }

    /// All items whose keys begin with `start`, with the attributes `wanted`. The call reads the whole table, because the table has no
    /// sort key: with one, all locks would be in one partition, which would be hot.
    pub async fn scan(&self, start: &str, wanted: &[&str]) -> Result<Vec<AttributeMap>, Failure> {
        let mut found = Vec::new();
        let mut from = None;
        loop {
            let mut request = self.client.scan().table_name(&self.table).consistent_read(true);
            request = request.filter_expression("begins_with(k, :start)").set_exclusive_start_key(from);
            request = request.expression_attribute_values(":start", AttributeValue::S(start.to_owned()));
            let names = (0..wanted.len()).map(|i| format!("#w{i}")).collect::<Vec<_>>().join(", ");
            request = request.projection_expression(names);
            for (i, name) in wanted.iter().enumerate() {
                request = request.expression_attribute_names(format!("#w{i}"), *name);
            }
            let page = request.send().await.map_err(read_failure)?;
            found.extend(page.items.unwrap_or_default());
            from = page.last_evaluated_key;
            if from.is_none() {
                return Ok(found);
            }
        }
    }
}

/// A read changes nothing, so a read without a reply counts as not sent.
fn read_failure<E>(error: SdkError<E>) -> Failure
where
    E: std::error::Error + ProvideErrorMetadata + Send + Sync + 'static,
{
    match Failure::of(error) {
        Failure::NoReply(text) => Failure::NotSent(text),
        failure => failure,
    }
}

fn is_condition(error: &PutItemError) -> bool {
    error.is_conditional_check_failed_exception()
}

/// The failure of a cancelled transaction, which has a reason for each of its writes. DynamoDB has executed none of them.
fn worst_reason(reasons: &[CancellationReason]) -> Failure {
    let mut worst = Failure::Conflict(None);
    for reason in reasons {
        let code = reason.code().unwrap_or_default();
        let text = format!("{code}: {}", reason.message().unwrap_or_default());
        match code {
            "" | "None" | "ConditionalCheckFailed" | "TransactionConflict" => {}
            code => match Failure::of_code(code, text) {
                // An unknown reason does not make the outcome unknown: the transaction was cancelled.
                Failure::NoReply(text) => worst = Failure::Rejected(text),
                failure => worst = failure,
            },
        }
    }
    worst
}
