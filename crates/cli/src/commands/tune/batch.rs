//! `trainyard tune batch`: the largest batch that fits, and the largest that still pays.
//!
//! The largest that fits is predicted, by executing steps of more and more sequences on the meta
//! device; nothing is tried. The largest that pays follows from the gradient's noise scale. It is
//! measured on a run that trains for a while first: from its checkpoint, many small batches and a
//! few large ones of the same text are run at a learning rate that changes no weight, and the norms
//! of their gradients are compared. With `--branch`, trainings from the checkpoint with several
//! batches measure it too.

use super::branches;
use super::copies::{Origin, alone, log_of};
use super::new_folder;
use super::trials::{Folder, Start};
use crate::commands::config::{load, plan, resolve};
use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use trainyard_base::format_bytes;
use trainyard_engine::config::{Config, Resolved};
use trainyard_engine::largest::{LargestBatch, ROWS_MAX, Room, largest_batch};
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_tune::{Branches, NoiseScale, Norms};

/// Small batches that make a large one.
const PARTS: usize = 16;

/// A learning rate that changes no weight in f32.
const STILL: f64 = 1e-30;

/// Find the largest batch that fits, by prediction, and the largest that still pays, by the
/// gradient's noise scale.
#[derive(clap::Args)]
pub struct BatchArgs {
    /// A configuration in TOML. Without one: the quick start.
    config: Option<PathBuf>,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Measure at the newest checkpoint of this run, and train nothing. The noise scale grows as
    /// the loss falls, so a later checkpoint takes larger batches.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "sets", "steps"])]
    run: Option<PathBuf>,
    /// Steps to train before the noise is measured. Default: a tenth of the configuration's, at
    /// least 10.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Large batches whose gradients are measured. More take longer and narrow the interval.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(4..=4096))]
    samples: u32,
    /// Also train branches with five batches, each with several learning rates, on the same number
    /// of sequences, and take the critical batch from their losses. Takes as long as a thousand
    /// small steps; needs validation text.
    #[arg(long)]
    branch: bool,
    /// Say only what fits.
    #[arg(long, conflicts_with_all = ["steps", "branch"])]
    memory_only: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &BatchArgs) -> Result<ExitCode> {
    let resolved = match &args.run {
        Some(folder) => of_run(folder)?,
        None => resolve(&load(args.config.as_deref(), &args.sets)?)?,
    };
    let mut report = Report { resolved, fits: None, limit: String::new(), noise: None };
    report.find_what_fits()?;
    if !args.memory_only {
        report.check_noise()?;
        if args.branch && !report.resolved.validation {
            bail!("--branch compares losses on held-back text: set data.validation or data.validation_fraction");
        }
        let stop = Arc::<AtomicBool>::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&stop)).context("signal handling")?;
        }
        let run = match &args.run {
            Some(folder) => Folder::at(folder),
            None => train(args, &report.resolved, &stop)?,
        };
        let origin = Origin::newest(&report.resolved, &run, &stop)?;
        let mut noise = measure(args, &origin)?;
        if args.branch {
            let center = nearest_batch(&noise.scale, origin.resolved.batch.data_parallel_degree);
            let batches = branches::around(center, origin.resolved.batch.data_parallel_degree);
            noise.branches = Some(branches::measure(&origin, &batches)?);
        }
        report.noise = Some(noise);
        if report.fits.is_none() {
            // The vocabulary is known now.
            report.resolved = of_run(run.path())?;
            report.find_what_fits()?;
        }
    }
    print(if args.json { format!("{}\n", report.json()) } else { report.words() })?;
    Ok(ExitCode::SUCCESS)
}

/// The configuration of a run.
fn of_run(folder: &Path) -> Result<Resolved> {
    let config: Config = Session::configuration(&GoingOn::new(folder, &[]))?;
    resolve(&config)
}

/// Trains a new run up to the step at which the noise is measured.
fn train(args: &BatchArgs, resolved: &Resolved, stop: &AtomicBool) -> Result<Folder> {
    let usual = resolved.limits.steps.map_or(100, |steps| (steps / 10).max(10).min(steps));
    let steps = args.steps.unwrap_or(usual);
    let runs = &resolved.config.run.directory;
    fs::create_dir_all(runs).with_context(|| format!("cannot create {}", runs.display()))?;
    let path = new_folder(runs, "batch")?;
    let run = Folder::at(&path);
    note(&format!("training {} for {} steps", path.display(), count(steps)));
    let mut sets = args.sets.clone();
    sets.push(format!("run.name={}", toml::Value::String(run.name())));
    let config = args.config.as_deref();
    let log = log_of(&run);
    alone(Start { trial: 0, folder: &run, config, sets: &sets, changed: &[], until: Some(steps), log }, stop)?;
    Ok(run)
}

