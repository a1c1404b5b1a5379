//! Recordings whose cause of lost time is known.
//!
//! A recording is made on a virtual clock: programs that were really lowered are played with seeded
//! durations, once with a planted cause and once without it. So it takes no time of its own, and
//! the true cost of the cause is known.

use std::collections::BTreeMap;
use std::time::Duration;
use trainyard_base::philox4x32;
use trainyard_observe::run::{FaultReport, LaneReport, Metrics, RankRecord, Run};
use trainyard_observe::verdict::Cause;
use trainyard_program::{
    Action, Lane, Mesh, ModelShape, Offload, PipelineSchedule, Program, Strategy, Tier, UnitShape, lower_rank,
};
use trainyard_record::health::{HealthEvent, Symptom};
use trainyard_record::monitor::{Gpu, Sample};
use trainyard_record::programs::{Programs, Work};
use trainyard_record::steps::{Step, Times};
use trainyard_sim::replay::{Own, Replay};

/// A planted cause.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Plant {
    /// Nothing.
    Clean,
    /// Every batch is read from a slow disk.
    SlowDisk,
    /// Batches come in time but for one step in four, in which the tokenizer is late.
    SlowTokenizer,
    /// Gradients take long to be summed.
    SlowLink,
    /// In some steps a reduction takes very long.
    Jitter,
    /// Gathers of sharded parameters take long.
    SlowGather,
    /// One data rank computes slower.
    SlowRank,
    /// One data rank computes slower in some steps.
    SometimesSlowRank,
    /// One stage of a pipeline computes slower at the same work.
    SlowStage,
    /// One stage of a pipeline has more work.
    UnevenStages,
    /// Micro-batches have unequal work.
    UnevenLengths,
    /// A pipeline has few micro-batches.
    FewMicroBatches,
    /// Kernels are so short that launching them takes the time.
    TinyKernels,
    /// The engine is slow between instructions.
    SlowEngine,
    /// Optimizer state lies on a slow disk.
    SlowOffload,
    /// Training waits for checkpoints.
    SlowCheckpoint,
    /// Another program uses cores.
    StolenCores,
    /// The hypervisor gives cores to others.
    StolenByHypervisor,
    /// The control group withholds cores.
    ThrottledCores,
    /// The clock falls.
    SlowClock,
    /// The clock of a GPU falls at its power limit.
    SlowGpu,
    /// Another program uses memory bandwidth at times.
    NoisyNeighbour,
    /// Pages go to swap.
    Swapping,
    /// Memory grows.
    Leak,
    /// Losses are not finite.
    NotFinite,
    /// Losses jump.
    Spikes,
    /// A bit flips on the way between ranks.
    FlippedBit,
    /// A bit flips in the memory of a rank, so that replicas differ.
    FlippedInMemory,
    /// A rank hangs.
    Hang,
    /// A rank has left no record, and few steps were trained.
    FewSteps,
}

impl Plant {
    /// Every cause that is planted.
    pub const ALL: [Plant; 29] = [
        Plant::SlowDisk,
        Plant::SlowTokenizer,
        Plant::SlowLink,
        Plant::Jitter,
        Plant::SlowGather,
        Plant::SlowRank,
        Plant::SometimesSlowRank,
        Plant::SlowStage,
        Plant::UnevenStages,
        Plant::UnevenLengths,
        Plant::FewMicroBatches,
        Plant::TinyKernels,
        Plant::SlowEngine,
        Plant::SlowOffload,
        Plant::SlowCheckpoint,
        Plant::StolenCores,
        Plant::StolenByHypervisor,
        Plant::ThrottledCores,
        Plant::SlowClock,
        Plant::SlowGpu,
        Plant::NoisyNeighbour,
        Plant::Swapping,
        Plant::Leak,
        Plant::NotFinite,
        Plant::Spikes,
        Plant::FlippedBit,
        Plant::FlippedInMemory,
        Plant::Hang,
        Plant::FewSteps,
    ];

