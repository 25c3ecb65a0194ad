use std::time::Duration;

use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType, TableStatus,
};
use lockkeeper_core::{Error, Result};
use lockkeeper_host::{Reactor, sleep_until};

use crate::config::Options;
use crate::fault::Failure;
use crate::link;
use crate::open::{check, look};
use crate::script::{KEY, Script};
use crate::wall::WallClock;

/// How long a new table may take.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(500);

/// What [`init`] found to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// The table was made.
    Made,
    /// It was there, and is as it should be.
    WasThere,
}

/// Makes the table, if it is not there: paid per request, nothing to size. Returns when it can be used.
///
/// # Errors
/// As [`crate::DynamoStore::open`]; [`Error::Invalid`] if there is a table of that name that is no table for locks.
pub async fn init(options: Options) -> Result<Init> {
    options.check()?;
    let reactor = Reactor::start("lockkeeper-dynamodb")
        .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
    reactor.lend(make(&options)).await
}

async fn make(options: &Options) -> Result<Init> {
    let script = link::connect(options, &WallClock::new(options.clock.clone())).await;
    let mut done = Init::WasThere;
    let clock = &*options.clock;
    let until = clock.now() + PATIENCE;
    loop {
        match look(&script).await? {
            None if done == Init::WasThere => {
                create(&script).await?;
                done = Init::Made;
            }
            Some(table) if table.table_status() != Some(&TableStatus::Creating) => {
                return check(&table, &options.table).map(|()| done);
            }
            _ if clock.now() >= until => {
                return Err(Error::Unavailable("the table is still being made: try again later".into()));
            }
            _ => sleep_until(clock, clock.now() + PAUSE).await,
        }
    }
}

async fn create(script: &Script) -> Result<()> {
    let bad = |error: aws_sdk_dynamodb::error::BuildError| Error::Invalid(error.to_string());
    let key = KeySchemaElement::builder().attribute_name(KEY).key_type(KeyType::Hash).build().map_err(bad)?;
    let text = AttributeDefinition::builder().attribute_name(KEY).attribute_type(ScalarAttributeType::S);
    let ask = script.client.create_table().table_name(&script.table).key_schema(key);
    let ask = ask.attribute_definitions(text.build().map_err(bad)?).billing_mode(BillingMode::PayPerRequest);
    match ask.send().await.map_err(Failure::of) {
        // Somebody else makes it just now.
        Err(Failure::Refused(text)) if text.starts_with("ResourceInUseException") => Ok(()),
        Err(failure) => Err(failure.into()),
        Ok(_) => Ok(()),
    }
}