/// The noise scale at `origin`.
fn measure(args: &BatchArgs, origin: &Origin<'_>) -> Result<Noise> {
    let degree = origin.resolved.batch.data_parallel_degree;
    let micro = (origin.resolved.batch.global / (PARTS * degree)).max(1);
    let (small, large) = (micro * degree, PARTS * micro * degree);
    let samples = args.samples as usize;
    note(&format!(
        "measuring gradients at step {}: {} batches of {small} and {} of {large} sequences",
        count(origin.step),
        count((samples * PARTS) as u64),
        count(samples as u64)
    ));
    let mut sets = origin.rates(STILL);
    if origin.resolved.validation {
        sets.extend(["evaluation.tokens_max=1", "evaluation.interval_steps=auto"].map(str::to_owned));
    }
    let squares = |name: &str, accumulation: usize, batches: usize| -> Result<Vec<f64>> {
        let read = |run: &Folder| norms(run, origin.step, batches as u64);
        let norms = origin.train(name, (micro, accumulation), batches as u64, &sets, read)?;
        Ok(norms.into_iter().map(|norm| norm * norm).collect())
    };
    let of_small = squares("small", 1, samples * PARTS)?;
    let of_large = squares("large", PARTS, samples)?;
    let mean = |squares: &[f64]| squares.iter().sum::<f64>() / squares.len() as f64;
    let norms: Vec<Norms> = of_small
        .chunks(PARTS)
        .zip(&of_large)
        .map(|(small, large)| Norms { small: mean(small), large: *large })
        .collect();
    let scale = NoiseScale::measured(&norms, small, large).context("the gradients' norms are not finite")?;
    Ok(Noise { scale, step: origin.step, run: origin.run.path().to_owned(), branches: None })
}

