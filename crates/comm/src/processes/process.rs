//! The state of this process: the places of all ranks, their last positions, the first failure; and
//! the thread that receives notices.

use super::transport::Transport;
use crate::error::{CommError, Failure};
use crate::place::{Place, Position};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use trainyard_base::lock;

/// The pause between two looks of the listener. A failure reaches other ranks within it.
const LISTEN: Duration = Duration::from_millis(5);
/// The time for which a rank must have been dead before it is blamed. A rank that ends because of a
/// failure has sent a notice of it, and the notice may arrive a moment after the end is seen.
const GOODBYE: Duration = Duration::from_millis(200);
/// The longest time for which a failing process waits until its notices are sent.
const FAREWELL: Duration = Duration::from_millis(300);

/// Messages between ranks beside operations.
#[derive(Serialize, Deserialize)]
enum Notice {
    Failed(Failure),
    /// A question for the receiver's positions.
    Ask,
    /// Positions by context, and milliseconds since they were posted.
    Answer(Vec<(u32, Position, u64)>),
    /// The sender is asked to stop.
    Stop,
    /// A handle was dropped after so many operations.
    Left {
        context: u32,
        operations: u64,
    },
}

/// State shared by the groups of this process.
pub(super) struct Process<T> {
    pub transport: Arc<T>,
    places: OnceLock<Vec<Place>>,
    /// Peers whose processes can be seen from here.
    visible: OnceLock<Vec<bool>>,
    failure: OnceLock<CommError>,
    /// The first rank that was asked to stop, as far as is known here.
    stop: OnceLock<u32>,
    /// Last positions by context and world rank, also this rank's own.
    posts: Mutex<BTreeMap<(u32, usize), (Position, Instant)>>,
    /// Operations after which a rank left a context.
    left: Mutex<BTreeMap<(u32, usize), u64>>,
    /// When each rank was first seen to be dead.
    died: Mutex<Vec<Option<Instant>>>,
    /// When each rank last answered.
    answered: Mutex<Vec<Option<Instant>>>,
    contexts: Mutex<BTreeSet<u32>>,
    ended: AtomicBool,
}

impl<T: Transport> Process<T> {
    pub fn new(transport: Arc<T>) -> Self {
        Self {
            died: Mutex::new(vec![None; transport.size()]),
            answered: Mutex::new(vec![None; transport.size()]),
            transport,
            places: OnceLock::new(),
            visible: OnceLock::new(),
            failure: OnceLock::new(),
            stop: OnceLock::new(),
            posts: Mutex::default(),
            left: Mutex::default(),
            contexts: Mutex::new(BTreeSet::from([0])),
            ended: AtomicBool::new(false),
        }
    }

    /// This process in the world.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Makes known where everybody is; until then reports name places without hosts.
    pub fn set_places(&self, places: Vec<Place>) {
        let here = places[self.rank()].host.clone();
        let visible = places.iter().map(|place| place.host == here && runs(place.pid)).collect();
        // Set once, by the world's making.
        let _ = self.visible.set(visible);
        let _ = self.places.set(places);
    }

    pub fn place(&self, rank: u32) -> Place {
        self.places.get().map_or_else(Place::default, |places| places[rank as usize].clone())
    }

    /// The evidence that a rank is dead, once it has been for a while.
    pub fn death_of(&self, rank: usize) -> Option<String> {
        let evidence = self.evidence(rank)?;
        let since = *lock(&self.died)[rank].get_or_insert_with(Instant::now);
        (since.elapsed() >= GOODBYE).then_some(evidence)
    }

    /// Its process on this host has ended, or the transport has lost it.
    fn evidence(&self, rank: usize) -> Option<String> {
        let seen = self.visible.get().is_some_and(|visible| visible[rank]);
        if seen && self.places.get().is_some_and(|places| !runs(places[rank].pid)) {
            return Some("its process no longer exists".to_owned());
        }
        self.transport.lost(rank)
    }

    pub fn post(&self, context: u32, rank: usize, position: Position) {
        lock(&self.posts).insert((context, rank), (position, Instant::now()));
    }

    /// The position that a rank posted last in a context, else in any.
    pub fn position_of(&self, context: u32, rank: usize) -> Option<(Position, Duration)> {
        let posts = lock(&self.posts);
        let latest = || {
            let its = posts.iter().filter(|((_, of), _)| *of == rank);
            its.map(|(_, post)| post).max_by_key(|(_, at)| *at)
        };
        posts.get(&(context, rank)).or_else(latest).map(|(position, at)| (position.clone(), at.elapsed()))
    }

    pub fn failure(&self) -> Option<CommError> {
        self.failure.get().cloned()
    }

