//! Tensor, sequence and pipeline parallelism with everything else that shapes a step: offload,
//! activation checkpointing, elastic bits, loss scaling, 8-bit products, schedules of gathers and
//! reductions, tables from files. Where the layout of ranks stays, the bits stay.

#[path = "common/train.rs"]
mod common;

use common::*;
use trainyard_engine::shape;
use trainyard_program::Schedule;

const STEPS: u64 = 3;

const SCHEDULES: [&str; 6] = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dual_pipe_v"];

const STAGES: &str = "model.layers=4 training.micro_batch_size=1 parallel.pipeline_parallel_degree=2";
const PARTS: &str =
    "model.heads=6 model.kv_heads=2 model.dim=48 training.micro_batch_size=1 parallel.tensor_parallel_degree=2";
/// Parts that are unequal: of heads, of which some share a key/value head, and of the vocabulary.
const UNEQUAL: &str = "model.heads=6 model.kv_heads=2 model.dim=48 model.vocab_size=257 training.micro_batch_size=1 \
                       parallel.tensor_parallel_degree=4";

fn sets(text: &str) -> Vec<String> {
    text.split_whitespace().map(|set| set.replace("on-the-host", ON_THE_HOST)).collect()
}

/// The ranks' ends, with memory as predicted.
fn ends(text: &str, steps: u64) -> Vec<End> {
    let sets = sets(text);
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let ends = train(&sets, steps);
    ends.iter().for_each(|end| check_memory(end, &sets));
    ends
}

/// Losses and norms.
fn curve(ends: &[End]) -> Vec<[f64; 2]> {
    ends[0].outcomes.iter().map(|outcome| [outcome.loss, outcome.gradient_norm]).collect()
}

/// Trains `base` as it is and with each of `changes`: all end with the same bits.
fn same_bits<'c>(base: &str, changes: impl IntoIterator<Item = &'c str>) {
    let first = ends(base, STEPS);
    let bits = weights(&first);
    for change in changes {
        let other = ends(&format!("{base} {change}"), STEPS);
        assert_eq!(losses(&other), losses(&first), "{base} | {change}: losses");
        assert_eq!(curve(&other), curve(&first), "{base} | {change}: norms");
        assert!(weights(&other) == bits, "{base} | {change}: some weight differs");
    }
}

/// Calls [`same_bits`] with every base and all `changes`; or with `few` pairs of them, spread over
/// both, unless all sweeps are requested.
fn sweep(bases: &[String], changes: &[&str], few: usize) {
    let pairs = bases.len() * changes.len();
    let pairs = trainyard_testing::cases("layouts with other settings", few as u64, pairs as u64) as usize;
    for (number, base) in bases.iter().enumerate() {
        let [from, to] = [number, number + 1].map(|number| number * pairs / bases.len());
        if from < to {
            same_bits(base, (from..to).map(|pair| changes[pair % changes.len()]));
        }
    }
}

fn staged(schedule: &str, more: &str) -> String {
    format!("{STAGES} parallel.pipeline_schedule='{schedule}' {more}")
}

#[test]
fn offload_changes_no_bit_of_stages_and_parts() {
    let (bf16, full) = ("precision.compute='bf16'", "activation_checkpointing.mode='full'");
    let selective = "activation_checkpointing.mode='selective'";
    sweep(
        &[
            staged("1f1b", full),
            staged("interleaved", bf16),
            staged("zero_bubble", bf16),
            staged("zero_bubble_v", bf16),
            staged("dual_pipe_v", selective),
            staged("gpipe", "model.tie_embeddings=true"),
            staged("gpipe", "parallel.ranks=4 parallel.zero_stage=3"),
            format!("{PARTS} parallel.sequence_parallel=false {bf16} {selective}"),
            format!("{PARTS} {bf16} {full}"),
            format!("{PARTS} parallel.ranks=4 parallel.zero_stage=3"),
            format!("{PARTS} parallel.ranks=4 parallel.zero_stage=1"),
            format!("{PARTS} {} {bf16} {selective}", staged("zero_bubble_v", "")),
            format!("{PARTS} {} {bf16}", staged("1f1b", "parallel.ranks=8 parallel.zero_stage=2")),
        ],
        &[
            "memory.offload.optimizer='disk' memory.offload.chunk_elements=4096",
            "memory.offload.parameters='disk' on-the-host",
            "memory.offload.activations='disk'",
            "memory.offload.activations='disk' memory.offload.parameters='disk' parallel.prefetch=2",
            "memory.offload.optimizer='disk' memory.offload.parameters='disk' memory.offload.activations='disk' parallel.prefetch=0",
            "memory.offload.optimizer='disk' memory.offload.parameters='disk' memory.offload.activations='disk' \
             memory.offload.chunk_elements=8192 on-the-host",
        ],
        10,
    );
}

