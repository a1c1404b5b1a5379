//! `trainyard dash`: runs in the browser.

use crate::output::{note, print};
use anyhow::{Result, bail};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use trainyard_dashboard::run;
use trainyard_dashboard::server::{Options, Server};
use trainyard_engine::warning::warning;

/// Show runs in the browser, past and live ones, and compare them. The page is for reading only.
#[derive(clap::Args)]
pub struct Args {
    /// The folder of runs.
    #[arg(default_value = "runs")]
    runs: PathBuf,
    /// The address to listen on. Addresses other than the loopback need the token that is printed.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port. Unset: the first free one from 8724 on.
    #[arg(long)]
    port: Option<u16>,
    /// The token that requests must have: at least 16 letters, digits, - and _. Unset: none on the
    /// loopback, a random one elsewhere.
    #[arg(long)]
    token: Option<String>,
}

/// Runs the command until the process is ended.
pub fn run(args: &Args) -> Result<()> {
    let runs = folder_of_runs(&args.runs)?;
    let server = Server::bind(runs, &Options { host: args.host, port: args.port, token: args.token.clone() })?;
    print(format_args!("runs in {}: {}\n", runs.display(), server.url()))?;
    Ok(server.run()?)
}

/// The folder itself, or the one around it if it is a run.
fn folder_of_runs(folder: &Path) -> Result<&Path> {
    if !folder.is_dir() {
        bail!("there is no folder {}: name the folder that holds the runs", folder.display());
    }
    Ok(if run::is_run(folder) { around(folder) } else { folder })
}

fn around(run: &Path) -> &Path {
    run.parent().filter(|around| !around.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Shows the run in `folder`, and those beside it, while it trains. A server that cannot start does
/// not stop the training.
pub fn beside_training(folder: &Path) {
    let started = Server::bind(around(folder), &Options::default()).and_then(|server| {
        let url = server.url();
        server.spawn().map(|()| url)
    });
    match started {
        Ok(url) => {
            let name = folder.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
            note(&format!("dashboard    {url}#/run/{name}"));
        }
        Err(error) => note(&warning(format_args!("no dashboard: {error}"))),
    }
}
