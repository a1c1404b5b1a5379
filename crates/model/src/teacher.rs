//! Distillation: a student whose last unit learns from a teacher's distribution of the next token
//! beside the targets (Hinton et al. 2015).
//!
//! The teacher is a whole model on the device of the student's last unit. It reads the micro-batch
//! that the student reads, so it works with packed documents, and in any layout that leaves the
//! student's head whole. Its weights are no parameters of the student: they are not sharded, not
//! trained, and not in checkpoints.

use crate::model::Model;
use crate::parameter::ParameterSpec;
use crate::unit::{Forward, Output, Unit};
use crate::{Batch, ModelError, Result};
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use trainyard_autograd::{ParamId, Parameters, Policy, RandomKey, Store, Tape, Var};
use trainyard_tensor::ops::{Distillation, TeacherLogits};
use trainyard_tensor::{DType, Device, Purpose};

/// A model that others learn from, and its weights once they are there.
pub struct Teacher {
    model: Model,
    dtype: DType,
    distillation: Distillation,
    /// The weight of the distance of final hidden states in the loss; 0 for none.
    hidden: f32,
    weights: OnceLock<Box<dyn Parameters + Send + Sync>>,
    kept: OnceLock<Box<dyn KeptStates>>,
}

/// A sequence: its tokens, and their positions in their document.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Token ids.
    pub tokens: &'a [i32],
    /// The position of each.
    pub positions: &'a [i32],
}

