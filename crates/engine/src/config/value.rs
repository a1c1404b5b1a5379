//! The types that a key can have. One trait gives each type its reader, its messages and its
//! documentation, so that they agree.
//!
//! Reading is more lenient than serde's (`steps = 1e6` is a whole number, `"auto"` unsets an
//! optional key, one path is a list of one) and its messages say what is expected in a user's
//! words.

use super::nearest::nearest;
use serde::{Serialize, Serializer};
use std::fmt;
use std::path::PathBuf;
use toml::Value;
use trainyard_model::{FAMILIES, Family};

/// A type that a configuration key can have.
pub trait ConfigValue: Sized {
    /// The values that a user may write, in words, e.g. `a whole number`.
    fn expected() -> String;
    /// Reads the value. The error continues a sentence that begins with the key's name.
    fn from_value(value: &Value) -> Result<Self, String>;
    /// The value as TOML; `None` when the key is not set.
    fn to_value(&self) -> Option<Value>;
}

/// The message `takes EXPECTED, not VALUE`.
pub(super) fn wrong<T: ConfigValue>(value: &Value) -> String {
    let given = match value {
        Value::String(s) => format!("the string \"{s}\""),
        Value::Table(_) => "a table".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        other => other.to_string(),
    };
    format!("takes {}, not {given}", T::expected())
}

/// `value` as an integer. Whole floats count, so that `1e9` may be written.
fn integer(value: &Value) -> Option<i64> {
    /// 2^53: every whole number up to it is a float exactly.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Integer(n) => Some(*n),
        Value::Float(x) if x.fract() == 0.0 && x.abs() <= EXACT => Some(*x as i64),
        _ => None,
    }
}

macro_rules! whole_numbers {
    ($($type:ty),*) => {$(
        impl ConfigValue for $type {
            fn expected() -> String {
                "a whole number".to_owned()
            }
            fn from_value(value: &Value) -> Result<Self, String> {
                integer(value).and_then(|n| <$type>::try_from(n).ok()).ok_or_else(|| wrong::<Self>(value))
            }
            fn to_value(&self) -> Option<Value> {
                Some(i64::try_from(*self).map_or_else(|_| Value::String(self.to_string()), Value::Integer))
            }
        }
    )*};
}
whole_numbers!(u8, usize, u64);

impl ConfigValue for f64 {
    fn expected() -> String {
        "a number".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        match value {
            Value::Integer(n) => Ok(*n as f64),
            Value::Float(x) if x.is_finite() => Ok(*x),
            _ => Err(wrong::<Self>(value)),
        }
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::Float(*self))
    }
}

impl ConfigValue for bool {
    fn expected() -> String {
        "true or false".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        value.as_bool().ok_or_else(|| wrong::<Self>(value))
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::Boolean(*self))
    }
}

impl ConfigValue for String {
    fn expected() -> String {
        "a string".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        value.as_str().map(str::to_owned).ok_or_else(|| wrong::<Self>(value))
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::String(self.clone()))
    }
}

impl ConfigValue for PathBuf {
    fn expected() -> String {
        "a path".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        match value.as_str() {
            Some("") => Err("is an empty path".to_owned()),
            Some(path) if path.contains('\0') => Err("is a path with a NUL in it".to_owned()),
            Some(path) => Ok(PathBuf::from(path)),
            None => Err(wrong::<Self>(value)),
        }
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::String(self.to_string_lossy().into_owned()))
    }
}

impl<T: ConfigValue> ConfigValue for Option<T> {
    fn expected() -> String {
        T::expected()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        if value.as_str() == Some("auto") { Ok(None) } else { T::from_value(value).map(Some) }
    }
    fn to_value(&self) -> Option<Value> {
        self.as_ref().and_then(T::to_value)
    }
}

