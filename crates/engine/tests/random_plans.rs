//! No false yes: configurations drawn at random either are refused with words, or train as
//! predicted. `trainyard plan` lists a way of running if its configuration resolves, its programs
//! pass the checker and its memory can be predicted; so does this test, and then it runs the way.

#[path = "common/train.rs"]
mod common;

use common::{End, batch, resolve, train_rank};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use trainyard_comm::local;
use trainyard_engine::EngineError;
use trainyard_engine::config::{Compute, Resolved};
use trainyard_engine::predict::predict;
use trainyard_engine::rank::Compression;
use trainyard_engine::shape;
use trainyard_engine::world::run;
use trainyard_program::runnable;
use trainyard_tensor::Purpose;

const STEPS: u64 = 2;

/// Numbers that look random, the same for the same seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % count as u64) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// True once in `times`.
    fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// The settings of the model of a plan: one rank with them has the loss that the plan must have.
fn model(draw: &mut Draw) -> Vec<String> {
    let families = ["llama", "gpt2", "gemma3", "olmo2", "phi3", "mixtral", "qwen3_moe", "dots1", "t5"];
    let family = draw.of(&families);
    let mut sets = vec![format!("model.family='{family}'"), format!("model.layers={}", draw.of(&[2, 4]))];
    if ["gpt2", "t5"].contains(&family) {
        sets.push("model.kv_heads=4".to_owned());
    }
    if ["mixtral", "qwen3_moe", "dots1"].contains(&family) {
        // A token's share of an auxiliary loss depends on the others of its micro-batch.
        sets.extend(["experts.count=4", "experts.auxiliary_loss=0"].map(str::to_owned));
    }
    if draw.once_in(3) {
        sets.push(format!("model.tie_embeddings={}", draw.once_in(2)));
    }
    sets
}

/// Every other setting of a plan on up to eight ranks.
fn plan(draw: &mut Draw) -> Vec<String> {
    // Replicas, shards, parts of sequences, parts of products, stages.
    let mut degrees = [1; 5];
    for _ in 0..draw.below(4) {
        degrees[draw.below(5)] *= 2;
    }
    let [replicate, shard, context, tensor, pipeline] = degrees;
    let rows = 8 / (replicate * shard);
    let micro = draw.of(&[1, 2, 4, 8]).min(rows);
    let stage = if shard > 1 { draw.of(&[1, 2, 3]) } else { draw.of(&[0, 0, 0, 1, 2, 3]) };
    let mut sets = vec![
        format!("parallel.ranks={}", degrees.iter().product::<usize>()),
        format!("parallel.data_parallel_replicate_degree={replicate}"),
        format!("parallel.data_parallel_shard_degree={shard}"),
        format!("parallel.context_parallel_degree={context}"),
        format!("parallel.tensor_parallel_degree={tensor}"),
        format!("parallel.pipeline_parallel_degree={pipeline}"),
        format!("parallel.zero_stage={stage}"),
        format!("training.micro_batch_size={micro}"),
        format!("activation_checkpointing.mode='{}'", draw.of(&["none", "selective", "full"])),
        format!("precision.compute='{}'", draw.of(&["f32", "f32", "bf16", "f16"])),
    ];
    let mut sometimes = |times: usize, draw: &mut Draw, key: &str, values: &[&str]| {
        if draw.once_in(times) {
            sets.push(format!("{key}={}", draw.of(values)));
        }
    };
    let tiers = ["'none'", "'disk'"];
    let schedules = ["'gpipe'", "'1f1b'", "'interleaved'", "'zero_bubble'", "'zero_bubble_v'", "'dual_pipe_v'"];
    let codecs = ["'bf16'", "'int8'", "'int4'", "'one_bit'", "'top_k'", "'power_sgd'"];
    if pipeline > 1 {
        sometimes(2, draw, "parallel.pipeline_schedule", &schedules);
        sometimes(4, draw, "compression.activations", &["'int8'"]);
    }
    if replicate > 1 {
        sometimes(2, draw, "parallel.expert_parallel_degree", &["2", "4"]);
    }
    if tensor > 1 {
        sometimes(2, draw, "parallel.sequence_parallel", &["true", "false"]);
    }
    if context > 1 {
        sometimes(2, draw, "parallel.context_parallel_load_balance", &["true", "false"]);
        sometimes(
            2,
            draw,
            "parallel.context_parallel_exchange",
            &["'all_gather'", "'all_gather_overlapped'", "'all_to_all'"],
        );
    }
    if stage == 3 {
        sometimes(2, draw, "parallel.reshard_after_forward", &["true", "false", "2"]);
        sometimes(2, draw, "parallel.prefetch", &["0", "1", "2"]);
        sometimes(4, draw, "compression.parameters", &["'int8'"]);
    }
    sometimes(3, draw, "parallel.reduce_schedule", &["'step'", "'micro_batch'"]);
    sometimes(4, draw, "parallel.reduce_dtype", &["'f32'", "'bf16'"]);
    sometimes(3, draw, "optimizer.name", &["'sgd'", "'lion'", "'muon'", "'adafactor'", "'lamb'"]);
    sometimes(6, draw, "memory.offload.optimizer", &tiers);
    sometimes(8, draw, "memory.offload.gradients", &tiers);
    sometimes(8, draw, "memory.offload.parameters", &tiers);
    sometimes(8, draw, "memory.offload.activations", &tiers);
    sometimes(8, draw, "compression.gradients", &codecs);
    sometimes(10, draw, "training.elastic_bits", &["true"]);
    sometimes(10, draw, "fine_tuning.adapter", &["'lora'"]);
    sometimes(10, draw, "averaging.kind", &["'ema'", "'uniform'"]);
    sometimes(12, draw, "optimizer.clip_norm", &["0"]);
    if draw.once_in(10) {
        sets.push(format!("update.rule={}", draw.of(&["'local'", "'diloco'"])));
        sets.push(format!("update.fragments={}", draw.of(&["1", "2", "3"])));
        sets.push(format!("update.overlap={}", draw.of(&["false", "true"])));
    }
    sets
}

