//! The macro that declares a section. From one list of keys it makes the struct, its reader, its
//! printer and its documentation.

use serde::Serialize;
use toml::Value;

/// The description of one key, without its value.
#[derive(Clone, Debug, Serialize)]
pub struct Key {
    /// The key's name inside the section.
    pub name: &'static str,
    /// The values that may be written, in words.
    pub expected: String,
    /// The default; `None` when it is derived or unset.
    pub default: Option<Value>,
    /// The documentation, one string per line.
    pub about: Vec<&'static str>,
    /// Names of the key in other programs. They are not accepted; messages suggest this key for
    /// them.
    pub elsewhere: Vec<&'static str>,
}

/// A section of the configuration, seen by name.
pub trait Section {
    /// The name in brackets.
    fn name(&self) -> &'static str;
    /// The section's documentation, one string per line.
    fn about(&self) -> &'static [&'static str];
    /// The section's keys in the order of the documentation.
    fn keys(&self) -> Vec<Key>;
    /// The value of a key; `None` when it is unset or unknown.
    fn get(&self, key: &str) -> Option<Value>;
    /// Sets a known key. The error continues a sentence that begins with the key's name.
    fn set(&mut self, key: &str, value: &Value) -> Result<(), String>;
}

/// Declares a section: `name: type = default;`, with the documentation of each key above it.
macro_rules! section {
    (
        $(#[doc = $about:literal])*
        $name:ident = $section:literal {
            $($(#[doc = $doc:literal])* $(#[elsewhere($($other:literal),+)])? $key:ident: $type:ty = $default:expr;)+
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        pub struct $name {
            $($(#[doc = $doc])* pub $key: $type,)+
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($key: $default,)+ }
            }
        }

        impl $crate::config::section::Section for $name {
            fn name(&self) -> &'static str {
                $section
            }
            fn about(&self) -> &'static [&'static str] {
                &[$($about),*]
            }
            fn keys(&self) -> Vec<$crate::config::section::Key> {
                use $crate::config::value::ConfigValue;
                let defaults = Self::default();
                vec![$($crate::config::section::Key {
                    name: stringify!($key),
                    expected: <$type as ConfigValue>::expected(),
                    default: defaults.$key.to_value(),
                    about: vec![$($doc),*],
                    elsewhere: vec![$($($other),+)?],
                }),+]
            }
            fn get(&self, key: &str) -> Option<toml::Value> {
                use $crate::config::value::ConfigValue;
                $(if key == stringify!($key) { return self.$key.to_value(); })+
                None
            }
            fn set(&mut self, key: &str, value: &toml::Value) -> Result<(), String> {
                use $crate::config::value::ConfigValue;
                $(if key == stringify!($key) {
                    self.$key = <$type as ConfigValue>::from_value(value)?;
                    return Ok(());
                })+
                Err(format!("is unknown in [{}]", $section))
            }
        }
    };
}
pub(super) use section;
