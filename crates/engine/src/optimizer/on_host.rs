//! Optimizer state on the host beside a GPU, updated by the host's CPU (ZeRO-Offload, Ren et al.
//! 2021, section 4).
//!
//! For each chunk, gradients are copied from GPU to host, unless backward already evicted them. The
//! CPU updates masters and state and writes the compute copy, which is then copied to the GPU.
//!
//! Two buffers make the three stages overlap: while one chunk is updated, the gradients of the next
//! are fetched and the copy of the previous is sent. An update waits until its gradients have
//! arrived and until the previous copy in its buffer has been sent.

use super::{Chunk, Optimizer};
use crate::Result;
use crate::state::{GradientState, ParameterState, lock};
use crate::tier::Stored;
use trainyard_tensor::cuda::Mark;
use trainyard_tensor::{DType, Purpose, Tensor, ops};

/// Number of chunks that are fetched, updated or evicted at once.
const AT_ONCE: usize = 2;

/// Host buffers of a chunk's gradient and compute copy during its update, for chunks up to some
/// size.
#[derive(Clone)]
pub(super) struct Visit {
    /// The chunk's gradient. If gradients lie on the host, it is a view of them, and None while the
    /// buffer is free.
    gradient: Option<Tensor>,
    /// The chunk's copy, in the dtype that forward reads.
    copy: Tensor,
    /// Marks the arrival of the gradient.
    fetched: Mark,
    /// Marks the end of the transfer of the previous copy in this memory.
    gone: Mark,
}

impl Visit {
    /// Waits until the gradient has arrived and the previous copy has been sent.
    pub fn wait(&self) -> Result<()> {
        self.fetched.wait()?;
        Ok(self.gone.wait()?)
    }

    /// Views of the gradient and copy of `elements` elements from `start` of the chunk on.
    pub fn part(&self, start: usize, elements: usize) -> Result<(Tensor, Option<Tensor>)> {
        let gradient = self.gradient.as_ref().expect("a program fetches gradients before it updates");
        Ok((gradient.view(start, [elements])?, Some(self.copy.view(start, [elements])?)))
    }

    /// Casts the chunk's masters into the copy.
    pub fn refresh_copy(&self, masters: &Tensor) -> Result<()> {
        self.wait()?;
        Ok(ops::cast_into(masters, &mut self.copy.view(0, [masters.elements()])?)?)
    }
}

impl Optimizer {
    /// Allocates the host buffers, if the state lies on the host.
    pub(super) fn take_visits(&self, compute: DType) -> Result<()> {
        let Some(host) = self.host() else { return Ok(()) };
        let chunks = || self.units.iter().flatten();
        let elements = chunks().map(|chunk| chunk.range.len()).max().unwrap_or(0);
        let gradient = || host.empty([elements], DType::F32, Purpose::Grads);
        let visit = |_| -> Result<Visit> {
            Ok(Visit {
                gradient: (!self.with_gradients).then(gradient).transpose()?,
                copy: host.empty([elements], compute, Purpose::Params)?,
                fetched: Mark::default(),
                gone: Mark::default(),
            })
        };
        *lock(&self.visits) = (0..AT_ONCE.min(chunks().count())).map(visit).collect::<Result<_>>()?;
        Ok(())
    }

    /// Copies the gradients of a chunk to the host. If they lie there already, the mark still waits
    /// for evictions that are under way.
    pub(super) fn fetch_gradients(&self, unit: usize, chunk: &Chunk, gradients: &GradientState) -> Result<()> {
        let mut visit = lock(&self.visits).pop().expect("a program has two chunks under way at most");
        if let Some(Stored::Here(gradient)) = gradients.in_tier(unit, &chunk.range)? {
            visit.gradient = Some(gradient);
        } else {
            for piece in &chunk.pieces {
                let (mut gradient, _) = visit.part(piece.range.start - chunk.range.start, piece.range.len())?;
                gradient.transfer_from(&gradients.range(unit, piece.range.clone())?)?;
            }
        }
        visit.fetched = self.device.mark()?;
        *lock(&chunk.visit) = Some(visit);
        Ok(())
    }

    /// Copies an updated chunk of the compute copy to the device.
    pub(super) fn evict_copy(&self, unit: usize, chunk: &Chunk, parameters: &ParameterState) -> Result<()> {
        let mut visit = lock(&chunk.visit).take().expect("a program evicts what it fetched");
        for piece in &chunk.pieces {
            let copy = visit.copy.view(piece.range.start - chunk.range.start, [piece.range.len()])?;
            let mut target = parameters.unit(unit).copy_of(piece.range.clone())?;
            target.transfer_from(&copy)?;
        }
        visit.gone = self.device.mark()?;
        lock(&self.visits).push(visit);
        Ok(())
    }
}
