//! Causes that are differences between ranks: a slow one, uneven work, and the bubble of a
//! pipeline.

use super::{Findings, computes, exchanges, verdict};
use crate::measured::{Measured, Site};
use crate::verdict::{Advice, Cause, Evidence, Place, SavedStep, Saving, Unit, Verdict};
use std::collections::BTreeMap;
use trainyard_base::median;
use trainyard_program::Lane;

/// A rank must be slower than the others by this factor.
const SLOWER: f64 = 1.05;

/// Instructions of the same work: action, FLOPs, bytes. Ranks that run the same kind can be
/// compared, whatever unit it is.
type Kind = (&'static str, String, u64, u64);

fn kind(findings: &Findings<'_>, site: Site<'_>) -> Option<Kind> {
    use trainyard_program::Action;
    let part = match site.instruction.action {
        Action::Backward { part, .. } => format!("{part:?}"),
        Action::Forward { keep, .. } => format!("{keep:?}"),
        _ => String::new(),
    };
    let work = findings.work(site);
    let is_work = computes(site.instruction) && work.bytes > 0.0;
    is_work.then(|| (site.instruction.action.name(), part, work.flops as u64, work.bytes as u64))
}

/// Per rank, its kinds of instructions with their typical seconds in all steps.
type Typical = Vec<BTreeMap<Kind, f64>>;

fn typical(findings: &Findings<'_>) -> Typical {
    let of_rank = |rank: usize| {
        let mut samples: BTreeMap<Kind, Vec<f64>> = BTreeMap::new();
        for step in &findings.steps {
            for (number, instruction) in step.replay.programs()[rank].instructions.iter().enumerate() {
                if let Some(kind) = kind(findings, Site { rank, number, instruction }) {
                    samples.entry(kind).or_default().push(step.replay.own[rank][number].took_s);
                }
            }
        }
        samples.into_iter().map(|(kind, samples)| (kind, median(samples).unwrap_or(0.0))).collect()
    };
    (0..findings.ranks()).map(of_rank).collect()
}

/// The typical seconds of a kind on ranks other than `rank`.
fn on_others(typical: &Typical, rank: usize, kind: &Kind) -> Option<f64> {
    median(
        typical
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != rank)
            .filter_map(|(_, kinds)| kinds.get(kind).copied()),
    )
}

/// One rank is slower than the others at the same work, and they wait for it.
pub fn straggler(findings: &Findings<'_>) -> Option<Verdict> {
    if findings.ranks() < 2 {
        return None;
    }
    let typical = typical(findings);
    // Seconds of a step on this rank, and what the others would take for them.
    let compared = |rank: usize| {
        let other = |site: Site<'_>| kind(findings, site).and_then(|kind| on_others(&typical, rank, &kind));
        let own = findings.mean_of(rank, |_, site, own| other(site).map_or(0.0, |_| own.took_s));
        (own, findings.mean_of(rank, |_, site, _| other(site).unwrap_or(0.0)))
    };
    let factors: Vec<(f64, f64)> = (0..findings.ranks()).map(compared).collect();
    let factor = |rank: usize| factors[rank].0 / factors[rank].1.max(1e-12);
    let slow =
        (0..findings.ranks()).filter(|rank| factors[*rank].1 > 0.0).max_by(|a, b| factor(*a).total_cmp(&factor(*b)))?;
    let slower = factor(slow);
    if slower < SLOWER {
        return None;
    }
    let saving = findings.saving(|_, site, own| {
        if site.rank == slow && computes(site.instruction) {
            let other = kind(findings, site).and_then(|kind| on_others(&typical, slow, &kind));
            own.took_s = own.took_s.min(other.unwrap_or(own.took_s / slower));
        }
    });
    let record = &findings.run.ranks[slow];
    let at = Place { rank: Some(record.rank), ..Place::default() };
    let mut evidence = vec![
        Evidence::new("times as long as the others at the same work", slower, Unit::Ratio).at(at.clone()),
        Evidence::new("its compute, a step", factors[slow].0, Unit::Seconds).at(at),
        Evidence::new("the same work on the others", factors[slow].1, Unit::Seconds),
    ];
    let slow_steps = findings.steps.iter().filter(|step| of_step(findings, &typical, step, slow) > SLOWER).count();
    evidence.push(Evidence::new(
        "steps in which it was slow",
        slow_steps as f64 / findings.steps.len().max(1) as f64,
        Unit::Share,
    ));
    let host = if record.host.is_empty() { String::new() } else { format!(" (host {})", record.host) };
    let advice = vec![
        Advice::new(format!(
            "look after the machine of rank {}{host}: clock, temperature, other programs",
            record.rank
        )),
        Advice::new("leave the rank out and go on from the last checkpoint with fewer ranks"),
    ];
    verdict(Cause::Straggler, saving, format!("All ranks wait for rank {}.", record.rank), evidence, advice)
}

