//! Splits Rust source into code, string contents and comments, line by line.
//!
//! The rules of [`tidy`](crate::tidy) ask questions such as "does `unsafe` appear in code?". A
//! plain text search answers them wrongly if the word is in a comment or a string. This module
//! implements the part of Rust's lexical grammar that decides it: comments (nested), plain, raw,
//! byte and C strings, and character literals against lifetimes. It does not parse.

/// One line of source, divided into three strings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// The code that the compiler sees, with each string literal reduced to its quotes.
    pub code: String,
    /// The contents of string literals.
    pub strings: String,
    /// The text of comments with their markers.
    pub comment: String,
}

impl Line {
    /// The identifiers and keywords of the code, raw identifiers without `r#`.
    pub fn words(&self) -> impl Iterator<Item = &str> {
        words(&self.code)
    }

    /// True if the code holds `word` as a whole identifier.
    pub fn has_word(&self, word: &str) -> bool {
        self.words().any(|w| w == word)
    }

    /// True if there is neither code nor a string.
    pub fn is_only_comment(&self) -> bool {
        self.code.trim().is_empty() && !self.comment.is_empty()
    }
}

/// Maximal runs of letters, digits and underscores.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|w| !w.is_empty())
}

#[derive(Clone, Copy)]
enum State {
    Code,
    LineComment,
    /// With its nesting depth.
    BlockComment(u32),
    Text,
    /// Ends at `"` followed by this many `#`.
    RawText(usize),
}

/// The lines of `source`.
pub fn lines(source: &str) -> Vec<Line> {
    let chars: Vec<char> = source.chars().collect();
    let mut lines = vec![Line::default()];
    let mut state = State::Code;
    let mut at = 0;
    while at < chars.len() {
        let c = chars[at];
        let next = chars.get(at + 1).copied();
        if c == '\n' {
            if matches!(state, State::LineComment) {
                state = State::Code;
            }
            lines.push(Line::default());
            at += 1;
            continue;
        }
        let line = lines.last_mut().expect("never empty");
        match state {
            State::Code => {
                if c == '/' && next == Some('/') {
                    state = State::LineComment;
                    continue;
                }
                if c == '/' && next == Some('*') {
                    state = State::BlockComment(1);
                    line.comment.push_str("/*");
                    at += 2;
                    continue;
                }
                line.code.push(c);
                at += 1;
                if c == '"' {
                    state = State::Text;
                } else if c == '\'' {
                    at += char_literal_length(&chars[at..]);
                } else if let Some(hashes) = raw_string_start(&chars, at - 1) {
                    line.code.push('"');
                    at += hashes + 1;
                    state = State::RawText(hashes);
                }
            }
            State::LineComment => {
                line.comment.push(c);
                at += 1;
            }
            State::BlockComment(depth) => {
                let (step, depth) = match (c, next) {
                    ('/', Some('*')) => (2, depth + 1),
                    ('*', Some('/')) => (2, depth - 1),
                    _ => (1, depth),
                };
                line.comment.extend(&chars[at..at + step]);
                at += step;
                state = if depth == 0 { State::Code } else { State::BlockComment(depth) };
            }
            State::Text => {
                if c == '"' {
                    line.code.push('"');
                    state = State::Code;
                } else if c == '\\' && next.is_some_and(|n| n != '\n') {
                    line.strings.extend(&chars[at..at + 2]);
                    at += 1;
                } else {
                    line.strings.push(c);
                }
                at += 1;
            }
            State::RawText(hashes) => {
                if c == '"' && chars[at + 1..].iter().take(hashes).filter(|&&h| h == '#').count() == hashes {
                    line.code.push('"');
                    at += 1 + hashes;
                    state = State::Code;
                } else {
                    line.strings.push(c);
                    at += 1;
                }
            }
        }
    }
    lines
}

/// The number of characters after an opening `'` that belong to a character literal; 0 for a
/// lifetime.
fn char_literal_length(after: &[char]) -> usize {
    match after {
        // '\n', '\'', '\u{1F600}': up to the quote that is not the escaped character itself.
        ['\\', _, rest @ ..] => 2 + rest.iter().position(|&c| c == '\'').map_or(0, |p| p + 1),
        [_, '\'', ..] => 2,
        _ => 0,
    }
}

/// The number of `#` if a raw string (`r"`, `r#"`, `br"`, `cr"`) begins with the `r` at `at`.
fn raw_string_start(chars: &[char], at: usize) -> Option<usize> {
    if chars[at] != 'r' {
        return None;
    }
    let mut before = chars[..at].iter().rev();
    let mut previous = before.next();
    if matches!(previous, Some('b' | 'c')) {
        previous = before.next();
    }
    if previous.is_some_and(|c| c.is_alphanumeric() || *c == '_') {
        return None;
    }
    let hashes = chars[at + 1..].iter().take_while(|&&c| c == '#').count();
    (chars.get(at + 1 + hashes) == Some(&'"')).then_some(hashes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, code: &str, strings: &str, comment: &str) {
        let got = lines(source);
        let join = |part: fn(&Line) -> &String| got.iter().map(part).cloned().collect::<Vec<_>>().join("\n");
        assert_eq!(join(|l| &l.code), code, "code of {source:?}");
        assert_eq!(join(|l| &l.strings), strings, "strings of {source:?}");
        assert_eq!(join(|l| &l.comment), comment, "comments of {source:?}");
    }

    #[test]
    fn comments_leave_the_code() {
        check("a // b \"c\"", "a ", "", "// b \"c\"");
        check("a /* b /* c */ d */ e", "a  e", "", "/* b /* c */ d */");
        check("/* a\nb */c", "\nc", "\n", "/* a\nb */");
    }

    #[test]
    fn strings_leave_their_quotes() {
        check(r#"f("a // b", 'c')"#, "f(\"\", ')", "a // b", "");
        check(r#"x("a\"b")"#, "x(\"\")", "a\\\"b", "");
        check("r#\"a\"b\"# + br\"\\\" + c\"d\"", "r\"\" + br\"\" + c\"\"", "a\"b\\d", "");
        check("\"a\nb\"c", "\"\n\"c", "a\nb", "\n");
    }

    #[test]
    fn lifetimes_and_character_literals() {
        check("&'a str = '\"'; 'x: loop", "&'a str = '; 'x: loop", "", "");
        check(r"['\'', '\\', '\u{41}', b'/']", "[', ', ', b']", "", "");
    }

    #[test]
    fn raw_identifiers_are_not_strings() {
        check("r#type + var\"\"", "r#type + var\"\"", "", "");
    }

    #[test]
    fn words_are_whole() {
        let line = &lines("let unsafe_code = a.unsafe_fn();")[0];
        assert!(!line.has_word("unsafe") && line.has_word("unsafe_code"));
    }
}
