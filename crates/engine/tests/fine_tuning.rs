//! Frozen parameters and adapters on the engine: the same training in every layout, no state for
//! what
//! is not trained, and memory as predicted.

#[path = "common/train.rs"]
mod common;

use common::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trainyard_autograd::ParamId;
use trainyard_comm::codec::{Rounding, oracle};
use trainyard_engine::links::Links;
use trainyard_engine::rank::{Rank, StepSettings};
use trainyard_engine::shape;
use trainyard_engine::state::Holding;
use trainyard_engine::tier::Tiers;
use trainyard_model::weights::{WeightReader, export_adapter, read_adapter_config};
use trainyard_model::{BatchShape, Model, Tuning, hf};
use trainyard_program::{Action, BlockCodec, MemoryKind, StateBytes, Tier};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{DType, Device, Purpose};

const STEPS: u64 = 4;

/// Everything but the last block and the head is frozen.
const TOP: &[&str] = &["fine_tuning.freeze=['embedding.*','block.0.*']"];
/// Whole units and parts of units are frozen.
const MIXED: &[&str] =
    &["fine_tuning.freeze=['block.0.*','block.1.attn.*','embedding.*']", "fine_tuning.train=['*.norm1.*']"];
const LORA: &[&str] = &["fine_tuning.adapter='lora'", "fine_tuning.rank=4"];
const LORA_IN_BF16: &[&str] =
    &["fine_tuning.adapter='lora'", "fine_tuning.targets=['q_proj','v_proj','down_proj']", "precision.compute='bf16'"];
const LORA_ON_GPT2: &[&str] = &["fine_tuning.adapter='lora'", "model.family='gpt2'", "model.kv_heads='auto'"];

const DORA: &[&str] = &["fine_tuning.adapter='dora'", "fine_tuning.rank=4"];
const QLORA: &[&str] = &["fine_tuning.adapter='lora'", "fine_tuning.base_dtype='nf4'", "precision.compute='bf16'"];
const QDORA: &[&str] = &["fine_tuning.adapter='dora'", "fine_tuning.base_dtype='int8'"];
/// Whole units and parts of units are frozen, and their matrices lie encoded.
const MIXED_IN_8_BITS: &[&str] = &[MIXED[0], MIXED[1], "fine_tuning.base_dtype='int8'"];

/// Other units and parts of units rest in the first two steps than after them.
const PARTS: &str = "fine_tuning.freeze_schedule=[{from_step=0,frozen=['block.0.*','*.norm*']},\
        {from_step=2,frozen=['block.1.attn.*','head.*','embedding.*']}]";

fn joined<'s>(parts: &[&[&'s str]]) -> Vec<&'s str> {
    parts.concat()
}

/// False if parameters lie encoded, and are to lie on disk.
fn goes_with(way: &[&str], tuning: &[&str]) -> bool {
    let encoded = tuning.iter().any(|set| set.starts_with("fine_tuning.base_dtype"));
    !encoded || !way.contains(&"memory.offload.parameters='disk'")
}

/// The bits of one rank, on every way of running that may not change them.
fn same_bits(tuning: &[&str]) {
    let base: &[&str] = if tuning.contains(&"precision.compute='bf16'") { &[] } else { &["precision.compute='f32'"] };
    let one = train(&joined(&[base, tuning]), STEPS);
    check_memory(&one[0], tuning);
    assert!(losses(&one).iter().all(|loss| loss.is_finite()));
    let ways: &[&[&str]] = &[
        &["activation_checkpointing.mode='full'"],
        &["activation_checkpointing.mode='selective'"],
        &["memory.offload.optimizer='disk'", "memory.offload.parameters='disk'"],
        &["memory.offload.activations='disk'"],
        &["memory.offload.optimizer='disk'", "memory.offload.gradients='disk'"],
        &["memory.offload.optimizer='disk'", ON_THE_HOST],
    ];
    for way in ways.iter().filter(|way| goes_with(way, tuning)) {
        let sets = joined(&[base, tuning, way]);
        let ends = train(&sets, STEPS);
        check_memory(&ends[0], &sets);
        assert!((losses(&ends), weights(&ends)) == (losses(&one), weights(&one)), "{sets:?}");
    }
    // Two ranks sum in another order than one.
    let ddp = joined(&[base, tuning, &["parallel.ranks=2"]]);
    let two = train(&ddp, STEPS);
    let layouts: &[&[&str]] = &[
        &["parallel.ranks=2", "parallel.zero_stage=1"],
        &["parallel.ranks=2", "parallel.zero_stage=2"],
        &["parallel.ranks=2", "parallel.zero_stage=3"],
        &["parallel.ranks=2", "parallel.zero_stage=3", "memory.offload.parameters='disk'"],
        &["parallel.ranks=4", "parallel.data_parallel_replicate_degree=2", "parallel.pipeline_parallel_degree=2"],
    ];
    for layout in layouts.iter().filter(|way| goes_with(way, tuning)) {
        let sets = joined(&[base, tuning, layout]);
        let ends = train(&sets, STEPS);
        ends.iter().for_each(|end| check_memory(end, &sets));
        assert!((losses(&ends), weights(&ends)) == (losses(&two), weights(&two)), "{sets:?}");
    }
}