/// Declares an enum whose variants are written as strings.
macro_rules! choices {
    ($(#[$meta:meta])* $name:ident { $($(#[doc = $doc:literal])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name {
            $($(#[doc = $doc])* $variant,)+
        }

        impl $name {
            /// Every variant, as declared.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The name that is written in configurations.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl $crate::config::value::ConfigValue for $name {
            fn expected() -> String {
                $crate::config::value::one_of(&[$($text),+])
            }
            fn from_value(value: &toml::Value) -> Result<Self, String> {
                let found = value.as_str().and_then(|text| Self::ALL.iter().find(|v| v.name() == text));
                found.copied().ok_or_else(|| $crate::config::value::wrong_choice::<Self>(value, &[$($text),+]))
            }
            fn to_value(&self) -> Option<toml::Value> {
                Some(toml::Value::String(self.name().to_owned()))
            }
        }
    };
}
pub(super) use choices;

impl ConfigValue for Family {
    fn expected() -> String {
        one_of(&family_names())
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        let found = value.as_str().and_then(Family::named);
        found.ok_or_else(|| wrong_choice::<Self>(value, &family_names()))
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::String(self.name().to_owned()))
    }
}

fn family_names() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.name()).collect()
}

pub(super) fn one_of(names: &[&str]) -> String {
    let quoted: Vec<_> = names.iter().map(|n| format!("\"{n}\"")).collect();
    if quoted.len() == 1 { quoted[0].clone() } else { format!("one of {}", quoted.join(", ")) }
}

pub(super) fn wrong_choice<T: ConfigValue>(value: &Value, names: &[&str]) -> String {
    let hint = value.as_str().and_then(|text| nearest(text, names.iter().copied()));
    wrong::<T>(value) + &hint.map(|name| format!("; did you mean \"{name}\"?")).unwrap_or_default()
}

/// A number of bytes; written as a number or with a unit: `"512MiB"`, `"1.5 GiB"`, `"2GB"`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ByteSize(pub u64);

/// Suffixes, longest first, so that `B` does not hide the others. Those with an `i` are powers of
/// 1024, the others of 1000.
const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

impl ByteSize {
    fn parse(text: &str) -> Option<ByteSize> {
        let (number, unit) = UNITS
            .iter()
            .find_map(|(suffix, unit)| text.strip_suffix(suffix).map(|number| (number.trim(), *unit)))
            .unwrap_or((text.trim(), 1));
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(unit).filter(|bytes| *bytes <= i64::MAX as u64).map(ByteSize);
        }
        let bytes = number.parse::<f64>().ok()? * unit as f64;
        (bytes.is_finite() && bytes >= 0.0 && bytes < i64::MAX as f64).then_some(ByteSize(bytes as u64))
    }
}

impl fmt::Display for ByteSize {
    /// Prints in the largest binary unit that divides the number, so exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS[..4].iter().rev().find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit));
        match unit {
            Some((suffix, unit)) => write!(f, "{}{suffix}", self.0 / unit),
            None => write!(f, "{}B", self.0),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl ConfigValue for ByteSize {
    fn expected() -> String {
        "a size such as \"2GiB\" or a number of bytes".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        let size = match value {
            Value::String(text) => ByteSize::parse(text),
            other => integer(other).and_then(|n| u64::try_from(n).ok()).map(ByteSize),
        };
        size.ok_or_else(|| wrong::<Self>(value))
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::String(self.to_string()))
    }
}

/// The part of a gathered unit that a rank keeps between the unit's forward and its backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Reshard {
    /// Only the rank's own shard: the unit is gathered again.
    Always,
    /// The whole unit.
    Never,
    /// One part in this many, so that as many neighbouring ranks together hold the unit.
    To(usize),
}

impl ConfigValue for Reshard {
    fn expected() -> String {
        "true, false or a number of ranks".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        match value {
            Value::Boolean(true) => Ok(Reshard::Always),
            Value::Boolean(false) => Ok(Reshard::Never),
            other => usize::from_value(other).map(Reshard::To).map_err(|_| wrong::<Self>(value)),
        }
    }
    fn to_value(&self) -> Option<Value> {
        match self {
            Reshard::Always => Some(Value::Boolean(true)),
            Reshard::Never => Some(Value::Boolean(false)),
            Reshard::To(n) => n.to_value(),
        }
    }
}

