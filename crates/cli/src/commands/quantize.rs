//! `trainyard quantize`: a trained model with weights of few bits.

use super::compress::{ModelArgs, TextArgs};
use crate::output::note;
use anyhow::{Context, Result, bail};
use serde_json::json;
use trainyard_compress::QuantiseMethod;
use trainyard_model::weights::{PACKED_BITS, PackedFormat};

/// The choice of codes on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Method {
    /// Round to nearest; needs no text.
    Rtn,
    /// Round one column after another; later columns make up for the error.
    Gptq,
    /// Scale columns by the size of their inputs, then round to nearest.
    Awq,
}

/// The form of the files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Form {
    /// Packed as transformers reads it (compressed-tensors, pack-quantized).
    CompressedTensors,
    /// Floats that have the same values, for programs that know no packed weights.
    Dense,
}

/// Round the weights of a trained model's blocks to few bits; writes a Hugging Face folder that
/// transformers loads.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The choice of codes.
    #[arg(long, value_enum, default_value_t = Method::Gptq)]
    method: Method,
    /// Bits of a weight: 2, 3, 4 or 8.
    #[arg(long, default_value_t = 4)]
    bits: u8,
    /// Neighbours of a row that share a scale; 0: all of a row.
    #[arg(long, default_value_t = 128)]
    group: usize,
    /// The form of the files.
    #[arg(long, value_enum, default_value_t = Form::CompressedTensors)]
    form: Form,
    #[command(flatten)]
    text: TextArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !PACKED_BITS.contains(&args.bits) {
        bail!("--bits {}: weights have 2, 3, 4 or 8 bits", args.bits);
    }
    let device = args.model.device();
    let source = args.model.open(&device)?;
    let options = args.model.options(&source)?;
    let failed = || format!("cannot quantise {}", args.model.model.display());
    let format = PackedFormat { bits: args.bits, group: Some(args.group).filter(|group| *group > 0) };
    let (method, name) = match args.method {
        Method::Rtn => (QuantiseMethod::Nearest, "rtn"),
        Method::Gptq => (QuantiseMethod::Gptq, "gptq"),
        Method::Awq => (QuantiseMethod::Awq, "awq"),
    };
    let mut tell = note;
    let pass = args.text.pass(&source, &device, options, &mut tell).with_context(failed)?;
    let done = pass.quantise(&args.model.out, method, format, args.form == Form::Dense).with_context(failed)?;
    let scales = match args.group {
        0 => "a scale per row".to_owned(),
        group => format!("groups of {group}"),
    };
    let what = format!("{name}, {} bits, {scales}", args.bits);
    let settings = json!({"method": name, "bits": args.bits, "group": args.group});
    args.model.report(&source, &done, &what, settings)
}
