//! The setups that each lever offers. A function per lever; [`table`](super::table) names them.

use super::{Choice, Code, Edit, Offers, Optimizer, Place, ReduceFormat, Setup, Switch};
use crate::{Candidate, Checkpointing};
use trainyard_program::{Mesh, Offload, PipelineSchedule, Reshard, Tier};
use trainyard_sim::Format;

fn choice(words: impl Into<String>, setup: Setup) -> Choice {
    Choice { words: words.into(), setup }
}

fn one(words: &str, setup: Option<Setup>) -> Offers {
    Offers::Choices(setup.map(|setup| choice(words, setup)).into_iter().collect())
}

fn tier(tier: Tier) -> &'static str {
    match tier {
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Encoded(_) => "memory",
    }
}

/// Micro-batches of more sequences, at the same global batch.
pub fn micro_batch(now: &Setup, _: &Place) -> Offers {
    let Candidate { micro_batch: micro, accumulation: steps, .. } = now.candidate;
    let larger = [2, 4, 8].into_iter().filter(|times| steps.is_multiple_of(*times)).map(|times| {
        let candidate = Candidate { micro_batch: micro * times, accumulation: steps / times, ..now.candidate };
        choice(
            format!("micro-batch {} x {}, from {micro} x {steps}", micro * times, steps / times),
            now.with(candidate),
        )
    });
    let larger: Vec<Choice> = larger.collect();
    if larger.is_empty() {
        Offers::InUse("every rank has one micro-batch, or none that divides further")
    } else {
        Offers::Choices(larger)
    }
}

/// Smaller micro-batches, and more of them.
pub fn accumulation(now: &Setup, _: &Place) -> Offers {
    let Candidate { micro_batch: micro, accumulation: steps, .. } = now.candidate;
    let smaller = [2, 4, 8].into_iter().filter(|by| micro.is_multiple_of(*by)).map(|by| {
        let candidate = Candidate { micro_batch: micro / by, accumulation: steps * by, ..now.candidate };
        choice(format!("micro-batch {} x {}, from {micro} x {steps}", micro / by, steps * by), now.with(candidate))
    });
    let smaller: Vec<Choice> = smaller.collect();
    if smaller.is_empty() { Offers::InUse("a micro-batch is one sequence") } else { Offers::Choices(smaller) }
}

/// More sequences a step, by larger micro-batches or by more of them.
pub fn batch_size(now: &Setup, _: &Place) -> Offers {
    let Candidate { micro_batch, accumulation, .. } = now.candidate;
    let mut all = Vec::new();
    for times in [2, 4] {
        let global = now.global_batch() * u64::from(times);
        let [more, larger] = [
            Candidate { accumulation: accumulation * times, ..now.candidate },
            Candidate { micro_batch: micro_batch * times, ..now.candidate },
        ];
        for candidate in [larger, more] {
            let (micro, steps) = (candidate.micro_batch, candidate.accumulation);
            all.push(choice(format!("{global} sequences a step as {micro} x {steps}"), now.with(candidate)));
        }
    }
    Offers::Choices(all)
}

/// Half of the tokens of a sequence, twice the sequences.
pub fn sequence_length(now: &Setup, _: &Place) -> Offers {
    let half = now.sequence_length / 2;
    let whole = now.sequence_length.is_multiple_of(2) && half >= 64;
    let candidate = Candidate { micro_batch: 2 * now.candidate.micro_batch, ..now.candidate };
    one(
        &format!("{half} tokens a sequence, twice as many sequences"),
        whole.then(|| Setup { sequence_length: half, ..now.with(candidate) }),
    )
}

/// Products of 16 bits.
pub fn sixteen_bits(now: &Setup, place: &Place) -> Offers {
    match now.candidate.format {
        Format::Fp32 | Format::Tf32 if place.formats.contains(&Format::Bf16) => {
            one("products in bf16, f32 masters", Some(now.with(Candidate { format: Format::Bf16, ..now.candidate })))
        }
        Format::Fp32 | Format::Tf32 => Offers::NotPriced("the devices have no 16-bit products"),
        _ => Offers::InUse("products have 16 bits or fewer"),
    }
}

