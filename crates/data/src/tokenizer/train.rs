//! Training of byte-level BPE, by the trainer of the crate `tokenizers`.

use std::sync::Mutex;
use trainyard_base::lock;

use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Trainer};

use super::hugging_face::{byte_alphabet, byte_characters, may_cut};
use super::words::words;
use super::{END_OF_TEXT, cut};
use crate::error::{DataError, Result};

/// The progress of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainProgress {
    /// Counting words.
    Counting {
        /// Bytes of text read so far.
        bytes: u64,
    },
    /// All text is counted and pairs are being merged. (The library does not report progress.)
    Merging {
        /// Bytes of all text.
        bytes: u64,
    },
}

/// Texts are counted in parallel in pieces of this size.
const PIECE_BYTES: usize = 1 << 19;

/// A merge must occur at least twice, or it memorises instead of compressing.
const PAIR_COUNT_MIN: u64 = 2;

/// The content of the trained `tokenizer.json`.
pub(super) fn train_bpe<I>(texts: I, vocab_size: usize, progress: impl FnMut(TrainProgress) + Send) -> Result<String>
where
    I: Iterator<Item = Result<String>> + Send,
{
    const SMALLEST: usize = 256 + 1;
    if !(SMALLEST..=1 << 24).contains(&vocab_size) {
        let what = format!("is {vocab_size}");
        let fix = format!("take at least {SMALLEST}, for 256 bytes and {END_OF_TEXT}, and at most 2^24");
        return Err(DataError::setting("vocab_size", what, fix));
    }
    let failed = |e: tokenizers::Error| DataError::tokenizer("training", e.to_string(), "please report this");
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(PAIR_COUNT_MIN)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(byte_alphabet())
        .build();

    // The library's iterator cannot fail, so an error ends it and is kept here. It is a mutex,
    // because the library's threads read from it, one at a time.
    let feed = Mutex::new(Feed { error: None, bytes: 0, progress });
    let pieces = texts
        .map_while(|text| {
            let mut feed = lock(&feed);
            match text {
                Ok(text) => {
                    feed.bytes += text.len() as u64;
                    let bytes = feed.bytes;
                    (feed.progress)(TrainProgress::Counting { bytes });
                    Some(text)
                }
                Err(error) => {
                    feed.error = Some(error);
                    None
                }
            }
        })
        .flat_map(|text| {
            // One text at a time: a text may be a gigabyte, and so would be all of its pieces.
            let lengths: Vec<usize> = cut(&text, PIECE_BYTES, may_cut).into_iter().map(str::len).collect();
            let mut start = 0;
            lengths.into_iter().map(move |length| {
                start += length;
                text[start - length..start].to_owned()
            })
        });
    // Words as the pre-tokenizer would cut them, in the printable characters that stand for bytes.
    let characters = byte_characters();
    let in_characters = |word: &str| word.bytes().map(|byte| characters[usize::from(byte)]).collect();
    let counted = trainer.feed(pieces, |text| Ok(words(text).map(in_characters).collect()));
    let mut feed = feed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(error) = feed.error {
        return Err(error);
    }
    counted.map_err(failed)?;
    if feed.bytes == 0 {
        return Err(DataError::TooLittle {
            what: "there is no text to train a tokenizer on".into(),
            fix: "give files that have text".into(),
        });
    }
    (feed.progress)(TrainProgress::Merging { bytes: feed.bytes });
    let mut model = BPE::default();
    let special = trainer.train(&mut model).map_err(failed)?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevelDecoder::new(false, true, true)));
    tokenizer.add_special_tokens(special).map_err(failed)?;
    tokenizer.to_string(true).map_err(failed)
}

struct Feed<P> {
    error: Option<DataError>,
    bytes: u64,
    progress: P,
}
