//! The ways of running a configuration on the machine at hand, priced one by one.
//!
//! The global batch is fixed. The search varies ranks, pipeline stages, context- and
//! tensor-parallel degree, sharding (ZeRO stage, resharding), micro-batch and accumulation,
//! recomputation and the reduction schedule. A way is a few settings over the configuration, so the
//! priced way is the one that runs. The caller provides the function that prices it: by making the
//! programs of the configuration with these settings, executing them on the `meta` device, and
//! simulating them with the profile of the machine.
//!
//! Savings of memory are tried only where they are needed, because they cost time: recomputation
//! computes again, and summing per micro-batch exchanges more. Offloading is slower than both, so
//! it is tried only if nothing fits without it.

pub mod race;
mod room;
mod sharing;

pub use room::{Bound, Limit, Room};
pub use sharing::Base;

use sharing::{Sharing, micro_batches, settings, sharings};
use std::collections::BTreeMap;
use trainyard_base::format_bytes;

/// A way of running the configuration, priced.
#[derive(Clone, Debug)]
pub struct Way {
    /// Settings over the configuration, as `--set` takes them.
    pub sets: Vec<String>,
    /// Ranks and sharding, in words.
    pub layout: String,
    /// Sequences of a micro-batch, and micro-batches of a rank.
    pub batch: [usize; 2],
    /// Savings of memory, in words.
    pub savings: String,
    /// Predicted seconds of a step.
    pub step_s: f64,
    /// Predicted peak of a rank.
    pub bytes: u64,
    /// The most bytes that a rank may hold, if there is a limit.
    pub limit: Option<Limit>,
    /// Bytes of the host's memory that a rank with a GPU holds.
    pub pinned_bytes: u64,
    /// Seconds of a rank's instructions by kind.
    pub kinds: BTreeMap<String, f64>,
    /// Seconds that computing waits for other lanes.
    pub waits_s: f64,
    /// True if state is offloaded to disk, or to the host's memory beside a GPU.
    pub offloaded: bool,
    /// The result of its trial, if there was one.
    pub tried: Option<Tried>,
}

/// The result of a trial.
#[derive(Clone, Copy, Debug)]
pub struct Tried {
    /// Median seconds of a step.
    pub seconds: f64,
    /// Expected seconds of a step, by prediction and trial.
    pub expected_s: f64,
}

/// All ways that were priced.
#[derive(Clone, Debug, Default)]
pub struct Ways {
    /// The ways within the memory limit, the fastest first: tried ways, then the others by
    /// prediction.
    pub fitting: Vec<Way>,
    /// The ways above the limit, the smallest first.
    pub too_large: Vec<Way>,
}

/// Savings of memory, from none to the most expensive: the checkpointing mode, and true for sums
/// per micro-batch.
const SAVINGS: [(&str, bool); 6] =
    [("none", false), ("none", true), ("selective", false), ("selective", true), ("full", false), ("full", true)];

/// Offloaded state, to disk or, beside a GPU, to the host. Combinations that move the least bytes
/// come first.
const OFFLOADS: [&[&str]; 8] = [
    &["optimizer"],
    &["activations"],
    &["optimizer", "activations"],
    &["optimizer", "gradients"],
    &["optimizer", "parameters"],
    &["optimizer", "gradients", "activations"],
    &["optimizer", "gradients", "parameters"],
    &["optimizer", "gradients", "parameters", "activations"],
];

/// Number of tried ways beside the best that are named.
const TRIED_SHOWN: usize = 3;

/// The price of the configuration with further settings: None if they contradict what the
/// configuration says, or leave nothing that can be run.
pub type Price<'a, E> = dyn FnMut(Asked) -> Result<Option<Way>, E> + 'a;

/// A way whose price is asked.
#[derive(Clone, PartialEq, Debug)]
pub struct Asked {
    /// Settings over the configuration, as `--set` takes them.
    pub sets: Vec<String>,
    /// The pipeline stages, the context-parallel, tensor-parallel and expert-parallel degree that
    /// the settings mean. Degrees given by hand are those of another way.
    pub model_degrees: [usize; 4],
}

