//! Rules that judge a document by counting: Gopher, C4 and FineWeb.
//!
//! The thresholds are those of the papers and of datatrove, in whose order the rules are applied.
//! Words and sentences are divided by [`words`](super::words), not by a language's own tokenizer.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use xxhash_rust::xxh3::xxh3_64;

use super::words::{length, sentences, words};

/// A set of rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Lengths, symbols and stop words (Rae et al. 2021, table A1; English stop words).
    GopherQuality,
    /// Repeated lines, paragraphs and n-grams (the same).
    GopherRepetition,
    /// C4 (Raffel et al. 2020): drops lines, and documents that then have too little.
    C4,
    /// C4 without its rule that a line ends in punctuation, as FineWeb uses it.
    C4Lenient,
    /// FineWeb (Penedo et al. 2024): punctuation, short and repeated lines.
    FineWeb,
}

impl Rule {
    /// All rules with their names.
    pub const ALL: [(&'static str, Rule); 5] = [
        ("gopher-quality", Rule::GopherQuality),
        ("gopher-repetition", Rule::GopherRepetition),
        ("c4", Rule::C4),
        ("c4-lenient", Rule::C4Lenient),
        ("fineweb", Rule::FineWeb),
    ];

    /// Judges a text: what is left of it, or the reason to drop it.
    pub(super) fn apply<'t>(self, text: &'t str) -> Result<Cow<'t, str>, &'static str> {
        let whole = |fault: Option<&'static str>| fault.map_or(Ok(Cow::Borrowed(text)), Err);
        match self {
            Rule::GopherQuality => whole(gopher_quality(text)),
            Rule::GopherRepetition => whole(gopher_repetition(text)),
            Rule::C4 => c4(text, Endings::Required).map(Cow::Owned),
            Rule::C4Lenient => c4(text, Endings::Free).map(Cow::Owned),
            Rule::FineWeb => whole(fineweb(text)),
        }
    }
}

/// A part of a whole; 0 of nothing.
fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn gopher_quality(text: &str) -> Option<&'static str> {
    const STOP_WORDS: [&str; 8] = ["the", "be", "to", "of", "and", "that", "have", "with"];
    let words = words(text);
    let (mut plain, mut letters, mut alphabetic) = (0, 0, 0);
    for word in &words {
        if word.chars().any(|c| !is_punctuation(c)) {
            plain += 1;
            letters += length(word);
        }
        alphabetic += usize::from(word.chars().any(char::is_alphabetic));
    }
    let mean = share(letters, plain);
    let lines: Vec<&str> = text.lines().collect();
    let lines_that = |test: fn(&&str) -> bool| share(lines.iter().copied().filter(test).count(), lines.len());
    let symbols = |count: usize| share(count, words.len()) > 0.1;
    Some(match () {
        () if plain < 50 => "gopher: fewer than 50 words",
        () if plain > 100_000 => "gopher: more than 100,000 words",
        () if mean < 3.0 => "gopher: words of fewer than 3 characters on average",
        () if mean > 10.0 => "gopher: words of more than 10 characters on average",
        () if symbols(text.matches('#').count()) => "gopher: too many hash signs",
        () if symbols(text.matches("...").count() + text.matches('…').count()) => "gopher: too many ellipses",
        () if lines_that(|line| line.trim_start().starts_with(['•', '-'])) > 0.9 => {
            "gopher: nearly all lines are bullets"
        }
        () if lines_that(|line| line.trim_end().ends_with("...") || line.trim_end().ends_with('…')) > 0.3 => {
            "gopher: too many lines end in an ellipsis"
        }
        () if share(alphabetic, words.len()) < 0.8 => "gopher: too many words without letters",
        () if STOP_WORDS.iter().filter(|stop| words.contains(stop)).count() < 2 => "gopher: fewer than 2 stop words",
        () => return None,
    })
}

/// The characters of which a word that is none consists, as in datatrove.
fn is_punctuation(c: char) -> bool {
    const MARKS: &str = "!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»";
    match c.is_ascii() {
        true => c.is_ascii_punctuation() || (c.is_ascii_control() && c != '\t' && c != '\n'),
        false => c.is_control() || MARKS.contains(c),
    }
}

/// Elements that occurred before, and their characters.
fn duplicates<'t>(elements: impl Iterator<Item = &'t str>) -> (usize, usize, usize) {
    let mut seen = HashSet::new();
    let (mut all, mut again, mut characters) = (0, 0, 0);
    for element in elements {
        all += 1;
        if !seen.insert(element) {
            again += 1;
            characters += length(element);
        }
    }
    (all, again, characters)
}

