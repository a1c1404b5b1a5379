//! The cost of instructions: seconds on the device, seconds of the host, and bytes held while they
//! run.

use crate::cluster::Cluster;
use crate::collective::{Operation, collective_s, message_s, to_experts_s};
use crate::constants::Constants;
use crate::encoding::encoding_bytes;
use crate::kernel::{Engine, Kernel};
use crate::profile::Format;
use crate::segments::SegmentShare;
use crate::stack::{Bundle, Dispatch, Stack};
use crate::transformer::{UnitWork, Units, Workload};
use trainyard_program::{
    Action, Axis, BackwardPart, Collective, Instruction, Keep, Mesh, ModelShape, Program, Tier, UnitShape,
};

/// Bytes per second of a device's share of its host's memory in an update there. Sockets with eight
/// channels of DDR5-4800 have 307e9 bytes/s, two of them serve eight devices, and streams reach
/// about 0.8 of it.
const HOST_MEMORY_BYTES_S: f64 = 60e9;

/// Size of the messages on which collectives were measured. Instructions that are sent together pay
/// the latency once per message.
const MESSAGE_BYTES: f64 = 256e6;

/// The number of nodes that a network's `straggle_s` is for. Below it the wait falls with the
/// fourth power; above it, where nobody measured, it is assumed to grow in proportion.
const STRAGGLE_NODES: f64 = 64.0;

/// Share of an exchange with experts that another micro-batch's compute hides, in software that
/// interleaves two.
const HIDDEN_EXPERTS: f64 = 0.8;

/// Prices of one kind of unit on one rank.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct UnitCost {
    /// Seconds of the forward.
    pub forward_s: f64,
    /// Seconds of the input's gradient.
    pub backward_input_s: f64,
    /// Seconds of the weights' gradients.
    pub backward_weights_s: f64,
    /// Seconds of adding them to the sum over micro-batches, if that is a kernel of its own.
    pub accumulate_s: f64,
    /// Seconds of selective recomputation.
    pub selective_s: f64,
    /// Number of launches of forward and backward.
    pub launches: [f64; 2],
    /// Number of launches of selective recomputation.
    pub selective_launches: f64,
    /// Bytes held while forward and backward run, beyond the activations that are kept.
    pub working: [f64; 2],
    /// Number of trained parameter elements that the rank computes with.
    pub elements: f64,
    /// Number of parameter tensors.
    pub tensors: f64,
}

/// The prices of every instruction on a cluster.
#[derive(Clone, PartialEq, Debug)]
pub struct Costs {
    /// Prices of distinct units.
    pub kinds: Vec<UnitCost>,
    /// Per unit, its index in `kinds`.
    pub kind_of: Vec<usize>,
    /// The cluster.
    pub cluster: Cluster,
    /// The constants.
    pub constants: Constants,
    /// The software.
    pub stack: Stack,
    /// Number of experts that each token is sent to; 0 in dense models.
    pub expert_copies: f64,
}

impl Costs {
    /// Prices `units` for `stack` on `cluster` with products in `format`.
    pub fn new(
        units: &Units,
        work: &Workload,
        cluster: &Cluster,
        stack: &Stack,
        constants: &Constants,
        format: Format,
    ) -> Costs {
        let engine = Engine { device: &cluster.device, format, constants };
        let kinds = units.kinds.iter().map(|unit| unit_cost(unit, work, &engine, stack)).collect();
        Costs {
            kinds,
            kind_of: units.order.iter().map(|(kind, _)| *kind).collect(),
            cluster: cluster.clone(),
            constants: constants.clone(),
            stack: stack.clone(),
            expert_copies: units.kinds.iter().map(|unit| unit.expert_copies).fold(0.0, f64::max),
        }
    }

    /// The prices of `unit`.
    pub fn unit(&self, unit: u32) -> &UnitCost {
        &self.kinds[self.kind_of[unit as usize]]
    }

