//! The meaning of the profiler's categories and names.

use super::CallClass;
use crate::span::Kind;

/// The categories that are of use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Category {
    /// A kernel on a device.
    Kernel,
    /// A copy or fill on a device.
    DeviceCopy,
    /// A call of the device's runtime or driver.
    Call,
    /// An operator on the host.
    Operator,
    /// A region that a program names with `record_function`.
    Annotation,
    /// A frame of Python.
    PythonFrame,
    /// Anything else.
    Other,
}

impl Category {
    /// The category by its name, of any version and device.
    pub fn of(name: &str) -> Category {
        match name {
            "kernel" | "Kernel" | "mtia_ccp_events" => Category::Kernel,
            "gpu_memcpy" | "gpu_memset" | "Memcpy" | "Memset" => Category::DeviceCopy,
            "cpu_op" | "Operator" => Category::Operator,
            "user_annotation" => Category::Annotation,
            "python_function" => Category::PythonFrame,
            "Runtime" => Category::Call,
            _ if name.ends_with("_runtime") || name.ends_with("_driver") => Category::Call,
            _ => Category::Other,
        }
    }
}

/// Beginnings of kernels' names that move data between ranks: NCCL and RCCL, NVSHMEM, oneCCL, and
/// the custom all-reduces of serving and training libraries.
const COMMUNICATION_PREFIXES: [&str; 7] = ["nccl", "rccl", "msccl", "nvshmem", "oneccl", "ccl_", "deep_ep"];
const COMMUNICATION_PARTS: [&str; 6] = [
    "cross_device_reduce",
    "one_shot_all_reduce",
    "two_shot_all_reduce",
    "multimem_all_",
    "ncclDevKernel",
    "deep_ep::",
];

/// Kernels of ROCm that copy or fill memory.
const COPY_PREFIXES: [&str; 3] = ["__amd_rocclr_copy", "__amd_rocclr_fill", "dma"];

/// The kind of a kernel, by its name.
pub fn kernel_kind(name: &str) -> Kind {
    let plain = name.strip_prefix("void ").unwrap_or(name);
    if COMMUNICATION_PREFIXES.iter().any(|prefix| plain.starts_with(prefix))
        || COMMUNICATION_PARTS.iter().any(|part| plain.contains(part))
    {
        Kind::Communication
    } else if plain.starts_with("Memcpy")
        || plain.starts_with("Memset")
        || COPY_PREFIXES.iter().any(|prefix| plain.starts_with(prefix))
    {
        Kind::Copy
    } else {
        Kind::Compute
    }
}

/// Parts of the names that programs give to reading a batch. PyTorch itself writes
/// `enumerate(DataLoader)#...` and `enumerate(DataPipe)#...`.
const INPUT_PARTS: [&str; 6] = ["dataload", "data_load", "data load", "get_batch", "next_batch", "load_batch"];

fn contains_ignoring_case(text: &str, part: &str) -> bool {
    text.as_bytes().windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes()))
}

/// The kind of an operator or annotation of the host, by its name.
pub fn host_kind(name: &str) -> Kind {
    if name.starts_with("enumerate(Data") || INPUT_PARTS.iter().any(|part| contains_ignoring_case(name, part)) {
        Kind::Input
    } else if ["gloo:", "nccl:", "mpi:", "ucc:", "xccl:"].iter().any(|backend| name.starts_with(backend)) {
        Kind::Communication
    } else {
        Kind::Host
    }
}

/// The class of a call, by its name: `cudaLaunchKernel`, `hipMemcpyWithStream`, `cuGraphLaunch`.
pub fn call_class(name: &str) -> CallClass {
    if name.contains("GraphLaunch") {
        CallClass::GraphLaunch
    } else if name.contains("Synchronize") {
        CallClass::Synchronise
    } else if name.contains("Launch") {
        CallClass::Launch
    } else if name.contains("Memcpy") || name.contains("Memset") {
        CallClass::Copy
    } else {
        CallClass::Other
    }
}

/// Characters that a short name has at most.
const SHORT_NAME_CHARS: usize = 72;

/// A C++ name without return type, template arguments and parameters: what fits into a table.
pub fn short_name(name: &str) -> String {
    let short = plain_name(name);
    match short.char_indices().nth(SHORT_NAME_CHARS) {
        Some((end, _)) => format!("{}...", &short[..end]),
        None => short,
    }
}

fn plain_name(name: &str) -> String {
    if name.starts_with("Memcpy") || name.starts_with("Memset") {
        return name.to_owned();
    }
    let spelt = name.replace("(anonymous namespace)::", "");
    let spelt = spelt.strip_prefix("void ").unwrap_or(&spelt);
    let end = spelt.find(['<', '(']).unwrap_or(spelt.len());
    let plain = spelt[..end].trim();
    // What a generic kernel computes stands in its template arguments.
    let functor = spelt
        .split(['<', '(', ',', '>', '{', ' '])
        .filter(|part| part.contains("Functor") || part.contains("_kernel_cuda") || part.contains("_kernel_impl"))
        .map(|part| part.rsplit("::").next().unwrap_or(part))
        .find(|part| !plain.ends_with(part));
    match functor {
        _ if plain.is_empty() => name.to_owned(),
        Some(functor) => format!("{plain}<{functor}>"),
        None => plain.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_apart_by_name() {
        for (name, kind) in [
            ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Kind::Communication),
            ("ncclDevKernel_Generic(ncclDevComm*, ...)", Kind::Communication),
            ("void vllm::cross_device_reduce_1stage<float, 2>(...)", Kind::Communication),
            ("Memcpy HtoD (Pageable -> Device)", Kind::Copy),
            ("__amd_rocclr_copyBuffer", Kind::Copy),
            ("void at::native::reduce_kernel<512, 1>(...)", Kind::Compute),
            ("Cijk_Ailk_Bljk_SB_MT128x64", Kind::Compute),
        ] {
            assert_eq!(kernel_kind(name), kind, "{name}");
        }
    }

    #[test]
    fn categories_of_all_versions_and_devices() {
        for (name, category) in [
            ("Operator", Category::Operator),
            ("cuda_driver", Category::Call),
            ("xpu_runtime", Category::Call),
            ("Runtime", Category::Call),
            ("gpu_user_annotation", Category::Other),
            ("gpu_memset", Category::DeviceCopy),
        ] {
            assert_eq!(Category::of(name), category, "{name}");
        }
        assert_eq!(call_class("hipExtModuleLaunchKernel"), CallClass::Launch);
        assert_eq!(call_class("cudaGraphLaunch"), CallClass::GraphLaunch);
        assert_eq!(call_class("hipDeviceSynchronize"), CallClass::Synchronise);
    }

    #[test]
    fn names_fit_into_a_table() {
        let long = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, \
                    at::detail::Array<char*, 1> >(int, at::native::FillFunctor<float>, at::detail::Array<char*, 1>)";
        assert_eq!(short_name(long), "at::native::vectorized_elementwise_kernel<FillFunctor>");
        assert_eq!(short_name("Memset (Device)"), "Memset (Device)");
        assert_eq!(short_name("(odd)"), "(odd)");
        assert_eq!(short_name("Cijk_MT64"), "Cijk_MT64");
    }
}
