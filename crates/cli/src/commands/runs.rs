//! `trainyard runs`: the registry of runs.

use crate::output::{note, print};
use anyhow::{Result, bail};
use std::path::PathBuf;
use trainyard_base::{format_bytes, format_count};
use trainyard_dashboard::registry::{Registry, Rows};
use trainyard_dashboard::select::{Condition, Key, Order, Run, sort, words};
use trainyard_engine::warning::warning;

/// List runs with their results, choose and sort them, or ask the registry with SQL. The registry
/// is the file registry.sqlite in the folder of runs; it follows from the folders.
#[derive(clap::Args)]
pub struct Args {
    /// The folder of runs.
    #[arg(default_value = "runs")]
    runs: PathBuf,
    /// Sort by a column, a setting or a metric: the largest first.
    #[arg(long, value_name = "KEY")]
    sort: Option<String>,
    /// With --sort: the smallest first.
    #[arg(long, requires = "sort")]
    reverse: bool,
    /// Only runs of which this holds, such as dim=768, tps>1000, or name~test (contains). Can be
    /// given several times.
    #[arg(long = "where", value_name = "CONDITION")]
    conditions: Vec<String>,
    /// Print everything as CSV: columns, then settings and metrics.
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
    /// Print the answer to this query. Tables: runs (a row each), config (run, key, value), metrics
    /// (run, name, value: the last record) and environment (run, key, value).
    #[arg(long, value_name = "SELECT", conflicts_with_all = ["sort", "conditions"])]
    sql: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !args.runs.is_dir() {
        bail!("there is no folder {}: name the folder that holds the runs", args.runs.display());
    }
    let registry = Registry::open(&args.runs)?;
    registry.notices().iter().for_each(|notice| note(&warning(notice)));
    if let Some(sql) = &args.sql {
        let rows = registry.query(sql)?;
        if args.json {
            return print(json(&objects(&rows))?);
        }
        let cells: Vec<Vec<String>> = rows.rows.iter().map(|row| row.iter().map(words).collect()).collect();
        return print(if args.csv { csv(&rows.columns, &cells) } else { table(&rows.columns, &cells) });
    }
    let in_conditions = args.conditions.iter().map(|text| Condition::name(text));
    let names = in_conditions.chain(args.sort.as_deref().map(Ok)).collect::<Result<Vec<_>, _>>()?;
    let is_whole = args.json || args.csv;
    let mut runs = registry.runs((!is_whole).then_some(&names[..]))?;
    if runs.is_empty() {
        return print(match (args.json, args.csv) {
            (true, _) => "[]\n".to_owned(),
            (_, true) => String::new(),
            _ => format!("no runs in {}\n", args.runs.display()),
        });
    }
    let conditions = args.conditions.iter().map(|text| Condition::parse(text, &runs)).collect::<Result<Vec<_>, _>>()?;
    let key = Key::find(args.sort.as_deref().unwrap_or("updated_s"), &runs)?;
    runs.retain(|run| conditions.iter().all(|condition| condition.holds(run)));
    sort(&mut runs, &key, if args.reverse { Order::SmallestFirst } else { Order::LargestFirst });
    if args.json {
        return print(json(&runs)?);
    }
    if args.csv {
        let (columns, rows) = flat(&runs);
        return print(csv(&columns, &rows));
    }
    let asked = conditions.into_iter().map(|condition| condition.key).chain(args.sort.as_ref().map(|_| key));
    print(listing(&runs, asked.collect()))
}

