//! The cost of collectives: latency and bandwidth, by algorithm and by the position of the group.
//!
//! This is the alpha-beta model (Hockney 1994; Thakur et al. 2005) in the form that NCCL's own
//! tuner uses (`src/graph/tuning.cc`). A ring moves `(n - 1) / n` of the buffer per pass at the
//! bandwidth of its slowest link, after one latency per step. A tree pays one latency per level. An
//! all-reduce makes two passes and takes the faster algorithm; all-gather and reduce-scatter are
//! rings. A ring that spans nodes crosses the network once per node. Groups that share a node's
//! network share its bandwidth. Beyond a pod, bandwidth is divided by the oversubscription.

use crate::cluster::{Cluster, Placed};
use crate::constants::Constants;
use crate::profile::Generation;

/// The operation of a collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Every rank gets the parts of all ranks.
    AllGather,
    /// Every rank gets a part of the sum.
    ReduceScatter,
    /// Every rank gets the whole sum.
    AllReduce,
    /// Every rank sends a part to every other rank.
    AllToAll,
}

/// Seconds of `operation` in a group at the position `placed`. `bytes` counts the whole buffer (an
/// all-gather's output).
pub fn collective_s(cluster: &Cluster, constants: &Constants, operation: Operation, bytes: f64, placed: Placed) -> f64 {
    if placed.ranks <= 1 || bytes <= 0.0 {
        return 0.0;
    }
    let n = f64::from(placed.ranks);
    let passes = if operation == Operation::AllReduce { 2.0 } else { 1.0 };
    let moved = bytes * (n - 1.0) / n;
    let link = cluster.device.link_gb_s * 1e9 * linked_share(cluster, placed);
    let start = constants.collective_start_us * 1e-6;
    let hop = constants.link_hop_us * 1e-6;
    if placed.nodes == 1 {
        return start + passes * (moved / link + hop * (n - 1.0));
    }
    let bandwidth = network_bandwidth(cluster, placed).min(link);
    let nodes = f64::from(placed.nodes);
    if operation == Operation::AllToAll {
        // Bytes that stay inside a node do not cross the network.
        let across = bytes * (nodes - 1.0) / nodes;
        return start + across / bandwidth + cluster.network.ring_us * 1e-6 * (nodes - 1.0).min(4.0);
    }
    let ring_latency = cluster.network.ring_us * 1e-6 * nodes + hop * (n - nodes);
    let ring = start + passes * (moved / bandwidth + ring_latency);
    if operation != Operation::AllReduce {
        return ring;
    }
    // A double binary tree reaches about nine tenths of the ring's bandwidth.
    let levels = nodes.log2().ceil();
    let tree = start + 2.0 * bytes / (0.9 * bandwidth) + cluster.network.tree_us * 1e-6 * levels;
    ring.min(tree)
}

/// Seconds of an exchange with experts: each rank of the group sends `bytes`, `copies` of each
/// token. A token crosses the network once for each other node that has some of its experts, and is
/// copied there (DeepEP, HybridEP).
pub fn to_experts_s(cluster: &Cluster, constants: &Constants, bytes: f64, copies: f64, placed: Placed) -> f64 {
    if placed.nodes == 1 || copies < 1.0 {
        return collective_s(cluster, constants, Operation::AllToAll, bytes, placed);
    }
    let nodes = f64::from(placed.nodes);
    let reached = nodes * (1.0 - (1.0 - 1.0 / nodes).powf(copies));
    let across = bytes * reached / copies * (nodes - 1.0) / nodes;
    // Every rank of a node sends at the same time.
    let each = network_bandwidth(cluster, placed) / f64::from(placed.ranks_per_node);
    let inside = bytes / (cluster.device.link_gb_s * 1e9);
    constants.collective_start_us * 1e-6
        + cluster.network.ring_us * 1e-6 * (nodes - 1.0).min(4.0)
        + (across / each).max(inside)
}

/// Seconds of one message between neighbouring pipeline stages. Every device of a node sends one at
/// the same time.
pub fn message_s(cluster: &Cluster, constants: &Constants, bytes: f64, across_nodes: bool) -> f64 {
    if across_nodes {
        let each = cluster.network.gb_s * 1e9 / f64::from(cluster.devices_per_node);
        constants.message_us * 1e-6 + bytes / each
    } else {
        constants.message_us * 1e-6 + bytes / (cluster.device.link_gb_s * 1e9)
    }
}

