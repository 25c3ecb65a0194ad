//! The recipes, by real processes that are killed and stopped, on real stores.

mod cached;
mod claim;
mod control;
mod crowd;
mod election;
mod limit;
mod once;
mod partitions;
mod register;
mod shapes;
mod windows;
