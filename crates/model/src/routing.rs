//! A record of where the tokens of a step went: for each mixture of experts the choices of each
//! expert, the choices that were dropped, and the balance losses.

use crate::Result;
use std::collections::BTreeMap;
use trainyard_tensor::ops::experts::{BalanceLosses, Router, Routes, balance_losses, balance_sums};
use trainyard_tensor::{Computes, Tensor, TensorError};

/// The record of a step's forwards, by layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutingRecord {
    layers: BTreeMap<usize, LayerRouting>,
}

/// The record of one layer. All are sums over micro-batches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerRouting {
    /// The choices of each expert, dropped ones included.
    pub counts: Vec<f64>,
    /// The choices that were dropped.
    pub dropped: f64,
    /// Tokens that were routed.
    pub tokens: f64,
    /// Each token's part of the auxiliary loss, without its factor; 0 where the loss has none.
    pub auxiliary: f64,
    /// The same of the router's z-loss.
    pub z: f64,
}

/// A record that is being made. What a GPU counts is read when the record is complete, so that the
/// host does not wait for it in every layer.
#[derive(Debug, Default)]
pub struct RoutingLog {
    record: RoutingRecord,
    unread: Vec<Unread>,
}

/// The routes of a micro-batch through one layer, on a GPU.
#[derive(Debug)]
struct Unread {
    layer: usize,
    router: Router,
    capacity: Option<usize>,
    tokens: usize,
    counts: Tensor,
    /// As [`balance_sums`] gives them; None where no balance loss is computed.
    sums: Option<Tensor>,
}

impl RoutingLog {
    /// Adds the routes of a micro-batch, of which each expert takes at most `capacity`. `losses`:
    /// whether balance losses are computed. A device without data records nothing.
    pub(crate) fn add(
        &mut self,
        layer: usize,
        router: &Router,
        capacity: Option<usize>,
        logits: &Tensor,
        routes: &Routes,
        losses: bool,
    ) -> Result<()> {
        let (device, tokens) = (logits.device(), logits.rows());
        if device.computes() == Computes::Cuda {
            let sums = losses.then(|| balance_sums(router, logits, &routes.counts)).transpose()?;
            let counts = routes.counts.clone();
            self.unread.push(Unread { layer, router: *router, capacity, tokens, counts, sums });
        } else if !device.is_meta() {
            let counts = routes.counts.data::<i32>()?;
            let found = losses.then(|| Ok::<_, TensorError>(balance_losses(router, logits.data()?, counts)));
            self.record.add(layer, router, capacity, tokens, counts, found.transpose()?.unwrap_or_default());
        }
        Ok(())
    }

    /// The record, once the device has done what was launched.
    ///
    /// # Errors
    /// The device failed.
    pub fn read(self) -> Result<RoutingRecord> {
        let RoutingLog { mut record, unread } = self;
        for Unread { layer, router, capacity, tokens, counts, sums } in unread {
            if counts.device().is_meta() {
                continue;
            }
            let counts = counts.to_vec::<i32>()?;
            let losses = match sums.map(|sums| sums.to_vec::<f32>()).transpose()?.as_deref() {
                Some(&[agreement, squares]) => {
                    let n = tokens.max(1) as f32;
                    BalanceLosses { auxiliary: router.experts as f32 * agreement / n / n, z: squares / n }
                }
                _ => BalanceLosses::default(),
            };
            record.add(layer, &router, capacity, tokens, &counts, losses);
        }
        Ok(record)
    }
}

impl RoutingRecord {
    /// Adds a micro-batch of `tokens` tokens, whose choices beyond `capacity` were dropped.
    fn add(
        &mut self,
        layer: usize,
        router: &Router,
        capacity: Option<usize>,
        tokens: usize,
        counts: &[i32],
        losses: BalanceLosses,
    ) {
        let capacity = capacity.map_or(f64::INFINITY, |capacity| capacity as f64);
        let kept: f64 = counts.iter().map(|count| f64::from(*count).min(capacity)).sum();
        let record = self.layers.entry(layer).or_default();
        record.counts.resize(counts.len(), 0.0);
        record.counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum += f64::from(*count));
        let tokens = tokens as f64;
        record.dropped += tokens * router.top_k as f64 - kept;
        record.tokens += tokens;
        record.auxiliary += tokens * f64::from(losses.auxiliary);
        record.z += tokens * f64::from(losses.z);
    }

    /// True if no layer has a record.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The records by layer.
    pub fn layers(&self) -> impl Iterator<Item = (usize, &LayerRouting)> {
        self.layers.iter().map(|(layer, record)| (*layer, record))
    }

    /// As a list of numbers for `layers` layers of `experts` experts: zeros for layers without a
    /// record. Lists of several ranks may be summed.
    pub fn to_list(&self, layers: usize, experts: usize) -> Vec<f64> {
        let width = experts + 4;
        let mut list = vec![0.0; layers * width];
        for (layer, record) in self.layers.iter().filter(|(layer, _)| **layer < layers) {
            let list = &mut list[layer * width..(layer + 1) * width];
            list[..record.counts.len()].copy_from_slice(&record.counts);
            list[experts..].copy_from_slice(&[record.dropped, record.tokens, record.auxiliary, record.z]);
        }
        list
    }

    /// The record of a list of [`RoutingRecord::to_list`].
    pub fn from_list(list: &[f64], experts: usize) -> RoutingRecord {
        let layer = |(layer, list): (usize, &[f64])| {
            let (counts, rest) = list.split_at(experts);
            let [dropped, tokens, auxiliary, z] = *rest else { unreachable!("four numbers follow the counts") };
            (layer, LayerRouting { counts: counts.to_vec(), dropped, tokens, auxiliary, z })
        };
        let layers = list.chunks_exact(experts + 4).enumerate().map(layer);
        RoutingRecord { layers: layers.filter(|(_, layer)| layer.tokens > 0.0).collect() }
    }
}
