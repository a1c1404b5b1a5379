//! The answer as one HTML page: key figures, plans, reasons, the best plan's timeline and memory,
//! Pareto fronts, scaling, levers. It has no scripts and loads nothing.

use crate::explain::duration;
use crate::levers::{Advice, bars};
use crate::svg::{Better, Mark, Point, Scatter, escaped, scatter, short};
use crate::table::{cells, considered, heading, titles};
use crate::{Answer, MemorySeries, Outline, PricedStep, Request, memory_plot, timeline};
use std::fmt::Write as _;
use trainyard_base::{format_bytes, format_count};

/// The content of a page.
pub struct Page<'a> {
    /// The name of the model.
    pub model: &'a str,
    /// The request.
    pub request: &'a Request,
    /// The answer.
    pub answer: &'a Answer,
    /// The step that the timeline shows, and the number of its plan, counted from 1.
    pub step: (&'a PricedStep, usize),
    /// Memory of each program of that step.
    pub memory: &'a [MemorySeries],
    /// The best plans for several numbers of devices, that of the answer first.
    pub scaling: &'a [Scaling],
    /// The levers of the first plan, if they were priced.
    pub levers: Option<&'a Advice>,
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
    /// Model FLOPs utilisation.
    pub mfu: f64,
    /// Every plan that was simulated for this number of devices and fits.
    pub simulated: Vec<Outline>,
}

const STYLE: &str = include_str!("page.css");

const KEY: [(&str, &str); 8] = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("update", "update"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("exchange", "exchanges inside units"),
    ("pipeline", "pipeline"),
    ("host", "data, host"),
];

const GIB: f64 = (1u64 << 30) as f64;
/// Width and height of a plot. It is as wide as a phone, so that its words are readable there.
const PLOT: (f64, f64) = (440.0, 290.0);
/// Maximum number of faint points of a plot.
const POINTS_MAX: usize = 400;

/// Renders the page.
pub fn page(page: &Page<'_>) -> String {
    let Page { request, answer, .. } = page;
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>Trainyard plan: {0}</title>\n<style>\n{STYLE}</style></head><body>\n\
         <h1>{0}</h1>\n<p class=\"soft\">{1}</p>\n",
        escaped(page.model),
        escaped(heading(request).trim())
    );
    html += &tiles(answer);
    html += &table(request, answer);
    html += &reasons(answer);
    html += &step(page);
    html += "<div class=\"cards\">\n";
    html += &card("Throughput against memory", &memory_plot(request, answer), &fronts(answer));
    if page.scaling.len() > 1 {
        html += &card(
            "Throughput against cost",
            &cost_plot(page, &|request, one| tokens(request) / one.step_s, "tokens per second", Better::Higher),
            "Every simulated plan on several numbers of devices; large points are the best of each number.",
        );
        html += &card(
            "Memory against cost",
            &cost_plot(page, &|_, one| one.bytes as f64 / GIB, "memory of the fullest device, GiB", Better::Lower),
            "The line is what nothing beats in both.",
        );
        html += &card("Scaling", &scaling_plot(page.scaling), &scaling_words(page.scaling));
    }
    html += "</div>\n";
    if let Some(advice) = page.levers {
        let intro = "<p class=\"soft\">Each lever changes plan 1 and is simulated. Pale bars cannot be run by this program yet.</p>";
        let _ = writeln!(html, "<section><h2>What each lever would do</h2>{intro}{}</section>", bars::html(advice));
    }
    html + "</body></html>\n"
}

fn card(title: &str, plot: &str, words: &str) -> String {
    if plot.is_empty() {
        return String::new();
    }
    format!("<section><h2>{title}</h2><figure>{plot}<figcaption>{}</figcaption></figure></section>\n", escaped(words))
}

fn tokens(request: &Request) -> f64 {
    request.global_batch as f64 * request.sequence_length as f64
}

/// The key figures of the best plan.
fn tiles(answer: &Answer) -> String {
    let Some(best) = answer.plans.first() else { return String::new() };
    let mut tiles = vec![
        (duration(best.step_s), "a step"),
        (short(best.tokens_per_s), "tokens per second"),
        (format!("{:.1} %", 100.0 * best.mfu), "model FLOPs utilisation"),
        (format_bytes(best.memory.total), "memory of the fullest device"),
    ];
    match best.usd_per_million_tokens {
        Some(usd) => tiles.push((format!("${:.2}", 1000.0 * usd), "per billion tokens")),
        None => tiles.push((format_count(f64::from(best.candidate.mesh.ranks())), "devices")),
    }
    let tiles =
        tiles.iter().map(|(figure, words)| format!("<div><b>{}</b><span>{words}</span></div>", escaped(figure)));
    format!("<div class=\"tiles\">{}</div>\n", tiles.collect::<String>())
}

fn table(request: &Request, answer: &Answer) -> String {
    let mut html = "<section><h2>Plans</h2><div class=\"scroll\"><table>\n<tr><th></th>".to_owned();
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
    html + "</table></div></section>\n"
}

fn reasons(answer: &Answer) -> String {
    let mut html = "<section><h2>Why</h2><ul>\n".to_owned();
    for reason in &answer.reasons {
        let _ = writeln!(html, "<li>{}</li>", escaped(reason));
    }
    let _ = writeln!(html, "</ul><p class=\"soft\">{}.</p></section>", considered(answer));
    html
}

