//! Properties of a model that hold whatever its values: caches, packing, dropout, costs.

mod common;

use common::*;
use trainyard_autograd::{Policy, Store, Tape};
use trainyard_model::costs::{unit_costs, unit_costs_on};
use trainyard_model::families::{FAMILIES, Sizes};
use trainyard_model::{BatchShape, BatchSlices, Forward, Init, KvCache, Model, ModelSpec, Output, ParameterKind};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// A small model of each kind that differs in how attention sees.
fn small_models() -> Vec<(&'static str, ModelSpec)> {
    let llama = ModelSpec { kv_heads: 2, ..ModelSpec::llama(53, 24, 2, 4, 40, 64) };
    let qwen3 = ModelSpec { qk_norm: true, head_dim: 8, tie_embeddings: true, ..llama.clone() };
    let mistral = ModelSpec { sliding_window: Some(4), sliding_layers: Some(vec![1]), ..llama.clone() };
    let plain = ModelSpec {
        norm_bias: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        ..ModelSpec::gpt2(53, 24, 2, 4, 64)
    };
    vec![
        ("gpt2 with value residuals", ModelSpec { value_residual: true, layers: 3, ..plain.clone() }),
        ("mistral with value residuals", ModelSpec { value_residual: true, ..mistral.clone() }),
        ("gpt2 with query/key norms", ModelSpec { qk_norm: true, ..ModelSpec::gpt2(53, 24, 2, 4, 64) }),
        ("gpt2", ModelSpec::gpt2(53, 24, 2, 4, 64)),
        ("gpt2 without biases", plain),
        ("llama", llama),
        ("qwen3", qwen3),
        ("mistral", mistral),
    ]
}

/// Logits of `tokens` through a cache, in pieces of the given lengths; each piece's last row.
fn in_pieces(
    model: &Model,
    store: &Store,
    device: &Device,
    tokens: &[i32],
    pieces: &[usize],
    dtype: DType,
) -> Vec<Vec<f32>> {
    let mut cache = KvCache::new(device, model.spec().unwrap(), tokens.len(), dtype).unwrap();
    let mut rows = Vec::new();
    let mut start = 0;
    for piece in pieces {
        let part = &tokens[start..start + piece];
        let positions: Vec<i32> = (start as i32..(start + piece) as i32).collect();
        let cu_seqlens = [0, *piece as i32];
        let slices = BatchSlices::of_text(part, None, &positions, &cu_seqlens);
        let batch = model.batch(device, &slices).unwrap();
        let mut tape = Tape::new(device, store, Policy::Nothing, KEY);
        let y = model.forward(&mut tape, &mut Forward::generation(&batch, &mut cache)).unwrap();
        rows.push(y.tensor().to_f32_vec().unwrap());
        start += piece;
    }
    assert_eq!(cache.len(), start);
    rows
}

/// Table 3 of Yang et al. 2022, for Adam: (standard deviation, learning rate) as factors of those
/// of the base width, at four times that width.
#[test]
fn mup_scales_initial_values_and_learning_rates_by_width() {
    let sizes = Sizes { vocab_size: 53, dim: 64, layers: 2, heads: 4, max_positions: 64 };
    for family in FAMILIES {
        let spec = ModelSpec { tie_embeddings: false, ..family.usual(&sizes) };
        let scaled = ModelSpec { mup_base_dim: Some(16), ..spec.clone() };
        if family.name() == "t5" {
            // It scales initial values by its own rule, and says so.
            assert!(scaled.validate().unwrap_err().to_string().contains("by its own rule"));
            continue;
        }
        let (plain, scaled) = (Model::new(spec).unwrap(), Model::new(scaled).unwrap());
        for ((_, plain), (_, scaled)) in plain.parameters().zip(scaled.parameters()) {
            let name = &plain.name;
            let (std, rate) = match plain.kind {
                ParameterKind::Matrix
                    if ["lm.weight", "class.weight", "mlp.router.weight"].contains(&name.as_str()) =>
                {
                    (0.25, 0.25)
                }
                // Patches do not grow with the width.
                ParameterKind::Matrix if name == "patches.weight" => (1.0, 1.0),
                ParameterKind::Matrix => (0.5, 0.25),
                // Gemma 3 multiplies by the root of the width.
                ParameterKind::Embedding if family.name() == "gemma3" => (0.5, 0.5),
                _ => (1.0, 1.0),
            };
            let factor = match (plain.init, scaled.init) {
                (Init::Normal { std: plain }, Init::Normal { std: scaled }) => scaled / plain,
                (one, other) => f32::from(u8::from(one == other)),
            };
            assert_eq!((factor, scaled.rate / plain.rate), (std, rate), "{} {name}", family.name());
        }
    }
    let tied = ModelSpec { mup_base_dim: Some(16), ..ModelSpec::gpt2(53, 64, 2, 4, 64) };
    assert!(tied.validate().unwrap_err().to_string().contains("tie_embeddings = false"));
}

