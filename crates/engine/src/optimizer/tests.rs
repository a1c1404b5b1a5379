//! Tests that a parameter that fuses several matrices is updated like separate matrices.

use super::*;
use crate::config::{Config, Inputs};
use crate::constraints::WeightConstraints;
use serde_json::Value;
use trainyard_autograd::{Tape, Var};
use trainyard_model::{Forward, Init, ParameterKind, Unit};
use trainyard_tensor::cpu::Isa;

/// A unit with parameters and no forward.
struct Holder(Vec<ParameterSpec>);

impl Unit for Holder {
    fn name(&self) -> &str {
        "holder"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.0
    }

    fn forward(&self, _: &mut Tape<'_>, _: &mut Forward<'_>, _: Option<&Var>) -> trainyard_model::Result<Var> {
        unreachable!("nobody runs it")
    }
}

fn settings(sets: &[String]) -> OptimizerSettings {
    let file = "[model]\npreset = 'gpt2-124m'\n[training]\nsteps = 10\n";
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Config::parse("test.toml".as_ref(), file, sets).unwrap().resolve(&inputs).unwrap().optimizer
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

struct Trial {
    model: Model,
    parameters: ParameterState,
    gradients: GradientState,
    optimizer: Optimizer,
}

impl Trial {
    /// A unit with a weight of `rows` (one entry per fused matrix) by `columns`, and a bias with as
    /// many parts.
    fn new(rows: &[usize], columns: usize, settings: OptimizerSettings) -> Trial {
        let (device, all) = (Device::cpu(Isa::detect(), 1, None), rows.iter().sum::<usize>());
        let parts: Vec<_> = rows.iter().enumerate().map(|(i, rows)| (format!("part.{i}"), *rows)).collect();
        let parameter = |name: &str, shape: &[usize], kind| {
            ParameterSpec::new(name, shape, Init::Zeros, kind, String::new()).fused(&parts)
        };
        let specs = vec![
            parameter("weight", &[all, columns], ParameterKind::Matrix),
            parameter("bias", &[all], ParameterKind::Bias),
        ];
        let model = Model::from_units(vec![Box::new(Holder(specs))], 1).unwrap();
        let (holding, tiers) = (Holding::whole(), Tiers::default());
        let parameters =
            ParameterState::zeros(&device, &model, holding.clone(), DType::F32, WeightConstraints::default(), &tiers)
                .unwrap();
        let gradients = GradientState::new(&device, &model, holding.clone(), &tiers).unwrap();
        let settings = RankSettings::new(settings, 0);
        let optimizer = Optimizer::new(&device, &model, &holding, DType::F32, &settings, &tiers).unwrap();
        Trial { model, parameters, gradients, optimizer }
    }

    fn master(&self, index: usize) -> Tensor {
        self.parameters.unit(0).master_range(self.model.layout(0, 1).range(index)).unwrap()
    }

    fn set(&self, weight: &Value, bias: &Value) {
        for (index, values) in [weight, bias].into_iter().enumerate() {
            self.master(index).write(&floats(values)).unwrap();
        }
    }

    fn update(&self, number: u64, gradients: &Value) {
        for (index, name) in ["weight", "bias"].into_iter().enumerate() {
            let range = self.model.layout(0, 1).range(index);
            self.gradients.range(0, range).unwrap().write(&floats(&gradients[name])).unwrap();
        }
        let rates = Rates { factor: 1.0, gradient_scale: 1.0, update: number, average: None };
        self.optimizer.update(0, 0, &self.parameters, &self.gradients, rates).unwrap();
    }
}

/// The greatest difference from the reference over ten steps, of weights and of biases where given.
fn farthest(golden: &Value, rows: &[usize], case: &Value, settings: OptimizerSettings) -> f32 {
    let trial = Trial::new(rows, golden["columns"].as_u64().unwrap() as usize, settings);
    trial.set(&golden["weight"], &golden["bias"]);
    let mut farthest = 0.0f32;
    for (step, gradients) in golden["grads"].as_array().unwrap().iter().enumerate() {
        trial.update(step as u64 + 1, gradients);
        for (index, name) in ["weight", "bias"].into_iter().enumerate().filter(|(_, name)| !case[name].is_null()) {
            let (got, want) = (trial.master(index).to_f32_vec().unwrap(), floats(&case[name][step]));
            farthest = got.iter().zip(&want).fold(farthest, |far, (got, want)| far.max((got - want).abs()));
        }
    }
    farthest
}

/// Queries, keys and values are one parameter here, and three matrices in the references.
#[test]
fn muon_and_adafactor_update_each_matrix_of_a_fused_parameter_by_itself() {
    let golden: Value = serde_json::from_str(include_str!("../../tests/golden/optimizers.json")).unwrap();
    let golden = &golden["fused"];
    let rows: Vec<usize> =
        golden["rows"].as_array().unwrap().iter().map(|rows| rows.as_u64().unwrap() as usize).collect();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2);
    for case in cases {
        let (name, number) = (case["name"].as_str().unwrap(), |key: &str| case["hyper"][key].as_f64().unwrap());
        let (sets, bound) = match name {
            "muon" => {
                let (decay, rate) = (number("weight_decay"), number("lr"));
                let momentum = number("momentum");
                let sets = [
                    format!("optimizer.matrix_learning_rate={rate}"),
                    format!("optimizer.weight_decay={decay}"),
                    format!("optimizer.momentum={momentum}"),
                ];
                // The iteration may be in bf16, as torch's is.
                (sets, 5e-3)
            }
            _ => {
                let sets = [
                    format!("optimizer.learning_rate={}", number("lr")),
                    "optimizer.relative_step=true".to_owned(),
                    "optimizer.weight_decay=0.0".to_owned(),
                ];
                (sets, 1e-5)
            }
        };
        let sets = [vec![format!("optimizer.name={name}")], sets.to_vec()].concat();
        let apart = farthest(golden, &rows, case, settings(&sets));
        assert!(apart < bound, "{name}: off by {apart}");
        let together = farthest(golden, &[rows.iter().sum()], case, settings(&sets));
        assert!(together > 4.0 * bound, "{name}: as one matrix off by {together}, which no test could tell");
    }
}

