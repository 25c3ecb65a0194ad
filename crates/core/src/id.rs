//! Identities: the attempt, the owner and the holder.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, limits};

macro_rules! id128 {
    ($name:ident, $what:literal) => {
        impl $name {
            /// From 128 bits, which should come from the operating system's random source.
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                $name(bytes)
            }

            /// The 128 bits.
            pub const fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }

            /// Eight hex digits that identify it in a log without revealing it.
            pub fn fingerprint(&self) -> String {
                // FNV-1a, folded: not reversible in the part that matters, because 96 bits are missing.
                let hash = self.0.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
                    (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)
                });
                format!("{:08x}", (hash ^ (hash >> 32)) as u32)
            }

            /// All 32 hex digits: for the wire and for stores, never for logs.
            pub fn to_hex(&self) -> String {
                let digit = |n: u8| char::from(b"0123456789abcdef"[usize::from(n)]);
                self.0.iter().flat_map(|b| [digit(b >> 4), digit(b & 15)]).collect()
            }

            /// From 32 hex digits.
            pub fn from_hex(hex: &str) -> Result<Self> {
                let bad = || Error::invalid(concat!("not ", $what, ": 32 hex digits are needed"));
                if hex.len() != 32 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(bad());
                }
                let n = u128::from_str_radix(hex, 16).map_err(|_| bad())?;
                Ok($name(n.to_be_bytes()))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({}…)"), self.fingerprint())
            }
        }
    };
}

/// 128 random bits, one per request, the same over its retries: the proof of ownership, and a secret.
///
/// `Debug` shows a fingerprint only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt([u8; 16]);
id128!(Attempt, "an attempt");

/// The owner of requests, for re-entry and for finding deadlocks: requests of one owner do not exclude each other.
///
/// A request without an explicit owner excludes every other request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner([u8; 16]);
id128!(Owner, "an owner");

/// The process that holds a lock or waits for it, for people to read. It proves nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// The name of the machine.
    pub host: String,
    /// The process on that machine.
    pub pid: u32,
    /// The user's name for this holder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
}

impl Holder {
    /// Checks the parts: a host or label that is over-long or has control characters in it is [`Error::Invalid`].
    pub fn new(host: impl Into<String>, pid: u32, label: Option<String>) -> Result<Self> {
        let host = host.into();
        for (what, text) in [("host", Some(&host)), ("label", label.as_ref())] {
            let Some(text) = text else { continue };
            if text.len() > limits::LABEL_BYTES {
                return Err(Error::invalid(format!("the {what} has {} bytes, 256 are allowed", text.len())));
            }
            if text.chars().any(char::is_control) {
                return Err(Error::invalid(format!("the {what} {text:?} has control characters in it")));
            }
        }
        Ok(Holder { host, pid, label })
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.label {
            Some(label) => write!(f, "{label} ({}, pid {})", self.host, self.pid),
            None => write!(f, "{}, pid {}", self.host, self.pid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_do_not_leak_into_debug_output() {
        let attempt = Attempt::from_bytes([0xab; 16]);
        let shown = format!("{attempt:?}");
        assert!(!shown.contains("abab"), "{shown}");
        assert_eq!(Attempt::from_hex(&attempt.to_hex()).unwrap(), attempt);
        for bad in ["", "zz", &"+".repeat(32), &"a".repeat(33)] {
            assert!(Attempt::from_hex(bad).is_err(), "{bad:?}");
        }
    }
}
