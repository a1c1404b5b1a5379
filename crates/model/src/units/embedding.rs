//! The first unit: tokens to rows of the residual stream.

use crate::Result;
use crate::families::{EmbeddingScale, Parameters, normal};
use crate::parameter::{ParameterKind, ParameterSpec};
use crate::spec::ModelSpec;
use crate::split::{Division, TensorSplit};
use crate::unit::{Exchange, Forward, Segment, Segments, Unit, Value, in_segments, no_segment, without_segments};
use std::ops::Range;
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_program::Layout;
use trainyard_tensor::ops::TablePart;

/// Token table, plus learned positions where there are some, plus dropout.
#[derive(Debug)]
pub struct Embedding {
    parameters: Vec<ParameterSpec>,
    tokens: ParamId,
    positions: Option<ParamId>,
    /// The factor on looked-up tokens; None for 1.
    scale: Option<f32>,
    dropout: f32,
    split: Option<SplitEmbedding>,
}

/// The part of the embedding that is one rank's.
#[derive(Debug)]
struct SplitEmbedding {
    place: TensorSplit,
    /// The rows of the token table that it has; None for all.
    tokens: Option<TablePart>,
    dim: usize,
    segments: Segments,
}

impl Embedding {
    /// The slot of the token table, which a tied head borrows.
    pub const TOKENS: ParamId = ParamId::new(0, 0);
    /// The slot of the numbers of distances in the encoder, [h, buckets], which its blocks borrow.
    pub const ENCODER_BIAS: ParamId = ParamId::new(0, 1);
    /// The same of the decoder.
    pub const DECODER_BIAS: ParamId = ParamId::new(0, 2);

    /// The embedding of `spec`, unit 0.
    pub fn new(spec: &ModelSpec) -> Embedding {
        let mut parameters = Parameters::new(spec, 0, 0);
        let mut table = |name: &str, rows: usize| parameters.table(name, rows);
        let tokens = table("tokens.weight", spec.vocab_size);
        let positions = spec.learned_positions().map(|rows| table("positions.weight", rows));
        debug_assert_eq!(tokens, Embedding::TOKENS);
        if let Some(encoder) = &spec.encoder {
            let std = spec.init_std / (spec.dim as f64).sqrt();
            for name in ["encoder_bias.weight", "decoder_bias.weight"] {
                parameters.add(name, &[spec.heads, encoder.buckets], normal(std), ParameterKind::Bias);
            }
        }
        let scale = match spec.family.form().embedding {
            EmbeddingScale::One => None,
            EmbeddingScale::SqrtDim => Some((spec.dim as f64).sqrt() as f32),
        };
        let dropout = spec.dropout as f32;
        Embedding { parameters: parameters.finish(), tokens, positions, scale, dropout, split: None }
    }

    /// The part of one rank of a tensor-parallel group. Each rank looks up the tokens that it has,
    /// the sum over ranks has all, and what follows works on the residual stream.
    pub fn split(mut self, division: &Division) -> Result<Embedding> {
        let dim = self.parameters[0].shape[1];
        division.cut("embedding", &mut self.parameters)?;
        let (place, residual) = (division.split(), division.split().residual());
        let value = Value::new;
        let segments = Segments {
            values: vec![value("e", Layout::Partial), value("e'", residual), value("x", residual)],
            input: None,
            segments: vec![
                Segment { name: "lookup", takes: vec![], gives: vec![0], differentiable: true },
                Segment { name: "positions", takes: vec![1], gives: vec![2], differentiable: true },
            ],
            exchanges: vec![Exchange { from: 0, to: 1 }],
        };
        self.split = Some(SplitEmbedding { place, tokens: Some(division.vocabulary()), dim, segments });
        Ok(self)
    }

    /// The same on the rows of one rank of a context-parallel group.
    pub fn on_rows(mut self) -> Embedding {
        let dim = self.parameters[0].shape[1];
        let whole =
            || SplitEmbedding { place: TensorSplit::WHOLE, tokens: None, dim, segments: Segments::whole(false) };
        let split = self.split.take().unwrap_or_else(whole);
        self.split = Some(SplitEmbedding { segments: split.segments.clone().on_rows(), ..split });
        self
    }

    /// Dropout of this rank's rows `here` of the batch.
    fn drop(&self, tape: &mut Tape<'_>, cx: &Forward<'_>, x: &Var, dim: usize, here: &Range<usize>) -> Result<Var> {
        let rows = cx.batch.rows_of(here).into_iter();
        let parts: Vec<Range<usize>> = rows.map(|rows| rows.start * dim..rows.end * dim).collect();
        Ok(tape.dropout_of(x, self.dropout, cx.training, &parts)?)
    }

    /// Looked-up tokens times the family's factor.
    fn scaled(&self, tape: &mut Tape<'_>, x: Var) -> Result<Var> {
        Ok(match self.scale {
            Some(scale) => tape.scale(&x, scale)?,
            None => x,
        })
    }
}

impl Unit for Embedding {
    fn name(&self) -> &str {
        "embedding"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
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
        let split = self.split.as_ref().ok_or_else(|| without_segments("embedding"))?;
        let rows = split.place.rows(cx.batch.len())?;
        let Some(tokens) = split.tokens else {
            let positions = self.positions.map(|table| (&cx.batch.positions, table));
            let x = tape.embedding(&cx.batch.tokens, self.tokens, positions)?;
            let x = self.scaled(tape, x)?;
            return Ok(vec![self.drop(tape, cx, &x, split.dim, &rows)?]);
        };
        match (segment, takes) {
            (0, []) => Ok(vec![tape.embedding_part(&cx.batch.tokens, self.tokens, tokens)?]),
            (1, [e]) => {
                let mut x = self.scaled(tape, e.clone())?;
                if let Some(table) = self.positions {
                    let positions = tape.embedding(&cx.batch.positions.narrow(rows.clone())?, table, None)?;
                    x = tape.add(&x, &positions)?;
                }
                Ok(vec![self.drop(tape, cx, &x, split.dim, &rows)?])
            }
            _ => Err(no_segment("embedding", segment, takes.len())),
        }
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, _input: Option<&Var>) -> Result<Var> {
        if self.split.is_some() {
            return Err(in_segments("embedding"));
        }
        let positions = self.positions.map(|table| (&cx.batch.positions, table));
        let x = tape.embedding(&cx.batch.tokens, self.tokens, positions)?;
        let x = self.scaled(tape, x)?;
        Ok(tape.dropout(&x, self.dropout, cx.training)?)
    }
}