/// The timeline of the shown plan, and below it memory on the same axis.
fn step(page: &Page<'_>) -> String {
    let (step, number) = page.step;
    let key = |entries: &[(&str, &str)]| {
        let spans = entries.iter().map(|(class, words)| format!("<span><i class=\"{class}\"></i>{words}</span>"));
        format!("<p class=\"key\">{}</p>", spans.collect::<String>())
    };
    let mut html = format!("<section><h2>The step of plan {number}</h2>\n{}", key(&KEY));
    let _ = writeln!(html, "<div class=\"scroll wide\">{}</div>", timeline::svg(step, &[]));
    let series = timeline::longest(step).and_then(|longest| page.memory.get(longest));
    if let Some(series) = series {
        let kinds = memory_plot::kinds(series);
        let names: Vec<(&str, &str)> = kinds.iter().rev().map(|kind| (kind.name(), kind.name())).collect();
        let _ = writeln!(
            html,
            "<h2>Its memory over time</h2>{}<div class=\"scroll wide\">{}</div>",
            key(&names),
            memory_plot::svg(series, step.step_s, page.answer.bytes_max as f64)
        );
    }
    html + "</section>\n"
}

fn words(outline: &Outline) -> String {
    format!(
        "{}, {} x {}: {}, {}",
        outline.candidate.layout(),
        outline.candidate.micro_batch,
        outline.candidate.accumulation,
        duration(outline.step_s),
        format_bytes(outline.bytes)
    )
}

/// At most [`POINTS_MAX`] of the outlines: the first, and every so many of the others.
fn some(outlines: &[Outline]) -> impl Iterator<Item = (usize, &Outline)> {
    outlines.iter().enumerate().step_by(outlines.len().div_ceil(POINTS_MAX).max(1))
}

fn memory_plot(request: &Request, answer: &Answer) -> String {
    let points: Vec<Point> = some(&answer.simulated)
        .map(|(index, outline)| {
            let listed = answer.plans.iter().any(|plan| plan.candidate == outline.candidate);
            let mark = match (index, listed) {
                (0, _) => Mark::Best,
                (_, true) => Mark::Listed,
                _ => Mark::Faint,
            };
            // An outline has no interval yet; where it has one, its ends belong into `spread`.
            let (x, y) = (outline.bytes as f64 / GIB, tokens(request) / outline.step_s);
            Point { x, y, label: words(outline), mark, spread: None }
        })
        .collect();
    scatter(&Scatter {
        title: "",
        x: "memory of the fullest device, GiB",
        y: "tokens per second",
        points: &points,
        limit: Some((answer.bytes_max as f64 / GIB, "limit")),
        better: Better::Higher,
        ideal: None,
        size: PLOT,
    })
}

fn fronts(answer: &Answer) -> String {
    format!(
        "{} simulated plans that fit; the line is what nothing beats in both. Point at one for its layout.",
        format_count(answer.simulated.len() as f64)
    )
}

/// Cost against another figure of every simulated plan, on all numbers of devices.
fn cost_plot(page: &Page<'_>, figure: &dyn Fn(&Request, &Outline) -> f64, y: &str, better: Better) -> String {
    let request = page.request;
    let usd = request.cluster.device.usd_per_hour;
    let mut points = Vec::new();
    for (number, scaling) in page.scaling.iter().enumerate() {
        for (index, outline) in some(&scaling.simulated) {
            let device_s = 1e6 * f64::from(scaling.devices) * outline.step_s / tokens(request);
            let mark = match (number, index) {
                (0, 0) => Mark::Best,
                (_, 0) => Mark::Listed,
                _ => Mark::Faint,
            };
            points.push(Point {
                x: if usd > 0.0 { usd / 3600.0 * device_s } else { device_s },
                y: figure(request, outline),
                label: format!("{} devices: {}", scaling.devices, words(outline)),
                mark,
                spread: None,
            });
        }
    }
    scatter(&Scatter {
        title: "",
        x: if usd > 0.0 { "US dollars per million tokens" } else { "device seconds per million tokens" },
        y,
        points: &points,
        limit: None,
        better,
        ideal: None,
        size: PLOT,
    })
}

fn scaling_plot(scaling: &[Scaling]) -> String {
    // Every device of the largest number makes as many tokens as each of the smallest.
    let few = scaling.iter().min_by_key(|best| best.devices).map(|best| (f64::from(best.devices), best.tokens_per_s));
    let most = scaling.iter().map(|best| f64::from(best.devices)).fold(0.0, f64::max);
    let most = few.map(|(devices, tokens_per_s)| (most, tokens_per_s / devices * most));
    let points: Vec<Point> = scaling
        .iter()
        .enumerate()
        .map(|(index, best)| Point {
            x: f64::from(best.devices),
            y: best.tokens_per_s,
            label: format!("{} devices: {}, MFU {:.1} %", best.devices, best.layout, 100.0 * best.mfu),
            mark: if index == 0 { Mark::Best } else { Mark::Listed },
            spread: None,
        })
        .collect();
    scatter(&Scatter {
        title: "",
        x: "devices",
        y: "tokens per second",
        points: &points,
        limit: None,
        better: Better::Higher,
        ideal: few.zip(most),
        size: PLOT,
    })
}

fn scaling_words(scaling: &[Scaling]) -> String {
    let (Some(most), Some(few)) =
        (scaling.iter().max_by_key(|scaling| scaling.devices), scaling.iter().min_by_key(|scaling| scaling.devices))
    else {
        return String::new();
    };
    let of_each = |scaling: &Scaling| scaling.tokens_per_s / f64::from(scaling.devices);
    format!(
        "The same batch on fewer devices; the dashed line is in proportion. {} devices each make {:.0} % of the tokens that each of {} makes.",
        format_count(f64::from(most.devices)),
        100.0 * of_each(most) / of_each(few),
        format_count(f64::from(few.devices))
    )
}
