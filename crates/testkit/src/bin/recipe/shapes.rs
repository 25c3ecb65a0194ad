//! Holders of permits, readers and writers, who write down when they believed to hold.

use std::time::Duration;

use lockkeeper::{Attempt, Error, Guard, Lockkeeper, Mode, Outcome, ReleaseOutcome};
use lockkeeper_host::random_128;
use lockkeeper_testkit::history::{HistoryEvent, HistoryRecorder, Operation};

use crate::{RecipeFailure, RecipeProcess};

/// How long a reader or a writer holds at least.
const MOMENT: Duration = Duration::from_millis(2);

/// The story of one hold.
struct HoldStory<'a> {
    history: &'a HistoryRecorder,
    name: &'a str,
    attempt: Attempt,
    mode: Mode,
}

impl<'a> HoldStory<'a> {
    fn request(history: &'a HistoryRecorder, name: &'a str, mode: Mode) -> Self {
        let hold = HoldStory { history, name, attempt: Lockkeeper::new_attempt(), mode };
        hold.tell(HistoryEvent::invoke(Operation::Acquire, name));
        hold
    }

    fn tell(&self, event: HistoryEvent) {
        self.history.record(event.attempt(&self.attempt).mode(self.mode));
    }

    /// Holds for a moment, and says that it is about to release.
    async fn hold(&self, guard: &Guard, least: Duration) {
        self.tell(
            HistoryEvent::ok(Operation::Acquire, self.name).fence(guard.fence()).deadline(guard.deadline()),
        );
        tokio::time::sleep(least + Duration::from_millis(u64::from(random_128()[0] % 16))).await;
        if !guard.is_held() {
            self.tell(HistoryEvent::signal(self.name));
        }
        self.tell(HistoryEvent::invoke(Operation::Release, self.name));
    }

    fn released(&self, answer: Result<ReleaseOutcome, Error>) {
        self.tell(match answer {
            Ok(ReleaseOutcome::Released) => HistoryEvent::ok(Operation::Release, self.name),
            Ok(ReleaseOutcome::AlreadyGone) => {
                HistoryEvent::refused(Operation::Release, self.name, Outcome::Lost)
            }
            Err(error) => HistoryEvent::failed(Operation::Release, self.name, &error),
        });
    }

    async fn failed(&self, error: &Error) {
        self.tell(HistoryEvent::failed(Operation::Acquire, self.name, error));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

impl RecipeProcess {
    fn history(&self) -> Result<HistoryRecorder, RecipeFailure> {
        Ok(HistoryRecorder::new(self.arg("history"), std::process::id().to_string())?)
    }

    fn ttl(&self) -> Result<Duration, RecipeFailure> {
        Ok(Duration::from_millis(self.arg("ttl_ms").parse()?))
    }

    /// Takes a permit, again and again, until it is killed.
    pub async fn semaphore(&self) -> Result<(), RecipeFailure> {
        let (name, permits, history) = (self.arg("name"), self.arg("permits").parse()?, self.history()?);
        let semaphore = self.keeper.semaphore(name, permits).ttl(self.ttl()?);
        loop {
            let hold = HoldStory::request(&history, name, Mode::Permit(permits));
            match semaphore.acquire().await {
                Ok(permit) => {
                    // Much longer than a hand-off takes: nearly always all permits are held.
                    hold.hold(&permit, Duration::from_millis(300)).await;
                    hold.released(permit.release().await);
                }
                Err(error) => hold.failed(&error).await,
            }
        }
    }

    /// Reads or writes, again and again, until it is killed.
    pub async fn rw_lock(&self) -> Result<(), RecipeFailure> {
        let (name, history) = (self.arg("name"), self.history()?);
        let lock = self.keeper.rw_lock(name).ttl(self.ttl()?);
        let writes = self.arg("role") == "writer";
        loop {
            let mode = if writes { Mode::Exclusive } else { Mode::Shared };
            let hold = HoldStory::request(&history, name, mode);
            let held = if writes {
                match lock.write().await {
                    Ok(guard) => {
                        hold.hold(&guard, MOMENT).await;
                        Ok(guard.release().await)
                    }
                    Err(error) => Err(error),
                }
            } else {
                match lock.read().await {
                    Ok(guard) => {
                        hold.hold(&guard, MOMENT).await;
                        Ok(guard.release().await)
                    }
                    Err(error) => Err(error),
                }
            };
            match held {
                Ok(answer) => hold.released(answer),
                Err(error) => hold.failed(&error).await,
            }
        }
    }
}
