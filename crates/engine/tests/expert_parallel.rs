//! Expert parallelism: mixtures whose experts are divided among data ranks train as those that are
//! whole on every rank, whatever is recomputed, dropped or accumulated.

#[path = "common/train.rs"]
mod common;

use common::*;
use trainyard_engine::shape;
use trainyard_tensor::Purpose;

const STEPS: u64 = 4;

/// Mixtral's with both balance losses; the same with a capacity; one with shared experts, an MLP in
/// the first layer and a bias that balances.
const MIXTURES: [&str; 3] = [
    "model.family='mixtral' experts.count=4 experts.auxiliary_loss=0.05 experts.z_loss=0.01",
    "model.family='mixtral' experts.count=8 experts.capacity_factor=1.0",
    "model.family='dots1' experts.count=8 experts.top_k=2 experts.dense_layers=1 experts.bias_update_rate=0.01",
];

fn ends(text: &str) -> Vec<End> {
    let sets: Vec<&str> = text.split_whitespace().collect();
    train(&sets, STEPS)
}

fn norms(ends: &[End]) -> Vec<f64> {
    ends[0].outcomes.iter().map(|outcome| outcome.gradient_norm).collect()
}

fn close(ours: f64, theirs: f64, bound: f64) -> bool {
    (ours - theirs).abs() <= bound * theirs.abs()
}

fn floats(all: &[Vec<u32>]) -> Vec<f32> {
    all.iter().flatten().map(|bits| f32::from_bits(*bits)).collect()
}

/// A rank's rows are the same wherever their expert is, and a weight's gradient is the sum of the
/// ranks' gradients along the tree of an all-reduce. So every bit is the same, as long as ranks
/// take one micro-batch each, and nothing depends on the last bits of the norm, whose chunks
/// differ.
#[test]
fn experts_over_ranks_have_the_bits_of_whole_ones() {
    for mixture in MIXTURES {
        for (ranks, degree) in [(2, 2), (4, 2), (4, 4)] {
            let base = format!(
                "{mixture} optimizer.clip_norm=0 precision.compute='f32' parallel.ranks={ranks} training.micro_batch_size={}",
                8 / ranks
            );
            let whole = ends(&base);
            let bits = [gradients(&whole), weights(&whole)];
            for more in [
                "",
                "activation_checkpointing.mode='selective'",
                "activation_checkpointing.mode='full'",
                "memory.offload.activations='disk' memory.offload.optimizer='disk'",
            ] {
                let spread = ends(&format!("{base} parallel.expert_parallel_degree={degree} {more}"));
                assert_eq!(losses(&spread), losses(&whole), "{base} {more}");
                let routing = |ends: &[End]| ends[0].outcomes.iter().map(|o| o.routing.clone()).collect::<Vec<_>>();
                assert_eq!(routing(&spread), routing(&whole), "{base} {more}");
                let all_close =
                    norms(&spread).iter().zip(norms(&whole)).all(|(ours, theirs)| close(*ours, theirs, 1e-7));
                assert!(all_close, "{base} {more}: {:?} {:?}", norms(&spread), norms(&whole));
                for (what, ours, theirs) in
                    [("gradient", gradients(&spread), &bits[0]), ("weight", weights(&spread), &bits[1])]
                {
                    for (number, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                        let differing = ours.iter().zip(theirs).filter(|(ours, theirs)| ours != theirs).count();
                        assert_eq!(differing, 0, "{base} {more}: {what} {number} of {} elements", ours.len());
                    }
                }
            }
        }
    }
}

/// Several micro-batches are summed in another order, and 16 bits are rounded where they travel:
/// the sums differ in their last bits.
#[test]
fn experts_over_ranks_train_as_whole_ones() {
    for (text, degree, bound) in [
        ("precision.compute='f32' parallel.ranks=2 training.micro_batch_size=1", 2, 1e-5),
        (
            "precision.compute='f32' parallel.ranks=2 training.micro_batch_size=2 parallel.reduce_schedule='micro_batch'",
            2,
            1e-5,
        ),
        ("precision.compute='bf16' parallel.ranks=2 training.micro_batch_size=4", 2, 2e-2),
        ("precision.compute='f32' parallel.ranks=2 training.micro_batch_size=4 parallel.reduce_dtype='bf16'", 2, 2e-2),
    ] {
        let base = format!("{} {text}", MIXTURES[0]);
        let (whole, spread) = (ends(&base), ends(&format!("{base} parallel.expert_parallel_degree={degree}")));
        for (ours, theirs) in losses(&spread).iter().zip(losses(&whole)) {
            assert!(close(*ours, theirs, bound), "{text}: {ours} and {theirs}");
        }
        let [ours, theirs] = [&spread, &whole].map(|ends| floats(&gradients(ends)));
        let largest = theirs.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let apart = ours.iter().zip(&theirs).fold(0.0f32, |most, (ours, theirs)| most.max((ours - theirs).abs()));
        assert!(apart <= bound as f32 * largest, "{text}: gradients differ by {apart} of {largest}");
    }
}

