//! Errors of Redis as errors of this crate: not done, or unknown.

use lockkeeper_core::Error;
use redis::RedisError;

/// Why there is no good answer. `writes`: what was sent and not heard of may have happened.
pub(super) fn to_error(error: &RedisError, writes: bool) -> Error {
    let text = format!("Redis says {error}");
    let Some(code) = error.code() else {
        return match writes && !error.is_connection_refusal() {
            true => Error::Unknown(text),
            false => Error::Unavailable(text),
        };
    };
    // A script passes on what a command in it said, with the word behind other words.
    let says = |word: &str| code == word || text.contains(&format!("{word} "));
    match () {
        () if says("WRONGTYPE") => Error::Invalid(format!("{text}. The key holds another kind of value")),
        () if says("LKFENCE") => Error::Invalid(text),
        () if says("CROSSSLOT") => {
            Error::Invalid(format!("{text}. This server is part of a cluster: connect to it as to a cluster"))
        }
        () if says("OOM") => Error::Limited(text),
        () if ["NOAUTH", "WRONGPASS", "NOPERM"].iter().any(|word| says(word))
            || text.contains("ACL failure") =>
        {
            Error::Denied(text)
        }
        () if text.contains("The user executing the script") => Error::Denied(text),
        () if [
            "READONLY",
            "MISCONF",
            "NOREPLICAS",
            "LOADING",
            "MASTERDOWN",
            "CLUSTERDOWN",
            "TRYAGAIN",
            "MOVED",
            "ASK",
            "BUSY",
        ]
        .iter()
        .any(|word| says(word)) =>
        {
            Error::Unavailable(text)
        }
        // A script that ended with an unexpected error may have done a part of its work.
        () if writes => Error::Unknown(text),
        () => Error::Unavailable(text),
    }
}
