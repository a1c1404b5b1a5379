//! Turns text into token files: reads, tokenizes on several threads, divides and writes, or reuses
//! an earlier result.
//!
//! `prepare` writes `OUT.train.bin/.idx`, `OUT.validation.bin/.idx` and `OUT.json` (see
//! [`Sidecar`]). The bytes do not depend on the number of workers: one thread reads documents in
//! order, many encode them, and the caller's thread writes them in order. Besides the document
//! being read, memory holds at most a few pieces of text per worker.
//!
//! A document begins and ends with what the tokenizer puts around a text
//! ([`Tokenizer::before`], [`Tokenizer::after`]), and then has the end-of-text token once.
//!
//! A document goes to validation by a hash of its text, so that it stays there when the corpus
//! grows and so that duplicates never lie on both sides. A corpus of one document is divided by
//! position instead: its last part validates.

mod pipeline;
mod sidecar;

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

pub use sidecar::{Sidecar, SidecarPart, SidecarSource, SidecarSplit, SidecarTokenizer};

use crate::atomic;
use crate::chat::{Chat, ChatOptions};
use crate::corpus::{Corpus, OnInvalid};
use crate::error::{DataError, Result};
use crate::indexed::{IndexedTokens, IndexedWriter, TokenType, bin_path, idx_path, mask_path, with_suffix};
use crate::ordered::threads;
use crate::tokenizer::Tokenizer;
use pipeline::{Encoded, Split, TargetSplit};

/// The settings of a preparation.
#[derive(Debug, Clone, PartialEq)]
pub struct PrepareOptions {
    /// Prefix of the files written.
    pub out: PathBuf,
    /// Share of the documents (or, with a single document, of the characters) that validates; below
    /// 1, and 0 for none.
    pub validation_fraction: f64,
    /// Seed of the choice of those documents.
    pub seed: u64,
    /// Number of encoding threads; 0 for one per core.
    pub workers: usize,
    /// True to end each document with the tokenizer's end-of-text token, if it has one.
    pub append_eos: bool,
    /// True to keep an earlier result with the same inputs.
    pub reuse: bool,
    /// The way from records with conversations to text; None for plain text.
    pub chat: Option<ChatOptions>,
}

/// The default share that validates.
pub const VALIDATION_FRACTION: f64 = 0.01;

impl PrepareOptions {
    /// The defaults: one percent for validation, all cores, end-of-text tokens, reuse.
    pub fn new(out: impl Into<PathBuf>) -> Self {
        Self {
            out: out.into(),
            validation_fraction: VALIDATION_FRACTION,
            seed: 0,
            workers: 0,
            append_eos: true,
            reuse: true,
            chat: None,
        }
    }
}

/// The progress of a preparation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrepareProgress {
    /// Documents encoded.
    pub documents: u64,
    /// Bytes of text encoded.
    pub text_bytes: u64,
    /// Tokens written.
    pub tokens: u64,
    /// Bytes on disk of all source files. They equal the bytes of text in the end unless files are
    /// compressed or JSONL.
    pub source_bytes: u64,
    /// True while another process prepares the same files and is waited for.
    pub waits: bool,
}

/// The result of a preparation.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// Prefix of the training token files.
    pub train: PathBuf,
    /// Prefix of the validation token files.
    pub validation: Option<PathBuf>,
    /// The full description.
    pub sidecar: Sidecar,
    /// True if an earlier result was kept.
    pub reused: bool,
    /// The reason why it was kept or made, for the user.
    pub reason: String,
}