#[test]
fn checkpointing_changes_no_bit_of_stages_and_parts() {
    let mut bases = Vec::new();
    for schedule in SCHEDULES {
        bases.push(staged(schedule, "activation_checkpointing.mode='none'"));
        let three = "parallel.pipeline_parallel_degree=3 training.global_batch_size=12 precision.compute='bf16' model.layers=7 model.dropout=0.1";
        bases.push(staged(schedule, &format!("activation_checkpointing.mode='none' {three}")));
        bases.push(format!("{PARTS} {}", staged(schedule, "activation_checkpointing.mode='none'")));
    }
    for more in
        ["", "parallel.sequence_parallel=false model.dropout=0.1", "precision.compute='bf16' model.vocab_size=67"]
    {
        bases.push(format!("{PARTS} {more} activation_checkpointing.mode='none'"));
    }
    sweep(&bases, &["activation_checkpointing.mode='selective'", "activation_checkpointing.mode='full'"], 11);
}

#[test]
fn elastic_bits_do_not_depend_on_the_data_parallel_degree_of_stages_and_parts() {
    let elastic = "training.elastic_bits=true";
    let degrees = |model: usize| {
        [
            format!("parallel.ranks={}", 2 * model),
            format!("parallel.ranks={} parallel.zero_stage=3", 2 * model),
            format!("parallel.ranks={} parallel.zero_stage=1", 4 * model),
        ]
    };
    // DualPipeV needs twice as many micro-batches as stages.
    let mut two: Vec<String> = SCHEDULES.map(|schedule| staged(schedule, elastic)).into();
    two[5] += " training.global_batch_size=16";
    two.extend(["", "parallel.sequence_parallel=false"].map(|more| format!("{PARTS} {elastic} {more}")));
    sweep(&two, &degrees(2).each_ref().map(String::as_str), 7);
    let tied = format!("{PARTS} {} model.tie_embeddings=true", staged("1f1b", elastic));
    sweep(&[tied], &degrees(4).each_ref().map(String::as_str), 1);
}

/// An overflow in one part or stage skips the step on all, and the scale falls on all alike.
#[test]
fn an_overflow_skips_the_step_on_all_stages_and_parts() {
    let f16 = "precision.compute='f16' precision.loss_scale_initial=16777216";
    for base in [
        staged("zero_bubble_v", ""),
        format!("{PARTS} parallel.tensor_parallel_degree=4"),
        format!("{PARTS} {} parallel.sequence_parallel=false", staged("1f1b", "")),
        format!("{PARTS} {}", staged("interleaved", "parallel.ranks=8 parallel.zero_stage=1")),
    ] {
        let ends = ends(&format!("{base} {f16}"), 10);
        let skipped = |end: &End| -> Vec<bool> { end.outcomes.iter().map(|outcome| outcome.skipped).collect() };
        let first = skipped(&ends[0]);
        assert!(first[0] && first.contains(&false), "{base}: {first:?}");
        ends.iter().for_each(|end| assert_eq!(skipped(end), first, "{base}"));
        // Replicas agree.
        weights(&ends);
    }
}

