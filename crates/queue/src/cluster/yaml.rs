//! Writes plain data as YAML: block style, texts of several lines as literal blocks.
//!
//! Texts are quoted as in JSON, which YAML 1.2 contains, unless they are plainly words. Only what a
//! manifest needs is here.

use serde_json::Value;
use std::fmt::Write as _;

/// The value as a YAML document, without the marker in front.
pub fn emit(value: &Value) -> String {
    let mut text = String::new();
    block(value, 0, &mut text);
    text
}

fn block(value: &Value, indent: usize, text: &mut String) {
    let pad = " ".repeat(indent);
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                // Writing to a String cannot fail.
                let _ = write!(text, "{pad}{}:", word(key));
                nested(value, indent + 2, text);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                let mut inner = String::new();
                match item {
                    Value::Object(fields) if !fields.is_empty() => block(item, indent + 2, &mut inner),
                    Value::Array(inside) if !inside.is_empty() => block(item, indent + 2, &mut inner),
                    scalar => {
                        inner.push_str(&" ".repeat(indent + 1));
                        nested(scalar, indent + 2, &mut inner);
                    }
                }
                let _ = write!(text, "{pad}- {}", inner.trim_start_matches(' '));
            }
        }
        scalar => {
            text.push_str(&pad);
            nested(scalar, indent, text);
        }
    }
}

/// A value behind a key or a dash.
fn nested(value: &Value, indent: usize, text: &mut String) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            text.push('\n');
            block(value, indent, text);
        }
        Value::Array(items) if !items.is_empty() => {
            text.push('\n');
            block(value, indent, text);
        }
        Value::Object(_) => text.push_str(" {}\n"),
        Value::Array(_) => text.push_str(" []\n"),
        Value::String(lines) if is_literal(lines) => {
            // The last line end is kept, or there is none.
            text.push_str(if lines.ends_with('\n') { " |\n" } else { " |-\n" });
            for line in lines.lines() {
                let pad = if line.is_empty() { String::new() } else { " ".repeat(indent) };
                let _ = writeln!(text, "{pad}{line}");
            }
        }
        Value::String(string) => {
            let _ = writeln!(text, " {}", word(string));
        }
        other => {
            let _ = writeln!(text, " {other}");
        }
    }
}

/// True for a text that a literal block gives back unchanged.
fn is_literal(text: &str) -> bool {
    let is_whole = !text.ends_with("\n\n") && !text.starts_with([' ', '\n', '\t']);
    let is_plain = text.chars().all(|c| c == '\n' || c == '\t' || !c.is_control());
    text.trim_end_matches('\n').contains('\n') && is_whole && is_plain
}

fn word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._/".contains(c);
    // What another reader takes for a number, a truth value, nothing or a date is quoted.
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let means_more =
        ["true", "false", "yes", "no", "on", "off", "null", "y", "n"].contains(&text.to_lowercase().as_str());
    if begins && text.chars().all(is_plain) && !means_more {
        return text.to_owned();
    }
    Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn documents_are_written() {
        let value = json!({
            "apiVersion": "v1",
            "list": [{ "a": 1, "b": { "c": [] } }, "x: y", [2, 3], "two\nlines"],
            "text": "first\n  second\n\nthird\n",
            "none": {},
            "no": "yes",
            "time": "12:30",
            "nothing": null,
            "open": "a\nb",
        });
        let expected = "\
apiVersion: v1
list:
  - a: 1
    b:
      c: []
  - \"x: y\"
  - - 2
    - 3
  - |-
    two
    lines
text: |
  first
    second

  third
none: {}
\"no\": \"yes\"
time: \"12:30\"
nothing: null
open: |-
  a
  b
";
        assert_eq!(emit(&value), expected);
    }
}