/// A list of names or patterns.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Names(pub Vec<String>);

impl ConfigValue for Names {
    fn expected() -> String {
        "a name, or a list of names".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        let name = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(|| wrong::<Self>(value));
        match value {
            Value::Array(list) => list.iter().map(name).collect::<Result<_, _>>().map(Names),
            one => name(one).map(|name| Names(vec![name])),
        }
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::Array(self.0.iter().map(|name| Value::String(name.clone())).collect()))
    }
}

/// A number for each of red, green and blue.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Channels(pub [f64; 3]);

impl ConfigValue for Channels {
    fn expected() -> String {
        "a list of three numbers, or one number for all three".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        let Value::Array(list) = value else {
            return f64::from_value(value).map(|one| Channels([one; 3])).map_err(|_| wrong::<Self>(value));
        };
        let numbers: Vec<f64> =
            list.iter().map(f64::from_value).collect::<Result<_, _>>().map_err(|_| wrong::<Self>(value))?;
        numbers.try_into().map(Channels).map_err(|_| wrong::<Self>(value))
    }
    fn to_value(&self) -> Option<Value> {
        Some(Value::Array(self.0.map(Value::Float).into()))
    }
}

/// Corpora, in order; see [`Source`].
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Sources(pub Vec<Source>);

/// One corpus and its share of the mixture.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Source {
    /// A file or a directory.
    pub path: PathBuf,
    /// The corpus's relative share of the sampled tokens; `None`: in proportion to its size.
    pub weight: Option<f64>,
}

impl Source {
    fn from_value(value: &Value) -> Result<Source, String> {
        let Value::Table(table) = value else {
            return PathBuf::from_value(value)
                .map(|path| Source { path, weight: None })
                .map_err(|_| wrong::<Sources>(value));
        };
        const KEYS: [&str; 2] = ["path", "weight"];
        if let Some(unknown) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let hint = nearest(unknown, KEYS).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
            return Err(format!("has an entry with the unknown key `{unknown}`{hint}"));
        }
        let path = table.get("path").ok_or("has an entry without a `path`")?;
        let path = PathBuf::from_value(path).map_err(|why| format!("has an entry whose `path` {why}"))?;
        let weight = table.get("weight").map(f64::from_value).transpose();
        let weight = weight.map_err(|why| format!("has an entry whose `weight` {why}"))?;
        Ok(Source { path, weight })
    }
}

impl ConfigValue for Sources {
    fn expected() -> String {
        "a path, or a list of paths and `{ path, weight }`".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        match value {
            Value::Array(list) => list.iter().map(Source::from_value).collect::<Result<_, _>>().map(Sources),
            one => Source::from_value(one).map(|source| Sources(vec![source])),
        }
    }
    fn to_value(&self) -> Option<Value> {
        let list = self.0.iter().map(|source| {
            let path = source.path.to_value()?;
            Some(match source.weight {
                None => path,
                Some(weight) => Value::Table(
                    [("path".to_owned(), path), ("weight".to_owned(), Value::Float(weight))].into_iter().collect(),
                ),
            })
        });
        Some(Value::Array(list.collect::<Option<_>>()?))
    }
}

/// The first unit of every stretch of a pipeline but the first.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Cuts(pub Vec<usize>);

impl ConfigValue for Cuts {
    fn expected() -> String {
        "a list of whole numbers".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        let list = value.as_array().ok_or_else(|| wrong::<Self>(value))?;
        list.iter().map(usize::from_value).collect::<Result<_, _>>().map(Cuts).map_err(|_| wrong::<Self>(value))
    }
    fn to_value(&self) -> Option<Value> {
        self.0.iter().map(usize::to_value).collect::<Option<_>>().map(Value::Array)
    }
}

/// Modes of activation checkpointing for some of the blocks.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Overrides(pub Vec<Override>);

