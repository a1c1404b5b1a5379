//! Two runs side by side: what changed between their steps, by instruction.

use crate::account::{Account, accounts, mean};
use crate::measured::{Measured, measured};
use crate::run::Run;
use serde::Serialize;
use std::collections::BTreeMap;
use trainyard_base::median;

/// The comparison of two runs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Comparison {
    /// Names of the runs.
    pub names: [String; 2],
    /// Median seconds of their steps.
    pub step_s: [f64; 2],
    /// The parts of rank 0's step: words, seconds in either run.
    pub parts: Vec<Part>,
    /// Instructions of rank 0 by kind and unit, the largest change first.
    pub instructions: Vec<Part>,
    /// Keys of the configuration that differ: key, values.
    pub settings: Vec<(String, [String; 2])>,
}

/// Mean seconds of a step that one part takes in either run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Part {
    /// The part in words.
    pub name: String,
    /// Seconds in either run; 0 if a run does not have it.
    pub seconds: [f64; 2],
}

impl Part {
    /// Seconds by which the second run takes longer.
    pub fn change(&self) -> f64 {
        self.seconds[1] - self.seconds[0]
    }
}

/// Compares two runs; None if one of them has no recorded steps.
pub fn compare(runs: [&Run; 2]) -> Option<Comparison> {
    let steps = runs.map(measured);
    let step_s = |n: usize| median(steps[n].iter().map(|step| step.seconds));
    let account = |n: usize| mean(&accounts(&steps[n]));
    let (first, second) = (account(0)?, account(1)?);
    let named = |account: &Account| {
        account.parts().into_iter().map(|(name, seconds)| (name.to_owned(), seconds)).collect::<Vec<_>>()
    };
    let mut parts = joined([named(&first), named(&second)]);
    let mut instructions = joined([0, 1].map(|n| by_instruction(&steps[n])));
    for list in [&mut parts, &mut instructions] {
        list.sort_by(|a, b| b.change().abs().total_cmp(&a.change().abs()));
    }
    Some(Comparison {
        names: runs.map(Run::name),
        step_s: [step_s(0)?, step_s(1)?],
        parts,
        instructions,
        settings: settings(runs),
    })
}

/// Mean seconds a step of rank 0's instructions, by action and unit.
fn by_instruction(steps: &[Measured<'_>]) -> Vec<(String, f64)> {
    let mut sums: BTreeMap<String, f64> = BTreeMap::new();
    for step in steps {
        let program = step.replay.programs()[0];
        for (number, instruction) in program.instructions.iter().enumerate() {
            let span = step.spans[0][number];
            *sums.entry(program.name_of(instruction)).or_default() += span.end_s - span.start_s;
        }
    }
    sums.into_iter().map(|(name, seconds)| (name, seconds / steps.len().max(1) as f64)).collect()
}

fn joined(lists: [Vec<(String, f64)>; 2]) -> Vec<Part> {
    let mut all: BTreeMap<String, [f64; 2]> = BTreeMap::new();
    for (n, list) in lists.into_iter().enumerate() {
        for (name, seconds) in list {
            all.entry(name).or_default()[n] += seconds;
        }
    }
    all.into_iter().map(|(name, seconds)| Part { name, seconds }).collect()
}

/// The keys of `config.toml` that differ.
fn settings(runs: [&Run; 2]) -> Vec<(String, [String; 2])> {
    let texts = runs.map(|run| std::fs::read_to_string(run.folder.join("config.toml")).unwrap_or_default());
    let [first, second] = texts.map(|text| keys(&text));
    let names: std::collections::BTreeSet<&String> = first.keys().chain(second.keys()).collect();
    let value =
        |of: &BTreeMap<String, String>, name: &String| of.get(name).cloned().unwrap_or_else(|| "unset".to_owned());
    let pairs = names.into_iter().map(|name| (name.clone(), [value(&first, name), value(&second, name)]));
    pairs.filter(|(_, [one, other])| one != other).collect()
}

/// The keys of a resolved configuration: it has one key a line, below the header of its section.
fn keys(text: &str) -> BTreeMap<String, String> {
    let mut section = String::new();
    let mut keys = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = format!("{header}.");
        } else if let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
            let value = value.split(" #").next().unwrap_or(value);
            keys.insert(format!("{section}{}", key.trim()), value.trim().to_owned());
        }
    }
    keys
}

impl Comparison {
    /// The comparison as text.
    pub fn to_text(&self) -> String {
        use crate::verdict::format_seconds;
        use std::fmt::Write as _;
        let mut text = String::new();
        let [first, second] = &self.names;
        let percent = 100.0 * (self.step_s[1] / self.step_s[0] - 1.0);
        let _ = writeln!(
            text,
            "step         {} in {first}, {} in {second} ({percent:+.1} %)",
            format_seconds(self.step_s[0]),
            format_seconds(self.step_s[1])
        );
        for (title, parts, most) in [("parts", &self.parts, 8), ("instructions", &self.instructions, 12)] {
            let changed = parts.iter().filter(|part| part.change().abs() > 0.002 * self.step_s[0]).take(most);
            let lines: Vec<String> = changed
                .map(|part| {
                    let [one, other] = part.seconds.map(format_seconds);
                    let sign = if part.change() < 0.0 { "-" } else { "+" };
                    format!("    {sign}{:<10} {one} -> {other}  {}\n", format_seconds(part.change().abs()), part.name)
                })
                .collect();
            let nothing = if lines.is_empty() { "    nothing by more than 0.2 % of the step\n" } else { "" };
            let _ = write!(text, "{title} of rank 0's step that changed most\n{nothing}{}", lines.concat());
        }
        if !self.settings.is_empty() {
            let _ = writeln!(text, "settings");
        }
        for (key, [one, other]) in &self.settings {
            let _ = writeln!(text, "    {key}: {one} -> {other}");
        }
        text
    }
}
