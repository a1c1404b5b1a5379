//! The network between fake devices: communicators that really move bytes, and fail when a test
//! asks for it.
//!
//! A device reaches an exchange when the exchange is at the head of a stream. The last rank to
//! arrive moves the bytes of all, so data that a rank has not written by then is missing. Sequences
//! of calls that do not match are noted as [`Network::problems`] and never end, as on a real
//! network. Sums go around a ring, in another order than this project's own.

use super::{State as Device, bytes, bytes_mut};
use crate::driver::Region;
use crate::error::{CudaError, Result};
use crate::nccl::{Comm, Element, Exchange, State, UniqueId};
use half::bf16;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;
use trainyard_base::lock;

/// A fault at a device's `call`-th group of exchanges, counted from 0 over all of its
/// communicators.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The device, in the order in which they joined the network.
    pub device: usize,
    /// Index of the call.
    pub call: usize,
    /// The fault.
    pub kind: FaultKind,
}

/// Kinds of fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// The exchange begins on the device and never ends.
    Hang,
    /// As `Hang`, and its communicator says that it failed.
    Fail,
    /// The device is gone: nothing that it is given from there on is done, and the communicators of
    /// its peers say so.
    Lose,
}

/// Exchanges of one call, with their numbers: which collective of the communicator, or which
/// message on its way, each of them is.
#[derive(Clone)]
pub(super) struct Group {
    comm: Comm,
    exchanges: Vec<(Exchange, usize)>,
    /// It never comes.
    stuck: bool,
}

/// Fake devices that can reach each other.
#[derive(Default)]
pub struct Network {
    state: Mutex<Links>,
    changed: Condvar,
}

#[derive(Default)]
struct Links {
    devices: Vec<Weak<Device>>,
    calls: Vec<usize>,
    lost: BTreeSet<usize>,
    faults: Vec<Fault>,
    problems: Vec<String>,
    ids: u64,
    circles: Vec<Circle>,
    /// Communicators as the devices know them: circle and rank.
    comms: Vec<(usize, usize)>,
}

/// One communicator with all of its ranks.
struct Circle {
    id: UniqueId,
    ranks: Vec<Option<Member>>,
    /// By number.
    collectives: BTreeMap<usize, Meeting>,
    /// By sender, receiver and number.
    messages: BTreeMap<(usize, usize, usize), Message>,
}

struct Member {
    device: usize,
    failed: Option<String>,
    aborted: bool,
    /// True once its end was requested. The end comes after everything that is on streams.
    ending: bool,
    collectives: usize,
    sent: BTreeMap<usize, usize>,
    received: BTreeMap<usize, usize>,
}

struct Meeting {
    calls: Vec<Option<Exchange>>,
    done: bool,
    wrong: bool,
}

#[derive(Default)]
struct Message {
    from: Option<Region>,
    to: Option<Region>,
    done: bool,
    wrong: bool,
}

impl Network {
    /// A network on which these faults happen.
    pub fn new(faults: &[Fault]) -> Network {
        let network = Network::default();
        network.lock().faults = faults.to_vec();
        network
    }

