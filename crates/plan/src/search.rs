//! The search: simulates candidates in the order of their lower bounds, and ends when no bound can
//! beat the best result.
//!
//! A candidate whose lower bound of memory is above the limit is dropped. The others are simulated
//! in the order of their lower bounds of time, until the next bound is above the best simulated
//! time. No remaining candidate can then be faster, so the result equals that of an exhaustive
//! search. Candidates that only save memory (by recomputing more, or with state on the host) are
//! skipped if the same candidate fits without: see [`Saving`].
//!
//! For the runners-up, candidates of new layouts are simulated until there are enough layouts. The
//! best plan is proven; the runners-up are the best among those simulated.
//!
//! There are two kinds of bounds: cheap ones for every candidate, and closer ones, which take
//! longer, for candidates whose cheap bound is below the best so far.
//!
//! A [`Budget`] limits the work. Half of it goes to the most promising candidates of every kind, so
//! that a good one is found early; the rest follows the bounds. If the budget runs out before the
//! proof is complete, [`Found::gap`] says how much better a plan could still be.
//!
//! Rounds have a fixed size, so that the result does not depend on the number of threads.

use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The limit of a search's work.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Budget {
    /// Number of simulated instructions, a few million of which take a second. The answer is the
    /// same on every machine.
    Instructions(u64),
    /// Seconds. If they run out, the answer depends on the machine.
    Seconds(f64),
}

impl Default for Budget {
    /// A few seconds at most.
    fn default() -> Budget {
        Budget::Instructions(20_000_000)
    }
}

/// Lower bounds of a candidate's simulation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bound {
    /// Cost that no simulation is below: seconds, or device seconds if cost is minimised.
    pub cost: f64,
    /// Bytes that no simulation's peak is below.
    pub bytes: u64,
}

/// The result of a simulation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Simulated {
    /// Cost in the units of [`Bound::cost`].
    pub cost: f64,
    /// Peak bytes of the fullest rank.
    pub bytes: u64,
}

/// The memory savings of a candidate. If a candidate fits, those of the same `family` that save
/// more at the same or a higher price are pointless.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Saving {
    /// Identifies the candidate without its savings.
    pub family: u32,
    /// Amount of recomputation; more is slower.
    pub level: u32,
    /// Amount of state in a lower tier. 0 is nothing, which is faster than anything else.
    pub tier: u8,
    /// True if more recomputation is slower at this tier. False where activations leave the device:
    /// what is recomputed need not travel, which can be faster.
    pub slower_by_level: bool,
}

/// The result of a search.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Found {
    /// Simulated candidates that fit, sorted by cost and then by number.
    pub fitting: Vec<usize>,
    /// Number of candidates.
    pub considered: usize,
    /// Number dropped because their lower bound of memory is above the limit.
    pub too_large: usize,
    /// Number dropped because they cannot be faster than the best, or than one that fits with less
    /// saving.
    pub too_slow: usize,
    /// Number simulated.
    pub simulated: usize,
    /// Number simulated whose peak is above the memory limit.
    pub out_of_memory: usize,
    /// The fraction of its cost by which any candidate could be better than the best; 0 if the best
    /// is proven.
    pub gap: f64,
    /// Simulated results by candidate.
    pub results: BTreeMap<usize, Simulated>,
}

/// The input of a search beside its candidates.
pub struct Search<'a> {
    /// Lower bounds, by candidate.
    pub bounds: &'a [Bound],
    /// Memory savings, by candidate.
    pub savings: &'a [Saving],
    /// The group of each candidate. Each runner-up is of another group than the best and the other
    /// runners-up.
    pub groups: &'a [u32],
    /// The kind of each candidate. Every kind is tried before any is followed.
    pub kinds: &'a [u32],
    /// The cost of simulating each candidate, in instructions.
    pub work: &'a [u64],
    /// Limit of the work. The runners-up may take a quarter more.
    pub budget: Budget,
    /// Bytes of a device that may be used.
    pub bytes_max: u64,
    /// Number of groups to show.
    pub shown: usize,
    /// Number of threads to simulate on.
    pub threads: usize,
}