    /// Seconds that `instruction` takes on its lane. `keep` says which activations the unit's
    /// forward kept for the backward to come.
    pub fn device_s(&self, program: &Program, instruction: &Instruction, keep: Keep) -> f64 {
        let mesh = &program.mesh;
        let bytes = instruction.bytes as f64;
        match instruction.action {
            Action::Forward { unit, segment, .. } => {
                self.unit(unit).forward_s * SegmentShare::of(program, unit, segment).forward
            }
            Action::Backward { unit, segment, part, .. } => {
                self.backward_s(unit, part, keep, SegmentShare::of(program, unit, segment))
            }
            Action::Gather { unit, over } if self.stack.gathers == Bundle::Tensor => {
                self.gather_of_tensors_s(mesh, unit, over, bytes, keep)
            }
            Action::Gather { over, .. } => {
                let sent = instruction.sent_bytes(Axis::Shard, instruction.bytes) as f64;
                self.collective(Operation::AllGather, sent, over, mesh.tp)
                    + self.stream_s(encoding_bytes(program, instruction))
            }
            Action::Reduce { axis, .. } => {
                self.reduce_s(mesh, instruction, axis) + self.stream_s(encoding_bytes(program, instruction))
            }
            Action::Outer { axis, .. } => {
                let sent = instruction.sent_bytes(axis, instruction.bytes) as f64;
                let stride = mesh.tp * mesh.shard_degree();
                // The masters, the parameters of the last outer step and their momentum are read
                // and written.
                self.collective(Operation::AllReduce, sent, mesh.degree(axis), stride)
                    + self.stream_s(6.0 * bytes + encoding_bytes(program, instruction))
            }
            // Masters and the parameters of the outer step are read, and masters and their copy
            // written.
            Action::Merge { unit } => {
                let moved = 3 * 4 + self.stack.state.parameter;
                self.stream_s(self.unit(unit).elements / masters_over(program) * f64::from(moved))
            }
            // Every server takes its part from every worker, as the ranks of a reduce-scatter do.
            Action::Push { .. } => {
                self.collective(Operation::ReduceScatter, bytes, mesh.shard_degree(), mesh.tp) * of_servers(program)
            }
            Action::Pull { .. } => {
                self.collective(Operation::AllGather, bytes, mesh.shard_degree(), mesh.tp) * of_servers(program)
            }
            // A server of the rank shares its cores: it adds up the gradients of all workers,
            // squares the sum and updates its part.
            Action::Commit => {
                let state = &self.stack.state;
                let (workers, gradient) = (mesh.shard_degree(), f64::from(state.gradient));
                let moved =
                    f64::from(workers + 2) * gradient + 2.0 * (f64::from(state.master) + state.whole_optimizer());
                let elements: f64 = program.trains().iter().map(|unit| self.unit(*unit).elements).sum();
                self.stream_s(moved * elements / f64::from(workers) * of_servers(program))
            }
            // The first and the last stage share the unit.
            Action::Tie { axis: Axis::Pipeline, .. } => {
                self.collective(Operation::AllReduce, bytes, 2, mesh.stage_ranks())
            }
            Action::Tie { axis, .. } => self.collective(Operation::AllReduce, bytes, mesh.degree(axis), 1),
            Action::Send { to, .. } => {
                let node = |rank: u32| rank / self.cluster.devices_per_node;
                // Tensor-parallel ranks with a split sequence send parts. Otherwise each sends a
                // part, and the parts are gathered.
                let sent = instruction.sent_bytes(Axis::Pipeline, instruction.bytes) as f64;
                message_s(&self.cluster, &self.constants, sent, node(program.rank) != node(to))
                    + self.stream_s(encoding_bytes(program, instruction))
            }
            // The time on the way is the sender's.
            Action::Recv { .. } => self.stream_s(encoding_bytes(program, instruction)),
            Action::Exchange { collective, axis, times, .. } => {
                f64::from(times) * self.exchange_s(mesh, collective, axis, bytes)
            }
            Action::Update { unit, .. } => {
                let held = masters_over(program);
                // The gradient is read, the master and both moments are read and written, and the
                // compute copy is written.
                let state = &self.stack.state;
                let mut moved = state.gradient + 2 * state.master + state.parameter;
                if program.rounding_bits_of(unit).is_some() {
                    // The masters are read once more, and their rounded values are written.
                    moved += state.master + state.parameter;
                }
                if program.is_pruned(unit) {
                    // Masters are read for the mask; then they and the copy are read and written.
                    moved += 3 * state.master + 2 * state.parameter;
                }
                let chunks = f64::from(program.chunks_of(unit));
                let bytes =
                    (f64::from(moved) + 2.0 * state.whole_optimizer()) * self.unit(unit).elements / held / chunks;
                match program.offload.optimizer {
                    Some(Tier::Host) => bytes / HOST_MEMORY_BYTES_S,
                    _ => self.stream_s(bytes),
                }
            }
            Action::Clip { .. } => {
                let elements: f64 = (0..program.units.len() as u32)
                    .filter(|unit| program.runs(*unit))
                    .map(|unit| self.unit(unit).elements)
                    .sum();
                let held = match program.placement.gradients {
                    trainyard_program::Extent::Full => 1.0,
                    trainyard_program::Extent::Shard => f64::from(mesh.shard_degree()),
                };
                // Gradients in a tier were squared on their way there.
                let read = if program.offload.gradients.is_none() { elements / held } else { 0.0 };
                self.stream_s(f64::from(self.stack.state.gradient) * read)
                    + self.collective(Operation::AllReduce, 8.0, mesh.ranks(), 1)
            }
            action @ (Action::Fetch { .. } | Action::Evict { .. }) => match program.tier_of(action) {
                Some(Tier::Encoded(_)) => self.stream_s(2.0 * bytes),
                _ => bytes / (self.cluster.device.host_gb_s * 1e9),
            },
            Action::Fold { unit, .. } => self.stream_s(12.0 * self.unit(unit).elements),
            Action::Load { .. } | Action::Count { .. } | Action::Release { .. } | Action::Snapshot => 0.0,
        }
    }

