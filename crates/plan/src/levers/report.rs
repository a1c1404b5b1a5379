//! The advice as a table for a terminal, and as JSON.

use super::advice::{Advice, Combination, Outcome, Row};
use super::{Price, Setup};
use crate::explain::duration;
use serde_json::{Value, json};
use std::fmt::Write as _;
use trainyard_base::{format_bytes, format_count};

/// The lines above the table.
pub struct Heading {
    /// The model and the place, in words.
    pub place: String,
    /// The present setup, in words.
    pub setup: String,
}

/// `+12.3 %`
pub(super) fn gain(speed: f64) -> String {
    format!("{:+.1} %", 100.0 * (speed - 1.0))
}

/// `+1.5 GiB`
pub(super) fn difference(bytes: u64, now: u64) -> String {
    match bytes.cmp(&now) {
        std::cmp::Ordering::Equal => "0".to_owned(),
        std::cmp::Ordering::Less => format!("-{}", format_bytes(now - bytes)),
        std::cmp::Ordering::Greater => format!("+{}", format_bytes(bytes - now)),
    }
}

/// The whole advice. `sets` gives the settings of a setup that can be run.
pub fn text(advice: &Advice, heading: &Heading, sets: &dyn Fn(&Setup) -> Vec<String>) -> String {
    let now = &advice.now;
    let mut text = format!(
        "{}\nnow: {}; {} tokens/s\n{}\n\n",
        heading.place,
        heading.setup,
        format_count(advice.setup.tokens() / now.step_s),
        advice.bottleneck
    );
    let priced = |wanted: bool| advice.rows.iter().filter(move |row| runs_now(row) == Some(wanted));
    let mut number = 0;
    for (title, wanted) in [("can be run", true), ("not by settings alone", false)] {
        let rows: Vec<Vec<String>> = priced(wanted)
            .map(|row| {
                number += 1;
                cells(row, number, now)
            })
            .collect();
        if !rows.is_empty() {
            text += &format!("{}\n", table(title, &rows));
        }
    }
    let without: Vec<&Row> = advice.rows.iter().filter(|row| runs_now(row).is_none()).collect();
    if !without.is_empty() {
        text += "without a price\n";
        for row in without {
            if let Outcome::Nothing(why) = &row.outcome {
                // Writing to a String cannot fail.
                let _ = writeln!(text, "  {:<28} {why}", row.lever.name);
            }
        }
        text.push('\n');
    }
    if !advice.combinations.is_empty() {
        text += "together\n";
        for combination in &advice.combinations {
            text += &together(combination, now, sets);
        }
        text.push('\n');
    }
    text += "to switch on\n";
    for (number, row) in (1..).zip(priced(true)) {
        if let Outcome::Priced { setup, .. } = &row.outcome {
            let _ = writeln!(text, "  {number:>2}  {}", flags(&sets(setup)));
        }
    }
    let mut remarks = advice.rows.iter().filter_map(|row| match &row.outcome {
        Outcome::Priced { price, .. } if !price.remarks.is_empty() => Some((row.lever.name, price.remarks.join("; "))),
        _ => None,
    });
    if let Some(first) = remarks.next() {
        text += "\nrough prices\n";
        for (name, remark) in std::iter::once(first).chain(remarks) {
            let _ = writeln!(text, "  {name}: {remark}");
        }
    }
    text += "\nsources of what is said of quality\n";
    for (number, row) in (1..).zip(priced(true).chain(priced(false))) {
        let _ = writeln!(text, "  {number:>2}  {}", row.lever.source);
    }
    text
}

/// True if the row's lever can be run, false if it is priced only, None without a price.
fn runs_now(row: &Row) -> Option<bool> {
    match &row.outcome {
        Outcome::Priced { runs, .. } => Some(*runs),
        Outcome::Nothing(_) => None,
    }
}

