//! Compares ranks, and finds the one that the others wait for.
//!
//! The n-th collective of a step is the same one on every rank. The rank that arrives last does not
//! wait, so its kernel is the shortest. The kernels of the other ranks are longer by the time that
//! they wait. A rank's own work is the length of its step, minus the waiting during which it
//! computes nothing.

use super::breakdown::seconds;
use super::intervals::Intervals;
use super::steps::StepRow;
use super::window::Window;
use crate::span::Kind;
use crate::verdict::{Advice, Cause, Evidence, Place, SavedStep, Saving, Severity, Unit, Verdict};
use std::collections::BTreeMap;
use trainyard_base::median;

/// One step of one rank.
#[derive(Clone, PartialEq, Debug)]
pub struct RankStep {
    seconds: f64,
    compute_seconds: f64,
    input_seconds: f64,
    /// Begins and ends of the collectives, in order, in nanoseconds.
    collectives: Vec<(i64, i64)>,
    /// Times in which the rank computed.
    compute: Intervals,
}

/// The steps of one rank, by number.
#[derive(Clone, PartialEq, Debug)]
pub struct RankSteps {
    rank: u32,
    steps: BTreeMap<u64, RankStep>,
}

impl RankSteps {
    /// The steps of a window, with the rows that were computed of them.
    pub fn of(window: &Window, rank: u32, rows: &[StepRow], compute: &Intervals) -> RankSteps {
        let trace = window.trace;
        let mut collectives: Vec<Vec<(i64, i64)>> = vec![Vec::new(); window.steps.len()];
        // Without a device, the host's annotations of messages are the collectives.
        let of_device = window.ops.iter().map(|op| trace.op_span(op));
        let of_host = trace.timeline.spans.iter().filter(|_| trace.ops.is_empty());
        for span in of_device.chain(of_host).filter(|span| span.kind == Kind::Communication) {
            if let Some(step) = window.step_of(span.step) {
                collectives[step].push((span.start_ns, span.end_ns));
            }
        }
        let step = |(row, collectives): (&StepRow, Vec<(i64, i64)>)| {
            let extent = Intervals::union(collectives.iter().copied()).extent();
            let step = RankStep {
                seconds: row.seconds,
                compute_seconds: row.compute_seconds,
                input_seconds: row.input_seconds,
                collectives,
                compute: extent.map_or_else(Intervals::default, |(start, end)| compute.within(start, end)),
            };
            (row.number, step)
        };
        RankSteps { rank, steps: rows.iter().zip(collectives).map(step).collect() }
    }
}

/// The own work of every rank in one step: its length less what it waited in collectives while it
/// computed nothing. None if the ranks did not run the same collectives.
fn own_work(steps: &[&RankStep]) -> Option<Vec<f64>> {
    let count = steps.first()?.collectives.len();
    if count == 0 || steps.iter().any(|step| step.collectives.len() != count) {
        return None;
    }
    let length = |(start, end): (i64, i64)| end - start;
    let shortest = |index: usize| steps.iter().map(|step| length(step.collectives[index])).min().unwrap_or(0);
    let transfers: Vec<i64> = (0..count).map(shortest).collect();
    let own = |step: &&RankStep| {
        // The transfer comes last, once everybody is there. Collectives may run side by side.
        let waits = step.collectives.iter().zip(&transfers).map(|((start, end), transfer)| (*start, end - transfer));
        let waited = Intervals::union(waits).without(&step.compute).length_ns();
        (step.seconds - seconds(waited)).max(0.0)
    };
    Some(steps.iter().map(own).collect())
}

