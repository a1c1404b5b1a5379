//! Plots as inline SVG: a scatter with axes and a frontier, and a timeline of lanes. The text is
//! deterministic, has no scripts, and is readable in light and dark.

use std::fmt::Write as _;

/// A point of a scatter.
#[derive(Clone, PartialEq, Debug)]
pub struct Point {
    /// Abscissa.
    pub x: f64,
    /// Ordinate.
    pub y: f64,
    /// Text that the reader sees on the point.
    pub label: String,
    /// Appearance.
    pub mark: Mark,
    /// The ends of an interval of the ordinate, if one is known.
    pub spread: Option<(f64, f64)>,
}

/// The appearance of a point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// One of many candidates.
    Faint,
    /// A plan that the table lists.
    Listed,
    /// The best plan.
    Best,
}

/// The better end of an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
}

/// A scatter plot. Less is better on the x axis.
#[derive(Clone, PartialEq, Debug)]
pub struct Scatter<'a> {
    /// Heading; empty: none.
    pub title: &'a str,
    /// Label of the x axis, with its unit.
    pub x: &'a str,
    /// Label of the y axis, with its unit.
    pub y: &'a str,
    /// The points.
    pub points: &'a [Point],
    /// A vertical line for a limit, with its label.
    pub limit: Option<(f64, &'a str)>,
    /// The better end of the y axis.
    pub better: Better,
    /// A dashed line between two points, for what would be ideal.
    pub ideal: Option<((f64, f64), (f64, f64))>,
    /// Width and height.
    pub size: (f64, f64),
}

const LEFT: f64 = 78.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 48.0;

/// `text` with the special characters of XML escaped.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Round numbers that cover `low` to `high`, 1, 2 or 5 times a power of ten apart.
pub fn ticks(low: f64, high: f64) -> Vec<f64> {
    let span = if high > low { high - low } else { low.abs().max(1.0) };
    let raw = span / 5.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= raw).unwrap_or(power);
    let first = (low / step).floor() as i64;
    let last = (high / step).ceil() as i64;
    (first..=last.max(first + 1)).map(|n| n as f64 * step).collect()
}

/// A number as an axis shows it: `250`, `12k`, `3.5M`.
pub fn short(value: f64) -> String {
    let units = [("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)];
    let (unit, scale) = units.into_iter().find(|(_, scale)| value.abs() >= *scale).unwrap_or(("", 1.0));
    let scaled = value / scale;
    let text = if scaled.abs() >= 100.0 { format!("{scaled:.0}") } else { format!("{scaled:.2}") };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text };
    format!("{text}{unit}")
}

/// Indices of the points that no other point beats in both axes, sorted by x.
pub fn frontier(points: &[Point], better: Better) -> Vec<usize> {
    let height = |index: usize| if better == Better::Higher { points[index].y } else { -points[index].y };
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|a, b| points[*a].x.total_cmp(&points[*b].x).then(height(*b).total_cmp(&height(*a))));
    let mut best = f64::NEG_INFINITY;
    order.retain(|index| {
        let is_better = height(*index) > best;
        best = best.max(height(*index));
        is_better
    });
    order
}

