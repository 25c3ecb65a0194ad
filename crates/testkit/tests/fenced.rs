//! The laws of resources hold for the rule itself, and every law catches the bugs that were planted for it.

use std::any::Any;
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use futures_util::FutureExt;
use lockkeeper_fenced::Fenced;
use lockkeeper_testkit::fenced::{FaultyResource, FencedHarness, ResourceBug};

/// The tables of this process by their addresses, since an address is text.
fn tables() -> &'static Mutex<HashMap<String, FaultyResource>> {
    static TABLES: OnceLock<Mutex<HashMap<String, FaultyResource>>> = OnceLock::new();
    TABLES.get_or_init(Mutex::default)
}

struct InMemory(String);

impl InMemory {
    fn new(table: FaultyResource) -> Self {
        let mut tables = tables().lock().unwrap();
        let address = tables.len().to_string();
        tables.insert(address.clone(), table);
        InMemory(address)
    }
}

#[async_trait]
impl FencedHarness for InMemory {
    const INTERLEAVINGS: u64 = 10_000;

    async fn start() -> Option<Self> {
        Some(InMemory::new(FaultyResource::default()))
    }

    fn address(&self) -> String {
        self.0.clone()
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        Arc::new(tables().lock().unwrap()[address].clone())
    }

    async fn twin(_: &str) -> Arc<dyn Fenced> {
        Arc::new(FaultyResource::bugged(ResourceBug::CheckRemoved))
    }
}

mod rule {
    use super::*;
    use lockkeeper_testkit::fenced_law_tests;
    lockkeeper_testkit::every_fenced_law!(fenced_law_tests, InMemory);
}

/// The text of a panic.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

macro_rules! planted_tests {
    ([] $($law:ident => [$($bug:ident: $text:literal),* $(,)?],)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                for (bug, text) in [$((ResourceBug::$bug, $text)),*] {
                    let harness = InMemory::new(FaultyResource::bugged(bug));
                    let law = lockkeeper_testkit::fenced::$law(harness);
                    let caught = AssertUnwindSafe(law).catch_unwind().await.err();
                    let failed = caught.map(|panic| text_of(&*panic));
                    let failed = failed.unwrap_or_else(|| panic!("the law did not notice {bug:?}"));
                    assert!(
                        failed.contains(text),
                        "{bug:?} was noticed at another assertion than the law's own ({text:?}): {failed}"
                    );
                }
            }
        )*
    };
}

mod planted {
    use super::*;
    lockkeeper_testkit::every_fenced_law!(planted_tests);
}
