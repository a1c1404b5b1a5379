//! GGUF files (ggml's `docs/gguf.md`, versions 2 and 3): metadata and tensors in one file.
//!
//! A file is `GGUF`, u32 version, u64 tensors, u64 metadata entries; the entries, each a name, a
//! type and a value; the tensors' descriptions, each a name, dimensions (the fastest first), a type
//! and an offset; and, from the next multiple of `general.alignment` on, the tensors' bytes. All
//! numbers are little-endian.

use super::Quantisation;
use crate::weights::{Change, Encoding, StoredDType, StoredTensor, TensorFile, WeightsError};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

/// The most bytes of a string, elements of an array, and entries or tensors that are accepted. The
/// largest vocabularies have 2^18 tokens.
const STRING_MAX: u64 = 1 << 26;
const ARRAY_MAX: u64 = 1 << 24;
const ENTRIES_MAX: u64 = 1 << 20;
/// Dimensions of a tensor.
const DIMENSIONS_MAX: u32 = 4;
/// The place of the first tensor is a multiple of this, unless the file says otherwise.
const ALIGNMENT: u64 = 32;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum MetaValue {
    /// A whole number of any width.
    Integer(i128),
    /// A number of 32 or 64 bits.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text.
    Text(String),
    /// Several values of one type.
    Array(Vec<MetaValue>),
}

/// The metadata of a file, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(pub BTreeMap<String, MetaValue>);

impl Metadata {
    /// Sets an entry.
    pub fn set(&mut self, key: &str, value: MetaValue) {
        self.0.insert(key.to_owned(), value);
    }

