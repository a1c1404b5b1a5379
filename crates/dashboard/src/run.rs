//! The folder of a run, in short: its state, its last numbers, its settings.
//!
//! A [`Summary`] reads a few kilobytes, however long the run is.

use crate::flatten;
use crate::inside::Inside;
use crate::table::RECORD_BYTES_MAX;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use xxhash_rust::xxh3::xxh3_64;

/// The files of a run that are shown.
pub mod files {
    /// All settings, derived ones as comments.
    pub const CONFIG: &str = "config.toml";
    /// One record a step.
    pub const METRICS: &str = "metrics.jsonl";
    /// One record an evaluation.
    pub const EVALUATIONS: &str = "evaluations.jsonl";
    /// Samples of the machine.
    pub const MONITOR: &str = "monitor.jsonl";
    /// Numbers that the run found suspicious.
    pub const HEALTH: &str = "health.jsonl";
    /// The verdicts on the run: the output of `trainyard doctor --json`.
    pub const VERDICTS: &str = "verdicts.json";
    /// Texts that the model wrote.
    pub const SAMPLES: &str = "samples.jsonl";
    /// The step program, its prediction and its measurement.
    pub const PLAN: &str = "plan.json";
    /// The version, the machine and the number of ranks.
    pub const ENVIRONMENT: &str = "environment.json";
    /// The model.
    pub const MODEL: &str = "model.json";
    /// Reports of ranks that failed.
    pub const FAULTS: &str = "faults";
    /// Timelines.
    pub const TRACE: &str = "trace";
}

/// Larger settings are not read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// A larger plan is not read.
pub(crate) const PLAN_BYTES_MAX: u64 = 256 << 20;
/// Larger evaluations are not read.
const EVALUATIONS_BYTES_MAX: u64 = 16 << 20;
/// Other files that are read whole are not larger.
pub(crate) const TEXT_BYTES_MAX: u64 = 4 << 20;
/// The files that are read whole, each with the size above which it is left out.
pub(crate) const READ_WHOLE: [(&str, u64); 7] = [
    (files::CONFIG, CONFIG_BYTES_MAX),
    (files::PLAN, PLAN_BYTES_MAX),
    (files::EVALUATIONS, EVALUATIONS_BYTES_MAX),
    (files::HEALTH, TEXT_BYTES_MAX),
    (files::VERDICTS, TEXT_BYTES_MAX),
    (files::SAMPLES, TEXT_BYTES_MAX),
    (files::MODEL, TEXT_BYTES_MAX),
];
/// Numbers of the last record that every list of runs has.
pub(crate) const LISTED: [&str; 11] = [
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "epoch",
    "tps",
    "tflops",
    "mfu",
    "predicted_step_s",
    "mem_peak_bytes",
    "predicted_mem_peak_bytes",
];
/// The end of a file of records in which the last one is looked for first. A longer record needs
/// more.
const TAIL_BYTES: usize = 32 << 10;
/// A run is taken to go on for this long after it last wrote anything.
const QUIET_S: f64 = 20.0;
/// The same, in steps.
const QUIET_STEPS: f64 = 20.0;

/// The state of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It wrote something a short time ago.
    Running,
    /// It reached its end.
    Finished,
    /// It was stopped or killed before its end.
    Stopped,
    /// A rank failed after the last record.
    Failed,
}

impl State {
    /// The name that users see.
    pub fn name(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Finished => "finished",
            State::Stopped => "stopped",
            State::Failed => "failed",
        }
    }
}

/// A run in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The folder's name.
    pub name: String,
    /// The state.
    pub state: State,
    /// Seconds since the Unix epoch when the folder was made.
    pub created_s: f64,
    /// Seconds since the Unix epoch when a record was last written.
    pub updated_s: f64,
    /// Completed steps.
    pub step: u64,
    /// The steps after which the run ends, if it ends after steps.
    pub steps: Option<u64>,
    /// The last record of a step, by name.
    pub last: BTreeMap<String, f64>,
    /// The last validation loss.
    pub validation_loss: Option<f64>,
    /// The lowest validation loss.
    pub validation_loss_min: Option<f64>,
    /// The median seconds of a step that the run measured at its end.
    pub step_s: Option<f64>,
    /// All settings by `section.key`, derived ones too.
    pub config: BTreeMap<String, Value>,
    /// The hash of the settings: runs with the same settings have the same.
    pub config_hash: String,
    /// The hash of the step program: runs with the same hash execute the same instructions.
    pub program_hash: Option<String>,
}

