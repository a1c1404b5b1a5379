//! A choice of runs, and their order: `--where 'dim=768' --sort tps`.

use serde_json::{Map, Value};
use std::cmp::Ordering;

/// A run of the registry.
pub type Run = Map<String, Value>;

/// A key, or a condition, that does not fit the runs.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SelectError {
    /// Not KEY OPERATOR VALUE.
    #[error("`{0}` is no condition: write KEY=VALUE, or with != < <= > >= or ~ (contains) for =")]
    Form(String),
    /// No run has it.
    #[error("no run has `{0}`: it is neither a column such as tps or validation_loss, nor a setting, nor a metric")]
    Unknown(String),
    /// The key is the end of several.
    #[error("`{key}` may be {}", candidates.join(" or "))]
    Ambiguous {
        /// The key.
        key: String,
        /// The keys that it may mean.
        candidates: Vec<String>,
    },
}

/// A key that some run has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Empty for a column, else `config`, `metrics` or `environment`.
    part: &'static str,
    /// The full name.
    pub name: String,
}

/// A condition such as `dim>=768`.
#[derive(Clone, Debug)]
pub struct Condition {
    /// The key.
    pub key: Key,
    operator: &'static str,
    value: String,
}

const OPERATORS: [&str; 7] = ["!=", "<=", ">=", "=", "<", ">", "~"];
const PARTS: [&str; 3] = ["config", "metrics", "environment"];

impl Key {
    /// The key that `name` means: a column, a setting, a metric, or the last word of one setting.
    ///
    /// # Errors
    ///
    /// No run has it, or it may mean several.
    pub fn find(name: &str, runs: &[Run]) -> Result<Key, SelectError> {
        let is_column = |run: &Run| run.contains_key(name) && !PARTS.contains(&name);
        if runs.iter().any(is_column) {
            return Ok(Key { part: "", name: name.to_owned() });
        }
        for part in PARTS {
            if runs.iter().any(|run| run[part].get(name).is_some()) {
                return Ok(Key { part, name: name.to_owned() });
            }
        }
        let settings = runs.iter().filter_map(|run| run["config"].as_object()).flat_map(Map::keys);
        let is_end = |key: &&String| key.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'));
        let mut candidates: Vec<String> = settings.filter(is_end).cloned().collect();
        candidates.sort();
        candidates.dedup();
        match candidates.len() {
            0 => Err(SelectError::Unknown(name.to_owned())),
            1 => Ok(Key { part: "config", name: candidates.remove(0) }),
            _ => Err(SelectError::Ambiguous { key: name.to_owned(), candidates }),
        }
    }

    /// The value that a run has; null if it has none.
    pub fn value<'a>(&self, run: &'a Run) -> &'a Value {
        let of = if self.part.is_empty() { run.get(&self.name) } else { run[self.part].get(&self.name) };
        of.unwrap_or(&Value::Null)
    }
}

impl Condition {
    /// The key in the text of a condition, in the user's words.
    ///
    /// # Errors
    ///
    /// The text has another form.
    pub fn name(text: &str) -> Result<&str, SelectError> {
        Condition::split(text).map(|(name, ..)| name)
    }

    /// Reads a condition on `runs`.
    ///
    /// # Errors
    ///
    /// It has another form, or its key does not fit.
    pub fn parse(text: &str, runs: &[Run]) -> Result<Condition, SelectError> {
        let (name, operator, value) = Condition::split(text)?;
        Ok(Condition { key: Key::find(name, runs)?, operator, value: value.trim_matches('"').to_owned() })
    }

    fn split(text: &str) -> Result<(&str, &'static str, &str), SelectError> {
        let places = OPERATORS.iter().filter_map(|operator| Some((text.find(operator)?, *operator)));
        // The first operator in the text, and of two at one place the longer.
        let found = places.min_by_key(|(at, operator)| (*at, std::cmp::Reverse(operator.len())));
        let (at, operator) = found.ok_or_else(|| SelectError::Form(text.to_owned()))?;
        let (name, value) = (text[..at].trim(), text[at + operator.len()..].trim());
        if name.is_empty() {
            return Err(SelectError::Form(text.to_owned()));
        }
        Ok((name, operator, value))
    }

