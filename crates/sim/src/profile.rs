//! Hardware profiles: facts about devices and networks, each with its source, in TOML.
//!
//! The built-in profiles lie in `data/devices.toml` and `data/networks.toml`. A user's own file has
//! the same tables, `[[device]]` and `[[network]]`; a name in it hides the built-in one. Nothing
//! here is fitted: [`Constants`](crate::Constants) describe how well kernels use a device.

use serde::Deserialize;
use std::collections::BTreeMap;

/// The generation of a device. Efficiency curves are per generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Generation {
    /// V100.
    Volta,
    /// A100, A10.
    Ampere,
    /// L4, RTX 4090.
    Ada,
    /// H100, H200.
    Hopper,
    /// B200, GB200.
    Blackwell,
    /// B300, GB300.
    #[serde(rename = "blackwell-ultra")]
    BlackwellUltra,
    /// MI300X.
    Cdna3,
    /// A host's cores.
    Cpu,
}

/// The number format of products.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// IEEE single precision.
    Fp32,
    /// TensorFloat-32 products of f32 operands.
    Tf32,
    /// IEEE half precision.
    Fp16,
    /// bfloat16.
    Bf16,
    /// 8-bit floats.
    Fp8,
    /// 4-bit floats.
    Fp4,
}

impl Format {
    /// The name in profiles.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Fp32 => "fp32",
            Format::Tf32 => "tf32",
            Format::Fp16 => "fp16",
            Format::Bf16 => "bf16",
            Format::Fp8 => "fp8",
            Format::Fp4 => "fp4",
        }
    }

    /// Bytes of an operand.
    pub const fn bytes(self) -> f64 {
        match self {
            Format::Fp32 | Format::Tf32 => 4.0,
            Format::Fp16 | Format::Bf16 => 2.0,
            Format::Fp8 => 1.0,
            Format::Fp4 => 0.5,
        }
    }
}

/// A device.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Its name, e.g. `A100-80GB`.
    pub name: String,
    /// Its generation.
    pub family: Generation,
    /// Peak of dense products, 1e12 FLOP/s, by format.
    pub dense_tflops: BTreeMap<Format, f64>,
    /// The best 16-bit product (32-bit on hosts) that was measured in a framework, 1e12 FLOP/s.
    pub product_tflops: f64,
    /// Memory, 1e9 bytes.
    pub memory_gb: f64,
    /// Memory bandwidth, 1e9 bytes/s.
    pub memory_gb_s: f64,
    /// Number of cores that tiles of a product are dealt to.
    pub multiprocessors: u32,
    /// Bus bandwidth of a ring inside a node, 1e9 bytes/s.
    pub link_gb_s: f64,
    /// Rate of copies between its memory and pinned memory of its host, 1e9 bytes/s each way.
    #[serde(default = "pcie_4")]
    pub host_gb_s: f64,
    /// Price of an hour, US dollars. An order of magnitude for comparisons, to be replaced by the
    /// user's own price.
    #[serde(default)]
    pub usd_per_hour: f64,
    /// Where the numbers are from.
    pub source: String,
}

/// Rate of copies of pinned memory over sixteen lanes of PCI Express 4.0, whose raw rate is 31.5:
/// about 0.8 of it, as over 3.0 and 5.0.
fn pcie_4() -> f64 {
    25.0
}

impl Device {
    /// True if products run in `format` itself, because its peak is stated.
    pub fn has(&self, format: Format) -> bool {
        self.dense_tflops.contains_key(&format)
    }

    /// Peak FLOP/s of dense products in `format`. A format that the device lacks runs in the next
    /// wider one that it has.
    pub fn peak(&self, format: Format) -> f64 {
        let wider = [Format::Fp4, Format::Fp8, Format::Bf16, Format::Fp16, Format::Tf32, Format::Fp32];
        let from = wider.iter().position(|f| *f == format).unwrap_or(0);
        let peak = wider[from..].iter().find_map(|f| self.dense_tflops.get(f));
        peak.copied().unwrap_or(self.product_tflops) * 1e12
    }

    /// The best measured rate of products in `format`, FLOP/s: the measured 16-bit rate scaled by
    /// the peaks.
    pub fn product_rate(&self, format: Format) -> f64 {
        self.product_tflops * 1e12 * self.peak(format) / self.peak(Format::Bf16)
    }
}

/// The network between nodes.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Its name, e.g. `ndr-8`.
    pub name: String,
    /// Bytes per second and node, one way, that collectives reach, 1e9.
    pub gb_s: f64,
    /// Latency of a ring's step between nodes, microseconds.
    pub ring_us: f64,
    /// Latency of a tree's level between nodes, microseconds.
    pub tree_us: f64,
    /// Seconds that a step on 64 nodes waits for its slowest rank. It falls with the fourth power
    /// of the number of nodes.
    #[serde(default)]
    pub straggle_s: f64,
    /// Number of nodes that a rail or pod connects at full bandwidth; None: all of them.
    #[serde(default)]
    pub pod_nodes: Option<u32>,
    /// Factor by which bandwidth between pods is lower; 1 is non-blocking.
    #[serde(default = "one")]
    pub oversubscription: f64,
    /// Where the numbers are from.
    pub source: String,
}

fn one() -> f64 {
    1.0
}

/// Devices and networks by name.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profiles {
    /// Devices.
    #[serde(default, rename = "device")]
    pub devices: Vec<Device>,
    /// Networks.
    #[serde(default, rename = "network")]
    pub networks: Vec<Network>,
}

