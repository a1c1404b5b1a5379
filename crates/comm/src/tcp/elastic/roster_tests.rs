//! Tests of the roster on a virtual clock, with hosts that follow its orders: coming, leaving,
//! dying, and all of it at random. They start no processes; `crates/cli/tests/elastic.rs` does.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// The steps of a clock tick, in milliseconds.
const TICK: u64 = 100;

/// Hosts that follow orders, on a virtual clock.
struct World {
    roster: Roster,
    now: Duration,
    hosts: BTreeMap<u64, Simulated>,
    next: u64,
    /// By host, the outcome that it was told.
    ends: BTreeMap<u64, Outcome>,
    /// Hosts and ranks of each generation.
    generations: Vec<(Vec<u64>, u32)>,
    /// Ticks for which ranks have trained, until the run is done.
    trained: u64,
    length: u64,
}

#[derive(Default)]
struct Simulated {
    ranks: u32,
    /// The place of its ranks, and when they end and how, if that is known.
    runs: Option<(Start, Option<(Duration, u8)>)>,
}

fn limits(hosts_min: u32, hosts_max: u32) -> Limits {
    Limits { hosts_min, hosts_max, restarts_max: 0, patience: Duration::from_secs(300) }
}

impl World {
    fn new(limits: Limits, length: u64) -> World {
        World {
            roster: Roster::new(limits),
            now: Duration::ZERO,
            hosts: BTreeMap::new(),
            next: 0,
            ends: BTreeMap::new(),
            generations: Vec::new(),
            trained: 0,
            length,
        }
    }

    fn join(&mut self, ranks: u32) -> u64 {
        let id = self.next;
        self.next += 1;
        self.hosts.insert(id, Simulated { ranks, runs: None });
        let card = HostCard { version: String::new(), host: format!("h{id}"), pid: 1, ranks, run: None };
        let orders = self.roster.join(id, card, self.now);
        self.follow(orders);
        id
    }

    fn die(&mut self, id: u64) {
        self.hosts.remove(&id);
        let orders = self.roster.lose(id, self.now);
        self.follow(orders);
    }

    fn leave(&mut self, id: u64) {
        let orders = self.roster.report(id, Report::Leaving, self.now);
        self.follow(orders);
    }

    /// The ranks of `id` end with `code` at once.
    fn end_ranks(&mut self, id: u64, code: u8) {
        if let Some((_, end)) = &mut self.hosts.get_mut(&id).expect("a host").runs {
            *end = Some((self.now, code));
        }
    }

    fn follow(&mut self, orders: Orders) {
        let mut generation = (Vec::new(), 0);
        let mut covered = BTreeSet::new();
        for (id, order) in orders {
            let Some(host) = self.hosts.get_mut(&id) else { continue };
            let soon = self.now + Duration::from_millis(3 * TICK);
            match (order, &mut host.runs) {
                (Order::Start(start), runs) => {
                    assert!(runs.is_none(), "host {id} has ranks of an earlier generation");
                    assert_eq!(start.node == 0, id == KEEPER, "rank 0 is on the keeper's host");
                    covered.extend(start.first..start.first + host.ranks);
                    generation.0.push(id);
                    generation.1 = start.world;
                    *runs = Some((start, None));
                }
                (Order::Stop(_), Some((_, end))) => *end = Some((soon, INTERRUPTED)),
                (Order::Abort(_), Some((_, end))) => *end = Some((self.now, FAULT)),
                (Order::End(outcome), runs) => {
                    assert!(runs.is_none() || outcome.code != 0, "host {id} trains and is told that the run is done");
                    assert!(self.ends.insert(id, outcome).is_none(), "host {id} is told its end twice");
                    self.hosts.remove(&id);
                }
                (Order::Alive | Order::Wait(_) | Order::Run(_) | Order::Stop(_) | Order::Abort(_), _) => {}
            }
        }
        if generation.1 > 0 {
            assert!(covered.iter().copied().eq(0..generation.1), "ranks {covered:?} of a world of {}", generation.1);
            self.generations.push(generation);
        }
    }

