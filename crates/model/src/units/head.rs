//! The last unit: the final norm and the product with the vocabulary, fused with the loss. Beside
//! an encoder it works on the decoder's rows.

use super::Embedding;
use super::norm::Norm;
use crate::Result;
use crate::families::{Parameters, normal};
use crate::parameter::{ParameterKind, ParameterSpec};
use crate::spec::ModelSpec;
use crate::split::{Division, TensorSplit};
use crate::unit::{
    Exchange, Forward, Output, Segment, Segments, Unit, Value, in_segments, no_segment, require_input, without_segments,
};
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_program::Layout;
use trainyard_tensor::ops::TablePart;
use trainyard_tensor::{DType, Purpose};

/// Final norm and LM head. Tied, it has no matrix of its own and borrows the token table.
#[derive(Debug)]
pub struct Head {
    parameters: Vec<ParameterSpec>,
    norm: Norm,
    weight: ParamId,
    borrowed: Vec<ParamId>,
    /// The factor of normed rows; None for 1.
    scale: Option<f32>,
    split: Option<SplitHead>,
}

/// The part of the head that is one rank's.
#[derive(Debug)]
struct SplitHead {
    place: TensorSplit,
    /// The rows of the vocabulary that it has; None for all.
    vocabulary: Option<TablePart>,
    segments: Segments,
}

impl Head {
    /// The head of `spec` as unit number `unit`.
    pub fn new(spec: &ModelSpec, unit: u32) -> Head {
        let mut parameters = Parameters::new(spec, unit, 0);
        let norm = Norm::new(&mut parameters, "norm");
        let (weight, borrowed) = if spec.tie_embeddings {
            (Embedding::TOKENS, vec![Embedding::TOKENS])
        } else {
            let shape = [spec.vocab_size, spec.dim];
            let weight = match &spec.encoder {
                // Tokens begin with a deviation of 1; logits would with the root of the width.
                Some(_) => {
                    let init = normal(spec.init_std / (spec.dim as f64).sqrt());
                    parameters.add("lm.weight", &shape, init, ParameterKind::Matrix)
                }
                None => parameters.readout("lm.weight", shape),
            };
            (weight, Vec::new())
        };
        // Tied, a model with an encoder divides by the root of its width (Raffel et al. 2020).
        let scale = (spec.encoder.is_some() && spec.tie_embeddings).then(|| (spec.dim as f64).sqrt().recip() as f32);
        Head { parameters: parameters.finish(), norm, weight, borrowed, scale, split: None }
    }

    /// The part of one rank of a tensor-parallel group. A rank computes the logits of the tokens
    /// that it has. Of each row, ranks exchange the largest logit, the sum of exponentials and the
    /// target's logit; from these each computes the loss, and the gradients of its part.
    pub fn split(mut self, division: &Division) -> Result<Head> {
        division.cut("head", &mut self.parameters)?;
        let (place, residual) = (division.split(), division.split().residual());
        let value = Value::new;
        let segments = Segments {
            values: vec![
                value("x", residual),
                value("h", residual),
                value("h'", Layout::Replicated),
                value("s", Layout::Split),
                value("s'", Layout::Invariant),
                value("loss", Layout::Invariant),
            ],
            input: Some(0),
            segments: vec![
                Segment { name: "norm", takes: vec![0], gives: vec![1], differentiable: true },
                Segment { name: "statistics", takes: vec![2], gives: vec![2, 3], differentiable: false },
                Segment { name: "loss", takes: vec![2, 4], gives: vec![5], differentiable: true },
            ],
            exchanges: vec![Exchange { from: 1, to: 2 }, Exchange { from: 3, to: 4 }],
        };
        self.split = Some(SplitHead { place, vocabulary: Some(division.vocabulary()), segments });
        Ok(self)
    }

    /// The same on the rows of one rank of a context-parallel group, whose losses are summands of
    /// the whole one.
    pub fn on_rows(mut self) -> Head {
        let whole = || SplitHead { place: TensorSplit::WHOLE, vocabulary: None, segments: Segments::whole(true) };
        let split = self.split.take().unwrap_or_else(whole);
        let mut segments = split.segments.clone().on_rows();
        if let Some(loss) = segments.values.last_mut() {
            loss.context = Layout::Partial;
        }
        self.split = Some(SplitHead { segments, ..split });
        self
    }

