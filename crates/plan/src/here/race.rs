//! Trials of ways to run a configuration. Ways with nearly equal predictions run for a few steps
//! each, in turn, to find the fastest. The caller provides the function that runs a visit.
//!
//! A prediction is off by several percent, and the best ways differ by less. A visit creates the
//! ranks of a way, trains on random tokens, and takes the median of a few steps. A round visits
//! every contender once, so that a slow phase of the machine affects them all. Offloaded ways are
//! not tried: they would write whole states for a few steps.
//!
//! On a shared machine, visits of one way differ by more than the ways do, and the fastest
//! measurement may be luck. So a trial corrects the prediction in proportion to its reliability.
//! The correction is the way's deviation from its prediction, relative to the other ways of its
//! rounds, times `p / (p + v / n)`. Here `p` is the variance of predictions ([`PREDICTION_ERROR`]),
//! `n` the number of visits and `v` their variance, estimated from the visits. This is the
//! posterior mean of a normal error (Gelman et al., "Bayesian Data Analysis", section 2.5). On a
//! steady machine the trials decide; on an unsteady one the predictions do.

use super::{Tried, Way, Ways};
use std::time::Duration;
use trainyard_base::median;

/// Upper limit for the contenders.
const CONTENDERS_MAX: usize = 10;
/// A contender's predicted time is at most this many times the best one. Beyond that the prediction
/// decides.
const NEAR: f64 = 1.3;
/// Number of rounds: as many as the time allows, within this range.
const ROUNDS: std::ops::RangeInclusive<usize> = 2..=5;
/// A contender whose expected time is this many times that of the fastest is eliminated.
const BEHIND: f64 = 1.12;
/// Standard deviation of the logarithm of predictions relative to one another, as measured by
/// `trainyard calibrate --check`.
const PREDICTION_ERROR: f64 = 0.08;
/// Standard deviation of the logarithm of visits, while there are too few to estimate it: that of a
/// shared machine.
const VISIT_ERROR: f64 = 0.15;
/// Number of timed steps of a visit, and the seconds after which a visit has enough.
pub const STEPS: std::ops::RangeInclusive<usize> = 3..=12;
/// Seconds of timed steps after which a visit has enough.
pub const VISIT_S: f64 = 0.4;
/// The rest of a visit, in steps: creating the ranks, and the untimed first step.
const UNTIMED_STEPS: f64 = 3.0;
/// Default time of a trial: a share of the predicted run, and an upper limit in seconds.
const SHARE_OF_RUN: f64 = 0.03;
const TRIAL_S_MAX: f64 = 120.0;

/// The seconds of trials that a run is worth whose steps take `step_s` seconds and which ends after
/// `steps` or `seconds`, if it does.
pub fn default_seconds(steps: Option<u64>, seconds: Option<f64>, step_s: f64) -> f64 {
    let by_steps = steps.map(|steps| steps as f64 * step_s);
    let run_s = by_steps.into_iter().chain(seconds).fold(f64::INFINITY, f64::min);
    (SHARE_OF_RUN * run_s).min(TRIAL_S_MAX)
}

/// The standing of a contender in a race.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Standing {
    contender: usize,
    /// Median seconds of a step, over its visits.
    seconds: f64,
    /// Expected seconds of a step relative to the others, by prediction and visits.
    expected: f64,
}

/// Moves the ways that were tried to the front, the one with the least expected time first: those
/// of `contenders` (indices into the fitting ways), which [`race`] against one another for
/// `seconds`. `elapsed` is the time since the trials began. `visit` runs a way and returns the
/// median seconds of its step, or None if it cannot be run, which eliminates it.
pub fn try_out(
    ways: &mut Ways,
    contenders: &[usize],
    seconds: f64,
    elapsed: &dyn Fn() -> Duration,
    visit: &mut dyn FnMut(&Way) -> Option<f64>,
) {
    let predicted: Vec<f64> = contenders.iter().map(|way| ways.fitting[*way].step_s).collect();
    let standings = race(&predicted, Duration::from_secs_f64(seconds), elapsed, &mut |contender| {
        visit(&ways.fitting[contenders[contender]])
    });
    let tried: Vec<Way> = standings
        .iter()
        .map(|standing| Way {
            tried: Some(Tried { seconds: standing.seconds, expected_s: standing.expected }),
            ..ways.fitting[contenders[standing.contender]].clone()
        })
        .collect();
    let mut number = 0..;
    ways.fitting.retain(|_| !contenders.contains(&number.next().unwrap_or(usize::MAX)));
    ways.fitting.splice(..0, tried);
}

