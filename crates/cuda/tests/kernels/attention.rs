//! Attention in all its forms, with the bounds of the CPU's suite (`cpu::attention::tests`). The
//! form on tensor cores has those of the CPU's tiles, which round probabilities and their gradients
//! to the operands' dtype too.

mod biased;

use super::device::{Buffer, NULL, both_orders, dtypes, float, launch, on_hopper, values, wide};
use trainyard_cuda::kernels::{self, Argument, AttentionForm, AttentionKernels, Float};
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::reference::attention::{self as oracle, Valued};
use trainyard_tensor::{DType, Element, bf16, f16};

fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    }
}

/// The largest distance of results from the oracle's.
#[derive(Clone, Copy)]
struct Tolerance {
    /// Relative to the magnitude of the terms: errors of probabilities and of sums.
    terms: f64,
    /// Relative to the result: storing it.
    stored: f64,
}

impl Tolerance {
    /// Scores are sums of head_dim products, each rounding relative to the largest of the pair's
    /// magnitudes; a probability is the exponential of a difference of two such, and sums over
    /// `keys` add their roundings. On tensor cores probabilities are rounded to the operands' dtype
    /// before they multiply, and the exponential is a power of two of a score that was multiplied
    /// once more.
    fn of(dtype: DType, tensor_cores: bool, spec: &AttentionSpec, score: f64, keys: usize) -> Tolerance {
        let u = unit(DType::F32);
        let exponential = if tensor_cores { 3e-6 } else { 4e-7 };
        let probability = 2.0 * ((spec.head_dim as f64 + 4.0) * u * score + exponential) + (2 * keys + 4) as f64 * u;
        Tolerance { terms: probability + if tensor_cores { unit(dtype) } else { 0.0 }, stored: unit(dtype) }
    }

    /// dQ and dK: delta is made of the stored output, so that one more storage rounding of the
    /// terms of dS enters.
    fn of_scores(self) -> Tolerance {
        Tolerance { terms: self.terms + self.stored, ..self }
    }

    #[track_caller]
    fn check<T: Element>(&self, what: &str, got: &[T], want: &Valued) {
        assert_eq!(got.len(), want.value.len(), "{what}");
        for (i, got) in wide(got).into_iter().enumerate() {
            let (value, magnitude) = (want.value[i], want.magnitude[i]);
            // 1.01: products of two roundings. 1e-7: the spacing of subnormal f16.
            let bound = 1.01 * (self.terms * magnitude + self.stored * value.abs()) + 1e-7;
            assert!((got - value).abs() <= bound, "{what}[{i}]: {got}, not {value} within {bound:e}");
        }
    }
}

/// Some columns of every row.
fn columns<T: Copy>(x: &[T], width: usize, range: std::ops::Range<usize>) -> Vec<T> {
    x.chunks_exact(width.max(1)).flat_map(|row| row[range.clone()].to_vec()).collect()
}

fn scaled<T: Element>(seed: u64, len: usize) -> Vec<T> {
    values::<f32>(seed, len).iter().map(|x| T::from_f32(x * 1.5)).collect()
}

/// The first row of each row's segment, and the one after its last.
fn bounds(cu: &[i32]) -> [Buffer<i32>; 2] {
    let each = |which: usize| -> Vec<i32> {
        cu.windows(2).flat_map(|pair| vec![pair[which]; (pair[1] - pair[0]) as usize]).collect()
    };
    [0, 1].map(|which| Buffer::new(&each(which)))
}

/// Queries and keys: rows, and elements from one row to the next.
#[derive(Clone, Copy)]
struct Sizes {
    queries: [usize; 2],
    keys: [usize; 2],
}

/// The arguments after the pointers: `sizes`, heads, and the mask.
fn shape(spec: &AttentionSpec, sizes: &[usize]) -> Vec<Argument> {
    let heads = [spec.heads, spec.kv_heads, spec.head_dim];
    let sizes = sizes.iter().chain(&heads).map(|n| Argument::I32(*n as i32));
    let window = Argument::I32(spec.window.unwrap_or(0) as i32);
    sizes.chain([Argument::F32(spec.scale), Argument::I32(i32::from(spec.causal)), window]).collect()
}

