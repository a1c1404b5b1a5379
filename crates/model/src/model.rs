//! A model: its units in order.

use crate::batch::{Batch, BatchShape, BatchSlices};
use crate::cache::KvCache;
use crate::families::{Positions, Share};
use crate::init::initialise;
use crate::parameter::{ParameterKind, ParameterSpec, UnitLayout};
use crate::rope::RopeTables;
use crate::spec::{EncoderSpec, ImageSpec, ModelSpec, RopeSpec};
use crate::split::{ContextSplit, Division, ExpertSplit, TensorSplit};
use crate::teacher::{TaughtUnit, Teacher};
use crate::tuning::{Adapters, Tuning, tuned};
use crate::unit::{Forward, Unit};
use crate::units::{ClassHead, Embedding, Head, PatchEmbedding};
use crate::{ModelError, Result};
use std::collections::BTreeSet;
use std::sync::Arc;
use trainyard_autograd::{ParamId, Store, Tape, Var};
use trainyard_tensor::{DType, Device, Purpose};

/// A chain of units. It holds no parameter values: those belong to the engine, or to a
/// [`Store`](trainyard_autograd::Store).
pub struct Model {
    spec: Option<ModelSpec>,
    /// The shares of the ranks of a tensor-parallel group; None if units are whole.
    division: Option<Division>,
    context: ContextSplit,
    experts: ExpertSplit,
    units: Vec<Box<dyn Unit>>,
    vocab_size: usize,
    positions_max: Option<usize>,
    tuning: Tuning,
    adapters: Adapters,
    teacher: Option<Arc<Teacher>>,
}

impl Model {
    /// The model that `spec` describes: an embedding, `layers` blocks, a head.
    pub fn new(spec: ModelSpec) -> Result<Model> {
        Model::split(spec, TensorSplit::WHOLE)
    }

    /// The units of one rank of a tensor-parallel group, which runs them in segments
    /// ([`Unit::segments`]). A group of one rank has whole units.
    ///
    /// # Errors
    /// A description that no model can follow; a degree that leaves ranks without work.
    pub fn split(spec: ModelSpec, split: TensorSplit) -> Result<Model> {
        Model::split_over(spec, split, ContextSplit::WHOLE, ExpertSplit::WHOLE)
    }

    /// The units of one rank of a tensor-parallel, of a context-parallel and of an expert-parallel
    /// group. A group of one rank divides nothing.
    ///
    /// # Errors
    /// As [`Model::split`], and experts that cannot be divided among so many ranks.
    pub fn split_over(
        spec: ModelSpec,
        split: TensorSplit,
        context: ContextSplit,
        experts: ExpertSplit,
    ) -> Result<Model> {
        spec.validate()?;
        experts.check(&spec)?;
        if spec.value_residual && split.ranks * context.ranks > 1 {
            return Err(ModelError::Split(
                "value residuals are not divided over tensor or context ranks: use data, pipeline or expert \
                 parallelism, or leave out model.value_residual"
                    .into(),
            ));
        }
        let division = (split.ranks != 1).then(|| Division::new(&spec, split)).transpose()?;
        let tables = |rope: &RopeSpec| Arc::new(RopeTables::new(rope, spec.head_dim));
        let [rope, local] = [&spec.rope, &spec.local_rope].map(|rope| rope.as_ref().map(tables));
        let (embedding, head) = ends(&spec, division.as_ref(), context)?;
        let share = Share { division: division.as_ref(), context, experts };
        let mut units: Vec<Box<dyn Unit>> = vec![embedding];
        for layer in 0..spec.layers {
            let local = local.as_ref().filter(|_| spec.window(layer).is_some());
            units.push(spec.family.block(&spec, layer, local.or(rope.as_ref()).cloned(), share)?);
        }
        units.push(head);
        // Buckets of distances have no end.
        let has_end = spec.family.form().positions != Positions::Buckets;
        let (vocab_size, positions_max) = (spec.vocab_size, has_end.then_some(spec.max_positions));
        let (tuning, adapters) = Default::default();
        let (spec, teacher) = (Some(spec), None);
        Ok(Model { spec, division, context, experts, units, vocab_size, positions_max, tuning, adapters, teacher })
    }

