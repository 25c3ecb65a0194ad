//! The `Records` trait. A store without records leaves it as it is, and has no recipes.
//!
//! Fill in: compare and write in one step. Take the version from a counter that outlives the record, such as the fence's: a record that
//! is created again must not repeat one. `TemplateKeys::record` has the key.

use crate::TemplateStore;
use crate::profile::profile;

lockkeeper_store_kit::no_records!(TemplateStore, profile().lacks("records"));
