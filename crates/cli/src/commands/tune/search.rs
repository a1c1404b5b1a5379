//! The search itself: asks the study what comes next, and lets it be trained.
//!
//! A study has a folder of its own in the folder of runs. It holds the journal and the base
//! configuration, and no `config.toml`, so it is no run. Its trials are runs beside it, named
//! `STUDY-000` and so on.

use super::trials::{Children, Ended, Folder, LOOK, Start};
use super::{duration, study_folder};
use crate::commands::config::{QUICKSTART, load, plan, resolve};
use crate::commands::dash;
use crate::output::{chain, count, note, print, read};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trainyard_base::format_bytes;
use trainyard_engine::config::{Config, Inputs, OptimizerName, Origin, Resolved};
use trainyard_engine::limit;
use trainyard_engine::shape::model_spec;
use trainyard_tune::{End, Event, Journal, Next, Sampler, Search, Settings, Space, Study, Trial};

/// Names of files in a study's folder.
const JOURNAL: &str = "journal.jsonl";
const BASE: &str = "base.toml";
const BEST: &str = "best.toml";

/// Trials of the table at the end.
const SHOWN: usize = 10;

#[derive(clap::Args)]
pub struct SearchArgs {
    /// A configuration in TOML, of which some keys are searched. Without one: the quick start.
    config: Option<PathBuf>,
    /// Set a key over the configuration, the same in all trials; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// A key to search over, and its values: `log:1e-4..1e-2`, `0.0..0.3`, `int:1..8`,
    /// `logint:8..512`, or a list `8|16|32`; can be given several times. Without any: the learning
    /// rate, from a tenth of the configuration's to ten times it, and the weight decay.
    #[arg(long = "space", value_name = "SECTION.KEY=RANGE")]
    space: Vec<String>,
    /// A file of such keys, in TOML; a list is a choice.
    #[arg(long, value_name = "FILE")]
    space_file: Option<PathBuf>,
    /// The method that chooses the settings of trials.
    #[arg(long, value_enum, default_value_t = Method::Tpe)]
    search: Method,
    /// Number of trials; of members, for a population. Default: 32, and 8 members.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..100_000))]
    trials: Option<u32>,
    /// Time after which the search ends: 90s, 30m, 2h. Trials that run then stop with a checkpoint.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    budget: Option<Duration>,
    /// Stop bad trials early: trials pause after a part of their training, and one of --reduction
    /// goes on from its checkpoint (asynchronous successive halving). `--search asha` has it; it is
    /// for the others.
    #[arg(long)]
    halving: bool,
    /// Number of times that trials are compared, the last one after the whole training: with
    /// halving, each after --reduction times as many steps as the one before (default 3); in a
    /// population, after equal intervals (default 8).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=20))]
    levels: Option<u32>,
    /// With halving, one of N trials goes on at each comparison.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=100))]
    reduction: u32,
    /// The seed of the search. Trials train with the configuration's own seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Trials that train at the same time. They share the cores; with one, a search that is killed
    /// and resumed makes the same trials.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    jobs: u32,
    /// The study's name. Unset: the first of tune-001, tune-002, ... that does not exist yet.
    #[arg(long, value_name = "NAME")]
    study: Option<String>,
    /// Go on with the study in this folder: a raised --trials, another --budget and --jobs count,
    /// everything else is as it began.
    #[arg(long, value_name = "STUDY", conflicts_with_all = ["config", "sets", "space", "space_file", "search", "halving", "levels", "reduction", "seed", "study"])]
    resume: Option<PathBuf>,
    /// Show the trials in the browser while they train.
    #[arg(long)]
    dash: bool,
    /// Print what was found as one JSON object.
    #[arg(long)]
    json: bool,
}

