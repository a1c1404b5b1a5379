//! The scheduler: on how many cores a job runs in each slot of time, so that its work is done for
//! the least cost.
//!
//! It is CarbonScaler's greedy form (Hanafy et al., "CarbonScaler: Leveraging Cloud Workload
//! Elasticity for Optimizing Carbon-Efficiency", 2023, algorithm 1): each step from one shape of
//! the job to the next larger one, in each slot, has a marginal work and a marginal cost, and steps
//! are taken in the order of work per cost until the work is done. That is optimal if larger shapes
//! bring ever less work per core, that is on their concave hull.
//!
//! The greedy order is the same as a threshold: with a value `v` of a unit of work, every slot
//! takes the shape with the largest `v work - cost`, which lies on the hull. This form also knows
//! the cost of a start, which the greedy one does not. Work that a start loses is taken from its
//! slot, and the best choice for all slots together is found by dynamic programming over slots and
//! shapes (Viterbi 1967). The least `v` whose choice does the work is found by bisection. With
//! starts that cost nothing this is the greedy schedule.
//!
//! The choice may do more work than is asked for. The surplus is taken from the dearest slots.

/// A slot of time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slot {
    /// Its begin.
    pub start: i64,
    /// Its length in seconds, above 0.
    pub seconds: f64,
    /// The cost of a core for a second.
    pub cost: f64,
    /// The cores that the job may use.
    pub cores: u32,
}

/// A number of cores and the work per second on them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Speed {
    /// Cores.
    pub cores: u32,
    /// Units of work per second, above 0.
    pub rate: f64,
}

/// The work that is left.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Demand {
    /// Units of work.
    pub work: f64,
    /// Seconds of work that a start, or a change of shape, loses.
    pub start_s: f64,
    /// The shape that runs now.
    pub running: Option<usize>,
}

/// A schedule of one job.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Plan {
    /// The shape in each slot.
    pub shapes: Vec<Option<usize>>,
    /// The time at which the work is done. None if it is not done within the slots.
    pub ends: Option<i64>,
    /// The work that the slots do, without what is beyond the end.
    pub work: f64,
    /// The cost up to the end.
    pub cost: f64,
}

/// A share of the work that rounding may hide.
const ROUNDING: f64 = 1e-9;
/// Number of bisections of the value of work.
const BISECTIONS: usize = 60;

/// The shapes that are faster than every one with as many cores or fewer, the smallest first.
fn frontier(shapes: &[Speed]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shapes.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&shapes[*a], &shapes[*b]);
        a.cores.cmp(&b.cores).then(b.rate.total_cmp(&a.rate))
    });
    let mut fastest = 0.0;
    order.retain(|shape| {
        let is_faster = shapes[*shape].rate > fastest;
        fastest = shapes[*shape].rate.max(fastest);
        is_faster
    });
    order
}

/// The cheapest schedule that does the work, or the one that does the most if the slots are too
/// few.
pub fn cheapest(slots: &[Slot], shapes: &[Speed], demand: Demand) -> Plan {
    if demand.work <= 0.0 || slots.is_empty() || shapes.is_empty() {
        return finish(slots, shapes, demand, vec![None; slots.len()]);
    }
    let frontier = frontier(shapes);
    let problem = Problem { slots, shapes, frontier: &frontier, demand };
    // A value at which every slot is taken that can be.
    let dearest = slots.iter().map(|slot| slot.cost.abs()).fold(0.0, f64::max);
    let slopes = frontier.windows(2).map(|pair| {
        let (a, b) = (shapes[pair[0]], shapes[pair[1]]);
        (b.rate - a.rate) / f64::from(b.cores - a.cores)
    });
    let first = shapes[frontier[0]];
    let slope = slopes.fold(first.rate / f64::from(first.cores), f64::min);
    let mut high = 4.0 * dearest / slope + 1.0;
    let mut best = problem.choose(high);
    for _ in 0..BISECTIONS {
        if problem.work(&best) >= demand.work {
            break;
        }
        high *= 4.0;
        best = problem.choose(high);
    }
    if problem.work(&best) < demand.work {
        return soonest(slots, shapes, demand);
    }
    let mut low = -high;
    for _ in 0..BISECTIONS {
        let middle = 0.5 * (low + high);
        let chosen = problem.choose(middle);
        if problem.work(&chosen) >= demand.work {
            (high, best) = (middle, chosen);
        } else {
            low = middle;
        }
    }
    problem.trim(&mut best);
    finish(slots, shapes, demand, best)
}

