//! Times the products of eight experts, of which each token goes to two, against dense products of
//! the same FLOPs, in turn: `bench_ragged [f32|bf16] [TOKENS] [SECONDS]`. Experts have 0.4 to 1.6
//! of
//! the mean's rows.

use std::time::Instant;
use trainyard_base::median;
use trainyard_tensor::cpu::gemm::{
    Accumulate, Epilogue, GradientEpilogue, MatMut, MatRef, forward, grouped_forward, grouped_input_gradient,
    grouped_weight_gradient, input_gradient, weight_gradient,
};
use trainyard_tensor::cpu::{Cpu, Isa};
use trainyard_tensor::{Element, bf16};

/// Experts' loads, of 80.
const LOADS: [usize; 8] = [16, 4, 10, 13, 7, 12, 8, 10];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let tokens = args.get(1).map_or(Ok(2048), |arg| arg.parse())?;
    let seconds = args.get(2).map_or(Ok(3.0), |arg| arg.parse())?;
    let isa = Isa::choose(&std::env::var("TRAINYARD_ISA").unwrap_or("auto".into()))?;
    let cpu = Cpu::new(isa, std::env::var("THREADS").map_or(Ok(2), |threads| threads.parse())?);
    println!("{isa}, {} threads, {tokens} tokens, top-2 of 8 experts", cpu.threads.count());
    let mut worst = f64::INFINITY;
    for (what, inputs, outputs) in [("up", 512, 2048), ("down", 1024, 512), ("large", 1024, 4096)] {
        worst = worst.min(match args.first().map(String::as_str) {
            Some("f32") => time::<f32>(&cpu, what, [2 * tokens, inputs, outputs], seconds)?,
            _ => time::<bf16>(&cpu, what, [2 * tokens, inputs, outputs], seconds)?,
        });
    }
    println!("worst ratio {worst:.3}");
    Ok(())
}

fn random<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

/// The least ratio of the three forms' rates to those of dense products.
fn time<T: Element>(
    cpu: &Cpu,
    what: &str,
    [rows, k, n]: [usize; 3],
    seconds: f64,
) -> Result<f64, Box<dyn std::error::Error>> {
    let mut bounds = vec![0];
    LOADS
        .iter()
        .scan(0, |sum, load| {
            Some({
                *sum += load;
                rows * *sum / 80
            })
        })
        .for_each(|end| bounds.push(end));
    let (x, dy) = (random::<T>(1, rows * k), random::<T>(2, rows * n));
    let (w, dense) = (random::<T>(3, 8 * n * k), random::<T>(4, n * k));
    let (x, dy) = (MatRef::new(&x, rows, k), MatRef::new(&dy, rows, n));
    let (w, dense) = (MatRef::new(&w, 8 * n, k), MatRef::new(&dense, n, k));
    let (mut y, mut dx) = (vec![T::default(); rows * n], vec![T::default(); rows * k]);
    let (mut dw, mut dw_dense) = (vec![0f32; 8 * n * k], vec![0f32; n * k]);

    // Checked against the plain products of each group before anything is timed.
    grouped_forward(cpu, x, w, &bounds, MatMut::new(&mut y, rows, n));
    for e in 0..8 {
        let group = bounds[e]..bounds[e + 1];
        let mut alone = vec![T::default(); group.len() * n];
        let (x, w) = (x.row_range(group.clone()), w.row_range(e * n..(e + 1) * n));
        forward(cpu, x, w.into(), Epilogue::default(), MatMut::new(&mut alone, group.len(), n));
        if alone != y[group.start * n..group.end * n] {
            return Err(format!("{what}: expert {e} has other bits than its own product").into());
        }
    }

    let mut worst = f64::INFINITY;
    for form in ["forward", "input gradient", "weight gradient"] {
        let (mut ragged, mut plain) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while ragged.len() < 5 || start.elapsed().as_secs_f64() < seconds {
            let began = Instant::now();
            match form {
                "forward" => grouped_forward(cpu, x, w, &bounds, MatMut::new(&mut y, rows, n)),
                "input gradient" => grouped_input_gradient(cpu, dy, w, &bounds, MatMut::new(&mut dx, rows, k)),
                _ => grouped_weight_gradient(cpu, dy, x, &bounds, &mut dw, Accumulate::Overwrite),
            }
            ragged.push(began.elapsed().as_secs_f64());
            let began = Instant::now();
            match form {
                "forward" => forward(cpu, x, dense.into(), Epilogue::default(), MatMut::new(&mut y, rows, n)),
                "input gradient" => {
                    let dx = MatMut::new(&mut dx, rows, k);
                    input_gradient(cpu, dy, dense.into(), GradientEpilogue::default(), dx);
                }
                _ => weight_gradient(cpu, dy, x, &mut dw_dense, Accumulate::Overwrite, None),
            }
            plain.push(began.elapsed().as_secs_f64());
        }
        let rate = |times| 2.0 * (rows * n * k) as f64 / median(times).unwrap_or(f64::INFINITY) / 1e9;
        let (ragged, plain) = (rate(ragged), rate(plain));
        println!(
            "{what:<6} {rows:>6} x {k:>5} -> {n:>5}  {form:<16} {:<5} experts {ragged:>7.1} GFLOP/s, dense {plain:>7.1}, ratio {:.3}",
            T::DTYPE.name(),
            ragged / plain
        );
        worst = worst.min(ragged / plain);
    }
    Ok(worst)
}
