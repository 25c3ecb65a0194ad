//! The recipes, by real processes that are killed and stopped, on real stores.

mod control;
mod crowd;
mod election;
mod limit;
mod once;
mod register;
mod windows;