/// The share of a device's links that lead to ranks of its group. Behind a switch all do. V100s are
/// linked to each other, so a group that is a part of a node uses a part of the links.
fn linked_share(cluster: &Cluster, placed: Placed) -> f64 {
    let peers = f64::from(cluster.devices_per_node.max(2) - 1);
    match cluster.device.family {
        Generation::Volta if placed.ranks_per_node > 1 => f64::from(placed.ranks_per_node - 1) / peers,
        _ => 1.0,
    }
}

/// Bytes per second that one rank of a group gets from the network.
fn network_bandwidth(cluster: &Cluster, placed: Placed) -> f64 {
    let network = &cluster.network;
    let beyond = network.pod_nodes.is_some_and(|pod| placed.nodes > pod);
    let node = network.gb_s * 1e9 / if beyond { network.oversubscription } else { 1.0 };
    node / f64::from(placed.sharing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profiles;

    fn cluster(text: &str) -> Cluster {
        Cluster::parse(text, &Profiles::builtin()).unwrap()
    }

    /// Bus bandwidth as nccl-tests define it, GB/s.
    fn bus(cluster: &Cluster, operation: Operation, bytes: f64, ranks: u32) -> f64 {
        let seconds = collective_s(cluster, &Constants::builtin(), operation, bytes, cluster.place(ranks, 1));
        let n = f64::from(ranks);
        let factor = if operation == Operation::AllReduce { 2.0 } else { 1.0 } * (n - 1.0) / n;
        bytes * factor / seconds / 1e9
    }

    fn near(ours: f64, measured: f64, tolerance: f64) {
        assert!((ours / measured - 1.0).abs() <= tolerance, "{ours:.1} against {measured}");
    }

    /// Sources: stas00/ml-engineering network/README.md, rings of 8 GiB; the playbook's chart, 256
    /// MB on EFA.
    #[test]
    fn large_messages_reach_the_measured_bus_bandwidth() {
        near(bus(&cluster("1x8xH200"), Operation::AllReduce, 8.6e9, 8), 365.6, 0.03);
        near(bus(&cluster("1x8xB200"), Operation::AllReduce, 8.6e9, 8), 682.2, 0.03);
        near(bus(&cluster("4x8xB200:ndr-8"), Operation::AllReduce, 17.2e9, 32), 381.8, 0.15);
        for (nodes, measured) in [(2, 184.6), (4, 119.0), (8, 69.0), (16, 55.0), (32, 28.0)] {
            let efa = cluster(&format!("{nodes}x8xH100:efa-v2"));
            near(bus(&efa, Operation::AllGather, 268e6, 8 * nodes), measured, 0.35);
        }
    }

    #[test]
    fn more_ranks_more_bytes_and_sharing_never_make_a_collective_faster() {
        let (cluster, constants) = (cluster("64x8xH100"), Constants::builtin());
        for operation in [Operation::AllGather, Operation::ReduceScatter, Operation::AllReduce, Operation::AllToAll] {
            let mut last = 0.0;
            for nodes in 1..=6 {
                let seconds = collective_s(&cluster, &constants, operation, 1e8, cluster.place(8 << nodes, 1));
                assert!(seconds >= last, "{operation:?} on {nodes} doublings");
                last = seconds;
            }
            let placed = cluster.place(8, 8);
            let once = collective_s(&cluster, &constants, operation, 1e8, placed);
            assert!(collective_s(&cluster, &constants, operation, 2e8, placed) > once);
            assert!(collective_s(&cluster, &constants, operation, 1e8, Placed { sharing: 1, ..placed }) < once);
        }
    }

    #[test]
    fn a_group_of_one_costs_nothing_and_a_spine_costs_its_factor() {
        let mut cluster = cluster("16x8xH100");
        let constants = Constants::builtin();
        let one = collective_s(&cluster, &constants, Operation::AllReduce, 1e9, cluster.place(1, 1));
        assert_eq!(one, 0.0);
        let placed = cluster.place(128, 1);
        let flat = collective_s(&cluster, &constants, Operation::AllGather, 1e10, placed);
        cluster.network.pod_nodes = Some(8);
        cluster.network.oversubscription = 4.0;
        let spine = collective_s(&cluster, &constants, Operation::AllGather, 1e10, placed);
        near(spine / flat, 4.0, 0.1);
    }
}
