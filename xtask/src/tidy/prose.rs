//! Rules about prose: how wide comments are, how documentation begins, how long table cells and
//! paragraphs are.
//!
//! Two of the rules hold for the crates and pages that are named here. A crate or a page is added
//! once it complies, and none is ever taken off.

use super::{Complaint, Source};
use crate::markdown;

/// The columns of a comment, indentation and marker included.
const COMMENT_COLUMNS_MAX: usize = 100;
/// The characters of a cell of a table.
const CELL_CHARS_MAX: usize = 120;
/// The characters of a paragraph: six lines of a hundred.
const PARAGRAPH_CHARS_MAX: usize = 600;
/// Words that make a clause the subject of a sentence.
const CLAUSES: [&str; 5] = ["What", "Whether", "Who", "Which", "Whose"];
/// Crates whose documentation names a thing before it says what the thing does.
const PLAIN_PROSE_CRATES: &[&str] = &[
    "autograd",
    "base",
    "calibrate",
    "cli",
    "comm",
    "cuda",
    "dashboard",
    "data",
    "engine",
    "model",
    "observe",
    "plan",
    "program",
    "queue",
    "record",
    "sim",
    "tensor",
    "testing",
    "tune",
];
/// Pages whose tables and paragraphs are short.
const SHORT_PAGES: &[&str] = &[
    "README.md",
    "docs/ARCHITECTURE.md",
    "docs/DEPENDENCIES.md",
    "docs/adding-a-kernel.md",
    "docs/advise.md",
    "docs/benchmarks.md",
    "docs/checkpoints.md",
    "docs/clusters.md",
    "docs/config.md",
    "docs/cost-model.md",
    "docs/data.md",
    "docs/distillation.md",
    "docs/equality.md",
    "docs/families.md",
    "docs/finding-bottlenecks.md",
    "docs/fine-tuning.md",
    "docs/gpu.md",
    "docs/install.md",
    "docs/layouts.md",
    "docs/models.md",
    "docs/offload.md",
    "docs/parallelism.md",
    "docs/planning.md",
    "docs/programs.md",
    "docs/python.md",
    "docs/queue.md",
    "docs/search.md",
    "docs/slow-networks.md",
    "docs/stacks.md",
    "docs/traces.md",
    "docs/training.md",
];

pub fn check(sources: &[Source]) -> Vec<Complaint> {
    check_with(sources, PLAIN_PROSE_CRATES, SHORT_PAGES)
}

fn check_with(sources: &[Source], crates: &[&str], pages: &[&str]) -> Vec<Complaint> {
    let rust = sources.iter().filter(|source| source.path.ends_with(".rs"));
    let plain = rust.clone().filter(|source| source.crate_name().is_some_and(|name| crates.contains(&name)));
    let short = sources.iter().filter(|source| pages.contains(&source.path.as_str()));
    rust.flat_map(comments_are_narrow)
        .chain(plain.flat_map(documentation_names_its_thing))
        .chain(short.flat_map(cells_and_paragraphs_are_short))
        .collect()
}

/// Tables, figures, code and addresses cannot be wrapped.
fn comments_are_narrow(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    let mut in_code = false;
    for (index, (text, line)) in source.text.lines().zip(&source.lines).enumerate() {
        let comment = line.comment.trim_start_matches(['/', '!', '*']).trim();
        if !line.is_only_comment() || !line.strings.is_empty() {
            in_code = false;
            continue;
        }
        if comment.starts_with("```") {
            in_code = !in_code;
        }
        let is_fixed = in_code || comment.starts_with('|') || comment.contains("   ") || comment.contains("://");
        let columns = text.chars().count();
        if columns > COMMENT_COLUMNS_MAX && !is_fixed {
            let what = format!("a comment of {columns} columns, at most {COMMENT_COLUMNS_MAX}: wrap it");
            complaints.push(Complaint::new(source, index + 1, what));
        }
    }
    complaints
}

/// The first sentence of documentation has a noun as its subject, not a clause.
fn documentation_names_its_thing(source: &Source) -> Vec<Complaint> {
    let text = |comment: &str| {
        let text = comment.strip_prefix("///").filter(|text| !text.starts_with('/')).or(comment.strip_prefix("//!"));
        text.map(|text| text.trim().to_owned())
    };
    let mut complaints = Vec::new();
    let mut begins = true;
    for (index, line) in source.lines.iter().enumerate() {
        let documentation = text(line.comment.trim()).filter(|_| line.is_only_comment());
        if begins && let Some(words) = &documentation {
            let first = words.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
            if CLAUSES.contains(&first) {
                let what = format!("documentation begins with `{first}`: name the thing, then say what it does");
                complaints.push(Complaint::new(source, index + 1, what));
            }
        }
        begins = documentation.is_none();
    }
    complaints
}

