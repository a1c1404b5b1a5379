//! The space of a search: configuration keys, each with the set of its values.
//!
//! Samplers know points of the unit cube only. [`Space::point`] rounds a place in the cube to the
//! nearest one that stands for values, and [`Space::sets`] writes those values down.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The values of one key.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Domain {
    /// Numbers from `low` to `high`, both included, rounded to four significant digits.
    Number {
        /// The lowest.
        low: f64,
        /// The highest.
        high: f64,
        /// True if factors count, not differences.
        log: bool,
    },
    /// Whole numbers from `low` to `high`, both included.
    Whole {
        /// The lowest.
        low: i64,
        /// The highest.
        high: i64,
        /// True if factors count, not differences.
        log: bool,
    },
    /// A list of values, as they are written in a configuration. Numbers in ascending order are
    /// neighbours; other values have no order.
    Choice {
        /// The values.
        values: Vec<String>,
    },
}

/// A key and its values.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Dimension {
    /// The key: `section.key`.
    pub key: String,
    /// Its values.
    pub domain: Domain,
}

/// A set of keys and their values.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Space {
    /// The keys, in a fixed order.
    pub dimensions: Vec<Dimension>,
}

/// A point of a space, by its place in the unit cube: one number in [0, 1] for each key. Equal
/// points stand for equal values.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Point(pub Vec<f64>);

/// An error in the description of a space.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct SpaceError {
    /// The text or key.
    pub place: String,
    /// The problem, and what is meant to stand there.
    pub problem: String,
}

const FORMS: &str = "write KEY=log:1e-4..1e-2, KEY=0.0..0.3, KEY=int:1..8, KEY=logint:8..512 or KEY=8|16|32";

fn error(place: &str, problem: impl Into<String>) -> SpaceError {
    SpaceError { place: place.to_owned(), problem: problem.into() }
}

impl Domain {
    /// Reads `log:1e-4..1e-2`, `0.0..0.3`, `int:1..8`, `logint:8..512` or `a|b|c`. `place` is named
    /// in errors.
    fn parse(text: &str, place: &str) -> Result<Domain, SpaceError> {
        let text = text.trim();
        let (kind, range) = match text.split_once(':') {
            Some((kind @ ("log" | "int" | "logint" | "lin"), range)) => (kind, range),
            _ => ("", text),
        };
        let Some((low, high)) = range.split_once("..") else {
            if !kind.is_empty() {
                return Err(error(place, format!("`{range}` is no range LOW..HIGH: {FORMS}")));
            }
            return Domain::choice(text.split('|').map(|value| value.trim().to_owned()).collect(), place);
        };
        let (low, high) = (low.trim(), high.trim_start_matches('=').trim());
        match kind {
            "int" | "logint" => {
                let whole = |end: &str| {
                    end.parse::<i64>().map_err(|_| error(place, format!("`{end}` is no whole number: {FORMS}")))
                };
                Domain::Whole { low: whole(low)?, high: whole(high)?, log: kind == "logint" }.checked(place)
            }
            _ => {
                let number = |end: &str| {
                    let number = end.parse::<f64>().ok().filter(|number| number.is_finite());
                    number.ok_or_else(|| error(place, format!("`{end}` is no number: {FORMS}")))
                };
                Domain::Number { low: number(low)?, high: number(high)?, log: kind == "log" }.checked(place)
            }
        }
    }

    fn choice(values: Vec<String>, place: &str) -> Result<Domain, SpaceError> {
        if values.len() < 2 {
            return Err(error(place, format!("one value is no choice: {FORMS}")));
        }
        if values.iter().any(String::is_empty) {
            return Err(error(place, format!("a value is empty: {FORMS}")));
        }
        if let Some(twice) = values.iter().enumerate().find(|(at, value)| values[..*at].contains(value)) {
            return Err(error(place, format!("{} is there twice", twice.1)));
        }
        Ok(Domain::Choice { values })
    }

