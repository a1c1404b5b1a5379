//! The copy of a unit at rest where its frozen matrices lie encoded in memory (QLoRA, Dettmers et
//! al. 2023).
//!
//! The frozen elements of a unit are packed into one buffer of 16-bit words. Each matrix is encoded
//! by itself, from its first element on, so what is kept of it does not depend on where it lies in
//! the unit. Everything else that is frozen follows as it is.
//!
//! Nothing computes with packed words, so they are cut without regard to blocks. Where parameters
//! are sharded, each rank holds an equal part of the words. A gather moves the words and then
//! decodes them, so a unit travels in the bytes of its codes.

use super::{lock, overlap};
use crate::Result;
use crate::links::Link;
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Mutex;
use trainyard_comm::codec::{self, Rounding};
use trainyard_model::UnitLayout;
use trainyard_program::BlockCodec;
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::cpu::cast::cast_part;
use trainyard_tensor::dtype::Element;
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// Elements that a thread encodes or decodes at a time: a multiple of every codec's block.
const GRAIN: usize = 1 << 14;

/// Bytes of a packed word.
const WORD: usize = 2;

/// The copy of a unit at rest, or a rank's part of it.
pub(crate) struct EncodedCopy {
    codec: BlockCodec,
    /// The dtype of the copy.
    dtype: DType,
    /// The frozen elements: first the matrices, then what lies between them.
    stretches: Vec<Stretch>,
    /// The number of packed words of the whole unit, padded to equal parts.
    words: usize,
    /// The packed words that this rank holds.
    own: Range<usize>,
    packed: Tensor,
    /// The trained elements of the copy; None if they never leave the device, because they are a
    /// shard.
    trained: Option<Tensor>,
}

/// Frozen elements of a unit that are packed in one way.
struct Stretch {
    /// The elements of the unit.
    elements: Range<usize>,
    /// The packed words.
    words: Range<usize>,
    /// True for a matrix that is encoded.
    encoded: bool,
    /// The elements of a block and its words. What lies as it is has blocks of one element.
    block: [usize; 2],
}

impl EncodedCopy {
    /// Memory for the copy of a unit of which the whole is `layout`; None if nothing of it is
    /// encoded. `part` is the index of the rank's part and the number of parts, where parameters
    /// are sharded.
    pub fn new(
        device: &Device,
        codec: BlockCodec,
        layout: &UnitLayout,
        encodable: &[usize],
        dtype: DType,
        part: Option<(usize, usize)>,
    ) -> Result<Option<EncodedCopy>> {
        check(device)?;
        let mut matrices: Vec<Range<usize>> = encodable.iter().map(|index| layout.range(*index)).collect();
        matrices.sort_by_key(|range| range.start);
        if matrices.is_empty() {
            return Ok(None);
        }
        let trained = layout.trained_elements();
        let starts = [trained].into_iter().chain(matrices.iter().map(|range| range.end));
        let ends = matrices.iter().map(|range| range.start).chain([trained + layout.frozen_flat_elements()]);
        let rest = starts.zip(ends).map(|(start, end)| start..end).filter(|range| !range.is_empty());
        let rest: Vec<(Range<usize>, bool)> = rest.map(|range| (range, false)).collect();
        let (mut stretches, mut words) = (Vec::new(), 0);
        for (elements, encoded) in matrices.into_iter().map(|range| (range, true)).chain(rest) {
            let block =
                if encoded { [codec.block_elements(), codec.block_bytes() / WORD] } else { [1, dtype.size() / WORD] };
            let first = words;
            words += elements.len().div_ceil(block[0]) * block[1];
            stretches.push(Stretch { elements, words: first..words, encoded, block });
        }
        let (index, parts) = part.unwrap_or((0, 1));
        let words = words.next_multiple_of(parts);
        let own = index * (words / parts)..(index + 1) * (words / parts);
        let packed = device.zeros([own.len()], DType::BF16, Purpose::Params)?;
        let at_rest = part.is_none().then(|| device.zeros([trained], dtype, Purpose::Params)).transpose()?;
        Ok(Some(EncodedCopy { codec, dtype, stretches, words, own, packed, trained: at_rest }))
    }

    /// True if the copy is fetched from here and given back, because it is whole.
    pub fn is_fetched(&self) -> bool {
        self.trained.is_some()
    }

    /// The number of packed words of the whole unit.
    pub fn words(&self) -> usize {
        self.words
    }

