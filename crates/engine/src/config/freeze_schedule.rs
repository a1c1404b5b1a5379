//! The value of `fine_tuning.freeze_schedule`.

use super::nearest::nearest;
use super::value::{ConfigValue, Names, wrong};
use serde::Serialize;
use toml::Value;

/// A schedule of freezing: its entries, ascending.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct FreezeSchedule(pub Vec<FreezeFrom>);

/// The parameters that are frozen from one step on, until the next entry.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct FreezeFrom {
    /// The first step, from 0.
    pub from_step: u64,
    /// Patterns of parameters.
    pub frozen: Names,
}

impl FreezeFrom {
    fn from_value(value: &Value) -> Result<FreezeFrom, String> {
        let table = value.as_table().ok_or_else(|| wrong::<FreezeSchedule>(value))?;
        const KEYS: [&str; 2] = ["from_step", "frozen"];
        if let Some(unknown) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let hint = nearest(unknown, KEYS).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
            return Err(format!("has an entry with the unknown key `{unknown}`{hint}"));
        }
        let (Some(from_step), Some(frozen)) = (table.get("from_step"), table.get("frozen")) else {
            return Err("has an entry that lacks `from_step` or `frozen`".to_owned());
        };
        let from_step = u64::from_value(from_step).map_err(|why| format!("has an entry whose `from_step` {why}"))?;
        let frozen = Names::from_value(frozen).map_err(|why| format!("has an entry whose `frozen` {why}"))?;
        Ok(FreezeFrom { from_step, frozen })
    }
}

impl ConfigValue for FreezeSchedule {
    fn expected() -> String {
        "a list of `{ from_step, frozen }`".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        let list = value.as_array().ok_or_else(|| wrong::<Self>(value))?;
        list.iter().map(FreezeFrom::from_value).collect::<Result<_, _>>().map(FreezeSchedule)
    }
    fn to_value(&self) -> Option<Value> {
        let entry = |entry: &FreezeFrom| {
            let keys = [("from_step", entry.from_step.to_value()?), ("frozen", entry.frozen.to_value()?)];
            Some(Value::Table(keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()))
        };
        self.0.iter().map(entry).collect::<Option<_>>().map(Value::Array)
    }
}