    fn checked(self, place: &str) -> Result<Domain, SpaceError> {
        let (low, high, log) = match self {
            Domain::Number { low, high, log } => (low, high, log),
            Domain::Whole { low, high, log } => (low as f64, high as f64, log),
            Domain::Choice { .. } => return Ok(self),
        };
        if low.is_nan() || high.is_nan() || low >= high {
            return Err(error(place, format!("the range {low}..{high} is empty: the lower end comes first")));
        }
        if log && low <= 0.0 {
            return Err(error(place, format!("a logarithmic range begins above 0, and this one at {low}")));
        }
        Ok(self)
    }

    /// Number of values; None for numbers, which have no fixed count.
    pub fn count(&self) -> Option<u64> {
        match self {
            Domain::Number { .. } => None,
            Domain::Whole { low, high, .. } => Some(high.abs_diff(*low).saturating_add(1)),
            Domain::Choice { values } => Some(values.len() as u64),
        }
    }

    /// The edges of the values' cells in the unit interval, ascending, one more than values; None
    /// for numbers.
    pub(crate) fn edges(&self) -> Option<Vec<f64>> {
        match self {
            Domain::Number { .. } => None,
            Domain::Whole { low, high, log } => {
                let edge = |value: i64| whole_edge(*low, *high, *log, value as f64);
                Some((*low..=*high).map(edge).chain([1.0]).collect())
            }
            Domain::Choice { values } => {
                Some((0..=values.len()).map(|value| value as f64 / values.len() as f64).collect())
            }
        }
    }

    /// True if neighbouring places in the unit interval mean similar values.
    pub fn is_ordered(&self) -> bool {
        let Domain::Choice { values } = self else { return true };
        let numbers: Vec<f64> = values.iter().filter_map(|value| value.parse().ok()).collect();
        numbers.len() == values.len() && numbers.is_sorted()
    }

    /// The value at `place` in [0, 1], as it is written in a configuration.
    fn value(&self, place: f64) -> String {
        match self {
            Domain::Number { low, high, log } => {
                let value = if *log { low * (high / low).powf(place) } else { low + (high - low) * place };
                let value = rounded(value).clamp(*low, *high);
                // TOML tells whole numbers from others.
                format!("{value:?}")
            }
            Domain::Whole { low, high, log } => whole_at(*low, *high, *log, place).to_string(),
            Domain::Choice { values } => values[cell(place, values.len())].clone(),
        }
    }

    /// The place of the value at `place`: the same for all places that mean the same value.
    pub(crate) fn canonical(&self, place: f64) -> f64 {
        match self {
            Domain::Number { low, high, log } => {
                let value: f64 = self.value(place).parse().unwrap_or(*low);
                let place = if *log { (value / low).ln() / (high / low).ln() } else { (value - low) / (high - low) };
                place.clamp(0.0, 1.0)
            }
            Domain::Whole { low, high, log } => whole_place(*low, *high, *log, whole_at(*low, *high, *log, place)),
            Domain::Choice { values } => (cell(place, values.len()) as f64 + 0.5) / values.len() as f64,
        }
    }
}

/// `value` with four significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// The cell of [0, 1], divided into `n`, that holds `place`.
pub(crate) fn cell(place: f64, n: usize) -> usize {
    ((place * n as f64) as usize).min(n - 1)
}

/// Whole numbers have cells of equal size, or of equal ratio.
fn whole_at(low: i64, high: i64, log: bool, place: f64) -> i64 {
    let value = match log {
        false => low as f64 + place * (high as f64 - low as f64 + 1.0),
        true => low as f64 * ((high as f64 + 1.0) / low as f64).powf(place),
    };
    (value.floor() as i64).clamp(low, high)
}

/// The middle of the cell of `value`.
fn whole_place(low: i64, high: i64, log: bool, value: i64) -> f64 {
    let edge = |value: f64| whole_edge(low, high, log, value);
    0.5 * (edge(value as f64) + edge(value as f64 + 1.0))
}

/// The lower edge of the cell of `value`.
fn whole_edge(low: i64, high: i64, log: bool, value: f64) -> f64 {
    let (low, end) = (low as f64, high as f64 + 1.0);
    match log {
        false => (value - low) / (end - low),
        true => (value / low).ln() / (end / low).ln(),
    }
}