#[test]
fn generating_through_a_cache_gives_the_logits_of_the_whole() {
    let device = cpu();
    for (name, spec) in small_models() {
        let (model, store) = initialised(spec, &device, DType::F32);
        let tokens = tokens(21, 53);
        let whole = logits(&model, &store, &device, &batch(&model, &device, 1, &tokens, None));
        for pieces in [vec![1; 21], vec![9, 1, 1, 10], vec![21]] {
            let mut end = 0;
            for (piece, row) in pieces.iter().zip(in_pieces(&model, &store, &device, &tokens, &pieces, DType::F32)) {
                end += piece;
                let error = relative_error(&row, &whole[(end - 1) * 53..end * 53]);
                assert!(error < 1e-5, "{name}, {pieces:?}: token {end} differs by {error:e}");
            }
        }
    }
}

#[test]
fn misuse_of_a_cache_is_an_error() {
    let device = cpu();
    let (model, store) = initialised(ModelSpec::llama(53, 24, 2, 4, 40, 64), &device, DType::F32);
    let spec = model.spec().unwrap();
    let check = |expect: &str, spec: &ModelSpec, policy, positions: &[i32], cu_seqlens: &[i32]| {
        let mut cache = KvCache::new(&device, spec, 3, DType::F32).unwrap();
        let tokens = vec![1; positions.len()];
        let slices = BatchSlices::of_text(&tokens, None, positions, cu_seqlens);
        let batch = model.batch(&device, &slices).unwrap();
        let mut tape = Tape::new(&device, &store, policy, KEY);
        let error = model.forward(&mut tape, &mut Forward::generation(&batch, &mut cache)).unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    };
    check("4 tokens after 0 in a cache made for 3", spec, Policy::Nothing, &[0, 1, 2, 3], &[0, 4]);
    check("no gradient flows", spec, Policy::Everything, &[0, 1], &[0, 2]);
    check("this batch has several", spec, Policy::Nothing, &[0, 0], &[0, 1, 2]);
    check("end at position 2, not 5", spec, Policy::Nothing, &[3, 4], &[0, 2]);
    check("a cache made for 1 layers", &ModelSpec { layers: 1, ..spec.clone() }, Policy::Nothing, &[0, 1], &[0, 2]);
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    let device = cpu();
    for (name, spec) in small_models() {
        let (model, store) = initialised(spec, &device, DType::F32);
        let tokens = tokens(16, 53);
        let (a, b) = tokens.split_at(5);
        let positions: Vec<i32> = (0..5).chain(0..11).collect();
        let slices = BatchSlices::of_text(&tokens, None, &positions, &[0, 5, 16]);
        let packed = logits(&model, &store, &device, &model.batch(&device, &slices).unwrap());
        let alone = [a, b].map(|part| logits(&model, &store, &device, &batch(&model, &device, 1, part, None))).concat();
        let error = relative_error(&packed, &alone);
        assert!(error < 1e-6, "{name}: {error:e}");
    }
}

/// Forward and backward unit by unit, as the engine runs them, give the bits of the whole model on
/// one tape, under every policy.
#[test]
fn units_one_at_a_time_give_the_bits_of_one_tape() {
    let device = cpu();
    for (name, spec) in small_models() {
        let tokens = tokens(24, 53);
        let (model, mut store) = initialised(spec.clone(), &device, DType::F32);
        let batch = batch(&model, &device, 2, &tokens, Some(&tokens));
        let expected = loss_and_gradients(&model, &mut store, &device, &batch, Policy::Everything, false);
        for policy in [Policy::Nothing, Policy::Selective, Policy::Everything] {
            let (model, mut store) = initialised(spec.clone(), &device, DType::F32);
            let forward = |store: &Store, unit: usize, input: Option<Tensor>, policy| {
                let mut tape = Tape::new(&device, store, policy, KEY);
                let leaf = input.map(|input| tape.leaf(input));
                let mut cx = Forward::training(&batch, 1.0 / batch.counted as f32);
                let output = model.units()[unit].forward(&mut tape, &mut cx, leaf.as_ref()).unwrap();
                (leaf, output, tape.finish())
            };
            let mut runs = Vec::new();
            let mut input = None;
            for unit in 0..model.units().len() {
                let run = forward(&store, unit, input.clone(), policy);
                let output = run.1.tensor().clone();
                runs.push((input.replace(output), run));
            }
            let loss = input.unwrap().to_scalar().unwrap();
            let mut gradient = device.tensor([], &[1.0f32], Purpose::Activations).unwrap();
            while let Some((input, run)) = runs.pop() {
                let (leaf, output, recording) = match policy {
                    Policy::Nothing => forward(&store, runs.len(), input, Policy::Everything),
                    _ => run,
                };
                let (parameters, mut gradients) = store.split();
                let inputs: Vec<_> = leaf.iter().collect();
                let given = recording.backward(&[(&output, gradient.clone())], &inputs, &parameters, &mut gradients);
                if let Some(Some(next)) = given.unwrap().pop() {
                    gradient = next;
                }
            }
            let gradients = model.parameters().map(|(id, _)| (id, store.gradient(id).unwrap().to_f32_vec().unwrap()));
            assert!((loss, gradients.collect()) == expected, "{name}, {policy:?}");
        }
    }
}

