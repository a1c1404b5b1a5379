//! Fine-tuning: which parameters are trained, and adapters on linear layers.
//!
//! An adapter (LoRA, Hu et al. 2021) leaves a weight as it is and trains two narrow matrices whose
//! product is added to it. With magnitudes (DoRA, Liu et al. 2024) the norm of each row of the sum
//! is trained too. Their parameters belong to the weight's unit, after its own. The tape adds their
//! product wherever the weight is multiplied by, so no family's code knows of them.
//!
//! Names in files are those of PEFT.

use crate::parameter::{Init, ParameterKind, ParameterSpec, Piece, Source, Split};
use crate::periods::schedule;
use crate::unit::{Exchange, Forward, Segment, Segments, Unit, Value};
use crate::{Model, ModelError, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use trainyard_autograd::{Adapter, AdapterOutputs, ParamId, Tape, Var};
use trainyard_program::Layout;

/// The prefix of every name in PEFT's files.
const PEFT_PREFIX: &str = "base_model.model.";

/// The adapters of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterSpec {
    /// Width between the two matrices of a pair.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// True if the scale is alpha / sqrt(rank) (Kalajdzievski 2023) rather than alpha / rank.
    #[serde(default)]
    pub rank_stabilised: bool,
    /// True if the norms of the rows of a weight are trained apart from their directions (DoRA).
    #[serde(default)]
    pub magnitudes: bool,
    /// The linear layers that have adapters, by the last part of their name in files: `q_proj`.
    /// Empty: all in blocks.
    #[serde(default)]
    pub targets: Vec<String>,
}

impl AdapterSpec {
    /// The factor of what an adapter adds.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilised { rank.sqrt() } else { rank }
    }

    fn has(&self, hf_name: &str) -> bool {
        self.targets.is_empty() || self.targets.iter().any(|target| target == layer_of(hf_name))
    }
}

/// The last part of a layer's name: `q_proj` of `model.layers.0.self_attn.q_proj.weight`.
fn layer_of(hf_name: &str) -> &str {
    let layer = hf_name.strip_suffix(".weight").unwrap_or(hf_name);
    layer.rsplit('.').next().unwrap_or(layer)
}

/// The trained part of a model. The default trains everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// Adapters. With them, all other parameters are frozen.
    pub adapter: Option<AdapterSpec>,
    /// Patterns of parameters that are frozen: names as `block.3.attn.qkv.weight`, where `*` stands
    /// for any characters.
    pub freeze: Vec<String>,
    /// Patterns of parameters that are trained although adapters or `freeze` freeze them.
    pub train: Vec<String>,
    /// Factor of the learning rate of each unit over that of the next one; the head has the whole
    /// rate (Howard & Ruder 2018, discriminative fine-tuning). None: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_rate_decay: Option<f64>,
    /// Per period of training, patterns of what is frozen in it beside: parameters of adapters too.
    /// Empty: there is one period, and nothing is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub freeze_schedule: Vec<Vec<String>>,
}

impl Tuning {
    /// True if the model is trained as it is.
    pub fn is_nothing(&self) -> bool {
        *self == Tuning::default()
    }

    /// True if everything is trained in every step and nothing is added, at whatever rates.
    pub fn trains_all(&self) -> bool {
        self.adapter.is_none() && self.freeze.is_empty() && self.freeze_schedule.is_empty()
    }

    /// True if the parameter `name`, which is not an adapter's, is trained.
    pub fn trains(&self, name: &str) -> bool {
        let is_in = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        is_in(&self.train) || self.adapter.is_none() && !is_in(&self.freeze)
    }
}

/// True if `name` is what `pattern` says; `*` stands for any characters.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, rest)) => name.strip_prefix(before).is_some_and(|name| {
            (0..=name.len()).filter(|at| name.is_char_boundary(*at)).any(|at| matches(rest, &name[at..]))
        }),
    }
}

