//! The sizes of one rank's state and messages.

use crate::{
    Axis, BlockCodec, Extent, Keep, Mesh, ModelShape, Placement, SHARD_QUANTUM, SplitShape, StateBytes, Strategy, Tier,
    chunk_elements, padded,
};

/// The sizes of one rank's state and messages. They are equal for all ranks of a pipeline stage,
/// unless units are split unevenly over tensor-parallel ranks.
pub struct Sizes<'a> {
    pub model: &'a ModelShape,
    pub mesh: &'a Mesh,
    pub strategy: &'a Strategy,
    pub placement: Placement,
    /// Per unit: elements of the trained region of the flat buffer, and of the rank's shard of it.
    trained: Vec<[u64; 2]>,
    /// The same of the frozen region.
    frozen: Vec<[u64; 2]>,
}

impl<'a> Sizes<'a> {
    pub fn new(model: &'a ModelShape, mesh: &'a Mesh, strategy: &'a Strategy) -> Sizes<'a> {
        let (shards, tp, ep) = (mesh.shard_degree(), u64::from(mesh.tp), u64::from(mesh.ep));
        let trained = |unit: &crate::UnitShape| {
            let tp = if unit.split.is_some() { 1 } else { tp };
            let all = unit.flat_elements.saturating_sub(unit.frozen_elements);
            let experts = unit.expert_elements.min(all);
            let [dense, experts] = [all - experts, experts].map(|elements| elements.div_ceil(tp));
            let held = padded(dense + experts.div_ceil(ep), shards);
            // Among the ranks of a shard group, experts are split over `ep` neighbours, and sharded
            // over the rest of it.
            let sharded = if mesh.experts_of_replicas() { held } else { padded(dense + experts, shards) };
            [held, sharded / u64::from(shards)]
        };
        let frozen = |unit: &crate::UnitShape| {
            let tp = if unit.split.is_some() { 1 } else { tp };
            let whole = padded(unit.frozen_elements.div_ceil(tp), shards);
            [whole, whole / u64::from(shards)]
        };
        let frozen = model.units.iter().map(frozen).collect();
        let trained = model.units.iter().map(trained).collect();
        Sizes { model, mesh, strategy, placement: Placement::of(mesh, strategy), trained, frozen }
    }

    /// Bytes of a unit's whole flat buffer at `width` bytes per element.
    pub fn full(&self, unit: u32, width: u32) -> u64 {
        self.trained(unit, width) + self.frozen[unit as usize][0] * u64::from(width)
    }

    /// Bytes of the trained region of a unit's flat buffer.
    pub fn trained(&self, unit: u32, width: u32) -> u64 {
        self.trained[unit as usize][0] * u64::from(width)
    }

    /// Bytes of the part of a unit's trained region that the rank holds.
    pub fn held(&self, unit: u32, extent: Extent, width: u32) -> u64 {
        match extent {
            Extent::Full => self.trained(unit, width),
            Extent::Shard => self.trained[unit as usize][1] * u64::from(width),
        }
    }

    /// Bytes of the resident copy, which forward reads, frozen parameters included.
    pub fn parameters(&self, unit: u32) -> u64 {
        let (extent, width) = (self.placement.parameters, self.strategy.bytes.parameter);
        let frozen = self.frozen[unit as usize][usize::from(extent == Extent::Shard)];
        self.held(unit, extent, width) + frozen * u64::from(width)
    }

    /// The units that stay on the device where the tier of parameters encodes: those of which
    /// nothing is encoded, or all if shards lie encoded, which gathers decode.
    pub fn staying_units(&self) -> Vec<u32> {
        let all = 0..self.model.units.len() as u32;
        let sharded = self.placement.parameters == Extent::Shard;
        match self.strategy.offload.parameters {
            Some(Tier::Encoded(codec)) => all.filter(|unit| sharded || self.packed(*unit, codec).is_none()).collect(),
            _ => Vec::new(),
        }
    }

    /// Bytes that an eviction writes after an update: what is trained, where the rest lies encoded.
    pub fn written(&self, unit: u32) -> u64 {
        match self.strategy.offload.parameters {
            Some(Tier::Encoded(_)) => self.trained(unit, self.strategy.bytes.parameter),
            _ => self.parameters(unit),
        }
    }

    /// Bytes of the copy on the device that stay there.
    pub fn staying(&self, unit: u32) -> u64 {
        match self.strategy.offload.parameters {
            None => self.parameters(unit),
            Some(Tier::Encoded(codec)) => match self.packed(unit, codec) {
                Some(packed) => {
                    let trained = self.held(unit, self.placement.parameters, self.strategy.bytes.parameter);
                    trained + packed / self.packed_parts()
                }
                None => self.parameters(unit),
            },
            Some(Tier::Host | Tier::Disk) => 0,
        }
    }

    /// Bytes of the message that gathers a unit's shards over the whole shard group.
    pub fn gathered(&self, unit: u32) -> u64 {
        let width = self.strategy.bytes.parameter;
        match self.received(unit) {
            0 => self.full(unit, width),
            packed => self.trained(unit, width) + packed,
        }
    }

    /// Bytes of a unit's frozen parameters as they travel and lie before they are decoded; 0 if
    /// gathers move them as they are.
    pub fn received(&self, unit: u32) -> u64 {
        match self.strategy.offload.parameters {
            Some(Tier::Encoded(codec)) if self.placement.parameters == Extent::Shard => {
                self.packed(unit, codec).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// The number of equal parts in which packed words lie on ranks.
    fn packed_parts(&self) -> u64 {
        match self.placement.parameters {
            Extent::Full => 1,
            Extent::Shard => u64::from(self.mesh.shard_degree()),
        }
    }

    /// Bytes of a unit's frozen parameters with its matrices encoded, padded to equal parts of
    /// 16-bit words; None if nothing of it is encoded.
    fn packed(&self, unit: u32, codec: BlockCodec) -> Option<u64> {
        let unit = &self.model.units[unit as usize];
        if unit.encodable.is_empty() {
            return None;
        }
        let tp = if unit.split.is_some() { 1 } else { u64::from(self.mesh.tp) };
        let matrices = || unit.encodable.iter().map(|elements| elements.div_ceil(tp));
        let encoded: u64 = matrices().map(|elements| codec.bytes(elements)).sum();
        let plain = unit.frozen_elements.div_ceil(tp).saturating_sub(matrices().sum());
        let bytes = encoded + plain * u64::from(self.strategy.bytes.parameter);
        Some(bytes.next_multiple_of(2 * self.packed_parts()))
    }

    /// Bytes of a unit's masters and of its optimizer state.
    pub fn optimizer(&self, unit: u32) -> [u64; 2] {
        self.masters_and_state(|width| self.held(unit, self.placement.masters, width))
    }

    /// Bytes of masters and of optimizer state of elements, from what they take at a width.
    fn masters_and_state(&self, at_width: impl Fn(u32) -> u64) -> [u64; 2] {
        let bytes = &self.strategy.bytes;
        let scales = at_width(bytes.optimizer_scales) / u64::from(StateBytes::BLOCK);
        [at_width(bytes.master), at_width(bytes.optimizer) + scales]
    }

    /// The number of chunks in which a unit's optimizer state is fetched.
    pub fn chunks(&self, unit: u32) -> u32 {
        match self.strategy.update_chunk.filter(|_| self.strategy.offload.optimizer.is_some()) {
            Some(elements) => {
                let whole = (elements / SHARD_QUANTUM).max(1) * SHARD_QUANTUM;
                self.held(unit, self.placement.masters, 1).div_ceil(whole).max(1) as u32
            }
            None => 1,
        }
    }

    /// Bytes of one chunk's masters and of its optimizer state.
    pub fn optimizer_chunk(&self, unit: u32, chunk: u32) -> [u64; 2] {
        self.masters_and_state(|width| self.of_chunk(unit, chunk, width))
    }

    /// Bytes of one chunk at `width` bytes per element.
    pub fn of_chunk(&self, unit: u32, chunk: u32, width: u32) -> u64 {
        let held = self.held(unit, self.placement.masters, 1);
        let each = chunk_elements(held, self.chunks(unit));
        each.min(held - u64::from(chunk) * each) * u64::from(width)
    }

    /// Bytes of the message by which a unit's gradient is summed over the data ranks. Where nothing
    /// is sharded and every rank has other experts, their gradients are complete. Where shards are
    /// summed over replicas, those of experts count, though they are summed over fewer.
    pub fn reduced(&self, unit: u32, width: u32) -> u64 {
        let Mesh { ep, .. } = *self.mesh;
        let alone = ep > 1 && self.mesh.shard_degree() == 1 && self.mesh.degree(Axis::Data) == ep;
        let experts = self.model.units[unit as usize].expert_elements.div_ceil(u64::from(ep));
        let elements = self.trained(unit, 1) - if alone { experts.min(self.trained(unit, 1)) } else { 0 };
        elements * u64::from(width)
    }

    /// Bytes of a unit's gradient before it is sharded.
    pub fn gradient(&self, unit: u32) -> u64 {
        self.trained(unit, self.strategy.bytes.gradient)
    }

    /// The activations that a unit's forward keeps. The last unit keeps everything, because its
    /// backward follows at once.
    pub fn keep(&self, unit: u32) -> Keep {
        let last = unit as usize + 1 == self.model.units.len();
        // Where no backward comes, nothing is kept at all.
        let below = unit < self.lowest_differentiated();
        if last || below { Keep::Everything } else { self.strategy.keep[unit as usize] }
    }

    /// The first unit that has a backward. In a pipeline, and where units are split, gradients flow
    /// through all of them.
    pub fn lowest_differentiated(&self) -> u32 {
        let whole = self.mesh.pp == 1 && self.model.units.iter().all(|unit| unit.split.is_none());
        if whole { self.model.lowest_trained() } else { 0 }
    }

    /// Bytes that the unit's forward keeps.
    pub fn saved(&self, unit: u32) -> u64 {
        self.saved_under(unit, self.keep(unit))
    }

    /// Bytes of activations that a unit's backward reads.
    pub fn everything(&self, unit: u32) -> u64 {
        self.saved_under(unit, Keep::Everything)
    }

    /// The inside of a unit that is split over the tensor-parallel or the context-parallel group.
    pub fn split(&self, unit: u32) -> Option<&'a SplitShape> {
        self.model.units[unit as usize].split.as_ref()
    }

    fn saved_under(&self, unit: u32, keep: Keep) -> u64 {
        if unit < self.lowest_differentiated() {
            return 0;
        }
        if let Some(split) = self.split(unit) {
            return split.saved(keep);
        }
        let unit = &self.model.units[unit as usize];
        let saved = unit.saved_bytes[keep as usize] / u64::from(self.mesh.cp);
        // Tensor parallelism alone leaves norms, dropout and their inputs whole: 10 of 34 bytes per
        // token and channel in 16 bits (Korthikanti et al. 2022, equations 1 and 2), that is 5
        // outputs.
        let whole = if self.strategy.sequence_parallel {
            0
        } else {
            saved.min(5 * unit.output_bytes / u64::from(self.mesh.cp))
        };
        whole + (saved - whole) / u64::from(self.mesh.tp)
    }

    /// Bytes of a unit's output for the rank's part of the sequence. That of a split unit is what
    /// the rank holds.
    pub fn output_bytes(&self, unit: u32) -> u64 {
        let parts = if self.split(unit).is_some() { 1 } else { u64::from(self.mesh.cp) };
        self.model.units[unit as usize].output_bytes / parts
    }

    /// Bytes of an output between pipeline stages: split along the sequence where the residual is.
    /// The output of a split unit is what the rank holds of it.
    pub fn sent(&self, unit: u32) -> u64 {
        if self.strategy.sequence_parallel && self.split(unit).is_none() {
            self.output_bytes(unit) / u64::from(self.mesh.tp)
        } else {
            self.output_bytes(unit)
        }
    }

    /// Bytes of one micro-batch.
    pub fn batch(&self) -> u64 {
        self.model.batch_bytes / u64::from(self.mesh.cp)
    }

    /// Bytes that the norm holds: its partial sums over `units`, one f64 per chunk, and a loss per
    /// micro-batch of the step and part of the sequence.
    pub fn norm(&self, units: &[u32]) -> u64 {
        let chunks: u64 = units.iter().map(|unit| self.trained(*unit, 1) / SHARD_QUANTUM).sum();
        8 * (chunks + u64::from(self.mesh.data_parallel() * self.mesh.cp * self.strategy.accumulation_steps))
    }

    /// True if the norm takes several ranks. Replicas that train apart have one each.
    pub fn exchanges_norm(&self) -> bool {
        let replicas = if self.strategy.kind.is_apart() { self.mesh.dp_replicate } else { 1 };
        self.mesh.ranks() > replicas
    }

    /// Bytes of a message along `axis`. A group of one sends nothing.
    pub fn message(&self, axis: Axis, bytes: u64) -> u64 {
        if self.mesh.degree(axis) > 1 { bytes } else { 0 }
    }
}
