//! Times the matrix products of GPT-2 124M and Llama 1B: `bench_gemm [DTYPE] [TOKENS] [SECONDS] [LAYER]`.
//!
//! Figures go to standard output, one line each, with `--json` as a JSON list that `scripts/peers/torch_gemm.py` also writes.

use trainyard_tensor::DType;
use trainyard_tensor::bench::gemm::{LAYERS, geometric_mean, time_layer};
use trainyard_tensor::cpu::{Cpu, Isa, peak};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (options, args): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let json = options.iter().any(|option| option == "--json");
    let dtype = match args.first().map(String::as_str) {
        Some("f32") => DType::F32,
        Some("f16") => DType::F16,
        _ => DType::BF16,
    };
    let tokens = args.get(1).map_or(Ok(1024), |arg| arg.parse())?;
    let seconds = args.get(2).map_or(Ok(0.3), |arg| arg.parse())?;
    let isa = Isa::choose(&std::env::var("TRAINYARD_ISA").unwrap_or("auto".into()))?;
    let threads = std::env::var("THREADS").map_or(Ok(2), |threads| threads.parse())?;

    let cpu = Cpu::new(isa, threads);
    let peaks = peak::measure(&cpu);
    if !json {
        println!("{peaks:?}");
    }
    let mut timings = Vec::new();
    for layer in LAYERS.into_iter().filter(|layer| args.get(3).is_none_or(|name| layer.name.contains(name.as_str()))) {
        for timing in time_layer(&cpu, &peaks, dtype, layer, tokens, seconds)? {
            if !json {
                println!("{timing}");
            }
            timings.push(timing);
        }
    }
    if json {
        let lines: Vec<String> = timings
            .iter()
            .map(|t| {
                format!(
                    r#"{{"layer":"{}","tokens":{},"form":"{}","dtype":"{}","seconds":{:e},"percent_of_peak":{:.2}}}"#,
                    t.layer.name,
                    t.tokens,
                    t.form.name(),
                    t.dtype.name(),
                    t.seconds,
                    t.percent_of_peak
                )
            })
            .collect();
        println!("[{}]", lines.join(",\n"));
    } else {
        println!("geometric mean: {:.1} % of peak", geometric_mean(&timings));
    }
    Ok(())
}