    /// All of it, on the rows that are here.
    fn whole(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        let input = require_input("head", input)?;
        let (x, first) = match &cx.batch.sides {
            Some(sides) => {
                let (first, rows) = (sides.encoder_rows, input.tensor().rows());
                (tape.narrow(input, 0, first, rows - first)?, first)
            }
            None => (input.clone(), 0),
        };
        match cx.output {
            Output::Loss { scale } => {
                let h = self.normed(tape, &x)?;
                let targets = cx.targets()?;
                let targets = targets.narrow(first..targets.elements())?;
                Ok(tape.linear_cross_entropy(&h, self.weight, &targets, scale)?)
            }
            Output::Logits => {
                let h = self.normed(tape, &x)?;
                Ok(tape.linear(&h, self.weight, Default::default())?)
            }
            Output::Hidden => self.normed(tape, &x),
            Output::LastLogits => {
                let rows = x.tensor().rows();
                let last = tape.constant(x.tensor().narrow(rows - 1..rows)?);
                let h = self.normed(tape, &last)?;
                Ok(tape.linear(&h, self.weight, Default::default())?)
            }
        }
    }

    /// The rows of which logits are made.
    fn normed(&self, tape: &mut Tape<'_>, x: &Var) -> Result<Var> {
        let h = self.norm.forward(tape, x)?;
        Ok(match self.scale {
            Some(scale) => tape.scale(&h, scale)?,
            None => h,
        })
    }

    /// The logits of the last row of h.
    fn last_logits(&self, tape: &mut Tape<'_>, h: &Var) -> Result<Var> {
        let rows = h.tensor().rows();
        let last = tape.constant(h.tensor().narrow(rows - 1..rows)?);
        Ok(tape.linear(&last, self.weight, Default::default())?)
    }
}

impl Unit for Head {
    fn name(&self) -> &str {
        "head"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn borrowed(&self) -> &[ParamId] {
        &self.borrowed
    }

    fn vocabulary(&self) -> Option<ParamId> {
        Some(self.weight)
    }

    fn segments(&self) -> Option<&Segments> {
        self.split.as_ref().map(|split| &split.segments)
    }

    fn forward_segment(
        &self,
        segment: usize,
        tape: &mut Tape<'_>,
        cx: &mut Forward<'_>,
        takes: &[Var],
    ) -> Result<Vec<Var>> {
        let split = self.split.as_ref().ok_or_else(|| without_segments("head"))?;
        split.place.rows(cx.batch.len())?;
        let Some(vocabulary) = split.vocabulary else { return Ok(vec![self.whole(tape, cx, takes.first())?]) };
        Ok(vec![match (segment, takes) {
            (0, [x]) => self.norm.forward(tape, x)?,
            (1, [h]) => {
                let statistics = match cx.output {
                    Output::Loss { .. } => tape.vocabulary_statistics(h, self.weight, vocabulary, cx.targets()?)?,
                    // Logits need none.
                    Output::Logits | Output::LastLogits | Output::Hidden => {
                        let zeros = tape.device().zeros([h.tensor().rows(), 3], DType::F32, Purpose::Activations)?;
                        tape.constant(zeros)
                    }
                };
                return Ok(vec![h.clone(), statistics]);
            }
            (2, [h, statistics]) => match cx.output {
                Output::Loss { scale } => {
                    let (part, statistics) = (vocabulary, statistics.tensor());
                    tape.part_cross_entropy(h, self.weight, part, statistics, cx.targets()?, scale)?
                }
                Output::Logits => tape.linear(h, self.weight, Default::default())?,
                Output::LastLogits => self.last_logits(tape, h)?,
                Output::Hidden => h.clone(),
            },
            _ => return Err(no_segment("head", segment, takes.len())),
        }])
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        if self.split.is_some() {
            return Err(in_segments("head"));
        }
        self.whole(tape, cx, input)
    }
}
