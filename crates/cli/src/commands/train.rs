//! `trainyard train`: a new run from a configuration, the quick start without one, or an earlier run resumed.

use anyhow::{Context, Result};
use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use trainyard_engine::config::Config;
use trainyard_engine::generate::{Sampling, generate};
use trainyard_engine::metrics::progress;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::{Control, Ending, Summary, train};

const QUICKSTART: &str = include_str!("../quickstart.toml");

/// Train a model: from a configuration, or without one as a quick start on the Rust sources of this machine.
#[derive(Parser)]
pub struct Args {
    /// A configuration in TOML (see `trainyard config docs`). Without one: the quick start.
    config: Option<PathBuf>,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Go on with an earlier run, from its newest whole checkpoint.
    #[arg(long, value_name = "RUN", conflicts_with = "config")]
    resume: Option<PathBuf>,
    /// Train on these files or folders instead of what the configuration names; can be given several times.
    #[arg(long, value_name = "PATH", conflicts_with = "resume")]
    data: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args, process_start: Instant) -> Result<ExitCode> {
    let note = |line: &str| eprintln!("{line}");
    let mut sets = args.sets.clone();
    if !args.data.is_empty() {
        let paths: Vec<String> = args.data.iter().map(|path| format!("{:?}", path.display().to_string())).collect();
        sets.insert(0, format!("data.train=[{}]", paths.join(", ")));
    }
    let mut session = match (&args.resume, &args.config) {
        (Some(folder), _) => Session::resume(folder, &sets, note)?,
        (None, Some(file)) => Session::create(&Config::load(Some(file), &sets)?, note)?,
        (None, None) => {
            let config = Config::parse(Path::new("quickstart.toml"), QUICKSTART, &sets)?;
            Session::create(&config, note)?
        }
    };
    print!("{}", session.resolved.to_toml());
    eprintln!("run folder: {}", session.folder.display());
    let stop = stop_on_signals()?;
    let mut display = progress::for_stderr();
    let control = Control { stop: &stop, process_start };
    let summary = train(&mut session, &mut *display, control)?;
    if summary.ending == Ending::Complete {
        sample(&session)?;
    }
    print_summary(&session, &summary);
    Ok(if summary.ending == Ending::Complete { ExitCode::SUCCESS } else { ExitCode::from(130) })
}

/// The first SIGINT or SIGTERM asks the run to stop; a second one ends the process at once.
fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // Order matters: the check of the flag comes before the flag is set.
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop)).context("signal handling")?;
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("signal handling")?;
    }
    Ok(stop)
}

fn sample(session: &Session) -> Result<()> {
    let prompt = "fn main() {";
    let tokens = session.tokenizer.encode(prompt).or_else(|_| session.tokenizer.encode("\n"))?;
    let mut out = tokens.clone();
    generate(&session.rank, &tokens, 120, Sampling::default(), &[], |token| {
        out.push(token);
        true
    })?;
    println!("\n--- sample ---\n{}\n--------------", session.tokenizer.decode(&out));
    Ok(())
}

fn print_summary(session: &Session, summary: &Summary) {
    println!("{summary:#?}\n{}", session.folder.display());
}
