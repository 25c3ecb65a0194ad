//! The matrix of faults: real client processes contend for locks in a real store while a fault is injected, and their histories are
//! judged against the table of [`lockkeeper_core::faults`].
//!
//! - [`TrafficPlan`] and [`run_traffic_client`]: the work of one client process.
//! - [`run_traffic`]: traffic against the store of a URL, without any fault, and what the checks found: for `lockkeeper verify`.
//! - [`run_cell`]: one cell of the matrix, with servers of its own.

mod cell;
mod cell_report;
mod check;
mod client;
mod disk;
mod holder_search;
mod matrix;
mod page;
mod random;
mod reset;
mod server_fault;
mod session;
mod site;
mod strike;
mod traffic;
mod traffic_client;

pub use cell::{CellPlan, run_cell};
pub use cell_report::{CellReport, CellVerdict};
pub use check::{ProcessEnd, RunConditions, TrafficFindings, TrafficTotals, check_traffic};
pub use client::{ClientProgram, TrafficProcess};
pub use matrix::{MatrixOptions, Selection, run_matrix};
pub use page::{CELL_MARKS, reliability_page};
pub use random::TortureRng;
pub use session::{SessionFindings, SessionOptions, run_traffic};
pub use traffic::{TrafficKind, TrafficPlan};
pub use traffic_client::run_traffic_client;