/// Products of 8 bits.
pub fn eight_bits(now: &Setup, place: &Place) -> Offers {
    match now.candidate.format {
        Format::Fp8 | Format::Fp4 => Offers::InUse("products have 8 bits or fewer"),
        _ if !place.formats.contains(&Format::Fp8) => {
            Offers::NotPriced("these devices multiply no 8-bit floats; a GPU from Ada or Hopper on does")
        }
        _ => one("fp8 products", Some(now.with(Candidate { format: Format::Fp8, ..now.candidate }))),
    }
}

/// Products of 8-bit integers.
pub fn integers(now: &Setup, place: &Place) -> Offers {
    match (place.integers, now.candidate.format) {
        (Switch::On, _) => Offers::InUse("blocks multiply in 8-bit integers"),
        (Switch::None, _) => Offers::NotPriced("they are for processors, and this profile has not measured them"),
        (_, Format::Fp8 | Format::Fp4) => Offers::InUse("products have 8 bits or fewer"),
        _ => {
            let in_bf16 = now.with(Candidate { format: Format::Bf16, ..now.candidate });
            one("blocks in 8-bit integers, the rest in bf16", in_bf16.edited(Edit::Integers))
        }
    }
}

/// Less or more that is kept for backward.
pub fn checkpointing(now: &Setup, _: &Place) -> Offers {
    let modes = [
        ("keep everything", Checkpointing::default()),
        ("selective", Checkpointing { full: 0, selective: now.layers }),
        ("full", Checkpointing { full: now.layers, selective: 0 }),
    ];
    let others = modes.into_iter().filter(|(_, mode)| *mode != now.candidate.checkpointing);
    let choices = others.map(|(words, checkpointing)| {
        choice(format!("recomputation: {words}"), now.with(Candidate { checkpointing, ..now.candidate }))
    });
    Offers::Choices(choices.collect())
}

/// An optimizer with less state.
pub fn optimizer(now: &Setup, _: &Place) -> Offers {
    if !matches!(now.optimizer, Optimizer::AdamW | Optimizer::AdamW8) {
        return Offers::InUse("the optimizer is not AdamW");
    }
    // Adafactor looks at whole matrices.
    let whole = now.candidate.layout().zero_stage == 0;
    let others = [Optimizer::Lion, Optimizer::Adafactor].into_iter();
    let others = others.filter(|optimizer| whole || *optimizer != Optimizer::Adafactor).map(|optimizer| {
        let words = format!("{} in place of AdamW", optimizer.name().unwrap_or_default());
        choice(words, Setup { optimizer, ..now.clone() })
    });
    Offers::Choices(others.collect())
}

/// The setups of `counts` ranks, with `mesh` made of their number.
fn meshes(now: &Setup, place: &Place, mesh: impl Fn(u32) -> Vec<Mesh>) -> Vec<(Mesh, Setup)> {
    let all = place.counts().into_iter().filter(|count| *count > 1).flat_map(mesh);
    all.filter(|mesh| *mesh != now.candidate.mesh).filter_map(|mesh| Some((mesh, now.on(mesh)?))).collect()
}

/// The degrees that divide `count` ranks, above one and up to `most`.
fn degrees(count: u32, most: u32) -> impl Iterator<Item = u32> {
    (2..=most.min(count)).filter(move |degree| count.is_multiple_of(*degree))
}

/// Data parallelism with whole replicas.
pub fn data_parallel(now: &Setup, place: &Place) -> Offers {
    let Mesh { tp, pp, cp, .. } = now.candidate.mesh;
    let model = tp * pp * cp;
    let found = meshes(now, place, |count| {
        let replicas = if count.is_multiple_of(model) { count / model } else { 0 };
        let mesh = Mesh { dp_replicate: replicas, dp_shard: 1, ep: 1, ..now.candidate.mesh };
        (replicas > 1).then_some(mesh).into_iter().collect()
    });
    let choices = found.into_iter().map(|(mesh, setup)| choice(format!("{} whole replicas", mesh.dp_replicate), setup));
    choices_or(choices.collect(), "all data-parallel ranks are replicas, or there is one device")
}

fn choices_or(choices: Vec<Choice>, otherwise: &'static str) -> Offers {
    if choices.is_empty() { Offers::NoUse(otherwise) } else { Offers::Choices(choices) }
}

