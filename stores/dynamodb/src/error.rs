//! Failures of calls to DynamoDB, and the errors that callers get for them.

use std::error::Error as Cause;

use aws_sdk_dynamodb::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use lockkeeper_core::Error;

use crate::attributes::AttributeMap;

/// Why a call failed.
#[derive(Debug)]
pub enum Failure {
    /// The request was not sent, or DynamoDB did not look at it.
    NotSent(String),
    /// The request was sent and no reply came: the outcome is unknown.
    NoReply(String),
    /// DynamoDB throttled the request and did not execute it.
    Throttled(String),
    /// The condition failed and nothing was written. The current item, if the reply has it.
    Conflict(Option<CurrentItem>),
    /// The table does not exist.
    NoTable,
    /// The credentials are missing or wrong, or lack a permission.
    Denied(String),
    /// The item would be too large.
    TooLarge(String),
    /// DynamoDB rejected the request; nothing was written.
    Rejected(String),
}

/// The item that made a condition fail; `None`: there is no item.
pub type CurrentItem = Option<AttributeMap>;

impl Failure {
    /// The failure for an error of the SDK.
    pub fn of<E>(error: SdkError<E>) -> Self
    where
        E: Cause + ProvideErrorMetadata + Send + Sync + 'static,
    {
        let text = DisplayErrorContext(&error).to_string();
        match &error {
            SdkError::ServiceError(answer) => {
                let code = answer.err().code().unwrap_or_default().to_owned();
                let message = answer.err().message().unwrap_or_default();
                Failure::of_code(&code, format!("{code}: {message}"))
            }
            // Without credentials nothing can be signed, so nothing was sent.
            _ if text.contains("CredentialsNotLoaded")
                || text.contains("no providers in chain provided credentials") =>
            {
                Failure::Denied(
                    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
                        .into(),
                )
            }
            SdkError::ConstructionFailure(_) => Failure::Rejected(text),
            SdkError::DispatchFailure(_) if never_sent(&error) => Failure::NotSent(text),
            _ => Failure::NoReply(text),
        }
    }

    /// The failure for an error code of DynamoDB. An unknown code leaves the outcome unknown.
    pub fn of_code(code: &str, text: String) -> Self {
        match code {
            "ConditionalCheckFailedException" | "TransactionConflictException" => Failure::Conflict(None),
            "ProvisionedThroughputExceededException"
            | "ProvisionedThroughputExceeded"
            | "ThrottlingException"
            | "ThrottlingError"
            | "Throttling"
            | "RequestLimitExceeded"
            | "TransactionInProgressException" => Failure::Throttled(text),
            "ResourceNotFoundException" => Failure::NoTable,
            "AccessDeniedException"
            | "UnrecognizedClientException"
            | "InvalidSignatureException"
            | "IncompleteSignatureException"
            | "MissingAuthenticationTokenException"
            | "MissingAuthenticationToken"
            | "ExpiredTokenException"
            | "InvalidClientTokenId" => Failure::Denied(text),
            "ItemCollectionSizeLimitExceededException" => Failure::TooLarge(text),
            "ValidationException" | "ValidationError" if text.contains("size") => Failure::TooLarge(text),
            "ValidationException"
            | "ValidationError"
            | "ResourceInUseException"
            | "LimitExceededException" => Failure::Rejected(text),
            _ => Failure::NoReply(text),
        }
    }
}

/// Whether the connection was never established.
fn never_sent(error: &(dyn Cause + 'static)) -> bool {
    let mut source = Some(error);
    while let Some(cause) = source {
        let text = cause.to_string();
        let io = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if io == Some(std::io::ErrorKind::ConnectionRefused)
            || ["tcp connect error", "dns error", "client error (Connect)"]
                .iter()
                .any(|cause| text.contains(cause))
        {
            return true;
        }
        source = cause.source();
    }
    false
}

/// The error that a caller gets, with what to do about it.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotSent(text) => Error::Unavailable(format!("DynamoDB is unreachable: {text}")),
            Failure::NoReply(text) => Error::Unknown(format!("DynamoDB did not reply: {text}")),
            Failure::Throttled(text) => Error::Limited(format!(
                "DynamoDB throttles ({text}) and did not execute the request. Send fewer requests, or give the table more capacity"
            )),
            Failure::Conflict(_) => Error::Unavailable(
                "other clients changed the item before every write, and nothing was written: try again"
                    .into(),
            ),
            Failure::NoTable => Error::Invalid(
                "there is no such table in that region: create it with `lockkeeper store init URL`".into(),
            ),
            Failure::Denied(text) => Error::Denied(format!(
                "DynamoDB denied the request: {text}. The store needs dynamodb:GetItem, PutItem, DeleteItem, Scan and DescribeTable on the table"
            )),
            Failure::TooLarge(text) => Error::Limited(format!(
                "an item of DynamoDB has room for 400 KB: this lock has too many holders ({text})"
            )),
            Failure::Rejected(text) => Error::Invalid(format!("DynamoDB rejected the request: {text}")),
        }
    }
}

/// The answer to a caller whose request was released before it was answered.
pub fn cancelled_error() -> Error {
    Error::Unknown("the lock request was released before it was answered".into())
}