    /// The verdict that is right.
    pub fn cause(self) -> Option<Cause> {
        Some(match self {
            Plant::Clean => return None,
            Plant::SlowDisk | Plant::SlowTokenizer => Cause::InputBound,
            Plant::SlowLink | Plant::Jitter | Plant::SlowGather => Cause::CommunicationBound,
            Plant::SlowRank | Plant::SometimesSlowRank | Plant::SlowStage => Cause::Straggler,
            Plant::UnevenStages | Plant::UnevenLengths => Cause::Imbalance,
            Plant::FewMicroBatches => Cause::Bubble,
            Plant::TinyKernels | Plant::SlowEngine => Cause::HostOverhead,
            Plant::SlowOffload => Cause::OffloadBound,
            Plant::SlowCheckpoint => Cause::CheckpointStall,
            Plant::StolenCores | Plant::StolenByHypervisor => Cause::StolenCores,
            Plant::ThrottledCores | Plant::SlowClock | Plant::SlowGpu => Cause::Throttled,
            Plant::NoisyNeighbour => Cause::NoisyNeighbour,
            Plant::Swapping => Cause::MemoryPressure,
            Plant::Leak => Cause::Leak,
            Plant::NotFinite | Plant::Spikes | Plant::FlippedBit | Plant::FlippedInMemory => Cause::WrongNumbers,
            Plant::Hang => Cause::Hang,
            Plant::FewSteps => Cause::IncompleteData,
        })
    }

    /// True if the cause makes steps longer than they would be without it, so that its size can be
    /// compared. Pipelines with a bubble or uneven stages have no step without them.
    pub fn has_size(self) -> bool {
        use Cause::{Bubble, Hang, IncompleteData, Leak, WrongNumbers};
        let without = matches!(self.cause(), None | Some(Leak | WrongNumbers | Hang | IncompleteData | Bubble));
        !without && self != Plant::UnevenStages
    }
}

/// Severities: the share of a step that the cause takes, about.
pub const SHARES: [f64; 3] = [0.1, 0.25, 0.5];
/// Steps of a recording.
pub const STEPS: u64 = 43;

/// A recording with a known cause.
pub struct Recording {
    /// The recording.
    pub run: Run,
    /// Mean seconds of a step that the cause cost.
    pub cost_s: f64,
}

/// Seeded numbers.
struct Random {
    key: [u32; 2],
    count: u32,
}

impl Random {
    fn new(seed: u64, stream: u32) -> Random {
        Random { key: [seed as u32, stream], count: 0 }
    }

    /// From 0 to 1.
    fn uniform(&mut self) -> f64 {
        self.count += 1;
        f64::from(philox4x32([self.count, 0, 0, 0], self.key)[0]) / f64::from(u32::MAX)
    }

