//! The choice of the transport of tensors between ranks. One way is through host memory, by the
//! communicator that the ranks have anyway. The other is NCCL, from GPU to GPU. All ranks choose
//! together, once; the choice is printed with its reason.

use crate::Result;
use crate::config::{Collectives, DeviceKind, Resolved};
use crate::state::does_not_fit;
use trainyard_comm::Communicator;
use trainyard_comm::nccl::version_text;
use trainyard_tensor::cuda::{Cuda, nccl_version};

/// A transport of tensors between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Way {
    /// Through host memory, by the communicator. Sums have a fixed order.
    #[default]
    Host,
    /// From GPU to GPU, by NCCL.
    Nccl {
        /// True if NCCL only moves the parts of a sum, and each rank adds its share in the fixed
        /// order. This gives the bits of [`Way::Host`].
        fixed_order: bool,
    },
}

/// A chosen transport and the reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The transport.
    pub way: Way,
    /// The reason in words; None if there was nothing to choose.
    pub why: Option<String>,
}

/// Facts about a rank that the choice depends on.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Candidate {
    host: String,
    /// The UUID of its GPU.
    gpu: [u64; 2],
    /// The version of its NCCL, 0 for none.
    nccl: u32,
}

/// The transport that a configuration requests, whether or not it turns out to be possible.
/// Predictions count memory for it.
pub fn asked(resolved: &Resolved) -> Way {
    match (resolved.config.parallel.collectives, resolved.config.compute.device) {
        (Collectives::Nccl, DeviceKind::Cuda(_)) => Way::Nccl { fixed_order: fixed_order(resolved).is_some() },
        _ => Way::Host,
    }
}

/// The key that asks for the fixed order.
fn fixed_order(resolved: &Resolved) -> Option<&'static str> {
    let training = &resolved.config.training;
    match (training.deterministic, training.elastic_bits) {
        (true, _) => Some("training.deterministic"),
        (_, true) => Some("training.elastic_bits"),
        _ => None,
    }
}

/// Chooses for the ranks of `world`, all of which call this together.
///
/// # Errors
/// A rank lacks something for its GPU; or for NCCL, if NCCL is requested.
pub fn choose(resolved: &Resolved, world: &Communicator) -> Result<Choice> {
    let needless =
        || {
            resolved.config.training.deterministic.then(|| {
                "training.deterministic changes nothing here: only NCCL sums in an order of its own".to_owned()
            })
        };
    let DeviceKind::Cuda(ordinal) = resolved.config.compute.device else {
        return Ok(Choice { way: Way::Host, why: needless() });
    };
    if world.size() == 1 {
        return Ok(Choice { way: Way::Host, why: needless() });
    }
    let gpu = Cuda::identity(ordinal.map_or_else(|| crate::device::place(Some(world)), Ok)?)?;
    let found = nccl_version();
    let (high, low) = gpu.split_at(8);
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    let mut all = vec![[0u64; 3]; world.size()];
    all[world.rank()] = [number(high), number(low), found.as_ref().map_or(0, |version| u64::from(*version))];
    world.all_gather_in_place(&mut all)?;
    let candidate = |(rank, [high, low, nccl]): (usize, &[u64; 3])| Candidate {
        host: world.place(rank).host,
        gpu: [*high, *low],
        nccl: *nccl as u32,
    };
    let ranks: Vec<Candidate> = all.iter().enumerate().map(candidate).collect();
    let missing = found.err().map(|error| error.to_string());
    let verify = resolved.config.parallel.verify;
    decide(resolved.config.parallel.collectives, verify, fixed_order(resolved), &ranks, missing).map_err(does_not_fit)
}

/// The choice, or the reason why the request is impossible. `missing` says what this rank lacks for
/// NCCL.
fn decide(
    asked: Collectives,
    verify: bool,
    fixed_order: Option<&str>,
    ranks: &[Candidate],
    missing: Option<String>,
) -> Result<Choice, String> {
    let against = against(verify, ranks, missing);
    let host = |because: String| Choice {
        way: Way::Host,
        why: Some(format!("ranks exchange through host memory, sums in the fixed order: {because}")),
    };
    let obstacle = match (asked, against) {
        (Collectives::Host, _) => return Ok(host("parallel.collectives = \"host\"".to_owned())),
        (Collectives::Nccl, Some(obstacle)) => {
            return Err(format!(
                "parallel.collectives = \"nccl\" cannot be had: {obstacle}. Leave it at \"auto\" to exchange through host memory"
            ));
        }
        (_, obstacle) => obstacle,
    };
    if let Some(obstacle) = obstacle {
        return Ok(host(obstacle));
    }
    let version = version_text(ranks[0].nccl);
    let sums = match fixed_order {
        Some(key) => {
            format!("sums in the fixed order, which {key} asks for: NCCL moves the parts and each rank adds its own")
        }
        None => {
            "gradients are summed in NCCL's own order, so that their last bits depend on the ranks and their links \
                 (training.deterministic = true fixes the order)"
                .to_owned()
        }
    };
    Ok(Choice {
        way: Way::Nccl { fixed_order: fixed_order.is_some() },
        why: Some(format!("ranks exchange from GPU to GPU by NCCL {version}, each having its own; {sums}")),
    })
}

