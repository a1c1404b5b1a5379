//! Units split over the ranks of a tensor-parallel group compute what whole units compute: an
//! interpreter runs all ranks, segment by segment, and does the exchanges as the layouts of values
//! say.

mod common;

use common::{KEY, cpu, relative_error, tokens};
use std::collections::BTreeMap;
use std::ops::Range;
use trainyard_autograd::{Deferred, ParamId, Parameters, Place, Policy, RandomKey, Recording, Store, Tape, Var};
use trainyard_model::families::{self, Sizes};
use trainyard_model::{
    Activation, BatchSlices, Exchange, Family, Forward, IGNORED, KvCache, Model, ModelError, ModelSpec, Output,
    Segment, Segments, TensorSplit, Unit, Value,
};
use trainyard_program::{Change, Collective, Layout};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// The models of a group's ranks with their parameters.
struct Group {
    models: Vec<Model>,
    stores: Vec<Store>,
}

/// Values as functions of the element's place in the whole parameter.
fn group(spec: &ModelSpec, ranks: usize, sequence: bool, device: &Device) -> Group {
    let split = |rank| TensorSplit { rank, ranks, sequence };
    let models: Vec<Model> = (0..ranks).map(|rank| Model::split(spec.clone(), split(rank)).unwrap()).collect();
    let store = |model: &Model| {
        let mut store = model.initial_store(device, 1).unwrap();
        for (id, parameter) in model.parameters() {
            let mut value = store.parameter(id).unwrap().value;
            let values = value.data_mut::<f32>().unwrap();
            for (run, whole) in parameter.whole_runs(0..parameter.elements()) {
                let start = run.start;
                run.for_each(|i| values[i] += 0.01 * (((i - start + whole) % 7) as f32 - 3.0));
            }
            store.insert(id, value);
        }
        store
    };
    let stores = models.iter().map(store).collect();
    Group { models, stores }
}

/// A whole unit as one segment.
fn segments_of(unit: &dyn Unit, first: bool) -> Segments {
    unit.segments().cloned().unwrap_or_else(|| {
        let value = |name| Value::new(name, Layout::Invariant);
        let (takes, gives) = if first { (vec![], vec![0]) } else { (vec![0], vec![1]) };
        Segments {
            values: if first { vec![value("y")] } else { vec![value("x"), value("y")] },
            input: (!first).then_some(0),
            segments: vec![Segment { name: "all", takes, gives, differentiable: true }],
            exchanges: vec![],
        }
    })
}

/// The steps of a unit in the order of forward.
#[derive(Clone, Copy)]
enum Step {
    Exchange(Exchange),
    Segment(usize),
}

fn steps(segments: &Segments) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut waiting = segments.exchanges.clone();
    for (index, segment) in segments.segments.iter().enumerate() {
        // Before the first segment that takes the result.
        let (now, later) = waiting.into_iter().partition(|exchange| segment.takes.contains(&exchange.to));
        waiting = later;
        steps.extend(Vec::<Exchange>::into_iter(now).map(Step::Exchange));
        steps.push(Step::Segment(index));
    }
    assert!(waiting.is_empty(), "nobody takes the results of {waiting:?}");
    steps
}

/// One value, or its gradient, on every rank.
type Ranks = Vec<Option<Tensor>>;

