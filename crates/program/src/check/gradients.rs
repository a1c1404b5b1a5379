//! Checks that every gradient is summed over all micro-batches and all ranks exactly once.

use crate::{Axes, Axis, BackwardPart, Phase, Program};

/// The state of every unit's gradient while the checker walks through the step.
pub struct Gradients {
    many_ranks: bool,
    folded: bool,
    micro_batches: u32,
    units: Vec<Gradient>,
}

#[derive(Clone, Default)]
struct Gradient {
    /// Number of passes per micro-batch that add to the gradient.
    expected: u32,
    /// Per micro-batch, the passes that have added so far.
    added: Vec<u32>,
    /// Buffers that are not reduced yet, each as the number of micro-batches it sums. Without
    /// folding there is at most one.
    buffers: Vec<u32>,
    /// Number of micro-batches in the resident sum.
    reduced: u32,
    /// The axes over which ranks that hold the same parameters have summed their gradient.
    tied: Axes,
}

impl Gradients {
    pub fn new(program: &Program) -> Gradients {
        let batches = program.micro_batches;
        let empty = Gradient { added: vec![0; batches as usize], ..Gradient::default() };
        let mut units = vec![empty; program.units.len()];
        for runs in program.stretches().flatten() {
            let differentiated = runs >= program.lowest;
            let forward = program.adds_gradients(runs, Phase::Forward, BackwardPart::Whole);
            let backwards = program.split_of(runs).map_or(1, |split| split.differentiable().len() as u32);
            let passes = if differentiated { backwards + u32::from(forward) } else { 0 };
            for unit in program.adds_to(runs) {
                units[unit as usize].expected += passes;
            }
        }
        let many_ranks = program.mesh.degree(program.kind.gradient_axis()) > 1;
        Gradients { many_ranks, folded: program.folded, micro_batches: batches, units }
    }

    /// Records that a pass adds to the gradient of `unit`.
    pub fn add(&mut self, unit: u32, micro_batch: u32) -> Result<(), String> {
        let (folded, in_all) = (self.folded, self.micro_batches);
        let gradient = &mut self.units[unit as usize];
        let added = &mut gradient.added[micro_batch as usize];
        *added += 1;
        if *added > 1 {
            return Ok(());
        }
        match gradient.buffers[..] {
            [.., a, b] if a == b => {
                return Err(format!("the gradient of unit {unit} before micro-batch {micro_batch} is not folded"));
            }
            [count] if !folded => gradient.buffers[0] = count + 1,
            _ => gradient.buffers.push(1),
        }
        if gradient.reduced + gradient.buffers.iter().sum::<u32>() > in_all {
            return Err(format!("the gradient of unit {unit} has more than {in_all} micro-batches"));
        }
        Ok(())
    }

    /// Records a fold: while the last two buffers sum equally many micro-batches, the later one is
    /// added to the earlier.
    pub fn fold(&mut self, unit: u32, micro_batch: u32) -> Result<(), String> {
        if !self.folded {
            return Err("the program does not fold gradients".to_owned());
        }
        let gradient = &mut self.units[unit as usize];
        if gradient.added[micro_batch as usize] != gradient.expected {
            return Err(format!("the gradient of unit {unit} on micro-batch {micro_batch} is not complete"));
        }
        if gradient.buffers.last() != Some(&1) || !matches!(gradient.buffers[..], [.., a, b] if a == b) {
            return Err(format!("there is nothing to fold for unit {unit}"));
        }
        while let [.., a, b] = gradient.buffers[..] {
            if a != b {
                break;
            }
            gradient.buffers.pop();
            *gradient.buffers.last_mut().expect("two were there") = a + b;
        }
        Ok(())
    }

    /// Records that the buffer of `unit` is summed over ranks into the resident sum.
    pub fn reduce(&mut self, unit: u32, accumulate: bool) -> Result<(), String> {
        if !self.many_ranks {
            return Err("there is one data rank, and nothing to reduce".to_owned());
        }
        let gradient = &mut self.units[unit as usize];
        gradient.complete(unit)?;
        let [count] = gradient.buffers[..] else {
            return Err(match gradient.buffers.is_empty() {
                true => format!("unit {unit} has no gradient that is not reduced"),
                false => format!("the gradient of unit {unit} is not folded to one"),
            });
        };
        if accumulate != (gradient.reduced > 0) {
            return Err(match accumulate {
                true => format!("there is no sum yet that unit {unit} could be added to"),
                false => format!("the sum of unit {unit} would be overwritten"),
            });
        }
        gradient.reduced += count;
        gradient.buffers.clear();
        Ok(())
    }

    /// Records that the gradient of `unit` is summed over ranks along `axis` that hold the same
    /// parameters.
    pub fn tie(&mut self, unit: u32, axis: Axis) -> Result<(), String> {
        self.is_sum(unit)?;
        let tied = &mut self.units[unit as usize].tied;
        if tied.contains(axis) {
            return Err(format!("unit {unit} is summed over {} again", axis.name()));
        }
        *tied = tied.iter().chain([axis]).collect();
        Ok(())
    }

    /// True once the gradient of `unit` is summed over ranks along `axis` that hold the same
    /// parameters.
    pub fn is_tied(&self, unit: u32, axis: Axis) -> bool {
        self.units[unit as usize].tied.contains(axis)
    }

    /// Checks that each micro-batch has added everything or nothing to the gradient of `unit`, and
    /// that at most one buffer is left.
    pub fn is_complete(&self, unit: u32) -> Result<(), String> {
        let gradient = &self.units[unit as usize];
        gradient.complete(unit)?;
        match gradient.buffers.len() {
            0 | 1 => Ok(()),
            _ => Err(format!("the gradient of unit {unit} is not folded to one")),
        }
    }

    /// Checks that the sum of `unit` is complete and that no buffer is left beside it.
    pub fn is_sum(&self, unit: u32) -> Result<(), String> {
        let gradient = &self.units[unit as usize];
        gradient.complete(unit)?;
        let (in_sum, beside) = match self.many_ranks {
            true => (gradient.reduced, !gradient.buffers.is_empty()),
            false => (gradient.buffers.first().copied().unwrap_or(0), gradient.buffers.len() > 1),
        };
        if in_sum != self.micro_batches || beside {
            let all = self.micro_batches;
            return Err(format!("the gradient of unit {unit} is the sum of {in_sum} of {all} micro-batches"));
        }
        Ok(())
    }
}

impl Gradient {
    /// Checks that each micro-batch has all contributions or none.
    fn complete(&self, unit: u32) -> Result<(), String> {
        match self.added.iter().position(|added| *added != 0 && *added != self.expected) {
            Some(micro_batch) => {
                Err(format!("the gradient of unit {unit} on micro-batch {micro_batch} is not complete"))
            }
            None => Ok(()),
        }
    }
}
