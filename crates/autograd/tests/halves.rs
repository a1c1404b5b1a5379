//! Backward in two halves: the division of the work, the memory between the halves, parameters that
//! plain functions compute with, and gradients that wait for an exchange. `table.rs` compares the
//! bits of every row.

mod common;

use common::*;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use trainyard_autograd::functions::{Direction, InFlight, LinearOptions, RowExchange, Traffic, WeightGradient};
use trainyard_autograd::{
    Deferred, GradientTarget, Gradients, ParamId, Parameter, Parameters, Place, Policy, Result, Store, Tape,
};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::ops::Segments;
use trainyard_tensor::ops::fp8::{Scaling, Slot, Slots};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

fn cpu() -> Device {
    Device::cpu(Isa::detect(), 2, None)
}

fn point(example: &Example) -> Vec<Vec<f32>> {
    let shapes = example.inputs.iter().chain(&example.params);
    shapes.enumerate().map(|(i, shape)| values(shape.iter().product(), i)).collect()
}

/// Parameters of which none is trained.
struct Frozen<'a>(&'a Store);

impl Parameters for Frozen<'_> {
    fn parameter(&self, id: ParamId) -> Result<Parameter> {
        Ok(Parameter { trained: false, ..self.0.parameter(id)? })
    }
}

/// Counts the gradients that are asked for.
struct Counted<G>(G, Cell<usize>);

impl<G: Gradients> Gradients for Counted<G> {
    fn target(&mut self, id: ParamId) -> Result<Option<GradientTarget>> {
        self.1.set(self.1.get() + 1);
        self.0.target(id)
    }
}

/// Half of a block, with a bias and an activation.
fn part_of_a_block() -> Example {
    let spec = AttentionSpec::causal(4, 2, 8);
    let segments = Segments::new(&[0, 4, 16]).unwrap();
    example(&[&[16, 32]], &[&[32], &[64, 32], &[32, 32], &[64, 32], &[64], &[32, 64]], move |t, x| {
        let n = t.rms_norm(&x[0], p(0), 1e-5)?;
        let qkv = t.linear(&n, p(1), LinearOptions::default())?;
        let a = t.attention(&qkv, spec, &segments)?;
        let h = t.linear(&a, p(2), LinearOptions { residual: Some(&x[0]), ..Default::default() })?;
        let activation = Activation::GeluTanh;
        let f = t.linear(&h, p(3), LinearOptions { bias: Some(p(4)), activation, residual: None })?;
        t.linear(&f, p(5), LinearOptions { residual: Some(&h), ..Default::default() })
    })
}

/// The first half of `example`'s backward, with the bytes of activations that live after it beside
/// the gradients of inputs.
fn first_half(device: &Device, example: &Example, parameters: &dyn Parameters) -> (Deferred, usize) {
    let mut tape = Tape::new(device, parameters, Policy::Everything, KEY);
    let inputs =
        tensors(device, &example.inputs, &point(example)).into_iter().map(|x| tape.leaf(x)).collect::<Vec<_>>();
    let y = (example.build)(&mut tape, &inputs).unwrap();
    let seed = device.zeros(*y.tensor().shape(), DType::F32, Purpose::Activations).unwrap();
    let wanted: Vec<Place> = inputs.iter().map(Place::from).collect();
    let outputs = [(Place::from(&y), seed)];
    drop((inputs, y));
    let (_, deferred) = tape.finish().backward_input(&outputs, &wanted, parameters).unwrap();
    drop(outputs);
    let live = device.pool().usage().live(Purpose::Activations);
    (deferred, live)
}

#[test]
fn the_first_half_keeps_only_what_weights_need() {
    let device = cpu();
    let example = part_of_a_block();
    let store = store(&device, &example, &point(&example));
    let before = device.pool().usage().live(Purpose::Activations);
    let (deferred, live) = first_half(&device, &example, &store);
    assert_eq!(deferred.function_names(), ["linear", "linear", "linear", "linear", "rms_norm"]);
    assert_eq!(deferred.bytes(), live - before);
    // Rows of 32 unless they say otherwise: x; its norm and the inverse rms of rows; attention's
    // result, h, f (64); and the gradients of the output, f (64), h, qkv (64), and the norm.
    let floats = 16 * (32 + 32 + 1 + 32 + 32 + 64 + 32 + 64 + 32 + 64 + 32);
    assert_eq!(deferred.bytes(), 4 * floats);
    drop(deferred);

    let (deferred, live) = first_half(&device, &example, &Frozen(&store));
    assert!(deferred.is_empty() && deferred.bytes() == 0 && live == before, "{deferred:?}");
}

