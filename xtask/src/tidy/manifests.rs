//! Rules about `Cargo.toml` files: arrows between crates point downward, and every dependency has
//! its reason.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::{Complaint, Source};

/// Name of the crate that only tests may use, in whichever crate they are.
const TESTING: &str = "testing";
const REASONS: &str = "docs/DEPENDENCIES.md";

/// The crates of this workspace that each crate may use: the floors of docs/ARCHITECTURE.md. A new
/// crate gets a line here.
const ARROWS: [(&str, &[&str]); 22] = [
    ("base", &[]),
    ("testing", &[]),
    // Tests compare the kernels with the oracles of `tensor`, which is the only reason for this
    // upward arrow.
    ("cuda", &["base", "tensor"]),
    ("tensor", &["base", "cuda"]),
    ("autograd", &["base", "tensor"]),
    ("model", &["base", "tensor", "autograd", "program"]),
    ("program", &[]),
    ("record", &["base", "program"]),
    ("comm", &["base", "cuda", "tensor", "program"]),
    ("store", &[]),
    ("data", &["base", "tensor", "store"]),
    ("engine", &["base", "tensor", "autograd", "model", "program", "record", "comm", "data"]),
    ("sim", &["base", "tensor", "autograd", "model", "program"]),
    ("plan", &["base", "tensor", "model", "program", "sim"]),
    ("calibrate", &["base", "tensor", "program", "comm", "engine", "sim"]),
    ("dashboard", &["base"]),
    ("queue", &[]),
    ("observe", &["base", "program", "record", "sim", "plan"]),
    ("tune", &["base"]),
    ("compress", &["base", "tensor", "autograd", "model", "program", "comm", "data", "engine"]),
    (
        "cli",
        &[
            "base",
            "tensor",
            "autograd",
            "model",
            "program",
            "record",
            "comm",
            "data",
            "engine",
            "sim",
            "plan",
            "calibrate",
            "dashboard",
            "observe",
            "queue",
            "tune",
            "compress",
        ],
    ),
    ("xtask", &["base", "cuda", "observe", "plan", "program", "record", "sim", "testing"]),
];

pub fn check(sources: &[Source]) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    let reasons = sources.iter().find(|s| s.path == REASONS);
    for source in sources.iter().filter(|s| s.path == "Cargo.toml" || s.path.ends_with("/Cargo.toml")) {
        let manifest: Table = match source.text.parse() {
            Ok(manifest) => manifest,
            Err(error) => {
                complaints.push(Complaint::new(source, 0, format!("is not TOML: {error}")));
                continue;
            }
        };
        // `fuzz` stands outside of the workspace, because it needs nightly and libFuzzer.
        if source.path == "Cargo.toml" {
            complaints.extend(dependencies_have_reasons(source, &manifest, reasons));
        } else if source.path.starts_with("crates/") || source.path.starts_with("xtask/") {
            complaints.extend(arrows_point_down(source, &manifest));
            complaints.extend(versions_stand_in_one_place(source, &manifest));
        }
    }
    complaints
}

/// The tables of dependencies.
const KINDS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Names and values of the dependency tables of these kinds, also those of targets.
fn dependencies<'a>(manifest: &'a Table, kinds: &[&str]) -> Vec<(&'a String, &'a Value)> {
    let targets = manifest.get("target").and_then(Value::as_table).into_iter().flat_map(Table::values);
    let tables = std::iter::once(manifest).chain(targets.filter_map(Value::as_table));
    tables.flat_map(|t| kinds.iter().filter_map(|kind| t.get(*kind)?.as_table())).flatten().collect()
}

fn arrows_point_down(source: &Source, manifest: &Table) -> Vec<Complaint> {
    let name = source.crate_name().unwrap_or("xtask");
    let Some((_, allowed)) = ARROWS.iter().find(|(from, _)| *from == name) else {
        let what = format!(
            "`{name}` has no floor: add it to ARROWS in xtask/src/tidy/manifests.rs and to docs/ARCHITECTURE.md"
        );
        return vec![Complaint::new(source, 0, what)];
    };
    let ours = |kinds: &[&str]| -> Vec<String> {
        let names = dependencies(manifest, kinds).into_iter().map(|(dependency, _)| dependency);
        names.filter_map(|dependency| dependency.strip_prefix("trainyard-")).map(str::to_owned).collect()
    };
    let built = ours(&["dependencies", "build-dependencies"]).into_iter();
    let tested = ours(&["dev-dependencies"]).into_iter().filter(|to| to != TESTING);
    built
        .chain(tested)
        .filter(|to| to != name && !allowed.contains(&to.as_str())) // itself: tests that need a feature
        .map(|to| Complaint::new(source, 0, format!("`{name}` must not use `{to}`: arrows only point down the floors")))
        .collect()
}

