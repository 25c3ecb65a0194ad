//! The traits of records and rate limits for a store whose records are a part of it that runs on the store's own thread.

/// Implements [`Records`](lockkeeper_core::Records) and [`Limits`](lockkeeper_core::Limits). The store has a method `run`, which lends a
/// future the store's thread. `records` names its part with the methods of the trait, `limits` its [`RecordLimits`](crate::RecordLimits),
/// `clock` its [`Clock`](lockkeeper_host::Clock), and `wall` the wall clock by which its rate limits count.
///
/// ```text
/// lent_records!(MyStore, |store| records: store.parts.records, limits: store.parts.limits, clock: store.clock, wall: store.clock.wall());
/// ```
#[macro_export]
macro_rules! lent_records {
    ($store:ty, |$this:ident| records: $records:expr, limits: $limits:expr, clock: $clock:expr, wall: $wall:expr) => {
        #[$crate::__async_trait]
        impl $crate::__core::Records for $store {
            async fn read(
                &self,
                key: &$crate::__core::LockName,
            ) -> $crate::__core::Result<Option<$crate::__core::Record>> {
                let $this = self;
                $this.run($records.read(key)).await
            }

            async fn write(
                &self,
                key: &$crate::__core::LockName,
                value: &[u8],
                expect: $crate::__core::Expect,
                ttl: Option<::std::time::Duration>,
            ) -> $crate::__core::Result<$crate::__core::WriteOutcome> {
                $crate::__core::Record::check(value, ttl)?;
                let $this = self;
                $this.run($records.write(key, value, expect, ttl)).await
            }

            async fn delete(
                &self,
                key: &$crate::__core::LockName,
                expect: $crate::__core::Expect,
            ) -> $crate::__core::Result<$crate::__core::DeleteOutcome> {
                let $this = self;
                $this.run($records.delete(key, expect)).await
            }

            async fn scan(
                &self,
                prefix: &str,
                page: &$crate::__core::Page,
            ) -> $crate::__core::Result<$crate::__core::RecordPage> {
                let $this = self;
                $this.run($records.scan(prefix, page)).await
            }
        }

        #[$crate::__async_trait]
        impl $crate::__core::Limits for $store {
            async fn limit(
                &self,
                request: &$crate::__core::limit::LimitRequest,
            ) -> $crate::__core::Result<$crate::__core::limit::LimitOutcome> {
                let $this = self;
                let wall = || $wall;
                let client = $crate::RecordClient { records: self, clock: &*$clock, wall: &wall };
                $limits.limit(client, request).await
            }
        }
    };
}
