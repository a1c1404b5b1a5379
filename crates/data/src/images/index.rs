//! The place and the class of every image of a training set.
//!
//! A folder has one sub-folder for each class, as torchvision's `ImageFolder`. A tar shard is a
//! WebDataset: `KEY.jpg` (or `.jpeg`, `.png`, `.webp`) beside `KEY.cls`, a number or a name, or
//! `KEY.json` with the field `label`. A Parquet file is one of Hugging Face's `datasets`. Images of
//! a shard are read in place from the mapped file.
//!
//! Opening reads names and labels, and no pixel. Named classes are numbered in the order of their
//! names, over all sources; numbered classes keep their numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trainyard_tensor::mapped::MappedFile;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::decode::{Rgb, decode};
use super::decoded::{Decoded, identity};
use super::parquet::{Row, Rows};
use crate::corpus::expand;
use crate::error::{DataError, Result};

/// Extensions of the formats that are decoded.
const EXTENSIONS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];
/// Extensions of images that are not.
const FOREIGN: [&str; 10] = ["bmp", "gif", "tif", "tiff", "ppm", "pgm", "avif", "heic", "jxl", "jp2"];
/// Maximum depth of folders below a class. Anything deeper is a loop or a mistake.
const DEPTH_MAX: usize = 64;
/// Most classes, which bounds what a wrong label can make of a model.
const CLASSES_MAX: u32 = 1 << 20;
/// Most bytes of a label.
const LABEL_BYTES_MAX: u64 = 1 << 20;
/// Random streams count images by 32 bits.
const IMAGES_MAX: usize = u32::MAX as usize;

const REPAIR: &str = "repair or remove it, or set images.skip_invalid = true";
const CONVERT: &str = "convert it to JPEG, PNG or WebP";
const LAYOUT: &str = "give a folder with one sub-folder for each class, WebDataset .tar shards or .parquet files";

/// The reading of sources.
#[derive(Debug, Clone, Default)]
pub struct IndexOptions {
    /// The classes, in order, where another set decides them, as a training set does for its
    /// validation set. A class that is not among them is an error.
    pub classes: Option<Vec<String>>,
}

/// The images of a set and their classes.
#[derive(Debug, Clone)]
pub struct ImageIndex {
    shards: Arc<Vec<Shard>>,
    entries: Vec<Entry>,
    classes: Arc<Vec<String>>,
    decoded: Option<Arc<Decoded>>,
}

/// A folder or a file of images.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    images: Images,
}

/// How the images of a shard are read.
#[derive(Debug)]
enum Images {
    /// A file each.
    Folder,
    /// Members of a tar file.
    Tar(MappedFile),
    /// Rows of a Parquet file.
    Parquet(Rows),
}

#[derive(Debug, Clone)]
struct Entry {
    shard: u32,
    class: u32,
    /// The file below its folder, or the member of its shard.
    name: Box<str>,
    /// Where the bytes of a member begin and end in its shard; of a row its row group and its place
    /// there.
    place: (u64, u64),
    /// Size of the file; of a row the mean of its row group.
    bytes: u64,
}

/// A label as a source gives it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Label {
    Number(u32),
    Name(String),
}

/// An image without the number of its class.
struct Found {
    entry: Entry,
    label: Label,
}