/// The history of a checkpoint is that of rank 0, so every rank must know the largest magnitudes of
/// all layers and of all parts.
#[test]
fn all_ranks_know_the_largest_magnitudes_of_all_stages_and_parts() {
    let fp8 = "precision.fp8='hybrid' model.layers=4 training.micro_batch_size=2";
    let amax = |text: &str| {
        let ends = ends(&format!("{text} {fp8}"), STEPS);
        let first = ends[0].amax.clone().unwrap();
        assert_eq!((first.layers.len(), first.steps.len()), (16, STEPS as usize), "{text}");
        assert!(first.steps.iter().flatten().all(|most| *most > 0.0), "{text}: {first:?}");
        ends.iter().for_each(|end| assert!(end.amax.as_ref() == Some(&first), "{text}: ranks differ"));
        (first, curve(&ends))
    };
    let one = amax("");
    for schedule in ["1f1b", "zero_bubble", "dual_pipe_v"] {
        assert!(amax(&staged(schedule, "")) == one, "{schedule}");
    }
    let parts = "parallel.tensor_parallel_degree=2";
    let split = amax(parts);
    let pairs = split.0.steps[0].iter().zip(&one.0.steps[0]);
    pairs.for_each(|(a, b)| assert!((a / b - 1.0).abs() < 0.05, "{a} against {b}"));
    assert!(amax(&format!("{parts} {}", staged("1f1b", ""))) == split);
    let sharded = "parallel.zero_stage=3 parallel.data_parallel_shard_degree=2";
    assert!(amax(&format!("{parts} {sharded}")) == amax(&format!("{parts} {}", staged("1f1b", sharded))));
}

/// Replicas and shards of every stage of ZeRO, with one tensor-parallel degree.
#[test]
fn zero_stages_change_no_bit_of_parts() {
    let mut bases = Vec::new();
    for more in ["", "parallel.reduce_dtype='bf16'", "parallel.reduce_schedule='micro_batch'"] {
        let tied = "precision.compute='f32' model.tie_embeddings=true";
        let gpt2 = "model.family='gpt2' model.kv_heads=6 precision.compute='f32' model.dropout=0.1";
        for model in ["", "parallel.sequence_parallel=false", tied, gpt2] {
            bases.push(format!("{UNEQUAL} {model} {more} parallel.ranks=8"));
        }
        bases.push(format!("{PARTS} {} {more} {tied} parallel.ranks=8", staged("1f1b", "")));
    }
    sweep(&bases, &["parallel.zero_stage=2", "parallel.zero_stage=1", "parallel.zero_stage=3"], 7);
}

/// Mixtures: Mixtral's with an auxiliary loss and a capacity, and one with shared experts, an MLP
/// in the first layer and a bias that balances.
const MIXTURES: [&str; 2] = [
    "model.family='mixtral' experts.count=4 experts.auxiliary_loss=0.05 experts.z_loss=0.01 experts.capacity_factor=1.25",
    "model.family='dots1' experts.count=6 experts.top_k=2 experts.dense_layers=1 experts.bias_update_rate=0.01 \
     precision.compute='f32'",
];

#[test]
fn shards_stages_offload_and_checkpointing_change_no_bit_of_mixtures() {
    for mixture in MIXTURES {
        let four = format!("{mixture} parallel.ranks=4 training.micro_batch_size=1");
        same_bits(
            &format!("{four} parallel.zero_stage=0"),
            [
                "parallel.zero_stage=1",
                "parallel.zero_stage=3 activation_checkpointing.mode='full'",
                "parallel.zero_stage=2 activation_checkpointing.mode='selective'",
                "parallel.data_parallel_replicate_degree=2 parallel.zero_stage=3 memory.offload.activations='disk'",
            ],
        );
        same_bits(
            &format!("{mixture} training.micro_batch_size=1 model.layers=4"),
            [
                "parallel.pipeline_parallel_degree=2 parallel.pipeline_schedule='zero_bubble'",
                "memory.offload.optimizer='disk' memory.offload.parameters='disk'",
            ],
        );
    }
}

