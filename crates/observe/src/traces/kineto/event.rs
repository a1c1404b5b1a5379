//! One event of a trace, in the few fields that are of use here.
//!
//! Numbers may be strings and strings numbers, as versions of PyTorch and other writers differ.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt;

/// An event as it is written. Fields that are absent or of no use are empty.
#[derive(Default, Debug)]
pub struct Event<'a> {
    pub ph: Text<'a>,
    pub cat: Text<'a>,
    pub name: Text<'a>,
    pub pid: Text<'a>,
    pub tid: Text<'a>,
    pub ts: Number,
    pub dur: Number,
    pub args: Args,
}

/// The arguments that are of use.
#[derive(Default, Debug)]
pub struct Args {
    pub correlation: Number,
    pub stream: Number,
    pub device: Number,
}

/// A string; a number as its digits.
#[derive(Default, Debug)]
pub struct Text<'a>(pub Cow<'a, str>);

/// A number in thousandths, so that microseconds keep their nanoseconds; None where there is none.
#[derive(Default, Clone, Copy, PartialEq, Debug)]
pub struct Number(Option<i128>);

impl Number {
    /// A time in microseconds as nanoseconds. None where there is none or it is out of reach: a
    /// quarter of the range (until the year 2043), so that differences cannot overflow.
    pub fn microseconds_as_ns(self) -> Option<i64> {
        self.0.filter(|n| n.unsigned_abs() < i64::MAX as u128 / 4).map(|n| n as i64)
    }

    /// The number without its fraction.
    pub fn whole(self) -> Option<i64> {
        self.0.and_then(|n| i64::try_from(n / 1000).ok())
    }

    fn of_f64(value: f64) -> Number {
        // The fraction apart, because a double of today's microseconds has no bits for thousandths.
        let thousandths = (value.fract() * 1e3).round();
        let within = value.abs() < 1e30;
        Number(within.then(|| value.trunc() as i128 * 1000 + thousandths as i128))
    }

    /// Reads `123`, `-4.5`, `0x1f`.
    fn of_text(text: &str) -> Number {
        let text = text.trim();
        if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
            return Number(i64::from_str_radix(digits, 16).ok().map(|n| i128::from(n) * 1000));
        }
        match text.parse::<i64>() {
            Ok(n) => Number(Some(i128::from(n) * 1000)),
            Err(_) => text.parse::<f64>().map_or(Number(None), Number::of_f64),
        }
    }
}

struct NumberVisitor;

impl<'de> Visitor<'de> for NumberVisitor {
    type Value = Number;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a number")
    }

    fn visit_i64<E>(self, n: i64) -> Result<Number, E> {
        Ok(Number(Some(i128::from(n) * 1000)))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Number, E> {
        Ok(Number(Some(i128::from(n) * 1000)))
    }

    fn visit_f64<E>(self, n: f64) -> Result<Number, E> {
        Ok(Number::of_f64(n))
    }

    fn visit_str<E>(self, text: &str) -> Result<Number, E> {
        Ok(Number::of_text(text))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Number, E> {
        Ok(Number(None))
    }

    fn visit_unit<E>(self) -> Result<Number, E> {
        Ok(Number(None))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Number, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Number(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Number, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Number(None))
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        deserializer.deserialize_any(NumberVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }

    fn visit_i64<E>(self, n: i64) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(n.to_string())))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(n.to_string())))
    }

    fn visit_f64<E>(self, n: f64) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(n.to_string())))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Text<'de>, E> {
        Ok(Text::default())
    }

    fn visit_unit<E>(self) -> Result<Text<'de>, E> {
        Ok(Text::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Text<'de>, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Text::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Text<'de>, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Text::default())
    }
}

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Text<'de>, D::Error> {
        deserializer.deserialize_any(TextVisitor)
    }
}

struct ArgsVisitor;

impl<'de> Visitor<'de> for ArgsVisitor {
    type Value = Args;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("arguments")
    }

    // By hand, because PyTorch writes some keys twice, which derived code refuses.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Args, A::Error> {
        let mut args = Args::default();
        while let Some(key) = map.next_key::<Text>()? {
            match key.0.as_ref() {
                "correlation" => args.correlation = map.next_value()?,
                "stream" => args.stream = map.next_value()?,
                "device" => args.device = map.next_value()?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(args)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Args, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Args::default())
    }

    fn visit_str<E>(self, _: &str) -> Result<Args, E> {
        Ok(Args::default())
    }

    fn visit_unit<E>(self) -> Result<Args, E> {
        Ok(Args::default())
    }
}

