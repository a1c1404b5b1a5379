//! Sums over ranks whose messages are encoded, and the residuals that they leave.
//!
//! Each rank encodes its contribution and sends each part of it to the rank that adds that part up.
//! Contributions are decoded and added in f32, along the tree of all other sums. A sum that all
//! ranks need is encoded by the rank that has it, and decoded by all, the same everywhere.
//!
//! With error feedback a rank adds to each message what the ones before left out. These residuals
//! are state: they lie beside the gradients, in the layout of what is encoded, and go to
//! checkpoints. With momentum correction so do the velocities of a rank's own contribution, which
//! is what it encodes first: for the sum in its shard group if that is encoded, or else for the sum
//! over replicas.

use crate::Result;
use crate::exchange::Link;
use crate::state::{does_not_fit, overlap};
use serde::Serialize;
use std::ops::Range;
use std::sync::Mutex;
use trainyard_base::{lock, philox4x32};
use trainyard_comm::codec::momentum::Momentum;
use trainyard_comm::codec::{self, Rounding, encoded_bytes};
use trainyard_model::UnitLayout;
use trainyard_program::{Axis, BlockCodec, Encoding};
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// Elements that a thread encodes or decodes at a time: a multiple of every codec's block.
const GRAIN: usize = 1 << 15;

/// The extents of one unit.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnitExtents {
    /// Elements of its whole flat buffer, where ranks of a shard group sum it; else 0.
    pub whole: usize,
    /// The elements of it that replicas sum.
    pub part: Range<usize>,
    /// The elements between parameters and behind the last. They are zero and stay zero.
    pub gaps: Vec<Range<usize>>,
}

impl UnitExtents {
    /// The extents of a unit of `layout`, whose ranks sum `whole` elements and whose replicas sum
    /// `part`.
    pub(crate) fn new(layout: &UnitLayout, whole: usize, part: Range<usize>) -> UnitExtents {
        let starts = layout.trained().skip(1).map(|(_, range)| range.start).chain([layout.trained_elements()]);
        let gaps = layout.trained().map(|(_, range)| range.end).zip(starts).map(|(end, next)| end..next);
        UnitExtents { whole, part, gaps: gaps.filter(|gap| !gap.is_empty()).collect() }
    }
}

/// The way in which values between two codes are rounded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CodeRounding {
    /// To the nearest.
    #[default]
    Nearest,
    /// By chance, with the value as the mean.
    Stochastic,
}

impl CodeRounding {
    /// The rounding of a message from its element `first` on.
    pub(crate) fn of(self, key: [u32; 2], first: usize) -> Rounding {
        match self {
            CodeRounding::Nearest => Rounding::Nearest,
            CodeRounding::Stochastic => Rounding::Stochastic { key, first: first as u64 },
        }
    }
}

/// The key of random rounding: a function of the run's seed and of what is rounded when. The words
/// of `site` name the message within the step. The last two bits of the second are those of
/// [`ResidualOf`] for sums, and 3 for other messages.
pub(crate) fn rounding_key(seed: u64, step: u64, [unit, what, rank]: [u32; 3]) -> [u32; 2] {
    let site = [unit, what, rank, step as u32];
    let [a, b, ..] = philox4x32(site, [seed as u32, (seed >> 32) as u32 ^ (step >> 32) as u32]);
    [a, b]
}

/// Momentum correction of gradients in the form of `top_k` (Lin et al. 2018, Section 3).
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct MomentumCorrection {
    /// The share of a velocity that stays from one step to the next.
    pub factor: f64,
    /// True if the velocity of what is sent becomes zero.
    pub masking: bool,
}

/// The settings of encoded sums beside their codec.
#[derive(Clone, Copy)]
pub(crate) struct SumSettings {
    pub rounding: CodeRounding,
    pub seed: u64,
    /// None: contributions are sums of gradients, or changes, as they are.
    pub momentum: Option<MomentumCorrection>,
}

/// Buffers and residuals of encoded sums, for every unit of a rank.
pub(crate) struct EncodedSums {
    encoding: Encoding,
    codec: BlockCodec,
    rounding: CodeRounding,
    seed: u64,
    momentum: Option<Momentum>,
    /// The residual beside which velocities lie: that of the rank's own contribution.
    contribution: ResidualOf,
    extents: Vec<UnitExtents>,
    /// Empty without error feedback.
    units: Vec<UnitResiduals>,
    /// Messages to the other ranks and from them, as 16-bit words.
    sent: Option<Tensor>,
    received: Option<Tensor>,
    /// The share of a sum that this rank adds up for all replicas.
    share: Option<Tensor>,
}

