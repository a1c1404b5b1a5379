//! Turns the JSON lines that programs print into rows with a bar and a verdict.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};

/// Runs `command` and returns the last line of its output that is a JSON object. Its stderr goes to
/// `log`.
pub fn last_json_line(command: &mut Command, log: &Path) -> Result<Value> {
    let text = output(command, log)?;
    let mut objects = text.lines().rev().filter_map(|line| serde_json::from_str(line.trim()).ok());
    objects.find(Value::is_object).with_context(|| format!("{command:?} printed no JSON object"))
}

/// Runs `command` and returns its output. Its stderr goes to `log`; if it fails, the error quotes
/// the end.
pub fn output(command: &mut Command, log: &Path) -> Result<String> {
    let file = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
    let output = command
        .stdin(Stdio::null())
        .stderr(file)
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
    if !output.status.success() {
        let said = std::fs::read_to_string(log).unwrap_or_default();
        let tail: Vec<&str> = said.lines().rev().take(12).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("{command:?}: {}\n{}\n(all of it: {})", output.status, tail.join("\n"), log.display());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The number at a JSON pointer (`/cases/0/tflops`).
pub fn figure(value: &Value, pointer: &str) -> Result<f64> {
    let found = value.pointer(pointer).with_context(|| format!("no `{pointer}` in what was printed"))?;
    found.as_f64().with_context(|| format!("`{pointer}` is {found}, not a number"))
}

/// The figures of a training run, from its `metrics.jsonl` and the `evaluations.jsonl` beside it:
/// medians and sums over its steps, and the last validation loss if there was an evaluation.
pub fn training_run(metrics: &Path) -> Result<Value> {
    let steps: Vec<(f64, f64)> = records(metrics)?
        .iter()
        .map(|r| Ok((figure(r, "/step_s")?, figure(r, "/data_wait_s")?)))
        .collect::<Result<_>>()?;
    let evaluations = metrics.with_file_name("evaluations.jsonl");
    let last = if evaluations.is_file() { records(&evaluations)?.pop() } else { None };
    // The first tenth is left out on both sides, while caches and the allocator settle.
    let settled = steps.get(steps.len() / 10..).unwrap_or_default();
    let sum = |part: fn(&(f64, f64)) -> f64| settled.iter().map(part).sum::<f64>();
    Ok(json!({
        "steps": steps.len(),
        "step_s": median(settled.iter().map(|step| step.0).collect())?,
        "data_wait_share": sum(|step| step.1) / sum(|step| step.0),
        "val_loss": last.map(|last| figure(&last, "/loss")).transpose()?,
    }))
}

/// The lines of a file of JSON objects.
pub fn records(path: &Path) -> Result<Vec<Value>> {
    let contents = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let parse = |(index, line): (usize, &str)| -> Result<Value> {
        serde_json::from_str(line).with_context(|| format!("{} line {}", path.display(), index + 1))
    };
    contents.lines().enumerate().map(parse).collect()
}

/// The outputs of the runs of both sides.
pub struct Measured {
    /// One object per run.
    pub ours: Vec<Value>,
    /// One object per run; empty if the peer was not run.
    pub theirs: Vec<Value>,
}

impl Measured {
    /// The median of our figure at a JSON pointer.
    pub fn ours(&self, pointer: &str) -> Result<f64> {
        median(self.ours.iter().map(|value| figure(value, pointer)).collect::<Result<_>>()?)
    }

    /// The median of the peer's figure; none if the peer was not run.
    pub fn theirs(&self, pointer: &str) -> Result<Option<f64>> {
        if self.theirs.is_empty() {
            return Ok(None);
        }
        median(self.theirs.iter().map(|value| figure(value, pointer)).collect::<Result<_>>()?).map(Some)
    }

    /// Medians of `key` for those of our cases whose text fields match `filters`, each with the
    /// peer's case of the same name.
    pub fn cases(&self, filters: &[(&str, &str)], key: &str) -> Result<Vec<Case>> {
        let ours = self.ours.iter().map(list).collect::<Result<Vec<_>>>()?;
        let theirs = self.theirs.iter().map(list).collect::<Result<Vec<_>>>()?;
        let chosen = |case: &&Value| filters.iter().all(|(field, wanted)| text(case, field) == Some(wanted));
        let mut cases = Vec::new();
        for case in ours.first().context("no run")?.iter().filter(chosen) {
            let name = text(case, "name").context("a case without a name")?;
            let of = |runs: &[&Vec<Value>]| -> Result<f64> {
                let find = |run: &&Vec<Value>| {
                    let case = run.iter().find(|case| text(case, "name") == Some(name));
                    figure(case.with_context(|| format!("no case `{name}`"))?, &format!("/{key}"))
                };
                median(runs.iter().map(find).collect::<Result<_>>()?)
            };
            let theirs = if theirs.is_empty() { None } else { Some(of(&theirs)?) };
            cases.push(Case { name: name.to_owned(), ours: of(&ours)?, theirs });
        }
        if cases.is_empty() {
            bail!("no case with {filters:?}");
        }
        Ok(cases)
    }
}

fn text<'a>(value: &'a Value, field: &str) -> Option<&'a str> {
    value.get(field).and_then(Value::as_str)
}