/// Indices into `fitting` of the ways to try, the fastest first, as many as a race of `seconds`
/// allows. The fastest of every layout comes before any layout's second. Or the reason why there is
/// no race.
///
/// # Errors
///
/// Fewer than two such ways, or too little time for two of them.
pub fn contenders(fitting: &[Way], seconds: f64) -> Result<Vec<usize>, String> {
    let near = |way: &usize| fitting[*way].step_s <= NEAR * fitting[0].step_s && !fitting[*way].offloaded;
    let near: Vec<usize> = (0..fitting.len()).filter(near).collect();
    if near.len() < 2 {
        return Err("no two plans that fit in memory are predicted to be nearly as fast as the best".to_owned());
    }
    let is_first = |way: &usize| !fitting[..*way].iter().any(|before| before.layout == fitting[*way].layout);
    let (first, others): (Vec<usize>, Vec<usize>) = near.into_iter().partition(is_first);
    let mut ordered: Vec<usize> = first.into_iter().chain(others).take(CONTENDERS_MAX).collect();
    let needed_s: Vec<f64> = ordered
        .iter()
        .scan(0.0, |sum, way| {
            *sum += *ROUNDS.start() as f64 * visit_s(fitting[*way].step_s);
            Some(*sum)
        })
        .collect();
    if needed_s[1] > seconds {
        return Err(format!(
            "{} rounds of two plans take about {:.1} s, and there are {seconds:.1}",
            ROUNDS.start(),
            needed_s[1]
        ));
    }
    ordered.truncate(needed_s.iter().take_while(|needed| **needed <= seconds).count());
    Ok(ordered)
}

/// Estimated seconds of a visit, for a way whose steps take `step_s`.
fn visit_s(step_s: f64) -> f64 {
    let timed = (VISIT_S / step_s).clamp(*STEPS.start() as f64, *STEPS.end() as f64);
    (timed + UNTIMED_STEPS) * step_s
}

/// Runs rounds of visits until the time is over or one contender is left. A failed visit eliminates
/// its contender. Returns the standings, the least expected time first.
fn race(
    predicted: &[f64],
    budget: Duration,
    elapsed: &dyn Fn() -> Duration,
    visit: &mut dyn FnMut(usize) -> Option<f64>,
) -> Vec<Standing> {
    let mut seconds: Vec<Vec<f64>> = vec![Vec::new(); predicted.len()];
    let mut racing: Vec<usize> = (0..predicted.len()).collect();
    let mut expected = predicted.to_vec();
    for round in 1..=*ROUNDS.end() {
        let began = elapsed();
        racing.retain(|contender| match visit(*contender) {
            Some(taken) => {
                seconds[*contender].push(taken);
                true
            }
            None => {
                seconds[*contender].clear();
                false
            }
        });
        expected = expect(predicted, &seconds);
        let best = racing.iter().map(|contender| expected[*contender]).fold(f64::INFINITY, f64::min);
        racing.retain(|contender| expected[*contender] <= BEHIND * best);
        let now = elapsed();
        let is_over = round >= *ROUNDS.start() && now + (now - began) > budget;
        if is_over || racing.len() < 2 {
            break;
        }
    }
    let standing = |contender: usize| {
        let seconds = median(seconds[contender].iter().copied())?;
        Some(Standing { contender, seconds, expected: expected[contender] })
    };
    let mut standings: Vec<Standing> = (0..predicted.len()).filter_map(standing).collect();
    standings.sort_by(|a, b| a.expected.total_cmp(&b.expected));
    standings
}

