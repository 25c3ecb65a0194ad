//! The `lockkeeper` command: run something under a lock, hold one, see who has it, take it away.
//!
//! One file per subcommand in [`commands`]; every exit code in [`exit`]; everything about child processes in [`child`].

mod acquire;
mod advice;
mod args;
mod attempt_file;
mod child;
mod commands;
mod contention;
mod daily_warnings;
mod doctor;
mod duration;
mod exit;
mod exporter;
mod exposition;
mod job_metrics;
mod log;
mod message_writer;
mod missed_windows;
mod output;
mod replay;
mod report;
mod schedule;
mod signals;
mod store;
mod text;
mod windows;
mod work;

use std::process::exit as end;

use clap::Parser;

fn main() {
    let mut words = std::env::args_os().skip(1);
    // Subcommands of this program only. `run` starts the first two, many times an hour on some hosts: they do without the whole command line.
    match words.next().as_ref().and_then(|word| word.to_str()) {
        Some(child::shim::SUBCOMMAND) => end(child::shim::main(words)),
        Some(child::watchdog::SUBCOMMAND) => end(child::watchdog::main(words)),
        #[cfg(feature = "lab")]
        Some(lockkeeper_lab::WORKER_SUBCOMMAND) => end(lockkeeper_lab::worker_main()),
        _ => {}
    }
    // A parent may have left signals blocked, that of a child's end among them: then nothing would ever be noticed.
    let _ = nix::sys::signal::SigSet::empty().thread_set_mask();
    let code = match args::Cli::try_parse() {
        Ok(cli) => {
            cli.store.into_iter().for_each(|url| drop(store::BEFORE.set(url)));
            commands::run(cli.command)
        }
        Err(error) => exit::usage(error),
    };
    message_writer::STDOUT.flush(message_writer::FINAL_FLUSH);
    message_writer::STDERR.flush(message_writer::FINAL_FLUSH);
    #[cfg(feature = "postgres")]
    lockkeeper::postgres::wait_for_cancellations(std::time::Duration::from_secs(1));
    // Ends the process at once: nothing is left to do, and joining threads would only cost time.
    end(code)
}
