//! A quantity over time, from CSV: the price of electricity, or its carbon intensity.
//!
//! A line is `time,value`, with times as [`crate::time::instant`] reads them. A header, empty lines
//! and lines that begin with `#` are skipped. A value holds until the next line's time, the last
//! one as long as the one before it. Beyond its ends the curve repeats: by the hour of the week if
//! it covers a week, else by the hour of the day.

use crate::QueueError;
use crate::time::{DAY_S, Offset, WEEK_S, instant};
use std::path::Path;

/// Upper limit for lines: ten years of quarter hours.
const LINES_MAX: usize = 400_000;
/// Upper limit for the size of a value: means and costs of accepted curves stay finite.
const VALUE_MAX: f64 = 1e15;
/// A pause between two lines that is longer than this is a hole.
const HOLE_S: i64 = DAY_S;

/// A quantity over time: constant from each time to the next.
#[derive(Clone, PartialEq, Debug)]
pub struct Curve {
    starts: Vec<i64>,
    values: Vec<f64>,
    end: i64,
}

impl Curve {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, a line that is not understood or out of order, or fewer hours
    /// than a day has.
    pub fn read(path: &Path, offset: Offset<'_>) -> Result<Curve, QueueError> {
        let text = std::fs::read_to_string(path).map_err(|source| QueueError::File {
            what: "read",
            path: path.to_owned(),
            source,
        })?;
        Curve::parse(&text, path, offset)
    }

    /// Reads the text of a file; `path` is for messages.
    ///
    /// # Errors
    ///
    /// As [`Curve::read`].
    pub fn parse(text: &str, path: &Path, offset: Offset<'_>) -> Result<Curve, QueueError> {
        let mut curve = Curve { starts: Vec::new(), values: Vec::new(), end: 0 };
        let mut is_first = true;
        for (index, line) in text.lines().enumerate() {
            let error = |what: String| QueueError::Line { path: path.to_owned(), line: index + 1, what };
            let line = line.trim().trim_start_matches('\u{feff}');
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let fields: Vec<&str> = line.split([',', ';', '\t']).map(|field| field.trim().trim_matches('"')).collect();
            let at = fields.first().and_then(|text| instant(text, offset));
            let was_first = std::mem::replace(&mut is_first, false);
            let Some(at) = at else {
                if was_first && !fields[0].starts_with(|c: char| c.is_ascii_digit()) {
                    continue;
                }
                return Err(error(format!(
                    "{:?} is no time: write 2026-11-27T08:00:00Z or 2026-11-27 08:00 (local), a comma, and a value",
                    fields[0]
                )));
            };
            let [_, value] = fields[..] else {
                return Err(error(format!("{} fields: a time and a value are needed", fields.len())));
            };
            let Some(value) = value.parse().ok().filter(|value: &f64| value.abs() <= VALUE_MAX) else {
                return Err(error(format!("{value:?} is no number from -{VALUE_MAX:e} to {VALUE_MAX:e}")));
            };
            match curve.starts.last() {
                Some(last) if at <= *last => {
                    return Err(error("its time is not after that of the line before".to_owned()));
                }
                Some(last) if at - last > HOLE_S => {
                    return Err(error(format!("{} hours are missing before it", (at - last) / 3600)));
                }
                _ => {}
            }
            if curve.starts.len() == LINES_MAX {
                return Err(error(format!("more than {LINES_MAX} values")));
            }
            curve.starts.push(at);
            curve.values.push(value);
        }
        let [.., before, last] = curve.starts[..] else {
            return Err(QueueError::Refused(format!("{}: at least two lines are needed", path.display())));
        };
        curve.end = last + (last - before);
        if curve.end - curve.starts[0] < DAY_S {
            return Err(QueueError::Refused(format!(
                "{}: it covers {:.1} hours, and at least 24 are needed to tell the other ones",
                path.display(),
                (curve.end - curve.starts[0]) as f64 / 3600.0
            )));
        }
        Ok(curve)
    }

    /// The time after the last value.
    pub fn end(&self) -> i64 {
        self.end
    }

    /// The period by which it repeats, in seconds.
    pub fn period_s(&self) -> i64 {
        if self.end - self.starts[0] >= WEEK_S { WEEK_S } else { DAY_S }
    }

    /// The time inside the curve that stands for `at`.
    fn inside(&self, at: i64) -> i64 {
        let (begin, period) = (self.starts[0], self.period_s());
        if at >= self.end {
            self.end - period + (at - self.end).rem_euclid(period)
        } else if at < begin {
            begin + (at - begin).rem_euclid(period)
        } else {
            at
        }
    }

    /// The index of the value at a time inside.
    fn index(&self, at: i64) -> usize {
        self.starts.partition_point(|start| *start <= at).saturating_sub(1)
    }

    /// The value at a time.
    pub fn at(&self, at: i64) -> f64 {
        self.values[self.index(self.inside(at))]
    }