    /// A whole number.
    pub fn integer(&self, key: &str) -> Option<u64> {
        match self.0.get(key)? {
            MetaValue::Integer(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// A number.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.0.get(key)? {
            MetaValue::Integer(n) => Some(*n as f64),
            MetaValue::Float(x) => Some(*x),
            _ => None,
        }
    }

    /// A truth value.
    pub fn flag(&self, key: &str) -> Option<bool> {
        match self.0.get(key)? {
            MetaValue::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    /// Text.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.0.get(key)? {
            MetaValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Several values.
    pub fn array(&self, key: &str) -> Option<&[MetaValue]> {
        match self.0.get(key)? {
            MetaValue::Array(values) => Some(values),
            _ => None,
        }
    }

    /// Several texts; None where one is none.
    pub fn texts(&self, key: &str) -> Option<Vec<String>> {
        let text = |value: &MetaValue| match value {
            MetaValue::Text(text) => Some(text.clone()),
            _ => None,
        };
        self.array(key)?.iter().map(text).collect()
    }
}

/// The numbers of encodings in ggml, of those that weights can have.
const ENCODINGS: [(u32, Encoding); 11] = [
    (0, Encoding::Float(StoredDType::F32)),
    (1, Encoding::Float(StoredDType::F16)),
    (30, Encoding::Float(StoredDType::BF16)),
    (2, Encoding::Blocks(Quantisation::Q4_0)),
    (3, Encoding::Blocks(Quantisation::Q4_1)),
    (6, Encoding::Blocks(Quantisation::Q5_0)),
    (7, Encoding::Blocks(Quantisation::Q5_1)),
    (8, Encoding::Blocks(Quantisation::Q8_0)),
    (12, Encoding::Blocks(Quantisation::Q4K)),
    (13, Encoding::Blocks(Quantisation::Q5K)),
    (14, Encoding::Blocks(Quantisation::Q6K)),
];

/// The names of the types that are not read, for messages.
const OTHER_TYPES: [(u32, &str); 12] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
];

/// Opens a file: its metadata, and its tensors with checked places.
///
/// # Errors
/// A file that is damaged, or has tensors of a kind that is not read.
pub fn open(path: &Path) -> Result<(Metadata, TensorFile), WeightsError> {
    let file = File::open(path).map_err(WeightsError::io("opening", path))?;
    let len = file.metadata().map_err(WeightsError::io("reading", path))?.len();
    let mut reader = Reader { bytes: BufReader::with_capacity(1 << 16, file), left: len };
    let damaged = |problem: String| WeightsError::Gguf { path: path.into(), problem };
    let (metadata, tensors) = reader.header().map_err(damaged)?;
    let alignment = metadata.integer("general.alignment").unwrap_or(ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        return Err(damaged(format!("general.alignment = {alignment} is no power of two up to 2^20")));
    }
    let data_start = (len - reader.left).next_multiple_of(alignment);
    let mut by_name = BTreeMap::new();
    for (name, tensor) in tensors {
        let end = data_start.checked_add(tensor.range.end).filter(|end| *end <= len);
        if end.is_none() || !tensor.range.start.is_multiple_of(alignment) {
            let (place, data) = (&tensor.range, len.saturating_sub(data_start));
            return Err(damaged(format!("tensor `{name}` lies at {place:?} of {data} bytes of data: it is cut short")));
        }
        if by_name.insert(name.clone(), tensor).is_some() {
            return Err(damaged(format!("tensor `{name}` is there twice")));
        }
    }
    Ok((metadata, TensorFile::of(path, reader.bytes.into_inner(), data_start, by_name)))
}

/// The header's bytes, and the bytes of the file that are left.
struct Reader {
    bytes: BufReader<File>,
    left: u64,
}

type Tensors = Vec<(String, StoredTensor)>;

impl Reader {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        let short = || "it ends within its header".to_owned();
        self.left = self.left.checked_sub(bytes.len() as u64).ok_or_else(short)?;
        self.bytes.read_exact(bytes).map_err(|error| error.to_string())
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn count(&mut self, what: &str, max: u64) -> Result<u64, String> {
        match self.u64()? {
            n if n <= max.min(self.left) => Ok(n),
            n => Err(format!("it claims {n} {what}")),
        }
    }

    fn text(&mut self) -> Result<String, String> {
        let len = self.count("bytes of a string", STRING_MAX)?;
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|error| format!("a string is not UTF-8: {error}"))
    }

    fn value(&mut self, kind: u32, nested: bool) -> Result<MetaValue, String> {
        Ok(match kind {
            0 => MetaValue::Integer(u8::from_le_bytes(self.take()?).into()),
            1 => MetaValue::Integer(i8::from_le_bytes(self.take()?).into()),
            2 => MetaValue::Integer(u16::from_le_bytes(self.take()?).into()),
            3 => MetaValue::Integer(i16::from_le_bytes(self.take()?).into()),
            4 => MetaValue::Integer(self.u32()?.into()),
            5 => MetaValue::Integer(i32::from_le_bytes(self.take()?).into()),
            6 => MetaValue::Float(f32::from_le_bytes(self.take()?).into()),
            7 => MetaValue::Bool(self.take::<1>()?[0] != 0),
            8 => MetaValue::Text(self.text()?),
            9 if !nested => {
                let kind = self.u32()?;
                let len = self.count("elements of an array", ARRAY_MAX)?;
                MetaValue::Array((0..len).map(|_| self.value(kind, true)).collect::<Result<_, _>>()?)
            }
            10 => MetaValue::Integer(self.u64()?.into()),
            11 => MetaValue::Integer(i64::from_le_bytes(self.take()?).into()),
            12 => MetaValue::Float(f64::from_le_bytes(self.take()?)),
            _ => return Err(format!("a value has the unknown type {kind}")),
        })
    }

    fn header(&mut self) -> Result<(Metadata, Tensors), String> {
        if &self.take::<4>()? != b"GGUF" {
            return Err("it does not begin with `GGUF`".into());
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            return Err(format!("it has version {version}; versions 2 and 3 (little-endian) are read"));
        }
        let tensors = self.count("tensors", ENTRIES_MAX)?;
        let entries = self.count("metadata entries", ENTRIES_MAX)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..entries {
            let name = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind, false).map_err(|problem| format!("metadata `{name}`: {problem}"))?;
            metadata.insert(name, value);
        }
        let tensors = (0..tensors).map(|_| self.tensor()).collect::<Result<_, _>>()?;
        Ok((Metadata(metadata), tensors))
    }

    fn tensor(&mut self) -> Result<(String, StoredTensor), String> {
        let name = self.text()?;
        let dimensions = self.u32()?;
        if !(1..=DIMENSIONS_MAX).contains(&dimensions) {
            return Err(format!("tensor `{name}` has {dimensions} dimensions"));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(usize::try_from(self.u64()?).map_err(|error| error.to_string())?);
        }
        shape.reverse();
        let (kind, start) = (self.u32()?, self.u64()?);
        let Some((_, encoding)) = ENCODINGS.into_iter().find(|(number, _)| *number == kind) else {
            let known = OTHER_TYPES.iter().find(|(number, _)| *number == kind);
            let known = known.map_or_else(|| format!("type {kind}"), |(_, name)| (*name).to_owned());
            let read: Vec<&str> = Quantisation::ALL.iter().map(|kind| kind.name()).collect();
            return Err(format!(
                "tensor `{name}` is {known}, which is not read; read are F32, F16, BF16, {}",
                read.join(", ")
            ));
        };
        let elements = shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
        let row = shape.last().copied().unwrap_or(1);
        let (block, bytes) = encoding.block();
        let bytes = elements.filter(|_| row.is_multiple_of(block)).and_then(|n| (n / block).checked_mul(bytes));
        let Some(end) = bytes.and_then(|bytes| start.checked_add(bytes as u64)) else {
            return Err(format!("tensor `{name}`, {} {shape:?}, is impossible", encoding.name()));
        };
        let (dtype, change) = (encoding.name().into(), Change::None);
        Ok((name, StoredTensor { dtype, shape, range: start..end, change, packed: None }))
    }
}