/// A mark of the files that a summary was read from. Equal marks: nothing was written meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mark([(u64, u64); 6]);

impl Mark {
    /// The mark of a run's folder.
    pub fn of(folder: &Path) -> Mark {
        let names = [files::CONFIG, files::METRICS, files::EVALUATIONS, files::PLAN, files::MONITOR, files::FAULTS];
        Mark(names.map(|name| {
            let about = folder.join(name).symlink_metadata();
            about.map_or((0, 0), |about| (about.len(), nanos(about.modified())))
        }))
    }

    /// Seconds since the Unix epoch of the last write.
    fn written_s(&self) -> f64 {
        self.0.iter().map(|(_, nanos)| *nanos).max().unwrap_or(0) as f64 / 1e9
    }
}

fn nanos(time: io::Result<SystemTime>) -> u64 {
    let since = time.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since: Duration| since.as_nanos() as u64)
}

/// Now, in seconds since the Unix epoch.
pub fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// True for the folder of a run: it has settings or records.
pub fn is_run(folder: &Path) -> bool {
    [files::CONFIG, files::METRICS].iter().any(|file| folder.join(file).is_file())
}

/// The folder around a run's folder, and the run's name. None if the folder has no such name.
///
/// # Errors
///
/// The folder does not exist.
pub fn split(folder: &Path) -> io::Result<Option<(PathBuf, String)>> {
    // `runs/x/..` and links have names of their own.
    let real = folder.canonicalize()?;
    let name = real.file_name().and_then(|name| name.to_str());
    Ok(real.parent().zip(name).map(|(around, name)| (around.to_owned(), name.to_owned())))
}

/// The folders in the runs folder that are runs, in the order of their names.
///
/// # Errors
///
/// The folder cannot be listed.
pub fn folders(inside: &Inside) -> io::Result<Vec<(String, PathBuf)>> {
    let mut runs = Vec::new();
    for entry in std::fs::read_dir(inside.root())? {
        let entry = entry?;
        // A name that is not text could not stand in an address.
        let Ok(name) = entry.file_name().into_string() else { continue };
        let folder = entry.path();
        // A folder behind a symbolic link may lie elsewhere.
        if is_run(&folder) && folder.canonicalize().is_ok_and(|real| real.starts_with(inside.root())) {
            runs.push((name, folder));
        }
    }
    runs.sort();
    Ok(runs)
}

impl Summary {
    /// Reads a run's folder.
    ///
    /// # Errors
    ///
    /// The folder is gone, or the disk fails. A file that is missing, refused, too large, or not
    /// what it should be leaves its numbers out, so that one bad run hides no others.
    pub fn read(inside: &Inside, name: &str, folder: &Path) -> io::Result<Summary> {
        let config_text = readable(inside.read(&folder.join(files::CONFIG), CONFIG_BYTES_MAX))?.unwrap_or_default();
        let config = settings(&config_text);
        let metrics = last_record(inside, &folder.join(files::METRICS))?;
        let evaluations = readable(inside.read(&folder.join(files::EVALUATIONS), EVALUATIONS_BYTES_MAX))?;
        let losses: Vec<f64> = evaluations.iter().flat_map(|text| text.lines()).filter_map(validation_loss).collect();
        let plan = readable(inside.read(&folder.join(files::PLAN), PLAN_BYTES_MAX))?;
        let plan: Option<Plan> = plan.as_deref().and_then(|text| serde_json::from_str(text).ok());
        let measured = plan.as_ref().and_then(|plan| plan.measured.as_ref());
        let about = folder.metadata()?;
        let created = about.created().or_else(|_| about.modified());
        let step = metrics.get("step").map_or(0, |step| *step as u64);
        let steps = config.get("training.steps").and_then(Value::as_u64);
        let mut summary = Summary {
            name: name.to_owned(),
            state: State::Stopped,
            created_s: nanos(created) as f64 / 1e9,
            updated_s: nanos(folder.join(files::METRICS).metadata().and_then(|about| about.modified())) as f64 / 1e9,
            step,
            steps,
            validation_loss: losses.last().copied(),
            validation_loss_min: losses.iter().copied().min_by(f64::total_cmp),
            step_s: measured.and_then(|measured| measured.step_s),
            config_hash: hash(&of_the_work(&config)),
            program_hash: plan.as_ref().and_then(|plan| plan.program.as_ref()).map(hash),
            config,
            last: metrics,
        };
        summary.state = summary.state_now(folder, measured.is_some());
        Ok(summary)
    }