/// Expected seconds of a step after the visits: the predictions, corrected in proportion to the
/// reliability of the visits. Only their ratios are meaningful.
fn expect(predicted: &[f64], seconds: &[Vec<f64>]) -> Vec<f64> {
    let rounds = seconds.iter().map(Vec::len).max().unwrap_or(0);
    let mean = |over: &[f64]| over.iter().sum::<f64>() / over.len().max(1) as f64;
    // The logarithm of a visit's time over its prediction, relative to the other visits of its
    // round: the state of the machine cancels. A later round has only the contenders that are left.
    // Its state is taken from their times relative to their earlier rounds, so that eliminated
    // contenders stay comparable.
    let mut over: Vec<Vec<f64>> = vec![Vec::new(); predicted.len()];
    for round in 0..rounds {
        let visits: Vec<(usize, f64)> = (0..predicted.len())
            .filter_map(|contender| Some((contender, (seconds[contender].get(round)? / predicted[contender]).ln())))
            .collect();
        let spell = median(visits.iter().map(|(contender, visit)| visit - mean(&over[*contender]))).unwrap_or(0.0);
        for (contender, visit) in visits {
            over[contender].push(visit - spell);
        }
    }
    let (mut squares, mut freedom) = (VISIT_ERROR.powi(2), 1.0);
    for over in &over {
        squares += over.iter().map(|value| (value - mean(over)).powi(2)).sum::<f64>();
        freedom += over.len().saturating_sub(1) as f64;
    }
    let (visit, prediction) = (squares / freedom, PREDICTION_ERROR.powi(2));
    let corrected = |(predicted, over): (&f64, &Vec<f64>)| {
        let believed = prediction / (prediction + visit / over.len().max(1) as f64);
        predicted * (believed * mean(over)).exp()
    };
    predicted.iter().zip(&over).map(corrected).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::collections::BTreeMap;

    fn way(layout: &str, step_s: f64) -> Way {
        Way {
            sets: Vec::new(),
            layout: layout.to_owned(),
            batch: [1, 1],
            savings: "none".to_owned(),
            step_s,
            bytes: 1,
            limit: None,
            pinned_bytes: 0,
            kinds: BTreeMap::new(),
            waits_s: 0.0,
            tried: None,
            offloaded: false,
        }
    }

    /// A race on a simulated clock, in which `step` gives the seconds of a step by contender and
    /// round.
    fn raced(predicted: &[f64], budget_s: u64, step: &dyn Fn(usize, usize) -> Option<f64>) -> Vec<Standing> {
        let clock = Cell::new(Duration::ZERO);
        let mut rounds = vec![0; predicted.len()];
        race(predicted, Duration::from_secs(budget_s), &|| clock.get(), &mut |contender| {
            rounds[contender] += 1;
            let seconds = step(contender, rounds[contender] - 1)?;
            clock.set(clock.get() + Duration::from_secs_f64(10.0 * seconds));
            Some(seconds)
        })
    }

    fn order(standings: &[Standing]) -> Vec<usize> {
        standings.iter().map(|standing| standing.contender).collect()
    }

    #[test]
    fn a_steady_machine_decides_also_while_it_slows_down_as_a_whole() {
        let undisturbed = [0.060, 0.050, 0.053, 0.090];
        let slower = [1.0, 2.5, 2.5, 1.0, 1.7];
        let step = |contender: usize, round: usize| {
            let disturbed = if (contender, round) == (1, 0) { 1.1 } else { 1.0 };
            Some(undisturbed[contender] * slower[round] * disturbed)
        };
        let standings = raced(&[0.055, 0.056, 0.054, 0.060], 1000, &step);
        assert_eq!(order(&standings), [1, 2, 0, 3], "{standings:?}");
    }

    #[test]
    fn on_an_unsteady_machine_predictions_outweigh_a_lucky_visit() {
        // Every visit is off by up to a factor of two; contender 2 is lucky twice.
        let noise = [[1.0, 2.0, 1.9, 1.1, 1.5], [2.0, 1.0, 1.2, 1.9, 1.1], [1.0, 1.0, 1.9, 1.3, 2.0]];
        let predicted = [0.050, 0.054, 0.062];
        let standings =
            raced(&predicted, 1000, &|contender, round| Some(predicted[contender] * noise[contender][round]));
        assert_eq!(standings[0].contender, 0, "{standings:?}");
        // On a machine that is steady the same measurement is a fact.
        let steady = raced(&predicted, 1000, &|contender, _| Some([0.050, 0.054, 0.045][contender]));
        assert_eq!(steady[0].contender, 2, "{steady:?}");
    }

    #[test]
    fn who_is_out_is_not_ahead_because_those_left_are_only_compared_with_one_another() {
        // The first three are eliminated after two rounds. Later visits of the others must not
        // count against those.
        let behind = |budget_s| {
            let step = |contender: usize, _| Some([0.1, 0.1, 0.1, 0.07, 0.072][contender]);
            let standings = raced(&[0.1; 5], budget_s, &step);
            let expected =
                |contender| standings.iter().find(|standing| standing.contender == contender).unwrap().expected;
            expected(0) / expected(3)
        };
        let (two_rounds, five) = (behind(4), behind(1000));
        assert!(two_rounds < five, "{two_rounds} {five}");
    }

    #[test]
    fn a_race_ends_when_its_time_is_over_or_nobody_else_is_left() {
        let visits = |budget_s, times: [f64; 3]| {
            let count = Cell::new(0);
            raced(&[0.1; 3], budget_s, &|contender, _| {
                count.set(count.get() + 1);
                Some(times[contender])
            });
            count.get()
        };
        assert_eq!(visits(4, [0.1, 0.101, 0.102]), 6, "3 s a round, 4 in all");
        assert_eq!(visits(1000, [0.1, 0.101, 0.102]), 15);
        assert_eq!(visits(1000, [0.3, 0.3, 0.1]), 3);
    }

    #[test]
    fn who_cannot_be_run_is_out() {
        let standings = raced(&[0.1; 3], 1000, &|contender, round| (contender != 0 || round == 0).then_some(0.1));
        assert_eq!(order(&standings), [1, 2]);
        assert!(raced(&[0.1; 2], 1000, &|_, _| None).is_empty());
    }

    #[test]
    fn contenders_are_near_of_every_layout_first_and_no_more_than_there_is_time_for() {
        let fitting = [
            way("a", 1.0),
            way("a", 1.01),
            way("a", 1.02),
            way("b", 1.1),
            way("c", 1.29),
            way("a", 1.29),
            way("d", 1.4),
        ];
        assert_eq!(contenders(&fitting, 1000.0).unwrap(), [0, 3, 4, 1, 2, 5]);
        // Two visits to each of two contenders, of six steps.
        assert_eq!(contenders(&fitting, 26.0).unwrap(), [0, 3]);
        let short = contenders(&fitting, 11.0).unwrap_err();
        assert_eq!(short, "2 rounds of two plans take about 25.2 s, and there are 11.0");
        let on_disk = [way("a", 1.0), Way { offloaded: true, ..way("b", 1.1) }];
        assert!(contenders(&on_disk, 1000.0).is_err() && contenders(&[], 1000.0).is_err());
    }

    #[test]
    fn a_trial_takes_a_small_share_of_the_run() {
        let seconds = |steps, seconds| default_seconds(steps, seconds, 0.1);
        assert!((seconds(Some(1000), None) - 3.0).abs() < 1e-9);
        assert!((seconds(Some(1000), Some(50.0)) - 1.5).abs() < 1e-9);
        assert!((seconds(Some(1_000_000), None) - 120.0).abs() < 1e-9);
    }
}