/// Does the work of a change of layout on the tensors of all ranks.
fn exchange(device: &Device, change: Change, tensors: &Ranks) -> Ranks {
    let given: Vec<&Tensor> = tensors.iter().flatten().collect();
    if given.is_empty() {
        return tensors.clone();
    }
    assert_eq!(given.len(), tensors.len(), "a value that some ranks do not have");
    let ranks = given.len();
    let (rows, columns) = (given[0].rows(), given[0].last_dim());
    let put = |rows: usize, data: &[f32]| device.tensor([rows, columns], data, Purpose::Activations).unwrap();
    let data: Vec<Vec<f32>> = given.iter().map(|tensor| tensor.to_f32_vec().unwrap()).collect();
    let sum = || (0..data[0].len()).map(|i| data.iter().map(|rank| rank[i]).sum()).collect::<Vec<f32>>();
    let part = |whole: &[f32], rank: usize| {
        let part = rows / ranks * columns;
        put(rows / ranks, &whole[rank * part..(rank + 1) * part])
    };
    let result = |rank: usize| match change {
        Change::Nothing => given[rank].clone(),
        Change::By(Collective::AllReduce) => put(rows, &sum()),
        Change::By(Collective::ReduceScatter) => part(&sum(), rank),
        Change::By(Collective::AllGather) => put(rows * ranks, &data.concat()),
        Change::TakePart => part(&data[rank], rank),
        Change::By(Collective::AllToAll) => {
            let of = rows / ranks * columns;
            let parts: Vec<&[f32]> = data.iter().map(|from| &from[rank * of..(rank + 1) * of]).collect();
            put(rows, &parts.concat())
        }
        Change::By(other) => panic!("{other:?} changes no layout"),
    };
    (0..ranks).map(|rank| Some(result(rank))).collect()
}

/// Asserts that the ranks hold what `layout` says, as far as that can be seen.
fn check_layout(what: &str, layout: Layout, tensors: &Ranks) {
    let bits = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.to_f32_vec().unwrap());
    if matches!(layout, Layout::Invariant | Layout::Replicated) {
        let first = bits(&tensors[0]);
        assert!(tensors.iter().all(|tensor| bits(tensor) == first), "{what} is {}, but ranks differ", layout.name());
    }
}

/// A segment that ran on one rank.
struct Ran {
    takes: Vec<Place>,
    gives: Vec<Place>,
    recording: Recording,
}

/// The course of a run.
#[derive(Clone, Copy)]
struct Course {
    policy: Policy,
    /// True if the loss takes its gradients in forward.
    eager: bool,
    /// True if backward comes in two halves.
    halves: bool,
    training: bool,
}

const TRAINING: Course = Course { policy: Policy::Everything, eager: true, halves: false, training: true };

/// The results of all ranks.
struct Outcome {
    losses: Vec<f32>,
    /// The output of the first unit, whole.
    embedded: Vec<f32>,
    /// By parameter and rank.
    gradients: BTreeMap<ParamId, Vec<Vec<f32>>>,
}