/// A verdict if one rank keeps the others waiting, or if ranks take turns in it. Needs two ranks
/// with the same collectives.
pub fn straggler(ranks: &[RankSteps]) -> Option<Verdict> {
    let first = ranks.first().filter(|_| ranks.len() >= 2)?;
    let mut saved = Vec::new();
    let mut slowest_in: Vec<usize> = vec![0; ranks.len()];
    let mut own_of: Vec<Vec<f64>> = vec![Vec::new(); ranks.len()];
    for number in first.steps.keys() {
        let Some(steps) = ranks.iter().map(|rank| rank.steps.get(number)).collect::<Option<Vec<_>>>() else {
            continue;
        };
        let Some(own) = own_work(&steps) else { continue };
        let slowest = (0..own.len()).max_by(|a, b| own[*a].total_cmp(&own[*b]))?;
        let others = own.iter().enumerate().filter(|(rank, _)| *rank != slowest).map(|(_, own)| *own);
        let excess = own[slowest] - median(others)?;
        let measured_seconds = steps.iter().map(|step| step.seconds).fold(0.0, f64::max);
        saved.push(SavedStep { measured_seconds, replayed_seconds: measured_seconds - excess.min(measured_seconds) });
        slowest_in[slowest] += 1;
        for (all, own) in own_of.iter_mut().zip(&own) {
            all.push(*own);
        }
    }
    let saving = Saving::median_of_steps(&saved).filter(|saving| saving.share() >= super::diagnose::SHARE_MIN)?;
    let worst = (0..ranks.len()).max_by_key(|rank| slowest_in[*rank])?;
    let always = slowest_in[worst] * 3 >= saved.len() * 2;
    let rank = ranks[worst].rank;
    let others = |part: fn(&RankStep) -> f64| {
        let steps =
            ranks.iter().enumerate().filter(|(index, _)| *index != worst).flat_map(|(_, rank)| rank.steps.values());
        median(steps.map(part)).unwrap_or(0.0)
    };
    let own = |part: fn(&RankStep) -> f64| median(ranks[worst].steps.values().map(part)).unwrap_or(0.0);
    let at = || Place { rank: Some(rank), ..Place::default() };
    let mut evidence = vec![
        Evidence::new("own work of this rank in a step", median(own_of[worst].iter().copied())?, Unit::Seconds)
            .at(at()),
        Evidence::new(
            "own work of the other ranks in a step",
            median(
                own_of.iter().enumerate().filter(|(index, _)| *index != worst).flat_map(|(_, own)| own.iter().copied()),
            )?,
            Unit::Seconds,
        ),
        Evidence::new(
            format!("steps of {} in which this rank was the last", saved.len()),
            slowest_in[worst] as f64,
            Unit::Count,
        )
        .at(at()),
    ];
    let compute = (own(|step| step.compute_seconds), others(|step| step.compute_seconds));
    if compute.1 > 0.0 {
        evidence.push(Evidence::new("its compute against the others'", compute.0 / compute.1, Unit::Ratio).at(at()));
    }
    let input_excess = own(|step| step.input_seconds) - others(|step| step.input_seconds);
    if input_excess > 0.0 {
        let what = "its input wait beyond the others'";
        evidence.push(Evidence::new(what, input_excess, Unit::Seconds).at(at()));
    }
    let severity = Severity::of_share(saving.share());
    Some(if always {
        Verdict {
            cause: Cause::Straggler,
            severity,
            summary: format!("The other ranks wait for rank {rank} in their collectives."),
            evidence,
            saving: Some(saving),
            advice: vec![
                Advice::new(format!("look at the machine of rank {rank}: clocks, other processes, its disk and links")),
                Advice::new("give all ranks the same amount of work, and the same machine"),
            ],
        }
    } else {
        Verdict {
            cause: Cause::Imbalance,
            severity,
            summary: "Ranks take turns in being the last: their work differs from step to step.".to_owned(),
            evidence,
            saving: Some(saving),
            advice: vec![
                Advice::new("balance batches by length or cost, not by number of samples"),
                Advice::new("look for work that one rank does alone: logging, evaluation, garbage collection"),
            ],
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps with their length and that of two collectives, which follow on each other; seconds.
    fn rank(rank: u32, steps: &[(f64, [f64; 2])]) -> RankSteps {
        let step = |(seconds, [first, second]): &(f64, [f64; 2])| {
            let ns = |seconds: f64| (seconds * 1e9) as i64;
            RankStep {
                seconds: *seconds,
                compute_seconds: 0.05,
                input_seconds: 0.0,
                collectives: vec![(0, ns(*first)), (ns(0.05), ns(0.05 + second))],
                compute: Intervals::default(),
            }
        };
        RankSteps { rank, steps: steps.iter().map(step).enumerate().map(|(n, step)| (n as u64, step)).collect() }
    }

    #[test]
    fn the_rank_that_the_others_wait_for_is_named_with_what_it_costs() {
        let waiting = [(0.1, [0.011, 0.021]), (0.1, [0.011, 0.021])];
        let last = [(0.1, [0.001, 0.001]), (0.1, [0.001, 0.001])];
        let verdict = straggler(&[rank(0, &waiting), rank(5, &last), rank(2, &waiting)]).unwrap();
        assert_eq!((verdict.cause, verdict.severity), (Cause::Straggler, Severity::Critical));
        assert!((verdict.saving.unwrap().seconds - 0.03).abs() < 1e-6);
        assert_eq!(verdict.evidence[0].place.rank, Some(5));
    }

    #[test]
    fn waiting_counts_once_and_not_under_compute() {
        let last = (0.1, [0.001, 0.001]);
        let mut waits = rank(1, &[(0.1, [0.041, 0.041])]);
        let step = waits.steps.get_mut(&0).unwrap();
        // Both collectives wait at the same time, and half of it is computed under.
        step.collectives[1] = step.collectives[0];
        step.compute = Intervals::union([(0, 20_000_000)]);
        let saving = straggler(&[rank(0, &[last]), waits]).unwrap().saving.unwrap();
        assert!((saving.seconds - 0.02).abs() < 1e-6, "{saving:?}");
    }

    #[test]
    fn ranks_that_take_turns_are_an_imbalance() {
        let (waits, last) = ((0.1, [0.02, 0.001]), (0.1, [0.001, 0.001]));
        let verdict = straggler(&[rank(0, &[waits, last]), rank(1, &[last, waits])]).unwrap();
        assert_eq!((verdict.cause, verdict.severity), (Cause::Imbalance, Severity::Warning));
    }

    #[test]
    fn ranks_with_other_collectives_or_alone_have_no_verdict() {
        let mut odd = rank(1, &[(0.1, [0.05, 0.05])]);
        odd.steps.get_mut(&0).unwrap().collectives.push((0, 1));
        assert_eq!(straggler(&[rank(0, &[(0.1, [0.001, 0.001])]), odd]), None);
        assert_eq!(straggler(&[rank(0, &[(0.1, [0.001, 0.001])])]), None);
    }
}