    /// About 1, with this deviation; never below a quarter.
    fn factor(&mut self, deviation: f64) -> f64 {
        // A sum of twelve uniform numbers is nearly normal.
        let normal = (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0;
        (1.0 + deviation * normal).max(0.25)
    }
}

/// The layout that a cause is planted in.
fn layout(plant: Plant, severity: usize, seed: u64) -> (Mesh, Strategy) {
    let units = UNITS.len();
    let pipeline = |micro_batches: u32| {
        let strategy = Strategy {
            accumulation_steps: micro_batches,
            pipeline: PipelineSchedule::OneForwardOneBackward.into(),
            ..Strategy::new(units)
        };
        (Mesh { pp: 2, ..Mesh::default() }, strategy)
    };
    let data =
        |mesh: Mesh, stage: u8| (mesh, Strategy { accumulation_steps: 2, zero_stage: stage, ..Strategy::new(units) });
    match plant {
        Plant::SlowStage | Plant::UnevenStages => pipeline(24),
        Plant::FewMicroBatches => pipeline([8, 3, 1][severity]),
        Plant::SlowLink | Plant::Jitter | Plant::SlowRank | Plant::SometimesSlowRank | Plant::UnevenLengths => {
            data(Mesh::data(4, 1), 0)
        }
        Plant::SlowGather => data(Mesh::data(1, 4), 3),
        Plant::SlowOffload => {
            let offload = Offload { optimizer: Some(Tier::Disk), ..Offload::default() };
            (Mesh::default(), Strategy { accumulation_steps: 2, offload, ..Strategy::new(units) })
        }
        Plant::Clean | Plant::FlippedBit | Plant::FlippedInMemory | Plant::Hang => match seed % 3 {
            0 => data(Mesh::default(), 0),
            1 => data(Mesh::data(4, 1), 0),
            _ => data(Mesh::data(1, 2), 3),
        },
        _ => data(Mesh::default(), 0),
    }
}

/// Seconds in which ranks agree on a step.
const AGREED_S: f64 = 3e-5;

const UNITS: [&str; 6] = ["embedding", "block.0", "block.1", "block.2", "block.3", "head"];

fn programs(mesh: Mesh, strategy: &Strategy) -> Vec<[Program; 2]> {
    let unit = |name: &str| UnitShape {
        name: name.into(),
        flat_elements: 1 << 20,
        output_bytes: 1 << 16,
        ..UnitShape::default()
    };
    let model = ModelShape { units: UNITS.map(unit).to_vec(), ..ModelShape::default() };
    let of_rank = |rank| {
        [false, true].map(|snapshot| {
            let strategy = Strategy { snapshot, ..strategy.clone() };
            lower_rank(&model, &mesh, &strategy, rank).expect("a layout of these tests can be lowered")
        })
    };
    (0..mesh.ranks()).map(of_rank).collect()
}

/// The work of an instruction, and its seconds on a healthy machine.
fn work(plant: Plant, severity: usize, program: &Program, action: Action) -> (Work, f64) {
    let unit = action.unit().map_or("", |unit| program.units[unit as usize].as_str());
    let uneven = plant == Plant::UnevenStages && matches!(unit, "head" | "block.3");
    let size = if uneven { 1.0 + 2.5 * SHARES[severity] } else { 1.0 };
    let tiny = plant == Plant::TinyKernels;
    let (flops, bytes, kernels, seconds) = match action {
        Action::Forward { .. } => (8e9, 5e7, 12, 8e-3),
        Action::Backward { .. } => (16e9, 9e7, 24, 16e-3),
        Action::Fold { .. } => (0.0, 4e7, 1, 4e-4),
        Action::Clip { .. } => (0.0, 4e7, 6, 3e-4),
        Action::Update { .. } => (1e7, 8e7, 1, 1.5e-3),
        _ => return (Work::default(), 0.0),
    };
    let shrink = if tiny { 1e-3 } else { 1.0 };
    (Work { flops: shrink * size * flops, bytes: shrink * size * bytes, kernels }, shrink * size * seconds)
}

/// The durations of one step of all ranks, with and without the cause.
struct Steps<'a> {
    programs: Vec<&'a Program>,
    plain: Replay<'a>,
    planted: Replay<'a>,
}

fn durations<'a>(
    plant: Plant,
    severity: usize,
    seed: u64,
    step: u64,
    ranks: &'a [[Program; 2]],
    snapshot: bool,
) -> Steps<'a> {
    let programs: Vec<&Program> = ranks.iter().map(|of| &of[usize::from(snapshot)]).collect();
    let mut plain = Replay::unmeasured(&programs);
    let mut random = Random::new(seed, step as u32);
    for (rank, program) in programs.iter().enumerate() {
        let of_step = random.factor(0.004);
        for (number, instruction) in program.instructions.iter().enumerate() {
            let action = instruction.action;
            let (_, seconds) = work(plant, severity, program, action);
            let seconds = match action {
                Action::Load { .. } => 2e-4,
                Action::Gather { .. } => 1.2e-3,
                Action::Reduce { .. } => 2e-3,
                Action::Count { .. } => 2e-5,
                Action::Send { .. } | Action::Recv { .. } => 5e-5,
                Action::Fetch { .. } | Action::Evict { .. } => 5e-4,
                Action::Snapshot => 5e-4,
                _ => seconds,
            };
            let own = Own { late_s: 8e-6 * random.factor(0.3), took_s: seconds * of_step * random.factor(0.015) };
            plain.own[rank][number] = own;
        }
    }
    let mut planted = plain.clone();
    if plant.cause() == Some(Cause::HostOverhead) {
        // What a healthy engine takes is overhead too.
        let compute = |rank: usize, number: usize| programs[rank].instructions[number].action.lane() == Lane::Compute;
        for (rank, own) in plain.own.iter_mut().enumerate() {
            own.iter_mut()
                .enumerate()
                .filter(|(number, _)| compute(rank, *number))
                .for_each(|(_, own)| own.late_s = 0.0);
        }
    }
    let step_s = plain.seconds().expect("it can be played");
    apply(plant, severity, step, step_s, &mut random, &programs, &mut planted);
    Steps { programs, plain, planted }
}