/// Layouts in which replicas of several ranks divide experts: their state, their stages and their
/// sequences are divided too, and products with and without rows.
const REPLICAS: [&str; 14] = [
    "parallel.ranks=4 parallel.zero_stage=1",
    "parallel.ranks=4 parallel.zero_stage=2 parallel.reduce_schedule='micro_batch'",
    "parallel.ranks=4 parallel.zero_stage=3 activation_checkpointing.mode='full'",
    "parallel.ranks=8 parallel.zero_stage=3 parallel.data_parallel_shard_degree=2 memory.offload.optimizer='disk'",
    "parallel.ranks=4 parallel.context_parallel_degree=2",
    "parallel.ranks=8 parallel.context_parallel_degree=2 parallel.zero_stage=2 parallel.data_parallel_shard_degree=2",
    "parallel.ranks=4 parallel.pipeline_parallel_degree=2",
    "parallel.ranks=4 parallel.pipeline_parallel_degree=2 parallel.pipeline_schedule='zero_bubble'",
    "parallel.ranks=8 parallel.pipeline_parallel_degree=2 parallel.zero_stage=1 parallel.data_parallel_shard_degree=2",
    "parallel.ranks=4 parallel.tensor_parallel_degree=2 parallel.sequence_parallel=false",
    "parallel.ranks=4 parallel.tensor_parallel_degree=2 activation_checkpointing.mode='full'",
    "parallel.ranks=8 parallel.tensor_parallel_degree=2 parallel.zero_stage=3 parallel.data_parallel_shard_degree=2",
    "parallel.ranks=8 parallel.tensor_parallel_degree=2 parallel.context_parallel_degree=2 memory.offload.optimizer='disk'",
    "parallel.ranks=8 parallel.tensor_parallel_degree=2 parallel.pipeline_parallel_degree=2 parallel.zero_stage=1",
];

/// The losses, norms and gradients are those of one rank that has everything, and a rank holds as
/// much as was predicted.
#[test]
fn replicas_that_are_divided_further_divide_experts() {
    // A token's share of an auxiliary loss depends on the others of its micro-batch, which differ.
    for mixture in ["model.family='mixtral' experts.count=4 experts.auxiliary_loss=0", MIXTURES[2]] {
        let one = ends(&format!("{mixture} precision.compute='f32' training.micro_batch_size=8"));
        let theirs = floats(&gradients(&one));
        let largest = theirs.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        for layout in REPLICAS {
            let base = format!("{mixture} precision.compute='f32' training.micro_batch_size=1 {layout}");
            let spread = ends(&format!("{base} parallel.expert_parallel_degree=2"));
            assert!(spread.iter().any(|end| end.outcomes[0].expert_bytes > 0), "{layout}");
            for (ours, theirs) in losses(&spread).iter().zip(losses(&one)) {
                assert!(close(*ours, theirs, 1e-5), "{layout}: {ours} and {theirs}");
            }
            assert!(close(norms(&spread)[0], norms(&one)[0], 1e-5), "{layout}: {:?} {:?}", norms(&spread), norms(&one));
            let ours = floats(&gradients(&spread));
            let apart = ours.iter().zip(&theirs).fold(0.0f32, |most, (ours, theirs)| most.max((ours - theirs).abs()));
            assert!(apart <= 1e-5 * largest, "{layout}: gradients differ by {apart} of {largest}");
            let sets: Vec<&str> = base.split_whitespace().collect();
            spread.iter().for_each(|end| check_state(end, &sets));
        }
    }
}

/// A rank holds its experts only: parameters, gradients and optimizer state are as predicted, and
/// those of experts are half as many.
#[test]
fn a_rank_holds_its_own_experts_only() {
    let base = "model.family='mixtral' experts.count=4 model.ffn_dim=256 precision.compute='f32' parallel.ranks=2 training.micro_batch_size=4";
    let (whole, spread) = (ends(base), ends(&format!("{base} parallel.expert_parallel_degree=2")));
    let purposes = [Purpose::Params, Purpose::Grads, Purpose::Optimizer];
    for end in &spread {
        for purpose in purposes {
            let (measured, predicted) = (end.memory.peak(purpose), end.predicted.peak(purpose));
            assert_eq!(measured, predicted, "{purpose}");
            // Two layers of four experts with three matrices of 256 x 32 each, of which half are
            // elsewhere.
            let width = if purpose == Purpose::Optimizer { 8 } else { 4 };
            let dim = shape::model_spec(&resolved(&base.split_whitespace().collect::<Vec<_>>())).unwrap().dim;
            let elsewhere = 2 * 2 * 3 * 256 * dim * width;
            let saved = whole[0].memory.peak(purpose) - measured;
            assert!(saved.abs_diff(elsewhere) < elsewhere / 20, "{purpose}: {saved} and not {elsewhere}");
        }
        // Routing decides how many rows come; here it is nearly even.
        let (measured, predicted) = (end.memory.peak(Purpose::Activations), end.predicted.peak(Purpose::Activations));
        assert!(measured.abs_diff(predicted) < predicted / 4, "activations: {measured} and not {predicted}");
    }
}

