//! The current instruction of each lane of a rank. Lanes update it as they run; fault reports and
//! the watch read it.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trainyard_comm::Position;
use trainyard_program::Lane;

/// Activity of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Doing {
    /// Its own work: computing, loading, copying.
    Running,
    /// An exchange with other ranks, for which it may have to wait.
    Exchanging,
    /// Nothing: the instruction has finished, and the next one waits for its dependencies.
    Finished,
    /// Nothing: the instruction has failed.
    Failed,
}

/// Position of one lane.
#[derive(Clone, Debug)]
pub struct LanePosition {
    /// The instruction that it is at.
    pub at: Position,
    /// Its activity.
    pub doing: Doing,
    /// Time at which the activity began.
    pub since: Instant,
    /// The last instruction that it finished.
    pub finished: Option<Position>,
}

/// Positions of the lanes of one rank.
#[derive(Debug, Default)]
pub struct Positions(Mutex<BTreeMap<Lane, LanePosition>>);

impl Positions {
    /// Notes that the lane begins an instruction.
    pub fn enter(&self, lane: Lane, at: &Position) {
        let mut lanes = self.lock();
        let finished = match lanes.remove(&lane) {
            Some(LanePosition { at, doing: Doing::Finished, .. }) => Some(at),
            before => before.and_then(|before| before.finished),
        };
        lanes.insert(lane, LanePosition { at: at.clone(), doing: Doing::Running, since: Instant::now(), finished });
    }

    /// Notes that the lane's activity changes within its instruction.
    pub fn now(&self, lane: Lane, doing: Doing) {
        if let Some(position) = self.lock().get_mut(&lane) {
            (position.doing, position.since) = (doing, Instant::now());
        }
    }

    /// Notes that the device waits in an exchange for other ranks. Lanes that wait for the device
    /// are not stuck, so the time of their activity begins anew.
    pub fn device_exchanges(&self) {
        let running = |position: &&mut LanePosition| position.doing == Doing::Running;
        self.lock().values_mut().filter(running).for_each(|position| position.since = Instant::now());
    }

    /// Positions of all lanes that have begun an instruction.
    pub fn lanes(&self) -> Vec<(Lane, LanePosition)> {
        self.lock().iter().map(|(lane, position)| (*lane, position.clone())).collect()
    }

    /// The lane that has been at its own work for longest, if for longer than `limit`.
    pub fn stuck(&self, limit: Duration) -> Option<(Lane, LanePosition)> {
        let is_stuck = |position: &LanePosition| position.doing == Doing::Running && position.since.elapsed() > limit;
        let stuck = self.lanes().into_iter().filter(|(_, position)| is_stuck(position));
        stuck.min_by_key(|(_, position)| position.since)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Lane, LanePosition>> {
        // The lock may be poisoned by the panic to be reported. Entries are replaced whole, so they
        // are valid.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `in step 3, instruction 7 (Reduce block 1) for 1.2 s`
impl fmt::Display for LanePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.doing {
            Doing::Running => "in",
            Doing::Exchanging => "exchanging in",
            Doing::Finished => "idle after",
            Doing::Failed => "failed in",
        };
        write!(f, "{how} {} for {:.1} s", self.at, self.since.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(instruction: u32) -> Position {
        Position { step: 2, instruction, what: "Forward head".to_owned() }
    }

    #[test]
    fn what_was_finished_last_is_kept() {
        let positions = Positions::default();
        positions.enter(Lane::Compute, &at(3));
        assert_eq!(positions.lanes()[0].1.finished, None);
        positions.now(Lane::Compute, Doing::Finished);
        positions.enter(Lane::Compute, &at(5));
        positions.now(Lane::Compute, Doing::Failed);
        positions.enter(Lane::Compute, &at(6));
        let (lane, position) = positions.lanes().remove(0);
        assert_eq!((lane, position.at, position.finished), (Lane::Compute, at(6), Some(at(3))));
    }

    #[test]
    fn only_own_work_can_be_stuck() {
        let positions = Positions::default();
        positions.enter(Lane::Gather, &at(1));
        positions.now(Lane::Gather, Doing::Exchanging);
        positions.enter(Lane::Input, &at(0));
        positions.now(Lane::Input, Doing::Finished);
        assert!(positions.stuck(Duration::ZERO).is_none());
        positions.enter(Lane::Compute, &at(2));
        std::thread::sleep(Duration::from_millis(2));
        let (lane, position) = positions.stuck(Duration::from_millis(1)).unwrap();
        assert_eq!((lane, position.at.instruction), (Lane::Compute, 2));
        assert!(position.to_string().starts_with("in step 2, instruction 2 (Forward head) for "), "{position}");
        assert!(positions.stuck(Duration::from_secs(60)).is_none());
        // While the device waits for other ranks, only those may be stuck.
        positions.device_exchanges();
        assert!(positions.stuck(Duration::from_millis(1)).is_none());
    }
}
