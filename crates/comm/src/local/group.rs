//! The meeting point of a group: descriptors, counts, and what each member is doing.

use super::gate::{Gate, Interrupted};
use super::mailbox::Mailbox;
use super::transfer;
use super::world::{Post, Shared, load, store};
use crate::backend::{Backend, Call, Common, Operation, Signature, Terms, intact, members_of_split};
use crate::error::{CommError, ErrorKind, Failure, Result};
use crate::inline;
use crate::number::Dtype;
use crate::place::{Place, Position};
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The largest input that travels inside its descriptor. Every rank then reads all of them, which
/// costs less than a second meeting up to a few kilobytes.
pub(crate) const INLINE_BYTES: usize = 4096;

/// The call of a rank, published when it arrives.
#[repr(C, align(128))]
pub(crate) struct Slot {
    pub call: Call,
    /// Checksums of the parts of the input, where they are asked for.
    pub sums: Vec<u64>,
    /// The input itself, when it is small.
    pub inline: InlineBytes,
}

/// Aligned like every number.
#[repr(C, align(64))]
pub(crate) struct InlineBytes(pub [u8; INLINE_BYTES]);

impl Slot {
    fn empty() -> Self {
        let signature = Signature { operation: Operation::Barrier, dtype: Dtype::Plain(1), elements: 0, root: 0 };
        let call = Call { signature, input: std::ptr::null(), output: std::ptr::null_mut() };
        Self { call, sums: Vec::new(), inline: InlineBytes([0; INLINE_BYTES]) }
    }
}

/// The state that one member shows to the others.
#[repr(align(128))]
#[derive(Default)]
struct Shown {
    /// Arrivals and departures so far.
    meetings: AtomicU64,
    /// Touching memory of others right now.
    busy: AtomicBool,
    /// Dropped its handle.
    left: AtomicBool,
    post: Post,
}

/// Groups being born of a split: by the number of the split and the color.
type Births = BTreeMap<(u64, u32), (Arc<Group>, usize)>;

/// A group of threads.
pub(crate) struct Group {
    world: Arc<Shared>,
    members: Vec<u32>,
    /// Two sets that alternate from one operation to the next, each with a slot for every member. A
    /// member writes its own slot between leaving the operation before and arriving; others read it
    /// after its arrival and before they arrive at the next operation.
    slots: [Vec<UnsafeCell<Slot>>; 2],
    shown: Vec<Shown>,
    gate: Gate,
    mailboxes: Vec<Mailbox>,
    births: Mutex<Births>,
}

// SAFETY: everything is synchronised by itself but the slots, whose protocol is told at the field
// and kept by `Member`.
unsafe impl Sync for Group {}
// SAFETY: slots hold pointers, which `Call` describes as mere descriptions.
unsafe impl Send for Group {}

impl Group {
    pub fn new(world: Arc<Shared>, members: Vec<u32>) -> Self {
        let size = members.len();
        let slots = || (0..size).map(|_| UnsafeCell::new(Slot::empty())).collect();
        Self {
            world,
            slots: [slots(), slots()],
            shown: members.iter().map(|_| Shown::default()).collect(),
            gate: Gate::default(),
            mailboxes: (0..size * size).map(|_| Mailbox::default()).collect(),
            births: Mutex::default(),
            members,
        }
    }
}

/// One member's view of its group.
pub(crate) struct Member {
    group: Arc<Group>,
    rank: usize,
    /// Operations and meetings so far; held for the length of an operation, so that two threads of
    /// one rank come one after the other.
    turn: Mutex<Turn>,
}

#[derive(Default)]
struct Turn {
    operations: u64,
    meetings: u64,
    splits: u64,
}

