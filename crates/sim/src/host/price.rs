//! The price of each instruction on a host while nothing else runs there.

use super::HostLayout;
use crate::encoding::{encoding_bytes, encoding_flops};
use crate::machine::{CollectiveCurve, Fitted, KernelCurve, MachineProfile, Speeds};
use std::collections::{BTreeMap, HashMap};
use trainyard_program::{Action, Axis, Collective, Extent, Group, Instruction, Lane, Mesh, Program, Tier};
use trainyard_tensor::{Call, Computes};

/// The price of one instruction.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Priced {
    /// Seconds on the rank's own threads: kernels, and the engine's work around them.
    pub work_s: f64,
    /// Seconds of communication with other ranks.
    pub exchange_s: f64,
    /// Number of ranks on this host that communicated at once when this was measured.
    pub exchange_ranks: u32,
}

/// Number of ranks that communicate with each other, and number of their hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Spread {
    ranks: u32,
    hosts: u32,
}

/// The curves of one machine for one layout, at the speeds of a moment.
pub struct HostPrices<'p> {
    profile: &'p MachineProfile,
    speeds: Speeds,
    /// Number of ranks on the host.
    ranks: u32,
    /// Curves by dtype and kernel, each with the ratio of the threads that were measured to those
    /// of a rank.
    curves: HashMap<&'p str, HashMap<&'p str, (Fitted, f64)>>,
}