fn cells_and_paragraphs_are_short(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    // The first line of the paragraph, and its characters.
    let mut paragraph = (0, 0);
    let mut last = 0;
    for (number, line) in markdown::prose(&source.text) {
        let line = line.trim();
        let longest =
            line.strip_prefix('|').and_then(|row| row.split('|').map(|cell| cell.trim().chars().count()).max());
        if let Some(chars) = longest.filter(|chars| *chars > CELL_CHARS_MAX) {
            let what = format!("a cell of {chars} characters, at most {CELL_CHARS_MAX}: say it below the table");
            complaints.push(Complaint::new(source, number, what));
        }
        let is_item = ["- ", "* ", "+ "].iter().any(|mark| line.starts_with(mark))
            || line.split_once(". ").is_some_and(|(digits, _)| digits.chars().all(|c| c.is_ascii_digit()));
        let is_text = !line.is_empty() && longest.is_none() && !line.starts_with('#');
        if !is_text || is_item || number != last + 1 || paragraph.1 == 0 {
            paragraph = (number, 0);
        }
        if is_text {
            let before = paragraph.1;
            paragraph.1 += line.chars().count();
            if before <= PARAGRAPH_CHARS_MAX && paragraph.1 > PARAGRAPH_CHARS_MAX {
                let what = format!("a paragraph of more than {PARAGRAPH_CHARS_MAX} characters: split it");
                complaints.push(Complaint::new(source, paragraph.0, what));
            }
        }
        last = number;
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::expect;

    fn rules(sources: &[Source]) -> Vec<Complaint> {
        check_with(sources, &["plan"], &["docs/a.md"])
    }

    fn expect_in(path: &str, text: &str, expected: &[&str]) {
        expect(rules, &[(path, text)], expected);
    }

    #[test]
    fn comments_wider_than_a_hundred_columns_are_wrapped() {
        let words = "x".repeat(93);
        expect_in("crates/a/src/b.rs", &format!("/// {words}xxx\n    // {words}\n"), &[]);
        expect_in("crates/a/src/b.rs", &format!("/// {words}xxxx\n"), &["crates/a/src/b.rs:1: a comment of 101"]);
        expect_in("crates/a/src/b.rs", &format!("    // {words}x\n"), &["crates/a/src/b.rs:1: a comment of 101"]);
        let fixed = ["| a | ", "a    b ", "<https://a.b/> "];
        let fixed: String = fixed.iter().map(|text| format!("//! {text}{words}\n")).collect();
        expect_in("crates/a/src/b.rs", &fixed, &[]);
        let code = format!("/// ```\n/// let x = {words};\n/// ```\n");
        expect_in("crates/a/src/b.rs", &code, &[]);
        expect_in("crates/a/src/b.rs", &format!("{code}// {words}xxxxx\n"), &["crates/a/src/b.rs:4: a comment of 101"]);
        expect_in("crates/a/src/b.rs", &format!("let x = \"\n// {words}xxxxxxx\";\n"), &[]);
    }

    #[test]
    fn documentation_does_not_begin_with_a_clause() {
        for clause in CLAUSES {
            let text =
                format!("//! {clause} is it.\nfn a() {{}}\n\n/// {clause}: it.\n///\n/// {clause} it.\nfn b() {{}}\n");
            let expected = ["crates/plan/src/b.rs:1: documentation", "crates/plan/src/b.rs:4: documentation"];
            expect_in("crates/plan/src/b.rs", &text, &expected);
            expect_in("crates/other/src/b.rs", &text, &[]);
        }
        let fine = "/// The whatever.\n/// What follows.\n// What a comment is.\n//// Who\n/// Whatever it is.\n";
        expect_in("crates/plan/src/b.rs", fine, &[]);
    }

    #[test]
    fn cells_of_a_page_are_short() {
        let cell = "x".repeat(120);
        let row = format!("| a | b |\n|---|---|\n| {cell} | c |\n");
        expect_in("docs/a.md", &row, &[]);
        expect_in(
            "docs/a.md",
            &row.replace("| c", "| x|").replace(&cell, &format!("{cell}x")),
            &["docs/a.md:3: a cell"],
        );
        expect_in("docs/b.md", &row.replace(&cell, &format!("{cell}x")), &[]);
        expect_in("docs/a.md", &format!("```text\n| {cell}x |\n```\n"), &[]);
    }

    #[test]
    fn paragraphs_of_a_page_are_short() {
        let line = "x".repeat(100) + "\n";
        expect_in("docs/a.md", &line.repeat(6), &[]);
        expect_in("docs/a.md", &format!("\n{}", line.repeat(9)), &["docs/a.md:2: a paragraph"]);
        expect_in("docs/a.md", &format!("{}\n{}", line.repeat(6), line.repeat(6)), &[]);
        expect_in("docs/a.md", &format!("- {line}").repeat(9), &[]);
        expect_in("docs/a.md", &format!("{}```\n{}```\n{}", line.repeat(6), line.repeat(9), line.repeat(6)), &[]);
    }
}
