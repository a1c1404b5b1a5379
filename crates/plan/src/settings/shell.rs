//! Arguments in a shell script: words of commands, with variables and arrays replaced.
//!
//! Launch scripts keep their arguments in variables (`ARGS="--num-layers 24"`) or arrays
//! (`ARGS=(--num-layers 24)`) and expand them in the last command. This reads assignments, quotes,
//! comments, continued lines, `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME[@]}` and products,
//! quotients, sums and differences in `$((...))`. It runs nothing; other substitutions stay as they
//! are written.

use std::collections::BTreeMap;

/// The arguments of a script: those of the last command that has any `--option`, else those of
/// all assignments, as options with their values. Options without a value have an empty one, and
/// those with several have them joined by spaces.
pub(super) fn options(text: &str) -> Vec<(String, String)> {
    let words = words(text);
    let is_option = |word: &String| word.starts_with("--") && word.len() > 2;
    let commands = words.commands.into_iter().rev().find(|words| words.iter().any(is_option));
    pairs(commands.unwrap_or(words.assigned))
}

/// The `key=value` words of a script.
pub(super) fn assignments(text: &str) -> Vec<(String, String)> {
    let words = words(text);
    let all = words.commands.into_iter().flatten().chain(words.assigned);
    all.filter_map(|word| {
        let (key, value) = word.split_once('=')?;
        let is_key = key.contains('.') && key.chars().all(|c| c.is_alphanumeric() || "._".contains(c));
        is_key.then(|| (key.to_owned(), value.to_owned()))
    })
    .collect()
}

fn pairs(words: Vec<String>) -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = Vec::new();
    let mut open = false;
    for word in words {
        match word.strip_prefix("--") {
            Some(option) if !option.is_empty() => {
                let (key, value) = option.split_once('=').unwrap_or((option, ""));
                all.push((key.to_owned(), value.to_owned()));
                open = true;
            }
            _ if word.starts_with('-') && word.parse::<f64>().is_err() => open = false,
            _ => {
                if let Some((_, value)) = all.last_mut().filter(|_| open) {
                    if !value.is_empty() {
                        value.push(' ');
                    }
                    value.push_str(&word);
                }
            }
        }
    }
    all
}

#[derive(Default)]
struct Words {
    /// Words of each command.
    commands: Vec<Vec<String>>,
    /// Words of all assigned values.
    assigned: Vec<String>,
}

/// A part of a word: its text, and true if it was quoted.
type Part = (String, bool);

fn words(text: &str) -> Words {
    let mut words = Words::default();
    let mut variables: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let joined = joined(text);
    let mut command: Vec<String> = Vec::new();
    // The array that is being read, with its words so far.
    let mut array: Option<(String, Vec<String>)> = None;
    for line in joined.lines() {
        for mut parts in line_parts(line) {
            if let Some((name, mut values)) = array.take() {
                let ends = parts.last().is_some_and(|(text, quoted)| !quoted && text.ends_with(')'));
                if ends {
                    parts.last_mut().expect("it has a part").0.pop();
                }
                values.extend(expand(&parts, &variables));
                if ends {
                    close(name, values, &mut words, &mut variables);
                } else {
                    array = Some((name, values));
                }
                continue;
            }
            let first = parts.first().filter(|(_, quoted)| !quoted).map(|(text, _)| text.clone()).unwrap_or_default();
            let assigned = first.split_once('=').filter(|(name, _)| is_name(name.trim_end_matches('+')));
            match assigned {
                Some((name, value)) if command.is_empty() => {
                    let name = name.trim_end_matches('+').to_owned();
                    let mut value_parts = parts.clone();
                    value_parts[0].0 = value.to_owned();
                    if let Some(rest) = value.strip_prefix('(') {
                        value_parts[0].0 = rest.to_owned();
                        let ends = value_parts.last().is_some_and(|(text, quoted)| !quoted && text.ends_with(')'));
                        if ends {
                            value_parts.last_mut().expect("it has a part").0.pop();
                        }
                        let before =
                            if first.contains("+=") { variables.remove(&name).unwrap_or_default() } else { Vec::new() };
                        let mut values = before;
                        values.extend(expand(&value_parts, &variables));
                        if ends {
                            close(name, values, &mut words, &mut variables);
                        } else {
                            array = Some((name, values));
                        }
                    } else {
                        // Text keeps its spaces until it is expanded without quotes.
                        let value =
                            replace(&value_parts.iter().map(|(text, _)| text.as_str()).collect::<String>(), &variables);
                        words.assigned.extend(value.split_whitespace().map(str::to_owned));
                        variables.insert(name, vec![value]);
                    }
                }
                _ if parts.len() == 1
                    && !parts[0].1
                    && ["export", "local", "declare", "-a"].contains(&first.as_str()) => {}
                _ => command.extend(expand(&parts, &variables)),
            }
        }
        if array.is_none() && !command.is_empty() {
            words.commands.push(std::mem::take(&mut command));
        }
    }
    words
}