/// The parts of one unit's values that messages left out.
#[derive(Default)]
struct UnitResiduals {
    /// Of the contribution to the sum in the shard group.
    group: Option<Tensor>,
    /// Of the contribution to the sum over replicas.
    part: Option<Tensor>,
    /// Of the share of the sum over replicas that this rank adds up.
    share: Option<Tensor>,
    /// The velocities of this rank's own contribution.
    velocity: Option<Tensor>,
}

/// The kind of a residual.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum ResidualOf {
    /// A rank's contribution to the sum in its shard group.
    Group,
    /// A rank's contribution to the sum over replicas.
    Replica,
    /// The sum over replicas.
    Sum,
}

/// A residual that a rank holds.
pub(crate) struct Residual {
    pub of: ResidualOf,
    pub unit: usize,
    /// The elements of the unit's flat buffer that it is about: its first elements, in order.
    pub within: Range<usize>,
    pub values: Tensor,
}

/// The moment of a sum, which random rounding depends on.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    pub step: u64,
    /// Number of earlier sums of the unit in this step.
    pub turn: u32,
}

impl EncodedSums {
    /// Allocates buffers for units of these extents, summed over the ranks of `shard` and then of
    /// `replicate`.
    pub(crate) fn new(
        device: &Device,
        extents: Vec<UnitExtents>,
        (encoding, codec): (Encoding, BlockCodec),
        settings: SumSettings,
        shard: &Link,
        replicate: &Link,
    ) -> Result<EncodedSums> {
        if device.as_cuda().is_some() {
            return Err(does_not_fit("messages are encoded on processors only, and this rank computes on a GPU"));
        }
        let grouped = shard.size() > 1 && encoding.is_over(Axis::Shard);
        let replicas = replicate.size();
        let blocks = |unit: &UnitExtents| share_blocks(codec, unit.part.len(), replicas);
        let words = |unit: &UnitExtents| {
            let group = if grouped { encoded_bytes(codec, unit.whole) } else { 0 };
            let across = if replicas > 1 { replicas * blocks(unit) * codec.block_bytes() } else { 0 };
            group.max(across) / 2
        };
        let share = |unit: &UnitExtents| blocks(unit) * codec.block_elements();
        let take = |elements: usize, dtype: DType| match elements {
            0 => Ok(None),
            _ => device.empty([elements], dtype, Purpose::Comm).map(Some),
        };
        let zeros = |elements: usize| device.zeros([elements], DType::F32, Purpose::Comm);
        let largest = extents.iter().map(words).max().unwrap_or(0);
        let largest_share = if replicas > 1 { extents.iter().map(share).max().unwrap_or(0) } else { 0 };
        let residuals = |unit: &UnitExtents| -> Result<UnitResiduals> {
            let of = |elements: usize, is_there: bool| -> Result<Option<Tensor>> {
                Ok((is_there && elements > 0).then(|| zeros(elements)).transpose()?)
            };
            let (group, part) = (of(unit.whole, grouped)?, of(unit.part.len(), replicas > 1)?);
            let share = of(share(unit), replicas > 1)?;
            let contribution = if grouped { &group } else { &part };
            let elements = contribution.as_ref().map_or(0, Tensor::elements);
            Ok(UnitResiduals { velocity: of(elements, settings.momentum.is_some())?, group, part, share })
        };
        let kept =
            if encoding.feedback { extents.iter().map(residuals).collect::<Result<Vec<_>>>()? } else { Vec::new() };
        let (sent, received) = (take(largest, DType::BF16)?, take(largest, DType::BF16)?);
        let share = take(largest_share, DType::F32)?;
        let SumSettings { rounding, seed, momentum } = settings;
        Ok(EncodedSums {
            encoding,
            codec,
            rounding,
            seed,
            momentum: momentum.map(|of| Momentum { factor: of.factor as f32, masking: of.masking }),
            contribution: if grouped { ResidualOf::Group } else { ResidualOf::Replica },
            extents,
            units: kept,
            sent,
            received,
            share,
        })
    }