/// The reason against NCCL, if there is one.
fn against(verify: bool, ranks: &[Candidate], missing: Option<String>) -> Option<String> {
    if verify {
        return Some("parallel.verify asks for checksums, which NCCL does not carry".to_owned());
    }
    for (rank, own) in ranks.iter().enumerate() {
        if let Some(other) = ranks[..rank].iter().position(|other| (&other.host, other.gpu) == (&own.host, own.gpu)) {
            return Some(format!("ranks {other} and {rank} share a GPU of {}", own.host));
        }
    }
    if let Some(rank) = ranks.iter().position(|rank| rank.nccl == 0) {
        let what = missing.unwrap_or_else(|| format!("there is none on {}", ranks[rank].host));
        return Some(format!("rank {rank} has no NCCL ({what})"));
    }
    let odd = ranks.iter().position(|rank| rank.nccl != ranks[0].nccl)?;
    let [first, other] = [0, odd].map(|rank| version_text(ranks[rank].nccl));
    Some(format!("rank 0 has NCCL {first} and rank {odd} {other}, which must be the same"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(host: &str, gpu: u64, nccl: u32) -> Candidate {
        Candidate { host: host.to_owned(), gpu: [7, gpu], nccl }
    }

    #[test]
    fn the_way_is_nccl_where_every_rank_has_its_own_gpu_and_says_why_not_elsewhere() {
        use Collectives::{Auto, Host, Nccl};
        let own = [rank("a", 0, 22_703), rank("a", 1, 22_703), rank("b", 0, 22_703)];
        let shared = [rank("a", 0, 22_703), rank("a", 1, 22_703), rank("a", 0, 22_703)];
        let without = [rank("a", 0, 22_703), rank("b", 0, 0)];
        let mixed = [rank("a", 0, 22_703), rank("b", 0, 21_805)];
        let free = Way::Nccl { fixed_order: false };
        for (asked, verify, fixed, ranks, way, words) in [
            (
                Auto,
                false,
                None,
                &own[..],
                Some(free),
                "by NCCL 2.27.3, each having its own; gradients are summed in NCCL's",
            ),
            (
                Nccl,
                false,
                Some("training.deterministic"),
                &own,
                Some(Way::Nccl { fixed_order: true }),
                "which training.det",
            ),
            (Host, false, None, &own, Some(Way::Host), "fixed order: parallel.collectives = \"host\""),
            (Auto, true, None, &own, Some(Way::Host), "parallel.verify asks for checksums"),
            (Auto, false, None, &shared, Some(Way::Host), "ranks 0 and 2 share a GPU of a"),
            (Auto, false, None, &without, Some(Way::Host), "rank 1 has no NCCL (there is none on b)"),
            (Auto, false, None, &mixed, Some(Way::Host), "rank 0 has NCCL 2.27.3 and rank 1 2.18.5"),
            (Nccl, false, None, &shared, None, "\"nccl\" cannot be had: ranks 0 and 2 share a GPU of a. Leave it at"),
            (Nccl, true, None, &own, None, "cannot be had: parallel.verify"),
        ] {
            let decided = decide(asked, verify, fixed, ranks, None);
            let (got, said) = match decided {
                Ok(choice) => (Some(choice.way), choice.why.unwrap()),
                Err(why) => (None, why),
            };
            assert!(got == way && said.contains(words), "{asked} {ranks:?}: {got:?}, {said}");
        }
        let missing = Some("NCCL is not found; it was looked for in x".to_owned());
        let said = decide(Auto, false, None, &without, missing).unwrap().why.unwrap();
        assert!(said.contains("rank 1 has no NCCL (NCCL is not found; it was looked for in x)"), "{said}");
    }
}
