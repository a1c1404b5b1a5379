//! The links of a rank's lanes to groups of ranks. Each lane has its own communicator per group,
//! because lanes run concurrently.

pub use crate::exchange::Link;
pub(crate) use crate::exchange::Staging;

use crate::Result;
use crate::collectives::Way;
use crate::encoded::{EncodedSums, Moment, ResidualOf, SumSettings, UnitExtents};
use crate::positions::Positions;
use crate::power_sgd::LowRankSums;
use crate::rank::RankSettings;
use crate::server::ServerLinks;
use crate::stages::StageLink;
use crate::state::{Holding, does_not_fit, overlap};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use trainyard_comm::nccl::Nccl;
use trainyard_comm::{Communicator, Position};
use trainyard_model::{Model, UnitLayout};
use trainyard_program::{Action, Axis, Codec, Group, Lane, Program};
use trainyard_tensor::{DType, Device, Tensor, ops};

/// Links of the gather lane: the shard group, and parts of it by their number of ranks.
#[derive(Default)]
pub struct GatherLinks {
    shard: Link,
    parts: BTreeMap<u32, Link>,
}

/// Links of the reduce lane, for gradients and the count of targets.
#[derive(Default)]
pub struct ReduceLinks {
    pub(crate) shard: Link,
    pub(crate) replicate: Link,
    /// The ranks that hold the same experts as this one.
    pub(crate) expert_replicas: Link,
    /// The ranks that sum gradients: all data ranks, or the shard group where replicas train apart.
    pub(crate) summed: Link,
    /// Per unit whose parameters others borrow, the pipeline stages that hold it.
    ties: BTreeMap<u32, Link>,
    /// The tensor-parallel group.
    pub(crate) tensor: Link,
    /// Buffers for data on their way, allocated by [`ReduceLinks::stage`].
    pub(crate) staging: Staging,
    /// Buffers and residuals of encoded gradients; None: they travel as they are.
    pub(crate) encoded: Option<EncodedSums>,
    /// State of gradients that travel as low-rank factors.
    pub(crate) low_rank: Option<LowRankSums>,
}

/// Links of the compute lane, for the gradient norm and the losses, and for gathers and messages
/// outside of steps.
#[derive(Default)]
pub struct ComputeLinks {
    pub(crate) shard: Link,
    pub(crate) data: Link,
    /// The ranks that sum gradients, as in [`ReduceLinks`].
    pub(crate) summed: Link,
    pub(crate) pipeline: Link,
    pub(crate) tensor: Link,
    /// The ranks that share the experts of every layer: rows inside passes, and the norm.
    pub(crate) experts: Link,
}

/// Links of the lanes that send and receive between pipeline stages. The two may run at once on one
/// communicator, because each direction between two ranks is a queue of its own.
#[derive(Default)]
pub struct PipelineLinks {
    pub(crate) send: StageLink,
    pub(crate) receive: StageLink,
}

/// The links of one rank, by lane. The default is for a rank alone.
#[derive(Default)]
pub struct Links {
    pub(crate) gather: GatherLinks,
    pub(crate) reduce: ReduceLinks,
    pub(crate) compute: ComputeLinks,
    pub(crate) pipeline: PipelineLinks,
    /// Link of the inner lane to the tensor-parallel group.
    pub(crate) tensor: Link,
    /// Link of the inner lane to the context-parallel group.
    pub(crate) context: Link,
    /// The communicators with a parameter server, until its worker takes them.
    pub(crate) server: Option<ServerLinks>,
    /// Communicator that reports this rank's failure to all others.
    pub(crate) alarm: Option<Communicator>,
    /// True if any link uses NCCL.
    pub(crate) by_nccl: bool,
    /// Positions of the rank's lanes in the program.
    pub(crate) positions: Arc<Positions>,
}

/// Makes the links of one rank.
struct Maker<'a> {
    program: &'a Program,
    way: Way,
    world: Option<&'a Communicator>,
    nccl: Option<Nccl>,
}

impl Links {
    /// Makes the links that `program` needs, through host memory. All ranks of `world` call this
    /// together, each with its own program.
    pub fn new(world: &Communicator, program: &Program) -> Result<Links> {
        Maker { program, way: Way::Host, world: Some(world), nccl: None }.make()
    }

    /// Makes links by the chosen transport `way`.
    ///
    /// # Errors
    /// With NCCL: the device is not a GPU, the library is missing or fails, or a rank does not
    /// arrive.
    pub fn by(way: Way, world: &Communicator, program: &Program, device: &Device) -> Result<Links> {
        match way {
            Way::Host => Links::new(world, program),
            Way::Nccl { fixed_order } => Links::over_nccl(world, program, device, fixed_order),
        }
    }

