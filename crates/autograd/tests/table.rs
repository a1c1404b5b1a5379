//! Walks the table: every function's backward against finite differences of its forward, and what
//! the policies keep.

mod common;

use common::*;
use std::sync::Arc;
use trainyard_autograd::functions::{Direction, Gains, InFlight, LinearOptions, RowExchange, Traffic, WeightGradient};
use trainyard_autograd::{Adapter, AdapterOutputs, AutogradError, Policy, Store, TABLE, Tape, Var};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::cpu::rope::{RopeScaling, RopeTable};
use trainyard_tensor::ops::experts::{BalanceFactors, EXCESS_UNIT, Gate, Groups, Router};
use trainyard_tensor::ops::{
    ContextSegments, CrossSegments, Distillation, Divergence, HeadLayout, Segments, TablePart, TeacherLogits,
};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// At least one example for every row of the table.
fn examples(name: &str, device: &Device) -> Vec<Example> {
    let layout = HeadLayout { heads: 4, kv_heads: 2, head_dim: 6 };
    let spec = AttentionSpec::causal(4, 2, 6);
    let device = device.clone();
    match name {
        "parameter" => vec![example(&[], &[&[3, 5]], |t, _| t.param(p(0)))],
        "add" => vec![
            example(&[&[3, 5], &[3, 5]], &[], |t, x| t.add(&x[0], &x[1])),
            example(&[&[3, 5]], &[], |t, x| t.add(&x[0], &x[0])),
            example(&[&[2, 1, 5], &[3, 1]], &[], |t, x| t.add(&x[0], &x[1])),
        ],
        "linear" => {
            let mut all = vec![example(&[&[5, 7]], &[&[9, 7]], |t, x| t.linear(&x[0], p(0), LinearOptions::default()))];
            for activation in [Activation::ReluSquared, Activation::Silu, Activation::GeluExact, Activation::GeluTanh] {
                all.push(example(&[&[5, 7], &[5, 9]], &[&[9, 7], &[9]], move |t, x| {
                    t.linear(&x[0], p(0), LinearOptions { bias: Some(p(1)), activation, residual: Some(&x[1]) })
                }));
            }
            all
        }
        "low_rank" => {
            let adapter = |members, outputs: &[(usize, Option<(usize, usize)>)], scale| Adapter {
                magnitude: None,
                a: p(0),
                b: p(1),
                rank: 3,
                members,
                outputs: outputs.iter().map(|(count, from)| AdapterOutputs { count: *count, from: *from }).collect(),
                scale,
            };
            let one = adapter(1, &[(9, Some((0, 0)))], 1.0);
            let two = adapter(2, &[(4, Some((0, 0))), (2, None), (3, Some((1, 4)))], 0.7);
            vec![
                example(&[&[5, 7]], &[&[3, 7], &[9, 3]], move |t, x| t.low_rank(&x[0], None, one.clone())),
                example(&[&[5, 7], &[5, 9]], &[&[6, 7], &[7, 3]], move |t, x| {
                    t.low_rank(&x[0], Some(&x[1]), two.clone())
                }),
            ]
        }
        "magnitude" => {
            let adapter = Adapter {
                a: p(1),
                b: p(2),
                magnitude: Some(p(0)),
                rank: 3,
                members: 2,
                outputs: [(4, Some((0, 0))), (2, None), (3, Some((1, 4)))]
                    .map(|(count, from)| AdapterOutputs { count, from })
                    .into(),
                scale: 0.7,
            };
            let norms: Vec<f32> = values(9, 8).iter().map(|value| 1.5 + value).collect();
            vec![example(&[&[5, 9]], &[&[7]], move |t, x| {
                let norms = device.tensor([9], &norms, Purpose::Activations)?;
                t.magnitude(&x[0], norms, adapter.clone())
            })]
        }
        "linear_cross_entropy" => vec![example(&[&[6, 5]], &[&[11, 5]], move |t, x| {
            let targets = ints(&device, &[3, 0, -100, 10, 3, 7]);
            t.linear_cross_entropy(&x[0], p(0), &targets, 0.7)
        })],
        "distillation_loss" => {
            let divergences = [Divergence::ForwardKl, Divergence::ReverseKl, Divergence::JensenShannon { beta: 0.3 }];
            let settings = divergences.into_iter().zip([1.0, 2.0, 0.5]);
            let examples = settings.map(|(divergence, temperature)| {
                let device = device.clone();
                example(&[&[6, 5]], &[&[11, 5]], move |t, x| {
                    let targets = ints(&device, &[3, 0, -100, 10, 3, 7]);
                    let taught = TeacherLogits {
                        x: device.tensor([6, 3], &values(18, 5), Purpose::Activations)?,
                        w: device.tensor([11, 3], &values(33, 6), Purpose::Params)?,
                        distillation: Distillation { weight: 0.6, temperature, divergence },
                    };
                    t.distillation_loss(&x[0], p(0), taught, &targets, 0.7)
                })
            });
            examples.collect()
        }
        "hidden_distance" => vec![example(&[&[6, 5]], &[], move |t, x| {
            let targets = ints(&device, &[3, 0, -100, 1, 3, 7]);
            t.hidden_distance(&x[0], device.tensor([6, 5], &values(30, 5), Purpose::Activations)?, &targets, 0.7)
        })],
        "bias" => vec![example(&[&[5, 9]], &[&[9]], |t, x| t.add_bias(&x[0], p(0)))],
        // Each part's loss is the whole one, and its gradient a summand: all but one loss is taken
        // off without its gradient.
        "part_cross_entropy" => vec![example(&[&[6, 5]], &[&[4, 5], &[7, 5]], move |t, x| {
            let targets = ints(&device, &[3, 0, -100, 10, 3, 7]);
            let parts = [TablePart { first: 0, whole: 11 }, TablePart { first: 4, whole: 11 }];
            let first = t.vocabulary_statistics(&x[0], p(0), parts[0], &targets)?;
            let second = t.vocabulary_statistics(&x[0], p(1), parts[1], &targets)?;
            let all = t.cat(&[&first, &second], 0)?.into_tensor();
            let first = t.part_cross_entropy(&x[0], p(0), parts[0], &all, &targets, 0.7)?;
            let second = t.part_cross_entropy(&x[0], p(1), parts[1], &all, &targets, 0.7)?;
            let twice = t.stop_gradient(&second);
            let second = t.sub(&second, &twice)?;
            t.add(&first, &second)
        })],
        "attention" => {
            let segments = Segments::new(&[0, 4, 5, 9]).unwrap();
            let window = AttentionSpec { window: Some(3), ..spec };
            [spec, window]
                .into_iter()
                .map(|spec| {
                    let segments = segments.clone();
                    example(&[&[9, layout.columns()]], &[], move |t, x| t.attention(&x[0], spec, &segments))
                })
                .collect()
        }
        // Two ranks' chunks of a sequence in four, gathered rank after rank, with documents that
        // end
        // inside chunks.
        "context_attention" => {
            let gathered = vec![0..3, 9..12, 3..6, 6..9];
            let window = AttentionSpec { window: Some(3), ..spec };
            [(spec, 0), (spec, 2), (window, 2)]
                .into_iter()
                .map(|(spec, own)| {
                    let segments =
                        ContextSegments::new(&[0, 4, 10, 12], &gathered[own..own + 2], gathered.clone()).unwrap();
                    example(&[&[6, 24], &[12, 24]], &[], move |t, x| t.context_attention(&x[0], &x[1], spec, &segments))
                })
                .collect()
        }
        "biased_attention" => {
            let segments = Segments::new(&[0, 4, 5, 9]).unwrap();
            let table = [spec.heads, 11];
            [spec, AttentionSpec { causal: false, ..spec }]
                .into_iter()
                .map(|spec| {
                    let segments = segments.clone();
                    example(&[&[9, layout.columns()], &table], &[], move |t, x| {
                        t.biased_attention(&x[0], &x[1], spec, &segments)
                    })
                })
                .collect()
        }
        "cross_attention" => {
            let of = |bounds| Segments::new(bounds).unwrap();
            let segments = CrossSegments::new(of(&[0, 2, 5]), of(&[0, 6, 7])).unwrap();
            let spec = AttentionSpec { causal: false, ..spec };
            vec![example(&[&[5, 24], &[7, 24]], &[], move |t, x| t.cross_attention(&x[0], &x[1], spec, &segments))]
        }
        // As above, in the two parts; each alone for one example.
        "context_attention_part" | "context_attention_rest" => {
            let gathered = vec![0..3, 9..12, 3..6, 6..9];
            let name = name.to_owned();
            [0, 2]
                .into_iter()
                .map(|own| {
                    let of_ranks = gathered.clone();
                    let [own, rest] =
                        ContextSegments::apart(&[0, 4, 10, 12], &of_ranks[own..own + 2], of_ranks.clone()).unwrap();
                    if name == "context_attention_part" {
                        return example(&[&[6, 24], &[6, 24]], &[], move |t, x| {
                            let [out, lse] = t.context_attention_part(&x[0], &x[1], spec, &own)?;
                            t.cat(&[&out, &lse], 1)
                        });
                    }
                    example(&[&[6, 24], &[6, 24], &[12, 24]], &[], move |t, x| {
                        let [out, lse] = t.context_attention_part(&x[0], &x[1], spec, &own)?;
                        t.context_attention_rest(&x[0], &x[2], [&out, &lse], spec, &rest)
                    })
                })
                .collect()
        }
        "split_at" => vec![
            example(&[&[5, 7]], &[], |t, x| {
                let [a, b] = t.split_at(&x[0], 1, 3)?;
                t.cat(&[&b, &a, &b], 1)
            }),
            example(&[&[5, 7]], &[], |t, x| Ok(t.split_at(&x[0], -1, 3)?[1].clone())),
            example(&[&[5, 7]], &[], |t, x| {
                let [a, b] = t.split_at(&x[0], 0, 2)?;
                t.cat(&[&b, &a], 0)
            }),
        ],
        // Values that are used twice, and values of which V_1 is a view.
        "value_residual" => vec![
            example(&[&[5, layout.columns()], &[5, 12]], &[&[2]], move |t, x| {
                t.value_residual(x[0].clone(), layout, &x[1], p(0))
            }),
            example(&[&[5, layout.columns()]], &[&[2]], move |t, x| {
                let first = t.narrow(&x[0], 1, 36, 12)?;
                let y = t.value_residual(x[0].clone(), layout, &first, p(0))?;
                t.cat(&[&y, &first], 1)
            }),
        ],
        "rope" => {
            let table = Arc::new(RopeTable::new(6, 1e4, RopeScaling::None, 16).unwrap());
            vec![example(&[&[5, layout.columns()]], &[], move |t, x| {
                t.rope(x[0].clone(), layout, &table, &ints(&device, &[0, 1, 2, 0, 15]))
            })]
        }
        "qk_norm" => vec![
            example(&[&[5, layout.columns()]], &[&[6], &[6]], move |t, x| t.qk_norm(&x[0], layout, p(0), p(1), 1e-5)),
            example(&[&[5, layout.columns()]], &[&[6], &[6]], move |t, x| {
                t.qk_norm_with(&x[0], layout, [p(0), p(1)], 1e-5, Gains::OnePlusWeight)
            }),
        ],
        "rms_norm" => vec![
            example(&[&[5, 24]], &[&[24]], |t, x| t.rms_norm_with(&x[0], p(0), 1e-5, Gains::OnePlusWeight)),
            example(&[&[5, 24]], &[&[24]], |t, x| t.rms_norm(&x[0], p(0), 1e-5)),
            // x also flows past the norm, so backward adds to a gradient that is there.
            example(&[&[5, 24]], &[&[24]], |t, x| {
                let y = t.rms_norm(&x[0], p(0), 1e-5)?;
                t.add(&x[0], &y)
            }),
        ],
        "layer_norm" => vec![
            example(&[&[5, 24]], &[&[24], &[24]], |t, x| t.layer_norm(&x[0], p(0), Some(p(1)), 1e-5)),
            example(&[&[5, 24]], &[&[24]], |t, x| {
                let y = t.layer_norm(&x[0], p(0), None, 1e-5)?;
                t.add(&x[0], &y)
            }),
        ],
        "swiglu" => vec![example(&[&[5, 14]], &[], |t, x| t.swiglu(&x[0]))],
        "glu" => [Activation::GeluExact, Activation::GeluTanh]
            .map(|a| example(&[&[5, 14]], &[], move |t, x| t.glu(&x[0], a)))
            .into(),
        "activate" => [Activation::ReluSquared, Activation::Silu, Activation::GeluExact, Activation::GeluTanh]
            .map(|a| example(&[&[5, 14]], &[], move |t, x| t.activate(&x[0], a)))
            .into(),
        "embedding" => vec![example(&[], &[&[10, 6], &[5, 6], &[4, 6]], move |t, _| {
            let (tokens, positions) = (ints(&device, &[3, 9, 3, 0]), ints(&device, &[0, 1, 2, 4]));
            let part = t.embedding_part(&tokens, p(2), TablePart { first: 3, whole: 10 })?;
            let all = t.embedding(&tokens, p(0), Some((&positions, p(1))))?;
            t.add(&all, &part)
        })],
        "dropout" => vec![
            example(&[&[40, 33]], &[], |t, x| t.dropout(&x[0], 0.3, true)),
            example(&[&[40, 33]], &[], |t, x| t.dropout_from(&x[0], 0.3, true, 5 * 33)),
            example(&[&[40, 33]], &[], |t, x| t.dropout_of(&x[0], 0.3, true, &[99..330, 990..2079])),
        ],
        _ if MIXTURE.contains(&name) => vec![mixture(name, &device)],
        _ => plain::examples(name, &device),
    }
}

