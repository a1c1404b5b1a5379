//! The copy of a unit at rest where its frozen matrices lie encoded in memory (QLoRA, Dettmers et
//! al. 2023).
//!
//! Each matrix is encoded by itself, from its first element on, so what is kept of it does not
//! depend on where it lies in the unit. Everything else of the copy is kept as it is.

use super::lock;
use crate::Result;
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Mutex;
use trainyard_comm::codec::{self, Rounding};
use trainyard_model::tuning::is_encodable;
use trainyard_model::{Model, UnitLayout};
use trainyard_program::BlockCodec;
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::cpu::cast::cast_part;
use trainyard_tensor::dtype::Element;
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// Elements that a thread encodes or decodes at a time: a multiple of every codec's block.
const GRAIN: usize = 1 << 14;

/// The indices of the parameters of `unit` that may lie encoded: none of the embedding and of the
/// head.
pub(crate) fn encodable(model: &Model, unit: usize) -> Vec<usize> {
    if unit == 0 || unit + 1 == model.units().len() {
        return Vec::new();
    }
    let parameters = model.units()[unit].parameters().iter().enumerate();
    parameters.filter(|(_, spec)| is_encodable(spec)).map(|(index, _)| index).collect()
}

/// The copy of a unit at rest.
pub(crate) struct EncodedCopy {
    codec: BlockCodec,
    /// The number of trained elements, which are the first.
    trained: usize,
    /// The elements of the copy that are encoded, by matrix, and those that are not.
    matrices: Vec<Range<usize>>,
    rest: Vec<Range<usize>>,
    /// The blocks of all matrices, as 16-bit words.
    blocks: Tensor,
    /// The elements of `rest`, one range after the other, in the dtype of the copy.
    plain: Tensor,
}

impl EncodedCopy {
    /// Memory for the copy of a unit of which the whole is `layout`; None if nothing of it is
    /// encoded.
    pub fn new(
        device: &Device,
        codec: BlockCodec,
        layout: &UnitLayout,
        encodable: &[usize],
        dtype: DType,
    ) -> Result<Option<EncodedCopy>> {
        check(device)?;
        let mut matrices: Vec<Range<usize>> = encodable.iter().map(|index| layout.range(*index)).collect();
        matrices.sort_by_key(|range| range.start);
        if matrices.is_empty() {
            return Ok(None);
        }
        let starts = [0].into_iter().chain(matrices.iter().map(|range| range.end));
        let ends = matrices.iter().map(|range| range.start).chain([layout.elements()]);
        let rest: Vec<Range<usize>> =
            starts.zip(ends).map(|(start, end)| start..end).filter(|range| !range.is_empty()).collect();
        let bytes: u64 = matrices.iter().map(|range| codec.bytes(range.len() as u64)).sum();
        let blocks = device.zeros([bytes as usize / 2], DType::BF16, Purpose::Params)?;
        let plain = device.zeros([rest.iter().map(Range::len).sum()], dtype, Purpose::Params)?;
        let trained = layout.trained_elements();
        Ok(Some(EncodedCopy { codec, trained, matrices, rest, blocks, plain }))
    }

    /// The place in `plain` of elements `range` of the copy, none of which is encoded.
    pub fn plain(&self, range: &Range<usize>) -> Result<Tensor> {
        let mut first = 0;
        for own in &self.rest {
            if own.contains(&range.start) {
                return Ok(self.plain.view(first + range.start - own.start, [range.len()])?);
            }
            first += own.len();
        }
        Err(super::does_not_fit(format!("elements {range:?} lie encoded")))
    }

    /// Decodes into `copy`, which is whole.
    pub fn fetch(&self, copy: &Tensor) -> Result<()> {
        for range in &self.rest {
            copy.view(range.start, [range.len()])?.copy_from(&self.plain(range)?)?;
        }
        self.each_matrix(copy, |mut matrix, blocks, cpu| decoded(cpu, self.codec, &blocks, &mut matrix))
    }

    /// Encodes `copy`, all of which was set.
    pub fn write_all(&self, copy: &Tensor) -> Result<()> {
        for range in &self.rest {
            self.plain(range)?.copy_from(&copy.view(range.start, [range.len()])?)?;
        }
        self.each_matrix(copy, |matrix, mut blocks, cpu| encoded(cpu, self.codec, &matrix, &mut blocks))
    }

    /// Keeps what is trained of `copy`. The rest of it need not have been fetched.
    pub fn write_trained(&self, copy: &Tensor) -> Result<()> {
        let trained = 0..self.trained;
        Ok(self.plain(&trained)?.copy_from(&copy.view(0, [self.trained])?)?)
    }

    /// Calls `f` with every matrix of `copy` and its blocks. Nothing happens on a device without
    /// memory.
    fn each_matrix(&self, copy: &Tensor, f: impl Fn(Tensor, Tensor, &Cpu) -> Result<()>) -> Result<()> {
        let device = copy.device().clone();
        let Some(cpu) = device.as_cpu() else { return Ok(()) };
        let mut first = 0;
        for range in &self.matrices {
            let words = self.codec.bytes(range.len() as u64) as usize / 2;
            f(copy.view(range.start, [range.len()])?, self.blocks.view(first, [words])?, cpu)?;
            first += words;
        }
        Ok(())
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