    /// Seconds of compute lost per second of the collective `instruction`, which takes `seconds`.
    /// A collective occupies some cores for as long as it runs, and memory bandwidth and power in
    /// proportion to the bytes that it moves.
    pub fn interference(&self, instruction: &Instruction, seconds: f64) -> f64 {
        let rate = instruction.bytes as f64 / seconds / (self.cluster.device.link_gb_s * 1e9);
        self.constants.interference + self.constants.interference_moved * rate.min(1.0)
    }

    /// Seconds that `instruction` saves if it is sent together with the collective before it: its
    /// share of the start and of the steps' latencies, which are paid once per [`MESSAGE_BYTES`].
    /// A collective without bytes costs nothing, so it saves nothing.
    pub fn joined_s(&self, program: &Program, instruction: &Instruction) -> f64 {
        let latency = match instruction.action {
            _ if instruction.bytes == 0 => return 0.0,
            Action::Gather { over, .. } if self.stack.gathers == Bundle::Queue => {
                self.collective(Operation::AllGather, 1.0, over, program.mesh.tp)
            }
            Action::Reduce { axis, .. } if self.stack.reductions == Bundle::Queue => {
                let smallest = Instruction { bytes: 1, encoding: None, factors: None, ..instruction.clone() };
                self.reduce_s(&program.mesh, &smallest, axis)
            }
            _ => return 0.0,
        };
        latency * (1.0 - instruction.bytes as f64 / MESSAGE_BYTES).max(0.0)
    }

    /// Seconds of gathering each tensor by itself into a list of parts: one collective per tensor,
    /// then a copy for every rank (PyTorch's `all_gather` over a list). With recomputation, module
    /// hooks gather twice in backward: for the repeated forward and for the gradients.
    fn gather_of_tensors_s(&self, mesh: &Mesh, unit: u32, over: u32, bytes: f64, keep: Keep) -> f64 {
        let tensors = self.unit(unit).tensors;
        let one = self.collective(Operation::AllGather, bytes / tensors, over, mesh.tp);
        // The library launches the copies, not the script.
        let copies = f64::from(over) * (self.constants.launch_us * 1e-6).max(self.dispatch_s(Dispatch::Compiled));
        let passes = if keep == Keep::InputOnly { 2.0 } else { 1.0 };
        passes * tensors * (one + copies)
    }