/// Ends a member's announcement that it touches memory of others.
struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Member {
    pub fn new(group: Arc<Group>, rank: usize) -> Self {
        Self { group, rank, turn: Mutex::default() }
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    /// Counts this member in and waits for the others.
    fn meet(&self, turn: &mut Turn, operation: Operation, terms: &Terms) -> Result<()> {
        turn.meetings += 1;
        let target = turn.meetings * self.size() as u64;
        self.group.shown[self.rank].meetings.store(turn.meetings, Ordering::SeqCst);
        self.group.gate.arrive(target);
        let interrupt = || self.group.world.failure().map(Ok).or_else(|| self.lost(turn.meetings).map(Err));
        match self.group.gate.wait(target, terms.deadline, interrupt) {
            Ok(()) => Ok(()),
            Err(Interrupted::By(Ok(failure))) => Err(failure),
            Err(Interrupted::By(Err(lost))) => Err(self.blame(ErrorKind::Left, &lost, operation, terms)),
            Err(Interrupted::Deadline) => {
                let missing = self.missing(turn.meetings);
                Err(self.blame(ErrorKind::Deadline { waited: terms.deadline }, &missing, operation, terms))
            }
        }
    }

    fn blame(&self, kind: ErrorKind, culprits: &[usize], operation: Operation, terms: &Terms) -> CommError {
        self.fail_with(kind, culprits, Some((operation, terms.number)), terms.group)
    }

    /// Members that have not come to meeting number `meetings`.
    fn missing(&self, meetings: u64) -> Vec<usize> {
        let late = |member: &usize| self.group.shown[*member].meetings.load(Ordering::SeqCst) < meetings;
        (0..self.size()).filter(late).collect()
    }

    /// Members that have not come and never will. `left` is read first: who came and then left
    /// counts as having come.
    fn lost(&self, meetings: u64) -> Option<Vec<usize>> {
        let gone = |member: &usize| {
            let shown = &self.group.shown[*member];
            shown.left.load(Ordering::SeqCst) && shown.meetings.load(Ordering::SeqCst) < meetings
        };
        let lost: Vec<usize> = (0..self.size()).filter(gone).collect();
        (!lost.is_empty()).then_some(lost)
    }

    /// Announces that foreign memory is about to be touched, unless the world has failed, after
    /// which owners no longer wait.
    fn touch(&self) -> Result<Busy<'_>> {
        let busy = &self.group.shown[self.rank].busy;
        busy.store(true, Ordering::SeqCst);
        let guard = Busy(busy);
        // With the fence in `settle`: either this sees the failure, or whoever failed sees the
        // announcement.
        fence(Ordering::SeqCst);
        match self.group.world.failure() {
            None => Ok(guard),
            Some(failure) => Err(failure),
        }
    }

    /// After a failure: waits until nobody touches memory of others. Transfers are bounded, so this
    /// is short.
    fn settle(&self) {
        fence(Ordering::SeqCst);
        while self.group.shown.iter().any(|shown| shown.busy.load(Ordering::SeqCst)) {
            std::thread::yield_now();
        }
    }

    /// Writes this member's slot of the current set.
    ///
    /// # Safety
    /// As [`Backend::collective`]; `turn` is this member's, so that nobody reads the slot yet.
    unsafe fn publish(&self, turn: &Turn, call: &Call, inline: bool, terms: &Terms) {
        let slot = self.group.slots[(turn.operations & 1) as usize][self.rank].get();
        // SAFETY: everybody has left the last operation that used this set, because they arrived at
        // the one in between.
        let slot = unsafe { &mut *slot };
        slot.call = *call;
        slot.sums.clear();
        slot.sums.extend_from_slice(terms.sums);
        let bytes = call.signature.extent(self.size(), self.rank).input;
        if inline && bytes > 0 {
            // SAFETY: the caller promises `bytes` readable bytes; inline ones fit by `fits_inline`.
            unsafe { std::ptr::copy_nonoverlapping(call.input, slot.inline.0.as_mut_ptr(), bytes) };
        }
    }

    /// All slots of the current set, after everybody has arrived.
    fn slots(&self, turn: &Turn) -> Vec<&Slot> {
        let set = &self.group.slots[(turn.operations & 1) as usize];
        // SAFETY: everybody has arrived, and nobody writes this set before everybody has arrived at
        // the next operation.
        set.iter().map(|slot| unsafe { &*slot.get() }).collect()
    }

    /// The first member of whose input this rank would read something else than was summed.
    ///
    /// # Safety
    /// The slots' inputs are valid for their signature's extents, and nobody writes what this rank
    /// reads of them.
    unsafe fn spoiled(&self, slots: &[&Slot]) -> Option<usize> {
        (0..slots.len()).find(|&member| {
            let Slot { call, sums, .. } = slots[member];
            let bytes = call.signature.extent(slots.len(), member).input;
            if sums.is_empty() || bytes == 0 {
                return false;
            }
            let (offset, bytes) = call.signature.read_by(slots.len(), self.rank);
            // SAFETY: the caller's promise. Of an all-reduce in place, others write other shares
            // meanwhile, which this slice leaves out.
            let segment = unsafe { std::slice::from_raw_parts(call.input.add(offset), bytes) };
            !intact(sums, self.rank, segment)
        })
    }

    /// # Safety
    /// As [`Backend::collective`].
    unsafe fn run(&self, turn: &mut Turn, call: &Call, terms: &Terms) -> Result<()> {
        if let Some(failure) = self.group.world.failure() {
            return Err(failure);
        }
        let inline = fits_inline(&call.signature, self.size());
        // SAFETY: the caller's promise.
        unsafe { self.publish(turn, call, inline, terms) };
        self.meet(turn, call.signature.operation, terms)?;
        let slots = self.slots(turn);
        let calls: Vec<Signature> = slots.iter().map(|slot| slot.call.signature).collect();
        self.agree(&calls, terms)?;
        if inline {
            // Small inputs are read whole by everybody, so everybody checks them whole.
            let spoiled = (0..slots.len()).find(|&member| {
                let Slot { call, sums, inline } = slots[member];
                let read = |reader| {
                    let (offset, bytes) = call.signature.read_by(slots.len(), reader);
                    intact(sums, reader, &inline.0[offset..offset + bytes])
                };
                !(0..sums.len()).all(read)
            });
            spoiled.map_or(Ok(()), |member| {
                Err(self.blame(ErrorKind::Corrupt, &[member], call.signature.operation, terms))
            })?;
            let inputs: Vec<*const u8> = slots.iter().map(|slot| slot.inline.0.as_ptr()).collect();
            // SAFETY: the signatures agree, so that all slots hold inputs of this call's size; the
            // output is the caller's.
            unsafe { inline::compute(&inputs, self.rank, call) };
            return Ok(());
        }
        {
            let _busy = self.touch()?;
            // SAFETY: everybody has arrived with this signature, and inputs stay as they are until
            // all have departed.
            let spoiled = unsafe { self.spoiled(&slots) };
            spoiled.map_or(Ok(()), |member| {
                Err(self.blame(ErrorKind::Corrupt, &[member], call.signature.operation, terms))
            })?;
            // SAFETY: the signatures agree and everybody has arrived, so all pointers are valid
            // until all have departed or failed and settled, and shares are disjoint.
            unsafe { transfer::in_place(&slots, self.rank) };
        }
        self.meet(turn, call.signature.operation, terms)
    }
}

