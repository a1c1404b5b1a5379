//! Checks the step in the program's own order: each instruction finds what it needs, and all of the
//! work is done once.

use super::CheckError;
use super::gradients::Gradients;
use crate::{
    Action, Axis, BackwardPart, Collective, Effect, Extent, Fresh, Instruction, Keep, MemoryKind, Phase, Program,
    SplitShape, State, StepKind, Tier,
};

/// Executes `program` on a model of the rank's state.
pub fn check(program: &Program) -> Result<(), CheckError> {
    let mut step = StepCheck::new(program);
    for (number, instruction) in program.instructions.iter().enumerate() {
        let wrong = |what| CheckError::Order { number, action: instruction.action.name(), what };
        step.apply(instruction).map_err(wrong)?;
        step.keep_batch(number, instruction).map_err(wrong)?;
        step.account(instruction).map_err(wrong)?;
    }
    step.end().map_err(CheckError::Leftover)
}

/// The place of activations that a forward kept, or of a gradient sum that moves between device and
/// tier.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    Nothing,
    Here,
    Away,
}

/// The progress of one unit on one micro-batch.
#[derive(Clone)]
struct Run {
    forwarded: bool,
    kept: Kept,
    /// The activations that the forward kept.
    keep: Keep,
    /// Number of segments that ran forward, that ran forward again, and that have the gradients of
    /// their inputs and of their weights.
    segments: u32,
    again: u32,
    of_inputs: u32,
    of_weights: u32,
    differentiated_input: bool,
    differentiated_weights: bool,
    /// Per phase, true once the result crossed to or from another stage.
    sent: [bool; 2],
    received: [bool; 2],
    /// Per phase, the number of collectives of each kind that ran inside the unit.
    exchanged: [[u32; Collective::COUNT]; 2],
}

/// The state of a unit on this rank.
#[derive(Clone)]
struct Unit {
    /// True while the resident copy of the parameters is on the device.
    present: bool,
    /// 0: not gathered; 1: whole; n: the 1/n part stayed.
    gathered: u32,
    /// Number of chunks of optimizer state that were fetched, updated and evicted.
    fetched: u32,
    chunks_updated: u32,
    evicted: u32,
    /// True once all chunks are updated.
    updated: bool,
    /// True once its changes are averaged, and once the result is in its masters.
    averaged: bool,
    merged: bool,
    /// True while other ranks' parts of a whole copy are older than the update.
    stale: bool,
    /// The place of the gradient sum once it has been begun. Used where sums lie in a tier.
    sum: Kept,
}

struct StepCheck<'p> {
    program: &'p Program,
    trains: Vec<u32>,
    runs: Vec<Run>,
    units: Vec<Unit>,
    gradients: Gradients,
    loaded: u32,
    /// Per micro-batch, true once it is given back.
    freed: Vec<bool>,
    counted: bool,
    clipped: bool,
    /// True once parameters were pulled that may lack updates.
    lacks_updates: bool,
    snapshot: bool,
    balance: Balance,
}

type Verdict = Result<(), String>;

fn must(holds: bool, otherwise: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(otherwise()) }
}

