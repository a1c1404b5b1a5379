//! Rules about all text: it mentions nothing of one machine, and its links resolve.

use std::collections::BTreeSet;

use super::{Complaint, Source};
use crate::markdown;

/// Prefixes of home folders. They are split so that this file does not contain them.
const MACHINE_PATHS: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];

pub fn check(sources: &[Source]) -> Vec<Complaint> {
    let mut complaints: Vec<Complaint> = sources.iter().flat_map(machine_paths).collect();
    complaints.extend(links_resolve(sources));
    complaints
}

/// A path of one machine works on no other. If a path is needed, it comes from an argument or the
/// environment.
fn machine_paths(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        for path in MACHINE_PATHS {
            // `framework/` and addresses contain these letters too; a path begins where no word
            // ends.
            let begins = |at: usize| {
                !line[..at].ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | '}'))
            };
            if line.match_indices(path).any(|(at, _)| begins(at)) {
                complaints.push(Complaint::new(source, index + 1, format!("`{path}` is a path of one machine")));
            }
        }
    }
    complaints
}

fn links_resolve(sources: &[Source]) -> Vec<Complaint> {
    let mut files: BTreeSet<&str> = sources.iter().map(|s| s.path.as_str()).collect();
    let folders: Vec<&str> =
        sources.iter().flat_map(|s| s.path.match_indices('/').map(|(at, _)| &s.path[..at])).collect();
    files.extend(folders);
    let mut complaints = Vec::new();
    for source in sources.iter().filter(|s| s.path.ends_with(".md")) {
        for link in markdown::links(&source.text) {
            let outside = ["http://", "https://", "mailto:"].iter().any(|scheme| link.target.starts_with(scheme));
            if outside || link.target.is_empty() {
                continue;
            }
            let (path, anchor) = link.target.split_once('#').unwrap_or((&link.target, ""));
            let target = if path.is_empty() { source.path.clone() } else { resolve(&source.path, path) };
            if !files.contains(target.as_str()) {
                complaints.push(Complaint::new(
                    source,
                    link.line,
                    format!("link to `{}`, which is not there", link.target),
                ));
                continue;
            }
            let page = sources.iter().find(|s| s.path == target && s.path.ends_with(".md"));
            if let Some(page) = page
                && !anchor.is_empty()
                && !markdown::anchors(&page.text).iter().any(|a| a == anchor)
            {
                complaints.push(Complaint::new(
                    source,
                    link.line,
                    format!("link to `{}`: no such heading", link.target),
                ));
            }
        }
    }
    complaints
}

/// Resolves `path` against the folder of `from`, both relative to the root.
fn resolve(from: &str, path: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::expect;

    #[test]
    fn machine_paths_are_found() {
        let path = format!("see `{}x`\n", MACHINE_PATHS[0]);
        expect(check, &[("a.md", &path)], &["a.md:1: `"]);
        expect(check, &[("a.sh", &format!("x={}me", MACHINE_PATHS[2]))], &["a.sh:1: `"]);
        expect(
            check,
            &[("a.md", &format!("https://x.org{}y, frame{}", MACHINE_PATHS[0], &MACHINE_PATHS[0][1..]))],
            &[],
        );
    }

    #[test]
    fn links_lead_somewhere() {
        let page = "[a](../README.md) [b](c/d.md#Not) [e](c/d.md#here) [f](gone.md) [g](#top) [h](https://x.org) [i](c)\n# Top\n";
        let files = [("README.md", ""), ("docs/page.md", page), ("docs/c/d.md", "## Here\n")];
        expect(
            check,
            &files,
            &["docs/page.md:1: link to `c/d.md#Not`: no such", "docs/page.md:1: link to `gone.md`, which"],
        );
    }
}
