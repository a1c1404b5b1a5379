//! The memory that ranks on this machine may hold, and where the limit comes from.

/// The most memory that a rank may hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// The origin of the limit.
    pub of: Bound,
}

/// The origin of a memory limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// `memory.limit`.
    Asked,
    /// The memory of a GPU.
    Gpu,
    /// A rank's share of the memory of this host, or of this process's limit.
    Host,
}

/// The memory available to ranks.
#[derive(Clone, Copy, Default, Debug)]
pub struct Room {
    /// Bytes of a rank, by `memory.limit`.
    pub asked: Option<u64>,
    /// Bytes of a GPU.
    pub gpu: Option<u64>,
    /// Bytes of a host for all of its ranks: for everything on processors, for offloaded state
    /// beside GPUs.
    pub host: Option<u64>,
    /// Hosts that ranks are spread over.
    pub hosts: u64,
}

impl Room {
    /// Bytes that each of `ranks` ranks may hold of its host's memory.
    pub fn share(&self, ranks: usize) -> Option<u64> {
        Some(self.host? / (ranks as u64).div_ceil(self.hosts).max(1))
    }

    /// The most memory that each of `ranks` ranks may hold on its device.
    pub fn limit(&self, ranks: usize) -> Option<Limit> {
        let host = if self.gpu.is_some() { None } else { self.share(ranks) };
        let bounds = [(self.asked, Bound::Asked), (self.gpu, Bound::Gpu), (host, Bound::Host)];
        bounds.into_iter().filter_map(|(bytes, of)| Some(Limit { bytes: bytes?, of })).min_by_key(|limit| limit.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_may_hold_what_is_asked_or_its_gpu_or_its_share_of_the_host() {
        let room = Room { asked: None, gpu: None, host: Some(1200), hosts: 1 };
        assert_eq!(room.limit(4), Some(Limit { bytes: 300, of: Bound::Host }));
        assert_eq!(Room { hosts: 2, ..room }.limit(4), Some(Limit { bytes: 600, of: Bound::Host }));
        let asked = Room { asked: Some(500), ..room };
        assert_eq!(asked.limit(2), Some(Limit { bytes: 500, of: Bound::Asked }));
        assert_eq!(asked.limit(4), Some(Limit { bytes: 300, of: Bound::Host }));
        // Beside a GPU the host holds only offloaded state.
        let gpu = Room { gpu: Some(400), ..asked };
        assert_eq!((gpu.limit(8), gpu.share(8)), (Some(Limit { bytes: 400, of: Bound::Gpu }), Some(150)));
        assert_eq!(Room { host: None, ..room }.limit(1), None);
    }
}
