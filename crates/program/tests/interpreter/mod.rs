//! Runs the programs of all ranks on numbers that stand for tensors, in any order that lanes and
//! dependencies allow.
//!
//! The interpreter shares nothing with the checker. An instruction that does not find its operands
//! is an error, and so are ranks that wait for each other for ever. The result is the weights. Two
//! programs are equivalent if no order tells them apart.

use trainyard_program::{Action, Axis, BackwardPart, Extent, Fresh, Lane, MemoryKind, Phase, Program, State, Tier};

/// The rule by which the next instruction is chosen among those that can run.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// At random, with this seed.
    Random(u64),
    /// Instructions of this lane first.
    Eager(Lane),
    /// Instructions of this lane last.
    Lazy(Lane),
}

/// The state of each rank after a step: its units' state, the snapshot, anything left over, and
/// last the norm and, per unit, the weights of its own part.
pub type Outcome = Vec<Vec<u64>>;

/// The parts of a unit's flat buffer that are present.
type Parts = Vec<Option<u64>>;

#[derive(Clone)]
struct Buffer {
    micro_batch: u32,
    count: u32,
    parts: Vec<u64>,
}

#[derive(Clone)]
struct UnitState {
    parameters: Option<Parts>,
    parameters_in_tier: Parts,
    gathered: Option<Parts>,
    /// By chunk.
    masters: Vec<Option<Parts>>,
    masters_in_tier: Vec<Parts>,
    /// By chunk, where the update runs on the host: the gradient that was fetched, and the copy
    /// that the update wrote.
    on_host: Vec<OnHost>,
    fresh: Vec<Buffer>,
    sum: Option<Vec<u64>>,
    /// Where gradients lie in a tier: a buffer that is not reduced, or a sum. Then, by chunk, the
    /// gradients that came with the optimizer state.
    sum_in_tier: Option<Buffer>,
    with_state: Vec<Option<Vec<u64>>>,
}

#[derive(Clone, Default)]
struct OnHost {
    gradient: Option<Vec<u64>>,
    copy: Option<Parts>,
}

#[derive(Clone)]
struct Rank {
    loaded: u32,
    targets: Option<u64>,
    units: Vec<UnitState>,
    /// By unit and micro-batch: the activations that forward kept, those in the tier, the output,
    /// and the gradient of the output.
    kept: Vec<Option<u64>>,
    away: Vec<Option<u64>>,
    outputs: Vec<Option<u64>>,
    flows: Vec<Option<u64>>,
    /// By unit and micro-batch, the gradient that the first half of a backward leaves for the
    /// second.
    halves: Vec<Option<u64>>,
    /// By micro-batch, true once it is given back.
    freed: Vec<bool>,
    norm: Option<u64>,
    snapshot: Option<u64>,
    next: [usize; Lane::ALL.len()],
    finished: Vec<bool>,
}

pub struct World<'p> {
    programs: &'p [Program],
    lanes: Vec<Vec<Vec<usize>>>,
    ranks: Vec<Rank>,
}

type Step<T> = Result<T, String>;

fn mix(values: &[u64]) -> u64 {
    values.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, value| {
        let mixed = (hash ^ value).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ (mixed >> 29)
    })
}

fn there<T: Clone>(value: &Option<T>, what: &str) -> Step<T> {
    value.clone().ok_or_else(|| format!("{what} is not there"))
}

fn whole(parts: &Option<Parts>, what: &str) -> Step<u64> {
    let parts: Option<Vec<u64>> = there(parts, what)?.into_iter().collect();
    Ok(mix(&there(&parts, what)?))
}

fn updates_on_host(program: &Program) -> bool {
    program.offload.optimizer == Some(Tier::Host)
}

/// Chunks of a unit that are equal are given as one number, so that the number of chunks does not
/// matter.
fn one_of_all(chunks: Vec<u64>) -> u64 {
    if chunks.iter().all(|chunk| *chunk == chunks[0]) { chunks[0] } else { mix(&chunks) }
}