#[test]
fn each_parameter_gets_one_contribution_in_the_second_half() {
    let device = cpu();
    let example = part_of_a_block();
    let mut store = store(&device, &example, &point(&example));
    let (deferred, _) = first_half(&device, &example, &store);
    let (parameters, sink) = store.split();
    let mut counted = Counted(sink, Cell::new(0));
    deferred.backward_parameters(&parameters, &mut counted).unwrap();
    assert_eq!(counted.1.get(), 6);
}

#[test]
fn plain_functions_of_parameters_have_the_bits_of_the_whole_in_halves() {
    let device = cpu();
    // A parameter that two functions compute with, one of them together with the input, and a sum
    // of several paths to one value of either kind.
    let example = example(&[&[4, 6]], &[&[6, 6], &[6], &[4, 6]], |t, x| {
        let w = t.param(p(0))?;
        let gain = t.param(p(1))?;
        let scaled = t.mul(&w, &gain)?;
        let w = t.add(&w, &scaled)?;
        let h = t.matmul(&x[0], &w)?;
        let bias = t.param(p(2))?;
        let bias = t.dropout(&bias, 0.2, true)?;
        let h = t.add(&h, &bias)?;
        let h = t.mul(&h, &x[0])?;
        let again = t.matmul(&h, &w)?;
        t.add(&h, &again)
    });
    let run = |course| {
        let point = point(&example);
        let mut store = store(&device, &example, &point);
        let (parameters, mut sink) = store.split();
        let tape = Tape::new(&device, &parameters, Policy::Everything, KEY);
        let (got, _) = differentiate(&device, &example, &point, tape, 1, course, &parameters, &mut sink).unwrap();
        (got, parameter_gradients(&store, &example))
    };
    let (whole, halves) = (run(Course::Whole), run(Course::Halves));
    assert_eq!(whole, halves);
    assert!(whole.1.iter().all(Option::is_some));
}

#[test]
fn a_loss_with_gradients_at_hand_leaves_nothing() {
    let device = cpu();
    let example = example(&[&[4, 5]], &[&[11, 5]], {
        let targets = ints(&device, &[3, 0, -100, 10]);
        move |t, x| t.linear_cross_entropy(&x[0], p(0), &targets, 0.25)
    });
    let point = point(&example);
    let mut store = store(&device, &example, &point);
    let (parameters, mut sink) = store.split();
    let mut tape = Tape::new(&device, &parameters, Policy::Everything, KEY).with_gradients(&mut sink);
    let x = tape.leaf(device.tensor([4, 5], &point[0], Purpose::Activations).unwrap());
    let loss = (example.build)(&mut tape, std::slice::from_ref(&x)).unwrap();
    let recording = tape.finish();
    let seed = device.tensor([], &[1.0f32], Purpose::Activations).unwrap();
    let (got, deferred) =
        recording.backward_input(&[(Place::from(&loss), seed)], &[Place::from(&x)], &parameters).unwrap();
    assert!(got[0].is_some() && deferred.is_empty(), "{deferred:?}");
}