const MIXTURE: [&str; 7] =
    ["router_logits", "route", "dispatch", "send_rows", "receive_rows", "ragged_linear", "combine"];

/// Two ranks that are one: as many rows as go to a rank come from it, those of the second doubled.
#[derive(Debug)]
struct Mirror;

impl RowExchange for Mirror {
    fn ranks(&self) -> usize {
        2
    }

    fn counts(&self, own: &[i32]) -> Result<Vec<i32>, AutogradError> {
        Ok(own.to_vec())
    }

    fn rows(&self, from: &Tensor, sends: &[usize], to: &Tensor, receives: &[usize]) -> Result<InFlight, AutogradError> {
        assert_eq!(sends, receives);
        let (end, dim) = (sends.iter().sum::<usize>(), from.last_dim());
        let mut values = to.to_f32_vec()?;
        values[..end * dim].copy_from_slice(&from.to_f32_vec()?[..end * dim]);
        values[sends[0] * dim..end * dim].iter_mut().for_each(|value| *value *= 2.0);
        // They arrive when somebody waits for them.
        let mut to = to.clone();
        Ok(Box::new(move || Ok(to.write(&values)?)))
    }
}

/// Seven tokens of width 6, of which each goes to two of five experts of width 4; one expert has no
/// token. The choices stay the same near every point.
fn mixture(name: &str, device: &Device) -> Example {
    let (device, own) = (device.clone(), device.clone());
    let router = Router { experts: 5, top_k: 2, gate: Gate::Softmax, normalise: true, scale: 1.5 };
    // Logits in (-1, 1) beside which these decide.
    let rank = |token: usize, expert: usize| if expert == 4 { 6 } else { (expert + 3 * token) % 4 };
    let far: Vec<f32> = (0..35).map(|i| -2.2 * rank(i / 5, i % 5) as f32).collect();
    let whole = name == "combine";
    let routes = move |t: &mut Tape<'_>, logits: &Var| {
        let far = t.constant(device.tensor([7, 5], &far, Purpose::Data).unwrap());
        let logits = t.add(logits, &far)?;
        t.route(&logits, None, router, None, BalanceFactors::default())
    };
    match name {
        "router_logits" => example(&[&[7, 6]], &[&[5, 6]], |t, x| t.router_logits(&x[0], p(0))),
        "route" => example(&[&[7, 5]], &[], move |t, x| Ok(routes(t, &x[0])?.0)),
        "dispatch" => example(&[&[7, 6], &[7, 5]], &[], move |t, x| {
            let (_, routes) = routes(t, &x[1])?;
            let logits = t.sum(&x[1], ..)?;
            let y = t.dispatch(&x[0], &routes)?;
            t.add(&y, &logits)
        }),
        // Of nine rows eight go to four experts on two ranks, and the last is nobody's.
        "send_rows" | "receive_rows" => example(&[&[9, 6]], &[&[2 * 3, 6]], move |t, x| {
            let bounds = ints(&own, &[0, 2, 5, 5, 8]);
            let mirror: Arc<dyn RowExchange> = Arc::new(Mirror);
            let (traffic, groups) = Traffic::announce(&bounds, 9, Some(&mirror), 2)?;
            assert_eq!((groups.bounds.to_vec::<i32>()?, groups.sources), (vec![0, 2, 5, 5, 8], 2));
            let sent = t.send_rows(&x[0], &traffic, Direction::Experts)?;
            let rows = t.receive_rows(sent)?;
            assert_eq!(rows.tensor().rows(), 8);
            let rows = t.ragged_linear(&rows, p(0), &groups, WeightGradient::BesideExchange)?;
            let sent = t.send_rows(&rows, &traffic, Direction::Tokens)?;
            let rows = t.receive_rows(sent)?;
            assert!(rows.tensor().to_f32_vec()?[8 * 3..].iter().all(|value| *value == 0.0));
            Ok(rows)
        }),
        _ => example(&[&[7, 6], &[7, 5]], &[&[5 * 4, 6], &[5 * 6, 4]], move |t, x| {
            let (weights, routes) = routes(t, &x[1])?;
            assert!(routes.counts.to_vec::<i32>().unwrap().contains(&0), "no expert is without tokens");
            let rows = t.dispatch(&x[0], &routes)?;
            let groups = Groups::of_one_source(&routes.bounds);
            let rows = t.ragged_linear(&rows, p(0), &groups, WeightGradient::AtOnce)?;
            let rows = t.ragged_linear(&rows, p(1), &groups, WeightGradient::AtOnce)?;
            t.combine(&rows, &weights, &routes.places, whole.then_some(&x[0]))
        }),
    }
}

