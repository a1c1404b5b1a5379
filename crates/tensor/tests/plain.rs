//! The plain operations against naive loops over multi-indices, on shapes that are odd and
//! broadcast in every way.

use proptest::prelude::*;
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::elementwise::{Binary, Compare};
use trainyard_tensor::cpu::gemm::Transpose;
use trainyard_tensor::ops::plain::{self, Dims};
use trainyard_tensor::reference::plain as oracle;
use trainyard_tensor::{DType, Device, Purpose, Shape, Tensor, ops};

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn cpu() -> Device {
    Device::cpu(Isa::detect(), 2, None)
}

/// Values in (0, 1) that every float dtype holds exactly.
fn tensor(device: &Device, shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| (((i + 1) * 7919 + seed * 31) % 127 + 1) as f32 / 128.0).collect();
    ops::cast(&device.tensor(shape, &values, Purpose::Activations).unwrap(), dtype).unwrap()
}

fn wide(x: &Tensor) -> Vec<f64> {
    x.to_f32_vec().unwrap().into_iter().map(f64::from).collect()
}

/// Equal up to one rounding of the dtype and `slack` roundings of f32.
#[track_caller]
fn close(what: &str, got: &Tensor, shape: &[usize], want: &[f64], slack: f64) {
    assert_eq!(got.shape()[..], *shape, "{what}");
    let unit = match got.dtype() {
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 1.0 / 16_777_216.0,
    };
    for (i, (got, want)) in wide(got).iter().zip(want).enumerate() {
        let off = (got - want).abs();
        let allowed = want.abs() * (unit + slack / 16_777_216.0) + slack / 16_777_216.0;
        assert!(off <= allowed, "{what}[{i}] of {shape:?}: {got} against {want}");
    }
}

/// Two shapes that broadcast together: a shape, dimensions of either set to 1, leading dimensions
/// of one dropped.
fn broadcasting() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    let dims = prop::collection::vec((1usize..6, 0..4), 0..5);
    (dims, 0usize..4, any::<bool>()).prop_map(|(dims, dropped, swap)| {
        let a = dims.iter().map(|(len, ones)| if *ones == 1 { 1 } else { *len }).collect::<Vec<_>>();
        let b: Vec<usize> = dims.iter().map(|(len, ones)| if *ones == 2 { 1 } else { *len }).collect();
        let b = b[dropped.min(b.len())..].to_vec();
        if swap { (b, a) } else { (a, b) }
    })
}