    /// The state, by what was written last.
    fn state_now(&self, folder: &Path, is_measured: bool) -> State {
        let mark = Mark::of(folder);
        let quiet = QUIET_S.max(QUIET_STEPS * self.last.get("step_s").copied().unwrap_or(0.0).clamp(0.0, 600.0));
        let written = |name: &str| nanos(folder.join(name).metadata().and_then(|about| about.modified()));
        let ended = is_measured && written(files::PLAN) >= written(files::METRICS);
        let limited = |key: &str| self.config.get(key).is_some_and(|value| !value.is_null());
        let reached = self.steps.is_some_and(|steps| self.step >= steps)
            || limited("training.seconds")
            || limited("evaluation.early_stopping_patience");
        if written(files::FAULTS) > written(files::METRICS) {
            State::Failed
        } else if ended && reached {
            State::Finished
        } else if !ended && now_s() - mark.written_s() < quiet {
            State::Running
        } else if self.steps.is_some_and(|steps| self.step >= steps) {
            State::Finished
        } else {
            State::Stopped
        }
    }
}

/// The parts of a plan that are needed.
#[derive(Deserialize)]
struct Plan<'a> {
    #[serde(borrow)]
    program: Option<&'a serde_json::value::RawValue>,
    measured: Option<Measured>,
}

#[derive(Deserialize)]
struct Measured {
    step_s: Option<f64>,
}

/// Nothing where there is no file.
pub(crate) fn optional<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Nothing where there is no file, or one that is refused or too large. Alerts say so.
fn readable<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{FileTooLarge, PermissionDenied};
    match read {
        Err(error) if matches!(error.kind(), PermissionDenied | FileTooLarge) => Ok(None),
        read => optional(read),
    }
}

fn hash(of: &impl Serialize) -> String {
    let text = serde_json::to_vec(of).unwrap_or_default();
    format!("{:016x}", xxh3_64(&text))
}

/// The settings without those that only say where a run lies.
fn of_the_work(config: &BTreeMap<String, Value>) -> BTreeMap<&String, &Value> {
    config.iter().filter(|(key, _)| !key.starts_with("run.")).collect()
}

fn validation_loss(line: &str) -> Option<f64> {
    serde_json::from_str::<Value>(line).ok()?.get("loss")?.as_f64()
}

/// The numbers of the last whole record of a file; none if there is no record.
fn last_record(inside: &Inside, path: &Path) -> io::Result<BTreeMap<String, f64>> {
    let Some(file) = readable(inside.open(path))? else { return Ok(BTreeMap::new()) };
    let len = file.metadata()?.len();
    let mut bytes = TAIL_BYTES;
    loop {
        let start = len.saturating_sub(bytes as u64);
        let mut tail = vec![0; (len - start) as usize];
        file.read_exact_at(&mut tail, start)?;
        // What comes after the last line end is being written.
        let whole = tail.iter().rposition(|byte| *byte == b'\n').map_or(&tail[..0], |end| &tail[..end]);
        for line in whole.split(|byte| *byte == b'\n').rev() {
            let mut found = BTreeMap::new();
            let mut keep = |path: &str, value: f64| {
                found.insert(path.to_owned(), value);
            };
            if flatten::numbers(line, &mut keep).is_ok() {
                return Ok(found);
            }
        }
        if start == 0 || bytes == RECORD_BYTES_MAX {
            return Ok(BTreeMap::new());
        }
        bytes = (8 * bytes).min(RECORD_BYTES_MAX);
    }
}

