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
