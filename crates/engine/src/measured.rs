//! Measured time and memory of a run's steps, which `plan.json` keeps beside the prediction.

use crate::lanes::Span;
use crate::metrics::Sample;
use serde::Serialize;
use std::collections::BTreeMap;
use trainyard_program::Program;

/// Samples of the seconds that a step's instructions take, by kind of instruction.
#[derive(Clone, Debug, Default)]
pub struct Kinds(BTreeMap<&'static str, Kind>);

/// Samples of one kind. The first step is kept apart because it touches memory for the first time.
#[derive(Clone, Debug, Default)]
struct Kind {
    first: Option<f64>,
    rest: Sample,
}

/// Measurements of one sitting of a run (from start or resumption to its end).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Number of measured steps.
    pub steps: usize,
    /// Median seconds of a step.
    pub step_s: f64,
    /// Median seconds of rank 0's instructions in a step, summed by kind.
    pub instructions: BTreeMap<String, f64>,
    /// Peak bytes in total.
    pub mem_peak_bytes: usize,
    /// Peak bytes by purpose.
    pub mem_peak: BTreeMap<String, usize>,
}

impl Kinds {
    /// Adds a step, given the spans of the instructions of `program`.
    pub fn add(&mut self, program: &Program, spans: &[Span]) {
        let mut sums: BTreeMap<&'static str, f64> = BTreeMap::new();
        for (instruction, span) in program.instructions.iter().zip(spans) {
            let seconds = span.end.saturating_sub(span.start).as_secs_f64();
            *sums.entry(instruction.action.name()).or_default() += seconds;
        }
        for (kind, seconds) in sums {
            let kind = self.0.entry(kind).or_default();
            match kind.first {
                None => kind.first = Some(seconds),
                Some(_) => kind.rest.add(seconds),
            }
        }
    }

    /// The median step's seconds by kind; the first step counts only when there is no other.
    pub fn medians(&self) -> BTreeMap<String, f64> {
        let median = |kind: &Kind| kind.rest.median().or(kind.first);
        self.0.iter().filter_map(|(name, kind)| Some(((*name).to_owned(), median(kind)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use trainyard_program::{Mesh, ModelShape, Strategy, UnitShape, lower_rank};

    #[test]
    fn kinds_are_summed_in_a_step_and_the_first_step_does_not_count() {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let program = lower_rank(&model, &Mesh::default(), &Strategy::new(2), 0).unwrap();
        let step = |millis: u64| {
            let span =
                Span { start: Duration::from_millis(7), end: Duration::from_millis(7 + millis), ..Span::default() };
            vec![span; program.instructions.len()]
        };
        let mut kinds = Kinds::default();
        assert_eq!(kinds.medians(), BTreeMap::new());
        for millis in [900, 1, 3, 2] {
            kinds.add(&program, &step(millis));
        }
        let medians = kinds.medians();
        // Two units go forward: twice the middle one of 1, 2 and 3.
        assert!((medians["forward"] - 0.004).abs() < 1e-9 && (medians["load"] - 0.002).abs() < 1e-9, "{medians:?}");
    }
}
