//! Conformance of every rung and dtype with the f64 oracle, within bounds that follow from the
//! arithmetic.

use super::*;
use crate::dtype::{bf16, f16};
use crate::reference::attention as reference;
use crate::reference::attention::Valued;

/// The rungs to test: those that the machine has and, where only the tiles are missing, the tile
/// form on emulated ones.
fn rungs() -> Vec<Isa> {
    let mut rungs: Vec<Isa> = Isa::tested(Isa::Avx512Bf16).collect();
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    if Isa::detect() == Isa::Avx512Bf16 {
        crate::cpu::tile_emulator::install();
        rungs.push(Isa::AmxBf16);
    }
    rungs
}

/// True if operands of `dtype` can be tested on a rung of [`rungs`]. On emulated tiles, only
/// operands that use tiles can.
fn runs(isa: Isa, dtype: DType) -> bool {
    isa <= Isa::detect() || Form::of(isa, dtype) == Form::Tiles
}

/// Deterministic values in (-1, 1), different for each stream.
fn values(stream: u64, len: usize) -> Vec<f32> {
    let mut state = stream.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 1.5
        })
        .collect()
}

fn rounded<T: Element>(x: &[f32]) -> Vec<T> {
    x.iter().map(|x| T::from_f32(*x)).collect()
}

fn wide<T: Element>(x: Rows<'_, T>) -> Vec<f64> {
    (0..x.rows()).flat_map(|row| x.row(row).iter().map(|x| x.to_f32() as f64)).collect()
}

/// Unit roundoff of a storage type.
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
    /// Forward, and dV: the probabilities' error. With `u` the f32 roundoff: a score is a sum of
    /// `d` products, scaled and shifted, which errs by `(d + 4) u` of its magnitude, and so,
    /// relatively, does its exponential; the exponential itself errs by 4e-7 (tested with the lane
    /// vectors), on tiles by 2.6e-6 and its rounding; the normaliser and the sum over `n` keys by
    /// `n u` and the same again. Tiles round probabilities to bf16 besides.
    fn of(isa: Isa, dtype: DType, spec: &AttentionSpec, score: f64, keys: usize) -> Tolerance {
        let u = unit(DType::F32);
        let tiles = Form::of(isa, dtype) != Form::Vector;
        let exponential = if tiles { 3e-6 } else { 4e-7 };
        let probability = 2.0 * ((spec.head_dim as f64 + 4.0) * u * score + exponential) + (2 * keys + 4) as f64 * u;
        let tiles = if tiles { unit(DType::BF16) } else { 0.0 };
        Tolerance { terms: probability + tiles, stored: unit(dtype) }
    }

    /// dQ and dK: delta is made of the stored output, so that one more storage rounding of the
    /// terms of dS enters.
    fn of_scores(self) -> Tolerance {
        Tolerance { terms: self.terms + self.stored, ..self }
    }

    #[track_caller]
    fn check<T: Element>(&self, what: &str, got: Rows<'_, T>, want: &Valued) {
        for (i, got) in wide(got).into_iter().enumerate() {
            let (value, magnitude) = (want.value[i], want.magnitude[i]);
            // 1.01: products of two roundings. 1e-7: the spacing of subnormal f16.
            let bound = 1.01 * (self.terms * magnitude + self.stored * value.abs()) + 1e-7;
            assert!((got - value).abs() <= bound, "{what}[{i}]: {got}, not {value} within {bound:e}");
        }
    }
}

struct Results<T> {
    out: Vec<T>,
    lse: Vec<f32>,
    dqkv: Vec<T>,
}

