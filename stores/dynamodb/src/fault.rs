use std::error::Error as Cause;

use aws_sdk_dynamodb::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use lockkeeper_core::Error;

use crate::script::Item;

/// Why a request has no good answer.
#[derive(Debug)]
pub enum Failure {
    /// It was never sent, or not even looked at.
    Away(String),
    /// It was sent, and nobody knows what became of it.
    Unheard(String),
    /// It did not happen, because too much is asked at once.
    Throttled(String),
    /// It did not happen, because the item is not as expected. What is there, if that was told.
    Conflict(Option<Found>),
    /// There is no such table.
    NoTable,
    /// The credentials are missing, wrong, or not enough.
    Denied(String),
    /// The item would be too large.
    TooLarge(String),
    /// DynamoDB refused it; nothing happened.
    Refused(String),
}

/// What is there instead of what was expected; `None`: nothing.
pub type Found = Option<Item>;

impl Failure {
    /// What a bad answer means.
    pub fn of<E>(error: SdkError<E>) -> Self
    where
        E: Cause + ProvideErrorMetadata + Send + Sync + 'static,
    {
        let text = DisplayErrorContext(&error).to_string();
        match &error {
            SdkError::ServiceError(answer) => {
                let code = answer.err().code().unwrap_or_default().to_owned();
                let said = answer.err().message().unwrap_or_default();
                Failure::named(&code, format!("{code}: {said}"))
            }
            // Nothing can be signed: nothing was sent.
            _ if text.contains("CredentialsNotLoaded")
                || text.contains("no providers in chain provided credentials") =>
            {
                Failure::Denied(
                    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
                        .into(),
                )
            }
            SdkError::ConstructionFailure(_) => Failure::Refused(text),
            SdkError::DispatchFailure(_) if never_sent(&error) => Failure::Away(text),
            _ => Failure::Unheard(text),
        }
    }

    /// What a code means. A code that we do not know may have come after the deed.
    pub fn named(code: &str, text: String) -> Self {
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
            | "LimitExceededException" => Failure::Refused(text),
            _ => Failure::Unheard(text),
        }
    }
}

/// Whether the connection could not even be made.
fn never_sent(error: &(dyn Cause + 'static)) -> bool {
    let mut source = Some(error);
    while let Some(cause) = source {
        let text = cause.to_string();
        let io = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if io == Some(std::io::ErrorKind::ConnectionRefused)
            || ["tcp connect error", "dns error", "client error (Connect)"]
                .iter()
                .any(|said| text.contains(said))
        {
            return true;
        }
        source = cause.source();
    }
    false
}

/// What each failure means to somebody who wants a lock, and what to do about it.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Away(text) => Error::Unavailable(format!("no DynamoDB there: {text}")),
            Failure::Unheard(text) => {
                Error::Unknown(format!("DynamoDB did not say what became of it: {text}"))
            }
            Failure::Throttled(text) => Error::Limited(format!(
                "DynamoDB throttles ({text}): it did not happen. Ask less often, or give the table more capacity"
            )),
            Failure::Conflict(_) => {
                Error::Unavailable("others were always faster: it did not happen, ask again".into())
            }
            Failure::NoTable => Error::Invalid(
                "there is no such table in that region: make it with `lockkeeper store init URL`".into(),
            ),
            Failure::Denied(text) => Error::Denied(format!(
                "DynamoDB says: {text}. Needed are dynamodb:GetItem, PutItem, DeleteItem, Scan and DescribeTable on the table"
            )),
            Failure::TooLarge(text) => Error::Limited(format!(
                "an item of DynamoDB has room for 400 KB: too many hold this lock at once ({text})"
            )),
            Failure::Refused(text) => Error::Invalid(format!("DynamoDB says: {text}")),
        }
    }
}