#[test]
fn the_bias_of_a_router_takes_what_experts_are_ahead_and_changes_no_gradient() {
    let device = Device::cpu(Isa::detect(), 2, None);
    let router = Router { experts: 4, top_k: 2, gate: Gate::Sigmoid, normalise: true, scale: 1.0 };
    let run = |bias: Option<[f32; 4]>| {
        let mut store = Store::new();
        if let Some(bias) = bias {
            store.insert(p(0), device.tensor([4], &bias, Purpose::Params).unwrap());
        }
        let (parameters, mut sink) = store.split();
        let mut tape = Tape::new(&device, &parameters, Policy::Everything, KEY);
        let logits = tape.leaf(device.tensor([9, 4], &values(36, 3), Purpose::Activations).unwrap());
        let factors = BalanceFactors { auxiliary: 0.1, z: 0.1 };
        let (weights, routes) = tape.route(&logits, bias.map(|_| p(0)), router, None, factors).unwrap();
        let seed = device.tensor([9, 2], &values(18, 5), Purpose::Activations).unwrap();
        let outputs = [(&weights, seed)];
        let dlogits = tape.finish().backward(&outputs, &[&logits], &parameters, &mut sink).unwrap().remove(0).unwrap();
        let excess = store.gradient(p(0)).map(|excess| excess.to_f32_vec().unwrap());
        (dlogits.to_f32_vec().unwrap(), routes.counts.to_vec::<i32>().unwrap(), excess)
    };
    let (without, counts, none) = run(None);
    let (with, same_counts, excess) = run(Some([0.0; 4]));
    assert_eq!((&with, &same_counts, none), (&without, &counts, None));
    let ahead: Vec<f32> = counts.iter().map(|count| (*count as f32 - 4.5) * EXCESS_UNIT).collect();
    assert_eq!(excess, Some(ahead));
    let (_, counts, _) = run(Some([0.0, 5.0, 0.0, -5.0]));
    assert_eq!((counts[1], counts[3]), (9, 0));
}