/// The reason why a profile cannot be used.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ProfileError {
    /// The text does not have the format of profiles.
    #[error("the hardware profile does not parse: {0}")]
    Parse(String),
    /// A number is one that no hardware has.
    #[error("{what} {name}: {field} is {value}, and must be positive")]
    NotPositive {
        /// `device` or `network`.
        what: &'static str,
        /// Name of the profile.
        name: String,
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: f64,
    },
    /// The name is unknown.
    #[error("no {what} is called `{asked}`; known: {known}")]
    Unknown {
        /// `device` or `network`.
        what: &'static str,
        /// The name that was asked for.
        asked: String,
        /// The names that exist.
        known: String,
    },
}

impl Profiles {
    /// The built-in profiles.
    pub fn builtin() -> Profiles {
        let parse = |text| Profiles::parse(text).expect("built-in profiles are tested");
        let mut all = parse(include_str!("../data/devices.toml"));
        all.networks = parse(include_str!("../data/networks.toml")).networks;
        all
    }

    /// Parses the text of a TOML file.
    ///
    /// # Errors
    ///
    /// Text that does not parse, and numbers that are not positive.
    pub fn parse(text: &str) -> Result<Profiles, ProfileError> {
        let profiles: Profiles = toml::from_str(text).map_err(|error| ProfileError::Parse(error.to_string()))?;
        for device in &profiles.devices {
            for (field, value) in [
                ("product_tflops", device.product_tflops),
                ("memory_gb", device.memory_gb),
                ("memory_gb_s", device.memory_gb_s),
                ("multiprocessors", f64::from(device.multiprocessors)),
                ("link_gb_s", device.link_gb_s),
                ("dense_tflops", device.dense_tflops.values().copied().fold(f64::INFINITY, f64::min)),
            ] {
                positive("device", &device.name, field, value)?;
            }
        }
        for network in &profiles.networks {
            positive("network", &network.name, "gb_s", network.gb_s)?;
            positive("network", &network.name, "oversubscription", network.oversubscription)?;
        }
        Ok(profiles)
    }

    /// These profiles, followed by those of `other` with other names.
    pub fn before(mut self, other: Profiles) -> Profiles {
        let new = other.devices.into_iter().filter(|d| self.devices.iter().all(|ours| ours.name != d.name));
        let new: Vec<Device> = new.collect();
        self.devices.extend(new);
        let new = other.networks.into_iter().filter(|n| self.networks.iter().all(|ours| ours.name != n.name));
        let new: Vec<Network> = new.collect();
        self.networks.extend(new);
        self
    }

    /// The device called `name`, in upper or lower case.
    ///
    /// # Errors
    ///
    /// An unknown name; the error lists the names that exist.
    pub fn device(&self, name: &str) -> Result<&Device, ProfileError> {
        self.devices.iter().find(|device| device.name.eq_ignore_ascii_case(name)).ok_or_else(|| ProfileError::Unknown {
            what: "device",
            asked: name.into(),
            known: self.devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    /// The network called `name`, in upper or lower case.
    ///
    /// # Errors
    ///
    /// As [`device`](Profiles::device).
    pub fn network(&self, name: &str) -> Result<&Network, ProfileError> {
        self.networks.iter().find(|n| n.name.eq_ignore_ascii_case(name)).ok_or_else(|| ProfileError::Unknown {
            what: "network",
            asked: name.into(),
            known: self.networks.iter().map(|n| n.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }
}

fn positive(what: &'static str, name: &str, field: &'static str, value: f64) -> Result<(), ProfileError> {
    if value > 0.0 && value.is_finite() {
        Ok(())
    } else {
        Err(ProfileError::NotPositive { what, name: name.into(), field, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_profiles_parse_and_name_their_sources() {
        let all = Profiles::builtin();
        assert!(all.devices.len() >= 14 && all.networks.len() >= 6);
        for device in &all.devices {
            assert!(!device.source.is_empty(), "{}", device.name);
            assert!(device.product_rate(Format::Bf16) <= 1.05 * device.peak(Format::Bf16), "{}", device.name);
        }
        assert!(all.networks.iter().all(|network| !network.source.is_empty()));
    }

    #[test]
    fn a_format_that_a_device_lacks_runs_in_a_wider_one() {
        let all = Profiles::builtin();
        let a100 = all.device("a100-80gb").unwrap();
        assert_eq!(a100.peak(Format::Fp8), 312e12);
        assert_eq!(a100.peak(Format::Tf32), 156e12);
        assert_eq!(all.device("V100-16GB").unwrap().peak(Format::Tf32), 15.7e12);
    }

    #[test]
    fn bad_profiles_are_refused_in_words() {
        for (text, says) in [
            ("[[device]]\nname = 1", "does not parse"),
            ("[[network]]\nname = \"x\"\ngb_s = 0.0\nring_us = 1.0\ntree_us = 1.0\nsource = \"me\"", "gb_s is 0"),
            ("[[network]]\nname = \"x\"\ngbs = 1.0", "unknown field `gbs`"),
        ] {
            let error = Profiles::parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let error = Profiles::builtin().device("A1000").unwrap_err().to_string();
        assert!(error.contains("A100-80GB"), "{error}");
    }

    #[test]
    fn ones_own_profile_hides_the_built_in_one() {
        let text = "[[network]]\nname = \"ndr-8\"\ngb_s = 100.0\nring_us = 1.0\ntree_us = 1.0\nsource = \"me\"";
        let all = Profiles::parse(text).unwrap().before(Profiles::builtin());
        assert_eq!(all.network("NDR-8").unwrap().gb_s, 100.0);
        assert!(all.device("H100").is_ok());
    }
}
