//! The promises of every backend, as functions of one rank's communicator. All ranks call the same
//! function; data is made from seeds that all ranks know, so each rank checks its own result
//! against the definition without asking anybody.

use half::bf16;
use trainyard_comm::number::tree_sum;
use trainyard_comm::{Communicator, Number, Scalar};

/// A collective with its sizes.
#[derive(Clone, Debug)]
pub struct Case {
    pub operation: Kind,
    /// Elements of a part.
    pub elements: usize,
    pub root: usize,
    pub seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    AllReduce,
    ReduceScatter,
    ReduceScatterSums,
    ReduceScatterInPlace,
    AllGather,
    AllGatherInPlace,
    Broadcast,
    Gather,
    AllToAll,
    AllToAllUneven,
    Ring,
    Barrier,
}

pub const KINDS: [Kind; 12] = [
    Kind::AllReduce,
    Kind::ReduceScatter,
    Kind::ReduceScatterSums,
    Kind::ReduceScatterInPlace,
    Kind::AllGather,
    Kind::AllGatherInPlace,
    Kind::Broadcast,
    Kind::Gather,
    Kind::AllToAll,
    Kind::AllToAllUneven,
    Kind::Ring,
    Kind::Barrier,
];

/// A well-mixed number (the finaliser of SplitMix64).
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A type with values to draw, whose sums depend on the order of additions where they can.
pub trait Drawn: Number {
    fn draw(seed: u64) -> Self;
}

impl Drawn for f32 {
    fn draw(seed: u64) -> Self {
        let exponent = (seed % 24) as i32 - 12;
        ((mix(seed) % 2_000_001) as f32 / 1e6 - 1.0) * 2f32.powi(exponent)
    }
}
impl Drawn for bf16 {
    fn draw(seed: u64) -> Self {
        bf16::from_f32(f32::draw(seed))
    }
}
impl Drawn for f64 {
    fn draw(seed: u64) -> Self {
        f64::from(f32::draw(seed)) * 1.000_000_1
    }
}
impl Drawn for i32 {
    fn draw(seed: u64) -> Self {
        mix(seed) as i32
    }
}
impl Drawn for u64 {
    fn draw(seed: u64) -> Self {
        mix(seed)
    }
}

/// The data of `rank`: `elements` values that depend on the seed and the rank alone.
pub fn data<T: Drawn>(seed: u64, rank: usize, elements: usize) -> Vec<T> {
    let key = mix(seed ^ mix(rank as u64));
    (0..elements).map(|i| T::draw(mix(key.wrapping_add(i as u64)))).collect()
}

/// The sum by definition.
pub fn summed<T: Drawn>(seed: u64, ranks: usize, elements: usize) -> Vec<T::Sum> {
    let all: Vec<Vec<T>> = (0..ranks).map(|rank| data(seed, rank, elements)).collect();
    (0..elements).map(|i| tree_sum(&all.iter().map(|d| d[i]).collect::<Vec<_>>())).collect()
}

fn rounded<T: Number>(sums: &[T::Sum]) -> Vec<T> {
    sums.iter().map(|&sum| T::round(sum)).collect()
}

fn same<T: Scalar>(what: &dyn std::fmt::Debug, rank: usize, ours: &[T], expected: &[T]) {
    let (ours, expected): (&[u8], &[u8]) = (bytemuck::cast_slice(ours), bytemuck::cast_slice(expected));
    assert_eq!(ours.len(), expected.len());
    if let Some(at) = (0..ours.len()).find(|&i| ours[i] != expected[i]) {
        panic!("rank {rank}, {what:?}: byte {at} of {} is {} instead of {}", ours.len(), ours[at], expected[at]);
    }
}

/// Runs one case with every type it is meant for.
pub fn check(comm: &Communicator, case: &Case) {
    check_as::<f32>(comm, case);
    check_as::<bf16>(comm, case);
    check_as::<i32>(comm, case);
    check_as::<f64>(comm, case);
    check_as::<u64>(comm, case);
}

