//! The answer as one HTML page: table, plots, timeline, reasons. It has no scripts and loads
//! nothing.

use crate::explain::duration;
use crate::svg::{Mark, Point, Scatter, escaped, scatter};
use crate::table::{cells, heading, titles};
use crate::{Answer, MemorySeries, PricedStep, Request, timeline};
use std::fmt::Write as _;
use trainyard_base::{format_bytes, format_count};

/// The content of a page.
pub struct Page<'a> {
    /// The request.
    pub request: &'a Request,
    /// The answer.
    pub answer: &'a Answer,
    /// The step that the timeline shows, and the number of its plan, counted from 1.
    pub step: (&'a PricedStep, usize),
    /// Memory of each program of that step.
    pub memory: &'a [MemorySeries],
    /// The best plans for other numbers of devices, for the plot of cost against throughput.
    pub scaling: &'a [Scaling],
}

/// The best plan for a number of devices.
#[derive(Clone, PartialEq, Debug)]
pub struct Scaling {
    /// Number of devices.
    pub devices: u32,
    /// The plan's layout.
    pub layout: String,
    /// Tokens per second of all devices together.
    pub tokens_per_s: f64,
    /// US dollars per million tokens, or device seconds per million tokens if devices have no
    /// price.
    pub cost: f64,
}

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1d2430;--paper:#fff;--line:#d8dde6;--best:#0b6e4f;--listed:#2f6fdb;--faint:#9aa7ba}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9f1;--paper:#14181f;--line:#323a48;--best:#3ecf9a;--listed:#7aa7ff;--faint:#5c6a80}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1180px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:nth-child(2),td:nth-child(4),td:last-child,th:nth-child(2),th:nth-child(4),th:last-child{text-align:left}tr.best td{font-weight:600}
.scroll{overflow-x:auto}svg{max-width:100%;height:auto;font:12px system-ui,sans-serif;fill:var(--ink)}svg .title{font-weight:600;font-size:14px}
.grid{stroke:var(--line)}.limit{stroke:#c0392b;stroke-dasharray:4 3}text.limit{stroke:none;fill:#c0392b}.frontier{fill:none;stroke:var(--best);stroke-width:1.5}
.faint{fill:var(--faint);opacity:.6}.listed{fill:var(--listed)}.best{fill:var(--best)}
rect.forward{fill:#4c8bf5}rect.backward{fill:#2456b3}rect.update{fill:#7a5cc9}rect.gather{fill:#e8a33d}rect.reduce{fill:#d9663a}rect.exchange{fill:#c94f7c}
rect.pipeline{fill:#2a9d8f}rect.host{fill:#8d99ae}.memory{fill:var(--listed);opacity:.35}.key span{display:inline-block;margin-right:1rem}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
";

const KEY: [(&str, &str); 8] = [
    ("#4c8bf5", "forward"),
    ("#2456b3", "backward"),
    ("#7a5cc9", "update"),
    ("#e8a33d", "gather"),
    ("#d9663a", "reduce"),
    ("#c94f7c", "exchanges inside units"),
    ("#2a9d8f", "pipeline"),
    ("#8d99ae", "data, host"),
];

/// Renders the page.
pub fn page(page: &Page<'_>) -> String {
    let Page { request, answer, .. } = page;
    let counts = &answer.search;
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Trainyard plan</title>\n<style>\n{STYLE}</style></head><body>\n\
         <h1>Plan</h1>\n<p>{}</p>\n",
        escaped(heading(request).trim())
    );
    html += &table(request, answer);
    let _ = writeln!(
        html,
        "<p>{} candidates considered: {} too large, {} cannot be {}, {} simulated.</p>\n<h2>Why</h2>\n<ul>",
        format_count(counts.considered as f64),
        format_count(counts.too_large as f64),
        format_count(counts.too_slow as f64),
        answer.objective.better(),
        format_count(counts.simulated as f64)
    );
    for reason in &answer.reasons {
        let _ = writeln!(html, "<li>{}</li>", escaped(reason));
    }
    html += "</ul>\n<h2>Throughput against memory</h2>\n";
    html += &memory_plot(request, answer);
    if page.scaling.len() > 1 {
        html += "<h2>Throughput against cost</h2>\n";
        html += &cost_plot(request, page.scaling);
    }
    let (step, number) = page.step;
    let _ = write!(html, "<h2>The step of plan {number}</h2>\n<p class=\"key\">");
    for (colour, words) in KEY {
        let _ = write!(html, "<span><i style=\"background:{colour}\"></i>{words}</span>");
    }
    html += "</p>\n";
    html += &timeline::svg(step, page.memory);
    html + "</body></html>\n"
}

fn table(request: &Request, answer: &Answer) -> String {
    let mut html = "<div class=\"scroll\"><table>\n<tr><th></th>".to_owned();
    for title in titles(request) {
        let _ = write!(html, "<th>{title}</th>");
    }
    html += "</tr>\n";
    for (index, plan) in answer.plans.iter().enumerate() {
        let class = if index == 0 { " class=\"best\"" } else { "" };
        let _ = write!(html, "<tr{class}><td>{}</td>", index + 1);
        for cell in cells(request, plan) {
            let _ = write!(html, "<td>{}</td>", escaped(&cell));
        }
        html += "</tr>\n";
    }
    html + "</table></div>\n"
}

fn memory_plot(request: &Request, answer: &Answer) -> String {
    let tokens = request.global_batch as f64 * request.sequence_length as f64;
    let points: Vec<Point> = answer
        .simulated
        .iter()
        .enumerate()
        .map(|(index, outline)| {
            let listed = answer.plans.iter().any(|plan| plan.candidate == outline.candidate);
            let mark = match (index, listed) {
                (0, _) => Mark::Best,
                (_, true) => Mark::Listed,
                _ => Mark::Faint,
            };
            let words = format!(
                "{}, {} x {}: {}, {}",
                outline.candidate.layout(),
                outline.candidate.micro_batch,
                outline.candidate.accumulation,
                duration(outline.step_s),
                format_bytes(outline.bytes)
            );
            Point { x: outline.bytes as f64 / GIB, y: tokens / outline.step_s, label: words, mark }
        })
        .collect();
    scatter(&Scatter {
        title: "Every simulated plan that fits; the line is what nothing beats in both",
        x: "memory of the fullest device, GiB",
        y: "tokens per second",
        points: &points,
        limit: Some((answer.bytes_max as f64 / GIB, "limit")),
    })
}

const GIB: f64 = (1u64 << 30) as f64;

fn cost_plot(request: &Request, scaling: &[Scaling]) -> String {
    let points: Vec<Point> = scaling
        .iter()
        .enumerate()
        .map(|(index, best)| Point {
            x: best.cost,
            y: best.tokens_per_s,
            label: format!("{} devices: {}", best.devices, best.layout),
            mark: if index == 0 { Mark::Best } else { Mark::Listed },
        })
        .collect();
    let priced = request.cluster.device.usd_per_hour > 0.0;
    scatter(&Scatter {
        title: "The best plan of each number of devices",
        x: if priced { "US dollars per million tokens" } else { "device seconds per million tokens" },
        y: "tokens per second",
        points: &points,
        limit: None,
    })
}