#[test]
fn every_row_has_a_right_backward() {
    let device = Device::cpu(Isa::detect(), 2, None);
    for row in TABLE.iter().filter(|row| row.differentiable) {
        let examples = examples(row.name, &device);
        assert!(!examples.is_empty(), "`{}` has no example in this test", row.name);
        for example in &examples {
            check(row.name, &device, example);
        }
    }
    assert_eq!(device.pool().usage().live_total(), 0, "something leaked");
}

#[test]
fn every_row_has_the_bits_of_the_whole_backward_in_two_halves() {
    let device = Device::cpu(Isa::detect(), 2, None);
    let halves = |name: &str, example: &Example| {
        let shapes: Vec<&Vec<usize>> = example.inputs.iter().chain(&example.params).collect();
        let point: Vec<Vec<f32>> = shapes.iter().enumerate().map(|(i, s)| values(s.iter().product(), i)).collect();
        for policy in [Policy::Everything, Policy::Selective] {
            // With some inputs, and with none, so that all is left to the second half.
            for wanted in [example.inputs.len(), 0] {
                let run = |course| {
                    let mut store = store(&device, example, &point);
                    let (parameters, mut sink) = store.split();
                    let tape = Tape::new(&device, &parameters, policy, KEY);
                    let (got, _) =
                        differentiate(&device, example, &point, tape, wanted, course, &parameters, &mut sink).unwrap();
                    (got, parameter_gradients(&store, example))
                };
                assert_eq!(run(Course::Whole), run(Course::Halves), "{name}, {wanted} inputs, {policy:?}");
            }
        }
    };
    for row in TABLE.iter().filter(|row| row.differentiable) {
        examples(row.name, &device).iter().for_each(|example| halves(row.name, example));
    }
    halves("a block", &block());
    assert_eq!(device.pool().usage().live_total(), 0, "something leaked");
}

