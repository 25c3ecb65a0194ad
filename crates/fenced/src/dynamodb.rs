//! DynamoDB: the mark is an attribute of your own item, checked and raised by the condition of your own write.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
// The types of the helpers' parameters.
pub use aws_sdk_dynamodb;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::delete_item::DeleteItemError;
use aws_sdk_dynamodb::operation::delete_item::builders::DeleteItemFluentBuilder;
use aws_sdk_dynamodb::operation::put_item::PutItemError;
use aws_sdk_dynamodb::operation::put_item::builders::PutItemFluentBuilder;
use aws_sdk_dynamodb::operation::update_item::UpdateItemError;
use aws_sdk_dynamodb::operation::update_item::builders::UpdateItemFluentBuilder;
use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;
use aws_sdk_dynamodb::{Client, Config};
use lockkeeper_core::{Error, Fence, Result};

use crate::{Fenced, GuardedValue, count_verdict};

/// The attribute that holds the mark.
pub const MARK: &str = "lockkeeper_fence";

const CONDITION: &str = "(attribute_not_exists(#lockkeeper_fence) OR #lockkeeper_fence <= :lockkeeper_fence)";

/// A write of yours to one item, which is done only if no higher fence was seen there.
pub trait Guarded: Sized {
    /// Adds the check, and the mark. Call it last, when everything else is set: your own condition stays, and both must be met.
    ///
    /// After [`SdkError::ServiceError`] ask [`verdict`] whether it was the fence.
    #[must_use]
    fn fenced(self, fence: Fence) -> Self;
}

/// Your condition and ours.
fn both(yours: &Option<String>) -> String {
    yours.as_ref().map_or(CONDITION.to_owned(), |yours| format!("{CONDITION} AND ({yours})"))
}

fn number(fence: Fence) -> AttributeValue {
    AttributeValue::N(fence.to_string())
}

macro_rules! with_condition {
    ($builder:expr, $fence:expr) => {{
        let condition = both($builder.get_condition_expression());
        $builder
            .condition_expression(condition)
            .expression_attribute_names("#lockkeeper_fence", MARK)
            .expression_attribute_values(":lockkeeper_fence", number($fence))
            .return_values_on_condition_check_failure(AllOld)
    }};
}

impl Guarded for PutItemFluentBuilder {
    fn fenced(self, fence: Fence) -> Self {
        with_condition!(self, fence).item(MARK, number(fence))
    }
}

impl Guarded for UpdateItemFluentBuilder {
    fn fenced(self, fence: Fence) -> Self {
        let update = with_mark(self.get_update_expression().as_deref().unwrap_or_default());
        with_condition!(self, fence).update_expression(update)
    }
}

/// Deleting the item deletes its mark, so a late writer could create it again. This is right if no writer creates the item again; if one
/// may, put a fenced item with nothing but its key in its place.
impl Guarded for DeleteItemFluentBuilder {
    fn fenced(self, fence: Fence) -> Self {
        with_condition!(self, fence)
    }
}

/// An update that raises the mark too. There is one `SET` in an update at most, and nothing else can be called so.
fn with_mark(update: &str) -> String {
    const MARKED: &str = "SET #lockkeeper_fence = :lockkeeper_fence";
    let word = |c: char| c.is_ascii_alphanumeric() || "_#:.".contains(c);
    let is_set = |at: &usize| {
        let (before, rest) = update.split_at(*at);
        rest.get(..3).is_some_and(|three| three.eq_ignore_ascii_case("set"))
            && !before.ends_with(word)
            && !rest[3..].starts_with(word)
    };
    match update.char_indices().map(|(at, _)| at).find(is_set) {
        Some(at) => format!("{}{MARKED},{}", &update[..at], &update[at + 3..]),
        None => format!("{update} {MARKED}").trim_start().to_owned(),
    }
}

type Item = HashMap<String, AttributeValue>;

/// An error that may say that a condition was not met, and what was there instead.
pub trait Refusal {
    /// The stored item, if the condition was not met.
    fn found(&self) -> Option<&Item>;
}

macro_rules! refusal {
    ($($error:ident),*) => {
        $(impl Refusal for $error {
            fn found(&self) -> Option<&Item> {
                match self {
                    $error::ConditionalCheckFailedException(refused) => refused.item(),
                    _ => None,
                }
            }
        })*
    };
}
refusal!(PutItemError, UpdateItemError, DeleteItemError);

/// The fence verdict in the answer to a fenced write. Everything else is as the SDK says: also a condition of your own that was not
/// met, when the fence was good.
///
/// The SDK sends a request again by itself, and tells the answer to the last try only: one before it may have been done, and then overtaken.
/// With `RetryConfig::disabled()` there is one try.
///
/// # Errors
/// [`Error::Stale`] if a higher fence was seen: the try that was answered has changed nothing.
pub fn verdict<T, E: Refusal>(
    answer: Result<T, SdkError<E>>,
    presented: Fence,
) -> Result<Result<T, SdkError<E>>> {
    if let Err(SdkError::ServiceError(answer)) = &answer
        && let Some(seen) = answer.err().found().and_then(mark)
        && seen > presented
    {
        return count_verdict("dynamodb", Err(Error::Stale { presented, seen }));
    }
    if answer.is_ok() {
        count_verdict("dynamodb", Ok(()))?;
    }
    Ok(answer)
}