    /// A model of the caller's own units. `vocab_size` bounds tokens and targets.
    pub fn from_units(units: Vec<Box<dyn Unit>>, vocab_size: usize) -> Result<Model> {
        let (tuning, adapters) = Default::default();
        let (spec, division, positions_max, teacher) = (None, None, None, None);
        let (context, experts) = (ContextSplit::WHOLE, ExpertSplit::WHOLE);
        let model =
            Model { spec, division, context, experts, units, vocab_size, positions_max, tuning, adapters, teacher };
        model.check_units()?;
        Ok(model)
    }

    pub(crate) fn with_tuning(mut self, tuning: &Tuning) -> Result<Model> {
        let ranks = self.tensor_split().ranks;
        (self.units, self.adapters) = tuned(std::mem::take(&mut self.units), ranks, tuning)?;
        self.tuning = tuning.clone();
        Ok(self)
    }

    /// The same model as a student: in training, the loss of its last unit has a part that comes
    /// from the teacher. Evaluation is as before.
    ///
    /// # Errors
    /// Another vocabulary; a last unit that is split over ranks or makes no logits.
    pub fn taught(mut self, teacher: Arc<Teacher>) -> Result<Model> {
        let (own, other) = (self.vocab_size, teacher.model().vocab_size);
        if own != other {
            return Err(ModelError::Teacher(format!(
                "it has a vocabulary of {other} and the student one of {own}: what is compared is distributions over one \
                 vocabulary"
            )));
        }
        teacher.check_width(self.spec.as_ref().map(|spec| spec.dim))?;
        let last = self.units.pop().ok_or_else(|| ModelError::Teacher("the student has no units".into()))?;
        self.units.push(Box::new(TaughtUnit::new(last, Arc::clone(&teacher))?));
        self.teacher = Some(teacher);
        Ok(self)
    }

    /// Its teacher; None if it learns from targets alone.
    pub fn teacher(&self) -> Option<&Arc<Teacher>> {
        self.teacher.as_ref()
    }

    /// The trained part of it.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Its adapters, by weight.
    pub fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    /// True if some parameter is never trained.
    pub fn has_frozen(&self) -> bool {
        self.parameters().any(|(_, parameter)| !parameter.trained)
    }

    /// The first unit of which something is trained.
    pub fn lowest_trained(&self) -> usize {
        let is_trained = |unit: &dyn Unit| unit.parameters().iter().any(|parameter| parameter.trained);
        self.units.iter().position(|unit| is_trained(unit.as_ref())).unwrap_or(0)
    }

    /// FLOPs of training on one token of a sequence of `length` tokens, by the convention of
    /// [`FlopsPerToken`](crate::costs::FlopsPerToken), less the gradients that nothing frozen has.
    /// None for a model of the caller's own units.
    pub fn flops_per_token(&self, length: usize) -> Option<f64> {
        let spec = self.spec.as_ref()?;
        let lowest = self.lowest_trained();
        let borrowed = |id: ParamId| self.units.iter().any(|unit| unit.borrowed().contains(&id));
        let mut flops = spec.flops_per_token(length).convention;
        for (id, parameter) in self.parameters() {
            let elements = parameter.whole_shape().iter().product::<usize>() as f64;
            let multiplied = parameter.kind == ParameterKind::Matrix || borrowed(id);
            flops += match (parameter.is_adapter(), multiplied, parameter.trained) {
                (true, _, true) => 6.0 * elements,
                (true, _, false) => 4.0 * elements,
                (false, true, false) => -2.0 * elements,
                _ => 0.0,
            };
            if multiplied && (id.unit as usize) < lowest && !borrowed(id) {
                flops -= 2.0 * elements;
            }
        }
        // A teacher runs forward alone: 2 of 6 parts.
        let teacher = self.teacher.as_ref().and_then(|teacher| teacher.model().spec());
        flops += teacher.map_or(0.0, |spec| spec.flops_per_token(length).convention / 3.0);
        // Blocks below the lowest have no backward: 8 of the 12 parts of attention.
        let width = (spec.heads * spec.head_dim) as f64;
        Some(flops - 8.0 * (lowest.saturating_sub(1).min(spec.layers) * length) as f64 * width)
    }

    fn check_units(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        for unit in &self.units {
            let fail = |problem: String| Err(ModelError::Unit { unit: unit.name().into(), problem });
            if !names.insert(unit.name()) {
                return fail("another unit has this name".into());
            }
            let mut parameters = BTreeSet::new();
            if let Some(twice) = unit.parameters().iter().find(|p| !parameters.insert(&p.name)) {
                return fail(format!("two parameters are called `{}`", twice.name));
            }
            if let Some(id) = unit.borrowed().iter().find(|id| self.find(**id).is_none()) {
                return fail(format!("borrows parameter {id}, which no unit has"));
            }
        }
        if self.units.is_empty() {
            return Err(ModelError::Unit { unit: "none".into(), problem: "a model needs at least one".into() });
        }
        Ok(())
    }