/// Runs a step.
pub fn run(programs: &[Program], order: Order) -> Step<Outcome> {
    let mut world = World::new(programs);
    let mut random = match order {
        Order::Random(seed) => mix(&[seed]) | 1,
        _ => 1,
    };
    loop {
        let mut ready = world.ready();
        if ready.is_empty() {
            break;
        }
        random = mix(&[random]);
        let preferred: Vec<_> = match order {
            Order::Random(_) => Vec::new(),
            Order::Eager(lane) => ready.iter().filter(|(l, _)| *l == lane).cloned().collect(),
            Order::Lazy(lane) => ready.iter().filter(|(l, _)| *l != lane).cloned().collect(),
        };
        if !preferred.is_empty() {
            ready = preferred;
        }
        let (_, meeting) = ready.swap_remove(random as usize % ready.len());
        world.run(&meeting)?;
    }
    world.outcome()
}

impl<'p> World<'p> {
    fn new(programs: &'p [Program]) -> World<'p> {
        let lanes = |p: &Program| Lane::ALL.map(|lane| p.on_lane(lane).collect::<Vec<_>>()).to_vec();
        World { programs, lanes: programs.iter().map(lanes).collect(), ranks: programs.iter().map(Rank::new).collect() }
    }

    fn shards(&self) -> usize {
        self.programs[0].mesh.shard_degree() as usize
    }

    fn own(&self, rank: usize) -> usize {
        self.programs[0].mesh.group(rank as u32, Axis::Shard).index as usize
    }

    /// The instruction that a lane stands at, if all of its dependencies have finished.
    fn at(&self, rank: usize, lane: usize) -> Option<usize> {
        let number = *self.lanes[rank][lane].get(self.ranks[rank].next[lane])?;
        let after = &self.programs[rank].instructions[number].after;
        after.iter().all(|on| self.ranks[rank].finished[*on as usize]).then_some(number)
    }

    /// Every instruction, or meeting of instructions, that can run.
    fn ready(&self) -> Vec<(Lane, Vec<(usize, usize)>)> {
        let mut ready = Vec::new();
        for rank in 0..self.ranks.len() {
            for (place, lane) in Lane::ALL.into_iter().enumerate() {
                let Some(number) = self.at(rank, place) else { continue };
                let action = self.programs[rank].instructions[number].action;
                if let Action::Send { to, .. } = action {
                    ready.extend(self.taker(rank, to as usize).map(|taker| (lane, vec![(rank, number), taker])));
                    continue;
                }
                let members = self.members(rank, action);
                if members[0] as usize != rank {
                    continue;
                }
                let there: Option<Vec<_>> =
                    members.iter().map(|m| Some((*m as usize, self.at(*m as usize, place)?))).collect();
                let Some(meeting) = there else { continue };
                let same = |(r, n): &(usize, usize)| self.programs[*r].instructions[*n].action == action;
                if meeting.iter().all(same) {
                    ready.push((lane, meeting));
                }
            }
        }
        ready
    }

    /// The receive that rank `to` stands at, if it is one of the next message from `rank`.
    fn taker(&self, rank: usize, to: usize) -> Option<(usize, usize)> {
        let number = self.ranks.get(to).and_then(|_| self.at(to, Lane::Receive as usize))?;
        let action = self.programs[to].instructions[number].action;
        matches!(action, Action::Recv { from, .. } if from as usize == rank).then_some((to, number))
    }

    fn members(&self, rank: usize, action: Action) -> Vec<u32> {
        let (mesh, rank) = (&self.programs[0].mesh, rank as u32);
        match action {
            Action::Gather { over, .. } if over > 0 && mesh.shard_degree().is_multiple_of(over) => {
                mesh.neighbours(rank, Axis::Shard, over).ranks
            }
            Action::Count { axis } | Action::Reduce { axis, .. } | Action::Outer { axis, .. } => {
                mesh.group(rank, axis).ranks
            }
            Action::Clip { .. } => self.programs[rank as usize].ranks_of_norm(),
            Action::Tie { unit, .. } => {
                let holders = self.programs[rank as usize].holders(unit);
                holders.iter().map(|stage| stage * mesh.stage_ranks() + rank % mesh.stage_ranks()).collect()
            }
            // Receives are run with the send.
            Action::Recv { from, .. } => vec![from],
            _ => vec![rank],
        }
    }

    fn run(&mut self, meeting: &[(usize, usize)]) -> Step<()> {
        let (rank, number) = meeting[0];
        let action = self.programs[rank].instructions[number].action;
        let ranks: Vec<usize> = meeting.iter().map(|(rank, _)| *rank).collect();
        match action {
            Action::Count { .. } => self.count(&ranks)?,
            Action::Gather { unit, over } => self.gather(&ranks, unit as usize, over as usize)?,
            Action::Reduce { unit, accumulate, .. } => self.reduce(&ranks, unit as usize, accumulate)?,
            Action::Outer { unit, .. } => self.outer(&ranks, unit as usize)?,
            Action::Clip { .. } => self.clip(&ranks)?,
            Action::Tie { unit, .. } => self.tie(&ranks, unit as usize)?,
            Action::Send { .. } => self.message(meeting)?,
            _ => self.alone(rank, number, action)?,
        }
        for (rank, number) in meeting {
            let lane = self.programs[*rank].instructions[*number].action.lane() as usize;
            self.ranks[*rank].next[lane] += 1;
            self.ranks[*rank].finished[*number] = true;
        }
        Ok(())
    }

    fn count(&mut self, ranks: &[usize]) -> Step<()> {
        let all = self.programs[0].micro_batches;
        let targets: u64 = ranks.iter().map(|rank| u64::from(self.ranks[*rank].loaded)).sum();
        for rank in ranks {
            if self.ranks[*rank].loaded < all {
                return Err("counts before all is loaded".to_owned());
            }
            self.ranks[*rank].targets = Some(targets);
        }
        Ok(())
    }

    fn gather(&mut self, ranks: &[usize], unit: usize, over: usize) -> Step<()> {
        let shards = self.shards();
        let resident = self.programs[0].placement.parameters == Extent::Full;
        let mut parts: Parts = vec![None; shards];
        for (place, rank) in ranks.iter().enumerate() {
            let own = self.own(*rank);
            let state = &self.ranks[*rank].units[unit];
            if resident || over == shards {
                parts[own] = there(&state.parameters, "the shard")?[own];
            } else {
                let kept = there(&state.gathered, "the part that stayed")?;
                let each = shards / over;
                parts[place * each..(place + 1) * each].copy_from_slice(&kept[place * each..(place + 1) * each]);
            }
        }
        for rank in ranks {
            let state = &mut self.ranks[*rank].units[unit];
            if resident { state.parameters = Some(parts.clone()) } else { state.gathered = Some(parts.clone()) }
        }
        Ok(())
    }

    fn reduce(&mut self, ranks: &[usize], unit: usize, accumulate: bool) -> Step<()> {
        let mut total = vec![0u64; self.shards()];
        // Of separate buffers, the oldest is reduced while the next is filled.
        let apart = self.programs[0].placement.fresh_gradients == Fresh::Transient && !self.programs[0].folded;
        for rank in ranks {
            let buffer = match &self.ranks[*rank].units[unit].fresh[..] {
                [buffer] => buffer,
                [buffer, ..] if apart => buffer,
                _ => return Err("there is not one gradient to reduce".to_owned()),
            };
            for (total, part) in total.iter_mut().zip(&buffer.parts) {
                *total = total.wrapping_add(*part);
            }
        }
        for rank in ranks {
            let state = &mut self.ranks[*rank].units[unit];
            state.fresh.remove(0);
            let before = match accumulate {
                true => there(&state.sum, "the sum")?,
                false => vec![0; total.len()],
            };
            state.sum = Some(before.iter().zip(&total).map(|(a, b)| a.wrapping_add(*b)).collect());
        }
        Ok(())
    }

    /// Moves a value from one rank to another. A message has no name: the receiver takes it for
    /// what it expects.
    fn message(&mut self, meeting: &[(usize, usize)]) -> Step<()> {
        let program = &self.programs[0];
        let value = |action: Action| {
            let (unit, micro_batch) = (action.unit().unwrap_or(0), action.micro_batch().unwrap_or(0));
            let (Action::Send { phase, .. } | Action::Recv { phase, .. }) = action else { return (false, 0) };
            (phase == Phase::Forward, Rank::place(program, unit, micro_batch))
        };
        let [sent, received] = [0, 1].map(|end| {
            let (rank, number) = meeting[end];
            value(self.programs[rank].instructions[number].action)
        });
        let sender = &self.ranks[meeting[0].0];
        let message = there(&if sent.0 { &sender.outputs } else { &sender.flows }[sent.1], "what is to be sent")?;
        let receiver = &mut self.ranks[meeting[1].0];
        let values = if received.0 { &mut receiver.outputs } else { &mut receiver.flows };
        values[received.1] = Some(message);
        Ok(())
    }

    /// Sums the gradients of a unit over the stages that hold it.
    fn tie(&mut self, ranks: &[usize], unit: usize) -> Step<()> {
        let mut total = vec![0u64; self.shards()];
        for rank in ranks {
            let state = &self.ranks[*rank].units[unit];
            let parts = match (&state.sum, &state.fresh[..]) {
                (Some(sum), _) => sum,
                (None, [buffer]) => &buffer.parts,
                _ => return Err("there is not one gradient to sum over stages".to_owned()),
            };
            total.iter_mut().zip(parts).for_each(|(total, part)| *total = total.wrapping_add(*part));
        }
        for rank in ranks {
            let state = &mut self.ranks[*rank].units[unit];
            match (&mut state.sum, &mut state.fresh[..]) {
                (Some(sum), _) => sum.clone_from(&total),
                (None, [buffer]) => buffer.parts.clone_from(&total),
                _ => return Err("there is not one gradient to sum over stages".to_owned()),
            }
        }
        Ok(())
    }

    /// Gives all replicas one value for each part of a unit's masters, which depends on all of
    /// theirs.
    fn outer(&mut self, ranks: &[usize], unit: usize) -> Step<()> {
        let apart: Vec<Parts> = ranks
            .iter()
            .map(|rank| there(&self.ranks[*rank].units[unit].masters[0], "the masters"))
            .collect::<Step<_>>()?;
        let one = |part: usize| -> Option<u64> {
            let of = apart.iter().map(|parts| parts[part]).collect::<Option<Vec<u64>>>()?;
            Some(mix(&of))
        };
        let masters: Parts = (0..self.shards()).map(one).collect();
        for rank in ranks {
            let state = &mut self.ranks[*rank].units[unit];
            let mut copy = there(&state.parameters, "the copy to write to")?;
            for (copy, master) in copy.iter_mut().zip(&masters).filter(|(_, master)| master.is_some()) {
                *copy = master.map(|master| mix(&[master, 7]));
            }
            (state.masters[0], state.parameters) = (Some(masters.clone()), Some(copy));
        }
        Ok(())
    }

    fn clip(&mut self, ranks: &[usize]) -> Step<()> {
        let many = self.programs[0].mesh.degree(self.programs[0].kind.gradient_axis()) > 1;
        let mut norm = 0u64;
        for rank in ranks {
            let own = self.own(*rank);
            let program = &self.programs[*rank];
            for number in program.trains() {
                let unit = &mut self.ranks[*rank].units[number as usize];
                // A gradient that stages share counts once.
                let counts = u64::from(program.runs(number));
                if self.programs[0].offload.gradients.is_some() {
                    if !unit.fresh.is_empty() || unit.sum.is_some() {
                        return Err("a gradient is not in its tier".to_owned());
                    }
                    let sum = there(&unit.sum_in_tier, "the gradient in its tier")?.parts;
                    norm = norm.wrapping_add(counts * mix(&[u64::from(number), sum[own]]));
                    continue;
                }
                if !many {
                    let [buffer] = &unit.fresh[..] else { return Err("there is not one gradient".to_owned()) };
                    unit.sum = Some(buffer.parts.clone());
                }
                norm = norm.wrapping_add(
                    counts.wrapping_mul(mix(&[u64::from(number), there(&unit.sum, "the gradient")?[own]])),
                );
            }
        }
        ranks.iter().for_each(|rank| self.ranks[*rank].norm = Some(norm));
        Ok(())
    }

    fn alone(&mut self, rank: usize, number: usize, action: Action) -> Step<()> {
        let programs: &[Program] = self.programs;
        let program = &programs[rank];
        let (shards, own) = (self.shards(), self.own(rank));
        let held = |extent: Extent| if extent == Extent::Full { 0..shards } else { own..own + 1 };
        let state = &mut self.ranks[rank];
        match action {
            Action::Load { .. } => state.loaded += 1,
            Action::Release { unit, keep } => {
                let unit = &mut state.units[unit as usize];
                let parts = there(&unit.gathered, "the gathered copy")?;
                let keep = keep as usize;
                unit.gathered = (keep != shards).then(|| {
                    let (place, each) = (own % keep, shards / keep);
                    let stays = |part: usize| part / each == place;
                    parts.iter().enumerate().map(|(part, value)| value.filter(|_| stays(part))).collect()
                });
            }
            Action::Forward { unit, micro_batch, .. } => state.forward(program, rank, number, unit, micro_batch)?,
            Action::Backward { unit, micro_batch, part, .. } => {
                state.backward(program, number, unit, micro_batch, part)?;
            }
            Action::Fold { unit, .. } => {
                let buffers = &mut state.units[unit as usize].fresh;
                while let [.., a, b] = &buffers[..] {
                    if a.count != b.count {
                        break;
                    }
                    let last = buffers.pop().expect("two were there");
                    let earlier = buffers.last_mut().expect("one is left");
                    earlier.count += last.count;
                    earlier.parts.iter_mut().zip(last.parts).for_each(|(a, b)| *a = a.wrapping_add(b));
                }
            }
            Action::Update { unit, chunk } => {
                let norm = there(&state.norm, "the norm")?;
                let (unit, chunk) = (&mut state.units[unit as usize], chunk as usize);
                let on_host = updates_on_host(program);
                let sum = match (on_host, program.offload.gradients) {
                    (true, _) => unit.on_host[chunk].gradient.take(),
                    (_, Some(_)) => unit.with_state[chunk].take(),
                    _ => unit.sum.clone(),
                };
                let sum = there(&sum, "the gradient")?;
                let mut masters = there(&unit.masters[chunk], "the optimizer state")?;
                let writes = program.instructions[number].effects.iter().any(|effect| effect.bytes > 0);
                let mut copy = match writes || on_host {
                    true => vec![None; shards],
                    false => there(&unit.parameters, "the copy to write to")?,
                };
                for part in held(program.placement.masters) {
                    let new = mix(&[there(&masters[part], "the master")?, sum[part], norm]);
                    (masters[part], copy[part]) = (Some(new), Some(mix(&[new, 7])));
                }
                unit.masters[chunk] = Some(masters);
                if on_host {
                    unit.on_host[chunk].copy = Some(copy);
                    if writes {
                        unit.parameters = Some(vec![None; shards]);
                    }
                } else {
                    unit.parameters = Some(copy);
                }
            }
            Action::Fetch { unit, state: what } => state.fetch(program, unit, what)?,
            Action::Evict { unit, state: what, write } => state.evict(program, unit, what, write)?,
            Action::Snapshot => {
                let masters = |unit: &UnitState| {
                    let chunks = unit.masters.iter().zip(&unit.masters_in_tier);
                    let chunk = |(here, in_tier): (&Option<Parts>, &Parts)| {
                        let parts = here.as_ref().unwrap_or(in_tier);
                        mix(&held(program.placement.masters).map(|part| parts[part].unwrap_or(0)).collect::<Vec<_>>())
                    };
                    one_of_all(chunks.map(chunk).collect())
                };
                state.snapshot = Some(mix(&state.units.iter().map(masters).collect::<Vec<_>>()));
            }
            other => return Err(format!("{} is not for programs without collectives inside units", other.name())),
        }
        Ok(())
    }

    fn outcome(self) -> Step<Outcome> {
        let done = |(rank, program): (&Rank, &Program)| {
            rank.finished.len() == program.instructions.len() && rank.finished.iter().all(|f| *f)
        };
        if !self.ranks.iter().zip(self.programs).all(done) {
            return Err("ranks wait for each other for ever".to_owned());
        }
        let number = |value: &Option<u64>| value.map_or(1, |value| mix(&[value]));
        let parts = |parts: &Parts| mix(&parts.iter().map(number).collect::<Vec<_>>());
        let maybe = |value: &Option<Parts>| value.as_ref().map_or(2, parts);
        let unit = |unit: &UnitState| {
            let [a, b] = [&unit.parameters, &unit.gathered].map(maybe);
            let here = one_of_all(unit.masters.iter().map(maybe).collect());
            let in_tier = one_of_all(unit.masters_in_tier.iter().map(parts).collect());
            mix(&[a, b, here, parts(&unit.parameters_in_tier), in_tier])
        };
        let rank = |(own, rank): (usize, &Rank)| {
            let own_part =
                |unit: &UnitState| number(&unit.parameters.as_ref().unwrap_or(&unit.parameters_in_tier)[own]);
            let left = |values: &Vec<Option<u64>>| values.iter().flatten().count() as u64;
            let mut all: Vec<u64> = rank.units.iter().map(unit).collect();
            let weights: Vec<u64> = rank.units.iter().map(own_part).collect();
            all.extend([number(&rank.snapshot), left(&rank.kept), number(&rank.norm)]);
            all.extend(weights);
            all
        };
        let own: Vec<usize> = (0..self.ranks.len()).map(|rank| self.own(rank)).collect();
        Ok(own.into_iter().zip(&self.ranks).map(rank).collect())
    }
}

impl Rank {
    fn new(program: &Program) -> Rank {
        let (mesh, place, offload) = (&program.mesh, &program.placement, &program.offload);
        let shards = mesh.shard_degree() as usize;
        let own = mesh.group(program.rank, Axis::Shard).index as usize;
        let unit = |unit: usize| {
            let chunks = program.chunks_of(unit as u32) as usize;
            let parts = |extent: Extent, salt: u64| -> Parts {
                let has = |part: usize| extent == Extent::Full || part == own;
                (0..shards).map(|part| has(part).then(|| mix(&[unit as u64, part as u64, salt]))).collect()
            };
            let (parameters, masters) = (parts(place.parameters, 1), parts(place.masters, 2));
            UnitState {
                parameters: (!program.lies_in_a_tier(unit as u32)).then(|| parameters.clone()),
                parameters_in_tier: parameters,
                gathered: None,
                masters: vec![offload.optimizer.is_none().then(|| masters.clone()); chunks],
                masters_in_tier: vec![masters; chunks],
                on_host: vec![OnHost::default(); chunks],
                fresh: Vec::new(),
                sum: None,
                sum_in_tier: None,
                with_state: vec![None; chunks],
            }
        };
        let places = program.units.len() * program.micro_batches as usize;
        Rank {
            loaded: 0,
            targets: None,
            units: (0..program.units.len()).map(unit).collect(),
            kept: vec![None; places],
            away: vec![None; places],
            outputs: vec![None; places],
            flows: vec![None; places],
            halves: vec![None; places],
            freed: vec![false; program.micro_batches as usize],
            norm: None,
            snapshot: None,
            next: [0; Lane::ALL.len()],
            finished: vec![false; program.instructions.len()],
        }
    }