impl<'p> HostPrices<'p> {
    /// Fits the curves that were measured with the layout's number of threads. If there are none,
    /// takes those of the nearest number, scaled.
    pub fn new(profile: &'p MachineProfile, layout: HostLayout, speeds: Speeds) -> HostPrices<'p> {
        let apart = |threads: u32| (f64::from(threads) / f64::from(layout.threads)).ln().abs();
        let mut nearest: HashMap<(&str, &str), &KernelCurve> = HashMap::new();
        for curve in &profile.kernels {
            let known = nearest.entry((&curve.dtype, &curve.kernel)).or_insert(curve);
            if apart(curve.threads) < apart(known.threads) {
                *known = curve;
            }
        }
        let mut curves: HashMap<&str, HashMap<&str, (Fitted, f64)>> = HashMap::new();
        for ((dtype, kernel), curve) in nearest {
            let scale = f64::from(curve.threads) / f64::from(layout.threads);
            curves.entry(dtype).or_default().insert(kernel, (curve.fit(), scale));
        }
        HostPrices { profile, speeds, ranks: layout.ranks, curves }
    }

    /// The curve of a call: that of its form and dtype, otherwise that of its plain form. 16-bit
    /// floats other than bf16 are computed as f32.
    fn curve(&self, call: &Call) -> Option<&(Fitted, f64)> {
        let dtype = if call.work.dtype.name() == "bf16" { "bf16" } else { "f32" };
        let curves = self.curves.get(dtype)?;
        curves.get(name(call).as_str()).or_else(|| curves.get(call.kernel))
    }

    /// Bytes per second of a call that the host runs beside a GPU; None if the profile is of the
    /// processor that runs it.
    fn beside_gpu(&self, call: &Call) -> Option<f64> {
        let transfers = self.profile.transfers.filter(|_| call.computes == Computes::Cpu)?;
        Some(transfers.host_update_bytes_per_s / f64::from(self.ranks))
    }

    /// Seconds of one call.
    pub fn call_s(&self, call: &Call) -> f64 {
        let (flops, bytes) = (call.work.cost.flops as f64, call.work.cost.bytes as f64);
        if let Some(speed) = self.beside_gpu(call) {
            return bytes / speed;
        }
        match self.curve(call) {
            Some((curve, scale)) => scale * curve.seconds(&dims(call), flops, bytes, &self.speeds),
            // At the roof: the peak of its arithmetic, or of copies.
            None => {
                let peak =
                    if call.work.dtype.name() == "bf16" { self.speeds.bf16_flops } else { self.speeds.f32_flops };
                (bytes / self.speeds.copy_bytes_per_s).max(flops / peak)
            }
        }
    }

    /// The calls that have no curve.
    pub fn unpriced(&self, calls: &[Call]) -> BTreeMap<String, u32> {
        let mut missing = BTreeMap::new();
        for call in calls.iter().filter(|call| self.beside_gpu(call).is_none() && self.curve(call).is_none()) {
            *missing.entry(format!("{} in {}", name(call), call.work.dtype)).or_default() += 1;
        }
        missing
    }

    /// The prices of all instructions of `program`.
    pub fn program(&self, program: &Program, calls: &[Call]) -> Vec<Priced> {
        let mut work: Vec<(f64, u32)> = vec![(0.0, 0); program.instructions.len()];
        for call in calls {
            if let Some((seconds, count)) = work.get_mut(call.tag as usize) {
                *seconds += self.call_s(call);
                *count += 1;
            }
        }
        let price = |(instruction, (kernels, count)): (&Instruction, (f64, u32))| {
            let (exchange_s, exchange_ranks) = self.exchange(program, instruction);
            let around = self.around(program, instruction, count);
            Priced { work_s: kernels + around, exchange_s, exchange_ranks }
        };
        program.instructions.iter().zip(work).map(price).collect()
    }

    /// Seconds of the engine's work around the `count` kernels of an instruction.
    fn around(&self, program: &Program, instruction: &Instruction, count: u32) -> f64 {
        let overheads = &self.profile.overheads;
        match instruction.action {
            // The batch is copied to the device.
            Action::Load { .. } => {
                let transfers = self.profile.transfers.map(|transfers| transfers.to_device_bytes_per_s);
                instruction.effects.iter().map(|effect| effect.bytes.max(0)).sum::<i64>() as f64
                    / transfers.unwrap_or(self.speeds.copy_bytes_per_s)
            }
            Action::Fetch { .. } | Action::Evict { .. } => {
                overheads.instruction_s + instruction.bytes as f64 / self.offload_speed(program, instruction.action)
            }
            Action::Gather { .. }
            | Action::Reduce { .. }
            | Action::Outer { .. }
            | Action::Send { .. }
            | Action::Recv { .. } => {
                let moves_s = encoding_bytes(program, instruction) / self.speeds.copy_bytes_per_s;
                overheads.instruction_s + moves_s.max(encoding_flops(program, instruction) / self.speeds.f32_flops)
            }
            action if action.lane() == Lane::Compute => overheads.instruction_s + f64::from(count) * overheads.launch_s,
            _ => overheads.instruction_s,
        }
    }

    /// Bytes per second at which state is fetched or evicted: over the GPU's own link to its host,
    /// from a disk that all ranks of a host share, or decoded in memory.
    fn offload_speed(&self, program: &Program, action: Action) -> f64 {
        let (disk, ranks) = (&self.profile.disk, f64::from(self.ranks));
        match (program.tier_of(action), self.profile.transfers) {
            (Some(Tier::Host), Some(link)) if program.leaves_device(action) => link.to_host_bytes_per_s,
            (Some(Tier::Host), Some(link)) => link.to_device_bytes_per_s,
            // Decoded elements are written, and read from fewer bytes.
            (Some(Tier::Encoded(_)), _) => self.speeds.copy_bytes_per_s,
            _ if matches!(action, Action::Fetch { .. }) => disk.read_bytes_per_s / ranks,
            _ => disk.write_bytes_per_s / ranks,
        }
    }

    /// Seconds of an instruction's collectives, and the number of ranks of a host that communicated
    /// at once when the largest of their groups was measured.
    fn exchange(&self, program: &Program, instruction: &Instruction) -> (f64, u32) {
        let mesh = &program.mesh;
        let bytes = instruction.bytes as f64;
        let along = |axis| self.spread(mesh, |rank| mesh.group(rank, axis));
        let (seconds, ranks) = match instruction.action {
            Action::Gather { over, .. } => {
                let group = self.spread(mesh, |rank| mesh.neighbours(rank, Axis::Shard, over));
                let sent = instruction.sent_bytes(Axis::Shard, instruction.bytes) as f64;
                (self.collective("all_gather", group, sent), over)
            }
            Action::Reduce { axis, .. } => {
                let (shards, replicas) = (along(Axis::Shard), along(Axis::Replicate));
                if let Some(factors) = instruction.factors {
                    let sum = |bytes: u64| self.collective("all_reduce", along(axis), bytes as f64);
                    return (factors.messages().map(sum).iter().sum(), along(axis).ranks);
                }
                let sent = |over| instruction.sent_bytes(over, instruction.bytes) as f64;
                let scatter = self.collective("reduce_scatter", shards, sent(Axis::Shard));
                let part = sent(Axis::Replicate) / f64::from(shards.ranks);
                let sum = if axis == Axis::Data { self.collective("all_reduce", replicas, part) } else { 0.0 };
                (scatter + sum, shards.ranks.max(replicas.ranks))
            }
            Action::Push { .. } | Action::Pull { .. } => {
                let group = along(Axis::Shard);
                let operation =
                    if let Action::Push { .. } = instruction.action { "reduce_scatter" } else { "all_gather" };
                let servers = program.server.map_or(group.ranks, |server| server.servers);
                (self.collective(operation, group, bytes) * f64::from(group.ranks) / f64::from(servers), group.ranks)
            }
            Action::Count { .. } if bytes == 0.0 => (0.0, 1),
            Action::Outer { axis, .. } => {
                let sent = instruction.sent_bytes(axis, instruction.bytes) as f64;
                (self.collective("all_reduce", along(axis), sent), along(axis).ranks)
            }
            Action::Count { axis } => {
                let data = along(axis);
                (self.collective("all_reduce", data, bytes), data.ranks)
            }
            Action::Clip { .. } => {
                // The norm's parts, if they are on several ranks, and then the losses.
                let data = along(program.kind.gradient_axis());
                let losses = 8.0 * f64::from(program.micro_batches * data.ranks);
                let parts = match program.placement.masters {
                    Extent::Full => 0.0,
                    Extent::Shard => self.collective("all_gather", along(Axis::Shard), bytes),
                };
                // Ranks of a tensor-parallel group have parts of a matrix, stages have other units.
                let [tensor, stages] = [Axis::Tensor, Axis::Pipeline].map(along);
                let rest = self.collective("all_gather", tensor, 8.0 * f64::from(tensor.ranks))
                    + 2.0 * self.collective("all_gather", stages, losses * f64::from(stages.ranks));
                let ranks = data.ranks.max(tensor.ranks).max(stages.ranks);
                (parts + self.collective("all_gather", data, losses) + rest, ranks)
            }
            Action::Exchange { collective, axis, times, .. } => {
                let group = along(axis);
                let one = |operation| self.collective(operation, group, bytes);
                let seconds = match collective {
                    Collective::AllReduce => one("all_reduce"),
                    Collective::ReduceScatter => one("reduce_scatter"),
                    Collective::GatherScatter => one("all_gather") + one("reduce_scatter"),
                    Collective::AllGather | Collective::Ring | Collective::AllToAll => one("all_gather"),
                };
                (f64::from(times) * seconds, group.ranks)
            }
            // The first and the last stage share the unit.
            Action::Tie { axis: Axis::Pipeline, .. } => {
                let hosts = along(Axis::Pipeline).hosts.min(2);
                (self.collective("all_reduce", Spread { ranks: 2, hosts }, bytes), 2)
            }
            Action::Tie { axis, .. } => (self.collective("all_reduce", along(axis), bytes), along(axis).ranks),
            // Messages were not measured. Each of two ranks that gather receives half of the
            // buffer.
            Action::Send { to, .. } => {
                let host = |rank: u32| rank / self.ranks.max(1);
                let hosts = if host(program.rank) == host(to) { 1 } else { 2 };
                let sent = instruction.sent_bytes(Axis::Pipeline, instruction.bytes) as f64;
                (self.collective("all_gather", Spread { ranks: 2, hosts }, 2.0 * sent), 2)
            }
            _ => (0.0, 0),
        };
        // Groups of threads were measured one at a time, groups of processes all at once.
        let at_once = if self.profile.machine.processes.is_some() { self.ranks } else { ranks };
        (seconds, at_once)
    }

    /// The spread over hosts of the groups that `group` makes of ranks, which are assigned to hosts
    /// in order. The group on the most hosts counts, because all others wait for it.
    fn spread(&self, mesh: &Mesh, group: impl Fn(u32) -> Group) -> Spread {
        let ranks = group(0).ranks.len() as u32;
        if self.ranks >= mesh.ranks() {
            return Spread { ranks, hosts: 1 };
        }
        let hosts = |rank| {
            let mut hosts: Vec<u32> = group(rank).ranks.iter().map(|rank| rank / self.ranks.max(1)).collect();
            hosts.dedup();
            hosts.len() as u32
        };
        Spread { ranks, hosts: (0..mesh.ranks()).map(hosts).max().unwrap_or(1) }
    }

    /// Seconds of a collective on a buffer of `bytes` between the ranks of a group. A group that
    /// was not measured takes the nearest one, by hosts before ranks, in proportion to the bytes
    /// that each rank moves.
    fn collective(&self, operation: &str, group: Spread, bytes: f64) -> f64 {
        let Spread { ranks, hosts } = group;
        if ranks <= 1 || bytes <= 0.0 {
            return 0.0;
        }
        let far = |a: u32, b: u32| (f64::from(a) / f64::from(b)).ln().abs();
        let apart = |curve: &CollectiveCurve| [far(curve.hosts, hosts), far(curve.ranks, ranks)];
        let of = self.profile.collectives.iter().filter(|curve| curve.operation == operation);
        let nearest = of.min_by(|a, b| {
            let ([hosts, ranks], [its_hosts, its_ranks]) = (apart(a), apart(b));
            hosts.total_cmp(&its_hosts).then(ranks.total_cmp(&its_ranks))
        });
        match nearest {
            Some(curve) => curve.seconds(bytes) * f64::from(ranks) / f64::from(curve.ranks),
            None => 2.0 * bytes * f64::from(ranks) / self.speeds.copy_bytes_per_s,
        }
    }
}

/// The kernel with its form, in the names of curves.
pub(crate) fn name(call: &Call) -> String {
    match call.work.variant {
        "" => call.kernel.to_owned(),
        form => format!("{} {form}", call.kernel),
    }
}

/// The shape of a call.
pub(crate) fn dims(call: &Call) -> Vec<f64> {
    call.work.dims.map(f64::from).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Processes;
    use crate::machine::Transfers;
    use crate::machine::tests::small;
    use trainyard_program::{ModelShape, Offload, Strategy, UnitShape, lower_rank};

    /// Two units whose optimizer state is offloaded, replicated on `ranks`.
    fn offloading(ranks: u32, tier: Tier) -> Program {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1 << 20, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let mut strategy = Strategy::new(2);
        strategy.offload = Offload { optimizer: Some(tier), ..Offload::default() };
        lower_rank(&model, &Mesh::data(ranks, 1), &strategy, 0).unwrap()
    }

    /// Expects every fetch and eviction to take its bytes over the given speed.
    fn expect_speeds(profile: &MachineProfile, program: &Program, fetch: f64, evict: f64) {
        let layout = HostLayout { ranks: program.mesh.ranks(), threads: 1 };
        let priced = HostPrices::new(profile, layout, profile.speeds).program(program, &[]);
        let mut seen = 0;
        for (instruction, price) in program.instructions.iter().zip(priced) {
            let speed = match instruction.action {
                Action::Fetch { .. } => fetch,
                Action::Evict { .. } => evict,
                _ => continue,
            };
            let expected = instruction.bytes as f64 / speed + profile.overheads.instruction_s;
            assert!(instruction.bytes > 0 && (price.work_s / expected - 1.0).abs() < 1e-9, "{instruction:?}");
            seen += 1;
        }
        assert!(seen >= 4, "state of two units comes and goes");
    }

    /// A profile of `count` processes on two hosts. Collectives within a host take one second
    /// whatever their size, those between hosts take ten.
    fn two_hosts(count: u32) -> MachineProfile {
        let curve = |operation: &str, ranks, hosts: u32| CollectiveCurve {
            operation: operation.to_owned(),
            ranks,
            hosts,
            alpha_s: 0.0,
            beta_s_per_byte: 0.0,
            points: vec![[1.0, 10f64.powi(hosts as i32 - 1)], [1e12, 10f64.powi(hosts as i32 - 1) + 1e-9]],
        };
        let of = |operation| [curve(operation, 2, 1), curve(operation, 2, 2), curve(operation, count, 2)];
        let collectives = ["all_gather", "reduce_scatter", "all_reduce"].into_iter().flat_map(of).collect();
        let processes = Some(Processes { backend: "tcp".into(), count, hosts: 2 });
        MachineProfile { machine: crate::machine::Machine { processes, ..small().machine }, collectives, ..small() }
    }

    /// Seconds of the first reduction of `replicas` x `shards` ranks on two hosts, and the number
    /// of ranks of a host that communicate at once.
    fn reduction(replicas: u32, shards: u32) -> (f64, u32) {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1 << 20, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let program = lower_rank(&model, &Mesh::data(replicas, shards), &Strategy::new(2), 0).unwrap();
        let (count, profile) = (replicas * shards, two_hosts(replicas * shards));
        let layout = HostLayout { ranks: count / 2, threads: 1 };
        let prices = HostPrices::new(&profile, layout, profile.speeds).program(&program, &[]);
        let is_reduction = |instruction: &Instruction| matches!(instruction.action, Action::Reduce { .. });
        let priced = prices[program.instructions.iter().position(is_reduction).unwrap()];
        (priced.exchange_s.round(), priced.exchange_ranks)
    }

    #[test]
    fn groups_are_priced_by_the_hosts_that_they_are_on() {
        // Shards within a host, replicas across hosts.
        assert_eq!(reduction(2, 2), (11.0, 2));
        // Shards on both hosts.
        assert_eq!(reduction(1, 4), (10.0, 2));
        // Three ranks on each host: pairs of neighbours share a host, except for the pair in the
        // middle, for which all wait.
        assert_eq!(reduction(3, 2), (10.0 + 10.0 * 1.5, 3));
    }

    #[test]
    fn what_comes_from_a_disk_takes_the_disks_time_and_ranks_share_it() {
        let profile = small();
        for ranks in [1, 2] {
            let share = f64::from(ranks);
            let (read, write) = (profile.disk.read_bytes_per_s / share, profile.disk.write_bytes_per_s / share);
            expect_speeds(&profile, &offloading(ranks, Tier::Disk), read, write);
        }
    }

    #[test]
    fn what_a_gpu_keeps_on_its_host_takes_its_own_links_time() {
        let transfers =
            Transfers { to_device_bytes_per_s: 5e10, to_host_bytes_per_s: 4e10, host_update_bytes_per_s: 2e11 };
        let profile = MachineProfile { transfers: Some(transfers), ..small() };
        for ranks in [1, 2] {
            // Gradients go to the host, where the update runs, and the updated copy returns.
            expect_speeds(&profile, &offloading(ranks, Tier::Host), 4e10, 5e10);
        }
    }

    #[test]
    fn an_update_on_the_host_takes_what_its_memory_gives_and_ranks_share_it() {
        let transfers =
            Transfers { to_device_bytes_per_s: 5e10, to_host_bytes_per_s: 4e10, host_update_bytes_per_s: 2e11 };
        let gpu = MachineProfile { transfers: Some(transfers), ..small() };
        let work = trainyard_tensor::Cost::new(12, 28_000_000).on(trainyard_tensor::DType::BF16, [1_000_000]);
        let call = |computes| Call { kernel: "lion", work, seconds: 0.0, tag: 0, computes };
        for ranks in [1, 2] {
            let prices = HostPrices::new(&gpu, HostLayout { ranks, threads: 1 }, gpu.speeds);
            assert_eq!(prices.call_s(&call(Computes::Cpu)), f64::from(ranks) * 28e6 / 2e11);
            // The GPU's own calls go by its own curves, of which there are none here.
            assert_eq!(prices.call_s(&call(Computes::Cuda)), 28e6 / gpu.speeds.copy_bytes_per_s);
            let unpriced: Vec<u32> =
                prices.unpriced(&[call(Computes::Cpu), call(Computes::Cuda)]).into_values().collect();
            assert_eq!(unpriced, [1]);
        }
        let small = small();
        let prices = HostPrices::new(&small, HostLayout { ranks: 1, threads: 1 }, small.speeds);
        assert_eq!(prices.call_s(&call(Computes::Cpu)), 28e6 / small.speeds.copy_bytes_per_s);
    }
}
