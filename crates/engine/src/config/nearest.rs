//! The nearest known name, for "did you mean".

/// The candidate with the least edit distance to `name`, if the distance is small enough for a
/// slip: at most two, or a third of the letters if that is more. Among equals a candidate of the
/// same length wins, then the first.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (name.chars().count() / 3).max(2);
    let distances = candidates.into_iter().map(|candidate| (distance(name, candidate), candidate));
    distances
        .filter(|(d, candidate)| *d <= limit && *d < candidate.chars().count())
        .min_by_key(|(d, candidate)| (*d, candidate.chars().count().abs_diff(name.chars().count())))
        .map(|(_, c)| c)
}

/// Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours each cost
/// one.
pub(super) fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // A name far longer than any key is no slip, and a hostile file could make the table below as
    // large as it likes.
    if a.len().abs_diff(b.len()) > 16 {
        return usize::MAX;
    }
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (j, cell) in rows[0].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=a.len() {
        rows[i][0] = i;
        for j in 1..=b.len() {
            let substitution = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = substitution.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_edits_and_swaps() {
        for (a, b, want) in [("steps", "steps", 0), ("stpes", "steps", 1), ("kitten", "sitting", 3), ("", "abc", 3)] {
            assert_eq!(distance(a, b), want, "{a} {b}");
            assert_eq!(distance(b, a), want, "{b} {a}");
        }
    }

    #[test]
    fn only_slips_have_a_nearest() {
        let keys = ["steps", "tokens", "seconds", "learning_rate"];
        assert_eq!(nearest("stpes", keys), Some("steps"));
        assert_eq!(nearest("lerning_rat", keys), Some("learning_rate"));
        assert_eq!(nearest("zzz", keys), None);
        assert_eq!(nearest("llama-71b", ["llama-1b", "llama-70b"]), Some("llama-70b"));
        assert_eq!(nearest(&"x".repeat(100_000), keys), None);
    }
}