impl ImageIndex {
    /// Lists the images of `sources`: folders, `.tar` and `.parquet` files, and patterns of paths.
    ///
    /// # Errors
    /// A source cannot be read or has another layout; an image has no label or a label that is not
    /// among given classes; numbered and named classes are mixed; there is no image at all.
    pub fn open(sources: &[PathBuf], options: &IndexOptions) -> Result<Self> {
        let mut shards = Vec::new();
        let mut found = Vec::new();
        for source in sources {
            for path in expand(source)? {
                let about = fs::metadata(&path).map_err(DataError::io("open", &path))?;
                let number = shards.len() as u32;
                if about.is_dir() {
                    let before = found.len();
                    class_folders(&path, number, &mut found)?;
                    shards.push(Shard { path: path.clone(), images: Images::Folder });
                    if found.len() == before {
                        // A folder of shards.
                        shards.pop();
                        for shard in shards_in(&path)? {
                            let images = images_of(&shard, shards.len() as u32, &mut found)?;
                            shards.push(Shard { path: shard, images });
                        }
                    }
                } else {
                    let images = images_of(&path, number, &mut found)?;
                    shards.push(Shard { path, images });
                }
            }
        }
        if found.is_empty() {
            let named: Vec<String> = sources.iter().map(|s| s.display().to_string()).collect();
            return Err(DataError::TooLittle {
                what: format!("{} holds no images", named.join(", ")),
                fix: LAYOUT.into(),
            });
        }
        if found.len() > IMAGES_MAX {
            let what = format!("{} images", found.len());
            return Err(DataError::setting("images", what, "give at most 2^32 - 1 images"));
        }
        let classes = match &options.classes {
            Some(classes) => classes.clone(),
            None => classes_of(&found, &shards)?,
        };
        let number: BTreeMap<&str, u32> = classes.iter().map(String::as_str).zip(0..).collect();
        let mut entries = Vec::with_capacity(found.len());
        for Found { mut entry, label } in found {
            let name = match &label {
                Label::Number(n) => n.to_string(),
                Label::Name(name) => name.clone(),
            };
            let by_number = match label {
                Label::Number(n) if (n as usize) < classes.len() => Some(n),
                _ => None,
            };
            let Some(class) = number.get(name.as_str()).copied().or(by_number) else {
                let what = format!("the class {name:?} of {} is not one of the {} classes", entry.name, classes.len());
                let fix = "give a set with the classes that the model is trained on";
                return Err(DataError::input(&shards[entry.shard as usize].path, None, what, fix));
            };
            entry.class = class;
            entries.push(entry);
        }
        Ok(Self { shards: Arc::new(shards), entries, classes: Arc::new(classes), decoded: None })
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if it has no image, as a held-back part of nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The names of the classes, in the order of their numbers.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The class of image `i`.
    pub fn class(&self, i: usize) -> u32 {
        self.entries[i].class
    }

    /// Number of images of each class.
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.classes.len()];
        self.entries.iter().for_each(|entry| counts[entry.class as usize] += 1);
        counts
    }

    /// Bytes of all images as they lie on disk.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }

    /// The path of image `i`, or its shard and member, for messages.
    pub fn name(&self, i: usize) -> PathBuf {
        let entry = &self.entries[i];
        self.shards[entry.shard as usize].path.join(&*entry.name)
    }

    /// Divides the images into a part for training and one that is held back.
    ///
    /// An image is held back by the hash of its name under `seed`, so that it stays where
    /// it is when the set grows. At least one image is held back if `fraction` is above 0.
    ///
    /// # Errors
    /// `fraction` is not in 0..1, or nothing is left to train on.
    pub fn split(&self, fraction: f64, seed: u64) -> Result<(Self, Self)> {
        if !(0.0..1.0).contains(&fraction) {
            let what = format!("is {fraction}");
            return Err(DataError::setting("validation_fraction", what, "take a fraction from 0 to below 1"));
        }
        let part = |entries| Self { entries, ..self.without_images() };
        if fraction == 0.0 {
            return Ok((self.clone(), part(Vec::new())));
        }
        let hash = |entry: &Entry| xxh3_64_with_seed(entry.name.as_bytes(), seed);
        let least = self.entries.iter().map(hash).min().unwrap_or(0);
        // 2^64 is a float, 2^64 - 1 is not; a fraction below 1 stays below it.
        let limit = (fraction * 64f64.exp2()) as u64;
        let (held_back, train): (Vec<Entry>, Vec<Entry>) = self.entries.iter().cloned().partition(|entry| {
            let hash = hash(entry);
            hash < limit || hash == least
        });
        if train.is_empty() {
            return Err(DataError::TooLittle {
                what: format!("all of the {} images are held back for validation", self.len()),
                fix: "give more images, or set the validation fraction to 0".into(),
            });
        }
        Ok((part(train), part(held_back)))
    }

    fn without_images(&self) -> Self {
        let (shards, classes) = (Arc::clone(&self.shards), Arc::clone(&self.classes));
        Self { shards, entries: Vec::new(), classes, decoded: self.decoded.clone() }
    }

    /// Reads from `decoded` what was decoded before, and keeps there what was not.
    pub fn keeping(mut self, decoded: Arc<Decoded>) -> Self {
        self.decoded = Some(decoded);
        self
    }

    /// The first `images` images, for example for an evaluation of a part.
    pub fn truncated(mut self, images: usize) -> Self {
        self.entries.truncate(images);
        self
    }

    /// Adds what identifies the images to a hash: names, classes and sizes.
    pub(super) fn fingerprint_into(&self, hash: &mut Xxh3) {
        for class in self.classes.iter() {
            hash.update(class.as_bytes());
            hash.update(&[0]);
        }
        for entry in &self.entries {
            hash.update(entry.name.as_bytes());
            hash.update(&entry.class.to_le_bytes());
            hash.update(&entry.bytes.to_le_bytes());
        }
    }

    /// Decodes image `i`, or reads it where it was decoded before.
    ///
    /// # Errors
    /// [`DataError::Input`] if the image is damaged; any other if it cannot be read.
    pub fn decoded(&self, i: usize) -> Result<Rgb> {
        let decode = |bytes: &[u8]| decode(bytes).map_err(|what| DataError::input(&self.name(i), None, what, REPAIR));
        let Some(decoded) = &self.decoded else { return self.with_bytes(i, decode) };
        match &self.shards[self.entries[i].shard as usize].images {
            // The pages around a row are not unpacked for its identity.
            Images::Parquet(rows) => {
                let identity = rows.identity(self.entries[i].place);
                decoded.get_or(identity, || self.with_bytes(i, decode))
            }
            Images::Folder | Images::Tar(_) => {
                self.with_bytes(i, |bytes| decoded.get_or(identity(bytes), || decode(bytes)))
            }
        }
    }

    /// Gives the encoded bytes of image `i` to `read`.
    fn with_bytes<T>(&self, i: usize, read: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        let entry = &self.entries[i];
        let shard = &self.shards[entry.shard as usize];
        match &shard.images {
            // The range was checked when the shard was opened.
            Images::Tar(map) => read(&map[entry.place.0 as usize..entry.place.1 as usize]),
            Images::Parquet(rows) => rows.with_bytes(entry.place, &entry.name, read),
            Images::Folder => {
                let path = shard.path.join(&*entry.name);
                read(&fs::read(&path).map_err(DataError::io("read", &path))?)
            }
        }
    }

    /// Asks the kernel to bring the shards into memory in the background.
    pub fn warm(&self) {
        for shard in self.shards.iter() {
            match &shard.images {
                Images::Tar(map) => map.warm(),
                Images::Parquet(rows) => rows.warm(),
                Images::Folder => {}
            }
        }
    }
}

