//! Whom a rank's lanes talk to: a communicator of its own for each lane and group, because lanes run beside each other.

use crate::Result;
use std::collections::BTreeMap;
use std::ops::Range;
use trainyard_comm::{CommError, Communicator, Position};
use trainyard_program::{Action, Axis, Group, Program};
use trainyard_tensor::{DType, Purpose, Tensor, bf16, ops};

/// A lane's way to one group of ranks. A group of one, and every group on the meta device, has nobody to talk to.
#[derive(Default)]
pub struct Link(Option<Communicator>);

/// For gathers: the shard group, and parts of it by their number of ranks.
#[derive(Default)]
pub struct GatherLinks {
    shard: Link,
    parts: BTreeMap<u32, Link>,
}

/// For reductions of gradients and the count of targets.
#[derive(Default)]
pub struct ReduceLinks {
    pub(crate) shard: Link,
    pub(crate) replicate: Link,
    pub(crate) data: Link,
}

/// For the norm and the losses; and for gathers outside of steps.
#[derive(Default)]
pub struct ComputeLinks {
    pub(crate) shard: Link,
    pub(crate) data: Link,
}

/// The links of one rank, by lane. The default is that of a rank alone, and of a prediction.
#[derive(Default)]
pub struct Links {
    pub(crate) gather: GatherLinks,
    pub(crate) reduce: ReduceLinks,
    pub(crate) compute: ComputeLinks,
    /// To wake all others when this rank fails.
    pub(crate) alarm: Option<Communicator>,
}

impl Links {
    /// The groups that `program` needs. All ranks of `world` call this together, each with its own program.
    pub fn new(world: &Communicator, program: &Program) -> Result<Links> {
        let group = |axis| program.mesh.group(program.rank, axis);
        let link = |lane: &str, name: &str, group: Group| -> Result<Link, CommError> {
            if group.ranks.len() == 1 {
                return Ok(Link(None));
            }
            world.split(group.ranks[0], group.index, format!("{lane} {name}")).map(|comm| Link(Some(comm)))
        };
        let mut parts = BTreeMap::new();
        let shards = program.mesh.degree(Axis::Shard);
        for instruction in &program.instructions {
            if let Action::Gather { over, .. } = instruction.action
                && over != shards
                && !parts.contains_key(&over)
            {
                let neighbours = program.mesh.neighbours(program.rank, Axis::Shard, over);
                parts.insert(over, link("gather", &format!("{over} shards"), neighbours)?);
            }
        }
        Ok(Links {
            gather: GatherLinks { shard: link("gather", "shards", group(Axis::Shard))?, parts },
            reduce: ReduceLinks {
                shard: link("reduce", "shards", group(Axis::Shard))?,
                replicate: link("reduce", "replicas", group(Axis::Replicate))?,
                data: link("reduce", "data ranks", group(Axis::Data))?,
            },
            compute: ComputeLinks {
                shard: link("compute", "shards", group(Axis::Shard))?,
                data: link("compute", "data ranks", group(Axis::Data))?,
            },
            alarm: Some(world.duplicate("alarm")?),
        })
    }
}

impl GatherLinks {
    /// The group of a gather from `over` ranks.
    pub fn over(&self, over: u32) -> &Link {
        self.parts.get(&over).unwrap_or(&self.shard)
    }

    /// Tells the others what this lane is about to do.
    pub fn post(&self, position: &Position) {
        [&self.shard].into_iter().chain(self.parts.values()).for_each(|link| link.post(position));
    }
}

impl ReduceLinks {
    /// As [`GatherLinks::post`].
    pub fn post(&self, position: &Position) {
        [&self.shard, &self.replicate, &self.data].into_iter().for_each(|link| link.post(position));
    }
}

impl ComputeLinks {
    /// As [`GatherLinks::post`].
    pub fn post(&self, position: &Position) {
        [&self.shard, &self.data].into_iter().for_each(|link| link.post(position));
    }
}

impl Link {
    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, Communicator::size)
    }

    /// This rank's place in it.
    pub fn index(&self) -> usize {
        self.0.as_ref().map_or(0, Communicator::rank)
    }

    fn post(&self, position: &Position) {
        if let Some(comm) = &self.0 {
            comm.post(position.clone());
        }
    }

    /// Every rank's `part` in every rank's `whole`.
    pub fn all_gather(&self, part: &Tensor, whole: &mut Tensor) -> Result<()> {
        if part.device().is_meta() {
            return Ok(());
        }
        match &self.0 {
            Some(comm) => {
                part.with_bytes(|part| whole.overwrite_bytes(|whole| comm.all_gather(part, whole)))???;
                Ok(())
            }
            None => Ok(whole.copy_from(part)?),
        }
    }

    /// As [`Link::all_gather`] with the own part in its place.
    pub fn all_gather_in_place(&self, whole: &mut Tensor) -> Result<()> {
        if let Some(comm) = &self.0 {
            whole.with_bytes_mut(|whole| comm.all_gather_in_place(whole))??;
        }
        Ok(())
    }

    /// Every rank's numbers, in order of the ranks.
    pub fn all_gather_numbers(&self, own: &[f64]) -> Result<Vec<f64>> {
        let mut all = own.to_vec();
        if let Some(comm) = &self.0 {
            all.resize(own.len() * comm.size(), 0.0);
            comm.all_gather(own, &mut all)?;
        }
        Ok(all)
    }

    /// Sums counts over the ranks.
    pub fn sum_counts(&self, counts: &mut [u64]) -> Result<()> {
        match &self.0 {
            Some(comm) => Ok(comm.all_reduce(counts)?),
            None => Ok(()),
        }
    }

    fn all_reduce_f32(&self, data: &mut Tensor) -> Result<()> {
        match &self.0 {
            Some(comm) => Ok(data.with_data_mut(|data: &mut [f32]| comm.all_reduce(data))??),
            None => Ok(()),
        }
    }
}

/// Sums `flat` over the data ranks: reduce-scatter inside the shard group, then all-reduce of the rank's `own` part across the replicas. The result is
/// that part of `flat`; the rest of it is arbitrary. Rounded to `dtype` on its way and again when it is complete, so that every division
/// of the data ranks into shards and replicas gives the same bits.
pub(crate) fn reduce(flat: &mut Tensor, own: Range<usize>, dtype: DType, links: &ReduceLinks) -> Result<Tensor> {
    let mut sum = flat.view(own.start, [own.len()])?;
    if dtype == DType::F32 {
        if let Some(comm) = &links.shard.0 {
            flat.with_data_mut(|flat: &mut [f32]| comm.reduce_scatter_in_place(flat))??;
        }
        links.replicate.all_reduce_f32(&mut sum)?;
        return Ok(sum);
    }
    let mut rounded = flat.device().empty([flat.elements()], dtype, Purpose::Comm)?;
    ops::cast_into(flat, &mut rounded)?;
    let mut own_rounded = rounded.view(own.start, [own.len()])?;
    match (&links.shard.0, &links.replicate.0) {
        (Some(shard), _) => {
            let scatter = |rounded: &[bf16]| sum.overwrite(|sum: &mut [f32]| shard.reduce_scatter_sums(rounded, sum));
            rounded.with_data(scatter)???;
            links.replicate.all_reduce_f32(&mut sum)?;
            ops::cast_into(&sum, &mut own_rounded)?;
        }
        (None, Some(replicate)) => own_rounded.with_data_mut(|own: &mut [bf16]| replicate.all_reduce(own))??,
        (None, None) => {}
    }
    ops::cast_into(&own_rounded, &mut sum)?;
    Ok(sum)
}