/// A unit of whose parameters some are frozen, or that has adapters.
struct TunedUnit {
    inner: Box<dyn Unit>,
    parameters: Vec<ParameterSpec>,
    /// None if no adapter with magnitudes has a weight of which ranks have parts of rows.
    parted: Option<PartedRows>,
}

impl TunedUnit {
    /// Its parameters with their full names.
    fn named(&mut self) -> impl Iterator<Item = (String, &mut ParameterSpec)> {
        let unit = self.inner.name().to_owned();
        self.parameters.iter_mut().map(move |parameter| (format!("{unit}.{}", parameter.name), parameter))
    }
}

impl Unit for TunedUnit {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn borrowed(&self) -> &[ParamId] {
        self.inner.borrowed()
    }

    fn vocabulary(&self) -> Option<ParamId> {
        self.inner.vocabulary()
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        self.inner.forward(tape, cx, input)
    }

    fn segments(&self) -> Option<&Segments> {
        self.parted.as_ref().map(|parted| &parted.segments).or_else(|| self.inner.segments())
    }

    fn forward_segment(
        &self,
        segment: usize,
        tape: &mut Tape<'_>,
        cx: &mut Forward<'_>,
        takes: &[Var],
    ) -> Result<Vec<Var>> {
        let Some(parted) = &self.parted else { return self.inner.forward_segment(segment, tape, cx, takes) };
        if segment == ROWS {
            let squares = |(weight, adapter, _): &(ParamId, Adapter, usize)| Ok(tape.row_squares(*weight, adapter)?);
            return parted.weights.iter().map(squares).collect();
        }
        let inner = segment - usize::from(segment > ROWS);
        let own: Vec<&(ParamId, Adapter, usize)> = parted.weights.iter().filter(|(.., at)| *at == inner).collect();
        let (takes, squares) = takes.split_at(takes.len().saturating_sub(own.len()));
        for ((weight, ..), squares) in own.into_iter().zip(squares) {
            tape.set_row_squares(*weight, squares.tensor().clone());
        }
        self.inner.forward_segment(inner, tape, cx, takes)
    }
}

/// The segment that squares rows: it follows the first, which keeps the unit's input.
const ROWS: usize = 1;

/// The weights of a split unit that have magnitudes, and of whose rows each rank has a part. A
/// segment takes the squares of the rank's parts, an exchange sums them over ranks, and the
/// segments that multiply by the weights take the sums (Liu et al. 2024, equation 5).
struct PartedRows {
    segments: Segments,
    /// Each weight with its adapter and the segment of the inner unit that multiplies by it.
    weights: Vec<(ParamId, Adapter, usize)>,
}

