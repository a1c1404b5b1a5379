//! Attention with numbers by distance added to scores: T5's.

use super::*;
use trainyard_cuda::kernels::BiasTile;

/// A case: attention of a fused matrix, and numbers that reach at least as far as its longest
/// segment.
struct Biased<'a> {
    spec: &'a AttentionSpec,
    cu: &'a [i32],
    reach: usize,
    numbers: Vec<f32>,
}

impl<'a> Biased<'a> {
    fn new(spec: &'a AttentionSpec, cu: &'a [i32], reach: usize) -> Biased<'a> {
        Biased { spec, cu, reach, numbers: values(4, spec.heads * (2 * reach - 1)) }
    }

    /// The place of the number of a head and a distance.
    fn at(&self, head: usize, distance: isize) -> usize {
        head * (2 * self.reach - 1) + (self.reach as isize - 1 + distance) as usize
    }

    fn tokens(&self) -> usize {
        *self.cu.last().unwrap() as usize
    }

    fn width(&self) -> usize {
        self.spec.q_cols() + 2 * self.spec.kv_cols()
    }

    /// The arguments after the pointers, of `sizes` and this case.
    fn arguments(&self, pointers: &[Argument], sizes: &[usize], numbers: &Buffer<f32>) -> Vec<Argument> {
        [pointers, &shape(self.spec, sizes), &[numbers.at(), Argument::I32(self.reach as i32)]].concat()
    }

    /// out and lse.
    fn forward<T: Element>(&self, form: AttentionForm, qkv: &[T]) -> (Vec<T>, Vec<f32>) {
        let (spec, tokens, width) = (self.spec, self.tokens(), self.width());
        let (qkv, numbers, [starts, ends]) = (Buffer::new(qkv), Buffer::new(&self.numbers), bounds(self.cu));
        let (out, lse) = (Buffer::<T>::empty(tokens * spec.q_cols()), Buffer::<f32>::empty(spec.heads * tokens));
        let pointers = [qkv.at(), qkv.at_element(spec.q_cols()), out.at(), lse.at(), starts.at(), ends.at()];
        let arguments = self.arguments(&pointers, &[tokens, width, width], &numbers);
        let kernel = form.biased_kernels(spec.head_dim).attention.forward;
        launch(kernel, float::<T>(), [tokens, spec.heads, spec.head_dim], &arguments);
        (out.get(), lse.get())
    }

    /// dqkv and dbias.
    fn backward<T: Element>(
        &self,
        form: AttentionForm,
        [qkv, dout, out]: [&[T]; 3],
        lse: &[f32],
    ) -> (Vec<T>, Vec<f32>) {
        let (spec, tokens, width) = (self.spec, self.tokens(), self.width());
        let AttentionSpec { heads, kv_heads, head_dim, .. } = *spec;
        let (qkv, dout, out, lse) = (Buffer::new(qkv), Buffer::new(dout), Buffer::new(out), Buffer::new(lse));
        let (dqkv, delta) = (Buffer::<T>::empty(tokens * width), Buffer::<f32>::empty(heads * tokens));
        let (numbers, [starts, ends]) = (Buffer::new(&self.numbers), bounds(self.cu));
        let sizes = [tokens, heads, head_dim].map(|n| Argument::I32(n as i32));
        let arguments = [&[dout.at(), out.at(), NULL, delta.at()][..], &sizes].concat();
        launch(&kernels::ATTENTION_DELTA, float::<T>(), [tokens * heads, 1, 1], &arguments);
        let kernels = form.biased_kernels(head_dim);
        let given = [qkv.at(), qkv.at_element(spec.q_cols()), dout.at(), lse.at(), delta.at(), starts.at(), ends.at()];
        let of = |to: Argument, sizes: &[usize]| self.arguments(&[&given[..], &[to]].concat(), sizes, &numbers);
        let arguments = of(dqkv.at(), &[tokens, width, width]);
        launch(kernels.attention.backward_queries, float::<T>(), [tokens, heads, head_dim], &arguments);
        let arguments = of(dqkv.at_element(spec.q_cols()), &[tokens, tokens, width, width]);
        launch(kernels.attention.backward_keys, float::<T>(), [tokens, kv_heads, head_dim], &arguments);

        let (kernel, tile) = kernels.gradient;
        let (parts, dbias) = (BiasTile::parts(tokens), Buffer::<f32>::empty(self.numbers.len()));
        let partials = Buffer::<f32>::empty(tile.partials(heads, tokens, self.reach));
        let arguments = [of(partials.at(), &[tokens, width, width]), vec![Argument::I32(parts as i32)]].concat();
        launch(kernel, float::<T>(), [parts * tile.shifts(self.reach), heads, head_dim], &arguments);
        assert!(partials.get().iter().all(|sum| !sum.is_nan()), "a sum is left out");
        let sizes = [heads, self.reach, parts, tile.rows, tile.columns].map(|n| Argument::I32(n as i32));
        let arguments = [&[partials.at(), dbias.at()][..], &sizes].concat();
        launch(&kernels::ATTENTION_BIAS_SUM, float::<T>(), [self.numbers.len(), 1, 1], &arguments);
        (dqkv.get(), dbias.get())
    }
}

