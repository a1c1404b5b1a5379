//! `update.inner_steps`: the numbers of steps that replicas make in a round.

use super::nearest::nearest;
use super::value::{ConfigValue, wrong};
use serde::{Serialize, Serializer};
use std::fmt;
use toml::Value;

/// The number of steps that each replica makes between two outer steps.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum InnerSteps {
    /// Every replica makes `update.every`.
    #[default]
    Equal,
    /// The fastest makes `update.every`, and others fewer, by their speed in the round before.
    BySpeed,
    /// One number for each replica.
    Given(Vec<u64>),
}

const EQUAL: &str = "equal";
const BY_SPEED: &str = "by_speed";

impl fmt::Display for InnerSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InnerSteps::Equal => write!(f, "\"{EQUAL}\""),
            InnerSteps::BySpeed => write!(f, "\"{BY_SPEED}\""),
            InnerSteps::Given(numbers) => write!(f, "{numbers:?}"),
        }
    }
}

impl Serialize for InnerSteps {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            InnerSteps::Equal => serializer.serialize_str(EQUAL),
            InnerSteps::BySpeed => serializer.serialize_str(BY_SPEED),
            InnerSteps::Given(numbers) => serializer.collect_seq(numbers),
        }
    }
}

impl ConfigValue for InnerSteps {
    fn expected() -> String {
        format!("\"{EQUAL}\", \"{BY_SPEED}\" or a list of whole numbers, one for each replica")
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        match value {
            Value::String(word) if word == EQUAL => Ok(InnerSteps::Equal),
            Value::String(word) if word == BY_SPEED => Ok(InnerSteps::BySpeed),
            Value::String(word) => {
                let hint = nearest(word, [EQUAL, BY_SPEED]).map(|name| format!("; did you mean \"{name}\"?"));
                Err(wrong::<Self>(value) + &hint.unwrap_or_default())
            }
            Value::Array(list) => {
                let numbers = list.iter().map(u64::from_value).collect::<Result<_, _>>();
                numbers.map(InnerSteps::Given).map_err(|_| wrong::<Self>(value))
            }
            _ => Err(wrong::<Self>(value)),
        }
    }
    fn to_value(&self) -> Option<Value> {
        match self {
            InnerSteps::Equal => Some(Value::String(EQUAL.to_owned())),
            InnerSteps::BySpeed => Some(Value::String(BY_SPEED.to_owned())),
            InnerSteps::Given(numbers) => numbers.iter().map(u64::to_value).collect::<Option<_>>().map(Value::Array),
        }
    }
}