/// Nothing can be chosen.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum NoWay {
    /// Every way exceeds the memory.
    #[error(
        "nothing fits: the least that any runnable plan needs is {least} on each rank ({way}), and {limit}; the \
         nearest that would: {nearest}, a smaller model, a shorter sequence, or an optimizer with less state"
    )]
    TooLarge {
        /// Memory of the smallest way, in words.
        least: String,
        /// The smallest way, in words.
        way: String,
        /// The limit, in words.
        limit: String,
        /// A change that would make it fit.
        nearest: String,
    },
    /// Settings given by hand exclude each other.
    #[error("no plan for this configuration is left by what is set by hand")]
    NothingLeft,
}

/// Prices the ways of running the configuration of `base` in `room`.
///
/// # Errors
///
/// Those of `price`.
pub fn ways<E>(base: &Base, room: &Room, price: &mut Price<'_, E>) -> Result<Ways, E> {
    let mut ways = Ways::default();
    ways.look(base, room, &[&[]], "none", price)?;
    // A GPU's host is faster than a disk.
    let tiers = if room.gpu.is_some() { &["host", "disk"][..] } else { &["disk"] };
    for tier in tiers {
        if ways.fitting.is_empty() && !ways.too_large.is_empty() {
            ways.look(base, room, &OFFLOADS, tier, price)?;
        }
    }
    ways.fitting.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    ways.too_large.sort_by_key(|way| way.bytes);
    Ok(ways)
}

/// A way in words: its layout, the sequences of a micro-batch and the micro-batches of a rank, and
/// its savings of memory.
pub fn words(layout: &str, [micro, accumulation]: [usize; 2], savings: &str) -> String {
    format!("{layout}, micro-batch {micro} x {accumulation}, recomputation {savings}")
}

impl Way {
    /// True if `other` resolved to the same way, because settings given by hand left nothing to
    /// choose.
    fn says_the_same(&self, other: &Way) -> bool {
        (&self.layout, self.batch, &self.savings) == (&other.layout, other.batch, &other.savings)
    }

    /// The way in words.
    pub fn words(&self) -> String {
        words(&self.layout, self.batch, &self.savings)
    }
}

impl Ways {
    /// Prices, for every sharding and micro-batch, the savings in order until one fits, with each
    /// of `offloads` in `tier`.
    fn look<E>(
        &mut self,
        base: &Base,
        room: &Room,
        offloads: &[&[&str]],
        tier: &str,
        price: &mut Price<'_, E>,
    ) -> Result<(), E> {
        for sharing in sharings(base) {
            for micro in micro_batches(base, sharing) {
                let saved = savings(base, sharing, micro, offloads, tier);
                self.first_that_fits(room, sharing, saved, price)?;
            }
        }
        Ok(())
    }

