//! Examples of the plain functions, every member of every kind.

use super::{Example, example, ints};
use trainyard_autograd::{Result, Tape, Var};
use trainyard_tensor::cpu::gemm::Transpose::{No, Yes};
use trainyard_tensor::ops::plain::{Dims, Reduction};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

fn one(build: impl Fn(&mut Tape<'_>, &[Var]) -> Result<Var> + 'static) -> Example {
    example(&[&[3, 5]], &[], build)
}

/// Numbers in (0.5, 2.5).
fn positive(t: &mut Tape<'_>, x: &Var) -> Result<Var> {
    t.add_scalar(x, 1.5)
}

/// Shapes that broadcast in every way the kernels tell apart: not, rows, columns, scalars,
/// alternating.
const PAIRS: [[&[usize]; 2]; 9] = [
    [&[3, 5], &[3, 5]],
    [&[2, 3, 5], &[5]],
    [&[3, 1], &[4, 3, 5]],
    [&[4, 1], &[7]],
    [&[3, 5], &[]],
    [&[1, 1], &[2, 3]],
    [&[2, 3, 1, 4], &[3, 5, 1]],
    [&[2, 1, 3, 1], &[4, 1, 5]],
    [&[1, 3, 1], &[1, 3, 1]],
];

fn pairs(build: impl Fn(&mut Tape<'_>, &[Var]) -> Result<Var> + Clone + 'static) -> Vec<Example> {
    PAIRS.iter().map(|shapes| example(shapes, &[], build.clone())).collect()
}

fn table_of(device: &Device, shape: &[usize], values: &[u32]) -> Tensor {
    device.tensor(shape, values, Purpose::Data).unwrap()
}

/// Reductions of every pattern: all, the last, the first, the middle, outer ones, alternating,
/// kept.
fn dims() -> Vec<Dims> {
    let kept = |dims: Dims| dims.keep();
    vec![
        Dims::from(..),
        Dims::from(-1),
        Dims::from(0),
        kept(Dims::from(1)),
        Dims::from([0, 2]),
        kept(Dims::from([1, 3])),
        kept(Dims::from(..)),
    ]
}

fn reductions(build: impl Fn(&mut Tape<'_>, &Var, Dims) -> Result<Var> + Clone + 'static) -> Vec<Example> {
    let of = |dims: Dims| {
        let build = build.clone();
        example(&[&[3, 4, 2, 5]], &[], move |t, x| build(t, &x[0], dims.clone()))
    };
    dims().into_iter().map(of).collect()
}

/// At least one example for each member of the row `name`.
pub fn examples(name: &str, device: &Device) -> Vec<Example> {
    let device = device.clone();
    match name {
        "unary" => vec![
            one(|t, x| t.neg(&x[0])),
            one(|t, x| t.abs(&x[0])),
            one(|t, x| t.exp(&x[0])),
            one(|t, x| positive(t, &x[0]).and_then(|z| t.log(&z))),
            one(|t, x| positive(t, &x[0]).and_then(|z| t.sqrt(&z))),
            one(|t, x| positive(t, &x[0]).and_then(|z| t.rsqrt(&z))),
            one(|t, x| t.square(&x[0])),
            one(|t, x| positive(t, &x[0]).and_then(|z| t.reciprocal(&z))),
            one(|t, x| t.tanh(&x[0])),
            one(|t, x| t.sigmoid(&x[0])),
            one(|t, x| t.erf(&x[0])),
            one(|t, x| t.sign(&x[0])),
        ],
        "binary" => [
            pairs(|t, x| t.sub(&x[0], &x[1])),
            pairs(|t, x| t.mul(&x[0], &x[1])),
            pairs(|t, x| positive(t, &x[1]).and_then(|z| t.div(&x[0], &z))),
            pairs(|t, x| t.maximum(&x[0], &x[1])),
            pairs(|t, x| t.minimum(&x[0], &x[1])),
            pairs(|t, x| positive(t, &x[0]).and_then(|z| t.pow(&z, &x[1]))),
            vec![one(|t, x| t.mul(&x[0], &x[0]))],
        ]
        .into_iter()
        .flatten()
        .collect(),
        "with_number" => vec![
            one(|t, x| t.add_scalar(&x[0], -0.25)),
            one(|t, x| t.scale(&x[0], -1.75)),
            one(|t, x| positive(t, &x[0]).and_then(|z| t.pow_scalar(&z, 1.7))),
            one(|t, x| t.pow_scalar(&x[0], 2.0)),
            one(|t, x| positive(t, &x[0]).and_then(|z| t.pow_scalar(&z, -0.5))),
            one(|t, x| t.clamp(&x[0], -0.3, 0.6)),
            one(|t, x| t.clamp(&x[0], f32::NEG_INFINITY, 0.1)),
        ],
        // The result of a cast through f16 is a staircase with steps of 2^-11. Its share of the
        // result is small, so that the steps stay below the tolerance while its slope, 1/64, stays
        // above.
        "cast" => vec![one(|t, x| {
            let half = t.cast(&x[0], DType::F16)?;
            let back = t.cast(&half, DType::F32)?;
            let part = t.scale(&back, 1.0 / 64.0)?;
            let rest = t.scale(&x[0], 0.1)?;
            t.add(&part, &rest)
        })],
        "dropout_add" => vec![
            example(&[&[9, 33], &[9, 33]], &[], |t, x| t.dropout_add(&x[0], &x[1], 0.3, true)),
            example(&[&[3, 5], &[3, 5]], &[], |t, x| t.dropout_add(&x[0], &x[1], 0.3, false)),
        ],
        "where" => vec![
            example(&[&[2, 3, 5], &[3, 1]], &[], |t, x| {
                let zero = t.scale(&x[0], 0.0)?;
                let mask = t.gt(&x[0], &zero)?;
                t.where_(&mask, &x[0], &x[1])
            }),
            example(&[&[5, 5], &[]], &[], |t, x| {
                let mask = t.causal_mask(5, 5)?;
                t.where_(&mask, &x[1], &x[0])
            }),
        ],
        "masked_fill" => vec![example(&[&[2, 4, 6]], &[], |t, x| {
            let seen = t.causal_mask(4, 6)?;
            let hidden = t.logical_not(&seen)?;
            let scores = t.masked_fill(&x[0], &hidden, f32::NEG_INFINITY)?;
            t.softmax(&scores)
        })],
        "sum" => {
            let mut all = reductions(|t, x, dims| t.sum(x, dims));
            all.extend(reductions(|t, x, dims| t.mean(x, dims)));
            all
        }
        "amax" => reductions(|t, x, dims| t.amax(x, dims)),
        "variance" => reductions(|t, x, dims| t.var(x, dims, 1)),
        "softmax" => vec![
            example(&[&[2, 3, 17]], &[], |t, x| t.softmax(&x[0])),
            example(&[&[2, 3, 17]], &[], |t, x| t.log_softmax(&x[0])),
        ],
        "cumulative_sum" => (-3..3).map(|dim| example(&[&[2, 3, 5]], &[], move |t, x| t.cumsum(&x[0], dim))).collect(),
        "top_k" => vec![example(&[&[4, 9]], &[], |t, x| Ok(t.topk(&x[0], 3)?.0))],
        "rearrange" => vec![
            one(|t, x| t.reshape(&x[0], &[5, 1, 3])),
            one(|t, x| t.unsqueeze(&x[0], -1)),
            example(&[&[3, 1, 4]], &[], |t, x| t.squeeze(&x[0], 1)),
            example(&[&[2, 3, 4, 5]], &[], |t, x| t.permute(&x[0], &[2, 0, -1, 1])),
            example(&[&[2, 37, 35]], &[], |t, x| t.transpose(&x[0], -2, -1)),
            example(&[&[4, 3, 2]], &[], |t, x| t.narrow(&x[0], 0, 1, 2)),
            example(&[&[4, 3, 2]], &[], |t, x| t.narrow(&x[0], -2, 1, 2)),
            // The pieces' gradients meet in one.
            example(&[&[4, 7]], &[], |t, x| {
                let pieces = t.split(&x[0], &[3, 1, 3], -1)?;
                let y = t.mul(&pieces[0], &pieces[1])?;
                t.mul(&y, &pieces[2])
            }),
            example(&[&[3, 1]], &[], |t, x| t.expand(&x[0], &[2, 3, 4])),
            example(&[&[2, 3]], &[], |t, x| t.repeat(&x[0], &[3, 2, 2])),
        ],
        "concat" => vec![
            example(&[&[2, 3], &[2, 1], &[2, 4]], &[], |t, x| t.cat(&[&x[0], &x[1], &x[2], &x[1]], 1)),
            example(&[&[2, 3], &[1, 3]], &[], |t, x| t.cat(&[&x[0], &x[1]], 0)),
            example(&[&[2, 3], &[2, 3]], &[], |t, x| t.stack(&[&x[0], &x[1], &x[0]], -1)),
            example(&[&[2, 3], &[2, 3]], &[], |t, x| t.stack(&[&x[0], &x[1]], 0)),
        ],
        "gather" => {
            let (select, rows) = (ints(&device, &[3, 0, 3, 1]), table_of(&device, &[2, 3], &[4, 4, 0, 1, 2, 1]));
            let columns = select.clone();
            vec![
                example(&[&[4, 5]], &[], move |t, x| t.index_select(&x[0], 0, &select)),
                example(&[&[2, 4, 3]], &[], move |t, x| t.index_select(&x[0], 1, &columns)),
                example(&[&[2, 5]], &[], move |t, x| t.gather(&x[0], &rows)),
            ]
        }
        "index_add" => {
            let rows = ints(&device, &[3, 0, 3]);
            vec![example(&[&[4, 5], &[3, 5]], &[], move |t, x| t.index_add(&x[0], 0, &rows, &x[1]))]
        }
        "matmul" => {
            let mut all = Vec::new();
            let batches: [[&[usize]; 2]; 6] =
                [[&[], &[]], [&[3], &[3]], [&[2, 3], &[]], [&[], &[2]], [&[2, 1, 3], &[4, 1]], [&[1, 5], &[3, 1]]];
            for [left, right] in batches {
                for (ta, tb) in [(No, No), (No, Yes), (Yes, No), (Yes, Yes)] {
                    let of = |batch: &[usize], dims: [usize; 2], transposed| {
                        let [rows, columns] = dims;
                        [batch, &if transposed == Yes { [columns, rows] } else { [rows, columns] }].concat()
                    };
                    let (a, b) = (of(left, [2, 5], ta), of(right, [5, 3], tb));
                    all.push(example(&[&a, &b], &[], move |t, x| t.matmul_transposed(&x[0], ta, &x[1], tb)));
                }
            }
            all.push(example(&[&[2, 3], &[3, 4]], &[], |t, x| t.matmul(&x[0], &x[1])));
            all
        }
        "mse_loss" => vec![example(&[&[3, 5], &[3, 5]], &[], |t, x| t.mse_loss(&x[0], &x[1]))],
        "cross_entropy" => {
            let of = |reduction| {
                let targets = ints(&device, &[3, 0, -100, 6]);
                example(&[&[4, 7]], &[], move |t, x| {
                    let loss = t.cross_entropy(&x[0], &targets, reduction)?;
                    t.scale(&loss, 0.5)
                })
            };
            vec![of(Reduction::Mean), of(Reduction::Sum)]
        }
        _ => Vec::new(),
    }
}

/// Examples of the members of a row without a derivative, with the name that the error gives.
pub fn without_derivative(name: &str) -> Vec<(&'static str, Example)> {
    fn as_number(t: &mut Tape<'_>, mask: Var) -> Result<Var> {
        t.cast(&mask, DType::F32)
    }
    macro_rules! masks {
        ($($name:ident)*) => {
            vec![$((stringify!($name), example(&[&[3, 5], &[5]], &[], |t, x| {
                let mask = t.$name(&x[0], &x[1])?;
                as_number(t, mask)
            })),)*]
        };
    }
    macro_rules! logic {
        ($($name:ident)*) => {
            vec![$((stringify!($name), example(&[&[3, 5], &[5]], &[], |t, x| {
                let (a, b) = (t.gt(&x[0], &x[1])?, t.eq(&x[0], &x[1])?);
                let mask = t.$name(&a, &b)?;
                as_number(t, mask)
            })),)*]
        };
    }
    match name {
        "mask" => {
            let mut all = masks![gt ge lt le eq];
            all.extend(logic![logical_and logical_or logical_xor]);
            all.push((
                "logical_not",
                example(&[&[3, 5], &[5]], &[], |t, x| {
                    let mask = t.ge(&x[0], &x[1])?;
                    let mask = t.logical_not(&mask)?;
                    as_number(t, mask)
                }),
            ));
            all
        }
        "argmax" => vec![(
            "argmax",
            one(|t, x| {
                let at = t.argmax(&x[0], -1)?;
                as_number(t, at)
            }),
        )],
        _ => Vec::new(),
    }
}