    fn reads(&self, program: &Program, unit: u32) -> Step<u64> {
        let mut values = Vec::new();
        for unit in program.reads(unit) {
            let state = &self.units[unit as usize];
            values.push(match program.placement.parameters {
                Extent::Full => whole(&state.parameters, "a parameter")?,
                Extent::Shard => whole(&state.gathered, "a gathered parameter")?,
            });
        }
        Ok(mix(&values))
    }

    fn place(program: &Program, unit: u32, micro_batch: u32) -> usize {
        (unit * program.micro_batches + micro_batch) as usize
    }

    fn forward(&mut self, program: &Program, rank: usize, number: usize, unit: u32, micro_batch: u32) -> Step<()> {
        let input = match unit.checked_sub(1) {
            Some(below) => there(&self.outputs[Self::place(program, below, micro_batch)], "the input")?,
            // Ranks of one pipeline have the same batches.
            None => mix(&[rank as u64 % u64::from(program.mesh.stage_ranks()), u64::from(micro_batch)]),
        };
        self.reads_batch(program, number, micro_batch)?;
        let targets = there(&self.targets, "the count")?;
        let output = mix(&[u64::from(unit), self.reads(program, unit)?, input, targets]);
        let place = Self::place(program, unit, micro_batch);
        (self.outputs[place], self.kept[place]) = (Some(output), Some(output));
        if unit == program.loss_unit() && program.fused_loss {
            self.add_gradients(program, number, output);
        }
        Ok(())
    }