    /// The packed words that this rank holds, and their place among those of the unit.
    pub fn packed(&self) -> (&Tensor, Range<usize>) {
        (&self.packed, self.own.clone())
    }

    /// Elements `range` of the copy at rest, which are trained.
    pub fn trained(&self, range: &Range<usize>) -> Result<Tensor> {
        match &self.trained {
            Some(trained) => Ok(trained.view(range.start, [range.len()])?),
            None => Err(super::does_not_fit("trained parameters of a shard do not lie in a tier")),
        }
    }

    /// Decodes into `copy`, which is whole.
    pub fn fetch(&self, copy: &Tensor) -> Result<()> {
        if let Some(trained) = &self.trained {
            copy.view(0, [trained.elements()])?.copy_from(trained)?;
        }
        self.unpack(&self.packed, copy)
    }

    /// Keeps what is trained of `copy`. The rest of it need not have been fetched.
    pub fn write(&self, copy: &Tensor) -> Result<()> {
        match self.trained.clone() {
            Some(mut trained) => Ok(trained.copy_from(&copy.view(0, [trained.elements()])?)?),
            None => Ok(()),
        }
    }

    /// Gathers the packed words of the ranks of `link` into `received`, and decodes them into the
    /// frozen elements of `whole`.
    pub fn gather(&self, received: &Tensor, whole: &Tensor, link: &Link) -> Result<()> {
        let mut all = received.view(0, [self.words])?;
        link.all_gather(&self.packed, &mut all)?;
        self.unpack(&all, whole)
    }

    /// Decodes `packed`, all words of the unit, into the frozen elements of `copy`. Nothing happens
    /// on a device without memory.
    fn unpack(&self, packed: &Tensor, copy: &Tensor) -> Result<()> {
        let device = copy.device().clone();
        let Some(cpu) = device.as_cpu() else { return Ok(()) };
        for Stretch { elements, words, encoded, .. } in &self.stretches {
            let words = packed.view(words.start, [words.len()])?;
            let mut values = copy.view(elements.start, [elements.len()])?;
            match encoded {
                true => decoded(cpu, self.codec, &words, &mut values)?,
                false => values.copy_from(&words)?,
            }
        }
        Ok(())
    }

