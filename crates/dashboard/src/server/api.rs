//! The data of the page, as JSON.

use super::prometheus;
use crate::alerts;
use crate::pyramid::Bucket;
use crate::run::{LISTED, PLAN_BYTES_MAX, Summary, TEXT_BYTES_MAX, files};
use crate::store::{Run, Store};
use crate::table::{Progress, Scale};
use crate::timeline::Timelines;
use hyper::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Numbers of the last record that the list of runs has beside [`LISTED`].
const ALSO_LISTED: [&str; 4] = ["step_s", "data_wait_s", "comm_exposed_s", "skipped"];
/// Curves in one answer.
const CURVES_MAX: usize = 4_000;
/// Buckets of a curve.
const BINS_MAX: usize = 8_000;
/// Buckets of a curve if the request does not say.
const BINS: usize = 800;
/// Time that a request may spend on reading what was appended. The rest is read beside.
const READ_TIME: Duration = Duration::from_millis(20);

/// An answer.
pub struct Answer {
    /// The content type.
    pub kind: &'static str,
    /// The content.
    pub text: String,
}

/// A request without an answer.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// No such place.
    #[error("there is nothing at {0}")]
    Path(String),
    /// No such run.
    #[error("there is no run `{0}`")]
    Run(String),
    /// A parameter is missing or wrong.
    #[error("{0}")]
    Query(String),
    /// A file cannot be read.
    #[error("cannot read the run: {0}")]
    Io(#[from] io::Error),
}

