//! What many callers want changed at once travels in one transaction, and one sync of the log serves all of them.

use lockkeeper_core::{Acquired, Ask, Claim, Error, Release, Result};
use tokio::sync::oneshot;

use crate::hold::Answer;
use crate::locals::{Local, Teller};
use crate::tx::{After, Tx};
use crate::worker::Worker;

/// Something that a caller wants changed.
pub(crate) enum Request {
    Acquire {
        ask: Ask,
        tell: Teller,
    },
    Release {
        claim: Claim,
        tell: oneshot::Sender<Result<Release>>,
    },
    /// Takes a request out of the queue, for a release that failed.
    Withdraw(Claim),
    Other(Box<dyn Change>),
}

/// A change without a part of its own in what follows the commit.
pub(crate) trait Change: Send {
    /// May be run again, if the transaction was rolled back.
    fn run(&mut self, tx: &mut Tx<'_>) -> Result<()>;
    fn tell(self: Box<Self>, end: Result<()>);
}

struct Call<T, W> {
    work: W,
    done: Option<T>,
    tell: oneshot::Sender<Result<T>>,
}

impl<T: Send, W: FnMut(&mut Tx<'_>) -> Result<T> + Send> Change for Call<T, W> {
    fn run(&mut self, tx: &mut Tx<'_>) -> Result<()> {
        self.done = Some((self.work)(tx)?);
        Ok(())
    }

    fn tell(self: Box<Self>, end: Result<()>) {
        let Call { done, tell, .. } = *self;
        let _ = tell.send(end.and_then(|()| done.ok_or_else(crate::tx::closed)));
    }
}

/// How a request ended, before it is known whether the transaction is.
enum Outcome {
    Asked(Result<Answer>),
    Released(Release),
    Done,
}

impl Request {
    pub fn other<T: Send + 'static>(
        work: impl FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static,
        tell: oneshot::Sender<Result<T>>,
    ) -> Self {
        Request::Other(Box::new(Call { work, done: None, tell }))
    }

    fn run(&mut self, tx: &mut Tx<'_>) -> Result<Outcome> {
        match self {
            Request::Acquire { ask, .. } => match tx.ask(ask) {
                // An answer like any other: nothing was changed before it was found.
                Err(error @ (Error::Deadlock(_) | Error::Limited(_))) => Ok(Outcome::Asked(Err(error))),
                other => Ok(Outcome::Asked(Ok(other?))),
            },
            Request::Release { claim, .. } => tx.release(claim).map(Outcome::Released),
            Request::Withdraw(claim) => tx.withdraw(claim).map(|()| Outcome::Done),
            Request::Other(change) => change.run(tx).map(|()| Outcome::Done),
        }
    }
}

impl Worker {
    /// Does all of them in one transaction, and answers them. One that fails is left out, and the others are done
    /// without it.
    pub fn run_batch(&mut self, mut requests: Vec<Request>) {
        while !requests.is_empty() {
            let durable = requests.iter().any(|request| self.waits_for_the_disk(request));
            let mut failed = None;
            let done = self.commit(durable, |tx| {
                let each = requests
                    .iter_mut()
                    .enumerate()
                    .map(|(i, request)| request.run(tx).inspect_err(|_| failed = Some(i)));
                each.collect::<Result<Vec<Outcome>>>()
            });
            match (done, failed) {
                (Ok((outcomes, after)), _) => return self.answer(requests, outcomes, after),
                (Err(error), Some(i)) => self.fail(requests.remove(i), error),
                (Err(error), None) => {
                    return requests.into_iter().for_each(|request| self.fail(request, error.clone()));
                }
            }
        }
    }

    /// Whether a power cut must not take it back once it is told. A release that gives the lock to nobody may be
    /// forgotten: whoever takes the lock next syncs the log, and the release is in it before that.
    fn waits_for_the_disk(&self, request: &Request) -> bool {
        let waited_for = |claim: &Claim| claim.names.iter().any(|name| self.locals.first(name).is_some());
        match request {
            Request::Acquire { ask, .. } => !waited_for(&ask.claim),
            Request::Release { claim, .. } => waited_for(claim),
            Request::Withdraw(_) => false,
            Request::Other(_) => true,
        }
    }

    fn answer(&mut self, requests: Vec<Request>, outcomes: Vec<Outcome>, after: After) {
        let mut joined = Vec::new();
        let count = requests.len();
        for (request, outcome) in requests.into_iter().zip(outcomes) {
            match (request, outcome) {
                (Request::Acquire { ask, tell }, Outcome::Asked(Ok(Answer::Waiting(ticket, until)))) => {
                    // Known here before anything else happens: a queue entry that nobody knows of is given up.
                    self.locals.add(ticket, Local { ask, until, tell });
                    joined.push(ticket);
                }
                (Request::Acquire { tell, .. }, Outcome::Asked(Ok(Answer::Granted(grant)))) => {
                    self.tell(tell, Ok(Acquired::Granted(grant)));
                }
                (Request::Acquire { tell, .. }, Outcome::Asked(Ok(Answer::Busy(busy)))) => {
                    let _ = tell.send(Ok(Acquired::Busy(busy)));
                }
                (Request::Acquire { tell, .. }, Outcome::Asked(Err(error))) => drop(tell.send(Err(error))),
                (Request::Release { claim, tell }, Outcome::Released(release)) => {
                    self.forget(&claim);
                    let _ = tell.send(Ok(release));
                }
                (Request::Other(change), _) => change.tell(Ok(())),
                _ => {}
            }
        }
        self.answered = count - joined.len();
        self.pass_on(after);
        self.wait(&joined);
    }

    fn fail(&mut self, request: Request, error: Error) {
        match request {
            Request::Acquire { tell, .. } => drop(tell.send(Err(error))),
            Request::Release { claim, tell } => {
                self.forget(&claim);
                self.withdraw_later(claim);
                let _ = tell.send(Err(error));
            }
            Request::Withdraw(claim) => self.withdraw_later(claim),
            Request::Other(change) => change.tell(Err(error)),
        }
    }
}
