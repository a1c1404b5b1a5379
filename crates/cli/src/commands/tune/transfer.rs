//! `trainyard tune transfer`: does the best learning rate of a narrow model hold for wide ones?
//!
//! Models of several widths are trained with the same learning rates, scaled by the maximal update
//! parametrisation (muP; Yang et al. 2022). The best rate of each width is shown, and the size of
//! every unit's output over the widths, which should not grow with them (the coordinate check of
//! appendix D.1). The trials are runs beside the study's folder, so a search that was killed goes
//! on where it stopped.

use super::study_folder;
use super::trials::{Children, Ended, Folder, LOOK, Start};
use crate::commands::config::{load, resolve};
use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use trainyard_compress::{Source, output_sizes};
use trainyard_data::Tokenizer;
use trainyard_engine::checkpoint::Choice;
use trainyard_engine::config::{Config, ModelShape, ModelSource, Resolved};
use trainyard_engine::trained::Runtime;
use trainyard_tensor::Device;

/// The facts that a study keeps in its folder.
const ABOUT: &str = "transfer.json";
/// Factor between neighbours of the usual grid of rates.
const STEP: f64 = 2.0;
/// Rates on each side of the configuration's, in the usual grid.
const EACH_SIDE: i32 = 2;
/// The text whose tokens go through the models in the coordinate check.
const TEXT: &str = "The cars of a goods train are collected in a yard, where each of them is put behind \
                    an engine that goes its way. A yard with few tracks is a slow one. It is built to \
                    be wide, and the wider it is, the more trains can be made up at the same time.";
/// Growth of outputs for each doubling of the width from which the check fails.
const GROWTH_MAX: f64 = 1.3;

/// Find out if the best learning rate of a narrow model is that of wide ones too, with initial
/// weights and learning rates scaled by width (muP).
#[derive(clap::Args)]
pub struct TransferArgs {
    /// A configuration in TOML, of which the width and the learning rate are changed. Without one:
    /// the quick start.
    config: Option<PathBuf>,
    /// Set a key over the configuration, the same in all trials; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// The widths to train: values of model.dim. The least is the one to scale from. Heads keep
    /// their size, and model.ffn_dim its ratio.
    #[arg(long, value_name = "DIM,...", value_delimiter = ',', required_unless_present = "resume")]
    widths: Vec<usize>,
    /// The learning rates to try. Unset: the configuration's, and two on each side by factors of
    /// two.
    #[arg(long, value_name = "RATE,...", value_delimiter = ',')]
    rates: Vec<f64>,
    /// Train without scaling, to see how far the best rate moves then.
    #[arg(long)]
    standard: bool,
    /// Trials that train at the same time. They share the cores.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    jobs: u32,
    /// The study's name. Unset: the first of transfer-001, transfer-002, ... that does not exist
    /// yet.
    #[arg(long, value_name = "NAME")]
    study: Option<String>,
    /// Go on with the study in this folder. Everything is as it began.
    #[arg(long, value_name = "STUDY", conflicts_with_all = ["config", "sets", "widths", "rates", "standard", "study"])]
    resume: Option<PathBuf>,
    /// Print what was found as one JSON object.
    #[arg(long)]
    json: bool,
}

/// The models that are compared.
#[derive(Serialize, Deserialize)]
struct About {
    config: Option<PathBuf>,
    sets: Vec<String>,
    /// Ascending.
    widths: Vec<usize>,
    /// Ascending.
    rates: Vec<f64>,
    standard: bool,
}

/// Runs the command.
pub fn run(args: &TransferArgs) -> Result<ExitCode> {
    let mut transfer = match &args.resume {
        Some(folder) => Transfer::resume(folder)?,
        None => Transfer::begin(args)?,
    };
    let is_whole = transfer.train(args.jobs as usize)?;
    if !is_whole {
        note(&format!("go on with: trainyard tune transfer --resume {}", transfer.folder.display()));
        bail!("asked to stop: {} of {} trials are done", transfer.done(), transfer.trials.len());
    }
    transfer.check_coordinates()?;
    print(if args.json { format!("{}\n", transfer.json()) } else { transfer.words() })?;
    Ok(ExitCode::SUCCESS)
}