impl ApiError {
    /// The status of the answer.
    pub fn status(&self) -> StatusCode {
        match self {
            ApiError::Path(_) | ApiError::Run(_) => StatusCode::NOT_FOUND,
            ApiError::Query(_) => StatusCode::BAD_REQUEST,
            ApiError::Io(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// Answers a request.
///
/// # Errors
///
/// There is no answer to it.
pub fn answer(path: &str, query: &str, store: &Store, timelines: &Timelines) -> Result<Answer, ApiError> {
    let query = Query::parse(query);
    let json = |value: Value| Answer { kind: "application/json", text: value.to_string() };
    Ok(match path {
        "/api/runs" => json(runs_json(store, None)?),
        "/api/run" => json(details_json(store, &run(store, query.one("run")?)?, timelines)?),
        "/api/curves" => json(curves(store, &query)?),
        "/api/timeline" => {
            let run = run(store, query.one("run")?)?;
            json(json!(timelines.step(store.inside(), &run, query.number("step")?)?))
        }
        "/metrics" => {
            let runs = summaries(store, None)?;
            Answer { kind: prometheus::CONTENT_TYPE, text: prometheus::text(&runs) }
        }
        _ => return Err(ApiError::Path(path.chars().take(80).collect())),
    })
}

/// The short form of a run, for lists.
pub fn brief(summary: &Summary) -> Value {
    let listed = LISTED.iter().chain(&ALSO_LISTED).filter_map(|name| Some((*name, summary.last.get(*name)?)));
    json!({
        "name": summary.name,
        "state": summary.state,
        "created_s": summary.created_s,
        "updated_s": summary.updated_s,
        "step": summary.step,
        "steps": summary.steps,
        "validation_loss": summary.validation_loss,
        "validation_loss_min": summary.validation_loss_min,
        "median_step_s": summary.step_s,
        "config_hash": summary.config_hash,
        "last": listed.collect::<BTreeMap<_, _>>(),
    })
}

/// A bucket as a number, null if its only value is not finite, false if it is empty, or minimum,
/// maximum, mean, count, and number of values that are not finite.
pub fn bucket_json(bucket: &Bucket) -> Value {
    match (bucket.count, bucket.not_finite) {
        (0, 0) => Value::Bool(false),
        (0, 1) => Value::Null,
        (1, 0) => json!(bucket.sum),
        (0, wrong) => json!([null, null, null, 0, wrong]),
        (count, wrong) => json!([bucket.min, bucket.max, bucket.mean(), count, wrong]),
    }
}

/// Curves of `runs` and `metrics` between two places.
pub fn curves_json(
    runs: &[Arc<Run>],
    metrics: &[String],
    (from, to): (f64, f64),
    bins: usize,
    scale: Scale,
) -> Vec<Value> {
    let mut curves = Vec::new();
    for run in runs {
        run.with(|tables| {
            for metric in metrics {
                let Some((table, name)) = tables.find(metric) else { continue };
                let curve = table.curve(name, from, to, bins, scale);
                let mut places = Vec::with_capacity(curve.buckets.len());
                let mut values = Vec::with_capacity(curve.buckets.len());
                for (first, last, bucket) in &curve.buckets {
                    places.push(if first == last { json!(first) } else { json!([first, last]) });
                    values.push(bucket_json(bucket));
                }
                curves.push(json!({
                    "run": run.name,
                    "metric": metric,
                    "records": table.len(),
                    "generation": table.generation(),
                    "places": places,
                    "values": values,
                }));
            }
        });
    }
    curves
}

/// The parts of a plan that are shown.
#[derive(Default, Deserialize)]
struct Plan {
    predicted: Option<Value>,
    measured: Option<Value>,
}

/// Everything about one run but its curves.
///
/// # Errors
///
/// A file cannot be read.
pub fn details_json(store: &Store, run: &Arc<Run>, timelines: &Timelines) -> Result<Value, ApiError> {
    let inside = store.inside();
    read_some(store, run)?;
    let summary = run.summary(inside)?;
    // Files that are refused or too large have an alert instead.
    let samples = inside.read(&run.folder.join(files::SAMPLES), TEXT_BYTES_MAX).unwrap_or_default();
    let samples: Vec<Value> = samples.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let plan: Plan = json_file(store, run, files::PLAN, PLAN_BYTES_MAX).unwrap_or_default();
    Ok(json!({
        "run": brief(&summary),
        "config": summary.config,
        "program_hash": summary.program_hash,
        "metrics": run.with(|tables| tables.names()),
        "model": json_file::<Value>(store, run, files::MODEL, TEXT_BYTES_MAX),
        "predicted": plan.predicted,
        "measured": plan.measured,
        "verdicts": json_file::<Value>(store, run, files::VERDICTS, TEXT_BYTES_MAX),
        "alerts": alerts::of(inside, run, &summary),
        "samples": samples,
        "timeline_steps": timelines.steps(inside, run)?,
    }))
}

fn json_file<T: DeserializeOwned>(store: &Store, run: &Run, name: &str, bytes_max: u64) -> Option<T> {
    let text = store.inside().read(&run.folder.join(name), bytes_max).ok()?;
    serde_json::from_str(&text).ok()
}

/// The runs in short, or those with the `names`.
fn summaries(store: &Store, names: Option<&[String]>) -> Result<Vec<Arc<Summary>>, ApiError> {
    let mut runs = store.scan()?;
    runs.retain(|run| names.is_none_or(|names| names.contains(&run.name)));
    let read = runs.iter().map(|run| run.summary(store.inside()));
    // A folder that was removed meanwhile is no run.
    let read = read.filter(|read| !matches!(read, Err(error) if error.kind() == io::ErrorKind::NotFound));
    Ok(read.collect::<io::Result<_>>()?)
}

/// The list of runs, or of those with the `names`, with the settings in which they differ.
///
/// # Errors
///
/// A file cannot be read.
pub fn runs_json(store: &Store, names: Option<&[String]>) -> Result<Value, ApiError> {
    let summaries = summaries(store, names)?;
    let differing = differing(&summaries);
    let runs = summaries.iter().map(|summary| {
        let mut run = brief(summary);
        let settings = differing.iter().filter_map(|key| Some(((*key).clone(), summary.config.get(*key)?.clone())));
        run["settings"] = Value::Object(settings.collect::<Map<_, _>>());
        run
    });
    let runs: Vec<Value> = runs.collect();
    let folder = store.inside().root().file_name().map(|name| name.to_string_lossy());
    Ok(json!({"folder": folder, "runs": runs, "differing": differing}))
}

/// The settings that are not the same in all runs.
fn differing(summaries: &[Arc<Summary>]) -> Vec<&String> {
    let mut values: BTreeMap<&String, (&Value, usize, bool)> = BTreeMap::new();
    for (key, value) in summaries.iter().flat_map(|summary| &summary.config) {
        let entry = values.entry(key).or_insert((value, 0, false));
        entry.1 += 1;
        entry.2 |= entry.0 != value;
    }
    let is_name = |key: &str| key.starts_with("run.");
    let differs = |count: usize, other: bool| other || count < summaries.len();
    values.into_iter().filter(|(key, (_, n, other))| differs(*n, *other) && !is_name(key)).map(|(key, _)| key).collect()
}

fn run(store: &Store, name: &str) -> Result<Arc<Run>, ApiError> {
    store.run(name)?.ok_or_else(|| ApiError::Run(name.chars().take(80).collect()))
}

/// Reads on for a short time; a long file is read further beside, and requests then wait for
/// nothing.
fn read_some(store: &Store, run: &Arc<Run>) -> Result<Progress, ApiError> {
    if run.is_read_beside() {
        return Ok(Progress::More);
    }
    let start = Instant::now();
    loop {
        let progress = run.read(store.inside())?;
        if progress == Progress::Done {
            return Ok(progress);
        }
        if start.elapsed() > READ_TIME {
            run.read_beside(store.inside());
            return Ok(progress);
        }
    }
}

fn curves(store: &Store, query: &Query) -> Result<Value, ApiError> {
    let runs = query.all("run").map(|name| run(store, name)).collect::<Result<Vec<_>, _>>()?;
    let metrics: Vec<String> = query.all("metric").map(str::to_owned).collect();
    if runs.len() * metrics.len() > CURVES_MAX {
        return Err(ApiError::Query(format!("at most {CURVES_MAX} curves at once")));
    }
    let bins = query.number_or("bins", BINS as f64)?.clamp(1.0, BINS_MAX as f64) as usize;
    let range = (query.number_or("from", f64::NEG_INFINITY)?, query.number_or("to", f64::INFINITY)?);
    let scale = match query.all("scale").next() {
        None | Some("linear") => Scale::Linear,
        Some("log") => Scale::Log,
        Some(_) => return Err(ApiError::Query("the parameter `scale` is linear or log".to_owned())),
    };
    let mut reading = false;
    for run in &runs {
        reading |= read_some(store, run)? == Progress::More;
    }
    Ok(json!({"reading": reading, "curves": curves_json(&runs, &metrics, range, bins, scale)}))
}

/// The parameters of a request.
struct Query<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'a> Query<'a> {
    fn parse(text: &'a str) -> Query<'a> {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        Query(
            pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(k, v)| (decoded(k), decoded(v)))
                .collect(),
        )
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_ref())
    }

    fn one(&self, name: &str) -> Result<&str, ApiError> {
        self.all(name).next().ok_or_else(|| ApiError::Query(format!("the parameter `{name}` is missing")))
    }

    fn number(&self, name: &str) -> Result<f64, ApiError> {
        let value = self.one(name)?.parse().ok().filter(|value: &f64| !value.is_nan());
        value.ok_or_else(|| ApiError::Query(format!("the parameter `{name}` is not a number")))
    }

    fn number_or(&self, name: &str, default: f64) -> Result<f64, ApiError> {
        if self.all(name).next().is_some() { self.number(name) } else { Ok(default) }
    }
}

/// The text that `%20` and `+` stand for. What is not UTF-8 is replaced.
fn decoded(text: &str) -> Cow<'_, str> {
    if !text.contains(['%', '+']) {
        return Cow::Borrowed(text);
    }
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
        let byte = hex.filter(|_| bytes[at] == b'%').and_then(|hex| u8::from_str_radix(hex, 16).ok());
        decoded.push(byte.unwrap_or(if bytes[at] == b'+' { b' ' } else { bytes[at] }));
        at += if byte.is_some() { 3 } else { 1 };
    }
    Cow::Owned(String::from_utf8_lossy(&decoded).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded() {
        let query = Query::parse("run=a%20b&run=c+d&x=%zz%4&n=1e3&bad=nan&empty&%72un=%ff");
        assert_eq!(query.all("run").collect::<Vec<_>>(), ["a b", "c d", "\u{fffd}"]);
        assert_eq!(query.one("x").unwrap(), "%zz%4");
        assert_eq!((query.number("n").unwrap(), query.one("empty").unwrap()), (1000.0, ""));
        assert!(query.number("bad").is_err() && query.one("none").is_err());
        assert_eq!(query.number_or("none", 2.0).unwrap(), 2.0);
    }
}
