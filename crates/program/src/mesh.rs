//! The mesh: the numbering of ranks along the axes of parallelism, and the group of ranks that
//! works together along each axis.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The degree along each axis. Ranks are numbered with `tp` innermost and `pp` outermost, as in
/// torchtitan: rank = (((pp · R + replicate) · F + shard) · CP + cp) · TP + tp, with R =
/// `dp_replicate` and F = `dp_shard`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Mesh {
    /// Number of pipeline stages.
    pub pp: u32,
    /// Number of replicas of the sharded model.
    pub dp_replicate: u32,
    /// Number of data-parallel ranks over which state is sharded.
    pub dp_shard: u32,
    /// Number of ranks that share a sequence (context parallelism).
    pub cp: u32,
    /// Number of ranks that share every product (tensor parallelism).
    pub tp: u32,
    /// Number of ranks that share the experts of a layer. It divides `dp_shard` x `cp`, or
    /// `dp_replicate` where these ranks are replicas ([`Mesh::experts_of_replicas`]).
    pub ep: u32,
    /// The ranks that share them.
    #[serde(default)]
    pub expert_ranks: ExpertRanks,
}

/// The ranks that share the experts of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertRanks {
    /// Neighbours in one shard group, over the rest of which the state of their experts is sharded,
    /// as in torchtitan and Megatron-LM. A shard group of one rank has none: then replicas do.
    #[default]
    Shards,
    /// Neighbouring replicas with the same shard. Each shards its state, its own experts included.
    Replicas,
}

/// A direction of the mesh. The ranks along it work together in a collective.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// The stages of one pipeline.
    Pipeline,
    /// The ranks with the same shard, one per replica.
    Replicate,
    /// The ranks that together hold one copy of the sharded state: `dp_shard` x `cp` (as
    /// torchtitan's `dp_shard_cp`).
    Shard,
    /// All ranks over which gradients are summed: `dp_replicate` x `dp_shard` x `cp`.
    Data,
    /// The ranks that share a sequence.
    Context,
    /// The ranks that share every product.
    Tensor,
    /// The ranks that share the experts of a layer.
    Expert,
    /// Every rank.
    World,
}

impl Axis {
    /// Every axis.
    pub const ALL: [Axis; 8] = [
        Axis::Pipeline,
        Axis::Replicate,
        Axis::Shard,
        Axis::Data,
        Axis::Context,
        Axis::Tensor,
        Axis::Expert,
        Axis::World,
    ];

    /// The name in prints.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Pipeline => "pipeline",
            Axis::Replicate => "replicate",
            Axis::Shard => "shard",
            Axis::Data => "data",
            Axis::Context => "context",
            Axis::Tensor => "tensor",
            Axis::Expert => "expert",
            Axis::World => "world",
        }
    }
}

/// A set of axes. It is serialised as a list of their names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Axes(u8);

impl Axes {
    /// True if `axis` is in the set.
    pub const fn contains(self, axis: Axis) -> bool {
        self.0 >> axis as u8 & 1 == 1
    }

    /// True if no axis is in the set.
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// The axes of the set, in the order of [`Axis::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |axis| self.contains(*axis))
    }
}

impl FromIterator<Axis> for Axes {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> Axes {
        Axes(axes.into_iter().fold(0, |set, axis| set | 1 << axis as u8))
    }
}

impl fmt::Debug for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// The names of the axes, or "this rank only".
impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(Axis::name).collect();
        f.write_str(&if names.is_empty() { "this rank only".to_owned() } else { names.join(", ") })
    }
}

impl Serialize for Axes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for Axes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Axes, D::Error> {
        Vec::<Axis>::deserialize(deserializer).map(Axes::from_iter)
    }
}

/// The position of a rank along the axes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coordinates {
    /// Index of the pipeline stage.
    pub pp: u32,
    /// Index of the replica.
    pub dp_replicate: u32,
    /// Index along the shard axis.
    pub dp_shard: u32,
    /// Index of the part of the sequence.
    pub cp: u32,
    /// Index of the part of every product.
    pub tp: u32,
}

/// The ranks that work together, in the order of their sums, and the position of the rank that
/// asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// Rank numbers, ascending.
    pub ranks: Vec<u32>,
    /// Position of the rank that asked: `ranks[index]`.
    pub index: u32,
}

impl Default for Mesh {
    fn default() -> Mesh {
        Mesh { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 1, ep: 1, expert_ranks: ExpertRanks::Shards }
    }
}