pub fn check_as<T: Drawn>(comm: &Communicator, case: &Case) {
    let (rank, size) = (comm.rank(), comm.size());
    let (n, seed, root) = (case.elements, case.seed, case.root % size);
    let mine = |elements| data::<T>(seed, rank, elements);
    let all = || (0..size).flat_map(|r| data::<T>(seed, r, n)).collect::<Vec<T>>();
    let own = rank * n..(rank + 1) * n;
    match case.operation {
        Kind::AllReduce => {
            let mut sum = mine(n);
            comm.all_reduce(&mut sum).unwrap();
            same(case, rank, &sum, &rounded::<T>(&summed::<T>(seed, size, n)));
        }
        Kind::ReduceScatter => {
            let mut part = vec![T::default(); n];
            comm.reduce_scatter(&mine(n * size), &mut part).unwrap();
            same(case, rank, &part, &rounded::<T>(&summed::<T>(seed, size, n * size)[own]));
        }
        Kind::ReduceScatterSums => {
            let mut part = vec![T::Sum::default(); n];
            comm.reduce_scatter_sums(&mine(n * size), &mut part).unwrap();
            same(case, rank, &part, &summed::<T>(seed, size, n * size)[own]);
        }
        Kind::ReduceScatterInPlace => {
            let mut whole = mine(n * size);
            comm.reduce_scatter_in_place(&mut whole).unwrap();
            same(case, rank, &whole[own.clone()], &rounded::<T>(&summed::<T>(seed, size, n * size)[own.clone()]));
            let before = mine(n * size);
            same(case, rank, &whole[..own.start], &before[..own.start]);
            same(case, rank, &whole[own.end..], &before[own.end..]);
        }
        Kind::AllGather => {
            let mut whole = vec![T::default(); n * size];
            comm.all_gather(&mine(n), &mut whole).unwrap();
            same(case, rank, &whole, &all());
        }
        Kind::AllGatherInPlace => {
            let mut whole = vec![T::default(); n * size];
            whole[own].copy_from_slice(&mine(n));
            comm.all_gather_in_place(&mut whole).unwrap();
            same(case, rank, &whole, &all());
        }
        Kind::Broadcast => {
            let mut whole = mine(n);
            comm.broadcast(&mut whole, root).unwrap();
            same(case, rank, &whole, &data::<T>(seed, root, n));
        }
        Kind::Gather => {
            let mut whole = if rank == root { vec![T::default(); n * size] } else { Vec::new() };
            comm.gather(&mine(n), &mut whole, root).unwrap();
            same(case, rank, &whole, &if rank == root { all() } else { Vec::new() });
        }
        Kind::AllToAll => {
            let mut whole = vec![T::default(); n * size];
            comm.all_to_all(&mine(n * size), &mut whole).unwrap();
            let expected = (0..size).flat_map(|r| data::<T>(seed, r, n * size)[own.clone()].to_vec());
            same(case, rank, &whole, &expected.collect::<Vec<T>>());
        }
        Kind::AllToAllUneven => {
            // About a third of the parts are empty, and some ranks send or receive nothing at all.
            let count = |from: usize, to: usize| match mix(seed ^ (from * size + to) as u64) {
                draw if draw % 3 == 0 || from == root && seed % 2 == 0 || to == root && seed % 5 == 0 => 0,
                draw => draw as usize % (n + 1),
            };
            let sends = |from: usize| (0..size).map(|to| count(from, to)).collect::<Vec<_>>();
            let receives: Vec<usize> = (0..size).map(|from| count(from, rank)).collect();
            let sent = |from: usize| data::<T>(seed, from, sends(from).iter().sum());
            let mut arrived = vec![T::default(); receives.iter().sum()];
            comm.all_to_all_uneven(&sent(rank), &sends(rank), &mut arrived, &receives).unwrap();
            let part = |from: usize| {
                let start: usize = sends(from)[..rank].iter().sum();
                sent(from)[start..start + count(from, rank)].to_vec()
            };
            same(case, rank, &arrived, &(0..size).flat_map(part).collect::<Vec<T>>());
        }
        Kind::Ring => {
            // A shift by `root`; a shift by nothing sends to itself.
            let (to, from) = ((rank + root) % size, (rank + size - root) % size);
            let mut arrived = vec![T::default(); n];
            comm.exchange(&mine(n), to, &mut arrived, from).unwrap();
            same(case, rank, &arrived, &data::<T>(seed, from, n));
        }
        Kind::Barrier => comm.barrier().unwrap(),
    }
}

