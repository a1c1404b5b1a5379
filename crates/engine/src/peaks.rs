//! Measured peak speeds of a device. Utilisation (MFU) is a run's speed divided by these.

use crate::Result;
use trainyard_tensor::cpu::{Cpu, peak};
use trainyard_tensor::cuda;
use trainyard_tensor::{DType, Device};

/// Measured peaks.
#[derive(Clone, PartialEq, Debug)]
pub enum Peaks {
    /// Peaks of a host's CPU.
    Cpu(peak::Peaks),
    /// Peaks of one GPU.
    Cuda {
        /// Its name.
        name: String,
        /// Its architecture, as kernels are compiled for it.
        architecture: String,
        /// Its measured peaks.
        peaks: cuda::peak::Peaks,
    },
}

impl Peaks {
    /// Measures the peaks of `device`. Takes some tenths of a second.
    ///
    /// # Errors
    /// Those of a GPU, and if `device` is the meta device.
    pub fn of(device: &Device) -> Result<Peaks> {
        match (device.as_cuda(), device.as_cpu()) {
            (Some(gpu), _) => {
                let properties = gpu.properties();
                let (name, architecture) = (properties.name.clone(), properties.architecture());
                Ok(Peaks::Cuda { name, architecture, peaks: cuda::peak::measure(gpu)? })
            }
            (_, Some(cpu)) => Ok(Peaks::of_cpu(cpu)),
            _ => {
                Err(crate::state::does_not_fit("a device that has shapes only reaches nothing that could be measured"))
            }
        }
    }

    /// Measures the peaks of a CPU.
    pub fn of_cpu(cpu: &Cpu) -> Peaks {
        Peaks::Cpu(peak::measure(cpu))
    }

    /// FLOP/s of matrix products whose operands have type `dtype`.
    pub fn flops(&self, dtype: DType) -> f64 {
        match self {
            Peaks::Cpu(peaks) => peaks.flops(dtype),
            Peaks::Cuda { peaks, .. } => peaks.flops(dtype),
        }
    }

    /// Bytes per second, read plus written, of a copy that is larger than all caches.
    pub fn copy_bytes_per_s(&self) -> f64 {
        match self {
            Peaks::Cpu(peaks) => peaks.copy_bytes_per_s,
            Peaks::Cuda { peaks, .. } => peaks.copy_bytes_per_s,
        }
    }

    /// Name of the measured device: `amx_bf16 on 2 threads`, `NVIDIA H200, sm_90a`.
    pub fn of_what(&self) -> String {
        match self {
            Peaks::Cpu(peaks) => format!("{} on {} threads", peaks.isa, peaks.threads),
            Peaks::Cuda { name, architecture, .. } => format!("{name}, {architecture}"),
        }
    }

    /// The instruction set, or a GPU's architecture.
    pub fn isa(&self) -> &str {
        match self {
            Peaks::Cpu(peaks) => peaks.isa.name(),
            Peaks::Cuda { architecture, .. } => architecture,
        }
    }
}
