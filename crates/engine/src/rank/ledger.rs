//! When memory is taken for what is gathered and fetched, and given back by what is released and
//! evicted.
//!
//! The gather and host lanes move bytes; the compute lane does the bookkeeping, at places that
//! depend on no clock. It takes memory for a gather or a fetch when it has finished the last of its
//! own instructions that those wait for, and gives back what a release or an eviction frees when it
//! knows, from the dependencies that it has itself waited for, that nobody uses it any more. What a
//! rank holds at an instruction is then a function of the program alone: executing it on the meta
//! device predicts its memory to the byte, and a limit that a prediction keeps is kept.

use std::collections::BTreeMap;
use trainyard_program::{Action, Extent, Instruction, Lane, MemoryKind, Program, State};

/// Per lane, one more than the number of the last instruction; 0: none. As a vector clock: all that
/// has finished.
type Reach = [u32; Lane::ALL.len()];

fn merge(into: &mut Reach, other: &Reach) {
    into.iter_mut().zip(other).for_each(|(into, other)| *into = (*into).max(*other));
}

/// What is to be taken and given back at the instructions of the compute lane.
pub(super) struct Ledger {
    /// Gathers, fetches, and reductions into sums that lie in a tier, by the compute instruction
    /// after which their memory is taken; None: at the start.
    takes: BTreeMap<Option<u32>, Vec<u32>>,
    /// Releases and evictions that have not given back yet, and what must have finished.
    gives: Vec<(u32, Reach)>,
    /// Per instruction, what has finished when it has.
    clocks: Vec<Reach>,
    /// What the compute lane knows to have finished.
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
                // All chunks share the buffers that are taken for the first.
                Action::Fetch { state: State::Optimizer { .. }, .. } => !std::mem::replace(&mut staged, true),
                Action::Fetch { .. } => true,
                Action::Gather { .. } => sharded,
                Action::Reduce { .. } => takes_sum(instruction),
                _ => false,
            };
            if take {
                takes.entry(waited[Lane::Compute as usize].checked_sub(1)).or_default().push(number);
            }
            let give = match instruction.action {
                // Passes use what is whole, and a gather uses the shard.
                Action::Release { .. } => Some(only(Lane::Compute, waited[Lane::Compute as usize])),
                Action::Evict { state: State::Parameters, write: false, .. } => {
                    let user = if sharded { Lane::Gather } else { Lane::Compute };
                    Some(only(user, waited[user as usize]))
                }
                Action::Evict { state: State::Parameters | State::Activations { .. } | State::Gradients, .. } => {
                    Some(only(Lane::HostIo, number + 1))
                }
                _ => None,
            };
            gives.extend(give.map(|needed| (number, needed)));
            waited[lane] = number + 1;
            lanes[lane] = waited;
            clocks.push(waited);
        }
        Ledger { takes, gives, clocks, known: Reach::default() }
    }

    /// What nothing on the compute lane comes before: what memory is to be taken for.
    pub fn start(&mut self) -> Vec<u32> {
        self.takes.remove(&None).unwrap_or_default()
    }

    /// The compute lane has waited for `after`: what has given back by now.
    pub fn begin(&mut self, after: &[u32]) -> Vec<u32> {
        after.iter().for_each(|on| merge(&mut self.known, &self.clocks[*on as usize]));
        self.due()
    }

    /// The compute lane has finished `number`: what has given back, and what memory is to be taken
    /// for.
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

/// Whether a reduction's sum is not on the device before it.
fn takes_sum(reduction: &Instruction) -> bool {
    reduction.effects.iter().any(|effect| effect.kind == MemoryKind::Gradients && effect.bytes > 0)
}

/// How many chunks of optimizer state `program` has on the device at once.
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
