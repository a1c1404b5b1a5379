//! Measures NCCL collectives between GPUs of one host or several, on each GPU's own clock.

use crate::CalibrateError;
use crate::exchange::{OPERATIONS, curve, groups, members};
use std::sync::Arc;
use trainyard_comm::nccl::{Circle, Nccl};
use trainyard_comm::{Communicator, local};
use trainyard_sim::machine::{CollectiveCurve, Processes};
use trainyard_tensor::cuda::Cuda;
use trainyard_tensor::cuda::nccl::Element;
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// Number of exchanges between two time marks.
const ROUNDS: usize = 10;

/// Returns curves of groups of two, four, eight … of `gpus`, and of all of them, on buffers of
/// `bytes`. A single GPU has no curves.
///
/// # Errors
///
/// NCCL is missing, a GPU refuses, or a rank does not join.
pub fn collectives(gpus: &[Arc<Cuda>], bytes: &[usize]) -> Result<Vec<CollectiveCurve>, CalibrateError> {
    let powers = (1..).map(|power| 1 << power).take_while(|ranks| *ranks < gpus.len());
    let groups = powers.chain((gpus.len() > 1).then_some(gpus.len()));
    let mut curves = Vec::new();
    for ranks in groups {
        let bytes = packs(bytes, ranks);
        curves.extend(curves_of(ranks, 1, &bytes, between(&gpus[..ranks], &bytes)?));
    }
    Ok(curves)
}

/// Returns curves of the groups that the processes of `world` can form, each with `cuda` to itself.
/// All groups of a kind exchange at once, and the slowest one counts. Every process gets all
/// curves.
///
/// # Errors
///
/// As [`collectives`].
pub fn among(
    world: &Communicator,
    processes: &Processes,
    cuda: &Arc<Cuda>,
    bytes: &[usize],
) -> Result<Vec<CollectiveCurve>, CalibrateError> {
    let nccl = Nccl::new(Arc::clone(cuda.driver()), world, || ())?;
    let mut curves = Vec::new();
    for group in groups(processes) {
        let bytes = packs(bytes, group.ranks as usize);
        let circle = nccl.circle(&members(world, group)?)?;
        let seconds = on_rank(world, cuda, &circle, &bytes)?;
        curves.extend(curves_of(group.ranks as usize, group.hosts, &bytes, seconds));
    }
    Ok(curves)
}

/// `bytes` rounded so that the part of each of `ranks` is a whole number of packs.
fn packs(bytes: &[usize], ranks: usize) -> Vec<usize> {
    bytes.iter().map(|bytes| bytes.next_multiple_of(256 * ranks)).collect()
}

/// One curve per operation, through `seconds` by operation and size.
fn curves_of(
    ranks: usize,
    hosts: u32,
    bytes: &[usize],
    seconds: Vec<Vec<f64>>,
) -> impl Iterator<Item = CollectiveCurve> {
    OPERATIONS.into_iter().zip(seconds).map(move |(operation, seconds)| {
        let points = bytes.iter().zip(seconds).map(|(bytes, seconds)| [*bytes as f64, seconds]).collect();
        CollectiveCurve { hosts, ..curve(operation, ranks as u32, points) }
    })
}

/// Seconds of the slowest rank, by operation and size.
fn between(gpus: &[Arc<Cuda>], bytes: &[usize]) -> Result<Vec<Vec<f64>>, CalibrateError> {
    let results: Vec<Result<Vec<Vec<f64>>, CalibrateError>> = std::thread::scope(|scope| {
        let ranks = local::World::new(gpus.len()).into_iter().zip(gpus);
        let on = |world: Communicator, cuda: &Arc<Cuda>| {
            let circle = Nccl::new(Arc::clone(cuda.driver()), &world, || ())?.circle(&world)?;
            on_rank(&world, cuda, &circle, bytes)
        };
        let ranks: Vec<_> = ranks.map(|(world, cuda)| scope.spawn(move || on(world, cuda))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    });
    results.into_iter().next().expect("a group has ranks")
}

/// Seconds of the slowest rank of `world`, by operation and size. All of its ranks exchange over
/// circles like `circle` at the same time.
fn on_rank(
    world: &Communicator,
    cuda: &Arc<Cuda>,
    circle: &Circle,
    bytes: &[usize],
) -> Result<Vec<Vec<f64>>, CalibrateError> {
    let device = Device::cuda(Arc::clone(cuda), None);
    let case = |operation: &str, bytes: usize| -> Result<f64, CalibrateError> {
        let own = once(&device, circle, operation, bytes);
        // After a failure of this rank, aborting tells the other ranks, which wait for it.
        let own = own.inspect_err(|error| drop(world.abort(error.to_string())))?;
        // The device's results are worthless if the world has failed meanwhile.
        world.failure().map_or(Ok(()), Err)?;
        let mut all = vec![0.0f64; world.size()];
        world.all_gather(&[own], &mut all)?;
        Ok(all.into_iter().fold(0.0, f64::max))
    };
    OPERATIONS.iter().map(|operation| bytes.iter().map(|bytes| case(operation, *bytes)).collect()).collect()
}

/// Seconds of one `operation` on a buffer of `bytes`.
fn once(device: &Device, circle: &Circle, operation: &str, bytes: usize) -> Result<f64, CalibrateError> {
    let zeros = |bytes: usize| device.zeros([bytes / 4], DType::F32, Purpose::Comm);
    let (part, whole) = (zeros(bytes / circle.size())?, zeros(bytes)?);
    let run = || -> Result<(), CalibrateError> {
        let placed = |tensor: &Tensor| tensor.on_stream().map(|placed| placed.expect("it lies on a GPU"));
        let ((part, _), (whole, stream)) = (placed(&part)?, placed(&whole)?);
        match operation {
            "all_gather" => circle.all_gather(stream, part, whole)?,
            "reduce_scatter" => circle.reduce_scatter_in_place(stream, whole, Element::F32)?,
            _ => circle.all_reduce(stream, whole, Element::F32)?,
        }
        Ok(())
    };
    // The first exchange connects the ranks.
    run()?;
    device.synchronize()?;
    let began = device.mark()?;
    (0..ROUNDS).try_for_each(|_| run())?;
    let ended = device.mark()?;
    device.synchronize()?;
    Ok(began.seconds_to(&ended)? / ROUNDS as f64)
}