/// Each rank counts the ways of its tokens once, whatever runs again.
#[test]
fn ranks_agree_on_the_balance_of_experts_and_its_bias_moves_against_it() {
    let routed = |text: &str| {
        let ends = ends(&format!("{} parallel.ranks=2 training.micro_batch_size=2 {text}", MIXTURES[1]), STEPS);
        let records: Vec<_> = ends[0].outcomes.iter().map(|outcome| outcome.routing.clone().unwrap()).collect();
        ends.iter().for_each(|end| {
            let own = end.outcomes.iter().map(|outcome| outcome.routing.clone().unwrap());
            assert!(own.eq(records.iter().cloned()), "{text}: ranks differ");
        });
        (records, ends)
    };
    let (plain, ends) = routed("");
    for record in &plain {
        let layers: Vec<_> = record.layers().collect();
        let [(1, layer)] = layers[..] else { panic!("experts are in layer 1: {layers:?}") };
        // Eight rows of eight tokens, two choices each.
        assert_eq!((layer.counts.iter().sum::<f64>(), layer.tokens, layer.dropped), (128.0, 64.0, 0.0));
    }
    assert_eq!(routed("activation_checkpointing.mode='full'").0, plain);
    assert_eq!(routed("parallel.zero_stage=3").0, plain);
    let spec = shape::model_spec(&resolved(&sets(MIXTURES[1]).iter().map(String::as_str).collect::<Vec<_>>())).unwrap();
    let model = trainyard_model::Model::new(spec).unwrap();
    let bias = model.parameters().position(|(_, parameter)| parameter.name == "mlp.router.bias").unwrap();
    let bias: Vec<f32> = weights(&ends)[bias].iter().map(|bits| f32::from_bits(*bits)).collect();
    let mut want = vec![0.0f32; 6];
    for record in &plain {
        let (_, layer) = record.layers().next().unwrap();
        let mean = layer.counts.iter().sum::<f64>() / 6.0;
        for (want, count) in want.iter_mut().zip(&layer.counts) {
            *want -= if *count == mean { 0.0 } else { 0.01 * (count - mean).signum() as f32 };
        }
    }
    assert_eq!(bias, want);
}

/// In ZeRO stage 1 a rank's sum has all elements, but only those of its own shard are reduced.
/// Parts of a tensor-parallel group whose shards end at different elements sum shared gradients.
#[test]
fn stage_1_sums_shared_gradients_of_unequal_parts() {
    let gpt2 = "model.family='gpt2' model.kv_heads=6 precision.compute='f32'";
    same_bits(&format!("{UNEQUAL} {gpt2} parallel.ranks=8"), ["parallel.zero_stage=1"]);
}

/// Gradients of parts are those of one rank, whatever sums and shards them.
#[test]
fn gradients_of_unequal_parts_are_those_of_one_rank() {
    let model = UNEQUAL.replace("parallel.tensor_parallel_degree=4", "precision.compute='f32'");
    let one = curve(&ends(&model, 1))[0];
    for more in ["", "parallel.ranks=8 parallel.zero_stage=1", "parallel.ranks=8 parallel.zero_stage=3"] {
        let parts = curve(&ends(&format!("{UNEQUAL} precision.compute='f32' {more}"), 1))[0];
        for (a, b) in parts.iter().zip(one) {
            assert!((a / b - 1.0).abs() < 1e-5, "{more}: {a} against {b}");
        }
    }
}

#[test]
fn gathers_and_reductions_change_no_bit_of_stages() {
    let mut bases = Vec::new();
    for schedule in SCHEDULES {
        for reduce in ["", "parallel.reduce_schedule='micro_batch'", "parallel.reduce_dtype='bf16'"] {
            bases.push(staged(schedule, &format!("parallel.ranks=4 {reduce}")));
        }
        bases.push(format!("{PARTS} {}", staged(schedule, "parallel.ranks=8 parallel.reduce_schedule='micro_batch'")));
    }
    let changes = [
        "parallel.zero_stage=3",
        "parallel.zero_stage=3 parallel.prefetch=0",
        "parallel.zero_stage=2",
        "parallel.zero_stage=3 parallel.prefetch=3",
        "parallel.zero_stage=1",
        "parallel.zero_stage=3 parallel.reshard_after_forward=false",
    ];
    sweep(&bases, &changes, 13);
    for schedule in ["1f1b", "dual_pipe_v"] {
        let wide = "parallel.ranks=8 parallel.zero_stage=3 training.global_batch_size=16";
        same_bits(&staged(schedule, wide), ["parallel.reshard_after_forward=2"]);
    }
}

