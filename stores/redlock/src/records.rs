//! Records are not for a store that can forget: a majority that has a value today may have lost it tomorrow.

use crate::error::unsupported;
use crate::store::RedlockStore;

lockkeeper_store_kit::no_records!(RedlockStore, unsupported("records"));