/// Changes a healthy step to one with the cause.
fn apply(
    plant: Plant,
    severity: usize,
    step: u64,
    step_s: f64,
    random: &mut Random,
    programs: &[&Program],
    planted: &mut Replay<'_>,
) {
    let share = SHARES[severity];
    // Seconds to add, so that they are this share of the longer step.
    let lost_s = step_s * share / (1.0 - share);
    let slower = 1.0 / (1.0 - share);
    let sometimes = random.uniform() < 0.6;
    let of_micro_batch: Vec<f64> = (0..64).map(|_| random.factor(share)).collect();
    for (rank, program) in programs.iter().enumerate() {
        let count =
            |of: fn(&Action) -> bool| program.instructions.iter().filter(|i| of(&i.action)).count().max(1) as f64;
        let loads = count(|action| matches!(action, Action::Load { .. }));
        let moves = count(|action| matches!(action, Action::Fetch { .. } | Action::Evict { .. }));
        let computing = count(|action| action.lane() == Lane::Compute);
        let compute_s: f64 = program.on_lane(Lane::Compute).map(|n| planted.own[rank][n].took_s).sum();
        for (number, instruction) in program.instructions.iter().enumerate() {
            let own = &mut planted.own[rank][number];
            let action = instruction.action;
            let is_compute = action.lane() == Lane::Compute;
            match plant {
                Plant::SlowDisk if action.lane() == Lane::Input => own.took_s += lost_s / loads,
                Plant::SlowTokenizer if action.lane() == Lane::Input && step % 4 == 1 => {
                    own.took_s += 4.0 * lost_s / loads
                }
                // What compute could hide has to be filled before anything is exposed.
                Plant::SlowLink if matches!(action, Action::Reduce { .. }) => {
                    own.took_s += (0.4 * compute_s + lost_s) / UNITS.len() as f64;
                }
                Plant::Jitter if matches!(action, Action::Reduce { .. }) && action.unit() == Some(0) && sometimes => {
                    own.took_s += lost_s / 0.6 * (0.5 + random.uniform());
                }
                Plant::SlowGather if matches!(action, Action::Gather { .. }) => {
                    own.took_s += (compute_s + lost_s) / count(|action| matches!(action, Action::Gather { .. }));
                }
                Plant::SlowRank if rank == 2 && is_compute => own.took_s *= slower,
                Plant::SometimesSlowRank if rank == 1 && is_compute && sometimes => {
                    own.took_s *= 1.0 + (slower - 1.0) / 0.6
                }
                Plant::SlowStage if rank == 1 && is_compute => own.took_s *= slower,
                Plant::UnevenLengths if is_compute => {
                    let index = action.micro_batch().map(|m| (8 * rank + m as usize) % of_micro_batch.len());
                    own.took_s *= index.map_or(1.0, |index| of_micro_batch[index]);
                }
                Plant::TinyKernels if is_compute => {
                    let kernels = f64::from(work(plant, severity, program, action).0.kernels);
                    own.took_s += kernels * [1.5e-6, 4e-6, 9e-6][severity] * random.factor(0.02);
                }
                Plant::SlowEngine if is_compute => own.late_s += lost_s / computing,
                Plant::SlowOffload if matches!(action, Action::Fetch { .. } | Action::Evict { .. }) => {
                    own.took_s += (0.02 * step_s + lost_s) / moves;
                }
                Plant::SlowCheckpoint if action == Action::Snapshot => own.took_s += 5.0 * lost_s,
                Plant::StolenCores | Plant::StolenByHypervisor | Plant::ThrottledCores | Plant::Swapping
                    if is_compute =>
                {
                    own.took_s *= slower;
                }
                Plant::SlowClock | Plant::SlowGpu if is_compute && step > STEPS / 4 => own.took_s *= slower,
                Plant::NoisyNeighbour if step % 8 >= 4 => own.took_s *= 1.0 + 2.0 * (slower - 1.0),
                _ => {}
            }
        }
    }
}