impl PartedRows {
    /// The segments of a unit whose own are `inner`; None if there are no `weights`, which come
    /// with their names.
    ///
    /// # Errors
    /// A unit without the segments that multiply by the weights.
    fn new(inner: Option<&Segments>, weights: Vec<(ParamId, Adapter, String)>) -> Result<Option<PartedRows>> {
        if weights.is_empty() {
            return Ok(None);
        }
        let of = |inner: &Segments, (weight, adapter, name): (ParamId, Adapter, String)| {
            let summand = summand_of(&name);
            let made = inner.values.iter().position(|value| value.name == summand)?;
            let multiplies = inner.segments.iter().position(|segment| segment.gives.contains(&made))?;
            Some((weight, adapter, multiplies))
        };
        let names: Vec<&str> = weights.iter().map(|(.., name)| summand_of(name)).collect();
        let of_all = |inner: &Segments| weights.iter().cloned().map(|weight| of(inner, weight)).collect::<Option<_>>();
        let unknown = || {
            let problem = "magnitudes (DoRA) of rows that tensor parallelism cuts need a block whose parts are summed";
            ModelError::Tuning(format!("{problem}: use adapters without them, or parallel.tensor_parallel_degree = 1"))
        };
        let inner = inner.ok_or_else(unknown)?;
        let weights: Vec<(ParamId, Adapter, usize)> = of_all(inner).ok_or_else(unknown)?;
        let mut segments = inner.clone();
        let first = segments.values.len() - 1;
        let moved = |value: &mut usize| *value += if *value == first { 2 * weights.len() } else { 0 };
        segments.segments.iter_mut().flat_map(|one| one.takes.iter_mut().chain(&mut one.gives)).for_each(moved);
        segments.exchanges.iter_mut().flat_map(|one| [&mut one.from, &mut one.to]).for_each(moved);
        let output = segments.values.pop().ok_or_else(unknown)?;
        // Ranks that divide the sequence have the same weights.
        let context = match output.context {
            Layout::Invariant => Layout::Invariant,
            _ => Layout::Replicated,
        };
        let mut exchanges = Vec::new();
        for (number, (.., multiplies)) in weights.iter().enumerate() {
            let [from, to] = [0, 1].map(|after| first + 2 * number + after);
            let [parts, sums] = if names[number] == "a" { ["a_rows", "a_rows'"] } else { ["b_rows", "b_rows'"] };
            segments.values.push(Value { context, ..Value::new(parts, Layout::Partial) });
            segments.values.push(Value { context, ..Value::new(sums, Layout::Replicated) });
            segments.segments[*multiplies].takes.push(to);
            exchanges.push(Exchange { from, to });
        }
        segments.values.push(output);
        let gives = exchanges.iter().map(|exchange| exchange.from).collect();
        let rows = Segment { name: "rows", takes: Vec::new(), gives, differentiable: false };
        segments.segments.insert(ROWS, rows);
        let before = segments.exchanges.iter().filter(|one| segments.segments[0].gives.contains(&one.from)).count();
        segments.exchanges.splice(before..before, exchanges);
        Ok(Some(PartedRows { segments, weights }))
    }
}

/// The value of a block's segments to which the product with a weight leads: attention ends with
/// the summand `a` of the residual stream, and the MLP with `b`.
fn summand_of(weight: &str) -> &'static str {
    if weight.starts_with("attn.") { "a" } else { "b" }
}

/// True if the rank has parts of the rows of a weight, because ranks divide its columns.
pub fn has_parts_of_rows(weight: &ParameterSpec) -> bool {
    weight.shape.len() == 2 && weight.split.as_ref().is_some_and(|split| split.dim == 1)
}

/// The adapters of a model by the weight that they add to.
pub type Adapters = BTreeMap<ParamId, Adapter>;

