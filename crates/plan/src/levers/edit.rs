//! Edits: changes of a program, and of the prices of its instructions, for levers that are more
//! than another layout (adapters, for example). The engine can run some of them. The edited program
//! is simulated like any other.

use super::Price;
use trainyard_program::{Action, MemoryKind, Program};

/// A change of a program and its prices.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Edit {
    /// Gradients travel encoded.
    Codec {
        /// The code.
        code: Code,
        /// Bytes of a message as a share of those in the format that is used otherwise.
        share: f64,
        /// Bytes that encoding, decoding and the residual read and write per byte of a gradient.
        passes: f64,
    },
    /// Replicas train by themselves and average their parameters now and then.
    LocalSteps {
        /// Number of steps between two averages.
        every: u32,
    },
    /// Parameters are frozen, and small matrices beside them train.
    Adapters {
        /// Number of parameters that train as a share of all.
        share: f64,
    },
    /// The first blocks are frozen.
    Freeze {
        /// Number of blocks.
        blocks: u32,
    },
    /// Optimizer state has fewer bits.
    OptimizerBytes {
        /// Its bytes as a share of what they are otherwise.
        share: f64,
    },
    /// The copy of parameters that forward reads has fewer bits.
    ParameterBytes {
        /// Its bytes as a share of what they are otherwise.
        share: f64,
    },
    /// Weights are rounded to a narrow format and back before every forward.
    FakeQuantisation,
    /// Blocks multiply in 8-bit integers. It has a price where the setting itself is priced.
    Integers,
    /// The setup's model is what is left of a larger one.
    Pruned,
    /// A teacher runs forward on every micro-batch.
    Teacher,
    /// Nothing waits for batches: a bound for every improvement of loading.
    FreeLoading,
    /// Nothing waits for other ranks: a bound for every improvement of overlap.
    FreeExchanges,
}

/// A code of gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Code {
    /// 8-bit integers in blocks with a scale.
    Int8,
    /// The largest elements with their places.
    TopK,
    /// Two factors of low rank.
    LowRank,
}

impl Edit {
    /// Bytes that one pass over the gradient moves per byte of it: read, and written once.
    pub(super) const PASS: f64 = 2.0;

    /// Changes the bytes of messages and of memory in `program`.
    pub fn program(&self, program: &mut Program) {
        match *self {
            Edit::Codec { share, .. } => {
                // The residual of error feedback has the gradient's shape.
                let held = resident(program, MemoryKind::Masters).max(resident(program, MemoryKind::Parameters));
                program.resident.push(trainyard_program::Effect { kind: MemoryKind::Communication, bytes: held });
                messages(program, share, |action| matches!(action, Action::Reduce { .. }));
            }
            Edit::Adapters { share } => {
                for kind in [MemoryKind::Gradients, MemoryKind::Optimizer, MemoryKind::Masters] {
                    hold(program, share, kind);
                }
                messages(program, share, |action| matches!(action, Action::Reduce { .. } | Action::Tie { .. }));
            }
            Edit::Freeze { blocks } => {
                messages(program, 0.0, |action| {
                    matches!(action, Action::Reduce { .. }) && action.unit().is_some_and(|unit| unit <= blocks)
                });
                let held: i64 = program.units.len() as i64;
                let share = 1.0 - f64::from(blocks + 1) / held as f64;
                for kind in [MemoryKind::Optimizer, MemoryKind::Masters] {
                    hold(program, share, kind);
                }
            }
            Edit::OptimizerBytes { share } => hold(program, share, MemoryKind::Optimizer),
            Edit::ParameterBytes { share } => hold(program, share, MemoryKind::Parameters),
            Edit::FreeLoading => messages(program, 0.0, |action| matches!(action, Action::Load { .. })),
            Edit::FreeExchanges => messages(program, 0.0, is_exchange),
            Edit::LocalSteps { .. } | Edit::FakeQuantisation | Edit::Integers | Edit::Pruned | Edit::Teacher => {}
        }
    }
}

/// True if ranks exchange something in the action.
pub fn is_exchange(action: &Action) -> bool {
    matches!(
        action,
        Action::Reduce { .. }
            | Action::Gather { .. }
            | Action::Exchange { .. }
            | Action::Send { .. }
            | Action::Tie { .. }
            | Action::Count { .. }
    )
}

/// Bytes of a kind that are held for the whole step.
fn resident(program: &Program, kind: MemoryKind) -> i64 {
    program.resident.iter().filter(|effect| effect.kind == kind).map(|effect| effect.bytes).sum()
}

/// Multiplies the message bytes of the actions for which `which` holds.
fn messages(program: &mut Program, share: f64, which: impl Fn(&Action) -> bool) {
    for instruction in program.instructions.iter_mut().filter(|instruction| which(&instruction.action)) {
        instruction.bytes = (instruction.bytes as f64 * share).ceil() as u64;
    }
}

/// Multiplies the memory of a kind.
fn hold(program: &mut Program, share: f64, kind: MemoryKind) {
    let effects = program.instructions.iter_mut().flat_map(|instruction| instruction.effects.iter_mut());
    for effect in program.resident.iter_mut().chain(effects).filter(|effect| effect.kind == kind) {
        effect.bytes = (effect.bytes as f64 * share) as i64;
    }
}

/// A step of local training: `island` is the price of a replica by itself, `average_s` the seconds
/// of one average over replicas, and `moments_bytes` the optimizer's moments that a rank holds.
pub fn local_steps(island: Price, every: u32, average_s: f64, moments_bytes: f64, memory_bytes_s: f64) -> Price {
    // The outer optimizer keeps the parameters of the last average and a momentum, as many bytes as
    // AdamW's two moments. Its update reads both and the parameters, and writes two of the three.
    let update_s = 2.5 * moments_bytes / memory_bytes_s;
    let step_s = island.step_s + (average_s + update_s) / f64::from(every);
    Price { step_s, bytes: island.bytes + moments_bytes as u64, ..island }
}
