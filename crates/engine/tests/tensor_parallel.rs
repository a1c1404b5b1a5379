//! Tensor and sequence parallelism on the engine: the losses and weights of one rank, within what
//! another order of sums changes, and memory as predicted.

#[path = "common/train.rs"]
mod common;

use common::*;
use trainyard_engine::shape;
use trainyard_program::{Action, Phase};

const STEPS: u64 = 6;

struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<Vec<u32>>,
}

fn trained(sets: &[&str]) -> Trained {
    let ends = train(sets, STEPS);
    ends.iter().for_each(|end| check_memory(end, sets));
    let norms = ends[0].outcomes.iter().map(|outcome| outcome.gradient_norm).collect();
    Trained { losses: losses(&ends), norms, weights: weights(&ends) }
}

/// Asserts that two trainings agree: losses and norms at the first step within 1e-5, losses to the
/// end within 1e-4, and every weight within 1e-3 of the largest change that steps of AdamW make.
fn assert_close(one: &Trained, many: &Trained, what: &[&str]) {
    let far = |a: f64, b: f64, limit: f64| (a / b - 1.0).abs() > limit;
    assert!(!far(many.losses[0], one.losses[0], 1e-5), "{what:?}: {:?} against {:?}", many.losses, one.losses);
    assert!(!far(many.norms[0], one.norms[0], 1e-5), "{what:?}: {:?} against {:?}", many.norms, one.norms);
    for (a, b) in many.losses.iter().zip(&one.losses) {
        assert!(!far(*a, *b, 1e-4), "{what:?}: {:?} against {:?}", many.losses, one.losses);
    }
    let largest = 0.003 * STEPS as f32;
    for (index, (a, b)) in many.weights.iter().zip(&one.weights).enumerate() {
        assert_eq!(a.len(), b.len(), "{what:?}: parameter {index}");
        let distances = a.iter().zip(b).map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs());
        let mean = distances.sum::<f32>() / a.len() as f32;
        assert!(mean < 1e-3 * largest, "{what:?}: parameter {index} is off by {mean}");
    }
}

