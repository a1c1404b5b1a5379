//! Kernels and their cost on a device: the efficiency curves.
//!
//! - A **product** is cut into tiles, which are dealt to cores in waves. A tile's start and end
//!   cost as much as a longer k would. An unfilled last wave is partly lost. No product is faster
//!   than its operands can be moved (the roofline of Williams et al. 2009). Of several tile shapes
//!   the fastest is taken, as libraries do.
//! - A **batched product** is one product per attention head, with small k, so start costs and
//!   traffic decide. Tensor cores cannot load rows that are no multiple of 16 bytes.
//! - **Fused attention** reaches a share of peak that depends on the kernel's generation. Tiles on
//!   the causal diagonal are half wasted.
//! - **Streaming** kernels move bytes.

use crate::constants::{AttentionKind, Constants};
use crate::profile::{Device, Format, Generation};

/// Operations per byte of an A100 in 16 bits, the unit of `tile_start_k`.
const BALANCE: f64 = 312e12 / 2039e9;

/// One kernel launch, or several equal ones.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kernel {
    /// A product of [m, k] and [k, n].
    Product {
        /// Rows of the result.
        m: f64,
        /// Columns of the result.
        n: f64,
        /// Inner length.
        k: f64,
    },
    /// `batch` independent products.
    Batched {
        /// Number of products.
        batch: f64,
        /// Rows of each result.
        m: f64,
        /// Columns of each result.
        n: f64,
        /// Inner length.
        k: f64,
        /// Width of a head: the distance between rows of the operands.
        head_dim: f64,
    },
    /// Fused attention, forward or backward.
    Attention {
        /// The kernel.
        kind: AttentionKind,
        /// Number of sequences times heads.
        heads: f64,
        /// Number of queries per sequence.
        queries: f64,
        /// Number of keys per sequence.
        keys: f64,
        /// Width of a head.
        head_dim: f64,
        /// True if a query sees only itself and what comes before it.
        causal: bool,
        /// True for the backward.
        backward: bool,
    },
    /// Memory-bound work as a chain of kernels, one per operation. Each reads what the one before
    /// it wrote. The fields are those of [`Kernel::Stream`].
    Unfused {
        /// Bytes that one kernel would read and write.
        bytes: f64,
        /// Number of launches.
        launches: f64,
    },
    /// Memory-bound work.
    Stream {
        /// Bytes read and written.
        bytes: f64,
        /// Number of launches.
        launches: f64,
    },
}

/// The context in which kernels are priced: a device, the format of products, the constants.
#[derive(Clone, Copy, Debug)]
pub struct Engine<'a> {
    /// The device.
    pub device: &'a Device,
    /// The format of products.
    pub format: Format,
    /// The constants.
    pub constants: &'a Constants,
}

impl Kernel {
    /// The floating-point operations that matter.
    pub fn flops(&self) -> f64 {
        match *self {
            Kernel::Product { m, n, k } => 2.0 * m * n * k,
            Kernel::Batched { batch, m, n, k, .. } => 2.0 * batch * m * n * k,
            Kernel::Attention { heads, queries, keys, head_dim, causal, backward, .. } => {
                let whole = 4.0 * heads * queries * keys * head_dim;
                whole * if causal { 0.5 } else { 1.0 } * if backward { 2.5 } else { 1.0 }
            }
            Kernel::Stream { .. } | Kernel::Unfused { .. } => 0.0,
        }
    }

    /// The number of launches by the host.
    pub fn launches(&self) -> f64 {
        match *self {
            Kernel::Stream { launches, .. } | Kernel::Unfused { launches, .. } => launches,
            Kernel::Attention { backward: true, .. } => 2.0,
            _ => 1.0,
        }
    }
}

