//! The pipeline: one thread reads and divides documents, several encode, and the caller's thread
//! takes the results in order.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::chat::{Chat, Conversation};
use crate::corpus::{Corpus, Document, OnInvalid, Skipped};
use crate::error::{DataError, Result};
use crate::ordered::{self, JOB_BYTES};
use crate::tokenizer::Tokenizer;

/// The part that a text belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TargetSplit {
    Train,
    Validation,
}

/// Tokens of one piece of text, in reading order.
pub(super) struct Encoded {
    pub(super) part: TargetSplit,
    /// True if the document ends here.
    pub(super) ends_document: bool,
    /// True if the document ends here for this part, which it also does where it is cut between the
    /// parts.
    pub(super) ends_part: bool,
    pub(super) tokens: Vec<u32>,
    /// Of each token whether it is learned; None for plain text, of which all are.
    pub(super) learned: Option<Vec<bool>>,
    /// True if the end-of-text token belongs behind the document.
    pub(super) wants_end: bool,
    /// True for a record without a conversation, where those are skipped.
    pub(super) invalid: bool,
    /// Bytes of the text that is learned.
    pub(super) text_bytes: u64,
}

/// The rule that decides which documents validate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Split {
    fraction: f64,
    seed: u64,
    /// Documents with a hash below this value validate.
    threshold: u64,
    /// Approximate bytes of text that should validate.
    wanted: f64,
    /// True once the threshold was moved to fill an empty side. It is not moved again.
    is_repaired: bool,
    /// The hash of a document (or of several equal ones) that is too large to validate whole, and
    /// the share of its characters that validates.
    divided: Option<(u64, f64)>,
}

/// The counts of a pass.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) documents: u64,
    pub(super) by_position: bool,
    pub(super) skipped: Skipped,
    /// Number of documents that validate whole, and of those whose end validates.
    validation_documents: u64,
    pub(super) divided_documents: u64,
    text_bytes: u64,
    /// The lowest hash of a document, and its bytes of text.
    hash_min: Option<(u64, u64)>,
    hash_max: Option<u64>,
}

/// Minimum bytes of text for validation. Fewer say nothing about a model.
const VALIDATION_BYTES_MIN: f64 = 256.0;

impl Split {
    /// The split for files of `bytes` bytes.
    pub(super) fn new(fraction: f64, seed: u64, bytes: u64) -> Self {
        let wanted = wanted(fraction, bytes);
        // 2^64 x fraction. The conversion saturates, and a fraction of 0 selects no document.
        Self { fraction, seed, threshold: (fraction * 2f64.powi(64)) as u64, wanted, is_repaired: false, divided: None }
    }

    /// Another split, if a side that was asked for stayed empty although there are several
    /// documents. A document at the border moves to that side, or only its end if the whole would
    /// be more than twice the wanted amount, as with a corpus of a few books. All equal documents
    /// move the same way.
    pub(super) fn repaired(&self, counts: &Counts) -> Option<Self> {
        let ((low, bytes), high) = (counts.hash_min?, counts.hash_max?);
        if self.is_repaired || self.fraction == 0.0 || counts.by_position {
            return None;
        }
        let all_validate = counts.validation_documents == counts.documents;
        if !all_validate && counts.validation_documents + counts.divided_documents > 0 {
            return None;
        }
        let repaired = Self { is_repaired: true, ..*self };
        let wanted = wanted(self.fraction, counts.text_bytes);
        Some(match bytes as f64 > 2.0 * wanted {
            _ if low == high => Self { threshold: 0, divided: Some((low, self.fraction)), ..repaired },
            _ if all_validate => Self { threshold: high, ..repaired },
            true => Self { threshold: 0, divided: Some((low, wanted / bytes as f64)), ..repaired },
            false => Self { threshold: low + 1, ..repaired },
        })
    }

    /// The share of a document's characters that validates: none, all, or those at its end.
    fn share(&self, hash: u64, bytes: u64) -> f64 {
        match self.divided {
            Some((of, share)) if of == hash => share,
            _ if hash >= self.threshold => 0.0,
            _ if bytes as f64 > 2.0 * self.wanted => self.wanted / bytes as f64,
            _ => 1.0,
        }
    }

