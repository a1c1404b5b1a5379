//! The search: best first by lower bounds of time, ended when no bound can beat what was found.
//!
//! A candidate whose lower bound of memory is above the limit is dropped. The others are simulated in the order of their lower bounds of time
//! until the next bound is above the best simulated time: then nothing that is left can be faster, and the best is that of an exhaustive search.
//! On the way, what only saves memory (recomputing more, state on the host) is passed over where the same candidate fits without: see
//! [`Saving`]. For the runners-up, candidates of layouts not seen yet are simulated until enough layouts are there; they are the best of
//! what was simulated, while the best one is proven.
//!
//! Work is bounded: half of it looks at the most promising candidates of every kind, so that a good one is found early, the rest follows the bounds. When
//! it runs out before the proof is complete, [`Found::gap`] says how much better than the best a plan could still be.
//!
//! Rounds have a fixed size, so that the result does not depend on the number of threads.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a candidate cannot be better than.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bound {
    /// Cost that no simulation is below: seconds, or dollars where those are minimised.
    pub cost: f64,
    /// Bytes that no simulation's peak is below.
    pub bytes: u64,
}

/// What a simulation says.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Simulated {
    /// In the units of [`Bound::cost`].
    pub cost: f64,
    /// Peak of the fullest rank.
    pub bytes: u64,
}

/// How a candidate saves memory: of candidates with the same `family`, one that fits makes those pointless that save more at the same or
/// a higher price.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Saving {
    /// The candidate without what it saves.
    pub family: u32,
    /// How much is recomputed; more is slower.
    pub level: u32,
    /// What lies in a lower tier; 0 is nothing, which is faster than anything else.
    pub tier: u8,
}

/// How a search went.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Found {
    /// Simulated candidates that fit, by cost, then number.
    pub fitting: Vec<usize>,
    /// Candidates in all.
    pub considered: usize,
    /// Dropped since their least memory is above the limit.
    pub too_large: usize,
    /// Dropped since they cannot be faster than the best, or than what fits with less saving.
    pub too_slow: usize,
    /// Simulated.
    pub simulated: usize,
    /// Simulated, and above the limit of memory.
    pub out_of_memory: usize,
    /// What part of its cost any candidate could be better than the best; 0 when the best is proven.
    pub gap: f64,
    /// Simulated results by candidate.
    pub results: BTreeMap<usize, Simulated>,
}

/// What a search is given beside its candidates.
pub struct Search<'a> {
    /// By candidate.
    pub bounds: &'a [Bound],
    /// By candidate.
    pub savings: &'a [Saving],
    /// The group of each candidate; runners-up are of other groups than the best and one another.
    pub groups: &'a [u32],
    /// The kind of each candidate: every kind is looked at before any is followed.
    pub kinds: &'a [u32],
    /// What simulating each candidate takes, in instructions.
    pub work: &'a [u64],
    /// Instructions that may be simulated; the runners-up may take a quarter more.
    pub work_max: u64,
    /// Bytes of a device that may be used.
    pub bytes_max: u64,
    /// How many groups to show.
    pub shown: usize,
    /// Threads to simulate on.
    pub threads: usize,
}

/// Candidates that are simulated between two looks at the best.
const ROUND: usize = 16;