    /// True if the run fulfils it.
    pub fn holds(&self, run: &Run) -> bool {
        let value = self.key.value(run);
        let order = compare(value, &self.value);
        match self.operator {
            "=" => order == Some(Ordering::Equal),
            "!=" => order != Some(Ordering::Equal),
            "<" => order == Some(Ordering::Less),
            "<=" => matches!(order, Some(Ordering::Less | Ordering::Equal)),
            ">" => order == Some(Ordering::Greater),
            ">=" => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
            _ => words(value).contains(&self.value),
        }
    }
}

/// Compares as numbers if both are numbers, else as texts. None if the run has no value.
fn compare(value: &Value, with: &str) -> Option<Ordering> {
    let number = |text: &str| text.parse::<f64>().ok();
    match (value, value.as_f64().or_else(|| number(value.as_str()?)), number(with)) {
        (Value::Null, ..) => None,
        (_, Some(value), Some(with)) => value.partial_cmp(&with),
        // SQLite keeps true and false as numbers.
        (_, Some(value), None) if with == "true" || with == "false" => {
            value.partial_cmp(&f64::from(u8::from(with == "true")))
        }
        _ => Some(words(value).as_str().cmp(with)),
    }
}

/// A value as users read it.
pub fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// The order of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From the largest value to the smallest.
    LargestFirst,
    /// From the smallest value to the largest.
    SmallestFirst,
}

/// Sorts runs by a key: first those with numbers, then those with texts. Runs without a value come
/// last in either order.
pub fn sort(runs: &mut [Run], key: &Key, order: Order) {
    // Numbers and texts in one column have no common order, and sorting needs a total one.
    let kind = |value: &Value| match value {
        Value::Null => 2,
        value if value.as_f64().is_some() => 0,
        _ => 1,
    };
    runs.sort_by(|a, b| {
        let (a, b) = (key.value(a), key.value(b));
        let rising = match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => a.total_cmp(&b),
            _ => words(a).cmp(&words(b)),
        };
        kind(a).cmp(&kind(b)).then(match order {
            Order::LargestFirst => rising.reverse(),
            Order::SmallestFirst => rising,
        })
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(name: &str, tps: Value, dim: u32, ffn: &str) -> Run {
        let run = json!({
            "name": name, "tps": tps,
            "config": {"model.dim": dim, "model.kind": ffn, "data.kind": "x", "training.deterministic": 0},
            "metrics": {"mem_peak.grads": 5}, "environment": {"host": "h"},
        });
        run.as_object().unwrap().clone()
    }

    fn runs() -> Vec<Run> {
        vec![
            run("a", json!(9.0), 64, "swiglu"),
            run("b", json!(10.5), 768, "gelu"),
            run("c", Value::Null, 1024, "gelu"),
        ]
    }

    fn chosen(condition: &str) -> Result<String, SelectError> {
        let runs = runs();
        let condition = Condition::parse(condition, &runs)?;
        Ok(runs.iter().filter(|run| condition.holds(run)).map(|run| run["name"].as_str().unwrap()).collect())
    }

    #[test]
    fn conditions_choose_runs() {
        for (condition, expected) in [
            ("dim=768", "b"),
            ("model.dim >= 768", "bc"),
            ("dim!=768", "ac"),
            ("tps<10", "a"),
            ("tps<=10.5", "ab"),
            ("model.kind = \"gelu\"", "bc"),
            ("model.kind~glu", "a"),
            ("name>a", "bc"),
            ("mem_peak.grads=5", "abc"),
            ("host=h", "abc"),
            ("deterministic=false", "abc"),
        ] {
            assert_eq!(chosen(condition).as_deref(), Ok(expected), "{condition}");
        }
        assert!(matches!(chosen("dim"), Err(SelectError::Form(_))));
        assert!(matches!(chosen("=3"), Err(SelectError::Form(_))));
        assert_eq!(chosen("dime=3"), Err(SelectError::Unknown("dime".to_owned())));
        assert!(matches!(chosen("kind=x"), Err(SelectError::Ambiguous { candidates, .. }) if candidates.len() == 2));
    }

    #[test]
    fn numbers_come_before_texts_and_nothing_comes_last() {
        let mut sorted = runs();
        sorted.extend([run("d", json!("2a"), 1, "x"), run("e", json!(20), 1, "x"), run("f", json!("auto"), 1, "x")]);
        let key = Key::find("tps", &sorted).unwrap();
        for (order, expected) in [(Order::LargestFirst, "ebafdc"), (Order::SmallestFirst, "abedfc")] {
            sort(&mut sorted, &key, order);
            let names: String = sorted.iter().map(|run| run["name"].as_str().unwrap()).collect();
            assert_eq!(names, expected);
        }
    }
}
