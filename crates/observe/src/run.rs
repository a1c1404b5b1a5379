//! The folder of a run: the files that explain it.

use serde::Deserialize;
use std::path::{Path, PathBuf};
use trainyard_record::health::{self, HealthEvent};
use trainyard_record::monitor::{self, Sample};
use trainyard_record::programs::{Predicted, Programs};
use trainyard_record::steps::{self, Step};
use trainyard_record::{RecordError, read_lines};

/// The record of a run.
#[derive(Debug, Default)]
pub struct Run {
    /// The folder.
    pub folder: PathBuf,
    /// The recorded ranks, ascending. Ranks without a record are missing.
    pub ranks: Vec<RankRecord>,
    /// The predicted step, if the machine had a profile.
    pub predicted: Option<Predicted>,
    /// `metrics.jsonl`, by step.
    pub metrics: Vec<Metrics>,
    /// Samples of the machine by rank 0's process, oldest first.
    pub samples: Vec<Sample>,
    /// Suspicious numbers.
    pub health: Vec<HealthEvent>,
    /// Reports of failures.
    pub faults: Vec<FaultReport>,
    /// The images that it trains on; None if it trains on text.
    pub images: Option<Images>,
    /// The form of its products; None where its configuration cannot be read.
    pub products: Option<Products>,
}

/// The form of the numbers that a run multiplies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Products {
    /// f32.
    F32,
    /// bf16 or f16.
    Bits16 {
        /// True if the linear layers could multiply 8-bit integers instead (`precision.int8`):
        /// on a processor, where no other setting forbids it.
        could_be_int8: bool,
    },
    /// 8 bits, in the layers that have them.
    Bits8,
}

/// The preparation of a run's images.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Images {
    /// True if decoded images are kept on disk (`images.cache`).
    pub cached: bool,
}

/// The record of one rank.
#[derive(Debug)]
pub struct RankRecord {
    /// The rank.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// Its programs.
    pub programs: Programs,
    /// Its recorded steps, oldest first.
    pub steps: Vec<Step>,
}

/// The part of a record of `metrics.jsonl` that explanations use.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Metrics {
    /// The step, from 1.
    pub step: u64,
    /// Seconds.
    pub step_s: f64,
    /// The loss; None if it is not finite.
    pub loss: Option<f64>,
    /// The gradient norm; None if it is not finite.
    pub grad_norm: Option<f64>,
    /// Share of the measured peak.
    pub mfu: Option<f64>,
    /// Peak bytes of the pool.
    pub mem_peak_bytes: u64,
    /// The loss scale in f16; skipped steps are then part of the method.
    pub loss_scale: Option<f64>,
    /// True if the update was skipped.
    pub skipped: bool,
}

/// A report in `faults/`: where a rank was when the run failed.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct FaultReport {
    /// The rank that reports.
    pub rank: u32,
    /// Time of the report, since the Unix epoch.
    pub unix_s: f64,
    /// The error.
    pub error: String,
    /// The positions of its lanes.
    pub lanes: Vec<LaneReport>,
}

/// The position of a lane in a [`FaultReport`].
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct LaneReport {
    /// The lane.
    pub lane: String,
    /// The step, from 0.
    pub step: u64,
    /// The instruction in words.
    pub what: String,
    /// `running`, `exchanging`, `finished` or `failed`.
    pub doing: String,
    /// Seconds since it began.
    pub for_s: f64,
}

impl Run {
    /// Reads the folder of a run. It may go on meanwhile.
    ///
    /// # Errors
    /// No run, or a file that cannot be read.
    pub fn open(folder: &Path) -> Result<Run, RecordError> {
        let mut run = Run { folder: folder.to_owned(), ..Run::default() };
        if !folder.join("config.toml").is_file() {
            let why = "it has no config.toml: name the folder of a run, e.g. runs/NAME".to_owned();
            return Err(RecordError::Format { path: folder.display().to_string(), why });
        }
        for rank in 0.. {
            let Some(programs) = Programs::read(folder, rank)? else { break };
            let (host, steps) = steps::read(folder, rank, &programs.programs)?;
            run.ranks.push(RankRecord { rank, host, programs, steps });
        }
        run.predicted = Predicted::read(folder)?;
        run.metrics = read_lines(&folder.join("metrics.jsonl"))?;
        run.metrics.retain(|metrics| metrics.step_s > 0.0);
        run.samples = monitor::read(&monitor::path(folder, 0))?;
        run.health = health::read(folder)?;
        run.faults = fault_reports(&folder.join("faults"))?;
        // Times are explained without it.
        let config = std::fs::read_to_string(folder.join("config.toml")).ok().and_then(|text| text.parse().ok());
        run.images = config.as_ref().and_then(images);
        run.products = config.as_ref().and_then(products);
        Ok(run)
    }

    /// The name of the run.
    pub fn name(&self) -> String {
        self.folder.file_name().map_or_else(|| self.folder.display().to_string(), |n| n.to_string_lossy().into_owned())
    }

    /// Number of ranks of the run; 0 if nothing was recorded.
    pub fn world(&self) -> usize {
        self.ranks.first().map_or(0, |rank| rank.programs.programs[0].mesh.ranks() as usize)
    }
}

/// The images of a configuration.
fn images(config: &toml::Table) -> Option<Images> {
    let is_of_images = config.get("data")?.get("format")?.as_str() == Some("images");
    let cached = config.get("images").and_then(|images| images.get("cache")).is_some();
    is_of_images.then_some(Images { cached })
}

/// The products of a configuration.
fn products(config: &toml::Table) -> Option<Products> {
    let value = |section: &str, key: &str| config.get(section).and_then(|section| section.get(key));
    let is = |section: &str, key: &str, usual: &str| value(section, key).is_none_or(|it| it.as_str() == Some(usual));
    if !is("precision", "fp8", "off") || !is("precision", "int8", "off") {
        return Some(Products::Bits8);
    }
    let whole = value("parallel", "tensor_parallel_degree").is_none_or(|degree| degree.as_integer() == Some(1));
    let could_be_int8 = is("compute", "device", "cpu")
        && value("quantization", "aware").is_none()
        && whole
        && !config.contains_key("experts");
    match value("precision", "compute")?.as_str()? {
        "f32" => Some(Products::F32),
        "bf16" | "f16" => Some(Products::Bits16 { could_be_int8 }),
        _ => None,
    }
}

fn fault_reports(folder: &Path) -> Result<Vec<FaultReport>, RecordError> {
    let error = |source| RecordError::Io { what: "read", path: folder.display().to_string(), source };
    let files = match std::fs::read_dir(folder) {
        Ok(files) => files,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(error(source)),
    };
    let mut reports: Vec<FaultReport> = Vec::new();
    for file in files {
        let path = file.map_err(error)?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let text = std::fs::read(&path).map_err(error)?;
            reports.extend(serde_json::from_slice::<FaultReport>(&text).ok());
        }
    }
    reports.sort_by(|a, b| a.unix_s.total_cmp(&b.unix_s).then(a.rank.cmp(&b.rank)));
    Ok(reports)
}
