//! Rules about Rust sources: length, essays, unfinished code, unsafe code, and names that a crate
//! may not use.

use super::{Complaint, Source};
use crate::lexer::{Line, words};

const LINES_MAX: usize = 799;
/// Minimum length of a module's first line, which must say what the module is.
const ESSAY_CHARS_MIN: usize = 10;
/// Crates that may hold unsafe code: kernels and memory, the driver of GPUs, and the bindings of
/// communicators.
const UNSAFE_CRATES: [&str; 3] = ["tensor", "cuda", "comm"];
/// Maximum number of lines between unsafe code and the end of its reason.
const REASON_LINES: usize = 6;

pub fn check(sources: &[Source]) -> Vec<Complaint> {
    let rust = || sources.iter().filter(|s| s.path.ends_with(".rs"));
    rust()
        .flat_map(length)
        .chain(rust().flat_map(essay))
        .chain(rust().flat_map(unfinished))
        .chain(rust().flat_map(unsafe_code))
        .chain(rust().flat_map(program_is_pure_data))
        .chain(rust().flat_map(engine_knows_no_strategy))
        .collect()
}

fn length(source: &Source) -> Option<Complaint> {
    let lines = source.text.lines().count();
    (lines > LINES_MAX)
        .then(|| Complaint::new(source, 0, format!("{lines} lines, at most {LINES_MAX}: split it by noun")))
}

/// Modules, programs and examples must begin with a description; test files may.
fn essay(source: &Source) -> Option<Complaint> {
    let test = source.path.contains("/tests/") || source.path.ends_with("/tests.rs");
    let explained = !test && (source.path.contains("src/") || source.path.contains("examples/"));
    let first = source.text.lines().find(|line| !line.starts_with("#!"))?;
    let long_enough = first.strip_prefix("//!").is_some_and(|text| text.trim().len() >= ESSAY_CHARS_MIN);
    (explained && !long_enough).then(|| {
        Complaint::new(source, 1, "begins without a module essay (`//!`: what it is, why, what it does not do)")
    })
}

fn unfinished(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for (number, line) in numbered(source) {
        for name in ["todo", "unimplemented", "dbg"] {
            if line.code.match_indices(&format!("{name}!")).any(|(at, _)| !ends_in_word(&line.code[..at])) {
                complaints.push(Complaint::new(
                    source,
                    number,
                    format!("`{name}!` is for drafts: finish it or return an error"),
                ));
            }
        }
    }
    complaints
}

fn ends_in_word(text: &str) -> bool {
    text.chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_')
}

/// Invariant 10: unsafe code lives in `tensor`, `cuda` and `comm`, and gives its reason.
fn unsafe_code(source: &Source) -> Vec<Complaint> {
    let allowed = source.crate_name().is_some_and(|name| UNSAFE_CRATES.contains(&name));
    let mut complaints = Vec::new();
    for (number, line) in numbered(source).filter(|(_, line)| line.has_word("unsafe")) {
        if !allowed {
            let what = format!("unsafe code outside of {}: give it a safe function there", UNSAFE_CRATES.join(" and "));
            complaints.push(Complaint::new(source, number, what));
        } else if needs_reason(&line.code)
            && !has_reason(&source.lines[..number])
            && !fulfils_a_trait(&source.lines[..number])
        {
            let what = format!("unsafe code without `SAFETY:` (or `# Safety`) in the {REASON_LINES} lines above it");
            complaints.push(Complaint::new(source, number, what));
        }
    }
    complaints
}

/// True if the line opens an unsafe block, function, trait or implementation. A function *type*
/// (`unsafe fn(..)`, `unsafe extern "C" fn(..)`) does not count.
fn needs_reason(code: &str) -> bool {
    code.match_indices("unsafe").any(|(at, word)| {
        let after = code[at + word.len()..].trim_start();
        let mut next = words(after);
        let is_type = after.split_once("fn").is_some_and(|(_, rest)| rest.trim_start().starts_with('('));
        match next.next() {
            _ if after.starts_with('{') || after.is_empty() => !ends_in_word(&code[..at]),
            Some("fn" | "extern") => !is_type,
            Some("impl" | "trait") => true,
            _ => false,
        }
    })
}

