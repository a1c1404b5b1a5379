//! The display of a running training: lines of figures that stay, and, on a terminal, a bar with
//! the newest figures below them.

use super::{EvaluationMetrics, StepMetrics, mean_staleness};
use crate::config::Limits;
use crate::evaluate::EvaluationProgress;
use crate::warning::is_warning;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};
use trainyard_base::{format_bytes, format_count};

/// A display. The trainer reports every event; the display chooses which ones to show.
pub trait Progress: Send {
    /// Training begins after `done` steps; `steps` is where it ends, when that is known.
    fn begin(&mut self, done: u64, steps: Option<u64>);
    /// A step is complete.
    fn step(&mut self, metrics: &StepMetrics, steps: Option<u64>, left: Option<Duration>);
    /// An evaluation is under way.
    fn evaluating(&mut self, _: EvaluationProgress) {}
    /// An evaluation is complete.
    fn evaluation(&mut self, metrics: &EvaluationMetrics);
    /// A message for the user: a checkpoint, a skipped step, a repair.
    fn note(&mut self, text: &str);
    /// Training has ended; the display is left in a readable state.
    fn end(&mut self);
}

/// The display that fits standard error: [`Terminal`] or [`Plain`].
pub fn for_stderr() -> Box<dyn Progress> {
    if std::io::stderr().is_terminal() {
        Box::new(Terminal::new(std::io::stderr(), ProgressDrawTarget::stderr()))
    } else {
        Box::new(Plain::new(std::io::stderr(), Plain::EVERY_S))
    }
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn begin(&mut self, _: u64, _: Option<u64>) {}
    fn step(&mut self, _: &StepMetrics, _: Option<u64>, _: Option<Duration>) {}
    fn evaluation(&mut self, _: &EvaluationMetrics) {}
    fn note(&mut self, _: &str) {}
    fn end(&mut self) {}
}

/// Shows warnings and nothing else.
#[derive(Debug)]
pub struct Warnings<W> {
    out: W,
}

impl<W: Write + Send> Warnings<W> {
    /// Writes to `out`.
    pub fn new(out: W) -> Warnings<W> {
        Warnings { out }
    }
}

impl<W: Write + Send> Progress for Warnings<W> {
    fn begin(&mut self, _: u64, _: Option<u64>) {}
    fn step(&mut self, _: &StepMetrics, _: Option<u64>, _: Option<Duration>) {}
    fn evaluation(&mut self, _: &EvaluationMetrics) {}
    fn note(&mut self, text: &str) {
        if is_warning(text) {
            write_line(&mut self.out, text);
        }
    }
    fn end(&mut self) {}
}