/// Final hidden states of a teacher, kept by the sequence that they are for. They depend on nothing
/// else, and its logits follow from them.
pub trait KeptStates: Send + Sync {
    /// Fills `states` with those of `sequence`. Returns false if they are not kept.
    ///
    /// # Errors
    /// Storage that cannot be read.
    fn read(&self, sequence: Sequence<'_>, states: &mut [u8]) -> io::Result<bool>;

    /// Keeps the states of `sequence`.
    ///
    /// # Errors
    /// Storage that cannot be written.
    fn keep(&self, sequence: Sequence<'_>, states: &[u8]) -> io::Result<()>;
}

impl Teacher {
    /// A teacher that computes in `dtype`. Its weights come with [`Teacher::set_weights`].
    ///
    /// # Errors
    /// A model whose last unit is no head, or which is split over ranks.
    pub fn new(model: Model, dtype: DType, distillation: Distillation) -> Result<Teacher> {
        vocabulary_of(&model)?;
        Ok(Teacher { model, dtype, distillation, hidden: 0.0, weights: OnceLock::new(), kept: OnceLock::new() })
    }

    /// The same, whose students also learn its final hidden states: the loss has `weight` times the
    /// mean squared difference (Sanh et al. 2019 compare directions instead).
    pub fn with_hidden(self, weight: f32) -> Teacher {
        Teacher { hidden: weight, ..self }
    }

    /// Refuses a student whose hidden states have another width, if they are compared.
    pub(crate) fn check_width(&self, student: Option<usize>) -> Result<()> {
        let own = self.model.spec().map(|spec| spec.dim);
        match self.hidden > 0.0 && own != student {
            true => Err(failure(&format!(
                "its hidden states have {} columns and the student's {}: compare hidden states of one width, as those of a \
                 student with fewer blocks",
                own.unwrap_or_default(),
                student.unwrap_or_default()
            ))),
            false => Ok(()),
        }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The dtype of its forward.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Gives it its weights, which lie on the device that it computes on.
    ///
    /// # Panics
    /// If it has some.
    pub fn set_weights(&self, weights: Box<dyn Parameters + Send + Sync>) {
        assert!(self.weights.set(weights).is_ok(), "the teacher has weights already");
    }

    /// Lets it read final hidden states from `kept`, and keep there what it computes.
    ///
    /// # Panics
    /// If it does so already.
    pub fn keep_states(&self, kept: Box<dyn KeptStates>) {
        assert!(self.kept.set(kept).is_ok(), "the teacher keeps its states already");
    }

    /// The factors of the logits of all tokens of `batch`: the final hidden states [m, d], and the
    /// matrix of the vocabulary [v, d].
    ///
    /// # Errors
    /// A teacher without weights, unless `device` is meta.
    fn teach(&self, device: &Device, batch: &Batch) -> Result<TeacherLogits> {
        match self.weights.get() {
            Some(weights) => match self.kept.get() {
                Some(kept) => self.teach_from(kept.as_ref(), device, weights.as_ref(), batch),
                None => self.teach_by(device, weights.as_ref(), batch),
            },
            None if device.is_meta() => self.teach_by(device, &self.zeros(device)?, batch),
            None => Err(failure("its weights were not loaded")),
        }
    }

    /// As [`Teacher::teach_by`], without a forward if the states of all sequences are kept.
    fn teach_from(
        &self,
        kept: &dyn KeptStates,
        device: &Device,
        weights: &dyn Parameters,
        batch: &Batch,
    ) -> Result<TeacherLogits> {
        let w = weights.parameter(vocabulary_of(&self.model)?)?.value;
        let width = w.shape()[1];
        let (tokens, positions) = (batch.tokens.to_vec::<i32>()?, batch.positions.to_vec::<i32>()?);
        let bounds: Vec<usize> = batch.segments.bounds().iter().map(|bound| *bound as usize).collect();
        let sequences = || {
            let of = |range: Range<usize>| Sequence { tokens: &tokens[range.clone()], positions: &positions[range] };
            let ranges = bounds.windows(2).filter(|pair| pair[0] < pair[1]).map(|pair| pair[0]..pair[1]);
            ranges.map(move |range| (of(range.clone()), range))
        };
        let bytes_of = |range: Range<usize>| {
            let row = width * self.dtype.size();
            range.start * row..range.end * row
        };
        let failed = |error: io::Error| failure(&format!("its kept states: {error}"));
        {
            let mut x = device.empty([tokens.len(), width], self.dtype, Purpose::Activations)?;
            let all_kept = x.overwrite_bytes(|states| -> io::Result<bool> {
                for (sequence, range) in sequences() {
                    if !kept.read(sequence, &mut states[bytes_of(range)])? {
                        // What is not filled would be read otherwise.
                        states.fill(0);
                        return Ok(false);
                    }
                }
                Ok(true)
            })?;
            if all_kept.map_err(failed)? {
                return Ok(TeacherLogits { x, w, distillation: self.distillation });
            }
        }
        let taught = self.teach_by(device, weights, batch)?;
        let keep =
            |states: &[u8]| sequences().try_for_each(|(sequence, range)| kept.keep(sequence, &states[bytes_of(range)]));
        taught.x.with_bytes(keep)?.map_err(failed)?;
        Ok(taught)
    }

    fn teach_by(&self, device: &Device, weights: &dyn Parameters, batch: &Batch) -> Result<TeacherLogits> {
        let mut tape = Tape::new(device, weights, Policy::Nothing, RandomKey::default());
        let x = self.model.forward(&mut tape, &mut Forward::evaluation(batch, Output::Hidden))?.into_tensor();
        let w = weights.parameter(vocabulary_of(&self.model)?)?.value;
        Ok(TeacherLogits { x, w, distillation: self.distillation })
    }

    /// Weights that are all zero, in the dtype of its forward.
    ///
    /// # Errors
    /// No memory for them.
    pub fn zeros(&self, device: &Device) -> Result<Store> {
        let mut store = Store::new();
        for (id, parameter) in self.model.parameters() {
            store.insert(id, device.zeros(&parameter.shape, self.dtype, Purpose::Params)?);
        }
        self.model.adapters().iter().for_each(|(id, adapter)| store.adapt(*id, adapter.clone()));
        Ok(store)
    }
}

impl std::fmt::Debug for Teacher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Teacher({:?}, {:?})", self.model, self.distillation)
    }
}

fn failure(problem: &str) -> ModelError {
    ModelError::Teacher(problem.into())
}

/// The matrix of the vocabulary of a model's last unit.
fn vocabulary_of(model: &Model) -> Result<ParamId> {
    let head = model.units().last().filter(|unit| unit.segments().is_none()).and_then(|unit| unit.vocabulary());
    head.ok_or_else(|| failure("its last unit is no whole head, so it has no logits to learn from"))
}

/// A last unit whose loss in training has a teacher's part.
pub(crate) struct TaughtUnit {
    inner: Box<dyn Unit>,
    vocabulary: ParamId,
    teacher: Arc<Teacher>,
}

impl TaughtUnit {
    /// `inner` with `teacher` beside it.
    ///
    /// # Errors
    /// A unit that is no whole head.
    pub(crate) fn new(inner: Box<dyn Unit>, teacher: Arc<Teacher>) -> Result<TaughtUnit> {
        let whole = inner.vocabulary().filter(|_| inner.segments().is_none());
        let Some(vocabulary) = whole else {
            return Err(failure("the student's last unit is no whole head, so it has no logits to compare"));
        };
        Ok(TaughtUnit { inner, vocabulary, teacher })
    }
}

impl Unit for TaughtUnit {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.inner.parameters()
    }

    fn borrowed(&self) -> &[ParamId] {
        self.inner.borrowed()
    }

    fn vocabulary(&self) -> Option<ParamId> {
        Some(self.vocabulary)
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        let (Output::Loss { scale }, true) = (cx.output, cx.training) else {
            return self.inner.forward(tape, cx, input);
        };
        let taught = self.teacher.teach(tape.device(), cx.batch)?;
        let mut of_hidden = Forward {
            batch: cx.batch,
            training: true,
            output: Output::Hidden,
            cache: None,
            routing: cx.routing.as_deref_mut(),
            hits: None,
            experts: cx.experts.clone(),
        };
        let h = self.inner.forward(tape, &mut of_hidden, input)?;
        let targets = cx.targets()?;
        let weight = self.teacher.hidden;
        if weight == 0.0 {
            return Ok(tape.distillation_loss(&h, self.vocabulary, taught, targets, scale)?);
        }
        let distance = tape.hidden_distance(&h, taught.x.clone(), targets, weight * scale)?;
        let loss = tape.distillation_loss(&h, self.vocabulary, taught, targets, scale)?;
        Ok(tape.add(&loss, &distance)?)
    }
}
