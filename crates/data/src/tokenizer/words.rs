//! GPT-2's pre-tokenization: cuts a text into words without a regular expression engine.
//!
//! The pattern (`encoder.py` of openai/gpt-2; the crate `tokenizers` calls it the regex of
//! `ByteLevel`) is
//!
//! ```text
//! 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```
//!
//! The next characters alone decide each alternative, so one pass with a table of character classes
//! replaces the engine's backtracking. The classes come from the Unicode tables of the engine
//! itself.

use std::sync::LazyLock;

use regex_syntax::hir::{Class as HirClass, HirKind};

/// The classes of characters that the pattern distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Other,
    Letter,
    Number,
    Space,
}

/// The words of a text, in order. Joined they are the text.
pub(super) fn words(text: &str) -> Words<'_> {
    Words { rest: text, classes: &CLASSES }
}

/// See [`words`].
pub(super) struct Words<'t> {
    rest: &'t str,
    classes: &'static Classes,
}

impl<'t> Iterator for Words<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        let length = self.word_length();
        let (word, rest) = self.rest.split_at(length);
        self.rest = rest;
        (length > 0).then_some(word)
    }
}

impl Words<'_> {
    /// Bytes of the word at the beginning of the rest; 0 only at the end.
    fn word_length(&self) -> usize {
        let text = self.rest;
        let bytes = text.as_bytes();
        match bytes {
            [] => return 0,
            [b'\'', b's' | b't' | b'm' | b'd', ..] => return 2,
            [b'\'', b'r' | b'v', b'e', ..] | [b'\'', b'l', b'l', ..] => return 3,
            _ => {}
        }
        // ` ?` and a run of one class, if the class after the optional space is not itself space.
        let start = usize::from(bytes[0] == b' ');
        if let Some((class, _)) = self.class_at(start)
            && class != Class::Space
        {
            return self.run_end(start, class);
        }
        // `\s+(?!\S)`: all of the run but its last character, which the next word may take, unless
        // the text ends.
        let end = self.run_end(0, Class::Space);
        let last = text[..end].chars().next_back().map_or(0, char::len_utf8);
        // `\s+`: a single space character before a word that does not take it.
        if end == text.len() || end == last { end } else { end - last }
    }

    /// End of the run of `class` that begins at `start`.
    fn run_end(&self, start: usize, class: Class) -> usize {
        let mut at = start;
        while let Some((found, length)) = self.class_at(at) {
            if found != class {
                break;
            }
            at += length;
        }
        at
    }

    /// Class and bytes of the character at `at`.
    fn class_at(&self, at: usize) -> Option<(Class, usize)> {
        let byte = *self.rest.as_bytes().get(at)?;
        if byte < 0x80 {
            return Some((self.classes.low[usize::from(byte)], 1));
        }
        let character = self.rest[at..].chars().next()?;
        Some((self.classes.of(character), character.len_utf8()))
    }
}

static CLASSES: LazyLock<Classes> = LazyLock::new(Classes::new);

/// Unicode's classes: a table for the planes of usual text, ranges beyond.
struct Classes {
    /// Classes of the first two planes.
    low: Vec<Class>,
    /// Sorted, disjoint ranges of the planes above.
    high: Vec<(u32, u32, Class)>,
}

impl Classes {
    const LOW: usize = 0x2_0000;

    fn new() -> Self {
        let mut classes = Self { low: vec![Class::Other; Self::LOW], high: Vec::new() };
        for (pattern, class) in [(r"\p{L}", Class::Letter), (r"\p{N}", Class::Number), (r"\s", Class::Space)] {
            for (first, last) in ranges(pattern) {
                for code in first..=last.min(Self::LOW as u32 - 1) {
                    classes.low[code as usize] = class;
                }
                if last as usize >= Self::LOW {
                    classes.high.push((first.max(Self::LOW as u32), last, class));
                }
            }
        }
        classes.high.sort_unstable_by_key(|range| range.0);
        classes
    }

    fn of(&self, character: char) -> Class {
        let code = character as u32;
        if let Some(&class) = self.low.get(code as usize) {
            return class;
        }
        let after = self.high.partition_point(|&(first, _, _)| first <= code);
        match after.checked_sub(1).map(|place| self.high[place]) {
            Some((_, last, class)) if code <= last => class,
            _ => Class::Other,
        }
    }
}

/// The code points of a character class.
fn ranges(pattern: &str) -> Vec<(u32, u32)> {
    // The three patterns are constants. A build without their tables fails the tests of this
    // module.
    let Ok(hir) = regex_syntax::parse(pattern) else { return Vec::new() };
    match hir.kind() {
        HirKind::Class(HirClass::Unicode(class)) => {
            class.ranges().iter().map(|range| (range.start() as u32, range.end() as u32)).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    /// The library's words.
    fn reference(text: &str) -> Vec<String> {
        let mut split = PreTokenizedString::from(text);
        ByteLevel::new(false, true, true).pre_tokenize(&mut split).unwrap();
        let splits = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (from, to), _)| text[from..to].to_owned()).collect()
    }

    #[test]
    fn words_of_the_awkward_places() {
        let check = |text: &str, expected: &[&str]| {
            assert_eq!(words(text).collect::<Vec<_>>(), expected, "{text:?}");
            assert_eq!(reference(text), expected, "the library's {text:?}");
        };
        check("", &[]);
        check("it's we'll they'RE 'tis", &["it", "'s", " we", "'ll", " they", "'", "RE", " '", "tis"]);
        check("a  b\n\n c \n", &["a", " ", " b", "\n\n", " c", " \n"]);
        check("x=1.50; //", &["x", "=", "1", ".", "50", ";", " //"]);
        check("  ", &["  "]);
        check(" \u{A0}é²Ⅷ日本 🚂", &[" ", "\u{A0}", "é", "²Ⅷ", "日本", " 🚂"]);
    }

    #[test]
    fn every_character_has_the_class_of_the_engine() {
        // Between two letters a character shows its class: a letter joins them, other classes cut
        // differently.
        let text: String = (0..0x11_0000).filter_map(char::from_u32).flat_map(|c| ['a', c, 'b', '\n']).collect();
        let mut library = reference(&text).into_iter();
        for word in words(&text) {
            assert_eq!(Some(word), library.next().as_deref());
        }
        assert!(library.next().is_none());
    }

    proptest! {
        #[test]
        fn any_text_falls_into_the_words_of_the_library(text in "([a-zA-Z]{1,4}|[ \t\n\r\u{A0}]{1,3}|[0-9²]{1,3}|'(s|t|re|ve|m|ll|d|x)?|[.,;=-]{1,3}|\\PC){0,40}") {
            prop_assert_eq!(words(&text).collect::<Vec<_>>(), reference(&text));
            prop_assert_eq!(words(&text).collect::<String>(), text);
        }
    }
}
