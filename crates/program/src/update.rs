//! The end of a step: the sum over stages of shared gradients, the norm, and the updates unit by
//! unit.

use crate::lower::Lowering;
use crate::{
    Action, Axis, Codec, Effect, Encoding, Instruction, MemoryKind, ParameterServer, PowerSgd, State, StepKind, Tier,
};

/// Words of 8 bytes that a worker sends with a commit beside its losses: four of the request, two
/// numbers of targets, the learning rate, the limit of the norm, and the number of updates.
const COMMIT_NUMBERS: u32 = 9;

impl Lowering<'_> {
    /// Emits the norm and then, unit by unit: fetch the optimizer state, update, pass the result on
    /// to ranks and stages that hold it too, evict. Gradients are complete once their norm is
    /// known. An update on the host therefore fetches them after the norm, unless they are on the
    /// host already.
    pub(crate) fn update(&mut self) {
        if let Some(server) = self.strategy.server {
            return self.update_by_server(server);
        }
        let last_pass = self.ran.last().map(|ran| ran.last);
        let tied = self.tie();
        let chunks = |unit: &u32| (0..self.sizes.chunks(*unit)).map(|chunk| (*unit, chunk)).collect::<Vec<_>>();
        self.pieces = self.trains.iter().flat_map(chunks).collect();
        let fetches_gradients = self.updates_on_host() && self.strategy.offload.gradients.is_none();
        if !fetches_gradients {
            self.fetch_state(0, last_pass);
        }
        let norm = self.sizes.norm(&self.trains);
        let clip = Instruction::new(Action::Clip { axes: self.program.axes_of_norm() })
            .moving(if self.sizes.exchanges_norm() { norm } else { 0 });
        let sums = [self.reduces.last().copied(), self.sums_evicted.last().copied(), self.tied, tied];
        let clip = self.builder.push(clip, sums.into_iter().flatten());
        if fetches_gradients {
            self.fetch_state(0, Some(clip));
        }
        let mut updated = None;
        for at in 0..self.pieces.len() {
            // The next piece of state is fetched while this one is updated. By then the previous
            // one has been evicted.
            self.fetch_state(at + 1, None);
            updated = Some(self.update_piece(self.pieces[at]));
        }
        if self.strategy.snapshot {
            self.builder.push(Instruction::new(Action::Snapshot), updated.into_iter().chain(self.outer));
        }
    }

    /// Emits the commit of the step's pushes and then, unit by unit, the pull of parameters that
    /// are new enough for the next step. A snapshot reads the servers' state, so all updates must
    /// have been made by then.
    fn update_by_server(&mut self, server: ParameterServer) {
        // A worker's losses go to each server, beside the numbers of `Commit` in the engine.
        let commit = 8 * u64::from(COMMIT_NUMBERS + self.strategy.accumulation_steps) * u64::from(server.servers);
        let commit = Instruction::new(Action::Commit).moving(commit);
        let last_pass = self.ran.last().map(|ran| ran.last);
        let commit = self.builder.push(commit, self.reduces.last().copied().into_iter().chain(last_pass));
        let is_drained = self.strategy.kind == StepKind::Drained || self.strategy.snapshot;
        let staleness = if is_drained { 0 } else { server.staleness };
        let mut pulled = commit;
        for unit in self.trains.clone() {
            let message = self.sizes.trained(unit, self.strategy.bytes.parameter);
            pulled = self.builder.push(Instruction::new(Action::Pull { unit, staleness }).moving(message), [commit]);
        }
        if self.strategy.snapshot {
            self.builder.push(Instruction::new(Action::Snapshot), [pulled]);
        }
    }

    /// Bytes that a parameter server on this rank holds for messages: the gradients of every worker
    /// for as many steps as may lack an update, and a copy of the largest unit for each other
    /// worker that pulls.
    fn server_buffers(&self, of_server: impl Fn(u64) -> u64) -> u64 {
        let Some(server) = self.strategy.server else { return 0 };
        let workers = u64::from(self.sizes.mesh.dp_shard);
        let held = |width| self.trains.iter().map(move |unit| (*unit, width));
        let part = |(unit, width): (u32, u32)| of_server(self.sizes.held(unit, self.sizes.placement.masters, width));
        let gradients: u64 = held(4).map(part).sum();
        let largest = held(self.strategy.bytes.parameter).map(part).max().unwrap_or(0);
        u64::from(server.staleness + 1) * workers * gradients + (workers - 1) * largest
    }

    /// True if the update runs on the host, where the optimizer state lies.
    fn updates_on_host(&self) -> bool {
        self.strategy.offload.optimizer == Some(Tier::Host)
    }

    /// True if the copy of `unit` that forward reads is separate from the masters, and has nothing
    /// frozen or keeps that encoded in its tier. An update then writes it without reading it.
    fn writes_copy(&self, unit: u32) -> bool {
        let separate = self.strategy.bytes.master != 0 || self.updates_on_host();
        let encoded = matches!(self.strategy.offload.parameters, Some(Tier::Encoded(_)));
        separate && (encoded || self.sizes.model.units[unit as usize].frozen_elements == 0)
    }

    /// Sums the gradients of units that several stages hold, because each stage contributes to
    /// them.
    fn tie(&mut self) -> Option<u32> {
        let mut tied = None;
        for unit in self.trains.clone() {
            if self.program.is_shared_between_stages(unit) {
                let bytes = self.sizes.held(unit, self.sizes.placement.gradients, self.strategy.bytes.reduce);
                let tie = Instruction::new(Action::Tie { unit, axis: Axis::Pipeline }).moving(bytes);
                tied = Some(self.builder.push(tie, self.summed[unit as usize]));
            }
        }
        tied
    }

    /// Fetches what the `at`-th update needs and is not on the device.
    fn fetch_state(&mut self, at: usize, before: Option<u32>) {
        let Some((unit, chunk)) = self.pieces.get(at).copied() else { return };
        // An update reads a copy that is its own master, and one of which a part is frozen; another
        // is written anew.
        if chunk == 0 {
            let reads = self.program.lies_in_a_tier(unit) && !self.writes_copy(unit);
            // The copies before it may have been written without a fetch that waited for the last
            // pass.
            let before = before.or_else(|| {
                let is_partly_frozen = self.sizes.model.units[unit as usize].frozen_elements > 0;
                self.ran.last().map(|ran| ran.last).filter(|_| is_partly_frozen)
            });
            self.present[unit as usize] = reads.then(|| self.fetch_parameters(unit, before));
        }
        let fetch = Instruction::new(Action::Fetch { unit, state: State::Optimizer { chunk } });
        let fetch = match self.strategy.offload.optimizer {
            None => return,
            // The gradients are on the host already.
            Some(Tier::Host) if self.strategy.offload.gradients.is_some() => fetch,
            Some(Tier::Host) => fetch.moving(self.sizes.of_chunk(unit, chunk, self.strategy.bytes.gradient)),
            Some(Tier::Disk | Tier::Encoded(_)) => {
                let [masters, optimizer] = self.sizes.optimizer_chunk(unit, chunk);
                let gradients = self.gradients_with(unit, chunk);
                let fetch = fetch.moving(masters + optimizer + gradients).taking(MemoryKind::Masters, masters);
                fetch.taking(MemoryKind::Optimizer, optimizer).taking(MemoryKind::Gradients, gradients)
            }
        };
        self.fetched.push(self.builder.push(fetch, before));
    }

    /// Bytes of gradients that come from a disk together with a chunk of optimizer state.
    fn gradients_with(&self, unit: u32, chunk: u32) -> u64 {
        let width = if self.strategy.offload.gradients.is_some() { self.strategy.bytes.gradient } else { 0 };
        self.sizes.of_chunk(unit, chunk, width)
    }

    fn update_piece(&mut self, (unit, chunk): (u32, u32)) -> u32 {
        let offload = self.strategy.offload;
        let mut instruction = Instruction::new(Action::Update { unit, chunk });
        let mut needs = vec![self.present[unit as usize], self.dropped[unit as usize], self.averaged[unit as usize]];
        if offload.optimizer.is_some() {
            needs.push(Some(self.fetched[self.updated]));
        }
        self.updated += 1;
        if self.program.lies_in_a_tier(unit) && self.writes_copy(unit) && chunk == 0 {
            instruction = instruction.taking(MemoryKind::Parameters, self.sizes.parameters(unit));
            needs.push(self.room(&self.copies_evicted));
        }
        let update = self.builder.push(instruction, needs.into_iter().flatten());
        let evict = Instruction::new(Action::Evict { unit, state: State::Optimizer { chunk }, write: true });
        let mut written = update;
        match offload.optimizer {
            None => {}
            Some(Tier::Host) => {
                let copy = self.sizes.of_chunk(unit, chunk, self.strategy.bytes.parameter);
                written = self.builder.push(evict.moving(copy), [update]);
            }
            Some(Tier::Disk | Tier::Encoded(_)) => {
                let [masters, optimizer] = self.sizes.optimizer_chunk(unit, chunk);
                let evict = evict.moving(masters + optimizer).giving_back(MemoryKind::Masters, masters);
                let evict = evict.giving_back(MemoryKind::Optimizer, optimizer);
                let evict = evict.giving_back(MemoryKind::Gradients, self.gradients_with(unit, chunk));
                self.builder.push(evict, [update]);
            }
        }
        if chunk + 1 == self.sizes.chunks(unit) {
            self.pass_on_update(unit, written);
        }
        update
    }

    /// Sends updated parameters to the ranks that hold a copy of them, and the copy to its tier.
    fn pass_on_update(&mut self, unit: u32, written: u32) {
        let mut written = self.outer_step(unit, written);
        if self.sizes.placement.parameters != self.sizes.placement.masters {
            let gather = Instruction::new(Action::Gather { unit, over: self.sizes.mesh.shard_degree() });
            let message = self.sizes.trained(unit, self.strategy.bytes.parameter);
            written = self.builder.push(gather.moving(message), [written]);
        }
        if self.program.lies_in_a_tier(unit) {
            let evicted = self.drop_parameters(unit, written, true);
            self.copies_evicted.push(evicted);
        }
    }

    /// Emits the outer steps that run while the step computes. They read the masters before it.
    pub(crate) fn average_beside(&mut self) {
        if !self.program.averages_beside() {
            return;
        }
        for unit in self.trains.clone().into_iter().filter(|unit| self.program.averages(*unit)).collect::<Vec<_>>() {
            let outer = self.average(unit);
            self.averaged[unit as usize] = Some(self.builder.push(outer, []));
        }
    }

    /// The outer step of a unit.
    fn average(&self, unit: u32) -> Instruction {
        let axis = Axis::Replicate;
        let changes = self.sizes.message(axis, self.sizes.held(unit, self.sizes.placement.masters, 4));
        let matrices = &self.sizes.model.units[unit as usize].matrices;
        Instruction::new(Action::Outer { unit, axis }).moving(changes).encoded(self.strategy.outer, matrices)
    }

    /// Emits the outer step of a unit whose inner update is `updated`, or its end, if the step has
    /// one. Returns the instruction that completes the masters.
    fn outer_step(&mut self, unit: u32, updated: u32) -> u32 {
        if !self.program.averages(unit) {
            return updated;
        }
        let last = match self.averaged[unit as usize] {
            Some(averaged) => self.builder.push(Instruction::new(Action::Merge { unit }), [updated, averaged]),
            None => self.builder.push(self.average(unit), [updated]),
        };
        self.outer = Some(last);
        last
    }

    /// The units that the rank holds with gradients, masters and optimizer state.
    fn with_state(&self) -> impl Iterator<Item = u32> + '_ {
        self.holds.iter().copied().filter(|unit| !self.sizes.model.units[*unit as usize].has_no_state())
    }

    /// The memory that is held from the first instruction to the last.
    pub(crate) fn resident(&self) -> Vec<Effect> {
        let offload = &self.strategy.offload;
        let sum = |of: &dyn Fn(u32) -> u64| self.with_state().map(of).sum::<u64>() as i64;
        let gradient = |unit| self.sizes.held(unit, self.sizes.placement.gradients, self.strategy.bytes.gradient);
        let copies_held = self.holds.iter().map(|unit| self.sizes.staying(*unit)).sum::<u64>() as i64;
        // Fewer servers than ranks hold the shards of several ranks each.
        let of_server = |bytes: u64| match self.strategy.server {
            Some(server) if self.program.rank >= server.servers => 0,
            Some(server) => bytes * u64::from(self.sizes.mesh.dp_shard / server.servers),
            None => bytes,
        };
        let effects = [
            (MemoryKind::Parameters, None, copies_held),
            (MemoryKind::Masters, offload.optimizer, sum(&|unit| of_server(self.sizes.optimizer(unit)[0]))),
            (MemoryKind::Gradients, offload.gradients, sum(&gradient)),
            (MemoryKind::Optimizer, offload.optimizer, sum(&|unit| of_server(self.sizes.optimizer(unit)[1]))),
        ];
        let masters = |unit| self.sizes.held(unit, self.sizes.placement.masters, 4);
        // The parameters of the last outer step and their momentum.
        let copies = 1 + i64::from(self.strategy.outer_momentum);
        let apart = if self.strategy.kind.is_apart() { copies * sum(&masters) } else { 0 };
        // Gathers come one after the other, so they share the buffer of the largest.
        let received = self.holds.iter().map(|unit| self.sizes.received(*unit)).max().unwrap_or(0);
        let buffers = self.residuals() + (self.server_buffers(of_server) + received) as i64;
        let kept = [(MemoryKind::Optimizer, None, apart), (MemoryKind::Communication, None, buffers)];
        let effects = effects.into_iter().chain(kept);
        let here = effects.filter(|(_, tier, bytes)| tier.is_none() && *bytes != 0);
        here.map(|(kind, _, bytes)| Effect { kind, bytes }).collect()
    }

    /// Bytes of the residuals of error feedback: for the rank's contribution to each sum, and for
    /// its share of each sum over replicas; and of velocities. With low-rank factors, those of Q
    /// and of the whole gradient, or of the changes that the rank holds.
    fn residuals(&self) -> i64 {
        let mesh = self.sizes.mesh;
        let (shards, replicas) = (u64::from(mesh.shard_degree()), u64::from(mesh.dp_replicate));
        let is_apart = self.strategy.kind.is_apart();
        let over_replicas = |part: u64| if replicas > 1 { part + part.div_ceil(replicas) } else { 0 };
        let of_gradient = |unit: u32, encoding: Encoding| {
            let whole = self.sizes.trained(unit, 4);
            if let Codec::PowerSgd(codec) = encoding.codec {
                let left_out = if encoding.feedback { whole } else { 0 };
                let summed = mesh.degree(self.strategy.kind.gradient_axis()) > 1;
                return if summed { self.bytes_of_q(unit, codec) + left_out } else { 0 };
            }
            if !encoding.feedback {
                return 0;
            }
            let in_group = if shards > 1 && encoding.is_over(Axis::Shard) { whole } else { 0 };
            let part = if is_apart || replicas == 1 { 0 } else { whole / shards };
            // Velocities lie beside what the rank's own contribution left out.
            let velocity = if in_group > 0 { in_group } else { part };
            in_group + over_replicas(part) + if encoding.momentum { velocity } else { 0 }
        };
        let of_outer = |unit: u32, encoding: Encoding| {
            let held = self.sizes.held(unit, self.sizes.placement.masters, 4);
            match encoding.codec {
                Codec::PowerSgd(codec) => self.bytes_of_q(unit, codec) + if encoding.feedback { held } else { 0 },
                Codec::Blocks(_) if encoding.feedback => over_replicas(held),
                Codec::Blocks(_) => 0,
            }
        };
        let of = |unit: u32| {
            let gradients = self.strategy.gradients.map_or(0, |encoding| of_gradient(unit, encoding));
            let outer = self.strategy.outer.filter(|_| is_apart);
            gradients + outer.map_or(0, |encoding| of_outer(unit, encoding))
        };
        self.with_state().map(of).sum::<u64>() as i64
    }

    /// Bytes of the factors Q of a unit.
    fn bytes_of_q(&self, unit: u32, codec: PowerSgd) -> u64 {
        4 * codec.factors_of(&self.sizes.model.units[unit as usize].matrices).q
    }
}
