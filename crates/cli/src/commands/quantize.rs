//! `trainyard quantize`: a trained model with weights of few bits.

use super::compress::{ModelArgs, TextArgs};
use crate::output::note;
use anyhow::{Context, Result, bail};
use serde_json::json;
use trainyard_compress::QuantiseMethod;
use trainyard_compress::smooth::EXPONENT;
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
    /// Scale columns so that inputs lose less in rounding, too; 8 bits for weights and inputs.
    Smoothquant,
}

/// The form of the files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Form {
    /// As transformers reads it: compressed-tensors, pack-quantized, or int-quantized with rounded
    /// inputs.
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
    /// Bits of a weight: 2, 3, 4 or 8. Unset: 4; 8 where inputs are rounded.
    #[arg(long)]
    bits: Option<u8>,
    /// Neighbours of a row that share a scale; 0: all of a row. Unset: 128; 0 where inputs are
    /// rounded.
    #[arg(long)]
    group: Option<usize>,
    /// Bits to which the inputs of layers are rounded, each row with a scale of its own: 8. Unset:
    /// inputs are not rounded; 8 with smoothquant.
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(u8).range(8..=8))]
    activations: Option<u8>,
    /// SmoothQuant: how much of the difficulty moves from inputs to weights, 0 to 1. Unset: 0.5.
    #[arg(long, value_name = "SHARE")]
    smoothing: Option<f32>,
    /// The form of the files.
    #[arg(long, value_enum, default_value_t = Form::CompressedTensors)]
    form: Form,
    #[command(flatten)]
    text: TextArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let smooth = args.method == Method::Smoothquant;
    let codes_inputs = smooth || args.activations.is_some();
    let (bits, group) = match codes_inputs {
        true => (args.bits.unwrap_or(8), args.group.unwrap_or(0)),
        false => (args.bits.unwrap_or(4), args.group.unwrap_or(128)),
    };
    if !PACKED_BITS.contains(&bits) {
        bail!("--bits {bits}: weights have 2, 3, 4 or 8 bits");
    }
    if codes_inputs && (bits, group) != (8, 0) {
        bail!(
            "--bits {bits} --group {group}: where inputs are rounded, weights have 8 bits and a scale per row (--bits 8 --group 0)"
        );
    }
    let smoothing = match args.smoothing {
        Some(_) if !smooth => bail!("--smoothing has no effect: it is for --method smoothquant"),
        Some(share) if !(0.0..=1.0).contains(&share) => {
            bail!("--smoothing {share} is out of range: it must be from 0 to 1")
        }
        share => share.unwrap_or(EXPONENT),
    };
    let device = args.model.device();
    let source = args.model.open(&device)?;
    let options = args.model.options(&source)?;
    let failed = || format!("cannot quantise {}", args.model.model.display());
    let format = PackedFormat { bits, group: Some(group).filter(|group| *group > 0), codes_inputs };
    let (method, name) = match args.method {
        Method::Rtn => (QuantiseMethod::Nearest, "rtn"),
        Method::Gptq => (QuantiseMethod::Gptq, "gptq"),
        Method::Awq => (QuantiseMethod::Awq, "awq"),
        Method::Smoothquant => (QuantiseMethod::SmoothQuant, "smoothquant"),
    };
    let mut tell = note;
    let pass = args.text.pass(&source, &device, options, &mut tell).with_context(failed)?.smoothing(smoothing);
    let done = pass.quantise(&args.model.out, method, format, args.form == Form::Dense).with_context(failed)?;
    let scales = match group {
        0 => "a scale per row".to_owned(),
        group => format!("groups of {group}"),
    };
    let inputs = if codes_inputs { "; inputs in 8 bits" } else { "" };
    let what = format!("{name}, {bits} bits, {scales}{inputs}");
    let activations = codes_inputs.then_some(8);
    let settings = json!({"method": name, "bits": bits, "group": group, "activations": activations});
    args.model.report(&source, &done, &what, settings)
}
