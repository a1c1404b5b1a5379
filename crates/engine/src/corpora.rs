//! Opens or makes the tokenizer and the token files that `[tokenizer]` and `[data]` ask for.
//!
//! A source is a file, folder or URL of text, a prefix of token files (`data prepare` writes them;
//! other tools' Megatron files work too), or `rust-sources`, the Rust sources that cargo unpacked
//! on this machine. Text is tokenized once into `data.cache` and found again.

use crate::config::{
    Config, DataFormat, DataSection, LossOnPart, Resolved, Sampling as ConfigSampling, Source as ConfigSource,
    TokenizerKind,
};
use crate::pretrained;
use crate::spans::corruption;
use crate::state::does_not_fit;
use crate::{EngineError, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trainyard_base::format_bytes;
use trainyard_data::corpus::{CACHE_BYTES, CacheOptions, StoreOptions, Traffic, expand, is_url, printable};
use trainyard_data::indexed::{bin_path, is_llm_c};
use trainyard_data::prepare::{VALIDATION_FRACTION, train_prefix, validation_prefix};
use trainyard_data::{
    ChatOptions, ChatTemplate, Corpus, CorpusOptions, Dataset, DatasetSpec, FillInTheMiddle, IndexedTokens,
    LengthCurriculum, LossOn, PrepareOptions, Sampling, Sidecar, Source, Tokenizer, Transforms, prepare, rows_in_epoch,
};
use xxhash_rust::xxh3::xxh3_64;

/// Name of the source that stands for the Rust sources in cargo's registry.
pub const RUST_SOURCES: &str = "rust-sources";

/// Bytes of Rust sources that are read: enough for minutes of training on a CPU, few enough to be
/// tokenized in seconds.
const RUST_SOURCES_BYTES: u64 = 24 << 20;

/// Bytes of text that a tokenizer is trained on. More bytes hardly change the merges.
const TOKENIZER_BYTES: u64 = 8 << 20;

/// True if `path` can be a source: it exists, it is a prefix of token files, or it is
/// [`RUST_SOURCES`].
pub fn source_exists(path: &Path) -> bool {
    // A path that is no pattern expands to itself.
    source_is_single(path) || expand(path).is_ok_and(|found| found != [path])
}

/// True if `path` itself is a source, and no pattern of them.
fn source_is_single(path: &Path) -> bool {
    // An object is looked for when the run opens its data.
    path.as_os_str() == RUST_SOURCES || is_url(path) || path.exists() || token_prefix(path).is_some()
}

/// The way in which objects are read, with a cache in `folder`, of `bytes` or of the default size.
pub fn store_options(folder: Option<&Path>, bytes: Option<u64>) -> StoreOptions {
    let cache =
        folder.map(|folder| CacheOptions { folder: folder.to_path_buf(), bytes_max: bytes.unwrap_or(CACHE_BYTES) });
    StoreOptions { cache, ..StoreOptions::default() }
}

/// The traffic with object stores, in words; None if nothing was asked for.
pub fn traffic_in_words(traffic: Traffic) -> Option<String> {
    let Traffic { requests, network_bytes, cache_bytes, retries } = traffic;
    (requests > 0).then(|| {
        format!(
            "{} from the network in {requests} requests, {} from the cache, {retries} retries",
            format_bytes(network_bytes),
            format_bytes(cache_bytes)
        )
    })
}

/// The training prefix that `path` names: `path` itself, or `path` with the suffix that
/// `data prepare` appends.
fn token_prefix(path: &Path) -> Option<PathBuf> {
    let bare = if path.extension().is_some_and(|e| e == "idx" || e == "bin") {
        path.with_extension("")
    } else {
        path.to_owned()
    };
    let has = |prefix: &Path| {
        let mut name = prefix.as_os_str().to_owned();
        name.push(".idx");
        Path::new(&name).is_file()
    };
    let of_llm_c = |prefix: &Path| is_llm_c(&bin_path(prefix));
    [train_prefix(&bare), bare].into_iter().find(|prefix| has(prefix) || of_llm_c(prefix))
}

/// The sources of `data.train` with patterns of token files expanded. A pattern of text stays: its
/// files are one corpus.
///
/// # Errors
/// A pattern matches nothing, both token files and others, or several token files with one weight.
pub(crate) fn expanded(sources: &[ConfigSource]) -> Result<Vec<ConfigSource>> {
    let mut all = Vec::new();
    for source in sources {
        if source_is_single(&source.path) {
            all.push(source.clone());
            continue;
        }
        let (tokens, others): (Vec<PathBuf>, Vec<PathBuf>) =
            expand(&source.path)?.into_iter().partition(|path| token_source(path).is_some());
        let mut prefixes: Vec<PathBuf> = tokens.iter().filter_map(|path| token_source(path)).collect();
        prefixes.dedup();
        // The tokenizer and the description of token files are .json, which is never read as text.
        let other = others.iter().find(|path| path.extension().is_none_or(|extension| extension != "json"));
        if let (false, Some(other)) = (prefixes.is_empty(), other) {
            return Err(does_not_fit(format!(
                "data.train: the pattern {} matches token files and others, such as {}: give each kind a pattern of its own",
                source.path.display(),
                other.display()
            )));
        }
        match (prefixes.is_empty(), source.weight) {
            (true, _) => all.push(source.clone()),
            (false, Some(_)) => {
                return Err(does_not_fit(format!(
                    "data.train: the pattern {} names several pairs of token files, which cannot share a weight: name \
                     each with its own",
                    source.path.display()
                )));
            }
            (false, None) => all.extend(prefixes.into_iter().map(|path| ConfigSource { path, weight: None })),
        }
    }
    Ok(all)
}

/// The training prefix of `path`, if it names token files rather than text or a folder.
pub fn token_source(path: &Path) -> Option<PathBuf> {
    token_prefix(path).filter(|_| !path.is_dir())
}

/// The prefix of the validation tokens that `data prepare` held back of the token files `path`.
pub fn held_back_part(path: &Path) -> Option<PathBuf> {
    let prefix = token_source(path)?;
    let bare = prefix.to_str()?.strip_suffix(".train")?.to_owned();
    token_source(&validation_prefix(Path::new(&bare)))
}

/// The share that `data prepare` was asked to hold back of the token files `path`; None for files
/// from elsewhere.
///
/// # Errors
/// The description of the files is damaged.
pub(crate) fn prepared_fraction(path: &Path) -> Result<Option<f64>> {
    let Some(prefix) = token_source(path) else { return Ok(None) };
    Ok(Sidecar::of_part(&prefix)?.map(|(sidecar, _)| sidecar.split.validation_fraction))
}

/// A validation text.
struct HeldBack {
    /// The path by which the user named it, or the text that it was held back of.
    of: PathBuf,
    /// Its token files.
    prefix: PathBuf,
}

/// The tokenizer and the token files of a run.
pub struct Corpora {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    sources: Vec<Source>,
    validation: Vec<HeldBack>,
    /// Notes for the user about files that were made or found.
    pub notes: Vec<String>,
}

impl Corpora {
    /// Finds or makes the tokenizer and the token files that `resolved` asks for. `note` receives
    /// messages about the progress.
    pub fn open(resolved: &Resolved, mut note: impl FnMut(&str)) -> Result<Corpora> {
        let config = &resolved.config;
        let data = &config.data;
        let cache = data.cache.clone().unwrap_or_else(|| config.run.directory.join("data-cache"));
        std::fs::create_dir_all(&cache).map_err(|source| file_error("cannot create", &cache, source))?;

        let mut texts = Vec::new();
        let mut sources = Vec::new();
        let mut validation = Vec::new();
        let holds_back = data.validation.is_none() && data.validation_fraction != Some(0.0);
        for source in &expanded(&data.train.0)? {
            match token_source(&source.path) {
                Some(prefix) => {
                    let part = held_back_part(&source.path).filter(|_| holds_back);
                    validation.extend(part.map(|prefix| HeldBack { of: source.path.clone(), prefix }));
                    sources.push((Some(prefix), source.weight));
                }
                None => {
                    texts.push((source.path.clone(), source.weight));
                    // Text without weights is one corpus, in which all documents count equally.
                    if source.weight.is_some() || texts.len() == 1 {
                        sources.push((None, source.weight));
                    }
                }
            }
        }
        let trained_on = |part: &&HeldBack| sources.iter().any(|(prefix, _)| prefix.as_ref() == Some(&part.prefix));
        if let Some(HeldBack { prefix, .. }) = validation.iter().find(trained_on) {
            return Err(does_not_fit(format!(
                "data.train names {}, which was held back to validate: leave it out, as the pattern *.train.bin does, \
                 or set data.validation_fraction = 0",
                prefix.display()
            )));
        }
        let weighted = texts.iter().any(|(_, weight)| weight.is_some());
        let groups: Vec<Vec<PathBuf>> = if weighted {
            texts.iter().map(|(path, _)| vec![path.clone()]).collect()
        } else if texts.is_empty() {
            Vec::new()
        } else {
            vec![texts.iter().map(|(path, _)| path.clone()).collect()]
        };
        let whole = data.format == DataFormat::Chat;
        let is_text = |source: &ConfigSource| token_source(&source.path).is_none();
        let validates_text = data.validation.iter().any(|sources| sources.0.iter().any(is_text));
        if whole && groups.is_empty() && !validates_text {
            return Err(does_not_fit(
                "data.format = \"chat\" has no effect on token files: make them of conversations by `trainyard data prepare \
                 --chat`, and leave data.format at \"text\"",
            ));
        }
        let store = store_options(data.object_cache.as_deref(), data.object_cache_size.map(|size| size.0));
        let open = |group: &Vec<PathBuf>| open_text_of(group, &data.text_field, whole, &store);
        let opened = groups.iter().map(open).collect::<Result<Vec<_>>>()?;
        let add_bos = config.tokenizer.add_bos;
        let tokenizer = find_tokenizer(config, &cache, &opened, &sources, &mut note)?.with_bos(add_bos)?;
        let (tokenizer, chat) = match whole {
            true => conversations(data, tokenizer, &mut note)?,
            false => (tokenizer, None),
        };
        if let Some(words) = tokenizer.around_in_words() {
            note(&format!("the tokenizer {words}"));
        }

        let mut notes = Vec::new();
        let fraction =
            if data.validation.is_some() { 0.0 } else { data.validation_fraction.unwrap_or(VALIDATION_FRACTION) };
        let mut prepared = opened.iter().zip(&groups);
        let mut resolved_sources = Vec::new();
        for (prefix, weight) in sources {
            let prefix = match prefix {
                Some(prefix) => prefix,
                None => {
                    let (corpus, group) = prepared.next().expect("one group for each text source");
                    let made = {
                        let parts = (fraction, config.training.seed);
                        tokenize(corpus, group, &tokenizer, chat.as_ref(), &cache, parts, &mut note)?
                    };
                    notes.push(made.1);
                    let of = group[0].clone();
                    validation.extend(made.0.validation.map(|prefix| HeldBack { of, prefix }));
                    made.0.train
                }
            };
            resolved_sources.push((prefix, weight));
        }
        for source in data.validation.iter().flat_map(|sources| &sources.0) {
            match token_source(&source.path) {
                Some(prefix) => validation.push(HeldBack { of: source.path.clone(), prefix }),
                None => {
                    let group = vec![source.path.clone()];
                    let corpus = open(&group)?;
                    let made = tokenize(&corpus, &group, &tokenizer, chat.as_ref(), &cache, (0.0, 0), &mut note)?;
                    notes.push(made.1);
                    validation.push(HeldBack { of: source.path.clone(), prefix: made.0.train });
                }
            }
        }
        let held_back = validation.iter().map(|text| &text.prefix);
        for prefix in resolved_sources.iter().map(|(prefix, _)| prefix).chain(held_back) {
            check_made_by(&tokenizer, prefix)?;
            match (begins_otherwise(&tokenizer, prefix)?, add_bos) {
                (None, _) => {}
                (Some(line), None) => note(&line),
                (Some(line), Some(add)) => return Err(does_not_fit(format!("tokenizer.add_bos = {add}, but {line}"))),
            }
        }
        let sources = resolved_sources
            .into_iter()
            .map(|(prefix, weight)| {
                // Without weights a source counts by its size.
                let weight = match weight {
                    Some(weight) => weight,
                    None => IndexedTokens::open(&prefix)?.tokens().max(1) as f64,
                };
                Ok(Source { prefix, weight })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Corpora { tokenizer, sources, validation, notes })
    }

    /// Sequences in one pass over the training data.
    ///
    /// # Errors
    /// A pair of token files cannot be opened.
    pub fn sequences_per_epoch(&self, resolved: &Resolved) -> Result<u64> {
        let length = resolved.spans.map_or(resolved.sequence_length, |spans| spans.lengths.text);
        let sampling = sampling(resolved);
        let rows = |source: &Source| Ok(rows_in_epoch(&IndexedTokens::open(&source.prefix)?, length, sampling));
        self.sources.iter().map(rows).sum()
    }

    /// The training samples for a model of `vocab_size` rows.
    pub fn dataset(&self, resolved: &Resolved, vocab_size: usize) -> Result<Arc<Dataset>> {
        let data = &resolved.config.data;
        Ok(Arc::new(Dataset::open(DatasetSpec {
            sources: self.sources.clone(),
            sequence_length: resolved.sequence_length,
            vocab_size: vocab_size as u32,
            respect_document_boundaries: data.respect_document_boundaries,
            sampling: sampling(resolved),
            seed: resolved.config.training.seed,
            transforms: self.transforms(resolved, vocab_size)?,
        })?))
    }

    fn transforms(&self, resolved: &Resolved, vocab_size: usize) -> Result<Transforms> {
        let data = &resolved.config.data;
        let fill_in_the_middle = match data.fim_rate > 0.0 {
            true => Some(fill_in_the_middle(&self.tokenizer, data.fim_rate, data.fim_spm_rate)?),
            false => None,
        };
        let curriculum = data.curriculum_start.zip(data.curriculum_steps);
        let curriculum =
            curriculum.map(|(start, steps)| LengthCurriculum { start, samples: resolved.batches().sequences(steps) });
        let length = resolved.sequence_length;
        let spans = resolved.spans.map(|s| corruption(&self.tokenizer, vocab_size, s.shape, s.paired, length));
        let span_corruption = spans.transpose()?;
        Ok(Transforms { fill_in_the_middle, noise_rate: data.token_noise, curriculum, span_corruption })
    }

    /// The validation text.
    pub fn validation(&self) -> Result<Vec<IndexedTokens>> {
        let texts: Vec<_> =
            self.validation.iter().map(|text| IndexedTokens::open(&text.prefix)).collect::<Result<_, _>>()?;
        match texts.iter().find(|text| text.tokens() < 2) {
            Some(text) => Err(does_not_fit(format!(
                "the validation text {} has {} tokens, and a loss takes 2: give more of it, or set data.validation_fraction = 0",
                text.prefix().display(),
                text.tokens()
            ))),
            None => Ok(texts),
        }
    }
}

impl Corpora {
    /// The names of the validation texts: of their files without endings, or their paths where two
    /// files have the same name.
    pub fn validation_names(&self) -> Vec<String> {
        let stem = |text: &HeldBack| {
            let name = text.of.file_name().unwrap_or(text.of.as_os_str()).to_string_lossy().into_owned();
            name.split('.').find(|part| !part.is_empty()).unwrap_or(&name).to_owned()
        };
        let stems: Vec<String> = self.validation.iter().map(stem).collect();
        let is_only = |name: &String| stems.iter().filter(|other| *other == name).count() == 1;
        let name = |(text, stem): (&HeldBack, &String)| match is_only(stem) {
            true => stem.clone(),
            false => text.of.display().to_string(),
        };
        self.validation.iter().zip(&stems).map(name).collect()
    }
}

/// The way in which sequences are cut.
fn sampling(resolved: &Resolved) -> Sampling {
    let data = &resolved.config.data;
    match (data.sampling, data.shuffle) {
        (ConfigSampling::Packed, Some(false)) => Sampling::InOrder,
        (ConfigSampling::Packed, _) => Sampling::Packed,
        (ConfigSampling::Random, _) => Sampling::Random,
        (ConfigSampling::BestFit, _) => Sampling::BestFit,
    }
}

/// The names that models give to the tokens before prefix, middle and suffix: StarCoder and others,
/// Qwen, Code Llama, Codestral's tokenizer.
const FILL_TOKENS: [[&str; 3]; 4] = [
    ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
    ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
    ["\u{2581}<PRE>", "\u{2581}<MID>", "\u{2581}<SUF>"],
    ["[PREFIX]", "[MIDDLE]", "[SUFFIX]"],
];

fn fill_in_the_middle(tokenizer: &Tokenizer, rate: f64, spm_rate: f64) -> Result<FillInTheMiddle> {
    let found = FILL_TOKENS.iter().find_map(|names| {
        let [prefix, middle, suffix] = names.map(|name| tokenizer.token_to_id(name));
        Some((prefix?, middle?, suffix?))
    });
    let (prefix, middle, suffix) = found.ok_or_else(|| {
        does_not_fit(format!(
            "data.fim_rate = {rate}, and the tokenizer has no tokens for it ({}, or the names of other models): take \
             one that has them, or set data.fim_rate = 0",
            FILL_TOKENS[0].join(", ")
        ))
    })?;
    Ok(FillInTheMiddle { rate, spm_rate, prefix, middle, suffix, eos: tokenizer.eos() })
}

fn file_error(what: &'static str, path: &Path, source: std::io::Error) -> EngineError {
    EngineError::File { what, path: path.display().to_string(), source }
}

/// The name of a chat template that needs no file.
pub const CHATML_NAME: &str = "chatml";

/// The way from conversations to text, and the tokenizer with the chat template that is used.
fn conversations(
    data: &DataSection,
    tokenizer: Tokenizer,
    note: &mut impl FnMut(&str),
) -> Result<(Tokenizer, Option<ChatOptions>)> {
    let loss_on = match data.loss_on {
        None | Some(LossOnPart::Answers) => LossOn::Answers,
        Some(LossOnPart::LastAnswer) => LossOn::LastAnswer,
        Some(LossOnPart::All) => LossOn::All,
    };
    let template = match &data.chat_template {
        None => tokenizer.chat_template(),
        Some(name) => Some(chat_template(name)?),
    };
    let tokenizer = match &template {
        Some(template) => tokenizer.with_chat_template(template),
        None => tokenizer,
    };
    if let Some(source) = &template
        && ChatTemplate::new(source, &tokenizer)?.end(&tokenizer).is_none()
    {
        note(
            "the chat template ends an answer by text that is no special token of the tokenizer: `generate --chat` cannot \
             stop there",
        );
    }
    Ok((tokenizer, Some(ChatOptions { template, loss_on })))
}

/// The chat template in a file, or the one called `chatml`.
///
/// # Errors
/// The file cannot be read.
pub fn chat_template(name: &Path) -> Result<String> {
    if name.as_os_str() == CHATML_NAME {
        return Ok(trainyard_data::chat::CHATML.to_owned());
    }
    std::fs::read_to_string(name).map_err(|source| file_error("cannot read", name, source))
}

/// The documents of some paths as one corpus; with `whole`, their records as they are.
pub fn open_text(paths: &[PathBuf], text_field: &str, whole: bool) -> Result<Corpus> {
    open_text_of(paths, text_field, whole, &StoreOptions::default())
}

/// The same, with objects read as `store` says.
fn open_text_of(paths: &[PathBuf], text_field: &str, whole: bool, store: &StoreOptions) -> Result<Corpus> {
    if let [path] = paths
        && path.as_os_str() == RUST_SOURCES
    {
        if whole {
            return Err(does_not_fit("data.format = \"chat\" reads JSONL, and rust-sources has no conversations"));
        }
        return trainyard_data::corpus::rust_sources(RUST_SOURCES_BYTES).ok_or(EngineError::NoRustSources);
    }
    let (field, store) = (text_field.to_owned(), store.clone());
    let options = CorpusOptions { field, whole_records: whole, store, ..CorpusOptions::default() };
    Ok(Corpus::open(paths, options)?)
}

/// A file name for the tokens of `paths`, readable and unlikely to clash. The sidecar file tells if
/// they are up to date.
fn cache_name(paths: &[PathBuf], more: &str) -> String {
    let mut all: Vec<u8> = more.as_bytes().to_vec();
    for path in paths {
        all.extend(std::path::absolute(path).unwrap_or_else(|_| path.clone()).as_os_str().as_encoded_bytes());
        all.push(0);
    }
    // Without the query of a URL, which may be a signature, and without a pattern's characters.
    let first = paths.first().map(|path| printable(path)).unwrap_or_default();
    let stem = Path::new(&first).file_stem().map_or("text".into(), |stem| stem.to_string_lossy());
    format!("{stem}-{:08x}", xxh3_64(&all) as u32)
}

fn tokenize(
    corpus: &Corpus,
    paths: &[PathBuf],
    tokenizer: &Tokenizer,
    chat: Option<&ChatOptions>,
    cache: &Path,
    (validation_fraction, seed): (f64, u64),
    note: &mut impl FnMut(&str),
) -> Result<(trainyard_data::Prepared, String)> {
    let mut key = format!("{} {validation_fraction} {seed}", tokenizer.fingerprint());
    if tokenizer.around_in_words().is_some() {
        key += &format!(" {:?} {:?}", tokenizer.before(), tokenizer.after());
    }
    if let Some(chat) = chat {
        key += &format!(" {chat:?}");
    }
    let out = cache.join(cache_name(paths, &key));
    let options = PrepareOptions { validation_fraction, seed, chat: chat.cloned(), ..PrepareOptions::new(&out) };
    let total = corpus.bytes();
    let mut told = std::time::Instant::now();
    let made = prepare(corpus, tokenizer, &options, |progress| {
        if progress.waits {
            return note("another run prepares the same text: waiting for it");
        }
        if told.elapsed().as_secs_f64() > 5.0 {
            told = std::time::Instant::now();
            let mib = |bytes: u64| bytes >> 20;
            note(&format!("tokenizing: {} of {} MiB of files", mib(progress.text_bytes), mib(total)));
        }
    })?;
    if let Some(words) = corpus.traffic().and_then(traffic_in_words) {
        note(&format!("objects: {words}"));
    }
    let documents = match (made.sidecar.documents(), made.sidecar.split.divided_documents) {
        (1, _) => "1 document".to_owned(),
        (all, 0) => format!("{all} documents"),
        (all, divided) => format!("{all} documents ({divided} of them divided between training and validation)"),
    };
    let learned = made.sidecar.train.learned.map_or(String::new(), |learned| format!(" ({learned} of them learned)"));
    let text = format!(
        "{} {documents}, {} tokens for training{learned}, {} for validation ({})",
        if made.reused { "found" } else { "tokenized" },
        made.sidecar.train.tokens,
        made.sidecar.validation.as_ref().map_or(0, |part| part.tokens),
        made.reason,
    );
    note(&text);
    Ok((made, text))
}

/// The tokenizer of the token files `prefix`, which `data prepare` saves beside them.
///
/// # Errors
/// The tokenizer, or the description of the files, is damaged.
pub fn tokenizer_of(prefix: &Path) -> Result<Option<Tokenizer>> {
    let beside = prefix.with_extension("tokenizer.json");
    if beside.is_file() {
        return Ok(Some(Tokenizer::load(&beside)?));
    }
    let is_bytes = Sidecar::of_part(prefix)?.is_some_and(|(sidecar, _)| sidecar.tokenizer.kind == "bytes");
    Ok(is_bytes.then(Tokenizer::bytes))
}

/// Returns an error if the token files `prefix` are known to be made by another tokenizer. Files
/// from elsewhere pass.
pub fn check_made_by(tokenizer: &Tokenizer, prefix: &Path) -> Result<()> {
    let Some((sidecar, _)) = Sidecar::of_part(prefix)? else { return Ok(()) };
    let theirs = sidecar.tokenizer;
    if theirs.fingerprint == tokenizer.fingerprint() {
        return Ok(());
    }
    // Another file with the same vocabulary passes, for example an exported one.
    let same = |of: Tokenizer| {
        of.vocab_size() == tokenizer.vocab_size() && of.eos() == tokenizer.eos() && same_words(&of, tokenizer)
    };
    if tokenizer_of(prefix)?.is_some_and(same) {
        return Ok(());
    }
    Err(does_not_fit(format!(
        "{} holds tokens of another tokenizer ({}, {} tokens) than this run's ({}, {} tokens): prepare it again with this one, leave tokenizer.kind \
         and tokenizer.path unset to use its own, and mix token files of one tokenizer only",
        prefix.display(),
        theirs.kind,
        theirs.vocab_size,
        tokenizer.kind(),
        tokenizer.vocab_size()
    )))
}

/// A description of the special tokens around the documents of the token files `prefix`, if
/// `tokenizer` would put different ones. None if they agree or nothing is known.
///
/// # Errors
///
/// The description of the files cannot be read.
pub fn begins_otherwise(tokenizer: &Tokenizer, prefix: &Path) -> Result<Option<String>> {
    let Some((sidecar, _)) = Sidecar::of_part(prefix)? else { return Ok(None) };
    let made = sidecar.tokenizer;
    if (made.before.as_slice(), made.after.as_slice()) == (tokenizer.before(), tokenizer.after()) {
        return Ok(None);
    }
    let now = tokenizer.around_in_words().unwrap_or_else(|| "puts nothing around a text".to_owned());
    Ok(Some(format!(
        "the documents of {} have the tokens {:?} before them and {:?} after them, and the tokenizer now {now}: prepare the files again to have the same",
        prefix.display(),
        made.before,
        made.after
    )))
}

/// True if every token stands for the same text in both tokenizers.
pub(crate) fn same_words(one: &Tokenizer, other: &Tokenizer) -> bool {
    (0..one.vocab_size() as u32).all(|token| one.decode(&[token]) == other.decode(&[token]))
}

fn find_tokenizer(
    config: &Config,
    cache: &Path,
    texts: &[Corpus],
    sources: &[(Option<PathBuf>, Option<f64>)],
    note: &mut impl FnMut(&str),
) -> Result<Tokenizer> {
    if let Some(path) = &config.tokenizer.path {
        return Ok(Tokenizer::load(path)?);
    }
    if let Some(path) = config.model.path.as_ref().filter(|path| pretrained::brings_tokenizer(path)) {
        return pretrained::tokenizer(path);
    }
    if config.tokenizer.kind != Some(TokenizerKind::Bytes) {
        // Token files cannot be tokenized again, so text in the same run uses their tokenizer.
        for prefix in sources.iter().filter_map(|(prefix, _)| prefix.as_ref()) {
            if let Some(tokenizer) = tokenizer_of(prefix)? {
                let (kind, size) = (tokenizer.kind(), tokenizer.vocab_size());
                note(&format!("tokenizer of {}: {kind}, {size} tokens", prefix.display()));
                return Ok(tokenizer);
            }
        }
    }
    if texts.is_empty() && config.tokenizer.kind != Some(TokenizerKind::Bytes) {
        return Err(does_not_fit(
            "data.train names token files only, and nothing says which tokenizer made them: set tokenizer.path",
        ));
    }
    let kind = match (config.tokenizer.kind, &config.model.path) {
        (Some(kind), _) => kind,
        (None, None) => TokenizerKind::Bpe,
        // Trained weights are valid only for the tokenizer that they were trained with.
        (None, Some(model)) => {
            return Err(does_not_fit(format!(
                "model.path = {} has no {}: set tokenizer.path to that of the model, or tokenizer.kind to make one",
                model.display(),
                crate::session::files::TOKENIZER
            )));
        }
    };
    if config.data.format == DataFormat::Chat && kind != TokenizerKind::Bytes {
        return Err(does_not_fit(
            "data.format = \"chat\": no tokenizer is made of conversations: name that of the model by model.path or \
             tokenizer.path, or set tokenizer.kind = \"bytes\"",
        ));
    }
    match kind {
        TokenizerKind::Bytes => Ok(Tokenizer::bytes()),
        TokenizerKind::Characters => {
            Ok(Tokenizer::characters_from_texts(texts.iter().flat_map(|corpus| corpus.texts(u64::MAX)))?)
        }
        TokenizerKind::Bpe => {
            let vocab_size = config.tokenizer.vocab_size.unwrap_or(8192);
            let mut key = format!("bpe {vocab_size} {TOKENIZER_BYTES}");
            for file in texts.iter().flat_map(Corpus::files) {
                key += &format!(" {} {} {}", file.path.display(), file.bytes, file.modified_ns);
            }
            let path = cache.join(format!("tokenizer-{:016x}.json", xxh3_64(key.as_bytes())));
            if path.is_file() {
                note(&format!("found the tokenizer {}", path.display()));
                return Ok(Tokenizer::load(&path)?);
            }
            let share = TOKENIZER_BYTES / texts.len() as u64;
            note(&format!("training a byte-level BPE tokenizer of {vocab_size} tokens"));
            let texts = texts.iter().flat_map(|corpus| corpus.texts(share));
            let tokenizer = Tokenizer::train_bpe(texts, vocab_size, |_| ())?;
            tokenizer.save(&path)?;
            Ok(tokenizer)
        }
    }
}