impl<'de> Deserialize<'de> for Args {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Args, D::Error> {
        deserializer.deserialize_any(ArgsVisitor)
    }
}

struct EventVisitor;

impl<'de> Visitor<'de> for EventVisitor {
    type Value = Event<'de>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an event")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Event<'de>, A::Error> {
        let mut event = Event::default();
        while let Some(key) = map.next_key::<Text>()? {
            match key.0.as_ref() {
                "ph" => event.ph = map.next_value()?,
                "cat" => event.cat = map.next_value()?,
                "name" => event.name = map.next_value()?,
                "pid" => event.pid = map.next_value()?,
                "tid" => event.tid = map.next_value()?,
                "ts" => event.ts = map.next_value()?,
                "dur" => event.dur = map.next_value()?,
                "args" => event.args = map.next_value()?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(event)
    }
}

impl<'de> Deserialize<'de> for Event<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Event<'de>, D::Error> {
        deserializer.deserialize_map(EventVisitor)
    }
}

/// Mends what writers of traces are known to get wrong: escapes and control characters in strings
/// that JSON forbids (paths of Windows, kernels' names), bytes that are not UTF-8, and the words
/// NaN and Infinity outside of strings, which become null.
pub fn mend(bytes: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(bytes);
    let bytes = text.as_bytes();
    let mut mended = Vec::with_capacity(bytes.len() + 16);
    let mut in_string = false;
    let mut at = 0;
    while at < bytes.len() {
        let byte = bytes[at];
        if in_string && byte == b'\\' {
            let next = bytes.get(at + 1).copied().unwrap_or(b' ');
            let hex = bytes.get(at + 2..at + 6).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit));
            if matches!(next, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') || next == b'u' && hex {
                mended.extend_from_slice(&[byte, next]);
                at += 2;
            } else {
                mended.extend_from_slice(b"\\\\");
                at += 1;
            }
            continue;
        }
        if byte == b'"' {
            in_string = !in_string;
        }
        if in_string && byte < b' ' {
            mended.push(b' ');
        } else if !in_string && matches!(byte, b'N' | b'I' | b'i') {
            let word = bytes[at..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
            // A sign before Infinity belongs to the word.
            if mended.last() == Some(&b'-') {
                mended.pop();
            }
            mended.extend_from_slice(b"null");
            at += word;
            continue;
        } else {
            mended.push(byte);
        }
        at += 1;
    }
    mended
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Event<'_> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn numbers_may_be_strings_and_strings_numbers() {
        let event = parse(
            r#"{"ph":"X","tid":7,"pid":"Spans","ts":"1682725898236567.25","dur":2.5,
            "args":{"stream":"0x10","correlation":12,"correlation":13,"device":null,"grid":[1,2,3]}}"#,
        );
        assert_eq!((event.ph.0.as_ref(), event.tid.0.as_ref(), event.pid.0.as_ref()), ("X", "7", "Spans"));
        assert_eq!(event.ts.microseconds_as_ns(), Some(1_682_725_898_236_567_250));
        assert_eq!(event.dur.microseconds_as_ns(), Some(2500));
        assert_eq!(event.args.stream.whole(), Some(16));
        assert_eq!(event.args.correlation.whole(), Some(13));
        assert_eq!(event.args.device.whole(), None);
    }

    #[test]
    fn fields_of_odd_types_are_empty_and_times_out_of_reach_are_none() {
        let event = parse(r#"{"name":null,"cat":[1,{"a":2}],"tid":{"x":[]},"ts":1e300,"dur":"soon","args":"none"}"#);
        assert!(event.name.0.is_empty() && event.cat.0.is_empty() && event.tid.0.is_empty());
        assert_eq!(event.ts.microseconds_as_ns(), None);
        assert_eq!(event.dur.microseconds_as_ns(), None);
        assert_eq!(parse(r#"{"ts":9223372036854775807}"#).ts.microseconds_as_ns(), None);
    }

    #[test]
    fn what_json_forbids_is_mended() {
        let broken = b"{\"name\":\"C:\\Users\\new \x01 \xff\",\"ts\":NaN,\"dur\":-Infinity,\"pid\":null}";
        assert!(serde_json::from_slice::<Event>(broken).is_err());
        let mended = mend(broken);
        let event: Event = serde_json::from_slice(&mended).unwrap();
        assert_eq!(event.name.0, "C:\\Users\new   \u{fffd}");
        assert_eq!((event.ts, event.dur), (Number(None), Number(None)));
    }
}