fn set(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Six query heads on two key/value heads; a vocabulary of 64 and one that does not divide.
const LLAMA: &str = "precision.compute='f32' model.heads=6 model.kv_heads=2 model.dim=48";
const GPT2: &str =
    "precision.compute='f32' model.family='gpt2' model.heads=4 model.kv_heads=4 model.dropout=0.1 model.vocab_size=67";

fn agree(model: &str, layouts: &[&str]) {
    let model = set(model);
    let sets = |more: &str| -> Vec<String> { model.iter().cloned().chain(set(more)).collect() };
    let strs = |sets: &[String]| -> Trained { trained(&sets.iter().map(String::as_str).collect::<Vec<_>>()) };
    let one = strs(&sets(""));
    for layout in layouts {
        let sets = sets(layout);
        let many = strs(&sets);
        assert_close(&one, &many, &[layout]);
    }
}

#[test]
fn a_llama_split_over_ranks_trains_as_on_one() {
    agree(
        LLAMA,
        &[
            "parallel.tensor_parallel_degree=2 parallel.sequence_parallel=false",
            "parallel.tensor_parallel_degree=2",
            "parallel.tensor_parallel_degree=3 parallel.sequence_parallel=false",
            "parallel.tensor_parallel_degree=4",
            "parallel.tensor_parallel_degree=2 activation_checkpointing.mode='full'",
            "parallel.tensor_parallel_degree=2 activation_checkpointing.mode='selective' training.accumulation_steps=4",
        ],
    );
}

/// Five layers with a window of five tokens, and one without.
const GEMMA3: &str =
    "precision.compute='f32' model.family='gemma3' model.layers=6 model.head_dim=8 model.sliding_window=5";

#[test]
fn a_gemma_3_divided_over_ranks_trains_as_on_one() {
    agree(
        GEMMA3,
        &[
            "parallel.tensor_parallel_degree=2",
            "parallel.tensor_parallel_degree=2 parallel.sequence_parallel=false activation_checkpointing.mode='full'",
            "parallel.context_parallel_degree=2",
            "parallel.context_parallel_degree=2 parallel.tensor_parallel_degree=2",
            "parallel.pipeline_parallel_degree=2 training.accumulation_steps=2",
        ],
    );
}

/// Attention in two parts: models of every kind, blocks with and without windows, early and late
/// chunks or neighbours.
#[test]
fn attention_to_own_keys_while_others_are_gathered_gives_what_one_rank_gives() {
    let overlapped = "parallel.context_parallel_exchange='all_gather_overlapped'";
    let two = format!("parallel.context_parallel_degree=2 {overlapped}");
    for model in [
        "precision.compute='f32' model.heads=8 model.kv_heads=4 model.head_dim=8",
        "precision.compute='f32' model.family='gpt2' model.heads=8 model.kv_heads=8",
        GEMMA3,
        "precision.compute='f32' model.family='dots1' model.heads=4 model.kv_heads=2 model.head_dim=8 experts.count=6 experts.dense_layers=1",
    ] {
        let layouts = [
            two.clone(),
            format!("{two} parallel.context_parallel_load_balance=false"),
            format!("{two} activation_checkpointing.mode='full' training.accumulation_steps=2"),
            format!("{two} parallel.tensor_parallel_degree=2 activation_checkpointing.mode='selective'"),
            format!("{two} parallel.tensor_parallel_degree=2 parallel.sequence_parallel=false"),
            format!("parallel.context_parallel_degree=4 {overlapped}"),
            format!(
                "{two} parallel.pipeline_parallel_degree=2 parallel.pipeline_schedule='zero_bubble' training.accumulation_steps=4"
            ),
        ];
        agree(model, &layouts.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

/// The use of two parts: nothing but the second waits for the keys of other ranks, forward,
/// and the gradients of these travel while the first part is differentiated.
#[test]
fn keys_travel_while_those_at_hand_are_used() {
    let sets = set("parallel.context_parallel_degree=2 parallel.context_parallel_exchange='all_gather_overlapped'");
    let resolved = resolve(&sets).unwrap();
    let spec = shape::model_spec(&resolved).unwrap();
    let model = shape::model_of(&resolved, spec, 0).unwrap();
    let batch = shape::batch_shape(&resolved, &model);
    let model_shape = shape::model_shape(&model, &batch, shape::compute_dtype(&resolved)).unwrap();
    let strategy = shape::strategy(&resolved, model.units().len()).unwrap();
    let [program, _] = shape::programs(&model_shape, &shape::mesh(&resolved), &strategy, 0).unwrap();
    let find = |of: &dyn Fn(&Action) -> bool| program.instructions.iter().position(|i| of(&i.action)).unwrap();
    let needs = |at: usize, of: usize| program.instructions[at].after.contains(&(of as u32));
    let forward = |wanted: u32| {
        find(&|action| matches!(action, Action::Forward { unit: 1, segment, micro_batch: 0, .. } if *segment == wanted))
    };
    let exchange = |wanted: Phase| {
        find(&|action| matches!(action, Action::Exchange { unit: 1, micro_batch: 0, phase, .. } if *phase == wanted))
    };
    let backward = |wanted: u32| {
        find(
            &|action| matches!(action, Action::Backward { unit: 1, segment, micro_batch: 0, .. } if *segment == wanted),
        )
    };
    let (own, rest, gather) = (forward(1), forward(2), exchange(Phase::Forward));
    assert!(gather < own && own < rest, "{gather} {own} {rest}");
    assert!(!needs(own, gather) && needs(rest, gather));
    let (own, scatter, project) = (backward(1), exchange(Phase::Backward), backward(0));
    assert!(scatter < own && own < project, "{scatter} {own} {project}");
    assert!(!needs(own, scatter) && needs(project, scatter));
}

/// Norms of queries and keys, biases, windows and dropout.
#[test]
fn rows_exchanged_for_heads_give_what_one_rank_gives() {
    let by_heads = "parallel.context_parallel_exchange='all_to_all'";
    let two = format!("parallel.context_parallel_degree=2 {by_heads}");
    for model in [
        "precision.compute='f32' model.heads=8 model.kv_heads=4 model.head_dim=8",
        "precision.compute='f32' model.family='gpt2' model.heads=8 model.kv_heads=8",
        "precision.compute='f32' model.family='gemma3' model.heads=4 model.kv_heads=4 model.head_dim=8 model.layers=2 model.sliding_window=5",
        "precision.compute='f32' model.family='dots1' model.heads=4 model.kv_heads=4 model.head_dim=8 experts.count=6 experts.dense_layers=1",
    ] {
        let layouts = [
            two.clone(),
            format!("{two} activation_checkpointing.mode='full' training.accumulation_steps=2"),
            format!("{two} parallel.tensor_parallel_degree=2 activation_checkpointing.mode='selective'"),
            format!("{two} parallel.tensor_parallel_degree=2 parallel.sequence_parallel=false"),
            format!("parallel.context_parallel_degree=4 {by_heads}"),
            format!(
                "{two} parallel.pipeline_parallel_degree=2 parallel.pipeline_schedule='zero_bubble' training.accumulation_steps=4"
            ),
        ];
        agree(model, &layouts.iter().map(String::as_str).collect::<Vec<_>>());
    }
    // Masks of dropout depend on the micro-batches, not on the ranks.
    let dropout = "precision.compute='f32' model.family='gpt2' model.heads=8 model.kv_heads=8 model.dropout=0.1";
    agree(dropout, &[&two, &format!("{two} activation_checkpointing.mode='full'")]);
    let refused = "model.heads=6 model.kv_heads=3 model.head_dim=8 parallel.context_parallel_degree=2";
    let resolved = resolve(&[set(refused), set(by_heads)].concat()).unwrap();
    let spec = trainyard_engine::shape::model_spec(&resolved).unwrap();
    let error = trainyard_engine::shape::model_of(&resolved, spec, 0).unwrap_err().to_string();
    assert!(error.contains("context_parallel_degree = 2: 6 query heads and 3 key/value heads"), "{error}");
}

#[test]
fn a_phi_3_divided_over_ranks_trains_as_on_one() {
    agree(
        "precision.compute='f32' model.family='phi3' model.sliding_window=5",
        &["parallel.tensor_parallel_degree=2", "parallel.context_parallel_degree=2"],
    );
}

#[test]
fn an_olmo_2_is_divided_by_rows_and_layers_but_not_by_heads() {
    let olmo2 = "precision.compute='f32' model.family='olmo2'";
    agree(
        olmo2,
        &["parallel.context_parallel_degree=2", "parallel.pipeline_parallel_degree=2 training.accumulation_steps=2"],
    );
    let sets = [&set(olmo2)[..], &set("parallel.tensor_parallel_degree=2")].concat();
    let resolved = resolve(&sets).unwrap();
    let spec = trainyard_engine::shape::model_spec(&resolved).unwrap();
    let error = trainyard_engine::shape::model_of(&resolved, spec, 0).unwrap_err().to_string();
    assert!(error.contains("`attn.q_norm.weight` needs all heads of a token on one rank"), "{error}");
}

#[test]
fn a_gpt_2_split_over_ranks_trains_as_on_one() {
    agree(
        GPT2,
        &[
            "parallel.tensor_parallel_degree=2 parallel.sequence_parallel=false",
            "parallel.tensor_parallel_degree=4",
            "parallel.tensor_parallel_degree=2 model.tie_embeddings=true",
        ],
    );
}

/// Experts' columns are divided like those of an MLP, and each rank routes all tokens.
#[test]
fn mixtures_split_over_ranks_train_as_on_one() {
    for mixture in [
        "precision.compute='f32' model.family='mixtral' experts.count=4 experts.auxiliary_loss=0.05 experts.z_loss=0.01",
        "precision.compute='f32' model.family='dots1' experts.count=6 experts.dense_layers=1",
    ] {
        agree(
            mixture,
            &[
                "parallel.tensor_parallel_degree=2 parallel.sequence_parallel=false",
                "parallel.tensor_parallel_degree=4 activation_checkpointing.mode='selective'",
            ],
        );
    }
    // Each rank routes its rows. Without a loss that balances, that changes no choice.
    agree(
        "precision.compute='f32' model.family='dots1' experts.count=6",
        &["parallel.context_parallel_degree=2", "parallel.context_parallel_degree=2 parallel.tensor_parallel_degree=2"],
    );
}
