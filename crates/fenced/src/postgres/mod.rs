//! PostgreSQL: a guard row that is checked in your own transaction ([`Fences`]), and tables that check by themselves whatever client
//! writes to them ([`table`]).

mod error;
mod fences;
pub mod table;
mod values;

pub use error::refusal;
pub use fences::Fences;
// The crate of the clients and transactions.
pub use tokio_postgres;
pub use values::PostgresFenced;
