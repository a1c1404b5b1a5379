//! Drops documents that break a rule or are in another language, and masks personal data.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::documents;
use super::language::Language;
use super::output::{Output, Report};
use super::pii::Masks;
use super::quality::Rule;
use crate::corpus::{Corpus, Document};
use crate::error::{DataError, Result};

/// The settings of a filter.
#[derive(Debug, Clone, PartialEq)]
pub struct FilterOptions {
    /// Prefix of the files written.
    pub out: PathBuf,
    /// Rules, applied in this order.
    pub rules: Vec<Rule>,
    /// Languages of which a document must be one; none for any.
    pub languages: Vec<Language>,
    /// Least confidence in a document's language, from 0 to 1.
    pub confidence_min: f64,
    /// True to mask e-mail and IP addresses.
    pub mask_pii: bool,
    /// Number of threads; 0 for one per core.
    pub workers: usize,
}

/// A document after all rules.
struct Judged {
    document: Document,
    /// The text to write, if it differs.
    text: Option<String>,
    reason: Option<String>,
    changes: BTreeSet<&'static str>,
}

/// Writes the documents of `corpus` that pass.
pub fn filter(corpus: &Corpus, options: &FilterOptions) -> Result<Report> {
    if !(0.0..=1.0).contains(&options.confidence_min) {
        let what = format!("is {}", options.confidence_min);
        return Err(DataError::setting("language_confidence", what, "take a number from 0 to 1"));
    }
    if options.rules.is_empty() && options.languages.is_empty() && !options.mask_pii {
        let fix = "name rules or a language, or ask for masks";
        return Err(DataError::setting("rules", "nothing is asked for", fix));
    }
    let mut output = Output::create(&options.out, &[corpus])?;
    let masks = options.mask_pii.then(Masks::new);
    let skipped = documents::map(
        corpus,
        options.workers,
        |document| judge(document, options, masks.as_ref()),
        |judged| {
            let Judged { document, text, reason, changes } = judged;
            let mut line = output.line(corpus, &document);
            line.reason = reason.as_deref();
            // A document that is dropped is written as it was.
            if reason.is_none() {
                line.text = text.as_deref().unwrap_or(&document.text);
                for change in changes {
                    *output.report.changed.entry(change.to_owned()).or_default() += 1;
                }
            }
            output.write(&line)
        },
    )?;
    output.finish(skipped)
}

fn judge(document: Document, options: &FilterOptions, masks: Option<&Masks>) -> Judged {
    let mut judged = Judged { document, text: None, reason: None, changes: BTreeSet::new() };
    let text = judged.document.text.as_str();
    if !options.languages.is_empty() {
        judged.reason = match Language::of_text(text) {
            None => Some("language: none found".to_owned()),
            Some((found, _)) if !options.languages.contains(&found) => Some(format!("language: {found}")),
            Some((found, confidence)) if confidence < options.confidence_min => {
                Some(format!("language: unsure, {found}"))
            }
            Some(_) => None,
        };
        if judged.reason.is_some() {
            return judged;
        }
    }
    for rule in &options.rules {
        let before = judged.text.as_deref().unwrap_or(text);
        match rule.apply(before) {
            Ok(after) if after != before => {
                judged.text = Some(after.into_owned());
                judged.changes.insert("c4: lines removed");
            }
            Ok(_) => {}
            Err(reason) => {
                judged.reason = Some(reason.to_owned());
                return judged;
            }
        }
    }
    if let Some(masks) = masks {
        let masked = masks.apply(judged.text.as_deref().unwrap_or(text));
        if masked.emails > 0 {
            judged.changes.insert("pii: e-mail addresses masked");
        }
        if masked.ips > 0 {
            judged.changes.insert("pii: IP addresses masked");
        }
        if masked.emails + masked.ips > 0 {
            judged.text = Some(masked.text.into_owned());
        }
    }
    judged
}
