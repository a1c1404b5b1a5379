//! Prints one JSON line per attention shape. Arguments: f32, bf16 or f16 (default bf16), threads (default 2), seconds per
//! measurement (default 1), and a part of the names of the shapes to run (default all).

use trainyard_tensor::bench::attention::{Case, measure};
use trainyard_tensor::cpu::{Cpu, Isa};
use trainyard_tensor::{bf16, f16};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or_else(|| default.to_owned());
    let (dtype, threads, seconds, part) = (arg(0, "bf16"), arg(1, "2").parse()?, arg(2, "1").parse()?, arg(3, ""));
    let isa = Isa::choose(&std::env::var("TRAINYARD_ISA").unwrap_or_else(|_| "auto".to_owned()))?;
    let cpu = Cpu::new(isa, threads);
    for case in Case::all().into_iter().filter(|case| case.name.contains(&part)) {
        let result = match dtype.as_str() {
            "f32" => measure::<f32>(&cpu, &case, seconds)?,
            "f16" => measure::<f16>(&cpu, &case, seconds)?,
            _ => measure::<bf16>(&cpu, &case, seconds)?,
        };
        let (tflops, [forward, backward]) = (result.tflops(), result.seconds.map(|seconds| seconds * 1e3));
        println!(
            "{{\"name\": \"{}\", \"dtype\": \"{}\", \"isa\": \"{}\", \"threads\": {threads}, \"forward_ms\": {forward:.4}, \
             \"backward_ms\": {backward:.4}, \"forward_tflops\": {:.3}, \"backward_tflops\": {:.3}, \
             \"forward_ms_min\": {:.4}, \"backward_ms_min\": {:.4}, \
             \"error_out\": {:.1e}, \"error_gradients\": {:.1e}}}",
            result.name,
            result.dtype,
            result.isa,
            tflops[0],
            tflops[1],
            result.fastest[0] * 1e3,
            result.fastest[1] * 1e3,
            result.errors[0],
            result.errors[1],
        );
    }
    Ok(())
}
