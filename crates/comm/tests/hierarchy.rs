//! Collectives inside nodes and between them give the bits of flat ones.

use half::bf16;
use std::thread;
use trainyard_comm::{BY_NODES_BYTES_MIN, Communicator, ErrorKind, Number, Place, local};

fn on_nodes<R: Send>(nodes: &[u32], body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let place = |&node: &u32| Place { node, host: format!("node{node}"), ..Place::here(0) };
    let body = &body;
    thread::scope(|scope| {
        let world = local::World::with_places(nodes.iter().map(place).collect());
        let threads: Vec<_> = world.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Values of very different size, so that every other order of additions shows.
fn values<T: Number>(rank: usize, elements: usize) -> Vec<T::Sum>
where
    T::Sum: From<f32>,
{
    let value = |i: usize| {
        let x = (rank * 7919 + i * 104_729 + 13) % 10_007;
        (x as f32 - 5000.0) * 2f32.powi((x % 20) as i32 - 10)
    };
    (0..elements).map(|i| value(i).into()).collect()
}

fn compare<T: Number>(comm: &Communicator)
where
    T::Sum: From<f32>,
{
    let hierarchy = comm.hierarchy().unwrap();
    let draw = |elements| values::<T>(comm.rank(), elements).into_iter().map(T::round).collect::<Vec<T>>();
    for elements in [0, 1, 3, 8, 1000, 5003] {
        let (mut flat, mut nested) = (draw(elements), draw(elements));
        comm.all_reduce(&mut flat).unwrap();
        hierarchy.all_reduce(&mut nested).unwrap();
        assert_eq!(bytemuck::cast_slice::<T, u8>(&flat), bytemuck::cast_slice::<T, u8>(&nested));

        let input = draw(elements * comm.size());
        let (mut flat, mut nested) = (vec![T::default(); elements], vec![T::default(); elements]);
        comm.reduce_scatter(&input, &mut flat).unwrap();
        hierarchy.reduce_scatter(&input, &mut nested).unwrap();
        assert_eq!(bytemuck::cast_slice::<T, u8>(&flat), bytemuck::cast_slice::<T, u8>(&nested));

        let (mut flat, mut nested) = (input.clone(), input);
        comm.all_gather(&draw(elements), &mut flat).unwrap();
        hierarchy.all_gather(&draw(elements), &mut nested).unwrap();
        assert_eq!(bytemuck::cast_slice::<T, u8>(&flat), bytemuck::cast_slice::<T, u8>(&nested));

        for root in 0..comm.size() {
            let (mut flat, mut nested) = (draw(elements), draw(elements));
            comm.broadcast(&mut flat, root).unwrap();
            hierarchy.broadcast(&mut nested, root).unwrap();
            assert_eq!(bytemuck::cast_slice::<T, u8>(&flat), bytemuck::cast_slice::<T, u8>(&nested));
        }
    }
}

#[test]
fn hierarchical_collectives_give_the_bits_of_flat_ones() {
    let layouts: [&[u32]; 6] = [&[0], &[0, 0], &[0, 1], &[0, 0, 1, 1], &[0, 0, 3, 3, 1, 1], &[0, 0, 0, 0, 1, 1, 1, 1]];
    for nodes in layouts {
        on_nodes(nodes, |comm| {
            compare::<f32>(&comm);
            compare::<bf16>(&comm);
        });
    }
}

/// Sums by nodes, on the group itself and on those split off it, and on groups that have no nodes.
#[test]
fn sums_by_nodes_have_the_bits_of_one_exchange() {
    let layouts: [&[u32]; 5] = [&[0, 0, 1, 1], &[0, 0, 0, 0, 1, 1, 1, 1], &[0, 1, 0, 1], &[0, 0, 0, 1, 1, 1], &[0, 0]];
    for nodes in layouts {
        on_nodes(nodes, |comm| {
            let flat = comm.duplicate("flat").unwrap();
            comm.sum_by_nodes().unwrap();
            let lane = comm.duplicate("lane").unwrap();
            for elements in [7, BY_NODES_BYTES_MIN / 4, BY_NODES_BYTES_MIN / 4 + 3] {
                let mut expected = values::<f32>(comm.rank(), elements);
                let (mut here, mut there) = (expected.clone(), expected.clone());
                flat.all_reduce(&mut expected).unwrap();
                comm.all_reduce(&mut here).unwrap();
                lane.all_reduce(&mut there).unwrap();
                assert_eq!(bytemuck::cast_slice::<f32, u8>(&here), bytemuck::cast_slice::<f32, u8>(&expected));
                assert_eq!(there, here);
                let mut expected: Vec<bf16> = expected.into_iter().map(bf16::from_f32).collect();
                let mut narrow = expected.clone();
                flat.all_reduce(&mut expected).unwrap();
                lane.all_reduce(&mut narrow).unwrap();
                assert_eq!(narrow, expected);
            }
        });
    }
}

/// bf16 rounded once: scattering unrounded sums inside, then adding them across, is one all-reduce
/// over all.
#[test]
fn unrounded_sums_compose() {
    on_nodes(&[0, 0, 1, 1], |comm| {
        let inside = comm.split(comm.rank() as u32 / 2, 0, "inside").unwrap();
        let across = comm.split(comm.rank() as u32 % 2, 0, "across").unwrap();
        let mut flat: Vec<bf16> = values::<bf16>(comm.rank(), 64).into_iter().map(bf16::from_f32).collect();
        let mut sums = [0f32; 32];
        inside.reduce_scatter_sums(&flat, &mut sums).unwrap();
        across.all_reduce(&mut sums).unwrap();
        comm.all_reduce(&mut flat).unwrap();
        let own = inside.rank() * 32;
        assert_eq!(sums.map(bf16::from_f32), flat[own..own + 32]);
    });
}

#[test]
fn layouts_that_would_change_the_order_are_refused() {
    let layouts: [&[u32]; 4] = [&[0, 1, 0, 1], &[0, 0, 0, 1, 1, 1], &[0, 0, 1], &[0, 1, 1, 0]];
    for nodes in layouts {
        for error in on_nodes(nodes, |comm| comm.hierarchy().err().unwrap()) {
            assert!(
                matches!(&error.kind, ErrorKind::Argument { what } if what.contains("same power of two")),
                "{error}"
            );
        }
    }
}