impl Group {
    /// The output of each unit of all ranks, and the recordings of its segments.
    fn forward(
        &mut self,
        device: &Device,
        batches: &[trainyard_model::Batch],
        output: Output,
        course: Course,
        mut caches: Option<&mut Vec<KvCache>>,
    ) -> (Vec<Ranks>, Vec<Vec<Vec<Ran>>>) {
        let ranks = self.models.len();
        let (mut outputs, mut ran): (Vec<Ranks>, Vec<Vec<Vec<Ran>>>) = (Vec::new(), Vec::new());
        for unit in 0..self.models[0].units().len() {
            let segments = segments_of(self.models[0].units()[unit].as_ref(), unit == 0);
            let mut values: Vec<Ranks> = vec![vec![None; ranks]; segments.values.len()];
            if let (Some(input), Some(output)) = (segments.input, outputs.last()) {
                values[input] = output.clone();
            }
            let mut sites = vec![0; ranks];
            let mut of_unit = Vec::new();
            for step in steps(&segments) {
                let segment = match step {
                    Step::Exchange(Exchange { from, to }) => {
                        let (before, after) = (segments.values[from].layout, segments.values[to].layout);
                        let change = Change::between(before, after).expect("a change that a collective makes");
                        values[to] = exchange(device, change, &values[from]);
                        check_layout(segments.values[to].name, after, &values[to]);
                        continue;
                    }
                    Step::Segment(segment) => segment,
                };
                let described = &segments.segments[segment];
                let mut of_segment = Vec::new();
                for rank in 0..ranks {
                    let (parameters, mut sink) = self.stores[rank].split();
                    let key = RandomKey { site: unit as u32, ..KEY };
                    let mut tape = Tape::new(device, &parameters, course.policy, key).with_sites(sites[rank]);
                    if course.eager {
                        tape = tape.with_gradients(&mut sink);
                    }
                    let leaf = |value: &usize| tape.leaf(values[*value][rank].clone().expect("a value that was given"));
                    let takes: Vec<Var> = described.takes.iter().map(leaf).collect();
                    let cache = caches.as_deref_mut().map(|caches| &mut caches[rank]);
                    let mut cx =
                        Forward { training: course.training, cache, ..Forward::evaluation(&batches[rank], output) };
                    let unit = &self.models[rank].units()[unit];
                    let gives = match unit.segments() {
                        Some(_) => unit.forward_segment(segment, &mut tape, &mut cx, &takes).unwrap(),
                        None => vec![unit.forward(&mut tape, &mut cx, takes.first()).unwrap()],
                    };
                    assert_eq!(gives.len(), described.gives.len(), "values of segment {}", described.name);
                    for (value, var) in described.gives.iter().zip(&gives) {
                        values[*value][rank] = Some(var.tensor().clone());
                    }
                    sites[rank] = tape.sites();
                    let places = |vars: &[Var]| vars.iter().map(Place::from).collect();
                    of_segment.push(Ran { takes: places(&takes), gives: places(&gives), recording: tape.finish() });
                }
                // Logits are columns of this rank.
                let loss = matches!(output, Output::Loss { .. });
                for value in described.gives.iter().filter(|value| loss || segments.values[**value].name != "loss") {
                    check_layout(segments.values[*value].name, segments.values[*value].layout, &values[*value]);
                }
                of_unit.push(of_segment);
            }
            outputs.push(values.pop().expect("a unit has an output"));
            ran.push(of_unit);
        }
        (outputs, ran)
    }

    /// Backward of all units from a gradient of 1 for the loss; fills the gradients of parameters.
    fn backward(&mut self, device: &Device, course: Course, ran: Vec<Vec<Vec<Ran>>>) {
        let ranks = self.models.len();
        let one = || Some(device.tensor([], &[1.0f32], Purpose::Activations).unwrap());
        let mut gradient: Ranks = (0..ranks).map(|_| one()).collect();
        let mut deferred: Vec<(usize, Deferred)> = Vec::new();
        for (unit, mut of_unit) in ran.into_iter().enumerate().rev() {
            let segments = segments_of(self.models[0].units()[unit].as_ref(), unit == 0);
            let mut gradients: Vec<Ranks> = vec![vec![None; ranks]; segments.values.len()];
            *gradients.last_mut().expect("an output") = gradient;
            for step in steps(&segments).into_iter().rev() {
                let segment = match step {
                    Step::Exchange(Exchange { from, to }) => {
                        let (before, after) = (segments.values[from].layout, segments.values[to].layout);
                        let change = Change::backward(before, after).expect("a change that a collective makes");
                        let arriving = std::mem::replace(&mut gradients[to], vec![None; ranks]);
                        gradients[from] = exchange(device, change, &arriving);
                        check_layout(segments.values[from].name, before.of_gradient(), &gradients[from]);
                        continue;
                    }
                    Step::Segment(segment) => &segments.segments[segment],
                };
                let of_segment = of_unit.pop().expect("a recording for each segment");
                if !segment.differentiable {
                    continue;
                }
                for (rank, Ran { takes, gives, recording }) in of_segment.into_iter().enumerate() {
                    let outputs: Vec<(Place, Tensor)> = segment
                        .gives
                        .iter()
                        .zip(&gives)
                        .filter_map(|(value, place)| Some((*place, gradients[*value][rank].take()?)))
                        .collect();
                    let (parameters, mut sink) = self.stores[rank].split();
                    let got = if course.halves {
                        let (got, rest) = recording.backward_input(&outputs, &takes, &parameters).unwrap();
                        deferred.push((rank, rest));
                        got
                    } else {
                        recording.backward_at(&outputs, &takes, &parameters, &mut sink).unwrap()
                    };
                    for (value, got) in segment.takes.iter().zip(got) {
                        assert!(gradients[*value][rank].is_none(), "two gradients of {}", segments.values[*value].name);
                        gradients[*value][rank] = got;
                    }
                }
                for value in &segment.takes {
                    let Value { name, layout, .. } = segments.values[*value];
                    check_layout(&format!("the gradient of {name}"), layout.of_gradient(), &gradients[*value]);
                }
            }
            gradient = segments.input.map_or(vec![None; ranks], |input| gradients.swap_remove(input));
        }
        for (rank, rest) in deferred {
            let (parameters, mut sink) = self.stores[rank].split();
            rest.backward_parameters(&parameters, &mut sink).unwrap();
        }
    }

