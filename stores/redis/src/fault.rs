//! What a server's refusal means: whether the request was applied, and what the caller can do about it.

use lockkeeper_core::Error;
use redis::{RedisError, ServerError};

/// Why a request has no good answer.
#[derive(Clone, Debug)]
pub enum Failure {
    /// It was never sent.
    Away(String),
    /// It was sent, and nobody knows what became of it.
    Unheard(String),
    /// The server refused it.
    Refused {
        /// The first word of the answer, such as `READONLY`.
        code: String,
        /// The rest of it.
        detail: String,
    },
}

impl Failure {
    /// Whether the server refused with this word.
    pub fn is(&self, word: &str) -> bool {
        matches!(self, Failure::Refused { code, .. } if code == word)
    }

    /// Whether a script found some of its keys on another node of the cluster: their slot is being moved.
    pub fn keys_are_split(&self) -> bool {
        let local = |detail: &str| detail.contains("access a non local key");
        self.is("TRYAGAIN") || matches!(self, Failure::Refused { detail, .. } if local(detail))
    }

    /// Whether the request may have been applied, in whole or in part.
    pub fn may_have_happened(&self) -> bool {
        matches!(Error::from(self.clone()), Error::Unknown(_))
    }

    /// What a failure to connect, to log in or to choose a database means: nothing was asked for yet.
    pub(crate) fn while_connecting(error: &RedisError, to: &str) -> Self {
        match error.code() {
            Some(code) => {
                Failure::Refused { code: code.into(), detail: error.detail().unwrap_or_default().into() }
            }
            None if error.kind() == redis::ErrorKind::AuthenticationFailed => {
                Failure::Refused { code: "WRONGPASS".into(), detail: error.to_string() }
            }
            None => Failure::Away(format!("no Redis at {to}: {error}")),
        }
    }
}

impl From<ServerError> for Failure {
    fn from(error: ServerError) -> Self {
        let detail = error.details().unwrap_or_default();
        // The scripts of this store name the refusal of their first write like this: nothing was written.
        let first = error.code() == "REFUSED";
        // The first four refuse the first write of a script, and never a later one. The scripts themselves raise the last one,
        // before they change a lock.
        let never_late = ["OOM", "READONLY", "MISCONF", "NOREPLICAS", "TRYAGAIN"];
        let whole = format!("{} {detail}", error.code());
        if detail.contains(IN_SCRIPT)
            && !first
            && !never_late.iter().any(|word| whole.contains(&format!("{word} ")))
        {
            return Failure::Refused { code: HALFWAY.into(), detail: whole };
        }
        // A script passes on what a command in it said, with the word behind other words.
        for word in ["OOM", "READONLY", "MISCONF", "NOREPLICAS", "WRONGTYPE", "NOPERM"] {
            if detail.contains(&format!("{word} ")) && error.code() != word {
                return Failure::Refused { code: word.into(), detail: detail.into() };
            }
        }
        // A right that is missing within a script comes without its word: of Redis 7.0, and of later ones.
        if ["The user executing the script", "ACL failure in script"].iter().any(|said| detail.contains(said))
        {
            return Failure::Refused { code: "NOPERM".into(), detail: detail.into() };
        }
        Failure::Refused { code: error.code().into(), detail: detail.into() }
    }
}

/// What Redis writes behind an error that was raised inside a script.
const IN_SCRIPT: &str = "on @user_script";
/// Our word for an error raised inside a script that may have written before.
const HALFWAY: &str = "HALFWAY";

/// What each refusal means to somebody who wants a lock, and what to do about it.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let (code, detail) = match failure {
            Failure::Away(text) => return Error::Unavailable(text),
            Failure::Unheard(text) => return Error::Unknown(text),
            Failure::Refused { code, detail } => (code, detail),
        };
        let told = format!("Redis says {code} {detail}").trim_end().to_owned();
        match code.as_str() {
            "NOAUTH" | "WRONGPASS" => Error::Denied(format!(
                "{told}. Give the password in the address, as redis://USER:PASSWORD@HOST"
            )),
            "NOPERM" => Error::Denied(format!(
                "{told}. This user needs the keys and channels lockkeeper:* and the locks' own prefix, and the commands \
                 in docs/stores/redis.md"
            )),
            "READONLY" => Error::Unavailable(format!(
                "{told}. This is a replica: name the primary, or use redis+sentinel://, which follows it"
            )),
            "LOADING" => {
                Error::Unavailable(format!("{told}. The server is still reading its data; try again soon"))
            }
            "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "NOREPLICAS" | "BUSY" | "MOVED" | "ASK" => {
                Error::Unavailable(told)
            }
            "MISCONF" => Error::Unavailable(format!("{told}. The server cannot write to its disk")),
            "OOM" => {
                Error::Limited(format!("{told}. The server is out of memory: raise maxmemory, or free some"))
            }
            "WRONGTYPE" => Error::Invalid(format!(
                "{told}. Another program keeps something that is no lock under this name: choose another ?prefix="
            )),
            "CROSSSLOT" => Error::Unavailable(format!(
                "{told}. This server is part of a cluster: use redis+cluster:// to reach it"
            )),
            HALFWAY => Error::Unknown(format!(
                "a script ended with an error and may have done a part of its work. Redis says {detail}. A user with an ACL \
                 needs the rights in docs/stores/redis.md"
            )),
            // A script that ended in an error that nobody foresaw may have done a part of its work.
            _ => Error::Unknown(told),
        }
    }
}