/// The slowness of a rank in one step, relative to what is typical on others.
fn of_step(findings: &Findings<'_>, typical: &Typical, step: &Measured<'_>, rank: usize) -> f64 {
    let (mut own, mut others) = (0.0, 0.0);
    for (number, instruction) in step.replay.programs()[rank].instructions.iter().enumerate() {
        let kind = kind(findings, Site { rank, number, instruction });
        if let Some(other) = kind.and_then(|kind| on_others(typical, rank, &kind)) {
            own += step.replay.own[rank][number].took_s;
            others += other;
        }
    }
    if others > 0.0 { own / others } else { 1.0 }
}

/// Work is divided unevenly: over the stages of a pipeline, or, step by step, over data ranks.
pub fn imbalance(findings: &Findings<'_>) -> Option<Verdict> {
    if findings.ranks() < 2 {
        return None;
    }
    stages(findings).into_iter().chain(lengths(findings)).max_by(|a, b| seconds(a).total_cmp(&seconds(b)))
}

fn seconds(verdict: &Verdict) -> f64 {
    verdict.saving.map_or(0.0, |saving| saving.seconds)
}

/// Stages with unequal work. The work of an instruction is what its kind takes on all ranks, so
/// that a slow rank is no uneven work.
fn stages(findings: &Findings<'_>) -> Option<Verdict> {
    let program = &findings.run.ranks.first()?.programs.programs[0];
    if program.mesh.pp < 2 {
        return None;
    }
    let typical = typical(findings);
    let everywhere = |kind: &Kind| median(typical.iter().filter_map(|kinds| kinds.get(kind).copied())).unwrap_or(0.0);
    let stages = program.mesh.pp as usize;
    let stage = |rank: usize| findings.run.ranks[rank].programs.programs[0].stage() as usize;
    let mut work = vec![(0.0, 0.0); stages];
    for rank in 0..findings.ranks() {
        let seconds = findings.mean_of(rank, |_, site, _| kind(findings, site).map_or(0.0, |kind| everywhere(&kind)));
        work[stage(rank)].0 += seconds;
        work[stage(rank)].1 += 1.0;
    }
    let work: Vec<f64> = work.into_iter().map(|(seconds, ranks): (f64, f64)| seconds / ranks.max(1.0)).collect();
    let mean = work.iter().sum::<f64>() / stages as f64;
    let most = (0..stages).max_by(|a, b| work[*a].total_cmp(&work[*b]))?;
    if work[most] < SLOWER * mean {
        return None;
    }
    let saving = findings.saving(|_, site, own| {
        if computes(site.instruction) {
            own.took_s *= mean / work[stage(site.rank)].max(1e-12);
        }
    });
    let mut evidence: Vec<Evidence> = Vec::new();
    for (stage, seconds) in work.iter().enumerate().take(8) {
        evidence.push(Evidence::new(format!("work of stage {stage}, a step"), *seconds, Unit::Seconds));
    }
    let advice = vec![
        Advice::new("move units from the heaviest stage to the lightest"),
        Advice::new("choose a number of layers that gives every stage as much, embedding and head counted"),
    ];
    verdict(
        Cause::Imbalance,
        saving,
        format!("Stage {most} of the pipeline has more work than the others."),
        evidence,
        advice,
    )
}

