//! Windows: the stretches of a step during which something that is not resident must be on the
//! device, and the spans of gradients.

use crate::passes::Pass;
use crate::{BackwardPart, Phase, Reshard};

/// The stretch from the first to the last pass that uses a unit's parameters without a release in
/// between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Index of the unit.
    pub unit: u32,
    /// Index of the first pass that uses its parameters.
    pub first: usize,
    /// Index of the last such pass.
    pub last: usize,
    /// Number of ranks that the gather runs over.
    pub over: u32,
    /// The 1/`keep` part stays after the release.
    pub keep: u32,
}

/// The rules by which parameters are gathered and released.
pub struct Reach {
    /// True if parameters are not resident.
    pub come_and_go: bool,
    /// The size of the shard group.
    pub shards: u32,
    /// The part that stays after forwards.
    pub reshard: Reshard,
    /// Number of passes by which gathers run ahead.
    pub prefetch: usize,
}

/// The windows of all units, in order of first use. `uses` gives the units whose parameters a pass
/// over a unit reads. Two uses that are at most `prefetch` passes apart share a window, because the
/// next gather would begin before the release.
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

/// The part that stays for the backward after a forward.
fn part_that_stays(last_use: &Pass, shards: u32, reshard: Reshard) -> u32 {
    match (reshard, last_use.phase) {
        (Reshard::To(part), Phase::Forward) => part,
        _ => shards,
    }
}

/// The span of a gradient, of a unit or of a unit on one micro-batch: from its first contribution
/// to its last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GradientSpan {
    /// Index of the unit.
    pub unit: u32,
    /// Index of the micro-batch; the last one, if micro-batches share a buffer.
    pub micro_batch: u32,
    /// Index of the first pass that adds to the gradient.
    pub first: usize,
    /// Index of the last such pass.
    pub last: usize,
}

/// The spans of all gradients, by unit. With `apart`, every micro-batch has its own, in ascending
/// order.
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

/// A stretch of passes during which a unit's gradient sum must be on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stay {
    /// Index of the unit.
    pub unit: u32,
    /// Index of the first pass that adds to the sum, or completes what a reduction adds to it.
    pub first: usize,
    /// Index of the last such pass.
    pub last: usize,
    /// True if the sum begins on the device, false if it comes from its tier.
    pub begins: bool,
}

/// The stretches during which gradient sums are on the device, in order of their first pass.
/// `needed` gives the passes that need each sum, ascending for every unit. Two stretches that are
/// at most `reach` passes apart become one, because the sum would be fetched before it is evicted.
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

/// Per forward pass, the backward pass until which its activations can be offloaded. It is more
/// than `reach` passes later.
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