/// Prepares `corpus` with `tokenizer`, or keeps an earlier result made from the same files (path,
/// size, time of change), tokenizer and options. Calls `progress` after every piece, from the
/// calling thread.
pub fn prepare(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    mut progress: impl FnMut(PrepareProgress),
) -> Result<Prepared> {
    if !(0.0..1.0).contains(&options.validation_fraction) {
        let what = format!("is {}", options.validation_fraction);
        return Err(DataError::setting(
            "validation_fraction",
            what,
            "take a share from 0 (none) to below 1, such as 0.01",
        ));
    }
    if options.out.file_name().is_none() {
        let what = format!("{:?} has no file name", options.out);
        return Err(DataError::setting("out", what, "give a prefix such as data/my"));
    }
    let key = key(corpus, tokenizer, options);
    if let Ok(sidecar) = earlier(options, &key) {
        return Ok(prepared(options, sidecar, true, REUSED.into()));
    }
    // Of several that find nothing one writes, and the others find what it wrote.
    let _lock = Lock::take(&options.out, || progress(PrepareProgress { waits: true, ..PrepareProgress::default() }))?;
    let reason = match earlier(options, &key) {
        Ok(sidecar) => {
            return Ok(prepared(options, sidecar, true, REUSED.into()));
        }
        Err(reason) => reason,
    };
    let mut split = Split::new(options.validation_fraction, options.seed, corpus.bytes());
    let sidecar = loop {
        match build(corpus, tokenizer, options, &key, split, &mut progress)? {
            (_, Some(sidecar)) => break sidecar,
            // A small corpus can leave one side empty by chance. The document nearest to the border
            // then changes sides.
            (counts, None) => split = split.repaired(&counts).unwrap_or(split),
        }
    };
    Ok(prepared(options, sidecar, false, reason))
}

const REUSED: &str = "the same files, tokenizer and options were prepared before";

/// The right to write the files of a prefix, which one process at a time has. It ends with the
/// value, or with the process.
struct Lock {
    /// Held, not read. `None` where the file system knows no locks.
    _file: Option<File>,
}

impl Lock {
    /// Waits for whoever has it; `waiting` is called before that.
    fn take(out: &Path, mut waiting: impl FnMut()) -> Result<Lock> {
        let folder = atomic::folder_of(out);
        std::fs::create_dir_all(folder).map_err(DataError::io("create", folder))?;
        let name = out.file_name().unwrap_or_default().to_string_lossy();
        let path = folder.join(format!(".{name}.lock"));
        // It stays: who removed it might leave two processes with a lock each, of files of the same
        // name.
        let file = File::create(&path).map_err(DataError::io("create", &path))?;
        let locked = match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                waiting();
                file.lock()
            }
            Err(TryLockError::Error(reason)) => Err(reason),
            Ok(()) => Ok(()),
        };
        match locked {
            Ok(()) => Ok(Lock { _file: Some(file) }),
            // NFS without a lock service says ENOLCK, which has no kind of its own.
            Err(reason) if reason.kind() == ErrorKind::Unsupported || reason.raw_os_error() == Some(ENOLCK) => {
                Ok(Lock { _file: None })
            }
            Err(reason) => Err(DataError::io("lock", &path)(reason)),
        }
    }
}

/// Linux: no locks are available.
const ENOLCK: i32 = 37;

/// `OUT.train`.
pub fn train_prefix(out: &Path) -> PathBuf {
    with_suffix(out, ".train")
}

/// `OUT.validation`.
pub fn validation_prefix(out: &Path) -> PathBuf {
    with_suffix(out, ".validation")
}

fn prepared(options: &PrepareOptions, sidecar: Sidecar, reused: bool, reason: String) -> Prepared {
    Prepared {
        train: train_prefix(&options.out),
        validation: sidecar.validation.is_some().then(|| validation_prefix(&options.out)),
        sidecar,
        reused,
        reason,
    }
}

/// A hash of everything that the result depends on. The number of workers is not part of it.
fn key(corpus: &Corpus, tokenizer: &Tokenizer, options: &PrepareOptions) -> String {
    let mut hash = Xxh3::new();
    let mut field = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(b"trainyard-tokens 1");
    field(tokenizer.fingerprint().as_bytes());
    field(format!("{:?} {}", tokenizer.eos(), options.append_eos).as_bytes());
    if !(tokenizer.before().is_empty() && tokenizer.after().is_empty()) {
        field(format!("{:?} {:?}", tokenizer.before(), tokenizer.after()).as_bytes());
    }
    field(&options.validation_fraction.to_le_bytes());
    field(&options.seed.to_le_bytes());
    field(corpus.options().field.as_bytes());
    field(corpus.options().document_separator.as_deref().unwrap_or("").as_bytes());
    field(&[u8::from(corpus.options().on_invalid == OnInvalid::Skip)]);
    if let Some(ChatOptions { template, loss_on }) = &options.chat {
        field(format!("chat {} {template:?}", loss_on.name()).as_bytes());
    }
    for file in corpus.files() {
        field(file.path.as_os_str().as_encoded_bytes());
        field(&file.bytes.to_le_bytes());
        field(&file.modified_ns.to_le_bytes());
        if let Some(validator) = file.validator() {
            field(validator.as_bytes());
        }
    }
    format!("{:016x}", hash.digest())
}

