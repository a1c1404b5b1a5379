//! A lane's way to a group of ranks, and what goes over it: through host memory, or by NCCL from
//! GPU to GPU. The bits are those of one order of sums, unless NCCL may take its own.

use crate::Result;
use crate::collectives::Way;
use crate::state::does_not_fit;
use std::ops::Range;
use trainyard_comm::nccl::{Circle, Nccl};
use trainyard_comm::{CommError, Communicator, Position, number};
use trainyard_program::Group;
use trainyard_tensor::cuda::driver::{Region, Stream};
use trainyard_tensor::cuda::nccl::Element;
use trainyard_tensor::{DType, Device, Purpose, Tensor, bf16, ops};

/// A lane's way to one group of ranks. A group of one has nobody to talk to; on the meta device
/// nobody is talked to.
pub struct Link {
    size: usize,
    index: usize,
    host: Option<Communicator>,
    /// What exchanges tensors; None: the host does.
    device: Option<Circle>,
    /// Whether NCCL only moves what is summed, and this rank adds it in the order of [`number`].
    fixed_order: bool,
}

impl Default for Link {
    fn default() -> Link {
        Link { size: 1, index: 0, host: None, device: None, fixed_order: false }
    }
}

/// Where reductions put what is on its way between ranks. It is taken once and stays, because the
/// reduce lane runs at times that depend on a clock: buffers of its own would meet the peak of the
/// step or miss it by chance. One of each is enough, because the lane reduces one unit at a time.
#[derive(Default)]
pub(crate) struct Staging {
    /// A unit's gradient, rounded to 16 bits.
    rounded: Option<Tensor>,
    /// The other ranks' shares in 16 bits, as NCCL brings them, where this rank adds them up.
    narrow: Option<Tensor>,
    /// The same in f32.
    wide: Option<Tensor>,
}

impl Staging {
    /// For gradients of at most `elements`, of which a rank of the shard group has `own`, that
    /// travel as `dtype` over the ranks of `shard` and then of `replicate`.
    pub(crate) fn new(
        device: &Device,
        elements: usize,
        own: usize,
        dtype: DType,
        shard: &Link,
        replicate: &Link,
    ) -> Result<Staging> {
        let (sharded, replicated) = (shard.size > 1, replicate.size > 1);
        let is_narrow = dtype != DType::F32;
        let take = |elements: usize, dtype: DType| match elements {
            0 => Ok(None),
            _ => device.empty([elements], dtype, Purpose::Comm).map(Some),
        };
        let rounded = take(if is_narrow && (sharded || replicated) { elements } else { 0 }, dtype)?;
        // What the ranks' shares of either exchange come to.
        let scattered = if sharded && shard.fixed_order { elements } else { 0 };
        let reduced = if replicated && replicate.fixed_order { replicate.share_elements_max(own) } else { 0 };
        // Sums of the shard group are f32 when the replicas add theirs.
        let narrow = if sharded { scattered } else { reduced };
        let narrow = take(if is_narrow { narrow } else { 0 }, dtype)?;
        let wide = take(scattered.max(reduced), DType::F32)?;
        Ok(Staging { rounded, narrow, wide })
    }

    /// `elements` of 16 bits for a rounded gradient.
    pub(crate) fn rounded(&self, elements: usize) -> Result<Tensor> {
        part(&self.rounded, elements)
    }
}

/// The first elements of a buffer, which was made for the largest of them.
fn part(buffer: &Option<Tensor>, elements: usize) -> Result<Tensor> {
    Ok(buffer.as_ref().expect("staging is taken before it is used").view(0, [elements])?)
}

/// Elements of a share of an all-reduce are a multiple of this, so that shares begin at whole packs
/// of a kernel.
const QUANTUM: usize = 64;

/// The tensor's memory and this lane's stream.
fn placed(tensor: &Tensor) -> Result<(Region, Stream)> {
    tensor.on_stream()?.ok_or_else(|| does_not_fit("NCCL exchanges the memory of GPUs, and this tensor lies elsewhere"))
}

fn element(dtype: DType) -> Element {
    if dtype == DType::BF16 { Element::Bf16 } else { Element::F32 }
}

impl Link {
    /// To the ranks of `group`, by what `host` and `nccl` are; neither where a prediction is made.
    /// All ranks of the world do this together.
    pub(crate) fn new(
        group: &Group,
        host: Option<Communicator>,
        nccl: Option<&Nccl>,
        way: Way,
    ) -> Result<Link, CommError> {
        let device = match (&host, nccl) {
            (Some(host), Some(nccl)) => Some(nccl.circle(host)?),
            _ => None,
        };
        let fixed_order = way == Way::Nccl { fixed_order: true };
        Ok(Link { size: group.ranks.len(), index: group.index as usize, host, device, fixed_order })
    }

