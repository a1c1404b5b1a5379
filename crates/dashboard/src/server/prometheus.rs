//! The last numbers of every run in the text format of Prometheus.

use crate::run::Summary;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

/// The content type of the format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The numbers of `runs`: one metric per name, one line per run.
pub fn text(runs: &[Arc<Summary>]) -> String {
    let mut metrics: BTreeMap<String, Vec<(&str, f64)>> = BTreeMap::new();
    for run in runs {
        for (name, value) in &run.last {
            metrics.entry(metric_name(name)).or_default().push((&run.name, *value));
        }
        let more = [("validation_loss", run.validation_loss), ("updated_seconds", Some(run.updated_s))];
        for (name, value) in more {
            value.iter().for_each(|value| metrics.entry(metric_name(name)).or_default().push((&run.name, *value)));
        }
        let running = f64::from(u8::from(run.state == crate::run::State::Running));
        metrics.entry(metric_name("running")).or_default().push((&run.name, running));
    }
    let mut text = String::new();
    for (name, values) in metrics {
        let _ = writeln!(text, "# TYPE {name} gauge");
        for (run, value) in values {
            let value = if value.is_nan() { "NaN".to_owned() } else { value.to_string() };
            let _ = writeln!(text, "{name}{{run=\"{}\"}} {value}", escaped(run));
        }
    }
    text
}

/// `trainyard_` and the name with what Prometheus does not allow replaced.
fn metric_name(name: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    format!("trainyard_{}", name.chars().map(allowed).collect::<String>())
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