/// An earlier result with this key, opened to check that it is whole; or the reason why there is
/// none.
fn earlier(options: &PrepareOptions, key: &str) -> Result<Sidecar, String> {
    if !options.reuse {
        return Err("reuse is switched off".into());
    }
    let sidecar = match Sidecar::read(&options.out) {
        Ok(Some(sidecar)) => sidecar,
        Ok(None) => return Err("no earlier result".into()),
        Err(error) => return Err(format!("the earlier result cannot be used: {error}")),
    };
    if sidecar.key != key {
        return Err("the files, the tokenizer or the options changed since the earlier result".into());
    }
    let parts = [
        (train_prefix(&options.out), Some(&sidecar.train)),
        (validation_prefix(&options.out), sidecar.validation.as_ref()),
    ];
    for (prefix, part) in parts {
        let Some(part) = part else { continue };
        match IndexedTokens::open(&prefix) {
            Ok(tokens)
                if (tokens.tokens(), tokens.documents() as u64) == (part.tokens, part.documents)
                    && tokens.is_masked() == part.mask_xxh3.is_some() => {}
            Ok(_) => return Err(format!("{} is not what its description says", prefix.display())),
            Err(error) => return Err(format!("the earlier result is damaged: {error}")),
        }
    }
    Ok(sidecar)
}

/// Makes one pass over the corpus. Returns no description if `split` left a side empty that another
/// split would fill.
fn build(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    key: &str,
    split: Split,
    progress: &mut impl FnMut(PrepareProgress),
) -> Result<(pipeline::Counts, Option<Sidecar>)> {
    let token_type = TokenType::for_vocabulary(tokenizer.vocab_size());
    let wants_validation = options.validation_fraction > 0.0;
    let mut train = Output::create(&train_prefix(&options.out), token_type)?;
    let mut validation = match wants_validation {
        true => Some(Output::create(&validation_prefix(&options.out), token_type)?),
        false => None,
    };
    // Not a second one where it is what the tokenizer ends a text with.
    let eos = tokenizer.eos().filter(|eos| options.append_eos && tokenizer.after().last() != Some(eos));
    let chat = options.chat.as_ref().map(|chat| Chat::new(chat, tokenizer)).transpose()?;
    let mut so_far = PrepareProgress { source_bytes: corpus.bytes(), ..PrepareProgress::default() };
    let mut invalid = 0;
    let mut counts =
        pipeline::run(corpus, tokenizer, chat.as_ref(), split, threads(options.workers), |piece: Encoded| {
            let output = match piece.part {
                TargetSplit::Train => &mut train,
                TargetSplit::Validation => validation.as_mut().unwrap_or(&mut train),
            };
            invalid += u64::from(piece.invalid);
            output.writer.append(&piece.tokens)?;
            if let Some(learned) = &piece.learned {
                output.mask.extend(learned.iter().copied());
            }
            output.text_bytes += piece.text_bytes;
            so_far.text_bytes += piece.text_bytes;
            so_far.tokens += piece.tokens.len() as u64;
            if piece.ends_document {
                if let Some(eos) = eos.filter(|_| piece.wants_end) {
                    output.writer.append(&[eos])?;
                    if piece.learned.is_some() {
                        output.mask.extend([true]);
                    }
                    so_far.tokens += 1;
                }
                so_far.documents += 1;
            }
            if piece.ends_part {
                output.writer.end_document();
            }
            progress(so_far);
            Ok(())
        })?;
    counts.skipped.invalid += invalid;
    counts.documents -= invalid;
    if counts.documents == 0 {
        return Err(DataError::TooLittle {
            what: format!(
                "the {} files have no usable document ({} empty, {} invalid)",
                corpus.files().len(),
                counts.skipped.empty,
                counts.skipped.invalid
            ),
            fix: "give files that have text".into(),
        });
    }
    let by = match (wants_validation, counts.by_position) {
        (false, _) => "none",
        (true, true) => "position",
        (true, false) => "document",
    };
    if split.repaired(&counts).is_some() {
        // A side is empty: the files would be written again at once.
        return Ok((counts, None));
    }
    if chat.is_some() && train.writer.tokens() == 0 {
        return Err(DataError::TooLittle {
            what: "all conversations went to validation: they are equal, or too few to be divided".into(),
            fix: "give more of them, or set the validation fraction to 0".into(),
        });
    }
    // From here on the description of an older result would be wrong.
    atomic::remove_if_present(&Sidecar::path(&options.out))?;
    let train = train.finish(&options.out, ".train")?;
    let validation = match validation {
        Some(output) => Some(output.finish(&options.out, ".validation")?),
        None => {
            // The files of an earlier run with a validation part.
            let left = validation_prefix(&options.out);
            [idx_path(&left), bin_path(&left), mask_path(&left)]
                .iter()
                .try_for_each(|path| atomic::remove_if_present(path))?;
            None
        }
    };
    let sources = corpus.files().iter().take(Sidecar::SOURCES_MAX);
    let sidecar = Sidecar {
        format: Sidecar::format(),
        version: Sidecar::version(),
        key: key.into(),
        tokenizer: SidecarTokenizer {
            kind: tokenizer.kind().into(),
            fingerprint: tokenizer.fingerprint(),
            vocab_size: tokenizer.vocab_size(),
            eos: tokenizer.eos(),
            before: tokenizer.before().to_vec(),
            after: tokenizer.after().to_vec(),
        },
        split: SidecarSplit {
            by: by.into(),
            validation_fraction: options.validation_fraction,
            seed: options.seed,
            divided_documents: counts.divided_documents,
        },
        train,
        validation,
        empty_documents: counts.skipped.empty,
        invalid_documents: counts.skipped.invalid,
        source_files: corpus.files().len() as u64,
        sources: sources
            .map(|f| SidecarSource { path: f.path.clone(), bytes: f.bytes, modified_ns: f.modified_ns })
            .collect(),
    };
    sidecar.write(&options.out)?;
    Ok((counts, Some(sidecar)))
}

