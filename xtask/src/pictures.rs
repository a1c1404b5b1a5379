//! `cargo xtask pictures`: draws the pictures of the documentation into `docs/pictures`.
//!
//! Every picture is computed by the code that it explains: memory by the lowering, a step by the
//! simulator, plans by the search. So a picture cannot show what the program does not do. With
//! `--check` nothing is written, and a picture that differs from its file fails the command;
//! `cargo xtask test` runs that.

mod data;
mod memory;
mod mesh;
mod schedules;
mod steps;
mod tensor;

use anyhow::{Context, Result};
use std::path::Path;

/// The options of the chore.
#[derive(clap::Args)]
pub struct Options {
    /// Compare with the files instead of writing them.
    #[arg(long)]
    pub check: bool,
}

/// Where the pictures lie, below the root of the repository.
const FOLDER: &str = "docs/pictures";

/// Draws all pictures; true if they were written or, with `--check`, are the files that are there.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let mut same = true;
    for (name, picture) in all()? {
        let path = root.join(FOLDER).join(name);
        if !options.check {
            std::fs::write(&path, picture).with_context(|| format!("cannot write {}", path.display()))?;
            println!("{FOLDER}/{name}");
            continue;
        }
        if !std::fs::read_to_string(&path).is_ok_and(|committed| same_drawing(&committed, &picture)) {
            println!("{FOLDER}/{name} is not what the code draws: run `cargo xtask pictures`");
            same = false;
        }
    }
    Ok(same)
}

/// True if two pictures have the same words and differ at most by a unit in their places: the
/// mathematical functions of another processor may round otherwise.
fn same_drawing(a: &str, b: &str) -> bool {
    fn texts(picture: &str) -> Vec<&str> {
        picture.split("</text>").filter_map(|part| part.rsplit_once('>').map(|(_, text)| text)).collect()
    }
    if texts(a) != texts(b) {
        return false;
    }
    let words = |text: &str| -> Vec<String> {
        text.split(|c: char| !(c.is_ascii_alphanumeric() || ".-".contains(c))).map(str::to_owned).collect()
    };
    let (a, b) = (words(a), words(b));
    let same = |(a, b): (&String, &String)| match (a.parse::<f64>(), b.parse::<f64>()) {
        (Ok(a), Ok(b)) => (a - b).abs() <= 1.0,
        _ => a == b,
    };
    a.len() == b.len() && a.iter().zip(&b).all(same)
}

fn all() -> Result<Vec<(&'static str, String)>> {
    Ok(vec![
        ("memory.svg", memory::picture()?),
        ("mesh.svg", mesh::picture()),
        ("data.svg", data::picture()),
        ("step.svg", steps::sharded()?),
        ("offload.svg", steps::offloaded()?),
        ("plans.svg", steps::plans()?),
        ("schedules.svg", schedules::picture()),
        ("tensor.svg", tensor::picture()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawings_differ_by_words_and_by_more_than_a_unit() {
        let drawn = "<rect x=\"10.0\" class=\"update\"/>";
        assert!(same_drawing(drawn, "<rect x=\"10.4\" class=\"update\"/>"));
        assert!(!same_drawing(drawn, "<rect x=\"12.0\" class=\"update\"/>"));
        assert!(!same_drawing(drawn, "<rect x=\"10.0\" class=\"gather\"/>"));
        assert!(!same_drawing(drawn, "<rect x=\"10.0\"/>"));
        assert!(!same_drawing("<text x=\"1\">rank 3</text>", "<text x=\"1\">rank 4</text>"));
        assert!(same_drawing("<text x=\"1\">rank 3</text>", "<text x=\"1.5\">rank 3</text>"));
    }
}
