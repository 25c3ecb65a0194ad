//! Our own schema: made on first use if that is allowed, and brought up to date.

use lockkeeper_core::Error;

use crate::config::Options;
use crate::fault::Failure;
use crate::link::{Live, first};
use crate::script::{FUNCTIONS, GIVING, MIGRATIONS, PATH, Sql, TAKE, VERSION};
use crate::trust::{check, trusted, untrusted};

/// The SQLSTATE of a statement that PostgreSQL ended to resolve a deadlock.
const DEADLOCK: &str = "40P01";

static SERVER: Sql =
    Sql { text: "SELECT pg_is_in_recovery(), current_setting('server_encoding')", types: &[] };
static THERE: Sql = Sql { text: "SELECT to_regclass('@S.migration') IS NOT NULL", types: &[] };
static FOUND: Sql = Sql { text: "SELECT coalesce(max(version), 0) FROM @S.migration", types: &[] };

/// Looks whether the server is one to keep locks in, and whether our tables are there in our version; if not, makes them. `repair`:
/// something is known to be missing.
pub(crate) async fn ready(live: &Live, options: &Options, repair: bool) -> Result<(), Failure> {
    let server = live.rows(&SERVER, &[]).await?;
    if first(&server, 0)? {
        return Err(Failure::Told(Error::Unavailable(format!(
            "{} is a standby: locks are taken at the primary. Name that, or a name that follows it",
            options.door
        ))));
    }
    let encoding: String = first(&server, 1)?;
    if encoding != "UTF8" {
        return Err(Failure::Told(Error::Unsupported(format!(
            "the database {} has the encoding {encoding}: names are UTF-8. Make one with CREATE DATABASE ... ENCODING 'UTF8'",
            options.database
        ))));
    }
    let told = |failure| explain(failure, options);
    trusted(live, options).await.map_err(told)?;
    let found = found(live).await.map_err(told)?;
    if found > VERSION {
        return Err(Failure::Told(Error::Unsupported(format!(
            "the schema {} has version {found}, and this program knows {VERSION}: use a newer lockkeeper, or \
             another ?schema=",
            options.schema
        ))));
    }
    if found < VERSION || repair {
        migrate(live, &migration(&options.schema, repair)).await.map_err(told)?;
    }
    Ok(())
}

/// How often a migration is tried that ends in a deadlock.
const TRIES: usize = 10;

/// Runs a migration. It locks our tables, and statements of other clients lock them in another order: PostgreSQL ends one of the two
/// with a deadlock. If it ends the migration, nothing of it has happened, and it is tried again.
async fn migrate(live: &Live, script: &str) -> Result<(), Failure> {
    let mut tries = 1;
    loop {
        match live.run(script).await {
            Err(Failure::Refused { code, text }) if code == DEADLOCK && tries < TRIES => {
                tracing::debug!(%text, tries, "the migration met a deadlock and is tried again");
                live.run("ROLLBACK").await?;
                tries += 1;
            }
            done => return done,
        }
    }
}

async fn found(live: &Live) -> Result<i32, Failure> {
    let there: bool = first(&live.rows(&THERE, &[]).await?, 0)?;
    if !there {
        return Ok(0);
    }
    first(&live.rows(&FOUND, &[]).await?, 0)
}

/// What brings the schema to our version, from whatever it is. Many may try at once: one does it, and the others find it done.
pub(crate) fn migration(schema: &str, repair: bool) -> String {
    let mut steps = String::new();
    for (i, step) in MIGRATIONS.iter().enumerate() {
        let (version, step) = (i + 1, step.replace("@S", schema));
        steps += &format!(
            "IF _found < {version} THEN EXECUTE $migration${step}$migration$; \
             INSERT INTO {schema}.migration(version) VALUES ({version}) ON CONFLICT DO NOTHING; END IF;\n"
        );
    }
    let functions = FUNCTIONS
        .replace("@TAKE", TAKE.text)
        .replace("@GIVE", GIVING)
        .replace("@PATH", PATH)
        .replace("@S", schema);
    steps += &format!("IF _found < {VERSION} THEN EXECUTE $migration${functions}$migration$; END IF;\n");
    let trust = check(schema);
    format!(
        // The schema may have been made by another role since it was looked for, so it is checked again. The catalogues are read as
        // tables: what a session remembers of them may be from before it waited for the lock.
        "BEGIN; SET LOCAL search_path = pg_catalog, pg_temp; \
         SELECT pg_advisory_xact_lock(hashtextextended('lockkeeper migration {schema}'::text, 0::bigint));\n\
         DO $do$ BEGIN IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = '{schema}') THEN CREATE SCHEMA {schema}; END IF; \
         END $do$;\n{trust}\
         DO $do$ DECLARE _found int := 0; BEGIN\n\
         IF NOT {repair} AND EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = '{schema}' AND c.relname = 'migration') THEN \
         SELECT coalesce(max(version), 0) INTO _found FROM {schema}.migration; END IF;\n\
         {steps}END $do$; COMMIT;"
    )
}

/// What a missing right needs: the SQL to run.
pub(crate) fn explain(failure: Failure, options: &Options) -> Failure {
    let (schema, user) = (&options.schema, options.user.replace('"', "\"\""));
    match failure {
        Failure::Refused { code, text } if code == "LK077" => Failure::Told(untrusted(&text, options)),
        Failure::Refused { code, text } if code == "42501" => Failure::Told(Error::Denied(format!(
            "PostgreSQL says {text}. Let somebody who may run this SQL: CREATE SCHEMA IF NOT EXISTS {schema}; GRANT USAGE, \
             CREATE ON SCHEMA {schema} TO \"{user}\"; or, if the tables are there already: GRANT USAGE ON SCHEMA {schema} TO \
             \"{user}\"; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO \"{user}\"; GRANT USAGE, UPDATE ON \
             ALL SEQUENCES IN SCHEMA {schema} TO \"{user}\";"
        ))),
        Failure::Refused { code, text } if code == "25006" => Failure::Told(Error::Denied(format!(
            "PostgreSQL says {text}. Locks are written. Let somebody who may run this SQL: ALTER ROLE \"{user}\" SET \
             default_transaction_read_only = off;"
        ))),
        other => other,
    }
}