/// Fewer micro-batches than stages, one alone, and as many stages as units.
#[test]
fn few_micro_batches_fill_no_pipeline_and_train_the_same_bits() {
    let model = "model.layers=4 precision.compute='f32'";
    for micro_batches in [1, 2, 3] {
        let batch = format!("training.accumulation_steps={micro_batches} training.global_batch_size={micro_batches}");
        let one = ends(&format!("{model} {batch}"), STEPS);
        for (schedule, stages) in [("gpipe", 6), ("1f1b", 6), ("zero_bubble", 4), ("zero_bubble_v", 3)] {
            let pipeline =
                format!("parallel.pipeline_parallel_degree={stages} parallel.pipeline_schedule='{schedule}'");
            let many = ends(&format!("{model} {batch} {pipeline}"), STEPS);
            assert_eq!(curve(&many), curve(&one), "{pipeline} {batch}");
            assert!(weights(&many) == weights(&one), "{pipeline} {batch}: some weight differs");
        }
    }
}

#[test]
fn a_table_from_a_file_trains_the_bits_of_its_schedule() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table.csv");
    for schedule in ["1f1b", "zero_bubble_v"] {
        let known = resolved(&sets(&staged(schedule, "")).iter().map(String::as_str).collect::<Vec<_>>());
        let Schedule::Known(known) = shape::strategy(&known, 6).unwrap().pipeline else { panic!("no known schedule") };
        std::fs::write(&file, known.table(2, 8).to_string()).unwrap();
        let own = format!("parallel.pipeline_schedule_file='{}'", file.display());
        let [a, b] = [staged(schedule, ""), format!("{STAGES} {own}")].map(|text| ends(&text, STEPS));
        assert_eq!(curve(&a), curve(&b), "{schedule}");
        assert!(weights(&a) == weights(&b), "{schedule}: some weight differs");
        let programs = [&a[0].program, &b[0].program].map(|program| &program.instructions);
        assert!(programs[0] == programs[1], "{schedule}: another program");
    }
}

/// Degrees and sizes that cannot be divided are refused with the names of the keys, before anything
/// is read.
#[test]
fn what_cannot_be_divided_is_refused_with_the_names_of_its_keys() {
    let stages = "parallel.pipeline_parallel_degree";
    for (text, words) in [
        ("parallel.pipeline_parallel_degree=5", &[stages, "5 units", "the model has 4"][..]),
        (
            "parallel.pipeline_parallel_degree=3 parallel.pipeline_schedule='zero_bubble_v'",
            &[stages, "2 stretches", "6 units"],
        ),
        (
            "parallel.pipeline_parallel_degree=2 parallel.pipeline_schedule='interleaved' training.global_batch_size=3 \
             training.accumulation_steps=3",
            &["parallel.pipeline_schedule = \"interleaved\"", "a multiple of 2", "training.accumulation_steps is 3"],
        ),
        (
            "parallel.pipeline_parallel_degree=2 parallel.pipeline_schedule='dual_pipe_v' training.accumulation_steps=2",
            &["\"dual_pipe_v\" on 2 stages needs at least 4", "training.accumulation_steps is 2"],
        ),
        (
            "parallel.tensor_parallel_degree=5",
            &["parallel.tensor_parallel_degree = 5", "model.heads is 4", "from 1 to 4"],
        ),
        (
            "parallel.tensor_parallel_degree=3 training.micro_batch_size=1",
            &[
                "parallel.sequence_parallel",
                "training.micro_batch_size 1 x sequence_length 8 = 8",
                "sequence_parallel = false",
            ],
        ),
        (
            "parallel.pipeline_parallel_degree=2 memory.offload.optimizer='disk' memory.offload.gradients='disk'",
            &["memory.offload.gradients", stages],
        ),
        (
            "parallel.tensor_parallel_degree=2 memory.offload.optimizer='disk' memory.offload.gradients='disk'",
            &["memory.offload.gradients", "parallel.tensor_parallel_degree"],
        ),
    ] {
        let error = resolve(&sets(text)).expect_err(text).to_string();
        words.iter().for_each(|word| assert!(error.contains(word), "no `{word}` in: {error}"));
    }
}

/// The sides of parts count, and not those of the whole.
#[test]
fn parts_that_eight_bits_cannot_multiply_are_refused() {
    let resolved = resolve(&sets("parallel.tensor_parallel_degree=4 precision.fp8='hybrid'")).unwrap();
    let error = shape::model_spec(&resolved).unwrap_err().to_string();
    for word in ["precision.fp8", "parallel.tensor_parallel_degree", "multiples of 16", "= 8"] {
        assert!(error.contains(word), "no `{word}` in: {error}");
    }
}