/// True if the last of `lines` has a reason. It may also be further up in the documentation or
/// attributes that belong to it.
fn has_reason(lines: &[Line]) -> bool {
    let gives_reason = |line: &Line| line.comment.contains("SAFETY") || line.comment.contains("# Safety");
    let near = lines.iter().rev().take(REASON_LINES + 1);
    let attached =
        lines.iter().rev().skip(1).take_while(|l| l.is_only_comment() || l.code.trim_start().starts_with("#["));
    near.chain(attached).any(gives_reason)
}

/// True if the last of `lines` is a method in an `impl Trait for Type`. Its contract is documented
/// at the trait.
///
/// Indentation decides, which rustfmt makes exact: the enclosing item begins at the nearest line
/// further left that is no `where` clause.
fn fulfils_a_trait(lines: &[Line]) -> bool {
    let indent = |line: &Line| line.code.len() - line.code.trim_start().len();
    let Some((last, above)) = lines.split_last() else { return false };
    let encloses = |line: &&Line| {
        let code = line.code.trim();
        !code.is_empty() && indent(line) < indent(last) && !matches!(code, "{" | "where") && !code.starts_with(')')
    };
    let is_function = last.code.trim_start().trim_start_matches("pub ").starts_with("unsafe fn");
    let opener = above.iter().rev().find(encloses).map(|line| line.code.trim_start().trim_start_matches("unsafe "));
    is_function && opener.is_some_and(|code| code.starts_with("impl") && code.contains(" for "))
}

/// Invariant 1, first half: `program` knows no tensors, threads, files or clocks.
fn program_is_pure_data(source: &Source) -> Vec<Complaint> {
    const ABSENT: [&str; 10] = [
        "std::fs",
        "std::io",
        "std::net",
        "std::thread",
        "std::sync",
        "std::time",
        "std::env",
        "std::process",
        "trainyard_tensor",
        "trainyard_model",
    ];
    if source.crate_name() != Some("program") || !source.path.contains("/src/") {
        return Vec::new();
    }
    absent(source, &ABSENT, "the program is plain data: it knows no tensors, threads, files or clocks")
}

fn absent(source: &Source, names: &[&str], why: &str) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for (number, line) in numbered(source) {
        let code: String = line.code.split_whitespace().collect();
        for name in names.iter().filter(|name| code.contains(**name)) {
            complaints.push(Complaint::new(source, number, format!("`{name}` here, but {why}")));
        }
    }
    complaints
}

/// Invariant 1, second half: `engine` runs instructions and names no strategy. Two places must name
/// it: the configuration, and the place that hands it to the lowering.
fn engine_knows_no_strategy(source: &Source) -> Vec<Complaint> {
    const STRATEGIES: [&str; 6] = ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"];
    let asks = ["engine/src/config/", "engine/src/shape.rs", "engine/src/limit.rs"]
        .iter()
        .any(|place| source.path.contains(place));
    if source.crate_name() != Some("engine") || !source.path.contains("/src/") || asks {
        return Vec::new();
    }
    let mut complaints = Vec::new();
    for (number, line) in numbered(source) {
        let text = format!("{} {}", line.code, line.strings).to_lowercase();
        let named = words(&text)
            .find(|word| word.contains("zero_stage") || word.split('_').any(|part| STRATEGIES.contains(&part)));
        if let Some(word) = named {
            let what = format!("`{word}`: the engine knows no strategy; a lowering in `program` expresses it");
            complaints.push(Complaint::new(source, number, what));
        }
    }
    complaints
}

