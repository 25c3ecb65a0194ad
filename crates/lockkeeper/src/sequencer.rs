//! The sequencer: a grant as one line of text that travels with a request, and the check that it still
//! holds.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use lockkeeper_core::{Error, Fence, LockName, LockView, Mode, Names, Result};
use sha2::{Digest, Sha256};

use crate::guard::Guard;
use crate::keeper::Lockkeeper;

/// A grant in one line of text, for a resource that cannot compare fences and asks the store instead:
/// [`Lockkeeper::check`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # use lockkeeper::{Error, Lockkeeper, Sequencer};
/// # let keeper = Lockkeeper::open("memory:").await?;
/// let guard = keeper.lock("orders/42").acquire().await?;
/// let text = guard.sequencer().to_string();              // travels with a request
/// let sequencer: Sequencer = text.parse()?;              // at the resource
/// keeper.check(&sequencer).await?;
/// guard.release().await?;
/// assert!(matches!(keeper.check(&sequencer).await, Err(Error::Lost(_))));
/// # Ok(())
/// # }
/// ```
///
/// A sequencer holds the names, the mode and the fence. It is not a secret and does not prove who sends it:
/// it does not contain the attempt, so no client can renew or release with it, and its checksum detects
/// typing errors, not forgeries.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sequencer {
    names: Names,
    mode: Mode,
    fence: Fence,
}

impl Sequencer {
    /// The held names, sorted.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// The mode of the hold.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The fence of the grant.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Whether one of these holders has this grant.
    fn held_in(&self, view: &LockView) -> bool {
        view.held.iter().any(|held| held.fence == self.fence && held.mode == self.mode && !held.lingering)
    }
}

impl Guard {
    /// This grant in one line of text, for a resource that asks the store whether the grant still holds.
    pub fn sequencer(&self) -> Sequencer {
        Sequencer { names: self.names().clone(), mode: self.mode(), fence: self.fence() }
    }
}

impl Lockkeeper {
    /// Asks the store whether the grant of a [`Sequencer`] still holds, with all its names.
    ///
    /// - `Ok`: the grant held when the store looked. That moment is over when the answer arrives, so a
    ///   write after it can still be late. Only a resource that compares fences in the step that writes is
    ///   safe from that.
    /// - [`Error::Stale`]: another client holds one of the locks, with a newer fence.
    /// - [`Error::Lost`]: the lock is free, or held only in another mode.
    /// - Any other error: the store did not answer, so treat the grant as lost.
    pub async fn check(&self, sequencer: &Sequencer) -> Result<()> {
        let (mut gone, mut newest) = (None, None);
        for name in &sequencer.names {
            let view = self.0.store.inspect(name).await.map_err(looked)?;
            if !view.as_ref().is_some_and(|view| sequencer.held_in(view)) {
                gone = gone.or(Some(name));
                newest = newest.max(view.iter().flat_map(|view| &view.held).map(|held| held.fence).max());
            }
        }
        let fence = sequencer.fence;
        match (gone, newest) {
            (None, _) => Ok(()),
            (_, Some(seen)) if seen > fence => Err(Error::Stale { presented: fence, seen }),
            (Some(name), _) => {
                Err(Error::Lost(format!("{:?} is not held with fence {fence}", name.as_str())))
            }
        }
    }
}

/// Reading changes nothing, so an unknown outcome means no more than an unreachable store.
fn looked(error: Error) -> Error {
    match error {
        Error::Unknown(why) => Error::Unavailable(why),
        error => error,
    }
}

/// `lk1.MODE.FENCE.NAME+NAME.CHECK`: only characters that need no quoting in a shell, a header or a URL.
impl fmt::Display for Sequencer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = match self.mode {
            Mode::Exclusive => format!("lk1.x.{}.", self.fence),
            Mode::Shared => format!("lk1.s.{}.", self.fence),
            Mode::Permit(n) => format!("lk1.p{n}.{}.", self.fence),
        };
        for (i, name) in self.names.iter().enumerate() {
            text += if i > 0 { "+" } else { "" };
            encode(name.as_str(), &mut text);
        }
        write!(f, "{text}.{}", checksum(&text))
    }
}

