//! Lists the files of a corpus.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use xxhash_rust::xxh3::xxh3_64;

use super::{Compression, Corpus, CorpusOptions, Format, OnInvalid, SourceFile, mds};
use crate::error::{DataError, Result};

/// Extensions that are read as text when found in a folder.
const TEXT_EXTENSIONS: &[&str] = &[
    "txt", "text", "md", "markdown", "rst", "tex", "org", "adoc", "html", "htm", "xml", "csv", "tsv", "rs", "py", "c",
    "h", "cc", "cpp", "cxx", "hpp", "hh", "cu", "cuh", "java", "kt", "scala", "go", "js", "mjs", "ts", "tsx", "jsx",
    "rb", "php", "pl", "lua", "r", "jl", "hs", "ml", "mli", "ex", "exs", "erl", "clj", "lisp", "el", "swift", "m",
    "cs", "fs", "sh", "bash", "zsh", "sql", "css", "toml", "yaml", "yml", "ini", "cfg", "vim", "proto", "zig", "v",
    "sv", "vhd", "asm", "s",
];

/// Extensions of files with one JSON object per line.
const JSONL_EXTENSIONS: &[&str] = &["jsonl", "ndjson"];

/// Extensions that are certainly not text. Naming such a file is a mistake that deserves a better
/// message than "not UTF-8".
const FOREIGN_EXTENSIONS: &[(&str, &str)] = &[
    ("arrow", "convert it to .parquet or .jsonl"),
    ("zip", "unpack it"),
    ("xz", "unpack it, or compress with zstd"),
    ("bz2", "unpack it, or compress with zstd"),
    ("7z", "unpack it"),
    ("bin", "it looks like a token file: give its prefix as prepared data instead"),
    ("idx", "it looks like a token file: give its prefix as prepared data instead"),
    ("safetensors", "it holds weights, not text"),
    ("pdf", "extract its text first"),
    ("json", "write one object per line and call it .jsonl"),
];

/// The extension of the documents that cleaning dropped, as zstd-compressed JSON lines. Reading a
/// folder passes over such files; one that is named is read.
pub const DROPPED_EXTENSION: &str = "dropped";

/// Maximum depth of folders. Anything deeper is a loop or a mistake.
const DEPTH_MAX: usize = 64;

/// The files and folders that `path` stands for: itself if it exists or is no pattern, else what
/// the pattern matches, in the order of names.
///
/// # Errors
/// The pattern is malformed or matches nothing, or a folder cannot be listed.
pub fn expand(path: &Path) -> Result<Vec<PathBuf>> {
    let pattern = path.to_str().filter(|text| text.contains(['*', '?', '[']) && !path.exists());
    let Some(pattern) = pattern else { return Ok(vec![path.to_path_buf()]) };
    const FIX: &str = "write * for any characters, ? for one, [abc] for one of them, ** for any folders";
    let matches = glob::glob(pattern)
        .map_err(|error| DataError::input(path, None, format!("is not a pattern of paths ({error})"), FIX))?;
    let mut paths = Vec::new();
    for found in matches {
        paths.push(found.map_err(|error| {
            let folder = error.path().to_path_buf();
            DataError::io("list", &folder)(error.into())
        })?);
    }
    if paths.is_empty() {
        return Err(DataError::input(path, None, "matches no file", "check the pattern, and quote it in a shell"));
    }
    Ok(paths)
}

/// Adds a file, or the files of a folder.
pub(super) fn add(path: &Path, files: &mut Vec<SourceFile>) -> Result<()> {
    let metadata = fs::metadata(path).map_err(DataError::io("open", path))?;
    if metadata.is_dir() {
        return walk(path, 0, files);
    }
    if path.file_name().is_some_and(|name| name == mds::INDEX) {
        let text = fs::read(path).map_err(DataError::io("read", path))?;
        return match mds::shards(path, &text)? {
            Some(shards) => add_shards(path, shards, files),
            None => Err(DataError::input(path, None, "is not the index of an MDS dataset", "name the files with text")),
        };
    }
    if !metadata.is_file() {
        // Text is read more than once, and to its end: what a pipe gives is gone, and a device may
        // have no end.
        let what = "is neither a file nor a folder but a pipe, a socket or a device";
        return Err(DataError::input(path, None, what, "write what it gives to a file, and name that"));
    }
    let (format, compression) = classify(path)?.unwrap_or((Format::Text, Compression::None));
    files.push(source(path.to_path_buf(), &metadata, true, format, compression));
    Ok(())
}

fn walk(folder: &Path, depth: usize, files: &mut Vec<SourceFile>) -> Result<()> {
    if depth > DEPTH_MAX {
        let what = format!("lies more than {DEPTH_MAX} folders deep");
        return Err(DataError::input(folder, None, what, "check for links that lead back"));
    }
    let index = folder.join(mds::INDEX);
    if index.is_file()
        && let Some(shards) = mds::shards(&index, &fs::read(&index).map_err(DataError::io("read", &index))?)?
    {
        return add_shards(&index, shards, files);
    }
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(DataError::io("list", folder))? {
        entries.push(entry.map_err(DataError::io("list", folder))?.path());
    }
    entries.sort_unstable();
    for path in entries {
        if path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b".")) {
            continue;
        }
        let is_link = fs::symlink_metadata(&path).is_ok_and(|about| about.is_symlink());
        let metadata = match fs::metadata(&path) {
            // A dangling link is no file of this folder.
            Err(reason) if is_link && reason.kind() == ErrorKind::NotFound => continue,
            other => other.map_err(DataError::io("open", &path))?,
        };
        if metadata.is_dir() {
            if is_link && leads_back(&path, folder) {
                let what = "is a link to a folder that it lies in";
                return Err(DataError::input(&path, None, what, "remove it, or name the files themselves"));
            }
            walk(&path, depth + 1, files)?;
        } else if metadata.is_file()
            && path.extension().is_none_or(|extension| extension != DROPPED_EXTENSION)
            && let Ok(Some((format, compression))) = classify(&path)
        {
            files.push(source(path, &metadata, false, format, compression));
        }
    }
    Ok(())
}

