//! The store's schema: created on first use if the role may, and upgraded from older versions.

use lockkeeper_core::Error;

use crate::config::Options;
use crate::error::Failure;
use crate::schema_owner::{check_owner, check_sql, refused_owner};
use crate::session::{PgSession, first};
use crate::statements::{
    ACQUIRE_FAST, FUNCTIONS, PATH, PgStatement, RELEASE_FAST_UPDATE, TABLES, UPGRADES, VERSION,
};

/// The SQLSTATE of a statement that PostgreSQL ended to resolve a deadlock.
const DEADLOCK: &str = "40P01";

static SERVER: PgStatement =
    PgStatement { text: "SELECT pg_is_in_recovery(), current_setting('server_encoding')", types: &[] };
static EXISTS: PgStatement =
    PgStatement { text: "SELECT to_regclass('@S.migration') IS NOT NULL", types: &[] };
static FOUND_VERSION: PgStatement =
    PgStatement { text: "SELECT coalesce(max(version), 0) FROM @S.migration", types: &[] };

/// Checks that the server can keep locks and that the schema has this version; if not, creates or upgrades the schema. `repair`: a table
/// or function is known to be missing.
pub(crate) async fn prepare_schema(
    session: &PgSession,
    options: &Options,
    repair: bool,
) -> Result<(), Failure> {
    let server = session.rows(&SERVER, &[]).await?;
    if first(&server, 0)? {
        return Err(Failure::Final(Error::Unavailable(format!(
            "{} is a standby: locks are taken at the primary. Name the primary, or a name that follows it",
            options.server
        ))));
    }
    let encoding: String = first(&server, 1)?;
    if encoding != "UTF8" {
        return Err(Failure::Final(Error::Unsupported(format!(
            "the database {} has the encoding {encoding}: names are UTF-8. Create one with CREATE DATABASE ... ENCODING 'UTF8'",
            options.database
        ))));
    }
    let explained = |failure| explain(failure, options);
    check_owner(session, options).await.map_err(explained)?;
    let found = found_version(session).await.map_err(explained)?;
    if found > VERSION {
        return Err(Failure::Final(Error::Unsupported(format!(
            "the schema {} has version {found}, and this program knows {VERSION}: use a newer lockkeeper, or \
             another ?schema=",
            options.schema
        ))));
    }
    if found < VERSION || repair {
        migrate(session, &migration(&options.schema, repair)).await.map_err(explained)?;
    }
    Ok(())
}

/// How often a migration is tried that ends in a deadlock.
const TRIES: usize = 10;

/// Runs a migration. It locks all tables of the store, and statements of other clients lock them in another order: PostgreSQL ends one
/// of the two with a deadlock. If it ends the migration, all of it is rolled back, and the migration is tried again.
async fn migrate(session: &PgSession, script: &str) -> Result<(), Failure> {
    let mut tries = 1;
    loop {
        match session.run(script).await {
            Err(Failure::Rejected { code, text }) if code == DEADLOCK && tries < TRIES => {
                tracing::debug!(%text, tries, "the migration met a deadlock and is tried again");
                session.run("ROLLBACK").await?;
                tries += 1;
            }
            done => return done,
        }
    }
}

async fn found_version(session: &PgSession) -> Result<i32, Failure> {
    let exists: bool = first(&session.rows(&EXISTS, &[]).await?, 0)?;
    if !exists {
        return Ok(0);
    }
    first(&session.rows(&FOUND_VERSION, &[]).await?, 0)
}

/// The script that brings the schema to this version, from any older one or none. Many processes may run it at once: one of them does
/// the work, and the others find it done.
pub(crate) fn migration(schema: &str, repair: bool) -> String {
    let mut upgrades = String::new();
    for (version, script) in UPGRADES {
        let script = script.replace("@S", schema);
        upgrades += &format!(
            "IF _found BETWEEN 1 AND {version} - 1 THEN EXECUTE $migration${script}$migration$; END IF;\n"
        );
    }
    let tables = TABLES.replace("@S", schema);
    let functions = FUNCTIONS
        .replace("@ACQUIRE_FAST", ACQUIRE_FAST.text)
        .replace("@RELEASE_FAST", RELEASE_FAST_UPDATE)
        .replace("@PATH", PATH)
        .replace("@S", schema);
    let owner_check = check_sql(schema);
    format!(
        // Another role may have created the schema since the first check, so the owner is checked again. The catalogues are read as
        // tables: the session may have cached them before it waited for the lock.
        "BEGIN; SET LOCAL search_path = pg_catalog, pg_temp; \
         SELECT pg_advisory_xact_lock(hashtextextended('lockkeeper migration {schema}'::text, 0::bigint));\n\
         DO $do$ BEGIN IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = '{schema}') THEN CREATE SCHEMA {schema}; END IF; \
         END $do$;\n{owner_check}\
         DO $do$ DECLARE _found int := 0; BEGIN\n\
         IF EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = '{schema}' AND c.relname = 'migration') THEN \
         SELECT coalesce(max(version), 0) INTO _found FROM {schema}.migration; END IF;\n\
         {upgrades}IF {repair} OR _found < {VERSION} THEN\n\
         EXECUTE $migration${tables}$migration$;\n\
         EXECUTE $migration${functions}$migration$;\n\
         INSERT INTO {schema}.migration(version) VALUES ({VERSION}) ON CONFLICT DO NOTHING;\n\
         END IF; END $do$; COMMIT;"
    )
}

/// Adds the SQL to run to the error of a missing privilege.
pub(crate) fn explain(failure: Failure, options: &Options) -> Failure {
    let (schema, user) = (&options.schema, options.user.replace('"', "\"\""));
    match failure {
        Failure::Rejected { code, text } if code == "LK077" => Failure::Final(refused_owner(&text, options)),
        Failure::Rejected { code, text } if code == "42501" => Failure::Final(Error::Denied(format!(
            "PostgreSQL says {text}. Let a role that may run this SQL: CREATE SCHEMA IF NOT EXISTS {schema}; GRANT USAGE, \
             CREATE ON SCHEMA {schema} TO \"{user}\"; or, if the tables are there already: GRANT USAGE ON SCHEMA {schema} TO \
             \"{user}\"; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO \"{user}\"; GRANT USAGE, UPDATE ON \
             ALL SEQUENCES IN SCHEMA {schema} TO \"{user}\"; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO \"{user}\";"
        ))),
        Failure::Rejected { code, text } if code == "25006" => Failure::Final(Error::Denied(format!(
            "PostgreSQL says {text}. The store writes its locks. Let a role that may run this SQL: ALTER ROLE \"{user}\" SET \
             default_transaction_read_only = off;"
        ))),
        other => other,
    }
}