    /// The mismatches between ranks so far.
    pub fn problems(&self) -> Vec<String> {
        self.lock().problems.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Links> {
        lock(&self.state)
    }

    /// The number of a device that joins.
    pub(super) fn join(&self, device: Weak<Device>) -> usize {
        let mut links = self.lock();
        links.devices.push(device);
        links.calls.push(0);
        links.devices.len() - 1
    }

    /// Lets the other devices go on, and waits a little for one of them to change something.
    pub(super) fn wait(&self) {
        let devices = self.lock().devices.clone();
        devices.iter().filter_map(Weak::upgrade).for_each(|device| device.advance());
        let links = self.lock();
        drop(self.changed.wait_timeout(links, Duration::from_millis(1)));
    }

    pub(super) fn unique_id(&self) -> UniqueId {
        let mut links = self.lock();
        links.ids += 1;
        let mut id = UniqueId([0x1d; 128]);
        id.0[..8].copy_from_slice(&links.ids.to_le_bytes());
        id
    }

    pub(super) fn init(&self, device: usize, id: &UniqueId, rank: usize, size: usize) -> Result<Comm> {
        let refused = |what: String| CudaError::Call { call: "ncclCommInitRankConfig", code: what, hint: "" };
        let links = &mut *self.lock();
        let at = links.circles.iter().position(|circle| circle.id == *id).unwrap_or_else(|| {
            let ranks = (0..size).map(|_| None).collect();
            links.circles.push(Circle { id: *id, ranks, collectives: BTreeMap::new(), messages: BTreeMap::new() });
            links.circles.len() - 1
        });
        let circle = &mut links.circles[at];
        if circle.ranks.len() != size || rank >= size || circle.ranks[rank].is_some() {
            return Err(refused(format!("rank {rank} of {size} in a communicator of {}", circle.ranks.len())));
        }
        if circle.ranks.iter().flatten().any(|member| member.device == device) {
            return Err(refused("duplicate GPU detected".to_owned()));
        }
        let (sent, received) = Default::default();
        let (failed, aborted, ending, collectives) = Default::default();
        circle.ranks[rank] = Some(Member { device, failed, aborted, ending, collectives, sent, received });
        links.comms.push((at, rank));
        Ok(Comm(links.comms.len() - 1))
    }

    pub(super) fn state(&self, comm: Comm) -> State {
        let links = self.lock();
        let (circle, rank) = links.comms[comm.0];
        let circle = &links.circles[circle];
        match &circle.ranks[rank] {
            Some(Member { failed: Some(what), .. }) => State::Failed(what.clone()),
            _ if circle.ranks.iter().any(Option::is_none) => State::Busy,
            _ => State::Ready,
        }
    }

    pub(super) fn finalize(&self, comm: Comm) {
        if let Some(member) = self.lock().member(comm) {
            member.ending = true;
        }
    }

    pub(super) fn is_ending(&self, comm: Comm) -> bool {
        self.lock().member(comm).is_some_and(|member| member.ending)
    }

    pub(super) fn abort(&self, comm: Comm) {
        let links = &mut *self.lock();
        let (circle, rank) = links.comms[comm.0];
        let circle = &mut links.circles[circle];
        if let Some(member) = &mut circle.ranks[rank] {
            member.aborted = true;
        }
        // Its memory may be used for something else from now on.
        for meeting in circle.collectives.values_mut().filter(|meeting| !meeting.done) {
            (meeting.calls[rank], meeting.wrong) = (None, true);
        }
        for ((from, to, _), message) in circle.messages.iter_mut().filter(|(_, message)| !message.done) {
            message.wrong |= *from == rank || *to == rank;
        }
        self.changed.notify_all();
    }

    /// Numbers the exchanges of a call.
    pub(super) fn number(&self, device: usize, comm: Comm, exchanges: &[Exchange]) -> Group {
        let links = &mut *self.lock();
        let (at, rank) = links.comms[comm.0];
        let call = links.calls[device];
        links.calls[device] += 1;
        let mut stuck = links.lost.contains(&device);
        let due = links.faults.iter().find(|fault| fault.device == device && fault.call == call).copied();
        if let Some(fault) = due {
            stuck = true;
            links.strike(fault, at, rank);
        }
        let member = links.circles[at].ranks[rank].as_mut().expect("it was made by its rank");
        let mut next = |exchange: &Exchange| {
            let counter = match exchange {
                Exchange::Send { peer, .. } => member.sent.entry(*peer).or_default(),
                Exchange::Receive { peer, .. } => member.received.entry(*peer).or_default(),
                _ => &mut member.collectives,
            };
            *counter += 1;
            *counter - 1
        };
        let exchanges = exchanges.iter().map(|exchange| (*exchange, next(exchange))).collect();
        Group { comm, exchanges, stuck }
    }

    /// The device is at this group: whether it has ended.
    pub(super) fn came(&self, group: &Group) -> bool {
        let links = &mut *self.lock();
        let (at, rank) = links.comms[group.comm.0];
        let Links { circles, problems, .. } = links;
        let circle = &mut circles[at];
        if circle.ranks[rank].as_ref().is_none_or(|member| member.aborted) {
            return true;
        }
        if group.stuck {
            return false;
        }
        let mut ended = true;
        for (exchange, number) in &group.exchanges {
            let (done, problem) = circle.meet(rank, exchange, *number);
            problems.extend(problem);
            ended &= done;
        }
        if ended {
            self.changed.notify_all();
        }
        ended
    }
}

impl Group {
    pub(super) fn is_of(&self, comm: Comm) -> bool {
        self.comm == comm
    }
}

impl Links {
    fn member(&mut self, comm: Comm) -> Option<&mut Member> {
        let (circle, rank) = self.comms[comm.0];
        self.circles[circle].ranks[rank].as_mut()
    }