/// Runs forward and backward in every form that takes the case, and checks both against the
/// oracle. The numbers reach `beyond` further than the longest segment.
fn conforms<T: Element>(aligned: bool, spec: &AttentionSpec, cu: &[i32], beyond: usize) {
    let longest = cu.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap() as usize;
    let case = Biased::new(spec, cu, longest + beyond);
    let (nq, nkv, width, tokens) = (spec.q_cols(), spec.kv_cols(), case.width(), case.tokens());
    let (qkv, dout) = (scaled::<T>(1, tokens * width), scaled::<T>(2, tokens * nq));

    let [q, k, v] = [0..nq, nq..nq + nkv, nq + nkv..width].map(|range| wide(&columns(&qkv, width, range)));
    let of = |head: usize, distance: isize| f64::from(case.numbers[case.at(head, distance)]);
    let want = oracle::forward_biased(spec, &q, &k, &v, cu, cu, &of);
    let zeros = vec![0.0; case.numbers.len()];
    let mut dbias = Valued { value: zeros.clone(), magnitude: zeros };
    let gradients =
        oracle::backward_biased(spec, &q, &k, &v, &wide(&dout), cu, cu, &of, |head, distance, ds, magnitude| {
            dbias.value[case.at(head, distance)] += ds;
            dbias.magnitude[case.at(head, distance)] += magnitude;
        });

    for form in forms::<T>(spec.head_dim, spec.scale, aligned) {
        let (out, lse) = both_orders(|| case.forward(form, &qkv));
        let (dqkv, sums) = both_orders(|| case.backward(form, [&qkv, &dout, &out], &lse));
        let tensor_cores = form != AttentionForm::MultiplyAdds;
        let tolerance = Tolerance::of(T::DTYPE, tensor_cores, spec, want.score_magnitude, longest * spec.group());
        let name = format!("{form:?} {} {spec:?} {cu:?}", T::DTYPE);
        tolerance.check(&format!("out of {name}"), &out, &want.out);
        for (got, want) in lse.iter().zip(&want.lse) {
            let bound = tolerance.terms.min(1e-4) + unit(DType::F32) * want.abs() * 2.0;
            assert!((f64::from(*got) - want).abs() <= bound, "lse of {name}: {got}, not {want} within {bound:e}");
        }
        let of_scores = tolerance.of_scores();
        of_scores.check(&format!("dq of {name}"), &columns(&dqkv, width, 0..nq), &gradients.dq);
        of_scores.check(&format!("dk of {name}"), &columns(&dqkv, width, nq..nq + nkv), &gradients.dk);
        tolerance.check(&format!("dv of {name}"), &columns(&dqkv, width, nq + nkv..width), &gradients.dv);
        // A number sums the pairs of all segments.
        let of_sums = Tolerance { terms: of_scores.terms + 2.0 * tokens as f64 * unit(DType::F32), ..of_scores };
        of_sums.check(&format!("dbias of {name}"), &sums, &dbias);
    }
}

dtypes! {
    fn numbers_by_distance_conform_in_both_directions<T>() {
        for (cu, beyond) in
            [(&[0, 1][..], 0), (&[0, 1, 1, 2, 5, 5], 0), (&[0, 5, 5, 45], 30), (&[0, 15, 31, 63, 127, 200], 0)]
        {
            for causal in [true, false] {
                let spec = AttentionSpec { causal, scale: 1.0, ..AttentionSpec::causal(3, 3, 16) };
                conforms::<T>(true, &spec, cu, beyond);
            }
        }
    }
}

