//! `trainyard merge`: one model of several that have the same shape, or one adapter of several.

use super::compress::check_out;
use super::export::{parse_size, stored_dtype};
use super::{Precision, generation_config};
use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use trainyard_base::format_bytes;
use trainyard_compress::{AdapterMerge, AdapterMethod, MergeMethod, MergeSettings, Source, merge, merge_adapters};
use trainyard_engine::checkpoint::Choice;
use trainyard_engine::trained::Runtime;
use trainyard_engine::warning::warning;
use trainyard_model::weights::ExportOptions;
use trainyard_tensor::Device;

/// The rule on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Method {
    /// The weighted mean.
    Soup,
    /// The arc from one model to another.
    Slerp,
    /// The base with the weighted sum of all changes from it.
    Task,
    /// The base with the changes that are large and agree in sign.
    Ties,
    /// The base with a random part of all changes, which grow to make up for the rest.
    Dare,
    /// Of adapters: their matrices side by side, which adds exactly the weighted sum.
    Cat,
    /// Of adapters of one rank: the sums of their matrices, each by the root of its weight.
    Linear,
    /// Of adapters: the weighted sum of their products, cut to a rank.
    Svd,
}

impl Method {
    /// The rule of adapters; None for a rule of models.
    fn of_adapters(self) -> Option<AdapterMethod> {
        match self {
            Method::Cat => Some(AdapterMethod::Cat),
            Method::Linear => Some(AdapterMethod::Linear),
            Method::Svd => Some(AdapterMethod::Svd),
            Method::Soup | Method::Slerp | Method::Task | Method::Ties | Method::Dare => None,
        }
    }
}

/// Make one model of several of the same shape; writes a Hugging Face folder. With cat, linear and
/// svd, make one PEFT adapter of several on one base.
#[derive(clap::Args)]
pub struct Args {
    /// Runs at their newest checkpoints, Hugging Face folders or GGUF files; PEFT folders for cat,
    /// linear and svd.
    #[arg(required = true, num_args = 1..)]
    models: Vec<PathBuf>,
    /// The folder to write. It must not exist, or be empty.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The rule by which tensors become one.
    #[arg(long, value_enum, default_value_t = Method::Soup)]
    method: Method,
    /// The model that all were tuned from, for task, ties and dare.
    #[arg(long, value_name = "MODEL")]
    base: Option<PathBuf>,
    /// The rank of the result of svd. Unset: the largest of the adapters'.
    #[arg(long)]
    rank: Option<usize>,
    /// A weight for each model: 0.7,0.3. Unset: 1 for each.
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true)]
    weights: Vec<f64>,
    /// The share of changes that ties and dare keep.
    #[arg(long, default_value_t = 0.5, allow_negative_numbers = true)]
    density: f64,
    /// The factor of changes, for task, ties and dare.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    scale: f64,
    /// Seed of dare.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The type of the weights. Unset: that of the first model.
    #[arg(long)]
    dtype: Option<Precision>,
    /// The most bytes of one file: "5GB", "512MiB".
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let weights = if args.weights.is_empty() { vec![1.0; args.models.len()] } else { args.weights.clone() };
    if let Some(method) = args.method.of_adapters() {
        return of_adapters(args, &AdapterMerge { method, weights, rank: args.rank });
    }
    if args.rank.is_some() {
        bail!("--rank is that of an adapter: it goes with --method svd");
    }
    let method = match args.method {
        Method::Cat | Method::Linear | Method::Svd => unreachable!("a rule of adapters"),
        Method::Soup => MergeMethod::Soup,
        Method::Slerp => MergeMethod::Slerp,
        Method::Task => MergeMethod::Task,
        Method::Ties => MergeMethod::Ties,
        Method::Dare => MergeMethod::Dare,
    };
    let (density, scale, seed) = (args.density, args.scale, args.seed);
    let settings = MergeSettings { method, weights, density, scale, seed };
    settings.check(args.models.len(), args.base.is_some())?;
    check_out(&args.out)?;
    let runtime = Runtime::of_this_machine();
    let device = Device::cpu(runtime.isa, runtime.threads, None);
    let open = |path: &Path| {
        Source::open(path, Choice::Latest, &device, note)
            .with_context(|| format!("cannot open the model {}", path.display()))
    };
    let models = args.models.iter().map(|path| open(path)).collect::<Result<Vec<_>>>()?;
    let base = args.base.as_deref().map(open).transpose()?;
    let [first, ..] = &models[..] else { bail!("a merge takes two models or more") };
    let words = |source: &Source| source.tokenizer().fingerprint().to_owned();
    for (other, path) in models.iter().zip(&args.models).skip(1).filter(|(other, _)| words(other) != words(first)) {
        note(&warning(format_args!(
            "the tokenizer of {} ({} tokens) is not that of {} ({} tokens), which the result gets",
            path.display(),
            other.tokenizer().vocab_size(),
            args.models[0].display(),
            first.tokenizer().vocab_size()
        )));
    }
    let (dtype, _) = stored_dtype(args.dtype, &args.models[0], first.trained())?;
    let generation = generation_config(&args.models[0])?;
    let options = ExportOptions { dtype, max_shard_bytes: args.max_shard_size, generation };
    let done = merge(&models, base.as_ref(), &settings, &args.out, options).context("cannot merge the models")?;
    first
        .tokenizer()
        .save_hugging_face(&args.out, first.spec().max_positions)
        .with_context(|| format!("cannot write the tokenizer to {}", args.out.display()))?;
    print(format_args!(
        "{} of {} models: {} of weights in {}\n",
        clap::ValueEnum::to_possible_value(&args.method).map_or(String::new(), |value| value.get_name().to_owned()),
        models.len(),
        format_bytes(done.bytes),
        args.out.display()
    ))?;
    done.files.iter().try_for_each(|file| print(format_args!("  {}\n", file.display())))
}

/// Merges adapters into one.
fn of_adapters(args: &Args, settings: &AdapterMerge) -> Result<()> {
    if args.base.is_some() || args.dtype.is_some() {
        bail!("--base and --dtype are of models: adapters name their base, and are written in f32");
    }
    check_out(&args.out)?;
    let done = merge_adapters(&args.models, settings, &args.out).context("cannot merge the adapters")?;
    let left_out = match settings.method {
        AdapterMethod::Svd => format!(", without {:.2} % of the norm of their sum", 100.0 * done.left_out),
        AdapterMethod::Cat | AdapterMethod::Linear => String::new(),
    };
    print(format_args!(
        "{} of {} adapters: rank {}{left_out}, in {}\n",
        clap::ValueEnum::to_possible_value(&args.method).map_or(String::new(), |value| value.get_name().to_owned()),
        args.models.len(),
        done.rank,
        args.out.display()
    ))?;
    done.files.iter().try_for_each(|file| print(format_args!("  {}\n", file.display())))
}