    fn reads_batch(&mut self, program: &Program, number: usize, micro_batch: u32) -> Step<()> {
        let freed = &mut self.freed[micro_batch as usize];
        if *freed || micro_batch >= self.loaded {
            return Err("the batch is not there".to_owned());
        }
        *freed = program.frees_batch(number);
        Ok(())
    }

    fn backward(
        &mut self,
        program: &Program,
        number: usize,
        unit: u32,
        micro_batch: u32,
        part: BackwardPart,
    ) -> Step<()> {
        self.reads_batch(program, number, micro_batch)?;
        let place = Self::place(program, unit, micro_batch);
        if part == BackwardPart::Weights {
            let gradient = there(&self.halves[place].take(), "the first half")?;
            return self.add_backward(program, number, place, gradient);
        }
        let above = match unit == program.loss_unit() {
            true => there(&self.outputs[place], "the loss")?,
            false => there(&self.flows[place], "the gradient from above")?,
        };
        let kept = there(&self.kept[place], "what forward kept")?;
        let gradient = mix(&[above, kept, self.reads(program, unit)?]);
        if let Some(below) = unit.checked_sub(1) {
            self.flows[Self::place(program, below, micro_batch)] = Some(gradient);
        }
        if part == BackwardPart::Input {
            self.halves[place] = Some(gradient);
            return Ok(());
        }
        self.add_backward(program, number, place, gradient)
    }

