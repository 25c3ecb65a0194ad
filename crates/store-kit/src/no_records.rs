//! The `Records` trait of a store that has none.

/// Implements [`Records`](lockkeeper_core::Records) for a store without records: every call returns this error, and changes nothing.
///
/// ```
/// struct MyStore;
/// lockkeeper_store_kit::no_records!(MyStore, lockkeeper_core::Error::Unsupported("my store has no records".into()));
/// ```
#[macro_export]
macro_rules! no_records {
    ($store:ty, $error:expr) => {
        #[$crate::__async_trait]
        impl $crate::__core::Records for $store {
            async fn read(
                &self,
                _: &$crate::__core::LockName,
            ) -> $crate::__core::Result<Option<$crate::__core::Record>> {
                Err($error)
            }

            async fn write(
                &self,
                _: &$crate::__core::LockName,
                _: &[u8],
                _: $crate::__core::Expect,
                _: Option<::std::time::Duration>,
            ) -> $crate::__core::Result<$crate::__core::WriteOutcome> {
                Err($error)
            }

            async fn delete(
                &self,
                _: &$crate::__core::LockName,
                _: $crate::__core::Expect,
            ) -> $crate::__core::Result<$crate::__core::DeleteOutcome> {
                Err($error)
            }

            async fn scan(
                &self,
                _: &str,
                _: &$crate::__core::Page,
            ) -> $crate::__core::Result<$crate::__core::RecordPage> {
                Err($error)
            }
        }
    };
}