/// Runs forward and backward on column ranges of one fused matrix, as models do, and checks both
/// against the oracle.
fn conforms<T: Element>(isa: Isa, threads: usize, spec: &AttentionSpec, cu: &[i32]) -> Results<T> {
    if !runs(isa, T::DTYPE) {
        return Results { out: Vec::new(), lse: Vec::new(), dqkv: Vec::new() };
    }
    let tokens = *cu.last().unwrap() as usize;
    let (nq, nkv) = (spec.q_cols(), spec.kv_cols());
    let (fused, gap) = (nq + 2 * nkv, 3);
    let qkv: Vec<T> = rounded(&values(1, tokens * (fused + gap)));
    let dout: Vec<T> = rounded(&values(2, tokens * nq));
    let rows = Rows::new(&qkv, tokens, fused, fused + gap).unwrap();
    let (q, k, v) = (rows.columns(0..nq), rows.columns(nq..nq + nkv), rows.columns(nq + nkv..fused));
    let dout_rows = Rows::dense(&dout, tokens, nq).unwrap();
    let cpu = Cpu::new(isa, threads);

    let mut out = vec![T::from_f32(7.0); tokens * nq];
    let mut lse = vec![7.0; spec.heads * tokens];
    forward(&cpu, spec, q, k, v, cu, RowsMut::dense(&mut out, tokens, nq).unwrap(), &mut lse).unwrap();
    let mut dqkv = vec![T::from_f32(7.0); tokens * (fused + gap)];
    let (dq, rest) = RowsMut::new(&mut dqkv, tokens, fused, fused + gap).unwrap().split_columns(nq);
    let (dk, dv) = rest.split_columns(nkv);
    let out_rows = Rows::dense(&out, tokens, nq).unwrap();
    backward(&cpu, spec, q, k, v, out_rows, &lse, dout_rows, cu, dq, dk, dv).unwrap();

    let (q64, k64, v64) = (wide(q), wide(k), wide(v));
    let want = reference::forward(spec, &q64, &k64, &v64, cu, cu);
    let longest = cu.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0) as usize;
    let tolerance = || Tolerance::of(isa, T::DTYPE, spec, want.score_magnitude, longest * spec.group());
    let name = format!("{isa} {} {spec:?} {cu:?}", T::DTYPE);
    tolerance().check(&format!("out of {name}"), out_rows, &want.out);
    for (i, (got, want)) in lse.iter().zip(&want.lse).enumerate() {
        // The logarithm turns the relative error of the sum into an absolute one; adding the
        // maximum rounds once more.
        let bound = tolerance().terms.min(1e-4) + unit(DType::F32) * want.abs() * 2.0;
        assert!((*got as f64 - want).abs() <= bound, "lse[{i}] of {name}: {got}, not {want} within {bound:e}");
    }
    let want = reference::backward(spec, &q64, &k64, &v64, &wide(dout_rows), cu, cu);
    let rows = Rows::new(&dqkv, tokens, fused, fused + gap).unwrap();
    tolerance().of_scores().check(&format!("dq of {name}"), rows.columns(0..nq), &want.dq);
    tolerance().of_scores().check(&format!("dk of {name}"), rows.columns(nq..nq + nkv), &want.dk);
    tolerance().check(&format!("dv of {name}"), rows.columns(nq + nkv..fused), &want.dv);
    // What lies between the rows of the views stays as it was.
    for row in dqkv.chunks(fused + gap) {
        assert!(row[fused..].iter().all(|x| x.to_f32() == 7.0));
    }
    Results { out, lse, dqkv }
}

fn every_dtype(isa: Isa, spec: &AttentionSpec, cu: &[i32]) {
    conforms::<f32>(isa, 2, spec, cu);
    conforms::<bf16>(isa, 2, spec, cu);
    conforms::<f16>(isa, 2, spec, cu);
}

#[test]
fn head_sizes_conform_on_every_rung() {
    for isa in rungs() {
        for head_dim in [1, 7, 16, 32, 33, 64, 80, 96, 128, 130] {
            every_dtype(isa, &AttentionSpec::causal(2, 2, head_dim), &[0, 37, 102]);
        }
    }
}