/// State that is sharded over the data-parallel ranks: the ZeRO stage.
pub fn zero(now: &Setup, place: &Place) -> Offers {
    let Mesh { tp, pp, cp, ep, .. } = now.candidate.mesh;
    let model = tp * pp * cp;
    let mut all = Vec::new();
    for count in place.counts().into_iter().filter(|count| count.is_multiple_of(model) && count / model > 1) {
        let mesh = Mesh { dp_replicate: 1, dp_shard: count / model, ep, ..now.candidate.mesh };
        let Some(setup) = now.on(mesh) else { continue };
        for zero_stage in 1..=3 {
            let candidate = Candidate { zero_stage, ..setup.candidate };
            if candidate != now.candidate {
                all.push(choice(format!("ZeRO-{zero_stage} over {} ranks", mesh.dp_shard), setup.with(candidate)));
            }
        }
    }
    choices_or(all, "there is one device")
}

/// Shard groups of some ranks, with replicas of the groups; and gathered parameters that stay.
pub fn sharding_factor(now: &Setup, place: &Place) -> Offers {
    let mut all = Vec::new();
    let Mesh { tp, dp_replicate, dp_shard, .. } = now.candidate.mesh;
    let data = dp_replicate * dp_shard;
    let node = (place.devices_per_node / tp).max(1);
    for shard in degrees(data, data).filter(|shard| *shard <= node || *shard == data || shard.is_multiple_of(node)) {
        let mesh = Mesh { dp_replicate: data / shard, dp_shard: shard, ..now.candidate.mesh };
        if mesh == now.candidate.mesh {
            continue;
        }
        all.extend(now.on(mesh).map(|setup| choice(groups(data / shard, shard), setup)));
    }
    if now.candidate.layout().zero_stage == 3 {
        let keep = Candidate { reshard: Reshard::Never, ..now.candidate };
        all.push(choice("gathered parameters stay until the step ends", now.with(keep)));
        if dp_shard > node && dp_shard.is_multiple_of(node) && node > 1 {
            let to = Candidate { reshard: Reshard::To(node), ..now.candidate };
            all.push(choice(format!("gathered parameters stay sharded over {node} ranks"), now.with(to)));
        }
        all.retain(|choice| choice.setup.candidate != now.candidate);
    }
    choices_or(all, "nothing is sharded")
}

fn groups(groups: u32, shards: u32) -> String {
    if groups == 1 { format!("one group of {shards} shards") } else { format!("{groups} groups of {shards} shards") }
}

/// A mesh of `count` ranks on which data parallelism takes what the other degrees leave, sharded if
/// it is now.
fn rest(now: &Setup, count: u32, mesh: Mesh) -> Option<Mesh> {
    let model = mesh.tp * mesh.pp * mesh.cp;
    let data = count.is_multiple_of(model).then_some(count / model)?;
    let shard = if now.candidate.mesh.dp_shard > 1 { data } else { 1 };
    let mesh = Mesh { dp_replicate: data / shard, dp_shard: shard, ..mesh };
    mesh.shard_degree().is_multiple_of(mesh.ep).then_some(mesh)
}

/// Products that are split over ranks, with the rows between them.
pub fn tensor_parallel(now: &Setup, place: &Place) -> Offers {
    let divides = |tp: &u32| place.heads.is_multiple_of(*tp) && place.kv_heads.is_multiple_of(*tp);
    let found = meshes(now, place, |count| {
        let all = degrees(count, place.devices_per_node).filter(divides);
        all.filter_map(|tp| rest(now, count, Mesh { tp, ..now.candidate.mesh })).collect()
    });
    let choices = found.into_iter().map(|(mesh, setup)| choice(format!("tensor-parallel degree {}", mesh.tp), setup));
    choices_or(choices.collect(), "no degree divides devices and heads")
}