fn gopher_repetition(text: &str) -> Option<&'static str> {
    let characters = length(text);
    // Two or more line ends divide paragraphs; an odd one out begins the next, as in the original.
    let paragraphs = text.trim().split("\n\n").map(|paragraph| paragraph.trim_matches('\n'));
    let (all, again, of_them) = duplicates(paragraphs.filter(|paragraph| !paragraph.is_empty()));
    if share(again, all) > 0.3 {
        return Some("gopher: repeated paragraphs");
    }
    if share(of_them, characters) > 0.2 {
        return Some("gopher: characters in repeated paragraphs");
    }
    let (all, again, of_them) = duplicates(text.split('\n').filter(|line| !line.is_empty()));
    if share(again, all) > 0.3 {
        return Some("gopher: repeated lines");
    }
    if share(of_them, characters) > 0.2 {
        return Some("gopher: characters in repeated lines");
    }
    let words = words(text);
    let hashes: Vec<u64> = words.iter().map(|word| xxh3_64(word.as_bytes())).collect();
    // Sums of lengths, so that an n-gram's length is one difference.
    let mut lengths = vec![0];
    lengths.extend(words.iter().scan(0, |sum, word| {
        *sum += length(word);
        Some(*sum)
    }));
    const TOP: [(usize, f64, &str); 3] = [
        (2, 0.20, "gopher: one 2-gram is too much of the text"),
        (3, 0.18, "gopher: one 3-gram is too much of the text"),
        (4, 0.16, "gopher: one 4-gram is too much of the text"),
    ];
    for (n, most, reason) in TOP {
        if share(top_gram(&hashes, &lengths, n), characters) > most {
            return Some(reason);
        }
    }
    const AGAIN: [(usize, f64, &str); 6] = [
        (5, 0.15, "gopher: characters in repeated 5-grams"),
        (6, 0.14, "gopher: characters in repeated 6-grams"),
        (7, 0.13, "gopher: characters in repeated 7-grams"),
        (8, 0.12, "gopher: characters in repeated 8-grams"),
        (9, 0.11, "gopher: characters in repeated 9-grams"),
        (10, 0.10, "gopher: characters in repeated 10-grams"),
    ];
    AGAIN
        .iter()
        .find(|(n, most, _)| share(repeated_grams(&hashes, &lengths, *n), characters) > *most)
        .map(|found| found.2)
}

/// A hash of the words of an n-gram.
fn gram(hashes: &[u64]) -> u64 {
    hashes.iter().fold(0u64, |key, hash| (key ^ hash).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

/// Characters of the most frequent n-gram, times its frequency; the first of several.
fn top_gram(hashes: &[u64], lengths: &[usize], n: usize) -> usize {
    let mut counts: HashMap<u64, (usize, usize)> = HashMap::new();
    for (at, window) in hashes.windows(n).enumerate() {
        counts.entry(gram(window)).or_insert((0, at)).0 += 1;
    }
    let top = counts.values().max_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    // With spaces between its words.
    top.map_or(0, |&(count, at)| count * (lengths[at + n] - lengths[at] + n - 1))
}

/// Characters in n-grams that occurred before, without overlap.
fn repeated_grams(hashes: &[u64], lengths: &[usize], n: usize) -> usize {
    let (mut seen, mut characters, mut at) = (HashSet::new(), 0, 0);
    while at + n <= hashes.len() {
        if seen.insert(gram(&hashes[at..at + n])) {
            at += 1;
        } else {
            characters += lengths[at + n] - lengths[at];
            at += n;
        }
    }
    characters
}

/// True if a line must end in punctuation.
#[derive(PartialEq, Eq, Clone, Copy)]
enum Endings {
    Required,
    Free,
}

fn c4(text: &str, endings: Endings) -> Result<String, &'static str> {
    const POLICY: [&str; 6] =
        ["terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"];
    let mut kept = Vec::new();
    let mut count = 0;
    for line in text.lines() {
        let line = line.trim();
        let mut words = 0;
        let too_long = line.split_whitespace().inspect(|_| words += 1).filter(|word| length(word) > 1000).count() > 0;
        if too_long {
            continue;
        }
        let line = without_citations(line);
        let ends = line.ends_with(['.', '?', '!', '"', '\'']) && !line.ends_with("...");
        if (endings == Endings::Required && !ends) || words < 3 {
            continue;
        }
        let lower = line.to_lowercase();
        if lower.contains("lorem ipsum") {
            return Err("c4: lorem ipsum");
        }
        if lower.contains("javascript") {
            continue;
        }
        if line.contains('{') {
            return Err("c4: a curly bracket");
        }
        if POLICY.iter().any(|phrase| lower.contains(phrase)) {
            continue;
        }
        count += sentences(&line);
        kept.push(line);
    }
    if count < 5 {
        return Err("c4: fewer than 5 sentences");
    }
    Ok(kept.join("\n").trim().to_owned())
}

/// A line without `[12]`, `[]`, `[edit]` and `[citation needed]`.
fn without_citations(line: &str) -> Cow<'_, str> {
    if !line.contains('[') {
        return Cow::Borrowed(line);
    }
    let mut left = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('[') {
        left.push_str(before);
        let citation = after.split_once(']').filter(|(inside, _)| {
            inside.bytes().all(|byte| byte.is_ascii_digit()) || *inside == "edit" || *inside == "citation needed"
        });
        rest = match citation {
            Some((_, behind)) => behind,
            None => {
                left.push('[');
                after
            }
        };
    }
    left.push_str(rest);
    Cow::Owned(left)
}

