//! `trainyard bench`: measures the speed of this machine, in percent of its measured peak.

use super::Precision;
use super::bench_gpu::{self, GpuArgs};
use super::bubbles::{self, BubblesArgs};
use super::collectives::{self, CollectivesArgs};
use super::largest::{self, LargestArgs};
use super::layouts::{self, LayoutsArgs};
use crate::output::{count, memory, note, print};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;
use trainyard_base::format_bytes;
use trainyard_engine::bench::{PurposeMemory, StepReport, steps};
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::trained::Runtime;
use trainyard_tensor::bench::attention::{BenchError, Case, Measured, measure as time_attention};
use trainyard_tensor::bench::gemm::{LAYERS, Timing, geometric_mean, time_int8, time_layer};
use trainyard_tensor::cpu::peak::{self, Peaks};
use trainyard_tensor::cpu::{Cpu, Isa};
use trainyard_tensor::{DType, bf16, f16};

/// Measure the speed of this machine.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Whole training steps on random tokens.
    Train(TrainArgs),
    /// Matrix products in the three forms that training needs, and attention, forward and backward.
    Kernels(KernelsArgs),
    /// Peak memory against its prediction: three models, three checkpointing modes.
    Memory(MemoryArgs),
    Largest(LargestArgs),
    /// Collectives between ranks, in percent of plain copies; fits latency and bandwidth.
    Collectives(CollectivesArgs),
    Bubbles(BubblesArgs),
    Layouts(LayoutsArgs),
    Gpu(GpuArgs),
}

/// Arguments of `bench train`.
#[derive(clap::Args)]
pub struct TrainArgs {
    /// A named model shape (see `trainyard config presets`).
    #[arg(long, default_value = "gpt2-124m")]
    preset: String,
    /// Rows of the embedding; 50304 is GPT-2's vocabulary, padded.
    #[arg(long, default_value_t = 50304)]
    vocab_size: usize,
    /// Sequences of a micro-batch.
    #[arg(long, default_value_t = 4)]
    rows: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 512)]
    length: usize,
    /// The number format of matrix products.
    #[arg(long, visible_alias = "precision", default_value = "bf16")]
    dtype: Precision,
    /// Timed steps.
    #[arg(long, default_value_t = 5)]
    pub(super) steps: u64,
    /// Micro-batches of a step.
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// The activation checkpointing of the blocks: none, selective, full.
    #[arg(long, value_name = "MODE", default_value = "none")]
    checkpointing: String,
    /// Set a key of the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Print one JSON line.
    #[arg(long)]
    pub(super) json: bool,
}

