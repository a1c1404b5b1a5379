//! `trainyard export`: a trained model as a Hugging Face folder or a GGUF file.

use super::{CheckpointArgs, Precision};
use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use trainyard_base::format_bytes;
use trainyard_data::Tokenizer;
use trainyard_engine::EngineError;
use trainyard_engine::config::{ByteSize, ConfigValue};
use trainyard_engine::pretrained::{base_of, config_text};
use trainyard_engine::session::files;
use trainyard_engine::shape;
use trainyard_engine::trained::{Runtime, Trained, open_trained};
use trainyard_model::Model;
use trainyard_model::gguf::{GgufOptions, Quantisation, export_gguf};
use trainyard_model::weights::{Encoding, ExportOptions, StoredDType, export, export_adapter};
use trainyard_tensor::DType;

/// Write a run's model as a Hugging Face folder that transformers loads (weights, config.json,
/// tokenizer), or as one GGUF file for llama.cpp.
#[derive(clap::Args)]
pub struct Args {
    /// A run's folder, a Hugging Face folder, or a GGUF file.
    model: PathBuf,
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// The folder to write, or the .gguf file.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// The form of what is written. Unset: gguf if --out ends with .gguf, else hugging-face.
    #[arg(long)]
    format: Option<Format>,
    /// Round matrices to blocks of 32 with a scale, in a GGUF file.
    #[arg(long, value_name = "KIND", conflicts_with_all = ["dtype", "adapter"])]
    quantize: Option<Blocks>,
    /// Write no tokenizer into a GGUF file.
    #[arg(long)]
    no_tokenizer: bool,
    /// Write the run's adapters alone, as a PEFT folder. Without this they are merged into the
    /// weights.
    #[arg(long, conflicts_with_all = ["dtype", "max_shard_size"])]
    adapter: bool,
    /// The type of the weights. Unset: the precision of the run, or the type in a Hugging Face
    /// folder's config.json.
    #[arg(long)]
    dtype: Option<Precision>,
    /// The most bytes of one file: "5GB", "512MiB".
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
}

/// The form of what is written.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    HuggingFace,
    Gguf,
}

/// The kinds of blocks that are written.
#[derive(Clone, Copy, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Blocks {
    #[value(name = "q8_0")]
    Q8,
    #[value(name = "q5_1")]
    Q5One,
    #[value(name = "q5_0")]
    Q5,
    #[value(name = "q4_1")]
    Q4One,
    #[value(name = "q4_0")]
    Q4,
}

impl Blocks {
    fn kind(self) -> Quantisation {
        match self {
            Blocks::Q8 => Quantisation::Q8_0,
            Blocks::Q5One => Quantisation::Q5_1,
            Blocks::Q5 => Quantisation::Q5_0,
            Blocks::Q4One => Quantisation::Q4_1,
            Blocks::Q4 => Quantisation::Q4_0,
        }
    }
}

pub fn parse_size(text: &str) -> Result<u64, String> {
    match ByteSize::from_value(&toml::Value::String(text.to_owned())) {
        Ok(ByteSize(0)) => Err("0 bytes hold nothing".to_owned()),
        Ok(ByteSize(bytes)) => Ok(bytes),
        Err(why) => Err(why),
    }
}

/// The type in the `config.json` of a Hugging Face folder; f32 if it names none, as in
/// transformers, and of a GGUF file.
fn dtype_of(model: &Path) -> Result<DType> {
    let text = config_text(model)?;
    let config: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", model.join("config.json").display()))?;
    let named = ["dtype", "torch_dtype"].iter().find_map(|key| config.get(key)?.as_str());
    Ok(match named {
        Some("bfloat16") => DType::BF16,
        Some("float16") => DType::F16,
        _ => DType::F32,
    })
}

/// The type of the weights of a folder that is written of `model`, and the reason in words.
pub fn stored_dtype(
    asked: Option<Precision>,
    model: &Path,
    trained: Option<&Trained>,
) -> Result<(DType, &'static str)> {
    Ok(match (asked, trained.and_then(|trained| trained.run.as_ref())) {
        (Some(dtype), _) => (dtype.dtype(), ""),
        (None, Some(run)) => (shape::dtype_of(run.config.precision.compute), ", as the run computes"),
        (None, None) => (dtype_of(model)?, ", as config.json says"),
    })
}

/// Writes the adapters of a run.
fn adapter(args: &Args, trained: &Trained) -> Result<()> {
    let of_run = trained.run.as_ref().and_then(|run| run.config.model.path.clone());
    let base = of_run.map_or_else(|| base_of(&args.model), Ok)?;
    let files = export_adapter(&args.out, trained.rank.model(), &base.display().to_string(), |id| trained.values(id))
        .with_context(|| format!("cannot write an adapter to {}", args.out.display()))?;
    let step = trained.run.as_ref().map_or(String::new(), |run| format!(" ({})", run.weights_in_words()));
    print(format_args!("{}{step}: adapters for {} in {}\n", args.model.display(), base.display(), args.out.display()))?;
    for file in &files {
        print(format_args!("  {}\n", file.display()))?;
    }
    Ok(())
}