#[test]
fn products_of_eight_bits_have_the_bits_of_the_whole_in_halves() {
    let device = cpu();
    let example = example(&[&[16, 32], &[16, 16]], &[&[16, 32], &[16]], |t, x| {
        let activation = Activation::Silu;
        t.linear(&x[0], p(0), LinearOptions { bias: Some(p(1)), activation, residual: Some(&x[1]) })
    });
    let slot = |scale: f32| Slot {
        scale: device.tensor([1], &[scale], Purpose::Optimizer).unwrap(),
        inverse: device.tensor([1], &[1.0 / scale], Purpose::Optimizer).unwrap(),
        amax: device.zeros([1], DType::U32, Purpose::Optimizer).unwrap(),
    };
    for measures in [false, true] {
        let run = |course| {
            let slots = Arc::new(Slots { input: slot(64.0), weight: slot(32.0), gradient: slot(1024.0) });
            let layers = BTreeMap::from([(p(0), Scaling { slots: slots.clone(), measures })]);
            let point = point(&example);
            let mut store = store(&device, &example, &point);
            let (parameters, mut sink) = store.split();
            let tape = Tape::new(&device, &parameters, Policy::Everything, KEY).with_fp8(&layers);
            let (got, _) = differentiate(&device, &example, &point, tape, 2, course, &parameters, &mut sink).unwrap();
            let noted = slots.gradient.amax.with_data(|bits: &[u32]| bits[0]).unwrap();
            (got, parameter_gradients(&store, &example), noted)
        };
        assert_eq!(run(Course::Whole), run(Course::Halves), "measures: {measures}");
    }
}

/// The gradient of the weight is that of unrounded operands; the others are near it.
#[test]
fn products_of_integers_have_the_bits_of_the_whole_in_halves_and_gradients_near_the_unrounded() {
    let device = cpu();
    let example = example(&[&[16, 32]], &[&[24, 32], &[24]], |t, x| {
        t.linear(&x[0], p(0), LinearOptions { bias: Some(p(1)), ..LinearOptions::default() })
    });
    let run = |course, layers: &BTreeSet<ParamId>| {
        let point = point(&example);
        let mut store = store(&device, &example, &point);
        let (parameters, mut sink) = store.split();
        let tape = Tape::new(&device, &parameters, Policy::Everything, KEY).with_int8(layers);
        let (got, _) = differentiate(&device, &example, &point, tape, 1, course, &parameters, &mut sink).unwrap();
        (got, parameter_gradients(&store, &example))
    };
    let (coded, none) = (BTreeSet::from([p(0)]), BTreeSet::new());
    let [whole, halves, plain] =
        [(Course::Whole, &coded), (Course::Halves, &coded), (Course::Whole, &none)].map(|(course, on)| run(course, on));
    assert_eq!(whole, halves);
    assert_eq!(whole.1, plain.1, "gradients of parameters");
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let [coded, plain] = [&whole, &plain].map(|(got, _)| got[0].as_ref().expect("x wants a gradient"));
    let off: Vec<f32> = coded.iter().zip(plain).map(|(a, b)| a - b).collect();
    let off = norm(&off) / norm(plain);
    // Each operand is off by a step's uniform error, 1 / (127 sqrt 12) of a largest number that is
    // a few times the others.
    assert!(off > 0.0 && off < 0.02, "the gradient of the input is {off} off");
}

#[test]
fn random_sites_continue_on_a_second_tape() {
    let device = cpu();
    let store = Store::new();
    let x = device.tensor([8, 64], &[1.0f32; 512], Purpose::Activations).unwrap();
    let drop_on = |tape: &mut Tape<'_>, times: usize| {
        let x = tape.leaf(x.clone());
        (0..times).map(|_| tape.dropout(&x, 0.5, true).unwrap().tensor().to_f32_vec().unwrap()).collect::<Vec<_>>()
    };
    let mut whole = Tape::new(&device, &store, Policy::Everything, KEY);
    let masks = drop_on(&mut whole, 3);
    let mut first = Tape::new(&device, &store, Policy::Everything, KEY);
    let mut parts = drop_on(&mut first, 2);
    let mut second = Tape::new(&device, &store, Policy::Everything, KEY).with_sites(first.sites());
    parts.extend(drop_on(&mut second, 1));
    assert_eq!(masks, parts);
    assert_eq!((whole.sites(), second.sites()), (3, 3));
    assert!(masks[0] != masks[1] && masks[1] != masks[2]);
}

/// The events of a pass, in order.
type Events = Arc<Mutex<Vec<String>>>;

/// A rank alone that exchanges rows with itself. They arrive when somebody waits for them.
#[derive(Debug)]
struct Alone(Events);

impl RowExchange for Alone {
    fn ranks(&self) -> usize {
        1
    }

    fn counts(&self, own: &[i32]) -> Result<Vec<i32>> {
        Ok(own.to_vec())
    }

