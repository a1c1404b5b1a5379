//! Collectives of one lane with one group of ranks: gather, reduce-scatter, all-reduce. Tensors go
//! through host memory, or by NCCL from GPU to GPU. Sums over ranks have one fixed order, and so
//! the same bits, unless NCCL may choose its own.

use crate::Result;
use crate::collectives::Way;
use crate::state::does_not_fit;
use std::ops::Range;
use std::sync::Arc;
use trainyard_comm::nccl::{Circle, Nccl};
use trainyard_comm::{CommError, Communicator, Position, number};
use trainyard_program::Group;
use trainyard_tensor::cuda::driver::{Region, Stream};
use trainyard_tensor::cuda::nccl::Element;
use trainyard_tensor::{DType, Device, Purpose, Tensor, bf16, ops};

/// The connection of one lane to one group of ranks. In a group of one, and on the meta device,
/// nothing is exchanged.
#[derive(Clone)]
pub struct Link {
    size: usize,
    index: usize,
    host: Option<Arc<Communicator>>,
    /// The NCCL communicator for tensors; None: tensors go through the host.
    device: Option<Circle>,
    /// True if NCCL only moves the parts of a sum, and this rank adds them in the order of
    /// [`number`].
    fixed_order: bool,
}

impl Default for Link {
    fn default() -> Link {
        Link { size: 1, index: 0, host: None, device: None, fixed_order: false }
    }
}

/// Buffers of the reduce lane for data on their way between ranks. They are allocated once and
/// stay. The reduce lane runs at times that depend on a clock, so buffers allocated per reduction
/// would meet the step's memory peak, or miss it, by chance. One of each is enough, because the
/// lane reduces one unit at a time.
#[derive(Default)]
pub(crate) struct Staging {
    /// A unit's gradient, rounded to 16 bits.
    rounded: Option<Tensor>,
    /// The other ranks' shares in 16 bits, received by NCCL, if this rank adds them up.
    narrow: Option<Tensor>,
    /// The other ranks' shares in f32.
    wide: Option<Tensor>,
}

impl Staging {
    /// Allocates the buffers for gradients of at most `elements`, of which a rank of the shard
    /// group owns `own`. Gradients travel as `dtype` over the ranks of `shard` and then of
    /// `replicate`.
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
        // Elements of all ranks' shares in each of the two exchanges.
        let scattered = if sharded && shard.fixed_order { elements } else { 0 };
        let reduced = if replicated && replicate.fixed_order { replicate.share_elements_max(own) } else { 0 };
        // Sums of the shard group are f32 when the replicas add theirs.
        let narrow = if sharded { scattered } else { reduced };
        let narrow = take(if is_narrow { narrow } else { 0 }, dtype)?;
        let wide = take(scattered.max(reduced), DType::F32)?;
        Ok(Staging { rounded, narrow, wide })
    }

    /// A 16-bit buffer of `elements` for a rounded gradient.
    pub(crate) fn rounded(&self, elements: usize) -> Result<Tensor> {
        part(&self.rounded, elements)
    }
}

/// The first `elements` of a buffer that was made for the largest unit.
fn part(buffer: &Option<Tensor>, elements: usize) -> Result<Tensor> {
    Ok(buffer.as_ref().expect("staging is taken before it is used").view(0, [elements])?)
}

/// Elements of a share of an all-reduce are a multiple of this, so that shares begin at whole packs
/// of a kernel.
const QUANTUM: usize = 64;

/// The memory of the tensor and the stream of this lane.
fn placed(tensor: &Tensor) -> Result<(Region, Stream)> {
    tensor.on_stream()?.ok_or_else(|| does_not_fit("NCCL exchanges the memory of GPUs, and this tensor lies elsewhere"))
}

fn element(dtype: DType) -> Element {
    if dtype == DType::BF16 { Element::Bf16 } else { Element::F32 }
}