/// The usual columns, and what conditions and order name.
fn listing(runs: &[Run], asked: Vec<Key>) -> String {
    type Show = fn(f64) -> String;
    let usual: [(&str, &str, Show); 7] = [
        ("loss", "loss", |loss| format!("{loss:.4}")),
        ("validation_loss", "validation", |loss| format!("{loss:.4}")),
        ("tps", "tokens/s", format_count),
        ("mfu", "MFU", |mfu| format!("{:.1} %", 100.0 * mfu)),
        ("step_s", "step time", |s| if s < 1.0 { format!("{:.1} ms", 1e3 * s) } else { format!("{s:.2} s") }),
        ("mem_peak_bytes", "memory", |bytes| format_bytes(bytes as u64)),
        ("tokens", "tokens", format_count),
    ];
    let is_usual = |key: &Key| {
        ["name", "state", "step"].contains(&key.name.as_str()) || usual.iter().any(|(name, ..)| *name == key.name)
    };
    let mut more: Vec<Key> = Vec::new();
    for key in asked {
        if !is_usual(&key) && !more.contains(&key) {
            more.push(key);
        }
    }
    let head = ["run", "state", "step"].into_iter().chain(usual.iter().map(|(_, title, _)| *title));
    let columns: Vec<String> = head.map(str::to_owned).chain(more.iter().map(|key| key.name.clone())).collect();
    let rows = runs.iter().map(|run| {
        let step = match run["steps"].as_u64() {
            Some(steps) => format!("{}/{steps}", words(&run["step"])),
            None => words(&run["step"]),
        };
        let mut row = vec![words(&run["name"]), words(&run["state"]), step];
        row.extend(usual.iter().map(|(name, _, show)| run[*name].as_f64().map_or("-".to_owned(), show)));
        row.extend(more.iter().map(|key| words(key.value(run))));
        row
    });
    table(&columns, &rows.collect::<Vec<_>>())
}

/// Every column, setting and metric of the runs.
fn flat(runs: &[Run]) -> (Vec<String>, Vec<Vec<String>>) {
    let mut columns: Vec<(Option<String>, String)> = Vec::new();
    let mut known = std::collections::BTreeSet::new();
    for run in runs {
        for (name, value) in run {
            let names: Vec<_> = match value.as_object() {
                Some(part) => part.keys().map(|key| (Some(name.clone()), key.clone())).collect(),
                None => vec![(None, name.clone())],
            };
            columns.extend(names.into_iter().filter(|column| known.insert(column.clone())));
        }
    }
    let value = |run: &Run, (part, key): &(Option<String>, String)| match part {
        Some(part) => words(run[part].get(key).unwrap_or(&serde_json::Value::Null)),
        None => run.get(key).map_or(String::new(), words),
    };
    let rows = runs.iter().map(|run| columns.iter().map(|column| value(run, column)).collect()).collect();
    let name = |(part, key): (Option<String>, String)| part.map_or(key.clone(), |part| format!("{part}.{key}"));
    (columns.into_iter().map(name).collect(), rows)
}

fn objects(rows: &Rows) -> Vec<Run> {
    rows.rows.iter().map(|row| rows.columns.iter().cloned().zip(row.iter().cloned()).collect()).collect()
}

fn json(runs: &[Run]) -> Result<String> {
    Ok(serde_json::to_string_pretty(runs)? + "\n")
}

/// Columns with their widths, texts at the left and numbers at the right.
pub(super) fn table(columns: &[String], rows: &[Vec<String>]) -> String {
    let width = |index: usize| {
        let cells = rows.iter().map(|row| row[index].chars().count());
        cells.chain([columns[index].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let is_number = |text: &str| text.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    let right: Vec<bool> = (0..columns.len())
        .map(|index| rows.iter().all(|row| is_number(&row[index]) || row[index].is_empty()))
        .collect();
    let mut text = String::new();
    for row in std::iter::once(columns).chain(rows.iter().map(Vec::as_slice)) {
        let cells = row
            .iter()
            .zip(widths.iter().zip(&right))
            .map(|(cell, (width, right))| if *right { format!("{cell:>width$}") } else { format!("{cell:<width$}") });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

fn csv(columns: &[String], rows: &[Vec<String>]) -> String {
    let quoted = |cell: &String| match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.clone(),
    };
    let line = |cells: &[String]| cells.iter().map(quoted).collect::<Vec<_>>().join(",") + "\n";
    line(columns) + &rows.iter().map(|row| line(row)).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_quoted_where_they_must_be() {
        let cells = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
        assert_eq!(csv(&cells(&["a", "b,c"]), &[cells(&["x\"y", "1"])]), "a,\"b,c\"\n\"x\"\"y\",1\n");
        assert_eq!(
            table(&cells(&["run", "n"]), &[cells(&["a", "10"]), cells(&["bb", "9"])]),
            "run   n\na    10\nbb    9\n"
        );
    }
}
