//! Report of a run of all tests: each test's time in a file, a list of the slowest, and the names
//! of skipped tests.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::pool::{End, Outcome};

const SLOWEST: usize = 20;
/// Tests that are named of those with one reason; the others are counted.
const NAMED: usize = 3;

/// The seconds of each test, by its name; empty where none are recorded or they cannot be read.
pub fn durations(path: &Path) -> BTreeMap<String, f64> {
    fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Writes what `outcomes` took.
pub fn record(path: &Path, outcomes: &[Outcome]) -> Result<()> {
    let list: BTreeMap<&str, f64> =
        outcomes.iter().map(|outcome| (outcome.id.as_str(), (outcome.seconds * 1e3).round() / 1e3)).collect();
    let text = serde_json::to_string_pretty(&list)? + "\n";
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The printed summary: the slowest tests, then those that ran in part or reduced, were skipped, or
/// failed. The last line has only the numbers of passed, failed and skipped tests.
#[derive(Debug, Default)]
pub struct Report {
    /// Of the tests that ran.
    pub outcomes: Vec<Outcome>,
    /// Checks that were left out, with the reason.
    pub skipped: Vec<(String, String)>,
    /// Tests of documentation: passed, failed.
    pub documentation: [usize; 2],
    /// Names of the checks that failed.
    pub failures: Vec<String>,
}

impl Report {
    /// Numbers of passed, failed and skipped tests. A check that was left out counts as skipped.
    pub fn counts(&self) -> [usize; 3] {
        let count = |wanted: fn(&End) -> bool| self.outcomes.iter().filter(|outcome| wanted(&outcome.end)).count();
        [
            count(|end| *end == End::Passed) + self.documentation[0],
            count(|end| matches!(end, End::Failed(_))) + self.documentation[1],
            count(|end| matches!(end, End::Skipped(_))) + self.skipped.len(),
        ]
    }

    /// The text of it.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut slowest: Vec<&Outcome> = self.outcomes.iter().collect();
        slowest.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        slowest.truncate(SLOWEST);
        text += "the slowest tests (all of them: target/test/durations.json)\n";
        for outcome in slowest {
            let _ = writeln!(text, "{:8.1} s  {}", outcome.seconds, outcome.id);
        }
        let said = |lines: fn(&Outcome) -> &[String]| {
            self.outcomes.iter().flat_map(move |outcome| lines(outcome).iter().map(|line| (line.clone(), &*outcome.id)))
        };
        list(&mut text, "reduced (in full: cargo xtask test --all)", said(|outcome| &outcome.reduced));
        list(&mut text, "passed in part", said(|outcome| &outcome.in_part));
        let skipped = self.outcomes.iter().filter_map(|outcome| match &outcome.end {
            End::Skipped(reason) => Some((reason.clone(), &*outcome.id)),
            _ => None,
        });
        let checks = self.skipped.iter().map(|(name, reason)| (reason.clone(), name.as_str()));
        list(&mut text, "skipped", checks.chain(skipped));
        let failed = self.outcomes.iter().filter(|outcome| matches!(outcome.end, End::Failed(_)));
        let failed = failed.map(|outcome| &outcome.id).chain(&self.failures);
        failed.for_each(|name| text += &format!("failed: {name}\n"));
        let [passed, failed, skipped] = self.counts();
        text + &format!("{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// A paragraph of names by what is said of them; nothing where nothing is said.
fn list<'a>(text: &mut String, title: &str, said: impl Iterator<Item = (String, &'a str)>) {
    let mut names: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (words, name) in said {
        let of = names.entry(words).or_default();
        if !of.contains(&name) {
            of.push(name);
        }
    }
    if names.is_empty() {
        return;
    }
    *text += &format!("{title}\n");
    for (words, mut names) in names {
        names.sort_unstable();
        let more = names.len().saturating_sub(NAMED);
        names.truncate(NAMED);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        *text += &format!("  {words}: {}{more}\n", names.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(id: &str, end: End, seconds: f64) -> Outcome {
        Outcome { id: id.to_owned(), end, seconds, in_part: Vec::new(), reduced: Vec::new() }
    }

    #[test]
    fn the_last_line_counts_and_the_lines_above_name() {
        let mut sweep = outcome("-p e --test f sweep", End::Passed, 61.25);
        sweep.reduced.push("20 of 100 faults".into());
        let mut report = Report {
            outcomes: vec![outcome("-p a --lib quick", End::Passed, 0.01), sweep],
            documentation: [2, 0],
            ..Report::default()
        };
        for number in 0..5 {
            report.outcomes.push(outcome(&format!("-p a --lib gpu_{number}"), End::Skipped("no GPU".into()), 0.0));
        }
        report.outcomes.push(outcome("-p a --lib part", End::PartOfOthers, 0.0));
        report.skipped.push(("mpi".into(), "there is no mpicc".into()));
        let text = report.text();
        let expected = "the slowest tests (all of them: target/test/durations.json)\n    61.2 s  -p e --test f sweep\n";
        assert!(text.starts_with(expected), "{text}");
        let end = "reduced (in full: cargo xtask test --all)\n  20 of 100 faults: -p e --test f sweep\nskipped\n  \
                   no GPU: -p a --lib gpu_0, -p a --lib gpu_1, -p a --lib gpu_2 and 2 more\n  \
                   there is no mpicc: mpi\n4 passed, 0 failed, 6 skipped";
        assert!(text.ends_with(end), "{text}");
        report.outcomes.push(outcome("-p a --lib bad", End::Failed("exit status: 101".into()), 0.0));
        report.failures.push("rustfmt".into());
        let end = "failed: -p a --lib bad\nfailed: rustfmt\n4 passed, 1 failed, 6 skipped";
        assert!(report.text().ends_with(end), "{}", report.text());
    }

    #[test]
    fn durations_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("durations.json");
        assert_eq!(durations(&path), BTreeMap::new());
        record(&path, &[outcome("-p a --lib b", End::Passed, 1.23456)]).unwrap();
        assert_eq!(durations(&path), BTreeMap::from([("-p a --lib b".to_owned(), 1.235)]));
    }
}