    /// Adds what a backward gives for weights. The loss's backward adds what its forward has not.
    fn add_backward(&mut self, program: &Program, number: usize, place: usize, gradient: u64) -> Step<()> {
        let output = there(&self.kept[place].take(), "what forward kept")?;
        if program.instructions[number].action.unit() == Some(program.loss_unit()) && !program.fused_loss {
            self.add_gradients(program, number, output);
        }
        self.add_gradients(program, number, gradient);
        Ok(())
    }

    /// A pass with an effect that takes memory for gradients begins buffers of its own.
    fn add_gradients(&mut self, program: &Program, number: usize, value: u64) {
        let instruction = &program.instructions[number];
        let takes = |effect: &trainyard_program::Effect| effect.kind == MemoryKind::Gradients && effect.bytes > 0;
        let begins = instruction.effects.iter().any(takes);
        let (unit, micro_batch) =
            (instruction.action.unit().unwrap_or(0), instruction.action.micro_batch().unwrap_or(0));
        let shards = program.mesh.shard_degree() as usize;
        for unit in program.reads(unit) {
            let state = &mut self.units[unit as usize];
            let apart = begins && state.fresh.last().is_some_and(|last| last.micro_batch != micro_batch);
            if state.fresh.is_empty() || apart {
                // In place, the earlier sum is overwritten.
                if program.placement.fresh_gradients == Fresh::InPlace {
                    state.sum = None;
                }
                state.fresh.push(Buffer { micro_batch, count: 1, parts: vec![0; shards] });
            }
            let buffer = state.fresh.last_mut().expect("one was pushed");
            for (part, sum) in buffer.parts.iter_mut().enumerate() {
                *sum = sum.wrapping_add(mix(&[value, u64::from(unit), part as u64]));
            }
        }
    }