#[test]
fn segments_of_any_length_conform_on_every_rung() {
    for isa in rungs() {
        let spec = AttentionSpec::causal(1, 1, 32);
        for cu in [&[0][..], &[0, 0], &[0, 1], &[0, 1, 1, 2, 5, 5], &[0, 15, 31, 63, 127, 256], &[0, 16, 48, 112, 240]]
        {
            every_dtype(isa, &spec, cu);
            every_dtype(isa, &AttentionSpec { causal: false, ..spec }, cu);
        }
    }
}

#[test]
fn grouped_heads_and_windows_conform_on_every_rung() {
    for isa in rungs() {
        for (heads, kv_heads) in [(4, 2), (6, 1), (3, 3)] {
            for window in [None, Some(1), Some(5), Some(32), Some(70), Some(1000)] {
                let spec = AttentionSpec { window, ..AttentionSpec::causal(heads, kv_heads, 40) };
                conforms::<f32>(isa, 2, &spec, &[0, 150, 161]);
                conforms::<bf16>(isa, 2, &spec, &[0, 150, 161]);
            }
        }
    }
}

/// As [`conforms`], with a bias that reaches `beyond` further than the longest segment.
fn conforms_biased<T: Element>(isa: Isa, spec: &AttentionSpec, cu: &[i32], beyond: usize) -> (Vec<T>, Vec<f32>) {
    let tokens = *cu.last().unwrap() as usize;
    let (nq, nkv) = (spec.q_cols(), spec.kv_cols());
    let longest = cu.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap() as usize;
    let (reach, cpu) = (longest + beyond, Cpu::new(isa, 2));
    let table = values(4, spec.heads * (2 * reach - 1));
    let at = |head: usize, distance: isize| head * (2 * reach - 1) + (reach as isize - 1 + distance) as usize;
    let of = |head: usize, distance: isize| table[at(head, distance)] as f64;
    let qkv: Vec<T> = rounded(&values(1, tokens * (nq + 2 * nkv)));
    let dout: Vec<T> = rounded(&values(2, tokens * nq));
    let rows = Rows::dense(&qkv, tokens, nq + 2 * nkv).unwrap();
    let (q, k, v) = (rows.columns(0..nq), rows.columns(nq..nq + nkv), rows.columns(nq + nkv..nq + 2 * nkv));
    let dout_rows = Rows::dense(&dout, tokens, nq).unwrap();
    let bias = DistanceBias::new(spec, &table, reach).unwrap();

    let mut out = vec![T::from_f32(7.0); tokens * nq];
    let mut lse = vec![7.0; spec.heads * tokens];
    let to = RowsMut::dense(&mut out, tokens, nq).unwrap();
    forward_biased(&cpu, spec, q, k, v, cu, bias, to, &mut lse).unwrap();
    let (q64, k64, v64) = (wide(q), wide(k), wide(v));
    let want = reference::forward_biased(spec, &q64, &k64, &v64, cu, cu, &of);
    // The vector form on every rung, and no tiles.
    let tolerance = Tolerance::of(Isa::Portable, T::DTYPE, spec, want.score_magnitude, longest * spec.group());
    let out_rows = Rows::dense(&out, tokens, nq).unwrap();
    tolerance.check(&format!("out of {isa} {spec:?} {cu:?}"), out_rows, &want.out);

    let mut dqkv = vec![T::from_f32(7.0); tokens * (nq + 2 * nkv)];
    let (dq, rest) = RowsMut::dense(&mut dqkv, tokens, nq + 2 * nkv).unwrap().split_columns(nq);
    let (dk, dv) = rest.split_columns(nkv);
    let mut dbias = vec![7.0; table.len()];
    backward_biased(&cpu, spec, q, k, v, out_rows, &lse, dout_rows, cu, bias, dq, dk, dv, &mut dbias).unwrap();
    let mut sums = Valued { value: vec![0.0; table.len()], magnitude: vec![0.0; table.len()] };
    let gradients =
        reference::backward_biased(spec, &q64, &k64, &v64, &wide(dout_rows), cu, cu, &of, |head, distance, ds, abs| {
            sums.value[at(head, distance)] += ds;
            sums.magnitude[at(head, distance)] += abs;
        });
    let rows = Rows::dense(&dqkv, tokens, nq + 2 * nkv).unwrap();
    tolerance.of_scores().check("dq", rows.columns(0..nq), &gradients.dq);
    tolerance.of_scores().check("dk", rows.columns(nq..nq + nkv), &gradients.dk);
    tolerance.check("dv", rows.columns(nq + nkv..nq + 2 * nkv), &gradients.dv);
    tolerance.of_scores().check("dbias", Rows::dense(&dbias, 1, table.len()).unwrap(), &sums);
    (dqkv, dbias)
}

