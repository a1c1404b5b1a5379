//! `trainyard bench gpu`: the speed of a GPU's kernels, in percent of its measured peaks.

use super::Precision;
use crate::output::print;
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use trainyard_tensor::Device;
use trainyard_tensor::bench::gpu::{Sizes, Timing, attention, experts, fp8, products, streaming};
use trainyard_tensor::cuda::driver::Product;
use trainyard_tensor::cuda::{AttentionForm, Cuda, peak};

/// Kernels on a GPU: products in the three forms of training, attention, and kernels bound by
/// memory. Results are checked before they are timed.
#[derive(clap::Args)]
pub struct GpuArgs {
    /// Number of the GPU, among those that the process sees.
    #[arg(long, value_name = "N", default_value_t = 0)]
    ordinal: usize,
    /// The kernels to time.
    #[arg(long, value_delimiter = ',', default_value = "products,attention,streaming")]
    only: Vec<What>,
    /// Type of the operands.
    #[arg(long, default_value = "bf16")]
    dtype: Precision,
    /// The instructions of attention. Default: as in training.
    #[arg(long, value_name = "FORM")]
    attention: Option<Form>,
    /// Seconds for each case.
    #[arg(long, default_value_t = 0.05)]
    seconds: f64,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

/// The values of `--only`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum What {
    /// Matrix products.
    Products,
    /// Products of the experts of a mixture, each on rows of its own, beside dense ones of as many
    /// operations.
    Experts,
    /// Attention, forward and backward.
    Attention,
    /// Kernels that are bound by memory.
    Streaming,
    /// 8-bit products, in percent of the fastest of them, and the rounding of their operands: Ada,
    /// Hopper and later.
    Fp8,
}

/// The values of `--attention`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Form {
    /// Products of a warp.
    Mma,
    /// Products of a warpgroup: Hopper.
    Wgmma,
}

impl From<Form> for AttentionForm {
    fn from(form: Form) -> AttentionForm {
        match form {
            Form::Mma => AttentionForm::Warps,
            Form::Wgmma => AttentionForm::Warpgroups,
        }
    }
}

/// Runs the command.
pub fn run(args: &GpuArgs) -> Result<()> {
    if !(0.0..=60.0).contains(&args.seconds) {
        bail!("--seconds {} must be from 0 to 60", args.seconds);
    }
    let cuda = Arc::new(Cuda::open(args.ordinal, 1).context("there is no GPU to measure")?);
    let peaks = peak::measure(&cuda)?;
    let device = Device::cuda(Arc::clone(&cuda), None);
    let (dtype, sizes) = (args.dtype.dtype(), Sizes::of_a_gpu());
    let asked = args.attention.map(AttentionForm::from);
    if let Some(form) = asked.filter(|form| !cuda.has_attention(*form)) {
        bail!("--attention {} is Hopper's alone, and this is {cuda:?}", form.name());
    }
    let (needed, capability) = (Product::FP8_CAPABILITY, cuda.properties().capability);
    if args.only.contains(&What::Fp8) && capability < needed {
        bail!(
            "--only fp8: products of eight bits begin with compute capability {}.{}, and this is {cuda:?}",
            needed.0,
            needed.1
        );
    }
    cuda.choose_attention(dtype, asked)?;
    let by = match cuda.attention() {
        Some(choice) => format!("{} ({})", choice.form.name(), choice.because),
        None => AttentionForm::MultiplyAdds.name().to_owned(),
    };
    if !args.json {
        print(format_args!(
            "{cuda:?}; measured peaks: f32 {:.1} TFLOP/s, bf16 {:.1}, f16 {:.1}, copies {:.1} GB/s\nattention by {by}\n\n",
            peaks.f32_flops / 1e12,
            peaks.bf16_flops / 1e12,
            peaks.f16_flops / 1e12,
            peaks.copy_bytes_per_s / 1e9,
        ))?;
    }
    let mut cases = Vec::new();
    for what in &args.only {
        let timings = match what {
            What::Products => products(&device, &peaks, &sizes, dtype, args.seconds)?,
            What::Experts => experts(&device, &peaks, &sizes, dtype, args.seconds)?,
            What::Attention => attention(&device, &peaks, &sizes, dtype, args.seconds)?,
            What::Streaming => streaming(&device, &peaks, &sizes, dtype, args.seconds)?,
            What::Fp8 => fp8(&device, &peaks, peak::fp8(&cuda)?, &sizes, args.seconds)?,
        };
        for timing in timings {
            if !args.json {
                print(line(&timing))?;
            }
            cases.push(case(&timing));
        }
    }
    if !args.json {
        return Ok(());
    }
    let line = json!({
        "device": cuda.properties().name,
        "architecture": cuda.properties().architecture(),
        "attention": by,
        "f32_tflops": peaks.f32_flops / 1e12,
        "bf16_tflops": peaks.bf16_flops / 1e12,
        "f16_tflops": peaks.f16_flops / 1e12,
        "copy_gb_per_s": peaks.copy_bytes_per_s / 1e9,
        "cases": cases,
    });
    print(format_args!("{line}\n"))
}

fn line(timing: &Timing) -> String {
    let (rate, unit) = match timing.flops {
        0.0 => (timing.bytes / timing.seconds / 1e9, "GB/s"),
        flops => (flops / timing.seconds / 1e12, "TFLOP/s"),
    };
    format!(
        "{:<64} {:>9.3} ms {rate:>9.1} {unit:<7} {:>5.1} %\n",
        timing.name,
        1e3 * timing.seconds,
        100.0 * timing.peak_share
    )
}

/// A timing as JSON, with the keys that `scripts/peers/torch_gpu.py` reads.
fn case(timing: &Timing) -> Value {
    let mut fields = Map::new();
    fields.insert("name".into(), timing.name.as_str().into());
    for (key, text) in [("kind", timing.kind), ("form", timing.form), ("dtype", timing.dtype.name())] {
        fields.insert(key.into(), text.into());
    }
    for (key, size) in &timing.sizes {
        fields.insert((*key).into(), (*size).into());
    }
    let rates = [("tflops", timing.flops / timing.seconds / 1e12), ("gb_per_s", timing.bytes / timing.seconds / 1e9)];
    let figures = [
        ("flops", timing.flops),
        ("bytes", timing.bytes),
        ("seconds", timing.seconds),
        ("peak_share", timing.peak_share),
    ];
    for (key, value) in figures.into_iter().chain(rates) {
        fields.insert(key.into(), value.into());
    }
    Value::Object(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_tensor::DType;

    #[test]
    fn a_case_has_what_its_peer_needs() {
        let timing = Timing {
            name: "attention, head 64".into(),
            kind: "attention",
            form: "forward",
            dtype: DType::BF16,
            sizes: vec![("batch", 2), ("seq", 1024)],
            flops: 3e12,
            bytes: 0.0,
            seconds: 2.0,
            peak_share: 0.25,
        };
        let case = case(&timing);
        assert_eq!((&case["seq"], &case["tflops"], &case["dtype"]), (&json!(1024), &json!(1.5), &json!("bf16")));
        assert!(line(&timing).contains("TFLOP/s  25.0 %"), "{}", line(&timing));
    }
}
