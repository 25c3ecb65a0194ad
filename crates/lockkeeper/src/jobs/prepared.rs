//! The prepared statements of one connection: the server parses a statement once, not for every call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lockkeeper_postgres::tokio_postgres::types::Type;
use lockkeeper_postgres::tokio_postgres::{Client, Error, Statement};
use tokio::sync::OnceCell;

/// How many statements there are at most: a claim of each size is one of its own, because the planner has to know the size.
const STATEMENTS_MAX: usize = 32;
/// How old a plan becomes. The server plans a prepared statement for the table as it is then, and a table that was empty may have a million
/// rows a moment later.
const PLAN_AGE: Duration = Duration::from_secs(5);

/// The meaning of an error of a prepared statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreparedFault {
    /// The server has dropped the statement, or has another one under its name: on this connection none is prepared again.
    NotOurs,
    /// The table has changed, and the statement would return other types.
    Outdated,
}

impl PreparedFault {
    /// `None`: the error has nothing to do with the preparation.
    pub fn of(error: &Error) -> Option<PreparedFault> {
        match error.code()?.code() {
            // No such statement; there is one already; one with another number of parameters.
            "26000" | "42P05" | "08P01" => Some(PreparedFault::NotOurs),
            "0A000" => Some(PreparedFault::Outdated),
            _ => None,
        }
    }
}

#[derive(Default)]
pub(super) struct PreparedStatements(Mutex<PreparedState>);

#[derive(Default)]
struct PreparedState {
    since: Option<Instant>,
    by_text: HashMap<String, Arc<OnceCell<Statement>>>,
    refused: bool,
}

impl PreparedStatements {
    /// The prepared statement for a text. `None`: it is sent as text. A statement is prepared when it is used for the second time, because
    /// that takes a round trip.
    pub async fn get(&self, client: &Client, text: &str, types: &[Type]) -> Result<Option<Statement>, Error> {
        let Some(cell) = self.cell(text) else { return Ok(None) };
        let prepared = cell.get_or_try_init(|| client.prepare_typed(text, types)).await;
        prepared.map(|statement| Some(statement.clone()))
    }

    fn cell(&self, text: &str) -> Option<Arc<OnceCell<Statement>>> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.refused {
            return None;
        }
        if state.since.is_none_or(|since| since.elapsed() > PLAN_AGE) {
            state.by_text.clear();
            state.since = Some(Instant::now());
        }
        if let Some(cell) = state.by_text.get(text) {
            return Some(cell.clone());
        }
        if state.by_text.len() < STATEMENTS_MAX {
            state.by_text.insert(text.to_owned(), Arc::default());
        }
        None
    }

    /// Forgets all statements, and does not prepare again if they do not stay this client's own.
    pub fn forget(&self, fault: PreparedFault) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.by_text.clear();
        state.refused |= fault == PreparedFault::NotOurs;
    }
}