fn fineweb(text: &str) -> Option<&'static str> {
    let lines: Vec<&str> = text.split('\n').filter(|line| !line.trim().is_empty()).collect();
    let is_end = |c: char| {
        matches!(c, '.' | '!' | '?' | '。' | '！' | '？' | '．' | '؟' | '۔' | '।' | '…' | '⁇' | '⁈' | '⁉' | '‼')
    };
    let ending = lines.iter().filter(|line| line.ends_with(is_end)).count();
    let short = lines.iter().filter(|line| length(line) <= 30).count();
    let (_, _, again) = duplicates(lines.iter().copied());
    let ends = text.matches('\n').count();
    Some(match () {
        () if lines.is_empty() => "fineweb: no lines",
        () if share(ending, lines.len()) < 0.12 => "fineweb: too few lines end in punctuation",
        () if share(short, lines.len()) > 0.67 => "fineweb: too many short lines",
        () if share(again, length(text) - ends) > 0.01 => "fineweb: characters in repeated lines",
        () if share(ends, words(text).len()) > 0.3 => "fineweb: too many lines for its words",
        () => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "The railway that we have built with our hands is to be opened in the spring of the year. \
        It runs along the river, and it crosses three bridges. Engines of every kind are welcome to it! \
        Would you like to see the old station? Bring a lamp, because the tunnel is dark. \
        Everybody who has worked on the line will be there with their families, and there will be music.";

    #[test]
    fn a_good_text_passes_every_rule() {
        for (name, rule) in Rule::ALL {
            assert_eq!(rule.apply(GOOD).as_deref(), Ok(GOOD), "{name}");
        }
    }

    #[test]
    fn each_rule_has_a_text_that_it_drops() {
        let long_words = "antidisestablishmentarianism ".repeat(60);
        let cases: [(Rule, String, &str); 16] = [
            (Rule::GopherQuality, "Too short.".into(), "fewer than 50"),
            (Rule::GopherQuality, "a b of ".repeat(30), "fewer than 3 char"),
            (Rule::GopherQuality, long_words, "more than 10"),
            (Rule::GopherQuality, GOOD.replace(' ', " # "), "hash signs"),
            (Rule::GopherQuality, GOOD.replace(' ', "... "), "ellipses"),
            (
                Rule::GopherQuality,
                GOOD.replace(". ", ".\n- ").replacen("The", "- The", 1).replace("! ", "!\n- ").replace("? ", "?\n- "),
                "bullets",
            ),
            (Rule::GopherQuality, format!("{GOOD} {}", "12 34 56 ".repeat(12)), "without letters"),
            (Rule::GopherQuality, GOOD.to_uppercase(), "stop words"),
            (Rule::GopherRepetition, format!("{GOOD}\n\n{GOOD}"), "repeated paragraphs"),
            (Rule::GopherRepetition, format!("{GOOD}\nx\ny\n{GOOD}"), "characters in repeated lines"),
            (Rule::GopherRepetition, "hello world ".repeat(20), "2-gram"),
            (Rule::GopherRepetition, format!("{GOOD} {GOOD}"), "repeated 5-grams"),
            (Rule::C4, "No end\nno end here either".into(), "5 sentences"),
            (Rule::C4, format!("{GOOD}\nfunction that is f() {{ x }}."), "curly"),
            (Rule::FineWeb, "one\ntwo\nthree.".into(), "short lines"),
            (Rule::FineWeb, "no end of this line in a long text of words\n".repeat(9), "punctuation"),
        ];
        for (rule, text, words) in cases {
            let reason = rule.apply(&text).expect_err(words);
            assert!(reason.contains(words), "{reason} for {words}");
        }
    }

    #[test]
    fn c4_keeps_the_lines_that_it_wants() {
        let text =
            format!("Home\n{GOOD}[12][edit]\nThis site uses cookies for you.\nPlease enable javascript now.\n[a] See.");
        assert_eq!(Rule::C4.apply(&text).as_deref(), Ok(GOOD));
        assert_eq!(without_citations("a[1] b[x] c[citation needed]["), "a b[x] c[");
    }
}
