//! `trainyard completions` and `trainyard man`: shell completions and manual pages, generated from
//! the definitions of the command line.

use crate::output::print;
use anyhow::{Context, Result};
use clap_complete::Shell;
use std::path::PathBuf;

/// Print the completions of a shell.
///
/// docs/install.md says where each shell looks for them.
#[derive(clap::Args)]
pub struct Args {
    /// The shell.
    shell: Shell,
}

/// Print the manual page, or write the pages of all commands.
#[derive(clap::Args)]
pub struct ManArgs {
    /// Write `trainyard.1` and a page for each command into this folder, which is created.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Prints the completions of `command`, the whole command line.
pub fn run(args: &Args, mut command: clap::Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "trainyard", &mut script);
    print(String::from_utf8(script).context("the completions are no text")?)
}

/// Prints or writes the manual of `command`, the whole command line.
pub fn man(args: &ManArgs, command: clap::Command) -> Result<()> {
    let Some(folder) = &args.out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command.disable_help_subcommand(true)).render(&mut page)?;
        return print(String::from_utf8(page).context("the page is no text")?);
    };
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    clap_mangen::generate_to(command, folder).with_context(|| format!("cannot write into {}", folder.display()))
}
