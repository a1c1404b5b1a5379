//! A run in the terminal: curves of braille dots, redrawn as it goes on. It works over ssh.

use crate::alerts::{self, Alert, Level};
use crate::run::{State, Summary};
use crate::store::{Run, Store};
use crate::table::{Curve, Progress, Scale};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::canvas::{Canvas, Line as Stroke};
use ratatui::widgets::{Block, BorderType, Gauge, Paragraph};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use trainyard_base::{format_bytes, format_count};

/// Time between two looks at the files.
const INTERVAL: Duration = Duration::from_millis(500);
/// Shares of the run that the curves show: all of it, or its end.
const SHARES: [f64; 5] = [1.0, 0.5, 0.2, 0.05, 0.01];

/// Writes a number for people.
type InWords = fn(f64) -> String;

/// The charts: title, metric, second metric, and the form of their numbers.
const CHARTS: [(&str, &str, Option<&str>, InWords); 6] = [
    ("loss", "loss", Some("evaluation.loss"), number),
    ("tokens/s", "tps", None, format_count),
    ("gradient norm", "grad_norm", None, number),
    ("step time", "step_s", Some("predicted_step_s"), seconds),
    ("waiting for data", "data_wait_s", None, seconds),
    ("exposed communication", "comm_exposed_s", None, seconds),
];

/// Everything that is drawn.
pub struct View {
    /// The run in short.
    pub summary: Arc<Summary>,
    /// The alerts.
    pub alerts: Vec<Alert>,
    /// The curves of [`CHARTS`], the second beside the first.
    curves: Vec<[Curve; 2]>,
    share: usize,
}

impl View {
    /// Reads on, and looks at the last share of the run. `bins` are the columns of dots of a chart.
    ///
    /// # Errors
    ///
    /// A file cannot be read.
    pub fn read(store: &Store, run: &Run, share: usize, bins: usize) -> io::Result<View> {
        while run.read(store.inside())? == Progress::More {}
        let summary = run.summary(store.inside())?;
        let alerts = alerts::of(store.inside(), run, &summary);
        let share = share.min(SHARES.len() - 1);
        let curves = run.with(|tables| {
            let steps = tables.tables[0].steps();
            let (first, last) = (if steps.is_empty() { 0.0 } else { steps.get(0) }, steps.last().unwrap_or(0.0));
            let from = last - (last - first) * SHARES[share];
            let curve = |metric: &str| {
                let found = tables.find(metric);
                found.map_or_else(Curve::default, |(table, name)| table.curve(name, from, last, bins, Scale::Linear))
            };
            CHARTS.map(|(_, metric, second, _)| [curve(metric), second.map_or_else(Curve::default, curve)]).into()
        });
        Ok(View { summary, alerts, curves, share })
    }