impl Space {
    /// Reads `KEY=DOMAIN` lines, as given by `--space`, after those in the text of a file, in TOML:
    /// `"optimizer.learning_rate" = "log:1e-4..1e-2"`, or with sections; a list is a choice.
    ///
    /// # Errors
    /// Text of another form, empty ranges, a key that is given twice, no key at all.
    pub fn parse(file: Option<(&str, &str)>, lines: &[String]) -> Result<Space, SpaceError> {
        let mut dimensions: Vec<Dimension> = Vec::new();
        if let Some((name, text)) = file {
            let table: toml::Table = text.parse().map_err(|problem: toml::de::Error| {
                error(name, format!("this is no TOML: {}", problem.to_string().trim_end()))
            })?;
            flatten(name, "", &table, &mut dimensions)?;
        }
        for line in lines {
            let Some((key, domain)) = line.split_once('=') else {
                return Err(error(line, FORMS));
            };
            let key = key.trim();
            dimensions.push(Dimension { key: key.to_owned(), domain: Domain::parse(domain, line)? });
        }
        let mut seen = BTreeMap::new();
        for Dimension { key, .. } in &dimensions {
            let is_key = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            if key.split('.').count() < 2 || !key.split('.').all(is_key) {
                return Err(error(key, format!("a key is SECTION.KEY: {FORMS}")));
            }
            if seen.insert(key, ()).is_some() {
                return Err(error(key, "the key is given twice"));
            }
        }
        if dimensions.is_empty() {
            return Err(error("the search space", format!("it has no key: {FORMS}")));
        }
        Ok(Space { dimensions })
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.dimensions.len()
    }

    /// True if there is no key.
    pub fn is_empty(&self) -> bool {
        self.dimensions.is_empty()
    }

    /// The point nearest to `place` in the unit cube.
    pub fn point(&self, place: &[f64]) -> Point {
        let canonical = |(dimension, place): (&Dimension, &f64)| dimension.domain.canonical(place.clamp(0.0, 1.0));
        Point(self.dimensions.iter().zip(place).map(canonical).collect())
    }

    /// The values of a point, as they are written in a configuration.
    pub fn values(&self, point: &Point) -> Vec<String> {
        self.dimensions.iter().zip(&point.0).map(|(dimension, place)| dimension.domain.value(*place)).collect()
    }

    /// The point as `KEY=VALUE`, one for each key.
    pub fn sets(&self, point: &Point) -> Vec<String> {
        let values = self.values(point).into_iter();
        self.dimensions.iter().zip(values).map(|(dimension, value)| format!("{}={value}", dimension.key)).collect()
    }

    /// Number of points; None if there is no fixed count.
    pub fn count(&self) -> Option<u64> {
        self.dimensions.iter().try_fold(1u64, |all, d| d.domain.count().map(|count| all.saturating_mul(count)))
    }
}