/// Adds the shards of an MDS dataset in the order of its index.
fn add_shards(index: &Path, shards: Vec<mds::Shard>, files: &mut Vec<SourceFile>) -> Result<()> {
    let folder = index.parent().unwrap_or(Path::new("."));
    for shard in shards {
        // A dataset may be unpacked beside its compressed shards.
        let raw = folder.join(&shard.raw);
        let (path, compression) = match shard.zip {
            Some((zip, compression)) if !raw.is_file() => (folder.join(zip), compression),
            _ => (raw, Compression::None),
        };
        let metadata = fs::metadata(&path).map_err(DataError::io("open", &path))?;
        let mut file = source(path, &metadata, false, Format::Mds, compression);
        file.expected = Some(shard.expected);
        files.push(file);
    }
    Ok(())
}

fn leads_back(link: &Path, folder: &Path) -> bool {
    matches!((fs::canonicalize(link), fs::canonicalize(folder)), (Ok(to), Ok(from)) if from.starts_with(&to))
}

/// The format that a file's name implies; `None` if it implies nothing, an error if it implies that
/// the file holds no text.
pub(super) fn classify(path: &Path) -> Result<Option<(Format, Compression)>> {
    let extension = |p: &Path| p.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase);
    let mut inner = path.to_path_buf();
    let compression = match extension(path).as_deref() {
        Some("gz") => Compression::Gzip,
        Some("zst" | "zstd") => Compression::Zstd,
        _ => Compression::None,
    };
    if compression != Compression::None {
        inner.set_extension("");
    }
    let extension = extension(&inner).unwrap_or_default();
    match extension.as_str() {
        "parquet" if compression == Compression::None => return Ok(Some((Format::Parquet, compression))),
        "parquet" => {
            let what = "is a compressed Parquet file, which cannot be read from its end";
            return Err(DataError::input(path, None, what, "unpack it: its pages are compressed anyway"));
        }
        "tar" => return Ok(Some((Format::Tar, compression))),
        "tgz" if compression == Compression::None => return Ok(Some((Format::Tar, Compression::Gzip))),
        "mds" => return Ok(Some((Format::Mds, compression))),
        DROPPED_EXTENSION => return Ok(Some((Format::JsonLines, Compression::Zstd))),
        _ => {}
    }
    if JSONL_EXTENSIONS.contains(&extension.as_str()) {
        return Ok(Some((Format::JsonLines, compression)));
    }
    if let Some((_, fix)) = FOREIGN_EXTENSIONS.iter().find(|(foreign, _)| *foreign == extension) {
        return Err(DataError::input(path, None, format!("a .{extension} file is not read as text"), *fix));
    }
    if TEXT_EXTENSIONS.contains(&extension.as_str()) || compression != Compression::None {
        return Ok(Some((Format::Text, compression)));
    }
    Ok(None)
}

fn source(path: PathBuf, metadata: &Metadata, named: bool, format: Format, compression: Compression) -> SourceFile {
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let modified_ns = modified.map_or(0, |since| since.as_nanos() as u64);
    SourceFile { path, bytes: metadata.len(), modified_ns, named, format, compression, expected: None, object: None }
}

/// The Rust sources that cargo unpacked on this machine (`$CARGO_HOME` or `~/.cargo`,
/// `registry/src/*/*/**/*.rs`), up to `bytes_max` of them; `None` if there are none.
///
/// The order is a hash of each file's path below the registry, so that a part of the files is a
/// fair sample. It does not depend on the registry's name or on the machine. Files above 256 KiB
/// are left out because they are generated tables. A file that is not UTF-8 is skipped.
pub fn rust_sources(bytes_max: u64) -> Option<Corpus> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))?;
    rust_sources_in(&home, bytes_max)
}

pub(super) fn rust_sources_in(cargo_home: &Path, bytes_max: u64) -> Option<Corpus> {
    const FILE_BYTES_MAX: u64 = 256 << 10;
    let mut by_place: BTreeMap<(u64, PathBuf), SourceFile> = BTreeMap::new();
    for registry in folders(&cargo_home.join("registry").join("src")) {
        for package in folders(&registry) {
            let mut files = Vec::new();
            // A file that vanishes or cannot be read is no reason to give up the corpus.
            let _ = walk(&package, 0, &mut files);
            for file in files {
                let Ok(relative) = file.path.strip_prefix(&registry) else { continue };
                if file.path.extension().is_some_and(|e| e == "rs") && (1..=FILE_BYTES_MAX).contains(&file.bytes) {
                    let order = xxh3_64(relative.as_os_str().as_encoded_bytes());
                    by_place.entry((order, relative.to_path_buf())).or_insert(file);
                }
            }
        }
    }
    let mut bytes = 0;
    let files: Vec<SourceFile> = by_place
        .into_values()
        .take_while(|file| {
            bytes += file.bytes;
            bytes <= bytes_max
        })
        .collect();
    let options = CorpusOptions { on_invalid: OnInvalid::Skip, ..CorpusOptions::default() };
    (!files.is_empty()).then_some(Corpus { files, options, store: None })
}

/// The folders inside a folder, sorted; none if it cannot be listed.
fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut folders: Vec<PathBuf> = entries.filter(|p| p.is_dir()).collect();
    folders.sort_unstable();
    folders
}