/// Blocks that are dealt to stages.
pub fn pipeline_parallel(now: &Setup, place: &Place) -> Offers {
    let found = meshes(now, place, |count| {
        let all = degrees(count, 16.min(now.layers));
        all.filter_map(|pp| rest(now, count, Mesh { pp, ..now.candidate.mesh })).collect()
    });
    let mut choices = Vec::new();
    for (mesh, setup) in found {
        // A pipeline is full from as many micro-batches on as it has stages. It gathers parameters
        // once a step, and state stays on the device.
        let sequences = setup.candidate.micro_batch * setup.candidate.accumulation;
        let micro = (1..=setup.candidate.micro_batch).rev();
        let Some(micro) = micro.into_iter().find(|n| sequences.is_multiple_of(*n) && sequences / n >= mesh.pp) else {
            continue;
        };
        let candidate = Candidate {
            micro_batch: micro,
            accumulation: sequences / micro,
            zero_stage: setup.candidate.zero_stage.min(1),
            offload: Offload::default(),
            ..setup.candidate
        };
        for (name, pipeline) in
            [("1F1B", PipelineSchedule::OneForwardOneBackward), ("zero-bubble", PipelineSchedule::ZeroBubble)]
        {
            choices
                .push(choice(format!("{} stages, {name}", mesh.pp), setup.with(Candidate { pipeline, ..candidate })));
        }
    }
    choices_or(choices, "no number of stages divides devices and micro-batches")
}

/// Sequences that are split over ranks.
pub fn context_parallel(now: &Setup, place: &Place) -> Offers {
    let long = |cp: &u32| {
        now.sequence_length.is_multiple_of(2 * u64::from(*cp)) && now.sequence_length / u64::from(*cp) >= 1024
    };
    let found = meshes(now, place, |count| {
        let all = degrees(count, 64).filter(long);
        all.filter_map(|cp| rest(now, count, Mesh { cp, ..now.candidate.mesh })).collect()
    });
    let choices = found.into_iter().map(|(mesh, setup)| choice(format!("context-parallel degree {}", mesh.cp), setup));
    choices_or(choices.collect(), "sequences are short: a part of one has fewer than 1,024 tokens")
}

/// Experts that are dealt to ranks.
pub fn expert_parallel(now: &Setup, place: &Place) -> Offers {
    if place.experts < 2 {
        return Offers::NoUse("the model has no experts");
    }
    let found = meshes(now, place, |count| {
        let all = degrees(place.experts, place.experts);
        all.filter_map(|ep| rest(now, count, Mesh { ep, ..now.candidate.mesh })).collect()
    });
    let choices = found.into_iter().map(|(mesh, setup)| choice(format!("expert-parallel degree {}", mesh.ep), setup));
    Offers::Choices(choices.collect())
}

/// State in a lower tier.
pub fn offload(now: &Setup, place: &Place) -> Offers {
    if now.candidate.mesh.pp > 1 {
        return Offers::NoUse("the stages of a pipeline keep their state");
    }
    let mut all = Vec::new();
    for &lower in &place.tiers {
        let there = Some(lower);
        let none = Offload::default();
        let optimizer = Offload { optimizer: there, ..none };
        let kinds = [
            ("optimizer state", optimizer),
            ("optimizer state and gradients", Offload { gradients: there, ..optimizer }),
            ("activations", Offload { activations: there, ..none }),
        ];
        all.extend(kinds.map(|(what, offload)| {
            choice(format!("{what} on {}", tier(lower)), now.with(Candidate { offload, ..now.candidate }))
        }));
    }
    if now.candidate.offload != Offload::default() {
        all.push(choice("no offload", now.with(Candidate { offload: Offload::default(), ..now.candidate })));
    }
    all.retain(|choice| choice.setup.candidate != now.candidate);
    choices_or(all, "there is no lower tier")
}

/// Parameters that are gathered further ahead.
pub fn prefetch(now: &Setup, _: &Place) -> Offers {
    if now.candidate.layout().zero_stage != 3 {
        return Offers::InUse("gradients are summed while backward runs, and nothing is gathered");
    }
    let more = [2, 4].into_iter().filter(|units| *units > now.candidate.prefetch).map(|prefetch| {
        choice(format!("{prefetch} units gathered ahead"), now.with(Candidate { prefetch, ..now.candidate }))
    });
    Offers::Choices(more.collect())
}

/// Nothing waits for other ranks.
pub fn perfect_overlap(now: &Setup, _: &Place) -> Offers {
    match now.candidate.mesh.ranks() {
        1 => Offers::NoUse("one rank exchanges nothing"),
        _ => one("a bound: nothing waits for other ranks", now.edited(Edit::FreeExchanges)),
    }
}

const NO_GRADIENTS: Offers = Offers::NoUse("one data-parallel rank sends no gradients");