#[test]
fn a_bias_by_distance_conforms_on_every_rung() {
    for isa in Isa::tested(Isa::Avx512Bf16) {
        for cu in [&[0, 1][..], &[0, 5, 5, 102], &[0, 70, 71, 211], &[0, 290]] {
            for (heads, kv_heads, head_dim) in [(3, 3, 16), (4, 2, 33)] {
                let spec = AttentionSpec { scale: 1.0, ..AttentionSpec::causal(heads, kv_heads, head_dim) };
                for spec in [spec, AttentionSpec { causal: false, ..spec }] {
                    conforms_biased::<f32>(isa, &spec, cu, 0);
                    conforms_biased::<bf16>(isa, &spec, cu, 40);
                }
            }
        }
    }
}

#[test]
fn a_segment_that_its_bias_does_not_reach_is_refused() {
    let spec = AttentionSpec::causal(1, 1, 4);
    let table = [0.0; 5];
    assert!(DistanceBias::new(&spec, &table, 2).is_err());
    let bias = DistanceBias::new(&spec, &table, 3).unwrap();
    let (data, mut out, mut lse) = ([0.0f32; 16], [0.0f32; 16], [0.0; 4]);
    let rows = Rows::dense(&data, 4, 4).unwrap();
    let to = RowsMut::dense(&mut out, 4, 4).unwrap();
    let error = forward_biased(&Cpu::new(Isa::Portable, 1), &spec, rows, rows, rows, &[0, 4], bias, to, &mut lse);
    assert_eq!(error, Err(AttentionError::Distance { longest: 4, reach: 3 }));
}

#[test]
fn sequences_longer_than_every_block_conform() {
    for isa in rungs().into_iter().filter(|isa| *isa == Isa::detect() || *isa == Isa::AmxBf16) {
        for window in [None, Some(300)] {
            let spec = AttentionSpec { window, ..AttentionSpec::causal(2, 1, 32) };
            conforms::<bf16>(isa, 2, &spec, &[0, 601]);
        }
        conforms::<bf16>(isa, 2, &AttentionSpec { causal: false, ..AttentionSpec::causal(2, 1, 32) }, &[0, 601]);
    }
}

#[test]
fn scores_of_any_size_conform() {
    for isa in rungs() {
        // Scores of some +-200 make nearly one-hot probabilities and underflow most exponentials.
        let spec = AttentionSpec { scale: 20.0, ..AttentionSpec::causal(1, 1, 16) };
        conforms::<f32>(isa, 1, &spec, &[0, 90]);
        conforms::<bf16>(isa, 1, &AttentionSpec { scale: -3.0, ..spec }, &[0, 90]);
        conforms::<bf16>(isa, 1, &AttentionSpec { scale: 0.0, ..spec }, &[0, 90]);
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    fn bits<T: Element>(results: &Results<T>) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let of = |x: &[T]| bytemuck::cast_slice::<T, u8>(x).to_vec();
        (of(&results.out), bytemuck::cast_slice(&results.lse).to_vec(), of(&results.dqkv))
    }
    for isa in rungs() {
        let spec = AttentionSpec::causal(4, 2, 24);
        let cu = [0, 3, 200, 280, 280, 281];
        let (one, one_bf16) = (conforms::<f32>(isa, 1, &spec, &cu), conforms::<bf16>(isa, 1, &spec, &cu));
        for threads in [2, 3] {
            assert_eq!(bits(&conforms::<f32>(isa, threads, &spec, &cu)), bits(&one), "{isa} {threads}");
            assert_eq!(bits(&conforms::<bf16>(isa, threads, &spec, &cu)), bits(&one_bf16), "{isa} {threads}");
        }
    }
}