impl<'p> StepCheck<'p> {
    fn new(program: &'p Program) -> StepCheck<'p> {
        let run = Run {
            forwarded: false,
            kept: Kept::Nothing,
            keep: Keep::Everything,
            segments: 0,
            again: 0,
            of_inputs: 0,
            of_weights: 0,
            differentiated_input: false,
            differentiated_weights: false,
            sent: [false; 2],
            received: [false; 2],
            exchanged: [[0; Collective::COUNT]; 2],
        };
        let unit = |unit: u32| Unit {
            present: !program.lies_in_a_tier(unit),
            gathered: 0,
            fetched: 0,
            chunks_updated: 0,
            evicted: 0,
            updated: false,
            averaged: false,
            merged: false,
            stale: false,
            sum: Kept::Nothing,
        };
        StepCheck {
            program,
            trains: program.trains(),
            runs: vec![run; program.units.len() * program.micro_batches as usize],
            units: (0..program.units.len() as u32).map(unit).collect(),
            gradients: Gradients::new(program),
            loaded: 0,
            freed: vec![false; program.micro_batches as usize],
            counted: false,
            clipped: false,
            lacks_updates: false,
            snapshot: false,
            balance: Balance::new(program),
        }
    }

    fn apply(&mut self, instruction: &Instruction) -> Verdict {
        match instruction.action {
            Action::Load { micro_batch } => self.load(micro_batch),
            Action::Count { .. } => self.count(),
            Action::Gather { unit, over } => self.gather(unit, over),
            Action::Release { unit, keep } => self.release(unit, keep),
            Action::Forward { unit, segment, micro_batch, keep } => self.forward(unit, segment, micro_batch, keep),
            Action::Backward { unit, segment, micro_batch, part } => self.backward(unit, segment, micro_batch, part),
            Action::Fold { unit, micro_batch } => {
                self.adds_to_sum(unit, Fresh::InPlace)?;
                self.gradients.fold(unit, micro_batch)
            }
            Action::Reduce { unit, accumulate, .. } => {
                must(self.program.server.is_none(), || "servers sum gradients".to_owned())?;
                must(!self.clipped, || "the norm is taken already".to_owned())?;
                self.adds_to_sum(unit, self.program.placement.fresh_gradients)?;
                self.gradients.reduce(unit, accumulate)
            }
            Action::Tie { unit, axis } => {
                must(!self.clipped, || "the norm is taken already".to_owned())?;
                self.gradients.tie(unit, axis)
            }
            Action::Send { unit, micro_batch, phase, .. } => self.send(unit, micro_batch, phase),
            Action::Recv { unit, micro_batch, phase, .. } => self.receive(unit, micro_batch, phase),
            // `types` checks those between the segments of a split unit.
            Action::Exchange { unit, axis, .. } if axis != Axis::Expert && self.program.split_of(unit).is_some() => {
                Ok(())
            }
            Action::Exchange { collective, unit, micro_batch, phase, times, .. } => {
                self.exchange(unit, micro_batch, phase, collective, times)
            }
            Action::Push { unit } => self.push(unit),
            Action::Commit => {
                self.is_worker()?;
                self.clip()
            }
            Action::Pull { unit, staleness } => self.pull(unit, staleness),
            Action::Clip { .. } => {
                must(self.program.server.is_none(), || "servers take the norm".to_owned())?;
                self.clip()
            }
            Action::Update { .. } if self.program.server.is_some() => Err("servers make the updates".to_owned()),
            Action::Update { unit, chunk } => self.update(unit, chunk, instruction),
            Action::Outer { unit, .. } => self.outer(unit),
            Action::Merge { unit } => self.merge(unit),
            Action::Fetch { unit, state } => self.fetch(unit, state),
            Action::Evict { unit, state, write } => self.evict(unit, state, write),
            Action::Snapshot => {
                must(self.program.snapshot, || "this program takes none".to_owned())?;
                must(!self.lacks_updates, || "the servers may not have made all updates".to_owned())?;
                let done = |unit: &u32| {
                    let state = &self.units[*unit as usize];
                    state.updated && state.merged == self.program.averages(*unit)
                };
                must(self.trains.iter().all(done), || "some unit is not updated".to_owned())?;
                must(!std::mem::replace(&mut self.snapshot, true), || "again".to_owned())
            }
        }
    }

    fn run(&mut self, unit: u32, micro_batch: u32) -> &mut Run {
        &mut self.runs[(unit * self.program.micro_batches + micro_batch) as usize]
    }

    fn load(&mut self, micro_batch: u32) -> Verdict {
        must(micro_batch == self.loaded, || format!("the next micro-batch is {}", self.loaded))?;
        self.loaded += 1;
        Ok(())
    }

    /// Checks that no pass reads a batch that was given back before.
    fn keep_batch(&mut self, number: usize, instruction: &Instruction) -> Verdict {
        if let Action::Forward { micro_batch, .. } | Action::Backward { micro_batch, .. } = instruction.action {
            let freed = &mut self.freed[micro_batch as usize];
            must(!*freed, || format!("micro-batch {micro_batch} is given back already"))?;
            *freed = self.program.frees_batch(number);
        }
        Ok(())
    }

    fn count(&mut self) -> Verdict {
        must(self.loaded == self.program.micro_batches, || "not all micro-batches are loaded".to_owned())?;
        must(!std::mem::replace(&mut self.counted, true), || "again".to_owned())
    }

    fn gather(&mut self, unit: u32, over: u32) -> Verdict {
        let (shards, whole) = (self.program.mesh.shard_degree(), self.program.placement.parameters == Extent::Full);
        let state = &mut self.units[unit as usize];
        must(state.present || state.gathered > 1, || format!("the rank's part of unit {unit} is in a lower tier"))?;
        if whole {
            self.copy_is_written(unit)?;
            let state = &mut self.units[unit as usize];
            must(std::mem::replace(&mut state.stale, false), || format!("unit {unit} is whole and up to date"))?;
            return must(over == shards, || format!("the parts of unit {unit} lie on {shards} ranks"));
        }
        must(!state.updated, || format!("unit {unit} is updated, and nothing uses it any more"))?;
        must(state.gathered != 1, || format!("unit {unit} is gathered already"))?;
        let parts = if state.gathered == 0 { shards } else { state.gathered };
        must(over == parts, || format!("the parts of unit {unit} lie on {parts} ranks"))?;
        state.gathered = 1;
        Ok(())
    }

    /// Checks that the device has the copy that an update on the host wrote.
    fn copy_is_written(&self, unit: u32) -> Verdict {
        let (on_host, state) = (self.program.offload.optimizer == Some(Tier::Host), &self.units[unit as usize]);
        must(!on_host || state.evicted == state.chunks_updated, || {
            format!("a part of the updated unit {unit} is still on the host")
        })
    }

    fn release(&mut self, unit: u32, keep: u32) -> Verdict {
        let shards = self.program.mesh.shard_degree();
        let parts = keep > 1 && shards.is_multiple_of(keep);
        must(parts, || format!("{keep} parts of {shards} ranks' shards cannot be kept"))?;
        let state = &mut self.units[unit as usize];
        must(state.gathered == 1, || format!("unit {unit} is not gathered"))?;
        state.gathered = if keep == shards { 0 } else { keep };
        Ok(())
    }

    /// Checks that all parameters that `unit` reads are on the device and whole.
    fn readable(&self, unit: u32) -> Verdict {
        for unit in self.program.reads(unit) {
            let state = &self.units[unit as usize];
            match self.program.placement.parameters {
                Extent::Shard => must(state.gathered == 1, || format!("unit {unit} is not gathered"))?,
                Extent::Full => must(state.present, || format!("unit {unit} is in a lower tier"))?,
            }
        }
        Ok(())
    }

    fn forward(&mut self, unit: u32, segment: u32, micro_batch: u32, keep: Keep) -> Verdict {
        must(self.counted, || "the targets are not counted".to_owned())?;
        must(!self.clipped, || "the norm is taken already".to_owned())?;
        self.readable(unit)?;
        if let Some(below) = unit.checked_sub(1) {
            let input = self.run(below, micro_batch);
            must(input.forwarded || input.received[Phase::Forward as usize], || {
                format!("unit {below} has not run on micro-batch {micro_batch}")
            })?;
        }
        let split = self.program.split_of(unit);
        let segments = split.map_or(1, |split| split.segments.len() as u32);
        let run = self.run(unit, micro_batch);
        if run.forwarded {
            let may = split.is_some() && run.keep == Keep::InputOnly && run.of_inputs == 0;
            must(may && keep == Keep::Everything, || format!("unit {unit} ran on micro-batch {micro_batch}"))?;
            must(run.kept == Kept::Here, || format!("the input of unit {unit} is in a lower tier"))?;
            must(segment == run.again, || format!("the next segment of unit {unit} is {}", run.again))?;
            run.again += 1;
            return Ok(());
        }
        must(segment == run.segments, || format!("the next segment of unit {unit} is {}", run.segments))?;
        must(segment == 0 || run.keep == keep, || format!("unit {unit} keeps the same in all segments"))?;
        (run.kept, run.keep) = (Kept::Here, keep);
        run.segments += 1;
        run.forwarded = run.segments == segments;
        self.add_gradients(unit, segment, micro_batch, Phase::Forward, BackwardPart::Whole)
    }

    fn backward(&mut self, unit: u32, segment: u32, micro_batch: u32, part: BackwardPart) -> Verdict {
        must(!self.clipped, || "the norm is taken already".to_owned())?;
        self.readable(unit)?;
        must(unit >= self.program.lowest, || format!("nothing of unit {unit} or below it is trained"))?;
        let loss = unit == self.program.loss_unit();
        let received = self.run(unit, micro_batch).received[Phase::Backward as usize];
        let above = loss || received || self.run(unit + 1, micro_batch).differentiated_input;
        must(above, || format!("unit {} has not been differentiated", unit + 1))?;
        let split = self.program.split_of(unit);
        let differentiable = split.map_or_else(|| vec![0], SplitShape::differentiable);
        let count = differentiable.len() as u32;
        let run = self.run(unit, micro_batch);
        match run.kept {
            Kept::Here => {}
            Kept::Nothing => return Err(format!("unit {unit} has kept nothing of micro-batch {micro_batch}")),
            Kept::Away => return Err(format!("the activations of unit {unit} are in a lower tier")),
        }
        if let Some(split) = split {
            must(run.forwarded, || format!("unit {unit} has not run on micro-batch {micro_batch} to its end"))?;
            let again = run.keep != Keep::InputOnly || run.again as usize == split.segments.len();
            must(again, || format!("unit {unit} has kept its input only, and has not run again"))?;
        }
        let is_next = |done: u32| differentiable.iter().rev().nth(done as usize) == Some(&segment);
        if part != BackwardPart::Weights {
            must(is_next(run.of_inputs), || format!("unit {unit} again, or segments out of order"))?;
            run.of_inputs += 1;
            run.differentiated_input = run.of_inputs == count;
        }
        if part != BackwardPart::Input {
            must(run.of_weights < run.of_inputs, || format!("the input of unit {unit} comes before its weights"))?;
            must(is_next(run.of_weights), || format!("unit {unit} again, or segments out of order"))?;
            run.of_weights += 1;
            run.differentiated_weights = run.of_weights == count;
            if run.differentiated_weights {
                run.kept = Kept::Nothing;
            }
        }
        self.add_gradients(unit, segment, micro_batch, Phase::Backward, part)
    }

    fn add_gradients(
        &mut self,
        unit: u32,
        segment: u32,
        micro_batch: u32,
        phase: Phase,
        part: BackwardPart,
    ) -> Verdict {
        if self.program.segment_adds_gradients(unit, segment, phase, part) {
            for unit in self.program.adds_to(unit) {
                self.adds_to_sum(unit, Fresh::InPlace)?;
                self.gradients.add(unit, micro_batch)?;
            }
        }
        Ok(())
    }

    /// Records an addition to a unit's sum, if gradients are summed as `fresh` says. The sum must
    /// not be in a lower tier.
    fn adds_to_sum(&mut self, unit: u32, fresh: Fresh) -> Verdict {
        if self.program.offload.gradients.is_none() || self.program.placement.fresh_gradients != fresh {
            return Ok(());
        }
        let before = std::mem::replace(&mut self.units[unit as usize].sum, Kept::Here);
        must(before != Kept::Away, || format!("the gradients of unit {unit} are in a lower tier"))
    }

    /// Where gradients lie in a tier, checks that the complete sum of `unit` is there.
    fn sum_is_in_its_tier(&self, unit: u32) -> Verdict {
        if self.program.offload.gradients.is_none() {
            return Ok(());
        }
        self.gradients.is_sum(unit)?;
        must(self.units[unit as usize].sum == Kept::Away, || {
            format!("the gradients of unit {unit} are not in their tier")
        })
    }

    fn send(&mut self, unit: u32, micro_batch: u32, phase: Phase) -> Verdict {
        let ready = match phase {
            Phase::Forward => self.run(unit, micro_batch).forwarded,
            Phase::Backward => unit < self.program.loss_unit() && self.run(unit + 1, micro_batch).differentiated_input,
        };
        must(ready, || format!("there is nothing to send for unit {unit} on micro-batch {micro_batch}"))?;
        let sent = &mut self.run(unit, micro_batch).sent[phase as usize];
        must(!std::mem::replace(sent, true), || format!("unit {unit} on micro-batch {micro_batch} again"))
    }

    fn receive(&mut self, unit: u32, micro_batch: u32, phase: Phase) -> Verdict {
        let received = &mut self.run(unit, micro_batch).received[phase as usize];
        must(!std::mem::replace(received, true), || format!("unit {unit} on micro-batch {micro_batch} again"))
    }

    /// Records a collective inside a unit that runs as a whole, or between experts.
    fn exchange(&mut self, unit: u32, micro_batch: u32, phase: Phase, collective: Collective, times: u32) -> Verdict {
        let run = self.run(unit, micro_batch);
        let before = &mut run.exchanged[phase as usize][collective as usize];
        must(*before == 0, || format!("unit {unit} on micro-batch {micro_batch} again"))?;
        *before = times;
        Ok(())
    }

    fn clip(&mut self) -> Verdict {
        must(!std::mem::replace(&mut self.clipped, true), || "again".to_owned())?;
        for unit in &self.trains {
            self.gradients.is_sum(*unit)?;
            let shared = [
                (Axis::Pipeline, self.program.is_shared_between_stages(*unit)),
                (Axis::Tensor, self.program.is_shared_in_group(*unit)),
            ];
            for (axis, shared) in shared {
                must(shared == self.gradients.is_tied(*unit, axis), || {
                    format!("the gradient of unit {unit} is partial over {}", axis.name())
                })?;
            }
            self.sum_is_in_its_tier(*unit)?;
        }
        Ok(())
    }

    fn is_worker(&self) -> Verdict {
        must(self.program.server.is_some(), || "the program has no parameter server".to_owned())
    }

    fn push(&mut self, unit: u32) -> Verdict {
        self.is_worker()?;
        must(!self.clipped, || "the step is committed already".to_owned())?;
        self.gradients.reduce(unit, false)?;
        self.gradients.is_sum(unit)
    }

    fn pull(&mut self, unit: u32, staleness: u32) -> Verdict {
        self.is_worker()?;
        must(self.clipped, || "the step is not committed".to_owned())?;
        must(self.program.is_trained(unit), || format!("unit {unit} is frozen"))?;
        let bound = self.program.server.map_or(0, |server| server.staleness);
        let bound = if self.program.kind == StepKind::Drained { 0 } else { bound };
        must(staleness <= bound, || format!("parameters may lack the updates of {bound} steps, not of {staleness}"))?;
        self.lacks_updates |= staleness > 0;
        let state = &mut self.units[unit as usize];
        must(!std::mem::replace(&mut state.updated, true), || format!("unit {unit} again"))
    }

    fn update(&mut self, unit: u32, chunk: u32, instruction: &Instruction) -> Verdict {
        must(self.clipped, || "the gradient norm is not known".to_owned())?;
        must(self.program.is_trained(unit), || format!("unit {unit} is frozen"))?;
        let writes = instruction.effects.iter().any(|effect| effect.kind == MemoryKind::Parameters && effect.bytes > 0);
        let placement = &self.program.placement;
        let (chunks, offloaded) = (self.program.chunks_of(unit), self.program.offload.optimizer.is_some());
        let state = &mut self.units[unit as usize];
        must(chunk == state.chunks_updated && chunk < chunks, || {
            format!("{} of {chunks} chunks of unit {unit} are updated", state.chunks_updated)
        })?;
        must(!offloaded || chunk < state.fetched, || format!("the optimizer state of unit {unit} is in a lower tier"))?;
        state.chunks_updated += 1;
        state.updated = state.chunks_updated == chunks;
        must(state.present != writes, || {
            format!("the parameters of unit {unit} are not there to be written, or twice")
        })?;
        state.present = true;
        state.stale = placement.parameters != placement.masters;
        Ok(())
    }

    fn outer(&mut self, unit: u32) -> Verdict {
        must(self.program.averages(unit), || format!("the step has no outer step of unit {unit}"))?;
        if !self.program.averages_beside() {
            self.ends_outer(unit)?;
            self.units[unit as usize].merged = true;
        }
        let state = &mut self.units[unit as usize];
        must(state.updated == state.merged, || format!("unit {unit} is updated before its changes are taken"))?;
        must(!std::mem::replace(&mut state.averaged, true), || format!("unit {unit} again"))
    }

    fn merge(&mut self, unit: u32) -> Verdict {
        must(self.program.averages_beside(), || "no outer step runs during this step".to_owned())?;
        self.ends_outer(unit)?;
        let state = &mut self.units[unit as usize];
        must(state.averaged, || format!("the changes of unit {unit} are not averaged"))?;
        must(!std::mem::replace(&mut state.merged, true), || format!("unit {unit} again"))
    }

    /// The masters of `unit` can be replaced: they are updated, and nobody has a copy of them.
    fn ends_outer(&self, unit: u32) -> Verdict {
        let placement = &self.program.placement;
        let state = &self.units[unit as usize];
        must(state.updated, || format!("unit {unit} is not updated"))?;
        must(state.stale == (placement.parameters != placement.masters), || {
            format!("the parameters of unit {unit} were passed on before their outer step")
        })
    }

    fn fetch(&mut self, unit: u32, what: State) -> Verdict {
        let here = || format!("that of unit {unit} is on the device already");
        let offload = &self.program.offload;
        match what {
            State::Parameters => {
                must(self.program.lies_in_a_tier(unit), || "parameters do not lie in a tier".to_owned())?;
                must(!std::mem::replace(&mut self.units[unit as usize].present, true), here)
            }
            State::Optimizer { chunk } => {
                must(offload.optimizer.is_some(), || "optimizer state does not lie in a tier".to_owned())?;
                let complete = self.clipped || offload.gradients.is_some();
                must(offload.optimizer != Some(Tier::Host) || complete, || {
                    "gradients are not complete before their norm is known".to_owned()
                })?;
                self.sum_is_in_its_tier(unit)?;
                let (chunks, state) = (self.program.chunks_of(unit), &mut self.units[unit as usize]);
                must(chunk == state.fetched && chunk < chunks, || {
                    format!("{} of {chunks} chunks of unit {unit} were fetched", state.fetched)
                })?;
                state.fetched += 1;
                Ok(())
            }
            State::Activations { micro_batch } => {
                let kept = std::mem::replace(&mut self.run(unit, micro_batch).kept, Kept::Here);
                must(kept == Kept::Away, here)
            }
            State::Gradients => {
                must(!self.clipped, || "the norm is taken already".to_owned())?;
                let before = std::mem::replace(&mut self.units[unit as usize].sum, Kept::Here);
                must(before == Kept::Away, here)
            }
        }
    }

    fn evict(&mut self, unit: u32, what: State, write: bool) -> Verdict {
        let offload = &self.program.offload;
        let state = &mut self.units[unit as usize];
        match what {
            State::Parameters => {
                must(self.program.lies_in_a_tier(unit), || "parameters do not lie in a tier".to_owned())?;
                self.copy_is_written(unit)?;
                let state = &mut self.units[unit as usize];
                must(std::mem::replace(&mut state.present, false), || format!("unit {unit} is not on the device"))?;
                must(!state.stale, || format!("unit {unit} has parts from before the update"))?;
                must(write == state.updated, || format!("unit {unit} is to be written if it was updated"))
            }
            State::Optimizer { chunk } => {
                must(offload.optimizer.is_some(), || "optimizer state does not lie in a tier".to_owned())?;
                must(chunk == state.evicted && chunk < state.fetched, || format!("unit {unit} is not on the device"))?;
                state.evicted += 1;
                must(write && chunk < state.chunks_updated, || {
                    format!("unit {unit} is to be written once it is updated")
                })
            }
            State::Activations { micro_batch } => {
                must(offload.activations.is_some() && write, || "activations do not lie in a tier".to_owned())?;
                let kept = std::mem::replace(&mut self.run(unit, micro_batch).kept, Kept::Away);
                must(kept == Kept::Here, || format!("unit {unit} has kept nothing of micro-batch {micro_batch}"))
            }
            State::Gradients => {
                must(offload.gradients.is_some() && write, || "gradients do not lie in a tier".to_owned())?;
                must(!self.clipped, || "the norm is taken already".to_owned())?;
                let before = std::mem::replace(&mut state.sum, Kept::Away);
                must(before == Kept::Here, || format!("the gradients of unit {unit} are not on the device"))?;
                self.gradients.is_complete(unit)
            }
        }
    }

    /// Applies the memory effects of an instruction. Nothing may be given back that was not taken.
    fn account(&mut self, instruction: &Instruction) -> Verdict {
        for effect in &instruction.effects {
            let live = self.balance.change(instruction.action, effect);
            must(live >= 0, || format!("gives back {} bytes of {} more than were taken", -live, effect.kind.name()))?;
        }
        Ok(())
    }

    fn end(&self) -> Verdict {
        must(self.loaded == self.program.micro_batches, || "some micro-batch was never loaded".to_owned())?;
        must(self.counted, || "targets were never counted".to_owned())?;
        for unit in self.program.stretches().flatten() {
            self.all_runs_done(unit)?;
        }
        for unit in self.program.holds() {
            let state = &self.units[unit as usize];
            must(!state.stale, || format!("unit {unit} has parts from before the update"))?;
            must(state.gathered == 0, || format!("unit {unit} is still gathered"))?;
            must(state.present != self.program.lies_in_a_tier(unit), || format!("unit {unit} is not in its tier"))?;
        }
        for unit in &self.trains {
            let (offload, state) = (&self.program.offload, &self.units[*unit as usize]);
            must(state.updated, || format!("unit {unit} was never updated"))?;
            must(state.merged == self.program.averages(*unit), || format!("unit {unit} has no outer step"))?;
            let away = if offload.optimizer.is_some() { self.program.chunks_of(*unit) } else { 0 };
            must(state.evicted == away && state.fetched == away, || {
                format!("the state of unit {unit} is not in its tier")
            })?;
        }
        must(self.snapshot == self.program.snapshot, || "no snapshot was taken".to_owned())?;
        self.balance.is_even()
    }

    fn all_runs_done(&self, unit: u32) -> Verdict {
        let (program, loss) = (self.program, self.program.loss_unit());
        let of = |unit: u32, m: u32| &self.runs[(unit * program.micro_batches + m) as usize];
        for m in 0..program.micro_batches {
            let run = of(unit, m);
            must(run.forwarded, || format!("unit {unit} never ran on micro-batch {m}"))?;
            must(run.differentiated_weights || unit < program.lowest, || {
                format!("unit {unit} was never differentiated on micro-batch {m}")
            })?;
            must(run.exchanged == of(unit, 0).exchanged, || {
                format!("unit {unit} exchanges differently on micro-batch {m}")
            })?;
            let up = unit < loss && !program.runs(unit + 1);
            must(run.sent[0] == up && run.received[1] == up, || crossing(unit, m))?;
            if let Some(below) = unit.checked_sub(1) {
                let (run, down) = (of(below, m), !program.runs(below));
                must(!down || run.received[0] && run.sent[1], || crossing(below, m))?;
            }
        }
        Ok(())
    }
}

fn crossing(unit: u32, micro_batch: u32) -> String {
    format!(
        "the output of unit {unit} on micro-batch {micro_batch}, or its gradient, did not cross the pipeline's cut as it must"
    )
}

/// Bytes that are taken and not given back, by purpose.
struct Balance {
    micro_batches: u32,
    /// Per kind; within it per unit, or per unit and micro-batch, if the effect belongs to one.
    live: Vec<Vec<i64>>,
}

impl Balance {
    fn new(program: &Program) -> Balance {
        let places = (program.units.len() as u32 * program.micro_batches) as usize;
        Balance { micro_batches: program.micro_batches, live: vec![vec![0; places]; MemoryKind::ALL.len()] }
    }

    fn change(&mut self, action: Action, effect: &Effect) -> i64 {
        let (unit, micro_batch) = (action.unit().unwrap_or(0), action.micro_batch().unwrap_or(0));
        let place = match effect.kind {
            MemoryKind::Activations => unit * self.micro_batches + micro_batch,
            MemoryKind::Data => micro_batch,
            MemoryKind::Parameters | MemoryKind::Masters | MemoryKind::Optimizer | MemoryKind::Gathered => unit,
            // These are not counted per unit: one pass takes buffers for several units, and a
            // receive is named after another unit than the pass that uses it.
            MemoryKind::Gradients | MemoryKind::Communication => 0,
        };
        let live = &mut self.live[effect.kind as usize][place as usize];
        *live += effect.bytes;
        *live
    }

    fn is_even(&self) -> Verdict {
        for (kind, live) in MemoryKind::ALL.into_iter().zip(&self.live) {
            let bytes: i64 = live.iter().map(|bytes| bytes.abs()).sum();
            must(bytes == 0, || format!("{bytes} bytes of {} are not given back", kind.name()))?;
        }
        Ok(())
    }
}
