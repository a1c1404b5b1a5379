//! `compute.device`: the device of a run, as it is written in a configuration.

use super::value::{ConfigValue, wrong};
use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use toml::Value;

/// The device that the model runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// A GPU among those that the process sees: the one of this index, or, for None, the one whose
    /// index is the rank's place on its host.
    Cuda(Option<usize>),
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceKind::Cpu => f.write_str("cpu"),
            DeviceKind::Cuda(None) => f.write_str("cuda"),
            DeviceKind::Cuda(Some(ordinal)) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl Serialize for DeviceKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for DeviceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cpu" => Ok(DeviceKind::Cpu),
            "cuda" => Ok(DeviceKind::Cuda(None)),
            other => match other.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()) {
                Some(ordinal) => Ok(DeviceKind::Cuda(Some(ordinal))),
                None => Err(format!("a device is {}, not {text:?}", Self::expected())),
            },
        }
    }
}

impl ConfigValue for DeviceKind {
    fn expected() -> String {
        "\"cpu\", \"cuda\" or \"cuda:N\"".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        value.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| wrong::<Self>(value))
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::String(self.to_string()))
    }
}