/// A recording with `plant`.
pub fn record(plant: Plant, severity: usize, seed: u64) -> Recording {
    let (mesh, strategy) = layout(plant, severity, seed);
    let ranks = programs(mesh, &strategy);
    let mut run = Run { folder: format!("{plant:?}-{severity}-{seed}").into(), ..Run::default() };
    for programs in &ranks {
        let work = programs[0].instructions.iter().map(|i| work(plant, severity, &programs[0], i.action).0).collect();
        let programs = Programs {
            programs: programs.to_vec(),
            priced: 0,
            work,
            threads: 2,
            peak_flops: Some(2e12 * ranks.len() as f64),
        };
        run.ranks.push(RankRecord {
            rank: programs.programs[0].rank,
            host: "here".into(),
            programs,
            steps: Vec::new(),
        });
    }
    let steps = if plant == Plant::FewSteps { 4 } else { STEPS };
    let (mut clock, mut cost_s) = (1_790_000_000.0, 0.0);
    for number in 1..=steps {
        let snapshot = plant == Plant::SlowCheckpoint && number % 5 == 0;
        let step = durations(plant, severity, seed, number, &ranks, snapshot);
        let measured = step.planted.play().expect("it can be played");
        let length = measured.iter().flatten().map(|span| span.end_s).fold(0.0, f64::max);
        cost_s += (length - step.plain.seconds().expect("it can be played")) / steps as f64;
        let before = 1.5e-4;
        if plant.cause() == Some(Cause::HostOverhead) {
            cost_s += (before - AGREED_S) / steps as f64;
        }
        for (rank, program) in step.programs.iter().enumerate() {
            let mut free = [0.0; Lane::ALL.len()];
            let seconds = |s: f64| Duration::from_secs_f64(s.max(0.0));
            let times = |(number, instruction): (usize, &trainyard_program::Instruction)| {
                let span = measured[rank][number];
                let free = &mut free[instruction.action.lane() as usize];
                let waited = span.start_s - step.planted.own[rank][number].late_s - *free;
                *free = span.end_s;
                let waited = if waited < 1e-9 { 0.0 } else { waited };
                Times { waited: seconds(waited), start: seconds(span.start_s), end: seconds(span.end_s) }
            };
            let instructions = program.instructions.iter().enumerate().map(times).collect();
            run.ranks[rank].steps.push(Step {
                step: number,
                program: usize::from(snapshot),
                began: seconds(clock + before),
                before: seconds(before),
                length: seconds(length + 2e-6),
                agreed: seconds(AGREED_S),
                instructions,
            });
        }
        run.samples.push(sample(plant, severity, seed, number, clock, before + length));
        clock += before + length;
        run.metrics.push(Metrics {
            step: number,
            step_s: before + length,
            loss: Some(4.0),
            grad_norm: Some(1.0),
            mfu: Some(0.6),
            ..Metrics::default()
        });
    }
    numbers(plant, &mut run);
    Recording { run, cost_s }
}

