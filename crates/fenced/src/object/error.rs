//! Errors of the object store as errors of this crate: not done, or unknown.

use std::io;

use lockkeeper_core::Error;
use object_store::Error as StoreError;

/// The error of a request. `writes`: a request without a reply may have been applied, also when the last of several tries could not
/// connect.
pub(super) fn to_error(error: &StoreError, writes: bool) -> Error {
    let text = error.to_string();
    match error {
        // The last try was refused, and one before it got no reply: it may have been applied.
        _ if writes && was_retried(&text) => Error::Unknown(text),
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => Error::Denied(text),
        StoreError::NotImplemented { .. } | StoreError::NotSupported { .. } => cannot(&text),
        StoreError::NotFound { .. } => Error::Invalid(format!("{text}. Is there such a bucket?")),
        StoreError::InvalidPath { .. } | StoreError::UnknownConfigurationKey { .. } => Error::Invalid(text),
        _ if writes => Error::Unknown(text),
        // Files: the store gives all of their errors one name.
        StoreError::Generic { store: "LocalFileSystem", source } => {
            let cause = source.downcast_ref().or_else(|| source.source()?.downcast_ref::<io::Error>());
            file(text, cause.map_or(io::ErrorKind::Other, io::Error::kind))
        }
        _ => Error::Unavailable(text),
    }
}

/// [`Error::Unknown`] of a refusal that came after a retry: a try before it may have been done.
pub(super) fn retried(error: &StoreError) -> Option<Error> {
    let text = error.to_string();
    was_retried(&text).then_some(Error::Unknown(text))
}

/// Whether the store was asked more than once, as its client says in the text of its errors and nowhere else.
fn was_retried(text: &str) -> bool {
    text.contains(" retries, max_retries: ")
}

/// Why a file could not be written. Nothing has happened.
pub(super) fn file(text: String, kind: io::ErrorKind) -> Error {
    use io::ErrorKind as Is;
    match kind {
        Is::PermissionDenied | Is::ReadOnlyFilesystem => Error::Denied(text),
        Is::StorageFull | Is::QuotaExceeded | Is::FileTooLarge => Error::Limited(text),
        Is::NotADirectory | Is::IsADirectory | Is::InvalidFilename => Error::Invalid(text),
        _ => Error::Unavailable(text),
    }
}

/// The store has no conditional writes.
pub(super) fn cannot(why: &str) -> Error {
    Error::Unsupported(format!(
        "this store cannot write on a condition, so it cannot refuse a late writer: {why} \
         For local files there is `ObjectFenced::local`; else keep a pointer to the object in a database"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_after_a_retry_says_nothing_of_the_first_try() {
        let denied = |text: &str| StoreError::PermissionDenied { path: "a".into(), source: text.into() };
        let first = denied("Error performing PUT http://s3/a in 5ms - Server returned 403");
        assert!(matches!(to_error(&first, true), Error::Denied(_)));
        let later = "Error performing PUT http://s3/a in 9s, after 2 retries, max_retries: 10, retry_timeout: 180s  - 403";
        assert!(matches!(to_error(&denied(later), true), Error::Unknown(_)));
        assert!(matches!(to_error(&denied(later), false), Error::Denied(_)), "nothing happens by reading");
    }

    #[test]
    fn a_full_disk_is_told_as_one_unless_the_write_may_be_done() {
        let disk_full = || StoreError::Generic {
            store: "LocalFileSystem",
            source: Box::new(io::Error::from(io::ErrorKind::StorageFull)),
        };
        assert!(matches!(to_error(&disk_full(), false), Error::Limited(_)));
        assert!(matches!(to_error(&disk_full(), true), Error::Unknown(_)));
    }
}
