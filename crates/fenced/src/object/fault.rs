use std::io;

use lockkeeper_core::Error;
use object_store::Error as Told;

/// Why there is no good answer. `writes`: what was sent and not heard of may have happened, also when the last of several tries
/// says that nobody was there.
pub(super) fn fault(error: &Told, writes: bool) -> Error {
    let text = error.to_string();
    match error {
        Told::PermissionDenied { .. } | Told::Unauthenticated { .. } => Error::Denied(text),
        Told::NotImplemented { .. } | Told::NotSupported { .. } => cannot(&text),
        Told::NotFound { .. } => Error::Invalid(format!("{text}. Is there such a bucket?")),
        Told::InvalidPath { .. } | Told::UnknownConfigurationKey { .. } => Error::Invalid(text),
        _ if writes => Error::Unknown(text),
        // Files: the store gives all of their errors one name.
        Told::Generic { store: "LocalFileSystem", source } => {
            let cause = source.downcast_ref().or_else(|| source.source()?.downcast_ref::<io::Error>());
            file(text, cause.map_or(io::ErrorKind::Other, io::Error::kind))
        }
        _ => Error::Unavailable(text),
    }
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
    fn a_full_disk_is_told_as_one_unless_the_write_may_be_done() {
        let told = || Told::Generic {
            store: "LocalFileSystem",
            source: Box::new(io::Error::from(io::ErrorKind::StorageFull)),
        };
        assert!(matches!(fault(&told(), false), Error::Limited(_)));
        assert!(matches!(fault(&told(), true), Error::Unknown(_)));
    }
}