/// The units of a model after `tuning`, and its adapters.
///
/// # Errors
/// A rank of 0; targets and patterns that nothing has; nothing left to train.
pub(crate) fn tuned(
    units: Vec<Box<dyn Unit>>,
    tensor_ranks: usize,
    tuning: &Tuning,
) -> Result<(Vec<Box<dyn Unit>>, Adapters)> {
    let last = units.len() - 1;
    let names: Vec<String> = units
        .iter()
        .flat_map(|unit| unit.parameters().iter().map(|parameter| format!("{}.{}", unit.name(), parameter.name)))
        .collect();
    for (key, patterns) in [("freeze", &tuning.freeze), ("train", &tuning.train)] {
        if let Some(pattern) = patterns.iter().find(|pattern| !names.iter().any(|name| matches(pattern, name))) {
            return Err(ModelError::Tuning(format!(
                "no parameter is called `{pattern}` (fine_tuning.{key}): names are like {}",
                some_of(names.iter().map(String::as_str))
            )));
        }
    }
    let mut targets = Vec::new();
    let mut adapters = Adapters::new();
    let mut all = Vec::with_capacity(units.len());
    for (number, inner) in units.into_iter().enumerate() {
        let mut parameters = inner.parameters().to_vec();
        let mut parted = Vec::new();
        for parameter in &mut parameters {
            parameter.trained = tuning.trains(&format!("{}.{}", inner.name(), parameter.name));
            parameter.rate *= tuning.layer_rate_decay.map_or(1.0, |decay| decay.powi((last - number) as i32));
        }
        if let Some(spec) = &tuning.adapter {
            // The embedding is looked up, and the head is fused with the loss.
            for index in (0..inner.parameters().len()).filter(|_| number > 0 && number < last) {
                let weight = parameters[index].clone();
                let linear = weight.kind == ParameterKind::Matrix && weight.shape.len() == 2;
                if !linear || is_of_routed_experts(&weight) {
                    continue;
                }
                targets.extend(weight.sources.iter().map(|source| layer_of(&source.hf_name).to_owned()));
                let next = parameters.len() as u32;
                let [a, b, m] = [next, next + 1, next + 2].map(|index| ParamId::new(number as u32, index));
                if let Some((mut adapter, pair)) = pair(spec, &weight, tensor_ranks, [a, b]) {
                    let [_, up] = &pair;
                    let magnitude = spec.magnitudes.then(|| magnitude(&weight, up));
                    adapter.magnitude = magnitude.as_ref().map(|_| m);
                    parameters.extend(pair.into_iter().chain(magnitude));
                    let id = ParamId::new(number as u32, index as u32);
                    if spec.magnitudes && has_parts_of_rows(&weight) {
                        parted.push((id, adapter.clone(), weight.name.clone()));
                    }
                    adapters.insert(id, adapter);
                }
            }
        }
        let parted = PartedRows::new(inner.segments(), parted)?;
        all.push(TunedUnit { inner, parameters, parted });
    }
    schedule(tuning, all.iter_mut().flat_map(TunedUnit::named).collect())?;
    if let Some(spec) = &tuning.adapter {
        if spec.rank == 0 {
            return Err(ModelError::Tuning("an adapter of rank 0 adds nothing: give a rank of 1 or more".into()));
        }
        if let Some(target) = spec.targets.iter().find(|target| !targets.contains(target)) {
            targets.sort();
            targets.dedup();
            return Err(ModelError::Tuning(format!(
                "no linear layer of a block is called `{target}` (fine_tuning.targets): this model has {}",
                targets.join(", ")
            )));
        }
    }
    if !all.iter().any(|unit| unit.parameters.iter().any(|parameter| parameter.trained)) {
        return Err(ModelError::Tuning("every parameter is frozen, so there is nothing to train".into()));
    }
    Ok((all.into_iter().map(|unit| Box::new(unit) as Box<dyn Unit>).collect(), adapters))
}

/// True for the weights of a router and of the experts that it chooses from. Their products are not
/// those of linear layers and take no adapters.
fn is_of_routed_experts(weight: &ParameterSpec) -> bool {
    ["mlp.router.", "mlp.experts."].iter().any(|prefix| weight.name.starts_with(prefix))
}

/// True for weights that may lie encoded in memory while they are not used: frozen matrices but
/// those of routers, whose choices small errors change.
fn is_encodable(weight: &ParameterSpec) -> bool {
    !weight.trained && weight.kind == ParameterKind::Matrix && !weight.name.starts_with("mlp.router.")
}

/// The indices of the parameters of `unit` that may lie encoded: none of the embedding and of the
/// head.
pub fn encodable(model: &Model, unit: usize) -> Vec<usize> {
    if unit == 0 || unit + 1 == model.units().len() {
        return Vec::new();
    }
    let parameters = model.units()[unit].parameters().iter().enumerate();
    parameters.filter(|(_, spec)| is_encodable(spec)).map(|(index, _)| index).collect()
}

/// Up to three of `names`.
fn some_of<'n>(names: impl Iterator<Item = &'n str>) -> String {
    names.step_by(5).take(3).collect::<Vec<_>>().join(", ")
}