/// Numbers the classes: names in their order, numbers as they are.
fn classes_of(found: &[Found], shards: &[Shard]) -> Result<Vec<String>> {
    let labels: BTreeSet<&Label> = found.iter().map(|found| &found.label).collect();
    let greatest = labels.iter().filter_map(|label| match label {
        Label::Number(number) => Some(*number),
        Label::Name(_) => None,
    });
    match greatest.max() {
        None => Ok(labels
            .iter()
            .filter_map(|label| match label {
                Label::Name(name) => Some(name.clone()),
                Label::Number(_) => None,
            })
            .collect()),
        Some(greatest) if labels.iter().all(|label| matches!(label, Label::Number(_))) => {
            Ok((0..=greatest).map(|number| number.to_string()).collect())
        }
        Some(_) => {
            let named = found.iter().find(|found| matches!(found.label, Label::Name(_)));
            let entry = &named.unwrap_or(&found[0]).entry;
            let what = format!("{} has a class with a name, and other images have classes with numbers", entry.name);
            let fix = "label all images by names, or all by numbers";
            Err(DataError::input(&shards[entry.shard as usize].path, None, what, fix))
        }
    }
}

/// The images of the sub-folders of `root`; none if `root` has no sub-folder.
fn class_folders(root: &Path, shard: u32, found: &mut Vec<Found>) -> Result<()> {
    let mut is_first_loose = true;
    let (mut folders, mut loose) = (Vec::new(), None);
    for path in listed(root)? {
        if fs::metadata(&path).is_ok_and(|about| about.is_dir()) {
            folders.push(path);
        } else if is_first_loose && is_image(&path)? {
            (loose, is_first_loose) = (Some(path), false);
        }
    }
    if let Some(path) = loose {
        let what = "lies in no folder of a class";
        return Err(DataError::input(&path, None, what, "move it into the sub-folder of its class"));
    }
    for folder in folders {
        let Some(class) = folder.file_name().and_then(|name| name.to_str()) else {
            return Err(DataError::input(&folder, None, "has a name that is not UTF-8", "rename it"));
        };
        let before = found.len();
        walk(root, &folder, class, shard, 0, found)?;
        if found.len() == before {
            let what = "is the folder of a class, and holds no image";
            return Err(DataError::input(&folder, None, what, "put images into it, or remove it"));
        }
    }
    Ok(())
}