fn versions_stand_in_one_place(source: &Source, manifest: &Table) -> Vec<Complaint> {
    let inherits = |value: &Value| value.get("workspace").and_then(Value::as_bool) == Some(true);
    let stray = dependencies(manifest, &KINDS).into_iter().filter(|(_, value)| !inherits(value));
    stray
        .map(|(name, _)| {
            Complaint::new(
                source,
                0,
                format!("`{name}`: write the version in the root Cargo.toml and `{name}.workspace = true` here"),
            )
        })
        .collect()
}

/// Each outside crate has a row `| crate | why |`, and no row is left from a crate that is gone.
fn dependencies_have_reasons(source: &Source, manifest: &Table, reasons: Option<&Source>) -> Vec<Complaint> {
    let listed = manifest.get("workspace").and_then(|w| w.get("dependencies")).and_then(Value::as_table);
    let used: BTreeSet<&str> = listed
        .into_iter()
        .flat_map(Table::keys)
        .map(String::as_str)
        .filter(|name| !name.starts_with("trainyard"))
        .collect();
    let Some(reasons) = reasons else {
        return vec![Complaint::new(source, 0, format!("{REASONS} is missing"))];
    };
    let rows: Vec<(usize, &str, &str)> = reasons
        .text
        .lines()
        .enumerate()
        .filter_map(|(index, line)| {
            let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
            Some((index + 1, cells.next()?.trim_matches('`'), cells.next()?))
        })
        .filter(|(_, name, _)| *name != "crate" && !name.starts_with('-'))
        .collect();
    let mut complaints = Vec::new();
    for name in &used {
        if !rows.iter().any(|(_, row, why)| row == name && why.len() >= 10) {
            complaints.push(Complaint::new(source, 0, format!("`{name}` has no row with its reason in {REASONS}")));
        }
    }
    for (line, name, _) in &rows {
        if !used.contains(name) {
            complaints.push(Complaint::new(
                reasons,
                *line,
                format!("`{name}` is not in the root Cargo.toml: remove the row"),
            ));
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::expect;

    const TABLE: &str = "| crate | why |\n|---|---|\n| serde | everything is data |\n";
    const ROOT: &str = "[workspace.dependencies]\ntrainyard-data = { path = \"crates/data\" }\nserde = \"1\"\n";

    #[test]
    fn arrows() {
        let uses = |name: &str| format!("[dependencies]\ntrainyard-{name}.workspace = true\n");
        expect(check, &[("crates/model/Cargo.toml", &uses("tensor"))], &[]);
        expect(check, &[("crates/model/Cargo.toml", &uses("model"))], &[]);
        expect(
            check,
            &[("crates/tensor/Cargo.toml", &uses("model"))],
            &["crates/tensor/Cargo.toml: `tensor` must not use `model`"],
        );
        let dev = uses("tensor").replace("dependencies", "target.'cfg(unix)'.dev-dependencies");
        expect(check, &[("crates/program/Cargo.toml", &dev)], &["crates/program/Cargo.toml: `program` must not use"]);
        let testing = uses("testing");
        expect(
            check,
            &[("crates/model/Cargo.toml", &testing)],
            &["crates/model/Cargo.toml: `model` must not use `testing`"],
        );
        expect(check, &[("crates/model/Cargo.toml", &testing.replace("dependencies", "dev-dependencies"))], &[]);
        expect(check, &[("crates/new/Cargo.toml", "")], &["crates/new/Cargo.toml: `new` has no floor"]);
    }

    #[test]
    fn versions() {
        expect(
            check,
            &[("xtask/Cargo.toml", "[dependencies]\nserde = \"1\"\n")],
            &["xtask/Cargo.toml: `serde`: write the version"],
        );
        expect(check, &[("xtask/Cargo.toml", "[dependencies]\nserde = { workspace = true, features = [] }\n")], &[]);
    }

    #[test]
    fn reasons() {
        expect(check, &[("Cargo.toml", ROOT), (REASONS, TABLE)], &[]);
        expect(check, &[("Cargo.toml", ROOT)], &["Cargo.toml: docs/DEPENDENCIES.md is missing"]);
        let more = format!("{ROOT}clap = \"4\"\n");
        expect(check, &[("Cargo.toml", &more), (REASONS, TABLE)], &["Cargo.toml: `clap` has no row"]);
        let stale = format!("{TABLE}| `gone` | it was needed once |\n");
        expect(check, &[("Cargo.toml", ROOT), (REASONS, &stale)], &["docs/DEPENDENCIES.md:4: `gone` is not"]);
    }

    #[test]
    fn broken_manifests_are_complaints() {
        expect(check, &[("xtask/Cargo.toml", "[")], &["xtask/Cargo.toml: is not TOML"]);
    }
}
