//! One safetensors file: its header, checked, and reads of single tensors; the encodings of tensors
//! in it and in [GGUF files](crate::gguf).

use super::WeightsError;
use super::packed::PackedParts;
use crate::gguf::Quantisation;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use trainyard_base::lock;
use trainyard_tensor::{Element, bf16, f16};

/// The most bytes of a header that are accepted, as in the format's own library.
const HEADER_MAX: u64 = 100_000_000;

/// The dtypes of the format that weights can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoredDType {
    /// IEEE binary32.
    F32,
    /// Upper half of a binary32.
    BF16,
    /// IEEE binary16.
    F16,
}

impl StoredDType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        if self == StoredDType::F32 { 4 } else { 2 }
    }

    /// The name in headers.
    pub fn name(self) -> &'static str {
        match self {
            StoredDType::F32 => "F32",
            StoredDType::BF16 => "BF16",
            StoredDType::F16 => "F16",
        }
    }

    /// Widens stored bytes to f32.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            StoredDType::F32 => {
                for (x, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            StoredDType::BF16 => {
                for (x, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *x = Element::to_f32(bf16::from_le_bytes([b[0], b[1]]));
                }
            }
            StoredDType::F16 => {
                for (x, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *x = Element::to_f32(f16::from_le_bytes([b[0], b[1]]));
                }
            }
        }
    }

    /// Rounds f32 to stored bytes, to nearest, ties to even.
    pub(crate) fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        out.resize(values.len() * self.size(), 0);
        match self {
            StoredDType::F32 => {
                for (b, x) in out.chunks_exact_mut(4).zip(values) {
                    b.copy_from_slice(&x.to_le_bytes());
                }
            }
            StoredDType::BF16 => {
                for (b, x) in out.chunks_exact_mut(2).zip(values) {
                    b.copy_from_slice(&bf16::from_f32(*x).to_le_bytes());
                }
            }
            StoredDType::F16 => {
                for (b, x) in out.chunks_exact_mut(2).zip(values) {
                    b.copy_from_slice(&f16::from_f32(*x).to_le_bytes());
                }
            }
        }
    }
}

/// The encoding of weights in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encoding {
    /// Numbers one by one.
    Float(StoredDType),
    /// Blocks of quantised numbers; in GGUF files only.
    Blocks(Quantisation),
}

impl Encoding {
    /// The encoding that headers call `name`.
    pub fn named(name: &str) -> Option<Encoding> {
        let floats = [StoredDType::F32, StoredDType::BF16, StoredDType::F16].map(Encoding::Float);
        let blocks = Quantisation::ALL.map(Encoding::Blocks);
        floats.into_iter().chain(blocks).find(|encoding| encoding.name() == name)
    }

    /// The name in headers.
    pub fn name(self) -> &'static str {
        match self {
            Encoding::Float(dtype) => dtype.name(),
            Encoding::Blocks(kind) => kind.name(),
        }
    }

    /// Elements and bytes of a block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Encoding::Float(dtype) => (1, dtype.size()),
            Encoding::Blocks(kind) => (kind.elements(), kind.bytes()),
        }
    }

    /// The values of whole blocks in f32.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Encoding::Float(dtype) => dtype.decode(bytes, out),
            Encoding::Blocks(kind) => kind.decode(bytes, out),
        }
    }
}

/// A tensor's entry in a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its dtype's name; that of weights is one of [`Encoding`], other tensors may have any.
    pub dtype: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its bytes, from the end of the header on.
    pub range: std::ops::Range<u64>,
    /// The difference between what is stored and the tensor of a Hugging Face file.
    pub change: Change,
    /// The other parts of a matrix of few bits. `dtype` is then that of its values, `shape` that of
    /// the matrix, and `range` the place of its codes.
    pub packed: Option<Arc<PackedParts>>,
}

/// The difference between a stored tensor and that of a Hugging Face file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// None.
    None,
    /// One is added to each element.
    PlusOne,
    /// It is transposed.
    Transposed,
    /// The rows of a head's two halves alternate, in heads of this many rows.
    Interleaved {
        /// Rows of a head.
        head: usize,
    },
}

impl StoredTensor {
    /// Its encoding, if it is one that weights can have.
    pub fn encoding(&self) -> Option<Encoding> {
        Encoding::named(&self.dtype)
    }
}