    /// Lets `ticks` of time pass.
    fn pass(&mut self, ticks: u64) {
        for _ in 0..ticks {
            self.now += Duration::from_millis(TICK);
            let running: Vec<u64> =
                self.hosts.iter().filter(|(_, host)| host.runs.is_some()).map(|(id, _)| *id).collect();
            let is_whole = self.generations.last().is_some_and(|(hosts, _)| *hosts == running);
            if is_whole {
                self.trained += 1;
                let orders = self.roster.report(KEEPER, Report::Run("runs/a".into()), self.now);
                self.follow(orders);
            }
            for id in running {
                let done = (is_whole && self.trained >= self.length).then_some((self.now, 0));
                let Some(host) = self.hosts.get_mut(&id) else { continue };
                let Some((_, end)) = &mut host.runs else { continue };
                let Some((when, code)) = end.or(done) else { continue };
                if when <= self.now {
                    host.runs = None;
                    let orders = self.roster.report(id, Report::Ended(code), self.now);
                    self.follow(orders);
                }
            }
            let orders = self.roster.decide(self.now, &mut || 1);
            self.follow(orders);
        }
    }

    fn codes(&self) -> Vec<(u64, u8)> {
        self.ends.iter().map(|(id, outcome)| (*id, outcome.code)).collect()
    }

    fn worlds(&self) -> Vec<u32> {
        self.generations.iter().map(|(_, world)| *world).collect()
    }
}

#[test]
fn hosts_come_die_and_leave_and_the_run_goes_on() {
    let mut world = World::new(limits(2, 3), 500);
    world.join(2);
    world.pass(50);
    assert!(world.generations.is_empty(), "one host is too few");
    let second = world.join(1);
    world.pass(50);
    assert_eq!(world.worlds(), [3]);
    let (third, spare) = (world.join(2), world.join(4));
    world.pass(80);
    assert_eq!(world.worlds(), [3, 5], "one place was free");
    world.die(third);
    world.pass(20);
    assert_eq!(world.worlds(), [3, 5, 7], "the spare host takes the place");
    world.leave(spare);
    world.pass(20);
    assert_eq!((world.worlds(), world.codes()), (vec![3, 5, 7, 3], vec![(spare, INTERRUPTED)]));
    world.pass(500);
    assert_eq!(world.codes(), [(KEEPER, 0), (second, 0), (spare, INTERRUPTED)]);
    assert!(world.roster.is_over());
}

#[test]
fn a_start_waits_for_the_last_call_and_for_the_keeper() {
    let mut world = World::new(limits(1, 4), 100);
    world.join(1);
    world.pass(20);
    world.join(1);
    world.pass(20);
    assert!(world.generations.is_empty(), "more may come");
    world.pass(20);
    assert_eq!(world.worlds(), [2]);
    // A run without the keeper's host would have no rank 0 where the others look for it.
    world.die(KEEPER);
    world.pass(100);
    assert_eq!(world.worlds(), [2]);
}

#[test]
fn with_too_few_hosts_the_run_waits_and_gives_up_in_the_end() {
    let mut world = World::new(limits(2, 4), 10_000);
    world.join(1);
    let second = world.join(1);
    world.pass(60);
    world.die(second);
    world.pass(100);
    assert_eq!((world.worlds(), world.ends.len()), (vec![2], 0));
    world.join(1);
    world.pass(60);
    assert_eq!(world.worlds(), [2, 2]);
    world.die(2);
    world.pass(3100);
    let outcome = &world.ends[&KEEPER];
    assert_eq!(outcome.code, FAULT);
    assert!(outcome.why.as_ref().unwrap().contains("1 of at least 2 hosts are there after 300 s"), "{outcome:?}");
}