/// The adapter of `weight` with its two parameters in the slots `ids`; None if none of the weight's
/// matrices is a target.
///
/// Over a tensor-parallel group, the pair is divided as its weight is. What is whole on every rank
/// has gradients that the group sums: each rank computes the summands of its outputs or inputs.
fn pair(
    spec: &AdapterSpec,
    weight: &ParameterSpec,
    tensor_ranks: usize,
    [a, b]: [ParamId; 2],
) -> Option<(Adapter, [ParameterSpec; 2])> {
    let sources: Vec<&Source> = weight.sources.iter().filter(|source| spec.has(&source.hf_name)).collect();
    if sources.is_empty() {
        return None;
    }
    let (rank, members, columns) = (spec.rank, sources.len(), weight.shape[1]);
    let peft = |source: &Source, side: &str| {
        let layer = source.hf_name.strip_suffix(".weight").unwrap_or(&source.hf_name);
        format!("{PEFT_PREFIX}{layer}.lora_{side}.weight")
    };
    let std = 1.0 / (3.0 * weight.whole_shape()[1] as f32).sqrt();
    let base = |what: &str, shape: [usize; 2], init| {
        let name = format!("{}.{what}", weight.name.strip_suffix(".weight").unwrap_or(&weight.name));
        ParameterSpec::new(&name, &shape, init, ParameterKind::Matrix, String::new())
    };
    let names = |side: &str| sources.iter().map(|source| peft(source, side)).collect::<Vec<_>>();

    // PEFT draws uniformly from +-1/sqrt(k); a normal distribution of the same variance serves.
    let mut down = base("lora_a", [members * rank, columns], Init::Normal { std });
    down = down.fused(&names("A").into_iter().map(|name| (name, rank)).collect::<Vec<_>>());
    let whole_rows: usize = sources.iter().map(|source| source.rows.len()).sum();
    let rows: Vec<usize> = sources.iter().map(|source| source.rows.len()).collect();
    let mut up = base("lora_b", [whole_rows, rank], Init::Zeros);
    up = up.fused(&names("B").into_iter().zip(rows.iter().copied()).collect::<Vec<_>>());

    // The first row in `b`, whole, of each source.
    let firsts: Vec<usize> = rows
        .iter()
        .scan(0, |end, rows| {
            let first = *end;
            *end += rows;
            Some(first)
        })
        .collect();
    let all = [Piece { local: 0..weight.shape[0], whole: 0..weight.shape[0], holders: 1, owned: true }];
    let by_rows = weight.split.as_ref().filter(|split| split.dim == 0);
    let pieces = by_rows.map_or(&all[..], |split| &split.pieces);
    let (mut outputs, mut held) = (Vec::new(), Vec::new());
    let mut row = 0;
    for piece in pieces {
        let mut at = piece.whole.start;
        for (member, source) in sources.iter().enumerate() {
            let part = source.rows.start.max(at)..source.rows.end.min(piece.whole.end);
            if part.start >= part.end {
                continue;
            }
            let mut add = |count: usize, from| {
                if count > 0 {
                    outputs.push(AdapterOutputs { count, from });
                }
            };
            add(part.start - at, None);
            add(part.len(), Some((member, row)));
            let whole = firsts[member] + part.start - source.rows.start;
            let (local, whole) = (row..row + part.len(), whole..whole + part.len());
            held.push(Piece { local, whole, holders: piece.holders, owned: piece.owned });
            row += part.len();
            at = part.end;
        }
        if at < piece.whole.end {
            outputs.push(AdapterOutputs { count: piece.whole.end - at, from: None });
        }
    }
    if let Some(split) = by_rows {
        let moved = |shared: &Range<usize>| {
            let of_source = |(source, first): (&&Source, &usize)| {
                let part = shared.start.max(source.rows.start)..shared.end.min(source.rows.end);
                (part.start < part.end)
                    .then(|| first + part.start - source.rows.start..first + part.end - source.rows.start)
            };
            sources.iter().zip(&firsts).filter_map(of_source).collect::<Vec<_>>()
        };
        up.shape[0] = row;
        up.layout = weight.layout;
        let shared = split.shared.iter().flat_map(moved).collect();
        up.split = Some(Split { whole: vec![whole_rows, rank], dim: 0, outer: 0, pieces: held, shared });
        down.layout = Layout::Replicated;
    } else if let Some(split) = &weight.split {
        down.layout = weight.layout;
        down.split = Some(Split { whole: vec![members * rank, split.whole[1]], ..split.clone() });
        up.layout = Layout::Replicated;
    } else if tensor_ranks > 1 {
        // The weight is whole on every rank, and so is the gradient of what it gives.
        (down.layout, up.layout) = (weight.layout, weight.layout);
    }
    let outputs = merged(outputs).into();
    Some((Adapter { a, b, magnitude: None, rank, members, outputs, scale: spec.scale() as f32 }, [down, up]))
}

