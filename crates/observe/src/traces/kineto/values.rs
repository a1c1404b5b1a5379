//! Cuts a JSON document into its values as it streams by.
//!
//! A trace is one object with an array of a hundred thousand small events. [`Values`] finds where
//! each event ends and hands out its bytes, so that no more than one event is in memory. It checks
//! brackets and strings, not grammar: whoever parses the bytes does that.

use super::ReadError;
use std::io::Read;

/// Bytes that are read at a time.
const CHUNK: usize = 256 * 1024;

/// Values longer than this are skipped: no event that is of use here is a megabyte long.
const VALUE_BYTES_MAX: usize = 8 << 20;

/// A reader of the values of one JSON document.
pub struct Values<R> {
    input: R,
    buffer: Vec<u8>,
    /// The unread bytes are `buffer[at..end]`.
    at: usize,
    end: usize,
    /// Offset in the document of `buffer[0]`.
    offset: u64,
}

/// The next value of a document.
pub enum Value<'a> {
    /// The bytes of a whole value.
    Bytes(&'a [u8]),
    /// A value that was too long to keep, and was skipped.
    TooLong,
}

impl<R: Read> Values<R> {
    pub fn new(input: R) -> Self {
        Values { input, buffer: vec![0; CHUNK], at: 0, end: 0, offset: 0 }
    }

    /// Number of bytes of the document that were consumed.
    pub fn position(&self) -> u64 {
        self.offset + self.at as u64
    }

    /// Reads more bytes behind those from `keep` on, which move to the front. False at the end.
    fn fill(&mut self, keep: usize) -> Result<bool, ReadError> {
        if keep > 0 {
            self.buffer.copy_within(keep..self.end, 0);
            self.offset += keep as u64;
            self.end -= keep;
            self.at = self.at.saturating_sub(keep);
        }
        if self.buffer.len() < self.end + CHUNK {
            self.buffer.resize(self.end + CHUNK, 0);
        }
        let position = self.offset + self.end as u64;
        loop {
            match self.input.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    self.end += count;
                    return Ok(true);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ReadError::of_input(error, position)),
            }
        }
    }

    /// The next byte that is no white space, unconsumed; None at the end of the document.
    pub fn peek(&mut self) -> Result<Option<u8>, ReadError> {
        loop {
            while self.at < self.end {
                match self.buffer[self.at] {
                    b' ' | b'\n' | b'\r' | b'\t' => self.at += 1,
                    byte => return Ok(Some(byte)),
                }
            }
            if !self.fill(self.at)? {
                return Ok(None);
            }
        }
    }

    /// Consumes the byte that was peeked at.
    pub fn take(&mut self) {
        self.at += 1;
    }

    /// Skips the byte order mark that some programs write first.
    pub fn skip_byte_order_mark(&mut self) -> Result<(), ReadError> {
        while self.end < 3 && self.fill(0)? {}
        if self.buffer[..self.end].starts_with(b"\xef\xbb\xbf") {
            self.at = 3;
        }
        Ok(())
    }

    /// The value that begins at the next byte: an object or array up to its last bracket, a string
    /// up to its quote, or a number or word up to what ends it.
    pub fn value(&mut self) -> Result<Value<'_>, ReadError> {
        self.peek()?;
        let mut scan = Scan::default();
        let mut start = self.at;
        let mut cursor = self.at;
        let mut too_long = false;
        loop {
            if let Some(end) = scan.run(&self.buffer[..self.end], &mut cursor) {
                self.at = end;
                return Ok(if too_long { Value::TooLong } else { Value::Bytes(&self.buffer[start..end]) });
            }
            too_long |= cursor - start > VALUE_BYTES_MAX;
            let keep = if too_long { cursor } else { start };
            self.at = cursor;
            let more = self.fill(keep)?;
            start = start.saturating_sub(keep);
            cursor -= keep;
            if !more {
                // Only a number or word at the top of the document may end with it.
                self.at = self.end;
                return Err(ReadError::Truncated { position: self.position() });
            }
        }
    }
}