impl Mesh {
    /// `dp_replicate` x `dp_shard` ranks and nothing else: `data(n, 1)` is plain data parallelism,
    /// `data(1, n)` full sharding.
    pub fn data(dp_replicate: u32, dp_shard: u32) -> Mesh {
        Mesh { dp_replicate, dp_shard, ..Mesh::default() }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u32 {
        self.pp * self.stage_ranks()
    }

    /// The number of ranks of one pipeline stage.
    pub fn stage_ranks(&self) -> u32 {
        self.dp_replicate * self.dp_shard * self.cp * self.tp
    }

    /// The number of ranks with different micro-batches: `dp_replicate` x `dp_shard`. The global
    /// batch is this x accumulation x micro-batch.
    pub fn data_parallel(&self) -> u32 {
        self.dp_replicate * self.dp_shard
    }

    /// The index of `rank` among the ranks with different micro-batches: 0 to
    /// [`Mesh::data_parallel`]. Ranks of one context, tensor or pipeline group have the same index,
    /// because they work on the same micro-batches. Data and the random numbers of dropout are
    /// dealt by this index, not by the position along [`Axis::Data`], which counts context ranks.
    pub fn data_rank(&self, rank: u32) -> u32 {
        let place = self.coordinates(rank);
        place.dp_replicate * self.dp_shard + place.dp_shard
    }

    /// The number of ranks over which state is sharded.
    pub fn shard_degree(&self) -> u32 {
        self.dp_shard * self.cp
    }

    /// The size of a rank's group along `axis`.
    pub fn degree(&self, axis: Axis) -> u32 {
        match axis {
            Axis::Pipeline => self.pp,
            Axis::Replicate => self.dp_replicate,
            Axis::Shard => self.shard_degree(),
            Axis::Data => self.dp_replicate * self.shard_degree(),
            Axis::Context => self.cp,
            Axis::Tensor => self.tp,
            Axis::Expert => self.ep,
            Axis::World => self.ranks(),
        }
    }

    /// The coordinates of `rank`.
    pub fn coordinates(&self, rank: u32) -> Coordinates {
        let (rest, tp) = (rank / self.tp, rank % self.tp);
        let (rest, cp) = (rest / self.cp, rest % self.cp);
        let (rest, dp_shard) = (rest / self.dp_shard, rest % self.dp_shard);
        let (pp, dp_replicate) = (rest / self.dp_replicate, rest % self.dp_replicate);
        Coordinates { pp, dp_replicate, dp_shard, cp, tp }
    }

    /// The ranks that `rank` works with along `axis`.
    pub fn group(&self, rank: u32, axis: Axis) -> Group {
        let (first, stride) = self.progression(rank, axis);
        let count = self.degree(axis);
        Group { ranks: (0..count).map(|i| first + i * stride).collect(), index: (rank - first) / stride }
    }

    /// True if experts are divided among replicas.
    pub fn experts_of_replicas(&self) -> bool {
        self.ep > 1 && (self.shard_degree() == 1 || self.expert_ranks == ExpertRanks::Replicas)
    }

    /// The ranks along [`Axis::Replicate`] that hold the same experts as `rank`, if experts are
    /// divided among replicas.
    pub fn expert_replicas(&self, rank: u32) -> Group {
        let Group { ranks, index } = self.group(rank, Axis::Replicate);
        let place = index % self.ep;
        Group {
            ranks: ranks.into_iter().skip(place as usize).step_by(self.ep as usize).collect(),
            index: index / self.ep,
        }
    }

    /// The aligned block of `over` ranks around `rank` in its group along `axis`. A gather over a
    /// part of the shard group runs over it.
    pub fn neighbours(&self, rank: u32, axis: Axis, over: u32) -> Group {
        let group = self.group(rank, axis);
        let start = group.index / over * over;
        Group { ranks: group.ranks[start as usize..(start + over) as usize].to_vec(), index: group.index - start }
    }

    /// The first rank and the stride of a group: every group is an arithmetic progression of ranks.
    fn progression(&self, rank: u32, axis: Axis) -> (u32, u32) {
        let stride = match axis {
            Axis::Tensor | Axis::World => 1,
            Axis::Expert if self.experts_of_replicas() => self.tp * self.shard_degree(),
            Axis::Context | Axis::Shard | Axis::Data | Axis::Expert => self.tp,
            Axis::Replicate => self.tp * self.shard_degree(),
            Axis::Pipeline => self.stage_ranks(),
        };
        let index = rank / stride % self.degree(axis);
        (rank - index * stride, stride)
    }
}
