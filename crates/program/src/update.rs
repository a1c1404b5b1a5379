//! The end of a step: what several stages share, the norm, and unit by unit the update with the state that it needs.

use crate::lower::Lowering;
use crate::{Action, Axis, Effect, Instruction, MemoryKind, State};

impl Lowering<'_> {
    /// The norm, then unit by unit: fetch what its optimizer needs, update, pass on what others hold too, evict.
    pub(crate) fn update(&mut self) {
        let last_pass = self.ran.last().copied();
        let tied = self.tie();
        self.fetch_state(0, last_pass);
        let norm = self.sizes.norm(&self.trains);
        let clip = Instruction::new(Action::Clip).moving(self.sizes.message(Axis::World, norm));
        self.builder.push(clip, self.reduces.last().copied().into_iter().chain(tied));
        let mut updated = None;
        for at in 0..self.trains.len() {
            // The state of the next unit comes while this one is updated; that of the one before has gone by then.
            self.fetch_state(at + 1, None);
            updated = Some(self.update_unit(self.trains[at]));
        }
        if self.strategy.snapshot {
            self.builder.push(Instruction::new(Action::Snapshot), updated);
        }
    }

    /// A unit that several stages hold has contributions to its gradient from each of them.
    fn tie(&mut self) -> Option<u32> {
        let mut tied = None;
        for unit in self.trains.clone() {
            if self.program.is_shared_between_stages(unit) {
                let bytes = self.sizes.held(unit, self.sizes.placement.gradients, self.strategy.bytes.reduce);
                tied = Some(
                    self.builder.push(Instruction::new(Action::Tie { unit }).moving(bytes), self.summed[unit as usize]),
                );
            }
        }
        tied
    }

    /// Fetches what updating the `at`-th unit needs and is not here.
    fn fetch_state(&mut self, at: usize, before: Option<u32>) {
        let Some(unit) = self.trains.get(at).copied() else { return };
        let [masters, optimizer] = self.sizes.optimizer(unit);
        let mut fetched = None;
        if self.strategy.offload.optimizer.is_some() {
            let fetch = Instruction::new(Action::Fetch { unit, state: State::Optimizer }).moving(masters + optimizer);
            let fetch = fetch.taking(MemoryKind::Masters, masters).taking(MemoryKind::Optimizer, optimizer);
            fetched = Some(self.builder.push(fetch, before));
        }
        // The update of a copy that is its own master reads it; otherwise it is written anew.
        if self.strategy.offload.parameters.is_some() && self.strategy.bytes.master == 0 {
            fetched = Some(self.fetch_parameters(unit, before));
        }
        self.present[unit as usize] = fetched;
    }

    fn update_unit(&mut self, unit: u32) -> u32 {
        let (offload, bytes) = (self.strategy.offload, self.strategy.bytes);
        let mut instruction = Instruction::new(Action::Update { unit });
        if offload.parameters.is_some() && bytes.master != 0 {
            instruction = instruction.taking(MemoryKind::Parameters, self.sizes.parameters(unit));
        }
        let update = self
            .builder
            .push(instruction, [self.present[unit as usize], self.dropped[unit as usize]].into_iter().flatten());
        if offload.optimizer.is_some() {
            let [masters, optimizer] = self.sizes.optimizer(unit);
            let evict = Instruction::new(Action::Evict { unit, state: State::Optimizer, write: true });
            let evict = evict.moving(masters + optimizer).giving_back(MemoryKind::Masters, masters);
            self.builder.push(evict.giving_back(MemoryKind::Optimizer, optimizer), [update]);
        }
        let mut written = update;
        if self.sizes.placement.parameters != self.sizes.placement.masters {
            let gather = Instruction::new(Action::Gather { unit, over: self.sizes.mesh.shard_degree() });
            written = self.builder.push(gather.moving(self.sizes.full(unit, bytes.parameter)), [update]);
        }
        if offload.parameters.is_some() {
            self.drop_parameters(unit, written, true);
        }
        update
    }

    /// What is held from the first instruction to the last.
    pub(crate) fn resident(&self) -> Vec<Effect> {
        let offload = &self.strategy.offload;
        let sum = |of: &dyn Fn(u32) -> u64| self.trains.iter().map(|unit| of(*unit)).sum::<u64>() as i64;
        let gradient = |unit| self.sizes.held(unit, self.sizes.placement.gradients, self.strategy.bytes.gradient);
        let effects = [
            (MemoryKind::Parameters, offload.parameters, sum(&|unit| self.sizes.parameters(unit))),
            (MemoryKind::Masters, offload.optimizer, sum(&|unit| self.sizes.optimizer(unit)[0])),
            (MemoryKind::Gradients, None, sum(&gradient)),
            (MemoryKind::Optimizer, offload.optimizer, sum(&|unit| self.sizes.optimizer(unit)[1])),
        ];
        let here = effects.into_iter().filter(|(_, tier, bytes)| tier.is_none() && *bytes != 0);
        here.map(|(kind, _, bytes)| Effect { kind, bytes }).collect()
    }
}