impl Search<'_> {
    /// Searches. `simulate` may say None for a candidate that cannot be lowered; such ones count as too large.
    pub fn run(&self, simulate: impl Fn(usize) -> Option<Simulated> + Sync) -> Found {
        let mut found = Found { considered: self.bounds.len(), ..Found::default() };
        let mut order: Vec<usize> = (0..self.bounds.len()).collect();
        order.retain(|index| self.bounds[*index].bytes <= self.bytes_max);
        found.too_large = self.bounds.len() - order.len();
        order.sort_by(|a, b| self.bounds[*a].cost.total_cmp(&self.bounds[*b].cost).then(a.cmp(b)));
        let mut state = State { fitted: Fitted::default(), best: f64::INFINITY, work: 0, seen: HashSet::new() };
        self.look_at_every_kind(&order, &simulate, &mut found, &mut state);
        let mut next = 0;
        while let Some(index) = order.get(next).filter(|index| self.bounds[**index].cost < state.best) {
            if state.work >= self.work_max {
                found.gap = if state.best.is_finite() { 1.0 - self.bounds[*index].cost / state.best } else { 0.0 };
                break;
            }
            let mut round = Vec::with_capacity(ROUND);
            while next < order.len() && round.len() < ROUND && self.bounds[order[next]].cost < state.best {
                let wanted =
                    !state.seen.contains(&order[next]) && !state.fitted.makes_pointless(self.savings[order[next]]);
                round.extend(wanted.then_some(order[next]));
                next += 1;
            }
            self.simulate_round(&round, &simulate, &mut found, &mut state);
        }
        state.work = 0;
        self.runners_up(&order[next..], &mut state, &simulate, &mut found);
        let cost = |index: &usize| found.results[index].cost;
        let mut fitting: Vec<usize> = found.fits(self.bytes_max).collect();
        fitting.sort_by(|a, b| cost(a).total_cmp(&cost(b)).then(a.cmp(b)));
        found.fitting = fitting;
        found.out_of_memory = found.results.len() - found.fitting.len();
        found.too_slow = found.considered - found.too_large - found.simulated;
        found
    }

    /// Simulates the candidate of each kind with the lowest bound, and the next one where that does not fit.
    fn look_at_every_kind(
        &self,
        order: &[usize],
        simulate: &(impl Fn(usize) -> Option<Simulated> + Sync),
        found: &mut Found,
        state: &mut State,
    ) {
        const TRIES: u32 = 3;
        let mut tries: HashMap<u32, u32> = HashMap::new();
        let mut round = Vec::with_capacity(ROUND);
        for index in order {
            let kind = self.kinds[*index];
            let tried = tries.entry(kind).or_default();
            let worth = *tried < TRIES && self.bounds[*index].cost < state.best;
            if worth && !state.fitted.makes_pointless(self.savings[*index]) {
                *tried += 1;
                round.push(*index);
            }
            if round.len() == ROUND {
                self.simulate_round(&round, simulate, found, state);
                for index in round.drain(..) {
                    if found.results.get(&index).is_some_and(|result| result.bytes <= self.bytes_max) {
                        tries.insert(self.kinds[index], TRIES);
                    }
                }
                if state.work >= self.work_max / 2 {
                    return;
                }
            }
        }
        self.simulate_round(&round, simulate, found, state);
    }

    /// Simulates `round`, and learns from it.
    fn simulate_round(
        &self,
        round: &[usize],
        simulate: &(impl Fn(usize) -> Option<Simulated> + Sync),
        found: &mut Found,
        state: &mut State,
    ) {
        self.simulate_all(round, simulate, found);
        for index in round {
            state.seen.insert(*index);
            state.work += self.work[*index];
            if let Some(result) = found.results.get(index).filter(|result| result.bytes <= self.bytes_max) {
                state.best = state.best.min(result.cost);
                state.fitted.add(self.savings[*index]);
            }
        }
    }

    /// Goes on through `order` with candidates of groups that are not among the fitting ones yet.
    fn runners_up(
        &self,
        order: &[usize],
        state: &mut State,
        simulate: &(impl Fn(usize) -> Option<Simulated> + Sync),
        found: &mut Found,
    ) {
        let mut groups: Vec<u32> = found.fits(self.bytes_max).map(|index| self.groups[index]).collect();
        groups.sort_unstable();
        groups.dedup();
        if groups.is_empty() {
            return;
        }
        // A group that does not fit the first few times is not worth more.
        const TRIES: u32 = 3;
        let mut tried: BTreeMap<u32, u32> = BTreeMap::new();
        for index in order {
            if groups.len() >= self.shown || state.work >= self.work_max / 4 {
                break;
            }
            let group = self.groups[*index];
            let tries = tried.entry(group).or_default();
            let pointless = state.seen.contains(index) || state.fitted.makes_pointless(self.savings[*index]);
            if groups.contains(&group) || *tries >= TRIES || pointless {
                continue;
            }
            *tries += 1;
            self.simulate_round(&[*index], simulate, found, state);
            if found.results.get(index).is_some_and(|result| result.bytes <= self.bytes_max) {
                groups.push(group);
            }
        }
    }

    fn simulate_all(
        &self,
        indices: &[usize],
        simulate: &(impl Fn(usize) -> Option<Simulated> + Sync),
        found: &mut Found,
    ) {
        found.simulated += indices.len();
        if self.threads <= 1 || indices.len() == 1 {
            found.results.extend(indices.iter().filter_map(|index| Some((*index, simulate(*index)?))));
            return;
        }
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some(index) = indices.get(next.fetch_add(1, Ordering::Relaxed)) {
                done.extend(simulate(*index).map(|result| (*index, result)));
            }
            done
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.threads).map(|_| scope.spawn(work)).collect();
            for worker in workers {
                match worker.join() {
                    Ok(done) => found.results.extend(done),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
    }
}

impl Found {
    fn fits(&self, bytes_max: u64) -> impl Iterator<Item = usize> + '_ {
        self.results.iter().filter(move |(_, result)| result.bytes <= bytes_max).map(|(index, _)| *index)
    }
}

/// What a search knows so far.
struct State {
    fitted: Fitted,
    best: f64,
    /// Instructions simulated.
    work: u64,
    seen: HashSet<usize>,
}