    /// Sets the frozen parameters of `layout`, at most `at_once` elements at a time, which are
    /// whole blocks. `set` is called with each one's index, a range of its elements that covers a
    /// part of this rank's words, and an f32 tensor to write their values to.
    pub fn set(
        &self,
        layout: &UnitLayout,
        at_once: usize,
        set: &mut impl FnMut(usize, Range<usize>, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for (index, parameter) in layout.frozen() {
            let of = self.stretches.iter().find(|stretch| stretch.elements.contains(&parameter.start));
            let Some(stretch) = of else { continue };
            let [elements, words] = stretch.block;
            let first = stretch.words.start + (parameter.start - stretch.elements.start) / elements * words;
            let all = first..first + parameter.len().div_ceil(elements) * words;
            let held = overlap(&all, &self.own);
            if held.is_empty() {
                continue;
            }
            let blocks = (held.start - first) / words..(held.end - first).div_ceil(words);
            for start in blocks.clone().step_by(at_once / elements) {
                let blocks = start..blocks.end.min(start + at_once / elements);
                let local = blocks.start * elements..parameter.len().min(blocks.end * elements);
                self.set_blocks(stretch, first + blocks.start * words, blocks.len() * words, local.len(), |values| {
                    set(index, local.clone(), values)
                })?;
            }
        }
        Ok(())
    }

    /// Packs `elements` elements whose values `set` gives into the `words` words from `first` on,
    /// and keeps those that this rank holds.
    fn set_blocks(
        &self,
        stretch: &Stretch,
        first: usize,
        words: usize,
        elements: usize,
        set: impl FnOnce(&mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let device = self.packed.device().clone();
        let mut values = device.empty([elements], DType::F32, Purpose::Workspace)?;
        set(&mut values)?;
        if self.dtype != DType::F32 {
            let mut cast = device.empty([elements], self.dtype, Purpose::Workspace)?;
            ops::cast_into(&values, &mut cast)?;
            values = cast;
        }
        let mut made = device.empty([words], DType::BF16, Purpose::Workspace)?;
        match (stretch.encoded, device.as_cpu()) {
            (true, Some(cpu)) => encoded(cpu, self.codec, &values, &mut made)?,
            (true, None) => {}
            (false, _) => made.copy_from(&values)?,
        }
        let part = overlap(&(first..first + words), &self.own);
        let made = made.view(part.start - first, [part.len()])?;
        Ok(self.packed.view(part.start - self.own.start, [part.len()])?.copy_from(&made)?)
    }
}

/// Refuses devices whose matrices nothing encodes and decodes.
fn check(device: &Device) -> Result<()> {
    match device.as_cuda() {
        Some(_) => Err(super::does_not_fit(
            "a base in few bits (fine_tuning.base_dtype) is decoded on processors only: use the device cpu, or export the \
             run and use the merged model",
        )),
        None => Ok(()),
    }
}

/// Rounds `matrix` to what `codec` keeps of it as a tensor of `dtype`.
pub(super) fn round(matrix: &mut Tensor, codec: BlockCodec, dtype: DType) -> Result<()> {
    let device = matrix.device().clone();
    check(&device)?;
    let Some(cpu) = device.as_cpu() else { return Ok(()) };
    let words = codec.bytes(matrix.elements() as u64) as usize / 2;
    let mut blocks = device.empty([words], DType::BF16, Purpose::Workspace)?;
    if matrix.dtype() == dtype {
        encoded(cpu, codec, matrix, &mut blocks)?;
    } else {
        let mut cast = device.empty([matrix.elements()], dtype, Purpose::Workspace)?;
        ops::cast_into(matrix, &mut cast)?;
        encoded(cpu, codec, &cast, &mut blocks)?;
    }
    decoded(cpu, codec, &blocks, matrix)
}

fn decoded(cpu: &Cpu, codec: BlockCodec, blocks: &Tensor, matrix: &mut Tensor) -> Result<()> {
    match matrix.dtype() {
        DType::F32 => decode::<f32>(cpu, codec, blocks, matrix),
        DType::F16 => decode::<f16>(cpu, codec, blocks, matrix),
        _ => decode::<bf16>(cpu, codec, blocks, matrix),
    }
}

fn encoded(cpu: &Cpu, codec: BlockCodec, matrix: &Tensor, blocks: &mut Tensor) -> Result<()> {
    match matrix.dtype() {
        DType::F32 => encode::<f32>(cpu, codec, matrix, blocks),
        DType::F16 => encode::<f16>(cpu, codec, matrix, blocks),
        _ => encode::<bf16>(cpu, codec, matrix, blocks),
    }
}

/// Decodes `blocks` into `matrix` on all threads.
fn decode<T: Element>(cpu: &Cpu, codec: BlockCodec, blocks: &Tensor, matrix: &mut Tensor) -> Result<()> {
    let run = |blocks: &[u8]| {
        matrix.overwrite(|matrix: &mut [T]| {
            let parts = matrix.chunks_mut(GRAIN).zip(blocks.chunks(codec.bytes(GRAIN as u64) as usize));
            let tasks: Vec<_> = parts.map(Mutex::new).collect();
            cpu.threads.for_each(tasks.len(), |task| {
                let (values, blocks) = &mut *lock(&tasks[task]);
                let mut wide = vec![0.0; values.len().next_multiple_of(codec.block_elements())];
                codec::decode(codec, blocks, &mut wide);
                cast_part(cpu.isa, &wide[..values.len()], values);
            });
        })
    };
    Ok(blocks.with_bytes(run)??)
}

/// Encodes `matrix` into `blocks` on all threads. Zeros fill the last block.
fn encode<T: Element>(cpu: &Cpu, codec: BlockCodec, matrix: &Tensor, blocks: &mut Tensor) -> Result<()> {
    let run = |matrix: &[T]| {
        blocks.overwrite_bytes(|blocks| {
            let parts = matrix.chunks(GRAIN).zip(blocks.chunks_mut(codec.bytes(GRAIN as u64) as usize));
            let tasks: Vec<_> = parts.map(Mutex::new).collect();
            cpu.threads.for_each(tasks.len(), |task| {
                let (values, blocks) = &mut *lock(&tasks[task]);
                let mut wide = vec![0.0; values.len().next_multiple_of(codec.block_elements())];
                cast_part(cpu.isa, values, &mut wide[..values.len()]);
                codec::encode(codec, &wide, None, Rounding::Nearest, blocks);
            });
        })
    };
    Ok(matrix.with_data(run)??)
}
