//! Creating the table: `lockkeeper store init`.

use std::time::Duration;

use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType, TableStatus,
};
use lockkeeper_core::{Error, Result};
use lockkeeper_host::sleep_until;
use lockkeeper_store_kit::IoThread;

use crate::attributes::KEY;
use crate::config::Options;
use crate::connection;
use crate::error::Failure;
use crate::profile::{check, describe_table};
use crate::server_clock::DynamoClock;
use crate::statements::TableClient;

/// How long DynamoDB may take to create a table.
const CREATE_TIMEOUT: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(500);

/// The outcome of [`init`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableInit {
    /// The table was created.
    Made,
    /// The table existed and can keep locks.
    WasThere,
}

/// Creates the table, with billing per request, if it does not exist. Returns when it can be used.
///
/// # Errors
/// As [`crate::DynamoStore::open`]; [`Error::Invalid`] if a table of that name has another key.
pub async fn init(options: Options) -> Result<TableInit> {
    options.check()?;
    let io_thread = IoThread::start("lockkeeper-dynamodb")
        .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
    io_thread.lend(create_if_missing(&options)).await
}

async fn create_if_missing(options: &Options) -> Result<TableInit> {
    let table = connection::connect(options, &DynamoClock::new(options.clock.clone())).await;
    let mut done = TableInit::WasThere;
    let clock = &*options.clock;
    let until = clock.now() + CREATE_TIMEOUT;
    loop {
        match describe_table(&table).await? {
            None if done == TableInit::WasThere => {
                create(&table).await?;
                done = TableInit::Made;
            }
            Some(table) if table.table_status() != Some(&TableStatus::Creating) => {
                return check(&table, &options.table).map(|()| done);
            }
            _ if clock.now() >= until => {
                return Err(Error::Unavailable("the table is still being created: try again later".into()));
            }
            _ => sleep_until(clock, clock.now() + PAUSE).await,
        }
    }
}

async fn create(table: &TableClient) -> Result<()> {
    let bad = |error: aws_sdk_dynamodb::error::BuildError| Error::Invalid(error.to_string());
    let key = KeySchemaElement::builder().attribute_name(KEY).key_type(KeyType::Hash).build().map_err(bad)?;
    let text = AttributeDefinition::builder().attribute_name(KEY).attribute_type(ScalarAttributeType::S);
    let request = table.client.create_table().table_name(&table.table).key_schema(key);
    let request =
        request.attribute_definitions(text.build().map_err(bad)?).billing_mode(BillingMode::PayPerRequest);
    match request.send().await.map_err(Failure::of) {
        // Another process is creating it.
        Err(Failure::Rejected(text)) if text.starts_with("ResourceInUseException") => Ok(()),
        Err(failure) => Err(failure.into()),
        Ok(_) => Ok(()),
    }
}
