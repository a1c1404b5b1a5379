//! Rates of steps relative to the measured peak, for steps that exceed it.

use super::Throughput;
use crate::Result;

/// Upper limit for repeated measurements of the peak in a run. One is enough if the machine was
/// busy during the first measurement. Steps that exceed the peak three times more have another
/// cause, and a measurement may take longer than a step.
const AGAIN_MAX: u32 = 3;

/// The work of a step.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    /// Tokens that the step trained on.
    pub tokens: u64,
    /// Model FLOPs.
    pub flops: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Counts the repeated measurements of a run's peak.
#[derive(Default)]
pub(crate) struct AbovePeak(u32);

impl AbovePeak {
    /// Rates of a step relative to `peak`, in FLOP/s. If the step exceeds it, `measure` measures
    /// the peak again, at most [`AGAIN_MAX`] times in a run. A step that exceeds the new peak too
    /// has no utilisation; it does not end the training. `note` gets a line about each case.
    pub(crate) fn rates(
        &mut self,
        work: Work,
        peak: Option<f64>,
        measure: impl FnOnce() -> Result<Option<f64>>,
        note: impl FnOnce(&str),
    ) -> Throughput {
        let Work { tokens, flops, seconds } = work;
        let against = |peak| Throughput::new(tokens, flops, seconds, peak);
        let above = match against(peak) {
            Ok(rates) => return rates,
            Err(above) => above,
        };
        let faster = format!(
            "this step ran at {:.3} TFLOP/s, faster than the measured peak of {:.3} TFLOP/s (the machine was busy during that measurement)",
            above.tflops, above.peak_tflops
        );
        self.0 = self.0.saturating_add(1);
        let mut rates = None;
        if self.0 <= AGAIN_MAX {
            match measure() {
                Ok(again) => {
                    rates = against(again).ok();
                    let left_out = if rates.is_none() { "; the step has no MFU" } else { "" };
                    let again = again.unwrap_or(0.0) / 1e12;
                    note(&format!("{faster}; the peak was measured again: {again:.3} TFLOP/s{left_out}"));
                }
                Err(error) => {
                    note(&format!("{faster}; the peak cannot be measured again, so the step has no MFU: {error}"))
                }
            }
        } else if self.0 == AGAIN_MAX + 1 {
            note(&format!(
                "{faster}; the peak was measured again {AGAIN_MAX} times already: from here on, steps faster than it have no MFU"
            ));
        }
        rates.unwrap_or_else(|| Throughput::without_peak(tokens, flops, seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of 100 steps once measured its peak 100 times, which took longer than the training.
    #[test]
    fn a_peak_that_every_step_beats_is_measured_again_a_few_times() {
        let (mut above_peak, mut measured, mut notes) = (AbovePeak::default(), 0, Vec::new());
        let work = Work { tokens: 10, flops: 2e12, seconds: 1.0 };
        for _ in 0..100 {
            let measure = || {
                measured += 1;
                Ok(Some(1e12))
            };
            let rates = above_peak.rates(work, Some(1e12), measure, |text| notes.push(text.to_owned()));
            assert_eq!(rates, Throughput { tps: 10.0, tflops: 2.0, mfu: None });
        }
        assert_eq!((measured, notes.len()), (3, 4));
        assert!(notes[2].ends_with("the peak was measured again: 1.000 TFLOP/s; the step has no MFU"), "{}", notes[2]);
        assert!(notes[3].ends_with("from here on, steps faster than it have no MFU"), "{}", notes[3]);
        let slower = Work { seconds: 4.0, ..work };
        let rates = above_peak.rates(slower, Some(1e12), || unreachable!("it is possible"), |_| unreachable!());
        assert_eq!(rates.mfu, Some(0.5));
    }

    #[test]
    fn a_peak_that_was_measured_on_a_busy_machine_is_mended_by_the_next() {
        let work = Work { tokens: 10, flops: 2e12, seconds: 1.0 };
        let mut said = String::new();
        let rates = AbovePeak::default().rates(work, Some(1e12), || Ok(Some(4e12)), |text| said = text.to_owned());
        assert_eq!(rates.mfu, Some(0.5));
        assert!(said.ends_with("measured again: 4.000 TFLOP/s"), "{said}");
    }
}