/// Forward of queries and keys that lie at pointers: out and lse.
fn forward_at<T: Element>(
    kernels: AttentionKernels,
    spec: &AttentionSpec,
    [q, kv]: [Argument; 2],
    Sizes { queries: [rows, q_stride], keys: [_, kv_stride] }: Sizes,
    seen: &[Buffer<i32>; 2],
) -> (Vec<T>, Vec<f32>) {
    let (out, lse) = (Buffer::<T>::empty(rows * spec.q_cols()), Buffer::<f32>::empty(spec.heads * rows));
    let pointers = [q, kv, out.at(), lse.at(), seen[0].at(), seen[1].at()];
    let arguments = [&pointers[..], &shape(spec, &[rows, q_stride, kv_stride])].concat();
    launch(kernels.forward, float::<T>(), [rows, spec.heads, spec.head_dim], &arguments);
    (out.get(), lse.get())
}

/// Writes the gradients of queries and keys to pointers.
fn backward_at<T: Element>(
    kernels: AttentionKernels,
    spec: &AttentionSpec,
    [q, kv, dq, dkv]: [Argument; 4],
    Sizes { queries: [queries, q_stride], keys: [keys, kv_stride] }: Sizes,
    [seen, seeing]: [&[Buffer<i32>; 2]; 2],
    (dout, out, lse): (&[T], &[T], &[f32]),
) {
    let delta = Buffer::<f32>::empty(spec.heads * queries);
    let (dout, out, lse) = (Buffer::new(dout), Buffer::new(out), Buffer::new(lse));
    let sizes = [queries, spec.heads, spec.head_dim].map(|n| Argument::I32(n as i32));
    let arguments = [&[dout.at(), out.at(), NULL, delta.at()][..], &sizes].concat();
    launch(&kernels::ATTENTION_DELTA, float::<T>(), [queries * spec.heads, 1, 1], &arguments);
    let given = [q, kv, dout.at(), lse.at(), delta.at()];
    let of_queries = [&given[..], &[seen[0].at(), seen[1].at(), dq]].concat();
    let arguments = [&of_queries[..], &shape(spec, &[queries, q_stride, kv_stride])].concat();
    launch(kernels.backward_queries, float::<T>(), [queries, spec.heads, spec.head_dim], &arguments);
    let of_keys = [&given[..], &[seeing[0].at(), seeing[1].at(), dkv]].concat();
    let arguments = [&of_keys[..], &shape(spec, &[keys, queries, q_stride, kv_stride])].concat();
    launch(kernels.backward_keys, float::<T>(), [keys, spec.kv_heads, spec.head_dim], &arguments);
}

fn fused(spec: &AttentionSpec, tokens: usize) -> Sizes {
    let size = [tokens, spec.q_cols() + 2 * spec.kv_cols()];
    Sizes { queries: size, keys: size }
}

/// Forward of a fused matrix: out and lse.
fn forward<T: Element>(kernels: AttentionKernels, spec: &AttentionSpec, cu: &[i32], qkv: &[T]) -> (Vec<T>, Vec<f32>) {
    let qkv = Buffer::new(qkv);
    let read = [qkv.at(), qkv.at_element(spec.q_cols())];
    forward_at(kernels, spec, read, fused(spec, *cu.last().unwrap() as usize), &bounds(cu))
}

fn backward<T: Element>(
    kernels: AttentionKernels,
    spec: &AttentionSpec,
    cu: &[i32],
    qkv: &[T],
    dout: &[T],
    out: &[T],
    lse: &[f32],
) -> Vec<T> {
    let (dqkv, qkv, seen) = (Buffer::<T>::empty(qkv.len()), Buffer::new(qkv), bounds(cu));
    let [keys, of_keys] = [&qkv, &dqkv].map(|matrix| matrix.at_element(spec.q_cols()));
    let pointers = [qkv.at(), keys, dqkv.at(), of_keys];
    let sizes = fused(spec, *cu.last().unwrap() as usize);
    backward_at(kernels, spec, pointers, sizes, [&seen, &seen], (dout, out, lse));
    dqkv.get()
}

