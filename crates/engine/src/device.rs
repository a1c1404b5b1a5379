//! Opens the device of a rank, by its configuration, and checks that a step fits.

use crate::Result;
use crate::config::{AttentionKernels, DeviceKind, Resolved};
use crate::host;
use crate::predict::StepNeeds;
use crate::state::does_not_fit;
use std::sync::Arc;
use trainyard_base::format_bytes;
use trainyard_comm::{Communicator, Environment};
use trainyard_tensor::cpu::LentThreads;
use trainyard_tensor::cuda::driver::Product;
use trainyard_tensor::cuda::{AttentionForm, Cuda};
use trainyard_tensor::{Computes, DType, Device, Purpose};

/// The kind of device that computes under a configuration.
pub fn computes(resolved: &Resolved) -> Computes {
    match resolved.config.compute.device {
        DeviceKind::Cpu => Computes::Cpu,
        DeviceKind::Cuda(_) => Computes::Cuda,
    }
}

/// Checks that the requested device can be opened, before ranks wait for each other.
///
/// # Errors
/// The machine lacks something for a GPU.
pub fn check(resolved: &Resolved, world: &Communicator) -> Result<()> {
    let DeviceKind::Cuda(ordinal) = resolved.config.compute.device else { return Ok(()) };
    Ok(Cuda::check(ordinal.map_or_else(|| place(Some(world)), Ok)?)?)
}

/// Opens the device of a rank; `prediction` has the needs of its step.
///
/// # Errors
/// On a GPU: the machine lacks something for it, or a step does not fit in the free memory.
pub fn open(resolved: &Resolved, world: Option<&Communicator>, prediction: Option<&StepNeeds>) -> Result<Device> {
    let limit = resolved.config.memory.limit.map(|limit| limit.0 as usize);
    let DeviceKind::Cuda(ordinal) = resolved.config.compute.device else {
        return Ok(match world.and_then(|world| lent(resolved, world)) {
            Some(lent) => Device::cpu_lending_threads(resolved.isa, resolved.threads, limit, &lent),
            None => Device::cpu(resolved.isa, resolved.threads, limit),
        });
    };
    let ordinal = ordinal.map_or_else(|| place(world), Ok)?;
    let cuda = Arc::new(Cuda::open(ordinal, resolved.threads)?.with_tf32(resolved.config.precision.tf32));
    if crate::shape::fp8(resolved).is_some() {
        multiplies_fp8(&cuda)?;
    }
    if let Some(prediction) = prediction {
        let (needed, (free, total)) = (prediction.memory.peak_total(), cuda.memory()?);
        if needed > free {
            let mib = |bytes: usize| bytes.div_ceil(1 << 20);
            return Err(does_not_fit(format!(
                "a step needs {} MiB of GPU memory, and {} of the {} MiB of {cuda:?} are free: free the GPU of other \
                 processes, take a smaller training.micro_batch_size or set activation_checkpointing.mode = \"full\"",
                mib(needed),
                mib(free),
                mib(total)
            )));
        }
    }
    choose_attention(&cuda, crate::shape::compute_dtype(resolved), resolved.config.compute.attention)?;
    Ok(Device::cuda(cuda, limit))
}

/// Chooses the instructions by which a GPU's attention multiplies.
///
/// # Errors
/// `wgmma` on a GPU that lacks it, or a trial of it that fails.
fn choose_attention(cuda: &Arc<Cuda>, dtype: DType, asked: AttentionKernels) -> Result<()> {
    let form = match asked {
        AttentionKernels::Auto => None,
        AttentionKernels::Mma => Some(AttentionForm::Warps),
        AttentionKernels::Wgmma => Some(AttentionForm::Warpgroups),
    };
    if form.is_some_and(|form| !cuda.has_attention(form)) {
        return Err(does_not_fit(format!(
            "compute.attention = \"{asked}\", which Hopper alone has (compute capability 9.0), and this is {cuda:?}: leave it at \"auto\""
        )));
    }
    cuda.choose_attention(dtype, form).map_err(|error| {
        does_not_fit(format!(
            "attention by wgmma was tried on a small problem and failed; compute.attention = \"mma\" does without it: {error}"
        ))
    })
}

/// The chosen instructions of a GPU's attention, in words.
pub fn attention(device: &Device) -> Option<String> {
    let choice = device.as_cuda()?.attention()?;
    Some(format!("attention on the GPU by {} ({})", choice.form.name(), choice.because))
}

/// The architecture of the GPUs that this was run on.
const TRIED: &str = "sm_90a";

