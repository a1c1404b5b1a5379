//! Windows: the stretches of a step during which something that is not resident has to be there,
//! and when gradients begin and end.

use crate::order::Pass;
use crate::{BackwardPart, Phase, Reshard};

/// From the first to the last pass that uses a unit's parameters without letting go of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Whose parameters.
    pub unit: u32,
    /// Index of the first pass that uses them.
    pub first: usize,
    /// Index of the last one.
    pub last: usize,
    /// From how many neighbours they come.
    pub over: u32,
    /// One of how many parts stays afterwards.
    pub keep: u32,
}

/// How parameters come and go.
pub struct Reach {
    /// Whether they do: they are not resident.
    pub come_and_go: bool,
    /// The size of the shard group.
    pub shards: u32,
    /// What stays after forwards.
    pub reshard: Reshard,
    /// How many passes ahead they are brought.
    pub prefetch: usize,
}

/// The windows of all units, by first use. `uses` are the units whose parameters a pass reads. Two
/// uses no further apart than `prefetch` passes share a window: the next gather would begin before
/// the release.
pub fn parameter_windows(passes: &[Pass], units: usize, uses: impl Fn(u32) -> Vec<u32>, reach: &Reach) -> Vec<Window> {
    if !reach.come_and_go {
        return Vec::new();
    }
    let Reach { shards, reshard, .. } = *reach;
    let reach = if reshard == Reshard::Never { passes.len() } else { reach.prefetch.max(1) };
    let mut open: Vec<Option<usize>> = vec![None; units];
    let mut windows: Vec<Window> = Vec::new();
    for (at, pass) in passes.iter().enumerate() {
        for unit in uses(pass.unit) {
            let earlier = open[unit as usize];
            match earlier {
                Some(window) if at - windows[window].last <= reach => windows[window].last = at,
                _ => {
                    let over = earlier.map_or(shards, |window| {
                        windows[window].keep = part_that_stays(&passes[windows[window].last], shards, reshard);
                        windows[window].keep
                    });
                    open[unit as usize] = Some(windows.len());
                    windows.push(Window { unit, first: at, last: at, over, keep: shards });
                }
            }
        }
    }
    windows
}

/// After a forward, a part may stay for the backward.
fn part_that_stays(last_use: &Pass, shards: u32, reshard: Reshard) -> u32 {
    match (reshard, last_use.phase) {
        (Reshard::To(part), Phase::Forward) => part,
        _ => shards,
    }
}

/// When the gradient of a unit, or of a unit on one micro-batch, begins and is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GradientSpan {
    /// Whose.
    pub unit: u32,
    /// Of which micro-batch; when micro-batches share a buffer, of the last.
    pub micro_batch: u32,
    /// Index of the first pass that adds to it.
    pub first: usize,
    /// Index of the last one.
    pub last: usize,
}

/// The spans of all gradients, in no order that matters. With `apart`, every micro-batch has its
/// own.
pub fn gradient_spans(
    passes: &[Pass],
    units: usize,
    micro_batches: u32,
    adds_to: impl Fn(&Pass) -> Vec<u32>,
    apart: bool,
) -> Vec<GradientSpan> {
    let buffers = if apart { micro_batches as usize } else { 1 };
    let mut spans: Vec<Option<GradientSpan>> = vec![None; units * buffers];
    for (at, pass) in passes.iter().enumerate() {
        for unit in adds_to(pass) {
            let buffer = if apart { pass.micro_batch as usize } else { 0 };
            let span = spans[unit as usize * buffers + buffer].get_or_insert(GradientSpan {
                unit,
                micro_batch: pass.micro_batch,
                first: at,
                last: at,
            });
            span.last = at;
            span.micro_batch = pass.micro_batch;
        }
    }
    spans.into_iter().flatten().collect()
}

/// From when a unit's sum of gradients has to be on the device until it may leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stay {
    /// Whose.
    pub unit: u32,
    /// Index of the pass that first adds to it, or completes what a reduction adds to it.
    pub first: usize,
    /// Index of the last one.
    pub last: usize,
    /// Whether it begins there; otherwise it comes from its tier.
    pub begins: bool,
}

/// When sums of gradients are on the device, in order of their first pass: while a micro-batch adds
/// to them. `needed` is the first and the last pass of each of these times, ascending for every
/// unit. Two times no further apart than `reach` passes are one: the sum would be fetched before it
/// is gone.
pub fn gradient_stays(needed: impl Iterator<Item = GradientSpan>, units: usize, reach: usize) -> Vec<Stay> {
    let mut open: Vec<Option<usize>> = vec![None; units];
    let mut stays: Vec<Stay> = Vec::new();
    for GradientSpan { unit, first, last, .. } in needed {
        match open[unit as usize] {
            Some(stay) if first - stays[stay].last <= reach => stays[stay].last = last,
            before => {
                open[unit as usize] = Some(stays.len());
                stays.push(Stay { unit, first, last, begins: before.is_none() });
            }
        }
    }
    stays.sort_by_key(|stay| stay.first);
    stays
}

/// Per forward pass, the backward pass that its activations can be away until: one more than
/// `reach` passes later.
pub fn activation_trips(passes: &[Pass], micro_batches: u32, reach: usize) -> Vec<Option<usize>> {
    let place = |pass: &Pass| pass.unit as usize * micro_batches as usize + pass.micro_batch as usize;
    let mut forwards = vec![0; passes.iter().map(place).max().map_or(0, |last| last + 1)];
    let mut trips = vec![None; passes.len()];
    for (at, pass) in passes.iter().enumerate() {
        match pass.phase {
            Phase::Forward => forwards[place(pass)] = at,
            Phase::Backward if pass.part == BackwardPart::Weights => {}
            Phase::Backward => {
                let forward = forwards[place(pass)];
                trips[forward] = (at - forward > reach).then_some(at);
            }
        }
    }
    trips
}