/// The schedule that ends first: the fastest shape that the cores allow, from the first slot on. A
/// running job keeps its shape unless another one would end it sooner, the start counted twice.
pub fn soonest(slots: &[Slot], shapes: &[Speed], demand: Demand) -> Plan {
    let fastest = |slot: &Slot| {
        let fits = (0..shapes.len()).filter(|shape| shapes[*shape].cores <= slot.cores);
        fits.max_by(|a, b| {
            let (a, b) = (shapes[*a], shapes[*b]);
            a.rate.total_cmp(&b.rate).then(b.cores.cmp(&a.cores))
        })
    };
    let mut last = demand.running;
    let chosen = slots.iter().map(|slot| {
        let best = fastest(slot);
        let kept = last.filter(|shape| shapes[*shape].cores <= slot.cores);
        let choice = match (kept, best) {
            (Some(kept), Some(best)) => {
                let seconds = |shape: usize| demand.work / shapes[shape].rate;
                Some(if seconds(best) + 2.0 * demand.start_s < seconds(kept) { best } else { kept })
            }
            (_, best) => best,
        };
        last = choice.or(last);
        choice
    });
    let chosen: Vec<Option<usize>> = chosen.collect();
    finish(slots, shapes, demand, chosen)
}

/// The work of shape `now` in a slot, after `before` in the slot before it.
fn work_of(slot: &Slot, shapes: &[Speed], start_s: f64, before: Option<usize>, now: Option<usize>) -> f64 {
    let Some(shape) = now else { return 0.0 };
    let lost = if before == now { 0.0 } else { start_s.min(slot.seconds) };
    shapes[shape].rate * (slot.seconds - lost)
}

fn cost_of(slot: &Slot, shapes: &[Speed], now: Option<usize>) -> f64 {
    now.map_or(0.0, |shape| f64::from(shapes[shape].cores) * slot.seconds * slot.cost)
}

/// Walks through the slots until the work is done. Slots after that are set free.
fn finish(slots: &[Slot], shapes: &[Speed], demand: Demand, mut chosen: Vec<Option<usize>>) -> Plan {
    let mut plan = Plan::default();
    let mut before = demand.running;
    if demand.work <= 0.0 {
        plan.ends = slots.first().map(|slot| slot.start);
    }
    for (slot, now) in slots.iter().zip(&mut chosen) {
        if plan.ends.is_some() {
            *now = None;
            continue;
        }
        let work = work_of(slot, shapes, demand.start_s, before, *now);
        let cost = cost_of(slot, shapes, *now);
        let left = demand.work - plan.work;
        if let Some(shape) = now.filter(|_| work >= left - ROUNDING * demand.work) {
            let lost = if before == *now { 0.0 } else { demand.start_s.min(slot.seconds) };
            let seconds = lost + left / shapes[shape].rate;
            plan.ends = Some(slot.start + seconds.ceil() as i64);
            plan.work += left;
            plan.cost += cost * (seconds / slot.seconds).min(1.0);
        } else {
            plan.work += work;
            plan.cost += cost;
        }
        before = *now;
    }
    plan.shapes = chosen;
    plan
}