#[test]
fn fewer_or_more_queries_than_keys_conform() {
    fn check<T: Element>(isa: Isa, spec: &AttentionSpec, cu_q: &[i32], cu_k: &[i32]) {
        if !runs(isa, T::DTYPE) {
            return;
        }
        let (queries, keys) = (*cu_q.last().unwrap() as usize, *cu_k.last().unwrap() as usize);
        let q: Vec<T> = rounded(&values(1, queries * spec.q_cols()));
        let k: Vec<T> = rounded(&values(2, keys * spec.kv_cols()));
        let v: Vec<T> = rounded(&values(3, keys * spec.kv_cols()));
        let q = Rows::dense(&q, queries, spec.q_cols()).unwrap();
        let k = Rows::dense(&k, keys, spec.kv_cols()).unwrap();
        let v = Rows::dense(&v, keys, spec.kv_cols()).unwrap();
        let mut out = vec![T::from_f32(7.0); queries * spec.q_cols()];
        let mut lse = vec![7.0; spec.heads * queries];
        let view = RowsMut::dense(&mut out, queries, spec.q_cols()).unwrap();
        forward_cross(&Cpu::new(isa, 2), spec, q, k, v, cu_q, cu_k, view, &mut lse).unwrap();
        let want = reference::forward(spec, &wide(q), &wide(k), &wide(v), cu_q, cu_k);
        let tolerance = Tolerance::of(isa, T::DTYPE, spec, want.score_magnitude, keys.max(queries) * spec.group());
        let out = Rows::dense(&out, queries, spec.q_cols()).unwrap();
        tolerance.check(&format!("out of {isa} {spec:?} {cu_q:?} {cu_k:?}"), out, &want.out);
        for (got, want) in lse.iter().zip(&want.lse) {
            assert!(*got as f64 == *want || (*got as f64 - want).abs() < 1e-4, "{got} {want}");
        }
        let dout: Vec<T> = rounded(&values(4, queries * spec.q_cols()));
        let dout = Rows::dense(&dout, queries, spec.q_cols()).unwrap();
        let mut dq = vec![T::from_f32(7.0); queries * spec.q_cols()];
        // Keys of segments without queries are not written.
        let [mut dk, mut dv] = [0, 1].map(|_| vec![T::from_f32(0.0); keys * spec.kv_cols()]);
        let (to_q, to_k, to_v) = (
            RowsMut::dense(&mut dq, queries, spec.q_cols()).unwrap(),
            RowsMut::dense(&mut dk, keys, spec.kv_cols()).unwrap(),
            RowsMut::dense(&mut dv, keys, spec.kv_cols()).unwrap(),
        );
        backward_cross(&Cpu::new(isa, 2), spec, q, k, v, out, &lse, dout, cu_q, cu_k, to_q, to_k, to_v).unwrap();
        let want = reference::backward(spec, &wide(q), &wide(k), &wide(v), &wide(dout), cu_q, cu_k);
        let name = format!("{isa} {} {spec:?} {cu_q:?} {cu_k:?}", T::DTYPE);
        let rows = |x| Rows::dense(x, keys, spec.kv_cols()).unwrap();
        tolerance.of_scores().check(
            &format!("dq of {name}"),
            Rows::dense(&dq, queries, spec.q_cols()).unwrap(),
            &want.dq,
        );
        tolerance.of_scores().check(&format!("dk of {name}"), rows(&dk), &want.dk);
        tolerance.check(&format!("dv of {name}"), rows(&dv), &want.dv);
    }
    for isa in rungs() {
        for spec in
            [AttentionSpec::causal(2, 1, 20), AttentionSpec { causal: false, ..AttentionSpec::causal(2, 2, 20) }]
        {
            check::<f32>(isa, &spec, &[0, 1, 40, 50, 50], &[0, 70, 140, 145, 150]);
            check::<bf16>(isa, &spec, &[0, 1, 40, 50, 50], &[0, 70, 140, 145, 150]);
            check::<bf16>(isa, &spec, &[0, 70], &[0, 0]);
            // The second half of a document, and the first of another with keys behind it.
            check::<f32>(isa, &spec, &[0, 100, 163, 163], &[0, 200, 263, 300]);
            check::<bf16>(isa, &spec, &[0, 100, 163, 163], &[0, 200, 263, 300]);
        }
    }
}