    /// Seconds of the host to launch a kernel.
    fn dispatch_s(&self, dispatch: Dispatch) -> f64 {
        self.constants.dispatch_us * 1e-6 * if dispatch == Dispatch::Eager { 1.0 } else { 0.2 }
    }

    /// Seconds of the host to launch `instruction`.
    pub fn host_s(&self, program: &Program, instruction: &Instruction, keep: Keep) -> f64 {
        let each = self.dispatch_s(self.stack.dispatch);
        match instruction.action {
            Action::Forward { unit, segment, .. } => {
                each * self.unit(unit).launches[0] * SegmentShare::of(program, unit, segment).forward
            }
            Action::Backward { unit, segment, part, .. } => {
                let share = SegmentShare::of(program, unit, segment);
                let [forward, backward] = self.unit(unit).launches;
                let backward = match part {
                    BackwardPart::Whole => backward * share.backward,
                    BackwardPart::Input | BackwardPart::Weights => 0.5 * backward * share.backward,
                };
                let again = match keep {
                    _ if part == BackwardPart::Weights => 0.0,
                    Keep::Everything => 0.0,
                    Keep::Selective => self.unit(unit).selective_launches,
                    Keep::InputOnly => forward,
                };
                each * (again * share.forward + backward)
            }
            Action::Exchange { collective, axis: Axis::Tensor, times, .. } => {
                let collectives = f64::from(times) * if collective == Collective::GatherScatter { 2.0 } else { 1.0 };
                let mesh = &program.mesh;
                let far = mesh.stage_ranks() * mesh.pp > self.cluster.devices_per_node;
                let waits = if self.stack.host_sync && mesh.pp > 1 && far {
                    let nodes = f64::from(self.cluster.place(mesh.tp, 1).nodes);
                    let each = self.constants.host_sync_ms * (1.0 + self.constants.host_sync_node * (nodes - 1.0));
                    each * 1e-3 * f64::from(mesh.tp)
                } else {
                    0.0
                };
                // Each collective enqueues, hands over, waits and hands back.
                collectives * (4.0 * each + waits)
            }
            _ => 0.0,
        }
    }

    /// Bytes held only while `instruction` runs, beyond those that the program states.
    pub fn working(&self, instruction: &Instruction) -> f64 {
        match instruction.action {
            Action::Forward { unit, .. } => self.unit(unit).working[0],
            Action::Backward { unit, .. } => self.unit(unit).working[1],
            _ => 0.0,
        }
    }

    fn backward_s(&self, unit: u32, part: BackwardPart, keep: Keep, share: SegmentShare) -> f64 {
        let cost = self.unit(unit);
        let again = match keep {
            Keep::Everything => 0.0,
            Keep::Selective => cost.selective_s * share.forward,
            Keep::InputOnly => cost.forward_s * share.forward,
        };
        let input = cost.backward_input_s * share.backward;
        let weights = (cost.backward_weights_s + cost.accumulate_s) * share.backward;
        match part {
            BackwardPart::Whole => again + input + weights,
            BackwardPart::Input => again + input,
            BackwardPart::Weights => weights,
        }
    }

    /// Seconds that a step on many nodes waits for the slowest of them.
    pub fn straggle_s(&self) -> f64 {
        let nodes = f64::from(self.cluster.nodes);
        let share = nodes / STRAGGLE_NODES;
        if nodes > 1.0 { self.cluster.network.straggle_s * share.powi(4).min(share) } else { 0.0 }
    }

    fn stream_s(&self, bytes: f64) -> f64 {
        bytes / (self.cluster.device.memory_gb_s * 1e9 * self.constants.memory_share)
    }

    fn collective(&self, operation: Operation, bytes: f64, ranks: u32, stride: u32) -> f64 {
        collective_s(&self.cluster, &self.constants, operation, bytes, self.cluster.place(ranks, stride))
    }