/// Number of candidates that are simulated between two comparisons with the best.
const ROUND: usize = 16;
/// Number of closer bounds that are computed between two looks at the clock.
const BOUNDS: usize = 256;
/// The cost of a simulation over that of a closer bound, roughly.
const CHEAPER: u64 = 64;

impl Search<'_> {
    /// Searches. `simulate` may return None for a candidate that cannot be lowered, which then
    /// counts as too large. `closer` returns a bound of cost that is closer than that of
    /// [`Search::bounds`].
    pub fn run(
        &self,
        closer: impl Fn(usize) -> f64 + Sync,
        simulate: impl Fn(usize) -> Option<Simulated> + Sync,
    ) -> Found {
        let mut found = Found { considered: self.bounds.len(), ..Found::default() };
        let mut order: Vec<usize> = (0..self.bounds.len()).collect();
        order.retain(|index| self.bounds[*index].bytes <= self.bytes_max);
        found.too_large = self.bounds.len() - order.len();
        order.sort_by(|a, b| self.bounds[*a].cost.total_cmp(&self.bounds[*b].cost).then(a.cmp(b)));
        let mut state = State::new();
        let first = self.first_of_every_kind(&order);
        let first = self.by_closer_bound(&first, &closer, &mut state, 0.25);
        self.follow(&first, &simulate, &mut found, &mut state, 0.5);
        let open = self.by_closer_bound(&order, &closer, &mut state, 0.75);
        let left = self.follow(&open, &simulate, &mut found, &mut state, 1.0);
        if let (Some((bound, _)), true) = (left, state.best.is_finite()) {
            found.gap = 1.0 - bound / state.best;
        }
        self.runners_up(&order, &mut state, &simulate, &mut found);
        let cost = |index: &usize| found.results[index].cost;
        let mut fitting: Vec<usize> = found.fits(self.bytes_max).collect();
        fitting.sort_by(|a, b| cost(a).total_cmp(&cost(b)).then(a.cmp(b)));
        found.fitting = fitting;
        found.out_of_memory = found.results.len() - found.fitting.len();
        found.too_slow = found.considered - found.too_large - found.simulated;
        found
    }

    /// The candidates of each kind with the lowest bounds.
    fn first_of_every_kind(&self, order: &[usize]) -> Vec<usize> {
        const TRIES: u32 = 3;
        let mut tries: HashMap<u32, u32> = HashMap::new();
        let mut wanted = |index: &&usize| {
            let tried = tries.entry(self.kinds[**index]).or_default();
            *tried += 1;
            *tried <= TRIES
        };
        order.iter().filter(|index| wanted(index)).copied().collect()
    }

    /// The candidates of `order` that could be the best, sorted by the closer of their bounds. Once
    /// `share` of the budget is spent, the others follow by their cheap bounds.
    fn by_closer_bound(
        &self,
        order: &[usize],
        closer: &(impl Fn(usize) -> f64 + Sync),
        state: &mut State,
        share: f64,
    ) -> Vec<(f64, usize)> {
        let open = |index: &usize| {
            let pointless = state.seen.contains(index) || state.fitted.makes_pointless(self.savings[*index]);
            self.bounds[*index].cost < state.best && !pointless
        };
        let open: Vec<usize> = order.iter().copied().filter(open).collect();
        let mut bounds = Vec::with_capacity(open.len());
        for some in open.chunks(BOUNDS) {
            let cheap = |index: usize| self.bounds[index].cost;
            if state.spent(&self.budget) >= share {
                bounds.extend(some.iter().map(|index| (cheap(*index), *index)));
                continue;
            }
            let closer = |index: usize| Some(closer(index).max(cheap(index)));
            bounds.extend(self.in_parallel(some, closer).into_iter().map(|(index, bound)| (bound, index)));
            state.work += some.iter().map(|index| self.work[*index] / CHEAPER).sum::<u64>();
        }
        bounds.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        bounds
    }

    /// Simulates in the order of bounds until the next one is above the best, or until `share` of
    /// the budget is spent; then returns the next one.
    fn follow(
        &self,
        order: &[(f64, usize)],
        simulate: &(impl Fn(usize) -> Option<Simulated> + Sync),
        found: &mut Found,
        state: &mut State,
        share: f64,
    ) -> Option<(f64, usize)> {
        let mut next = 0;
        while let Some(first) = order.get(next).filter(|(bound, _)| *bound < state.best) {
            if state.spent(&self.budget) >= share {
                return Some(*first);
            }
            let mut round = Vec::with_capacity(ROUND);
            while let Some((bound, index)) = order.get(next).filter(|_| round.len() < ROUND) {
                let pointless = state.seen.contains(index) || state.fitted.makes_pointless(self.savings[*index]);
                round.extend((!pointless && *bound < state.best).then_some(*index));
                next += 1;
            }
            self.simulate_round(&round, simulate, found, state);
        }
        None
    }

    /// Simulates the candidates of `round` and records their results.
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

    /// Continues through `order` with candidates of groups that are not among the fitting ones yet.
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
        // Number of attempts per group. A group that does not fit in the first few is given up.
        const TRIES: u32 = 3;
        /// Number of groups that are tried at once.
        const TOGETHER: usize = 4;
        let mut tried: BTreeMap<u32, u32> = BTreeMap::new();
        let spent = state.spent(&self.budget);
        let mut rest: VecDeque<usize> = order.iter().copied().collect();
        while groups.len() < self.shown && state.spent(&self.budget) < spent + 0.25 {
            // One of each group that has none yet, so that they can be simulated at once.
            let (mut round, mut newest, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
            while round.len() < TOGETHER
                && let Some(index) = rest.pop_front()
            {
                let group = self.groups[index];
                let tries = tried.entry(group).or_default();
                let pointless = state.seen.contains(&index) || state.fitted.makes_pointless(self.savings[index]);
                if groups.contains(&group) || *tries >= TRIES || pointless {
                    continue;
                }
                if newest.contains(&group) {
                    waiting.push(index);
                    continue;
                }
                *tries += 1;
                newest.push(group);
                round.push(index);
            }
            waiting.into_iter().rev().for_each(|index| rest.push_front(index));
            if round.is_empty() {
                break;
            }
            self.simulate_round(&round, simulate, found, state);
            let fits = |index: &usize| found.results.get(index).is_some_and(|result| result.bytes <= self.bytes_max);
            groups.extend(round.iter().filter(|index| fits(index)).map(|index| self.groups[*index]));
        }
    }

    fn simulate_all(
        &self,
        indices: &[usize],
        simulate: &(impl Fn(usize) -> Option<Simulated> + Sync),
        found: &mut Found,
    ) {
        found.simulated += indices.len();
        found.results.extend(self.in_parallel(indices, simulate));
    }

    /// The results of `work` for `indices`, ascending, without those that are None.
    fn in_parallel<T: Send>(&self, indices: &[usize], work: impl Fn(usize) -> Option<T> + Sync) -> Vec<(usize, T)> {
        if self.threads <= 1 || indices.len() <= 1 {
            return indices.iter().filter_map(|index| Some((*index, work(*index)?))).collect();
        }
        let next = AtomicUsize::new(0);
        let some = || {
            let mut done = Vec::new();
            while let Some(index) = indices.get(next.fetch_add(1, Ordering::Relaxed)) {
                done.extend(work(*index).map(|result| (*index, result)));
            }
            done
        };
        let mut all: Vec<(usize, T)> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.threads).map(|_| scope.spawn(some)).collect();
            let done = workers.into_iter().flat_map(|worker| match worker.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            done.collect()
        });
        all.sort_by_key(|(index, _)| *index);
        all
    }
}

