//! The constants that no datasheet gives. There are few of them, and they are the same for every
//! model, device and source.
//!
//! They are in `data/constants.toml`. `cargo xtask validate --fit` fits those of the table `fitted`
//! on all sources, and for `data/left_out.toml` on all but one. docs/cost-model.md derives each
//! one.

use crate::profile::Generation;
use serde::Deserialize;
use std::collections::BTreeMap;

/// All constants: the fields of `fitted` and `assumed` in the file, by name.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(try_from = "File")]
pub struct Constants {
    /// Sustained over best measured rate of products on V100. Clocks fall under hours of full
    /// power.
    pub sustained_volta: f64,
    /// The same for Ampere.
    pub sustained_ampere: f64,
    /// The same for Hopper and Ada.
    pub sustained_hopper: f64,
    /// The same for Blackwell.
    pub sustained_blackwell: f64,
    /// The same for Blackwell Ultra, over the rate that was measured on a B200.
    pub sustained_blackwell_ultra: f64,
    /// Further share that products of 8-bit operands reach, scales and transposes included.
    pub eight_bit_share: f64,
    /// The same for 4-bit operands.
    pub four_bit_share: f64,
    /// Cost of a tile's start and end, as an addition to its k on an A100 in 16 bits.
    pub tile_start_k: f64,
    /// Share of an unfilled last wave of tiles that is lost: 1 all of it, 0 none (stream-K).
    pub wave_share: f64,
    /// As `tile_start_k`, for the batched products of unfused attention.
    pub batched_start_k: f64,
    /// Traffic of memory-bound kernels, over the traffic of reading and writing their operands
    /// once.
    pub stream_factor: f64,
    /// Traffic of chains of kernels, one per operation, over that of one kernel.
    pub unfused_factor: f64,
    /// Traffic of the loss, over the traffic of writing and reading its logits once.
    pub loss_factor: f64,
    /// Seconds of compute lost per second of a collective beside it, which takes cores.
    pub interference: f64,
    /// Additional seconds lost per second of a collective that moves bytes at the full rate of the
    /// device's links, which takes memory bandwidth and power.
    pub interference_moved: f64,
    /// Host time per kernel in an eager framework, microseconds.
    pub dispatch_us: f64,
    /// Host time per collective inside a unit and per rank of its group, when pipeline messages
    /// synchronise the host, milliseconds.
    pub host_sync_ms: f64,
    /// Addition to `host_sync_ms` for each further node of the group, as a share of it.
    pub host_sync_node: f64,
    /// Share of memory bandwidth that streaming kernels reach.
    pub memory_share: f64,
    /// Share of the f32 peak that products reach if their rows are no multiple of 16 bytes, which
    /// tensor cores cannot load.
    pub misaligned_share: f64,
    /// Start and end of a kernel, microseconds.
    pub launch_us: f64,
    /// Start of a collective, microseconds.
    pub collective_start_us: f64,
    /// A step of a ring inside a node, microseconds.
    pub link_hop_us: f64,
    /// Start of a pipeline message, microseconds.
    pub message_us: f64,
    /// Cost of a step outside its instructions (loader, logging, norms), seconds.
    pub step_s: f64,
    /// Memory of the driver and the communication library, 1e9 bytes.
    pub context_gb: f64,
    /// Memory that a caching allocator cannot use, as a share of the memory in use.
    pub fragmentation: f64,
    /// The same if its segments grow.
    pub expandable: f64,
    /// Memory that a caching allocator holds beyond the memory in use while there is room, if its
    /// segments do not grow.
    pub cached: f64,
    attention: BTreeMap<AttentionKind, BTreeMap<Generation, Shares>>,
    prior: BTreeMap<String, Prior>,
}

/// The value of a constant that is expected before any measurement.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prior {
    /// The most probable value.
    pub mean: f64,
    /// Standard deviation of the logarithm.
    pub spread: f64,
}

/// The attention kernel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKind {
    /// Scores are written to memory. Products, mask, softmax and dropout are separate kernels.
    Unfused,
    /// FlashAttention (Dao et al. 2022), or its Triton form.
    Flash1,
    /// FlashAttention-2 (Dao 2023).
    Flash2,
    /// FlashAttention-3 (Shah et al. 2024) or cuDNN's of that time.
    Flash3,
}

#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shares {
    forward: f64,
    backward: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    fitted: BTreeMap<String, f64>,
    prior: BTreeMap<String, Prior>,
    assumed: BTreeMap<String, f64>,
    attention: BTreeMap<AttentionKind, BTreeMap<Generation, Shares>>,
}

impl Constants {
    /// The built-in constants.
    pub fn builtin() -> Constants {
        toml::from_str(include_str!("../data/constants.toml")).expect("built-in constants are tested")
    }

    /// Sustained over best measured rate of products.
    pub fn sustained(&self, family: Generation) -> f64 {
        match family {
            Generation::Volta => self.sustained_volta,
            Generation::Ampere => self.sustained_ampere,
            Generation::Cpu => 1.0,
            Generation::Ada | Generation::Hopper | Generation::Cdna3 => self.sustained_hopper,
            Generation::Blackwell => self.sustained_blackwell,
            Generation::BlackwellUltra => self.sustained_blackwell_ultra,
        }
    }

