//! Maps failures to the errors of `core`: whether the request was carried out, and what the caller can do about it.

use lockkeeper_core::Error;
use redis::{RedisError, ServerError};

/// Why a request has no result.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The request was not sent.
    NotSent(String),
    /// The request was sent and no reply came: the server may have carried it out.
    NoReply(String),
    /// The server rejected the request.
    Rejected {
        /// The first word of the reply, such as `READONLY`.
        code: String,
        /// The rest of the reply.
        detail: String,
    },
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::NotSent(text) | Failure::NoReply(text) => f.write_str(text),
            Failure::Rejected { code, detail } => f.write_str(format!("{code} {detail}").trim_end()),
        }
    }
}

impl Failure {
    /// Whether the server rejected the request with this code.
    pub fn is(&self, word: &str) -> bool {
        matches!(self, Failure::Rejected { code, .. } if code == word)
    }

    /// Whether a script found some of its keys on another node of the cluster: their slot is being migrated.
    pub fn keys_are_split(&self) -> bool {
        let local = |detail: &str| detail.contains("access a non local key");
        self.is("TRYAGAIN") || matches!(self, Failure::Rejected { detail, .. } if local(detail))
    }

    /// The same failure of a script that reads before it writes: if an error of a command ended it, it has written nothing.
    #[must_use]
    pub fn of_script_without_partial_writes(self) -> Self {
        match self {
            Failure::Rejected { code, detail } if code == HALFWAY => classify("ERR", &detail),
            other => other,
        }
    }

    /// The failure for a reply that has another shape than the scripts send.
    pub(crate) fn unexpected_reply() -> Self {
        Failure::NoReply("Redis sent a reply of an unexpected shape".into())
    }

    /// The failure for a hold that another version of Lockkeeper wrote, in a format that this one does not know.
    pub(crate) fn other_format() -> Self {
        Failure::Rejected { code: OTHER_FORMAT.into(), detail: String::new() }
    }

    /// Whether the server may have carried out the request, in whole or in part.
    pub fn may_have_happened(&self) -> bool {
        matches!(Error::from(self.clone()), Error::Unknown(_))
    }

    /// The failure to connect, to log in or to choose a database: no request was sent.
    pub(crate) fn while_connecting(error: &RedisError, to: &str) -> Self {
        let detail = error.detail().unwrap_or_default();
        match error.code() {
            Some(code @ ("NOAUTH" | "WRONGPASS" | "NOPERM" | "LOADING" | "MASTERDOWN")) => {
                Failure::Rejected { code: code.into(), detail: detail.into() }
            }
            Some(_) if detail.contains("DB index is out of range") => {
                Failure::Rejected { code: NO_DATABASE.into(), detail: detail.into() }
            }
            Some(code) => Failure::NotSent(format!("Redis at {to} refuses the connection: {code} {detail}")),
            None if error.kind() == redis::ErrorKind::AuthenticationFailed => {
                Failure::Rejected { code: "WRONGPASS".into(), detail: error.to_string() }
            }
            None => Failure::NotSent(format!("no Redis at {to}: {error}")),
        }
    }
}

impl From<ServerError> for Failure {
    fn from(error: ServerError) -> Self {
        let detail = error.details().unwrap_or_default();
        // The scripts use this code when Redis rejects their first write: they have written nothing.
        let first = error.code() == "REFUSED";
        // Redis rejects the first write of a script with the first four codes, and never a later write. The scripts raise the last
        // code before they change a lock; those that acquire or release many locks answer each request instead.
        let never_late = ["OOM", "READONLY", "MISCONF", "NOREPLICAS", "TRYAGAIN"];
        let whole = format!("{} {detail}", error.code());
        // The scripts raise this before they change a lock; those that serve many requests answer each of them instead.
        if detail.contains(IN_SCRIPT) && whole.contains("UNSUPPORTED ") {
            return Failure::other_format();
        }
        if detail.contains(IN_SCRIPT)
            && !first
            && !never_late.iter().any(|word| whole.contains(&format!("{word} ")))
        {
            return Failure::Rejected { code: HALFWAY.into(), detail: whole };
        }
        classify(error.code(), detail)
    }
}