/// The text with continued lines and lines inside quotes joined.
fn joined(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace("\\\n", " ");
    let mut out = String::with_capacity(text.len());
    let (mut quote, mut comment, mut before) = (None, false, ' ');
    for c in text.chars() {
        match (quote, c) {
            (Some(_), '\n') => out.push(' '),
            (Some(open), _) => {
                out.push(c);
                if c == open && before != '\\' {
                    quote = None;
                }
            }
            (None, _) => {
                out.push(c);
                comment = c != '\n' && (comment || c == '#' && before.is_whitespace());
                if matches!(c, '"' | '\'') && !comment && before != '\\' {
                    quote = Some(c);
                }
            }
        }
        before = c;
    }
    out
}

fn close(name: String, values: Vec<String>, words: &mut Words, variables: &mut BTreeMap<String, Vec<String>>) {
    words.assigned.extend(values.iter().cloned());
    variables.insert(name, values);
}

fn is_name(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c.is_alphabetic() || c == '_') && chars.all(|c| c.is_alphanumeric() || c == '_')
}

/// The words of a line, each as quoted and unquoted parts, without comments. A `;` or `|` ends a
/// word.
fn line_parts(line: &str) -> Vec<Vec<Part>> {
    let mut all: Vec<Vec<Part>> = Vec::new();
    let mut word: Vec<Part> = Vec::new();
    let mut chars = line.chars().peekable();
    let mut depth = 0;
    while let Some(c) = chars.next() {
        match c {
            '\'' | '"' => {
                let mut quoted = String::new();
                while let Some(next) = chars.next() {
                    match next {
                        '\\' if c == '"' => quoted.extend(chars.next()),
                        _ if next == c => break,
                        _ => quoted.push(next),
                    }
                }
                // A single-quoted dollar stays what it is.
                word.push((if c == '\'' { quoted.replace('$', "\u{0}") } else { quoted }, true));
            }
            '#' if word.is_empty() => break,
            c if c.is_whitespace() || (c == ';' || c == '|') && depth == 0 => {
                if depth > 0 {
                    push(&mut word, c);
                } else if !word.is_empty() {
                    all.push(std::mem::take(&mut word));
                }
            }
            '$' => {
                push(&mut word, c);
                if matches!(chars.peek(), Some('(' | '{')) {
                    depth += 1;
                    word.last_mut().expect("it has a part").0.extend(chars.next());
                }
            }
            '(' | '{' if depth > 0 => {
                depth += 1;
                push(&mut word, c);
            }
            ')' | '}' if depth > 0 => {
                depth -= 1;
                push(&mut word, c);
            }
            _ => push(&mut word, c),
        }
    }
    if !word.is_empty() {
        all.push(word);
    }
    all
}

fn push(word: &mut Vec<Part>, c: char) {
    match word.last_mut() {
        Some((text, false)) => text.push(c),
        _ => word.push((c.to_string(), false)),
    }
}

/// The words that a word becomes: unquoted variables are split at spaces, arrays at elements.
fn expand(parts: &[Part], variables: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let [(text, quoted)] = parts else {
        let joined = replace(&parts.iter().map(|(text, _)| text.as_str()).collect::<String>(), variables);
        return if joined.is_empty() { Vec::new() } else { vec![joined] };
    };
    let name = text.strip_prefix("${").and_then(|rest| rest.strip_suffix("[@]}").or_else(|| rest.strip_suffix("[*]}")));
    if let Some(values) = name.and_then(|name| variables.get(name)) {
        return values.clone();
    }
    let replaced = replace(text, variables);
    match quoted {
        true => vec![replaced],
        false => replaced.split_whitespace().map(str::to_owned).collect(),
    }
}