/// Writes a line to a display's output.
fn write_line(out: &mut impl Write, text: &str) {
    // A display that cannot be written to must not end a training.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Chooses the steps whose line stays: the first, the last, and others in between.
#[derive(Debug)]
struct History {
    /// Seconds of training between lines, at most.
    every_s: f64,
    /// Number of equal parts of the steps; the first step of each part has a line. 0: only time
    /// counts.
    parts: u64,
    /// Seconds of training since the last line.
    since_s: f64,
    /// The part of the steps that the last line is in.
    part: u64,
}

impl History {
    fn new(every_s: f64, parts: u64) -> History {
        History { every_s, parts, since_s: f64::INFINITY, part: 0 }
    }

    /// True if the line of this step stays.
    fn keeps(&mut self, metrics: &StepMetrics, steps: Option<u64>) -> bool {
        self.since_s += metrics.step_s;
        let part = steps.map_or(0, |steps| metrics.step.saturating_mul(self.parts) / steps.max(1));
        let keeps = self.since_s >= self.every_s || part > self.part || steps == Some(metrics.step);
        if keeps {
            (self.since_s, self.part) = (0.0, part);
        }
        keeps
    }
}

/// A bar with the figures of the newest step, redrawn in place. Above it are lines that stay: one
/// for every 30 s of training, and one for every tenth of the steps.
#[derive(Debug)]
pub struct Terminal<W> {
    bar: ProgressBar,
    out: W,
    history: History,
    /// The newest step's line, unless it is already among the lines that stay.
    passing: Option<String>,
}

impl<W: Write + Send> Terminal<W> {
    /// Draws on `target`, and writes the lines that stay to `out`.
    pub fn new(out: W, target: ProgressDrawTarget) -> Terminal<W> {
        let bar = ProgressBar::with_draw_target(None, target);
        // The template is a constant; should it ever be refused, the default bar is still a bar.
        let style =
            ProgressStyle::with_template("{bar:24.cyan/dim} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style);
        Terminal { bar, out, history: History::new(30.0, 10), passing: None }
    }

    fn line(&mut self, text: &str) {
        let Terminal { bar, out, .. } = self;
        bar.suspend(|| write_line(out, text));
    }
}

impl<W: Write + Send> Progress for Terminal<W> {
    fn begin(&mut self, done: u64, steps: Option<u64>) {
        self.bar.set_length(steps.unwrap_or(0));
        self.bar.set_position(done);
        self.bar.set_message(steps.map_or("first step".to_owned(), |steps| format!("step {done}/{steps}")));
    }

    fn step(&mut self, metrics: &StepMetrics, steps: Option<u64>, left: Option<Duration>) {
        // Restores the bar's length after an evaluation.
        self.bar.set_length(steps.unwrap_or(0));
        let line = step_line(metrics, steps, left);
        let keeps = self.history.keeps(metrics, steps);
        if keeps {
            self.line(&line);
        }
        self.passing = (!keeps).then(|| line.clone());
        self.bar.set_position(metrics.step);
        self.bar.set_message(line);
    }

    fn evaluating(&mut self, progress: EvaluationProgress) {
        self.bar.set_length(progress.of);
        self.bar.set_position(progress.tokens);
        self.bar.set_message(evaluating_line(progress));
    }

    fn evaluation(&mut self, metrics: &EvaluationMetrics) {
        self.line(&evaluation_line(metrics));
    }

    fn note(&mut self, text: &str) {
        self.line(text);
    }

    fn end(&mut self) {
        self.bar.finish_and_clear();
        if let Some(line) = self.passing.take() {
            self.line(&line);
        }
    }
}

/// Plain lines for a log file: the first step, the last, and one for every so many seconds of
/// training between.
#[derive(Debug)]
pub struct Plain<W> {
    out: W,
    history: History,
    /// The time of the last line about the evaluation under way.
    evaluating: Option<Instant>,
}

impl Plain<std::io::Stderr> {
    /// Seconds of training between lines in a log file: a day is 8,640 lines.
    pub const EVERY_S: f64 = 10.0;
}

impl<W: Write + Send> Plain<W> {
    /// Writes to `out`, a step's line at most every `every_s` seconds of training.
    pub fn new(out: W, every_s: f64) -> Plain<W> {
        Plain { out, history: History::new(every_s, 0), evaluating: None }
    }

    fn line(&mut self, text: &str) {
        write_line(&mut self.out, text);
    }
}

impl<W: Write + Send> Progress for Plain<W> {
    fn begin(&mut self, _: u64, _: Option<u64>) {}

    fn step(&mut self, metrics: &StepMetrics, steps: Option<u64>, left: Option<Duration>) {
        if self.history.keeps(metrics, steps) {
            self.line(&step_line(metrics, steps, left));
        }
    }

    fn evaluating(&mut self, progress: EvaluationProgress) {
        let told = *self.evaluating.get_or_insert_with(Instant::now);
        if told.elapsed().as_secs_f64() >= self.history.every_s {
            self.evaluating = Some(Instant::now());
            self.line(&evaluating_line(progress));
        }
    }

    fn evaluation(&mut self, metrics: &EvaluationMetrics) {
        self.evaluating = None;
        self.line(&evaluation_line(metrics));
    }

    fn note(&mut self, text: &str) {
        self.line(text);
    }

    fn end(&mut self) {}
}

/// The line of a step:
///
/// ```text
/// step 120/2000  loss 3.1416  lr 3.00e-4  grad 1.23  12,345 tok/s  0.72 TFLOP/s  MFU 21.3 %  1.2 GiB  1m 20s left
/// ```
pub fn step_line(m: &StepMetrics, steps: Option<u64>, left: Option<Duration>) -> String {
    let mut parts = vec![
        steps.map_or_else(|| format!("step {}", m.step), |steps| format!("step {}/{steps}", m.step)),
        format!("loss {:.4}", m.loss),
        format!("lr {:.2e}", m.lr),
        format!("grad {:.2}", m.grad_norm),
        match m.images_per_s {
            Some(rate) => format!("{} images/s", format_count(rate)),
            None => format!("{} tok/s", format_count(m.tps)),
        },
        format!("{:.2} TFLOP/s", m.tflops),
    ];
    parts.extend(m.mfu.map(|mfu| format!("MFU {:.1} %", 100.0 * mfu)));
    parts.push(format_bytes(m.mem_peak_bytes));
    parts.extend((m.epoch > 1.0).then(|| format!("epoch {:.2}", m.epoch)));
    parts.extend(m.drift.map(|drift| format!("drift {drift:.3}")));
    parts.extend(m.inner_steps.as_ref().map(|steps| format!("inner steps {steps:?}")));
    let staleness = m.staleness.as_deref().filter(|pulls| pulls.len() > 1).and_then(mean_staleness);
    parts.extend(staleness.map(|mean| format!("stale {mean:.1}")));
    parts.extend(m.penalty.map(|penalty| format!("penalty {penalty:.4}")));
    parts.extend(m.sparsity.map(|share| format!("zeros {:.1} %", 100.0 * share)));
    parts.extend(m.experts.map(|experts| format!("largest expert {:.2} x mean", experts.load_max)));
    parts.extend(m.loss_scale.map(|scale| format!("scale {scale}")));
    parts.extend(m.skipped.then(|| "SKIPPED".to_owned()));
    parts.extend(left.map(|left| format!("{} left", duration(left))));
    parts.join("  ")
}

/// `evaluation at step 500  loss 1.8741  perplexity 6.51  2.7031 bits/byte  111,540 tokens  1s`, of
/// images `evaluation at step 500  loss 0.4714  top 1 87.10 %  top 5 99.02 %  10,000 images  9s`.
/// Behind it stand the losses of several texts: `(web 1.9021, code 1.4410)`
pub fn evaluation_line(m: &EvaluationMetrics) -> String {
    let mut parts = vec![format!("evaluation at step {}", m.step), format!("loss {:.4}", m.loss)];
    match m.top1.zip(m.top5) {
        Some((top1, top5)) => {
            parts.extend([("1", top1), ("5", top5)].map(|(n, share)| format!("top {n} {:.2} %", 1e2 * share)))
        }
        None => parts.push(format!("perplexity {:.2}", m.perplexity)),
    }
    parts.extend(m.bits_per_byte.map(|bits| format!("{bits:.4} bits/byte")));
    parts.extend(m.averaged_loss.map(|loss| format!("averaged weights {loss:.4}")));
    let unit = if m.top1.is_some() { "images" } else { "tokens" };
    parts.push(format!("{} {unit}", format_count(m.tokens as f64)));
    parts.push(duration(Duration::from_secs_f64(m.seconds.clamp(0.0, 1e9))));
    if !m.texts.is_empty() {
        let texts: Vec<String> = m.texts.iter().map(|text| format!("{} {:.4}", text.name, text.loss)).collect();
        parts.push(format!("({})", texts.join(", ")));
    }
    parts.join("  ")
}

/// `evaluating: 65,536 of 1,115,394 tokens, 5 %`
fn evaluating_line(EvaluationProgress { tokens, of }: EvaluationProgress) -> String {
    let share = 100 * u128::from(tokens) / u128::from(of.max(1));
    format!("evaluating: {} of {} tokens, {share} %", format_count(tokens as f64), format_count(of as f64))
}

/// The two largest units: `2d 3h`, `1h 5m`, `1m 20s`, `7s`.
fn duration(time: Duration) -> String {
    let s = time.as_secs();
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {}s", s / 60, s % 60),
        3600..86_400 => format!("{}h {}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d {}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Estimates the time left from the steps so far, without a clock of its own.
#[derive(Clone, Debug)]
pub struct TimeLeft {
    limits: Limits,
    /// Exponential mean of the seconds of a step, and the weight it rests on.
    mean_s: f64,
    weight: f64,
}

impl TimeLeft {
    /// Begins with the limits of the run; the number of steps may be set later.
    pub fn new(limits: Limits) -> TimeLeft {
        TimeLeft { limits, mean_s: 0.0, weight: 0.0 }
    }

    /// Sets the number of steps, once it is known.
    pub fn set_steps(&mut self, steps: u64) {
        self.limits.steps = Some(steps);
    }

    /// Updates the estimate after step `step`, which took `step_s`, and `elapsed_s` of training in
    /// all. Returns the time until the first limit.
    pub fn update(&mut self, step: u64, step_s: f64, elapsed_s: f64) -> Option<Duration> {
        /// Weight of a new step: a mean over about the last fifty steps.
        const NEW: f64 = 0.02;
        self.mean_s += NEW * (step_s - self.mean_s);
        self.weight += NEW * (1.0 - self.weight);
        let by_steps = self.limits.steps.map(|steps| steps.saturating_sub(step) as f64 * self.mean_s / self.weight);
        let by_clock = self.limits.seconds.map(|seconds| (seconds - elapsed_s).max(0.0));
        let seconds = by_steps.into_iter().chain(by_clock).reduce(f64::min)?;
        Duration::try_from_secs_f64(seconds.max(0.0)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::TextLoss;
    use crate::metrics::tests::sample;

    #[test]
    fn the_line_has_every_figure() {
        let line = step_line(&sample(12), Some(100), Some(Duration::from_secs(80)));
        assert_eq!(
            line,
            "step 12/100  loss 2.5000  lr 3.00e-4  grad 1.25  2,300 tok/s  1.90 TFLOP/s  MFU 31.0 %  1.5 GiB  1m 20s left"
        );
        let skipped = StepMetrics { skipped: true, loss: f64::NAN, mfu: None, loss_scale: Some(1024.0), ..sample(1) };
        let line = step_line(&skipped, None, None);
        assert!(line.starts_with("step 1  loss NaN") && line.ends_with("scale 1024  SKIPPED"), "{line}");
        let second = step_line(&StepMetrics { epoch: 1.254, ..sample(1) }, None, None);
        assert!(second.ends_with("1.5 GiB  epoch 1.25"), "{second}");
        let line = evaluation_line(&EvaluationMetrics::new(500, 1.5 * 111_540.0, 111_540, Some(111_540), 2.0));
        assert_eq!(line, "evaluation at step 500  loss 1.5000  perplexity 4.48  2.1640 bits/byte  111,540 tokens  2s");
        let names = ["web", "code", "left off"].map(str::to_owned);
        let texts = [(30.0, 20), (5.0, 10), (0.0, 0)].map(|(loss_sum, targets)| TextLoss { loss_sum, targets });
        let several = EvaluationMetrics::new(7, 35.0, 30, None, 2.0).with_texts(&names, &texts);
        assert!(evaluation_line(&several).ends_with("30 tokens  2s  (web 1.5000, code 0.5000)"), "{several:?}");
        let one = EvaluationMetrics::new(7, 30.0, 20, None, 2.0).with_texts(&names[..1], &texts[..1]);
        assert!(one.texts.is_empty(), "one text is all");
    }

    #[test]
    fn plain_lines_are_spaced_by_training_time() {
        let mut out = Vec::new();
        let mut plain = Plain::new(&mut out, 10.0);
        plain.begin(0, Some(100));
        for step in 1..=100 {
            plain.step(&StepMetrics { step_s: 1.0, ..sample(step) }, Some(100), None);
        }
        plain.note("done");
        let text = String::from_utf8(out).unwrap();
        let steps: Vec<_> = text.lines().map(|line| line.split(' ').nth(1).unwrap_or("")).collect();
        assert_eq!(steps[..4], ["1/100", "11/100", "21/100", "31/100"]);
        assert_eq!(text.lines().count(), 12, "ten lines, the last step, the note: {text}");
    }

    #[test]
    fn an_evaluation_shows_how_far_it_has_come() {
        let lines = |every_s: f64| {
            let mut out = Vec::new();
            let mut plain = Plain::new(&mut out, every_s);
            (1..=3).for_each(|round| plain.evaluating(EvaluationProgress { tokens: 1000 * round, of: 3000 }));
            String::from_utf8(out).unwrap()
        };
        assert_eq!(lines(0.0).lines().next(), Some("evaluating: 1,000 of 3,000 tokens, 33 %"));
        assert_eq!((lines(0.0).lines().count(), lines(60.0).as_str()), (3, ""), "a short one says nothing");
    }

    #[test]
    fn the_time_left_ends_at_the_first_limit() {
        let seconds = |limits: Limits, step, elapsed_s| {
            let mut left = TimeLeft::new(limits);
            left.update(step, 2.0, elapsed_s).map(|left| left.as_secs_f64().round())
        };
        assert_eq!(seconds(Limits { steps: Some(100), seconds: None }, 40, 80.0), Some(120.0));
        assert_eq!(seconds(Limits { steps: Some(100), seconds: Some(90.0) }, 40, 80.0), Some(10.0));
        assert_eq!(seconds(Limits { steps: None, seconds: Some(90.0) }, 40, 100.0), Some(0.0));
        assert_eq!(seconds(Limits { steps: None, seconds: None }, 40, 100.0), None);
    }

    /// The numbers of the steps whose lines a terminal keeps, of `steps` of `step_s` seconds.
    fn kept(steps: u64, step_s: f64) -> Vec<u64> {
        let mut out = Vec::new();
        let mut terminal = Terminal::new(&mut out, ProgressDrawTarget::hidden());
        terminal.begin(0, Some(steps));
        for step in 1..=steps {
            terminal.step(&StepMetrics { step_s, ..sample(step) }, Some(steps), None);
        }
        assert_eq!((terminal.bar.position(), terminal.bar.length()), (steps, Some(steps)));
        terminal.end();
        let text = String::from_utf8(out).unwrap();
        let number = |line: &str| line.split([' ', '/']).nth(1).and_then(|number| number.parse().ok()).unwrap();
        text.lines().map(number).collect()
    }

    /// A bar alone once left a single line of a run, the last.
    #[test]
    fn a_terminal_keeps_a_history_of_lines() {
        assert_eq!(kept(1000, 0.01), [1, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]);
        assert_eq!(kept(3, 0.01), [1, 2, 3]);
        // A tenth of the steps takes 100 s, so a line comes every 30 s as well.
        assert_eq!(kept(100, 10.0)[..8], [1, 4, 7, 10, 13, 16, 19, 20]);
    }

    #[test]
    fn notes_evaluations_and_the_last_step_stay_on_a_terminal() {
        let mut out = Vec::new();
        let mut terminal = Terminal::new(&mut out, ProgressDrawTarget::hidden());
        terminal.begin(3, None);
        terminal.note("a note");
        terminal.evaluating(EvaluationProgress { tokens: 700, of: 1000 });
        assert_eq!((terminal.bar.position(), terminal.bar.length()), (700, Some(1000)));
        for step in [4, 5] {
            terminal.step(&sample(step), None, None);
        }
        terminal.evaluation(&EvaluationMetrics::new(4, 1.0, 1, None, 0.0));
        terminal.end();
        let text = String::from_utf8(out).unwrap();
        let begin: Vec<_> = text.lines().map(|line| line.get(..12).unwrap_or(line)).collect();
        // The last step of a run that ends early is shown too.
        assert_eq!(begin, ["a note", "step 4  loss", "evaluation a", "step 5  loss"]);
    }

    #[test]
    fn quiet_runs_show_warnings_and_nothing_else() {
        let mut out = Vec::new();
        let mut quiet = Warnings::new(&mut out);
        quiet.begin(0, Some(2));
        quiet.step(&sample(1), Some(2), None);
        quiet.note("checkpoint written");
        quiet.note(&crate::warning::warning("no room"));
        quiet.evaluation(&EvaluationMetrics::new(1, 1.0, 1, None, 0.0));
        quiet.end();
        assert_eq!(String::from_utf8(out).unwrap(), "warning: no room\n");
    }

    #[test]
    fn figures_are_readable() {
        assert_eq!(format_count(1_234_567.4), "1,234,567");
        assert_eq!([format_count(0.0), format_count(999.0)], ["0", "999"]);
        for (s, want) in [(7, "7s"), (80, "1m 20s"), (3900, "1h 5m"), (183_600, "2d 3h")] {
            assert_eq!(duration(Duration::from_secs(s)), want);
        }
    }
}
