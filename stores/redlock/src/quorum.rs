//! Asking all nodes at once, and what a majority says.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use lockkeeper_host::sleep_until;
use lockkeeper_redis::Failure;
use redis::Value;
use tokio::sync::mpsc;

use crate::node::Node;
use crate::store::Shared;

/// What each node said; `None`: nothing in time.
pub type Answers = Vec<Option<Result<Value, Failure>>>;

impl Shared {
    /// Asks every node and collects the answers, until all are there, `enough` says so, or the patience is over. What is
    /// not answered by then goes on in the background.
    pub async fn hear<F>(
        &self,
        patience: Duration,
        work: impl Fn(Arc<Node>) -> F,
        mut enough: impl FnMut(&Answers) -> bool,
    ) -> Answers
    where
        F: Future<Output = Result<Value, Failure>> + Send + 'static,
    {
        let clock = &*self.options.clock;
        let until = clock.now() + patience;
        let (tell, mut told) = mpsc::unbounded_channel();
        for node in &self.nodes {
            let (tell, index, work) = (tell.clone(), node.index, work(node.clone()));
            self.reactor.spawn(async move { _ = tell.send((index, work.await)) });
        }
        drop(tell);
        let mut answers: Answers = self.nodes.iter().map(|_| None).collect();
        loop {
            let (index, answer) = tokio::select! {
                told = told.recv() => match told {
                    Some(told) => told,
                    None => return answers,
                },
                () = sleep_until(clock, until) => return answers,
            };
            answers[index] = Some(answer);
            if enough(&answers) {
                return answers;
            }
        }
    }

    /// The good answers, if a majority gave one.
    pub fn majority_of(&self, answers: Answers) -> Result<Vec<(usize, Value)>> {
        let mut good = Vec::new();
        let mut failures = Vec::new();
        for (index, answer) in answers.into_iter().enumerate() {
            match answer {
                Some(Ok(value)) => good.push((index, value)),
                Some(Err(failure)) => failures.push(failure),
                None => {}
            }
        }
        if good.len() >= self.quorum { Ok(good) } else { Err(self.too_few(good.len(), 0, &failures)) }
    }

    /// The same for a request that changes something. Without a majority its outcome is unknown, if a node did it or may
    /// still do it.
    pub fn majority_did(&self, answers: Answers) -> Result<Vec<(usize, Value)>> {
        let possible = |answer: &Option<Result<Value, Failure>>| match answer {
            None | Some(Ok(_)) => true,
            // An error that was raised inside a script may have come after a write.
            Some(Err(failure)) => failure.may_have_happened(),
        };
        let possible = answers.iter().any(possible);
        self.majority_of(answers).map_err(|error| match error {
            Error::Unavailable(text) if possible => Error::Unknown(text),
            error if possible => Error::Unknown(error.to_string()),
            error => error,
        })
    }

    /// Fewer than a majority can be used: nothing was done.
    pub fn too_few(&self, good: usize, young: usize, failures: &[Failure]) -> Error {
        // A wrong password is a wrong password, whatever else is the matter.
        let refused = failures.iter().filter(|failure| matches!(failure, Failure::Refused { .. }));
        let clear = |error: &Error| matches!(error, Error::Denied(_) | Error::Invalid(_) | Error::Limited(_));
        if let Some(error) = refused.map(|failure| Error::from(failure.clone())).find(clear) {
            return error;
        }
        let mut told =
            format!("{} of {} nodes are needed, and {good} answered in time", self.quorum, self.nodes.len());
        if young > 0 {
            let age = self.options.young_node;
            told +=
                &format!("; {young} more came up less than {age:?} ago and do not count yet (?young_node=)");
        }
        if let Some(failure) = failures.first() {
            told += &format!("; {}", Error::from(failure.clone()));
        }
        Error::Unavailable(told)
    }
}

pub fn odd() -> Error {
    Error::Unknown("a node gave an answer that makes no sense".into())
}

pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