fn walk(root: &Path, folder: &Path, class: &str, shard: u32, depth: usize, found: &mut Vec<Found>) -> Result<()> {
    if depth > DEPTH_MAX {
        let what = format!("lies more than {DEPTH_MAX} folders deep");
        return Err(DataError::input(folder, None, what, "check for links that lead back"));
    }
    for path in listed(folder)? {
        let about = fs::metadata(&path).map_err(DataError::io("open", &path))?;
        if about.is_dir() {
            walk(root, &path, class, shard, depth + 1, found)?;
        } else if is_image(&path)? {
            let Some(name) = path.strip_prefix(root).ok().and_then(Path::to_str) else {
                return Err(DataError::input(&path, None, "has a name that is not UTF-8", "rename it"));
            };
            let entry = Entry { shard, class: 0, name: name.into(), place: (0, 0), bytes: about.len() };
            found.push(Found { entry, label: Label::Name(class.to_owned()) });
        }
    }
    Ok(())
}

/// The entries of a folder in the order of their names, without hidden ones.
fn listed(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(DataError::io("list", folder))? {
        let path = entry.map_err(DataError::io("list", folder))?.path();
        if path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b".")) {
            paths.push(path);
        }
    }
    paths.sort_unstable();
    Ok(paths)
}

/// The `.tar` and `.parquet` files of a folder.
fn shards_in(folder: &Path) -> Result<Vec<PathBuf>> {
    Ok(listed(folder)?
        .into_iter()
        .filter(|path| has_extension(path, "tar") || has_extension(path, "parquet"))
        .collect())
}

fn has_extension(path: &Path, wanted: &str) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(wanted))
}

fn extension_of(name: &str) -> Option<String> {
    name.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase())
}

/// True for a file that is decoded; an error for an image of another format.
fn is_image(path: &Path) -> Result<bool> {
    let extension = path.file_name().and_then(|name| name.to_str()).and_then(extension_of).unwrap_or_default();
    if FOREIGN.contains(&extension.as_str()) {
        let what = format!("is a .{extension} image, which is not read");
        return Err(DataError::input(path, None, what, CONVERT));
    }
    Ok(EXTENSIONS.contains(&extension.as_str()))
}

/// The images of a file.
fn images_of(path: &Path, shard: u32, found: &mut Vec<Found>) -> Result<Images> {
    if !has_extension(path, "parquet") {
        return members(path, shard, found).map(Images::Tar);
    }
    let (images, rows) = Rows::open(path)?;
    found.extend(rows.into_iter().zip(1u64..).map(|(Row { label, group, row, bytes }, number)| {
        let name = format!("row {number}").into();
        Found { entry: Entry { shard, class: 0, name, place: (group, row), bytes }, label }
    }));
    Ok(Images::Parquet(images))
}

