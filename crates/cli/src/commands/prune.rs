//! `trainyard prune`: a trained model with weights that are zero, or with fewer blocks, channels
//! and heads.

use super::compress::{ModelArgs, TextArgs};
use crate::output::{count, note};
use anyhow::{Context, Result, bail};
use serde_json::json;
use trainyard_compress::{Pass, Pattern, PruneMethod, Smaller, Survey, Widths};

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

/// Zero a share of the weights of a trained model's blocks, or drop blocks, channels and heads;
/// writes a Hugging Face folder.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The choice of weights.
    #[arg(long, value_enum, default_value_t = Method::Wanda, conflicts_with_all = STRUCTURES)]
    method: Method,
    /// The share of weights that become zero: 0.5 is half.
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true, conflicts_with = "pattern", conflicts_with_all = STRUCTURES)]
    sparsity: Option<f64>,
    /// Keep N of each M neighbours of a row: 2:4.
    #[arg(long, value_name = "N:M", conflicts_with_all = STRUCTURES)]
    pattern: Option<String>,
    /// Keep this many blocks, and drop those that change their input least.
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Keep this many channels in each MLP, and drop those that add least to its output.
    #[arg(long, value_name = "N")]
    ffn: Option<usize>,
    /// Keep this many query heads in each block, and drop those that add least to its output.
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Keep this many channels of the residual stream, and drop those that are smallest behind
    /// norms.
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,
    #[command(flatten)]
    text: TextArgs,
}

/// The options that drop whole parts of a model. They go with each other.
const STRUCTURES: [&str; 4] = ["layers", "ffn", "heads", "hidden"];

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let widths = Widths { layers: args.layers, ffn: args.ffn, heads: args.heads, hidden: args.hidden };
    let pattern = match (args.sparsity, &args.pattern) {
        (Some(share), _) => Pattern::share(share).context("--sparsity")?,
        (_, Some(text)) => text.parse::<Pattern>().context("--pattern")?,
        _ if widths != Widths::default() => return narrow(args, widths),
        _ => bail!(
            "nothing says how much to prune: give --sparsity 0.5, --pattern 2:4, --layers N, --ffn N, --heads N or \
             --hidden N"
        ),
    };
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

/// Writes the model with fewer blocks, channels and heads.
fn narrow(args: &Args, widths: Widths) -> Result<()> {
    let device = args.model.device();
    let source = args.model.open(&device)?;
    let options = args.model.options(&source)?;
    let failed = || format!("cannot prune {}", args.model.model.display());
    // Before anything runs.
    widths.check(source.spec()).with_context(failed)?;
    let Some(mut calibration) = args.text.calibration(&source, &device).with_context(failed)? else {
        bail!(
            "--layers, --ffn, --heads and --hidden look at what the parts of a model do: give it text with \
             --calibration FILES"
        )
    };
    let evaluation = args.text.evaluation(&source, &device).with_context(failed)?;
    let survey = Survey::of(&source, &device, &mut calibration).with_context(failed)?;
    drop(calibration);
    let kept = widths.choose(source.spec(), &survey).with_context(failed)?;
    if widths.layers.is_some() {
        for (layer, block) in survey.blocks.iter().enumerate() {
            let fate = if kept.layers.contains(&layer) { "kept" } else { "dropped" };
            note(&format!("block.{layer}: influence {:.4}, {fate}", block.influence));
        }
    }
    let smaller = Smaller::new(&source, &survey, kept).with_context(failed)?;
    let mut tell = note;
    let pass = Pass::new(&source, &device, options, &mut tell).evaluated(evaluation);
    let done = pass.keep(&args.model.out, &smaller).with_context(failed)?;
    let (Some(before), Some(after)) = (source.model().spec(), smaller.model().spec()) else {
        bail!("a model without a description cannot be pruned")
    };
    let parts = [
        (widths.layers, before.layers, "blocks"),
        (widths.ffn, before.ffn_dim, "channels of MLPs"),
        (widths.heads, before.heads, "heads"),
        (widths.hidden, before.dim, "channels of the residual stream"),
    ];
    let parts = parts.iter().filter_map(|(kept, all, what)| Some(format!("{} of its {all} {what}", (*kept)?)));
    let parameters = [source.model(), smaller.model()].map(|model| count(model.parameter_count() as u64));
    let what = format!(
        "{} are kept, {} of its {} parameters",
        parts.collect::<Vec<_>>().join(", "),
        parameters[1],
        parameters[0]
    );
    let influences: Vec<f64> = survey.blocks.iter().map(|block| block.influence).collect();
    let settings = json!({
        "layers": after.layers,
        "kept": smaller.kept().layers,
        "influences": influences,
        "ffn": after.ffn_dim,
        "heads": after.heads,
        "kv_heads": after.kv_heads,
        "hidden": after.dim,
    });
    args.model.report(&source, &done, &what, settings)
}