proptest! {
    #[test]
    fn arithmetic_broadcasts_as_in_numpy((sa, sb) in broadcasting(), which in 0..7usize, dtype in 0..3usize) {
        let (device, dtype, f) = (cpu(), FLOATS[dtype], Binary::ALL[which]);
        let (a, b) = (tensor(&device, &sa, 1, dtype), tensor(&device, &sb, 2, dtype));
        let exact = |a: f64, b: f64| match f {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Max => a.max(b),
            Binary::Min => a.min(b),
            Binary::Pow => a.powf(b),
        };
        let shape = oracle::broadcast(&sa, &sb);
        let want = oracle::zip(exact, (&wide(&a), &sa), (&wide(&b), &sb));
        close("binary", &plain::binary(f, &a, &b).unwrap(), &shape, &want, 4.0);

        // Gradients: for a gradient of ones, the slopes summed over what was broadcast.
        let ones = plain::expand(&device.tensor([], &[1.0f32], Purpose::Activations).unwrap(), &shape).unwrap();
        let ones = ops::cast(&ones, dtype).unwrap();
        let gradients = plain::binary_backward(f, &ones, &a, &b, [true, true]).unwrap();
        for (which, (gradient, target)) in gradients.iter().zip([&sa, &sb]).enumerate() {
            let slope = |a, b| oracle::slopes(f, a, b)[which];
            let full = oracle::zip(slope, (&wide(&a), &sa), (&wide(&b), &sb));
            let mut sums = vec![0.0; target.iter().product()];
            let mut sizes = sums.clone();
            for (i, slope) in full.iter().enumerate() {
                let at = oracle::element(target, &oracle::coordinates(&shape, i));
                sums[at] += slope;
                sizes[at] += slope.abs();
            }
            // Addends are rounded to the dtype before they are added.
            let gradient = wide(gradient.as_ref().unwrap());
            for ((got, sum), size) in gradient.iter().zip(&sums).zip(&sizes) {
                let unit = if dtype == DType::BF16 { 1.0 / 128.0 } else if dtype == DType::F16 { 1e-3 } else { 1e-5 };
                prop_assert!((got - sum).abs() <= unit * size + 1e-6, "{f:?} {sa:?} {sb:?}: {got} against {sum}");
            }
        }
    }

    #[test]
    fn comparison_and_selection_broadcast_too((sa, sb) in broadcasting()) {
        let device = cpu();
        let (a, b) = (tensor(&device, &sa, 1, DType::F32), tensor(&device, &sb, 2, DType::F32));
        let mask = plain::compare(Compare::GreaterEqual, &a, &b).unwrap();
        let chosen = plain::select(&mask, &a, &b).unwrap();
        let want = oracle::zip(f64::max, (&wide(&a), &sa), (&wide(&b), &sb));
        close("select", &chosen, &oracle::broadcast(&sa, &sb), &want, 0.0);
    }

    #[test]
    fn reductions_over_any_dimensions(
        shape in prop::collection::vec(1usize..6, 1..6),
        chosen in prop::collection::vec(any::<bool>(), 6),
        keep in any::<bool>(),
        dtype in 0..3usize,
    ) {
        let (device, dtype) = (cpu(), FLOATS[dtype]);
        let reduced = &chosen[..shape.len()];
        let which: Vec<i32> = (0..shape.len()).filter(|i| reduced[*i])
            .map(|i| if i % 2 == 0 { i as i32 } else { i as i32 - shape.len() as i32 }).collect();
        let dims = Dims::from(&which[..]);
        let dims = if keep { dims.keep() } else { dims };
        let x = tensor(&device, &shape, 1, dtype);
        let kept: Vec<usize> = (0..shape.len()).filter(|i| keep || !reduced[*i])
            .map(|i| if reduced[i] { 1 } else { shape[i] }).collect();
        let of = |f: &dyn Fn(&[f64]) -> f64| oracle::reduce(&wide(&x), &shape, reduced, f);
        let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
        close("sum", &plain::sum(&x, &dims).unwrap(), &kept, &of(&|x| x.iter().sum()), 64.0);
        close("mean", &plain::mean(&x, &dims).unwrap(), &kept, &of(&mean), 64.0);
        let most = of(&|x| x.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        close("amax", &plain::amax(&x, &dims).unwrap(), &kept, &most, 0.0);
        let variance = of(&|x| x.iter().map(|v| (v - mean(x)).powi(2)).sum::<f64>() / x.len() as f64);
        close("variance", &plain::variance(&x, &dims, 0).unwrap().0, &kept, &variance, 64.0);

        // Along one dimension.
        let dim = which.first().copied().unwrap_or(-1);
        let at = dim.rem_euclid(shape.len() as i32) as usize;
        let mut sums = wide(&x);
        let stride: usize = shape[at + 1..].iter().product();
        for i in 0..sums.len() {
            if !(i / stride).is_multiple_of(shape[at]) {
                sums[i] += sums[i - stride];
            }
        }
        close("cumulative sum", &plain::cumulative_sum(&x, dim).unwrap(), &shape, &sums, 16.0);
        let only: Vec<bool> = (0..shape.len()).map(|i| i == at).collect();
        let first = |x: &[f64]| x.iter().position(|v| x.iter().all(|w| v >= w)).unwrap() as f64;
        let places = oracle::reduce(&wide(&x), &shape, &only, first);
        let found = plain::to_float(&plain::argmax(&x, dim).unwrap(), DType::F32).unwrap();
        prop_assert_eq!(wide(&found), places);
    }

    #[test]
    fn rearranging_moves_every_element_to_its_place(
        shape in prop::collection::vec(1usize..9, 4),
        order in Just([0usize, 1, 2, 3]).prop_shuffle(),
        times in prop::collection::vec(1usize..4, 4),
        (dim, cut) in (0usize..4, any::<prop::sample::Index>()),
        dtype in 0..3usize,
    ) {
        let device = cpu();
        let x = tensor(&device, &shape, 1, FLOATS[dtype]);
        let signed: Vec<i32> = order.iter().map(|dim| *dim as i32).collect();
        let dims: Vec<usize> = order.iter().map(|dim| shape[*dim]).collect();
        let want = oracle::permute(&wide(&x), &shape, &order);
        close("permute", &plain::permute(&x, &signed).unwrap(), &dims, &want, 0.0);

        // Cut in two along a dimension and put together again, as forward and as backward do it.
        let start = cut.index(shape[dim] + 1);
        let rest = shape[dim] - start;
        let parts = [
            plain::narrow(&x, dim as i32, 0, start).unwrap(),
            plain::narrow(&x, dim as i32 - 4, start, rest).unwrap(),
        ];
        let whole = plain::concat(&[&parts[0], &parts[1]], dim as i32).unwrap();
        close("concat of parts", &whole, &shape, &wide(&x), 0.0);
        let first = plain::narrow_backward(&parts[0], &Shape::from(&shape), dim as i32, 0, None).unwrap();
        let both = plain::narrow_backward(&parts[1], &Shape::from(&shape), dim as i32, start, Some(first)).unwrap();
        close("sum of parts", &both, &shape, &wide(&x), 0.0);

        // Repetition, and the sum over repetitions: of small whole numbers, exact.
        let tiled = plain::repeat(&x, &times).unwrap();
        let big: Vec<usize> = shape.iter().zip(&times).map(|(len, times)| len * times).collect();
        let want: Vec<f64> = (0..big.iter().product()).map(|i| {
            let at: Vec<usize> = oracle::coordinates(&big, i).iter().zip(&shape).map(|(at, len)| at % len).collect();
            wide(&x)[oracle::element(&shape, &at)]
        }).collect();
        if want.len() < 4000 {
            close("repeat", &tiled, &big, &want, 0.0);
        }
        let ones = plain::with_number(Binary::Mul, &tiled, 0.0).unwrap();
        let ones = plain::with_number(Binary::Add, &ones, 1.0).unwrap();
        let count = times.iter().product::<usize>() as f64;
        let sums = plain::repeat_backward(&ones, &Shape::from(&shape), &times).unwrap();
        close("repeat backward", &sums, &shape, &vec![count; x.elements()], 0.0);
    }

    #[test]
    fn products_broadcast_batches(
        (batch_a, batch_b) in broadcasting(),
        (m, k, n) in (1usize..8, 1usize..8, 1usize..8),
        (ta, tb) in (any::<bool>(), any::<bool>()),
    ) {
        let device = cpu();
        let (sa, sb) = ([&batch_a[..], &[m, k]].concat(), [&batch_b[..], &[k, n]].concat());
        let (a, b) = (tensor(&device, &sa, 1, DType::F32), tensor(&device, &sb, 2, DType::F32));
        let want = oracle::matmul((&wide(&a), &sa), (&wide(&b), &sb));
        let shape = [&oracle::broadcast(&batch_a, &batch_b)[..], &[m, n]].concat();
        let lay = |x: &Tensor, transposed: bool| match transposed {
            true => (plain::transpose(x, -1, -2).unwrap(), Transpose::Yes),
            false => (x.clone(), Transpose::No),
        };
        let ((a, ta), (b, tb)) = (lay(&a, ta), lay(&b, tb));
        close("matmul", &plain::matmul(&a, ta, &b, tb).unwrap(), &shape, &want, 16.0);
    }
}

#[test]
fn reading_by_indices_along_any_dimension() {
    let device = cpu();
    for dtype in FLOATS {
        let shape = [3, 5, 4];
        let x = tensor(&device, &shape, 1, dtype);
        for (dim, chosen) in [(0i32, [2, 0, 2]), (1, [4, 4, 0]), (-1, [3, 1, 0])] {
            let indices = device.tensor([3], &chosen, Purpose::Data).unwrap();
            let at = dim.rem_euclid(3) as usize;
            let y = plain::index_select(&x, dim, &indices).unwrap();
            let mut big = shape;
            big[at] = 3;
            let mut sums = vec![0.0; 60];
            let want: Vec<f64> = (0..big.iter().product())
                .map(|i| {
                    let mut place = oracle::coordinates(&big, i);
                    place[at] = chosen[place[at]] as usize;
                    sums[oracle::element(&shape, &place)] += wide(&y)[i];
                    wide(&x)[oracle::element(&shape, &place)]
                })
                .collect();
            close("index_select", &y, &big, &want, 0.0);
            let back = plain::index_add(&y, x.shape(), dim, &indices).unwrap();
            close("index_add", &back, &shape, &sums, 2.0);
        }
        let (values, indices) = plain::top_k(&x, 2).unwrap();
        close("gather", &plain::gather(&x, &indices).unwrap(), &[3, 5, 2], &wide(&values), 0.0);
        let hot = plain::one_hot(&device, &indices, 4, dtype).unwrap();
        let marked = plain::sum(
            &plain::binary(
                Binary::Mul,
                &hot,
                &plain::expand(&x.reshape([3, 5, 1, 4]).unwrap(), &[3, 5, 2, 4]).unwrap(),
            )
            .unwrap(),
            &Dims::from(-1),
        )
        .unwrap();
        close("one_hot", &marked, &[3, 5, 2], &wide(&values), 0.0);
    }
}

#[test]
fn losses_are_their_formulas() {
    let device = cpu();
    for dtype in FLOATS {
        let (x, y) = (tensor(&device, &[4, 7], 1, dtype), tensor(&device, &[4, 7], 2, dtype));
        let mse = wide(&x).iter().zip(wide(&y)).map(|(a, b)| (a - b) * (a - b)).sum::<f64>() / 28.0;
        close("mse", &plain::mse_loss(&x, &y).unwrap(), &[], &[mse], 8.0);
        let targets = device.tensor([4], &[3, -100, 6, 0], Purpose::Data).unwrap();
        let rows = wide(&x);
        let of = |row: usize, target: usize| {
            let row = &rows[row * 7..][..7];
            row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[target]
        };
        let sum = of(0, 3) + of(2, 6) + of(3, 0);
        let (loss, _) = plain::cross_entropy(&x, &targets, plain::Reduction::Sum).unwrap();
        close("cross entropy", &loss, &[], &[sum], 32.0);
        let (loss, _) = plain::cross_entropy(&x, &targets, plain::Reduction::Mean).unwrap();
        close("cross entropy", &loss, &[], &[sum / 3.0], 32.0);
        let nobody = device.tensor([4], &[-100; 4], Purpose::Data).unwrap();
        let (loss, _) = plain::cross_entropy(&x, &nobody, plain::Reduction::Mean).unwrap();
        close("cross entropy of nothing", &loss, &[], &[0.0], 0.0);
    }
}

#[test]
fn slices_that_are_one_run_share_memory_and_others_do_not() {
    let device = cpu();
    let x = tensor(&device, &[4, 6], 1, DType::F32);
    assert_eq!(plain::narrow(&x, 0, 1, 2).unwrap().buffer_id(), x.buffer_id());
    assert_ne!(plain::narrow(&x, 1, 1, 2).unwrap().buffer_id(), x.buffer_id());
    assert_eq!(plain::permute(&x.reshape([4, 1, 6]).unwrap(), &[1, 0, 2]).unwrap().buffer_id(), x.buffer_id());
    assert_eq!(plain::expand(&x, &[1, 4, 6]).unwrap().buffer_id(), x.buffer_id());
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let run = |threads: usize| {
        let device = Device::cpu(Isa::detect(), threads, None);
        let (a, b) = (tensor(&device, &[70, 33, 40], 1, DType::BF16), tensor(&device, &[70, 1, 40], 2, DType::BF16));
        let y = plain::binary(Binary::Mul, &a, &b).unwrap();
        let [_, db] = plain::binary_backward(Binary::Div, &y, &a, &b, [false, true]).unwrap();
        let all = [
            y.clone(),
            db.unwrap(),
            plain::sum(&y, &Dims::from(0)).unwrap(),
            plain::mean(&y, &Dims::from(..)).unwrap(),
        ];
        all.map(|t| t.as_bytes().unwrap().to_vec())
    };
    assert_eq!(run(1), run(3));
}