/// The forms on tensor cores that take these heads here, else multiply-adds.
fn forms<T: Element>(head_dim: usize, scale: f32, aligned: bool) -> Vec<AttentionForm> {
    let here = |form| form != AttentionForm::Warpgroups || on_hopper();
    let cores = [AttentionForm::Warps, AttentionForm::Warpgroups].into_iter();
    let cores: Vec<_> =
        cores.filter(|form| form.takes(float::<T>(), head_dim, scale, aligned) && here(*form)).collect();
    if cores.is_empty() { vec![AttentionForm::MultiplyAdds] } else { cores }
}

/// Runs forward and backward on a fused matrix, in every form that takes it, and checks both
/// against the oracle.
fn conforms<T: Element>(aligned: bool, spec: &AttentionSpec, cu: &[i32]) {
    for form in forms::<T>(spec.head_dim, spec.scale, aligned) {
        form_conforms::<T>(form, spec, cu);
    }
}

fn form_conforms<T: Element>(form: AttentionForm, spec: &AttentionSpec, cu: &[i32]) {
    let tokens = *cu.last().unwrap() as usize;
    let (nq, nkv) = (spec.q_cols(), spec.kv_cols());
    let width = nq + 2 * nkv;
    let (qkv, dout) = (scaled::<T>(1, tokens * width), scaled::<T>(2, tokens * nq));
    let kernels = form.kernels(spec.head_dim);
    let tensor_cores = form != AttentionForm::MultiplyAdds;
    let (out, lse) = both_orders(|| forward(kernels, spec, cu, &qkv));
    let dqkv = both_orders(|| backward(kernels, spec, cu, &qkv, &dout, &out, &lse));

    let [q, k, v] = [0..nq, nq..nq + nkv, nq + nkv..width].map(|range| wide(&columns(&qkv, width, range)));
    let want = oracle::forward(spec, &q, &k, &v, cu, cu);
    let longest = cu.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0) as usize;
    let tolerance = Tolerance::of(T::DTYPE, tensor_cores, spec, want.score_magnitude, longest * spec.group());
    let name = format!("{} {} {spec:?} {cu:?}", kernels.forward.name, T::DTYPE);
    tolerance.check(&format!("out of {name}"), &out, &want.out);
    for (i, (got, want)) in lse.iter().zip(&want.lse).enumerate() {
        // The logarithm turns the relative error of the sum into an absolute one; adding the
        // maximum rounds once more.
        let bound = tolerance.terms.min(1e-4) + unit(DType::F32) * want.abs() * 2.0;
        assert!((f64::from(*got) - want).abs() <= bound, "lse[{i}] of {name}: {got}, not {want} within {bound:e}");
    }
    let want = oracle::backward(spec, &q, &k, &v, &wide(&dout), cu, cu);
    tolerance.of_scores().check(&format!("dq of {name}"), &columns(&dqkv, width, 0..nq), &want.dq);
    tolerance.of_scores().check(&format!("dk of {name}"), &columns(&dqkv, width, nq..nq + nkv), &want.dk);
    tolerance.check(&format!("dv of {name}"), &columns(&dqkv, width, nq + nkv..width), &want.dv);
}

#[test]
fn heads_of_any_size_conform() {
    for head_dim in [1, 7, 16, 33, 64, 80, 128, 130, 256] {
        let spec = AttentionSpec::causal(2, 2, head_dim);
        conforms::<f32>(true, &spec, &[0, 23, 60]);
        conforms::<bf16>(false, &spec, &[0, 23, 60]);
        conforms::<bf16>(true, &spec, &[0, 23, 60]);
        conforms::<f16>(true, &spec, &[0, 23, 60]);
    }
}