/// A comparison under way.
struct Transfer {
    /// The study's folder.
    folder: PathBuf,
    about: About,
    steps: u64,
    /// By width, then by rate.
    trials: Vec<Trial>,
    /// By unit: its name, and the root mean square of its outputs at each width.
    sizes: Vec<(String, Vec<f64>)>,
}

struct Trial {
    width: usize,
    rate: f64,
    run: Folder,
    sets: Vec<String>,
    end: End,
}

#[derive(Clone, Debug, PartialEq)]
enum End {
    /// Not yet.
    Open,
    /// The validation loss after the last step.
    Loss(f64),
    /// The reason.
    Failed(String),
}

impl Transfer {
    fn begin(args: &TransferArgs) -> Result<Transfer> {
        let (mut widths, mut rates) = (args.widths.clone(), args.rates.clone());
        let resolved = resolve(&load(args.config.as_deref(), &args.sets)?)?;
        for (key, by) in
            [("model.dim", "--widths"), ("optimizer.learning_rate", "--rates"), ("model.mup_base_dim", "--widths")]
        {
            if args.sets.iter().any(|set| set.split('=').next().is_some_and(|name| name.trim() == key)) {
                bail!("{key} is both --set and given by {by}: leave one of them out");
            }
        }
        if rates.is_empty() {
            let rate = resolved.optimizer.learning_rate;
            rates = (-EACH_SIDE..=EACH_SIDE).map(|step| rate * STEP.powi(step)).collect();
        }
        widths.sort_unstable();
        widths.dedup();
        if widths.len() < 2 {
            bail!("--widths needs at least two different widths, as in --widths 64,128,256");
        }
        if let Some(rate) = rates.iter().find(|rate| !(**rate > 0.0 && rate.is_finite())) {
            bail!("--rates: {rate} is no positive number");
        }
        rates.sort_by(f64::total_cmp);
        rates.dedup();
        let runs = &resolved.config.run.directory;
        let folder = study_folder(runs, args.study.as_deref(), "transfer")?;
        if folder.exists() {
            bail!("{} exists: take another --study, or go on with it by --resume {0}", folder.display());
        }
        let about =
            About { config: args.config.clone(), sets: args.sets.clone(), widths, rates, standard: args.standard };
        let transfer = Transfer::of(folder, about)?;
        fs::create_dir_all(&transfer.folder).with_context(|| format!("cannot create {}", transfer.folder.display()))?;
        let path = transfer.folder.join(ABOUT);
        let text = serde_json::to_string_pretty(&transfer.about).context("the study's settings")?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(transfer)
    }

    fn resume(folder: &Path) -> Result<Transfer> {
        let path = folder.join(ABOUT);
        let text = fs::read_to_string(&path).with_context(|| {
            format!("{} is no study of tune transfer: cannot read {}", folder.display(), path.display())
        })?;
        let about = serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?;
        Transfer::of(folder.to_owned(), about)
    }

