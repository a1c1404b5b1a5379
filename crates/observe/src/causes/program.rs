//! Causes that are instructions of the program: input, communication, tiers, checkpoints, and the
//! engine around them.

use super::{EXCHANGES, Findings, computes, exchanges, verdict};
use crate::account::{accounts, mean};
use crate::measured::{Measured, Site};
use crate::run::Products;
use crate::verdict::{Advice, Cause, Evidence, Place, Severity, Unit, Verdict};
use trainyard_base::median;
use trainyard_plan::TimeCategory;
use trainyard_program::{Action, Lane};

/// A kernel that takes less than this is mostly its own launch.
const TINY_KERNEL_S: f64 = 20e-6;

/// The step waits for its batch.
pub fn input_bound(findings: &Findings<'_>) -> Option<Verdict> {
    let saving = findings.saving_on(|instruction| instruction.action.lane() == Lane::Input);
    let loads = findings.mean_of(0, |_, site, own| match site.instruction.action {
        Action::Load { .. } => own.took_s,
        _ => 0.0,
    });
    let longest = longest(findings, |action| matches!(action, Action::Load { .. }));
    let mut evidence = vec![Evidence::new("loading a step's batches, on rank 0", loads, Unit::Seconds)];
    evidence.extend(longest);
    let samples = || findings.steps.iter().filter_map(|step| step.sample);
    let faults = median(samples().map(|sample| sample.memory.major_faults)).unwrap_or(0.0);
    let reads = median(samples().map(|sample| sample.disk.process_read)).unwrap_or(0.0);
    let mut advice = Vec::new();
    if faults >= 1.0 || reads > 1e6 {
        evidence.push(Evidence::new("page faults of the run that waited for a disk, a second", faults, Unit::Count));
        evidence.push(Evidence::new("read from disks by the run", reads, Unit::BytesPerSecond));
        let what = if findings.run.images.is_some() { "images" } else { "token files" };
        advice.push(Advice::new(format!(
            "the {what} are not in memory: keep them on a faster disk, or free memory for them"
        )));
    }
    if findings.run.images.is_some_and(|images| !images.cached) {
        advice.push(Advice::set("keep decoded images, which all epochs but the first then read", "images.cache"));
    }
    advice.push(Advice::set("load with more workers", "data.workers"));
    advice.push(Advice::set("load further ahead", "data.prefetch"));
    verdict(Cause::InputBound, saving, "Compute waits for batches.", evidence, advice)
}

/// The longest instruction of any step and rank, as evidence with its place.
fn longest(findings: &Findings<'_>, of: impl Fn(&Action) -> bool) -> Option<Evidence> {
    let mut most: Option<(f64, usize, usize, usize)> = None;
    for (index, step) in findings.steps.iter().enumerate() {
        for (rank, program) in step.replay.programs().iter().enumerate() {
            for (number, instruction) in program.instructions.iter().enumerate() {
                let took = step.replay.own[rank][number].took_s;
                if of(&instruction.action) && most.is_none_or(|(most, ..)| took > most) {
                    most = Some((took, index, rank, number));
                }
            }
        }
    }
    let (took, index, rank, number) = most?;
    let step = &findings.steps[index];
    let program = step.replay.programs()[rank];
    let instruction = &program.instructions[number];
    Some(Evidence::new("the longest of them", took, Unit::Seconds).at(Place {
        rank: Some(program.rank),
        step: Some(step.step),
        lane: Some(instruction.action.lane().name().to_owned()),
        span: Some(program.name_of(instruction)),
        start_seconds: Some(step.spans[rank][number].start_s),
        ..Place::default()
    }))
}

/// The step waits for collectives or messages, beyond the waiting of ranks for each other.
pub fn communication_bound(findings: &Findings<'_>) -> Option<Verdict> {
    if findings.ranks() < 2 {
        return None;
    }
    let saving = findings.saving_on(exchanges)?;
    let busy = findings.mean_of(0, |_, site, own| if exchanges(site.instruction) { own.took_s } else { 0.0 });
    let bytes =
        findings.mean_of(0, |_, site, _| if exchanges(site.instruction) { site.instruction.bytes as f64 } else { 0.0 });
    let count = findings.mean_of(0, |step, site, _| f64::from(u8::from(step.replay.meets(site.rank, site.number))));
    let hidden = (1.0 - saving.seconds / busy.max(1e-12)).clamp(0.0, 1.0);
    let mut evidence = vec![
        Evidence::new("exchanges of a step on rank 0, without waiting for late ranks", busy, Unit::Seconds),
        Evidence::new("the part of them that compute hides", hidden, Unit::Share),
        Evidence::new("bytes that they move", bytes, Unit::Bytes),
        Evidence::new("their speed", bytes / busy.max(1e-12), Unit::BytesPerSecond),
        Evidence::new("exchanges of a step", count, Unit::Count),
    ];
    evidence.extend(longest(findings, |action| EXCHANGES.contains(&action.lane())));
    let by_lane = EXCHANGES.map(|lane| {
        let saved = findings.saving_on(|instruction| instruction.action.lane() == lane);
        (lane, saved.map_or(0.0, |saving| saving.seconds))
    });
    let (most, seconds) = by_lane.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("there are lanes");
    evidence.push(Evidence::new(format!("saved without the lane {} alone", most.name()), seconds, Unit::Seconds));
    let mut advice = Vec::new();
    match most {
        Lane::Gather => {
            advice.push(Advice::set("shard the parameters less", "parallel.zero_stage=2"));
            advice.push(Advice::set("gather further ahead", "parallel.prefetch"));
        }
        Lane::Reduce => {
            advice.push(Advice::set("send gradients in two bytes", "parallel.reduce_dtype=\"bf16\""));
            advice
                .push(Advice::set("exchange less often: accumulate more micro-batches", "training.global_batch_size"));
        }
        Lane::Inner => advice.push(Advice::set("split products over fewer ranks", "parallel.tensor_parallel_degree")),
        _ => advice.push(Advice::set("send larger messages less often", "training.micro_batch_size")),
    }
    verdict(Cause::CommunicationBound, Some(saving), "Compute waits for exchanges between ranks.", evidence, advice)
}

