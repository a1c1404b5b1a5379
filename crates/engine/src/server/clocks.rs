//! The accounting of a server: which worker has committed which clocks, and which version the
//! parameters have.

use super::Commit;
use std::collections::VecDeque;

/// The commits of all workers that no update has taken yet, and the version of the parameters.
#[derive(Clone, Debug)]
pub struct Clocks {
    staleness: u64,
    /// Number of workers that an update does not wait for.
    backups: usize,
    version: u64,
    /// Per worker, the clock that it commits next. With back-up workers it may leave some out.
    next: Vec<u64>,
    /// Per worker, its commits of the clocks from `version` on.
    commits: Vec<VecDeque<Commit>>,
}

impl Clocks {
    /// Clocks of `workers` workers that may be `staleness` clocks ahead of the parameters. An
    /// update waits for all of them but `backups`.
    pub fn new(workers: usize, staleness: u64, backups: usize) -> Clocks {
        Clocks { staleness, backups, version: 0, next: vec![0; workers], commits: vec![VecDeque::new(); workers] }
    }

    /// Number of clocks whose updates are in the parameters.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The clock that `worker` commits next. Without back-up workers it has committed as many.
    pub fn committed(&self, worker: usize) -> u64 {
        self.next[worker]
    }

    /// The oldest version that a pull for `clock` may return.
    pub fn oldest(clock: u64, staleness: u64) -> u64 {
        clock.saturating_sub(staleness)
    }