/// The warning where a GPU is used as none ever was by those who wrote this: of another
/// architecture, or several at once.
pub fn untried(cuda: &Cuda, ranks: usize) -> Option<String> {
    let architecture = cuda.properties().architecture();
    if architecture != TRIED {
        return Some(format!(
            "{} ({architecture}) is untried: this was run on an H100 alone; `cargo xtask gpu` checks it, see docs/gpu.md",
            cuda.properties().name
        ));
    }
    (ranks > 1).then(|| "several GPUs are untried: this was run on one H100 alone, see docs/gpu.md".to_owned())
}

/// Checks that a GPU has 8-bit products.
///
/// # Errors
/// The GPU has none.
fn multiplies_fp8(cuda: &Cuda) -> Result<()> {
    let (needed, (major, minor)) = (Product::FP8_CAPABILITY, cuda.properties().capability);
    if (major, minor) >= needed {
        return Ok(());
    }
    Err(does_not_fit(format!(
        "precision.fp8 = \"hybrid\", and {cuda:?} has compute capability {major}.{minor}: products of eight bits begin with {}.{} (Ada, Hopper); set \
         precision.fp8 = \"off\"",
        needed.0, needed.1
    )))
}

/// A warning if the `ranks` ranks that are threads of this process together have more kernel
/// threads than there are cores.
pub fn crowding(resolved: &Resolved, ranks: usize) -> Option<String> {
    let (cores, threads) = (cores(), resolved.threads);
    let crowded = resolved.config.compute.device == DeviceKind::Cpu && ranks.saturating_mul(threads) > cores;
    crowded.then(|| {
        let of_ranks = if ranks > 1 { format!("{ranks} ranks with ") } else { String::new() };
        format!(
            "{of_ranks}compute.threads = {threads}, and this process may use {cores} of the machine's cores: threads will take turns"
        )
    })
}

/// The threads that ranks of this process lend each other while they wait. None unless each thread
/// has a core.
fn lent(resolved: &Resolved, world: &Communicator) -> Option<Arc<LentThreads>> {
    let lends = resolved.config.parallel.lend_threads && world.size() > 1 && world.size() * resolved.threads <= cores();
    lends.then(|| world.common()).flatten()
}

/// Cores that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

/// Checks that the state that `ranks` ranks offload to this host fits in its available memory.
///
/// # Errors
/// The excess, its purposes, and what to do.
pub fn check_host(prediction: &StepNeeds, ranks: usize) -> Result<()> {
    let each = prediction.host_memory.peak_total();
    match (each > 0).then(host::memory).flatten() {
        Some(memory) => fits_on_host(prediction, ranks, memory.available),
        // Nothing is offloaded. Or the available memory is unknown; then pinning too much fails
        // later.
        None => Ok(()),
    }
}

fn fits_on_host(prediction: &StepNeeds, ranks: usize, available: usize) -> Result<()> {
    let needed = ranks.max(1) * prediction.host_memory.peak_total();
    if needed <= available {
        return Ok(());
    }
    let share = if ranks > 1 { format!(" for each of {ranks} ranks on this host") } else { String::new() };
    Err(does_not_fit(format!(
        "what memory.offload puts on the host needs {}{share}, {} more than the {} that are available: offload less, or to \"disk\"; or shard it \
         over more hosts (docs/parallelism.md)",
        pinned(prediction),
        format_bytes((needed - available) as u64),
        format_bytes(available as u64),
    )))
}

/// The host memory that a rank's step needs, in words.
pub fn pinned(prediction: &StepNeeds) -> String {
    let purposes = Purpose::ALL.map(|purpose| (purpose, prediction.host_memory.peak(purpose)));
    let purposes = purposes.into_iter().filter(|(_, bytes)| *bytes > 0);
    let purposes: Vec<String> =
        purposes.map(|(purpose, bytes)| format!("{purpose} {}", format_bytes(bytes as u64))).collect();
    format!("{} of pinned memory ({})", format_bytes(prediction.host_memory.peak_total() as u64), purposes.join(", "))
}