    fn hash(&self, text: &str) -> u64 {
        xxh3_64_with_seed(text.as_bytes(), self.seed)
    }
}

/// Bytes of text that should validate among `bytes`.
fn wanted(fraction: f64, bytes: u64) -> f64 {
    (fraction * bytes as f64).max(VALIDATION_BYTES_MIN)
}

/// A piece of text on its way to a worker.
struct Piece {
    part: TargetSplit,
    begins_document: bool,
    ends_document: bool,
    ends_part: bool,
    file: usize,
    line: u64,
    text: String,
}

/// Takes pieces from the reader to the workers.
type Outlet = ordered::Outlet<Vec<Piece>, Result<Vec<Encoded>>>;

/// Encodes the whole corpus with `workers` threads. `take` gets every piece in reading order.
pub(super) fn run(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    chat: Option<&Chat>,
    split: Split,
    workers: usize,
    mut take: impl FnMut(Encoded) -> Result<()>,
) -> Result<Counts> {
    ordered::run(
        workers,
        "encoding text",
        |outlet| read(corpus, tokenizer, chat.is_some(), split, outlet),
        |pieces: Vec<Piece>| pieces.into_iter().map(|piece| encode(corpus, tokenizer, chat, piece)).collect(),
        |encoded: Result<Vec<Encoded>>| encoded?.into_iter().try_for_each(&mut take),
    )
}

/// Reads and divides documents. Those that are `whole` are not divided.
fn read(corpus: &Corpus, tokenizer: &Tokenizer, whole: bool, split: Split, outlet: &Outlet) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut batch = Batch { pieces: Vec::new(), bytes: 0, whole };
    let mut documents = corpus.documents();
    let first = documents.next().transpose()?;
    let second = documents.next().transpose()?;
    let is_single = first.is_some() && second.is_none();
    for document in first.into_iter().chain(second).map(Ok).chain(documents.by_ref()) {
        let Document { text, file, line } = document?;
        let file = (file, line);
        counts.documents += 1;
        let going_on = if is_single && split.fraction > 0.0 && whole {
            return Err(DataError::TooLittle {
                what: "one conversation cannot be divided between training and validation".into(),
                fix: "give more of them, or set the validation fraction to 0".into(),
            });
        } else if is_single && split.fraction > 0.0 {
            counts.by_position = true;
            counts.divided_documents += 1;
            let (train, validation) = divide(&text, split.fraction)?;
            batch.add(tokenizer, TargetSplit::Train, file, train, Cut::BEGIN, outlet)
                && batch.add(tokenizer, TargetSplit::Validation, file, validation, Cut::END, outlet)
        } else {
            let hash = split.hash(&text);
            let bytes = text.len() as u64;
            counts.text_bytes += bytes;
            counts.hash_min = Some(counts.hash_min.map_or((hash, bytes), |low| low.min((hash, bytes))));
            counts.hash_max = Some(counts.hash_max.map_or(hash, |high| high.max(hash)));
            let share = split.share(hash, bytes);
            let share = if whole { share.ceil() } else { share };
            if share > 0.0 && share < 1.0 {
                counts.divided_documents += 1;
                let (train, validation) = divide(&text, share)?;
                batch.add(tokenizer, TargetSplit::Train, file, train, Cut::BEGIN, outlet)
                    && batch.add(tokenizer, TargetSplit::Validation, file, validation, Cut::END, outlet)
            } else {
                let part = if share == 1.0 { TargetSplit::Validation } else { TargetSplit::Train };
                counts.validation_documents += u64::from(part == TargetSplit::Validation);
                batch.add(tokenizer, part, file, &text, Cut::WHOLE, outlet)
            }
        };
        if !going_on {
            return Ok(counts); // the other side has its own error to report
        }
    }
    if !batch.pieces.is_empty() {
        outlet.send(batch.pieces);
    }
    counts.skipped = documents.skipped();
    Ok(counts)
}