    fn rows(&self, from: &Tensor, sends: &[usize], to: &Tensor, receives: &[usize]) -> Result<InFlight> {
        assert_eq!(sends, receives);
        self.0.lock().unwrap().push("rows leave".to_owned());
        let (events, from, mut to) = (Arc::clone(&self.0), from.clone(), to.clone());
        Ok(Box::new(move || {
            events.lock().unwrap().push("rows arrive".to_owned());
            Ok(to.copy_from(&from)?)
        }))
    }
}

/// Notes which parameters are read.
struct Read<P>(P, Events);

impl<P: Parameters> Parameters for Read<P> {
    fn parameter(&self, id: ParamId) -> Result<Parameter> {
        let mut events = self.1.lock().unwrap();
        let event = format!("reads {}", id.index);
        if events.last() != Some(&event) {
            events.push(event);
        }
        self.0.parameter(id)
    }
}

/// Notes which gradients are computed.
struct Written<G>(G, Events);

impl<G: Gradients> Gradients for Written<G> {
    fn target(&mut self, id: ParamId) -> Result<Option<GradientTarget>> {
        self.1.lock().unwrap().push(format!("gradient {}", id.index));
        self.0.target(id)
    }
}

/// A product of all rows runs while those of experts travel, and so do its backward and the
/// gradient of the experts' weights. The gradients are those of weights that do not wait.
#[test]
fn rows_of_experts_travel_beside_other_products() {
    let device = cpu();
    let gradients_of = |when: WeightGradient| {
        let (mut store, events) = (Store::new(), Events::default());
        let weights = tensors(&device, &[vec![2 * 6, 8], vec![5, 8]], &[values(96, 1), values(40, 2)]);
        (0..).zip(weights).for_each(|(index, weight)| store.insert(p(index), weight));
        let (parameters, sink) = store.split();
        let parameters = Read(parameters, Arc::clone(&events));
        let mut tape = Tape::new(&device, &parameters, Policy::Everything, KEY);
        let x = tape.leaf(tensors(&device, &[vec![7, 8]], &[values(56, 3)]).remove(0));
        let bounds = device.tensor([3], &[0i32, 3, 7], Purpose::Data).unwrap();
        let exchange: Arc<dyn RowExchange> = Arc::new(Alone(Arc::clone(&events)));
        let (traffic, groups) = Traffic::announce(&bounds, 7, Some(&exchange), 1).unwrap();
        let sent = tape.send_rows(&x, &traffic, Direction::Experts).unwrap();
        let beside = tape.linear(&x, p(1), LinearOptions::default()).unwrap();
        let rows = tape.receive_rows(sent).unwrap();
        let y = tape.ragged_linear(&rows, p(0), &groups, when).unwrap();
        let forward = std::mem::take(&mut *events.lock().unwrap());
        let outputs = [&y, &beside].map(|y| {
            let seed = values(y.tensor().elements(), 5);
            (Place::from(y), device.tensor(*y.tensor().shape(), &seed, Purpose::Activations).unwrap())
        });
        let place = Place::from(&x);
        drop((x, rows, y, beside));
        let mut gradients = Written(sink, Arc::clone(&events));
        let dx = tape.finish().backward_at(&outputs, &[place], &parameters, &mut gradients).unwrap();
        let backward = std::mem::take(&mut *events.lock().unwrap());
        let dx = dx[0].as_ref().unwrap().to_f32_vec().unwrap();
        (forward, backward, dx, [p(0), p(1)].map(|id| store.gradient(id).unwrap().to_f32_vec().unwrap()))
    };
    let (forward, backward, dx, dw) = gradients_of(WeightGradient::BesideExchange);
    assert_eq!(forward, ["rows leave", "reads 1", "rows arrive", "reads 0"]);
    let at = |event: &str| backward.iter().position(|other| other == event).unwrap_or_else(|| panic!("{event}"));
    let way = at("rows leave")..at("rows arrive");
    assert!(way.contains(&at("gradient 0")) && way.contains(&at("gradient 1")), "{backward:?}");
    let (_, backward, dx_at_once, dw_at_once) = gradients_of(WeightGradient::AtOnce);
    let at = |event: &str| backward.iter().position(|other| other == event);
    assert!(at("gradient 0") < at("rows leave"), "{backward:?}");
    assert_eq!((dx, dw), (dx_at_once, dw_at_once));
}
