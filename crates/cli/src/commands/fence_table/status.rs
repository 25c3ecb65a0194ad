//! `lockkeeper fence status`: which PostgreSQL tables check fences.

use clap::Args;
use lockkeeper_fenced::postgres::table::{Status, TriggerState, status};
use serde_json::{Value, json};

use super::DatabaseArgs;
use crate::exit::{ExitFailure, OK};
use crate::output::{self, bold};
use crate::text::{columns, plain};

#[derive(Args, Debug)]
pub struct FenceStatusArgs {
    #[command(flatten)]
    pub database: DatabaseArgs,
}

const HEAD: [&str; 6] = ["TABLE", "STATE", "COLUMN", "KEY", "UNFENCED WRITES", "MARKS OF DELETED ROWS"];

impl FenceStatusArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let all = status(&mut self.database.open().await?).await?;
        if self.database.json {
            let tables: Vec<Value> = all.iter().map(shown).collect();
            output::line(&json!({ "tables": tables }).to_string())?;
        } else if all.is_empty() {
            output::line("no table of this database checks fences")?;
        } else {
            let mut rows = vec![HEAD.map(String::from).to_vec()];
            rows.extend(all.iter().map(row));
            for (i, line) in columns(&rows).iter().enumerate() {
                output::line(&if i == 0 { bold(line) } else { line.clone() })?;
            }
        }
        Ok(OK)
    }
}

fn state_name(state: TriggerState) -> &'static str {
    match state {
        TriggerState::On => "on",
        TriggerState::Off => "off",
        TriggerState::Inherited => "inherited",
        TriggerState::Gone => "gone",
    }
}

fn shown(one: &Status) -> Value {
    json!({
        "table": one.table, "state": state_name(one.state), "column": one.column, "key": one.key,
        "allow_unfenced": one.allow_unfenced, "marks": one.marks,
    })
}

fn row(one: &Status) -> Vec<String> {
    let state = match one.state {
        TriggerState::On => "on",
        TriggerState::Off => "OFF: a trigger is disabled or dropped",
        TriggerState::Inherited => "OFF: tables inherit from it, and their rows are not checked",
        TriggerState::Gone => "the table is gone",
    };
    let unfenced = if one.allow_unfenced { "LET THROUGH" } else { "refused" };
    let text = |text: &str| plain(text).into_owned();
    vec![
        text(&one.table),
        state.into(),
        text(&one.column),
        text(&one.key),
        unfenced.into(),
        one.marks.to_string(),
    ]
}
