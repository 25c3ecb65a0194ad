//! `lockkeeper completions`: prints shell completions.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::args::Cli;
use crate::exit::ExitFailure;
use crate::output;

/// Print shell completions.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CompletionsArgs {
    /// For which shell
    pub shell: Shell,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper completions bash > /etc/bash_completion.d/lockkeeper
  lockkeeper completions zsh  > ~/.zfunc/_lockkeeper
  lockkeeper completions fish > ~/.config/fish/completions/lockkeeper.fish";

impl CompletionsArgs {
    pub fn execute(self) -> Result<(), ExitFailure> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "lockkeeper", &mut text);
        output::line(String::from_utf8_lossy(&text).trim_end())
    }
}
