//! What the device of a run reaches at best, measured: the denominator of its utilisation.

use crate::Result;
use trainyard_tensor::cpu::{Cpu, peak};
use trainyard_tensor::cuda;
use trainyard_tensor::{DType, Device};

/// Measured peaks.
#[derive(Clone, PartialEq, Debug)]
pub enum Peaks {
    /// Of a host's processor.
    Cpu(peak::Peaks),
    /// Of one GPU.
    Cuda {
        /// Its name.
        name: String,
        /// Its architecture, as kernels are compiled for it.
        architecture: String,
        /// What it reaches.
        peaks: cuda::peak::Peaks,
    },
}

impl Peaks {
    /// Measures those of `device`: some tenths of a second.
    ///
    /// # Errors
    /// Those of a GPU; a device that has shapes only.
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

    /// Those of a processor.
    pub fn of_cpu(cpu: &Cpu) -> Peaks {
        Peaks::Cpu(peak::measure(cpu))
    }

    /// Operations a second of products whose operands have type `dtype`.
    pub fn flops(&self, dtype: DType) -> f64 {
        match self {
            Peaks::Cpu(peaks) => peaks.flops(dtype),
            Peaks::Cuda { peaks, .. } => peaks.flops(dtype),
        }
    }

    /// Bytes a second, read plus written, of a copy that no cache holds.
    pub fn copy_bytes_per_s(&self) -> f64 {
        match self {
            Peaks::Cpu(peaks) => peaks.copy_bytes_per_s,
            Peaks::Cuda { peaks, .. } => peaks.copy_bytes_per_s,
        }
    }

    /// Whose they are: `amx_bf16 on 2 threads`, `NVIDIA H200, sm_90a`.
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
