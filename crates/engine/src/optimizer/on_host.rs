//! State that lies on the host beside a GPU, where the update runs: gradients come down chunk by
//! chunk, unless they came down during backward, and the copy that forward reads goes up
//! (ZeRO-Offload, Ren et al. 2021, section 4).
//!
//! There are two buffers for what comes and goes. A chunk's gradients are fetched while the one
//! before is updated, and its copy goes up while the next is and the one after that comes down: an
//! update waits until its gradients are there, and the copy before it in its buffer is gone.

use super::{Chunk, Optimizer};
use crate::Result;
use crate::state::{GradientState, ParameterState, lock};
use crate::tier::Stored;
use trainyard_tensor::cuda::Mark;
use trainyard_tensor::{DType, Purpose, Tensor, ops};

/// Chunks that are fetched, updated or evicted at once.
const AT_ONCE: usize = 2;

/// Memory of the host for what an update of a chunk, or of a larger one, reads and writes beside
/// the state.
#[derive(Clone)]
pub(super) struct Visit {
    /// Where gradients lie on the host themselves, a chunk's own; none while none is visited.
    gradient: Option<Tensor>,
    /// In the dtype that forward reads.
    copy: Tensor,
    /// When the gradient is there.
    fetched: Mark,
    /// When the copy before it in this memory is gone.
    gone: Mark,
}

impl Visit {
    /// Waits until the gradient is there, and there is room for the copy.
    pub fn wait(&self) -> Result<()> {
        self.fetched.wait()?;
        Ok(self.gone.wait()?)
    }

    /// Gradient and copy of `elements` elements from `start` of the chunk on.
    pub fn part(&self, start: usize, elements: usize) -> Result<(Tensor, Option<Tensor>)> {
        let gradient = self.gradient.as_ref().expect("a program fetches gradients before it updates");
        Ok((gradient.view(start, [elements])?, Some(self.copy.view(start, [elements])?)))
    }

    /// Writes the copy anew from the chunk's masters.
    pub fn refresh_copy(&self, masters: &Tensor) -> Result<()> {
        self.wait()?;
        Ok(ops::cast_into(masters, &mut self.copy.view(0, [masters.elements()])?)?)
    }
}

impl Optimizer {
    /// Takes memory for what comes and goes, where the state lies on the host.
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

    /// Brings the gradients of a chunk to the host; where they are there, after those that are
    /// still on their way.
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

    /// Brings what an update wrote of the copy that forward reads to the device.
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