    fn fetch(&mut self, program: &Program, unit: u32, what: State) -> Step<()> {
        let state = &mut self.units[unit as usize];
        match what {
            State::Parameters => state.parameters = Some(state.parameters_in_tier.clone()),
            State::Optimizer { chunk } => {
                let chunk = chunk as usize;
                state.masters[chunk] = Some(state.masters_in_tier[chunk].clone());
                let in_tier = || there(&state.sum_in_tier, "the gradient in its tier").map(|buffer| buffer.parts);
                match (updates_on_host(program), program.offload.gradients) {
                    (true, Some(_)) => state.on_host[chunk].gradient = Some(in_tier()?),
                    (true, None) => state.on_host[chunk].gradient = Some(there(&state.sum, "the gradient")?),
                    (false, Some(_)) => state.with_state[chunk] = Some(in_tier()?),
                    (false, None) => {}
                }
            }
            State::Gradients => {
                let buffer = there(&state.sum_in_tier.take(), "the gradient in its tier")?;
                if !state.fresh.is_empty() && program.placement.fresh_gradients == Fresh::InPlace || state.sum.is_some()
                {
                    return Err("a gradient comes onto another".to_owned());
                }
                match program.placement.fresh_gradients {
                    Fresh::InPlace => state.fresh.push(buffer),
                    Fresh::Transient => state.sum = Some(buffer.parts),
                }
            }
            State::Activations { micro_batch } => {
                let place = Self::place(program, unit, micro_batch);
                self.kept[place] = self.away[place].take();
            }
        }
        Ok(())
    }