/// The header of a file that is to be written: tensors first, then all of it by
/// [`Writer::finish`].
#[derive(Default)]
pub(super) struct Writer {
    tensors: Vec<u8>,
    count: u64,
    /// Places of the tensors from the end of the header on.
    places: Vec<u64>,
    end: u64,
}

impl Writer {
    /// Adds a tensor of this shape, the slowest dimension first.
    pub fn tensor(&mut self, name: &str, encoding: Encoding, shape: &[usize]) {
        let at = self.end.next_multiple_of(ALIGNMENT);
        put_text(&mut self.tensors, name);
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|side| self.tensors.extend((*side as u64).to_le_bytes()));
        let number = ENCODINGS.iter().find(|(_, known)| *known == encoding).map_or(0, |(number, _)| *number);
        self.tensors.extend(number.to_le_bytes());
        self.tensors.extend(at.to_le_bytes());
        let (block, bytes) = encoding.block();
        self.end = at + (shape.iter().product::<usize>() / block * bytes) as u64;
        self.count += 1;
        self.places.push(at);
    }

    /// The header's bytes with padding, the place of each tensor in the file, and its size.
    pub fn finish(self, metadata: &Metadata) -> (Vec<u8>, Vec<u64>, u64) {
        let mut header = b"GGUF".to_vec();
        header.extend(3u32.to_le_bytes());
        header.extend(self.count.to_le_bytes());
        header.extend((metadata.0.len() as u64).to_le_bytes());
        // The architecture comes first, as in other writers' files.
        let is_first = |key: &&String| !key.starts_with("general.");
        let mut keys: Vec<&String> = metadata.0.keys().collect();
        keys.sort_by_key(|key| is_first(key));
        for key in keys {
            put_text(&mut header, key);
            put_value(&mut header, &metadata.0[key]);
        }
        header.extend(self.tensors);
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        let start = header.len() as u64;
        let places = self.places.into_iter().map(|place| start + place).collect();
        (header, places, (start + self.end).next_multiple_of(ALIGNMENT))
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The type of a value, and its bytes.
fn put_value(out: &mut Vec<u8>, value: &MetaValue) {
    out.extend(kind(value).to_le_bytes());
    put_plain(out, value);
}

/// The number of a value's type. Whole numbers go out as u32, and as i32 or i64 where they do not
/// fit.
fn kind(value: &MetaValue) -> u32 {
    match value {
        MetaValue::Integer(n) if u32::try_from(*n).is_ok() => 4,
        MetaValue::Integer(n) if i32::try_from(*n).is_ok() => 5,
        MetaValue::Integer(_) => 11,
        MetaValue::Float(_) => 6,
        MetaValue::Bool(_) => 7,
        MetaValue::Text(_) => 8,
        MetaValue::Array(_) => 9,
    }
}

fn put_plain(out: &mut Vec<u8>, value: &MetaValue) {
    match value {
        MetaValue::Integer(n) => match kind(value) {
            4 => out.extend((*n as u32).to_le_bytes()),
            5 => out.extend((*n as i32).to_le_bytes()),
            _ => out.extend((*n as i64).to_le_bytes()),
        },
        MetaValue::Float(x) => out.extend((*x as f32).to_le_bytes()),
        MetaValue::Bool(flag) => out.push(u8::from(*flag)),
        MetaValue::Text(text) => put_text(out, text),
        MetaValue::Array(values) => {
            // Types of tokens are i32 in other writers' files.
            let of = values.first().map_or(8, |value| if kind(value) == 4 { 5 } else { kind(value) });
            out.extend(of.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            for value in values {
                match value {
                    MetaValue::Integer(n) => out.extend((*n as i32).to_le_bytes()),
                    value => put_plain(out, value),
                }
            }
        }
    }
}