fn numbered(source: &Source) -> impl Iterator<Item = (usize, &Line)> {
    source.lines.iter().enumerate().map(|(index, line)| (index + 1, line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::expect;

    const ESSAY: &str = "//! Text that says what this is.\n";

    fn expect_in(path: &str, body: &str, expected: &[&str]) {
        expect(check, &[(path, &format!("{ESSAY}{body}"))], expected);
    }

    #[test]
    fn files_are_short() {
        expect_in("crates/a/src/b.rs", &"\n".repeat(798), &[]);
        expect_in("crates/a/src/b.rs", &"\n".repeat(799), &["crates/a/src/b.rs: 800 lines"]);
    }

    #[test]
    fn modules_begin_with_an_essay() {
        expect(check, &[("crates/a/src/b.rs", "use x;\n")], &["crates/a/src/b.rs:1: begins without"]);
        expect(check, &[("crates/a/examples/b.rs", "//! Short.\n")], &["crates/a/examples/b.rs:1: begins without"]);
        expect(check, &[("crates/a/tests/b.rs", "use x;\n"), ("crates/a/src/b/tests.rs", "use x;\n")], &[]);
        expect(check, &[("crates/a/src/b.rs", "#!/usr/bin/env x\n//! Text that says what this is.\n")], &[]);
    }

    #[test]
    fn drafts_are_found_in_code_only() {
        expect_in("crates/a/src/b.rs", "// todo!()\nlet x = \"dbg!\"; my_todo!();\n", &[]);
        expect_in(
            "crates/a/src/b.rs",
            "a();todo!();\ndbg!(x)",
            &["crates/a/src/b.rs:2: `todo!`", "crates/a/src/b.rs:3: `dbg!`"],
        );
    }

    #[test]
    fn unsafe_code_has_a_place_and_a_reason() {
        let block = "unsafe { f() }\n";
        expect_in("crates/tensor/src/b.rs", block, &["crates/tensor/src/b.rs:2: unsafe code without"]);
        expect_in("crates/tensor/src/b.rs", &format!("// SAFETY: because.\n{block}"), &[]);
        expect_in("crates/tensor/src/b.rs", &format!("// SAFETY: because.\n{}{block}", "x();\n".repeat(5)), &[]);
        expect_in(
            "crates/tensor/src/b.rs",
            &format!("// SAFETY: because.\n{}{block}", "x();\n".repeat(6)),
            &["crates/tensor/src/b.rs:9:"],
        );
        expect_in(
            "crates/engine/src/b.rs",
            &format!("// SAFETY: no.\n{block}"),
            &["crates/engine/src/b.rs:3: unsafe code outside"],
        );
        expect_in("crates/engine/src/b.rs", "#![forbid(unsafe_code)]\n// unsafe\n", &[]);
    }

    #[test]
    fn reasons_may_stand_in_long_documentation() {
        let text =
            format!("/// # Safety\n/// The caller ...\n{}#[inline]\npub unsafe fn f() {{}}\n", "/// more\n".repeat(9));
        expect_in("crates/tensor/src/b.rs", &text, &[]);
        expect_in("crates/tensor/src/b.rs", "type F = unsafe fn(u8);\n", &[]);
        expect_in("crates/tensor/src/b.rs", "type F = unsafe extern \"C\" fn(u8);\n", &[]);
        for body in ["unsafe extern \"C\" fn f(u8) {}\n", "unsafe extern \"C\" {\n"] {
            expect_in("crates/tensor/src/b.rs", body, &["crates/tensor/src/b.rs:2: unsafe code without"]);
        }
        expect_in(
            "crates/tensor/src/b.rs",
            "unsafe impl Send for F {}\n",
            &["crates/tensor/src/b.rs:2: unsafe code without"],
        );
    }

    #[test]
    fn methods_of_a_trait_have_the_contract_of_the_trait() {
        let method = "    unsafe fn f() {\n    }\n}\n";
        let implementation = format!("impl<T> A for B<T>\nwhere\n    T: C,\n{{\n    fn e() {{}}\n\n{method}");
        expect_in("crates/tensor/src/b.rs", &implementation, &[]);
        expect_in(
            "crates/tensor/src/b.rs",
            &format!("impl B {{\n{method}"),
            &["crates/tensor/src/b.rs:3: unsafe code without"],
        );
        expect_in(
            "crates/tensor/src/b.rs",
            &format!("trait B {{\n{method}"),
            &["crates/tensor/src/b.rs:3: unsafe code without"],
        );
    }

    #[test]
    fn program_is_plain_data() {
        expect_in("crates/program/src/b.rs", "use std::time::Instant;\n", &["crates/program/src/b.rs:2: `std::time`"]);
        expect_in("crates/program/src/b.rs", "// std::fs\n", &[]);
        expect_in("crates/engine/src/b.rs", "use std::time::Instant;\n", &[]);
    }

    #[test]
    fn engine_names_no_strategy() {
        expect_in("crates/engine/src/b.rs", "if cfg.zero_stage > 1 {}\n", &["crates/engine/src/b.rs:2: `zero_stage`"]);
        expect_in("crates/engine/src/config/b.rs", "if cfg.zero_stage > 1 {}\n", &[]);
        expect_in("crates/engine/src/b.rs", "let x = \"DDP\";\n", &["crates/engine/src/b.rs:2: `ddp`"]);
        expect_in("crates/engine/src/b.rs", "// ddp\nlet add_params = addpd;\n", &[]);
    }
}