/// The shapes on the concave hull of work over cores, which begins at no cores and no work.
fn hull(shapes: &[Speed]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shapes.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&shapes[*a], &shapes[*b]);
        a.cores.cmp(&b.cores).then(b.rate.total_cmp(&a.rate))
    });
    let mut on: Vec<usize> = Vec::new();
    for index in order {
        let shape = shapes[index];
        if on.last().is_some_and(|last| shapes[*last].rate >= shape.rate) {
            continue;
        }
        while let Some(last) = on.last() {
            let last = shapes[*last];
            let before = if on.len() > 1 { shapes[on[on.len() - 2]] } else { Speed { cores: 0, rate: 0.0 } };
            let slope = |a: Speed, b: Speed| (b.rate - a.rate) / f64::from(b.cores - a.cores);
            if slope(before, last) > slope(last, shape) {
                break;
            }
            on.pop();
        }
        on.push(index);
    }
    on
}

/// The least cost of any schedule that may stop anywhere and whose starts are free: steps in the
/// order of cost per work, the last one in part. No schedule is cheaper. None if the work cannot be
/// done within the slots.
pub fn least_cost(slots: &[Slot], shapes: &[Speed], mut work: f64) -> Option<f64> {
    let mut steps = Vec::new();
    for slot in slots {
        let mut before = Speed { cores: 0, rate: 0.0 };
        for index in hull(shapes) {
            let shape = shapes[index];
            if shape.cores > slot.cores {
                break;
            }
            let rate = shape.rate - before.rate;
            let cost = f64::from(shape.cores - before.cores) * slot.cost * slot.seconds;
            steps.push((cost, rate * slot.seconds));
            before = shape;
        }
    }
    steps.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
    let rounding = ROUNDING * work;
    let mut sum = 0.0;
    for (cost, done) in steps {
        let share = (work / done).min(1.0);
        sum += share * cost;
        work -= share * done;
        if work <= rounding {
            return Some(sum);
        }
    }
    None
}

struct Problem<'a> {
    slots: &'a [Slot],
    shapes: &'a [Speed],
    frontier: &'a [usize],
    demand: Demand,
}