    /// The first failure counts; if it is this one, all others are told.
    pub fn fail(&self, failure: Failure) -> CommError {
        let error = CommError::from(failure);
        if self.failure.set(error.clone()).is_ok() {
            self.tell_everybody(&error);
            let start = Instant::now();
            while !self.transport.has_told() && start.elapsed() < FAREWELL {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        self.failure().unwrap_or(error)
    }

    fn tell_everybody(&self, failure: &Failure) {
        let everybody: Vec<usize> = (0..self.transport.size()).collect();
        self.tell(&everybody, &Notice::Failed(failure.clone()));
    }

    /// Tells all ranks that this one is asked to stop, once.
    pub fn request_stop(&self) {
        if self.stop.set(self.rank() as u32).is_ok() {
            let everybody: Vec<usize> = (0..self.transport.size()).collect();
            self.tell(&everybody, &Notice::Stop);
        }
    }

    pub fn stop_requested(&self) -> Option<u32> {
        self.stop.get().copied()
    }

    /// Asks ranks where they are; [`Process::answered`] knows later who replied.
    pub fn ask(&self, ranks: &[usize]) {
        for &rank in ranks {
            lock(&self.answered)[rank] = None;
        }
        self.tell(ranks, &Notice::Ask);
    }

    /// True if a rank has answered since it was last asked.
    pub fn answered(&self, rank: usize) -> bool {
        lock(&self.answered)[rank].is_some()
    }

    pub fn tell_left(&self, ranks: &[usize], context: u32, operations: u64) {
        if !self.ended.load(Ordering::SeqCst) && self.failure().is_none() {
            self.tell(ranks, &Notice::Left { context, operations });
        }
    }

    /// True if a rank left a context before operation `number`.
    pub fn left_before(&self, context: u32, rank: usize, number: u64) -> bool {
        lock(&self.left).get(&(context, rank)).is_some_and(|&operations| operations <= number)
    }

    /// Takes `count` contexts from `first` on, unless one is in use.
    pub fn claim(&self, first: u32, count: u32) -> bool {
        let mut contexts = lock(&self.contexts);
        let free = (first..first + count).all(|context| !contexts.contains(&context));
        if free {
            contexts.extend(first..first + count);
        }
        free
    }

    pub fn unclaim(&self, first: u32, count: u32) {
        lock(&self.contexts).retain(|&context| context < first || context >= first + count);
    }

    /// The least context above all in use.
    pub fn next_context(&self) -> u32 {
        lock(&self.contexts).last().map_or(0, |last| last + 1)
    }

    /// Sends a notice to ranks other than this one.
    fn tell(&self, ranks: &[usize], notice: &Notice) {
        // Notices are plain data, which always becomes text.
        let Ok(text) = serde_json::to_vec(notice) else { return };
        for &rank in ranks.iter().filter(|&&rank| rank != self.rank()) {
            self.transport.tell(rank, &text);
        }
    }

    /// Receives the notices that have arrived.
    fn listen(&self) -> Result<(), String> {
        while let Some((from, text)) = self.transport.hear()? {
            if let Ok(notice) = serde_json::from_slice(&text) {
                self.handle(from, notice);
            }
        }
        Ok(())
    }

    fn handle(&self, from: usize, notice: Notice) {
        match notice {
            Notice::Failed(failure) => {
                let error = CommError::from(failure);
                if self.failure.set(error.clone()).is_ok() {
                    // This process may end before another one hears of it, which would then take
                    // its end for the cause.
                    self.tell_everybody(&error);
                }
            }
            Notice::Ask => {
                let own = self.rank();
                let posts = lock(&self.posts);
                let mine = posts.iter().filter(|((_, rank), _)| *rank == own);
                let answer = mine.map(|((context, _), (position, at))| {
                    (*context, position.clone(), at.elapsed().as_millis() as u64)
                });
                let answer = Notice::Answer(answer.collect());
                drop(posts);
                self.tell(&[from], &answer);
            }
            Notice::Answer(positions) => {
                let now = Instant::now();
                let mut posts = lock(&self.posts);
                for (context, position, ago_ms) in positions {
                    let at = now.checked_sub(Duration::from_millis(ago_ms)).unwrap_or(now);
                    posts.insert((context, from), (position, at));
                }
                lock(&self.answered)[from] = Some(now);
            }
            Notice::Stop => {
                // The first counts.
                let _ = self.stop.set(from as u32);
            }
            Notice::Left { context, operations } => {
                lock(&self.left).insert((context, from), operations);
            }
        }
    }
}

/// True if a process of this host exists and is no zombie.
fn runs(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // `pid (name) state ...`, where the name may hold anything.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X') | None)
}

/// Keeps the listener running; the last one to go ends the transport.
pub(super) struct Handle<T> {
    process: Arc<Process<T>>,
    listener: Option<JoinHandle<()>>,
}

impl<T: Transport> Handle<T> {
    pub fn new(process: Arc<Process<T>>) -> std::io::Result<Self> {
        let listening = process.clone();
        let listen = move || {
            while !listening.ended.load(Ordering::SeqCst) {
                if listening.listen().is_err() {
                    break;
                }
                listening.transport.has_told();
                std::thread::sleep(LISTEN);
            }
        };
        let listener = std::thread::Builder::new().name("comm-listener".to_owned()).spawn(listen)?;
        Ok(Self { process, listener: Some(listener) })
    }

    /// Stops the listener, and the transport with it if `together`, i.e. if all ranks have come to
    /// this point.
    pub fn end(&mut self, together: bool) {
        self.process.ended.store(true, Ordering::SeqCst);
        if let Some(listener) = self.listener.take() {
            // A panic there has told itself.
            let _ = listener.join();
        }
        if together {
            self.process.transport.finish();
        }
    }
}
