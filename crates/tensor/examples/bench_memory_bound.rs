//! Times the kernels that stream: `bench_memory_bound [DTYPE] [gpt2|characters] [SECONDS]`.

use trainyard_tensor::bench::memory_bound::{Sizes, time_kernels};
use trainyard_tensor::cpu::{Cpu, Isa};
use trainyard_tensor::{bf16, f16};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let sizes = match args.get(1).map(String::as_str) {
        Some("characters") => Sizes::CHARACTERS,
        _ => Sizes::GPT2,
    };
    let seconds = args.get(2).map_or(Ok(0.2), |arg| arg.parse())?;
    let isa = Isa::choose(&std::env::var("TRAINYARD_ISA").unwrap_or("auto".into()))?;
    let cpu = Cpu::new(isa, std::env::var("THREADS").map_or(Ok(2), |threads| threads.parse())?);
    println!("{isa}, {} threads, {sizes:?}", cpu.threads.count());
    let timings = match args.first().map(String::as_str) {
        Some("f32") => time_kernels::<f32>(&cpu, sizes, seconds)?,
        Some("f16") => time_kernels::<f16>(&cpu, sizes, seconds)?,
        _ => time_kernels::<bf16>(&cpu, sizes, seconds)?,
    };
    for timing in timings {
        println!("{timing}");
    }
    Ok(())
}
