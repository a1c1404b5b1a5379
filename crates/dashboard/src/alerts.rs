//! Alerts: facts that a watcher of a run should know at once.

use crate::inside::Inside;
use crate::run::{READ_WHOLE, State, Summary, TEXT_BYTES_MAX, files, now_s, optional};
use crate::store::Run;
use serde::Serialize;
use serde_json::Value;
use trainyard_base::format_bytes;

/// The severity of an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Worth knowing.
    Note,
    /// Something is not as it should be.
    Warning,
    /// The run does not go on, or its numbers are wrong.
    Error,
}

/// One fact.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alert {
    /// The severity.
    pub level: Level,
    /// The fact.
    pub text: String,
    /// The step that it is about.
    pub step: Option<u64>,
}

/// A running step is late after this many times its usual seconds.
const LATE_STEPS: f64 = 10.0;
/// A step or its memory is above its prediction by more than this share.
const ABOVE: f64 = 0.2;
/// Events of `health.jsonl` that become alerts: the last ones.
const EVENTS_MAX: usize = 50;

/// The alerts of a run, the worst first.
pub fn of(inside: &Inside, run: &Run, summary: &Summary) -> Vec<Alert> {
    let mut alerts = Vec::new();
    let mut add = |level, step, text: String| alerts.push(Alert { level, text, step });
    let last = |name: &str| summary.last.get(name).copied();
    if summary.state == State::Failed {
        add(Level::Error, Some(summary.step), format!("a rank failed: its report is in {}", files::FAULTS));
    }
    if last("loss").is_some_and(|loss| !loss.is_finite()) {
        add(Level::Error, Some(summary.step), "the loss of the last step is not finite".to_owned());
    }
    if let (State::Running, Some(step_s)) = (summary.state, last("step_s").filter(|step_s| *step_s > 0.0)) {
        let late = (now_s() - summary.updated_s) / step_s;
        if late > LATE_STEPS {
            add(Level::Warning, Some(summary.step), format!("no new record for the time of {late:.0} steps"));
        }
    }
    let measured_s = summary.step_s.or(last("step_s"));
    if let (Some(measured), Some(predicted)) = (measured_s, last("predicted_step_s")) {
        let share = measured / predicted - 1.0;
        if share > ABOVE {
            let text = format!("a step takes {:.0} % longer than predicted", 100.0 * share);
            add(Level::Note, None, text);
        }
    }
    if let (Some(peak), Some(predicted)) = (last("mem_peak_bytes"), last("predicted_mem_peak_bytes"))
        && peak > predicted * (1.0 + ABOVE)
    {
        let [peak, predicted] = [peak, predicted].map(|bytes| format_bytes(bytes as u64));
        add(Level::Warning, None, format!("the peak of memory is {peak}, predicted were {predicted}"));
    }
    run.with(|tables| {
        let steps = &tables.tables[0];
        let skipped = |column: &crate::pyramid::Pyramid| column.range(0, column.len()).sum;
        if let Some(skipped) = steps.column("skipped").map(skipped).filter(|skipped| *skipped > 0.0) {
            let text = format!("steps skipped, because their loss or gradient was not finite: {skipped:.0}");
            add(Level::Warning, None, text);
        }
        if tables.damaged() > 0 {
            add(Level::Note, None, format!("{} damaged records were left out", tables.damaged()));
        }
    });
    for (name, bytes_max) in READ_WHOLE {
        let why = match optional(inside.open(&run.folder.join(name)).and_then(|file| file.metadata())) {
            Ok(Some(about)) if about.len() > bytes_max => format!("it has more than {}", format_bytes(bytes_max)),
            Ok(_) => continue,
            Err(error) => error.to_string(),
        };
        add(Level::Note, None, format!("{name} is not shown: {why}"));
    }
    let health = inside.read(&run.folder.join(files::HEALTH), TEXT_BYTES_MAX).unwrap_or_default();
    let events = health.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    for event in events.take(EVENTS_MAX) {
        let word = |key: &str| event.get(key).and_then(Value::as_str).unwrap_or("").replace('_', " ");
        let value = event.get("value").and_then(Value::as_f64).map_or(String::new(), |value| format!(" of {value:.4}"));
        let usual =
            event.get("usual").and_then(Value::as_f64).map_or(String::new(), |usual| format!(" (usual: {usual:.4})"));
        let text = format!("{}{value}{usual}: {}", word("symptom"), word("reaction"));
        add(Level::Warning, event.get("step").and_then(Value::as_u64), text);
    }
    alerts.sort_by_key(|alert| std::cmp::Reverse(alert.level));
    alerts
}
