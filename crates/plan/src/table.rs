//! The answer for a terminal: a table of plans, the reasons, and the details of one.

use crate::answer::Basis;
use crate::candidate::{checkpointing_words, details};
use crate::explain::duration;
use crate::{Answer, Plan, Request};
use std::fmt::Write as _;
use trainyard_base::{format_bytes, format_count};
use trainyard_program::Mesh;
use trainyard_sim::Interval;

/// `124M`, `70.6B`
pub fn parameters(n: f64) -> String {
    let units = [("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)];
    let (unit, scale) = units.into_iter().find(|(_, scale)| n >= *scale).unwrap_or(("", 1.0));
    let scaled = n / scale;
    if scaled >= 100.0 { format!("{scaled:.0}{unit}") } else { format!("{scaled:.1}{unit}") }
}

/// `$0.42`, with as many digits as it needs.
fn dollars(usd: f64) -> String {
    if usd >= 0.1 { format!("${usd:.2}") } else { format!("${usd:.2e}") }
}

/// `9.8-11.5 s`
fn range(interval: Interval) -> String {
    let (low, high) = (duration(interval.low), duration(interval.high));
    match (low.split_once(' '), high.split_once(' ')) {
        (Some((number, unit)), Some((_, same))) if unit == same => format!("{number}-{high}"),
        _ => format!("{low}-{high}"),
    }
}

/// A few lines about the measurements that the answer rests on.
fn basis(answer: &Answer) -> String {
    let Basis { runs, count, sources, usual_error, large_error, uncovered, apart, memory_margin, correction } =
        &answer.basis;
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let mut text = format!(
        "rests on {count} published runs of {sources} sources ({runs}), predicted without their own source: half within {}, nine of ten within {}\n",
        percent(*usual_error),
        percent(*large_error)
    );
    if !uncovered.is_empty() {
        let _ = writeln!(text, "not covered, so intervals are wider: {}", uncovered.join("; "));
    }
    if let Some(factor) = correction {
        let _ = writeln!(text, "corrected by a measured step: all times x {factor:.3}");
    }
    if *memory_margin > 0.0 {
        let free = percent(*memory_margin);
        let _ = writeln!(
            text,
            "{free} of each device's memory are left free for the error of prediction (--memory-margin)"
        );
    }
    match answer.basis.equal(&answer.plans) {
        0 | 1 => {}
        equal => {
            let apart = percent(apart.exp() - 1.0);
            let _ = writeln!(text, "plans 1 to {equal} cannot be told apart: a difference counts from {apart} on");
        }
    }
    text
}

/// The number of candidates, and what became of them.
pub(crate) fn considered(answer: &Answer) -> String {
    let counts = &answer.search;
    format!(
        "{} candidates considered: {} too large, {} cannot be {}, {} simulated",
        format_count(counts.considered as f64),
        format_count(counts.too_large as f64),
        format_count(counts.too_slow as f64),
        answer.objective.better(),
        format_count(counts.simulated as f64)
    )
}

/// The whole answer.
pub fn table(request: &Request, answer: &Answer) -> String {
    let mut text = heading(request);
    text.push('\n');
    text += &rows(request, &answer.plans);
    text.push('\n');
    let out_of_memory = match answer.search.out_of_memory {
        0 => String::new(),
        n => format!(", {} of them out of memory", format_count(n as f64)),
    };
    let _ = writeln!(text, "{}{out_of_memory}", considered(answer));
    if answer.gap > 0.0 {
        let _ = writeln!(
            text,
            "by the bounds of what was not simulated, no candidate is more than {:.0} % better",
            100.0 * answer.gap
        );
    }
    text += &basis(answer);
    for (index, reason) in answer.reasons.iter().enumerate() {
        let _ = writeln!(text, "{}{reason}", if index == 0 { "why  " } else { "     " });
    }
    text
}

/// The request, in a line or two.
pub fn heading(request: &Request) -> String {
    let cluster = &request.cluster;
    let devices = request.device_counts().first().copied().unwrap_or(cluster.devices());
    let network = if cluster.nodes > 1 { format!(" on {}", cluster.network.name) } else { String::new() };
    let mut text = format!(
        "{} parameters; {} sequences of {} tokens a step; {} x {} {}{network}",
        parameters(request.model.parameters()),
        format_count(request.global_batch as f64),
        format_count(request.sequence_length as f64),
        cluster.nodes,
        cluster.devices_per_node,
        cluster.device.name,
    );
    if devices < cluster.devices() {
        let _ = write!(text, ", of which {} devices", format_count(f64::from(devices)));
    }
    text.push('\n');
    text
}

/// A plan's row of the table.
pub fn cells(request: &Request, plan: &Plan) -> Vec<String> {
    let candidate = &plan.candidate;
    let blocks = request.model.layers + request.model.encoder_layers;
    let devices = candidate.mesh.ranks();
    let mut how = details(candidate);
    if candidate.mesh.pp > 1 {
        how.insert(0, candidate.pipeline.to_string());
    }
    if request.formats.len() > 1 {
        how.insert(0, candidate.format.name().to_owned());
    }
    let mut columns = vec![
        plan.layout.clone(),
        format!("{} x {}", candidate.micro_batch, candidate.accumulation),
        checkpointing_words(candidate.checkpointing, blocks),
        duration(plan.step_s),
        range(plan.step_interval),
        format_count(plan.tokens_per_s),
        format_count(plan.tokens_per_s / f64::from(devices)),
        format!("{:.1} %", 100.0 * plan.mfu),
        format_bytes(plan.memory.total),
        format!("{:.0} %", 100.0 * (1.0 - plan.not_fitting)),
    ];
    if request.cluster.device.usd_per_hour > 0.0 {
        columns.push(plan.usd_per_million_tokens.map_or(String::new(), dollars));
    }
    columns.push(how.join(", "));
    columns
}

/// The titles of [`cells`].
pub fn titles(request: &Request) -> Vec<&'static str> {
    let mut titles =
        vec!["layout", "batch", "recompute", "step", "8 in 10", "tokens/s", "/device", "MFU", "memory", "fits"];
    if request.cluster.device.usd_per_hour > 0.0 {
        titles.push("$/1M tok");
    }
    titles.push("");
    titles
}

fn rows(request: &Request, plans: &[Plan]) -> String {
    lines(&titles(request), plans.iter().map(|plan| cells(request, plan)))
}

/// Aligned rows below their titles, numbered from 1. The first, third and last column are words,
/// aligned left; the others are numbers, aligned right.
pub fn lines<Row: AsRef<[String]>>(titles: &[&str], rows: impl IntoIterator<Item = Row>) -> String {
    let rows: Vec<Row> = rows.into_iter().collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row.as_ref()[column].chars().count());
        cells.chain([titles[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let mut text = String::new();
    let mut line = |number: &str, cells: &[&str]| {
        let mut out = format!("{number:>3}");
        for (column, cell) in cells.iter().enumerate() {
            let left = matches!(column, 0 | 2) || column + 1 == cells.len();
            let width = widths[column];
            out += &if left { format!("  {cell:<width$}") } else { format!("  {cell:>width$}") };
        }
        text += out.trim_end();
        text.push('\n');
    };
    line("", titles);
    for (index, row) in rows.iter().enumerate() {
        let cells: Vec<&str> = row.as_ref().iter().map(String::as_str).collect();
        line(&(index + 1).to_string(), &cells);
    }
    text
}

/// The details of plan number `number`, counted from 1.
pub fn details_of(request: &Request, plan: &Plan, number: usize, bytes_max: u64) -> String {
    let candidate = &plan.candidate;
    let Mesh { pp, dp_replicate, dp_shard, cp, tp, ep, .. } = candidate.mesh;
    let blocks = request.model.layers + request.model.encoder_layers;
    let mut text = format!("plan {number}: {}\n", plan.layout);
    for (name, degree) in [
        ("pipeline_parallel_degree", pp),
        ("data_parallel_replicate_degree", dp_replicate),
        ("data_parallel_shard_degree", dp_shard),
        ("context_parallel_degree", cp),
        ("tensor_parallel_degree", tp),
        ("expert_parallel_degree", ep),
    ] {
        let _ = writeln!(text, "  {name:<32} {degree}");
    }
    let mut facts = vec![
        ("zero_stage", candidate.layout().zero_stage.to_string()),
        ("micro_batch_size", candidate.micro_batch.to_string()),
        ("accumulation_steps", candidate.accumulation.to_string()),
        ("activation_checkpointing", checkpointing_words(candidate.checkpointing, blocks)),
        ("precision", candidate.format.name().to_owned()),
    ];
    if pp > 1 {
        facts.push(("pipeline_schedule", candidate.pipeline.to_string()));
    }
    let more = details(candidate);
    if !more.is_empty() {
        facts.push(("besides", more.join(", ")));
    }
    for (name, value) in facts {
        let _ = writeln!(text, "  {name:<32} {value}");
    }
    let _ = writeln!(
        text,
        "\nstep {}, {} in 8 of 10 cases, of which on rank {}:",
        duration(plan.step_s),
        range(plan.step_interval),
        plan.memory.rank
    );
    for (part, seconds) in &plan.breakdown.0 {
        let share = 100.0 * seconds / plan.breakdown.total();
        let _ = writeln!(text, "  {:<40} {:>9}  {share:>5.1} %", part.words(), duration(*seconds));
    }
    let _ = writeln!(
        text,
        "\n{} of {} on the fullest device (rank {}) at {}:",
        format_bytes(plan.memory.total),
        format_bytes(bytes_max),
        plan.memory.rank,
        plan.memory.at
    );
    for (kind, bytes) in &plan.memory.by_kind {
        let _ = writeln!(text, "  {:<40} {:>11}", kind.name(), format_bytes(*bytes));
    }
    let _ = writeln!(text, "  {:<40} {:>11}", "driver, libraries, scratch", format_bytes(plan.memory.other));
    let _ = writeln!(
        text,
        "\n{} model TFLOP/s per device, {:.1} % of peak; {} tokens/s{}",
        format_count(plan.model_flops_per_s / 1e12),
        100.0 * plan.mfu,
        format_count(plan.tokens_per_s),
        plan.usd_per_million_tokens.map_or(String::new(), |usd| format!(
            "; {} per million tokens, {} per trillion",
            dollars(usd),
            format_args!("${}", format_count(1e6 * usd))
        ))
    );
    text
}

/// The effect of a change on the best plan.
pub fn difference(what: &str, before: &Plan, after: &Plan) -> String {
    let percent = |before: f64, after: f64| format!("{:+.1} %", 100.0 * (after / before - 1.0));
    let mut text = format!("what if {what}\n");
    let mut line = |name: &str, before: String, after: String, change: String| {
        let _ = writeln!(text, "  {name:<20} {before:>32}  {after:>32}  {change}");
    };
    let changed = if before.layout == after.layout { "the same" } else { "another" };
    line("layout", before.layout.clone(), after.layout.clone(), changed.to_owned());
    let step = percent(before.step_s, after.step_s);
    line("step", duration(before.step_s), duration(after.step_s), step);
    let speed = percent(before.tokens_per_s, after.tokens_per_s);
    line("tokens/s", format_count(before.tokens_per_s), format_count(after.tokens_per_s), speed);
    let mfu = |plan: &Plan| format!("{:.1} %", 100.0 * plan.mfu);
    line("MFU", mfu(before), mfu(after), format!("{:+.1} points", 100.0 * (after.mfu - before.mfu)));
    let memory = percent(before.memory.total as f64, after.memory.total as f64);
    line("memory", format_bytes(before.memory.total), format_bytes(after.memory.total), memory);
    if let (Some(a), Some(b)) = (before.usd_per_million_tokens, after.usd_per_million_tokens) {
        line("$ per million tokens", dollars(a), dollars(b), percent(a, b));
    }
    text
}
