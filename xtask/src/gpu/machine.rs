//! Describes the machine: the GPU, its driver, and the libraries that are found.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;
use trainyard_cuda::driver::{Driver, Properties};
use trainyard_cuda::find::{NCCL, Places};
use trainyard_cuda::nvidia::Nvidia;

use super::python::Python;

/// The properties of the machine that figures depend on.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// The GPU. Emulation needs none.
    gpu: Option<Gpu>,
    nccl: Option<PathBuf>,
    /// A Python whose PyTorch sees the GPU.
    pub python: Option<Python>,
    /// The reason why there is no such Python.
    no_python: Option<String>,
    cores: usize,
}

#[derive(Debug, Serialize)]
struct Gpu {
    name: String,
    architecture: String,
    multiprocessors: u32,
    memory_bytes: usize,
    /// The CUDA version that the driver supports.
    driver: String,
    libraries: Vec<(&'static str, String)>,
}

impl Machine {
    /// Describes this machine.
    pub fn of(gpu: Option<&Nvidia>) -> Machine {
        let (python, no_python) = match Python::find() {
            Ok(python) => (Some(python), None),
            Err(why) => (None, Some(why)),
        };
        let nccl = Places::of_this_process().candidates(&NCCL, u32::MAX).into_iter().find(|path| path.is_file());
        let gpu = gpu.map(|gpu| Gpu::new(gpu.properties(), gpu.libraries()));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Machine { gpu, nccl, python, no_python, cores }
    }

    /// The architecture that kernels are compiled for.
    pub fn architecture(&self) -> &str {
        self.gpu.as_ref().map_or("none", |gpu| &gpu.architecture)
    }

    /// One line of description.
    pub fn words(&self) -> String {
        let gpu = self.gpu.as_ref().map_or("emulated kernels, no GPU".to_owned(), |gpu| {
            let libraries: Vec<String> =
                gpu.libraries.iter().map(|(name, version)| format!("{name} {version}")).collect();
            format!("{} ({}), driver of CUDA {}, {}", gpu.name, gpu.architecture, gpu.driver, libraries.join(", "))
        });
        let torch = self.python.as_ref().map_or("no PyTorch found".to_owned(), |p| format!("PyTorch {}", p.torch));
        format!("{gpu}; {torch}")
    }
}

impl Gpu {
    fn new(properties: &Properties, libraries: Vec<(&'static str, String)>) -> Gpu {
        Gpu {
            name: properties.name.clone(),
            architecture: properties.architecture(),
            multiprocessors: properties.multiprocessors,
            memory_bytes: properties.memory,
            driver: format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10),
            libraries,
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gpu {
            None => writeln!(f, "GPU      none: kernels are emulated")?,
            Some(gpu) => {
                let gib = gpu.memory_bytes as f64 / f64::from(1 << 30);
                let Gpu { name, architecture, multiprocessors, driver, .. } = gpu;
                writeln!(f, "GPU      {name}, {architecture}, {multiprocessors} multiprocessors, {gib:.1} GiB")?;
                writeln!(f, "driver   CUDA {driver}")?;
                for (library, version) in &gpu.libraries {
                    writeln!(f, "{library:<8} {version}")?;
                }
            }
        }
        let nccl = self.nccl.as_ref().map_or("not found".to_owned(), |path| path.display().to_string());
        writeln!(f, "NCCL     {nccl}")?;
        match (&self.python, &self.no_python) {
            (Some(python), _) => writeln!(f, "PyTorch  {}", python.torch)?,
            (None, why) => writeln!(f, "PyTorch  not found: {}", why.as_deref().unwrap_or("no Python"))?,
        }
        writeln!(f, "host     {} cores", self.cores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_said_with_and_without_a_gpu() {
        let mut machine = Machine { gpu: None, nccl: None, python: None, no_python: Some("no torch".into()), cores: 2 };
        assert_eq!(machine.words(), "emulated kernels, no GPU; no PyTorch found");
        assert!(machine.to_string().contains("PyTorch  not found: no torch\n"), "{machine}");
        let properties = Properties {
            name: "NVIDIA H200".into(),
            ordinal: 0,
            capability: (9, 0),
            multiprocessors: 132,
            shared_max: 232_448,
            memory: 141 << 30,
            driver_version: 13_000,
        };
        machine.gpu = Some(Gpu::new(&properties, vec![("NVRTC", "13.0".into())]));
        machine.python = Some(Python { torch: "2.11.0 with CUDA 13.0".into(), ..Python::default() });
        let words = "NVIDIA H200 (sm_90a), driver of CUDA 13.0, NVRTC 13.0; PyTorch 2.11.0 with CUDA 13.0";
        assert_eq!(machine.words(), words);
        assert!(machine.to_string().contains("132 multiprocessors, 141.0 GiB\ndriver   CUDA 13.0\nNVRTC    13.0\n"));
    }
}