    /// Seconds of a reduce-scatter inside the shard group and an all-reduce of the shard across
    /// replicas, if gradients are summed over them.
    fn reduce_s(&self, mesh: &Mesh, instruction: &Instruction, axis: Axis) -> f64 {
        if let Some(factors) = instruction.factors {
            let sum = |bytes: u64| self.collective(Operation::AllReduce, bytes as f64, mesh.degree(axis), mesh.tp);
            return factors.messages().map(sum).iter().sum();
        }
        let sent = |over| instruction.sent_bytes(over, instruction.bytes) as f64;
        let shards = mesh.shard_degree();
        let scatter = self.collective(Operation::ReduceScatter, sent(Axis::Shard), shards, mesh.tp);
        let replicas = if axis == Axis::Data { mesh.degree(Axis::Replicate) } else { 1 };
        let part = sent(Axis::Replicate) / f64::from(shards);
        scatter + self.collective(Operation::AllReduce, part, replicas, mesh.tp * mesh.shard_degree())
    }

    fn exchange_s(&self, mesh: &Mesh, collective: Collective, axis: Axis, bytes: f64) -> f64 {
        let ranks = mesh.degree(axis);
        let stride = match axis {
            Axis::Tensor => 1,
            _ => mesh.tp,
        };
        match collective {
            Collective::AllReduce => self.collective(Operation::AllReduce, bytes, ranks, stride),
            Collective::GatherScatter => {
                self.collective(Operation::AllGather, bytes, ranks, stride)
                    + self.collective(Operation::ReduceScatter, bytes, ranks, stride)
            }
            // Each rank sends its part of a buffer of these bytes to each other.
            Collective::AllToAll if axis == Axis::Context => self.collective(Operation::AllToAll, bytes, ranks, stride),
            // Experts lie on the ranks of a tensor group first.
            Collective::AllToAll => {
                let placed = match mesh.experts_of_replicas() {
                    true if mesh.shard_degree() > 1 => self.cluster.place(ranks, mesh.tp * mesh.shard_degree()),
                    _ => self.cluster.place(ranks * mesh.tp, 1),
                };
                let seconds = to_experts_s(&self.cluster, &self.constants, bytes, self.expert_copies, placed);
                seconds * if self.stack.overlap_experts { 1.0 - HIDDEN_EXPERTS } else { 1.0 }
            }
            Collective::Ring | Collective::AllGather => self.collective(Operation::AllGather, bytes, ranks, stride),
            Collective::ReduceScatter => self.collective(Operation::ReduceScatter, bytes, ranks, stride),
        }
    }
}

fn unit_cost(unit: &UnitWork, work: &Workload, engine: &Engine<'_>, stack: &Stack) -> UnitCost {
    let constants = engine.constants;
    // Frozen parameters have no gradients and no updates.
    let tuned = unit.tuned.as_ref();
    let trained = unit.elements - tuned.map_or(0.0, |tuned| tuned.frozen_elements as f64);
    let experts = unit.expert_elements.min(trained);
    let elements = ((trained - experts) + experts / f64::from(work.expert)) / f64::from(work.tensor);
    let (gradients, adapters) = tuned.map_or((1.0, 0.0), |tuned| (tuned.gradients, tuned.adapters));
    let launches = |kernels: &[&[Kernel]]| -> f64 { kernels.iter().flat_map(|k| k.iter()).map(Kernel::launches).sum() };
    // The loss reads logits and writes their gradient. Three quarters of the traffic belong to
    // forward.
    let loss = |share: f64| share * unit.loss_traffic * constants.loss_factor / engine.bandwidth();
    UnitCost {
        forward_s: (1.0 + adapters) * engine.seconds(&unit.forward) + loss(0.75),
        backward_input_s: (1.0 + adapters) * engine.seconds(&unit.backward_input) + loss(0.25),
        backward_weights_s: gradients * engine.seconds(&unit.backward_weights),
        // A 16-bit gradient is read, and an f32 sum is read and written.
        accumulate_s: if stack.fused_accumulation { 0.0 } else { 10.0 * elements / engine.bandwidth() },
        selective_s: engine.seconds(&unit.selective),
        launches: [
            launches(&[&unit.forward]) + unit.extra_launches[0],
            launches(&[&unit.backward_input, &unit.backward_weights]) + unit.extra_launches[1],
        ],
        selective_launches: launches(&[&unit.selective]),
        working: unit.working,
        elements,
        tensors: f64::from(unit.tensors),
    }
}