/// The state of the scan of one value.
#[derive(Default)]
struct Scan {
    depth: u32,
    in_string: bool,
    escaped: bool,
    begun: bool,
}

impl Scan {
    /// Goes on to the end of the value and returns it, or None where the bytes end first.
    fn run(&mut self, bytes: &[u8], cursor: &mut usize) -> Option<usize> {
        let mut at = *cursor;
        while at < bytes.len() {
            if self.in_string {
                if self.escaped {
                    self.escaped = false;
                    at += 1;
                    continue;
                }
                // Most bytes of a trace lie inside strings.
                match bytes[at..].iter().position(|byte| matches!(byte, b'"' | b'\\')) {
                    None => at = bytes.len(),
                    Some(ahead) => {
                        at += ahead + 1;
                        if bytes[at - 1] == b'\\' {
                            self.escaped = true;
                        } else {
                            self.in_string = false;
                            if self.depth == 0 {
                                *cursor = at;
                                return Some(at);
                            }
                        }
                    }
                }
                continue;
            }
            match bytes[at] {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    // A bracket that closes what encloses the value ends a number or word.
                    if self.depth == 0 {
                        *cursor = at;
                        return Some(at);
                    }
                    self.depth -= 1;
                    if self.depth == 0 {
                        *cursor = at + 1;
                        return Some(at + 1);
                    }
                }
                b',' | b':' | b' ' | b'\n' | b'\r' | b'\t' if self.depth == 0 && self.begun => {
                    *cursor = at;
                    return Some(at);
                }
                _ => {}
            }
            self.begun = true;
            at += 1;
        }
        *cursor = at;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out a few bytes at a time, so that values straddle reads.
    struct Dribble<'a>(&'a [u8], usize);

    impl Read for Dribble<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let count = self.1.min(self.0.len()).min(buffer.len());
            buffer[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    #[test]
    fn values_end_where_their_brackets_and_quotes_do() {
        let text = br#"  {"a": [1, {"b": "}]\"\\"}], "c": 2} , "x\"y" ,12.5 , [] ,true]"#;
        for step in [1, 2, 3, 7, 1000] {
            let mut values = Values::new(Dribble(text, step));
            let mut seen = Vec::new();
            loop {
                match values.value().unwrap() {
                    Value::Bytes(bytes) => seen.push(String::from_utf8(bytes.to_vec()).unwrap()),
                    Value::TooLong => panic!("nothing is long"),
                }
                if values.peek().unwrap() != Some(b',') {
                    break;
                }
                values.take();
            }
            assert_eq!(seen, [r#"{"a": [1, {"b": "}]\"\\"}], "c": 2}"#, r#""x\"y""#, "12.5", "[]", "true"]);
            assert_eq!(values.peek().unwrap(), Some(b']'));
            assert_eq!(values.position(), text.len() as u64 - 1);
        }
    }

    #[test]
    fn a_value_that_does_not_end_is_told_with_its_position() {
        for text in [&br#"{"a": [1,"#[..], br#""abc"#, br#"{"a": "b\"#] {
            match Values::new(text).value() {
                Err(ReadError::Truncated { position }) => assert_eq!(position, text.len() as u64),
                _ => panic!("{text:?} has no end"),
            }
        }
    }

    #[test]
    fn a_huge_value_is_skipped_without_being_kept() {
        let mut text = vec![b'['];
        text.resize(3 * VALUE_BYTES_MAX, b' ');
        text.extend_from_slice(b"], 7]");
        let mut values = Values::new(&text[..]);
        assert!(matches!(values.value().unwrap(), Value::TooLong));
        assert!(values.buffer.len() < 2 * VALUE_BYTES_MAX);
        assert_eq!(values.peek().unwrap(), Some(b','));
        values.take();
        assert!(matches!(values.value().unwrap(), Value::Bytes(b"7")));
    }
}