impl Found {
    fn fits(&self, bytes_max: u64) -> impl Iterator<Item = usize> + '_ {
        self.results.iter().filter(move |(_, result)| result.bytes <= bytes_max).map(|(index, _)| *index)
    }
}

/// The knowledge of a search so far.
struct State {
    fitted: Fitted,
    best: f64,
    /// Number of instructions simulated.
    work: u64,
    began: Instant,
    seen: HashSet<usize>,
}

impl State {
    fn new() -> State {
        State { fitted: Fitted::default(), best: f64::INFINITY, work: 0, began: Instant::now(), seen: HashSet::new() }
    }

    /// The fraction of `budget` that is spent.
    fn spent(&self, budget: &Budget) -> f64 {
        match budget {
            Budget::Instructions(most) => self.work as f64 / *most as f64,
            Budget::Seconds(most) => self.began.elapsed().as_secs_f64() / most,
        }
    }
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
        fits(0) || saving.slower_by_level && fits(saving.tier)
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
            let savings: Vec<Saving> =
                (0..count as u32).map(|family| Saving { family, level: 0, tier: 0, slower_by_level: true }).collect();
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
                    budget: Budget::Instructions(10_000),
                    bytes_max: 60,
                    shown: 3,
                    threads,
                }
                .run(|i| truth[i].cost * (1.0 - 0.1 * noise(seed << 35 | i as u64)), |i| Some(truth[i]))
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
        let savings: Vec<Saving> =
            (0..1000).map(|family| Saving { family, level: 0, tier: 0, slower_by_level: true }).collect();
        let groups = vec![0; 1000];
        let work = vec![1; 1000];
        let run = |instructions, slower: f64| {
            let (bounds, groups, savings, work) = (&bounds, &groups, &savings, &work);
            let (kinds, bytes_max, shown, threads) = (groups, 1, 5, 1);
            let budget = Budget::Instructions(instructions);
            let search = Search { bounds, groups, savings, kinds, work, budget, bytes_max, shown, threads };
            search.run(|i| bounds[i].cost, |i| Some(Simulated { cost: slower * bounds[i].cost + 0.5, bytes: 1 }))
        };
        let found = run(10_000, 1.0);
        assert!(found.simulated <= 3 + ROUND, "{}", found.simulated);
        assert_eq!((found.fitting[0], found.gap), (0, 0.0));
        // With bounds far below the truth and work for only a part of the candidates, the gap says
        // what could still be better.
        let found = run(64, 500.0);
        assert!(found.simulated < 100 && found.gap > 0.8, "{} {}", found.simulated, found.gap);
    }

    #[test]
    fn recomputing_more_is_tried_where_activations_leave_the_device() {
        let mut fitted = Fitted::default();
        let saving = |level, tier| Saving { family: 7, level, tier, slower_by_level: false };
        fitted.add(saving(20, 2));
        assert!(!fitted.makes_pointless(saving(30, 2)));
        fitted.add(saving(25, 0));
        assert!(fitted.makes_pointless(saving(30, 2)) && !fitted.makes_pointless(saving(24, 2)));
    }

    /// Levels 0 to 99 of one family, of which those from 40 fit. Levels above need not be
    /// simulated, nor do tiers above one that fits without.
    #[test]
    fn what_only_saves_memory_is_passed_over_where_it_is_not_needed() {
        let mut fitted = Fitted::default();
        let saving = |level, tier| Saving { family: 7, level, tier, slower_by_level: true };
        fitted.add(saving(40, 0));
        for (level, tier, pointless) in [(39, 0, false), (40, 0, true), (39, 1, false), (41, 1, true)] {
            assert_eq!(fitted.makes_pointless(saving(level, tier)), pointless, "{level} {tier}");
        }
        fitted.add(saving(20, 1));
        assert!(fitted.makes_pointless(saving(30, 1)) && !fitted.makes_pointless(saving(30, 2)));
        assert!(!fitted.makes_pointless(Saving { family: 8, level: 50, tier: 0, slower_by_level: true }));
    }
}