    /// True if messages between the ranks of `axis` are encoded.
    pub(crate) fn is_over(&self, axis: Axis) -> bool {
        self.encoding.is_over(axis)
    }

    /// Sums `flat`, which is one part per rank of `link`. This rank's part of the sum is written to
    /// `own`, which is a view of that part.
    pub(crate) fn reduce_scatter(
        &self,
        unit: usize,
        flat: &Tensor,
        own: &mut Tensor,
        link: &Link,
        at: Moment,
    ) -> Result<()> {
        let Some(cpu) = flat.device().as_cpu() else { return Ok(()) };
        let codec = self.codec;
        let bytes = encoded_bytes(codec, flat.elements());
        let (mut sent, mut received) = (words(&self.sent, bytes)?, words(&self.received, bytes)?);
        let residual = self.units.get(unit).and_then(|residuals| residuals.group.clone());
        let key = self.key(unit, ResidualOf::Group, link.index(), at);
        self.encode(cpu, flat, residual.clone(), self.velocity(unit, ResidualOf::Group), &mut sent, key)?;
        self.clear_gaps(unit, residual, 0)?;
        link.all_to_all(&sent, &mut received)?;
        decode_sum(cpu, codec, &received, link.size(), own)?;
        self.clear_gaps(unit, Some(own.clone()), self.extents[unit].part.start)
    }

    /// Sums `part` over the ranks of `link`; every rank gets the same sum.
    pub(crate) fn all_reduce(&self, unit: usize, part: &mut Tensor, link: &Link, at: Moment) -> Result<()> {
        let device = part.device().clone();
        let Some(cpu) = device.as_cpu().filter(|_| part.elements() > 0) else { return Ok(()) };
        let (codec, ranks) = (self.codec, link.size());
        let blocks = part.elements() / codec.block_elements();
        let each = share_blocks(codec, part.elements(), ranks);
        let of_share = each * codec.block_bytes();
        let (mut sent, mut received) = (words(&self.sent, ranks * of_share)?, words(&self.received, ranks * of_share)?);
        let residuals = self.units.get(unit);

        // Shares behind the end are empty.
        clear_behind(&mut sent, blocks * codec.block_bytes())?;
        let mut message = sent.view(0, [blocks * codec.block_bytes() / 2])?;
        let residual = residuals.and_then(|residuals| residuals.part.clone());
        let first = self.extents[unit].part.start;
        let key = self.key(unit, ResidualOf::Replica, link.index(), at);
        self.encode(cpu, part, residual.clone(), self.velocity(unit, ResidualOf::Replica), &mut message, key)?;
        self.clear_gaps(unit, residual, first)?;
        link.all_to_all(&sent, &mut received)?;

        let own = (link.index() * each).min(blocks)..((link.index() + 1) * each).min(blocks);
        let elements = own.len() * codec.block_elements();
        let mut message = words(&self.sent, of_share)?;
        clear_behind(&mut message, own.len() * codec.block_bytes())?;
        if elements > 0 {
            let share = self.share.as_ref().expect("allocated for the largest unit");
            let mut share = share.view(0, [elements])?;
            decode_sum(cpu, codec, &received, ranks, &mut share)?;
            let residual = residuals.and_then(|residuals| residuals.share.as_ref());
            let residual = residual.map(|residual| residual.view(0, [elements])).transpose()?;
            let mut message = message.view(0, [own.len() * codec.block_bytes() / 2])?;
            let key = self.key(unit, ResidualOf::Sum, link.index(), at);
            self.encode(cpu, &share, residual.clone(), None, &mut message, key)?;
            self.clear_gaps(unit, residual, first + own.start * codec.block_elements())?;
        }
        link.all_gather(&message, &mut received)?;
        let message = received.view(0, [blocks * codec.block_bytes() / 2])?;
        decode_sum(cpu, codec, &message, 1, part)?;
        self.clear_gaps(unit, Some(part.clone()), first)
    }