/// The machine during a step.
fn sample(plant: Plant, severity: usize, seed: u64, step: u64, began: f64, seconds: f64) -> Sample {
    let share = SHARES[severity];
    let mut random = Random::new(seed, 1_000_000 + step as u32);
    let mut sample = Sample { unix_s: began + seconds, seconds, step, ..Sample::default() };
    let cores = 2.0;
    sample.cpu.process = 1.95 * random.factor(0.01);
    sample.cpu.others = 0.02 * random.factor(0.5);
    sample.cpu.run_delay = 0.01 * random.factor(0.5);
    sample.cpu.mhz = Some(2600.0);
    sample.memory.available_bytes = 8 << 30;
    sample.memory.pool_reserved_bytes = 1 << 30;
    sample.memory.pool_bytes = BTreeMap::from([("activations".to_owned(), 1 << 29)]);
    sample.memory.rss_file_bytes = 1 << 26;
    sample.memory.rss_bytes = (1 << 30) + (1 << 27) + (f64::from(1 << 20) * random.uniform()) as u64;
    sample.pressure.memory = Some(0.0);
    match plant {
        Plant::SlowDisk => {
            sample.memory.major_faults = 40.0;
            sample.disk.process_read = 3e7;
        }
        Plant::StolenCores => {
            sample.cpu.process = cores * (1.0 - share) * random.factor(0.01);
            sample.cpu.others = cores * share * random.factor(0.02);
            sample.cpu.run_delay = cores * share * random.factor(0.02);
        }
        Plant::StolenByHypervisor => {
            sample.cpu.process = cores * (1.0 - share);
            sample.cpu.steal = cores * share;
            sample.cpu.others = 0.0;
        }
        Plant::ThrottledCores => {
            sample.cpu.process = cores * (1.0 - share);
            sample.cpu.limit = Some(cores * (1.0 - share));
            sample.cpu.throttled = Some(0.9);
            sample.cpu.throttled_cores = Some(cores * share);
        }
        Plant::SlowClock if step > STEPS / 4 => sample.cpu.mhz = Some(2600.0 * (1.0 - share)),
        Plant::SlowGpu => {
            let slows = step > STEPS / 4;
            sample.gpus = vec![Gpu {
                mhz: Some(if slows { 1980.0 * (1.0 - share) } else { 1980.0 }),
                mhz_max: Some(1980.0),
                slowed: slows.then(|| "power limit".to_owned()).into_iter().collect(),
                ..Gpu::default()
            }];
        }
        Plant::NoisyNeighbour if step % 8 >= 4 => sample.cpu.others = 0.8,
        Plant::Swapping => {
            sample.memory.swapped_pages = 2000.0;
            sample.memory.major_faults = 500.0;
            sample.memory.available_bytes = 50 << 20;
            sample.pressure.memory = Some(share);
        }
        Plant::Leak => sample.memory.rss_bytes += step * (1 << [20, 22, 25][severity]),
        _ => {}
    }
    sample
}

/// Numbers and reports that are wrong.
fn numbers(plant: Plant, run: &mut Run) {
    let lane = |doing: &str, what: &str| LaneReport {
        lane: "reduce".into(),
        step: 20,
        what: what.into(),
        doing: doing.into(),
        for_s: 8.0,
    };
    let report = |error: &str, lane: LaneReport| FaultReport {
        rank: 1,
        error: error.into(),
        lanes: vec![lane],
        ..FaultReport::default()
    };
    match plant {
        Plant::NotFinite => {
            run.metrics[30].loss = None;
            run.metrics[30].skipped = true;
        }
        Plant::Spikes => run.health.push(HealthEvent {
            step: 31,
            symptom: Symptom::LossSpike,
            value: Some(9.0),
            usual: Some(4.0),
            samples: [248, 8],
            reaction: "training goes on".into(),
        }),
        Plant::FlippedInMemory => run.health.push(HealthEvent {
            step: 20,
            symptom: Symptom::ReplicasDiffer,
            value: None,
            usual: None,
            samples: [160, 8],
            reaction: "rank 1 has other bits of `block.2` than ranks 0, 2, 3; the run ends".into(),
        }),
        Plant::FlippedBit => {
            run.faults
                .push(report("data of rank 1 on here arrived with a wrong checksum", lane("failed", "reduce block.2")));
        }
        Plant::Hang => {
            let error = "no progress within the deadline of 10.0 s: lane reduce is in step 20, instruction 7 (reduce block.2) for 8.0 s";
            run.faults.push(report(error, lane("running", "reduce block.2")));
        }
        _ => {}
    }
}