impl Engine<'_> {
    /// Seconds of `kernels`, one after another.
    pub fn seconds(&self, kernels: &[Kernel]) -> f64 {
        kernels.iter().map(|kernel| self.kernel_s(kernel)).sum()
    }

    /// Seconds of one kernel.
    pub fn kernel_s(&self, kernel: &Kernel) -> f64 {
        let launch = kernel.launches() * self.constants.launch_us * 1e-6;
        let run = match *kernel {
            Kernel::Product { m, n, k } => self.product_s(m, n, k),
            Kernel::Batched { batch, m, n, k, head_dim } => self.batched_s(batch, m, n, k, head_dim),
            Kernel::Attention { kind, queries, backward, causal, .. } => {
                let share = self.constants.attention_share(kind, self.device.family, backward);
                // Attention stays in 16 bits if products are in 8.
                let format = if self.format.bytes() < 2.0 { Format::Bf16 } else { self.format };
                let diagonal = if causal { 1.0 + 256.0 / queries.max(1.0) } else { 1.0 };
                kernel.flops() * diagonal / (share * self.device.peak(format))
            }
            Kernel::Stream { bytes, .. } => self.constants.stream_factor * bytes / self.bandwidth(),
            Kernel::Unfused { bytes, .. } => {
                self.constants.stream_factor * self.constants.unfused_factor * bytes / self.bandwidth()
            }
        };
        run + launch
    }

    /// Bytes per second that streaming kernels reach.
    pub fn bandwidth(&self) -> f64 {
        self.device.memory_gb_s * 1e9 * self.constants.memory_share
    }

    /// FLOP/s that large products sustain.
    fn rate(&self) -> f64 {
        let narrow = match self.format {
            _ if !self.device.has(self.format) => 1.0,
            Format::Fp8 => self.constants.eight_bit_share,
            Format::Fp4 => self.constants.four_bit_share,
            _ => 1.0,
        };
        self.device.product_rate(self.format) * self.constants.sustained(self.device.family) * narrow
    }

    /// Operations per byte of memory that the device is made for.
    fn balance(&self) -> f64 {
        self.device.peak(self.format) / (self.device.memory_gb_s * 1e9)
    }

    fn product_s(&self, m: f64, n: f64, k: f64) -> f64 {
        if m <= 0.0 || n <= 0.0 || k <= 0.0 {
            return 0.0;
        }
        let traffic = self.format.bytes() * (m * k + k * n) + 2.0 * m * n;
        let moved = traffic / self.bandwidth();
        if self.device.family == Generation::Cpu {
            return (2.0 * m * n * k / self.rate()).max(moved);
        }
        let cores = f64::from(self.device.multiprocessors);
        // A tile's start and end wait for memory. Counted as k, they grow with the operations that
        // a core does meanwhile.
        let start = self.constants.tile_start_k * self.balance() / BALANCE;
        // Tile shapes, each with its slowdown against the largest: it loads more bytes per
        // operation.
        let tiles: [(f64, f64, f64); 4] =
            [(128.0, 256.0, 1.0), (128.0, 128.0, 1.08), (64.0, 128.0, 1.25), (64.0, 64.0, 1.6)];
        let largest = if self.device.family == Generation::Volta { 1 } else { 0 };
        let seconds = |(rows, columns, slower): (f64, f64, f64)| {
            let waves = (m / rows).ceil() * (n / columns).ceil() / cores;
            let waves = if waves <= 1.0 { 1.0 } else { waves + (waves.ceil() - waves) * self.constants.wave_share };
            let slower = slower / tiles[largest].2;
            waves * cores * rows * columns * 2.0 * (k + start) * slower / self.rate()
        };
        tiles[largest..].iter().map(|tile| seconds(*tile)).fold(f64::INFINITY, f64::min).max(moved)
    }

    fn batched_s(&self, batch: f64, m: f64, n: f64, k: f64, head_dim: f64) -> f64 {
        let flops = 2.0 * batch * m * n * k;
        if head_dim % 8.0 != 0.0 {
            return flops / (self.constants.misaligned_share * self.device.peak(Format::Fp32));
        }
        let moved = 2.0 * batch * (m * k + k * n + m * n) / self.bandwidth();
        (flops * (1.0 + self.constants.batched_start_k / k) / self.rate()).max(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profiles;

    fn with<T>(device: &str, test: impl Fn(Engine<'_>) -> T) -> T {
        let profiles = Profiles::builtin();
        let device = profiles.device(device).unwrap();
        test(Engine { device, format: Format::Bf16, constants: &Constants::builtin() })
    }

    fn rate(engine: Engine<'_>, m: f64, n: f64, k: f64) -> f64 {
        let kernel = Kernel::Product { m, n, k };
        kernel.flops() / engine.kernel_s(&kernel)
    }

    #[test]
    fn no_product_beats_the_measured_best_and_large_ones_come_near_it() {
        for name in ["V100-16GB", "A100-80GB", "H100", "H200", "B200", "MI300X", "RTX-4090", "L4"] {
            with(name, |engine| {
                let best = engine.device.product_rate(Format::Bf16);
                for (m, n, k) in [(16384.0, 16384.0, 16384.0), (4096.0, 4096.0, 4096.0), (512.0, 8192.0, 1024.0)] {
                    assert!(rate(engine, m, n, k) < best, "{name} {m} {n} {k}");
                }
                assert!(rate(engine, 16384.0, 16384.0, 16384.0) > 0.6 * best, "{name}");
            });
        }
    }

    #[test]
    fn small_and_thin_products_are_slower_per_operation() {
        with("H100", |engine| {
            let large = rate(engine, 8192.0, 8192.0, 8192.0);
            assert!(rate(engine, 8192.0, 8192.0, 128.0) < 0.6 * large);
            assert!(rate(engine, 128.0, 8192.0, 8192.0) < 0.7 * large);
            assert!(rate(engine, 512.0, 512.0, 512.0) < 0.3 * large);
        });
    }

    /// FlashAttention-2, figure 4: causal forward at head width 128 and 8k tokens reaches about 190
    /// TFLOP/s on an A100.
    #[test]
    fn attention_and_streams_follow_their_papers() {
        with("A100-80GB", |engine| {
            let kernel = |kind, backward| Kernel::Attention {
                kind,
                heads: 32.0,
                queries: 8192.0,
                keys: 8192.0,
                head_dim: 128.0,
                causal: true,
                backward,
            };
            let rate = |kernel: Kernel| kernel.flops() / engine.kernel_s(&kernel) / 1e12;
            assert!((150.0..200.0).contains(&rate(kernel(AttentionKind::Flash2, false))));
            assert!(rate(kernel(AttentionKind::Flash1, false)) < rate(kernel(AttentionKind::Flash2, false)));
            let stream = engine.kernel_s(&Kernel::Stream { bytes: 2.039e9, launches: 1.0 });
            assert!((1e-3..2e-3).contains(&stream), "{stream}");
        });
    }

    #[test]
    fn rows_that_tensor_cores_cannot_load_are_many_times_slower() {
        with("A100-80GB", |engine| {
            let seconds = |width: f64| {
                engine.kernel_s(&Kernel::Batched { batch: 64.0, m: 2048.0, n: 2048.0, k: width, head_dim: width })
            };
            assert!(seconds(108.0) > 4.0 * seconds(112.0));
        });
    }
}