/// The step waits for state on its way from or to a lower tier.
pub fn offload_bound(findings: &Findings<'_>) -> Option<Verdict> {
    let moves = |action: &Action| matches!(action, Action::Fetch { .. } | Action::Evict { .. });
    let saving = findings.saving_on(|instruction| moves(&instruction.action));
    let busy = findings.mean_of(0, |_, site, own| if moves(&site.instruction.action) { own.took_s } else { 0.0 });
    let bytes = findings
        .mean_of(0, |_, site, _| if moves(&site.instruction.action) { site.instruction.bytes as f64 } else { 0.0 });
    let mut evidence = vec![
        Evidence::new("moving state of a step on rank 0", busy, Unit::Seconds),
        Evidence::new("bytes that it moves", bytes, Unit::Bytes),
        Evidence::new("their speed", bytes / busy.max(1e-12), Unit::BytesPerSecond),
    ];
    evidence.extend(longest(findings, moves));
    let advice = vec![
        Advice::set("keep on the device what fits", "memory.offload.optimizer=\"none\""),
        Advice::set("update less often: accumulate more micro-batches", "training.global_batch_size"),
        Advice::set("fetch further ahead", "parallel.prefetch"),
    ];
    verdict(Cause::OffloadBound, saving, "Compute waits for state that lies in a lower tier.", evidence, advice)
}

/// The step waits for a checkpoint.
pub fn checkpoint_stall(findings: &Findings<'_>) -> Option<Verdict> {
    let saving = findings.saving_on(|instruction| instruction.action == Action::Snapshot);
    let with = || findings.steps.iter().filter(|step| step.snapshot);
    let steps = |snapshot: bool| {
        median(findings.steps.iter().filter(|step| step.snapshot == snapshot).map(|step| step.seconds)).unwrap_or(0.0)
    };
    let mut evidence = vec![
        Evidence::new(
            "steps that end in a checkpoint",
            with().count() as f64 / findings.steps.len().max(1) as f64,
            Unit::Share,
        ),
        Evidence::new("such a step, median", steps(true), Unit::Seconds),
        Evidence::new("another step, median", steps(false), Unit::Seconds),
    ];
    evidence.extend(longest(findings, |action| *action == Action::Snapshot));
    let advice = vec![
        Advice::set("write checkpoints less often", "checkpoint.interval_steps"),
        Advice::new("leave memory for a copy of the state, from which a checkpoint is written while training goes on"),
    ];
    verdict(Cause::CheckpointStall, saving, "Training waits for checkpoints.", evidence, advice)
}

/// The engine around instructions and kernels takes the time: tiny kernels, many instructions, work
/// between steps.
pub fn host_overhead(findings: &Findings<'_>) -> Option<Verdict> {
    let kernels = findings
        .mean_of(0, |_, site, _| if computes(site.instruction) { f64::from(findings.work(site).kernels) } else { 0.0 });
    let busy = findings.mean_of(0, |_, site, own| if computes(site.instruction) { own.took_s } else { 0.0 });
    let each = busy / kernels.max(1.0);
    // The cheapest instructions have next to no work: the time of their kernels is overhead.
    let cheapest = |step: &Measured<'_>| {
        let program = step.replay.programs()[0];
        let each = program.on_lane(Lane::Compute).filter_map(|number| {
            let site = Site { rank: 0, number, instruction: &program.instructions[number] };
            let kernels = findings.work(site).kernels;
            (kernels > 0).then(|| step.replay.own[0][number].took_s / f64::from(kernels))
        });
        each.fold(f64::INFINITY, f64::min)
    };
    let launch = median(findings.steps.iter().map(cheapest)).filter(|launch| launch.is_finite()).unwrap_or(0.0);
    let launch = if each < TINY_KERNEL_S { launch.min(each) } else { 0.0 };
    let between = median(findings.steps.iter().map(|step| step.before_s - step.agreed_s)).unwrap_or(0.0);
    let mut saving = findings.saving(|index, site, own| {
        if computes(site.instruction) {
            own.took_s = (own.took_s - launch * f64::from(findings.work(site).kernels)).max(0.0);
            let waited = findings.steps[index].waited_s[site.rank][site.number] > 0.0;
            own.late_s = if waited { own.late_s } else { 0.0 };
        }
    })?;
    for seconds in [&mut saving.seconds, &mut saving.low_seconds, &mut saving.high_seconds] {
        *seconds += between;
    }
    let engine = median(accounts(&findings.steps).iter().map(|account| account.engine_s)).unwrap_or(0.0);
    let evidence = vec![
        Evidence::new("kernels of a step", kernels, Unit::Count),
        Evidence::new("a kernel, on average", each, Unit::Seconds),
        Evidence::new("launching a kernel", launch, Unit::Seconds),
        Evidence::new("the engine between instructions, a step", engine, Unit::Seconds),
        Evidence::new("recording and showing between steps", between, Unit::Seconds),
    ];
    let advice = vec![
        Advice::set("give every kernel more to do", "training.micro_batch_size"),
        Advice::set("use fewer threads for small products", "compute.threads"),
        Advice::set("write metrics less often", "metrics.interval_steps"),
    ];
    verdict(
        Cause::HostOverhead,
        Some(saving),
        "Kernels are so short that what is around them counts.",
        evidence,
        advice,
    )
}

