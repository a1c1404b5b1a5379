//! Output of the program: results on standard output, messages on standard error, formatted sizes,
//! tables of memory, chains of errors.

use anyhow::{Context, Result};
use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::path::Path;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;
use trainyard_base::format_bytes;
use trainyard_data::place_of;
use trainyard_engine::EngineError;
use trainyard_engine::warning::is_warning;

/// The options for the amount of output.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Verbosity {
    /// Show warnings, errors and the final result only.
    #[arg(long, short, conflicts_with = "verbose")]
    quiet: bool,
    /// Show everything: the configuration with every derived value and its reason, and at the end
    /// the tables of time and memory.
    #[arg(long, short)]
    verbose: bool,
}

impl Verbosity {
    /// True for `--quiet`.
    pub fn is_quiet(self) -> bool {
        self.quiet
    }

    /// True for `--verbose`.
    pub fn is_verbose(self) -> bool {
        self.verbose
    }

    /// Prints a message to standard error. Under `--quiet` it prints only warnings.
    pub fn note(self, line: &str) {
        if !self.quiet || is_warning(line) {
            note(line);
        }
    }

    /// The option that selects this verbosity, if there is one.
    pub fn option(self) -> Option<&'static str> {
        match self {
            Verbosity { quiet: true, .. } => Some("--quiet"),
            Verbosity { verbose: true, .. } => Some("--verbose"),
            _ => None,
        }
    }
}

/// Prints results. Unlike `print!`, it does not panic if the reader has closed the pipe.
pub fn print(text: impl Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).context("cannot write to standard output")
}

/// The text of a file that an option names.
pub fn read(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path);
    text.map_err(|error| anyhow::anyhow!("cannot read {}{}: {error}", path.display(), place_of(path, &error)))
}

/// Prints a message to standard error.
pub fn note(line: &str) {
    // A closed standard error is no reason to stop.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Shows the warnings of the libraries on standard error, as lines like the program's own.
/// `TRAINYARD_LOG` takes another filter, as `trainyard=debug`.
pub fn show_events() {
    let filter = EnvFilter::builder().with_env_var(LOG_FILTER).try_from_env();
    let filter = filter.unwrap_or_else(|_| EnvFilter::new("trainyard=warn"));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // It is set once, at the start of the program.
    let _ = subscriber.with_ansi(false).event_format(Line).try_init();
}

/// The variable with the filter of the libraries' events.
const LOG_FILTER: &str = "TRAINYARD_LOG";

/// An event as a line: its level, then its message.
struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        write!(line, "{level}: ")?;
        context.field_format().format_fields(line.by_ref(), event)?;
        writeln!(line)
    }
}

/// True if the error is only a reader that has closed our output (`trainyard config docs | head`).
pub fn reader_left(error: &anyhow::Error) -> bool {
    let broken = |cause: &std::io::Error| cause.kind() == std::io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(broken))
}

/// True if a rank failed while it ran, so that a restart from the last checkpoint may help.
pub fn is_fault(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.downcast_ref::<EngineError>().is_some_and(EngineError::is_fault))
}

/// The chain of an error, from the attempted action to the root cause. A cause that is already in
/// the text is not repeated.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// `1,234,567`
pub fn count(n: u64) -> String {
    // Exact up to 2^53, more than anything that is counted here.
    trainyard_base::format_count(n as f64)
}

/// A table of measured and predicted peak memory: rows `(purpose, measured, predicted)`, and the
/// total.
pub fn memory(rows: &[(&str, u64, u64)], total: (u64, u64)) -> String {
    let mut text = String::new();
    let mut line = |what: &str, measured: u64, predicted: u64| {
        let difference = match predicted {
            0 => "not predicted".to_owned(),
            _ => format!("{:+.1} %", 100.0 * (measured as f64 / predicted as f64 - 1.0)),
        };
        // Writing to a String cannot fail.
        let _ =
            writeln!(text, "  {what:<16} {:>11} {:>11}  {difference}", format_bytes(measured), format_bytes(predicted));
    };
    for (what, measured, predicted) in rows {
        line(what, *measured, *predicted);
    }
    line("together", total.0, total.1);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let io = std::io::Error::other("disk full");
        let error = anyhow::Error::from(io).context("cannot write `a`: disk full").context("exporting");
        assert_eq!(chain(&error), "exporting: cannot write `a`: disk full");
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert!(memory(&[("activations", 3 << 20, 2 << 20)], (1, 0)).contains("+50.0 %"));
    }
}