/// One range of blocks and its mode.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Override {
    /// The first block, from 0.
    pub first: usize,
    /// The last block, inclusive.
    pub last: usize,
    /// The checkpointing mode of these blocks.
    pub mode: super::CheckpointMode,
}

impl Override {
    fn from_value(value: &Value) -> Result<Override, String> {
        let table = value.as_table().ok_or_else(|| wrong::<Overrides>(value))?;
        const KEYS: [&str; 2] = ["blocks", "mode"];
        if let Some(unknown) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let hint = nearest(unknown, KEYS).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
            return Err(format!("has an entry with the unknown key `{unknown}`{hint}"));
        }
        let (Some(blocks), Some(mode)) = (table.get("blocks"), table.get("mode")) else {
            return Err("has an entry that lacks `blocks` or `mode`".to_owned());
        };
        let range = match blocks {
            Value::String(text) => text.split_once('-').unwrap_or((text, text)),
            other => {
                let one = usize::from_value(other).map_err(|why| format!("has an entry whose `blocks` {why}"))?;
                return Override::new(one, one, mode);
            }
        };
        let bound = |text: &str| text.trim().parse::<usize>().ok();
        match (bound(range.0), bound(range.1)) {
            (Some(first), Some(last)) => Override::new(first, last, mode),
            _ => Err(format!(
                "has an entry whose `blocks` is {blocks}, not a block such as 3 or a range such as \"0-5\""
            )),
        }
    }

    fn new(first: usize, last: usize, mode: &Value) -> Result<Override, String> {
        if last < first {
            return Err(format!("has an entry for blocks {first}-{last}, which is empty"));
        }
        let mode = ConfigValue::from_value(mode).map_err(|why| format!("has an entry whose `mode` {why}"))?;
        Ok(Override { first, last, mode })
    }
}

impl ConfigValue for Overrides {
    fn expected() -> String {
        "a list of `{ blocks = \"FIRST-LAST\", mode }`".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        let list = value.as_array().ok_or_else(|| wrong::<Self>(value))?;
        list.iter().map(Override::from_value).collect::<Result<_, _>>().map(Overrides)
    }
    fn to_value(&self) -> Option<Value> {
        let entry = |o: &Override| {
            let blocks = Value::String(format!("{}-{}", o.first, o.last));
            Value::Table(
                [("blocks".to_owned(), blocks), ("mode".to_owned(), Value::String(o.mode.to_string()))]
                    .into_iter()
                    .collect(),
            )
        };
        Some(Value::Array(self.0.iter().map(entry).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_units_and_printed_exactly() {
        for (text, bytes) in [
            ("2GiB", 2 << 30),
            ("1.5 GiB", 3 << 29),
            ("512MiB", 512 << 20),
            ("2GB", 2_000_000_000),
            ("17", 17),
            ("0B", 0),
        ] {
            let size = ByteSize::from_value(&Value::String(text.to_owned())).unwrap();
            assert_eq!(size, ByteSize(bytes), "{text}");
            assert_eq!(ByteSize::from_value(&size.to_value().unwrap()).unwrap(), size, "{text}");
        }
        for text in ["", "GiB", "2GX", "-1KiB", "1e30TiB", "99999999999999TiB", "NaN", "inf"] {
            assert!(ByteSize::from_value(&Value::String(text.to_owned())).is_err(), "{text}");
        }
    }

    #[test]
    fn whole_floats_are_whole_numbers() {
        assert_eq!(u64::from_value(&Value::Float(1e9)), Ok(1_000_000_000));
        assert!(u64::from_value(&Value::Float(1.5)).is_err());
        assert!(u64::from_value(&Value::Float(1e300)).is_err());
        assert_eq!(u64::from_value(&Value::Integer(-3)).unwrap_err(), "takes a whole number, not -3");
    }

    #[test]
    fn auto_unsets_an_optional_key_only() {
        assert_eq!(Option::<u64>::from_value(&Value::String("auto".to_owned())), Ok(None));
        assert!(u64::from_value(&Value::String("auto".to_owned())).is_err());
    }
}
