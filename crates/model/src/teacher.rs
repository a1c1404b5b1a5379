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
use std::sync::{Arc, OnceLock};
use trainyard_autograd::{ParamId, Parameters, Policy, RandomKey, Store, Tape, Var};
use trainyard_tensor::ops::{Distillation, TeacherLogits};
use trainyard_tensor::{DType, Device, Purpose};

/// A model that others learn from, and its weights once they are there.
pub struct Teacher {
    model: Model,
    dtype: DType,
    distillation: Distillation,
    weights: OnceLock<Box<dyn Parameters + Send + Sync>>,
}

impl Teacher {
    /// A teacher that computes in `dtype`. Its weights come with [`Teacher::set_weights`].
    ///
    /// # Errors
    /// A model whose last unit is no head, or which is split over ranks.
    pub fn new(model: Model, dtype: DType, distillation: Distillation) -> Result<Teacher> {
        vocabulary_of(&model)?;
        Ok(Teacher { model, dtype, distillation, weights: OnceLock::new() })
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

    /// The factors of the logits of all tokens of `batch`: the final hidden states [m, d], and the
    /// matrix of the vocabulary [v, d].
    ///
    /// # Errors
    /// A teacher without weights, unless `device` is meta.
    fn teach(&self, device: &Device, batch: &Batch) -> Result<TeacherLogits> {
        match self.weights.get() {
            Some(weights) => self.teach_by(device, weights.as_ref(), batch),
            None if device.is_meta() => self.teach_by(device, &self.zeros(device)?, batch),
            None => Err(failure("its weights were not loaded")),
        }
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
        Ok(tape.distillation_loss(&h, self.vocabulary, taught, cx.targets()?, scale)?)
    }
}