impl Problem<'_> {
    /// The choices in a slot.
    fn states(&self) -> impl Iterator<Item = Option<usize>> + Clone + '_ {
        std::iter::once(None).chain(self.frontier.iter().map(|shape| Some(*shape)))
    }

    fn fits(&self, slot: &Slot, state: Option<usize>) -> bool {
        state.is_none_or(|shape| self.shapes[shape].cores <= slot.cores)
    }

    /// The choice with the largest sum of `value` times work less cost.
    fn choose(&self, value: f64) -> Vec<Option<usize>> {
        let states: Vec<Option<usize>> = self.states().collect();
        let count = states.len();
        // From the last slot back: the best that can still be had from a slot on, by the state in
        // the slot before it.
        let mut after = vec![0.0; count + 1];
        let mut steps = vec![0u8; self.slots.len() * (count + 1)];
        for (index, slot) in self.slots.iter().enumerate().rev() {
            let mut best = vec![f64::NEG_INFINITY; count + 1];
            for before in 0..=count {
                // The last entry stands for what runs now, which may be another shape.
                let from = if before == count { self.demand.running } else { states[before] };
                for (number, state) in states.iter().enumerate() {
                    if !self.fits(slot, *state) {
                        continue;
                    }
                    let work = work_of(slot, self.shapes, self.demand.start_s, from, *state);
                    let gain = value * work - cost_of(slot, self.shapes, *state) + after[number];
                    if gain > best[before] {
                        best[before] = gain;
                        steps[index * (count + 1) + before] = number as u8;
                    }
                }
            }
            after = best;
        }
        let mut state = count;
        (0..self.slots.len())
            .map(|index| {
                state = usize::from(steps[index * (count + 1) + state]);
                states[state]
            })
            .collect()
    }

    fn work(&self, chosen: &[Option<usize>]) -> f64 {
        let mut before = self.demand.running;
        let work = self.slots.iter().zip(chosen).map(|(slot, now)| {
            let work = work_of(slot, self.shapes, self.demand.start_s, before, *now);
            before = *now;
            work
        });
        work.sum()
    }

    /// Gives back surplus work: in the order of cost per work, slots take a smaller shape or none
    /// while the work is still done. Of equal ones the last goes first, so that work is done early.
    /// The last slot ends with the work and so costs only in part: a change that is not cheaper
    /// when that is counted is not made.
    fn trim(&self, chosen: &mut [Option<usize>]) {
        let mut surplus = self.work(chosen) - self.demand.work;
        let mut cost = finish(self.slots, self.shapes, self.demand, chosen.to_vec()).cost;
        let states: Vec<Option<usize>> = self.states().collect();
        let mut refused = vec![false; self.slots.len() * states.len()];
        while surplus > 0.0 {
            let mut best: Option<(f64, usize, usize, f64)> = None;
            for index in 0..self.slots.len() {
                let Some(now) = chosen[index] else { continue };
                let before = if index == 0 { self.demand.running } else { chosen[index - 1] };
                for (number, state) in states.iter().copied().enumerate() {
                    let is_smaller = state.is_none_or(|shape| self.shapes[shape].cores < self.shapes[now].cores);
                    if !is_smaller {
                        continue;
                    }
                    let work = |state: Option<usize>| {
                        let here = work_of(&self.slots[index], self.shapes, self.demand.start_s, before, state);
                        let next = self.slots.get(index + 1).map_or(0.0, |slot| {
                            work_of(slot, self.shapes, self.demand.start_s, state, chosen[index + 1])
                        });
                        here + next
                    };
                    let lost = work(Some(now)) - work(state);
                    let slot = &self.slots[index];
                    let saved = cost_of(slot, self.shapes, Some(now)) - cost_of(slot, self.shapes, state);
                    if lost > surplus || saved <= 0.0 || refused[index * states.len() + number] {
                        continue;
                    }
                    let ratio = saved / lost.max(1e-300);
                    if best.is_none_or(|(known, ..)| ratio >= known) {
                        best = Some((ratio, index, number, lost));
                    }
                }
            }
            let Some((_, index, number, lost)) = best else { return };
            let before = std::mem::replace(&mut chosen[index], states[number]);
            let trimmed = finish(self.slots, self.shapes, self.demand, chosen.to_vec());
            if trimmed.ends.is_none() || trimmed.cost >= cost {
                chosen[index] = before;
                refused[index * states.len() + number] = true;
                continue;
            }
            cost = trimmed.cost;
            refused.fill(false);
            surplus -= lost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slots(costs: &[f64], cores: u32) -> Vec<Slot> {
        let slot =
            |(index, cost): (usize, &f64)| Slot { start: 3600 * index as i64, seconds: 3600.0, cost: *cost, cores };
        costs.iter().enumerate().map(slot).collect()
    }

    fn speeds(rates: &[(u32, f64)]) -> Vec<Speed> {
        rates.iter().map(|(cores, rate)| Speed { cores: *cores, rate: *rate }).collect()
    }

    fn demand(work: f64, start_s: f64) -> Demand {
        Demand { work, start_s, running: None }
    }

    #[test]
    fn the_frontier_leaves_out_what_wastes() {
        let shapes = speeds(&[(4, 3.0), (1, 1.0), (2, 1.8), (3, 1.7), (8, 3.0), (2, 1.0)]);
        assert_eq!(frontier(&shapes), [1, 2, 0]);
        // Three cores that bring little over two are not used where four are free, and are where
        // they are not.
        let shapes = speeds(&[(2, 2.0), (3, 2.1), (4, 4.0)]);
        let plan = cheapest(&slots(&[1.0; 4], 4), &shapes, demand(4.0 * 3600.0, 0.0));
        assert!(plan.shapes.iter().all(|shape| *shape != Some(1)), "{plan:?}");
        let plan = cheapest(&slots(&[1.0], 3), &shapes, demand(2.1 * 3600.0, 0.0));
        assert_eq!(plan.shapes, [Some(1)]);
    }

    #[test]
    fn the_cheapest_hours_are_taken_first() {
        let slots = slots(&[5.0, 1.0, 4.0, 2.0, 3.0], 1);
        let plan = cheapest(&slots, &speeds(&[(1, 1.0)]), demand(2.5 * 3600.0, 0.0));
        assert_eq!(plan.shapes, [None, Some(0), None, Some(0), Some(0)]);
        assert_eq!(plan.ends, Some(4 * 3600 + 1800));
        assert_eq!(plan.cost, 3600.0 * (1.0 + 2.0 + 1.5));
    }

    /// CarbonScaler's point: the second core of a cheap hour before the first core of a dear one.
    #[test]
    fn cheap_hours_take_more_cores_before_dear_hours_take_any() {
        let slots = slots(&[1.0, 3.0], 2);
        let shapes = speeds(&[(1, 1.0), (2, 1.5)]);
        // A second core costs 1 for half the work of the first: less per work than a core at 3.
        let plan = cheapest(&slots, &shapes, demand(1.5 * 3600.0, 0.0));
        assert_eq!(plan.shapes, [Some(1), None]);
        let plan = cheapest(&slots, &shapes, demand(1.6 * 3600.0, 0.0));
        assert_eq!(plan.shapes, [Some(1), Some(0)]);
    }

    #[test]
    fn a_start_that_costs_much_is_avoided() {
        let costs = [1.0, 1.2, 1.0, 1.2, 1.0, 1.2];
        let shapes = speeds(&[(1, 1.0)]);
        let free = cheapest(&slots(&costs, 1), &shapes, demand(3.0 * 3600.0, 0.0));
        assert_eq!(free.shapes, [Some(0), None, Some(0), None, Some(0), None]);
        let dear = cheapest(&slots(&costs, 1), &shapes, demand(3.0 * 3600.0 - 1800.0, 1800.0));
        assert_eq!(dear.shapes, [Some(0), Some(0), Some(0), None, None, None]);
    }

    #[test]
    fn a_job_that_runs_goes_on_rather_than_start_again() {
        let slots = slots(&[1.05, 1.0, 1.0, 1.0], 1);
        let shapes = speeds(&[(1, 1.0)]);
        let work = Demand { work: 3600.0, start_s: 600.0, running: Some(0) };
        assert_eq!(cheapest(&slots, &shapes, work).shapes, [Some(0), None, None, None]);
    }

    #[test]
    fn too_little_time_runs_as_fast_as_possible() {
        let slots = slots(&[1.0, 9.0], 2);
        let plan = cheapest(&slots, &speeds(&[(1, 1.0), (2, 1.5)]), demand(1e6, 60.0));
        assert_eq!((plan.shapes, plan.ends), (vec![Some(1), Some(1)], None));
    }

    #[test]
    fn cores_that_others_use_are_left_to_them() {
        let mut slots = slots(&[1.0, 2.0, 3.0], 2);
        slots[0].cores = 0;
        slots[1].cores = 1;
        // One core for an hour or two for half of one cost the same, and two end sooner.
        let plan = cheapest(&slots, &speeds(&[(1, 1.0), (2, 2.0)]), demand(2.0 * 3600.0, 0.0));
        assert_eq!((plan.shapes, plan.ends), (vec![None, Some(0), Some(1)], Some(2 * 3600 + 1800)));
        assert_eq!(plan.cost, 3600.0 * (2.0 + 3.0));
        let plan = soonest(&slots, &speeds(&[(1, 1.0), (2, 2.0)]), demand(3.0 * 3600.0, 60.0));
        assert_eq!(plan.shapes, [None, Some(0), Some(1)]);
    }

    /// The least cost by trying every schedule of whole slots, with the same rules for starts.
    fn exhaustive(slots: &[Slot], shapes: &[Speed], demand: Demand) -> Option<f64> {
        let states = shapes.len() + 1;
        let all = states.pow(slots.len() as u32);
        let costs = (0..all).filter_map(|mut code| {
            let chosen: Vec<Option<usize>> = slots
                .iter()
                .map(|slot| {
                    let state = (code % states).checked_sub(1);
                    code /= states;
                    state.filter(|shape| shapes[*shape].cores <= slot.cores)
                })
                .collect();
            let plan = finish(slots, shapes, demand, chosen);
            plan.ends.map(|_| plan.cost)
        });
        costs.min_by(f64::total_cmp)
    }

    fn some_shapes() -> impl Strategy<Value = Vec<Speed>> {
        let shape = (1u32..5, 0.2f64..3.0).prop_map(|(cores, rate)| Speed { cores, rate });
        proptest::collection::vec(shape, 1..4)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn the_work_is_done_within_the_cores_if_it_can_be(
            costs in proptest::collection::vec(-1.0f64..10.0, 1..60),
            shapes in some_shapes(),
            share in 0.01f64..1.2,
            start_s in 0.0f64..900.0,
            cores in 1u32..6,
        ) {
            let slots = slots(&costs, cores);
            let fastest = soonest(&slots, &shapes, demand(f64::INFINITY, start_s));
            let wanted = demand(share * fastest.work, start_s);
            let plan = cheapest(&slots, &shapes, wanted);
            prop_assert_eq!(plan.shapes.len(), slots.len());
            for (slot, shape) in slots.iter().zip(&plan.shapes) {
                prop_assert!(shape.is_none_or(|shape| shapes[shape].cores <= slot.cores));
            }
            if share <= 0.99 {
                prop_assert!(plan.ends.is_some(), "{:?}", plan);
                prop_assert!((plan.work - wanted.work).abs() < 1e-6 * wanted.work.max(1.0));
            } else if share > 1.01 && wanted.work > 0.0 {
                prop_assert!(plan.ends.is_none());
            }
            // More time never costs more: what is beyond is not used unless it is cheaper.
            let longer = self::slots(&[&costs[..], &[11.0; 5]].concat(), cores);
            let again = cheapest(&longer, &shapes, wanted);
            if plan.ends.is_some() && start_s == 0.0 {
                prop_assert!(again.cost <= plan.cost + 1e-6 * plan.cost.abs());
            }
        }

        /// Without a cost of starts the schedule is the greedy one: not dearer than the fractional
        /// optimum by more than one step of one slot.
        #[test]
        fn free_starts_give_the_greedy_optimum(
            costs in proptest::collection::vec(0.1f64..10.0, 1..60),
            shapes in some_shapes(),
            share in 0.05f64..0.95,
        ) {
            let slots = slots(&costs, 4);
            let most: f64 = hull(&shapes).last().map_or(0.0, |shape| shapes[*shape].rate) * 3600.0 * costs.len() as f64;
            let wanted = demand(share * most, 0.0);
            let plan = cheapest(&slots, &shapes, wanted);
            let least = least_cost(&slots, &shapes, wanted.work).unwrap();
            let step = 4.0 * 3600.0 * costs.iter().copied().fold(0.0, f64::max);
            prop_assert!(plan.ends.is_some() && plan.cost >= least * (1.0 - 1e-9) - 1e-9, "{} {}", plan.cost, least);
            prop_assert!(plan.cost <= least + step, "{} {} {}", plan.cost, least, step);
        }

        /// With starts that cost, close to the best of all schedules of few slots.
        #[test]
        fn few_slots_are_scheduled_nearly_as_well_as_by_trying_all(
            costs in proptest::collection::vec(0.5f64..10.0, 3..8),
            share in 0.1f64..0.9,
            start_s in 0.0f64..1200.0,
        ) {
            let shapes = speeds(&[(1, 1.0), (2, 1.7)]);
            let slots = slots(&costs, 2);
            let most = soonest(&slots, &shapes, demand(f64::INFINITY, start_s)).work;
            let wanted = demand(share * most, start_s);
            let plan = cheapest(&slots, &shapes, wanted);
            let best = exhaustive(&slots, &shapes, wanted).unwrap();
            let step = 2.0 * 3600.0 * costs.iter().copied().fold(0.0, f64::max);
            prop_assert!(plan.ends.is_some());
            prop_assert!(plan.cost >= best - 1e-6 && plan.cost <= best + step, "{} {}", plan.cost, best);
        }
    }
}