/// The magnitudes of `weight`, one for each row of the up projections `up`.
fn magnitude(weight: &ParameterSpec, up: &ParameterSpec) -> ParameterSpec {
    let name = format!("{}.lora_magnitude", weight.name.strip_suffix(".weight").unwrap_or(&weight.name));
    let rows = up.whole_shape()[0];
    let spec = ParameterSpec::new(&name, &[rows], Init::Ones, ParameterKind::Norm, String::new());
    let of_source = |source: &Source| {
        let layer = source.hf_name.strip_suffix("lora_B.weight").unwrap_or(&source.hf_name);
        (format!("{layer}lora_magnitude_vector"), source.rows.len())
    };
    let mut spec = spec.fused(&up.sources.iter().map(of_source).collect::<Vec<_>>());
    // Each rank scales its summands of the outputs, and the gradients of what is whole are summed.
    spec.shape[0] = up.shape[0];
    spec.layout = up.layout;
    spec.split = up.split.clone().map(|split| Split { whole: vec![rows], ..split });
    spec
}

/// Neighbours that continue each other as one.
fn merged(outputs: Vec<AdapterOutputs>) -> Vec<AdapterOutputs> {
    let mut all: Vec<AdapterOutputs> = Vec::new();
    for next in outputs {
        let continues = |last: &AdapterOutputs| match (last.from, next.from) {
            (Some((of, row)), Some((member, first))) => of == member && row + last.count == first,
            (None, None) => true,
            _ => false,
        };
        match all.last_mut().filter(|last| continues(last)) {
            Some(last) => last.count += next.count,
            None => all.push(next),
        }
    }
    all
}

impl ParameterSpec {
    /// True if this is a part of an adapter.
    pub fn is_adapter(&self) -> bool {
        [".lora_a", ".lora_b", ".lora_magnitude"].iter().any(|end| self.name.ends_with(end))
    }
}