/// Writes a GGUF file.
fn gguf(args: &Args, trained: &Trained) -> Result<()> {
    let (dtype, because) = stored_dtype(args.dtype, &args.model, Some(trained))?;
    let encoding = match (args.quantize, dtype) {
        (Some(blocks), _) => Encoding::Blocks(blocks.kind()),
        (None, DType::BF16) => Encoding::Float(StoredDType::BF16),
        (None, DType::F16) => Encoding::Float(StoredDType::F16),
        (None, _) => Encoding::Float(StoredDType::F32),
    };
    let name = args.model.file_stem().unwrap_or(args.model.as_os_str()).to_string_lossy();
    let tokenizer = trained.tokenizer.as_ref().filter(|_| !args.no_tokenizer).map(Tokenizer::hugging_face_json);
    let options = GgufOptions { encoding, name: &name, tokenizer: tokenizer.as_deref() };
    let values = |unit: usize, out: &mut [f32]| -> Result<(), EngineError> { trained.merged_unit(unit, out) };
    let model = Model::new(trained.spec.clone())?;
    let (exported, odd) = export_gguf(&args.out, &model, &options, values)
        .with_context(|| format!("cannot export to {}", args.out.display()))?;
    odd.iter().for_each(|line| note(line));
    let step = trained.run.as_ref().map_or(String::new(), |run| format!(" ({})", run.weights_in_words()));
    print(format_args!(
        "{}{step}: {} of weights in {}{}, {} in {}\n",
        args.model.display(),
        format_bytes(exported.bytes),
        encoding.name(),
        if args.quantize.is_some() { "" } else { because },
        if tokenizer.is_some() { "tokenizer" } else { "no tokenizer" },
        args.out.display()
    ))
}

/// Checks the options that belong to one format.
fn check_format(args: &Args) -> Result<Format> {
    let is_gguf = args.out.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let format = args.format.unwrap_or(if is_gguf { Format::Gguf } else { Format::HuggingFace });
    match format {
        Format::HuggingFace if args.quantize.is_some() => {
            bail!("--quantize rounds to the blocks of GGUF files: give --format gguf, or use `trainyard quantize`")
        }
        Format::HuggingFace if args.no_tokenizer => bail!("--no-tokenizer is of GGUF files: give --format gguf"),
        Format::Gguf if args.adapter => bail!("--adapter writes a PEFT folder: leave --format gguf out"),
        Format::Gguf if args.out.is_dir() => {
            bail!("{} is a folder, and a GGUF file is one file: give --out NAME.gguf", args.out.display())
        }
        Format::Gguf if !is_gguf => {
            bail!("{} does not end with .gguf, by which files of the format are known", args.out.display())
        }
        _ => Ok(format),
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let format = check_format(args)?;
    if args.out.join(files::CONFIG).exists() {
        bail!("{} is the folder of a run: give --out a folder of its own", args.out.display());
    }
    if let (Ok(model), Ok(out)) = (args.model.canonicalize(), args.out.canonicalize())
        && model == out
    {
        bail!("{} is the model itself, and would be replaced: give --out a folder of its own", args.out.display());
    }
    // The f32 masters are exported, whatever the precision of the run.
    let runtime = Runtime { dtype: Some(DType::F32), ..Runtime::of_this_machine() };
    let trained = open_trained(&args.model, args.checkpoint.selection(), &runtime, note)
        .with_context(|| format!("cannot open the model {}", args.model.display()))?;
    if args.adapter {
        return adapter(args, &trained);
    }
    if format == Format::Gguf {
        return gguf(args, &trained);
    }
    let (dtype, because) = stored_dtype(args.dtype, &args.model, Some(&trained))?;
    let generation = super::generation_config(&args.model)?;
    let options = ExportOptions { dtype, max_shard_bytes: args.max_shard_size, generation };
    let values = |unit: usize, out: &mut [f32]| -> Result<(), EngineError> { trained.merged_unit(unit, out) };
    let exported = export(&args.out, &Model::new(trained.spec.clone())?, options, values)
        .with_context(|| format!("cannot export to {}", args.out.display()))?;
    if let Some(tokenizer) = &trained.tokenizer {
        tokenizer
            .save_hugging_face(&args.out, trained.spec.max_positions)
            .with_context(|| format!("cannot write the tokenizer to {}", args.out.display()))?;
        let add_bos = trained.run.as_ref().and_then(|run| run.config.tokenizer.add_bos);
        if tokenizer.clone().with_bos(add_bos)?.before() != tokenizer.before() {
            let now = tokenizer.around_in_words().unwrap_or_else(|| "begins texts with no token".to_owned());
            note(&format!(
                "the run had a tokenizer.add_bos of its own, and the exported tokenizer is as it came: it {now}"
            ));
        }
    }
    let step = trained.run.as_ref().map_or(String::new(), |run| format!(" ({})", run.weights_in_words()));
    print(format_args!(
        "{}{step}: {} of weights in {}{because}, {} in {}\n",
        args.model.display(),
        format_bytes(exported.bytes),
        dtype.name(),
        if trained.tokenizer.is_some() { "tokenizer" } else { "preprocessing of images" },
        args.out.display()
    ))?;
    for file in &exported.files {
        print(format_args!("  {}\n", file.display()))?;
    }
    Ok(())
}
