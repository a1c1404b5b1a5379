//! The batch arithmetic, in its one place:
//!
//! global batch = micro-batch x accumulation steps x data-parallel degree,
//!
//! in sequences. The degree is given. Of the other three numbers, two give the third. Where only
//! one is given, a step has one micro-batch; where all three are given, they must agree.

use serde::Serialize;

/// The default micro-batch size, in sequences.
const MICRO_BATCH: usize = 8;

/// The batch of one optimizer step, in sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Batch {
    /// Sequences in one forward and backward on one rank.
    pub micro: usize,
    /// Micro-batches in one optimizer step, on each rank.
    pub accumulation: usize,
    /// Ranks that see different data.
    pub data_parallel_degree: usize,
    /// Sequences in one optimizer step.
    pub global: usize,
}

/// The derived numbers: key of `[training]`, value, derivation.
pub type Derived = Vec<(&'static str, usize, String)>;

/// A contradiction in the batch arithmetic.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BatchError {
    /// One of the numbers is zero.
    #[error("training.{0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// The given numbers contradict each other.
    #[error(
        "training.global_batch_size = {global} is not micro_batch_size {micro} x accumulation_steps {accumulation} x data-parallel \
         degree {degree} = {product}; leave one of the three out to have it derived"
    )]
    Disagree {
        /// `training.global_batch_size` as given.
        global: usize,
        /// `training.micro_batch_size` as given.
        micro: usize,
        /// `training.accumulation_steps` as given.
        accumulation: usize,
        /// The data-parallel degree.
        degree: usize,
        /// `micro * accumulation * degree`.
        product: usize,
    },
    /// The global batch cannot be divided.
    #[error(
        "training.global_batch_size = {global} does not divide by {by} ({what}); the nearest that does is {nearest}"
    )]
    Indivisible {
        /// `training.global_batch_size` as given.
        global: usize,
        /// The product of the other two factors.
        by: usize,
        /// The factors of `by`, in words.
        what: String,
        /// The nearest global batch size that `by` divides.
        nearest: usize,
    },
    /// The product does not fit in a `usize`.
    #[error("micro_batch_size x accumulation_steps x data-parallel degree is too large to count")]
    Overflow,
}

impl Batch {
    /// Completes the batch. Also returns each number that was not given, with its derivation.
    pub fn resolve(
        micro: Option<usize>,
        global: Option<usize>,
        accumulation: Option<usize>,
        degree: usize,
    ) -> Result<(Batch, Derived), BatchError> {
        let named = [("micro_batch_size", micro), ("global_batch_size", global), ("accumulation_steps", accumulation)];
        if let Some((name, _)) = named.iter().find(|(_, value)| *value == Some(0)) {
            return Err(BatchError::Zero(name));
        }
        let degree = degree.max(1);
        let product = |a: usize, b: usize| a.checked_mul(b).ok_or(BatchError::Overflow);
        let divide = |global: usize, by: usize, what: String| {
            if global.is_multiple_of(by) {
                return Ok(global / by);
            }
            let nearest = ((global + by / 2) / by).max(1).saturating_mul(by);
            Err(BatchError::Indivisible { global, by, what, nearest })
        };
        let ranks = format!("data-parallel degree {degree}");
        let mut because = Vec::new();
        let (micro, accumulation) = match (micro, global, accumulation) {
            (Some(micro), _, Some(accumulation)) => (micro, accumulation),
            (Some(micro), Some(global), None) => {
                let what = format!("micro_batch_size {micro} x {ranks}");
                let accumulation = divide(global, product(micro, degree)?, what)?;
                let why = format!("global_batch_size {global} / (micro_batch_size {micro} x {ranks})");
                because.push(("accumulation_steps", accumulation, why));
                (micro, accumulation)
            }
            (None, Some(global), accumulation) => {
                let steps = accumulation.unwrap_or(1);
                if accumulation.is_none() {
                    because.push(("accumulation_steps", 1, "no micro_batch_size asks for more".to_owned()));
                }
                let what = format!("accumulation_steps {steps} x {ranks}");
                let micro = divide(global, product(steps, degree)?, what)?;
                let why = format!("global_batch_size {global} / (accumulation_steps {steps} x {ranks})");
                because.push(("micro_batch_size", micro, why));
                (micro, steps)
            }
            (Some(micro), None, None) => {
                because.push(("accumulation_steps", 1, "no global_batch_size asks for more".to_owned()));
                (micro, 1)
            }
            (None, None, accumulation) => {
                because.push(("micro_batch_size", MICRO_BATCH, "no batch size is given".to_owned()));
                if accumulation.is_none() {
                    because.push(("accumulation_steps", 1, "no global_batch_size asks for more".to_owned()));
                }
                (MICRO_BATCH, accumulation.unwrap_or(1))
            }
        };
        let all = product(product(micro, accumulation)?, degree)?;
        match global {
            Some(global) if global != all => {
                return Err(BatchError::Disagree { global, micro, accumulation, degree, product: all });
            }
            Some(_) => {}
            None => {
                let why = format!("micro_batch_size {micro} x accumulation_steps {accumulation} x {ranks}");
                because.push(("global_batch_size", all, why));
            }
        }
        Ok((Batch { micro, accumulation, data_parallel_degree: degree, global: all }, because))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(batch: Batch) -> [usize; 4] {
        [batch.micro, batch.accumulation, batch.data_parallel_degree, batch.global]
    }

    #[test]
    fn any_two_give_the_third() {
        for (micro, global, accumulation, degree, want) in [
            (Some(4), Some(32), None, 2, [4, 4, 2, 32]),
            (Some(4), None, Some(3), 2, [4, 3, 2, 24]),
            (None, Some(32), Some(4), 1, [8, 4, 1, 32]),
            (Some(4), Some(32), Some(4), 2, [4, 4, 2, 32]),
            (Some(4), None, None, 2, [4, 1, 2, 8]),
            (None, Some(6), None, 2, [3, 1, 2, 6]),
            (None, None, None, 2, [8, 1, 2, 16]),
            (None, None, Some(2), 1, [8, 2, 1, 16]),
        ] {
            let (batch, because) = Batch::resolve(micro, global, accumulation, degree).unwrap();
            assert_eq!(numbers(batch), want);
            let given = [micro, global, accumulation].iter().flatten().count();
            assert_eq!(because.len(), 3 - given, "each number that was not given is explained once");
        }
    }

    #[test]
    fn contradictions_are_named() {
        let error = |m, g, a, d| Batch::resolve(m, g, a, d).unwrap_err().to_string();
        assert!(error(Some(4), Some(30), None, 2).contains("does not divide by 8"));
        assert!(error(Some(4), Some(30), None, 2).contains("nearest that does is 32"));
        assert!(error(Some(4), Some(30), Some(2), 2).contains("= 16"));
        assert!(error(Some(0), None, None, 1).contains("micro_batch_size is 0"));
        assert!(error(Some(usize::MAX), None, Some(2), 1).contains("too large"));
    }
}