/// Sizes around every threshold: nothing, one, vectors, inline messages, blocks, many pieces.
pub const SIZES: [usize; 10] = [0, 1, 2, 17, 511, 513, 1025, 4096, 4097, 20_011];

/// Every operation at every size, with the roots taking turns.
///
/// The data that a rank checks against grows with the square of the group, so large groups leave
/// out large sizes.
pub fn every_operation_at_every_size(comm: &Communicator) {
    let mut seed = 1;
    for operation in KINDS {
        for elements in SIZES.into_iter().filter(|&elements| elements * comm.size() * comm.size() <= 400_000) {
            seed += 1;
            check(comm, &Case { operation, elements, root: seed as usize, seed });
        }
    }
}

/// A message from each rank to each other, one way after the other, in order.
pub fn messages_arrive_in_order(comm: &Communicator) {
    let (rank, size) = (comm.rank(), comm.size());
    for from in 0..size {
        for to in (0..size).filter(|&to| to != from) {
            for (number, elements) in [(0u64, 1usize), (1, 0), (2, 5000), (3, 3)] {
                let seed = number + 10 * (from * size + to) as u64;
                let expected = data::<f32>(seed, from, elements);
                if rank == from {
                    comm.send(&expected, to).unwrap();
                } else if rank == to {
                    let mut arrived = vec![0f32; elements];
                    comm.recv(&mut arrived, from).unwrap();
                    same(&(from, to, number), rank, &arrived, &expected);
                }
            }
        }
    }
}

/// Groups by color, ordered by key, work beside each other and beside their parent.
pub fn splits_are_groups_of_their_own(comm: &Communicator) {
    let (rank, size) = (comm.rank(), comm.size());
    for colors in 1..=size {
        // Descending keys turn the order around.
        let part = comm.split((rank % colors) as u32, (size - rank) as u32, format!("of {colors}")).unwrap();
        let mut expected: Vec<u32> =
            (0..size).filter(|r| r % colors == rank % colors).map(|r| comm.members()[r]).collect();
        expected.reverse();
        assert_eq!(part.members(), expected);
        assert_eq!(part.members()[part.rank()], comm.members()[rank]);
        for (number, operation) in KINDS.into_iter().enumerate() {
            let case = Case { operation, elements: 700, root: 1, seed: number as u64 };
            check_as::<f32>(&part, &case);
            check_as::<f32>(comm, &case);
        }
        let again = part.duplicate("again").unwrap();
        assert_eq!(again.members(), part.members());
        check_as::<bf16>(&again, &Case { operation: Kind::AllReduce, elements: 3000, root: 0, seed: 9 });
    }
}

/// Started operations give the results of blocking ones, in order, also with blocking ones in
/// between and on two communicators at once.
pub fn started_operations_give_the_same(comm: &Communicator) {
    let (rank, size) = (comm.rank(), comm.size());
    let other = comm.duplicate("other").unwrap();
    let pending: Vec<_> = (0..8u64)
        .map(|seed| {
            let lane = if seed % 2 == 0 { comm } else { &other };
            lane.start(data::<f32>(seed, rank, 3000), |c, data| c.all_reduce(data))
        })
        .collect();
    check_as::<f32>(comm, &Case { operation: Kind::AllGather, elements: 2000, root: 0, seed: 3 });
    for (seed, pending) in pending.into_iter().enumerate() {
        same(&seed, rank, &pending.wait().unwrap(), &rounded::<f32>(&summed::<f32>(seed as u64, size, 3000)));
    }
}

/// All of the above.
pub fn everything(comm: &Communicator) {
    every_operation_at_every_size(comm);
    messages_arrive_in_order(comm);
    splits_are_groups_of_their_own(comm);
    started_operations_give_the_same(comm);
}