    /// Checks the configuration of every trial before any of them runs.
    fn of(folder: PathBuf, about: About) -> Result<Transfer> {
        let base: Config = load(about.config.as_deref(), &about.sets)?;
        let resolved = resolve(&base)?;
        let ModelSource::Shape(shape) = &resolved.model else {
            bail!("the shape of a model at model.path is fixed: give a configuration whose model.dim can change");
        };
        if !resolved.validation {
            bail!(
                "trials are compared by their validation loss, and there is no validation data: give data.validation or data.validation_fraction"
            );
        }
        let steps = resolved
            .limits
            .steps
            .context("widths are compared after equal steps: give training.steps or training.tokens")?;
        let mut trials = Vec::new();
        for width in &about.widths {
            let of_width = width_sets(shape, *width)?;
            for (number, rate) in about.rates.iter().enumerate() {
                let run = Folder::at(&folder).beside(&format!("{width}-{number}"));
                let mut sets = about.sets.clone();
                sets.extend(of_width.iter().cloned());
                if !about.standard {
                    sets.push(format!("model.mup_base_dim={}", about.widths[0]));
                }
                sets.push(format!("optimizer.learning_rate={rate:e}"));
                sets.push(format!("run.name={}", toml::Value::String(run.name())));
                let resolved = load(about.config.as_deref(), &sets).and_then(|config| resolve(&config));
                let resolved: Resolved = resolved.with_context(|| format!("model.dim = {width}"))?;
                debug_assert_eq!(resolved.limits.steps, Some(steps));
                let end = match run.loss() {
                    Ok((step, loss)) if step == steps => End::Loss(loss),
                    _ => End::Open,
                };
                trials.push(Trial { width: *width, rate: *rate, run, sets, end });
            }
        }
        Ok(Transfer { folder, about, steps, trials, sizes: Vec::new() })
    }

    /// Number of trials that have ended.
    fn done(&self) -> usize {
        self.trials.iter().filter(|trial| trial.end != End::Open).count()
    }