/// The values of `--search`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Method {
    /// Uniform random settings.
    Random,
    /// A Sobol sequence, which covers the space evenly.
    Sobol,
    /// The tree-structured Parzen estimator.
    Tpe,
    /// A Gaussian process and its expected improvement.
    Bayesian,
    /// Crossover and mutation of the best trials.
    Genetic,
    /// Random settings with --halving.
    Asha,
    /// Population-based training: the worst members go on from copies of the best, with changed
    /// settings. For keys that may change while a run trains.
    Population,
}

/// The facts that a study keeps with its journal.
#[derive(Serialize, Deserialize)]
struct About {
    /// The configuration as the user named it; None: the quick start.
    config: Option<PathBuf>,
    sets: Vec<String>,
}

/// Runs the command.
pub fn run(args: &SearchArgs) -> Result<ExitCode> {
    let mut tuning = match &args.resume {
        Some(folder) => Tuning::resume(folder, args)?,
        None => Tuning::begin(args)?,
    };
    if args.dash {
        dash::beside_training(&tuning.folder);
    }
    let is_whole = tuning.search(args)?;
    tuning.write_best()?;
    print(if args.json { format!("{}\n", tuning.json()) } else { tuning.table() })?;
    if tuning.journal.study().best().is_none() {
        bail!("no trial has a result{}", tuning.first_end().map_or(String::new(), |why| format!(": {why}")));
    }
    if !is_whole {
        note(&format!("go on with: trainyard tune --resume {}", tuning.folder.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// A search under way.
struct Tuning {
    /// The study's folder.
    folder: PathBuf,
    journal: Journal,
    about: About,
    /// Predicted bytes of the trials that train now.
    memory: BTreeMap<usize, u64>,
    began: Instant,
    stop: Arc<AtomicBool>,
}

impl Tuning {
    fn begin(args: &SearchArgs) -> Result<Tuning> {
        let text = match &args.config {
            Some(path) => read(path)?,
            None => QUICKSTART.to_owned(),
        };
        let config = load(args.config.as_deref(), &args.sets)?;
        let space = match args.space.is_empty() && args.space_file.is_none() {
            true => usual_space(args, &config)?,
            false => space(args)?,
        };
        for dimension in &space.dimensions {
            let key = &dimension.key;
            if args.sets.iter().any(|set| set.split('=').next().is_some_and(|name| name.trim() == key)) {
                bail!("{key} is both --set and searched: leave one of them out");
            }
            if key.starts_with("run.") || key.starts_with("evaluation.") {
                bail!("{key} does not change what is trained, so there is nothing to search");
            }
        }
        let study = Study::new(space, settings(args)?)?;
        // Both ends of the space must be configurations of this program: a wrong key is an error
        // before anything runs, and no failed trial.
        for place in [0.0, 1.0] {
            let point = study.space.point(&vec![place; study.space.len()]);
            load(args.config.as_deref(), &[&args.sets[..], &study.space.sets(&point)].concat())
                .context("the search space")?;
        }
        if study.settings.search == Search::Population {
            let fixed = study.space.dimensions.iter().find(|dimension| is_fixed(&dimension.key));
            if let Some(dimension) = fixed {
                bail!(
                    "{} cannot change while a run trains, as a population needs it to: search it with tpe or bayesian",
                    dimension.key
                );
            }
        }
        let first = study.space.point(&vec![0.5; study.space.len()]);
        let resolved = load(args.config.as_deref(), &[&args.sets[..], &study.space.sets(&first)].concat())
            .and_then(|config| resolve(&config));
        if let Ok(resolved) = resolved {
            steps(&resolved)?;
            if !resolved.validation {
                bail!(
                    "trials are compared by their validation loss, and there is no validation data: give data.validation or data.validation_fraction"
                );
            }
        }
        let runs = config.run.directory.clone();
        let folder = study_folder(&runs, args.study.as_deref(), "tune")?;
        fs::create_dir_all(&runs).with_context(|| format!("cannot create {}", runs.display()))?;
        fs::create_dir(&folder).with_context(|| {
            format!("cannot create the study's folder {}; `--resume` goes on with a study", folder.display())
        })?;
        let about = About { config: args.config.clone(), sets: args.sets.clone() };
        fs::write(folder.join(BASE), text).with_context(|| format!("cannot write {}", folder.join(BASE).display()))?;
        let journal = Journal::create(&folder.join(JOURNAL), study, serde_json::to_value(&about)?)?;
        Ok(Tuning { folder, journal, about, memory: BTreeMap::new(), began: Instant::now(), stop: Arc::default() })
    }

    fn resume(folder: &Path, args: &SearchArgs) -> Result<Tuning> {
        if !folder.join(JOURNAL).is_file() {
            bail!("{} is not the folder of a study: there is no {JOURNAL}", folder.display());
        }
        let mut journal = Journal::open(&folder.join(JOURNAL))?;
        let about = serde_json::from_value(journal.about().clone()).context("what the journal says of the study")?;
        let settings = &journal.study().settings;
        if let Some(trials) = args.trials.map(|trials| trials as usize).filter(|trials| *trials != settings.trials) {
            if settings.search == Search::Population {
                bail!("the number of a population's members cannot change");
            }
            if trials < settings.trials {
                bail!("--trials {trials}: the study has {} already", settings.trials);
            }
            journal.apply(&Event::Trials { trials })?;
        }
        Ok(Tuning {
            folder: folder.to_owned(),
            journal,
            about,
            memory: BTreeMap::new(),
            began: Instant::now(),
            stop: Arc::default(),
        })
    }

    /// Runs trials until the search is over. Returns false if it was stopped before.
    fn search(&mut self, args: &SearchArgs) -> Result<bool> {
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&self.stop)).context("signal handling")?;
        }
        let study = self.journal.study();
        note(&format!(
            "study {}: {} keys, {}{}",
            self.folder.display(),
            study.space.len(),
            words(&study.settings),
            if study.trials().is_empty() { String::new() } else { format!("; {} trials so far", study.trials().len()) }
        ));
        let mut children = Children::default();
        // Trials that were training when the search was killed.
        let mut waiting: Vec<usize> = study.running().map(|trial| trial.number).collect();
        waiting.reverse();
        let jobs = args.jobs as usize;
        loop {
            for (trial, ended) in children.ended()? {
                if matches!(ended, Ended::Stopped) {
                    // Somebody stopped this trial alone.
                    waiting.push(trial);
                }
                self.record_end(trial, ended)?;
            }
            let is_over = args.budget.is_some_and(|budget| self.began.elapsed() >= budget);
            if is_over || self.stop.load(Ordering::Relaxed) {
                if children.len() > 0 {
                    note(if is_over { "the time is over" } else { "asked to stop" });
                    note("trials that run stop with a checkpoint");
                    children.stop()?;
                    for (trial, ended) in children.wait()? {
                        self.record_end(trial, ended)?;
                    }
                }
                return Ok(false);
            }
            if children.len() < jobs {
                if let Some(trial) = waiting.pop() {
                    self.train(trial, jobs, &mut children)?;
                    continue;
                }
                match self.journal.study().next() {
                    Next::Train(event) => {
                        self.journal.apply(&event)?;
                        let (Event::New { trial, .. } | Event::GoOn { trial, .. }) = event else {
                            bail!("a training that is none");
                        };
                        self.train(trial, jobs, &mut children)?;
                        continue;
                    }
                    Next::Note(event) => {
                        self.journal.apply(&event)?;
                        continue;
                    }
                    Next::Wait => {}
                    Next::Over if children.len() == 0 => return Ok(true),
                    Next::Over => {}
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Starts or resumes the run of a trial, unless it would not fit.
    fn train(&mut self, trial: usize, jobs: usize, children: &mut Children) -> Result<()> {
        let study = self.journal.study();
        let known = &study.trials()[trial];
        let sets = self.sets(known, jobs);
        let folder = Folder::of(&self.folder, trial);
        let price = match self.price(&sets, jobs) {
            Ok(price) => price,
            Err(error) => {
                let end = End::Refused(chain(&error));
                note(&format!("trial {trial:<3} refused: {}", chain(&error)));
                self.journal.apply(&Event::Ended { trial, end, seconds: 0.0 })?;
                return Ok(());
            }
        };
        match price.bytes {
            Some(bytes) => self.memory.insert(trial, bytes),
            None => self.memory.remove(&trial),
        };
        let study = self.journal.study();
        let known = &study.trials()[trial];
        let to = known.training_to.context("the trial trains")?;
        let share = study.settings.rungs[to];
        let until = (share < 1.0).then(|| ((price.steps as f64 * share).round() as u64).max(1));
        if let Some((parent, rung)) = known.parent.filter(|_| !folder.is_begun()) {
            let step = ((price.steps as f64 * study.settings.rungs[rung]).round() as u64).max(1);
            folder.copy_from(&Folder::of(&self.folder, parent), step)?;
        }
        let base = self.folder.join(BASE);
        let from = if known.parent.is_some() { study.space.sets(&known.point) } else { Vec::new() };
        let log = self.folder.join(format!("{}.log", folder.name()));
        children.start(Start { trial, folder: &folder, config: Some(&base), sets: &sets, changed: &from, until, log })
    }

    /// The keys of a trial over the base configuration.
    fn sets(&self, trial: &Trial, jobs: usize) -> Vec<String> {
        let name = Folder::of(&self.folder, trial.number).name();
        let runs = self.folder.parent().unwrap_or(Path::new("."));
        let mut sets = self.about.sets.clone();
        sets.extend(self.journal.study().space.sets(&trial.point));
        // Texts are tokenized once for all trials, because the folder of runs is the same.
        sets.extend([
            format!("run.name={}", toml::Value::String(name)),
            format!("run.directory={}", toml::Value::String(runs.display().to_string())),
            "metrics.jsonl=true".to_owned(),
        ]);
        let threads = (Inputs::of_this_machine().cores / jobs).max(1);
        let usual = [
            ("checkpoint.keep_last", "1".to_owned()),
            ("checkpoint.keep_best", "false".to_owned()),
            ("compute.threads", threads.to_string()),
        ];
        let of_base = load(Some(&self.folder.join(BASE)), &sets).ok();
        let is_set = |key: &str| of_base.as_ref().is_some_and(|config| config.origin(key) != Origin::Default);
        let usual = &usual[..if jobs > 1 { 3 } else { 2 }];
        sets.extend(usual.iter().filter(|(key, _)| !is_set(key)).map(|(key, value)| format!("{key}={value}")));
        sets
    }

    /// The predicted needs of a trial.
    ///
    /// # Errors
    /// It is no valid configuration, or would not fit in memory beside the other jobs.
    fn price(&self, sets: &[String], jobs: usize) -> Result<Price> {
        let resolved = resolve(&load(Some(&self.folder.join(BASE)), sets)?)?;
        let steps = steps(&resolved)?;
        // With a vocabulary of characters the size is known only once the text is read, and the
        // run checks it by itself.
        let mut bytes = None;
        if let Some((_, _, needs)) = plan(&resolved, 0)? {
            let spec = model_spec(&resolved)?;
            limit::check(&resolved, &spec, 0, &needs)?;
            limit::check_machine(&resolved, &spec, 0, &needs, jobs * resolved.parallel.ranks)?;
            bytes = Some((resolved.parallel.ranks * needs.memory.peak_total()) as u64);
        }
        Ok(Price { steps, bytes })
    }

    fn record_end(&mut self, trial: usize, ended: Ended) -> Result<()> {
        let study = self.journal.study();
        let (top, space) = (study.top(), &study.space);
        let known = &study.trials()[trial];
        let to = known.training_to.unwrap_or(0);
        let sets = space.sets(&known.point).join(" ");
        let (reached, seconds) = match ended {
            Ended::Stopped => return Ok(()),
            Ended::Failed { why, seconds } => (Err(why), seconds),
            Ended::Done { seconds } => match Folder::of(&self.folder, trial).loss() {
                Ok((step, loss)) if loss.is_finite() => (Ok((step, loss)), seconds),
                Ok((step, loss)) => (Err(format!("the loss of step {step} is {loss}")), seconds),
                Err(error) => (Err(chain(&error)), seconds),
            },
        };
        let event = match reached {
            Err(why) => {
                note(&format!("trial {trial:<3} failed after {seconds:.1} s: {why}; {sets}"));
                Event::Ended { trial, end: End::Failed(why), seconds }
            }
            Ok((step, loss)) => {
                let rung = if top > 0 { format!("level {}/{}  ", to + 1, top + 1) } else { String::new() };
                let memory =
                    self.memory.get(&trial).map_or(String::new(), |bytes| format!("  {}", format_bytes(*bytes)));
                note(&format!("trial {trial:<3} {rung}step {step:<5} loss {loss:.4}  {seconds:6.1} s{memory}  {sets}"));
                Event::Reached { trial, loss, seconds }
            }
        };
        Ok(self.journal.apply(&event)?)
    }

    fn first_end(&self) -> Option<String> {
        self.journal.study().trials().iter().find_map(|trial| match &trial.end {
            Some(End::Refused(why) | End::Failed(why)) => Some(format!("trial {}: {why}", trial.number)),
            _ => None,
        })
    }

    /// The trials in order: those that trained longest first, then by their losses.
    fn ranked(&self) -> Vec<&Trial> {
        let mut ranked: Vec<&Trial> = self.journal.study().trials().iter().collect();
        let key = |trial: &Trial| trial.last().map_or((-1, f64::INFINITY), |(rung, loss)| (rung as i64, loss));
        ranked.sort_by(|a, b| {
            let (a, b) = (key(a), key(b));
            b.0.cmp(&a.0).then(a.1.total_cmp(&b.1))
        });
        ranked
    }

    /// Writes the configuration with the best settings, as a file that can be trained.
    fn write_best(&self) -> Result<()> {
        let study = self.journal.study();
        let Some(best) = study.best() else { return Ok(()) };
        let sets = [&self.about.sets[..], &study.space.sets(&best.point)].concat();
        let resolved = resolve(&load(Some(&self.folder.join(BASE)), &sets)?)?;
        let path = self.folder.join(BEST);
        let head = format!(
            "# The best of {} trials of {}: {}, loss {:.4}.\n",
            study.trials().len(),
            self.folder.display(),
            Folder::of(&self.folder, best.number).name(),
            best.last().map_or(f64::NAN, |(_, loss)| loss),
        );
        fs::write(&path, head + &resolved.to_toml()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// The command that trains with the best settings.
    fn command(&self, best: &Trial) -> String {
        let sets = self.about.sets.iter().cloned().chain(self.journal.study().space.sets(&best.point));
        let sets: String = sets.map(|set| format!(" --set {}", quoted(&set))).collect();
        let config = self.about.config.as_ref().map_or(String::new(), |path| format!(" {}", path.display()));
        format!("trainyard train{config}{sets}")
    }

    fn table(&self) -> String {
        let study = self.journal.study();
        let keys: Vec<&str> = study.space.dimensions.iter().map(|dimension| dimension.key.as_str()).collect();
        let name_width = Folder::of(&self.folder, 0).name().len().max(5);
        let mut text = format!("{:<name_width$}  trained      loss  seconds", "trial");
        let ranked = self.ranked();
        let shown: Vec<Vec<String>> = ranked.iter().take(SHOWN).map(|trial| study.space.values(&trial.point)).collect();
        let width = |key: usize| shown.iter().map(|row| row[key].len()).chain([keys[key].len()]).max().unwrap_or(0);
        for (index, key) in keys.iter().enumerate() {
            text += &format!("  {key:>width$}", width = width(index));
        }
        text.push('\n');
        for (trial, values) in ranked.iter().take(SHOWN).zip(&shown) {
            let share = trial.losses.len().checked_sub(1).map_or(0.0, |rung| study.settings.rungs[rung]);
            let loss = match (&trial.end, trial.last()) {
                (Some(End::Refused(_)), _) => "refused".to_owned(),
                (Some(End::Failed(_)), _) => "failed".to_owned(),
                (_, Some((_, loss))) => format!("{loss:.4}"),
                _ => "-".to_owned(),
            };
            let name = Folder::of(&self.folder, trial.number).name();
            text += &format!("{name:<name_width$}  {:>5.1} % {loss:>9}  {:>7.1}", 100.0 * share, trial.seconds);
            for (index, value) in values.iter().enumerate() {
                text += &format!("  {value:>width$}", width = width(index));
            }
            text.push('\n');
        }
        if ranked.len() > SHOWN {
            text += &format!("... and {} more: trainyard runs {}\n", ranked.len() - SHOWN, self.runs().display());
        }
        let seconds: f64 = study.trials().iter().map(|trial| trial.seconds).sum();
        text += &format!(
            "{} trials, as much training as {:.2} whole ones; {seconds:.1} s of trials\n",
            count(study.trials().len() as u64),
            study.spent()
        );
        if let Some(best) = study.best() {
            text += &format!("best: {}\n", self.command(best));
            text += &format!("its configuration: {}\n", self.folder.join(BEST).display());
        }
        text
    }

    fn runs(&self) -> &Path {
        self.folder.parent().unwrap_or(Path::new("."))
    }

    fn json(&self) -> Value {
        let study = self.journal.study();
        let trial = |trial: &Trial| {
            let (end, why) = match &trial.end {
                None if trial.training_to.is_some() => ("training", None),
                None if trial.losses.len() > study.top() => ("complete", None),
                None => ("paused", None),
                Some(End::Replaced) => ("replaced", None),
                Some(End::Failed(why)) => ("failed", Some(why)),
                Some(End::Refused(why)) => ("refused", Some(why)),
            };
            json!({
                "trial": trial.number,
                "run": Folder::of(&self.folder, trial.number).name(),
                "sets": study.space.sets(&trial.point),
                "parent": trial.parent.map(|(parent, _)| parent),
                "state": end,
                "why": why,
                "trained": trial.losses.len().checked_sub(1).map_or(0.0, |rung| study.settings.rungs[rung]),
                "loss": trial.last().map(|(_, loss)| loss),
                "losses": trial.losses,
                "seconds": trial.seconds,
            })
        };
        json!({
            "study": self.folder,
            "settings": study.settings,
            "trials": study.trials().iter().map(trial).collect::<Vec<_>>(),
            "spent_trainings": study.spent(),
            "best": study.best().map(|best| json!({
                "trial": best.number,
                "configuration": self.folder.join(BEST),
                "loss": best.last().map(|(_, loss)| loss),
                "sets": study.space.sets(&best.point),
                "command": self.command(best),
            })),
        })
    }
}

struct Price {
    /// Steps of the whole training.
    steps: u64,
    /// Bytes of all ranks' steps; None until the vocabulary is known.
    bytes: Option<u64>,
}

/// The steps of a whole training, of which trials train shares.
fn steps(resolved: &Resolved) -> Result<u64> {
    resolved.limits.steps.context(
        "trials are compared after equal shares of a training, so its steps must be known before any text is read: give training.steps or training.tokens",
    )
}

/// True for keys that a run keeps from its beginning.
fn is_fixed(key: &str) -> bool {
    ["model.", "tokenizer.", "data.", "training.", "parallel."].iter().any(|section| key.starts_with(section))
}

/// The space where none is given: the keys that matter most for every model.
fn usual_space(args: &SearchArgs, config: &Config) -> Result<Space> {
    let optimizer = resolve(config)?.optimizer;
    let around = |rate: f64| format!("log:{:e}..{:e}", rounded(rate / 10.0), rounded(rate * 10.0));
    let mut usual = vec![("optimizer.learning_rate", around(optimizer.learning_rate))];
    if optimizer.name == OptimizerName::Muon {
        usual.push(("optimizer.matrix_learning_rate", around(optimizer.matrix_learning_rate)));
    }
    usual.push(("optimizer.weight_decay", "0.0..0.3".to_owned()));
    // What is set on the command line stays as it is.
    usual.retain(|(key, _)| args.sets.iter().all(|set| set.split('=').next().is_none_or(|set| set.trim() != *key)));
    let lines: Vec<String> = usual.iter().map(|(key, values)| format!("{key}={values}")).collect();
    if lines.is_empty() {
        bail!("the keys that are searched by default are all --set: name others with --space");
    }
    note(&format!("no --space: searching {}", lines.join(" and ")));
    Space::parse(None, &lines).context("the usual search space")
}

/// `value` with three significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

fn space(args: &SearchArgs) -> Result<Space> {
    let file = args.space_file.as_ref().map(|path| Ok::<_, anyhow::Error>((path, read(path)?))).transpose()?;
    let names = file.as_ref().map(|(path, text)| (path.display().to_string(), text));
    let file = names.as_ref().map(|(name, text)| (name.as_str(), text.as_str()));
    let space = Space::parse(file, &args.space).context("the search space (--space, --space-file)")?;
    let config = Config::default();
    for dimension in &space.dimensions {
        let (section, key) = dimension.key.rsplit_once('.').context("a key has a section")?;
        let known = config.section(section).is_some_and(|section| section.keys().iter().any(|known| known.name == key));
        if !known {
            // The configuration's own message names the nearest known key.
            load(None, &[format!("{}=0", dimension.key)]).context("the search space")?;
        }
    }
    Ok(space)
}

fn settings(args: &SearchArgs) -> Result<Settings> {
    let reduction = args.reduction as usize;
    let halving = args.halving || args.search == Method::Asha;
    let (search, trials) = match args.search {
        Method::Random | Method::Asha => (Search::Trials(Sampler::Random), 32),
        Method::Sobol => (Search::Trials(Sampler::Sobol), 32),
        Method::Tpe => (Search::Trials(Sampler::Tpe), 32),
        Method::Bayesian => (Search::Trials(Sampler::GaussianProcess), 32),
        Method::Genetic => (Search::Trials(Sampler::Genetic), 32),
        Method::Population => (Search::Population, 8),
    };
    let rungs = match (search, halving) {
        (Search::Population, true) => {
            bail!("--halving is for searches by single trials, and a population selects by itself")
        }
        (Search::Population, false) => Settings::equal_rungs(args.levels.unwrap_or(8)),
        (Search::Trials(_), true) => Settings::halving_rungs(args.levels.unwrap_or(3), reduction),
        (Search::Trials(_), false) if args.levels.is_some() => {
            bail!("--levels has no effect without --halving: every trial trains to its end")
        }
        (Search::Trials(_), false) => vec![1.0],
    };
    let settings =
        Settings { search, seed: args.seed, trials: args.trials.map_or(trials, |n| n as usize), rungs, reduction };
    settings.check()?;
    Ok(settings)
}

fn words(settings: &Settings) -> String {
    let trials = settings.trials;
    match settings.search {
        Search::Population => format!("a population of {trials}, {} intervals", settings.rungs.len()),
        Search::Trials(sampler) => {
            let sampler = match sampler {
                Sampler::Random => "random",
                Sampler::Sobol => "a Sobol sequence",
                Sampler::Tpe => "tree-structured Parzen estimator",
                Sampler::GaussianProcess => "Gaussian process",
                Sampler::Genetic => "genetic",
            };
            let halving = match settings.rungs.len() {
                1 => String::new(),
                rungs => format!(", one in {} goes on at each of {rungs} levels", settings.reduction),
            };
            format!("{sampler}, {trials} trials{halving}")
        }
    }
}

/// A word of a shell's command line.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+".contains(c);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\\''")) }
}