fn encode(name: &str, text: &mut String) {
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => text.push(char::from(byte)),
            _ => _ = write!(text, "%{byte:02X}"),
        }
    }
}

fn decode(text: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), text.bytes());
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
        bytes.push(digit(rest.next()?)? << 4 | digit(rest.next()?)?);
    }
    String::from_utf8(bytes).ok()
}

fn checksum(text: &str) -> String {
    Sha256::digest(text).iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

impl FromStr for Sequencer {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid(format!(
                "this is no sequencer ({why}): pass it on unchanged, to the last character"
            ))
        };
        let (body, check) = text.rsplit_once('.').ok_or_else(|| bad("it has no checksum"))?;
        if !body.starts_with("lk1.") {
            return Err(bad("it does not begin with lk1."));
        }
        if checksum(body) != check {
            return Err(bad("its checksum is wrong"));
        }
        let sequencer = parse(body).ok_or_else(|| bad("its parts are wrong"))?;
        // Each grant has one text, so that texts can be compared.
        if sequencer.to_string() == text { Ok(sequencer) } else { Err(bad("it is written in another way")) }
    }
}

fn parse(body: &str) -> Option<Sequencer> {
    let mut parts = body.split('.').skip(1);
    let mode = match parts.next()? {
        "x" => Mode::Exclusive,
        "s" => Mode::Shared,
        permit => Mode::Permit(permit.strip_prefix('p')?.parse().ok()?),
    };
    let fence = Fence::new(parts.next()?.parse().ok()?).ok()?;
    let names = parts.next()?.split('+').map(|name| LockName::new(decode(name)?).ok());
    let names = Names::new(names.collect::<Option<Vec<_>>>()?).ok()?;
    parts.next().is_none().then_some(Sequencer { names, mode, fence })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequencer(names: &[&str], mode: Mode, fence: u64) -> Sequencer {
        let names = names.iter().map(|name| LockName::new(name).unwrap());
        Sequencer { names: Names::new(names).unwrap(), mode, fence: Fence::new(fence).unwrap() }
    }

    #[test]
    fn a_sequencer_round_trips_and_needs_no_quoting() {
        let long = "ключ/".repeat(50);
        for (names, mode, fence) in [
            (&["orders/42"][..], Mode::Exclusive, 1),
            (&["a", "b.c+d%e", " ", "'\"$(x)"], Mode::Shared, Fence::MAX.get()),
            (&[long.as_str()], Mode::Permit(1_000_000), 1_794_775_452_413_713),
        ] {
            let it = sequencer(names, mode, fence);
            let text = it.to_string();
            assert!(text.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_.+%".contains(&c)), "{text}");
            assert_eq!(text.parse::<Sequencer>().unwrap(), it);
        }
    }

    #[test]
    fn a_sequencer_that_was_cut_or_changed_is_refused() {
        let text = sequencer(&["orders/42"], Mode::Exclusive, 4711).to_string();
        for end in 0..text.len() {
            assert!(matches!(text[..end].parse::<Sequencer>(), Err(Error::Invalid(_))), "{}", &text[..end]);
        }
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'7' { b'8' } else { b'7' };
            assert!(String::from_utf8(bytes).unwrap().parse::<Sequencer>().is_err(), "a change at {at}");
        }
        // Another spelling of the same grant, with a valid checksum.
        for body in [
            "lk1.x.04711.orders%2F42",
            "lk1.x.4711.orders%2f42",
            "lk1.x.4711.b+a",
            "lk1.p0x.1.a",
            "lk1.x.1.%",
        ] {
            assert!(format!("{body}.{}", checksum(body)).parse::<Sequencer>().is_err(), "{body}");
        }
    }
}