/// Per family and tier, the lowest level that fits.
#[derive(Default)]
struct Fitted(HashMap<(u32, u8), u32>);

impl Fitted {
    fn add(&mut self, saving: Saving) {
        let level = self.0.entry((saving.family, saving.tier)).or_insert(saving.level);
        *level = saving.level.min(*level);
    }

    fn makes_pointless(&self, saving: Saving) -> bool {
        let fits = |tier| self.0.get(&(saving.family, tier)).is_some_and(|level| *level <= saving.level);
        fits(0) || fits(saving.tier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repeatable sequence of numbers in 0..1.
    fn noise(seed: u64) -> f64 {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x >> 11) as f64 / (1u64 << 53) as f64
    }

    #[test]
    fn the_best_is_that_of_an_exhaustive_search() {
        for seed in 0..200u64 {
            let count = 1 + (noise(seed) * 300.0) as u64;
            let truth: Vec<Simulated> = (0..count)
                .map(|i| Simulated { cost: noise(seed << 32 | i), bytes: (noise(seed << 33 | i) * 100.0) as u64 })
                .collect();
            let loose = |i: usize| 1.0 - 0.5 * noise(seed << 34 | i as u64);
            let bounds: Vec<Bound> = truth
                .iter()
                .enumerate()
                .map(|(i, t)| Bound { cost: t.cost * loose(i), bytes: (t.bytes as f64 * loose(i)) as u64 })
                .collect();
            let groups: Vec<u32> = (0..count as u32).map(|i| i % 7).collect();
            let savings: Vec<Saving> = (0..count as u32).map(|family| Saving { family, level: 0, tier: 0 }).collect();
            let run = |threads| {
                let (bounds, groups, savings) = (&bounds, &groups, &savings);
                let work = vec![1; bounds.len()];
                let kinds = groups;
                Search {
                    bounds,
                    groups,
                    savings,
                    kinds,
                    work: &work,
                    work_max: 10_000,
                    bytes_max: 60,
                    shown: 3,
                    threads,
                }
                .run(|i| Some(truth[i]))
            };
            let found = run(1);
            assert_eq!(found, run(3));
            let fitting = truth.iter().filter(|t| t.bytes <= 60);
            let best = fitting.map(|t| t.cost).fold(f64::INFINITY, f64::min);
            match found.fitting.first() {
                Some(first) => assert_eq!(truth[*first].cost, best),
                None => assert_eq!(best, f64::INFINITY),
            }
            assert_eq!(found.considered, found.too_large + found.too_slow + found.simulated);
        }
    }

    #[test]
    fn what_cannot_be_better_is_not_simulated() {
        let bounds: Vec<Bound> = (0..1000).map(|i| Bound { cost: 1.0 + f64::from(i), bytes: 1 }).collect();
        let savings: Vec<Saving> = (0..1000).map(|family| Saving { family, level: 0, tier: 0 }).collect();
        let groups = vec![0; 1000];
        let work = vec![1; 1000];
        let run = |work_max, slower: f64| {
            let (bounds, groups, savings, work) = (&bounds, &groups, &savings, &work);
            let (kinds, bytes_max, shown, threads) = (groups, 1, 5, 1);
            let search = Search { bounds, groups, savings, kinds, work, work_max, bytes_max, shown, threads };
            search.run(|i| Some(Simulated { cost: slower * bounds[i].cost + 0.5, bytes: 1 }))
        };
        let found = run(10_000, 1.0);
        assert!(found.simulated <= 3 + ROUND, "{}", found.simulated);
        assert_eq!((found.fitting[0], found.gap), (0, 0.0));
        // Bounds far below the truth, and work for a part of the candidates: what could still be better is said.
        let found = run(64, 500.0);
        assert!(found.simulated < 100 && found.gap > 0.8, "{} {}", found.simulated, found.gap);
    }

    /// Levels 0 to 99 of one family, of which those from 40 fit: those above need not be looked at, and neither need tiers above what fits without.
    #[test]
    fn what_only_saves_memory_is_passed_over_where_it_is_not_needed() {
        let mut fitted = Fitted::default();
        let saving = |level, tier| Saving { family: 7, level, tier };
        fitted.add(saving(40, 0));
        for (level, tier, pointless) in [(39, 0, false), (40, 0, true), (39, 1, false), (41, 1, true)] {
            assert_eq!(fitted.makes_pointless(saving(level, tier)), pointless, "{level} {tier}");
        }
        fitted.add(saving(20, 1));
        assert!(fitted.makes_pointless(saving(30, 1)) && !fitted.makes_pointless(saving(30, 2)));
        assert!(!fitted.makes_pointless(Saving { family: 8, level: 50, tier: 0 }));
    }
}
