//! PostgreSQL: the laws on real servers, for guard rows and for tables that check by themselves.
#![cfg(feature = "postgres")]

mod any_client;
mod apply;
mod changes;
mod common;
mod golden;
mod marks;
mod merge;
mod rights;
mod table;
mod values;