/// Gradients of 16 bits on the wire.
pub fn gradients_in_bf16(now: &Setup, _: &Place) -> Offers {
    if now.candidate.mesh.data_parallel() == 1 {
        return NO_GRADIENTS;
    }
    match now.reduce {
        ReduceFormat::Bf16 => Offers::InUse("gradients travel in bf16"),
        ReduceFormat::F32 => one("gradients travel in bf16", Some(Setup { reduce: ReduceFormat::Bf16, ..now.clone() })),
    }
}

/// Bytes of a 32-bit gradient.
const GRADIENT: f64 = 4.0;

fn codec(now: &Setup, words: &str, code: Code, bytes: f64, passes: f64) -> Offers {
    if now.candidate.mesh.data_parallel() == 1 {
        return NO_GRADIENTS;
    }
    let plain = if now.reduce == ReduceFormat::Bf16 { 2.0 } else { GRADIENT };
    one(words, now.edited(Edit::Codec { code, share: bytes / plain, passes }))
}

/// Blocks of 8-bit integers with a scale, and error feedback.
pub fn gradients_in_int8(now: &Setup, _: &Place) -> Offers {
    // A scale of 32 bits for every block of 256. The residual is read and written, the gradient
    // read and the code written and read.
    codec(now, "8-bit blocks of 256, error feedback", Code::Int8, 1.0 + 4.0 / 256.0, 3.5)
}

/// The largest hundredth, with error feedback.
pub fn top_k(now: &Setup, _: &Place) -> Offers {
    // A value and an index for one element in a hundred. Every rank's choice goes to every other,
    // so what a rank receives grows with their number. Choosing reads the gradient twice more.
    let ranks = f64::from(now.candidate.mesh.data_parallel());
    codec(now, "the largest 1 %, error feedback", Code::TopK, 0.01 * 8.0 * (ranks / 2.0).max(1.0), 5.0)
}

/// Factors of low rank, with error feedback.
pub fn low_rank(now: &Setup, place: &Place) -> Offers {
    const RANK: f64 = 4.0;
    // A matrix of d x f becomes RANK columns of d + f. Making and multiplying the factors reads the
    // gradient four times.
    let (d, f) = (f64::from(place.dim), f64::from(now.ffn));
    codec(now, "rank 4, error feedback", Code::LowRank, GRADIENT * RANK * (d + f) / (d * f), 6.0)
}

/// Replicas that train by themselves and average their parameters.
pub fn local_steps(now: &Setup, place: &Place) -> Offers {
    let Mesh { dp_replicate, dp_shard, .. } = now.candidate.mesh;
    let data = dp_replicate * dp_shard;
    if data == 1 {
        return Offers::NoUse("one data-parallel rank averages with nobody");
    }
    // A replica is a node, or a rank where there is one node.
    let replicas = match place.devices / place.devices_per_node {
        0 | 1 => data,
        nodes => nodes.min(data),
    };
    let mesh = if data.is_multiple_of(replicas) {
        Mesh { dp_replicate: replicas, dp_shard: data / replicas, ..now.candidate.mesh }
    } else {
        now.candidate.mesh
    };
    let setup = now.on(mesh).filter(|setup| setup.candidate.mesh.dp_replicate > 1);
    let setups = setup.into_iter().flat_map(|setup| {
        [10, 100].map(|every| {
            let words = format!("{} replicas average every {every} steps", mesh.dp_replicate);
            setup.edited(Edit::LocalSteps { every }).map(|setup| choice(words, setup))
        })
    });
    Offers::Choices(setups.flatten().collect())
}

/// Servers that hold parameters.
pub fn parameter_server(_: &Setup, _: &Place) -> Offers {
    Offers::NotPriced("its gain comes from ranks of unequal speed, and a profile has equal ones")
}

/// Batches that are always ready.
pub fn loading(now: &Setup, _: &Place) -> Offers {
    one("a bound: every batch is ready", now.edited(Edit::FreeLoading))
}

/// Token files that are made once.
pub fn caching(_: &Setup, place: &Place) -> Offers {
    match place.image_cache {
        Switch::None => Offers::InUse("text is tokenised once, and token files are mapped into memory"),
        Switch::On => Offers::InUse("decoded images are kept in images.cache"),
        Switch::Off => Offers::NotPriced("images.cache keeps decoded images from the first epoch on: docs/images.md"),
    }
}