    /// Trains what is not trained yet. False if it was asked to stop.
    fn train(&mut self, jobs: usize) -> Result<bool> {
        let stop = Arc::<AtomicBool>::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&stop)).context("signal handling")?;
        }
        let mut waiting: Vec<usize> = (0..self.trials.len()).filter(|n| self.trials[*n].end == End::Open).collect();
        waiting.reverse();
        let mut children = Children::default();
        while children.len() > 0 || !waiting.is_empty() {
            if stop.load(Ordering::Relaxed) {
                children.stop()?;
                children.wait()?;
                return Ok(false);
            }
            while children.len() < jobs
                && let Some(number) = waiting.pop()
            {
                let trial = &self.trials[number];
                let log = self.folder.join(format!("{}.log", trial.run.name()));
                let (folder, config) = (&trial.run, self.about.config.as_deref());
                children.start(Start {
                    trial: number,
                    folder,
                    config,
                    sets: &trial.sets,
                    changed: &[],
                    until: None,
                    log,
                })?;
            }
            for (number, ended) in children.ended()? {
                self.end(number, ended)?;
            }
            std::thread::sleep(LOOK);
        }
        Ok(true)
    }

    /// Takes the result of a trial.
    fn end(&mut self, number: usize, ended: Ended) -> Result<()> {
        let done = self.done() + 1;
        let (all, steps) = (self.trials.len(), self.steps);
        let trial = &mut self.trials[number];
        let (what, seconds) = match ended {
            Ended::Stopped => return Ok(()),
            Ended::Failed { why, seconds } => {
                trial.end = End::Failed(why.clone());
                (why, seconds)
            }
            Ended::Done { seconds } => match trial.run.loss()? {
                (step, loss) if step == steps => {
                    trial.end = End::Loss(loss);
                    (format!("loss {loss:.4}"), seconds)
                }
                (step, _) => bail!("{} was evaluated last at step {step} of {steps}", trial.run.name()),
            },
        };
        note(&format!("trial {done}/{all}  dim {}  rate {:e}  {what}  {seconds:.1} s", trial.width, trial.rate));
        Ok(())
    }

    /// The trials of a width.
    fn of_width(&self, width: usize) -> impl Iterator<Item = &Trial> {
        self.trials.iter().filter(move |trial| trial.width == width)
    }

    /// The index of the best rate of a width; None if none trained.
    fn best(&self, width: usize) -> Option<usize> {
        let losses = self.of_width(width).enumerate().filter_map(|(rate, trial)| match trial.end {
            End::Loss(loss) if loss.is_finite() => Some((rate, loss)),
            _ => None,
        });
        losses.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(rate, _)| rate)
    }

    /// Measures the outputs of the models that were trained with the best rate of the narrowest.
    fn check_coordinates(&mut self) -> Result<()> {
        let Some(rate) = self.best(self.about.widths[0]) else { return Ok(()) };
        let runtime = Runtime::of_this_machine();
        let device = Device::cpu(runtime.isa, runtime.threads, None);
        for width in self.about.widths.clone() {
            let Some(trial) = self.of_width(width).nth(rate).filter(|trial| matches!(trial.end, End::Loss(_))) else {
                self.sizes.clear();
                return Ok(());
            };
            let source = Source::open(trial.run.path(), Choice::Latest, &device, note);
            let source = match source {
                Ok(source) => source,
                Err(why) => {
                    note(&format!("no coordinate check: {why}"));
                    return Ok(());
                }
            };
            let tokens = tokens(source.tokenizer(), source.spec().max_positions)?;
            for (number, (name, size)) in output_sizes(&source, &device, &tokens)?.into_iter().enumerate() {
                match self.sizes.get_mut(number) {
                    Some((_, sizes)) => sizes.push(size),
                    None => self.sizes.push((name, vec![size])),
                }
            }
        }
        Ok(())
    }

    /// The growth of a unit's outputs for each doubling of the width: the slope of a straight line
    /// through the logarithms.
    fn growth(&self, sizes: &[f64]) -> f64 {
        let x: Vec<f64> = self.about.widths.iter().map(|width| (*width as f64).log2()).collect();
        let y: Vec<f64> = sizes.iter().map(|size| size.log2()).collect();
        slope(&x, &y).exp2()
    }

    /// The best rate of each width as an index, if all have one.
    fn bests(&self) -> Option<Vec<usize>> {
        self.about.widths.iter().map(|width| self.best(*width)).collect()
    }

    fn words(&self) -> String {
        let widths = &self.about.widths;
        let mut text = format!("{:<10}", "rate");
        for width in widths {
            text += &format!("{:>12}", format!("dim {width}"));
        }
        text.push('\n');
        for (number, rate) in self.about.rates.iter().enumerate() {
            text += &format!("{:<10}", format!("{rate:.3e}"));
            for width in widths {
                let trial = self.of_width(*width).nth(number).expect("every width has every rate");
                let mark = if self.best(*width) == Some(number) { "*" } else { " " };
                let cell = match &trial.end {
                    End::Loss(loss) => format!("{loss:.4}{mark}"),
                    End::Failed(_) => "failed ".to_owned(),
                    End::Open => "- ".to_owned(),
                };
                text += &format!("{cell:>12}");
            }
            text.push('\n');
        }
        text += "* the best of its width\n";
        if !self.sizes.is_empty() {
            text += &format!("\n{:<10}", "output of");
            for width in widths {
                text += &format!("{:>12}", format!("dim {width}"));
            }
            text += "  growth when the width doubles\n";
            for (name, sizes) in &self.sizes {
                text += &format!("{name:<10}");
                sizes.iter().for_each(|size| text += &format!("{size:>12.4}"));
                text += &format!("  x {:.2}\n", self.growth(sizes));
            }
        }
        text += &format!("\nanswer  {}\n", self.answer());
        text
    }

    /// The largest growth of a unit's outputs, and its name.
    fn largest_growth(&self) -> Option<(&str, f64)> {
        let growths = self.sizes.iter().map(|(name, sizes)| (name.as_str(), self.growth(sizes)));
        growths.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    fn answer(&self) -> String {
        let Some(bests) = self.bests() else {
            return "a width has no trial that trained to its end: take smaller --rates".to_owned();
        };
        let moved = bests.iter().max().unwrap_or(&0) - bests.iter().min().unwrap_or(&0);
        let rate = self.about.rates[bests[0]];
        let mut text = match moved {
            0 => format!("the best rate is the same at every width: {rate:e}"),
            1 => format!(
                "the best rates lie within one step of the grid, from dim {} with {rate:e} on",
                self.about.widths[0]
            ),
            _ => format!("the best rate moves by {moved} steps of the grid: do not take it from a narrow model"),
        };
        let last = self.about.rates.len() - 1;
        if bests.iter().any(|best| *best == 0 || *best == last) {
            text += "; a best rate lies at the end of the grid, so give more --rates";
        }
        if let Some((name, growth)) = self.largest_growth().filter(|(_, growth)| *growth > GROWTH_MAX) {
            text += &format!("; the outputs of {name} grow with the width (x {growth:.2} when it doubles)");
        }
        if moved <= 1 && !self.about.standard {
            let base = self.about.widths[0];
            text += &format!(
                "\n        for any width: --set model.mup_base_dim={base} --set optimizer.learning_rate={rate:e}"
            );
        }
        text
    }

    fn json(&self) -> Value {
        let trial = |trial: &Trial| {
            let (loss, why) = match &trial.end {
                End::Loss(loss) => (loss.is_finite().then_some(*loss), None),
                End::Failed(why) => (None, Some(why)),
                End::Open => (None, None),
            };
            json!({ "run": trial.run.name(), "dim": trial.width, "learning_rate": trial.rate, "loss": loss, "why": why })
        };
        let unit =
            |(name, sizes): &(String, Vec<f64>)| json!({ "unit": name, "rms": sizes, "growth": self.growth(sizes) });
        json!({
            "study": self.folder,
            "standard": self.about.standard,
            "steps": self.steps,
            "trials": self.trials.iter().map(trial).collect::<Vec<_>>(),
            "best": self.bests().map(|bests| bests.iter().map(|best| self.about.rates[*best]).collect::<Vec<_>>()),
            "outputs": self.sizes.iter().map(unit).collect::<Vec<_>>(),
            "answer": self.answer(),
        })
    }
}

