//! The state that the ranks of one process share beside their groups: places, last positions, the
//! first failure.

use super::group::{Group, Member};
use crate::backend::Common;
use crate::communicator::Communicator;
use crate::error::{CommError, Failure};
use crate::place::{Place, Position};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A rank's last position, and when it was posted.
pub(crate) type Post = Mutex<Option<(Position, Instant)>>;

/// Makes the communicators of a world of threads.
pub struct World;

impl World {
    /// One communicator for each of `ranks` ranks, all on this host; device `r` is rank `r`'s. Hand
    /// each to a thread of its own.
    ///
    /// # Panics
    /// If `ranks` is 0.
    #[expect(clippy::new_ret_no_self, reason = "a world is its communicators; there is nothing else to hold")]
    pub fn new(ranks: usize) -> Vec<Communicator> {
        Self::with_places((0..ranks).map(|rank| Place::here(rank as u32)).collect())
    }

    /// As [`World::new`], with the places given: for ranks that are bound to devices, and for tests
    /// of hierarchies.
    ///
    /// # Panics
    /// If there is no place.
    pub fn with_places(places: Vec<Place>) -> Vec<Communicator> {
        assert!(!places.is_empty(), "a world has at least one rank");
        let ranks = places.len();
        let posts = places.iter().map(|_| Mutex::default()).collect();
        let shared = Arc::new(Shared {
            places,
            posts,
            failure: OnceLock::new(),
            stop: OnceLock::new(),
            common: Mutex::default(),
        });
        let group = Arc::new(Group::new(shared, (0..ranks as u32).collect()));
        (0..ranks)
            .map(|rank| Communicator::new(Arc::new(Member::new(group.clone(), rank)), "world".to_owned()))
            .collect()
    }
}

/// The world as its groups see it.
pub(crate) struct Shared {
    pub places: Vec<Place>,
    posts: Vec<Post>,
    failure: OnceLock<CommError>,
    /// The first rank that was asked to stop.
    stop: OnceLock<u32>,
    pub common: Common,
}

impl Shared {
    pub fn failure(&self) -> Option<CommError> {
        self.failure.get().cloned()
    }

    /// The first failure counts.
    pub fn fail(&self, failure: Failure) -> CommError {
        self.failure.get_or_init(|| failure.into()).clone()
    }

    /// The first rank counts.
    pub fn request_stop(&self, rank: u32) {
        let _ = self.stop.set(rank);
    }

    pub fn stop_requested(&self) -> Option<u32> {
        self.stop.get().copied()
    }

    pub fn post(&self, rank: u32, position: Position) {
        store(&self.posts[rank as usize], position);
    }

    pub fn position_of(&self, rank: u32) -> Option<(Position, Duration)> {
        load(&self.posts[rank as usize])
    }
}

/// Replaces what was posted. A poisoned lock is no obstacle: the value is replaced whole.
pub(crate) fn store(post: &Post, position: Position) {
    *post.lock().unwrap_or_else(PoisonError::into_inner) = Some((position, Instant::now()));
}

/// The position that was posted, and the time since then.
pub(crate) fn load(post: &Post) -> Option<(Position, Duration)> {
    let post = post.lock().unwrap_or_else(PoisonError::into_inner);
    post.as_ref().map(|(position, at)| (position.clone(), at.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn ranks_of_a_world_have_one_value_of_each_type_in_common() {
        let [one, other] = [World::new(2), World::new(1)];
        let of = |comm: &Communicator| comm.common::<AtomicUsize>().unwrap();
        of(&one[0]).store(7, Ordering::Relaxed);
        assert_eq!(of(&one[1]).load(Ordering::Relaxed), 7);
        assert_eq!(*one[1].common::<u32>().unwrap(), 0);
        assert_eq!(of(&other[0]).load(Ordering::Relaxed), 0);
    }
}