    /// Draws everything.
    pub fn draw(&self, frame: &mut Frame) {
        let alerts = self.alerts.len().min(3) as u16;
        let [head, gauge, body, notices, keys] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(1),
            Constraint::Min(4),
            Constraint::Length(alerts),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(self.head()), head);
        self.draw_gauge(frame, gauge);
        self.draw_charts(frame, body);
        let line = |alert: &Alert| {
            let colour = match alert.level {
                Level::Note => Color::Gray,
                Level::Warning => Color::Yellow,
                Level::Error => Color::Red,
            };
            let step = alert.step.map_or(String::new(), |step| format!("step {step}: "));
            Line::from(vec![Span::styled("● ", Style::new().fg(colour)), Span::raw(format!("{step}{}", alert.text))])
        };
        frame.render_widget(Paragraph::new(self.alerts.iter().take(3).map(line).collect::<Vec<_>>()), notices);
        let range =
            if self.share == 0 { "all steps".to_owned() } else { format!("the last {} %", 100.0 * SHARES[self.share]) };
        frame.render_widget(Paragraph::new(format!("q ends   + - other range ({range})").dark_gray()), keys);
    }

    fn head(&self) -> Vec<Line<'static>> {
        let Summary { name, state, last, validation_loss, .. } = &*self.summary;
        let get = |key: &str| last.get(key).copied().filter(|value| value.is_finite());
        let fact = |title: &str, value: Option<String>| {
            value.map(|value| vec![Span::raw(format!("{title} ")).dark_gray(), Span::raw(format!("{value}   ")).bold()])
        };
        let facts = [
            fact("loss", get("loss").map(number)),
            fact("validation", validation_loss.map(number)),
            fact("tokens/s", get("tps").map(format_count)),
            fact("MFU", get("mfu").map(|mfu| format!("{:.1} %", 100.0 * mfu))),
            fact("step", self.summary.step_s.or(get("step_s")).map(seconds)),
            fact("memory", get("mem_peak_bytes").map(|bytes| format_bytes(bytes as u64))),
        ];
        let colour = match state {
            State::Running => Color::Green,
            State::Failed => Color::Red,
            State::Stopped => Color::Yellow,
            State::Finished => Color::Blue,
        };
        let title = vec![
            Span::raw(name.clone()).bold(),
            Span::raw("  "),
            Span::styled(format!("● {}", state.name()), Style::new().fg(colour)),
        ];
        vec![Line::from(title), Line::from(facts.into_iter().flatten().flatten().collect::<Vec<_>>())]
    }

    fn draw_gauge(&self, frame: &mut Frame, area: Rect) {
        let Summary { step, steps, last, step_s, .. } = &*self.summary;
        let Some(steps) = steps.filter(|steps| *steps > 0) else {
            let text = format!("step {}", format_count(*step as f64));
            frame.render_widget(Paragraph::new(text), area);
            return;
        };
        let each_s = step_s.or(last.get("step_s").copied()).filter(|s| s.is_finite()).unwrap_or(0.0);
        let left_s = steps.saturating_sub(*step) as f64 * each_s;
        let left = if left_s > 0.0 { format!(", {} left", seconds(left_s)) } else { String::new() };
        let label = format!("step {} of {}{left}", format_count(*step as f64), format_count(steps as f64));
        let part = (*step as f64 / steps as f64).clamp(0.0, 1.0);
        frame.render_widget(Gauge::default().ratio(part).label(label).gauge_style(Style::new().fg(Color::Blue)), area);
    }

    fn draw_charts(&self, frame: &mut Frame, area: Rect) {
        let has_values = |curves: &[Curve; 2]| {
            let values = curves[0].buckets.iter().filter_map(|(.., bucket)| bucket.mean());
            values.fold(0.0f64, |most, value| most.max(value.abs())) > 0.0
        };
        let shown: Vec<_> = CHARTS.iter().zip(&self.curves).filter(|(_, curves)| has_values(curves)).collect();
        let columns = if area.width >= 90 { 2 } else { 1 };
        let fitting = usize::from(area.height / 5).max(1) * columns;
        let shown = &shown[..shown.len().min(fitting)];
        let rows = shown.len().div_ceil(columns).max(1);
        let areas = Layout::vertical(vec![Constraint::Fill(1); rows]).split(area);
        for (row, charts) in shown.chunks(columns).enumerate() {
            let areas = Layout::horizontal(vec![Constraint::Fill(1); charts.len()]).split(areas[row]);
            for (((title, _, second, words), curves), area) in charts.iter().zip(areas.iter()) {
                draw_chart(frame, *area, title, *second, *words, curves);
            }
        }
    }
}