    fn train(&mut self, device: &Device, slices: &BatchSlices<'_>, course: Course) -> Outcome {
        let batches: Vec<_> = self.models.iter().map(|model| model.batch(device, slices).unwrap()).collect();
        let output = Output::Loss { scale: 1.0 / batches[0].counted as f32 };
        let (outputs, ran) = self.forward(device, &batches, output, course, None);
        let losses = outputs[outputs.len() - 1].iter().flatten().map(|loss| loss.to_scalar().unwrap()).collect();
        let embedded = {
            let mut rows = outputs[0].iter().flatten().map(|x| x.to_f32_vec().unwrap());
            if self.models[0].tensor_split().sequence { rows.flatten().collect() } else { rows.next_back().unwrap() }
        };
        self.backward(device, course, ran);
        let mut gradients = BTreeMap::new();
        for (id, _) in self.models[0].parameters() {
            let of = |store: &Store| match store.gradient(id) {
                Some(gradient) => gradient.to_f32_vec().unwrap(),
                None => panic!("no gradient of {}", self.models[0].parameter_name(id).unwrap()),
            };
            gradients.insert(id, self.stores.iter().map(of).collect());
        }
        Outcome { losses, embedded, gradients }
    }

    /// The gradient of the whole parameter, from those of the ranks.
    fn whole_gradient(&self, id: ParamId, of_ranks: &[Vec<f32>]) -> Vec<f32> {
        let parameter = self.models[0].find(id).unwrap();
        let mut whole = vec![0.0; parameter.whole_shape().iter().product()];
        for (rank, gradient) in of_ranks.iter().enumerate() {
            let parameter = self.models[rank].find(id).unwrap();
            if parameter.layout == Layout::Invariant && rank > 0 {
                assert!(*gradient == of_ranks[0], "the gradient of {} differs over ranks", parameter.name);
                continue;
            }
            for (run, first) in parameter.whole_runs(0..gradient.len()) {
                let (length, local) = (run.len(), &gradient[run]);
                whole[first..first + length].iter_mut().zip(local).for_each(|(sum, part)| *sum += part);
            }
        }
        whole
    }
}

/// Documents of unequal length; some targets do not count.
struct Documents {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    positions: Vec<i32>,
    cu_seqlens: Vec<i32>,
}

impl Documents {
    fn new(lengths: &[usize], vocab: usize) -> Documents {
        let count = lengths.iter().sum();
        let mut ids = tokens(count + 1, vocab);
        ids[2] = vocab as i32 - 1;
        let target = |i: usize| if i % 5 == 3 { IGNORED } else { ids[i + 1] };
        let targets = (0..count).map(target).collect();
        let positions = lengths.iter().flat_map(|length| 0..*length as i32).collect();
        let mut cu_seqlens = vec![0];
        lengths.iter().for_each(|length| cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *length as i32));
        ids.pop();
        Documents { tokens: ids, targets, positions, cu_seqlens }
    }

    fn slices(&self) -> BatchSlices<'_> {
        BatchSlices::of_text(&self.tokens, Some(&self.targets), &self.positions, &self.cu_seqlens)
    }
}