/// The text with known variables replaced.
fn replace(text: &str, variables: &BTreeMap<String, Vec<String>>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some((inner, after)) = rest.strip_prefix("((").and_then(|r| r.split_once("))")) {
            let inner = replace(inner, variables);
            out.push_str(&arithmetic(&inner, variables).map_or(format!("$(({inner}))"), |n| n.to_string()));
            rest = after;
        } else if let Some((inner, after)) = rest.strip_prefix('{').and_then(|r| r.split_once('}')) {
            let name = inner.split([':', '[', '-']).next().unwrap_or_default();
            let default = inner.split_once(":-").or_else(|| inner.split_once('-')).map(|(_, default)| default);
            match (variables.get(name), default) {
                (Some(values), _) => out.push_str(&values.join(" ")),
                (None, Some(default)) => out.push_str(&replace(default, variables)),
                (None, None) => out.push_str(&format!("${{{inner}}}")),
            }
            rest = after;
        } else {
            let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
            let name = &rest[..end];
            match variables.get(name) {
                Some(values) => out.push_str(&values.join(" ")),
                None => out.push_str(&format!("${name}")),
            }
            rest = &rest[end..];
        }
    }
    out.push_str(rest);
    out.replace('\u{0}', "$")
}

/// The value of sums and products of whole numbers and variables, without parentheses.
fn arithmetic(text: &str, variables: &BTreeMap<String, Vec<String>>) -> Option<i64> {
    let spaced =
        ["*", "/", "+", "-", "%"].iter().fold(text.to_owned(), |text, op| text.replace(op, &format!(" {op} ")));
    let mut total = 0i64;
    let (mut term, mut sign, mut operation) = (None::<i64>, 1i64, "*".to_owned());
    for word in spaced.split_whitespace() {
        match word {
            "+" | "-" => {
                total = total.checked_add(sign.checked_mul(term.take()?)?)?;
                sign = if word == "-" { -1 } else { 1 };
                operation = "*".to_owned();
            }
            "*" | "/" | "%" => operation = word.to_owned(),
            word => {
                let value = word.parse().ok().or_else(|| variables.get(word)?.first()?.trim().parse::<i64>().ok())?;
                term = Some(match (term, operation.as_str()) {
                    (None, _) => value,
                    (Some(before), "*") => before.checked_mul(value)?,
                    (Some(before), "/") => before.checked_div(value)?,
                    (Some(before), _) => before.checked_rem(value)?,
                });
            }
        }
    }
    total.checked_add(sign.checked_mul(term?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(text: &str, name: &str) -> Option<String> {
        options(text).into_iter().rev().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    #[test]
    fn arguments_are_found_through_variables_arrays_and_continued_lines() {
        let text = r#"#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=4   # a comment
GBS=$((WORLD_SIZE * 4 / TP))
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048 # another
    --lr '1e-4'
)
MODEL_PARALLEL_ARGS="
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size ${PP:-2}
    --sequence-parallel
"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    $MODEL_PARALLEL_ARGS \
    --global-batch-size ${GBS} --data-path "a b" '$HOME'
"#;
        for (name, value) in [
            ("num-layers", "24"),
            ("hidden-size", "2048"),
            ("lr", "1e-4"),
            ("tensor-model-parallel-size", "4"),
            ("pipeline-model-parallel-size", "2"),
            ("sequence-parallel", ""),
            ("global-batch-size", "16"),
            ("data-path", "a b $HOME"),
            ("nnodes", "2 pretrain_gpt.py"),
        ] {
            assert_eq!(option(text, name).as_deref(), Some(value), "{name}: {:?}", options(text));
        }
    }

    #[test]
    fn scripts_that_only_assign_give_what_they_assign() {
        let text = "ARGS=(\n  --tensor-model-parallel-size 8 --bf16\n)\nMORE=\"--micro-batch-size=2\"\nARGS+=(--fp16)";
        assert_eq!(option(text, "tensor-model-parallel-size").as_deref(), Some("8"));
        assert_eq!(option(text, "micro-batch-size").as_deref(), Some("2"));
        assert_eq!(option(text, "fp16").as_deref(), Some(""));
        let keys = assignments("nemo llm pretrain --factory llama3_8b trainer.devices=8 data.seq_length=4096\nTP=3\n");
        assert_eq!(keys, [("trainer.devices".into(), "8".into()), ("data.seq_length".into(), "4096".into())]);
    }

    #[test]
    fn odd_scripts_do_no_harm() {
        for text in ["", "(", "A=(", "A=('", "$", "${", "$((", "A=$((1/0)) --x $A", "'\"", "A+=(", "--x", ")"] {
            let _ = options(text);
            let _ = assignments(text);
        }
        assert_eq!(option("A=$((1/0))\nrun --x $A", "x").as_deref(), Some("$((1/0))"));
    }
}