    /// The description that it was built from; None for a model of the caller's own units.
    pub fn spec(&self) -> Option<&ModelSpec> {
        self.spec.as_ref()
    }

    /// The place of the rank whose units these are in its tensor-parallel group.
    pub fn tensor_split(&self) -> TensorSplit {
        self.division.as_ref().map_or(TensorSplit::WHOLE, Division::split)
    }

    /// The place of the rank whose units these are in its context-parallel group.
    pub fn context_split(&self) -> ContextSplit {
        self.context
    }

    /// The place of the rank whose units these are in its expert-parallel group.
    pub fn expert_split(&self) -> ExpertSplit {
        self.experts
    }

    /// An empty cache of `capacity` tokens for this rank's keys and values.
    ///
    /// # Errors
    /// Models of the caller's own units, whose heads are not known; no memory.
    pub fn cache(&self, device: &Device, capacity: usize, dtype: DType) -> Result<KvCache> {
        let Some(spec) = &self.spec else {
            return Err(ModelError::Cache("the heads of a model of own units are not known here".into()));
        };
        let kv_heads = self.division.as_ref().map_or(spec.kv_heads, |division| division.heads().kv_heads);
        KvCache::of_width(device, spec.decoder_layers(), kv_heads * spec.head_dim, capacity, dtype)
    }

    /// Its units, in order.
    pub fn units(&self) -> &[Box<dyn Unit>] {
        &self.units
    }

    /// The vocabulary that tokens and targets are from.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Every parameter with its slot, in order.
    pub fn parameters(&self) -> impl Iterator<Item = (ParamId, &ParameterSpec)> {
        self.units.iter().enumerate().flat_map(|(unit, u)| {
            u.parameters().iter().enumerate().map(move |(index, p)| (ParamId::new(unit as u32, index as u32), p))
        })
    }

    /// The parameter in slot `id`.
    pub fn find(&self, id: ParamId) -> Option<&ParameterSpec> {
        self.units.get(id.unit as usize)?.parameters().get(id.index as usize)
    }

    /// The name of slot `id` in the whole model, e.g. `block.3.attn.qkv.weight`.
    pub fn parameter_name(&self, id: ParamId) -> Option<String> {
        let parameter = self.find(id)?;
        Some(format!("{}.{}", self.units[id.unit as usize].name(), parameter.name))
    }

    /// Elements of all parameters of the whole model, of which a split model has a part. Tied ones
    /// count once.
    pub fn parameter_count(&self) -> usize {
        self.parameters().map(|(_, parameter)| parameter.whole_shape().iter().product::<usize>()).sum()
    }

    /// The layout of the parameters of `unit` in its flat buffer.
    pub fn layout(&self, unit: usize, shards: usize) -> UnitLayout {
        UnitLayout::new(self.units[unit].parameters(), shards)
    }

    /// Checks a batch against this model's vocabulary and positions and copies it to the device:
    /// all
    /// of it, or the part of this rank of a context-parallel group.
    pub fn batch(&self, device: &Device, slices: &BatchSlices<'_>) -> Result<Batch> {
        if self.is_paired() {
            return Batch::of_pairs(device, slices, self.vocab_size, self.positions_max);
        }
        Batch::of_part(device, slices, self.vocab_size, self.positions_max, self.context)
    }

    /// True if sequences come in pairs, an encoder's and its decoder's.
    pub fn is_paired(&self) -> bool {
        self.spec.as_ref().is_some_and(|spec| spec.encoder.is_some())
    }

    /// The shape of a batch of `rows` sequences, or images, of `length` positions; of pairs of
    /// sequences, in the usual parts.
    pub fn batch_shape(&self, rows: usize, length: usize) -> BatchShape {
        if self.is_paired() {
            let encoder = EncoderSpec::usual_positions(length);
            return BatchShape::pairs(rows, encoder, length - encoder);
        }
        let patch_len = self.spec.as_ref().and_then(|spec| spec.image.as_ref()).map(ImageSpec::patch_len);
        BatchShape { patch_len, ..BatchShape::uniform(rows, length) }
    }