    /// Zeroes the gaps in `values`, which begin at element `first` of the unit's flat buffer. Only
    /// a codec that has no zero leaves anything there.
    fn clear_gaps(&self, unit: usize, values: Option<Tensor>, first: usize) -> Result<()> {
        let Some(values) = values.filter(|_| self.codec == BlockCodec::OneBit) else { return Ok(()) };
        for gap in &self.extents[unit].gaps {
            let gap = overlap(gap, &(first..first + values.elements()));
            if !gap.is_empty() {
                values.view(gap.start - first, [gap.len()])?.fill_zero()?;
            }
        }
        Ok(())
    }

    /// The residuals, by unit. `replica` is this rank's index among the replicas, and `part` gives
    /// the elements of a unit that replicas share.
    pub(crate) fn residuals(&self, replica: usize, part: impl Fn(usize) -> Range<usize>) -> Vec<Residual> {
        let mut all = Vec::new();
        for (unit, residuals) in self.units.iter().enumerate() {
            let part = part(unit);
            let share = |share: &Tensor| {
                let start = (part.start + replica * share.elements()).min(part.end);
                start..(start + share.elements()).min(part.end)
            };
            let of_unit = [
                (ResidualOf::Group, &residuals.group, residuals.group.as_ref().map(|group| 0..group.elements())),
                (ResidualOf::Replica, &residuals.part, Some(part.clone())),
                (ResidualOf::Sum, &residuals.share, residuals.share.as_ref().map(share)),
            ];
            for (of, values, within) in of_unit {
                if let (Some(values), Some(within)) = (values, within.filter(|within| !within.is_empty())) {
                    all.push(Residual { of, unit, within, values: values.clone() });
                }
            }
        }
        all
    }

    /// The velocities of this rank's own contributions, by unit, as [`EncodedSums::residuals`].
    pub(crate) fn velocities(&self, part: impl Fn(usize) -> Range<usize>) -> Vec<Residual> {
        let of_unit = |(unit, state): (usize, &UnitResiduals)| {
            let values = state.velocity.clone()?;
            let within = if self.contribution == ResidualOf::Group { 0..values.elements() } else { part(unit) };
            Some(Residual { of: self.contribution, unit, within, values })
        };
        self.units.iter().enumerate().filter_map(of_unit).collect()
    }

    /// The velocity of a unit beside the residual `of`; None without momentum, and beside others.
    fn velocity(&self, unit: usize, of: ResidualOf) -> Option<Tensor> {
        self.units.get(unit)?.velocity.clone().filter(|_| of == self.contribution)
    }

    /// Makes velocities of `values`, if the contribution to the sum `of` has momentum: for
    /// gradients that travel as they are during a warm-up.
    pub(crate) fn apply_momentum(&self, unit: usize, of: ResidualOf, values: &Tensor) -> Result<()> {
        let (Some(momentum), Some(mut velocity)) = (self.momentum, self.velocity(unit, of)) else { return Ok(()) };
        if values.device().is_meta() {
            return Ok(());
        }
        let mut values = values.clone();
        Ok(values.with_data_mut(|values: &mut [f32]| {
            velocity.with_data_mut(|velocity: &mut [f32]| momentum.apply(values, velocity))
        })??)
    }

    fn encode(
        &self,
        cpu: &Cpu,
        values: &Tensor,
        residual: Option<Tensor>,
        velocity: Option<Tensor>,
        message: &mut Tensor,
        key: [u32; 2],
    ) -> Result<()> {
        if let (BlockCodec::TopK { kept }, Some(momentum)) = (self.codec, self.momentum)
            && let (Some(mut residual), Some(mut velocity)) = (residual.clone(), velocity)
        {
            return Ok(values.with_data(|values: &[f32]| {
                message.overwrite_bytes(|message| {
                    velocity.with_data_mut(|velocity: &mut [f32]| {
                        residual.with_data_mut(|residual: &mut [f32]| {
                            encode_with_momentum(cpu, kept, momentum, values, [velocity, residual], message);
                        })
                    })
                })
            })????);
        }
        let codec = self.codec;
        let rounding = |first: usize| self.rounding.of(key, first);
        let run = |values: &[f32], residual: Option<&mut [f32]>, message: &mut [u8]| {
            encode_on_all_threads(cpu, codec, values, residual, &rounding, message);
        };
        let with = |values: &[f32]| {
            message.overwrite_bytes(|message| match residual {
                Some(mut residual) => {
                    residual.with_data_mut(|residual: &mut [f32]| run(values, Some(residual), message))
                }
                None => {
                    run(values, None, message);
                    Ok(())
                }
            })
        };
        Ok(values.with_data(with)???)
    }