#[test]
fn what_has_no_derivative_says_so_by_name() {
    let device = Device::cpu(Isa::detect(), 2, None);
    for row in TABLE.iter().filter(|row| !row.differentiable) {
        let examples = plain::without_derivative(row.name);
        assert!(!examples.is_empty(), "`{}` has no example in this test", row.name);
        for (member, example) in &examples {
            let point: Vec<Vec<f32>> =
                example.inputs.iter().enumerate().map(|(i, s)| values(s.iter().product(), i)).collect();
            let error = backward(&device, example, &point, Policy::Everything).unwrap_err();
            let AutogradError::InBackward { source, .. } = error else { panic!("{member}: {error}") };
            assert!(matches!(*source, AutogradError::NotDifferentiable(name) if name == *member), "{member}: {source}");
        }
    }
}

/// A block of every function that models use, for comparing policies.
fn block() -> Example {
    let layout = HeadLayout { heads: 4, kv_heads: 2, head_dim: 6 };
    let spec = AttentionSpec::causal(4, 2, 6);
    let segments = Segments::new(&[0, 4, 9]).unwrap();
    example(
        &[&[9, 24]],
        &[&[24], &[layout.columns(), 24], &[24, 24], &[24], &[64, 24], &[24, 32], &[40, 24], &[24, 40]],
        move |t, x| {
            let h = &x[0];
            let n = t.rms_norm(h, p(0), 1e-5)?;
            let qkv = t.linear(&n, p(1), LinearOptions::default())?;
            let a = t.attention(&qkv, spec, &segments)?;
            let a = t.dropout(&a, 0.1, true)?;
            let h = t.linear(&a, p(2), LinearOptions { residual: Some(h), ..LinearOptions::default() })?;
            let n = t.rms_norm(&h, p(3), 1e-5)?;
            let gate_up = t.linear(&n, p(4), LinearOptions::default())?;
            let f = t.swiglu(&gate_up)?;
            let h = t.linear(&f, p(5), LinearOptions { residual: Some(&h), ..LinearOptions::default() })?;
            let up = t.linear(&h, p(6), LinearOptions::default())?;
            let up = t.activate(&up, Activation::GeluTanh)?;
            t.linear(&up, p(7), LinearOptions { residual: Some(&h), ..LinearOptions::default() })
        },
    )
}

