//! The numbers of a JSON object, each under the path of its keys: `{"mem_peak": {"grads": 3}}` has
//! `mem_peak.grads` = 3. True is 1 and false is 0. Null becomes NaN: JSON cannot express NaN and
//! infinities, so records write them as null. Texts are left out.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Calls `found` for each number of the JSON object in `line`, in its order.
///
/// # Errors
///
/// The line is not one JSON object. Numbers before the error have been found.
pub fn numbers(line: &[u8], found: &mut dyn FnMut(&str, f64)) -> Result<(), serde_json::Error> {
    let mut path = String::new();
    let mut json = serde_json::Deserializer::from_slice(line);
    json.deserialize_map(Walk { path: &mut path, found })?;
    json.end()
}

/// Visits a value and everything below it.
struct Walk<'a> {
    path: &'a mut String,
    found: &'a mut dyn FnMut(&str, f64),
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a record")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        self.visit_f64(f64::from(u8::from(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.visit_f64(value as f64)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.visit_f64(value as f64)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        (self.found)(self.path, value);
        Ok(())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.visit_f64(f64::NAN)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<(), A::Error> {
        let len = self.path.len();
        for index in 0.. {
            self.path.push('.');
            self.path.push_str(&index.to_string());
            let seed = Walk { path: self.path, found: self.found };
            let more = sequence.next_element_seed(seed)?.is_some();
            self.path.truncate(len);
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let len = self.path.len();
        while map.next_key_seed(Key(self.path))?.is_some() {
            map.next_value_seed(Walk { path: self.path, found: self.found })?;
            self.path.truncate(len);
        }
        Ok(())
    }
}

/// Appends a key to the path.
struct Key<'a>(&'a mut String);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<(), E> {
        if !self.0.is_empty() {
            self.0.push('.');
        }
        self.0.push_str(key);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(line: &str) -> Result<Vec<(String, f64)>, serde_json::Error> {
        let mut found = Vec::new();
        numbers(line.as_bytes(), &mut |path, value| found.push((path.to_owned(), value)))?;
        Ok(found)
    }

    #[test]
    fn numbers_have_the_path_of_their_keys() {
        let found = flat(r#"{"step":3,"mem":{"grads":5,"of":{"a":-1.5}},"cpu":[1,0.5],"ok":true,"name":"x","e":[]}"#);
        let named = |path: &str, value| (path.to_owned(), value);
        let expected =
            [("step", 3.0), ("mem.grads", 5.0), ("mem.of.a", -1.5), ("cpu.0", 1.0), ("cpu.1", 0.5), ("ok", 1.0)];
        assert_eq!(found.unwrap(), expected.map(|(path, value)| named(path, value)));
        assert!(flat(r#"{"loss":null}"#).unwrap()[0].1.is_nan());
    }

    #[test]
    fn what_is_no_object_is_an_error() {
        for line in ["", "3", "[1]", "null", "\"x\"", "{\"a\":1", "{\"a\":1}}", "{\"a\":1} 2", "\0\0\0"] {
            assert!(flat(line).is_err(), "{line:?}");
        }
        assert!(flat(&"[".repeat(100_000)).is_err() && flat(&format!("{{\"a\":{}", "[".repeat(100_000))).is_err());
    }
}