#[test]
fn decoding_gives_what_forward_gives() {
    fn check<T: Element>(isa: Isa, spec: &AttentionSpec) {
        // Few new tokens take the vector form on every rung.
        if isa > Isa::detect() {
            return;
        }
        let len = 90;
        let q: Vec<T> = rounded(&values(1, len * spec.q_cols()));
        let k: Vec<T> = rounded(&values(2, (len + 9) * spec.kv_cols()));
        let v: Vec<T> = rounded(&values(3, (len + 9) * spec.kv_cols()));
        let cols = spec.q_cols();
        let (all, k, v) = (
            Rows::dense(&q, len, cols).unwrap(),
            Rows::dense(&k, len + 9, spec.kv_cols()).unwrap(),
            Rows::dense(&v, len + 9, spec.kv_cols()).unwrap(),
        );
        let cu = [0, len as i32];
        let want = reference::forward(spec, &wide(all), &wide(k.first_rows(len)), &wide(v.first_rows(len)), &cu, &cu);
        let cpu = Cpu::new(isa, 2);
        let mut start = 0;
        for new in [1, 1, 3, 20, 1, 60, 1, 3] {
            let mut out = vec![T::default(); new * cols];
            let query = Rows::dense(&q[start * cols..], new, cols).unwrap();
            decode(&cpu, spec, query, k, v, start, RowsMut::dense(&mut out, new, cols).unwrap()).unwrap();
            let range = start * cols..(start + new) * cols;
            let part =
                Valued { value: want.out.value[range.clone()].to_vec(), magnitude: want.out.magnitude[range].to_vec() };
            let tolerance = Tolerance::of(isa, T::DTYPE, spec, want.score_magnitude, len);
            tolerance.check("out", Rows::dense(&out, new, cols).unwrap(), &part);
            start += new;
        }
        assert_eq!(start, len);
    }
    for isa in rungs() {
        for spec in
            [AttentionSpec::causal(4, 2, 24), AttentionSpec { window: Some(17), ..AttentionSpec::causal(2, 2, 64) }]
        {
            check::<f32>(isa, &spec);
            check::<bf16>(isa, &spec);
            check::<f16>(isa, &spec);
        }
    }
}

#[test]
fn values_that_are_not_finite_are_not_hidden() {
    for isa in rungs() {
        let spec = AttentionSpec::causal(1, 1, 32);
        for bad in [f32::NAN, f32::INFINITY] {
            let k: Vec<bf16> = rounded(&values(1, 40 * 32));
            let mut q = k.clone();
            q[20 * 32 + 3] = bf16::from_f32(bad);
            let (q, k) = (Rows::dense(&q, 40, 32).unwrap(), Rows::dense(&k, 40, 32).unwrap());
            let (mut out, mut lse) = (vec![bf16::default(); 40 * 32], vec![0.0; 40]);
            let view = RowsMut::dense(&mut out, 40, 32).unwrap();
            forward(&Cpu::new(isa, 1), &spec, q, k, k, &[0, 40], view, &mut lse).unwrap();
            let finite = |row: usize| out[row * 32..(row + 1) * 32].iter().all(|x| x.to_f32().is_finite());
            assert!((0..40).all(|row| finite(row) == (row != 20)), "{isa} {bad}");
        }
    }
}

