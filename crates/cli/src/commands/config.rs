//! `trainyard config`: checks and explains configurations, and documents every key.

use crate::output::{count, print};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use trainyard_base::{format_bytes, lock};
use trainyard_data::{ImageIndex, IndexOptions, Tokenizer};
use trainyard_engine::config::{Config, DataFormat, Inputs, PRESETS, Resolved, TokenizerKind, documentation};
use trainyard_engine::predict::StepNeeds;
use trainyard_engine::session::inputs_for;
use trainyard_engine::shape::{batch_shape, model_notes, model_of, model_spec, rank_settings, strategy};
use trainyard_engine::{limit, periods};
use trainyard_model::{Model, preset};
use trainyard_program::Program;

/// The quick start's configuration.
pub const QUICKSTART: &str = include_str!("../quickstart.toml");

/// Check and explain configurations.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Check a configuration: print every derived value with its derivation and the step's memory,
    /// or all problems at once. Reads no text, and of images the names of their classes.
    ///
    /// If this machine has too little memory for it, that is reported but is no error: the
    /// configuration may be for another machine.
    Check(ConfigArgs),
    /// Print a configuration as resolved, usable as a file again; without FILE, the quick start's.
    Print(ConfigArgs),
    /// Print the documentation of every key, as Markdown.
    Docs,
    /// List the named model shapes.
    Presets,
}

/// A configuration on the command line.
#[derive(clap::Args)]
pub struct ConfigArgs {
    /// A configuration in TOML. Without one: the quick start.
    file: Option<PathBuf>,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
}

impl ConfigArgs {
    /// The configuration, resolved as far as possible without reading text.
    pub fn resolve(&self) -> Result<Resolved> {
        resolve(&load(self.file.as_deref(), &self.sets)?)
    }
}

/// Runs the command.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Check(args) => check(args),
        Command::Print(args) => print(args.resolve()?.to_toml()),
        Command::Docs => print(documentation()),
        Command::Presets => {
            print("preset              layers    dim  heads  kv heads  longest sequence\n")?;
            for name in PRESETS {
                let spec = preset(name)?;
                print(format_args!(
                    "{name:<18} {:>7} {:>6} {:>6} {:>9} {:>17}\n",
                    spec.layers, spec.dim, spec.heads, spec.kv_heads, spec.max_positions
                ))?;
            }
            Ok(())
        }
    }
}

/// Loads the file, or the quick start, with the settings over it.
pub fn load(file: Option<&Path>, sets: &[String]) -> Result<Config> {
    Ok(match file {
        Some(file) => Config::load(Some(file), sets)?,
        None => Config::parse(Path::new("quickstart.toml"), QUICKSTART, sets)?,
    })
}

/// Resolves a configuration for this machine, before any text is read.
pub fn resolve(config: &Config) -> Result<Resolved> {
    resolve_for(config, Inputs::of_this_machine())
}

/// As [`resolve`], for ranks described by `inputs`.
pub fn resolve_for(config: &Config, inputs: Inputs) -> Result<Resolved> {
    let mut inputs = inputs_for(config, inputs)?;
    let tokenizer = &config.tokenizer;
    inputs.tokenizer_vocabulary = match (&tokenizer.path, tokenizer.kind) {
        (Some(path), _) => {
            let loaded = Tokenizer::load(path).with_context(|| format!("tokenizer.path {}", path.display()))?;
            inputs.knows(&loaded);
            inputs.tokenizer_vocabulary
        }
        (None, Some(TokenizerKind::Bytes)) => Some(Tokenizer::bytes().vocab_size()),
        // The characters are known only after the text is read.
        (None, Some(TokenizerKind::Characters)) => None,
        (None, _) if config.model.path.is_some() => None,
        // The vocabulary may become smaller if the text has too few pairs.
        (None, _) => Some(tokenizer.vocab_size.unwrap_or(8192)),
    };
    if config.data.format == DataFormat::Images && config.model.vocab_size.is_none() && inputs.classes.is_none() {
        inputs.classes = classes(config, &inputs);
    }
    Ok(config.resolve(&inputs)?)
}