/// The norms of the gradients of the `batches` steps of `run` after `step`.
fn norms(run: &Folder, step: u64, batches: u64) -> Result<Vec<f64>> {
    let path = run.path().join("metrics.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let own = lines.filter(|line| line["step"].as_u64().is_some_and(|at| at > step));
    let norms: Vec<f64> = own.map(|line| line["grad_norm"].as_f64().unwrap_or(f64::NAN)).collect();
    if norms.len() as u64 != batches || norms.iter().any(|norm| !norm.is_finite()) {
        bail!(
            "{}: {} finite norms of {batches} gradients",
            path.display(),
            norms.iter().filter(|n| n.is_finite()).count()
        );
    }
    Ok(norms)
}

struct Noise {
    scale: NoiseScale,
    /// The step and the run at which it was measured.
    step: u64,
    run: PathBuf,
    /// The critical batch by training, if it was asked for.
    branches: Option<Branches>,
}

impl Noise {
    /// The critical batch: that of the branches if they were trained.
    fn critical(&self) -> NoiseScale {
        self.branches.as_ref().map_or(self.scale, |branches| branches.scale)
    }
}

/// The power of two times `degree` that is nearest to the critical batch, by ratio.
fn nearest_batch(critical: &NoiseScale, degree: usize) -> usize {
    let most = if critical.sequences.is_finite() { critical.sequences } else { critical.low };
    let mut each = 1;
    while (2 * each * degree) as f64 <= most * 2f64.sqrt() {
        each *= 2;
    }
    each * degree
}

struct Report {
    resolved: Resolved,
    /// None while the vocabulary is unknown.
    fits: Option<Option<LargestBatch>>,
    /// The room that there is, in words.
    limit: String,
    noise: Option<Noise>,
}

impl Report {
    fn find_what_fits(&mut self) -> Result<()> {
        if plan(&self.resolved, 0)?.is_none() {
            return Ok(());
        }
        let device = trainyard_engine::device::open(&self.resolved, None, None)?;
        let room = Room::of_each(&self.resolved, &device, self.resolved.parallel.ranks)?;
        self.fits = Some(largest_batch(&room, &self.resolved)?);
        self.limit = format_bytes(room.device as u64);
        Ok(())
    }

    /// # Errors
    /// Layouts whose gradients' norms do not belong to one batch.
    fn check_noise(&self) -> Result<()> {
        if self.resolved.server.is_some() {
            bail!(
                "workers of a parameter server have gradients of their own: measure with update.rule=synchronous, or take --memory-only"
            );
        }
        if self.resolved.apart.is_some() {
            bail!(
                "replicas that train apart have gradients of their own: measure with update.rule=synchronous, or take --memory-only"
            );
        }
        if self.resolved.config.parallel.pipeline_parallel_degree > 1 {
            bail!(
                "a pipeline needs many micro-batches in every step: measure with parallel.pipeline_parallel_degree=1, or take --memory-only"
            );
        }
        if self.resolved.config.training.elastic_bits {
            bail!("training.elastic_bits ties the micro-batch to the ranks: measure without it, or take --memory-only");
        }
        Ok(())
    }

    /// The batch to take, and the settings for it: a power of two times the data-parallel degree,
    /// at most the noise scale.
    fn advice(&self) -> Option<(usize, Vec<String>)> {
        let degree = self.resolved.batch.data_parallel_degree;
        let each = nearest_batch(&self.noise.as_ref()?.critical(), degree) / degree;
        let fits = self.fits.flatten().map_or(each, |fits| fits.rows);
        let mut micro = each;
        while micro > fits.max(1) {
            micro /= 2;
        }
        let sets = [
            format!("training.global_batch_size={}", each * degree),
            format!("training.micro_batch_size={micro}"),
            "training.accumulation_steps=auto".to_owned(),
        ];
        let is_set = self.resolved.requested.training.accumulation_steps.is_some();
        Some((each * degree, sets[..if is_set { 3 } else { 2 }].to_vec()))
    }

    fn words(&self) -> String {
        let length = self.resolved.sequence_length;
        let of_rank = if self.resolved.parallel.ranks > 1 { " on each rank" } else { "" };
        let mut text = match &self.fits {
            None => "fits    unknown: the vocabulary is that of the text's characters; --run RUN, or measure the noise too\n".to_owned(),
            Some(None) => format!("fits    not even one sequence of {length} tokens fits in {}{of_rank}\n", self.limit),
            Some(Some(fits)) => {
                let next = fits.bytes_of_next.map_or(format!("; {ROWS_MAX} is the most that is looked for"), |bytes| {
                    format!("; {} need {}", count(fits.rows as u64 + 1), format_bytes(bytes as u64))
                });
                format!(
                    "fits    at most {} sequences of {length} tokens in one forward and backward{of_rank}: {} of {}{next}\n        \
                     predicted; nothing was tried\n",
                    count(fits.rows as u64),
                    format_bytes(fits.bytes as u64),
                    self.limit
                )
            }
        };
        let Some(noise) = &self.noise else { return text };
        let Noise { scale, step, run, branches } = noise;
        let sequences = |n: f64| if n.is_finite() { format!("{n:.1}") } else { "no limit".to_owned() };
        text += &format!(
            "noise   {} sequences ({} tokens) at step {} of {}; 95 % interval {} to {}\n",
            sequences(scale.sequences),
            if scale.sequences.is_finite() {
                count((scale.sequences * length as f64) as u64)
            } else {
                "any number of".to_owned()
            },
            count(*step),
            run.display(),
            sequences(scale.low),
            sequences(scale.high)
        );
        if let Some(branches) = branches {
            text += &branches::words(branches, length);
        }
        let scale = &noise.critical();
        let Some((batch, sets)) = self.advice() else { return text };
        let now = self.resolved.batch.global;
        if scale.sequences.is_finite() && scale.sequences > 0.0 {
            text += "\nbatch   steps   tokens   (1.00: the least with any batch)\n";
            let mut sizes: Vec<usize> = [batch / 4, batch / 2, batch, 2 * batch, 4 * batch, now].to_vec();
            sizes.retain(|size| *size > 0);
            sizes.sort_unstable();
            sizes.dedup();
            for size in sizes {
                let (steps, examples) = (scale.steps(size as f64), scale.examples(size as f64));
                let mark = if size == now { "  yours" } else { "" };
                text += &format!("{size:>5} {steps:>7.2} {examples:>8.2}{mark}\n");
            }
        }
        text += &format!("\nanswer  {}\n", self.answer(scale, batch, now));
        text += &format!("        --set {}\n", sets.join(" --set "));
        if let Some(Some(fits)) = &self.fits
            && now / self.resolved.batch.data_parallel_degree > fits.rows
            && self.resolved.batch.micro > fits.rows
        {
            text += "        your micro-batch does not fit\n";
        }
        text
    }

    fn answer(&self, scale: &NoiseScale, batch: usize, now: usize) -> String {
        if !scale.sequences.is_finite() {
            return format!(
                "the gradient is lost in its noise even with {} sequences, so at least {batch} sequences a step pay; \
                 --samples gives a closer answer",
                PARTS * (now / PARTS).max(1)
            );
        }
        let relative = |f: fn(&NoiseScale, f64) -> f64| f(scale, batch as f64) / f(scale, now as f64);
        let (steps, examples) = (100.0 * relative(NoiseScale::steps), 100.0 * relative(NoiseScale::examples));
        let unsure = if scale.high > 2.0 * scale.low { "; the interval is wide, and --samples narrows it" } else { "" };
        match batch.cmp(&now) {
            std::cmp::Ordering::Equal => format!(
                "your {now} sequences a step are the largest batch that still pays: beyond it, tokens grow faster than steps fall{unsure}"
            ),
            std::cmp::Ordering::Greater => format!(
                "up to {batch} sequences a step pay: against your {now}, the same loss takes {steps:.0} % of the steps and {examples:.0} % of the tokens{unsure}"
            ),
            std::cmp::Ordering::Less => format!(
                "{batch} sequences a step are the largest batch that still pays: against your {now}, the same loss takes {steps:.0} % of the steps and {examples:.0} % of the tokens{unsure}"
            ),
        }
    }

    fn json(&self) -> Value {
        json!({
            "sequence_length": self.resolved.sequence_length,
            "batch": self.resolved.batch.global,
            "fits": self.fits.flatten().map(|fits| json!({
                "micro_batch_size": fits.rows,
                "mem_predicted_bytes": fits.bytes,
                "next_mem_predicted_bytes": fits.bytes_of_next,
            })),
            "noise": self.noise.as_ref().map(|noise| json!({
                "step": noise.step,
                "run": noise.run,
                "sequences": noise.scale.sequences.is_finite().then_some(noise.scale.sequences),
                "low": noise.scale.low,
                "high": noise.scale.high.is_finite().then_some(noise.scale.high),
            })),
            "branches": self.noise.as_ref().and_then(|noise| noise.branches.as_ref()).map(branches::json),
            "pays": self.advice().map(|(batch, sets)| json!({ "global_batch_size": batch, "sets": sets })),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(noise: f64, rows: usize, batch: &str) -> Report {
        let sets = [
            "model.dim=32",
            "model.layers=1",
            "model.heads=2",
            "model.vocab_size=64",
            "tokenizer.kind=bytes",
            "data.train=src",
            "training.steps=10",
            "training.sequence_length=16",
            batch,
        ];
        let config = Config::parse(Path::new("c.toml"), "", &sets.map(str::to_owned)).unwrap();
        let inputs = trainyard_engine::config::Inputs {
            batches_supplied: true,
            ..trainyard_engine::config::Inputs::of_this_machine()
        };
        let scale = NoiseScale { sequences: noise, low: noise / 1.2, high: noise * 1.2 };
        Report {
            resolved: config.resolve(&inputs).unwrap(),
            fits: Some(Some(LargestBatch { rows, bytes: 1 << 20, bytes_of_next: Some(2 << 20) })),
            limit: "1.0 MiB".to_owned(),
            noise: Some(Noise { scale, step: 10, run: PathBuf::from("runs/x"), branches: None }),
        }
    }

    #[test]
    fn the_answer_is_the_power_of_two_nearest_to_the_noise_scale() {
        for (noise, batch) in [(0.3, 1), (1.0, 1), (30.0, 32), (45.0, 32), (46.0, 64), (100.0, 128)] {
            let (found, sets) = report(noise, 8, "training.micro_batch_size=4").advice().unwrap();
            assert_eq!(found, batch, "{noise}");
            assert_eq!(sets[0], format!("training.global_batch_size={batch}"));
            assert_eq!(sets[1], format!("training.micro_batch_size={}", batch.min(8)));
        }
    }

    #[test]
    fn the_answer_is_in_words() {
        let text = report(32.0, 1000, "training.micro_batch_size=8").words();
        // (1 + 32 / 32) / (1 + 32 / 8) and (1 + 32 / 32) / (1 + 8 / 32).
        assert!(
            text.contains("against your 8, the same loss takes 40 % of the steps and 160 % of the tokens"),
            "{text}"
        );
        assert!(
            text.contains("   32    2.00     2.00\n") && text.contains("    8    5.00     1.25  yours\n"),
            "{text}"
        );
        assert!(report(32.0, 1000, "training.micro_batch_size=32").words().contains("your 32 sequences a step are"));
        let wide = Report { noise: None, ..report(32.0, 10, "training.micro_batch_size=8") };
        assert!(wide.words().contains("at most 10 sequences of 16 tokens") && !wide.words().contains("answer"));
    }
}