#[test]
fn numbers_by_distance_conform_for_every_head_and_sequences_longer_than_every_tile() {
    let spec = |heads, kv_heads, head_dim, causal| AttentionSpec {
        causal,
        ..AttentionSpec::causal(heads, kv_heads, head_dim)
    };
    for head_dim in [1, 33, 80, 256] {
        conforms::<f32>(true, &spec(2, 2, head_dim, false), &[0, 23, 60], 0);
    }
    conforms::<bf16>(false, &spec(2, 1, 64, false), &[0, 70, 90], 3);
    conforms::<f32>(true, &spec(4, 2, 24, true), &[0, 90, 101], 7);
    for causal in [true, false] {
        conforms::<bf16>(true, &spec(2, 1, 64, causal), &[0, 301], 0);
        conforms::<bf16>(true, &spec(1, 1, 128, causal), &[0, 130, 261, 300], 64);
    }
    conforms::<f16>(true, &spec(2, 2, 72, false), &[0, 140, 150], 0);
    conforms::<bf16>(true, &AttentionSpec { scale: -1.5, ..spec(2, 2, 64, false) }, &[0, 40], 0);
}

/// More queries than one part of the gradient's sums has.
#[test]
fn parts_of_the_sums_by_distance_conform() {
    let cu: Vec<i32> = (0..=520).map(|segment| 8 * segment).collect();
    assert_eq!(BiasTile::parts(8 * 520), 2);
    let spec = AttentionSpec { causal: false, ..AttentionSpec::causal(1, 1, 8) };
    conforms::<f32>(true, &spec, &cu, 1);
    conforms::<bf16>(true, &spec, &cu, 1);
}

dtypes! {
    fn decoding_with_numbers_by_distance_gives_what_forward_gives<T>() {
        let spec = AttentionSpec::causal(4, 2, 24);
        let (len, nq, nkv) = (50, spec.q_cols(), spec.kv_cols());
        let cu = [0, len as i32];
        let case = Biased::new(&spec, &cu, len + 9);
        let width = case.width();
        let qkv = scaled::<T>(1, len * width);
        let [q, k, v] = [0..nq, nq..nq + nkv, nq + nkv..width].map(|range| wide(&columns(&qkv, width, range)));
        let of = |head: usize, distance: isize| f64::from(case.numbers[case.at(head, distance)]);
        let want = oracle::forward_biased(&spec, &q, &k, &v, &cu, &cu, &of);
        let (keys, cached) = (Buffer::new(&columns(&qkv, width, nq..nq + nkv)), Buffer::new(&columns(&qkv, width, nq + nkv..width)));
        let numbers = Buffer::new(&case.numbers);
        for range in [0..1, 1..4, 4..50] {
            let (new, fresh) = (range.len(), Buffer::new(&qkv[range.start * width..range.end * width]));
            let sizes = [new, range.start, spec.heads, spec.kv_heads, spec.head_dim].map(|n| Argument::I32(n as i32));
            let last = [Argument::F32(spec.scale), Argument::I32(1), Argument::I32(0), numbers.at(), Argument::I32(case.reach as i32)];
            let out = both_orders(|| {
                let out = Buffer::<T>::empty(new * nq);
                let arguments = [&[fresh.at(), keys.at(), cached.at(), out.at()][..], &sizes, &last].concat();
                launch(&kernels::ATTENTION_DECODE_BIASED, float::<T>(), [new, spec.heads, spec.head_dim], &arguments);
                out.get()
            });
            let range = range.start * nq..range.end * nq;
            let part = Valued { value: want.out.value[range.clone()].to_vec(), magnitude: want.out.magnitude[range].to_vec() };
            Tolerance::of(T::DTYPE, false, &spec, want.score_magnitude, len).check("out", &out, &part);
        }
    }
}

#[test]
fn scratch_holds_every_shift_of_tiles() {
    for tile in [BiasTile::SMALL, BiasTile::LARGE] {
        for reach in 1..400usize {
            // Every distance lies in a tile, and the outermost tiles are needed.
            let (rows, columns) = (tile.rows as isize, tile.columns as isize);
            let first = -(((reach as isize) + rows - 2) / columns) * columns;
            let last = first + (tile.shifts(reach) as isize - 1) * columns;
            let reach = reach as isize;
            assert!(first - columns < 1 - reach && last + rows > reach - 1, "{tile:?} {reach}");
            assert!(first + rows > 1 - reach && last - columns < reach - 1, "{tile:?} {reach}");
        }
    }
}