/// An open file with a checked header.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: Mutex<File>,
    data_start: u64,
    tensors: BTreeMap<String, StoredTensor>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// Header entries in file order, so that a repeated name is noticed.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entries, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

impl TensorFile {
    /// Opens a file and checks its header against its length: every tensor's bytes fit its shape
    /// and dtype, they neither overlap nor leave gaps, and together are the file.
    pub fn open(path: &Path) -> Result<TensorFile, WeightsError> {
        let mut file = File::open(path).map_err(WeightsError::io("opening", path))?;
        let file_len = file.metadata().map_err(WeightsError::io("reading", path))?.len();
        let damaged = |problem: String| WeightsError::Format { path: path.into(), problem };
        if file_len < 8 {
            return Err(damaged(format!("{file_len} bytes are too few for a header")));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(WeightsError::io("reading", path))?;
        let header_len = u64::from_le_bytes(length);
        if header_len > HEADER_MAX.min(file_len - 8) {
            return Err(damaged(format!("it claims a header of {header_len} bytes and has {} in all", file_len)));
        }
        let mut header = vec![0; header_len as usize];
        file.read_exact(&mut header).map_err(WeightsError::io("reading", path))?;
        let entries: Entries = serde_json::from_slice(&header)
            .map_err(|error| damaged(format!("its header is not as specified: {error}")))?;
        let tensors = check(entries, file_len - 8 - header_len).map_err(damaged)?;
        Ok(TensorFile { path: path.into(), file: Mutex::new(file), data_start: 8 + header_len, tensors })
    }

    /// An open file whose header was checked: tensors lie at their places from byte `data_start`
    /// on.
    pub(crate) fn of(path: &Path, file: File, data_start: u64, tensors: BTreeMap<String, StoredTensor>) -> TensorFile {
        TensorFile { path: path.into(), file: Mutex::new(file), data_start, tensors }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    /// Reads `into.len()` bytes of `tensor` from byte `skip` of it on.
    pub fn read(&self, tensor: &StoredTensor, skip: usize, into: &mut [u8]) -> Result<(), WeightsError> {
        let mut file = lock(&self.file);
        let start = self.data_start + tensor.range.start + skip as u64;
        file.seek(SeekFrom::Start(start))
            .and_then(|_| file.read_exact(into))
            .map_err(WeightsError::io("reading", &self.path))
    }
}

/// Bits of an element of any dtype of the format; None for a name it does not have.
fn bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

fn check(entries: Entries, data_len: u64) -> Result<BTreeMap<String, StoredTensor>, String> {
    let mut tensors = BTreeMap::new();
    let mut ranges = Vec::new();
    for (name, Entry { dtype, shape, data_offsets: [start, end] }) in entries.0 {
        let Some(bits) = bits(&dtype) else {
            return Err(format!("tensor `{name}` has the unknown dtype `{dtype}`"));
        };
        let elements = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim as u64));
        let Some(size) = elements.and_then(|n| n.checked_mul(bits)).filter(|bits| bits % 8 == 0).map(|bits| bits / 8)
        else {
            return Err(format!("tensor `{name}` has the impossible shape {shape:?}"));
        };
        if end < start || end - start != size {
            return Err(format!("tensor `{name}`, {dtype} {shape:?}, needs {size} bytes and claims {start}..{end}"));
        }
        if end > data_len {
            return Err(format!(
                "tensor `{name}` ends at byte {end} of the data, of which there are {data_len}: it is cut short"
            ));
        }
        ranges.push((start, end, name.clone()));
        if tensors
            .insert(name.clone(), StoredTensor { dtype, shape, range: start..end, change: Change::None, packed: None })
            .is_some()
        {
            return Err(format!("tensor `{name}` is there twice"));
        }
    }
    ranges.sort();
    let mut covered = 0;
    for (start, end, name) in ranges {
        if start != covered {
            let what = if start < covered { "overlaps the one before" } else { "leaves a gap before it" };
            return Err(format!("tensor `{name}` at {start}..{end} {what}, which ends at {covered}"));
        }
        covered = end;
    }
    if covered != data_len {
        return Err(format!("{} bytes after the last tensor", data_len - covered));
    }
    Ok(tensors)
}
