//! Reading a folder of weights into a model's flat unit buffers.

use super::file::{Change, Encoding, StoredTensor, TensorFile};
use super::packed::{self, PackedParts};
use super::{INDEX, SINGLE, WeightsError};
use crate::gguf;
use crate::hf::implied_zeros;
use crate::parameter::{ParameterSpec, Source, UnitLayout};
use crate::{Model, ModelError};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use trainyard_autograd::{ParamId, Store};
use trainyard_tensor::{DType, Device, Purpose};

/// Bytes converted at a time.
const CHUNK: usize = 1 << 22;

/// An open folder of weights that fit a model.
#[derive(Debug)]
pub struct WeightReader {
    files: Vec<TensorFile>,
    places: Places,
    layouts: Vec<UnitLayout>,
    notes: Vec<String>,
}

/// A rectangle of a source, as the parameter has it: not transposed.
struct Block {
    rows: Range<usize>,
    columns: Range<usize>,
    /// Rows and columns of all of the source.
    shape: [usize; 2],
    /// Elements from the start of one row to the next where it is read to.
    stride: usize,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl WeightReader {
    /// Opens `folder`, or a GGUF file, and checks that it holds exactly the tensors of `model`, in
    /// the right shapes. Reads headers only, except to compare a tied head that is stored
    /// nevertheless.
    pub fn open(folder: &Path, model: &Model) -> Result<WeightReader, WeightsError> {
        let mut notes = Vec::new();
        let (files, mut places) = match model.spec().filter(|_| gguf::is_gguf(folder)) {
            Some(spec) => gguf::open_weights(folder, spec, &mut notes)?,
            None => open_files(folder)?,
        };
        packed::join(folder, &files, &mut places)?;
        drop_buffers(model, &mut places, &mut notes);
        add_prefix(model, &mut places);
        let layouts = (0..model.units().len()).map(|unit| model.layout(unit, 1)).collect();
        let mut reader = WeightReader { files, places, layouts, notes };
        let mut problems = Vec::new();
        reader.drop_tied_head(model, &mut problems)?;
        reader.drop_zeros(model, &mut problems)?;
        reader.compare(model, &mut problems);
        if problems.is_empty() { Ok(reader) } else { Err(WeightsError::Mismatch { path: folder.into(), problems }) }
    }

    /// A reader of `places` in `files`, which were compared with `model`.
    pub(super) fn of_files(files: Vec<TensorFile>, places: Places, model: &Model) -> WeightReader {
        let layouts = (0..model.units().len()).map(|unit| model.layout(unit, 1)).collect();
        WeightReader { files, places, layouts, notes: Vec::new() }
    }

    /// Notes for the user, such as stored tensors that are no weights.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Reads a whole unit into its flat buffer, laid out for one shard; gaps become zero.
    pub fn read_unit(&self, model: &Model, unit: usize, out: &mut [f32]) -> Result<(), WeightsError> {
        let layout = &self.layouts[unit];
        out.fill(0.0);
        for (index, parameter) in model.units()[unit].parameters().iter().enumerate() {
            self.read_parameter(parameter, &mut out[layout.range(index)])?;
        }
        Ok(())
    }

    /// Reads the parameter in slot `id`.
    pub fn read_slot(&self, model: &Model, id: ParamId, out: &mut [f32]) -> Result<(), WeightsError> {
        match model.find(id) {
            Some(parameter) => self.read_parameter(parameter, out),
            None => Err(WeightsError::NotExportable(format!("there is no parameter {id}"))),
        }
    }

    /// Reads every parameter into a [`Store`], in f32, for small programs; the engine reads units
    /// into its own buffers.
    pub fn read_store(&self, model: &Model, device: &Device) -> Result<Store, ModelError> {
        let mut store = Store::new();
        for (id, parameter) in model.parameters() {
            let mut value = device.empty(&parameter.shape, DType::F32, Purpose::Params)?;
            value.overwrite(|value: &mut [f32]| self.read_parameter(parameter, value))??;
            store.insert(id, value);
        }
        Ok(store)
    }

    fn read_parameter(&self, parameter: &ParameterSpec, out: &mut [f32]) -> Result<(), WeightsError> {
        self.read_part(parameter, 0..parameter.elements(), out)
    }

    /// Reads the elements `local` of the part of a parameter that a rank holds. Of the files, only
    /// the rows and columns that these elements lie in are read.
    ///
    /// # Errors
    /// Refusals of the operating system, and an `out` of another length than `local`.
    pub fn read_part(
        &self,
        parameter: &ParameterSpec,
        local: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        if out.len() != local.len() || local.end > parameter.elements() {
            let path = self.files.first().map_or_else(PathBuf::new, |file| file.path().into());
            let name = &parameter.name;
            let problem = format!("{} elements are no room for {local:?} of a part of `{name}`", out.len());
            return Err(WeightsError::Mismatch { path, problems: vec![problem] });
        }
        let rows = parameter.whole_shape().first().copied().unwrap_or(1);
        for patch in parameter.patches(local.clone()) {
            // Rows of the patch's matrix in one row of the parameter; more than one only if a split
            // is along a later dimension than the second.
            let each = parameter.whole_shape().iter().product::<usize>() / (rows * patch.width).max(1);
            for source in &parameter.sources {
                let start = source.rows.start * each;
                let held = patch.rows.start.max(start)..patch.rows.end.min(source.rows.end * each);
                if held.is_empty() {
                    continue;
                }
                let first = patch.local - local.start + (held.start - patch.rows.start) * patch.local_stride;
                let block = Block {
                    rows: held.start - start..held.end - start,
                    columns: patch.columns.clone(),
                    shape: [source.rows.len() * each, patch.width],
                    stride: patch.local_stride,
                };
                self.read_block(source, &block, &mut out[first..])?;
            }
        }
        Ok(())
    }

    /// Reads a rectangle of a source. Its first element goes to the front of `out`.
    fn read_block(&self, source: &Source, block: &Block, out: &mut [f32]) -> Result<(), WeightsError> {
        let (file, tensor) = &self.places[&source.hf_name];
        let Block { rows, columns, shape: [all_rows, width], stride } = block;
        if !source.transposed || tensor.change == Change::Transposed {
            // Full rows lie one after the other, here and there.
            if columns.len() == *width && stride == width {
                return self.read_range(*file, tensor, rows.start * width, &mut out[..rows.len() * width]);
            }
            for (number, row) in rows.clone().enumerate() {
                let out = &mut out[number * stride..][..columns.len()];
                self.read_range(*file, tensor, row * width + columns.start, out)?;
            }
            return Ok(());
        }
        // Stored as [width, rows]: a stripe of stored rows becomes a stripe of the parameter's
        // columns.
        let count = rows.len();
        let stripe = (CHUNK / 4 / count.max(1)).clamp(1, columns.len().max(1));
        let mut values = vec![0.0; stripe * count];
        for first in columns.clone().step_by(stripe) {
            let stored = first..columns.end.min(first + stripe);
            let values = &mut values[..stored.len() * count];
            if count == *all_rows {
                self.read_range(*file, tensor, first * all_rows, values)?;
            } else {
                for (column, values) in stored.clone().zip(values.chunks_exact_mut(count)) {
                    self.read_range(*file, tensor, column * all_rows + rows.start, values)?;
                }
            }
            for row in 0..count {
                let out = &mut out[row * stride + first - columns.start..][..stored.len()];
                for (column, x) in out.iter_mut().enumerate() {
                    *x = values[column * count + row];
                }
            }
        }
        Ok(())
    }

    /// Elements `first ..` of a tensor as a Hugging Face file has it, but for its orientation.
    fn read_range(
        &self,
        file: usize,
        tensor: &StoredTensor,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        let Change::Interleaved { head } = tensor.change else {
            self.read_stored(file, tensor, first, out)?;
            if tensor.change == Change::PlusOne {
                out.iter_mut().for_each(|x| *x -= 1.0);
            }
            return Ok(());
        };
        // A vector's rows have one element.
        let width = if tensor.shape.len() == 1 { 1 } else { tensor.shape.last().copied().unwrap_or(1) };
        let (mut at, end) = (first, first + out.len());
        while at < end {
            let (row, column) = (at / width, at % width);
            let (start, half, inside) = (row / head * head, row % head / (head / 2), row % (head / 2));
            let stored = (start + 2 * inside + half) * width + column;
            let count = (width - column).min(end - at);
            self.read_stored(file, tensor, stored, &mut out[at - first..][..count])?;
            at += count;
        }
        Ok(())
    }

    /// Elements `first ..` of a tensor as it is stored.
    fn read_stored(
        &self,
        file: usize,
        tensor: &StoredTensor,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        if let Some(parts) = &tensor.packed {
            return self.read_packed(file, tensor, parts, first, out);
        }
        let file = &self.files[file];
        let Some(encoding) = tensor.encoding() else {
            let problem = format!("a tensor of dtype {} is needed as f32, bf16 or f16", tensor.dtype);
            return Err(WeightsError::Format { path: file.path().into(), problem });
        };
        let (block, block_bytes) = encoding.block();
        let most = CHUNK / block_bytes * block;
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        let (mut at, end) = (first, first + out.len());
        while at < end {
            let start = at / block * block;
            let stop = end.min(start + most);
            let blocks = (stop - start).div_ceil(block);
            bytes.resize(blocks * block_bytes, 0);
            file.read(tensor, start / block * block_bytes, &mut bytes)?;
            let part = &mut out[at - first..stop - first];
            if part.len() == blocks * block {
                encoding.decode(&bytes, part);
            } else {
                values.resize(blocks * block, 0.0);
                encoding.decode(&bytes, &mut values);
                part.copy_from_slice(&values[at - start..stop - start]);
            }
            at = stop;
        }
        Ok(())
    }

    /// Elements `first ..` of a matrix of few bits.
    fn read_packed(
        &self,
        file: usize,
        tensor: &StoredTensor,
        parts: &PackedParts,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        let PackedParts { format, scales: (of_scales, scales) } = parts;
        let (columns, encoding) = (tensor.shape[1], scales.encoding());
        let (Some(encoding), false) = (encoding, out.is_empty()) else { return Ok(()) };
        let (groups, group) = (format.groups(columns), format.group_in(columns));
        let (row_bytes, scale_bytes) = (format.row_bytes(columns), groups * encoding.block().1);
        let rows = first / columns..(first + out.len()).div_ceil(columns);
        let each = (CHUNK / row_bytes).max(1);
        let (mut bytes, mut factors) = (Vec::new(), vec![0.0; groups]);
        let (mut codes, mut values) = (vec![0; columns], vec![0.0; columns]);
        let mut rounded = Vec::new();
        for start in rows.clone().step_by(each) {
            let count = each.min(rows.end - start);
            bytes.resize(count * (row_bytes + scale_bytes), 0);
            let (of_codes, of_factors) = bytes.split_at_mut(count * row_bytes);
            self.files[file].read(tensor, start * row_bytes, of_codes)?;
            self.files[*of_scales].read(scales, start * scale_bytes, of_factors)?;
            let lines = of_codes.chunks_exact(row_bytes).zip(of_factors.chunks_exact(scale_bytes));
            for (row, (line, factor_bytes)) in lines.enumerate() {
                format.unpack(line, &mut codes);
                encoding.decode(factor_bytes, &mut factors);
                for ((codes, values), factor) in codes.chunks(group).zip(values.chunks_mut(group)).zip(&factors) {
                    codes.iter().zip(values).for_each(|(code, value)| *value = f32::from(*code) * factor);
                }
                if let Encoding::Float(dtype) = encoding {
                    dtype.encode(&values, &mut rounded);
                    dtype.decode(&rounded, &mut values);
                }
                let at = (start + row) * columns;
                let (from, to) = (at.max(first), (at + columns).min(first + out.len()));
                out[from - first..to - first].copy_from_slice(&values[from - at..to - at]);
            }
        }
        Ok(())
    }

    /// Collects every difference between the stored tensors and the model's.
    fn compare(&self, model: &Model, problems: &mut Vec<String>) {
        let mut wanted = BTreeSet::new();
        for (id, parameter) in model.parameters() {
            if parameter.sources.is_empty() {
                problems
                    .push(format!("parameter {} has no name in files", model.parameter_name(id).unwrap_or_default()));
            }
            for source in &parameter.sources {
                wanted.insert(source.hf_name.as_str());
                let mut shape = source.shape(parameter.whole_shape());
                if self.places.get(&source.hf_name).is_some_and(|(_, stored)| stored.change == Change::Transposed) {
                    shape.reverse();
                }
                match self.places.get(&source.hf_name) {
                    None => problems.push(format!("`{}` {shape:?} is missing", source.hf_name)),
                    Some((_, stored)) if stored.shape != shape => {
                        problems.push(format!("`{}` is {:?} and should be {shape:?}", source.hf_name, stored.shape))
                    }
                    Some((_, stored)) if stored.encoding().is_none() => problems.push(format!(
                        "`{}` has dtype {}; weights must be F32, BF16 or F16",
                        source.hf_name, stored.dtype
                    )),
                    Some(_) => {}
                }
            }
        }
        for (name, (_, stored)) in self.places.iter().filter(|(name, _)| !wanted.contains(name.as_str())) {
            problems.push(format!("`{name}` {:?} is no part of it", stored.shape));
        }
    }

    /// Drops a stored `lm_head.weight`, which a tied model does not need. It must equal the token
    /// table.
    fn drop_tied_head(&mut self, model: &Model, problems: &mut Vec<String>) -> Result<(), WeightsError> {
        const HEAD: &str = "lm_head.weight";
        if !model.spec().is_some_and(|spec| spec.tie_embeddings) {
            return Ok(());
        }
        let table = model.find(crate::units::Embedding::TOKENS).and_then(|p| p.sources.first());
        let Some(table) = table.and_then(|source| self.places.get(&source.hf_name)).cloned() else { return Ok(()) };
        let Some(head) = self.places.remove(HEAD) else { return Ok(()) };
        let same_form = head.1.shape == table.1.shape && head.1.dtype == table.1.dtype;
        if !same_form || !self.same_bytes(&head, &table)? {
            problems.push(format!(
                "`{HEAD}` differs from the token table, but the model ties the two (tie_embeddings, tie_word_embeddings)"
            ));
        }
        Ok(())
    }

    /// Drops stored biases that the model does not have. They must be zeros.
    fn drop_zeros(&mut self, model: &Model, problems: &mut Vec<String>) -> Result<(), WeightsError> {
        for (name, _) in model.spec().map(implied_zeros).unwrap_or_default() {
            let Some((file, tensor)) = self.places.remove(&name) else { continue };
            let mut values = vec![0.0; tensor.shape.iter().product()];
            self.read_range(file, &tensor, 0, &mut values)?;
            if values.iter().any(|x| *x != 0.0) {
                problems.push(format!("`{name}` is not zero, and the model has no such bias"));
            }
        }
        Ok(())
    }

    fn same_bytes(&self, a: &(usize, StoredTensor), b: &(usize, StoredTensor)) -> Result<bool, WeightsError> {
        let len = (a.1.range.end - a.1.range.start) as usize;
        let (mut x, mut y) = (vec![0; CHUNK.min(len)], vec![0; CHUNK.min(len)]);
        for at in (0..len).step_by(CHUNK) {
            let n = CHUNK.min(len - at);
            self.files[a.0].read(&a.1, at, &mut x[..n])?;
            self.files[b.0].read(&b.1, at, &mut y[..n])?;
            if x[..n] != y[..n] {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The file and entry of each tensor, by the model's name for it.
pub(crate) type Places = BTreeMap<String, (usize, StoredTensor)>;

fn open_files(folder: &Path) -> Result<(Vec<TensorFile>, Places), WeightsError> {
    let single = folder.join(SINGLE);
    if single.exists() {
        let file = TensorFile::open(&single)?;
        let places = file.tensors().iter().map(|(name, tensor)| (name.clone(), (0, tensor.clone()))).collect();
        return Ok((vec![file], places));
    }
    let path = folder.join(INDEX);
    if !path.exists() {
        return Err(WeightsError::NoWeights(folder.into()));
    }
    let bad = |problem: String| WeightsError::Index { path: path.clone(), problem };
    let text = std::fs::read(&path).map_err(WeightsError::io("reading", &path))?;
    let index: Index =
        serde_json::from_slice(&text).map_err(|error| bad(format!("not an index of weights: {error}")))?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    let mut files = Vec::new();
    let mut places = Places::new();
    for (number, name) in names.into_iter().enumerate() {
        if Path::new(name).file_name().is_none_or(|file| file != name.as_str()) {
            return Err(bad(format!("`{name}` is not the name of a file beside it")));
        }
        let shard: PathBuf = folder.join(name);
        if !shard.exists() {
            return Err(bad(format!("it names the file {name}, which is missing")));
        }
        let file = TensorFile::open(&shard)?;
        for (tensor, stored) in file.tensors() {
            match index.weight_map.get(tensor) {
                Some(listed) if listed == name => places.insert(tensor.clone(), (number, stored.clone())),
                Some(listed) => return Err(bad(format!("it has `{tensor}` in {listed}, and {name} holds one too"))),
                None => return Err(bad(format!("{name} holds `{tensor}`, which it does not list"))),
            };
        }
        files.push(file);
    }
    match index.weight_map.iter().find(|(tensor, _)| !places.contains_key(*tensor)) {
        Some((tensor, file)) => Err(bad(format!("it has `{tensor}` in {file}, which does not hold it"))),
        None => Ok((files, places)),
    }
}

/// Drops masks and rotary tables that old files hold beside weights.
fn drop_buffers(model: &Model, places: &mut Places, notes: &mut Vec<String>) {
    let suffixes = model.spec().map_or(&[][..], |spec| spec.family.buffers());
    let before = places.len();
    places.retain(|name, _| !suffixes.iter().any(|suffix| name.ends_with(suffix)));
    if places.len() < before {
        notes.push(format!(
            "{} stored tensors are masks or tables, not weights, and were not used",
            before - places.len()
        ));
    }
}

/// Adds the prefix that files of a bare decoder lack.
fn add_prefix(model: &Model, places: &mut Places) {
    let Some(spec) = model.spec() else { return };
    let prefix = spec.family.prefix();
    if places.keys().any(|name| name.starts_with(prefix)) {
        return;
    }
    let bare = std::mem::take(places);
    places.extend(bare.into_iter().map(|(name, place)| {
        let name = if name.starts_with("lm_head") { name } else { format!("{prefix}{name}") };
        (name, place)
    }));
}
