//! A report: the page in one file with the data of some runs inside. It opens without a server and
//! without a network.

use crate::page;
use crate::run;
use crate::server::{ApiError, curves_json, details_json, runs_json};
use crate::store::Store;
use crate::table::{Progress, Scale};
use crate::timeline::Timelines;
use serde_json::{Map, json};
use std::path::{Path, PathBuf};

/// Buckets of a curve in a report: more than a screen has pixels, so that zooming in shows more.
const BINS: usize = 4_000;
/// Buckets of the curves after the first [`METRICS_MANY`].
const BINS_OF_MANY: usize = 400;
/// Metrics that get [`BINS`] buckets each.
const METRICS_MANY: usize = 200;
/// Steps whose timeline is in a report.
const TIMELINES: usize = 6;

/// A report that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The folder has no such run.
    #[error("there is no run in {0}: it has neither config.toml nor metrics.jsonl")]
    NoRun(PathBuf),
    /// Runs of different folders.
    #[error("{0} and {1} do not lie in the same folder")]
    Folders(PathBuf, PathBuf),
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] ApiError),
}

/// The report of the runs in `folders`, which lie beside each other.
///
/// # Errors
///
/// A folder is no run, or cannot be read.
pub fn html(folders: &[PathBuf]) -> Result<String, ReportError> {
    let mut names = Vec::new();
    let mut root: Option<(PathBuf, &Path)> = None;
    for folder in folders {
        let found = run::split(folder).ok().flatten();
        let (around, name) = found.ok_or_else(|| ReportError::NoRun(folder.clone()))?;
        let (known, first) = root.get_or_insert_with(|| (around.clone(), folder));
        if *known != around {
            return Err(ReportError::Folders(first.to_owned(), folder.clone()));
        }
        names.push(name);
    }
    let (root, _) = root.unwrap_or_else(|| (PathBuf::from("."), Path::new(".")));
    let store = Store::open(&root).map_err(ApiError::from)?;
    let timelines = Timelines::default();
    let (mut details, mut curves, mut steps) = (Map::new(), Vec::new(), Map::new());
    for (name, folder) in names.iter().zip(folders) {
        let run = store.run(name).map_err(ApiError::from)?.ok_or_else(|| ReportError::NoRun(folder.clone()))?;
        while run.read(store.inside()).map_err(ApiError::from)? == Progress::More {}
        let mut about = details_json(&store, &run, &timelines)?;
        let metrics = run.with(|tables| tables.names());
        let runs = [run];
        for (number, metric) in metrics.into_iter().enumerate() {
            let bins = if number < METRICS_MANY { BINS } else { BINS_OF_MANY };
            curves.extend(curves_json(&runs, &[metric], (f64::NEG_INFINITY, f64::INFINITY), bins, Scale::Linear));
        }
        let recorded = timelines.steps(store.inside(), &runs[0]).map_err(ApiError::from)?;
        let chosen = spread(&recorded, TIMELINES);
        let found = chosen.iter().map(|step| timelines.step(store.inside(), &runs[0], *step as f64));
        let found = found.collect::<Result<Vec<_>, _>>().map_err(ApiError::from)?;
        steps.insert(name.clone(), json!(found.into_iter().flatten().collect::<Vec<_>>()));
        about["timeline_steps"] = json!(chosen);
        details.insert(name.clone(), about);
    }
    let data = json!({
        "runs": runs_json(&store, Some(&names))?,
        "details": details,
        "curves": curves,
        "timelines": steps,
    });
    Ok(page::with_data(&format!("{} · Trainyard", names.join(", ")), &data))
}

/// At most `number` of the steps: the first, the last, and some between.
fn spread(steps: &[u64], number: usize) -> Vec<u64> {
    if steps.len() <= number {
        return steps.to_vec();
    }
    (0..number).map(|index| steps[index * (steps.len() - 1) / (number - 1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_report_is_one_file_and_no_text_of_a_run_ends_its_script() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("config.toml"), "[model]\npreset = \"</script><b>\"\n").unwrap();
        let records: String =
            (1..=9_000).map(|step| format!("{{\"step\":{step},\"loss\":{}}}\n", 1.0 / f64::from(step))).collect();
        std::fs::write(folder.join("metrics.jsonl"), records).unwrap();
        let html = html(std::slice::from_ref(&folder)).unwrap();
        assert_eq!(html.matches("</script>").count(), 2);
        for outside in ["src=", "href=\"style", "http://", "https://"] {
            let found = html.replace("http://www.w3.org/2000/svg", "");
            assert!(!found.contains(outside), "{outside}");
        }
        let start = html.find("id=\"data\">").unwrap() + 10;
        let data: Value = serde_json::from_str(&html[start..start + html[start..].find("</script>").unwrap()]).unwrap();
        assert_eq!(data["details"]["a"]["config"]["model.preset"], "</script><b>");
        let loss = data["curves"].as_array().unwrap().iter().find(|curve| curve["metric"] == "loss").unwrap();
        assert!((2_000..=4_000).contains(&loss["values"].as_array().unwrap().len()));
    }

    #[test]
    fn folders_that_are_no_runs_are_named() {
        let root = tempfile::tempdir().unwrap();
        let error = html(&[root.path().join("x")]).unwrap_err().to_string();
        assert!(error.contains("there is no run in") && error.contains("/x"), "{error}");
        assert_eq!(spread(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 6), [1, 3, 5, 7, 9, 11]);
    }
}