/// The scatter as an `<svg>` element; empty text without points.
pub fn scatter(plot: &Scatter<'_>) -> String {
    if plot.points.is_empty() {
        return String::new();
    }
    let (width, height) = plot.size;
    let top = if plot.title.is_empty() { 12.0 } else { TOP };
    let range = |value: fn(&Point) -> f64, also: Option<f64>| {
        let values = || plot.points.iter().map(value).chain(also);
        ticks(values().fold(f64::INFINITY, f64::min).min(0.0), values().fold(f64::NEG_INFINITY, f64::max))
    };
    let xs = range(|p| p.x, plot.limit.map(|(x, _)| x));
    let ys = range(|p| p.y, plot.ideal.map(|(_, (_, y))| y));
    let at = |value: f64, ticks: &[f64]| (value - ticks[0]) / (ticks[ticks.len() - 1] - ticks[0]);
    let px = |x: f64| LEFT + at(x, &xs) * (width - LEFT - RIGHT);
    let py = |y: f64| height - BOTTOM - at(y, &ys) * (height - top - BOTTOM);
    let words = if plot.title.is_empty() { format!("{} by {}", plot.y, plot.x) } else { plot.title.to_owned() };
    let mut svg = format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n", escaped(&words));
    if !plot.title.is_empty() {
        let _ = writeln!(svg, "<text class=\"title\" x=\"{LEFT}\" y=\"18\">{}</text>", escaped(plot.title));
    }
    for &x in &xs {
        let (p, bottom) = (px(x), height - BOTTOM);
        let _ = writeln!(svg, "<line class=\"grid\" x1=\"{p:.1}\" y1=\"{top}\" x2=\"{p:.1}\" y2=\"{bottom}\"/>");
        let _ =
            writeln!(svg, "<text text-anchor=\"middle\" x=\"{p:.1}\" y=\"{:.1}\">{}</text>", bottom + 16.0, short(x));
    }
    for &y in &ys {
        let (p, right) = (py(y), width - RIGHT);
        let _ = writeln!(svg, "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{p:.1}\" x2=\"{right}\" y2=\"{p:.1}\"/>");
        let _ =
            writeln!(svg, "<text text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>", LEFT - 6.0, p + 4.0, short(y));
    }
    let middle = (top + height - BOTTOM) / 2.0;
    let _ = writeln!(
        svg,
        "<text text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
        (LEFT + width - RIGHT) / 2.0,
        height - 10.0,
        escaped(plot.x)
    );
    let _ = writeln!(
        svg,
        "<text text-anchor=\"middle\" transform=\"rotate(-90 16 {middle})\" x=\"16\" y=\"{middle}\">{}</text>",
        escaped(plot.y)
    );
    if let Some((x, words)) = plot.limit {
        let p = px(x);
        let _ = writeln!(
            svg,
            "<line class=\"limit\" x1=\"{p:.1}\" y1=\"{top}\" x2=\"{p:.1}\" y2=\"{:.1}\"/>\n\
             <text class=\"limit\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            height - BOTTOM,
            p - 4.0,
            top + 12.0,
            escaped(words)
        );
    }
    if let Some(((x1, y1), (x2, y2))) = plot.ideal {
        let _ = writeln!(
            svg,
            "<line class=\"ideal\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
            px(x1),
            py(y1),
            px(x2),
            py(y2)
        );
    }
    let line: Vec<String> = frontier(plot.points, plot.better)
        .into_iter()
        .map(|index| format!("{:.1},{:.1}", px(plot.points[index].x), py(plot.points[index].y)))
        .collect();
    let _ = writeln!(svg, "<polyline class=\"frontier\" points=\"{}\"/>", line.join(" "));
    for point in plot.points {
        if let Some((low, high)) = point.spread {
            let x = px(point.x);
            let _ = writeln!(
                svg,
                "<line class=\"spread\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
                py(low),
                py(high)
            );
        }
    }
    for mark in [Mark::Faint, Mark::Listed, Mark::Best] {
        for point in plot.points.iter().filter(|point| point.mark == mark) {
            let (class, radius) = match mark {
                Mark::Faint => ("faint", 3.0),
                Mark::Listed => ("listed", 4.5),
                Mark::Best => ("best", 6.5),
            };
            let _ = writeln!(
                svg,
                "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\"><title>{}</title></circle>",
                px(point.x),
                py(point.y),
                escaped(&point.label)
            );
        }
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.0, 0.0), [0.0, 0.2]);
        for (low, high) in [(0.0, 81.3), (-3.0, 4.0), (0.0, 1.3e9), (5.0, 5.0)] {
            let all = ticks(low, high);
            assert!(all[0] <= low && all[all.len() - 1] >= high && (2..=8).contains(&all.len()), "{all:?}");
        }
        assert_eq!([0.0, 0.25, 1234.0, 2.5e6].map(short), ["0", "0.25", "1.23k", "2.5M"]);
    }

    #[test]
    fn the_frontier_is_what_nothing_beats() {
        let point = |x, y| Point { x, y, label: String::new(), mark: Mark::Faint, spread: None };
        let points = [point(2.0, 5.0), point(1.0, 1.0), point(3.0, 4.0), point(4.0, 6.0), point(2.0, 3.0)];
        assert_eq!(frontier(&points, Better::Higher), [1, 0, 3]);
        assert_eq!(frontier(&points, Better::Lower), [1]);
    }

    #[test]
    fn a_scatter_is_well_formed_and_escapes_its_words() {
        let points = [Point { x: 1.0, y: 2.0, label: "a < b".into(), mark: Mark::Best, spread: Some((1.0, 3.0)) }];
        let empty = Scatter {
            title: "t",
            x: "x",
            y: "y",
            points: &[],
            limit: None,
            better: Better::Higher,
            ideal: Some(((0.0, 0.0), (1.0, 2.0))),
            size: (400.0, 300.0),
        };
        let svg = scatter(&Scatter { points: &points, limit: Some((3.0, "limit")), ..empty });
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("a &lt; b"));
        assert_eq!(svg.matches("<circle").count(), 1);
        assert_eq!(scatter(&empty), "");
    }
}
