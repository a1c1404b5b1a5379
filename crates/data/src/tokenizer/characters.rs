//! One token per character, for small experiments on one text.

use std::collections::BTreeSet;

use crate::error::{DataError, Result};

/// A sorted list of characters. A character's token is its index.
#[derive(Debug)]
pub(super) struct Characters {
    list: Vec<char>,
    /// Token of each of the first 128 code points, the fast path; `u32::MAX` if there is none.
    ascii: [u32; 128],
}

impl Characters {
    pub(super) fn from_text(text: &str) -> Result<Self> {
        Self::from_texts(std::iter::once(Ok(text.to_owned())))
    }

    pub(super) fn from_texts(texts: impl Iterator<Item = Result<String>>) -> Result<Self> {
        let mut set = BTreeSet::new();
        let mut ascii = [false; 128];
        for text in texts {
            for character in text?.chars() {
                match ascii.get_mut(character as usize) {
                    Some(seen) => *seen = true,
                    None => {
                        set.insert(character);
                    }
                }
            }
        }
        set.extend((0u8..128).filter(|&b| ascii[usize::from(b)]).map(char::from));
        Self::new(set.into_iter().collect(), "characters")
    }

    /// From the `characters` of a file, which must be sorted and free of repetitions.
    pub(super) fn from_list(list: &str, origin: &str) -> Result<Self> {
        let list: Vec<char> = list.chars().collect();
        if !list.is_sorted_by(|a, b| a < b) {
            let what = "its characters are not in strictly rising order";
            return Err(DataError::tokenizer(origin, what, "make it again from its text"));
        }
        Self::new(list, origin)
    }

    fn new(list: Vec<char>, origin: &str) -> Result<Self> {
        if list.is_empty() {
            return Err(DataError::tokenizer(origin, "the text has no characters", "give a text that is not empty"));
        }
        let mut ascii = [u32::MAX; 128];
        for (token, &character) in list.iter().enumerate() {
            if let Some(slot) = ascii.get_mut(character as usize) {
                *slot = token as u32;
            }
        }
        Ok(Self { list, ascii })
    }

    pub(super) fn list(&self) -> &[char] {
        &self.list
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = Vec::with_capacity(text.len());
        for character in text.chars() {
            match self.token(character) {
                Some(token) => tokens.push(token),
                None => {
                    return Err(DataError::Vocabulary {
                        origin: "text".into(),
                        what: format!(
                            "the character {character:?} (U+{:04X}) is not among the {} of the character tokenizer",
                            character as u32,
                            self.list.len()
                        ),
                        fix: "make the tokenizer from a text that has it, or take `bytes` or a trained tokenizer"
                            .into(),
                    });
                }
            }
        }
        Ok(tokens)
    }

    fn token(&self, character: char) -> Option<u32> {
        match self.ascii.get(character as usize) {
            Some(&token) => (token != u32::MAX).then_some(token),
            None => self.list.binary_search(&character).ok().map(|place| place as u32),
        }
    }

    pub(super) fn decode(&self, tokens: &[u32]) -> String {
        tokens.iter().map(|&t| self.list.get(t as usize).copied().unwrap_or('\u{FFFD}')).collect()
    }
}
