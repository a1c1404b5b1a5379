//! A lower bound for pipelines that plays their turns: it computes when each stage runs each
//! stretch of units on each micro-batch in the order of the schedule, with no other delays.
//!
//! A turn stands for hundreds of instructions, so this is that much cheaper than a simulation. It
//! is a lower bound, because the simulation's turns take at least as long and wait for at least as
//! much.

use super::{Prices, Stage};
use trainyard_program::{BackwardPart, Phase};
use trainyard_sim::collective::message_s;

impl Prices<'_> {
    /// Seconds from the step's start to its end.
    pub(super) fn played(&self, stages: &[Stage]) -> f64 {
        let (pp, micro_batches) = (self.candidate.mesh.pp, self.candidate.accumulation);
        let table = self.candidate.pipeline.table(pp, micro_batches);
        let stretches = table.stage_of().len();
        let places = chunks_of(table.stage_of());
        // Per phase, stretch and micro-batch: the time at which the result has arrived.
        let place = |stretch: usize, micro_batch: u32| stretch * micro_batches as usize + micro_batch as usize;
        let mut arrived = [0, 1].map(|_| vec![f64::NAN; stretches * micro_batches as usize]);
        let messages: Vec<[f64; 2]> =
            (0..stretches).map(|stretch| self.messages_s(stretch, table.stage_of(), stages)).collect();
        let mut free: Vec<f64> = stages.iter().map(|stage| self.passes_seconds(stage).start).collect();
        let mut played = vec![0; stages.len()];
        let mut began = vec![0.0; stretches];
        loop {
            let mut moved = false;
            for stage in 0..stages.len() {
                while let Some(turn) = table.turns(stage as u32).get(played[stage]) {
                    let number = turn.stretch as usize;
                    let ready = match (turn.phase, turn.part) {
                        (_, BackwardPart::Weights) => 0.0,
                        (Phase::Forward, _) if number == 0 => 0.0,
                        (Phase::Forward, _) => arrived[0][place(number - 1, turn.micro_batch)],
                        (Phase::Backward, _) if number + 1 == stretches => 0.0,
                        (Phase::Backward, _) => arrived[1][place(number + 1, turn.micro_batch)],
                    };
                    if ready.is_nan() {
                        break;
                    }
                    let stretch = &stages[stage].stretches[places[number]];
                    if turn.micro_batch + 1 == micro_batches
                        && (turn.phase, turn.part) != (Phase::Forward, BackwardPart::Whole)
                    {
                        // Its gradients are completed here or later, and summed afterwards.
                        began[number] = free[stage].max(ready);
                    }
                    free[stage] = free[stage].max(ready)
                        + match (turn.phase, turn.part) {
                            (Phase::Forward, _) => stretch.forward_s,
                            (_, BackwardPart::Whole) => stretch.backward_s,
                            (_, BackwardPart::Input) => stretch.input_s,
                            (_, BackwardPart::Weights) => stretch.weights_s,
                        };
                    if turn.part != BackwardPart::Weights {
                        let phase = turn.phase as usize;
                        let after = stretch.after_s[phase] + messages[number][phase];
                        arrived[phase][place(number, turn.micro_batch)] = free[stage] + after;
                    }
                    played[stage] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let end = |(number, (stage, free)): (usize, (&Stage, &f64))| {
            let [end, _, finish] = self.end_seconds(stage, f64::INFINITY);
            let of_stage = (0..stretches).filter(|stretch| table.stage_of()[*stretch] as usize == number);
            let sums = self.sums_end(stage, of_stage.map(|stretch| began[stretch]));
            (free + end).max(sums + finish)
        };
        stages.iter().zip(&free).enumerate().map(end).fold(0.0, f64::max) + self.rest_s()
    }

    /// The earliest end of a stage's last reduction. The reductions of a stretch wait for the turn
    /// that completes its gradients, which started at `began` (one per stretch), and for one
    /// another.
    fn sums_end(&self, stage: &Stage, began: impl Iterator<Item = f64>) -> f64 {
        let mut stretches: Vec<(f64, f64)> = stage
            .stretches
            .iter()
            .zip(began)
            .map(|(stretch, began)| (began, self.over(&stretch.kinds, |unit| self.reduce_s(unit)).0))
            .collect();
        stretches.sort_by(|a, b| a.0.total_cmp(&b.0));
        stretches.into_iter().fold(0.0, |end: f64, (began, seconds)| end.max(began) + seconds)
    }

    /// Seconds of the messages that carry a stretch's results to the next stretch and to the
    /// previous one.
    fn messages_s(&self, stretch: usize, stage_of: &[u32], stages: &[Stage]) -> [f64; 2] {
        let mesh = &self.candidate.mesh;
        let costs = &self.known.costs;
        let stage = stage_of[stretch];
        let [first, last] = stages[stage as usize].stretches[chunks_of(stage_of)[stretch]].ends;
        let node = |stage: u32| stage * mesh.stage_ranks() / costs.cluster.devices_per_node;
        let message = |unit: Option<u32>, to: Option<&u32>| {
            let (Some(unit), Some(&to)) = (unit, to.filter(|to| **to != stage)) else { return 0.0 };
            let bytes = self.known.shape.units[unit as usize].output_bytes / u64::from(mesh.cp) / u64::from(mesh.tp);
            message_s(&costs.cluster, &costs.constants, bytes as f64, node(stage) != node(to))
        };
        let before = stretch.checked_sub(1).and_then(|before| stage_of.get(before));
        [message(Some(last), stage_of.get(stretch + 1)), message(first.checked_sub(1), before)]
    }
}

/// Per stretch, its index among those of its stage.
fn chunks_of(stage_of: &[u32]) -> Vec<usize> {
    let earlier = |stretch: usize| stage_of[..stretch].iter().filter(|stage| **stage == stage_of[stretch]).count();
    (0..stage_of.len()).map(earlier).collect()
}
