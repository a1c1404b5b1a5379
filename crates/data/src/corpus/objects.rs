//! Lists the objects that a URL stands for, as files of a corpus.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use trainyard_store::{Object, Store, StoreError};

use super::list::{DROPPED_EXTENSION, classify};
use super::mds;
use super::{Compression, Format, SourceFile};
use crate::error::{DataError, Result};

/// Longest index of an MDS dataset that is read.
const INDEX_BYTES_MAX: u64 = 1 << 30;

pub(super) fn refused(error: StoreError) -> DataError {
    DataError::input(Path::new(&error.name), None, error.what, error.fix)
}

/// A path, or a URL without its query, which may hold a signature.
pub fn printable(path: &Path) -> String {
    let text = path.to_string_lossy();
    match text.contains("://") {
        true => text.split(['?', '#']).next().unwrap_or_default().to_owned(),
        false => text.into_owned(),
    }
}

/// Adds the objects that `url` stands for. Those below a URL that ends with `/` are taken as the
/// files of a folder are: without hidden ones and those that hold no text.
pub(super) fn add(store: &Store, url: &Path, files: &mut Vec<SourceFile>) -> Result<()> {
    let Some(text) = url.to_str() else {
        return Err(DataError::input(url, None, "is no valid URL", "write it in UTF-8"));
    };
    let objects = store.find(text).map_err(refused)?;
    let is_folder = text.ends_with('/');
    let mut by_name: HashMap<PathBuf, Object> = HashMap::new();
    let mut datasets = Vec::new();
    for object in &objects {
        if object.name().file_name().is_some_and(|name| name == mds::INDEX) {
            let shards = shards(object)?;
            match shards {
                Some(shards) => datasets.push((object.name().to_path_buf(), shards)),
                None if is_folder => continue,
                None => {
                    let what = "is not the index of an MDS dataset";
                    return Err(DataError::input(object.name(), None, what, "name the objects with text"));
                }
            }
        } else if is_folder {
            by_name.insert(object.name().to_path_buf(), object.clone());
        }
    }
    let root = Path::new(text.trim_end_matches('/'));
    for object in &objects {
        let name = object.name();
        if let Some((index, listed)) = datasets.iter().find(|(index, _)| index == name) {
            add_shards(store, index, listed, &by_name, files)?;
            continue;
        }
        // As in a folder of files, an index says what a dataset is made of.
        let is_in_dataset = |(index, _): &(PathBuf, _)| index.parent().is_some_and(|folder| name.starts_with(folder));
        if is_folder && (is_hidden(name, root) || datasets.iter().any(is_in_dataset)) {
            continue;
        }
        match classify(name) {
            Ok(None) if is_folder => {}
            Err(_) if is_folder => {}
            Ok(kind) => {
                let (format, compression) = kind.unwrap_or((Format::Text, Compression::None));
                files.push(source(object.clone(), format, compression, !is_folder)?);
            }
            Err(DataError::Input { path, what, .. }) if name.extension().is_some_and(|e| e == "bin" || e == "idx") => {
                let fix = "token files are read in place: copy them to a folder of this machine";
                return Err(DataError::input(&path, None, what, fix));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// True for names below `root` that have a part which begins with a dot, and for dropped documents.
fn is_hidden(name: &Path, root: &Path) -> bool {
    let below = name.strip_prefix(root).unwrap_or(name);
    below.iter().any(|part| part.as_encoded_bytes().starts_with(b"."))
        || name.extension().is_some_and(|extension| extension == DROPPED_EXTENSION)
}

fn source(object: Object, format: Format, compression: Compression, named: bool) -> Result<SourceFile> {
    if format == Format::Parquet && !object.has_ranges() {
        let what = "is a Parquet file, and its server gives no parts of files";
        return Err(DataError::input(object.name(), None, what, "copy it to a disk or a store, and name that"));
    }
    Ok(SourceFile {
        path: object.name().to_path_buf(),
        bytes: object.bytes(),
        modified_ns: object.modified_ns(),
        named,
        format,
        compression,
        expected: None,
        object: Some(object),
    })
}

/// The shards that an `index.json` lists; `None` if it is no index of an MDS dataset.
fn shards(index: &Object) -> Result<Option<Vec<mds::Shard>>> {
    let mut text = Vec::new();
    let read = index.read().take(INDEX_BYTES_MAX).read_to_end(&mut text);
    read.map_err(|reason| super::read::read_error(index.name(), Compression::None, reason))?;
    mds::shards(index.name(), &text)
}

/// Adds the shards of an MDS dataset in the order of its index. `known` holds the objects that were
/// listed already.
fn add_shards(
    store: &Store,
    index: &Path,
    shards: &[mds::Shard],
    known: &HashMap<PathBuf, Object>,
    files: &mut Vec<SourceFile>,
) -> Result<()> {
    let folder = index.parent().unwrap_or(Path::new(""));
    for shard in shards {
        let find = |name: &str| {
            let path = folder.join(name);
            match known.get(&path) {
                Some(object) => Ok(object.clone()),
                None => store.find_one(&path.to_string_lossy()).map_err(refused),
            }
        };
        let (object, compression) = match &shard.zip {
            // A dataset may be unpacked beside its compressed shards.
            Some((zip, compression)) => match known.get(&folder.join(&shard.raw)) {
                Some(raw) => (raw.clone(), Compression::None),
                None => (find(zip)?, *compression),
            },
            None => (find(&shard.raw)?, Compression::None),
        };
        let mut file = source(object, Format::Mds, compression, false)?;
        file.expected = Some(shard.expected.clone());
        files.push(file);
    }
    Ok(())
}