    /// Makes links with NCCL between the GPUs of the ranks. With `fixed_order`, sums have the bits
    /// of [`Links::new`].
    fn over_nccl(world: &Communicator, program: &Program, device: &Device, fixed_order: bool) -> Result<Links> {
        let cuda = device.as_cuda().ok_or_else(|| does_not_fit("NCCL exchanges the memory of GPUs: there is none"))?;
        let positions = Arc::<Positions>::default();
        let waiting = Arc::clone(&positions);
        let nccl = Nccl::new(Arc::clone(cuda.driver()), world, move || waiting.device_exchanges())?;
        let way = Way::Nccl { fixed_order };
        Ok(Links { positions, ..Maker { program, way, world: Some(world), nccl: Some(nccl) }.make()? })
    }

    /// Links of a prediction, which exchange nothing but allocate the same memory.
    pub fn predicted(program: &Program, way: Way) -> Result<Links> {
        Maker { program, way, world: None, nccl: None }.make()
    }
}

impl Maker<'_> {
    fn make(&self) -> Result<Links> {
        let Maker { program, world, .. } = *self;
        let group = |axis| program.mesh.group(program.rank, axis);
        let numbers = Maker { nccl: None, ..*self };
        let mut parts = BTreeMap::new();
        let shards = program.mesh.degree(Axis::Shard);
        for instruction in &program.instructions {
            if let Action::Gather { over, .. } = instruction.action
                && over != shards
                && !parts.contains_key(&over)
            {
                let neighbours = program.mesh.neighbours(program.rank, Axis::Shard, over);
                parts.insert(over, self.link("gather", &format!("{over} shards"), neighbours)?);
            }
        }
        let gather = GatherLinks { shard: self.link("gather", "shards", group(Axis::Shard))?, parts };
        let reduce = ReduceLinks {
            shard: self.link("reduce", "shards", group(Axis::Shard))?,
            replicate: self.link("reduce", "replicas", group(Axis::Replicate))?,
            expert_replicas: match program.mesh.ep {
                1 => Link::default(),
                _ => self.link("reduce", "replicas of experts", program.mesh.expert_replicas(program.rank))?,
            },
            summed: numbers.link("reduce", "ranks of a sum", group(program.kind.gradient_axis()))?,
            ties: self.ties()?,
            tensor: self.tensor_link("reduce")?,
            staging: Staging::default(),
            encoded: None,
            low_rank: None,
        };
        let compute = ComputeLinks {
            // The compute lane exchanges tensors only outside of steps, when the gather lane is
            // idle.
            shard: numbers.link("compute", "shards", group(Axis::Shard))?.sharing(&gather.shard),
            data: numbers.link("compute", "data ranks", group(Axis::Data))?,
            summed: numbers.link("compute", "ranks of a sum", group(program.kind.gradient_axis()))?,
            pipeline: numbers.link("compute", "stages", group(Axis::Pipeline))?,
            tensor: numbers.link("compute", "parts of products", group(Axis::Tensor))?,
            experts: self.link("compute", "experts", group(Axis::Expert))?,
        };
        let stages = numbers.link("pipeline", "stages", group(Axis::Pipeline))?;
        let stage = |lane| StageLink::new(stages.clone(), program, lane);
        let pipeline = PipelineLinks { send: stage(Lane::Send), receive: stage(Lane::Receive) };
        let tensor = self.tensor_link("inner")?;
        let context = self.staged_nowhere().link("inner", "parts of sequences", group(Axis::Context))?;
        let server = self.server_links()?;
        let alarm = world.map(|world| world.duplicate("alarm")).transpose()?;
        Ok(Links {
            gather,
            reduce,
            compute,
            pipeline,
            tensor,
            context,
            server,
            alarm,
            by_nccl: self.nccl.is_some(),
            positions: Arc::default(),
        })
    }

    /// The communicators between workers and servers, if the program has a parameter server.
    fn server_links(&self) -> Result<Option<ServerLinks>> {
        let (Some(server), Some(world)) = (self.program.server, self.world) else { return Ok(None) };
        let is_server = self.program.rank < server.servers;
        Ok(Some(ServerLinks {
            requests: world.duplicate("requests to servers")?,
            answers: world.duplicate("answers of servers")?,
            servers: world.split(u32::from(is_server), self.program.rank, "servers")?,
        }))
    }

    /// A link to the tensor-parallel group.
    fn tensor_link(&self, lane: &str) -> Result<Link> {
        let group = self.program.mesh.group(self.program.rank, Axis::Tensor);
        self.staged_nowhere().link(lane, "parts of products", group)
    }

    /// A maker of links whose sums have no staging buffers. In a fixed order they go through host
    /// memory.
    fn staged_nowhere(&self) -> Maker<'_> {
        let by_nccl = self.way == Way::Nccl { fixed_order: false };
        Maker { nccl: self.nccl.clone().filter(|_| by_nccl), ..*self }
    }

    /// A link between the stages that hold a unit, for every unit whose parameters others borrow.
    fn ties(&self) -> Result<BTreeMap<u32, Link>> {
        let Maker { program, .. } = *self;
        let mut borrowed: Vec<u32> = program.borrows.iter().flatten().copied().collect();
        borrowed.sort_unstable();
        borrowed.dedup();
        let mesh = &program.mesh;
        let mut links = BTreeMap::new();
        for unit in borrowed.into_iter().filter(|_| mesh.pp > 1) {
            let stages = program.holders(unit);
            let within = program.rank % mesh.stage_ranks();
            let ranks: Vec<u32> = stages.iter().map(|stage| stage * mesh.stage_ranks() + within).collect();
            // Ranks that do not hold it make a group of one, because all ranks of the world split
            // together.
            let group = match ranks.iter().position(|rank| *rank == program.rank) {
                Some(index) => Group { ranks, index: index as u32 },
                None => Group { ranks: vec![program.rank], index: 0 },
            };
            links.insert(unit, self.staged_nowhere().link_of("reduce", &format!("holders of unit {unit}"), &group)?);
        }
        Ok(links)
    }

    /// A link to `group`; nothing is made for a group of one, because every rank's is.
    fn link(&self, lane: &str, name: &str, group: Group) -> Result<Link> {
        if group.ranks.len() == 1 {
            return Ok(Link::default());
        }
        self.link_of(lane, name, &group)
    }

    fn link_of(&self, lane: &str, name: &str, group: &Group) -> Result<Link> {
        let split = |world: &Communicator| world.split(group.ranks[0], group.index, format!("{lane} {name}"));
        Ok(Link::new(group, self.world.map(split).transpose()?, self.nccl.as_ref(), self.way)?)
    }
}