/// Arguments of `bench kernels`.
#[derive(clap::Args)]
pub struct KernelsArgs {
    /// Rows of the products.
    #[arg(long, value_delimiter = ',', default_value = "1024,4096")]
    tokens: Vec<usize>,
    /// Types of the operands.
    #[arg(long, value_delimiter = ',', default_value = "bf16,f32")]
    dtype: Vec<Precision>,
    /// Seconds for each case, which runs at least three times.
    #[arg(long, default_value_t = 0.2)]
    seconds: f64,
    /// The fastest instruction set that kernels may use.
    #[arg(long, default_value = "auto")]
    isa: String,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

/// Arguments of `bench memory`.
#[derive(clap::Args)]
pub struct MemoryArgs {
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(command: &Command, process_start: Instant) -> Result<()> {
    match command {
        Command::Train(args) => train(args, process_start),
        Command::Kernels(args) => kernels(args),
        Command::Memory(args) => memory_table(args),
        Command::Largest(args) => largest::run(args, process_start),
        Command::Collectives(args) => collectives::run(args),
        Command::Bubbles(args) => bubbles::run(args),
        Command::Layouts(args) => layouts::run(args),
        Command::Gpu(args) => bench_gpu::run(args),
    }
}

fn train(args: &TrainArgs, process_start: Instant) -> Result<()> {
    let report = measure(args, process_start)?;
    if args.json { print(format_args!("{}\n", serde_json::to_string(&report)?)) } else { show(args, &report) }
}

/// Prints the report of a step.
pub(super) fn show(args: &TrainArgs, report: &StepReport) -> Result<()> {
    print(format_args!(
        "{}, {} parameters, {} x {} x {} tokens, {}, {} on {} threads\n\n",
        args.preset,
        count(report.parameters),
        args.accumulation,
        args.rows,
        args.length,
        report.dtype,
        report.isa,
        report.threads
    ))?;
    if report.replayed {
        print(format_args!("launches      forwards and backwards as one CUDA graph\n"))?;
    }
    print(format_args!(
        "step          {:.4} s (median of {})\nspeed         {} tokens/s\n\
         model FLOPs   {:.3} TFLOP/s, {} the measured peak of {:.3}{}\n\
         first step    done {:.2} s after the program's start, {:.2} s of processor time in the system\nwaiting       {:.3} ms a step for its batch\n\
         peak RSS      {}\nloss          {:.4}\n\n",
        report.step_s,
        report.steps,
        count(report.tokens_per_s as u64),
        report.tflops,
        report.mfu.map_or("more than".to_owned(), |mfu| format!("{:.1} % of", 100.0 * mfu)),
        report.peak_tflops,
        if report.mfu.is_none() { ": the machine was busy during that measurement" } else { "" },
        report.first_step_s,
        report.first_step_system_s,
        1e3 * report.data_wait_s,
        format_bytes(report.peak_rss_bytes),
        report.loss
    ))?;
    if report.host_peak_bytes > 0 {
        let [measured, predicted] = [report.host_peak_bytes, report.host_predicted_bytes].map(format_bytes);
        print(format_args!("on the host   {measured} of pinned memory, {predicted} predicted\n\n"))?;
    }
    if report.disk_bytes > 0 {
        print(format_args!("on disk       {}\n\n", format_bytes(report.disk_bytes)))?;
    }
    let rows: Vec<_> = report.memory.iter().map(|m| (m.purpose, m.measured, m.predicted)).collect();
    let total = (report.mem_peak_bytes, report.mem_predicted_bytes);
    print(format_args!("memory             measured   predicted\n{}", memory(&rows, total)))?;
    print(format_args!("held with what is kept for reuse: {}\n\n", format_bytes(report.mem_reserved_bytes)))?;
    print("kernels of one step                   calls         ms     GFLOP/s     GB/s\n")?;
    for kernel in &report.kernels {
        print(format_args!(
            "  {:<34} {:>6} {:>10.2} {:>11.1} {:>8.1}\n",
            kernel.name,
            kernel.calls,
            1e3 * kernel.seconds,
            kernel.gflops,
            kernel.gbytes
        ))?;
    }
    Ok(())
}

fn measure(args: &TrainArgs, process_start: Instant) -> Result<StepReport> {
    Ok(steps(&configuration(args, &[])?, args.steps, process_start)?)
}

/// The configuration of steps on random tokens, with `more` settings below those given by hand.
pub(super) fn configuration(args: &TrainArgs, more: &[String]) -> Result<Resolved> {
    let string = |text: &str| toml::Value::String(text.to_owned());
    let dtype = args.dtype.dtype();
    let mut sets = vec![
        format!("model.preset={}", string(&args.preset)),
        format!("model.vocab_size={}", args.vocab_size),
        "training.steps=1".to_owned(),
        format!("training.micro_batch_size={}", args.rows),
        format!("training.accumulation_steps={}", args.accumulation),
        format!("training.sequence_length={}", args.length),
        format!("precision.compute={}", string(dtype.name())),
        format!("activation_checkpointing.mode={}", string(&args.checkpointing)),
    ];
    sets.extend(more.iter().chain(&args.sets).cloned());
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Ok(Config::parse(Path::new("bench"), "", &sets)?.resolve(&inputs)?)
}

fn kernels(args: &KernelsArgs) -> Result<()> {
    if args.tokens.contains(&0) {
        bail!("--tokens 0 is an empty product");
    }
    if !(0.0..=60.0).contains(&args.seconds) {
        bail!("--seconds {} must be from 0 to 60", args.seconds);
    }
    let isa = Isa::choose(&args.isa).context("--isa")?;
    let cpu = Cpu::new(isa, Runtime::of_this_machine().threads);
    let peaks = peak::measure(&cpu);
    if !args.json {
        print(format_args!(
            "{} on {} threads; measured peaks: f32 {:.1} GFLOP/s, bf16 {:.1} GFLOP/s ({:?}), int8 {:.1} GFLOP/s ({:?}), copies {:.1} GB/s\n\n",
            peaks.isa,
            peaks.threads,
            peaks.f32_flops / 1e9,
            peaks.bf16_flops / 1e9,
            peaks.bf16_instruction,
            peaks.int8_flops / 1e9,
            peaks.int8_instruction,
            peaks.copy_bytes_per_s / 1e9
        ))?;
    }
    let mut cases = Vec::new();
    for dtype in &args.dtype {
        products(args, &cpu, &peaks, *dtype, &mut cases)?;
        attention(args, &cpu, &peaks, *dtype, &mut cases)?;
    }
    if args.json {
        let line = json!({"isa": isa.name(), "threads": peaks.threads, "cases": cases});
        print(format_args!("{line}\n"))?;
    }
    Ok(())
}

/// Times every product of `dtype`, prints it in percent of the peak, and appends it to `cases`.
fn products(args: &KernelsArgs, cpu: &Cpu, peaks: &Peaks, dtype: Precision, cases: &mut Vec<Value>) -> Result<()> {
    let mut all = Vec::new();
    for &tokens in &args.tokens {
        for layer in LAYERS {
            let mut timings = time_layer(cpu, peaks, dtype.dtype(), layer, tokens, args.seconds)?;
            if dtype == Precision::Bf16 {
                timings.extend(time_int8(cpu, peaks, layer, tokens, args.seconds)?);
            }
            for timing in timings {
                if timing.percent_of_peak > 100.0 {
                    bail!(
                        "{timing}: more than the measured peak, which cannot be; was the machine busy with something else?"
                    );
                }
                if !args.json {
                    print(format_args!("{timing}\n"))?;
                }
                cases.push(json!({
                    "name": format!("{} {tokens} {} {}", layer.name, timing.form.name(), timing.type_name()),
                    "kind": "product",
                    "form": timing.form.name(),
                    "dtype": timing.type_name(),
                    "tokens": tokens,
                    "inputs": layer.inputs,
                    "outputs": layer.outputs,
                    "flops": 2.0 * tokens as f64 * layer.inputs as f64 * layer.outputs as f64,
                    "seconds": timing.seconds,
                    "tflops": timing.gflops / 1e3,
                    "peak_share": timing.percent_of_peak / 100.0,
                }));
                all.push(timing);
            }
        }
    }
    if !args.json {
        let (codes, wide): (Vec<Timing>, Vec<Timing>) = all.into_iter().partition(|timing| timing.dtype == DType::U8);
        for timings in [wide, codes] {
            let Some(first) = timings.first() else { continue };
            let (name, mean) = (first.type_name(), geometric_mean(&timings));
            print(format_args!("{name} products: geometric mean {mean:.1} % of the measured peak\n"))?;
        }
        print("\n")?;
    }
    Ok(())
}

/// Times attention of `dtype`, forward and backward, prints it and appends it to `cases`.
fn attention(args: &KernelsArgs, cpu: &Cpu, peaks: &Peaks, dtype: Precision, cases: &mut Vec<Value>) -> Result<()> {
    for case in Case::all() {
        let timed: Result<Measured, BenchError> = match dtype {
            Precision::F32 => time_attention::<f32>(cpu, peaks, &case, args.seconds),
            Precision::Bf16 => time_attention::<bf16>(cpu, peaks, &case, args.seconds),
            Precision::F16 => time_attention::<f16>(cpu, peaks, &case, args.seconds),
        };
        let timed = timed?;
        for (index, form) in ["forward", "backward"].into_iter().enumerate() {
            let (tflops, share) = (timed.tflops()[index], timed.peak_shares()[index]);
            if share > 1.0 {
                bail!(
                    "attention {} {form}: {:.1} % of the measured peak, which cannot be; was the machine busy with something else?",
                    timed.name,
                    100.0 * share
                );
            }
            if !args.json {
                print(format_args!(
                    "attention {:<22} {form:<15} {:<4} {:>9.3} ms {:>8.1} GFLOP/s {:>5.1} %\n",
                    timed.name,
                    timed.dtype.name(),
                    1e3 * timed.seconds[index],
                    1e3 * tflops,
                    100.0 * share
                ))?;
            }
            let batch = case.cu_seqlens.len().saturating_sub(1);
            cases.push(json!({
                "name": format!("attention {} {form} {}", timed.name, timed.dtype.name()),
                "kind": "attention",
                "form": form,
                "dtype": timed.dtype.name(),
                "batch": batch,
                "seq": case.cu_seqlens.last().map_or(0, |tokens| *tokens as usize / batch.max(1)),
                "heads": case.spec.heads,
                "kv_heads": case.spec.kv_heads,
                "head_dim": case.spec.head_dim,
                "flops": timed.flops[index],
                "seconds": timed.seconds[index],
                "tflops": tflops,
                "peak_share": share,
            }));
        }
    }
    if args.json { Ok(()) } else { print("\n") }
}

fn memory_table(args: &MemoryArgs) -> Result<()> {
    const MODELS: [(&str, usize, usize, usize); 3] =
        [("quickstart", 4096, 8, 256), ("shakespeare-char", 128, 12, 64), ("gpt2-124m", 50304, 2, 512)];
    let mut cases = Vec::new();
    for (preset, vocab_size, rows, length) in MODELS {
        let mut activations = Vec::new();
        for mode in ["none", "selective", "full"] {
            let name = format!("{preset} {mode}");
            note(&name);
            let train = TrainArgs {
                preset: preset.to_owned(),
                vocab_size,
                rows,
                length,
                dtype: Precision::Bf16,
                steps: 1,
                accumulation: 1,
                checkpointing: mode.to_owned(),
                sets: Vec::new(),
                json: false,
            };
            let report = measure(&train, Instant::now())?;
            let worst = report.memory.iter().max_by(|a, b| a.error().abs().total_cmp(&b.error().abs()));
            let worst = worst.context("a step that uses no memory")?;
            let bytes = report.memory.iter().find(|m| m.purpose == "activations").map_or(0, |m| m.measured);
            activations.push(bytes as f64);
            if !args.json {
                print_worst(&name, &report, worst)?;
            }
            cases.push(json!({
                "name": name, "kind": "peak", "error": worst.error(), "purpose": worst.purpose,
                "peak_bytes": report.mem_peak_bytes, "predicted_bytes": report.mem_predicted_bytes,
            }));
        }
        let cut = activations[0] / activations[2].max(1.0);
        if !args.json {
            print(format_args!("{preset}: full checkpointing cuts activations {cut:.1} x\n"))?;
        }
        cases.push(json!({"name": preset, "kind": "cut", "cut": cut}));
    }
    if args.json { print(format_args!("{}\n", json!({"cases": cases}))) } else { Ok(()) }
}

fn print_worst(name: &str, report: &StepReport, worst: &PurposeMemory) -> Result<()> {
    print(format_args!(
        "{name:<28} peak {:>11}, predicted {:>11}; worst purpose: {} {:+.2} %\n",
        format_bytes(report.mem_peak_bytes),
        format_bytes(report.mem_predicted_bytes),
        worst.purpose,
        100.0 * worst.error()
    ))
}