/// The rejection, with the code of the command that failed if a script called the command.
fn classify(code: &str, detail: &str) -> Failure {
    // The error of a command inside a script has the code behind other words.
    for word in ["OOM", "READONLY", "MISCONF", "NOREPLICAS", "WRONGTYPE", "NOPERM"] {
        if detail.contains(&format!("{word} ")) && code != word {
            return Failure::Rejected { code: word.into(), detail: detail.into() };
        }
    }
    // A missing ACL right inside a script has no code: the text of Redis 7.0, and that of later versions.
    let denied = ["The user executing the script", "ACL failure in script"];
    let code = if denied.iter().any(|text| detail.contains(text)) { "NOPERM" } else { code };
    Failure::Rejected { code: code.into(), detail: detail.into() }
}

/// The text that Redis appends to an error that was raised inside a script.
const IN_SCRIPT: &str = "on @user_script";
/// The code for a hold of another format.
const OTHER_FORMAT: &str = "UNSUPPORTED";
/// The code for an error inside a script that may have written before.
const HALFWAY: &str = "HALFWAY";
/// The code for a database that the server does not have: Redis rejects it with its code for any other error.
const NO_DATABASE: &str = "NODB";

/// The meaning of each code for a caller, and the remedy.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let (code, detail) = match failure {
            Failure::NotSent(text) => return Error::Unavailable(text),
            Failure::NoReply(text) => return Error::Unknown(text),
            Failure::Rejected { code, detail } => (code, detail),
        };
        let text = format!("Redis says {code} {detail}").trim_end().to_owned();
        match code.as_str() {
            "NOAUTH" | "WRONGPASS" => Error::Denied(format!(
                "{text}. Give the password in the address, as redis://USER:PASSWORD@HOST"
            )),
            "NOPERM" => Error::Denied(format!(
                "{text}. This user needs the keys and channels lockkeeper:* and the locks' own prefix, and the commands \
                 in docs/stores/redis.md"
            )),
            "READONLY" => Error::Unavailable(format!(
                "{text}. This is a replica: name the primary, or use redis+sentinel://, which follows it"
            )),
            "LOADING" => {
                Error::Unavailable(format!("{text}. The server is still reading its data; try again soon"))
            }
            "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "NOREPLICAS" | "BUSY" | "MOVED" | "ASK" => {
                Error::Unavailable(text)
            }
            "MISCONF" => Error::Unavailable(format!("{text}. The server cannot write to its disk")),
            "OOM" => {
                Error::Limited(format!("{text}. The server is out of memory: raise maxmemory, or free some"))
            }
            "WRONGTYPE" => Error::Invalid(format!(
                "{text}. Another program keeps something that is no lock under this name: choose another ?prefix="
            )),
            "CROSSSLOT" => Error::Unavailable(format!(
                "{text}. This server is part of a cluster: use redis+cluster:// to reach it"
            )),
            OTHER_FORMAT => Error::Unsupported(
                "another version of Lockkeeper wrote a hold of this lock in a format that this version does not know: upgrade this one"
                    .into(),
            ),
            NO_DATABASE => {
                Error::invalid(format!("{text}. Choose a database that the server has: redis://HOST/0"))
            }
            HALFWAY => Error::Unknown(format!(
                "a script ended with an error and may have done a part of its work. Redis says {detail}. A user with an ACL \
                 needs the rights in docs/stores/redis.md"
            )),
            // A script that ended with any other error may have done a part of its work.
            _ => Error::Unknown(text),
        }
    }
}

/// The error for a reply that has another shape than the scripts send: the outcome is unknown.
pub(crate) fn unexpected_reply() -> Error {
    Failure::unexpected_reply().into()
}
