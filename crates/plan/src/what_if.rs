//! Hypothetical changes to a request ("what if"): one thing changed, written as `KEY=VALUE`.

use crate::Request;
use std::fmt;
use trainyard_sim::{ProfileError, Profiles};

/// One change.
#[derive(Clone, PartialEq, Debug)]
pub struct Change {
    key: &'static str,
    value: Value,
}

#[derive(Clone, PartialEq, Debug)]
enum Value {
    Times(f64),
    Number(u64),
    Name(String),
}

/// The reason why a change is impossible.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ChangeError {
    /// The text is not `KEY=VALUE`, or the key does not exist.
    #[error("`{given}` is no change: write one of {known}")]
    Key {
        /// The text that was given.
        given: String,
        /// The keys that exist.
        known: String,
    },
    /// The key does not accept the value.
    #[error("`{key}={value}`: {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value that was given.
        value: String,
        /// The values that are accepted.
        expected: &'static str,
    },
    /// No profile has the device or the network.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// The keys, each with the meaning of its value and an example.
const KEYS: [(&str, &str, &str); 10] = [
    ("interconnect", "a factor", "interconnect=2x"),
    ("network", "a factor or a network's name", "network=ndr-8"),
    ("link", "a factor", "link=2x"),
    ("compute", "a factor", "compute=2x"),
    ("memory", "a factor", "memory=2x"),
    ("memory_bandwidth", "a factor", "memory_bandwidth=2x"),
    ("gpus", "a number of devices", "gpus=512"),
    ("device", "a device's name", "device=H200"),
    ("sequence_length", "a number of tokens", "sequence_length=32768"),
    ("global_batch", "a number of sequences", "global_batch=2048"),
];

impl Change {
    /// Parses `KEY=VALUE`. Factors are written `2x`.
    ///
    /// # Errors
    ///
    /// The key or the value does not exist; the error lists those that do.
    pub fn parse(text: &str) -> Result<Change, ChangeError> {
        let unknown =
            || ChangeError::Key { given: text.to_owned(), known: KEYS.map(|(_, _, example)| example).join(", ") };
        let (key, value) = text.split_once('=').ok_or_else(unknown)?;
        let (key, value) = (key.trim(), value.trim());
        let (key, expected, _) = KEYS.into_iter().find(|(name, _, _)| *name == key).ok_or_else(unknown)?;
        let wrong = || ChangeError::Value { key, value: value.to_owned(), expected };
        let factor = value.strip_suffix('x').and_then(|n| n.parse::<f64>().ok()).filter(|n| *n > 0.0 && n.is_finite());
        let number = || value.parse::<u64>().ok().filter(|n| *n > 0);
        let value = match expected {
            "a factor" => Value::Times(factor.ok_or_else(wrong)?),
            "a factor or a network's name" => factor.map_or_else(|| Value::Name(value.to_owned()), Value::Times),
            "a device's name" => Value::Name(value.to_owned()),
            _ => Value::Number(number().ok_or_else(wrong)?),
        };
        Ok(Change { key, value })
    }

    /// Returns the request with this change. `profiles` knows the names of devices and networks.
    ///
    /// # Errors
    ///
    /// The profiles lack a name.
    pub fn apply(&self, request: &Request, profiles: &Profiles) -> Result<Request, ChangeError> {
        let mut changed = request.clone();
        let cluster = &mut changed.cluster;
        match (self.key, &self.value) {
            ("interconnect", Value::Times(by)) => {
                cluster.network.gb_s *= by;
                cluster.device.link_gb_s *= by;
            }
            ("network", Value::Times(by)) => cluster.network.gb_s *= by,
            ("network", Value::Name(name)) => cluster.network = profiles.network(name)?.clone(),
            ("link", Value::Times(by)) => cluster.device.link_gb_s *= by,
            ("compute", Value::Times(by)) => {
                cluster.device.product_tflops *= by;
                cluster.device.dense_tflops.values_mut().for_each(|peak| *peak *= by);
            }
            ("memory", Value::Times(by)) => {
                cluster.device.memory_gb *= by;
                changed.limits.memory_bytes = changed.limits.memory_bytes.map(|bytes| (bytes as f64 * by) as u64);
            }
            ("memory_bandwidth", Value::Times(by)) => cluster.device.memory_gb_s *= by,
            ("gpus", Value::Number(count)) => {
                let count = u32::try_from(*count).unwrap_or(u32::MAX);
                cluster.devices_per_node = cluster.devices_per_node.min(count);
                cluster.nodes = count.div_ceil(cluster.devices_per_node);
                changed.limits.devices = Some(count);
            }
            ("device", Value::Name(name)) => cluster.device = profiles.device(name)?.clone(),
            ("sequence_length", Value::Number(tokens)) => changed.sequence_length = *tokens,
            ("global_batch", Value::Number(sequences)) => changed.global_batch = *sequences,
            (key, value) => unreachable!("{key} is never parsed to {value:?}"),
        }
        Ok(changed)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Value::Times(by) => write!(f, "{}={by}x", self.key),
            Value::Number(number) => write!(f, "{}={number}", self.key),
            Value::Name(name) => write!(f, "{}={name}", self.key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read_and_said_back() {
        for text in ["interconnect=2x", "network=ndr-8", "gpus=512", "sequence_length=32768", "memory=0.5x"] {
            assert_eq!(Change::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Change::parse(" gpus = 8 ").unwrap().to_string(), "gpus=8");
    }

    #[test]
    fn what_is_no_change_is_refused_with_what_is() {
        for (text, says) in [
            ("gpus", "gpus=512"),
            ("gpu=3", "sequence_length=32768"),
            ("gpus=0", "a number of devices"),
            ("memory=2", "a factor"),
            ("memory=-1x", "a factor"),
            ("memory=infx", "a factor"),
        ] {
            let error = Change::parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