/// The keys that give a model of `shape` another width: heads of the same size, and the same ratios
/// of everything else.
fn width_sets(shape: &ModelShape, width: usize) -> Result<Vec<String>> {
    let scaled = |key: &str, value: usize| -> Result<String> {
        if width == 0 || !(value * width).is_multiple_of(shape.dim) {
            bail!(
                "--widths {width}: model.{key} is {value} at dim {}, and {value} x {width} / {} is no whole number; give widths that are multiples of {}",
                shape.dim,
                shape.dim,
                shape.dim / gcd(shape.dim, value)
            );
        }
        Ok(format!("model.{key}={}", value * width / shape.dim))
    };
    if let Some(experts) = &shape.experts {
        bail!(
            "a mixture of {} experts has widths of their own in [experts]: compare widths of a model without",
            experts.experts
        );
    }
    Ok(vec![
        format!("model.dim={width}"),
        format!("model.head_dim={}", shape.head_dim),
        scaled("heads", shape.heads)?,
        scaled("kv_heads", shape.kv_heads)?,
        scaled("ffn_dim", shape.ffn_dim)?,
    ])
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The tokens of the text, as far as the tokenizer has them.
fn tokens(tokenizer: &Tokenizer, most: usize) -> Result<Vec<i32>> {
    // A vocabulary of characters has those of its text only.
    let known: String =
        TEXT.chars().filter(|c| tokenizer.encode_ordinary(c.encode_utf8(&mut [0; 4])).is_ok()).collect();
    let tokens = tokenizer.encode_ordinary(&known).context("the text of the coordinate check")?;
    if tokens.is_empty() {
        bail!("the tokenizer has none of the characters of English text, which the coordinate check is made with");
    }
    Ok(tokens.into_iter().take(most).map(|token| token as i32).collect())
}

/// The slope of the straight line of least squares.
fn slope(x: &[f64], y: &[f64]) -> f64 {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (mean_x, mean_y) = (mean(x), mean(y));
    let both: f64 = x.iter().zip(y).map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    both / x.iter().map(|x| (x - mean_x).powi(2)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slope_is_that_of_the_line() {
        assert!((slope(&[6.0, 7.0, 8.0], &[1.0, 1.5, 2.0]) - 0.5).abs() < 1e-12);
    }
}