    /// Checks that a push of `worker` for `clock` is one of the clock that it is in, and that there
    /// is room for its gradient. With back-up workers a late worker leaves out clocks whose updates
    /// are made.
    ///
    /// # Errors
    /// A sentence about a push of another clock.
    pub fn check_push(&self, worker: usize, clock: u64) -> Result<(), String> {
        let now = self.committed(worker);
        let leaves_out = self.backups > 0 && clock > now && clock <= self.version;
        if clock != now && !leaves_out {
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

    /// Records that all gradients of `worker` for a clock have come. Those of a clock whose update
    /// is made are dropped.
    ///
    /// # Errors
    /// As [`Clocks::check_push`].
    pub fn commit(&mut self, worker: usize, commit: Commit) -> Result<(), String> {
        self.check_push(worker, commit.clock)?;
        self.next[worker] = commit.clock + 1;
        if commit.clock >= self.version {
            self.commits[worker].push_back(commit);
        }
        Ok(())
    }

    /// The workers whose gradients the next update takes: all that have committed its clock; None
    /// while too few have.
    pub fn due(&self) -> Option<Vec<usize>> {
        let workers: Vec<usize> = (0..self.commits.len()).filter(|worker| !self.commits[*worker].is_empty()).collect();
        (workers.len() + self.backups >= self.commits.len()).then_some(workers)
    }

    /// The commits of `workers` for the next clock; None while some are missing.
    pub fn commits_of(&self, workers: &[usize]) -> Option<Vec<(usize, Commit)>> {
        workers.iter().map(|worker| Some((*worker, self.commits[*worker].front()?.clone()))).collect()
    }

    /// Records that the update of the next clock was made, or skipped. Commits of that clock that
    /// have come since are dropped.
    ///
    /// # Panics
    /// If more workers than the back-up workers have not committed that clock.
    pub fn advance(&mut self) {
        assert!(self.due().is_some(), "an update takes the commits of all workers but the back-up workers");
        self.commits.iter_mut().for_each(|commits| drop(commits.pop_front()));
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
        let mut clocks = Clocks::new(3, 2, 0);
        for worker in [2, 0] {
            clocks.commit(worker, commit(0)).unwrap();
        }
        clocks.commit(2, commit(1)).unwrap();
        assert_eq!((clocks.due(), clocks.missing()), (None, vec![1]));
        clocks.commit(1, commit(0)).unwrap();
        assert_eq!(clocks.due(), Some(vec![0, 1, 2]));
        assert_eq!(clocks.commits_of(&[0, 2]), Some(vec![(0, commit(0)), (2, commit(0))]));
        clocks.advance();
        assert_eq!((clocks.version(), clocks.missing()), (1, vec![0, 1]));
        assert_eq!([0, 1, 2].map(|worker| clocks.committed(worker)), [1, 1, 2]);
    }

    #[test]
    fn clocks_out_of_turn_and_beyond_the_bound_are_refused() {
        let mut clocks = Clocks::new(2, 1, 0);
        assert!(clocks.commit(0, commit(1)).unwrap_err().contains("is in clock 0"));
        clocks.commit(0, commit(0)).unwrap();
        assert!(clocks.commit(0, commit(0)).unwrap_err().contains("is in clock 1"));
        clocks.commit(0, commit(1)).unwrap();
        assert!(clocks.check_push(0, 2).unwrap_err().contains("the bound is 1"));
        clocks.commit(1, commit(0)).unwrap();
        clocks.advance();
        clocks.check_push(0, 2).unwrap();
    }

    /// A commit that comes after its update, or while the update is made, is dropped, and its
    /// worker may go on with the clock of the parameters.
    #[test]
    fn late_commits_are_dropped_and_their_workers_catch_up() {
        let mut clocks = Clocks::new(3, 0, 1);
        for clock in 0..2 {
            clocks.commit(0, commit(clock)).unwrap();
            assert_eq!(clocks.due(), None);
            clocks.commit(2, commit(clock)).unwrap();
            assert_eq!(clocks.due(), Some(vec![0, 2]));
            if clock == 1 {
                clocks.commit(1, commit(1)).unwrap();
            }
            clocks.advance();
        }
        assert_eq!((clocks.version(), clocks.missing(), clocks.committed(1)), (2, vec![0, 1, 2], 2));
        assert!(clocks.check_push(1, 1).unwrap_err().contains("is in clock 2"));
        assert!(clocks.check_push(1, 3).unwrap_err().contains("is in clock 2"));
        clocks.commit(0, commit(2)).unwrap();
        clocks.commit(1, commit(2)).unwrap();
        assert_eq!(clocks.due(), Some(vec![0, 1]));
    }

    /// Workers that take turns by chance, each as far as pulls let it. The oracle counts commits.
    #[test]
    fn no_worker_is_further_ahead_than_the_bound_whatever_the_order() {
        for seed in 0..200u64 {
            let (workers, staleness) = (1 + seed as usize % 4, seed / 4 % 5);
            let mut clocks = Clocks::new(workers, staleness, 0);
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

    /// Workers that take turns by chance and take some turns for a step, of which one is slow. A
    /// worker that is late goes on with the clock of the parameters. Every update takes exactly the
    /// commits of its clock that had come, and never fewer than it may.
    #[test]
    fn updates_with_back_up_workers_take_what_has_come_whatever_the_order() {
        for seed in 0..200u64 {
            let (workers, backups) = (2 + seed as usize % 4, 1 + seed as usize / 4 % 2);
            let backups = backups.min(workers - 1);
            let mut clocks = Clocks::new(workers, 0, backups);
            let mut computing = vec![0u64; workers];
            let (mut taken, mut draw) = (0, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            let mut committed = 0;
            for _ in 0..400 {
                draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // Worker 0 has a turn less often than the others.
                let worker = (draw >> 33) as usize % (4 * workers) % (workers + 1);
                if worker == workers {
                    continue;
                }
                let clock = computing[worker];
                if clock <= clocks.version() {
                    let counts = clock == clocks.version();
                    clocks.commit(worker, commit(clock)).unwrap();
                    committed += usize::from(counts);
                    computing[worker] = (clock + 1).max(clocks.version());
                }
                if let Some(due) = clocks.due() {
                    assert!(due.len() + backups >= workers && due.len() == committed, "seed {seed}");
                    assert!(
                        clocks.commits_of(&due).unwrap().iter().all(|(_, commit)| commit.clock == clocks.version())
                    );
                    (taken, committed) = (taken + due.len(), 0);
                    clocks.advance();
                }
            }
            let version = clocks.version() as usize;
            assert!(version > 20 && taken < version * workers, "seed {seed}: {taken} pushes in {version} updates");
        }
    }
}