/// The settings in the text of a `config.toml`, by `section.key`. Derived settings stand in
/// comments (`# key = value  # reason`) and count too.
pub fn settings(text: &str) -> BTreeMap<String, Value> {
    let mut settings = BTreeMap::new();
    let mut section = String::new();
    for line in text.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.trim().to_owned();
            continue;
        }
        let setting = line.strip_prefix("# ").unwrap_or(line);
        let is_key =
            |key: &str| !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        if !setting.split_once('=').is_some_and(|(key, _)| is_key(key.trim())) {
            continue;
        }
        // A value of several lines is not read here, but by the whole text below.
        if let Ok(table) = setting.parse::<toml::Table>() {
            insert(&mut settings, &section, table);
        }
    }
    if let Ok(table) = text.parse::<toml::Table>() {
        insert(&mut settings, "", table);
    }
    settings
}

fn insert(settings: &mut BTreeMap<String, Value>, section: &str, table: toml::Table) {
    for (key, value) in table {
        let key = if section.is_empty() { key } else { format!("{section}.{key}") };
        match value {
            toml::Value::Table(table) => insert(settings, &key, table),
            value => {
                settings.insert(key, serde_json::to_value(value).unwrap_or(Value::Null));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_were_derived_count_too() {
        let text = "# As resolved. Commented values were derived.\n[model]\npreset = \"quickstart\"\n# dim = 64  # preset\n\
                    [data]\ntrain = [\n  \"a\",\n  \"b\",\n]\n[memory.offload]\noptimizer = \"none\"\n";
        let settings = settings(text);
        assert_eq!(settings["model.preset"], "quickstart");
        assert_eq!(settings["model.dim"], 64);
        assert_eq!(settings["data.train"], serde_json::json!(["a", "b"]));
        assert_eq!(settings["memory.offload.optimizer"], "none");
        assert_eq!(settings.len(), 4);
    }

    fn run(files: &[(&str, &str)]) -> (tempfile::TempDir, Summary) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a");
        std::fs::create_dir(&folder).unwrap();
        for (name, text) in files {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let inside = Inside::new(root.path()).unwrap();
        let (name, folder) = folders(&inside).unwrap().pop().unwrap();
        let summary = Summary::read(&inside, &name, &folder).unwrap();
        (root, summary)
    }

    #[test]
    fn a_run_has_its_last_whole_record() {
        let padding = "x".repeat(100_000);
        let metrics = format!(
            "{{\"step\":1,\"loss\":3}}\n{{\"step\":2,\"loss\":2.5,\"mem_peak\":{{\"grads\":7}},\"t\":\"{padding}\"}}\n{{\"step\":3,\"lo"
        );
        let evaluations = "{\"step\":1,\"loss\":4}\n{\"step\":2,\"loss\":5}\n";
        let config = "[training]\nsteps = 9\n";
        let (_root, summary) =
            run(&[("config.toml", config), ("metrics.jsonl", &metrics), ("evaluations.jsonl", evaluations)]);
        assert_eq!((summary.step, summary.steps, summary.state), (2, Some(9), State::Running));
        assert_eq!((summary.last["loss"], summary.last["mem_peak.grads"]), (2.5, 7.0));
        assert_eq!((summary.validation_loss, summary.validation_loss_min), (Some(5.0), Some(4.0)));
    }

    #[test]
    fn a_run_that_reached_its_steps_is_finished() {
        let (_root, summary) = run(&[
            ("config.toml", "[training]\nsteps = 2\n"),
            ("metrics.jsonl", "{\"step\":2,\"loss\":2.5}\n"),
            ("plan.json", "{\"program\":{\"rank\":0},\"measured\":{\"step_s\":0.5}}"),
        ]);
        assert_eq!((summary.state, summary.step_s), (State::Finished, Some(0.5)));
        assert_eq!(summary.program_hash.unwrap().len(), 16);
    }

    #[test]
    fn damaged_files_leave_their_numbers_out() {
        let (_root, summary) = run(&[("config.toml", "[[["), ("metrics.jsonl", "\0\0\n[]\n"), ("plan.json", "{")]);
        assert_eq!((summary.step, summary.config.len(), summary.program_hash), (0, 0, None));
    }
}
