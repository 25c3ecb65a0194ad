//! Every law catches the bug that was planted for it: a law that stays green on a broken store proves nothing.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use lockkeeper::{Clock, Store, WallTime};
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;
use lockkeeper_testkit::bugs::{Bug, Bugged, CLASSES, CaughtBy};
use lockkeeper_testkit::laws::Harness;

/// The reference store, spoilt.
struct Planted<const BUG: u8> {
    clock: VirtualClock,
    store: Bugged,
}

#[async_trait]
impl<const BUG: u8> Harness for Planted<BUG> {
    async fn start() -> Option<Self> {
        let clock = VirtualClock::default();
        let bug = laws::ALL
            .iter()
            .chain(recipes::ALL)
            .chain(forgotten::ALL)
            .chain(clients::ALL)
            .copied()
            .find(|bug| *bug as u8 == BUG)
            .expect("a bug that is used");
        let store = Bugged::new(Arc::new(MemoryStore::new(Arc::new(clock.clone()))), bug);
        let store = store.with_clock(Arc::new(clock.clone()));
        Some(Planted { clock, store })
    }

    async fn client(&self) -> Arc<dyn Store> {
        Arc::new(self.store.client())
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(self.clock.clone())
    }

    fn for_correctness() -> bool {
        false
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }

    async fn set_wall_clock_back(&self, by: Duration) {
        let wall = self.clock.wall().as_micros() - by.as_micros() as u64;
        self.clock.set_wall(WallTime::from_micros(wall));
    }
}

/// What a panic said.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

macro_rules! planted_tests {
    ([] $($group:ident::$law:ident => $bug:ident: $text:literal,)*) => {
        pub const ALL: &[Bug] = &[$(Bug::$bug),*];
        pub const CAUGHT: &[(Bug, &str)] = &[$((Bug::$bug, stringify!($law))),*];
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                let mut failed = String::new();
                // On a busy machine a law may lose patience at a step before the one that the bug breaks.
                for patience in [3, 30] {
                    lockkeeper_testkit::laws::set_patience(Duration::from_secs(patience));
                    let harness = Planted::<{ Bug::$bug as u8 }>::start().await.expect("memory is always there");
                    let law = lockkeeper_testkit::laws::$group::$law(harness);
                    let caught = AssertUnwindSafe(law).catch_unwind().await.err();
                    failed = caught.map(|panic| text_of(&*panic)).expect("the law did not notice the bug");
                    if failed.contains($text) {
                        return;
                    }
                }
                panic!(
                    "{:?} was noticed at another assertion than the law's own ({:?}): {failed}",
                    Bug::$bug,
                    $text
                );
            }
        )*
    };
}

mod laws {
    use super::*;
    lockkeeper_testkit::every_law!(planted_tests);
}

mod recipes {
    use super::*;
    lockkeeper_testkit::every_recipe_law!(planted_tests);
}

/// The store is fine here, and the recipe is not.
mod forgotten {
    use super::*;
    lockkeeper_testkit::every_recipe_bug!(planted_tests);
}

/// The client is wrong about itself.
mod clients {
    use super::*;
    lockkeeper_testkit::every_client_bug!(planted_tests);
}

#[test]
fn every_class_of_bugs_has_a_planted_bug_that_is_caught() {
    let numbers: Vec<u8> = CLASSES.iter().map(|class| class.number).collect();
    assert_eq!(numbers, (1..=22).collect::<Vec<_>>());
    let caught = [laws::CAUGHT, recipes::CAUGHT, forgotten::CAUGHT, clients::CAUGHT].concat();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for class in CLASSES {
        assert!(!class.caught_by.is_empty(), "B{}, {}: no bug is planted", class.number, class.what);
        for row in class.caught_by {
            match row {
                CaughtBy::Law(bug, law) => {
                    let listed = caught.contains(&(*bug, *law));
                    assert!(listed, "B{}: no test runs {law} against {bug:?}", class.number);
                }
                CaughtBy::Test { file, test, .. } => {
                    let text = std::fs::read_to_string(root.join(file)).expect("the file is there");
                    assert!(text.contains(&format!("fn {test}(")), "B{}: {file} has no {test}", class.number);
                }
            }
        }
    }
}