impl GatherLinks {
    /// The link for a gather from `over` ranks.
    pub fn over(&self, over: u32) -> &Link {
        self.parts.get(&over).unwrap_or(&self.shard)
    }

    /// Posts the instruction that this lane is about to run, for the other ranks.
    pub fn post(&self, position: &Position) {
        [&self.shard].into_iter().chain(self.parts.values()).for_each(|link| link.post(position));
    }

    /// Ends a step: what follows belongs to none of its instructions.
    pub fn forget(&self) {
        self.shard.forget();
    }
}

impl ReduceLinks {
    /// Allocates the buffers on `device` for reducing the gradients of `model`.
    pub(crate) fn stage(
        &mut self,
        device: &Device,
        model: &Model,
        holding: &Holding,
        settings: &RankSettings,
    ) -> Result<()> {
        let layouts = model.units().iter().map(|unit| UnitLayout::new(unit.parameters(), holding.shards));
        let sizes = layouts.map(|layout| (layout.trained_elements(), holding.own(&layout).len()));
        let (elements, own) = sizes.max().unwrap_or_default();
        self.staging = Staging::new(device, elements, own, settings.reduce, &self.shard, &self.replicate)?;
        let Some(encoding) = settings.compression.gradients else { return Ok(()) };
        if let Codec::PowerSgd(codec) = encoding.codec
            && self.summed.size() > 1
        {
            let layouts = model.units().iter().map(|unit| UnitLayout::new(unit.parameters(), holding.shards));
            let layouts: Vec<_> = layouts.collect();
            let whole = |unit: usize| 0..layouts[unit].trained_elements();
            let sums = LowRankSums::new(device, model, &layouts, codec, encoding.feedback, settings.seed, whole)?;
            self.low_rank = Some(sums);
        }
        if let Codec::Blocks(codec) = encoding.codec {
            let extents = |unit: usize| {
                let layout = UnitLayout::new(holding.parameters(model, unit), holding.shards);
                match holding.holds(unit) {
                    true => UnitExtents::new(&layout, layout.trained_elements(), holding.own(&layout)),
                    false => UnitExtents::default(),
                }
            };
            let units: Vec<_> = (0..model.units().len()).map(extents).collect();
            // Replicas that train apart do not sum gradients.
            let alone = Link::default();
            let replicate = if settings.outer.is_none() { &self.replicate } else { &alone };
            let of_sums = SumSettings {
                rounding: settings.compression.rounding,
                seed: settings.seed,
                momentum: settings.compression.momentum,
            };
            self.encoded = Some(EncodedSums::new(device, units, (encoding, codec), of_sums, &self.shard, replicate)?);
        }
        Ok(())
    }

    /// As [`GatherLinks::post`].
    pub fn post(&self, position: &Position) {
        [&self.shard, &self.replicate, &self.expert_replicas, &self.summed]
            .into_iter()
            .for_each(|link| link.post(position));
        self.ties.values().chain([&self.tensor]).for_each(|link| link.post(position));
    }

