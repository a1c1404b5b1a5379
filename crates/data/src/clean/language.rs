//! The language of a text, from its scripts and trigrams.

use std::fmt;

use whatlang::Lang;

use crate::error::{DataError, Result};

/// A language, by its code in ISO 639-3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Language(Lang);

/// Codes of two letters that people write for the languages that are known.
const SHORT: &[(&str, &str)] = &[
    ("ar", "ara"),
    ("bg", "bul"),
    ("bn", "ben"),
    ("ca", "cat"),
    ("cs", "ces"),
    ("da", "dan"),
    ("de", "deu"),
    ("el", "ell"),
    ("en", "eng"),
    ("es", "spa"),
    ("et", "est"),
    ("fa", "pes"),
    ("fi", "fin"),
    ("fr", "fra"),
    ("he", "heb"),
    ("hi", "hin"),
    ("hr", "hrv"),
    ("hu", "hun"),
    ("id", "ind"),
    ("it", "ita"),
    ("ja", "jpn"),
    ("ko", "kor"),
    ("lt", "lit"),
    ("lv", "lav"),
    ("nb", "nob"),
    ("nl", "nld"),
    ("no", "nob"),
    ("pl", "pol"),
    ("pt", "por"),
    ("ro", "ron"),
    ("ru", "rus"),
    ("sk", "slk"),
    ("sl", "slv"),
    ("sr", "srp"),
    ("sv", "swe"),
    ("th", "tha"),
    ("tr", "tur"),
    ("uk", "ukr"),
    ("ur", "urd"),
    ("vi", "vie"),
    ("zh", "cmn"),
];

impl Language {
    /// The language with a code such as `en` or `eng`.
    ///
    /// # Errors
    /// There is no such code. The message lists those of ISO 639-3 that are known.
    pub fn of_code(code: &str) -> Result<Language> {
        let long = SHORT.iter().find(|(short, _)| *short == code).map_or(code, |(_, long)| long);
        Lang::from_code(long).map(Language).ok_or_else(|| {
            let what = format!("{code:?} is no known language");
            let known: Vec<&str> = Lang::all().iter().map(|language| language.code()).collect();
            DataError::setting("language", what, format!("take one of {}", known.join(", ")))
        })
    }

    /// The language of a text, and a confidence from 0 to 1; `None` for a text without letters.
    pub(super) fn of_text(text: &str) -> Option<(Language, f64)> {
        whatlang::detect(text).map(|found| (Language(found.lang()), found.confidence()))
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_in_their_languages() {
        for (code, text) in [
            ("en", "The quick brown fox jumps over the lazy dog, and everybody watches it from the old bridge."),
            ("de", "Der schnelle braune Fuchs springt über den faulen Hund, und alle sehen ihm von der Brücke aus zu."),
            ("fr", "Le renard brun saute par-dessus le chien paresseux, et tout le monde le regarde depuis le pont."),
            ("ru", "Быстрая лиса прыгает через ленивую собаку, и все смотрят на неё со старого моста."),
            ("ja", "すばしっこい茶色の狐はのろまな犬を飛び越える。"),
        ] {
            let (found, confidence) = Language::of_text(text).unwrap();
            assert_eq!(found, Language::of_code(code).unwrap(), "{code}");
            assert!(confidence > 0.5, "{code} {confidence}");
        }
        assert!(Language::of_text("123 456").is_none());
        let error = Language::of_code("xx").unwrap_err().to_string();
        assert!(error.contains("\"xx\" is no known language; take one of"), "{error}");
    }

    #[test]
    fn short_codes_stand_for_known_languages() {
        for (short, _) in SHORT {
            Language::of_code(short).unwrap();
        }
    }
}
