//! `lockkeeper store`: sets up a store.

use clap::{Args, Subcommand};
use lockkeeper::{Init, Outcome};
use serde_json::json;

use crate::args::{CommonArgs, SecretUrl, secret_url};
use crate::exit::{ExitFailure, OK};
use crate::{output, store};

/// Set up a store.
#[derive(Args, Debug)]
#[command(arg_required_else_help = true, subcommand_required = true)]
pub struct StoreArgs {
    #[command(subcommand)]
    pub what: StoreAction,
}

#[derive(Debug, Subcommand)]
pub enum StoreAction {
    /// Make what a store needs before its first use
    Init(StoreInitArgs),
}

/// Make what a store needs before its first use.
///
/// DynamoDB needs a table, which is made only when asked for: paid per request, with nothing to size. All other stores make
/// what they need when they are opened: then this opens the store, and says whether that works.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct StoreInitArgs {
    /// The store, if no option and no variable names it
    #[arg(value_parser = secret_url(), conflicts_with_all = ["store", "store_file"])]
    pub url: Option<SecretUrl>,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper store init dynamodb://eu-central-1/locks
  lockkeeper store init sqlite:/srv/locks.db

It may be run again: what is there is looked at and left alone.";

impl StoreArgs {
    pub fn json(&self) -> bool {
        let StoreAction::Init(make) = &self.what;
        make.common.json
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let StoreAction::Init(make) = self.what;
        let source = match &make.url {
            Some(url) => store::find_source(Some(url), None)?,
            None => make.common.source()?,
        };
        if !source.is_named() {
            let unnamed = ExitFailure::new(Outcome::Invalid, "no store is named");
            return Err(unnamed.next("name it: lockkeeper store init URL, or --store-file FILE"));
        }
        let (state, text) = match lockkeeper::init(source.url.expose()).await? {
            Init::Made => ("made", "made: the store can be used now"),
            Init::WasThere => ("there", "it was there: the store can be used"),
            Init::Opened => ("opened", "opened: this store makes what it needs itself, and can be used"),
        };
        output::line(&if make.common.json {
            json!({ "store": state }).to_string()
        } else {
            text.to_owned()
        })?;
        Ok(OK)
    }
}