/// Per layer and pass `2 k t d` elements are exchanged by a rank of `t` tokens, of which `1 / n`
/// stay on it if routing is even; forward and backward are two passes, and recomputation is one
/// more.
#[test]
fn ranks_send_the_rows_of_choices_of_experts_elsewhere() {
    for (more, passes) in [("", 2.0), ("activation_checkpointing.mode='full'", 3.0)] {
        let base = "model.family='mixtral' experts.count=4 precision.compute='f32' parallel.ranks=2 training.micro_batch_size=4";
        let text = format!("{base} parallel.expert_parallel_degree=2 {more}");
        let sets: Vec<&str> = text.split_whitespace().collect();
        let spec = shape::model_spec(&resolved(&sets)).unwrap();
        let experts = spec.experts.as_ref().unwrap();
        let all = train(&sets, STEPS);
        for step in 0..STEPS as usize {
            let sent: u64 = all.iter().map(|end| end.outcomes[step].expert_bytes).sum();
            let (rows, row) = (experts.top_k * 8 * LENGTH, spec.dim * 4);
            let expected = passes * (2 * spec.layers * rows * row) as f64 / 2.0;
            assert!(close(sent as f64, expected, 0.25), "{more}: {sent} bytes and not {expected}");
        }
    }
    let whole = ends("model.family='mixtral' experts.count=4 parallel.ranks=2 training.micro_batch_size=4");
    assert_eq!(whole[0].outcomes[0].expert_bytes, 0);
}

#[test]
fn layouts_that_do_not_run_are_refused_with_what_would() {
    let refused = |text: &str| {
        let text = format!("parallel.expert_parallel_degree=2 training.micro_batch_size=1 {text}");
        let sets: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        match resolve(&sets) {
            Err(error) => error.to_string(),
            Ok(resolved) => {
                let spec = shape::model_spec(&resolved).unwrap();
                shape::model_of(&resolved, spec, 0).map(drop).expect_err(&text).to_string()
            }
        }
    };
    let mixtral = "model.family='mixtral' experts.count=4";
    for (text, words) in [
        ("parallel.ranks=1", "make parallel.ranks a multiple of 2"),
        ("parallel.ranks=3 training.global_batch_size=6", "of which there are 3: make parallel.ranks a multiple of 2"),
        ("parallel.ranks=2 parallel.tensor_parallel_degree=2", "make parallel.ranks a multiple of 4"),
        ("parallel.ranks=2 parallel.context_parallel_degree=2", "make parallel.ranks a multiple of 4"),
        (
            "parallel.ranks=4 parallel.zero_stage=1 parallel.data_parallel_shard_degree=4",
            "of which there are 1 of 4 shards each: make parallel.data_parallel_replicate_degree a multiple of 2",
        ),
        ("parallel.ranks=2 training.elastic_bits=true", "set training.elastic_bits = false"),
        ("parallel.ranks=2 update.rule='local'", "set update.rule = \"synchronous\""),
        ("parallel.ranks=2 compression.gradients='bf16'", "set compression.gradients = \"none\""),
        ("parallel.ranks=2 optimizer.name='muon'", "set optimizer.name = \"adamw\", \"sgd\" or \"lion\""),
        ("parallel.ranks=2 fine_tuning.adapter='lora'", "set fine_tuning.adapter = \"none\""),
        (
            "parallel.ranks=2 memory.offload.gradients='disk' memory.offload.optimizer='disk'",
            "set memory.offload.gradients = \"none\"",
        ),
    ] {
        let error = refused(&format!("{mixtral} {text}"));
        assert!(error.contains(words), "{text}: {error}");
    }
    let error = refused("model.family='mixtral' experts.count=5 parallel.ranks=2");
    assert!(
        error.contains("expert_parallel_degree = 2: 5 experts cannot be divided among 2 ranks: use one of [1, 5]"),
        "{error}"
    );
    let error = refused("parallel.ranks=2");
    assert!(error.contains("has no experts that 2 ranks could divide"), "{error}");
}