    /// Share of peak that the fused attention kernel `kind` reaches. A generation without an entry
    /// takes the nearest older one.
    pub fn attention_share(&self, kind: AttentionKind, family: Generation, backward: bool) -> f64 {
        let table = &self.attention[&kind];
        let family = if family <= Generation::Ada { Generation::Ampere } else { Generation::Hopper };
        let shares = table[&family];
        if backward { shares.backward } else { shares.forward }
    }

    /// The constants that were fitted without the source called `source`; these constants if no fit
    /// left it out.
    pub fn without(&self, source: &str) -> Constants {
        let file: BTreeMap<String, BTreeMap<String, f64>> =
            toml::from_str(include_str!("../data/left_out.toml")).expect("built-in constants are tested");
        let mut constants = self.clone();
        for (name, value) in constants.fitted_mut() {
            if let Some(fitted) = file.get(source).and_then(|fitted| fitted.get(name)) {
                *value = *fitted;
            }
        }
        constants
    }

    /// True if the constant called `name` is at most 1.
    pub fn is_share(name: &str) -> bool {
        // Nobody published the best product of a Blackwell Ultra; it may be faster than assumed.
        (name.starts_with("sustained") && !name.ends_with("ultra")) || name.ends_with("share")
    }

    /// The priors of the fitted constants, in the order of [`fitted_mut`](Constants::fitted_mut).
    pub fn priors(&self) -> Vec<Prior> {
        let names = self.clone().fitted_mut().map(|(name, _)| name);
        names.iter().map(|name| self.prior[*name]).collect()
    }

    /// The fitted constants by name, for a fit to change.
    pub fn fitted_mut(&mut self) -> [(&'static str, &mut f64); 18] {
        [
            ("sustained_volta", &mut self.sustained_volta),
            ("sustained_ampere", &mut self.sustained_ampere),
            ("sustained_hopper", &mut self.sustained_hopper),
            ("sustained_blackwell", &mut self.sustained_blackwell),
            ("sustained_blackwell_ultra", &mut self.sustained_blackwell_ultra),
            ("eight_bit_share", &mut self.eight_bit_share),
            ("four_bit_share", &mut self.four_bit_share),
            ("tile_start_k", &mut self.tile_start_k),
            ("wave_share", &mut self.wave_share),
            ("batched_start_k", &mut self.batched_start_k),
            ("stream_factor", &mut self.stream_factor),
            ("unfused_factor", &mut self.unfused_factor),
            ("loss_factor", &mut self.loss_factor),
            ("interference", &mut self.interference),
            ("interference_moved", &mut self.interference_moved),
            ("dispatch_us", &mut self.dispatch_us),
            ("host_sync_ms", &mut self.host_sync_ms),
            ("host_sync_node", &mut self.host_sync_node),
        ]
    }
}

impl TryFrom<File> for Constants {
    type Error = String;

    fn try_from(file: File) -> Result<Constants, String> {
        let File { fitted, prior, assumed, attention } = file;
        let get = |table: &BTreeMap<String, f64>, name: &str| {
            table.get(name).copied().ok_or_else(|| format!("`{name}` is missing"))
        };
        let fit = |name: &str| get(&fitted, name);
        let assume = |name: &str| get(&assumed, name);
        Ok(Constants {
            sustained_volta: fit("sustained_volta")?,
            sustained_ampere: fit("sustained_ampere")?,
            sustained_hopper: fit("sustained_hopper")?,
            sustained_blackwell: fit("sustained_blackwell")?,
            sustained_blackwell_ultra: fit("sustained_blackwell_ultra")?,
            eight_bit_share: fit("eight_bit_share")?,
            four_bit_share: fit("four_bit_share")?,
            tile_start_k: fit("tile_start_k")?,
            wave_share: fit("wave_share")?,
            batched_start_k: fit("batched_start_k")?,
            stream_factor: fit("stream_factor")?,
            unfused_factor: fit("unfused_factor")?,
            loss_factor: fit("loss_factor")?,
            interference: fit("interference")?,
            interference_moved: fit("interference_moved")?,
            dispatch_us: fit("dispatch_us")?,
            host_sync_ms: fit("host_sync_ms")?,
            host_sync_node: fit("host_sync_node")?,
            memory_share: assume("memory_share")?,
            misaligned_share: assume("misaligned_share")?,
            launch_us: assume("launch_us")?,
            collective_start_us: assume("collective_start_us")?,
            link_hop_us: assume("link_hop_us")?,
            message_us: assume("message_us")?,
            step_s: assume("step_s")?,
            context_gb: assume("context_gb")?,
            fragmentation: assume("fragmentation")?,
            expandable: assume("expandable")?,
            cached: assume("cached")?,
            attention,
            prior,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_constants_parse_and_have_priors() {
        let mut constants = Constants::builtin();
        let file: File = toml::from_str(include_str!("../data/constants.toml")).unwrap();
        let named: Vec<&str> = constants.fitted_mut().map(|(name, _)| name).into();
        assert_eq!((named.len(), named.len()), (file.fitted.len(), file.prior.len()));
        assert!(named.iter().all(|name| file.fitted.contains_key(*name)));
        for family in [
            Generation::Volta,
            Generation::Ampere,
            Generation::Ada,
            Generation::Hopper,
            Generation::Blackwell,
            Generation::Cdna3,
        ] {
            assert!(constants.sustained(family) > 0.3);
            for kind in [AttentionKind::Flash1, AttentionKind::Flash2, AttentionKind::Flash3] {
                assert!(constants.attention_share(kind, family, true) > 0.05);
            }
        }
    }
}