impl Link {
    /// Connects to the ranks of `group`, through `host` and `nccl`. A prediction has neither. All
    /// ranks of the world call this together.
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
        let host = host.map(Arc::new);
        Ok(Link { size: group.ranks.len(), index: group.index as usize, host, device, fixed_order })
    }

    /// This link with the NCCL communicator of `other`, whose lane uses it at other times.
    pub(crate) fn sharing(self, other: &Link) -> Link {
        Link { device: other.device.clone(), ..self }
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// This rank's index in the group.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Posts the instruction that this lane is about to run, for the other ranks. With NCCL it
    /// counts from the moment the device reaches it.
    pub(crate) fn post(&self, position: &Position) {
        match &self.device {
            Some(circle) => circle.post(Some(position.clone())),
            None => self.post_on_host(position),
        }
    }

    /// As [`Link::post`], for exchanges between hosts.
    pub(crate) fn post_on_host(&self, position: &Position) {
        if let Some(comm) = &self.host {
            comm.post(position.clone());
        }
    }

    /// Withdraws the posted position: what follows belongs to no instruction.
    pub(crate) fn forget(&self) {
        if let Some(circle) = &self.device {
            circle.post(None);
        }
    }

    /// Gathers every rank's `part` into every rank's `whole`.
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

    /// Sends part `j` of the rows of `from` to rank `j`, and receives its part for this rank into
    /// part `j` of `to`.
    pub(crate) fn all_to_all(&self, from: &Tensor, to: &mut Tensor) -> Result<()> {
        if from.device().is_meta() {
            return Ok(());
        }
        match (&self.device, &self.host) {
            (Some(circle), _) => {
                let each = vec![from.rows() / self.size; self.size];
                self.rows_by_nccl(circle, (from, &each), (to, &each))
            }
            (None, Some(comm)) => {
                from.with_bytes(|from| to.overwrite_bytes(|to| comm.all_to_all(from, to)))???;
                Ok(())
            }
            (None, None) => Ok(to.copy_from(from)?),
        }
    }

    /// Sends equally many of `own` to each rank, and returns the parts of all ranks, in their
    /// order.
    pub(crate) fn all_to_all_numbers(&self, own: &[i32]) -> Result<Vec<i32>> {
        let mut all = own.to_vec();
        if let Some(comm) = &self.host {
            comm.all_to_all(own, &mut all)?;
        }
        Ok(all)
    }

    /// Sends the next `sends[j]` rows of `from` to each rank j, and receives `receives[j]` rows
    /// from it into the next rows of `to`, through host memory.
    pub(crate) fn all_to_all_rows(
        &self,
        from: &Tensor,
        sends: &[usize],
        to: &mut Tensor,
        receives: &[usize],
    ) -> Result<()> {
        let Some(comm) = &self.host else { return Ok(to.copy_from(from)?) };
        if let Some(circle) = &self.device {
            return self.rows_by_nccl(circle, (from, sends), (to, receives));
        }
        let row = from.last_dim() * from.dtype().size();
        let bytes = |rows: &[usize]| rows.iter().map(|rows| rows * row).collect::<Vec<_>>();
        let (sends, receives) = (bytes(sends), bytes(receives));
        let [sent, received] = [&sends, &receives].map(|parts| parts.iter().sum::<usize>());
        from.with_bytes(|from| {
            to.with_bytes_mut(|to| comm.all_to_all_uneven(&from[..sent], &sends, &mut to[..received], &receives))
        })???;
        Ok(())
    }

    /// [`Link::all_to_all_rows`] from GPU to GPU.
    fn rows_by_nccl(
        &self,
        circle: &Circle,
        (from, sends): (&Tensor, &[usize]),
        (to, receives): (&Tensor, &[usize]),
    ) -> Result<()> {
        let spans = |counts: &[usize]| -> Vec<Range<usize>> {
            let next = |end: &mut usize, count: &usize| {
                *end += count;
                Some(*end - count..*end)
            };
            counts.iter().scan(0, next).collect()
        };
        let (sends, receives) = (spans(sends), spans(receives));
        if !sends[self.index].is_empty() {
            to.narrow(receives[self.index].clone())?.copy_from(&from.narrow(sends[self.index].clone())?)?;
        }
        let of_others = |tensor: &Tensor, spans: &[Range<usize>]| {
            let filled = self.others().filter(|peer| !spans[*peer].is_empty());
            filled.map(|peer| Ok((peer, placed(&tensor.narrow(spans[peer].clone())?)?.0))).collect::<Result<Vec<_>>>()
        };
        let (_, stream) = placed(from)?;
        Ok(circle.exchange(stream, &of_others(from, &sends)?, &of_others(to, &receives)?)?)
    }

    /// As [`Link::all_gather`], with the rank's own part already in its place.
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

    /// Gives every rank the `data` of the rank with index `root`, through host memory.
    pub(crate) fn broadcast(&self, data: &mut Tensor, root: usize) -> Result<()> {
        match self.host.as_ref().filter(|_| !data.device().is_meta()) {
            Some(comm) => Ok(data.with_bytes_mut(|data| comm.broadcast(data, root))??),
            None => Ok(()),
        }
    }

    /// Sums `data` over the ranks in place, of f32 or bf16. NCCL adds in an order of its own, so
    /// this is for links through host memory where a fixed order is requested, and for sums of
    /// which at most one term is not zero.
    pub(crate) fn sum(&self, data: &mut Tensor) -> Result<()> {
        if self.size == 1 || data.device().is_meta() {
            return Ok(());
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

    /// Sums `from`, which has one part of rows per rank, over the ranks. This rank's part of the
    /// sum is written to `to`. Both are f32, or both bf16.
    pub(crate) fn sum_to_parts(&self, from: &Tensor, to: &mut Tensor) -> Result<()> {
        if from.device().is_meta() {
            return Ok(());
        }
        match (&self.device, &self.host) {
            (Some(circle), _) => {
                let (region, stream) = placed(from)?;
                circle.reduce_scatter_in_place(stream, region, element(from.dtype()))?;
                Ok(to.copy_from(&from.narrow(self.index * to.rows()..(self.index + 1) * to.rows())?)?)
            }
            (None, Some(comm)) if from.dtype() == DType::BF16 => {
                let scatter = |from: &[bf16]| to.overwrite(|to: &mut [bf16]| comm.reduce_scatter(from, to));
                Ok(from.with_data(scatter)???)
            }
            (None, Some(comm)) => {
                let scatter = |from: &[f32]| to.overwrite(|to: &mut [f32]| comm.reduce_scatter(from, to));
                Ok(from.with_data(scatter)???)
            }
            (None, None) => Ok(to.copy_from(from)?),
        }
    }

    /// Sends a tensor to the rank with index `to`, which receives one of as many bytes. Messages
    /// from one rank to another arrive in the order sent. They go through host memory.
    pub(crate) fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        match self.host.as_ref().filter(|_| !tensor.device().is_meta()) {
            Some(comm) => Ok(tensor.with_bytes(|bytes| comm.send(bytes, to))??),
            None => Ok(()),
        }
    }

    /// Receives a tensor from the rank with index `from`.
    pub(crate) fn receive(&self, tensor: &mut Tensor, from: usize) -> Result<()> {
        match self.host.as_ref().filter(|_| !tensor.device().is_meta()) {
            Some(comm) => Ok(tensor.overwrite_bytes(|bytes| comm.recv(bytes, from))??),
            None => Ok(()),
        }
    }

    /// Sends a tensor of rows to the rank with index `to`, which calls [`Link::receive_rows`]. For
    /// exchanges outside of steps, whose sizes the receiver does not know.
    pub(crate) fn send_rows(&self, tensor: &Tensor, to: usize) -> Result<()> {
        if let Some(comm) = &self.host {
            let rows = tensor.rows() as u64;
            comm.send(&[rows, tensor.elements() as u64 / rows.max(1)], to)?;
        }
        self.send(tensor, to)
    }

    /// Receives a tensor of rows from the rank with index `from`.
    pub(crate) fn receive_rows(&self, device: &Device, dtype: DType, from: usize) -> Result<Tensor> {
        let mut shape = [0u64; 2];
        if let Some(comm) = &self.host {
            comm.recv(&mut shape, from)?;
        }
        let mut tensor = device.empty(shape.map(|size| size as usize), dtype, Purpose::Activations)?;
        self.receive(&mut tensor, from)?;
        Ok(tensor)
    }

    /// Gathers every rank's list of numbers, which may have different lengths.
    pub(crate) fn gather_lists(&self, own: &[f64]) -> Result<Vec<Vec<f64>>> {
        let lengths = self.all_gather_numbers(&[own.len() as f64])?;
        let longest = lengths.iter().fold(0.0, |most: f64, length| most.max(*length)) as usize;
        let mut padded = own.to_vec();
        padded.resize(longest, 0.0);
        let all = self.all_gather_numbers(&padded)?;
        let lists = all.chunks(longest.max(1)).zip(&lengths);
        Ok(lists.map(|(list, length)| list[..(*length as usize).min(list.len())].to_vec()).collect())
    }

    /// Gathers every rank's numbers, in the order of the ranks.
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

    /// Sums `flat` (f32, one part per rank) over the ranks. This rank's part of the sum is written
    /// to `own`, which is a view of that part of `flat`. The rest of `flat` is arbitrary
    /// afterwards.
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

    /// As [`Link::reduce_scatter`] for bf16; the result is written to `sum` in f32. Where NCCL adds
    /// by itself, it adds in bf16 and the result is widened.
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

    /// Sums `data`, of f32 or bf16, over the ranks, in the fixed order where one is requested.
    pub(crate) fn all_reduce(&self, data: &mut Tensor, staging: &Staging) -> Result<()> {
        match self.size > 1 && self.fixed_order {
            true => self.all_reduce_in_order(data, staging),
            false => self.sum(data),
        }
    }

    /// All-reduce in the fixed order: each rank adds up one share and sends it to all others.
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

    /// Elements of all ranks' shares of an all-reduce of `elements`, if each share were as large as
    /// the largest.
    fn share_elements_max(&self, elements: usize) -> usize {
        elements.div_ceil(QUANTUM).div_ceil(self.size) * QUANTUM * self.size
    }

    /// The sum over ranks of this rank's part of `flat`, which has one part per rank.
    fn sum_of_part(&self, flat: &Tensor, staging: &Staging) -> Result<Tensor> {
        let part = flat.elements() / self.size;
        self.sum_of_share(flat, &|rank| rank * part..(rank + 1) * part, staging)
    }

    /// The sum over ranks of this rank's share of `data`, in f32. All ranks send each other their
    /// shares; the owner of a share adds them along the tree of [`number`], as the host does.
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

/// Adds the parts `ranks`, of `count` elements each, along the tree. The sum is in the first part.
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
