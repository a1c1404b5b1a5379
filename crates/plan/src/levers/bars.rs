//! The levers as bars of a page: what each would do to speed, and to memory.

use super::advice::{Advice, Outcome, Row};
use super::report::{difference, gain};
use crate::svg::escaped;
use std::fmt::Write as _;

/// A gain that fills its half of a bar. Larger ones are cut, and their number says so.
const FULL: f64 = 0.5;

/// The bars as HTML. Its classes are those of the page's style.
pub fn html(advice: &Advice) -> String {
    let mut html = "<div class=\"lever head\"><span class=\"name\">lever</span><span class=\"speed\">tokens/s</span>\
                    <span class=\"memory\">memory</span></div>\n"
        .to_owned();
    for row in &advice.rows {
        html += &bar(row, advice.now.bytes);
    }
    for combination in advice.combinations.iter().take(1) {
        let names: Vec<&str> = combination.levers.iter().map(|lever| lever.name).collect();
        let _ = writeln!(
            html,
            "<p><b>{}</b> with {} together: {}.</p>",
            gain(combination.speed),
            names.join(" and "),
            escaped(&combination.words)
        );
    }
    html
}

fn bar(row: &Row, now: u64) -> String {
    let Outcome::Priced { words, price, speed, runs, .. } = &row.outcome else { return String::new() };
    let change = speed - 1.0;
    let width = 50.0 * (change.abs() / FULL).min(1.0);
    let class = if change < 0.0 { "loss" } else { "gain" };
    let later = if *runs { "" } else { " later" };
    let fits = if price.fits() { "" } else { "; does not fit" };
    format!(
        "<div class=\"lever\"><span class=\"name\">{}<span>{}{fits}</span></span><span class=\"bar{later}\">\
         <i class=\"{class}\" style=\"width:{width:.1}%\"></i></span><span class=\"speed\">{}</span><span class=\"memory\">{}</span></div>\n",
        escaped(row.lever.name),
        escaped(words),
        gain(*speed),
        difference(price.bytes, now)
    )
}
