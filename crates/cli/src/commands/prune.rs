//! `trainyard prune`: a trained model with weights that are zero, or with fewer blocks.

use super::compress::{ModelArgs, TextArgs};
use crate::output::note;
use anyhow::{Context, Result, bail};
use serde_json::json;
use trainyard_compress::depth::{influences, kept};
use trainyard_compress::{Pass, Pattern, PruneMethod};

/// The choice of weights on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Method {
    /// The smallest of each matrix; needs no text.
    Magnitude,
    /// The smallest of each row, times the norm of their inputs.
    Wanda,
    /// Those whose loss changes outputs least; the others are moved to make up for it.
    Sparsegpt,
}

impl Method {
    fn choice(self) -> PruneMethod {
        match self {
            Method::Magnitude => PruneMethod::Magnitude,
            Method::Wanda => PruneMethod::Wanda,
            Method::Sparsegpt => PruneMethod::SparseGpt,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Method::Magnitude => "magnitude",
            Method::Wanda => "wanda",
            Method::Sparsegpt => "sparsegpt",
        }
    }
}

/// Zero a share of the weights of a trained model's blocks, or drop blocks; writes a Hugging Face
/// folder.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The choice of weights.
    #[arg(long, value_enum, default_value_t = Method::Wanda)]
    method: Method,
    /// The share of weights that become zero: 0.5 is half.
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true, conflicts_with_all = ["pattern", "layers"])]
    sparsity: Option<f64>,
    /// Keep N of each M neighbours of a row: 2:4.
    #[arg(long, value_name = "N:M", conflicts_with = "layers")]
    pattern: Option<String>,
    /// Keep this many blocks, and drop those that change their input least.
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    #[command(flatten)]
    text: TextArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let pattern = match (args.sparsity, &args.pattern, args.layers) {
        (Some(share), ..) => Some(Pattern::share(share).context("--sparsity")?),
        (_, Some(text), _) => Some(text.parse::<Pattern>().context("--pattern")?),
        (.., Some(_)) => None,
        _ => bail!("nothing says how much to prune: give --sparsity 0.5, --pattern 2:4 or --layers N"),
    };
    let Some(pattern) = pattern else { return drop_blocks(args, args.layers.unwrap_or(0)) };
    let device = args.model.device();
    let source = args.model.open(&device)?;
    let options = args.model.options(&source)?;
    let failed = || format!("cannot prune {}", args.model.model.display());
    let mut tell = note;
    let pass = args.text.pass(&source, &device, options, &mut tell).with_context(failed)?;
    let done = pass.prune(&args.model.out, args.method.choice(), pattern).with_context(failed)?;
    let share = 100.0 * done.zeros as f64 / done.elements.max(1) as f64;
    let what = format!(
        "{}, {share:.1} % of the {} weights of its blocks are zero",
        args.method.name(),
        crate::output::count(done.elements)
    );
    let settings = json!({"method": args.method.name(), "sparsity": args.sparsity, "pattern": args.pattern});
    args.model.report(&source, &done, &what, settings)
}

/// Writes the model with fewer blocks.
fn drop_blocks(args: &Args, count: usize) -> Result<()> {
    let device = args.model.device();
    let source = args.model.open(&device)?;
    let options = args.model.options(&source)?;
    let failed = || format!("cannot prune {}", args.model.model.display());
    let calibration = args.text.calibration(&source, &device).with_context(failed)?;
    let Some(mut calibration) = calibration else {
        bail!("--layers looks at what blocks do: give it text with --calibration FILES")
    };
    // Before anything runs.
    kept(&vec![0.0; source.spec().layers], count)?;
    let evaluation = args.text.evaluation(&source, &device).with_context(failed)?;
    let all = influences(&source, &device, &mut calibration).with_context(failed)?;
    let kept = kept(&all, count)?;
    for (layer, influence) in all.iter().enumerate() {
        let fate = if kept.contains(&layer) { "kept" } else { "dropped" };
        note(&format!("block.{layer}: influence {influence:.4}, {fate}"));
    }
    let mut tell = note;
    let pass = Pass::new(&source, &device, options, &mut tell).evaluated(evaluation);
    let done = pass.keep(&args.model.out, &kept).with_context(failed)?;
    let what = format!("{count} of its {} blocks are kept", all.len());
    let settings = json!({"layers": count, "kept": kept, "influences": all});
    args.model.report(&source, &done, &what, settings)
}