fn draw_chart(frame: &mut Frame, area: Rect, title: &str, second: Option<&str>, words: InWords, curves: &[Curve; 2]) {
    let buckets = || curves.iter().flat_map(|curve| &curve.buckets);
    let finite = || buckets().filter(|(.., bucket)| bucket.count > 0);
    let low = finite().map(|(.., bucket)| bucket.min).fold(f64::INFINITY, f64::min);
    let high = finite().map(|(.., bucket)| bucket.max).fold(f64::NEG_INFINITY, f64::max);
    let (first, last) = buckets().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), (x, y, _)| (a.min(*x), b.max(*y)));
    let margin = if high > low { 0.0 } else { low.abs().max(1.0) * 0.1 };
    let now = curves[0].buckets.iter().rev().find_map(|(.., bucket)| bucket.mean());
    let block = Block::bordered()
        .border_type(BorderType::Rounded)
        .border_style(Style::new().dark_gray())
        .title(Line::from(vec![
            Span::raw(format!(" {title} ")),
            Span::raw(now.map_or(String::new(), |now| format!("{} ", words(now)))).bold(),
        ]))
        .title_bottom(Line::raw(format!(" {} … {} ", words(low), words(high))).dark_gray());
    // Evaluations are far apart: they are dots.
    let second_is_joined = !second.is_some_and(|name| name.starts_with("evaluation"));
    let [first_curve, second_curve] = curves;
    let canvas = Canvas::default()
        .block(block)
        .marker(Marker::Braille)
        .x_bounds([first, if last > first { last } else { first + 1.0 }])
        .y_bounds([low - margin, high + margin])
        .paint(|ctx| {
            for (curve, colour, is_joined) in
                [(first_curve, Color::Cyan, true), (second_curve, Color::Yellow, second_is_joined)]
            {
                let mut before: Option<(f64, f64)> = None;
                for (start, end, bucket) in &curve.buckets {
                    let Some(mean) = bucket.mean() else {
                        before = None;
                        continue;
                    };
                    let x = start.midpoint(*end);
                    // The whole range, so that a spike of one step is seen.
                    ctx.draw(&Stroke { x1: x, y1: bucket.min, x2: x, y2: bucket.max, color: colour });
                    if let Some((x1, y1)) = before.filter(|_| is_joined) {
                        ctx.draw(&Stroke { x1, y1, x2: x, y2: mean, color: colour });
                    }
                    before = Some((x, mean));
                }
            }
        });
    frame.render_widget(canvas, area);
}

fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if !(1e-3..1e6).contains(&size) => format!("{value:.2e}"),
        _ => format!("{value:.4}"),
    }
}

fn seconds(value: f64) -> String {
    match value {
        s if s < 1.0 => format!("{:.2} ms", 1e3 * s),
        s if s < 120.0 => format!("{s:.2} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Shows the run until the user ends it.
///
/// # Errors
///
/// The terminal or a file refuses.
pub fn show(store: &Store, run: &Run) -> io::Result<()> {
    let mut terminal = ratatui::try_init()?;
    let result = watch(&mut terminal, store, run);
    ratatui::try_restore()?;
    result
}

fn watch(terminal: &mut ratatui::DefaultTerminal, store: &Store, run: &Run) -> io::Result<()> {
    let mut share = 0;
    loop {
        let bins = 2 * usize::from(terminal.size()?.width).max(20);
        let view = View::read(store, run, share, bins)?;
        terminal.draw(|frame| view.draw(frame))?;
        if !event::poll(INTERVAL)? {
            continue;
        }
        let Event::Key(key) = event::read()? else { continue };
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
            KeyCode::Char('+' | '=') => share = (share + 1).min(SHARES.len() - 1),
            KeyCode::Char('-') => share = share.saturating_sub(1),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen(width: u16, height: u16) -> String {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("my-run");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("config.toml"), "[training]\nsteps = 4000\n").unwrap();
        let record = |step: i32| {
            let loss = if step == 1234 { 90.0 } else { 5.0 / f64::from(step).sqrt() };
            format!("{{\"step\":{step},\"loss\":{loss},\"tps\":12345,\"grad_norm\":null,\"skipped\":{}}}\n", step == 7)
        };
        std::fs::write(folder.join("metrics.jsonl"), (1..=2000).map(record).collect::<String>()).unwrap();
        let store = Store::open(root.path()).unwrap();
        let run = store.run("my-run").unwrap().unwrap();
        let view = View::read(&store, &run, 0, 2 * usize::from(width)).unwrap();
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_run_is_drawn_with_its_numbers_and_the_spike() {
        let screen = screen(110, 30);
        for part in [
            "my-run",
            "● running",
            "step 2,000 of 4,000",
            "tokens/s 12,345",
            " 0.1118 … 90.0000 ",
            "steps skipped, because their loss or gradient was not finite: 1",
        ] {
            assert!(screen.contains(part), "{part} in\n{screen}");
        }
        // Above the rest of the curve there are dots of the spike alone.
        let rows: Vec<&str> = screen.lines().collect();
        let top = rows.iter().position(|row| row.contains("╭ loss")).unwrap() + 1;
        let dots = rows[top].chars().take(56).filter(|c| ('\u{2801}'..='\u{28ff}').contains(c)).count();
        assert_eq!(dots, 1, "{screen}");
    }

    #[test]
    fn any_size_of_terminal_will_do() {
        for (width, height) in [(1, 1), (10, 3), (40, 12), (300, 100)] {
            screen(width, height);
        }
    }
}