/// True if the inputs of a call are small enough to travel in descriptors; the same on all ranks,
/// as it depends on the signature alone.
fn fits_inline(signature: &Signature, size: usize) -> bool {
    signature.extent(size, signature.root).input <= INLINE_BYTES
}

impl Backend for Member {
    fn kind(&self) -> &'static str {
        "local"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[u32] {
        &self.group.members
    }

    fn place(&self, world_rank: u32) -> Place {
        self.group.world.places[world_rank as usize].clone()
    }

    fn position_of(&self, member: usize) -> Option<(Position, Duration)> {
        load(&self.group.shown[member].post).or_else(|| self.group.world.position_of(self.group.members[member]))
    }

    fn post(&self, position: Position) {
        store(&self.group.shown[self.rank].post, position.clone());
        self.group.world.post(self.group.members[self.rank], position);
    }

    unsafe fn collective(&self, call: &Call, terms: &Terms) -> Result<()> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        let result = unsafe { self.run(&mut turn, call, terms) };
        turn.operations += 1;
        if result.is_err() {
            self.group.gate.wake_all();
            self.settle();
        }
        result
    }

    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>, terms: &Terms) -> Result<()> {
        let size = self.size();
        let offer = send.map(|(to, data)| {
            (to, self.group.mailboxes[self.rank * size + to].offer(data, terms.sums.first().copied()))
        });
        let gone = |member: usize| self.group.shown[member].left.load(Ordering::SeqCst);
        let fail = |operation, kind, member: usize| self.blame(kind, &[member], operation, terms);
        let received = receive.map_or(Ok(()), |(from, into)| {
            self.group.mailboxes[from * size + self.rank]
                .take(into, terms.deadline, || self.failure(), || gone(from))
                .map_err(|trouble| trouble.resolve(|kind| fail(Operation::Receive, kind, from)))
        });
        // Even when receiving failed the offer has to be withdrawn before the buffer is the
        // caller's again.
        let sent = offer.map_or(Ok(()), |(to, offer)| {
            offer
                .wait(terms.deadline, || self.failure(), || gone(to))
                .map_err(|trouble| trouble.resolve(|kind| fail(Operation::Send, kind, to)))
        });
        received.and(sent)
    }

    fn split(&self, keys: &[(u32, u32)], _: &Terms) -> Result<Arc<dyn Backend>> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let color = keys[self.rank].0;
        let members = members_of_split(keys, self.rank);
        let number = turn.splits;
        turn.splits += 1;
        let mut births = self.group.births.lock().unwrap_or_else(PoisonError::into_inner);
        let (group, waiting) = births.entry((number, color)).or_insert_with(|| {
            let ranks = members.iter().map(|&member| self.group.members[member]).collect();
            (Arc::new(Group::new(self.group.world.clone(), ranks)), members.len())
        });
        *waiting -= 1;
        let (group, last) = (group.clone(), *waiting == 0);
        if last {
            births.remove(&(number, color));
        }
        let rank = members.iter().position(|&member| member == self.rank).expect("a member of its own color");
        Ok(Arc::new(Member::new(group, rank)))
    }

    fn common(&self) -> Option<&Common> {
        Some(&self.group.world.common)
    }

    fn request_stop(&self) {
        self.group.world.request_stop(self.group.members[self.rank]);
    }

    fn stop_requested(&self) -> Option<u32> {
        self.group.world.stop_requested()
    }

    fn failure(&self) -> Option<CommError> {
        self.group.world.failure()
    }

    fn fail(&self, failure: Failure) -> CommError {
        let failure = self.group.world.fail(failure);
        self.group.gate.wake_all();
        failure
    }

    fn leave(&self) {
        self.group.shown[self.rank].left.store(true, Ordering::SeqCst);
        self.group.gate.wake_all();
    }
}
