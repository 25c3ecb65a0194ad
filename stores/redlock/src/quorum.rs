//! Calls to all nodes at once, and the replies of a majority.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use lockkeeper_host::sleep_until;
use lockkeeper_redis::Failure;
use redis::Value;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::config::Options;
use crate::connection::RedlockNode;
use crate::statements::ScriptCall;

/// The reply of each node; `None`: no reply in time.
pub type NodeReplies = Vec<Option<Result<Value, Failure>>>;

/// The nodes, and how many of them are a majority.
pub struct Quorum {
    pub options: Arc<Options>,
    pub nodes: Vec<Arc<RedlockNode>>,
    pub size: usize,
    pub io_thread: Handle,
}

impl Quorum {
    /// How long a node has for an answer: well within the lease.
    pub fn node_timeout(&self, ttl: Duration) -> Duration {
        self.options.node_timeout.min(ttl / 4)
    }

    /// Runs a script at every node.
    pub async fn run_on_all(&self, call: &ScriptCall) -> NodeReplies {
        let work = |node: Arc<RedlockNode>| {
            let call = call.clone();
            async move { call.run(&node.connection).await }
        };
        self.call_all(self.options.node_timeout, work, |_| false).await
    }

    /// Calls every node and collects the replies until all are there, `enough` returns true, or the timeout has passed. Calls
    /// without a reply then go on in the background.
    pub async fn call_all<F>(
        &self,
        node_timeout: Duration,
        work: impl Fn(Arc<RedlockNode>) -> F,
        mut enough: impl FnMut(&NodeReplies) -> bool,
    ) -> NodeReplies
    where
        F: Future<Output = Result<Value, Failure>> + Send + 'static,
    {
        let clock = &*self.options.clock;
        let until = clock.now() + node_timeout;
        let (reply, mut replies) = mpsc::unbounded_channel();
        for node in &self.nodes {
            let (reply, index, work) = (reply.clone(), node.index, work(node.clone()));
            self.io_thread.spawn(async move { _ = reply.send((index, work.await)) });
        }
        drop(reply);
        let mut answers: NodeReplies = self.nodes.iter().map(|_| None).collect();
        loop {
            let (index, answer) = tokio::select! {
                replies = replies.recv() => match replies {
                    Some(replies) => replies,
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
    pub fn require_majority(&self, answers: NodeReplies) -> Result<Vec<(usize, Value)>> {
        let mut good = Vec::new();
        let mut failures = Vec::new();
        for (index, answer) in answers.into_iter().enumerate() {
            match answer {
                Some(Ok(value)) => good.push((index, value)),
                Some(Err(failure)) => failures.push(failure),
                None => {}
            }
        }
        if good.len() >= self.size { Ok(good) } else { Err(self.no_majority(good.len(), 0, &failures)) }
    }

    /// The same for a request that changes something. Without a majority its outcome is unknown, if a node did it or may
    /// still do it.
    pub fn require_majority_of_writes(&self, answers: NodeReplies) -> Result<Vec<(usize, Value)>> {
        let possible = |answer: &Option<Result<Value, Failure>>| match answer {
            None | Some(Ok(_)) => true,
            // An error that was raised inside a script may have come after a write.
            Some(Err(failure)) => failure.may_have_happened(),
        };
        let possible = answers.iter().any(possible);
        self.require_majority(answers).map_err(|error| match error {
            Error::Unavailable(text) if possible => Error::Unknown(text),
            error if possible => Error::Unknown(error.to_string()),
            error => error,
        })
    }

    /// Fewer than a majority can be used: nothing was done.
    pub fn no_majority(&self, good: usize, young: usize, failures: &[Failure]) -> Error {
        // A wrong password is a wrong password, whatever else is the matter.
        let refused = failures.iter().filter(|failure| matches!(failure, Failure::Rejected { .. }));
        let clear = |error: &Error| matches!(error, Error::Denied(_) | Error::Invalid(_) | Error::Limited(_));
        if let Some(error) = refused.map(|failure| Error::from(failure.clone())).find(clear) {
            return error;
        }
        let mut replies =
            format!("{} of {} nodes are needed, and {good} answered in time", self.size, self.nodes.len());
        if young > 0 {
            let age = self.options.young_node;
            replies +=
                &format!("; {young} more came up less than {age:?} ago and do not count yet (?young_node=)");
        }
        if let Some(failure) = failures.first() {
            replies += &format!("; {}", Error::from(failure.clone()));
        }
        Error::Unavailable(replies)
    }
}