#[test]
fn a_frozen_bottom_trains_the_same_bits_in_every_layout() {
    same_bits(TOP);
}

#[test]
fn frozen_parts_of_units_train_the_same_bits_in_every_layout() {
    same_bits(MIXED);
}

/// Periods that unfreeze from above, freeze from below, and rest parts of units.
#[test]
fn a_schedule_of_freezing_trains_the_same_bits_in_every_layout() {
    const UNFREEZE: &str = "fine_tuning.freeze_schedule=[{from_step=0,frozen=['embedding.*','block.*']},\
        {from_step=1,frozen=['embedding.*','block.0.*']},{from_step=3,frozen=[]}]";
    const FREEZE: &str = "fine_tuning.freeze_schedule=[{from_step=1,frozen='embedding.*'},{from_step=2,frozen=['embedding.*','block.0.*']}]";
    for tuning in [UNFREEZE, FREEZE, PARTS] {
        same_bits(&[tuning]);
    }
    same_bits(&[PARTS, "precision.compute='bf16'"]);
    let tied = [PARTS, "precision.compute='bf16'", "model.tie_embeddings=true", "parallel.ranks=4"];
    let stages = ["parallel.zero_stage=0", "parallel.zero_stage=2", "parallel.zero_stage=3"];
    all_alike(&tied, &[&stages[..1], &stages[1..2], &stages[2..]]);
    same_bits(&[FREEZE, "optimizer.name='adamw'", "fine_tuning.freeze='block.1.attn.*'", "precision.compute='bf16'"]);
    const ADAPTERS: &str =
        "fine_tuning.freeze_schedule=[{from_step=0,frozen='block.0.*'},{from_step=2,frozen='block.1.*lora_a'}]";
    same_bits(&joined(&[LORA, &[ADAPTERS]]));
    same_bits(&joined(&[QLORA, &[ADAPTERS]]));
}

#[test]
fn adapters_train_the_same_bits_in_every_layout() {
    same_bits(LORA);
}

#[test]
fn adapters_in_bf16_train_the_same_bits_in_every_layout() {
    same_bits(LORA_IN_BF16);
}

#[test]
fn adapters_on_gpt_2_train_the_same_bits_in_every_layout() {
    same_bits(LORA_ON_GPT2);
}

#[test]
fn adapters_with_magnitudes_train_the_same_bits_in_every_layout() {
    same_bits(DORA);
}

#[test]
fn adapters_on_an_encoded_base_train_the_same_bits_in_every_layout() {
    same_bits(QLORA);
    same_bits(QDORA);
    same_bits(MIXED_IN_8_BITS);
}

/// Expects every one of `ways` to train the bits of the first, with memory as predicted.
fn all_alike(tuning: &[&str], ways: &[&[&str]]) {
    let base: &[&str] = if tuning.contains(&"precision.compute='bf16'") { &[] } else { &["precision.compute='f32'"] };
    let mut first = None;
    for way in ways {
        let sets = joined(&[base, tuning, way]);
        let ends = train(&sets, STEPS);
        ends.iter().for_each(|end| check_memory(end, &sets));
        let result = (losses(&ends), weights(&ends));
        assert!(*first.get_or_insert_with(|| result.clone()) == result, "{sets:?}");
    }
}