fn mark(item: &Item) -> Option<Fence> {
    Fence::new(item.get(MARK)?.as_n().ok()?.parse().ok()?).ok()
}

/// Small values in a table, each with its mark: for those who have no items of their own.
#[derive(Clone, Debug)]
pub struct DynamoFenced {
    client: Client,
    table: String,
    key: String,
}

impl DynamoFenced {
    /// The values in this table, whose only key is the text attribute `key`. Credentials and time-outs are the client's. Retries are our
    /// own: the SDK's say nothing of a try before the last, which may have been done.
    pub fn new(client: Client, table: impl Into<String>, key: impl Into<String>) -> Self {
        DynamoFenced { client, table: table.into(), key: key.into() }
    }

    async fn write(&self, resource: &str, fence: Fence, value: Option<&[u8]>) -> Result<()> {
        let put = self.client.put_item().table_name(&self.table).item(&self.key, text(resource)?);
        let put = match value {
            Some(value) => put.item("value", AttributeValue::B(Blob::new(value))),
            None => put,
        };
        let put = put.fenced(fence);
        let (mut unknown, mut pauses) = (None, PAUSES.iter());
        loop {
            let once = Config::builder().retry_config(RetryConfig::disabled());
            let answer = put.clone().customize().config_override(once).send().await;
            let error = match verdict(answer, fence) {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error)) => fault(error),
                // A try before this one may have been done, and the higher fence come after it.
                Err(stale) => return Err(unknown.map_or(stale, Error::Unknown)),
            };
            let passes = matches!(error, Error::Unknown(_) | Error::Limited(_) | Error::Unavailable(_));
            if let Error::Unknown(text) = &error {
                unknown = Some(text.clone());
            }
            match pauses.next().filter(|_| passes) {
                Some(pause) => tokio::time::sleep(*pause).await,
                // Whatever the last try says, one before it may have been done.
                None => return Err(unknown.map_or(error, Error::Unknown)),
            }
        }
    }
}

/// The pauses between the tries of a write.
const PAUSES: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(800)];

fn text(resource: &str) -> Result<AttributeValue> {
    match resource.len() {
        1..=2048 => Ok(AttributeValue::S(resource.to_owned())),
        n => {
            Err(Error::invalid(format!("a resource has {n} bytes: DynamoDB has room for 1 to 2048 in a key")))
        }
    }
}

/// Maps an error of the SDK. A request that is not known to have failed may have been applied.
fn fault<E>(error: SdkError<E>) -> Error
where
    E: std::error::Error + ProvideErrorMetadata + Send + Sync + 'static,
{
    let text = format!("DynamoDB: {}", DisplayErrorContext(&error));
    match error.code() {
        Some("ProvisionedThroughputExceededException" | "ThrottlingException" | "RequestLimitExceeded") => {
            Error::Limited(text)
        }
        Some("AccessDeniedException" | "UnrecognizedClientException" | "ExpiredTokenException") => {
            Error::Denied(text)
        }
        Some("ValidationException") if text.contains("size") => Error::Limited(text),
        Some("ValidationException" | "ResourceNotFoundException") => Error::Invalid(text),
        // Fenced writes only: the item has no mark that could be read, so nothing is taken on the strength of it.
        Some("ConditionalCheckFailedException") => Error::Invalid(format!("the mark is damaged. {text}")),
        _ if matches!(error, SdkError::ConstructionFailure(_)) => Error::Invalid(text),
        _ if text.contains("tcp connect error") || text.contains("dns error") => Error::Unavailable(text),
        _ => Error::Unknown(text),
    }
}

#[async_trait]
impl Fenced for DynamoFenced {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        self.write(resource, fence, Some(value)).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.write(resource, fence, None).await
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let get = self.client.get_item().table_name(&self.table).key(&self.key, text(resource)?);
        let found = get.consistent_read(true).send().await.map_err(|error| match fault(error) {
            // Nothing happens by reading.
            Error::Unknown(text) => Error::Unavailable(text),
            other => other,
        })?;
        let Some(item) = found.item else { return Ok(None) };
        let fence = mark(&item)
            .ok_or_else(|| Error::invalid(format!("{resource:?} has no mark, or a damaged one")))?;
        let value =
            item.get("value").and_then(|value| value.as_b().ok()).map(|value| value.as_ref().to_vec());
        Ok(Some(GuardedValue { fence, value }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_joins_whatever_the_update_does() {
        const MARKED: &str = "SET #lockkeeper_fence = :lockkeeper_fence";
        for (update, wanted) in [
            ("", MARKED.to_owned()),
            ("SET a = :a", format!("{MARKED}, a = :a")),
            ("remove b  set #set = :set", format!("remove b  {MARKED}, #set = :set")),
            ("ADD #set :set", format!("ADD #set :set {MARKED}")),
            ("REMOVE offset, reset.set1", format!("REMOVE offset, reset.set1 {MARKED}")),
            ("SET\tä = :ä", format!("{MARKED},\tä = :ä")),
        ] {
            assert_eq!(with_mark(update), wanted);
        }
    }
}