/// Lowers, checks and predicts every rank's programs, as a plan does.
fn plans(resolved: &Resolved) -> Result<(), EngineError> {
    let mesh = shape::mesh(resolved);
    let answer = runnable(&mesh);
    assert!(answer.is_yes(), "a configuration that resolves is {answer}");
    for rank in 0..resolved.parallel.ranks as u32 {
        let spec = shape::model_spec(resolved)?;
        let model = shape::model_of(resolved, spec.clone(), rank)?;
        let batch = shape::batch_shape(resolved, &model);
        let model_shape = shape::model_shape(&model, &batch, shape::compute_dtype(resolved))?;
        let strategy = shape::strategy(resolved, model.units().len())?;
        let [program, _] = shape::programs(&model_shape, &mesh, &strategy, rank)?;
        for outer in shape::outer_strategies(resolved, &strategy) {
            shape::programs(&model_shape, &mesh, &outer, rank)?;
        }
        predict(model, &program, &batch, &shape::rank_settings(resolved))?;
    }
    Ok(())
}

/// Trains on all ranks; the first problem in words.
fn train(resolved: &Resolved) -> Result<Vec<End>, String> {
    let worlds = local::World::new(resolved.parallel.ranks);
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            scope.spawn(move || {
                let body = || run(world, |world| train_rank(resolved, world, STEPS, batch));
                catch_unwind(AssertUnwindSafe(body)).map_err(|_| "a rank panicked".to_owned())
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let ends = ranks.into_iter().map(|rank| rank.join().expect("panics are caught"));
        ends.map(|end| end?.map_err(|error| error.to_string())).collect()
    })
}

/// The losses of plans that have the same model, on one rank in f32.
#[derive(Default)]
struct Expected(BTreeMap<Vec<String>, f64>);

impl Expected {
    fn loss(&mut self, model: &[String]) -> f64 {
        *self.0.entry(model.to_vec()).or_insert_with(|| {
            let one = ["precision.compute='f32'", "training.micro_batch_size=8"].map(str::to_owned);
            let resolved = resolve(&[model, &one].concat()).unwrap();
            train(&resolved).unwrap()[0].outcomes[0].loss
        })
    }
}

/// The difference of a plan's training from what was said of it; None if there is none.
fn problem(resolved: &Resolved, ends: &[End], expected: f64) -> Option<String> {
    // Encoded parameters and activations are rounded to 8 bits.
    let Compression { parameters, activations, .. } = resolved.compression;
    let encoded = parameters.is_some() || activations.iter().any(Option::is_some);
    let exact = resolved.config.precision.compute == Compute::F32 && !encoded;
    let bound = if exact { 1e-4 } else { 3e-2 };
    for (rank, end) in ends.iter().enumerate() {
        for (step, outcome) in end.outcomes.iter().enumerate() {
            if !outcome.loss.is_finite() || !outcome.gradient_norm.is_finite() && !outcome.skipped {
                return Some(format!("rank {rank}, step {step}: {} {}", outcome.loss, outcome.gradient_norm));
            }
        }
        // Replicas that train apart have losses of their own rows.
        let loss = end.outcomes[0].loss;
        if resolved.apart.is_none() && (loss / expected - 1.0).abs() > bound {
            return Some(format!("rank {rank}: a loss of {loss} and not {expected}"));
        }
        for purpose in Purpose::ALL {
            let (measured, predicted) = (end.memory.peak(purpose), end.predicted.peak(purpose));
            // Routing decides how many rows come to a rank.
            let open = resolved.parallel.experts > 1 && matches!(purpose, Purpose::Activations | Purpose::Workspace);
            // An optimizer whose every step was skipped, for gradients that overflow f16, has used
            // none of its workspace.
            let unused = purpose == Purpose::Workspace && end.outcomes.iter().all(|outcome| outcome.skipped);
            if measured != predicted && !open && !(unused && measured < predicted) {
                return Some(format!("rank {rank}: {purpose} is {measured} and not {predicted} bytes"));
            }
        }
    }
    None
}

#[test]
fn what_can_be_planned_runs() {
    let seeds = trainyard_testing::cases("random plans", 60, 1000);
    let (mut expected, mut ran, mut refused, mut failures) = (Expected::default(), 0, 0, Vec::new());
    for seed in 0..seeds {
        let mut draw = Draw(seed << 32);
        let model = model(&mut draw);
        let sets = [&model[..], &plan(&mut draw)].concat();
        let resolved = match resolve(&sets) {
            Ok(resolved) => resolved,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refused += 1;
                continue;
            }
        };
        let planned = catch_unwind(AssertUnwindSafe(|| plans(&resolved)));
        match planned {
            Err(_) => failures.push(format!("seed {seed}: planning panicked: {sets:?}")),
            Ok(Err(_)) => refused += 1,
            Ok(Ok(())) => {
                ran += 1;
                let trained = train(&resolved);
                let problem = match &trained {
                    Err(error) => Some(error.clone()),
                    Ok(ends) => problem(&resolved, ends, expected.loss(&model)),
                };
                failures.extend(problem.map(|problem| format!("seed {seed}: {problem}: {sets:?}")));
            }
        }
    }
    println!("{ran} plans ran, {refused} were refused");
    assert!(failures.is_empty(), "{} of {ran}:\n{}", failures.len(), failures.join("\n"));
    assert!(ran >= seeds / 3, "only {ran} of {seeds} plans can run: nothing is tested");
}