#[test]
fn unmasked_pairs_are_counted_exactly() {
    let cu = [0, 1, 1, 10, 45];
    for window in [None, Some(1), Some(4), Some(100)] {
        for causal in [true, false] {
            let spec = AttentionSpec { causal, window: window.filter(|_| causal), ..AttentionSpec::causal(3, 1, 5) };
            let mut pairs = 0;
            for segment in plan::segments(&cu, &cu) {
                pairs += (0..segment.queries.len()).map(|i| segment.visible(&spec, i).len()).sum::<usize>();
            }
            assert_eq!(unmasked_pairs(&spec, &cu), pairs as u64);
            assert_eq!(flops_forward(&spec, &cu), 4 * 3 * 5 * pairs as u64);
            assert_eq!(flops_backward(&spec, &cu), 10 * 3 * 5 * pairs as u64);
        }
    }
    for (queries, keys) in [(3, 10), (10, 3), (0, 4), (4, 0), (7, 7)] {
        let segment = plan::Segment { queries: 0..queries, keys: 0..keys };
        for window in [None, Some(2), Some(5)] {
            let spec = AttentionSpec { window, ..AttentionSpec::causal(1, 1, 1) };
            let pairs: usize = (0..queries).map(|i| segment.visible(&spec, i).len()).sum();
            assert_eq!(segment.pairs(&spec), pairs as u64, "{queries} {keys} {window:?}");
        }
    }
}

#[test]
fn bad_operands_are_errors_that_say_what_is_wrong() {
    let cpu = Cpu::new(Isa::Portable, 1);
    let spec = AttentionSpec::causal(2, 1, 4);
    let x = vec![0.0f32; 80];
    let run = |spec: &AttentionSpec, q_cols: usize, k_rows: usize, cu: &[i32], lse: usize| {
        let (mut out, mut lse) = (vec![0.0f32; 80], vec![0.0; lse]);
        let k = Rows::dense(&x, k_rows, 4).unwrap();
        let out = RowsMut::dense(&mut out, 10, 8).unwrap();
        forward(&cpu, spec, Rows::new(&x, 10, q_cols, 8).unwrap(), k, k, cu, out, &mut lse).map_err(|e| e.to_string())
    };
    assert_eq!(run(&spec, 8, 10, &[0, 10], 20), Ok(()));
    for (result, part) in [
        (run(&AttentionSpec { heads: 3, kv_heads: 2, ..spec }, 8, 10, &[0, 10], 20), "3 query heads over 2"),
        (run(&AttentionSpec { head_dim: 0, ..spec }, 8, 10, &[0, 10], 20), "head_dim is 0"),
        (run(&AttentionSpec { window: Some(0), ..spec }, 8, 10, &[0, 10], 20), "window of 0"),
        (run(&AttentionSpec { window: Some(3), causal: false, ..spec }, 8, 10, &[0, 10], 20), "causal = false"),
        (run(&spec, 7, 10, &[0, 10], 20), "`q` is [10, 7]"),
        (run(&spec, 8, 9, &[0, 10], 20), "entry 1 is 10"),
        (run(&spec, 8, 10, &[0, 10], 19), "`lse` is [1, 19]"),
        (run(&spec, 8, 10, &[0, 6, 4, 10], 20), "entry 2 is 4"),
        (run(&spec, 8, 10, &[1, 10], 20), "entry 0 is 1"),
        (run(&spec, 8, 10, &[0, 9], 20), "entry 1 is 9"),
        (run(&spec, 8, 10, &[], 20), "must rise from 0"),
    ] {
        let message = result.expect_err(part);
        assert!(message.contains(part), "{message}");
    }
    assert!(Rows::new(&x, 10, 8, 9).is_err() && Rows::new(&x, 2, 8, 7).is_err());
}