/// Micro-batches of unequal work: a rank that is slow in one step is not in the next, and its
/// forwards and backwards of one micro-batch are slow together.
fn lengths(findings: &Findings<'_>) -> Option<Verdict> {
    let typical = typical(findings);
    let ranks = findings.ranks();
    let slowness: Vec<Vec<f64>> = findings
        .steps
        .iter()
        .map(|step| (0..ranks).map(|rank| of_step(findings, &typical, step, rank)).collect())
        .collect();
    let lasting = (0..ranks).map(|rank| median(slowness.iter().map(|step| step[rank])).unwrap_or(1.0));
    if lasting.fold(0.0, f64::max) > 1.2 || pass_correlation(findings, &typical) < 0.7 {
        return None;
    }
    let saving = findings.saving(|index, site, own| {
        if computes(site.instruction) {
            let of_ranks = &slowness[index];
            let mean = of_ranks.iter().sum::<f64>() / ranks as f64;
            own.took_s *= mean / of_ranks[site.rank].max(1e-12);
        }
    });
    let spread = |step: &Vec<f64>| step.iter().copied().fold(0.0, f64::max) * ranks as f64 / step.iter().sum::<f64>();
    let evidence = vec![Evidence::new(
        "the slowest rank of a step over the mean, median over steps",
        median(slowness.iter().map(spread)).unwrap_or(1.0),
        Unit::Ratio,
    )];
    let advice = vec![
        Advice::new(
            "the work of micro-batches differs, for example by the lengths of documents: pack them to equal lengths",
        ),
        Advice::set("let more micro-batches even out in a step", "training.global_batch_size"),
    ];
    verdict(Cause::Imbalance, saving, "Ranks get unequal work in each step.", evidence, advice)
}

/// The correlation of how slow the forwards and the backwards of the same micro-batch are.
fn pass_correlation(findings: &Findings<'_>, typical: &Typical) -> f64 {
    let mut pairs: Vec<(f64, f64)> = Vec::new();
    for step in &findings.steps {
        for (rank, program) in step.replay.programs().iter().enumerate() {
            let mut sums: BTreeMap<u32, [f64; 4]> = BTreeMap::new();
            for (number, instruction) in program.instructions.iter().enumerate() {
                let site = Site { rank, number, instruction };
                let Some(micro_batch) = instruction.action.micro_batch() else { continue };
                let Some(usual) = kind(findings, site).and_then(|kind| on_others(typical, rank, &kind)) else {
                    continue;
                };
                let at = if instruction.action.name() == "forward" { 0 } else { 2 };
                let sums = sums.entry(micro_batch).or_default();
                sums[at] += step.replay.own[rank][number].took_s;
                sums[at + 1] += usual;
            }
            let ratios = sums.values().filter(|sums| sums[1] > 0.0 && sums[3] > 0.0);
            pairs.extend(ratios.map(|sums| (sums[0] / sums[1], sums[2] / sums[3])));
        }
    }
    let count = pairs.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / count.max(1.0);
    let (x, y) = (mean(|pair| pair.0), mean(|pair| pair.1));
    let sum = |of: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|pair| of(pair.0 - x, pair.1 - y)).sum::<f64>();
    let spread = (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt();
    if spread > 0.0 { sum(&|x, y| x * y) / spread } else { 0.0 }
}

/// Stages wait for each other by construction of the schedule.
pub fn bubble(findings: &Findings<'_>) -> Option<Verdict> {
    let program = &findings.run.ranks.first()?.programs.programs[0];
    let stages = program.mesh.pp;
    if stages < 2 {
        return None;
    }
    let mut savings = Vec::new();
    for step in &findings.steps {
        // The step when nothing has to be waited for but the order of the schedule.
        let ordered = step.without(&mut |site, own| {
            if exchanges(site.instruction) || site.instruction.action.lane() == Lane::Input {
                own.took_s = 0.0;
            }
        });
        let busiest = (0..findings.ranks()).map(|rank| {
            let lane = step.replay.programs()[rank].on_lane(Lane::Compute);
            lane.map(|number| step.replay.own[rank][number].took_s + step.replay.own[rank][number].late_s).sum::<f64>()
        });
        let busiest = step.before_s + busiest.fold(0.0, f64::max);
        let replayed_seconds = step.seconds - (ordered - busiest).max(0.0);
        savings.push(SavedStep { measured_seconds: step.seconds, replayed_seconds });
    }
    let saving = Saving::mean_of_steps(&savings);
    let micro_batches = f64::from(program.micro_batches);
    let evidence = vec![
        Evidence::new("pipeline stages", f64::from(stages), Unit::Count),
        Evidence::new("micro-batches of a step", micro_batches, Unit::Count),
    ];
    let advice = vec![
        Advice::set("more micro-batches a step", "training.global_batch_size"),
        Advice::set("a schedule with a smaller bubble", "parallel.pipeline_schedule=\"zero_bubble\""),
    ];
    verdict(Cause::Bubble, saving, "Pipeline stages wait for each other as their schedule asks.", evidence, advice)
}