    fn key(&self, unit: usize, of: ResidualOf, rank: usize, at: Moment) -> [u32; 2] {
        rounding_key(self.seed, at.step, [unit as u32, of as u32 | at.turn << 2, rank as u32])
    }
}

/// Blocks of the share of `elements` that each of `ranks` adds up; the last may have fewer.
fn share_blocks(codec: BlockCodec, elements: usize, ranks: usize) -> usize {
    (elements / codec.block_elements()).div_ceil(ranks.max(1))
}

/// The first `bytes` of a buffer of 16-bit words.
fn words(buffer: &Option<Tensor>, bytes: usize) -> Result<Tensor> {
    Ok(buffer.as_ref().expect("allocated for the largest unit").view(0, [bytes / 2])?)
}

/// Zeroes a message from byte `from` on.
fn clear_behind(message: &mut Tensor, from: usize) -> Result<()> {
    let words = message.elements() - from / 2;
    if words > 0 {
        message.view(from / 2, [words])?.fill_zero()?;
    }
    Ok(())
}

/// Encodes `values` and updates `residual`, in parts that threads share.
pub(crate) fn encode_on_all_threads(
    cpu: &Cpu,
    codec: BlockCodec,
    values: &[f32],
    residual: Option<&mut [f32]>,
    rounding: &(impl Fn(usize) -> Rounding + Sync),
    message: &mut [u8],
) {
    let residuals: Vec<Option<&mut [f32]>> = match residual {
        Some(residual) => residual.chunks_mut(GRAIN).map(Some).collect(),
        None => values.chunks(GRAIN).map(|_| None).collect(),
    };
    let messages = message.chunks_mut(encoded_bytes(codec, GRAIN));
    let parts = values.chunks(GRAIN).zip(residuals).zip(messages);
    let tasks: Vec<_> = parts.map(Mutex::new).collect();
    cpu.threads.for_each(tasks.len(), |task| {
        let ((values, residual), message) = &mut *lock(&tasks[task]);
        codec::encode(codec, values, residual.as_deref_mut(), rounding(task * GRAIN), message);
    });
}

/// As [`encode_on_all_threads`] with the momentum of a rank's contribution; `state` is its velocity
/// and its residual.
fn encode_with_momentum(
    cpu: &Cpu,
    kept: u16,
    momentum: Momentum,
    values: &[f32],
    state: [&mut [f32]; 2],
    message: &mut [u8],
) {
    let [velocity, residual] = state;
    let state = velocity.chunks_mut(GRAIN).zip(residual.chunks_mut(GRAIN));
    let messages = message.chunks_mut(encoded_bytes(BlockCodec::TopK { kept }, GRAIN));
    let tasks: Vec<_> = values.chunks(GRAIN).zip(state).zip(messages).map(Mutex::new).collect();
    cpu.threads.for_each(tasks.len(), |task| {
        let ((values, (velocity, residual)), message) = &mut *lock(&tasks[task]);
        momentum.encode(kept, values, velocity, residual, message);
    });
}

/// Decodes the messages of `ranks`, which lie one after the other in `messages`, and adds them up.
/// Each may be longer than the sum needs.
pub(crate) fn decode_sum(
    cpu: &Cpu,
    codec: BlockCodec,
    messages: &Tensor,
    ranks: usize,
    sum: &mut Tensor,
) -> Result<()> {
    let add = |messages: &[u8]| {
        let each = messages.len() / ranks;
        let messages: Vec<&[u8]> = messages.chunks(each).collect();
        sum.overwrite(|sum: &mut [f32]| {
            let tasks: Vec<_> = sum.chunks_mut(GRAIN).map(Mutex::new).collect();
            cpu.threads.for_each(tasks.len(), |task| {
                let sum = &mut *lock(&tasks[task]);
                let start = encoded_bytes(codec, task * GRAIN);
                let end = start + encoded_bytes(codec, sum.len());
                let parts: Vec<&[u8]> = messages.iter().map(|message| &message[start..end]).collect();
                codec::decode_sum(codec, &parts, sum);
            });
        })
    };
    Ok(messages.with_bytes(add)??)
}
