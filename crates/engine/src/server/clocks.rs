//! The accounting of a server: which worker has committed which clocks, and which version the
//! parameters have.

use super::Commit;
use std::collections::VecDeque;

/// The commits of all workers that no update has taken yet, and the version of the parameters.
#[derive(Clone, Debug)]
pub struct Clocks {
    staleness: u64,
    version: u64,
    /// Per worker, its commits of the clocks from `version` on.
    commits: Vec<VecDeque<Commit>>,
}

impl Clocks {
    /// Clocks of `workers` workers that may be `staleness` clocks ahead of the parameters.
    pub fn new(workers: usize, staleness: u64) -> Clocks {
        Clocks { staleness, version: 0, commits: vec![VecDeque::new(); workers] }
    }

    /// Number of clocks whose updates are in the parameters.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Number of clocks that `worker` has committed.
    pub fn committed(&self, worker: usize) -> u64 {
        self.version + self.commits[worker].len() as u64
    }

    /// The oldest version that a pull for `clock` may return.
    pub fn oldest(clock: u64, staleness: u64) -> u64 {
        clock.saturating_sub(staleness)
    }

    /// Checks that a push of `worker` for `clock` is one of the clock that it is in, and that there
    /// is room for its gradient.
    ///
    /// # Errors
    /// A sentence about a push of another clock.
    pub fn check_push(&self, worker: usize, clock: u64) -> Result<(), String> {
        let now = self.committed(worker);
        if clock != now {
            return Err(format!("worker {worker} pushes gradients of clock {clock}, and is in clock {now}"));
        }
        if clock > self.version + self.staleness {
            let version = self.version;
            return Err(format!(
                "worker {worker} is in clock {clock}, and the parameters in version {version}: the bound is {}",
                self.staleness
            ));
        }
        Ok(())
    }

    /// Records that all gradients of `worker` for a clock have come.
    ///
    /// # Errors
    /// As [`Clocks::check_push`].
    pub fn commit(&mut self, worker: usize, commit: Commit) -> Result<(), String> {
        self.check_push(worker, commit.clock)?;
        self.commits[worker].push_back(commit);
        Ok(())
    }

    /// The commits of all workers for the next clock, in their order; None while some are missing.
    pub fn due(&self) -> Option<Vec<Commit>> {
        self.commits.iter().map(|commits| commits.front().cloned()).collect()
    }

    /// Records that the update of the next clock was made, or skipped.
    ///
    /// # Panics
    /// If some worker has not committed that clock.
    pub fn advance(&mut self) {
        self.commits.iter_mut().for_each(|commits| {
            commits.pop_front().expect("an update takes the commits of all workers");
        });
        self.version += 1;
    }

    /// The workers for whose commits the next update waits.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.commits.len()).filter(|worker| self.commits[*worker].is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(clock: u64) -> Commit {
        Commit { clock, targets: 1, divisor: 1, rate_factor: 1.0, clip_norm: None, updates_before: 0, losses: vec![] }
    }

    #[test]
    fn an_update_takes_one_commit_of_every_worker() {
        let mut clocks = Clocks::new(3, 2);
        for worker in [2, 0] {
            clocks.commit(worker, commit(0)).unwrap();
        }
        clocks.commit(2, commit(1)).unwrap();
        assert_eq!((clocks.due(), clocks.missing()), (None, vec![1]));
        clocks.commit(1, commit(0)).unwrap();
        assert_eq!(clocks.due(), Some(vec![commit(0); 3]));
        clocks.advance();
        assert_eq!((clocks.version(), clocks.missing()), (1, vec![0, 1]));
        assert_eq!([0, 1, 2].map(|worker| clocks.committed(worker)), [1, 1, 2]);
    }

    #[test]
    fn clocks_out_of_turn_and_beyond_the_bound_are_refused() {
        let mut clocks = Clocks::new(2, 1);
        assert!(clocks.commit(0, commit(1)).unwrap_err().contains("is in clock 0"));
        clocks.commit(0, commit(0)).unwrap();
        assert!(clocks.commit(0, commit(0)).unwrap_err().contains("is in clock 1"));
        clocks.commit(0, commit(1)).unwrap();
        assert!(clocks.check_push(0, 2).unwrap_err().contains("the bound is 1"));
        clocks.commit(1, commit(0)).unwrap();
        clocks.advance();
        clocks.check_push(0, 2).unwrap();
    }

    /// Workers that take turns by chance, each as far as pulls let it. The oracle counts commits.
    #[test]
    fn no_worker_is_further_ahead_than_the_bound_whatever_the_order() {
        for seed in 0..200u64 {
            let (workers, staleness) = (1 + seed as usize % 4, seed / 4 % 5);
            let mut clocks = Clocks::new(workers, staleness);
            let (mut done, mut draw) = (vec![0u64; workers], seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            let mut most = 0;
            for _ in 0..300 {
                draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let worker = (draw >> 33) as usize % workers;
                if clocks.version() >= Clocks::oldest(done[worker], staleness) {
                    most = most.max(done[worker] - clocks.version());
                    clocks.commit(worker, commit(done[worker])).unwrap();
                    done[worker] += 1;
                }
                while clocks.due().is_some() {
                    clocks.advance();
                }
                assert_eq!(clocks.version(), *done.iter().min().unwrap());
            }
            assert!(most <= staleness && (workers == 1 || most == staleness), "seed {seed}: {most} of {staleness}");
        }
    }
}