    fn strike(&mut self, fault: Fault, circle: usize, rank: usize) {
        let fail = |member: &mut Option<Member>, what: &str| {
            if let Some(member) = member {
                member.failed.get_or_insert_with(|| what.to_owned());
            }
        };
        match fault.kind {
            FaultKind::Hang => {}
            FaultKind::Fail => fail(&mut self.circles[circle].ranks[rank], "unhandled system error"),
            FaultKind::Lose => {
                self.lost.insert(fault.device);
                let has = |circle: &&mut Circle| circle.ranks.iter().flatten().any(|m| m.device == fault.device);
                for member in self.circles.iter_mut().filter(has).flat_map(|circle| &mut circle.ranks) {
                    if member.as_ref().is_some_and(|member| member.device != fault.device) {
                        fail(member, "remote process exited or there was a network error");
                    }
                }
            }
        }
    }
}

impl Circle {
    /// A rank is at an exchange: whether it has ended, and what is found to be wrong with it.
    fn meet(&mut self, rank: usize, exchange: &Exchange, number: usize) -> (bool, Option<String>) {
        match *exchange {
            Exchange::Send { from, peer } => self.pass((rank, peer, number), |message| message.from = Some(from)),
            Exchange::Receive { to, peer } => self.pass((peer, rank, number), |message| message.to = Some(to)),
            _ => {
                let size = self.ranks.len();
                let new = || Meeting { calls: vec![None; size], done: false, wrong: false };
                let meeting = self.collectives.entry(number).or_insert_with(new);
                if !meeting.wrong && !meeting.done {
                    meeting.calls[rank] = Some(*exchange);
                }
                let calls: Vec<Exchange> = meeting.calls.iter().flatten().copied().collect();
                if meeting.wrong || meeting.done || calls.len() < size {
                    return (meeting.done, None);
                }
                let odd = calls.iter().position(|call| form(call) != form(&calls[0]));
                if let Some(odd) = odd {
                    meeting.wrong = true;
                    let what =
                        format!("collective {number}: rank 0 called {:?}, rank {odd} {:?}", calls[0], calls[odd]);
                    return (false, Some(what));
                }
                perform(&calls);
                meeting.done = true;
                (true, None)
            }
        }
    }

    fn pass(&mut self, key: (usize, usize, usize), come: impl FnOnce(&mut Message)) -> (bool, Option<String>) {
        let message = self.messages.entry(key).or_default();
        if message.done || message.wrong {
            return (message.done, None);
        }
        come(message);
        let (Some(from), Some(to)) = (message.from, message.to) else { return (false, None) };
        if from.bytes != to.bytes {
            message.wrong = true;
            let what = format!("message {} from rank {} to {}: {from:?} into {to:?}", key.2, key.0, key.1);
            return (false, Some(what));
        }
        bytes_mut(&to).copy_from_slice(bytes(&from));
        message.done = true;
        (true, None)
    }
}

/// The properties on which all ranks must agree: kind, element or root, and bytes.
fn form(exchange: &Exchange) -> (u8, usize, usize, usize) {
    match *exchange {
        Exchange::AllReduce { from, to, element } => (0, element as usize, from.bytes, to.bytes),
        Exchange::ReduceScatter { from, to, element } => (1, element as usize, from.bytes, to.bytes),
        Exchange::AllGather { from, to } => (2, 0, from.bytes, to.bytes),
        Exchange::Broadcast { to, root, .. } => (3, root, to.bytes, to.bytes),
        Exchange::Send { .. } | Exchange::Receive { .. } => unreachable!("messages have two ends"),
    }
}

/// Does what the ranks called, which agree.
fn perform(calls: &[Exchange]) {
    let inputs: Vec<Vec<u8>> = calls.iter().map(|call| bytes(&call.regions()[0]).to_vec()).collect();
    for (rank, call) in calls.iter().enumerate() {
        match *call {
            Exchange::AllReduce { to, element, .. } => bytes_mut(&to).copy_from_slice(&around(&inputs, 0, element)),
            Exchange::ReduceScatter { to, element, .. } => {
                let part = rank * to.bytes..(rank + 1) * to.bytes;
                let parts: Vec<Vec<u8>> = inputs.iter().map(|input| input[part.clone()].to_vec()).collect();
                bytes_mut(&to).copy_from_slice(&around(&parts, rank + 1, element));
            }
            Exchange::AllGather { to, .. } => bytes_mut(&to).copy_from_slice(&inputs.concat()),
            Exchange::Broadcast { to, root, .. } => bytes_mut(&to).copy_from_slice(&inputs[root]),
            Exchange::Send { .. } | Exchange::Receive { .. } => unreachable!("messages have two ends"),
        }
    }
}

/// The sum of all inputs as a ring makes it: one after the other from `first` on, rounded after
/// each.
fn around(inputs: &[Vec<u8>], first: usize, element: Element) -> Vec<u8> {
    let ring: Vec<&Vec<u8>> = (0..inputs.len()).map(|step| &inputs[(first + step) % inputs.len()]).collect();
    let mut sum = ring[0].clone();
    for input in &ring[1..] {
        match element {
            Element::F32 => {
                for (sum, x) in sum.as_chunks_mut::<4>().0.iter_mut().zip(input.as_chunks::<4>().0) {
                    *sum = (f32::from_ne_bytes(*sum) + f32::from_ne_bytes(*x)).to_ne_bytes();
                }
            }
            Element::Bf16 => {
                for (sum, x) in sum.as_chunks_mut::<2>().0.iter_mut().zip(input.as_chunks::<2>().0) {
                    let added = bf16::from_ne_bytes(*sum).to_f32() + bf16::from_ne_bytes(*x).to_f32();
                    *sum = bf16::from_f32(added).to_ne_bytes();
                }
            }
        }
    }
    sum
}
