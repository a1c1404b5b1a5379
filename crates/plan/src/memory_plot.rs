//! Memory of a step over time by purpose: stacked areas on the time axis of the timeline.

use crate::MemorySeries;
use crate::svg::{short, ticks};
use crate::timeline::{LEFT, WIDTH};
use std::fmt::Write as _;
use trainyard_program::MemoryKind;

const HEIGHT: f64 = 230.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 30.0;
const GIB: f64 = (1u64 << 30) as f64;
const KINDS: usize = MemoryKind::ALL.len();

/// The kinds in the order of their areas, from the bottom: what stays the whole step comes first.
const ORDER: [MemoryKind; KINDS] = [
    MemoryKind::Parameters,
    MemoryKind::Masters,
    MemoryKind::Optimizer,
    MemoryKind::Gradients,
    MemoryKind::Gathered,
    MemoryKind::Communication,
    MemoryKind::Data,
    MemoryKind::Activations,
];

/// The kinds that `series` holds at some time, in the order of their areas.
pub fn kinds(series: &MemorySeries) -> Vec<MemoryKind> {
    let held = |kind: &MemoryKind| series.0.iter().any(|(_, bytes)| bytes[*kind as usize] > 0.0);
    ORDER.into_iter().filter(held).collect()
}

/// The picture of a step of `step_s` seconds, with a line at `bytes_max` if the peak comes near it.
pub fn svg(series: &MemorySeries, step_s: f64, bytes_max: f64) -> String {
    let peak = series.peak();
    if peak <= 0.0 || step_s <= 0.0 {
        return String::new();
    }
    let top = if peak > 0.5 * bytes_max { peak.max(bytes_max) } else { peak };
    let ys = ticks(0.0, top / GIB);
    let most = ys.last().copied().unwrap_or(1.0) * GIB;
    let py = |bytes: f64| HEIGHT - BOTTOM - bytes / most * (HEIGHT - TOP - BOTTOM);
    let px = |seconds: f64| LEFT + seconds / step_s * (WIDTH - LEFT - 10.0);
    let mut svg =
        format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"memory of the step by purpose\">\n");
    for &y in &ys {
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\"/>\n\
             <text text-anchor=\"end\" x=\"{2}\" y=\"{3:.1}\">{4} GiB</text>",
            WIDTH - 10.0,
            py(y * GIB),
            LEFT - 6.0,
            py(y * GIB) + 4.0,
            short(y)
        );
    }
    let columns = columns(series, &px);
    let mut below = vec![0.0; columns.len()];
    for kind in kinds(series) {
        let above: Vec<f64> =
            below.iter().zip(&columns).map(|(below, (_, bytes))| below + bytes[kind as usize]).collect();
        let _ = writeln!(
            svg,
            "<polygon class=\"{}\" points=\"{}\"><title>{}: {} at most</title></polygon>",
            kind.name(),
            area(&columns, &below, &above, &py),
            kind.name(),
            trainyard_base::format_bytes(
                columns.iter().map(|(_, bytes)| bytes[kind as usize]).fold(0.0, f64::max) as u64
            )
        );
        below = above;
    }
    if most >= bytes_max {
        let _ = writeln!(
            svg,
            "<line class=\"limit\" x1=\"{LEFT}\" x2=\"{0:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\"/>\n\
             <text class=\"limit\" text-anchor=\"end\" x=\"{0:.1}\" y=\"{2:.1}\">limit</text>",
            WIDTH - 10.0,
            py(bytes_max),
            py(bytes_max) - 4.0
        );
    }
    let (unit, scale) = if step_s < 1.0 { ("ms", 1e3) } else { ("s", 1.0) };
    for seconds in ticks(0.0, step_s).into_iter().filter(|seconds| *seconds <= step_s) {
        let _ = writeln!(
            svg,
            "<text text-anchor=\"middle\" x=\"{:.1}\" y=\"{}\">{} {unit}</text>",
            px(seconds),
            HEIGHT - 8.0,
            short(seconds * scale)
        );
    }
    svg + "</svg>\n"
}

/// Bytes by kind from each pixel on: of the moments within a pixel, the fullest.
fn columns(series: &MemorySeries, px: &impl Fn(f64) -> f64) -> Vec<(f64, [f64; KINDS])> {
    let mut columns: Vec<(f64, [f64; KINDS])> = Vec::new();
    for (at, bytes) in &series.0 {
        let x = px(*at).round();
        match columns.last_mut() {
            Some((last, held)) if *last == x => {
                if bytes.iter().sum::<f64>() > held.iter().sum::<f64>() {
                    *held = *bytes;
                }
            }
            _ => columns.push((x, *bytes)),
        }
    }
    columns
}

/// The corners of the steps between two curves.
fn area(columns: &[(f64, [f64; KINDS])], below: &[f64], above: &[f64], py: &impl Fn(f64) -> f64) -> String {
    let end = WIDTH - 10.0;
    let next = |index: usize| columns.get(index + 1).map_or(end, |(x, _)| *x);
    let mut points = String::new();
    for (index, (x, _)) in columns.iter().enumerate() {
        let y = py(above[index]);
        let _ = write!(points, "{x:.0},{y:.1} {:.0},{y:.1} ", next(index));
    }
    for (index, (x, _)) in columns.iter().enumerate().rev() {
        let y = py(below[index]);
        let _ = write!(points, "{:.0},{y:.1} {x:.0},{y:.1} ", next(index));
    }
    points.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_stand_on_each_other_and_the_limit_is_drawn_where_it_is_near() {
        let bytes = |parameters: f64, activations: f64| {
            let mut all = [0.0; KINDS];
            all[MemoryKind::Parameters as usize] = parameters * GIB;
            all[MemoryKind::Activations as usize] = activations * GIB;
            all
        };
        let series = MemorySeries(vec![(0.0, bytes(2.0, 0.0)), (0.5, bytes(2.0, 6.0))]);
        assert_eq!(kinds(&series), [MemoryKind::Parameters, MemoryKind::Activations]);
        let near = svg(&series, 1.0, 10.0 * GIB);
        assert_eq!(near.matches("<polygon").count(), 2);
        assert!(near.contains("class=\"limit\"") && near.contains("activations: 6.0 GiB at most"), "{near}");
        assert!(!svg(&series, 1.0, 100.0 * GIB).contains("class=\"limit\""));
        assert_eq!(svg(&MemorySeries::default(), 1.0, 1.0), "");
    }
}
