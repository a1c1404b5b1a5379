//! The little of Markdown that the chores read: links, headings and fenced blocks.
//!
//! Code, fenced or between backticks, is left out of links and headings. Reference-style links are
//! not read, because the project does not use them.

/// A link with the line that it stands on, counted from 1.
#[derive(Debug, PartialEq, Eq)]
pub struct Link {
    /// Target as written: a path, an `#anchor`, a path with anchor, or an address.
    pub target: String,
    /// Line number, counted from 1.
    pub line: usize,
}

/// The lines outside of fenced blocks, with their numbers from 1.
pub fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence: Option<&str> = None;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let start = line.trim_start();
        let marker = if start.starts_with("```") { "```" } else { "~~~" };
        if start.starts_with(marker) {
            match fence {
                None => fence = Some(marker),
                Some(open) if open == marker => fence = None,
                Some(_) => {}
            }
            return None;
        }
        fence.is_none().then_some((index + 1, line))
    })
}

/// `line` with everything between backticks removed.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// Inline links and images, `[text](target)`, in order.
pub fn links(text: &str) -> Vec<Link> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let line = without_code(line);
        let mut rest = line.as_str();
        while let Some(start) = rest.find("](") {
            rest = &rest[start + 2..];
            let Some(end) = rest.find(')') else { break };
            let target = rest[..end].split_whitespace().next().unwrap_or("").to_owned();
            found.push(Link { target, line: number });
            rest = &rest[end + 1..];
        }
    }
    found
}

/// The anchors of the headings, formed as GitHub does: lower case, punctuation dropped, spaces to
/// hyphens.
pub fn anchors(text: &str) -> Vec<String> {
    let mut slugs: Vec<String> = Vec::new();
    let mut anchors = Vec::new();
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let slug: String = kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect();
        let repeats = slugs.iter().filter(|s| **s == slug).count();
        anchors.push(if repeats == 0 { slug.clone() } else { format!("{slug}-{repeats}") });
        slugs.push(slug);
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_of_code() {
        let text = "See [a](b.md) and ![c](d.png \"title\").\n```\n[no](x)\n```\n`[no](y)` [e](#f)\n";
        let found: Vec<_> = links(text).into_iter().map(|l| (l.target, l.line)).collect();
        assert_eq!(found, [("b.md".into(), 1), ("d.png".into(), 1), ("#f".into(), 5)]);
    }

    #[test]
    fn anchors_follow_github() {
        let text = "# One `two`, three!\n## A-b_c\n## A-b_c\n## A-b_c\n#not\n```\n# no\n```\n";
        assert_eq!(anchors(text), ["one-two-three", "a-b_c", "a-b_c-1", "a-b_c-2"]);
    }
}