dtypes! {
    fn segments_of_any_length_conform<T>() {
        let spec = AttentionSpec::causal(1, 1, 32);
        for cu in [&[0][..], &[0, 0], &[0, 1], &[0, 1, 1, 2, 5, 5], &[0, 15, 31, 63, 127, 200], &[0, 16, 48, 112]] {
            conforms::<T>(true, &spec, cu);
            conforms::<T>(true, &AttentionSpec { causal: false, ..spec }, cu);
        }
    }
}

#[test]
fn grouped_heads_and_windows_conform() {
    for (heads, kv_heads) in [(4, 2), (3, 1)] {
        for window in [None, Some(1), Some(5), Some(70), Some(1000)] {
            let spec = AttentionSpec { window, ..AttentionSpec::causal(heads, kv_heads, 40) };
            conforms::<f32>(true, &spec, &[0, 90, 101]);
            conforms::<bf16>(true, &spec, &[0, 90, 161]);
        }
    }
}

#[test]
fn sequences_longer_than_every_tile_conform() {
    for window in [None, Some(150)] {
        conforms::<bf16>(true, &AttentionSpec { window, ..AttentionSpec::causal(2, 1, 64) }, &[0, 301]);
    }
    conforms::<bf16>(true, &AttentionSpec::causal(1, 1, 128), &[0, 261]);
    conforms::<bf16>(true, &AttentionSpec { causal: false, ..AttentionSpec::causal(2, 1, 32) }, &[0, 301]);
}