#[test]
fn failures_of_ranks_count_and_lost_hosts_do_not() {
    let run = |restarts_max: u32, failures: u32| {
        let mut world = World::new(Limits { restarts_max, ..limits(2, 3) }, 10_000);
        world.join(1);
        world.join(1);
        world.pass(60);
        for _ in 0..3 {
            let lost = world.join(1);
            world.pass(80);
            world.die(lost);
            world.pass(20);
        }
        for _ in 0..failures {
            world.end_ranks(1, FAULT);
            world.end_ranks(0, FAULT);
            world.pass(20);
        }
        world.codes()
    };
    assert_eq!(run(2, 2), []);
    assert_eq!(run(2, 3), [(0, FAULT), (1, FAULT)]);
}

#[test]
fn an_error_that_comes_with_a_new_host_is_its_own() {
    let mut world = World::new(limits(2, 3), 10_000);
    world.join(1);
    world.join(1);
    world.pass(100);
    let bad = world.join(1);
    world.pass(60);
    assert_eq!(world.worlds(), [2, 3]);
    (0..3).for_each(|id| world.end_ranks(id, 1));
    world.pass(10);
    assert_eq!((world.worlds(), world.codes()), (vec![2, 3, 2], vec![(bad, 1)]));
    // Nobody is new now.
    (0..2).for_each(|id| world.end_ranks(id, 1));
    world.pass(10);
    assert_eq!(world.codes(), [(0, 1), (1, 1), (bad, 1)]);
}

#[test]
fn the_keeper_ends_the_run_for_all() {
    let mut world = World::new(limits(2, 3), 10_000);
    world.join(1);
    world.join(1);
    world.pass(60);
    world.leave(KEEPER);
    world.pass(10);
    assert_eq!(world.codes(), [(0, INTERRUPTED), (1, INTERRUPTED)]);
    let late = world.join(1);
    assert_eq!(world.ends[&late].why.as_deref(), Some("the run has ended"));
}

/// A host that trained under a keeper that died tells the next one what to go on with.
#[test]
fn a_new_keeper_learns_the_run_from_those_who_come() {
    let mut roster = Roster::new(limits(2, 2));
    let card = |run: Option<&str>| HostCard {
        version: String::new(),
        host: String::new(),
        pid: 1,
        ranks: 1,
        run: run.map(str::to_owned),
    };
    roster.join(KEEPER, card(None), Duration::ZERO);
    roster.join(1, card(Some("runs/a")), Duration::ZERO);
    for (_, order) in roster.decide(Duration::ZERO, &mut || 1) {
        let Order::Start(start) = order else { panic!("{order:?}") };
        assert_eq!(start.run.as_deref(), Some("runs/a"));
    }
}

proptest! {
    /// Whatever comes, leaves and dies: ranks are numbered without gaps, no host has ranks of two
    /// generations, everybody is told the end once, and the run is done in the end.
    #[test]
    fn churn_ends_in_a_finished_run(events in prop::collection::vec((0..4u8, any::<u8>(), 1..120u64), 1..60)) {
        let mut world = World::new(limits(2, 4), 3_000);
        world.join(1);
        world.join(2);
        for (kind, which, ticks) in events {
            let others: Vec<u64> = world.hosts.keys().copied().filter(|id| *id != KEEPER).collect();
            let chosen = others.get(usize::from(which) % others.len().max(1)).copied();
            match (kind, chosen) {
                (0, Some(id)) => world.die(id),
                (1, Some(id)) => world.leave(id),
                _ => drop(world.join(u32::from(which % 3) + 1)),
            }
            world.pass(ticks);
        }
        world.join(1);
        world.pass(10_000);
        prop_assert!(world.roster.is_over());
        prop_assert_eq!(world.ends[&KEEPER].code, 0);
        prop_assert!(world.hosts.is_empty(), "hosts that were told nothing");
        let sizes = world.generations.iter().all(|(hosts, _)| (2..=4).contains(&hosts.len()));
        prop_assert!(sizes);
    }
}