fn list(value: &Value) -> Result<&Vec<Value>> {
    value.get("cases").and_then(Value::as_array).context("no list `cases` in what was printed")
}

/// One named case of a benchmark that has many.
#[derive(Debug)]
pub struct Case {
    /// Name, the same on both sides.
    pub name: String,
    pub ours: f64,
    pub theirs: Option<f64>,
}

/// The median of finite values.
fn median(values: Vec<f64>) -> Result<f64> {
    let finite = values.iter().all(|value| value.is_finite()).then_some(values.iter().copied());
    finite.and_then(trainyard_base::median).with_context(|| format!("cannot take the median of {values:?}"))
}

/// The geometric mean, `exp(mean(ln))`, which is the right mean of ratios.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> Result<f64> {
    let logs: Vec<f64> = values.into_iter().map(f64::ln).collect();
    if logs.is_empty() || logs.iter().any(|l| !l.is_finite()) {
        bail!("a geometric mean needs positive numbers");
    }
    Ok((logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

/// Checks a utilisation. More than all of a peak means that the peak, the clock or the FLOPs are
/// wrong.
pub fn utilisation(what: &str, share: f64) -> Result<f64> {
    if !(0.0..=1.0).contains(&share) {
        bail!("{what} is {:.1} % of the measured peak, which cannot be", share * 100.0);
    }
    Ok(share)
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Bar {
    AtLeast(f64),
    AtMost(f64),
    RatioAtLeast(f64),
    RatioAtMost(f64),
}

/// One line of the table.
#[derive(Debug)]
pub struct Row {
    what: String,
    unit: &'static str,
    ours: f64,
    theirs: Option<f64>,
    bar: Option<Bar>,
}

impl Row {
    /// A figure of our side without a bar.
    pub fn new(what: impl Into<String>, unit: &'static str, ours: f64) -> Self {
        Self { what: what.into(), unit, ours, theirs: None, bar: None }
    }

    /// Adds the peer's figure, if it was run.
    pub fn against(self, theirs: Option<f64>) -> Self {
        Self { theirs, ..self }
    }

    /// Our figure must be at least `bar`.
    pub fn at_least(self, bar: f64) -> Self {
        Self { bar: Some(Bar::AtLeast(bar)), ..self }
    }

    /// Our figure must be at most `bar`.
    pub fn at_most(self, bar: f64) -> Self {
        Self { bar: Some(Bar::AtMost(bar)), ..self }
    }

    /// Our figure divided by the peer's must be at least `bar`.
    pub fn ratio_at_least(self, bar: f64) -> Self {
        Self { bar: Some(Bar::RatioAtLeast(bar)), ..self }
    }

    /// Our figure divided by the peer's must be at most `bar`.
    pub fn ratio_at_most(self, bar: f64) -> Self {
        Self { bar: Some(Bar::RatioAtMost(bar)), ..self }
    }

    /// The name of the figure.
    pub fn name(&self) -> String {
        self.what.clone()
    }

    fn ratio(&self) -> Option<f64> {
        self.theirs.map(|theirs| self.ours / theirs)
    }

    /// True if the bar was reached; None if there is no bar, or if it needs a peer that was not
    /// run.
    pub fn passed(&self) -> Option<bool> {
        match self.bar? {
            Bar::AtLeast(bar) => Some(self.ours >= bar),
            Bar::AtMost(bar) => Some(self.ours <= bar),
            Bar::RatioAtLeast(bar) => Some(self.ratio()? >= bar),
            Bar::RatioAtMost(bar) => Some(self.ratio()? <= bar),
        }
    }

    fn bar(&self) -> String {
        match self.bar {
            None => String::new(),
            Some(Bar::AtLeast(bar)) => format!(">= {}", digits(bar)),
            Some(Bar::AtMost(bar)) => format!("<= {}", digits(bar)),
            Some(Bar::RatioAtLeast(bar)) => format!(">= {} x", digits(bar)),
            Some(Bar::RatioAtMost(bar)) => format!("<= {} x", digits(bar)),
        }
    }
}

impl Serialize for Row {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut row = serializer.serialize_struct("Row", 7)?;
        row.serialize_field("what", &self.what)?;
        row.serialize_field("unit", self.unit)?;
        row.serialize_field("ours", &self.ours)?;
        row.serialize_field("theirs", &self.theirs)?;
        row.serialize_field("ratio", &self.ratio())?;
        row.serialize_field("bar", &self.bar)?;
        row.serialize_field("passed", &self.passed())?;
        row.end()
    }
}

/// Formats four significant digits.
pub fn digits(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let decimals = (3 - value.abs().log10().floor() as i32).clamp(0, 9) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

/// The rows as a Markdown table with aligned columns, which can go into a document as it is.
pub fn print(rows: &[(&str, &Row)]) -> String {
    let header = ["benchmark", "what", "unit", "ours", "PyTorch", "ratio", "bar", ""].map(String::from);
    let mut cells = vec![header];
    for (name, row) in rows {
        let optional = |value: Option<f64>| value.map(digits).unwrap_or_default();
        let verdict = match row.passed() {
            Some(true) => "pass",
            Some(false) => "FAIL",
            None if row.bar.is_some() => "no peer",
            None => "",
        };
        cells.push([
            (*name).into(),
            row.what.clone(),
            row.unit.into(),
            digits(row.ours),
            optional(row.theirs),
            optional(row.ratio()),
            row.bar(),
            verdict.into(),
        ]);
    }
    let widths: Vec<usize> =
        (0..8).map(|c| cells.iter().map(|r| r[c].chars().count()).max().unwrap_or(0).max(3)).collect();
    let mut out = String::new();
    for (index, row) in cells.iter().enumerate() {
        let padded: Vec<String> = row.iter().zip(&widths).map(|(cell, &w)| format!("{cell:w$}")).collect();
        out.push_str(&format!("| {} |\n", padded.join(" | ")));
        if index == 0 {
            let rule: Vec<String> = widths.iter().map(|&w| "-".repeat(w)).collect();
            out.push_str(&format!("| {} |\n", rule.join(" | ")));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Value> {
        let folder = tempfile::tempdir().unwrap();
        last_json_line(Command::new("sh").args(["-c", script]), &folder.path().join("log"))
    }

    #[test]
    fn the_last_object_counts() {
        assert_eq!(shell("echo '{\"a\": 1}'; echo '{\"a\": 2}'; echo '[3]'; echo done").unwrap(), json!({"a": 2}));
        assert!(shell("echo 1").unwrap_err().to_string().contains("no JSON object"));
        let error = shell("echo why >&2; exit 3").unwrap_err().to_string();
        assert!(error.contains("why") && error.contains("exit status: 3"), "{error}");
    }

    #[test]
    fn medians_of_cases_are_matched_by_name() {
        let run = |a: f64, b: f64| json!({"cases": [{"name": "a", "dtype": "f32", "v": a}, {"name": "b", "dtype": "f32", "v": b}]});
        let turned = json!({"cases": [{"name": "b", "v": 20.0}, {"name": "a", "v": 10.0}]});
        let measured = Measured { ours: vec![run(1.0, 7.0), run(3.0, 5.0), run(2.0, 6.0)], theirs: vec![turned] };
        let cases = measured.cases(&[("dtype", "f32")], "v").unwrap();
        let found: Vec<_> = cases.iter().map(|c| (c.ours, c.theirs)).collect();
        assert_eq!(found, [(2.0, Some(10.0)), (6.0, Some(20.0))]);
        assert!(measured.cases(&[("dtype", "bf16")], "v").is_err());
    }

    #[test]
    fn a_run_is_summed_up_from_its_metrics() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut lines: String = "{\"step\": 1, \"step_s\": 9.0, \"data_wait_s\": 9.0}\n".into();
        for step in 2..=10 {
            lines += &format!("{{\"step\": {step}, \"step_s\": 0.5, \"data_wait_s\": 0.005}}\n");
        }
        std::fs::write(&path, &lines).unwrap();
        let evaluations = folder.path().join("evaluations.jsonl");
        // A run that never evaluates leaves the file empty.
        std::fs::write(&evaluations, "").unwrap();
        assert!(training_run(&path).unwrap()["val_loss"].is_null());
        std::fs::write(&evaluations, "{\"step\": 5, \"loss\": 3.0}\n{\"step\": 10, \"loss\": 2.0}\n").unwrap();
        let run = training_run(&path).unwrap();
        assert_eq!((&run["steps"], &run["step_s"], &run["val_loss"]), (&json!(10), &json!(0.5), &json!(2.0)));
        assert!((run["data_wait_share"].as_f64().unwrap() - 0.01).abs() < 1e-12);
    }

    #[test]
    fn bars_are_judged() {
        let row = || Row::new("x", "s", 2.0);
        assert_eq!(row().passed(), None);
        assert_eq!(row().at_least(2.0).passed(), Some(true));
        assert_eq!(row().at_most(1.9).passed(), Some(false));
        assert_eq!(row().ratio_at_least(1.0).passed(), None, "no peer, no verdict");
        assert_eq!(row().against(Some(4.0)).ratio_at_most(0.5).passed(), Some(true));
        assert_eq!(row().against(Some(4.0)).ratio_at_least(0.6).passed(), Some(false));
    }

    #[test]
    fn impossible_figures_are_refused() {
        assert!(utilisation("a product", 1.01).is_err() && utilisation("a product", f64::NAN).is_err());
        assert!(geometric_mean([1.0, 0.0]).is_err() && geometric_mean([]).is_err());
        assert!(median(vec![1.0, f64::NAN]).is_err());
        assert!((geometric_mean([2.0, 8.0]).unwrap() - 4.0).abs() < 1e-12);
    }

    #[test]
    fn figures_have_four_digits() {
        for (value, text) in [(0.0, "0"), (0.012345, "0.01235"), (1.5, "1.5"), (1234.56, "1235"), (123456.0, "123456")]
        {
            assert_eq!(digits(value), text);
        }
    }

    #[test]
    fn the_table_is_markdown() {
        let table =
            print(&[("train", &Row::new("speed", "tokens/s", 2500.0).against(Some(1000.0)).ratio_at_least(2.5))]);
        let last = table.lines().last().unwrap();
        let cells: Vec<&str> = last.split('|').map(str::trim).collect();
        assert_eq!(cells, ["", "train", "speed", "tokens/s", "2500", "1000", "2.5", ">= 2.5 x", "pass", ""]);
    }
}
