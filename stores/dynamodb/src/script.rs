//! Exactly what we say to DynamoDB. Every read is strongly consistent, every write has a condition.

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

use crate::fault::Failure;

/// An item as DynamoDB has it.
pub type Item = HashMap<String, AttributeValue>;

/// The partition key, and the only key.
pub const KEY: &str = "k";
/// Which write of the item this is. Every write is made on condition that it is still the one that was read.
pub const REV: &str = "rev";

/// One write.
#[derive(Clone, Debug)]
pub enum Op {
    /// Replaces an item that was read as revision `over`; `None`: that was not there.
    Put { item: Item, over: Option<u64> },
    /// Writes what hangs on another item of the same step.
    Lay(Item),
    /// Takes away what hung on another item of the same step.
    Clear(String),
}

/// Our half of the conversation.
#[derive(Clone, Debug)]
pub struct Script {
    pub client: Client,
    pub table: String,
}

const ABSENT: &str = "attribute_not_exists(k)";
const UNCHANGED: &str = "rev = :rev";

fn key(key: &str) -> Item {
    HashMap::from([(KEY.to_owned(), AttributeValue::S(key.to_owned()))])
}

impl Script {
    pub async fn get(&self, of: &str) -> Result<Option<Item>, Failure> {
        let ask = self.client.get_item().table_name(&self.table).set_key(Some(key(of))).consistent_read(true);
        Ok(ask.send().await.map_err(unread)?.item)
    }

    /// Several items as they were at one moment.
    pub async fn get_all(&self, keys: &[String]) -> Result<Vec<Option<Item>>, Failure> {
        let mut ask = self.client.transact_get_items();
        for one in keys {
            let get = Get::builder().table_name(&self.table).set_key(Some(key(one)));
            let get = get.build().map_err(|error| Failure::Refused(error.to_string()))?;
            ask = ask.transact_items(TransactGetItem::builder().get(get).build());
        }
        // A transaction under way is no reason to fail: it is over in a moment.
        let found = ask.send().await.map_err(|error| match &error {
            SdkError::ServiceError(answer) => match answer.err() {
                TransactGetItemsError::TransactionCanceledException(cancelled) => {
                    gravest(cancelled.cancellation_reasons())
                }
                _ => unread(error),
            },
            _ => unread(error),
        })?;
        Ok(found.responses.unwrap_or_default().into_iter().map(|one| one.item).collect())
    }

    /// Does all of it, or nothing.
    pub async fn write(&self, ops: Vec<Op>) -> Result<(), Failure> {
        match &ops[..] {
            [Op::Put { item, over }] => self.put(item.clone(), *over).await,
            _ => self.write_all(ops).await,
        }
    }

    async fn put(&self, item: Item, over: Option<u64>) -> Result<(), Failure> {
        let ask = self.client.put_item().table_name(&self.table).set_item(Some(item));
        let ask = match over {
            None => ask.condition_expression(ABSENT),
            Some(rev) => ask.condition_expression(UNCHANGED).expression_attribute_values(":rev", number(rev)),
        };
        // Saves a read: what is there instead comes with the refusal.
        let ask = ask.return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match ask.send().await {
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

    async fn write_all(&self, ops: Vec<Op>) -> Result<(), Failure> {
        let mut ask = self.client.transact_write_items();
        for op in ops {
            ask = ask.transact_items(self.op(op)?);
        }
        let Err(error) = ask.send().await else { return Ok(()) };
        if let SdkError::ServiceError(answer) = &error
            && let TransactWriteItemsError::TransactionCanceledException(cancelled) = answer.err()
        {
            return Err(gravest(cancelled.cancellation_reasons()));
        }
        Err(Failure::of(error))
    }

    fn op(&self, op: Op) -> Result<TransactWriteItem, Failure> {
        let bad = |error: aws_sdk_dynamodb::error::BuildError| Failure::Refused(error.to_string());
        let put = |item| Put::builder().table_name(&self.table).set_item(Some(item));
        let one = TransactWriteItem::builder();
        Ok(match op {
            Op::Put { item, over: None } => {
                one.put(put(item).condition_expression(ABSENT).build().map_err(bad)?).build()
            }
            Op::Put { item, over: Some(rev) } => {
                let put = put(item).condition_expression(UNCHANGED);
                one.put(put.expression_attribute_values(":rev", number(rev)).build().map_err(bad)?).build()
            }
            Op::Lay(item) => one.put(put(item).build().map_err(bad)?).build(),
            Op::Clear(of) => {
                let delete = Delete::builder().table_name(&self.table).set_key(Some(key(&of)));
                one.delete(delete.build().map_err(bad)?).build()
            }
        })
    }

    /// All items whose keys begin with `start`, page by page; of each only what `wanted` names. It reads the whole table: keys
    /// have no order here, because what is in order is in one place, and that place would be hot.
    pub async fn scan(&self, start: &str, wanted: &[&str]) -> Result<Vec<Item>, Failure> {
        let mut found = Vec::new();
        let mut from = None;
        loop {
            let mut ask = self.client.scan().table_name(&self.table).consistent_read(true);
            ask = ask.filter_expression("begins_with(k, :start)").set_exclusive_start_key(from);
            ask = ask.expression_attribute_values(":start", AttributeValue::S(start.to_owned()));
            let names = (0..wanted.len()).map(|i| format!("#w{i}")).collect::<Vec<_>>().join(", ");
            ask = ask.projection_expression(names);
            for (i, name) in wanted.iter().enumerate() {
                ask = ask.expression_attribute_names(format!("#w{i}"), *name);
            }
            let page = ask.send().await.map_err(unread)?;
            found.extend(page.items.unwrap_or_default());
            from = page.last_evaluated_key;
            if from.is_none() {
                return Ok(found);
            }
        }
    }
}

/// Nothing happens by reading, whatever was heard of it.
fn unread<E>(error: SdkError<E>) -> Failure
where
    E: std::error::Error + ProvideErrorMetadata + Send + Sync + 'static,
{
    match Failure::of(error) {
        Failure::Unheard(text) => Failure::Away(text),
        failure => failure,
    }
}

fn is_condition(error: &PutItemError) -> bool {
    error.is_conditional_check_failed_exception()
}

/// A transaction that was cancelled has a reason for each of its parts. Nothing happened, whatever they are.
fn gravest(reasons: &[CancellationReason]) -> Failure {
    let mut worst = Failure::Conflict(None);
    for reason in reasons {
        let code = reason.code().unwrap_or_default();
        let text = format!("{code}: {}", reason.message().unwrap_or_default());
        match code {
            "" | "None" | "ConditionalCheckFailed" | "TransactionConflict" => {}
            code => match Failure::named(code, text) {
                // Cancelled means that it did not happen, also for a reason that we do not know.
                Failure::Unheard(text) => worst = Failure::Refused(text),
                failure => worst = failure,
            },
        }
    }
    worst
}

pub fn number(n: u64) -> AttributeValue {
    AttributeValue::N(n.to_string())
}

/// The number that an item has under `name`.
pub fn number_of(item: &Item, name: &str) -> Option<u64> {
    item.get(name)?.as_n().ok()?.parse().ok()
}

/// The text that an item has under `name`.
pub fn text_of<'a>(item: &'a Item, name: &str) -> Option<&'a str> {
    item.get(name)?.as_s().ok().map(String::as_str)
}
