//! `trainyard generate`: generates text from a trained model, and prints it as it is sampled.

use super::{BosArgs, CheckpointArgs, RuntimeArgs};
use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use trainyard_data::{ChatTemplate, Tokenizer};
use trainyard_engine::adapters::open_adapted;
use trainyard_engine::generate::{Sampling, generate};
use trainyard_engine::spans;
use trainyard_engine::trained::{Selection, Trained, open_trained};
use trainyard_model::hf;

/// Continue a prompt with a run or a Hugging Face folder; the text appears as it is sampled.
#[derive(clap::Args)]
pub struct Args {
    /// A run's folder, or a Hugging Face folder.
    model: PathBuf,
    /// A PEFT adapter of the model, which is a Hugging Face folder; may be given several times. The
    /// model is loaded once, and each adapter continues the prompt.
    #[arg(long = "adapter", value_name = "DIR")]
    adapters: Vec<PathBuf>,
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// The text to continue.
    #[arg(long)]
    prompt: String,
    /// The prompt is a message of the user: the chat template of the tokenizer writes it, and the
    /// answer alone is printed.
    #[arg(long)]
    chat: bool,
    /// The most tokens to generate.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Divide the logits by this; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f64,
    /// Choose among the K most likely tokens. Unset: among all.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Choose among the fewest most likely tokens whose probabilities add up to P. Unset: among
    /// all.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Seed of the random choices: the same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Go on after an end-of-text token: the tokenizer's, or one that config.json or
    /// generation_config.json names.
    #[arg(long)]
    ignore_eos: bool,
    #[command(flatten)]
    bos: BosArgs,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed };
    sampling.check()?;
    let runtime = args.runtime.resolve()?;
    if args.adapters.is_empty() {
        let trained = open_trained(&args.model, args.checkpoint.selection(), &runtime, note)
            .with_context(|| format!("cannot open the model {}", args.model.display()))?;
        return go_on(args, &trained, sampling);
    }
    if args.checkpoint.selection() != Selection::default() {
        bail!("--adapter: adapters are of a Hugging Face folder, which has no checkpoints");
    }
    let mut adapted = open_adapted(&args.model, &args.adapters, &runtime, note)
        .with_context(|| format!("cannot open the model {} with adapters", args.model.display()))?;
    for (number, folder) in args.adapters.iter().enumerate() {
        adapted.take(Some(number))?;
        print(format_args!("{}:\n", folder.display()))?;
        go_on(args, &adapted.trained, sampling)?;
    }
    Ok(())
}

/// Continues the prompt, and prints it.
fn go_on(args: &Args, trained: &Trained, sampling: Sampling) -> Result<()> {
    let tokenizer = args.bos.tokenizer(&args.model, trained)?;
    // Tokens that the tokenizer adds after a text are left out, because the text continues.
    let mut prompt = Vec::new();
    let mut stop = if args.ignore_eos { Vec::new() } else { stops(&args.model, trained, &tokenizer)? };
    if args.chat {
        let asked = asked(&tokenizer, &args.prompt)?;
        prompt.extend(tokenizer.encode(&asked.text).context("cannot tokenize the prompt")?);
        stop.extend(asked.stop.filter(|_| !args.ignore_eos));
    } else {
        prompt.extend(tokenizer.before());
        prompt.extend(tokenizer.encode(&args.prompt).context("cannot tokenize the prompt")?);
    }
    let prompt = spans::prompt(&trained.spec, &tokenizer, prompt)?;
    if prompt.is_empty() {
        bail!("--prompt is empty: give at least one character");
    }
    if !args.chat && trained.spec.encoder.is_none() {
        print(&args.prompt)?;
    }
    let mut decoder = tokenizer.stream_decoder();
    let mut written = Ok(());
    generate(&trained.rank, &prompt, args.tokens, sampling, &stop, |token| {
        written = print(match spans::sentinel_in_words(&trained.spec, &tokenizer, token) {
            Some(name) => name,
            None => decoder.push(token).to_string(),
        });
        written.is_ok()
    })?;
    written?;
    print(format_args!("{}\n", decoder.finish()))
}

/// A message as its chat template writes it.
struct Asked {
    text: String,
    /// The token that ends an answer, if the template ends it by one.
    stop: Option<u32>,
}

fn asked(tokenizer: &Tokenizer, message: &str) -> Result<Asked> {
    let Some(source) = tokenizer.chat_template() else {
        bail!("--chat: the tokenizer has no chat template (chat_template.jinja or tokenizer_config.json beside it)");
    };
    let template = ChatTemplate::new(&source, tokenizer)?;
    let prompt = template.prompt(message).map_err(|why| anyhow::anyhow!("--chat: {why}"))?;
    Ok(Asked { stop: template.end(tokenizer), text: prompt })
}

/// The tokens that end a text.
fn stops(model: &Path, trained: &Trained, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut stops: Vec<u32> = tokenizer.eos().into_iter().chain(trained.spec.eos_tokens.iter().copied()).collect();
    if let Some(text) = super::generation_config(model)? {
        stops.extend(hf::generation_eos(&text).with_context(|| format!("cannot use {}", model.display()))?);
    }
    Ok(stops)
}