#[test]
fn selective_keeps_less_and_changes_no_bit() {
    let device = Device::cpu(Isa::detect(), 2, None);
    let example = block();
    let shapes: Vec<&Vec<usize>> = example.inputs.iter().chain(&example.params).collect();
    let point: Vec<Vec<f32>> = shapes.iter().enumerate().map(|(i, s)| values(s.iter().product(), i)).collect();
    let everything = gradients(&device, &example, &point, Policy::Everything);
    let selective = gradients(&device, &example, &point, Policy::Selective);
    assert_eq!(everything, selective);

    let saved = |policy| {
        let store = store(&device, &example, &point);
        let mut tape = Tape::new(&device, &store, policy, KEY);
        let x = tape.leaf(device.tensor([9, 24], &point[0], Purpose::Activations).unwrap());
        (example.build)(&mut tape, &[x]).unwrap();
        tape.finish().saved_bytes()
    };
    assert!(saved(Policy::Selective) < saved(Policy::Everything));
    assert_eq!(saved(Policy::Nothing), 0);
    assert_eq!(device.pool().usage().live_total(), 0);
}

#[test]
fn a_loss_with_gradients_at_hand_gives_the_same_bits_and_refuses_another_upstream() {
    let device = Device::cpu(Isa::detect(), 2, None);
    let targets = ints(&device, &[3, 0, -100, 10]);
    let run = |eager: bool, upstream: f32| {
        let mut store = Store::new();
        store.insert(p(0), device.tensor([11, 5], &values(55, 1), Purpose::Params).unwrap());
        let (parameters, mut sink) = store.split();
        let (dx, error) = {
            // The sink is lent to the tape for forward, then to backward.
            let (x, loss, recording) = {
                let mut tape = Tape::new(&device, &parameters, Policy::Everything, KEY);
                if eager {
                    tape = tape.with_gradients(&mut sink);
                }
                let x = tape.leaf(device.tensor([4, 5], &values(20, 2), Purpose::Activations).unwrap());
                let loss = tape.linear_cross_entropy(&x, p(0), &targets, 0.25).unwrap();
                (x, loss, tape.finish())
            };
            let seed = device.tensor([], &[upstream], Purpose::Activations).unwrap();
            match recording.backward(&[(&loss, seed)], &[&x], &parameters, &mut sink) {
                Ok(mut got) => (got.remove(0).map(|t| t.to_f32_vec().unwrap()), None),
                Err(error) => (None, Some(error)),
            }
        };
        (dx, store.gradient(p(0)).map(|t| t.to_f32_vec().unwrap()), error)
    };
    let (eager, lazy) = (run(true, 1.0), run(false, 1.0));
    assert!(eager.0.is_some() && eager.0 == lazy.0 && eager.1 == lazy.1);
    let refused = run(true, 2.0).2.expect("an error");
    assert!(
        matches!(&refused, AutogradError::InBackward { source, .. } if matches!(**source, AutogradError::EagerUpstream(_)))
    );
}

#[test]
fn meta_counts_what_the_cpu_counts() {
    let example = block();
    let counted = |device: &Device| {
        device.set_profiling(true);
        let mut store = Store::new();
        for (index, shape) in example.params.iter().enumerate() {
            store.insert(p(index as u32), device.zeros(shape, DType::F32, Purpose::Params).unwrap());
        }
        let (parameters, mut sink) = store.split();
        let mut tape = Tape::new(device, &parameters, Policy::Selective, KEY);
        let x = tape.leaf(device.zeros([9, 24], DType::F32, Purpose::Activations).unwrap());
        let y = (example.build)(&mut tape, std::slice::from_ref(&x)).unwrap();
        let seed = device.zeros([9, 24], DType::F32, Purpose::Activations).unwrap();
        tape.finish().backward(&[(&y, seed)], &[&x], &parameters, &mut sink).unwrap();
        let calls: Vec<_> = device.take_profile().kernels.iter().map(|(name, k)| (*name, k.calls, k.cost)).collect();
        (calls, Purpose::ALL.map(|purpose| device.pool().usage().peak(purpose)))
    };
    assert_eq!(counted(&Device::meta()), counted(&Device::cpu(Isa::detect(), 2, None)));
}
