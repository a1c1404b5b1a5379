//! Forwards outside of steps, for evaluation and generation: all units on one tape.

use super::{Rank, exchanges};
use crate::links::Link;
use crate::state::lock;
use crate::{EngineError, Result};
use std::sync::Arc;
use trainyard_autograd::functions::RowExchange;
use trainyard_autograd::{Policy, RandomKey, Tape, Var};
use trainyard_model::{Forward, Output};

impl Rank {
    /// Runs the forward of every unit on one tape, for evaluation and generation. Sharded
    /// parameters of a unit are gathered only while it runs. All ranks of a shard group call this
    /// together, each on its own batch, and so do all stages of a pipeline, on the same batch. The
    /// result is None on stages that do not run the last unit.
    pub fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>) -> Result<Option<Var>> {
        let links = lock(&self.compute_links);
        let holding = self.parameters.holding();
        let comes_and_goes = self.parameters.is_sharded() || self.parameters.is_offloaded();
        let model = self.inference_model();
        let units = model.units().len();
        cx.experts = self.row_exchange();
        model.begin_forward(tape, cx)?;
        let mut x: Option<Var> = None;
        for unit in (0..units).filter(|unit| holding.runs(*unit)) {
            if let Some(below) = unit.checked_sub(1).filter(|below| !holding.runs(*below)) {
                let from = holding.stage_of(below) as usize;
                let received = links.pipeline.receive_rows(&self.device, self.parameters.compute(), from)?;
                x = Some(tape.constant(received));
            }
            let bring = |unit| self.bring_whole(unit, &links.shard);
            self.reads(unit).filter(|_| comes_and_goes).try_for_each(bring)?;
            x = Some(self.forward_unit(unit, tape, cx, x, &links.tensor).map_err(|error| self.experts_failed(error))?);
            self.reads(unit).filter(|_| comes_and_goes).try_for_each(|unit| self.let_go(unit))?;
            let above = unit + 1;
            if above < units && !holding.runs(above) {
                let output = x.take().expect("a unit has an output");
                links.pipeline.send_rows(output.tensor(), holding.stage_of(above) as usize)?;
            }
        }
        model.end_forward(cx);
        Ok(x)
    }

    /// Runs the forward of a unit. The ranks of a tensor-parallel group exchange between its
    /// segments.
    fn forward_unit(
        &self,
        unit: usize,
        tape: &mut Tape<'_>,
        cx: &mut Forward<'_>,
        input: Option<Var>,
        group: &Link,
    ) -> Result<Var> {
        let unit = &self.inference_model().units()[unit];
        let Some(segments) = unit.segments() else { return Ok(unit.forward(tape, cx, input.as_ref())?) };
        let mut values: Vec<Option<Var>> = vec![None; segments.values.len()];
        if let (Some(value), Some(input)) = (segments.input, input) {
            values[value] = Some(input);
        }
        for (number, segment) in segments.segments.iter().enumerate() {
            for exchange in segments.exchanges.iter().filter(|exchange| segment.takes.contains(&exchange.to)) {
                if values[exchange.to].is_none() {
                    let from = values[exchange.from].take().expect("a segment before gives it");
                    let (_, change) = segments.change(*exchange);
                    let changed = exchanges::change(from.tensor(), change, group)?;
                    values[exchange.to] = Some(tape.constant(changed));
                }
            }
            let takes = segment.takes.iter().map(|value| values[*value].take().expect("a segment before gives it"));
            let gives = unit.forward_segment(number, tape, cx, &takes.collect::<Vec<_>>())?;
            for (value, given) in segment.gives.iter().zip(gives) {
                values[*value] = Some(given);
            }
        }
        Ok(values.pop().flatten().expect("the last value is the unit's output"))
    }

    /// The way to the ranks that have other experts; None if this rank has all.
    pub(super) fn row_exchange(&self) -> Option<Arc<dyn RowExchange>> {
        self.experts.as_ref().map(|experts| Arc::clone(experts) as Arc<dyn RowExchange>)
    }

    /// The error of a pass, or that of the exchange of rows which it came from.
    pub(super) fn experts_failed(&self, error: EngineError) -> EngineError {
        match &self.experts {
            Some(experts) => experts.failed(error),
            None => error,
        }
    }

    /// The units whose parameters `unit` reads.
    fn reads(&self, unit: usize) -> impl Iterator<Item = usize> {
        let borrowed = self.model.units()[unit].borrowed().iter().map(|id| id.unit as usize);
        [unit].into_iter().chain(borrowed)
    }

    /// Makes evaluation and generation round the inputs of the blocks' layers to 8 bits, as the
    /// files of some models say.
    pub fn round_inputs(&mut self) {
        self.rounded_inputs = crate::fp8::layers(&self.model).into_iter().collect();
    }

    /// A tape for a forward that is not trained on.
    pub fn inference_tape(&self) -> Tape<'_> {
        let tape = Tape::new(&self.device, &self.parameters, Policy::Nothing, RandomKey::default());
        match self.rounded_inputs.is_empty() {
            true => tape,
            false => tape.with_rounded_inputs(&self.rounded_inputs),
        }
    }

    /// Joins a forward of the other ranks without a batch. In a shard group it only takes part in
    /// the gathers. Where ranks divide experts, it runs a token of its own, because the others'
    /// tokens need its experts, and that takes part in the gathers too.
    pub fn forward_nothing(&self) -> Result<()> {
        if self.experts.is_some() {
            let batch = self.inference_model().rows(&self.device, 1, &[0], None)?;
            let mut tape = self.inference_tape();
            self.forward(&mut tape, &mut Forward::evaluation(&batch, Output::LastLogits))?;
            return Ok(());
        }
        if !self.parameters.is_sharded() {
            return Ok(());
        }
        let links = lock(&self.compute_links);
        let runs = (0..self.model.units().len()).filter(|unit| self.parameters.holding().runs(*unit));
        for unit in runs.flat_map(|unit| self.reads(unit)) {
            self.bring_whole(unit, &links.shard)?;
            self.let_go(unit)?;
        }
        Ok(())
    }
}