/// Sequences without padding.
pub fn packing(_: &Setup, _: &Place) -> Offers {
    Offers::InUse("documents are packed, so no token of a sequence is padding")
}

/// Rank of the adapters.
const ADAPTER_RANK: f64 = 16.0;

/// The reason for which nothing is frozen where every weight must be learned.
const FROM_RANDOM: &str = "this model starts from random weights; with model.path it fine-tunes trained ones";

fn adapted(now: &Setup, place: &Place) -> Option<Setup> {
    let (d, f) = (f64::from(place.dim), f64::from(now.ffn));
    now.edited(Edit::Adapters { share: ADAPTER_RANK * (d + f) / (d * f) })
}

/// Small matrices that train beside frozen ones.
pub fn adapters(now: &Setup, place: &Place) -> Offers {
    if !place.pretrained {
        return Offers::NoUse(FROM_RANDOM);
    }
    one("LoRA of rank 16 on every matrix", adapted(now, place))
}

/// The same beside weights of four bits.
pub fn quantised_adapters(now: &Setup, place: &Place) -> Offers {
    if !place.pretrained {
        return Offers::NoUse(FROM_RANDOM);
    }
    let plain = if now.candidate.format == Format::Fp32 { 32.0 } else { 16.0 };
    // Four bits, and scales of about an eighth of a bit.
    let share = 4.127 / plain;
    one(
        "LoRA over weights of 4 bits",
        adapted(now, place).and_then(|setup| setup.edited(Edit::ParameterBytes { share })),
    )
}

/// The first half of the blocks is frozen.
pub fn freezing(now: &Setup, place: &Place) -> Offers {
    if !place.pretrained {
        return Offers::NoUse(FROM_RANDOM);
    }
    let blocks = now.layers / 2;
    one(&format!("the first {blocks} blocks are frozen"), now.edited(Edit::Freeze { blocks }).filter(|_| blocks > 0))
}

/// Three quarters of the blocks.
pub fn structured_pruning(now: &Setup, _: &Place) -> Offers {
    let layers = now.layers * 3 / 4;
    let words = format!("{layers} blocks, from {} (trainyard prune)", now.layers);
    one(&words, Setup { layers, ..now.clone() }.edited(Edit::Pruned).filter(|_| layers > 0))
}

/// Two of four weights are zero.
pub fn two_of_four(_: &Setup, _: &Place) -> Offers {
    Offers::NotPriced("no kernel here skips zeros, and no published step of training says what one gains")
}

/// Optimizer state of 8 bits.
pub fn optimizer_bits(now: &Setup, _: &Place) -> Offers {
    if now.optimizer == Optimizer::AdamW8 {
        return Offers::InUse("the moments have 8 bits");
    }
    // Two moments of eight bits for two of 32, and an f32 scale for every block of 32.
    let share = (1.0 + 4.0 / 32.0) / 4.0;
    let is_adamw = now.optimizer == Optimizer::AdamW;
    one("moments of 8 bits", now.edited(Edit::OptimizerBytes { share }).filter(|_| is_adamw))
}

/// Weights that are rounded in forward.
pub fn quantisation_aware(now: &Setup, _: &Place) -> Offers {
    one("weights rounded to 4 bits in every forward", now.edited(Edit::FakeQuantisation))
}

/// A student of half the depth beside its teacher.
pub fn distillation(now: &Setup, _: &Place) -> Offers {
    let layers = now.layers / 2;
    let student = Setup { layers, ..now.clone() };
    let words = format!("a student of {layers} blocks, this model its teacher (trainyard distill)");
    one(&words, student.edited(Edit::Teacher).filter(|_| layers > 0))
}

/// Trials that end early.
pub fn search(_: &Setup, _: &Place) -> Offers {
    Offers::NotPriced("no step changes; successive halving runs 27 trials, by thirds, in the time of 4 whole ones")
}

/// Averages of weights or models.
pub fn ensembles(_: &Setup, _: &Place) -> Offers {
    Offers::NotPriced("no step changes; an average of weights needs one more copy of them")
}

/// Jobs in idle or cheap hours.
pub fn scheduling(_: &Setup, _: &Place) -> Offers {
    Offers::NotPriced("no step changes; what an hour costs is not in a configuration")
}