/// Divides a document: the last `fraction` of its characters validates.
fn divide(text: &str, fraction: f64) -> Result<(&str, &str)> {
    let characters = text.chars().count();
    let train = (characters as f64 * (1.0 - fraction)) as usize;
    if train == 0 || train == characters {
        return Err(DataError::TooLittle {
            what: format!("a text of {characters} characters cannot give {fraction} of them to validation"),
            fix: "give more text, or set the validation fraction to 0".into(),
        });
    }
    let middle = text.char_indices().nth(train).map_or(text.len(), |(at, _)| at);
    Ok(text.split_at(middle))
}

/// The ends of a document that a text has.
#[derive(Clone, Copy)]
struct Cut {
    begins: bool,
    ends: bool,
}

impl Cut {
    const WHOLE: Cut = Cut { begins: true, ends: true };
    const BEGIN: Cut = Cut { begins: true, ends: false };
    const END: Cut = Cut { begins: false, ends: true };
}

/// Pieces collected until they are worth a job.
struct Batch {
    pieces: Vec<Piece>,
    bytes: usize,
    /// True if documents are not cut.
    whole: bool,
}

impl Batch {
    fn add(
        &mut self,
        tokenizer: &Tokenizer,
        part: TargetSplit,
        (file, line): (usize, u64),
        text: &str,
        cut: Cut,
        outlet: &Outlet,
    ) -> bool {
        let pieces = if self.whole { vec![text] } else { tokenizer.pieces(text, JOB_BYTES) };
        let last = pieces.len() - 1;
        for (number, piece) in pieces.into_iter().enumerate() {
            self.bytes += piece.len();
            self.pieces.push(Piece {
                part,
                begins_document: cut.begins && number == 0,
                ends_document: cut.ends && number == last,
                ends_part: number == last,
                file,
                line,
                text: piece.to_owned(),
            });
            if self.bytes >= JOB_BYTES {
                self.bytes = 0;
                if !outlet.send(std::mem::take(&mut self.pieces)) {
                    return false;
                }
            }
        }
        true
    }
}

fn encode(corpus: &Corpus, tokenizer: &Tokenizer, chat: Option<&Chat>, piece: Piece) -> Result<Encoded> {
    if let Some(chat) = chat {
        return encode_conversation(corpus, tokenizer, chat, &piece);
    }
    let mut tokens = if piece.begins_document { tokenizer.before().to_vec() } else { Vec::new() };
    let encoded = tokenizer.encode_ordinary(&piece.text).map_err(|error| match error {
        DataError::Vocabulary { what, fix, .. } => {
            DataError::Vocabulary { origin: corpus.files()[piece.file].path.display().to_string(), what, fix }
        }
        other => other,
    })?;
    tokens.extend(encoded);
    if piece.ends_document {
        tokens.extend(tokenizer.after());
    }
    Ok(Encoded {
        part: piece.part,
        ends_document: piece.ends_document,
        ends_part: piece.ends_part,
        tokens,
        learned: None,
        wants_end: true,
        invalid: false,
        text_bytes: piece.text.len() as u64,
    })
}

/// Encodes the conversation of a record. What the tokenizer puts around texts is the template's
/// matter.
fn encode_conversation(corpus: &Corpus, tokenizer: &Tokenizer, chat: &Chat, piece: &Piece) -> Result<Encoded> {
    let path = &corpus.files()[piece.file].path;
    let nothing = Conversation { text: String::new(), learned: Vec::new(), wants_end: false };
    let (told, invalid) = match chat.read(&piece.text) {
        Ok(told) => (told, false),
        Err(_) if corpus.options().on_invalid == OnInvalid::Skip => (nothing, true),
        Err(what) => {
            let fix = "repair or remove the record, or skip such ones by `data prepare --chat --skip-invalid`";
            return Err(DataError::input(path, Some(piece.line), what, fix));
        }
    };
    let (mut tokens, mut learned) = tokenizer.encode_learned(&told.text, &told.learned)?;
    if told.wants_end {
        let before = tokenizer.before();
        tokens.splice(0..0, before.iter().copied());
        learned.splice(0..0, before.iter().map(|_| false));
    }
    Ok(Encoded {
        part: piece.part,
        ends_document: piece.ends_document,
        ends_part: piece.ends_part,
        tokens,
        learned: Some(learned),
        wants_end: told.wants_end,
        invalid,
        text_bytes: told.learned.iter().map(|range| range.len() as u64).sum(),
    })
}