    /// A batch of sequences of equal `length`, one after another in `tokens` and `targets`.
    pub fn rows(&self, device: &Device, length: usize, tokens: &[i32], targets: Option<&[i32]>) -> Result<Batch> {
        if length == 0 || !tokens.len().is_multiple_of(length) {
            return Err(ModelError::Batch(format!("{} tokens are no rows of {length}", tokens.len())));
        }
        let positions: Vec<i32> = (0..tokens.len()).map(|i| (i % length) as i32).collect();
        let cu_seqlens: Vec<i32> = (0..=tokens.len() / length).map(|row| (row * length) as i32).collect();
        self.batch(device, &BatchSlices::of_text(tokens, targets, &positions, &cu_seqlens))
    }

    /// Initial values in f32, for small programs; the engine has its own buffers.
    pub fn initial_store(&self, device: &Device, seed: u64) -> Result<Store> {
        let mut store = Store::new();
        for (id, parameter) in self.parameters() {
            let mut value = device.empty(&parameter.shape, DType::F32, Purpose::Params)?;
            if let Some(cpu) = device.host() {
                value.overwrite(|value: &mut [f32]| initialise(cpu, seed, id, parameter, 0, value))?;
            }
            store.insert(id, value);
            if !parameter.trained {
                store.freeze(id);
            }
        }
        self.adapters.iter().for_each(|(id, adapter)| store.adapt(*id, adapter.clone()));
        Ok(store)
    }

    /// Runs every unit on one tape: evaluation, generation and small programs. (The engine runs
    /// units one at a time.)
    pub fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>) -> Result<Var> {
        self.begin_forward(tape, cx)?;
        let mut x: Option<Var> = None;
        for unit in &self.units {
            x = Some(unit.forward(tape, cx, x.as_ref())?);
        }
        self.end_forward(cx);
        x.ok_or_else(|| ModelError::Unit { unit: "none".into(), problem: "a model needs at least one".into() })
    }

    /// Checks that the units can run on `tape` and `cx`, for callers that run them one by one.
    pub fn begin_forward(&self, tape: &Tape<'_>, cx: &Forward<'_>) -> Result<()> {
        cx.cache.as_deref().map_or(Ok(()), |cache| self.check_cached(tape, cx, cache.len()))
    }

    /// Notes that all units have run on `cx`.
    pub fn end_forward(&self, cx: &mut Forward<'_>) {
        let own = self.cached_rows(cx);
        if let Some(cache) = cx.cache.as_deref_mut() {
            cache.advance(own);
        }
    }

    /// The rows of the batch whose keys and values are cached: all, or those of the decoder.
    fn cached_rows(&self, cx: &Forward<'_>) -> usize {
        cx.batch.len() - cx.batch.sides.as_ref().map_or(0, |sides| sides.encoder_rows)
    }

    fn check_cached(&self, tape: &Tape<'_>, cx: &Forward<'_>, len: usize) -> Result<()> {
        if tape.records() {
            return Err(ModelError::Cache("no gradient flows through it: use a tape that records nothing".into()));
        }
        let own = self.cached_rows(cx);
        if cx.batch.segments.bounds().len() != if cx.batch.len() > own { 3 } else { 2 } {
            return Err(ModelError::Cache("it holds one sequence, and this batch has several".into()));
        }
        if own == cx.batch.len() && cx.batch.positions_end != len + own {
            return Err(ModelError::Cache(format!(
                "it holds {len} tokens, so {own} more end at position {}, not {}",
                len + own,
                cx.batch.positions_end
            )));
        }
        Ok(())
    }
}

/// The first and the last unit of one rank.
fn ends(
    spec: &ModelSpec,
    division: Option<&Division>,
    context: ContextSplit,
) -> Result<(Box<dyn Unit>, Box<dyn Unit>)> {
    let last = spec.layers as u32 + 1;
    if let Some(image) = &spec.image {
        if division.is_some() || context.ranks > 1 {
            return Err(ModelError::Split(format!(
                "family {} is not divided over tensor or context ranks: use data or pipeline parallelism",
                spec.family
            )));
        }
        return Ok((Box::new(PatchEmbedding::new(spec, image)), Box::new(ClassHead::new(spec, last))));
    }
    let (mut embedding, mut head) = (Embedding::new(spec), Head::new(spec, last));
    if let Some(division) = division {
        embedding = embedding.split(division)?;
        head = head.split(division)?;
    }
    if context.ranks > 1 {
        embedding = embedding.on_rows();
        head = head.on_rows();
    }
    Ok((Box::new(embedding), Box::new(head)))
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({} units, {} parameters)", self.units.len(), self.parameter_count())
    }
}
