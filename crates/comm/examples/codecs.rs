//! Speed of the codecs on all threads, as a share of copying the same buffer: `cargo run --release
//! -p trainyard-comm --example codecs`.

use std::hint::black_box;
use std::time::Instant;
use trainyard_base::median;
use trainyard_comm::codec::{Rounding, decode, encode, encoded_bytes};
use trainyard_program::BlockCodec;

/// Elements of each thread: 64 MiB, far beyond the caches.
const ELEMENTS: usize = 1 << 24;
const ROUNDS: usize = 15;

/// Median seconds of `body` on all threads at once, each with buffers of its own.
fn seconds<B: Send>(buffers: &mut [B], body: impl Fn(&mut B) + Sync) -> f64 {
    let mut round = || {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for buffer in buffers.iter_mut() {
                scope.spawn(|| body(buffer));
            }
        });
        began.elapsed().as_secs_f64()
    };
    round();
    median((0..ROUNDS).map(|_| round())).expect("there are rounds")
}

struct Buffers {
    values: Vec<f32>,
    residual: Vec<f32>,
    other: Vec<f32>,
    message: Vec<u8>,
}

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let value = |i: usize| ((i * 2_654_435_761) % 10_007) as f32 * 1e-4 - 0.5;
    let mut buffers: Vec<Buffers> = (0..threads)
        .map(|_| Buffers {
            values: (0..ELEMENTS).map(value).collect(),
            residual: vec![0.0; ELEMENTS],
            other: vec![0.0; ELEMENTS],
            message: vec![0; 2 * ELEMENTS],
        })
        .collect();
    let bytes = (threads * ELEMENTS * 4) as f64;
    let copy = seconds(&mut buffers, |b| black_box(&mut b.other).copy_from_slice(black_box(&b.values)));
    println!("{threads} threads; a copy reads {:.1} GB/s and writes as much", bytes / copy / 1e9);
    println!("{:<12} {:>8} {:>16} {:>8}   as a share of the copy", "codec", "encode", "with feedback", "decode");
    use BlockCodec::{Bf16, Int4, Int8, Nf4, OneBit, TopK};
    for codec in [Bf16, Int8, Int4, Nf4, OneBit, TopK { kept: 41 }] {
        let size = encoded_bytes(codec, ELEMENTS);
        let plain =
            seconds(&mut buffers, |b| encode(codec, &b.values, None, Rounding::Nearest, &mut b.message[..size]));
        let kept = seconds(&mut buffers, |b| {
            encode(codec, &b.values, Some(&mut b.residual), Rounding::Nearest, &mut b.message[..size]);
        });
        let back = seconds(&mut buffers, |b| decode(codec, &b.message[..size], &mut b.other));
        let share = |seconds: f64| format!("{:.0} %", 100.0 * copy / seconds);
        println!("{:<12} {:>8} {:>16} {:>8}", codec.to_string(), share(plain), share(kept), share(back));
    }
}