    /// The mean value of `from..to`.
    pub fn mean(&self, from: i64, to: i64) -> f64 {
        if to <= from {
            return self.at(from);
        }
        let (mut sum, mut at) = (0.0, from);
        while at < to {
            let inside = self.inside(at);
            let index = self.index(inside);
            let until = self.starts.get(index + 1).copied().unwrap_or(self.end);
            let next = (at + (until - inside)).min(to);
            sum += self.values[index] * (next - at) as f64;
            at = next;
        }
        sum / (to - from) as f64
    }

    /// The shortest time that a value holds, in seconds.
    pub fn resolution_s(&self) -> i64 {
        self.starts.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(DAY_S)
    }

    /// The known part up to `until`: what somebody has who sees no further.
    pub fn known_until(&self, until: i64) -> Option<Curve> {
        let count = self.starts.partition_point(|start| *start < until);
        let mut part = self.clone();
        part.starts.truncate(count);
        part.values.truncate(count);
        part.end = self.starts.get(count).copied().unwrap_or(self.end);
        (count > 1 && part.end - part.starts[0] >= DAY_S).then_some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Curve, QueueError> {
        Curve::parse(text, Path::new("prices.csv"), &|_| 0)
    }

    /// A day of hours whose values are the hour.
    fn day() -> String {
        let lines = (0..24).map(|hour| format!("2026-11-25 {hour:02}:00,{hour}\n"));
        lines.collect()
    }

    #[test]
    fn a_day_repeats_by_the_hour() {
        let curve = parse(&format!("time,EUR/MWh\n# a note\n\n{}", day())).unwrap();
        let begin = 1_795_564_800;
        for (hour, value) in [(0, 0.0), (13, 13.0), (23, 23.0), (24, 0.0), (49, 1.0), (-1, 23.0), (-24, 0.0)] {
            assert_eq!(curve.at(begin + 3600 * hour + 1799), value, "{hour}");
        }
        assert_eq!(curve.mean(begin + 1800, begin + 3 * 3600), (0.0 * 0.5 + 1.0 + 2.0) / 2.5);
        assert_eq!(curve.mean(begin + 23 * 3600, begin + 25 * 3600), 11.5);
        assert_eq!((curve.resolution_s(), curve.end() - begin), (3600, DAY_S));
    }

    #[test]
    fn a_week_repeats_by_the_hour_of_the_week() {
        let lines = (0..7 * 24).map(|hour| format!("{},{hour}\n", crate::time::rfc3339(3600 * hour)));
        let curve = parse(&lines.collect::<String>()).unwrap();
        assert_eq!(curve.period_s(), WEEK_S);
        assert_eq!(curve.at(WEEK_S + 30 * 3600), 30.0);
        let known = curve.known_until(2 * DAY_S).unwrap();
        assert_eq!((known.period_s(), known.at(2 * DAY_S + 3600)), (DAY_S, 25.0));
    }

    #[test]
    fn bad_files_are_refused_with_the_line() {
        let with = |line: &str| format!("{}{line}\n", day());
        for (text, says) in [
            (String::new(), "at least two lines"),
            ("2026-11-25 00:00,1\n2026-11-25 01:00,1\n".to_owned(), "covers 2.0 hours"),
            (with("2026-11-25 23:00,1"), "prices.csv, line 25: its time is not after"),
            (with("2026-11-28 23:00,1"), "prices.csv, line 25: 72 hours are missing before it"),
            (with("2026-11-26 00:00,cheap"), "prices.csv, line 25: \"cheap\" is no number"),
            (with("2026-11-26 00:00,NaN"), "line 25: \"NaN\" is no number"),
            (with("2026-11-26 00:00,1e300"), "line 25: \"1e300\" is no number from -1e15 to 1e15"),
            (with("2026-11-26 00:00"), "line 25: 1 fields"),
            (with("2026-11-26 00:00,1,2"), "line 25: 3 fields"),
            (with("26.11.2026 00:00,1"), "line 25: \"26.11.2026 00:00\" is no time"),
            ("25.11.2026,1\n".to_owned(), "line 1: \"25.11.2026\" is no time"),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(says), "{says}: {error}");
        }
        let error = Curve::read(Path::new("/nowhere/prices.csv"), &|_| 0).unwrap_err().to_string();
        assert!(error.contains("cannot read /nowhere/prices.csv"), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([0-9:,T Z+-]|\\PC|\n){0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn a_mean_is_that_of_its_parts(from in -200_000i64..200_000, first in 1i64..100_000, second in 1i64..100_000) {
            let curve = parse(&day()).unwrap();
            let (a, b) = (curve.mean(from, from + first), curve.mean(from + first, from + first + second));
            let whole = curve.mean(from, from + first + second);
            let parts = (a * first as f64 + b * second as f64) / (first + second) as f64;
            prop_assert!((whole - parts).abs() < 1e-9, "{} {}", whole, parts);
        }
    }
}