/// The images of a tar file and its mapping.
fn members(path: &Path, shard: u32, found: &mut Vec<Found>) -> Result<MappedFile> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_ascii_lowercase();
    if !name.ends_with(".tar") {
        let fix = match name.ends_with(".gz") || name.ends_with(".tgz") || name.ends_with(".zst") {
            true => "unpack the compression: images are compressed themselves, and are read in place",
            false => LAYOUT,
        };
        return Err(DataError::input(
            path,
            None,
            "is neither a folder nor a .tar file nor a .parquet file of images",
            fix,
        ));
    }
    let map = MappedFile::open(path).map_err(DataError::io("open", path))?;
    let before = found.len();
    let mut sample = Sample::default();
    let damaged = |error: std::io::Error| {
        let what = format!("is damaged, or not a tar file ({error})");
        DataError::input(path, None, what, "fetch or pack the file again")
    };
    let mut archive = tar::Archive::new(Cursor::new(&map[..]));
    for entry in archive.entries_with_seek().map_err(damaged)? {
        let mut member = entry.map_err(damaged)?;
        if !member.header().entry_type().is_file() {
            continue;
        }
        let name = String::from_utf8_lossy(&member.path_bytes()).into_owned();
        let Some((key, extension)) = key_of(&name) else { continue };
        if key != sample.key {
            std::mem::replace(&mut sample, Sample { key: key.to_owned(), ..Sample::default() })
                .finish(path, shard, found)?;
        }
        let (begin, bytes) = (member.raw_file_position(), member.size());
        let end = begin.checked_add(bytes).filter(|end| *end <= map.len() as u64);
        let end = end.ok_or_else(|| damaged(std::io::Error::other(format!("{name} ends behind the file"))))?;
        let extension = extension.to_ascii_lowercase();
        if EXTENSIONS.contains(&extension.as_str()) {
            if let Some((other, ..)) = &sample.image {
                let what = format!("sample {key} has two images, {other} and {name}");
                return Err(DataError::input(path, None, what, "pack one image with each key"));
            }
            sample.image = Some((name.clone(), begin, end));
        } else if FOREIGN.contains(&extension.as_str()) {
            let what = format!("{name} is a .{extension} image, which is not read");
            return Err(DataError::input(path, None, what, CONVERT));
        } else if extension == "cls" || extension == "json" {
            let mut text = String::new();
            let bad = |what: String| DataError::input(path, None, what, "write a class number or name");
            (&mut member)
                .take(LABEL_BYTES_MAX)
                .read_to_string(&mut text)
                .map_err(|error| bad(format!("{name} is no text ({error})")))?;
            let label = match extension.as_str() {
                "cls" => label_of_text(&text),
                _ => label_of_json(&text),
            };
            match label {
                Ok(Some(label)) if extension == "cls" || sample.label.is_none() => sample.label = Some(label),
                Ok(_) => {}
                Err(what) => return Err(bad(format!("{name} {what}"))),
            }
        }
    }
    sample.finish(path, shard, found)?;
    if found.len() == before {
        return Err(DataError::input(path, None, "holds no images", "give the right file"));
    }
    Ok(map)
}

/// The members with a key.
#[derive(Default)]
struct Sample {
    key: String,
    /// Name, begin and end of the image.
    image: Option<(String, u64, u64)>,
    label: Option<Label>,
}

impl Sample {
    fn finish(self, path: &Path, shard: u32, found: &mut Vec<Found>) -> Result<()> {
        let Some((name, begin, end)) = self.image else { return Ok(()) };
        let Some(label) = self.label else {
            let what = format!("{name} has no label");
            let fix = format!("pack {0}.cls or {0}.json with a field \"label\" behind it", self.key);
            return Err(DataError::input(path, None, what, fix));
        };
        let entry = Entry { shard, class: 0, name: name.into(), place: (begin, end), bytes: end - begin };
        found.push(Found { entry, label });
        Ok(())
    }
}

pub(super) fn label_of_text(text: &str) -> std::result::Result<Option<Label>, String> {
    let text = text.trim();
    if text.is_empty() || text.len() > 200 || text.contains(['\n', '\0']) {
        return Err("is no class".into());
    }
    match text.parse::<i64>() {
        Ok(number) => label_of_number(number).map(Some),
        Err(_) => Ok(Some(Label::Name(text.to_owned()))),
    }
}

fn label_of_json(text: &str) -> std::result::Result<Option<Label>, String> {
    let value: serde_json::Value = serde_json::from_str(text).map_err(|error| format!("is no JSON ({error})"))?;
    match value.get("label").or_else(|| value.get("cls")) {
        None => Ok(None),
        Some(serde_json::Value::String(name)) => label_of_text(name),
        Some(number) => match number.as_i64() {
            Some(number) => label_of_number(number).map(Some),
            None => Err(format!("has the label {number}, which is neither a number nor a name")),
        },
    }
}

pub(super) fn label_of_number(number: i64) -> std::result::Result<Label, String> {
    match u32::try_from(number) {
        Ok(number) if number < CLASSES_MAX => Ok(Label::Number(number)),
        _ => Err(format!("has the class {number}, and classes are from 0 to {}", CLASSES_MAX - 1)),
    }
}

/// The key of a member and its extension, as WebDataset divides names: at the first dot of the file
/// name. `None` for hidden files and names without a dot.
fn key_of(name: &str) -> Option<(&str, &str)> {
    let begin = name.rfind('/').map_or(0, |at| at + 1);
    let dot = name[begin..].find('.').filter(|&dot| dot > 0)?;
    Some((&name[..begin + dot], &name[begin + dot + 1..]))
}