    fn first_that_fits<E>(
        &mut self,
        room: &Room,
        sharing: Sharing,
        saved: impl Iterator<Item = Vec<String>>,
        price: &mut Price<'_, E>,
    ) -> Result<(), E> {
        let model_degrees = [sharing.stages, sharing.context, sharing.tensor, sharing.expert_ranks];
        for sets in saved {
            let Some(way) = price(Asked { sets, model_degrees })? else { continue };
            let on_host = room.share(sharing.ranks()).is_none_or(|share| way.pinned_bytes <= share);
            let fits = on_host && way.limit.is_none_or(|limit| way.bytes <= limit.bytes);
            let list = if fits { &mut self.fitting } else { &mut self.too_large };
            if !list.iter().any(|known| known.says_the_same(&way)) {
                list.push(way);
            }
            if fits {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The fastest way that fits.
    ///
    /// # Errors
    ///
    /// Nothing fits in the memory limit; the error names the needs of the smallest way.
    pub fn best(&self) -> Result<&Way, NoWay> {
        if let Some(best) = self.fitting.first() {
            return Ok(best);
        }
        let least = self.too_large.first().ok_or(NoWay::NothingLeft)?;
        let limit = format_bytes(least.limit.map_or(0, |limit| limit.bytes));
        let (limit, nearest) = match least.limit.map(|limit| limit.of) {
            Some(Bound::Gpu) => (format!("a GPU here has {limit}"), "more GPUs, a larger one".to_owned()),
            Some(Bound::Host) | None => {
                (format!("a rank's share of this machine's memory is {limit}"), "more memory".to_owned())
            }
            Some(Bound::Asked) => {
                let mebibytes = least.bytes.div_ceil(1 << 20);
                (format!("memory.limit is {limit}"), format!("memory.limit = \"{mebibytes}MiB\""))
            }
        };
        Err(NoWay::TooLarge { least: format_bytes(least.bytes), way: least.words(), limit, nearest })
    }

    /// The reasons for the best way: its bottleneck, and the losses of others.
    pub fn reasons(&self) -> Vec<String> {
        let Some(best) = self.fitting.first() else { return Vec::new() };
        let waits = 100.0 * best.waits_s / best.step_s;
        let mut dearest: Vec<(&String, &f64)> = best.kinds.iter().collect();
        dearest.sort_by(|a, b| b.1.total_cmp(a.1));
        let dearest: Vec<String> = dearest
            .iter()
            .take(3)
            .map(|(kind, seconds)| format!("{kind} {:.0} %", 100.0 * **seconds / best.step_s))
            .collect();
        let mut said = vec![format!(
            "It computes for {:.0} % of the step and waits for exchanges and data for {waits:.0} %; instructions: {}.",
            100.0 - waits,
            dearest.join(", ")
        )];
        if let Some(limit) = best.limit {
            said.push(format!(
                "A rank holds {} of {} that it may.",
                format_bytes(best.bytes),
                format_bytes(limit.bytes)
            ));
        }
        if let Some(faster) =
            self.too_large.iter().filter(|way| way.step_s < best.step_s).min_by(|a, b| a.step_s.total_cmp(&b.step_s))
        {
            said.push(format!("Faster, but too large: {} needs {}.", faster.words(), format_bytes(faster.bytes)));
        }
        match (best.tried, self.fitting.get(1)) {
            (Some(tried), _) => said.push(self.tried(tried)),
            (None, Some(next)) => said.push(format!("The next best ({}) {}.", next.words(), loses(best, next))),
            (None, None) => {}
        }
        said
    }

    /// A sentence about the trials: the best, with the result `tried`, and the next ones.
    fn tried(&self, tried: Tried) -> String {
        let next = self.fitting.iter().skip(1).filter_map(|way| Some((way, way.tried?)));
        let next: Vec<String> = next
            .take(TRIED_SHOWN)
            .map(|(way, theirs)| {
                let worse = 100.0 * (theirs.expected_s / tried.expected_s - 1.0);
                let (took, predicted) = (1e3 * theirs.seconds, 1e3 * way.step_s);
                format!("{} takes {worse:.1} % longer (tried {took:.2} ms, predicted {predicted:.2})", way.words())
            })
            .collect();
        format!(
            "Tried in turn, it took {:.2} ms. Weighing predictions and trials, {}.",
            1e3 * tried.seconds,
            next.join("; ")
        )
    }
}

/// The settings of a division and micro-batch, with savings of memory from none to the dearest.
fn savings<'a>(
    base: &'a Base,
    sharing: Sharing,
    micro: usize,
    offloads: &'a [&'a [&'a str]],
    tier: &'a str,
) -> impl Iterator<Item = Vec<String>> + 'a {
    let accumulation = base.global_batch / sharing.data / micro;
    // Where gradients are not sharded, summing them more often saves nothing.
    let saves = move |each: bool| !each || sharing.stage >= 2 && accumulation > 1;
    SAVINGS.into_iter().filter(move |(_, each)| saves(*each)).flat_map(move |(mode, each)| {
        offloads.iter().map(move |offload| {
            let mut sets = settings(base, sharing, micro, mode, each);
            sets.extend(offload.iter().map(|what| format!("memory.offload.{what}={tier}")));
            sets
        })
    })
}

/// The loss of `next` against `best`, by the kinds of instruction that grew most.
fn loses(best: &Way, next: &Way) -> String {
    let of = |way: &Way, kind: &str| way.kinds.get(kind).copied().unwrap_or(0.0);
    let mut kinds: Vec<(&str, f64)> = best
        .kinds
        .keys()
        .chain(next.kinds.keys())
        .map(|kind| (kind.as_str(), of(next, kind) - of(best, kind)))
        .filter(|(_, more)| more.abs() > 0.002 * best.step_s)
        .collect();
    kinds.push(("waiting", next.waits_s - best.waits_s));
    kinds.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(b.0)));
    kinds.dedup();
    let grown: Vec<String> = kinds
        .iter()
        .filter(|(_, more)| *more > 0.002 * best.step_s)
        .take(2)
        .map(|(kind, more)| format!("{:.1} ms more {kind}", 1e3 * more))
        .collect();
    let worse = 100.0 * (next.step_s / best.step_s - 1.0);
    let why = if grown.is_empty() { String::new() } else { format!(": {}", grown.join(", ")) };
    format!("takes {worse:.1} % longer{why}")
}
