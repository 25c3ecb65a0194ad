//! Whether the store's schema belongs to a role that this client may trust: triggers and functions there run with the client's privileges.

use lockkeeper_core::Error;

use crate::config::Options;
use crate::error::Failure;
use crate::session::PgSession;

const CHECK: &str = include_str!("sql/schema_owner.sql");

/// The check, as a statement that fails. Its transaction must have set the search_path before.
pub(crate) fn check_sql(schema: &str) -> String {
    CHECK.replace("@S", schema)
}

/// Runs the check alone, before any statement reads the schema: a table there may be a view that calls a function.
pub(crate) async fn check_owner(session: &PgSession, options: &Options) -> Result<(), Failure> {
    let check = check_sql(&options.schema);
    session.run(&format!("BEGIN; SET LOCAL search_path = pg_catalog, pg_temp;\n{check}COMMIT;")).await
}

/// The error for a schema of a foreign owner, with what to do about it.
pub(crate) fn refused_owner(text: &str, options: &Options) -> Error {
    let (schema, user) = (&options.schema, &options.user);
    Error::Denied(format!(
        "{text}: its code would run with the rights of {user}. Connect as that role or as a member of it, name another \
         ?schema=, or let a superuser run this SQL if it is yours: ALTER SCHEMA {schema} OWNER TO \"{}\", and the same for what is in it",
        user.replace('"', "\"\"")
    ))
}