    /// The same with the way of `other` for tensors, which another lane uses at another time.
    pub(crate) fn sharing(self, other: &Link) -> Link {
        Link { device: other.device.clone(), ..self }
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// This rank's place in it.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Tells the others what this lane is about to do: with NCCL when the device comes to it.
    pub(crate) fn post(&self, position: &Position) {
        match &self.device {
            Some(circle) => circle.post(Some(position.clone())),
            None => self.post_on_host(position),
        }
    }

    /// As [`Link::post`] for what the hosts exchange.
    pub(crate) fn post_on_host(&self, position: &Position) {
        if let Some(comm) = &self.host {
            comm.post(position.clone());
        }
    }

    /// What comes next belongs to no instruction.
    pub(crate) fn forget(&self) {
        if let Some(circle) = &self.device {
            circle.post(None);
        }
    }

    /// Every rank's `part` in every rank's `whole`.
    pub fn all_gather(&self, part: &Tensor, whole: &mut Tensor) -> Result<()> {
        if part.device().is_meta() {
            return Ok(());
        }
        match (&self.device, &self.host) {
            (Some(circle), _) => {
                let ((part, stream), (whole, _)) = (placed(part)?, placed(whole)?);
                Ok(circle.all_gather(stream, part, whole)?)
            }
            (None, Some(comm)) => {
                part.with_bytes(|part| whole.overwrite_bytes(|whole| comm.all_gather(part, whole)))???;
                Ok(())
            }
            (None, None) => Ok(whole.copy_from(part)?),
        }
    }

    /// As [`Link::all_gather`] with the own part in its place.
    pub fn all_gather_in_place(&self, whole: &mut Tensor) -> Result<()> {
        match (&self.device, &self.host) {
            (Some(circle), _) => {
                let (whole, stream) = placed(whole)?;
                Ok(circle.all_gather_in_place(stream, whole)?)
            }
            (None, Some(comm)) => Ok(whole.with_bytes_mut(|whole| comm.all_gather_in_place(whole))??),
            (None, None) => Ok(()),
        }
    }

    /// Every rank's numbers, in order of the ranks.
    pub fn all_gather_numbers(&self, own: &[f64]) -> Result<Vec<f64>> {
        let mut all = own.to_vec();
        if let Some(comm) = &self.host {
            all.resize(own.len() * comm.size(), 0.0);
            comm.all_gather(own, &mut all)?;
        }
        Ok(all)
    }

    /// Sums counts over the ranks.
    pub fn sum_counts(&self, counts: &mut [u64]) -> Result<()> {
        match &self.host {
            Some(comm) => Ok(comm.all_reduce(counts)?),
            None => Ok(()),
        }
    }

    /// Sums f32 `flat`, which is a part for each rank, over the ranks into `own`, the view of it
    /// that is this rank's part; the rest is arbitrary.
    pub(crate) fn reduce_scatter(&self, flat: &mut Tensor, own: &mut Tensor, staging: &Staging) -> Result<()> {
        if self.size == 1 {
            return Ok(());
        }
        if self.fixed_order {
            return Ok(own.copy_from(&self.sum_of_part(flat, staging)?)?);
        }
        match (&self.device, &self.host) {
            (Some(circle), _) => {
                let (flat, stream) = placed(flat)?;
                Ok(circle.reduce_scatter_in_place(stream, flat, Element::F32)?)
            }
            (None, Some(comm)) => Ok(flat.with_data_mut(|flat: &mut [f32]| comm.reduce_scatter_in_place(flat))??),
            (None, None) => Ok(()),
        }
    }

    /// As [`Link::reduce_scatter`] for bf16; the sum is in `sum`, in f32. NCCL's own sums are of
    /// bf16, and what is left of them there is widened.
    pub(crate) fn reduce_scatter_bf16(
        &self,
        flat: &mut Tensor,
        own: &Tensor,
        sum: &mut Tensor,
        staging: &Staging,
    ) -> Result<()> {
        if self.fixed_order {
            return Ok(sum.copy_from(&self.sum_of_part(flat, staging)?)?);
        }
        match (&self.device, &self.host) {
            (Some(circle), _) => {
                let (flat, stream) = placed(flat)?;
                circle.reduce_scatter_in_place(stream, flat, Element::Bf16)?;
                Ok(ops::cast_into(own, sum)?)
            }
            (None, Some(comm)) => {
                let scatter = |flat: &[bf16]| sum.overwrite(|sum: &mut [f32]| comm.reduce_scatter_sums(flat, sum));
                Ok(flat.with_data(scatter)???)
            }
            (None, None) => Ok(()),
        }
    }

    /// Sums `data`, of f32 or bf16, over the ranks.
    pub(crate) fn all_reduce(&self, data: &mut Tensor, staging: &Staging) -> Result<()> {
        if self.size == 1 {
            return Ok(());
        }
        if self.fixed_order {
            return self.all_reduce_in_order(data, staging);
        }
        match (&self.device, &self.host) {
            (Some(circle), _) => {
                let (region, stream) = placed(data)?;
                Ok(circle.all_reduce(stream, region, element(data.dtype()))?)
            }
            (None, Some(comm)) if data.dtype() == DType::BF16 => {
                Ok(data.with_data_mut(|data: &mut [bf16]| comm.all_reduce(data))??)
            }
            (None, Some(comm)) => Ok(data.with_data_mut(|data: &mut [f32]| comm.all_reduce(data))??),
            (None, None) => Ok(()),
        }
    }

    /// Everybody adds up a share and hands it to all others.
    fn all_reduce_in_order(&self, data: &mut Tensor, staging: &Staging) -> Result<()> {
        let packs = data.elements().div_ceil(QUANTUM);
        let edge = |rank: usize| (packs * rank / self.size * QUANTUM).min(data.elements());
        let share = |rank: usize| edge(rank)..edge(rank + 1);
        let own = share(self.index);
        let sum = self.sum_of_share(data, &share, staging)?;
        let mut reduced = data.view(own.start, [own.len()])?;
        if !own.is_empty() {
            match data.dtype() {
                DType::F32 => reduced.copy_from(&sum)?,
                _ => ops::cast_into(&sum, &mut reduced)?,
            }
        }
        let Some(circle) = &self.device else { return Ok(()) };
        let (_, stream) = placed(data)?;
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for peer in self.others() {
            sends.push((peer, placed(&reduced)?.0));
            receives.push((peer, placed(&data.view(share(peer).start, [share(peer).len()])?)?.0));
        }
        Ok(circle.exchange(stream, &sends, &receives)?)
    }

    /// The most elements that the ranks' shares of an all-reduce of `elements` have together, each
    /// as large as the largest.
    fn share_elements_max(&self, elements: usize) -> usize {
        elements.div_ceil(QUANTUM).div_ceil(self.size) * QUANTUM * self.size
    }

    /// The sum of this rank's part of `flat`, which is a part for each rank.
    fn sum_of_part(&self, flat: &Tensor, staging: &Staging) -> Result<Tensor> {
        let part = flat.elements() / self.size;
        self.sum_of_share(flat, &|rank| rank * part..(rank + 1) * part, staging)
    }

    /// The sum over the ranks of this rank's share of `data`, in f32: everybody sends everybody
    /// their shares, and the owner adds them along the tree of [`number`], as the host would.
    fn sum_of_share(&self, data: &Tensor, share: &dyn Fn(usize) -> Range<usize>, staging: &Staging) -> Result<Tensor> {
        let own = share(self.index);
        let count = own.len();
        let is_wide = data.dtype() == DType::F32;
        let buffer = if is_wide { &staging.wide } else { &staging.narrow };
        let parts = part(buffer, self.size * count)?;
        let part_of = |rank: usize| parts.view(rank * count, [count]);
        if let Some(circle) = &self.device {
            let (_, stream) = placed(data)?;
            let (mut sends, mut receives) = (Vec::new(), Vec::new());
            for peer in self.others() {
                sends.push((peer, placed(&data.view(share(peer).start, [share(peer).len()])?)?.0));
                receives.push((peer, placed(&part_of(peer)?)?.0));
            }
            circle.exchange(stream, &sends, &receives)?;
        }
        part_of(self.index)?.copy_from(&data.view(own.start, [count])?)?;
        let sums = if is_wide {
            parts
        } else {
            let mut wide = part(&staging.wide, self.size * count)?;
            if count > 0 {
                ops::cast_into(&parts, &mut wide)?;
            }
            wide
        };
        if count > 0 {
            add_tree(&sums, 0..self.size, count)?;
        }
        Ok(sums.view(0, [count])?)
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let index = self.index;
        (0..self.size).filter(move |rank| *rank != index)
    }
}

/// Adds parts `ranks` of `count` elements along the tree, into the first.
fn add_tree(parts: &Tensor, ranks: Range<usize>, count: usize) -> Result<()> {
    if ranks.len() < 2 {
        return Ok(());
    }
    let middle = ranks.start + number::left_span(ranks.len());
    add_tree(parts, ranks.start..middle, count)?;
    add_tree(parts, middle..ranks.end, count)?;
    let mut left = parts.view(ranks.start * count, [count])?;
    Ok(ops::accumulate(&parts.view(middle * count, [count])?, &mut left, false)?)
}
