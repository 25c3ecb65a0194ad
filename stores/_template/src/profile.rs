//! What the store checks when it is opened, and the guarantees that follow.

use std::time::Duration;

use lockkeeper_core::{Error, Guarantee, LimitSupport, LockRequest, Mode, Profile, Result, WaitOrder};

/// The profile. Fill in: begin with everything false and `Guarantee::No`, and declare a feature when its laws are green.
///
/// - `fence` and `durable` are `Kept` only if a reported grant survives the crash of a server; read the server's settings
///   when the store is opened, and lower the guarantee if they do not allow it. Correctness needs both.
/// - `wake` bounds the time from a free lock to the next grant, also if a notification is lost.
/// - `notes` tell a user what is not promised, the gravest first.
pub fn profile() -> Profile {
    Profile {
        store: "template".into(),
        exclusion: Guarantee::No,
        fence: Guarantee::No,
        durable: Guarantee::No,
        waiting: WaitOrder::Poll,
        wake: Duration::from_secs(1),
        shared: false,
        permits: false,
        multi_name: false,
        reentry: false,
        deadlocks: false,
        lock_delay: false,
        min_hold: false,
        watch: false,
        revoke: false,
        records: false,
        limits: LimitSupport::No,
        notes: vec!["this is a template: it grants nothing".into()],
    }
}

/// Refuses a request for what the profile does not declare. Remove a check together with the `false` above.
pub fn check_features(request: &LockRequest) -> Result<()> {
    match request {
        LockRequest { mode: Mode::Shared, .. } => unsupported("shared locks"),
        LockRequest { mode: Mode::Permit(_), .. } => unsupported("permits"),
        LockRequest { owner: Some(_), .. } => unsupported("re-entry"),
        _ if request.key.names.count() > 1 => unsupported("requests for several names"),
        _ if !request.lock_delay.is_zero() => unsupported("lock-delay"),
        _ if !request.min_hold.is_zero() => unsupported("min-hold"),
        _ => Ok(()),
    }
}

/// The answer to a call for what the profile does not declare. The call must change nothing.
pub fn unsupported<T>(feature: &str) -> Result<T> {
    Err(Error::Unsupported(format!("the template store has no {feature}")))
}