    /// The stages that hold `unit`.
    pub(crate) fn tie(&self, unit: u32) -> &Link {
        self.ties.get(&unit).expect("a program ties units that others borrow")
    }
}

impl PipelineLinks {
    /// Allocates the buffers on `device` for encoded messages.
    pub(crate) fn stage(&mut self, device: &Device, settings: &RankSettings) -> Result<()> {
        self.send.stage(device, settings)?;
        self.receive.stage(device, settings)
    }
}

impl ComputeLinks {
    /// As [`GatherLinks::post`].
    pub fn post(&self, position: &Position) {
        [&self.shard, &self.data, &self.summed, &self.pipeline, &self.tensor, &self.experts]
            .into_iter()
            .for_each(|link| link.post_on_host(position));
    }
}

/// One sum of a gradient over ranks.
#[derive(Clone, Copy)]
pub struct Reduction {
    /// The axis along which it is summed: that of all data ranks, or of the shard group.
    pub over: Axis,
    /// True if it is added to the sum so far.
    pub accumulate: bool,
    /// The type in which it travels, unless it is encoded.
    pub dtype: DType,
    /// True if it travels in the form of the run's codec.
    pub encoded: bool,
    /// Number of the instruction.
    pub number: u32,
    pub(crate) at: Moment,
}

/// Sums `flat` over the data ranks: reduce-scatter inside the shard group, then all-reduce of the
/// rank's `own` part across the replicas. Returns that part of `flat`; the rest is arbitrary. The
/// sum is rounded to `dtype` on its way, and again when it is complete, so that every division of
/// the data ranks into shards and replicas gives the same bits. Where messages are encoded, they
/// are not rounded besides. Low-rank factors are summed over all ranks at once.
///
/// `experts` are the elements of the experts that this replica has, where replicas divide them. The
/// rows of all replicas that share the experts came to it, so these gradients are summed only
/// across replicas that have the same ones.
pub(crate) fn reduce(
    unit: usize,
    flat: &mut Tensor,
    own: Range<usize>,
    experts: Range<usize>,
    reduction: Reduction,
    links: &mut ReduceLinks,
) -> Result<Tensor> {
    let mut sum = flat.view(own.start, [own.len()])?;
    if let Some(low_rank) = links.low_rank.as_mut().filter(|_| reduction.encoded) {
        low_rank.sum(unit, flat, own, &Link::default(), &links.summed)?;
        return Ok(sum);
    }
    let ReduceLinks { shard, replicate, expert_replicas, staging, encoded, .. } = &*links;
    let (dtype, alone) = (reduction.dtype, Link::default());
    let [replicate, expert_replicas] =
        [replicate, expert_replicas].map(|link| if reduction.over == Axis::Data { link } else { &alone });
    let experts = overlap(&experts, &own);
    let across_replicas = |own_values: &Tensor| -> Result<()> {
        let start = if experts.is_empty() { own.end } else { experts.start };
        for (part, link) in [(own.start..start, replicate), (experts.clone(), expert_replicas)] {
            // The padding after the experts is zero on all ranks.
            if !part.is_empty() && link.size() > 1 {
                link.all_reduce(&mut own_values.view(part.start - own.start, [part.len()])?, staging)?;
            }
        }
        Ok(())
    };
    if let Some(encoded) = encoded.as_ref().filter(|_| reduction.encoded) {
        let at = reduction.at;
        match encoded.is_over(Axis::Shard) && shard.size() > 1 {
            true => encoded.reduce_scatter(unit, flat, &mut sum, shard, at)?,
            false => shard.reduce_scatter(flat, &mut sum, staging)?,
        }
        if replicate.size() > 1 {
            encoded.all_reduce(unit, &mut sum, replicate, at)?;
        }
        return Ok(sum);
    }
    if dtype == DType::F32 {
        // The velocities of a warm-up, in which gradients travel as they are.
        let momentum = |of: ResidualOf, values: &Tensor| {
            encoded.as_ref().map_or(Ok(()), |encoded| encoded.apply_momentum(unit, of, values))
        };
        momentum(ResidualOf::Group, flat)?;
        shard.reduce_scatter(flat, &mut sum, staging)?;
        momentum(ResidualOf::Replica, &sum)?;
        across_replicas(&sum)?;
        return Ok(sum);
    }
    let mut rounded = staging.rounded(flat.elements())?;
    ops::cast_into(flat, &mut rounded)?;
    let mut own_rounded = rounded.view(own.start, [own.len()])?;
    if shard.size() > 1 {
        shard.reduce_scatter_bf16(&mut rounded, &own_rounded, &mut sum, staging)?;
        across_replicas(&sum)?;
        ops::cast_into(&sum, &mut own_rounded)?;
    } else {
        across_replicas(&own_rounded)?;
    }
    ops::cast_into(&own_rounded, &mut sum)?;
    Ok(sum)
}