/// A step with dropout under the same key gives the same bits, whatever is kept and recomputed.
/// Another key gives others.
#[test]
fn dropout_replays_bit_exactly() {
    let device = cpu();
    for (name, spec) in small_models() {
        let spec = ModelSpec { dropout: 0.3, ..spec };
        let tokens = tokens(24, 53);
        let run = |policy, eager| {
            let (model, mut store) = initialised(spec.clone(), &device, DType::F32);
            let batch = batch(&model, &device, 2, &tokens, Some(&tokens));
            loss_and_gradients(&model, &mut store, &device, &batch, policy, eager)
        };
        let first = run(Policy::Everything, true);
        assert_eq!(run(Policy::Everything, true), first, "{name}");
        assert_eq!(run(Policy::Selective, true), first, "{name}: recomputing changes no bit");
        let (model, store) = initialised(spec.clone(), &device, DType::F32);
        let batch = batch(&model, &device, 2, &tokens, Some(&tokens));
        let loss = |seed, training| {
            let key = trainyard_autograd::RandomKey { seed, ..KEY };
            let mut tape = Tape::new(&device, &store, Policy::Nothing, key);
            let output = Output::Loss { scale: 1.0 / batch.counted as f32 };
            let mut cx = Forward { training, ..Forward::evaluation(&batch, output) };
            model.forward(&mut tape, &mut cx).unwrap().tensor().to_scalar().unwrap()
        };
        assert_eq!(loss(KEY.seed, true), first.0, "{name}: recording changes no bit");
        assert_ne!(loss(1, true), loss(2, true), "{name}: the seed matters");
        assert_eq!(loss(1, false), loss(2, false), "{name}: evaluation drops nothing");
    }
}

/// The costs that meta predicts are the launches and allocations of the CPU.
#[test]
fn costs_on_meta_are_the_counters_of_the_cpu() {
    for (name, spec) in small_models() {
        for dropout in [0.0, 0.1] {
            let model = Model::new(ModelSpec { dropout, ..spec.clone() }).unwrap();
            let shape = BatchShape { sequences: vec![17, 3, 12], ..BatchShape::uniform(0, 0) };
            for policy in [Policy::Nothing, Policy::Selective, Policy::Everything] {
                for dtype in [DType::F32, DType::BF16] {
                    let predicted = unit_costs(&model, &shape, dtype, policy).unwrap();
                    let measured = unit_costs_on(&cpu(), &model, &shape, dtype, policy).unwrap();
                    assert_eq!(predicted, measured, "{name}, dropout {dropout}, {policy:?}, {dtype}");
                }
            }
        }
    }
}

#[test]
fn checkpointing_keeps_less_and_full_repeats_forward() {
    let model = Model::new(ModelSpec::llama(512, 256, 4, 4, 704, 512)).unwrap();
    let shape = BatchShape::uniform(2, 256);
    let [full, selective, none] = [Policy::Nothing, Policy::Selective, Policy::Everything]
        .map(|policy| unit_costs(&model, &shape, DType::BF16, policy).unwrap());
    let blocks = 1..5;
    let saved = |costs: &[trainyard_model::costs::UnitCost]| -> usize {
        costs[blocks.clone()].iter().map(|cost| cost.saved_bytes).sum()
    };
    assert!(saved(&full) * 5 <= saved(&none), "{} and {}", saved(&full), saved(&none));
    assert!(saved(&selective) < saved(&none), "{} and {}", saved(&selective), saved(&none));
    for unit in blocks {
        assert_eq!(full[unit].forward, none[unit].forward);
        assert_eq!(full[unit].backward.flops, none[unit].backward.flops + none[unit].forward.flops);
        assert!(selective[unit].backward.flops < full[unit].backward.flops);
    }
}

/// The two conventions against what the kernels count, for a model whose FLOPs are nearly all in
/// products.
#[test]
fn flops_per_token_agree_with_the_counted_ones() {
    let model = Model::new(ModelSpec::llama(4096, 512, 2, 8, 1408, 512)).unwrap();
    let spec = model.spec().unwrap();
    let shape = BatchShape::uniform(2, 512);
    let costs = unit_costs(&model, &shape, DType::BF16, Policy::Everything).unwrap();
    let counted: u64 = costs.iter().map(|cost| cost.forward.flops + cost.backward.flops).sum();
    let per_token = counted as f64 / shape.tokens() as f64;
    let expected = spec.flops_per_token(512);
    // Counted beyond it: norms, rotations, activations, and the scores that attention's backward
    // makes again.
    assert!(per_token > expected.causal && per_token < 1.02 * expected.causal, "{per_token} and {expected:?}");
    assert!(expected.convention > expected.causal);
    let untied = spec.multiplied_parameters() + spec.vocab_size * spec.dim;
    assert_eq!(untied, model.parameter_count(), "all but the token table that is only looked up");
    let windowed = ModelSpec { sliding_window: Some(1), ..spec.clone() }.flops_per_token(512).causal;
    let per_layer = 12.0 * (spec.heads * spec.head_dim * spec.layers) as f64;
    assert_eq!(windowed, 6.0 * spec.multiplied_parameters() as f64 + per_layer);
}