/// Stages and parts of sequences divide rows from rows, never a row.
#[test]
fn integers_of_eight_bits_give_the_same_losses_on_stages_and_parts_of_sequences() {
    let int8 = "precision.int8='switchback' model.layers=4 training.micro_batch_size=2";
    let losses = |text: &str| curve(&ends(&format!("{text} {int8}"), STEPS));
    let one = losses("");
    assert!(one != curve(&ends("model.layers=4 training.micro_batch_size=2", STEPS)), "nothing was rounded");
    for schedule in ["1f1b", "zero_bubble", "dual_pipe_v"] {
        assert!(losses(&staged(schedule, "")) == one, "{schedule}");
    }
    // Attention over gathered keys sums in the order of one rank, up to rounding.
    let parts = losses("parallel.context_parallel_degree=2");
    assert!(
        parts.as_flattened().iter().zip(one.as_flattened()).all(|(a, b)| (a - b).abs() < 1e-3 * b),
        "{parts:?}, not {one:?}"
    );
}

#[test]
fn experts_are_as_wide_as_a_part_of_the_mlp() {
    for (text, width) in [
        ("model.family='mixtral' model.ffn_dim=48", 48),
        ("model.family='qwen3_moe' model.ffn_dim=48", 24),
        ("model.family='dots1' model.ffn_dim=48", 12),
        ("model.family='dots1' model.ffn_dim=48 experts.ffn_dim=40", 40),
    ] {
        let spec = shape::model_spec(&resolve(&sets(text)).unwrap()).unwrap();
        assert_eq!(spec.experts.map(|experts| experts.ffn_dim), Some(width), "{text}");
    }
}

#[test]
fn what_mixtures_do_not_have_is_refused() {
    let dots1 = "model.family='dots1' parallel.ranks=2";
    for (text, word) in [
        ("model.family='mixtral' precision.fp8='hybrid'", "precision.fp8"),
        ("model.family='mixtral' precision.int8='switchback'", "precision.int8"),
        ("model.family='dots1' parallel.ranks=2 compression.gradients='int8'", "experts.bias_update_rate"),
    ] {
        let error = shape::model_spec(&resolve(&sets(text)).unwrap()).unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
    for kept in ["compression.gradients='bf16'", "compression.gradients='int8' experts.bias_update_rate=0"] {
        shape::model_spec(&resolve(&sets(&format!("{dots1} {kept}"))).unwrap()).unwrap();
    }
    for (text, word) in [
        ("experts.count=4", "no experts"),
        ("model.family='mixtral' experts.count=4 experts.top_k=5", "only 4 experts"),
        ("model.family='mixtral' experts.dense_layers=9", "there are only"),
        ("model.family='mixtral' experts.capacity_factor=0", "experts.capacity_factor"),
    ] {
        let error = resolve(&sets(text)).expect_err(text).to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
}

#[test]
fn a_table_that_is_wrong_or_for_another_layout_is_refused_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table.csv");
    let path = file.display();
    let key = format!("parallel.pipeline_schedule_file {path}");
    for (table, words) in [
        ("0F0,0B0\n1F0,1X0\n", &["line 2, cell 2 (1X0)"][..]),
        (
            "0F0,0B0\n1F0,1B0\n",
            &["for 2 stages and 1 micro-batches", "parallel.pipeline_parallel_degree is 2", "accumulation_steps is 8"],
        ),
    ] {
        std::fs::write(&file, table).unwrap();
        let own = format!("{STAGES} parallel.pipeline_schedule_file='{path}'");
        let error = shape::strategy(&resolve(&sets(&own)).unwrap(), 6).unwrap_err().to_string();
        assert!(error.starts_with(&key), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "no `{word}` in: {error}"));
    }
    let error = resolve(&sets(&format!("{STAGES} parallel.pipeline_schedule_file='{path}.csv'")));
    let error = error.map(|resolved| shape::strategy(&resolved, 6).map(drop).unwrap_err().to_string());
    let error = error.unwrap_or_else(|error| error.to_string());
    assert!(error.contains("table.csv.csv"), "{error}");
}