impl Model {
    /// The same model with adapters, and with what `tuning` freezes frozen.
    ///
    /// # Errors
    /// A rank of 0; targets and patterns that nothing has; nothing left to train.
    pub fn tuned(self, tuning: &Tuning) -> Result<Model> {
        if tuning.is_nothing() {
            return Ok(self);
        }
        self.with_tuning(tuning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelSpec, TensorSplit, preset};

    fn tuning(targets: &[&str]) -> Tuning {
        let targets = targets.iter().map(|target| (*target).to_owned()).collect();
        let adapter = AdapterSpec { rank: 4, alpha: 8.0, rank_stabilised: false, magnitudes: false, targets };
        Tuning { adapter: Some(adapter), ..Tuning::default() }
    }

    fn small() -> ModelSpec {
        ModelSpec { layers: 1, dim: 32, heads: 4, kv_heads: 2, head_dim: 8, ffn_dim: 48, ..preset("llama-1b").unwrap() }
    }

    #[test]
    fn patterns_match_names() {
        for (pattern, name, is) in [
            ("*", "anything", true),
            ("block.*", "block.3.norm1.weight", true),
            ("block.*.norm1.weight", "block.3.norm1.weight", true),
            ("block.*.norm1.weight", "block.3.norm2.weight", false),
            ("*.weight", "head.norm.weight", true),
            ("head", "head.norm.weight", false),
            ("**a*", "ba", true),
        ] {
            assert_eq!(matches(pattern, name), is, "{pattern} {name}");
        }
    }

    #[test]
    fn a_fused_weight_has_a_pair_for_each_target() {
        let model = Model::new(small()).unwrap().tuned(&tuning(&["q_proj", "v_proj"])).unwrap();
        let specs = model.units()[1].parameters();
        let named = |name: &str| specs.iter().find(|spec| spec.name == name).unwrap();
        assert_eq!(
            (&named("attn.qkv.lora_a").shape[..], &named("attn.qkv.lora_b").shape[..]),
            (&[8, 32][..], &[48, 4][..])
        );
        let sources = |name: &str| named(name).sources.iter().map(|s| s.hf_name.clone()).collect::<Vec<_>>();
        assert_eq!(
            sources("attn.qkv.lora_b"),
            ["q", "v"].map(|m| format!("base_model.model.model.layers.0.self_attn.{m}_proj.lora_B.weight"))
        );
        let trained: Vec<&str> = specs.iter().filter(|spec| spec.trained).map(|spec| spec.name.as_str()).collect();
        assert_eq!(trained, ["attn.qkv.lora_a", "attn.qkv.lora_b"]);
        let [(_, adapter)] = &model.adapters().iter().collect::<Vec<_>>()[..] else { panic!("one adapter") };
        assert_eq!(
            adapter.outputs.iter().map(|o| (o.count, o.from)).collect::<Vec<_>>(),
            [(32, Some((0, 0))), (16, None), (16, Some((1, 32)))]
        );
        assert_eq!(adapter.scale, 2.0);
    }

    #[test]
    fn rates_fall_from_the_head_to_the_embedding() {
        let tuning = Tuning { layer_rate_decay: Some(0.5), ..Tuning::default() };
        let model = Model::new(ModelSpec { layers: 2, ..small() }).unwrap().tuned(&tuning).unwrap();
        let rates = model.units().iter().map(|unit| unit.parameters().iter().map(|spec| spec.rate).collect::<Vec<_>>());
        for (rates, want) in rates.zip([0.125, 0.25, 0.5, 1.0]) {
            assert!(!rates.is_empty() && rates.iter().all(|rate| *rate == want), "{rates:?} {want}");
        }
        assert!(tuning.trains_all() && !tuning.is_nothing());
    }

    /// A rank's parts of `b` and of `a` are the rows and columns of its part of the weight.
    #[test]
    fn parts_of_adapters_are_those_of_their_weights() {
        for rank in 0..2 {
            let split = TensorSplit { rank, ranks: 2, sequence: false };
            let model = Model::split(small(), split).unwrap().tuned(&tuning(&[])).unwrap();
            let specs = model.units()[1].parameters();
            for (weight, adapter) in model.adapters() {
                let [weight, a, b] = [*weight, adapter.a, adapter.b].map(|id| &specs[id.index as usize]);
                let count: usize = adapter.outputs.iter().map(|outputs| outputs.count).sum();
                assert_eq!((count, b.shape[0], a.shape[1]), (weight.shape[0], weight.shape[0], weight.shape[1]));
                assert_eq!(b.whole_shape()[0], weight.whole_shape()[0]);
                assert_eq!(a.whole_shape()[1], weight.whole_shape()[1]);
                let whole = [a, b].map(|spec| spec.split.is_none());
                assert!(whole[0] != whole[1], "{}", weight.name);
                for spec in [a, b] {
                    let summed = spec.shared_runs().1;
                    assert_eq!(summed, if spec.split.is_none() { spec.elements() } else { 0 }, "{}", spec.name);
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_tuned_is_refused() {
        let refused = |tuning: &Tuning| Model::new(small()).unwrap().tuned(tuning).unwrap_err().to_string();
        assert!(refused(&tuning(&["q_porj"])).contains("this model has down_proj, gate_proj"));
        assert!(refused(&Tuning { freeze: vec!["*".into()], ..Tuning::default() }).contains("nothing to train"));
        assert!(refused(&Tuning { freeze: vec!["blok.*".into()], ..Tuning::default() }).contains("`blok.*`"));
        let none = AdapterSpec { rank: 0, ..tuning(&[]).adapter.unwrap() };
        assert!(refused(&Tuning { adapter: Some(none), ..Tuning::default() }).contains("rank 0"));
    }
}