/// One pair of files being written.
struct Output {
    writer: IndexedWriter,
    text_bytes: u64,
    mask: Mask,
}

/// The bits of a mask being made: 12 MB for 100 million tokens.
#[derive(Default)]
struct Mask {
    bits: Vec<u8>,
    tokens: u64,
    learned: u64,
}

impl Mask {
    fn extend(&mut self, learned: impl IntoIterator<Item = bool>) {
        for is_learned in learned {
            if self.tokens.is_multiple_of(8) {
                self.bits.push(0);
            }
            if let (true, Some(last)) = (is_learned, self.bits.last_mut()) {
                *last |= 1 << (self.tokens % 8);
                self.learned += 1;
            }
            self.tokens += 1;
        }
    }
}

impl Output {
    fn create(prefix: &Path, token_type: TokenType) -> Result<Self> {
        Ok(Self { writer: IndexedWriter::create(prefix, token_type)?, text_bytes: 0, mask: Mask::default() })
    }

    fn finish(self, out: &Path, suffix: &str) -> Result<SidecarPart> {
        let summary = self.writer.finish()?;
        let name = with_suffix(Path::new(out.file_name().unwrap_or_default()), suffix);
        let mask = mask_path(&with_suffix(out, suffix));
        let is_masked = self.mask.tokens > 0;
        match is_masked {
            true => atomic::write(&mask, &self.mask.bits)?,
            false => atomic::remove_if_present(&mask)?,
        }
        Ok(SidecarPart {
            name: name.to_string_lossy().into_owned(),
            documents: summary.documents,
            tokens: summary.tokens,
            text_bytes: self.text_bytes,
            token_type: summary.token_type.to_string(),
            bin_xxh3: summary.bin_xxh3,
            mask_xxh3: is_masked.then(|| format!("{:016x}", xxh3_64(&self.mask.bits))),
            learned: is_masked.then_some(self.mask.learned),
        })
    }
}
