//! A cluster: devices in nodes, nodes in pods.

use crate::profile::{Device, Format, Network, Profiles};

/// Devices of one kind, in nodes of one size.
#[derive(Clone, PartialEq, Debug)]
pub struct Cluster {
    /// The device.
    pub device: Device,
    /// Number of devices of a node, connected by the device's links.
    pub devices_per_node: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// The network that connects the nodes.
    pub network: Network,
}

/// The position of a group of ranks in the network. Ranks are assigned to devices in order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Placed {
    /// Number of ranks of the group.
    pub ranks: u32,
    /// Number of its ranks on one node.
    pub ranks_per_node: u32,
    /// Number of nodes that it spans.
    pub nodes: u32,
    /// Number of such groups that share a node's network.
    pub sharing: u32,
}

/// Maximum number of devices of a cluster.
pub const DEVICES_MAX: u32 = 1 << 20;

/// The reason why a cluster is invalid.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ClusterError {
    /// The text is not `NODESxDEVICESxNAME`.
    #[error("`{0}` is no cluster: write NODESxDEVICESxDEVICE, e.g. 64x8xH100, with :NETWORK after it if wanted")]
    Format(String),
    /// The cluster is larger than anything here is made for.
    #[error("`{0}` has more than {DEVICES_MAX} devices")]
    Large(String),
    /// No profile has the name.
    #[error(transparent)]
    Profile(#[from] crate::ProfileError),
}

impl Cluster {
    /// Parses `NODESxDEVICESxNAME`, e.g. `64x8xH100`, or `NODESxDEVICESxNAME:NETWORK`. Without a
    /// network it takes the one that the device is usually sold with: see [`usual_network`].
    ///
    /// # Errors
    ///
    /// Text of another form, counts of zero, names that `profiles` lacks.
    pub fn parse(text: &str, profiles: &Profiles) -> Result<Cluster, ClusterError> {
        let malformed = || ClusterError::Format(text.into());
        let (shape, network) = match text.split_once(':') {
            Some((shape, network)) => (shape, Some(network)),
            None => (text, None),
        };
        let mut parts = shape.splitn(3, ['x', 'X']);
        let mut count = || parts.next()?.trim().parse::<u32>().ok().filter(|count| *count > 0);
        let nodes = count().ok_or_else(malformed)?;
        let devices_per_node = count().ok_or_else(malformed)?;
        if nodes.checked_mul(devices_per_node).is_none_or(|devices| devices > DEVICES_MAX) {
            return Err(ClusterError::Large(text.into()));
        }
        let device = profiles.device(parts.next().ok_or_else(malformed)?.trim())?.clone();
        let network = profiles.network(network.unwrap_or(usual_network(&device, devices_per_node)))?.clone();
        Ok(Cluster { device, devices_per_node, nodes, network })
    }

    /// The number of all devices.
    pub fn devices(&self) -> u32 {
        self.nodes * self.devices_per_node
    }

    /// FLOP/s of all devices at the peak of `format`.
    pub fn peak(&self, format: Format) -> f64 {
        f64::from(self.devices()) * self.device.peak(format)
    }

    /// The position of a group of `ranks` whose neighbours are `stride` ranks apart.
    pub fn place(&self, ranks: u32, stride: u32) -> Placed {
        let ranks_per_node = (self.devices_per_node / stride.max(1)).clamp(1, ranks.max(1));
        let nodes = ranks.div_ceil(ranks_per_node);
        let sharing = (self.devices_per_node / ranks_per_node).max(1);
        Placed { ranks, ranks_per_node, nodes, sharing }
    }
}

/// The usual network between nodes of `devices_per_node` times `device`: that of the vendor's own
/// systems.
pub fn usual_network(device: &Device, devices_per_node: u32) -> &'static str {
    use crate::profile::Generation;
    match device.family {
        Generation::Volta => "edr-1",
        Generation::Ampere if device.link_gb_s > 100.0 => "hdr-8",
        Generation::Hopper if device.link_gb_s > 100.0 => "ndr-8",
        // A rack is one domain of links.
        Generation::Blackwell if devices_per_node > 8 => "nvl72-ndr",
        Generation::BlackwellUltra if devices_per_node > 8 => "nvl72-xdr",
        Generation::Blackwell => "ndr-8",
        Generation::BlackwellUltra => "xdr-8",
        Generation::Cdna3 => "ndr-8",
        Generation::Cpu | Generation::Ada | Generation::Ampere | Generation::Hopper => "ethernet-25g",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_are_written_as_nodes_devices_and_name() {
        let profiles = Profiles::builtin();
        let cluster = Cluster::parse("64x8xH100-PCIe:ndr-8", &profiles).unwrap();
        assert_eq!((cluster.nodes, cluster.devices_per_node, cluster.devices()), (64, 8, 512));
        assert_eq!(Cluster::parse("4x8xA100-80GB", &profiles).unwrap().network.name, "hdr-8");
        for (text, says) in [
            ("8xH100", "is no cluster"),
            ("0x8xH100", "is no cluster"),
            ("1x8xH1000", "known:"),
            ("65536x65536xH100", "more than 1048576"),
        ] {
            let error = Cluster::parse(text, &profiles).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn groups_lie_on_nodes_in_order_of_ranks() {
        let cluster = Cluster::parse("4x8xH100", &Profiles::builtin()).unwrap();
        let place = |ranks, stride| {
            let placed = cluster.place(ranks, stride);
            (placed.ranks_per_node, placed.nodes, placed.sharing)
        };
        assert_eq!(place(8, 1), (8, 1, 1)); // tensor parallelism inside a node
        assert_eq!(place(16, 1), (8, 2, 1)); // and across two
        assert_eq!(place(4, 8), (1, 4, 8)); // its data-parallel groups
        assert_eq!(place(16, 2), (4, 4, 2));
        assert_eq!(place(2, 2), (2, 1, 4)); // two groups of two inside a node's half
    }
}