    fn evict(&mut self, program: &Program, unit: u32, what: State, write: bool) -> Step<()> {
        let state = &mut self.units[unit as usize];
        match what {
            State::Parameters => {
                let parts = there(&state.parameters.take(), "what is to go")?;
                if write {
                    state.parameters_in_tier = parts;
                }
            }
            State::Optimizer { chunk } => {
                let chunk = chunk as usize;
                let parts = there(&state.masters[chunk].take(), "what is to go")?;
                if write {
                    state.masters_in_tier[chunk] = parts;
                }
                if updates_on_host(program) {
                    let copy = there(&state.on_host[chunk].copy.take(), "the copy that is to go")?;
                    let parameters = state.parameters.as_mut().ok_or("the copy to write to is not there")?;
                    let new = copy.into_iter().enumerate().filter(|(_, value)| value.is_some());
                    new.for_each(|(part, value)| parameters[part] = value);
                }
            }
            State::Gradients => {
                let many = program.mesh.degree(Axis::Data) > 1;
                let sum = state.sum.take().map(|parts| Buffer { micro_batch: 0, count: 1, parts });
                let buffer = match program.placement.fresh_gradients {
                    Fresh::InPlace if sum.is_none() && state.fresh.len() == 1 => state.fresh.pop(),
                    Fresh::InPlace if !many => None,
                    _ => sum,
                };
                state.sum_in_tier = Some(there(&buffer, "the gradient that is to go")?);
            }
            State::Activations { micro_batch } => {
                let place = Self::place(program, unit, micro_batch);
                self.away[place] = Some(there(&self.kept[place].take(), "what is to go")?);
            }
        }
        Ok(())
    }
}