/// Whole units are frozen, and their matrices lie encoded.
const TOP_IN_4_BITS: &[&str] = &[TOP[0], "fine_tuning.base_dtype='nf4'"];
const ENCODED: [&[&str]; 4] = [QLORA, QDORA, MIXED_IN_8_BITS, TOP_IN_4_BITS];

/// A base that lies encoded on one rank, whole on every rank, and in shards.
#[test]
fn an_encoded_base_in_shards_trains_the_bits_of_a_whole_one() {
    let zero = |stage: &'static str| ["parallel.ranks=4", stage];
    let [ddp, two, three] = ["parallel.zero_stage=0", "parallel.zero_stage=2", "parallel.zero_stage=3"].map(zero);
    let of = |more: &[&'static str]| joined(&[&three, more]);
    let ways = [
        of(&["parallel.prefetch=2"]),
        of(&["parallel.prefetch=0"]),
        of(&["parallel.reshard_after_forward=false"]),
        of(&["parallel.reshard_after_forward=2", "activation_checkpointing.mode='selective'"]),
        of(&["activation_checkpointing.mode='full'"]),
        of(&["parallel.data_parallel_replicate_degree=2"]),
        of(&["memory.offload.optimizer='disk'", "memory.offload.gradients='disk'"]),
        of(&["memory.offload.activations='disk'"]),
    ];
    for tuning in ENCODED {
        let ways = [&ddp[..], &two].into_iter().chain(ways.iter().map(Vec::as_slice));
        all_alike(tuning, &ways.collect::<Vec<_>>());
        // Parts that are no whole words of a block, on three ranks.
        let three_ranks = ["parallel.ranks=3", "training.global_batch_size=6"];
        all_alike(tuning, &[&three_ranks, &joined(&[&three_ranks, &["parallel.zero_stage=3"]])]);
        let elastic = ["training.elastic_bits=true", "training.micro_batch_size=2"];
        let shards = |ranks: &'static str| joined(&[&elastic, &[ranks, "parallel.zero_stage=3"]]);
        all_alike(tuning, &[&elastic, &shards("parallel.ranks=2"), &shards("parallel.ranks=4")]);
    }
}

/// Shards of an encoded base beside the other ways of dividing a model and its batches.
#[test]
fn an_encoded_base_in_shards_trains_beside_other_axes() {
    let axes: [&[&str]; 4] = [
        &["parallel.pipeline_parallel_degree=2"],
        &["parallel.context_parallel_degree=2"],
        &["parallel.tensor_parallel_degree=2"],
        &["parallel.reduce_schedule='micro_batch'", "training.accumulation_steps=2"],
    ];
    for (axis, tuning) in axes.iter().flat_map(|axis| ENCODED.map(|tuning| (axis, tuning))) {
        let of = |stage| joined(&[&["parallel.ranks=4"], axis, &[stage]]);
        let stages = ["parallel.zero_stage=1", "parallel.zero_stage=3"].map(of);
        all_alike(tuning, &[&stages[0], &stages[1]]);
    }
}

/// Each rank holds its share of the codes, and the codes are what a gather moves.
#[test]
fn a_rank_holds_its_share_of_the_codes_and_gathers_move_codes() {
    let of = |ranks: u64, base: &str| {
        let [ranks, base] = [format!("parallel.ranks={ranks}"), format!("fine_tuning.base_dtype='{base}'")];
        train(&joined(&[LORA, &["parallel.zero_stage=3", "precision.compute='bf16'", &ranks, &base]]), 1).remove(0)
    };
    let gathered = |end: &End| {
        let gathers = end.program.instructions.iter().filter(|at| matches!(at.action, Action::Gather { unit: 1, .. }));
        let mut bytes: Vec<u64> = gathers.map(|gather| gather.bytes).collect();
        bytes.dedup();
        bytes
    };
    // Those of queries, keys and values, of the projection, of gate and up, and of down.
    let matrices = [64 * 32, 32 * 32, 128 * 32, 32 * 64];
    let norms = 2 * 2 * 32;
    let frozen = matrices.iter().sum::<u64>() + 2 * 32;
    for ranks in [2, 4] {
        let plain = of(ranks, "compute");
        // Adapters of rank 4 are less than a quantum, which each rank has one of.
        let trained = 2 * 4096 * ranks;
        let whole = 2 * frozen.next_multiple_of(4096 * ranks);
        assert_eq!(gathered(&plain), [trained + whole]);
        for (base, codec) in [("nf4", BlockCodec::Nf4), ("int8", BlockCodec::Int8)] {
            let encoded = of(ranks, base);
            let codes = matrices.map(|elements| codec.bytes(elements)).iter().sum::<u64>() + norms;
            let codes = codes.next_multiple_of(2 * ranks);
            assert_eq!(gathered(&encoded), [trained + codes], "{base} on {ranks} ranks");
            let [plain, encoded] = [&plain, &encoded].map(|end| end.memory.live(Purpose::Params) as u64);
            // Memory comes in 64 bytes. There are two blocks.
            let saved = 2 * (whole / ranks - (codes / ranks).next_multiple_of(64));
            assert_eq!(plain - encoded, saved, "{base} on {ranks} ranks");
        }
    }
}

/// Trained parameters have the gradients that they have in full training.
#[test]
fn freezing_changes_no_gradient_of_what_is_trained() {
    let base = ["precision.compute='f32'", "training.steps=1"];
    let full = train(&base, 1);
    for tuning in [TOP, MIXED, &["fine_tuning.freeze=['head.*','block.1.norm*']"]] {
        let part = train(&joined(&[&base, tuning]), 1);
        assert_eq!(losses(&full), losses(&part));
        let mut compared = 0;
        for (id, runs) in part[0].gradients.iter().filter(|(_, runs)| !runs.is_empty()) {
            assert!(full[0].gradients[id] == *runs, "{tuning:?}: parameter {id}");
            compared += 1;
        }
        assert!(compared > 0 && compared < full[0].gradients.len(), "{compared}");
    }
}

/// Frozen parameters have no gradients, masters or moments, and the units below the trained ones no
/// backward.
#[test]
fn what_is_frozen_has_no_state() {
    let of = |tuning: &[&str]| train(&joined(&[&["precision.compute='bf16'"], tuning]), 1).remove(0);
    let (full, top, lora) = (of(&[]), of(TOP), of(LORA));
    let state = |end: &End| {
        let resident = |kind: MemoryKind| -> i64 {
            end.program.resident.iter().filter(|effect| effect.kind == kind).map(|effect| effect.bytes).sum()
        };
        [MemoryKind::Masters, MemoryKind::Gradients, MemoryKind::Optimizer].map(resident)
    };
    for (part, most) in [(&top, 0.7), (&lora, 0.6)] {
        for (part, full) in state(part).into_iter().zip(state(&full)) {
            assert!(part > 0 && (part as f64) < most * full as f64, "{part} of {full}");
        }
        for purpose in [Purpose::Grads, Purpose::Optimizer] {
            assert!(part.memory.peak(purpose) < full.memory.peak(purpose), "{purpose}");
        }
    }
    assert_eq!((full.program.lowest, top.program.lowest, lora.program.lowest), (0, 2, 1));
}

/// Ranks that share products sum the gradients of what they hold in common.
#[test]
fn adapters_on_split_layers_train_as_on_one_rank() {
    let base = ["precision.compute='f32'", "model.heads=6", "model.kv_heads=2", "model.dim=48"];
    for tuning in [LORA, MIXED, DORA, &[PARTS]] {
        let one = train(&joined(&[&base, tuning]), STEPS);
        for layout in [
            &["parallel.tensor_parallel_degree=2", "parallel.sequence_parallel=false"][..],
            &["parallel.tensor_parallel_degree=2"],
            &["parallel.tensor_parallel_degree=3", "parallel.sequence_parallel=false"],
        ] {
            let sets = joined(&[&base, tuning, layout]);
            let many = train(&sets, STEPS);
            many.iter().for_each(|end| check_memory(end, &sets));
            for (a, b) in losses(&many).iter().zip(losses(&one)) {
                assert!((a / b - 1.0).abs() < 1e-5, "{sets:?}: {a} against {b}");
            }
            for (a, b) in gradients(&many).iter().flatten().zip(gradients(&one).iter().flatten()) {
                let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
                assert!((a - b).abs() < 1e-6 + 1e-3 * b.abs(), "{sets:?}: {a} against {b}");
            }
        }
    }
}

/// Rows of which every rank has a part: their norms are summed over ranks, whatever is kept for
/// backward and however else ranks are used. At first nothing is scaled.
#[test]
fn magnitudes_of_parted_rows_train_the_same_bits_in_every_layout() {
    const TENSOR: &[&str] = &["parallel.tensor_parallel_degree=2"];
    let dora_in_bf16 = joined(&[DORA, &["precision.compute='bf16'"]]);
    let dora_on_gpt2 = joined(&[DORA, &LORA_ON_GPT2[1..]]);
    for tuning in [DORA, &dora_in_bf16, &dora_on_gpt2, QDORA] {
        let of = |more: &[&'static str]| joined(&[TENSOR, more]);
        let two = "parallel.ranks=2";
        let ways = [
            of(&[two]),
            of(&[two, "activation_checkpointing.mode='selective'"]),
            of(&[two, "activation_checkpointing.mode='full'"]),
            of(&[two, "memory.offload.activations='disk'"]),
        ];
        all_alike(tuning, &ways.each_ref().map(Vec::as_slice));
        let four = ["parallel.ranks=4"];
        let ways = ["parallel.zero_stage=0", "parallel.zero_stage=2", "parallel.zero_stage=3"];
        all_alike(tuning, &ways.map(|stage| joined(&[TENSOR, &four, &[stage]])).each_ref().map(Vec::as_slice));
        let pipeline = ["parallel.pipeline_parallel_degree=2", "parallel.ranks=4"];
        let ways = ["activation_checkpointing.mode='none'", "activation_checkpointing.mode='full'"];
        all_alike(tuning, &ways.map(|mode| joined(&[TENSOR, &pipeline, &[mode]])).each_ref().map(Vec::as_slice));
    }
    let first = |adapter: &[&str]| losses(&train(&joined(&[adapter, TENSOR, &["parallel.ranks=2"]]), 2));
    let [lora, dora] = [LORA, DORA].map(first);
    assert!(lora[0] == dora[0] && lora[1] != dora[1], "{lora:?} {dora:?}");
}

/// Beside the ranks that divide the sequence too.
#[test]
fn magnitudes_of_parted_rows_train_beside_context_parallelism() {
    let base = joined(&[DORA, &["precision.compute='f32'"]]);
    let one = losses(&train(&base, STEPS));
    for axes in [
        &["parallel.ranks=4", "parallel.context_parallel_degree=2", "parallel.tensor_parallel_degree=2"][..],
        &["parallel.ranks=2", "parallel.context_parallel_degree=2"],
    ] {
        let sets = joined(&[&base, axes]);
        let ends = train(&sets, STEPS);
        ends.iter().for_each(|end| check_memory(end, &sets));
        for (a, b) in losses(&ends).iter().zip(&one) {
            assert!((a / b - 1.0).abs() < 1e-5, "{sets:?}: {a} against {b}");
        }
    }
}

/// The results of PEFT, made by `scripts/golden/make_adapters.py`.
#[derive(serde::Deserialize)]
struct Expected {
    tokens: Vec<Vec<Vec<i32>>>,
    losses: Vec<f64>,
    gradients: BTreeMap<String, f64>,
    weights: BTreeMap<String, f64>,
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The norms of the tensors of adapters, by their names in files.
fn norms(rank: &Rank, values: impl Fn(ParamId) -> Vec<f32>) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    for (id, spec) in rank.model().parameters().filter(|(_, spec)| spec.is_adapter()) {
        let (values, width) = (values(id), spec.row_elements());
        for source in &spec.sources {
            let own = &values[source.rows.start * width..source.rows.end * width];
            let norm = own.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            all.insert(source.hf_name.clone(), norm);
        }
    }
    all
}

fn assert_close(ours: &BTreeMap<String, f64>, theirs: &BTreeMap<String, f64>, limit: f64) {
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    for (name, theirs) in theirs {
        assert!((ours[name] / theirs - 1.0).abs() < limit, "{name}: {} against {theirs}", ours[name]);
    }
}

/// The same adapter on the same weights and batches: losses of 20 steps, gradients of the first and
/// weights of the last.
#[test]
fn adapters_train_as_in_peft() {
    trains_as_in_peft("adapter");
    trains_as_in_peft("dora");
}

/// Trains the adapter of the golden folder `of`.
fn trains_as_in_peft(of: &str) {
    let expected: Expected =
        serde_json::from_str(&std::fs::read_to_string(golden(&format!("{of}/expected.json"))).unwrap()).unwrap();
    let base = golden("../../../model/tests/golden/llama");
    let spec = hf::from_config_json(&std::fs::read_to_string(base.join("config.json")).unwrap()).unwrap().spec;
    let whole = Model::new(spec.clone()).unwrap();
    let adapter = read_adapter_config(&golden(of)).unwrap();
    let model = || {
        let tuning = Tuning { adapter: Some(adapter.clone()), ..Tuning::default() };
        Model::new(spec.clone()).unwrap().tuned(&tuning).unwrap()
    };
    let resolved = resolved(&[
        "precision.compute='f32'",
        "optimizer.learning_rate=0.01",
        "optimizer.beta2=0.95",
        "optimizer.weight_decay=0.1",
        "training.global_batch_size=4",
    ]);
    let shape = BatchShape::uniform(4, LENGTH);
    let strategy = trainyard_program::Strategy::new(whole.units().len());
    let mesh = trainyard_program::Mesh::default();
    let program = shape::program(&model(), &shape, DType::F32, &mesh, &strategy, 0).unwrap();
    let device = Device::cpu(Isa::detect(), 1, None);
    let settings = shape::rank_settings(&resolved);
    let mut rank = Rank::new(&device, model(), Holding::of(&program), Links::default(), &settings).unwrap();
    let [weights, adapters] =
        [WeightReader::open(&base, &whole).unwrap(), WeightReader::open_adapter(&golden(of), rank.model()).unwrap()];
    let specs: BTreeMap<_, _> = model().parameters().map(|(id, spec)| (id, spec.clone())).collect();
    rank.set_parameters(|id, range, values| {
        let reader = if specs[&id].is_adapter() { &adapters } else { &weights };
        let read = |values: &mut [f32]| reader.read_part(&specs[&id], range, values).unwrap();
        Ok(values.overwrite(read)?)
    })
    .unwrap();
    let mut of_gradients = BTreeMap::new();
    for (step, (rows, loss)) in expected.tokens.iter().zip(&expected.losses).enumerate() {
        let tokens: Vec<i32> = rows.iter().flat_map(|row| row[..LENGTH].to_vec()).collect();
        let targets: Vec<i32> = rows.iter().flat_map(|row| row[1..].to_vec()).collect();
        let load = |device: &Device, model: &Model| Ok(model.rows(device, LENGTH, &tokens, Some(&targets))?);
        let step_settings = StepSettings { step: step as u64, rate_factor: 1.0, clip_norm: None };
        let outcome = rank.execute(&program, step_settings, load, |_, _| Ok(())).unwrap();
        assert!((outcome.loss / loss - 1.0).abs() < 1e-4, "step {step}: {} against {loss}", outcome.loss);
        if step == 0 {
            of_gradients = norms(&rank, |id| rank.read_gradient(id).unwrap().1.to_f32_vec().unwrap());
        }
    }
    assert_close(&of_gradients, &expected.gradients, 1e-4);
    assert_close(&norms(&rank, |id| rank.read_masters(id).unwrap()), &expected.weights, 1e-4);

    // What is written is what PEFT wrote, but for the training.
    let folder = tempfile::tempdir().unwrap();
    export_adapter(folder.path(), rank.model(), "base", |id| rank.read_masters(id)).unwrap();
    assert_eq!(read_adapter_config(folder.path()).unwrap().scale(), adapter.scale());
    let again = WeightReader::open_adapter(folder.path(), rank.model()).unwrap();
    for (id, spec) in rank.model().parameters().filter(|(_, spec)| spec.is_adapter()) {
        let mut values = vec![0.0; spec.elements()];
        again.read_part(spec, 0..spec.elements(), &mut values).unwrap();
        assert_eq!(values, rank.read_masters(id).unwrap());
    }
}

/// The matrices of blocks are those that the codec's definition gives, one by one.
#[test]
fn an_encoded_base_trains_as_one_that_was_rounded() {
    let base = golden("../../../model/tests/golden/llama");
    let spec = hf::from_config_json(&std::fs::read_to_string(base.join("config.json")).unwrap()).unwrap().spec;
    let whole = Model::new(spec.clone()).unwrap();
    let weights = WeightReader::open(&base, &whole).unwrap();
    let adapter = read_adapter_config(&golden("dora")).unwrap();
    let device = Device::cpu(Isa::detect(), 2, None);
    // In f32 an update reads the copy, which is its own master; in bf16 it writes the copy anew.
    let kinds =
        [(BlockCodec::Nf4, "f32"), (BlockCodec::Int8, "f32"), (BlockCodec::Nf4, "bf16"), (BlockCodec::Int8, "bf16")];
    for (codec, compute) in kinds {
        let precision = format!("precision.compute='{compute}'");
        let resolved = resolved(&[&precision, "optimizer.learning_rate=0.01"]);
        let dtype = shape::compute_dtype(&resolved);
        let losses = [None, Some(Tier::Encoded(codec))].map(|parameters| {
            let tuning = Tuning { adapter: Some(adapter.clone()), ..Tuning::default() };
            let model = Model::new(spec.clone()).unwrap().tuned(&tuning).unwrap();
            let mut strategy = trainyard_program::Strategy::new(whole.units().len());
            strategy.offload.parameters = parameters;
            strategy.bytes = if dtype == DType::F32 { StateBytes::F32 } else { StateBytes::MIXED };
            let (shape, mesh) = (BatchShape::uniform(4, LENGTH), trainyard_program::Mesh::default());
            let program = shape::program(&model, &shape, dtype, &mesh, &strategy, 0).unwrap();
            let adapters = WeightReader::open_adapter(&golden("dora"), &model).unwrap();
            let specs: BTreeMap<_, _> = model.parameters().map(|(id, spec)| (id, spec.clone())).collect();
            let tiers = Tiers::create(&program, &device, Path::new("")).unwrap();
            let settings = shape::rank_settings(&resolved);
            let mut rank =
                Rank::with_tiers(&device, model, Holding::of(&program), tiers, Links::default(), &settings).unwrap();
            let last = whole.units().len() as u32 - 1;
            rank.set_parameters(|id, range, values| {
                let spec = &specs[&id];
                let reader = if spec.is_adapter() { &adapters } else { &weights };
                let in_block = id.unit > 0 && id.unit < last && spec.shape.len() == 2 && !spec.is_adapter();
                let mut all = vec![0.0; spec.elements()];
                reader.read_part(spec, 0..spec.elements(), &mut all).unwrap();
                if dtype == DType::BF16 {
                    all.iter_mut().for_each(|value| *value = half::bf16::from_f32(*value).to_f32());
                }
                if in_block && parameters.is_none() {
                    all.resize(all.len().next_multiple_of(codec.block_elements()), 0.0);
                    let mut blocks = vec![0; codec.bytes(all.len() as u64) as usize];
                    oracle::encode(codec, &all, None, Rounding::Nearest, &mut blocks);
                    oracle::decode(codec, &blocks, &mut all);
                }
                Ok(values.overwrite(|values: &mut [f32]| values.copy_from_slice(&all[range]))?)
            })
            .unwrap();
            let steps = (0..3).map(|step| {
                let tokens: Vec<i32> = (0..4 * LENGTH as i32).map(|i| (i * 7 + step) % 50).collect();
                let load = |device: &Device, model: &Model| Ok(model.rows(device, LENGTH, &tokens, Some(&tokens))?);
                let settings = StepSettings { step: step as u64, rate_factor: 1.0, clip_norm: None };
                rank.execute(&program, settings, load, |_, _| Ok(())).unwrap().loss.to_bits()
            });
            steps.collect::<Vec<_>>()
        });
        assert_eq!(losses[0], losses[1], "{codec} in {compute}");
    }
}