/// The resource that bounds a step in which nothing is lost: arithmetic, or memory.
pub fn bound(findings: &Findings<'_>) -> Option<Verdict> {
    let account = mean(&accounts(&findings.steps))?;
    let work = account.breakdown.work();
    let parts = [TimeCategory::Forward, TimeCategory::Backward, TimeCategory::Update];
    let mfu = median(findings.run.metrics.iter().skip(3).filter_map(|metrics| metrics.mfu));
    // Kernels of an update read and write each number a few times; their time is that of memory.
    let few_flops = |site: Site<'_>| {
        let work = findings.work(site);
        computes(site.instruction) && work.flops < 8.0 * work.bytes
    };
    let memory = findings.mean_of(0, |_, site, own| if few_flops(site) { own.took_s } else { 0.0 });
    let bytes = findings.mean_of(0, |_, site, _| if few_flops(site) { findings.work(site).bytes } else { 0.0 });
    let mut evidence = vec![Evidence::new("compute of a step", work / account.step_s, Unit::Share)];
    for part in parts {
        evidence.push(Evidence::new(part.words(), account.breakdown.seconds(part), Unit::Seconds));
    }
    if let Some(mfu) = mfu {
        evidence.push(Evidence::new("of the measured peak (MFU)", mfu, Unit::Share));
    }
    let is_memory = memory > 0.5 * work;
    evidence.push(Evidence::new("instructions with fewer than 8 FLOPs a byte", memory, Unit::Seconds));
    evidence.push(Evidence::new("their speed", bytes / memory.max(1e-12), Unit::BytesPerSecond));
    evidence.extend(slowest(findings));
    let (cause, summary, advice) = match is_memory {
        true => (
            Cause::MemoryBound,
            "Most of the compute moves bytes; faster arithmetic would not help.",
            vec![Advice::set("update less often: accumulate more micro-batches", "training.global_batch_size")],
        ),
        false => (
            Cause::ComputeBound,
            "Arithmetic fills the step.",
            shorter_products(findings.run.products)
                .into_iter()
                .chain([Advice::new("use more or faster cores or devices")])
                .collect(),
        ),
    };
    Some(Verdict { cause, severity: Severity::Info, summary: summary.to_owned(), evidence, saving: None, advice })
}

/// Products that take less time than those of the run.
fn shorter_products(now: Option<Products>) -> Option<Advice> {
    match now? {
        Products::F32 => Some(Advice::set("compute in bf16", "precision.compute=\"bf16\"")),
        Products::Bits16 { could_be_int8: true } => Some(Advice::set(
            "multiply 8-bit integers in linear layers, on a processor with VNNI or AMX",
            "precision.int8=\"switchback\"",
        )),
        Products::Bits16 { could_be_int8: false } | Products::Bits8 => None,
    }
}

/// The kind of pass that is farthest from the peak, weighted by its time.
fn slowest(findings: &Findings<'_>) -> Option<Evidence> {
    let peak = findings.run.ranks.first()?.programs.peak_flops? / findings.run.world().max(1) as f64;
    let step = findings.steps.last()?;
    let program = step.replay.programs()[0];
    let lost = |number: &usize| {
        let site = Site { rank: 0, number: *number, instruction: &program.instructions[*number] };
        step.replay.own[0][*number].took_s - findings.work(site).flops / peak
    };
    let number = program.on_lane(Lane::Compute).max_by(|a, b| lost(a).total_cmp(&lost(b)))?;
    Some(Evidence::new("farthest from the peak: seconds above it", lost(&number), Unit::Seconds).at(Place {
        rank: Some(program.rank),
        step: Some(step.step),
        span: Some(program.name_of(&program.instructions[number])),
        ..Place::default()
    }))
}
