//! Words, lines and sentences of a text, as the quality rules count them.

/// The words of a text: runs without white space, whose punctuation at either end is a word for
/// each run of one character.
pub(super) fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::with_capacity(text.len() / 5);
    for run in text.split_whitespace() {
        let core = run.trim_matches(is_edge);
        if core.is_empty() {
            push_punctuation(run, &mut words);
            continue;
        }
        let begin = core.as_ptr() as usize - run.as_ptr() as usize;
        push_punctuation(&run[..begin], &mut words);
        words.push(core);
        push_punctuation(&run[begin + core.len()..], &mut words);
    }
    words
}

/// Characters that are no part of a word at its ends.
fn is_edge(c: char) -> bool {
    !c.is_alphanumeric() && !matches!(c, '$' | '%' | '#' | '@' | '_' | '&' | '+')
}

fn push_punctuation<'t>(text: &'t str, words: &mut Vec<&'t str>) {
    let mut begin = 0;
    let mut last = None;
    for (at, c) in text.char_indices() {
        if last.is_some_and(|last| last != c) {
            words.push(&text[begin..at]);
            begin = at;
        }
        last = Some(c);
    }
    if begin < text.len() {
        words.push(&text[begin..]);
    }
}

/// Number of code points.
pub(super) fn length(text: &str) -> usize {
    if text.is_ascii() { text.len() } else { text.chars().count() }
}

/// Number of sentences: ends of `.`, `!` or `?` before white space or the end, and a rest.
pub(super) fn sentences(text: &str) -> usize {
    let text = text.trim();
    let is_end = |c: char| matches!(c, '.' | '!' | '?' | '…' | '。' | '！' | '？');
    let mut count = 0;
    let mut has_words = false;
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        has_words |= c.is_alphanumeric();
        let ends = characters.peek().is_none_or(|next| next.is_whitespace() || matches!(next, '"' | '\'' | ')' | '”'));
        if has_words && is_end(c) && ends {
            count += 1;
            has_words = false;
        }
    }
    count + usize::from(has_words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn punctuation_is_a_word_of_its_own() {
        assert_eq!(
            words("Well, (yes)... it's #1 \u{2014} 3.5%!"),
            ["Well", ",", "(", "yes", ")", "...", "it's", "#1", "\u{2014}", "3.5%", "!"]
        );
        assert_eq!(words(" \n "), [""; 0]);
    }

    #[test]
    fn sentences_end_at_their_marks() {
        assert_eq!(sentences("One. Two! Three? And 3.5 is no end"), 4);
        assert_eq!(sentences("He said \"no.\" Then..."), 2);
        assert_eq!(sentences(" ... "), 0);
    }
}