#[test]
fn the_size_of_state_is_known_from_parameters() {
    for name in ["adamw", "sgd", "lion", "muon", "adafactor"] {
        let trial = Trial::new(&[8, 4, 4], 4, settings(&[format!("optimizer.name={name}")]));
        let held: usize = trial.optimizer.state().unwrap().iter().map(|(part, _)| part.range.len()).sum();
        let parameters = trial.model.parameters();
        assert_eq!(parameters.map(|(_, spec)| trial.optimizer.state_elements(spec)).sum::<usize>(), held, "{name}");
    }
}

/// The state of a fused parameter is one tensor in a checkpoint. Each part of it is the state of
/// one matrix.
#[test]
fn the_state_of_fused_matrices_lies_in_order_and_covers_the_parameter() {
    for (name, bias) in [("muon", 2), ("adafactor", 1)] {
        let trial = Trial::new(&[8, 4, 4], 4, settings(&[format!("optimizer.name={name}")]));
        let mut covered = std::collections::BTreeMap::<(usize, &str), (usize, usize)>::new();
        for (part, stored) in trial.optimizer.state().unwrap() {
            let Stored::Here(state) = stored else { panic!("it is in memory") };
            assert_eq!(state.elements(), part.range.len());
            let (end, elements) = covered.entry((part.index, part.name)).or_insert((0, part.elements));
            assert_eq!((part.range.start, part.elements), (*end, *elements), "{name}: {} of {}", part.name, part.index);
            *end = part.range.end;
        }
        assert!(covered.values().all(|(end, elements)| end == elements), "{name}: {covered:?}");
        let of = |index: usize| covered.keys().filter(|(of, _)| *of == index).count();
        assert_eq!((of(0), of(1)), (if name == "muon" { 1 } else { 2 }, bias));
        if name == "adafactor" {
            assert_eq!(covered[&(0, "exp_avg_sq_row")].1, 16);
            assert_eq!(covered[&(0, "exp_avg_sq_col")].1, 3 * 4);
        }
    }
}