fn cells(row: &Row, number: usize, now: &Price) -> Vec<String> {
    let Outcome::Priced { words, price, speed, tried, .. } = &row.outcome else { return Vec::new() };
    let memory = difference(price.bytes, now.bytes);
    let memory = if price.fits() { memory } else { format!("{memory}, too large") };
    let rough = if price.remarks.is_empty() { "" } else { " (rough)" };
    let words = format!("{words}{rough}");
    let tried = tried.map_or(String::new(), |tried| format!(", tried {}", gain(tried)));
    let speed = format!("{}{tried}", gain(*speed));
    vec![format!("{number:>2} {}", row.lever.name), words, speed, memory, row.lever.quality.to_owned()]
}

/// A table of rows of five cells: words, words, two numbers, words.
fn table(title: &str, rows: &[Vec<String>]) -> String {
    let titles = [title, "change", "speed", "memory", "quality"];
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([titles[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let line = |cells: &[&str]| {
        let mut line = String::new();
        for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            line += &if matches!(column, 2 | 3) { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
        }
        format!("{}\n", line.trim_end())
    };
    let mut text = line(&titles);
    for row in rows {
        text += &line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    text
}

fn together(combination: &Combination, now: &Price, sets: &dyn Fn(&Setup) -> Vec<String>) -> String {
    let names: Vec<&str> = combination.levers.iter().map(|lever| lever.name).collect();
    let exact = combination.levers.iter().all(|lever| lever.is_exact);
    format!(
        "  {} of memory {}: {}{}\n    {}\n    {}\n",
        gain(combination.speed),
        difference(combination.price.bytes, now.bytes),
        names.join(" + "),
        if exact { ", with the same result" } else { "" },
        combination.words,
        flags(&sets(&combination.setup))
    )
}

fn flags(sets: &[String]) -> String {
    let flags: Vec<String> = sets.iter().map(|set| format!("--set {}", quoted(set))).collect();
    flags.join(" ")
}

/// `set`, quoted as one word for a shell.
pub fn quoted(set: &str) -> String {
    if set.contains([' ', '[', '{']) { format!("\"{set}\"") } else { set.to_owned() }
}

/// The advice as JSON.
pub fn json(advice: &Advice, sets: &dyn Fn(&Setup) -> Vec<String>) -> Value {
    let now = &advice.now;
    json!({
        "bottleneck": advice.bottleneck,
        "now": price(now, &advice.setup, 1.0),
        "levers": advice.rows.iter().map(|row| {
            let mut value = match &row.outcome {
                Outcome::Priced { words, setup, price: priced, speed, runs, tried } => {
                    let mut value = price(priced, setup, *speed);
                    value["change"] = words.as_str().into();
                    value["runnable"] = (*runs).into();
                    value["tried_speed"] = (*tried).into();
                    if *runs {
                        value["sets"] = sets(setup).into();
                    }
                    value
                }
                Outcome::Nothing(why) => json!({"runnable": false, "not_priced": why}),
            };
            value["lever"] = row.lever.name.into();
            value["exact"] = row.lever.is_exact.into();
            value["quality"] = row.lever.quality.into();
            value["source"] = row.lever.source.into();
            value
        }).collect::<Vec<_>>(),
        "together": advice.combinations.iter().map(|combination| {
            let mut value = price(&combination.price, &combination.setup, combination.speed);
            value["levers"] = combination.levers.iter().map(|lever| lever.name).collect::<Vec<_>>().into();
            value["change"] = combination.words.as_str().into();
            value["runnable"] = true.into();
            value["sets"] = sets(&combination.setup).into();
            value
        }).collect::<Vec<_>>(),
    })
}

fn price(price: &Price, setup: &Setup, speed: f64) -> Value {
    json!({
        "step_s": price.step_s,
        "step": duration(price.step_s),
        "tokens_per_step": setup.tokens(),
        "tokens_per_s": setup.tokens() / price.step_s,
        "speed": speed,
        "memory_bytes": price.bytes,
        "memory_bytes_max": price.bytes_max,
        "fits": price.fits(),
        "remarks": price.remarks,
    })
}
