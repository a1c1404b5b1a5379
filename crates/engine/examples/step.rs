//! Times training steps on random tokens: `step PRESET ROWS LENGTH STEPS DTYPE THREADS`.
use std::time::Instant;
use trainyard_engine::config::{Config, Inputs};
use trainyard_engine::{
    precision::LossScaler,
    predict::predict,
    rank::{Rank, StepSettings},
    shape,
};
use trainyard_model::{BatchShape, BatchSlices, Model};
use trainyard_tensor::{Device, Purpose, cpu::Isa};

fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    let (preset, rows, length, steps): (&str, usize, usize, usize) =
        (&a[0], a[1].parse().unwrap(), a[2].parse().unwrap(), a[3].parse().unwrap());
    let sets: Vec<String> = vec![
        format!("model.preset='{preset}'"),
        "model.vocab_multiple=64".into(),
        format!("training.micro_batch_size={rows}"),
        format!("training.sequence_length={length}"),
        "training.steps=1000".into(),
        format!("precision.compute='{}'", a[4]),
        format!("compute.threads={}", a[5]),
        format!("activation_checkpointing.mode='{}'", a.get(6).map_or("none", |s| s)),
    ];
    let mut inputs = Inputs::of_this_machine();
    inputs.batches_supplied = true;
    inputs.tokenizer_vocabulary = a.get(7).map(|v| v.parse().unwrap());
    let resolved = Config::parse(std::path::Path::new("none"), "", &sets).unwrap().resolve(&inputs).unwrap();
    let spec = shape::model_spec(&resolved).unwrap();
    let dtype = shape::compute_dtype(&resolved);
    let batch = BatchShape::uniform(rows, length);
    let model = Model::new(spec.clone()).unwrap();
    let keep = shape::keep(&resolved, model.units().len());
    let t = Instant::now();
    let [program, _] = shape::programs(&shape::model_shape(&model, &batch, dtype).unwrap(), 1, &keep).unwrap();
    let shape_time = t.elapsed();
    let p = predict(Model::new(spec.clone()).unwrap(), &program, &batch, dtype, resolved.optimizer).unwrap();
    println!(
        "shape {shape_time:?} predicted in {:?}: {:.3} TFLOP, memory {:?}",
        p.took,
        p.cost.flops as f64 / 1e12,
        p.purposes()
    );
    let device = Device::cpu(
        Isa::choose(&std::env::var("TRAINYARD_ISA").unwrap_or("auto".into())).unwrap(),
        resolved.threads,
        None,
    );
    let t = Instant::now();
    let mut rank = Rank::new(&device, model, dtype, resolved.optimizer, LossScaler::none(), 1).unwrap();
    println!("init {:?}", t.elapsed());
    let vocab = spec.vocab_size as u64;
    let mut x = 12345u64;
    let mut times = vec![];
    for step in 0..steps {
        device.take_profile();
        device.set_profiling(step > 1);
        let t = Instant::now();
        let out = rank
            .execute(
                &program,
                StepSettings { step: step as u64, rate_factor: 1.0, clip_norm: Some(1.0) },
                |d, m| {
                    let mut next = || {
                        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        ((x >> 33) % vocab) as i32
                    };
                    let tokens: Vec<i32> = (0..rows * length).map(|_| next()).collect();
                    let targets: Vec<i32> = (0..rows * length).map(|_| next()).collect();
                    let positions: Vec<i32> = (0..rows).flat_map(|_| 0..length as i32).collect();
                    let cu: Vec<i32> = (0..=rows).map(|r| (r * length) as i32).collect();
                    Ok(m.batch(
                        d,
                        &BatchSlices {
                            tokens: &tokens,
                            targets: Some(&targets),
                            positions: &positions,
                            cu_seqlens: &cu,
                        },
                    )?)
                },
                |_, _| Ok(()),
            )
            .unwrap();
        let s = t.elapsed().as_secs_f64();
        times.push(s);
        println!(
            "step {step} loss {:.4} norm {:.4} {:.4}s {:.0} tok/s",
            out.loss,
            out.gradient_norm,
            s,
            out.tokens as f64 / s
        );
    }
    let prof = device.take_profile();
    let mut k: Vec<_> = prof.kernels.iter().collect();
    k.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    for (name, k) in k {
        println!(
            "{name:<40} {:>5} calls {:>8.2} ms {:>7.1} GFLOP/s {:>6.1} GB/s",
            k.calls,
            k.seconds * 1e3,
            k.cost.flops as f64 / k.seconds / 1e9,
            k.cost.bytes as f64 / k.seconds / 1e9
        );
    }
    times.sort_by(f64::total_cmp);
    println!("median {:.4}s  {:.0} tok/s", times[times.len() / 2], (rows * length) as f64 / times[times.len() / 2]);
    let u = device.pool().usage();
    for q in Purpose::ALL {
        if u.peak(q) > 0 {
            println!("{q}: peak {} predicted {}", u.peak(q), p.memory.peak(q));
        }
    }
    println!("reserved {} total peak {} predicted {}", u.reserved(), u.peak_total(), p.memory.peak_total());
    println!(
        "{}",
        std::fs::read_to_string("/proc/self/status").unwrap().lines().find(|l| l.starts_with("VmHWM")).unwrap()
    );
}