/// Segments of fewer queries than keys, whose last ones pair up; of no queries, whose keys have
/// gradients of zero; and of no keys, whose queries see nothing.
#[test]
fn queries_over_keys_in_rows_of_their_own_conform() {
    fn check<T: Element>(spec: &AttentionSpec, cu_q: &[i32], cu_k: &[i32]) {
        let (queries, keys) = (cu_q[cu_q.len() - 1], cu_k[cu_k.len() - 1]);
        let segments = || cu_q.windows(2).zip(cu_k.windows(2));
        // The keys of each query, and the queries of each key.
        let (mut seen, mut seeing) = ([vec![], vec![]], [vec![], vec![]]);
        for (q, k) in segments() {
            let apart = k[1] - q[1];
            let window = spec.window.map_or(keys, |window| window as i32);
            for query in q[0]..q[1] {
                let position = query + apart;
                seen[0].push(k[0].max(position - window + 1));
                seen[1].push(if spec.causal { position + 1 } else { k[1] });
            }
            for key in k[0]..k[1] {
                let first = if spec.causal { (key - apart).clamp(q[0], q[1]) } else { q[0] };
                seeing[0].push(first);
                seeing[1]
                    .push(if spec.causal { q[1].min((key - apart).saturating_add(window)) } else { q[1] }.max(first));
            }
        }
        let [seen, seeing] = [seen, seeing].map(|bounds| bounds.map(|bounds| Buffer::new(&bounds)));
        let plain = AttentionSpec { causal: false, window: None, ..*spec };
        let (queries, keys) = (queries as usize, keys as usize);
        let (nq, nkv) = (spec.q_cols(), spec.kv_cols());
        let sizes = Sizes { queries: [queries, nq], keys: [keys, 2 * nkv] };
        let (q, kv, dout) =
            (scaled::<T>(1, queries * nq), scaled::<T>(2, keys * 2 * nkv), scaled::<T>(3, queries * nq));
        let [k, v] = [0..nkv, nkv..2 * nkv].map(|range| wide(&columns(&kv, 2 * nkv, range)));
        let want = oracle::forward(spec, &wide(&q), &k, &v, cu_q, cu_k);
        let gradients = oracle::backward(spec, &wide(&q), &k, &v, &wide(&dout), cu_q, cu_k);
        for form in forms::<T>(spec.head_dim, spec.scale, true) {
            let kernels = form.kernels(spec.head_dim);
            let (q, kv) = (Buffer::new(&q), Buffer::new(&kv));
            let (out, lse) = both_orders(|| forward_at::<T>(kernels, &plain, [q.at(), kv.at()], sizes, &seen));
            let (dq, dkv) = both_orders(|| {
                let (dq, dkv) = (Buffer::<T>::empty(queries * nq), Buffer::<T>::empty(keys * 2 * nkv));
                let pointers = [q.at(), kv.at(), dq.at(), dkv.at()];
                backward_at(kernels, &plain, pointers, sizes, [&seen, &seeing], (&dout, &out, &lse));
                (dq.get(), dkv.get())
            });
            let cores = form != AttentionForm::MultiplyAdds;
            let tolerance = Tolerance::of(T::DTYPE, cores, spec, want.score_magnitude, keys * spec.group());
            let name = format!("{} {} {spec:?} {cu_q:?} {cu_k:?}", kernels.forward.name, T::DTYPE);
            tolerance.check(&format!("out of {name}"), &out, &want.out);
            for (got, want) in lse.iter().zip(&want.lse) {
                let close = (f64::from(*got) - want).abs() <= 1e-4 + unit(DType::F32) * want.abs() * 2.0;
                assert!(close || f64::from(*got) == *want, "lse of {name}: {got}, not {want}");
            }
            let of_scores = tolerance.of_scores();
            of_scores.check(&format!("dq of {name}"), &dq, &gradients.dq);
            of_scores.check(&format!("dk of {name}"), &columns(&dkv, 2 * nkv, 0..nkv), &gradients.dk);
            tolerance.check(&format!("dv of {name}"), &columns(&dkv, 2 * nkv, nkv..2 * nkv), &gradients.dv);
        }
    }
    let few: [&[i32]; 2] = [&[0, 20, 20, 47], &[0, 30, 170, 200]];
    let many: [&[i32]; 2] = [&[0, 0, 5, 140], &[0, 140, 145, 300]];
    for window in [None, Some(9)] {
        let spec = AttentionSpec { window, ..AttentionSpec::causal(2, 1, 64) };
        check::<f32>(&AttentionSpec { head_dim: 33, ..spec }, few[0], few[1]);
        check::<bf16>(&spec, many[0], many[1]);
    }
    check::<bf16>(&AttentionSpec { causal: false, ..AttentionSpec::causal(2, 2, 128) }, few[0], few[1]);
    // Queries that see nothing.
    check::<f32>(&AttentionSpec { causal: false, ..AttentionSpec::causal(2, 1, 16) }, &[0, 30, 40], &[0, 0, 50]);
    check::<bf16>(&AttentionSpec { causal: false, ..AttentionSpec::causal(2, 1, 64) }, &[0, 130, 170], &[0, 0, 50]);
}

#[test]
fn scores_of_any_size_conform() {
    // Scores of some +-200 make nearly one-hot probabilities and underflow most exponentials.
    let spec = AttentionSpec { scale: 20.0, ..AttentionSpec::causal(1, 1, 16) };
    conforms::<f32>(true, &spec, &[0, 90]);
    conforms::<bf16>(true, &spec, &[0, 90]);
    conforms::<bf16>(true, &AttentionSpec { scale: -3.0, ..spec }, &[0, 90]);
    conforms::<bf16>(true, &AttentionSpec { scale: 0.0, ..spec }, &[0, 90]);
}

#[test]
fn values_that_are_not_finite_are_not_hidden() {
    fn check<T: Element>(aligned: bool) {
        let spec = AttentionSpec::causal(1, 1, 32);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut qkv: Vec<T> = scaled(1, 40 * 96);
            qkv[20 * 96 + 3] = T::from_f32(bad);
            for form in forms::<T>(32, spec.scale, aligned) {
                let (out, _) = forward(form.kernels(32), &spec, &[0, 40], &qkv);
                let finite = |row: usize| out[row * 32..(row + 1) * 32].iter().all(|x| x.to_f32().is_finite());
                assert!((0..40).all(|row| finite(row) == (row != 20)), "{form:?} {bad}");
            }
        }
    }
    check::<f32>(true);
    check::<bf16>(true);
}