/// The rank's index among the ranks on its host, which is the index of its GPU.
///
/// # Errors
/// Variables of a launcher that contradict each other.
pub fn place(world: Option<&Communicator>) -> Result<usize> {
    let Some(world) = world else { return Ok(0) };
    match Environment::detect()?.local_rank {
        Some(local) => Ok(local as usize),
        None => Ok(world.rank()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Inputs};
    use std::time::Duration;
    use trainyard_tensor::Cost;
    use trainyard_tensor::cuda::fake::{Fake, Options};

    #[test]
    fn gpus_that_were_never_tried_are_said() {
        let gpu = |capability| Cuda::new(Arc::new(Fake::new(Options { capability, ..Options::default() })), 1);
        assert_eq!(untried(&gpu((9, 0)), 1), None);
        assert!(untried(&gpu((8, 0)), 1).unwrap().contains("(sm_80) is untried"));
        assert!(untried(&gpu((9, 0)), 2).unwrap().starts_with("several GPUs are untried"));
    }

    #[test]
    fn a_gpu_without_products_of_eight_bits_is_said() {
        let gpu = |capability| Cuda::new(Arc::new(Fake::new(Options { capability, ..Options::default() })), 1);
        assert!([(8, 9), (9, 0), (10, 0)].into_iter().all(|capability| multiplies_fp8(&gpu(capability)).is_ok()));
        let error = multiplies_fp8(&gpu((8, 6))).unwrap_err().to_string();
        assert!(error.contains("capability 8.6: products of eight bits begin with 8.9"), "{error}");
    }

    #[test]
    fn attention_that_a_gpu_lacks_or_fails_at_is_said() {
        let gpu = |capability, failing| {
            Arc::new(Cuda::new(Arc::new(Fake::new(Options { capability, failing, ..Options::default() })), 1))
        };
        for (capability, asked, form) in [
            ((8, 0), AttentionKernels::Auto, AttentionForm::Warps),
            ((9, 0), AttentionKernels::Mma, AttentionForm::Warps),
            ((9, 0), AttentionKernels::Wgmma, AttentionForm::Warpgroups),
            ((9, 0), AttentionKernels::Auto, AttentionForm::Warpgroups),
        ] {
            let gpu = gpu(capability, None);
            choose_attention(&gpu, DType::BF16, asked).unwrap();
            assert_eq!(gpu.attention().unwrap().form, form, "{capability:?} {asked}");
        }
        let error = |gpu, asked| choose_attention(&gpu, DType::BF16, asked).unwrap_err().to_string();
        let lacks = error(gpu((8, 0), None), AttentionKernels::Wgmma);
        assert!(lacks.contains("compute.attention = \"wgmma\", which Hopper alone has"), "{lacks}");
        let fails = error(gpu((9, 0), Some("attention_warpgroup_64")), AttentionKernels::Auto);
        assert!(fails.contains("compute.attention = \"mma\" does without it"), "{fails}");
    }

    #[test]
    fn more_threads_than_cores_are_said() {
        let doubt = |threads: usize, ranks: usize| {
            let sets = ["model.preset=quickstart", "training.steps=1", &format!("compute.threads={threads}")];
            let sets = sets.map(String::from);
            let config = Config::parse("here".as_ref(), "", &sets).unwrap();
            let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
            crowding(&config.resolve(&inputs).unwrap(), ranks)
        };
        assert_eq!((doubt(cores(), 1), doubt(1, cores())), (None, None));
        let ranks = doubt(1, cores() + 1).unwrap();
        assert!(ranks.starts_with(&format!("{} ranks with compute.threads = 1, and", cores() + 1)), "{ranks}");
        let (more, said) = (cores() + 1, doubt(cores() + 1, 1).unwrap());
        assert!(said.starts_with(&format!("compute.threads = {more}, and this process may use {}", cores())), "{said}");
    }

    #[test]
    fn a_host_that_is_too_small_is_said_before_anything_is_pinned() {
        let host = Device::meta();
        let _state = host.zeros([3 << 20], DType::F32, Purpose::Optimizer).unwrap();
        let (memory, host_memory) = (Device::meta().pool().usage(), host.pool().usage());
        let prediction = StepNeeds {
            memory,
            host_memory,
            disk: 0,
            copy: 0,
            cost: Cost::default(),
            calls: Vec::new(),
            took: Duration::ZERO,
        };
        assert!(fits_on_host(&prediction, 2, 24 << 20).is_ok() && check_host(&prediction, 1).is_ok());
        let error = fits_on_host(&prediction, 2, 20 << 20).unwrap_err().to_string();
        for part in [
            "12.0 MiB of pinned",
            "each of 2 ranks",
            "4.0 MiB more than the 20.0 MiB",
            "(optimizer 12.0 MiB)",
            "\"disk\"",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let nothing = StepNeeds { host_memory: memory, ..prediction };
        assert!(check_host(&nothing, 1 << 30).is_ok());
    }
}
