//! The checks when the store is opened, and the guarantees that follow.

use lockkeeper_core::{Finding, Profile, Promise};

/// The profile. Fill in: it begins with everything false and `Guarantee::No`; declare a feature when its laws are green.
/// `Profile::check_features` refuses requests for the features that are not declared.
///
/// - `fence` and `durable` are `Kept` only if a reported grant survives the crash of a server; read the server's settings
///   when the store is opened, and lower the guarantee if they do not allow it. Correctness needs both.
/// - `wake` bounds the time from a free lock to the next grant, also if a notification is lost.
/// - `findings` tell a user what is not promised, and every setting to change, the gravest first.
pub fn profile() -> Profile {
    let nothing = Finding::harm(Promise::Availability, "this is a template: it grants nothing");
    Profile { findings: vec![nothing], ..Profile::undeclared("template") }
}