fn llama(vocab: usize, tied: bool) -> ModelSpec {
    let llama = ModelSpec::llama(vocab, 24, 2, 6, 40, 64);
    ModelSpec { kv_heads: 2, head_dim: 8, qk_norm: true, tie_embeddings: tied, ..llama }
}

fn gpt2_with_norms() -> ModelSpec {
    ModelSpec { qk_norm: true, activation: Activation::ReluSquared, dropout: 0.0, ..gpt2() }
}

fn gpt2() -> ModelSpec {
    ModelSpec { dropout: 0.2, ..ModelSpec::gpt2(257, 24, 2, 6, 64) }
}

fn usual(family: Family) -> ModelSpec {
    let sizes = Sizes { vocab_size: 257, dim: 24, layers: 2, heads: 6, max_positions: 64 };
    ModelSpec { kv_heads: 2, head_dim: 8, ffn_dim: 40, ..family.usual(&sizes) }
}

/// A window in one of two layers, and dropout after the norm that ends a half.
fn gemma3() -> ModelSpec {
    let sliding_layers = Some(vec![0]);
    ModelSpec { sliding_window: Some(4), sliding_layers, dropout: 0.2, ..usual(families::GEMMA3) }
}

fn models() -> [(&'static str, ModelSpec); 7] {
    [
        ("gpt2 with query/key norms and squared ReLU", gpt2_with_norms()),
        ("llama, 257 tokens, untied", llama(257, false)),
        ("llama, 1000 tokens, tied", llama(1000, true)),
        ("llama with biases", ModelSpec { qkv_bias: true, o_bias: true, mlp_bias: true, ..llama(257, true) }),
        ("gpt2", gpt2()),
        ("gemma3", gemma3()),
        ("phi3", usual(families::PHI3)),
    ]
}

#[test]
fn losses_and_every_gradient_are_those_of_the_whole_model() {
    let device = cpu();
    for (name, spec) in models() {
        let documents = Documents::new(&[5, 1, 11, 7], spec.vocab_size);
        let mut whole = group(&spec, 1, false, &device);
        let expected = whole.train(&device, &documents.slices(), TRAINING);
        for (ranks, sequence) in [(2, false), (2, true), (3, false), (3, true), (4, false), (4, true)] {
            let what = format!("{name} over {ranks} ranks, sequence: {sequence}");
            let mut split = group(&spec, ranks, sequence, &device);
            let got = split.train(&device, &documents.slices(), TRAINING);
            // Sums of one row and zeros: the very bits, and with them the same dropout.
            assert!(got.embedded == expected.embedded, "{what}: the embedding");
            for loss in &got.losses {
                assert!(*loss == got.losses[0], "{what}: ranks have different losses");
                let error = (loss - expected.losses[0]).abs() / expected.losses[0].abs();
                assert!(error <= 1e-5, "{what}: the loss is {loss}, not {}", expected.losses[0]);
            }
            for (id, of_ranks) in &got.gradients {
                let gradient = split.whole_gradient(*id, of_ranks);
                let error = relative_error(&gradient, &expected.gradients[id][0]);
                let parameter = split.models[0].parameter_name(*id).unwrap();
                assert!(error <= 1e-5, "{what}: the gradient of {parameter} differs by {error:e}");
            }
        }
    }
}

#[test]
fn norms_of_whole_queries_are_not_split_over_ranks() {
    let split = TensorSplit { rank: 0, ranks: 2, sequence: false };
    let error = Model::split(usual(families::OLMO2), split).unwrap_err();
    assert!(matches!(&error, ModelError::Split(_)), "{error}");
    assert!(error.to_string().contains("`attn.q_norm.weight` needs all heads of a token"), "{error}");
}

#[test]
fn policies_halves_and_a_loss_that_is_differentiated_later_change_no_bit() {
    let device = cpu();
    for (name, spec) in models() {
        let documents = Documents::new(&[5, 1, 11, 7], spec.vocab_size);
        for sequence in [false, true] {
            let run = |course| {
                let outcome = group(&spec, 3, sequence, &device).train(&device, &documents.slices(), course);
                (outcome.losses, outcome.gradients)
            };
            let expected = run(TRAINING);
            for course in [
                Course { halves: true, ..TRAINING },
                Course { eager: false, ..TRAINING },
                Course { eager: false, halves: true, policy: Policy::Selective, ..TRAINING },
            ] {
                let Course { policy, eager, halves, .. } = course;
                assert!(run(course) == expected, "{name}, {sequence}: {policy:?}, eager {eager}, halves {halves}");
            }
        }
    }
    assert_eq!(device.pool().usage().live_total(), 0, "something leaked");
}

#[test]
fn one_rank_has_the_units_of_the_whole_model() {
    for (_, spec) in models() {
        let split = Model::split(spec.clone(), TensorSplit { rank: 0, ranks: 1, sequence: true }).unwrap();
        let whole = Model::new(spec).unwrap();
        assert!(split.units().iter().all(|unit| unit.segments().is_none()));
        assert!(split.parameters().eq(whole.parameters()));
    }
}

#[test]
fn every_element_of_a_parameter_is_owned_once_and_initialised_as_in_the_whole() {
    let device = cpu();
    for (name, spec) in models() {
        let whole = Model::new(spec.clone()).unwrap();
        let expected = whole.initial_store(&device, 7).unwrap();
        for ranks in [2, 3, 4, 6] {
            // Of each element: ranks that own it, ranks that hold it, and how many each says hold
            // it.
            let mut counts: BTreeMap<ParamId, Vec<[usize; 3]>> =
                whole.parameters().map(|(id, parameter)| (id, vec![[0; 3]; parameter.elements()])).collect();
            for rank in 0..ranks {
                let model = Model::split(spec.clone(), TensorSplit { rank, ranks, sequence: true }).unwrap();
                let store = model.initial_store(&device, 7).unwrap();
                for ((id, parameter), (_, of_whole)) in model.parameters().zip(whole.parameters()) {
                    assert_eq!(parameter.whole_shape(), of_whole.shape);
                    let held = |local: usize| match &parameter.split {
                        None => (rank == 0, ranks),
                        Some(split) => {
                            let inner: usize = split.whole[split.dim + 1..].iter().product();
                            let at = local / inner % parameter.shape[split.dim];
                            let piece = split.pieces.iter().find(|piece| piece.local.contains(&at)).unwrap();
                            (piece.owned, piece.holders)
                        }
                    };
                    let values = |store: &Store| store.parameter(id).unwrap().value.to_f32_vec().unwrap();
                    let (here, there) = (values(&store), values(&expected));
                    for (run, first) in parameter.whole_runs(0..here.len()) {
                        for (i, place) in run.zip(first..) {
                            assert!(here[i] == there[place], "{name}, {ranks} ranks: {} of {}", i, parameter.name);
                            let (owned, holders) = held(i);
                            let [owners, ranks, said] = &mut counts.get_mut(&id).unwrap()[place];
                            (*owners, *ranks, *said) = (*owners + usize::from(owned), *ranks + 1, *said + holders);
                        }
                    }
                }
            }
            for (id, counts) in counts {
                let right = counts.iter().all(|[owners, ranks, said]| *owners == 1 && *said == ranks * ranks);
                assert!(right, "{name} over {ranks} ranks: holders of {}", whole.parameter_name(id).unwrap());
            }
        }
    }
}

#[test]
fn logits_of_evaluation_and_of_generation_are_columns_of_the_whole() {
    let device = cpu();
    let evaluation = Course { policy: Policy::Nothing, eager: false, training: false, ..TRAINING };
    let by_columns = |last: &Ranks| -> Vec<f32> {
        let ranks: Vec<Vec<Vec<f32>>> = last
            .iter()
            .flatten()
            .map(|part| part.to_f32_vec().unwrap().chunks(part.last_dim()).map(<[f32]>::to_vec).collect())
            .collect();
        (0..ranks[0].len()).flat_map(|row| ranks.iter().flat_map(move |rank| rank[row].clone())).collect()
    };
    for (name, spec) in models() {
        let documents = Documents::new(&[5, 1, 11, 7], spec.vocab_size);
        let run = |ranks, sequence, output| {
            let mut group = group(&spec, ranks, sequence, &device);
            let batches: Vec<_> =
                group.models.iter().map(|model| model.batch(&device, &documents.slices()).unwrap()).collect();
            let (outputs, _) = group.forward(&device, &batches, output, evaluation, None);
            by_columns(&outputs[outputs.len() - 1])
        };
        // One sequence, through a cache, in pieces.
        let generate = |ranks| {
            let mut group = group(&spec, ranks, false, &device);
            let mut caches: Vec<KvCache> =
                group.models.iter().map(|model| model.cache(&device, 9, DType::F32).unwrap()).collect();
            let ids = tokens(9, spec.vocab_size);
            let mut rows = Vec::new();
            for piece in [0..5, 5..6, 6..9] {
                let Range { start, end } = piece.clone();
                let positions: Vec<i32> = (start as i32..end as i32).collect();
                let ends = [0, positions.len() as i32];
                let slices = BatchSlices::of_text(&ids[piece], None, &positions, &ends);
                let batches: Vec<_> = group.models.iter().map(|model| model.batch(&device, &slices).unwrap()).collect();
                let (outputs, _) = group.forward(&device, &batches, Output::LastLogits, evaluation, Some(&mut caches));
                caches.iter_mut().for_each(|cache| cache.advance(positions.len()));
                rows.extend(by_columns(&outputs[outputs.len() - 1]));
            }
            rows
        };
        let generated = generate(1);
        for output in [Output::Logits, Output::LastLogits, Output::Loss { scale: 0.5 }] {
            let expected = run(1, false, output);
            for (ranks, sequence) in [(2, true), (3, false), (4, true)] {
                let mut got = run(ranks, sequence, output);
                if let Output::Loss { .. } = output {
                    got.truncate(1);
                }
                let error = relative_error(&got, &expected);
                assert!(error <= 1e-5, "{name} over {ranks} ranks: {output:?} differs by {error:e}");
            }
        }
        for ranks in [2, 3, 4] {
            let error = relative_error(&generate(ranks), &generated);
            assert!(error <= 1e-5, "{name} over {ranks} ranks: generation differs by {error:e}");
        }
    }
}

#[test]
fn what_cannot_be_divided_is_refused_with_the_reason() {
    let refused = |spec: ModelSpec, ranks, expect: &str| {
        let error = Model::split(spec, TensorSplit { rank: 0, ranks, sequence: false }).unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    };
    refused(llama(257, true), 7, "6 query heads on 2 key/value heads cannot be divided among 7 ranks");
    refused(llama(257, true), 7, "degrees from 1 to 6 work");
    refused(llama(5, true), 6, "5 tokens of the vocabulary");
    refused(llama(257, true), 0, "no rank 0 in a group of 0");

    let device = cpu();
    let model = Model::split(gpt2(), TensorSplit { rank: 0, ranks: 3, sequence: true }).unwrap();
    let documents = Documents::new(&[5, 2], 257);
    let batch = model.batch(&device, &documents.slices()).unwrap();
    let store = model.initial_store(&device, 1).unwrap();
    let mut tape = Tape::new(&device, &store, Policy::Everything, KEY);
    let mut cx = Forward::training(&batch, 1.0);
    let error = model.units()[0].forward_segment(0, &mut tape, &mut cx, &[]).unwrap_err().to_string();
    assert!(error.contains("7 tokens cannot be divided evenly among 3 ranks"), "{error}");
    let error = model.units()[0].forward(&mut tape, &mut cx, None).unwrap_err();
    assert!(matches!(&error, ModelError::Unit { problem, .. } if problem.contains("run its segments")), "{error}");
    let error = model.units()[1].forward_segment(9, &mut tape, &mut cx, &[]).unwrap_err().to_string();
    assert!(error.contains("no segment 9"), "{error}");
}
