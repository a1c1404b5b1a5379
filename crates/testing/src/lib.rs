//! Things that tests of several crates share: lines that say what a test left out, and the text and
//! the models of small runs.
//!
//! A test that returns early counts as passed, and nobody learns that nothing was tested. Such a
//! test calls [`skip`], [`skip_part`] or [`cases`] instead of being silent. Each writes a line of
//! its own to the test's output; `cargo xtask test` reads these lines, counts them and names the
//! tests at its end. `cargo test` shows them with `--nocapture`.
//!
//! It is a dev-dependency, which depends on nothing. `cargo xtask test` alone builds with it, to
//! read the lines.

use std::fmt::Display;

/// The environment variable under which sweeps run in full; `cargo xtask test --all` sets it.
pub const ALL: &str = "TRAINYARD_TEST_ALL";

/// Begins the line of a test that tested nothing.
pub const SKIPPED: &str = "test skipped: ";
/// Begins the line of a test that left out a part.
pub const IN_PART: &str = "test in part: ";
/// Begins the line of a sweep that ran fewer cases than it has.
pub const REDUCED: &str = "test reduced: ";

/// The environment variable with the folder in which tests leave results for a page of the
/// documentation.
pub const RESULTS: &str = "TRAINYARD_TEST_RESULTS";

/// Writes the results of a test to `NAME.json` in the folder that [`RESULTS`] names, if it is set.
///
/// # Errors
/// If the file cannot be written.
pub fn record(name: &str, json: &str) -> std::io::Result<()> {
    let Some(folder) = std::env::var_os(RESULTS) else { return Ok(()) };
    std::fs::write(std::path::Path::new(&folder).join(format!("{name}.json")), json)
}

/// Says that the calling test tests nothing here, and why. The test returns after it.
///
/// ```
/// if !std::path::Path::new("/dev/null").exists() {
///     return trainyard_testing::skip("there is no /dev/null");
/// }
/// ```
pub fn skip(reason: impl Display) {
    println!("\n{SKIPPED}{reason}");
}

/// Says that the calling test leaves out a part of what it tests, and why.
pub fn skip_part(reason: impl Display) {
    println!("\n{IN_PART}{reason}");
}

/// The number of cases for a sweep of `all` cases: `few`, or `all` where the variable [`ALL`] is
/// set. Says so where it is fewer. `what` names the cases, in the plural.
pub fn cases(what: &str, few: u64, all: u64) -> u64 {
    choose(std::env::var_os(ALL).is_some(), what, few, all)
}

fn choose(in_full: bool, what: &str, few: u64, all: u64) -> u64 {
    if in_full || few >= all {
        return all;
    }
    println!("\n{REDUCED}{few} of {all} {what}");
    few
}

/// Numbers as words, the same every time: a text that a small model learns something of.
pub fn text(words: usize) -> String {
    (0..words).map(|i| format!("{} ", (i * 7919) % 311)).collect()
}

/// The `[model]` section of a Llama that makes a step in milliseconds: grouped queries, 61 tokens.
pub fn tiny_llama(layers: usize) -> String {
    format!(
        "[model]\nfamily = 'llama'\ndim = 32\nlayers = {layers}\nheads = 4\nkv_heads = 2\nffn_dim = 64\nvocab_size = 61\n\
         max_sequence_length = 64\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_is_full_where_all_is_asked_for_or_it_is_short() {
        assert_eq!(choose(false, "seeds", 12, 100), 12);
        assert_eq!(choose(true, "seeds", 12, 100), 100);
        assert_eq!(choose(false, "seeds", 100, 12), 12);
    }
}
