//! The ledger decides when the compute lane allocates memory for gathers and fetches, and when it
//! frees memory after releases and evictions.
//!
//! The gather and host lanes only move bytes. The compute lane allocates and frees, at instructions
//! that depend on no clock:
//!
//! - It allocates for a gather or fetch after the last compute instruction that the gather or fetch
//!   depends on.
//! - It frees memory after a release or eviction once its own dependencies prove that no lane uses
//!   the memory any more.
//!
//! The memory of a rank at an instruction is then a function of the program alone. Executing the
//! program on the meta device predicts it to the byte, so a step that is predicted to stay below a
//! limit does.

use std::collections::BTreeMap;
use trainyard_program::{Action, Extent, Instruction, Lane, MemoryKind, Program, State};

/// A vector clock of finished instructions: per lane, the number of the last one plus 1; 0 if none.
type Reach = [u32; Lane::ALL.len()];

fn merge(into: &mut Reach, other: &Reach) {
    into.iter_mut().zip(other).for_each(|(into, other)| *into = (*into).max(*other));
}

/// The allocations and frees due at each instruction of the compute lane.
pub(super) struct Ledger {
    /// Gathers, fetches, receives, exchanges, and reductions into offloaded sums, by the compute
    /// instruction after which their memory is allocated; None is the start of the step.
    takes: BTreeMap<Option<u32>, Vec<u32>>,
    /// Releases, evictions, sends and exchanges whose memory is not freed yet, each with the clock
    /// that it waits for.
    gives: Vec<(u32, Reach)>,
    /// The clock after each instruction.
    clocks: Vec<Reach>,
    /// The instructions that the compute lane knows to have finished.
    known: Reach,
}

impl Ledger {
    pub fn new(program: &Program) -> Ledger {
        let (mut takes, mut gives) = (BTreeMap::<_, Vec<u32>>::new(), Vec::new());
        let mut clocks: Vec<Reach> = Vec::with_capacity(program.instructions.len());
        let mut lanes = [Reach::default(); Lane::ALL.len()];
        let mut staged = false;
        for (number, instruction) in (0..).zip(&program.instructions) {
            let lane = instruction.action.lane() as usize;
            let mut waited = lanes[lane];
            instruction.after.iter().for_each(|on| merge(&mut waited, &clocks[*on as usize]));
            let only = |lane: Lane, until: u32| {
                let mut needed = Reach::default();
                needed[lane as usize] = until;
                needed
            };
            let sharded = program.placement.parameters == Extent::Shard;
            let take = match instruction.action {
                // All chunks share the buffers that are allocated for the first.
                Action::Fetch { state: State::Optimizer { .. }, .. } => !std::mem::replace(&mut staged, true),
                Action::Fetch { .. } => true,
                Action::Gather { .. } => sharded,
                Action::Reduce { .. } => takes_sum(instruction),
                Action::Recv { .. } | Action::Exchange { .. } => true,
                _ => false,
            };
            if take {
                takes.entry(waited[Lane::Compute as usize].checked_sub(1)).or_default().push(number);
            }
            let give = match instruction.action {
                // Passes read gathered parameters; a gather reads the shard.
                Action::Release { .. } => Some(only(Lane::Compute, waited[Lane::Compute as usize])),
                Action::Evict { state: State::Parameters, write: false, .. } => {
                    let user = if sharded { Lane::Gather } else { Lane::Compute };
                    Some(only(user, waited[user as usize]))
                }
                Action::Evict { state: State::Parameters | State::Activations { .. } | State::Gradients, .. } => {
                    Some(only(Lane::HostIo, number + 1))
                }
                Action::Send { .. } => Some(only(Lane::Send, number + 1)),
                Action::Exchange { .. } => Some(only(Lane::Inner, number + 1)),
                _ => None,
            };
            gives.extend(give.map(|needed| (number, needed)));
            waited[lane] = number + 1;
            lanes[lane] = waited;
            clocks.push(waited);
        }
        Ledger { takes, gives, clocks, known: Reach::default() }
    }

    /// The instructions to allocate for before the compute lane begins.
    pub fn start(&mut self) -> Vec<u32> {
        self.takes.remove(&None).unwrap_or_default()
    }

    /// Notes that the compute lane has waited for `after`. Returns the instructions whose memory is
    /// to be freed now.
    pub fn begin(&mut self, after: &[u32]) -> Vec<u32> {
        after.iter().for_each(|on| merge(&mut self.known, &self.clocks[*on as usize]));
        self.due()
    }

    /// Notes that the compute lane has finished `number`. Returns the instructions whose memory is
    /// to be freed, and those to allocate for.
    pub fn end(&mut self, number: u32) -> (Vec<u32>, Vec<u32>) {
        merge(&mut self.known, &self.clocks[number as usize]);
        (self.due(), self.takes.remove(&Some(number)).unwrap_or_default())
    }

    fn due(&mut self) -> Vec<u32> {
        let known = self.known;
        let is_due = |needed: &Reach| needed.iter().zip(&known).all(|(needed, known)| needed <= known);
        self.gives.extract_if(.., |(_, needed)| is_due(needed)).map(|(number, _)| number).collect()
    }
}

/// True if a reduction must allocate its sum, which is not on the device before it.
fn takes_sum(reduction: &Instruction) -> bool {
    reduction.effects.iter().any(|effect| effect.kind == MemoryKind::Gradients && effect.bytes > 0)
}

/// The largest number of optimizer-state chunks that `program` has on the device at once.
pub(super) fn chunks_at_once(program: &Program) -> usize {
    let (mut here, mut most) = (0usize, 0);
    for instruction in &program.instructions {
        match instruction.action {
            Action::Fetch { state: State::Optimizer { .. }, .. } => here += 1,
            Action::Evict { state: State::Optimizer { .. }, .. } => here -= 1,
            _ => {}
        }
        most = most.max(here);
    }
    most
}
