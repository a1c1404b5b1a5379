//! A network between hosts that was not measured, given by its bandwidth and latency.

use crate::machine::{CollectiveCurve, MachineProfile};
use std::fmt;
use std::str::FromStr;

/// The link of each host to the others.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NetworkLink {
    /// Bits per second that a host sends, and as many that it receives at the same time.
    pub bits_per_s: f64,
    /// Seconds from one host to another.
    pub latency_s: f64,
}

/// A text that names no link.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no network: give bandwidth and latency, such as 1Gbps,20ms or 100Mbps,5ms")]
pub struct NetworkError(String);

impl FromStr for NetworkLink {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<NetworkLink, NetworkError> {
        let error = || NetworkError(text.to_owned());
        let (bandwidth, latency) = text.split_once(',').ok_or_else(error)?;
        let number = |text: &str, units: [(&str, f64); 3]| -> Option<f64> {
            let (number, unit) = text.trim().split_at(text.trim().find(|c: char| c.is_ascii_alphabetic())?);
            let (_, scale) = units.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
            Some(number.trim().parse::<f64>().ok()? * scale).filter(|value| value.is_finite() && *value >= 0.0)
        };
        let bits_per_s = number(bandwidth, [("Gbps", 1e9), ("Mbps", 1e6), ("kbps", 1e3)]).filter(|value| *value > 0.0);
        let latency_s = number(latency, [("ms", 1e-3), ("us", 1e-6), ("s", 1.0)]);
        Ok(NetworkLink { bits_per_s: bits_per_s.ok_or_else(error)?, latency_s: latency_s.ok_or_else(error)? })
    }
}

impl fmt::Display for NetworkLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NetworkLink { bits_per_s, latency_s } = self;
        let (bits, unit) = if *bits_per_s >= 1e9 { (bits_per_s / 1e9, "Gb/s") } else { (bits_per_s / 1e6, "Mb/s") };
        write!(f, "{bits} {unit} and {} ms", 1e3 * latency_s)
    }
}

impl NetworkLink {
    /// Seconds of a collective on a buffer of `bytes`, between one rank on each of `hosts`. Each
    /// rank sends a part to every other at once, and for an all-reduce receives the sums the same
    /// way.
    pub fn collective_s(&self, operation: &str, hosts: u32, bytes: f64) -> f64 {
        let passes = if operation == "all_reduce" { 2.0 } else { 1.0 };
        let moved = bytes * f64::from(hosts - 1) / f64::from(hosts);
        passes * (8.0 * moved / self.bits_per_s + self.latency_s)
    }
}

impl MachineProfile {
    /// The profile of `hosts` such machines, with this network between them. `ranks` of each host
    /// communicate across at once.
    pub fn over(&self, link: NetworkLink, hosts: u32, ranks: u32) -> MachineProfile {
        let curve = |operation: &str| {
            // Powers of two from 1 byte to 1 TiB.
            let point = |exponent: i32| {
                let bytes = 2f64.powi(exponent);
                [bytes, link.collective_s(operation, hosts, f64::from(ranks) * bytes).max(1e-9)]
            };
            CollectiveCurve {
                operation: operation.to_owned(),
                ranks: hosts,
                hosts,
                alpha_s: 0.0,
                beta_s_per_byte: 0.0,
                points: (0..=40).map(point).collect(),
            }
        };
        let within = self.collectives.iter().filter(|curve| curve.hosts == 1).cloned();
        let collectives = within.chain(["all_reduce", "reduce_scatter", "all_gather"].map(curve)).collect();
        MachineProfile { collectives, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_read_and_priced() {
        let link: NetworkLink = "1Gbps,20ms".parse().unwrap();
        assert_eq!(link, NetworkLink { bits_per_s: 1e9, latency_s: 0.02 });
        assert_eq!(link.to_string(), "1 Gb/s and 20 ms");
        assert_eq!("100 Mbps, 500us".parse::<NetworkLink>().unwrap().latency_s, 5e-4);
        for wrong in ["", "1Gbps", "1Gb,2ms", "0Gbps,1ms", "-1Gbps,1ms", "1Gbps,xms", "fastGbps,1ms"] {
            assert!(wrong.parse::<NetworkLink>().is_err(), "{wrong}");
        }
        // 125 MB at 1 Gb/s: between two hosts each sends a half, twice.
        assert!((link.collective_s("all_reduce", 2, 125e6) - 1.04).abs() < 1e-9);
        assert!((link.collective_s("all_gather", 4, 125e6) - 0.77).abs() < 1e-9);
    }
}
