//! `cargo xtask equality`: writes the tables of `docs/equality.md`.
//!
//! The tests of `crates/engine/tests/equality` train, compare and fail where layouts disagree; this
//! runs them in full and turns the results that they leave into tables. The text of the page is
//! written by hand; each table stands between two comments, `<!-- NAME -->` and `<!-- end -->`.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The options of the chore.
#[derive(clap::Args)]
pub struct Options {
    /// Run nothing: write the tables from the results of the last run.
    #[arg(long)]
    tables_only: bool,
}

/// The page, below the root of the repository.
const PAGE: &str = "docs/equality.md";
/// The folder of the results.
const RESULTS: &str = "target/equality";

/// Runs the tests and writes the page; true if every test passed.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let results = root.join(RESULTS);
    fs::create_dir_all(&results).with_context(|| format!("cannot create {}", results.display()))?;
    let passed = options.tables_only || train(root, &results)?;
    let path = root.join(PAGE);
    let page = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let schedules: Vec<Row> = read(&results, "schedules")?;
    let tables = [
        ("layouts", layouts(&read::<Vec<Row>>(&results, "layouts")?)),
        ("experts", layouts(&read::<Vec<Row>>(&results, "experts")?)),
        ("schedules", of_schedules(&schedules, Row::untied)),
        ("tied", of_schedules(&schedules, Row::tied)),
        ("resume", resumed(&results)?),
    ];
    let page = tables.iter().try_fold(page, |page, (name, table)| put(&page, name, table))?;
    fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {PAGE}");
    Ok(passed)
}

/// Runs every test in full; true if all passed.
fn train(root: &Path, results: &Path) -> Result<bool> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["test", "--locked", "-p", "trainyard-engine", "--test", "equality", "--", "--nocapture"])
        .args(["--skip", "the_page_shows_every_layout"])
        .env(trainyard_testing::ALL, "1")
        .env(trainyard_testing::RESULTS, results)
        .current_dir(root)
        .status()
        .context("cannot run cargo test")?;
    Ok(status.success())
}

fn read<T: DeserializeOwned>(results: &Path, name: &str) -> Result<T> {
    let path = results.join(format!("{name}.json"));
    let text = fs::read_to_string(&path).with_context(|| format!("there are no results in {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
}

/// `page` with `table` between the comments of `name`.
pub fn put(page: &str, name: &str, table: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- {name} -->\n"), "<!-- end -->");
    let place = page.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(end)?.1)));
    let (before, after) = place.with_context(|| format!("the page has no place for the table `{name}`"))?;
    Ok(format!("{before}{begin}\n{table}\n{end}{after}"))
}

#[derive(Deserialize)]
struct Differences {
    loss: f64,
    norm: f64,
    gradient: f64,
    losses: f64,
}

/// A layout beside others.
#[derive(Deserialize)]
struct Row {
    layout: String,
    schedule: String,
    ranks: u64,
    differences: Differences,
    untied_same: Option<bool>,
    tied_same: Option<bool>,
    tied: Differences,
    peak: u64,
}

impl Row {
    fn untied(&self) -> String {
        self.untied_same.map_or("", same).to_owned()
    }

    fn tied(&self) -> String {
        if self.tied_same == Some(true) { same(true).to_owned() } else { figure(self.tied.gradient) }
    }
}

fn layouts(rows: &[Row]) -> String {
    let mut table = "| ranks | layout | loss | norm | gradients | losses | without pipeline | peak |\n\
                     |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for row in rows {
        let Differences { loss, norm, gradient, losses } = row.differences;
        let cells = [loss, norm, gradient, losses].map(figure).join(" | ");
        let peak = trainyard_base::format_bytes(row.peak);
        table += &format!("| {} | {} | {cells} | {} | {peak} |\n", row.ranks, row.layout, row.untied());
    }
    table
}

/// A row per layout, a column per schedule.
fn of_schedules(rows: &[Row], cell: impl Fn(&Row) -> String) -> String {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        names.extend((!names.contains(&row.schedule.as_str())).then_some(row.schedule.as_str()));
    }
    let mut table = format!("| layout | {} |\n|---|{}\n", names.join(" | "), "---|".repeat(names.len()));
    for layout in rows.chunks(names.len().max(1)) {
        let cells: Vec<String> = layout.iter().map(&cell).collect();
        let name = layout[0].layout.replace(&format!(" ({})", layout[0].schedule), "");
        table += &format!("| {name} | {} |\n", cells.join(" | "));
    }
    table
}

#[derive(Deserialize)]
struct Comparison {
    pairs: u64,
    same: u64,
    losses: f64,
}

fn resumed(results: &Path) -> Result<String> {
    let mut table = "| runs that went on | layouts | with the same bits | largest difference of another's loss |\n\
                     |---|---|---|---|\n"
        .to_owned();
    for (name, what) in [("resume", "stopped after a checkpoint"), ("faults", "failed at a random instruction")] {
        let Comparison { pairs, same, losses } = read(results, name)?;
        table += &format!("| {what} | {pairs} pairs | {same} | {} |\n", figure(losses));
    }
    Ok(table)
}

fn same(is_same: bool) -> &'static str {
    if is_same { "same" } else { "others" }
}

/// A relative difference: 0, or two digits.
fn figure(difference: f64) -> String {
    if difference == 0.0 { "0".to_owned() } else { format!("{difference:.1e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_stand_between_their_comments() {
        let page = "# A\n<!-- a -->\nold\n<!-- end -->\nb\n<!-- b -->\n<!-- end -->\n";
        let new = put(page, "a", "| x |\n").unwrap();
        assert_eq!(new, "# A\n<!-- a -->\n\n| x |\n\n<!-- end -->\nb\n<!-- b -->\n<!-- end -->\n");
        assert_eq!(put(&new, "a", "| x |\n").unwrap(), new);
        assert!(put(page, "c", "").is_err());
        let row = |layout: &str, schedule: &str, tied: f64| Row {
            layout: format!("{layout} ({schedule})"),
            schedule: schedule.to_owned(),
            ranks: 2,
            differences: Differences { loss: 0.0, norm: 0.0, gradient: 0.0, losses: 0.0 },
            untied_same: Some(true),
            tied_same: Some(tied == 0.0),
            tied: Differences { loss: 0.0, norm: 0.0, gradient: tied, losses: 0.0 },
            peak: 1,
        };
        let rows = [row("one", "a", 0.0), row("one", "b", 1.26e-8), row("two", "a", 0.0), row("two", "b", 0.0)];
        let expected = "| layout | a | b |\n|---|---|---|\n| one | same | 1.3e-8 |\n| two | same | same |\n";
        assert_eq!(of_schedules(&rows, Row::tied), expected);
    }
}
