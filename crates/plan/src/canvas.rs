//! An SVG file under construction: boxes and words in the colours that all pictures share.

use crate::svg::escaped;
use std::fmt::Write as _;

/// The colours of all pictures, for light and dark pages. The classes of timelines and scatters are
/// those that `trainyard_plan` draws with.
const STYLE: &str = "\
svg{font:13px system-ui,sans-serif;fill:#1d2430;background:#fff}.title{font-weight:600;font-size:15px}.small{font-size:11px}.faded{fill:#5d6b80}
.grid{stroke:#d8dde6}.limit{stroke:#c0392b;stroke-dasharray:4 3}text.limit{stroke:none;fill:#c0392b}
.frontier{fill:none;stroke:#0b6e4f;stroke-width:1.5}.faint{fill:#9aa7ba;opacity:.6}.listed{fill:#2f6fdb}.best{fill:#0b6e4f}
rect.frame{fill:none;stroke:#9aa7ba}rect.plain{fill:#eef1f6}
rect.parameters,rect.forward{fill:#4c8bf5}rect.backward{fill:#2456b3}rect.optimizer,rect.update{fill:#7a5cc9}rect.gather{fill:#e8a33d}
rect.gradients,rect.reduce{fill:#d9663a}rect.exchange{fill:#c94f7c}rect.pipeline{fill:#2a9d8f}rect.host{fill:#8d99ae}
rect.masters{fill:#2a9d8f}.memory{fill:#2f6fdb;opacity:.35}text.on{fill:#fff}
@media(prefers-color-scheme:dark){svg{fill:#e4e9f1;background:#14181f}.grid{stroke:#323a48}.faded{fill:#9aa7ba}rect.plain{fill:#232a35}}
";

/// A picture of a given size, in pixels.
pub struct Canvas {
    width: f64,
    height: f64,
    body: String,
}

impl Canvas {
    /// An empty picture with a title. All pictures share their colours, for light and dark pages.
    pub fn new(width: f64, height: f64, title: &str) -> Canvas {
        let mut canvas = Canvas { width, height, body: String::new() };
        canvas.text(10.0, 22.0, "title", title);
        canvas
    }

    /// A rectangle of a class, from its upper left corner.
    pub fn rect(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), class: &str) {
        let _ = writeln!(
            self.body,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>"
        );
    }

    /// The same with words that appear when the pointer is on it.
    pub fn box_with(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), class: &str, words: &str) {
        let _ = writeln!(
            self.body,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"><title>{}</title></rect>",
            escaped(words)
        );
    }

    /// A line between two points.
    pub fn line(&mut self, (x, y): (f64, f64), (to_x, to_y): (f64, f64), class: &str) {
        let _ = writeln!(
            self.body,
            "<line class=\"{class}\" x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{to_x:.1}\" y2=\"{to_y:.1}\"/>"
        );
    }

    /// More colours, for this picture only.
    pub fn style(&mut self, css: &str) {
        let _ = writeln!(self.body, "<style>{css}</style>");
    }

    /// Words that begin at `x`, on the line `y`.
    pub fn text(&mut self, x: f64, y: f64, class: &str, words: &str) {
        let _ = writeln!(self.body, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(words));
    }

    /// Words around the middle `x`.
    pub fn centred(&mut self, x: f64, y: f64, class: &str, words: &str) {
        let _ = writeln!(
            self.body,
            "<text class=\"{class}\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>",
            escaped(words)
        );
    }

    /// A key: coloured squares with their words, in one line.
    pub fn key(&mut self, y: f64, entries: &[(&str, &str)]) {
        let mut x = 10.0;
        for (class, words) in entries {
            self.rect((x, y - 10.0), (11.0, 11.0), class);
            self.text(x + 16.0, y, "small", words);
            x += 34.0 + 6.4 * words.len() as f64;
        }
    }

    /// An `<svg>` element that was drawn elsewhere, its upper left corner at `y`.
    pub fn embed(&mut self, y: f64, height: f64, svg: &str) {
        let svg =
            svg.replacen("<svg ", &format!("<svg x=\"0\" y=\"{y}\" width=\"{}\" height=\"{height}\" ", self.width), 1);
        self.body += &svg;
    }

    /// The file.
    pub fn finish(self) -> String {
        let Canvas { width, height, body } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\">\n\
             <style>\n{STYLE}</style>\n{body}</svg>\n"
        )
    }
}
