//! Collects the measurements of probes and turns them into curves and overheads.

use std::collections::BTreeMap;
use trainyard_base::median;
use trainyard_engine::bench::Timed;
use trainyard_program::{Lane, Program};
use trainyard_sim::machine::{KernelCurve, Overheads, Point, Speeds};
use trainyard_tensor::{Call, Cost, Dims};

/// Identity of a curve: kernel with its form, dtype, ranks, threads.
type Key = (String, &'static str, u32, u32);

/// Samples of one shape.
#[derive(Default)]
struct Samples {
    cost: Cost,
    seconds: Vec<f64>,
    speeds: Vec<Speeds>,
}

/// All measurements so far.
#[derive(Default)]
pub struct Collector {
    kernels: BTreeMap<Key, BTreeMap<Dims, Samples>>,
    speeds: Vec<Speeds>,
    /// Per instruction of the compute lane: number of launches, and seconds outside of kernels.
    around: Vec<(f64, f64)>,
    handovers: Vec<f64>,
    steps: Vec<f64>,
}

impl Collector {
    /// Adds a sample of the machine's speeds.
    pub fn sample(&mut self, speeds: Speeds) {
        self.speeds.push(speeds);
    }

    /// All samples of speeds.
    pub fn speeds(&self) -> &[Speeds] {
        &self.speeds
    }

    /// Adds calls that `ranks` ranks of `threads` threads made at the same time while the machine
    /// had `speeds`.
    pub fn calls(&mut self, calls: &[Call], ranks: u32, threads: u32, speeds: Speeds) {
        for call in calls {
            let name = match call.work.variant {
                "" => call.kernel.to_owned(),
                form => format!("{} {form}", call.kernel),
            };
            let curve = self.kernels.entry((name, call.work.dtype.name(), ranks, threads)).or_default();
            let samples = curve.entry(call.work.dims).or_default();
            samples.cost = call.work.cost;
            samples.seconds.push(call.seconds);
            samples.speeds.push(speeds);
        }
    }

    /// Adds the time that a step spent outside of its kernels. The rank must be alone in its world.
    pub fn step(&mut self, program: &Program, timed: &Timed, calls: &[Call]) {
        let mut kernels = vec![(0.0, 0.0); program.instructions.len()];
        for call in calls {
            let (count, seconds) = &mut kernels[call.tag as usize];
            *count += 1.0;
            *seconds += call.seconds;
        }
        let seconds = |duration: std::time::Duration| duration.as_secs_f64();
        for (number, (instruction, span)) in program.instructions.iter().zip(&timed.spans).enumerate() {
            if instruction.action.lane() == Lane::Compute {
                let (count, inside) = kernels[number];
                self.around.push((count, seconds(span.end.saturating_sub(span.start)) - inside));
            }
            // A lane that slept until another lane was done must be woken.
            if let Some(on) = span.waited_for {
                self.handovers.push(seconds(span.start.saturating_sub(timed.spans[on as usize].end)));
            }
        }
        let end = timed.spans.iter().map(|span| span.end).max().unwrap_or_default();
        self.steps.push(timed.seconds - seconds(end));
    }

    /// The medians of the time spent outside of kernels.
    pub fn overheads(&self) -> Overheads {
        let (launch_s, instruction_s) = line(&self.around);
        Overheads {
            launch_s,
            instruction_s,
            handover_s: median(self.handovers.iter().copied()).unwrap_or(0.0).max(0.0),
            step_s: median(self.steps.iter().copied()).unwrap_or(0.0).max(0.0),
        }
    }

    /// A curve for every kernel, made of medians.
    pub fn curves(&self) -> Vec<KernelCurve> {
        let curve = |((kernel, dtype, ranks, threads), shapes): (&Key, &BTreeMap<Dims, Samples>)| KernelCurve {
            kernel: kernel.clone(),
            dtype: (*dtype).to_owned(),
            ranks: *ranks,
            threads: *threads,
            points: shapes.iter().filter_map(|(dims, samples)| point(dtype, dims, samples)).collect(),
        };
        self.kernels.iter().map(curve).filter(|curve| !curve.points.is_empty()).collect()
    }
}

/// The median of the samples of one shape. Times and speeds stay paired, so that a moment when both
/// were slow does not distort the result: the sample is taken whose arithmetic, in units of the
/// peak of its own moment, took the median time.
fn point(dtype: &str, dims: &Dims, samples: &Samples) -> Option<Point> {
    let mut order: Vec<usize> = (0..samples.seconds.len()).filter(|at| samples.seconds[*at] > 0.0).collect();
    let scaled = |at: usize| {
        let (seconds, speeds) = (samples.seconds[at], &samples.speeds[at]);
        let arithmetic = samples.cost.flops as f64 / speeds.flops(dtype);
        let traffic = samples.cost.bytes as f64 / speeds.copy_bytes_per_s;
        // A kernel slows down as much as the slower of its two parts.
        seconds / (arithmetic + traffic).max(1e-12)
    };
    order.sort_by(|a, b| scaled(*a).total_cmp(&scaled(*b)));
    let middle = *order.get(order.len() / 2)?;
    let speeds = &samples.speeds[middle];
    Some(Point {
        dims: dims.map(f64::from).into(),
        flops: samples.cost.flops as f64,
        bytes: samples.cost.bytes as f64,
        seconds: samples.seconds[middle],
        product_flops: speeds.flops(dtype),
        copy_bytes_per_s: speeds.copy_bytes_per_s,
    })
}

/// Seconds per launch and per instruction, neither negative: least squares over the medians of
/// instructions with equally many launches.
fn line(around: &[(f64, f64)]) -> (f64, f64) {
    let mut groups: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (count, seconds) in around {
        groups.entry(*count as u64).or_default().push(*seconds);
    }
    let points: Vec<(f64, f64)> =
        groups.into_iter().filter_map(|(count, seconds)| Some((count as f64, median(seconds)?.max(0.0)))).collect();
    let n = points.len().max(1) as f64;
    let mean = |f: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (x, y) = (mean(&|p| p.0), mean(&|p| p.1));
    let (xx, xy) = (mean(&|p| (p.0 - x).powi(2)), mean(&|p| (p.0 - x) * (p.1 - y)));
    let slope = if xx > 0.0 { (xy / xx).max(0.0) } else { 0.0 };
    let start = y - slope * x;
    if start >= 0.0 { (slope, start) } else { (if x > 0.0 { y / x } else { 0.0 }, 0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_tensor::{Computes, DType};

    const FAST: Speeds = Speeds { f32_flops: 1e11, bf16_flops: 4e12, copy_bytes_per_s: 1e10 };

    fn call(seconds: f64) -> Call {
        let work = Cost { flops: 4_000_000_000, bytes: 1000 }.on(DType::BF16, [10, 20, 30]).variant("residual");
        Call { kernel: "linear", work, seconds, tag: 0, computes: Computes::Cpu }
    }

    #[test]
    fn a_slow_spell_is_paired_with_its_own_peak_and_outliers_fall_out() {
        let mut collector = Collector::default();
        let slow = Speeds { bf16_flops: 1e12, ..FAST };
        for (seconds, speeds) in [(2e-3, FAST), (8e-3, slow), (8.1e-3, slow), (0.5, FAST), (1.9e-3, FAST)] {
            collector.calls(&[call(seconds)], 1, 2, speeds);
        }
        let curves = collector.curves();
        let [curve] = &curves[..] else { panic!("{curves:?}") };
        assert_eq!((curve.kernel.as_str(), curve.dtype.as_str(), curve.threads), ("linear residual", "bf16", 2));
        let point = &curve.points[0];
        assert!((point.seconds * point.product_flops / 8e9 - 1.0).abs() < 0.05, "{point:?}");
    }

    #[test]
    fn overheads_are_found_again() {
        let around: Vec<(f64, f64)> = (0..40).map(|i| (f64::from(i % 8), 3e-6 + 2e-6 * f64::from(i % 8))).collect();
        let (launch, instruction) = line(&around);
        assert!((launch - 2e-6).abs() < 1e-12 && (instruction - 3e-6).abs() < 1e-12);
        assert_eq!(line(&[]), (0.0, 0.0));
    }
}
