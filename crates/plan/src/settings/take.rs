//! Taking keys out of a table of settings, so that what is left was not understood.

use super::SettingsError;
use serde_json::Value;
use std::collections::BTreeMap;

/// Settings by key, from which understood keys are taken. Nested tables have keys with dots.
#[derive(Debug)]
pub(super) struct Keys(BTreeMap<String, Value>);

impl Keys {
    /// The keys of nested objects.
    pub(super) fn of(value: &Value) -> Keys {
        fn add(prefix: &str, value: &Value, all: &mut BTreeMap<String, Value>) {
            match value {
                Value::Object(object) => {
                    for (key, value) in object {
                        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                        add(&key, value, all);
                    }
                }
                Value::Null => {}
                other => {
                    all.insert(prefix.to_owned(), other.clone());
                }
            }
        }
        let mut all = BTreeMap::new();
        add("", value, &mut all);
        Keys(all)
    }

    /// The keys of arguments. A later one replaces an earlier one.
    pub(super) fn of_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Keys {
        Keys(pairs.into_iter().map(|(key, value)| (key, Value::String(value))).collect())
    }

    /// True if a key begins with `prefix`.
    pub(super) fn has(&self, prefix: &str) -> bool {
        self.0.keys().any(|key| key.starts_with(prefix))
    }

    /// Takes the value of `key`. `auto` counts as absent, and is told to `automatic`.
    fn take(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key).filter(|value| !is_auto(value))
    }

    /// Takes a text.
    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        self.take(key).map(|value| match value {
            Value::String(text) => text,
            other => other.to_string(),
        })
    }

    /// Takes a number; `None` if it is absent or `auto`.
    pub(super) fn number<N: TryFrom<u64>>(&mut self, key: &str) -> Result<Option<N>, SettingsError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let wrong = || SettingsError(format!("`{key}` is {value}, and must be a whole number from 0"));
        let number = match &value {
            Value::String(text) => text.trim().parse::<f64>().ok(),
            other => other.as_f64(),
        };
        let number = number.filter(|n| *n >= 0.0 && n.fract() == 0.0 && *n < 1e15).ok_or_else(wrong)?;
        N::try_from(number as u64).map(Some).map_err(|_| wrong())
    }

    /// Takes a degree: a number from 1; `None` if it is absent, `auto` or -1.
    pub(super) fn degree(&mut self, key: &str) -> Result<Option<u32>, SettingsError> {
        let open = match self.0.get(key) {
            Some(Value::Number(number)) => number.as_i64() == Some(-1),
            Some(Value::String(text)) => text.trim() == "-1",
            _ => false,
        };
        if open {
            self.0.remove(key);
            return Ok(None);
        }
        match self.number::<u32>(key)? {
            Some(0) => Err(SettingsError(format!("`{key}` is 0, and must be a number from 1"))),
            degree => Ok(degree),
        }
    }

    /// Takes a truth value; a flag without a value is true.
    pub(super) fn flag(&mut self, key: &str) -> Result<Option<bool>, SettingsError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let text = match &value {
            Value::Bool(value) => return Ok(Some(*value)),
            Value::String(text) => text.to_lowercase(),
            other => other.to_string(),
        };
        match text.as_str() {
            "" | "true" | "yes" | "1" => Ok(Some(true)),
            "false" | "no" | "0" => Ok(Some(false)),
            _ => Err(SettingsError(format!("`{key}` is {value}, and must be true or false"))),
        }
    }

    /// Removes the keys that are `auto`, and returns their names.
    pub(super) fn automatic(&mut self) -> Vec<String> {
        let auto = self.0.extract_if(.., |_, value| is_auto(value)).map(|(key, _)| key);
        auto.collect()
    }

    /// Drops the keys that begin with one of `prefixes`: they change neither speed nor memory.
    pub(super) fn drop_all(&mut self, prefixes: &[&str]) {
        self.0.retain(|key, _| !prefixes.iter().any(|prefix| key.starts_with(prefix)));
    }

    /// The keys that are left, with their values.
    pub(super) fn rest(self) -> Vec<String> {
        let said = |(key, value): (String, Value)| match value {
            Value::String(text) if text.is_empty() => key,
            Value::String(text) => format!("{key} = {text}"),
            other => format!("{key} = {other}"),
        };
        self.0.into_iter().map(said).collect()
    }
}

fn is_auto(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text == "auto")
}