impl Units {
    /// The facts about the model that a lowering needs: sizes of one rank's micro-batch, as if
    /// nothing split it.
    pub fn shape(&self, work: &Workload, tied: bool, sequence_parallel: bool) -> ModelShape {
        let (tensor, context) = (f64::from(work.tensor), f64::from(work.context));
        let last = self.order.len() - 1;
        let unit = |(index, (kind, name)): (usize, &(usize, String))| {
            let unit = &self.kinds[*kind];
            // A lowering divides again: everything by the tensor degree, or, without a split
            // sequence, everything but five outputs.
            let round = |bytes: f64| {
                let whole = if sequence_parallel { 0.0 } else { bytes.min(5.0 * unit.output) };
                ((whole + (bytes - whole) * tensor) * context) as u64
            };
            UnitShape {
                name: name.clone(),
                flat_elements: unit.elements as u64,
                matrices: Vec::new(),
                rests: false,
                frozen_elements: unit.tuned.as_ref().map_or(0, |tuned| tuned.frozen_elements),
                encodable: unit.tuned.as_ref().map_or(Vec::new(), |tuned| tuned.encodable.clone()),
                borrows: if tied && index == last { vec![0] } else { Vec::new() },
                saved_bytes: unit.saved.map(round),
                output_bytes: (unit.output * context) as u64,
                tensor_collectives: unit.exchanges,
                // Measured runs cut by blocks.
                work: 0,
                kv_bytes: (unit.kv * context) as u64,
                expert_elements: unit.expert_elements as u64,
                expert_bytes: (unit.expert_bytes * context) as u64,
                split: None,
            }
        };
        ModelShape {
            units: self.order.iter().enumerate().map(unit).collect(),
            batch_bytes: 16 * u64::from(work.micro_batch) * u64::from(work.sequence),
        }
    }
}

/// Number of ranks over which masters are divided.
fn masters_over(program: &Program) -> f64 {
    match program.placement.masters {
        trainyard_program::Extent::Full => 1.0,
        trainyard_program::Extent::Shard => f64::from(program.mesh.shard_degree()),
    }
}

/// The factor by which fewer servers than workers lengthen what a server does: the servers have the
/// parts of all ranks.
fn of_servers(program: &Program) -> f64 {
    program.server.map_or(1.0, |server| f64::from(program.mesh.shard_degree()) / f64::from(server.servers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Profiles, model};

    /// Regression: selective recomputation cost nothing where attention was fused, whatever it
    /// repeated.
    #[test]
    fn recomputing_more_takes_longer_and_keeps_less_in_every_software() {
        let constants = Constants::builtin();
        let cluster = Cluster::parse("1x8xH100", &Profiles::builtin()).unwrap();
        for stack in Stack::builtin() {
            for (name, tensor) in [("llama-8b", 1), ("llama-8b", 8), ("gpt3-175b", 8), ("qwen3-30b-a3b", 1)] {
                let work =
                    Workload { sequence: 4096, micro_batch: 2, tensor, context: 1, expert: 1, operand_bytes: 2.0 };
                let units = model(name).unwrap().units(&work, &stack);
                let costs = Costs::new(&units, &work, &cluster, &stack, &constants, Format::Bf16);
                let (cost, saved) = (&costs.kinds[1], units.kinds[1].saved);
                let what = format!("{name} on {tensor} by {}: {cost:?}, {saved:?}", stack.name);
                assert!(0.0 < cost.selective_s && cost.selective_s < cost.forward_s, "{what}");
                assert!(0.0 < cost.selective_launches && cost.selective_launches <= cost.launches[0], "{what}");
                assert!(saved[0] >= saved[1] && saved[1] > saved[2], "{what}");
            }
        }
    }
}
