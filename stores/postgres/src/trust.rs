//! Whether the store's schema belongs to a role that this client may trust: its triggers and functions run with the client's rights.

use lockkeeper_core::Error;

use crate::config::Options;
use crate::fault::Failure;
use crate::link::Live;

const TRUST: &str = include_str!("sql/trust.sql");

/// The check, as a statement that fails. What comes before it in its transaction must have set the search_path.
pub(crate) fn check(schema: &str) -> String {
    TRUST.replace("@S", schema)
}

/// Runs the check alone, before anything in the schema is looked at: a table there may be a view that calls a function.
pub(crate) async fn trusted(live: &Live, options: &Options) -> Result<(), Failure> {
    let check = check(&options.schema);
    live.run(&format!("BEGIN; SET LOCAL search_path = pg_catalog, pg_temp;\n{check}COMMIT;")).await
}

/// What to do about a schema that is refused.
pub(crate) fn untrusted(text: &str, options: &Options) -> Error {
    let (schema, user) = (&options.schema, &options.user);
    Error::Denied(format!(
        "{text}: its code would run with the rights of {user}. Connect as that role or as a member of it, name another \
         ?schema=, or let a superuser run this SQL if it is yours: ALTER SCHEMA {schema} OWNER TO \"{}\", and the same for what is in it",
        user.replace('"', "\"\"")
    ))
}
