//! Helpers for the tests of functions: problems, their values, their gradients, and finite
//! differences.
//!
//! With a fixed output gradient `g`, the directional derivative along `u` is
//! `g · (f(z + h u) - f(z - h u)) / 2h`, up to `O(h²)` and a rounding error of about
//! `2⁻²⁴ |g||f| / h`. Backward must give `z̄ · u` for the same. Inputs and parameters are perturbed
//! together.

// Each test program uses a part.
#![allow(dead_code)]

pub mod plain;

use trainyard_autograd::{Gradients, ParamId, Parameters, Place, Policy, Result, Store, Tape, Var};
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::{Device, Purpose, Tensor};

pub const KEY: RandomKey = RandomKey { seed: 7, step: 3, site: 1 };

pub type Build = Box<dyn Fn(&mut Tape<'_>, &[Var]) -> Result<Var>>;

/// A problem: shapes of the inputs and of the parameters, and a forward that contains the function.
pub struct Example {
    pub inputs: Vec<Vec<usize>>,
    pub params: Vec<Vec<usize>>,
    pub build: Build,
}

pub fn p(index: u32) -> ParamId {
    ParamId::new(0, index)
}

pub fn example(
    inputs: &[&[usize]],
    params: &[&[usize]],
    build: impl Fn(&mut Tape<'_>, &[Var]) -> Result<Var> + 'static,
) -> Example {
    let owned = |shapes: &[&[usize]]| shapes.iter().map(|s| s.to_vec()).collect();
    Example { inputs: owned(inputs), params: owned(params), build: Box::new(build) }
}

pub fn ints(device: &Device, values: &[i32]) -> Tensor {
    device.tensor([values.len()], values, Purpose::Data).unwrap()
}

/// Deterministic values in about (-1, 1).
pub fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729 + 13) as f64 * 0.618_033_988_75).fract() as f32 * 2.0 - 1.0).collect()
}

pub fn tensors(device: &Device, shapes: &[Vec<usize>], point: &[Vec<f32>]) -> Vec<Tensor> {
    shapes.iter().zip(point).map(|(shape, v)| device.tensor(shape, v, Purpose::Activations).unwrap()).collect()
}

pub fn store(device: &Device, example: &Example, point: &[Vec<f32>]) -> Store {
    let mut store = Store::new();
    for (index, tensor) in tensors(device, &example.params, &point[example.inputs.len()..]).into_iter().enumerate() {
        store.insert(p(index as u32), tensor);
    }
    store
}

pub fn forward(device: &Device, example: &Example, point: &[Vec<f32>]) -> Vec<f32> {
    let store = store(device, example, point);
    let mut tape = Tape::new(device, &store, Policy::Everything, KEY);
    let inputs: Vec<Var> =
        tensors(device, &example.inputs, point).into_iter().map(|tensor| tape.leaf(tensor)).collect();
    (example.build)(&mut tape, &inputs).unwrap().tensor().to_f32_vec().unwrap()
}

/// The gradients of inputs and parameters for output gradient `g`, and `g`.
pub fn gradients(device: &Device, example: &Example, point: &[Vec<f32>], policy: Policy) -> (Vec<Vec<f32>>, Vec<f32>) {
    backward(device, example, point, policy).unwrap()
}

/// The course of a backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Course {
    Whole,
    /// Gradients of inputs first, those of parameters later.
    Halves,
}

pub fn backward(
    device: &Device,
    example: &Example,
    point: &[Vec<f32>],
    policy: Policy,
) -> Result<(Vec<Vec<f32>>, Vec<f32>)> {
    let mut store = store(device, example, point);
    let (parameters, mut sink) = store.split();
    let tape = Tape::new(device, &parameters, policy, KEY);
    let (wanted, course) = (example.inputs.len(), Course::Whole);
    let (got, g) = differentiate(device, example, point, tape, wanted, course, &parameters, &mut sink)?;
    let mut all: Vec<Vec<f32>> = got.into_iter().map(|gradient| gradient.expect("a gradient")).collect();
    all.extend(parameter_gradients(&store, example).into_iter().map(|gradient| gradient.expect("a gradient")));
    Ok((all, g))
}

/// A gradient, if any flowed.
pub type MaybeGradient = Option<Vec<f32>>;

/// Records `example` on `tape` and returns the gradients of its first `wanted` inputs, and the
/// output's gradient.
pub fn differentiate(
    device: &Device,
    example: &Example,
    point: &[Vec<f32>],
    mut tape: Tape<'_>,
    wanted: usize,
    course: Course,
    parameters: &dyn Parameters,
    sink: &mut dyn Gradients,
) -> Result<(Vec<MaybeGradient>, Vec<f32>)> {
    let inputs: Vec<Var> =
        tensors(device, &example.inputs, point).into_iter().map(|tensor| tape.leaf(tensor)).collect();
    let y = (example.build)(&mut tape, &inputs).unwrap();
    let scalar = y.tensor().elements() == 1;
    let g = if scalar { vec![1.0] } else { values(y.tensor().elements(), 99) };
    let seed = device.tensor(*y.tensor().shape(), &g, Purpose::Activations).unwrap();
    let recording = tape.finish();
    let wanted: Vec<Place> = inputs[..wanted].iter().map(Place::from).collect();
    let outputs = [(Place::from(&y), seed)];
    drop((inputs, y));
    let got = match course {
        Course::Whole => recording.backward_at(&outputs, &wanted, parameters, sink)?,
        Course::Halves => {
            let (got, deferred) = recording.backward_input(&outputs, &wanted, parameters)?;
            drop(outputs);
            deferred.backward_parameters(parameters, sink)?;
            got
        }
    };
    Ok((got.into_iter().map(|gradient| gradient.map(|g| g.to_f32_vec().unwrap())).collect(), g))
}

pub fn parameter_gradients(store: &Store, example: &Example) -> Vec<MaybeGradient> {
    (0..example.params.len()).map(|i| store.gradient(p(i as u32)).map(|g| g.to_f32_vec().unwrap())).collect()
}

pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

pub fn check(name: &str, device: &Device, example: &Example) {
    let shapes: Vec<&Vec<usize>> = example.inputs.iter().chain(&example.params).collect();
    let count = |shape: &[usize]| shape.iter().product::<usize>();
    let point: Vec<Vec<f32>> = shapes.iter().enumerate().map(|(i, s)| values(count(s), i)).collect();
    let (gradients, g) = gradients(device, example, &point, Policy::Everything);
    let h = 1e-2f32;
    for direction in 0..3 {
        let u: Vec<Vec<f32>> =
            shapes.iter().enumerate().map(|(i, s)| values(count(s), 31 + 17 * direction + i)).collect();
        let moved = |sign: f32| -> Vec<f32> {
            let at: Vec<Vec<f32>> =
                point.iter().zip(&u).map(|(z, u)| z.iter().zip(u).map(|(z, u)| z + sign * h * u).collect()).collect();
            forward(device, example, &at)
        };
        let (above, below) = (moved(1.0), moved(-1.0));
        let change: Vec<f32> = above.iter().zip(&below).map(|(a, b)| (a - b) / (2.0 * h)).collect();
        let numeric = dot(&g, &change);
        let analytic: f64 = gradients.iter().zip(&u).map(|(z, u)| dot(z, u)).sum();
        let scale = dot(&g, &g).sqrt() * dot(&change, &change).sqrt();
        assert!((numeric - analytic).abs() <= 2e-3 * scale + 1e-5, "{name}: numeric {numeric}, backward {analytic}");
    }
}