dtypes! {
    fn decoding_gives_what_forward_gives<T>() {
        for spec in
            [AttentionSpec::causal(4, 2, 24), AttentionSpec { window: Some(17), ..AttentionSpec::causal(2, 2, 64) }]
        {
            let (len, nq, nkv) = (50, spec.q_cols(), spec.kv_cols());
            let width = nq + 2 * nkv;
            let qkv = scaled::<T>(1, len * width);
            let [q, k, v] = [0..nq, nq..nq + nkv, nq + nkv..width].map(|range| wide(&columns(&qkv, width, range)));
            let cu = [0, len as i32];
            let want = oracle::forward(&spec, &q, &k, &v, &cu, &cu);
            let (keys, cached) = (Buffer::<T>::empty((len + 3) * nkv), Buffer::<T>::empty((len + 3) * nkv));
            let mut start = 0;
            for new in [1, 1, 3, 20, 1, 24] {
                let fresh = Buffer::new(&qkv[start * width..(start + new) * width]);
                let heads = [spec.heads, spec.kv_heads, spec.head_dim];
                let shape = [new, start, heads[0], heads[1], heads[2]].map(|n| Argument::I32(n as i32));
                let arguments = [&[fresh.at(), keys.at(), cached.at()][..], &shape].concat();
                launch(&kernels::CACHE_APPEND, float::<T>(), [new * nkv, 1, 1], &arguments);
                let out = both_orders(|| {
                    let out = Buffer::<T>::empty(new * nq);
                    let last = [Argument::F32(spec.scale), Argument::I32(1), Argument::I32(spec.window.unwrap_or(0) as i32)];
                    let arguments = [&[fresh.at(), keys.at(), cached.at(), out.at()][..], &shape, &last].concat();
                    launch(&kernels::ATTENTION_DECODE, float::<T>(), [new, spec.heads, spec.head_dim], &arguments);
                    out.get()
                });
                let range = start * nq..(start + new) * nq;
                let part = Valued { value: want.out.value[range.clone()].to_vec(), magnitude: want.out.magnitude[range].to_vec() };
                Tolerance::of(T::DTYPE, false, &spec, want.score_magnitude, len).check("out", &out, &part);
                start += new;
            }
            assert_eq!(start, len);
        }
    }
}

#[test]
fn forms_take_the_heads_that_they_have_kernels_for() {
    let takes_scale = |float, head_dim, scale, aligned| {
        [AttentionForm::MultiplyAdds, AttentionForm::Warps, AttentionForm::Warpgroups]
            .map(|form| form.takes(float, head_dim, scale, aligned))
    };
    let takes = |float, head_dim, aligned| takes_scale(float, head_dim, 0.125, aligned);
    for scale in [0.0, -1.0] {
        assert_eq!(takes_scale(Float::Bf16, 64, scale, true), [true, false, false]);
    }
    assert_eq!(takes(Float::Bf16, 64, true), [true, true, true]);
    assert_eq!(takes(Float::F16, 72, true), [true, true, true]);
    assert_eq!(takes(Float::Bf16, 64, false), [true, false, false]);
    assert_eq!(takes(Float::Bf16, 60, true), [true, false, false]);
    assert_eq!(takes(Float::F32, 64, true), [true, false, false]);
    assert_eq!(takes(Float::Bf16, 256, true), [true, false, false]);
    assert_eq!(takes(Float::Bf16, 257, true), [false, false, false]);
    assert_eq!(takes(Float::Bf16, 0, true), [false, false, false]);
    assert_eq!(AttentionForm::Warps.kernels(64).forward.name, "attention_mma_64");
    assert_eq!(AttentionForm::Warpgroups.kernels(72).forward.name, "attention_warpgroup_128");
}