/// The classes of the images that `config` trains on; None if they cannot be listed, which a run
/// reports. Listed once, since plans resolve a configuration many times.
fn classes(config: &Config, inputs: &Inputs) -> Option<Vec<String>> {
    static LISTED: Mutex<BTreeMap<Vec<PathBuf>, Option<Vec<String>>>> = Mutex::new(BTreeMap::new());
    let of_model = inputs.pretrained.as_ref().and_then(|pretrained| pretrained.image.as_ref());
    if let Some(image) = of_model.filter(|image| !image.labels.is_empty()) {
        return Some(image.labels.clone());
    }
    let sources: Vec<PathBuf> = config.data.train.0.iter().map(|source| source.path.clone()).collect();
    let list = |sources: &Vec<PathBuf>| {
        ImageIndex::open(sources, &IndexOptions::default()).ok().map(|images| images.classes().to_vec())
    };
    let mut listed = lock(&LISTED);
    listed.entry(sources).or_insert_with_key(list).clone()
}

fn check(args: &ConfigArgs) -> Result<()> {
    let resolved = args.resolve()?;
    let mut refused = None;
    print(resolved.to_toml())?;
    print(format_args!("\nderived:\n{}", indented(&resolved.explain())))?;
    match plan(&resolved, 0)? {
        Some((model, programs, prediction)) => {
            let (spec, all) = (model_spec(&resolved)?, resolved.parallel.ranks);
            for line in model_notes(&resolved, &spec) {
                print(format_args!("\n{line}\n"))?;
            }
            limit::check(&resolved, &spec, 0, &prediction)?;
            // Another machine may have enough memory.
            refused = limit::check_machine(&resolved, &spec, 0, &prediction, all).err();
            let ranks = if resolved.parallel.ranks > 1 { " on each rank" } else { "" };
            let flops = prediction.cost.flops as f64 / 1e12;
            print(format_args!(
                "\n{} parameters; a step of {} tokens is {} instructions and {flops:.3} TFLOP{ranks}, and needs {}:\n",
                count(model.parameter_count() as u64),
                count(resolved.tokens_per_step()),
                programs[0].instructions.len(),
                format_bytes(prediction.memory.peak_total() as u64)
            ))?;
            for (purpose, bytes) in prediction.purposes() {
                print(format_args!("  {:<16} {:>11}\n", purpose.name(), format_bytes(bytes as u64)))?;
            }
        }
        None => {
            print("\nthe vocabulary is that of the text's characters, so the model's size is known once it is read\n")?
        }
    }
    match refused {
        None => print("\nthe configuration is valid\n"),
        Some(why) => {
            print(format_args!("\nthe configuration is valid, and cannot be trained on this machine: {why}\n"))
        }
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// The model, rank `rank`'s step program without and with a snapshot, and the needs of the run.
/// With a schedule of freezing it is the program of the period that computes the most. None while
/// the vocabulary is unknown.
pub fn plan(resolved: &Resolved, rank: u32) -> Result<Option<(Model, [Program; 2], StepNeeds)>> {
    if let trainyard_engine::config::ModelSource::Shape(shape) = &resolved.model
        && shape.vocab_size.is_none()
    {
        return Ok(None);
    }
    let spec = model_spec(resolved)?;
    let model = model_of(resolved, spec.clone(), rank)?;
    let batch = batch_shape(resolved, &model);
    let strategy = strategy(resolved, model.units().len())?;
    let mut lowered = periods::lower(resolved, &spec, &model, &strategy, rank)?;
    let prediction = lowered.predict(model_of(resolved, spec, rank)?, &batch, &rank_settings(resolved))?;
    let priced = lowered.programs.swap_remove(periods::dearest(&lowered.periods));
    Ok(Some((model, priced, prediction)))
}