fn flatten(name: &str, prefix: &str, table: &toml::Table, into: &mut Vec<Dimension>) -> Result<(), SpaceError> {
    for (key, value) in table {
        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        let place = format!("{name}: {key}");
        let domain = match value {
            toml::Value::Table(inner) => {
                flatten(name, &key, inner, into)?;
                continue;
            }
            toml::Value::String(text) => Domain::parse(text, &place)?,
            toml::Value::Array(values) => Domain::choice(values.iter().map(toml::Value::to_string).collect(), &place)?,
            other => return Err(error(&place, format!("`{other}` is one value, no range: {FORMS}"))),
        };
        into.push(Dimension { key, domain });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(lines: &[&str]) -> Result<Space, SpaceError> {
        Space::parse(None, &lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn values_are_written_as_a_configuration_reads_them() {
        let space = lines(&[
            "optimizer.learning_rate=log:1e-4..1e-2",
            "model.dropout=0.0..0.3",
            "model.layers=int:1..8",
            "training.micro_batch_size=logint:8..512",
            "schedule.kind='cosine'|'linear'",
            "training.global_batch_size=8|16|32",
        ])
        .unwrap();
        let sets = |place: f64| space.sets(&space.point(&[place; 6]));
        assert_eq!(
            sets(0.5),
            [
                "optimizer.learning_rate=0.001",
                "model.dropout=0.15",
                "model.layers=5",
                "training.micro_batch_size=64",
                "schedule.kind='linear'",
                "training.global_batch_size=16"
            ]
        );
        assert_eq!(
            sets(0.0)[..4],
            ["optimizer.learning_rate=0.0001", "model.dropout=0.0", "model.layers=1", "training.micro_batch_size=8"]
                .map(String::from)
        );
        assert_eq!(sets(1.0)[0], "optimizer.learning_rate=0.01");
        assert_eq!(sets(1.0)[2..4], ["model.layers=8", "training.micro_batch_size=512"].map(String::from));
        assert_eq!(sets(0.123)[0], "optimizer.learning_rate=0.0001762");
        assert!(!space.dimensions[4].domain.is_ordered() && space.dimensions[5].domain.is_ordered());
    }

    #[test]
    fn a_point_is_the_place_of_its_own_values() {
        let space =
            lines(&["a.x=log:3e-5..0.7", "a.y=-2.0..9.0", "a.z=int:-3..4", "a.w=logint:1..1000", "a.v=a|b|c"]).unwrap();
        for i in 0..=200 {
            let place: Vec<f64> = (0..5).map(|d| (f64::from(i) * 0.618 + f64::from(d) * 0.37).fract()).collect();
            let point = space.point(&place);
            assert_eq!(space.point(&point.0), point, "{place:?}");
            assert_eq!(space.values(&space.point(&point.0)), space.values(&point));
            for (at, was) in point.0.iter().zip(&place) {
                assert!((0.0..=1.0).contains(at) && (at - was).abs() < 0.26, "{at} for {was}");
            }
        }
        let all: std::collections::BTreeSet<_> =
            (0..1000).map(|i| space.values(&space.point(&[f64::from(i) / 999.0; 5]))[2].clone()).collect();
        assert_eq!(all.len(), 8, "every whole number is reached");
    }

    #[test]
    fn a_file_has_sections_or_quoted_keys() {
        let text = "\"optimizer.learning_rate\" = \"log:1e-4..1e-2\"\n[training]\nglobal_batch_size = [8, 16]\n[schedule]\nkind = ['cosine', 'linear']\n";
        let space = Space::parse(Some(("s.toml", text)), &["model.dim=8|16".to_owned()]).unwrap();
        let sets = space.sets(&space.point(&[0.0; 4]));
        // The file's keys come in its order, tables after it.
        assert_eq!(sets.len(), 4);
        assert!(sets.contains(&"schedule.kind=\"cosine\"".to_owned()), "{sets:?}");
        assert_eq!(space.count(), None);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (line, says) in [
            ("learning_rate", "write KEY=log:"),
            ("learning_rate=0..1", "SECTION.KEY"),
            ("optimizer.learning_rate=log:0..1", "begins above 0"),
            ("optimizer.learning_rate=log:1e-2..1e-4", "is empty"),
            ("optimizer.learning_rate=1e-3", "one value is no choice"),
            ("optimizer.learning_rate=a..b", "`a` is no number"),
            ("optimizer.learning_rate=0..inf", "`inf` is no number"),
            ("model.layers=int:1..2.5", "`2.5` is no whole number"),
            ("model.layers=int:3", "is no range"),
            ("model.layers=8|8", "there twice"),
            ("model.layers=8|", "a value is empty"),
        ] {
            let error = lines(&[line]).unwrap_err().to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
        assert!(lines(&[]).unwrap_err().to_string().contains("has no key"));
        assert!(lines(&["a.b=0..1", "a.b=0..2"]).unwrap_err().to_string().contains("given twice"));
        let file = |text| Space::parse(Some(("s.toml", text)), &[]).unwrap_err().to_string();
        assert!(file("a.b = 3\n").contains("is one value"));
        assert!(file("a.b = \n").contains("s.toml: this is no TOML"));
    }
}
