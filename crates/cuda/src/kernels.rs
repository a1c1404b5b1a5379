//! The table of kernels: name, source, parameters, and the size of a launch.
//!
//! A module is one source file compiled for one float dtype, `T` in the signatures below.
//! [`File::source`] gives the whole text, both for NVRTC and for the host's compiler. A kernel
//! without `T` is the same in every module of its file. Names carry no dtype.
//!
//! Pointers are to dense row-major arrays of the shapes given with each kernel; `[x]?` may be null.
//! Pointers to `T` that are read or written in runs of 16 bytes need not be aligned to 16: kernels
//! check, and take a slower path if they are not (tensor cores require alignment, see
//! [`attention`]). Reductions have a fixed order that depends on shapes alone: nothing here adds
//! floats atomically. Kernels that use indices only make sure to stay inside the memory;
//! `check_indices` finds the first wrong one.

mod launch;
mod list;

pub use launch::{Launch, Rule, row_blocks};
pub use list::*;

/// The float type that a module is compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Float {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of a binary32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
}

impl Float {
    /// All of them.
    pub const ALL: [Float; 3] = [Float::F32, Float::Bf16, Float::F16];

    /// `f32`, `bf16`, `f16`.
    pub const fn name(self) -> &'static str {
        match self {
            Float::F32 => "f32",
            Float::Bf16 => "bf16",
            Float::F16 => "f16",
        }
    }

    /// Bytes of one number.
    pub const fn size(self) -> usize {
        if matches!(self, Float::F32) { 4 } else { 2 }
    }

    const fn define(self) -> &'static str {
        match self {
            Float::F32 => "#define TRAINYARD_F32 1\n",
            Float::Bf16 => "#define TRAINYARD_BF16 1\n",
            Float::F16 => "#define TRAINYARD_F16 1\n",
        }
    }
}

/// A source file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum File {
    /// Attention by multiply-adds: every dtype and head size.
    Attention,
    /// Attention by tensor cores: bf16 and f16 only.
    AttentionMma,
    /// Attention by the tensor cores of Hopper: bf16 and f16 only.
    AttentionWarpgroup,
    /// Norms.
    Norm,
    /// Element-wise functions of transformers: activations, casts, sums, dropout, rotary positions.
    Pointwise,
    /// Sums over columns and whole buffers, and what works on rows.
    Reduce,
    /// Operands of eight bits.
    Fp8,
    /// Cross-entropy over logits.
    Loss,
    /// Embeddings and everything that reads or adds by indices.
    Index,
    /// Optimizer steps.
    Optim,
    /// The plain elementwise operations with their derivatives, masks, strided copies.
    Plain,
    /// Mixtures of experts: routes, rows on their way, products of ragged groups.
    Experts,
}

impl File {
    /// All of them.
    pub const ALL: [File; 12] = [
        File::Attention,
        File::AttentionMma,
        File::AttentionWarpgroup,
        File::Norm,
        File::Pointwise,
        File::Reduce,
        File::Fp8,
        File::Loss,
        File::Index,
        File::Optim,
        File::Plain,
        File::Experts,
    ];

    /// The file's name in `kernels/`.
    pub const fn name(self) -> &'static str {
        match self {
            File::Attention => "attention.cu",
            File::AttentionMma => "attention_mma.cu",
            File::AttentionWarpgroup => "attention_warpgroup.cu",
            File::Norm => "norm.cu",
            File::Pointwise => "pointwise.cu",
            File::Reduce => "reduce.cu",
            File::Fp8 => "fp8.cu",
            File::Loss => "loss.cu",
            File::Index => "index.cu",
            File::Optim => "optim.cu",
            File::Plain => "plain.cu",
            File::Experts => "experts.cu",
        }
    }

    /// True if the file can be compiled for `float`.
    pub const fn supports(self, float: Float) -> bool {
        !matches!((self, float), (File::AttentionMma | File::AttentionWarpgroup, Float::F32))
    }

    /// True if the file can be compiled for an architecture, e.g. `sm_90a`.
    pub fn runs_on(self, architecture: &str) -> bool {
        self != File::AttentionWarpgroup || architecture == "sm_90a"
    }

    const fn text(self) -> &'static str {
        match self {
            File::Attention => include_str!("../kernels/attention.cu"),
            File::AttentionMma => include_str!("../kernels/attention_mma.cu"),
            File::AttentionWarpgroup => include_str!("../kernels/attention_warpgroup.cu"),
            File::Norm => include_str!("../kernels/norm.cu"),
            File::Pointwise => include_str!("../kernels/pointwise.cu"),
            File::Reduce => include_str!("../kernels/reduce.cu"),
            File::Fp8 => include_str!("../kernels/fp8.cu"),
            File::Loss => include_str!("../kernels/loss.cu"),
            File::Index => include_str!("../kernels/index.cu"),
            File::Optim => include_str!("../kernels/optim.cu"),
            File::Plain => include_str!("../kernels/plain.cu"),
            File::Experts => include_str!("../kernels/experts.cu"),
        }
    }

    /// The text of the module for `float`, complete: no header is included.
    pub fn source(self, float: Float) -> String {
        let mut text = String::from(float.define());
        let shared =
            [("common.cuh", COMMON), ("curves.cuh", CURVES), ("mask.cuh", MASK), ("tensor_cores.cuh", TENSOR_CORES)];
        let own: &[(&str, &str)] = match self {
            File::AttentionMma => &[("attention_tiles.cuh", ATTENTION_TILES)],
            File::AttentionWarpgroup => &[("attention_tiles.cuh", ATTENTION_TILES), ("warpgroup.cuh", WARPGROUP)],
            _ => &[],
        };
        for (name, part) in shared.into_iter().chain(own.iter().copied()).chain([(self.name(), self.text())]) {
            text.push_str(&format!("#line 1 \"{name}\"\n{part}\n"));
        }
        text
    }

    /// The kernels in it.
    pub fn kernels(self) -> impl Iterator<Item = &'static Kernel> {
        ALL.iter().copied().filter(move |kernel| kernel.file == self)
    }
}

const COMMON: &str = include_str!("../kernels/common.cuh");
const CURVES: &str = include_str!("../kernels/curves.cuh");
const MASK: &str = include_str!("../kernels/mask.cuh");
const TENSOR_CORES: &str = include_str!("../kernels/tensor_cores.cuh");
const ATTENTION_TILES: &str = include_str!("../kernels/attention_tiles.cuh");
const WARPGROUP: &str = include_str!("../kernels/warpgroup.cuh");

/// One entry point.
#[derive(Debug)]
pub struct Kernel {
    /// Its name in the module, `extern "C"`.
    pub name: &'static str,
    /// Where it stands.
    pub file: File,
    /// The size of a launch.
    pub rule: Rule,
    /// Its parameters, as they stand in the source.
    pub signature: &'static str,
}

/// The kind of a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parameter {
    /// A device address; `element` as in the source (`T`, `float`, `int`, `unsigned`,
    /// `unsigned char`, `double`), `written` unless const.
    Pointer {
        /// The type pointed to.
        element: &'static str,
        /// True if the kernel writes there.
        written: bool,
    },
    /// `int`
    I32,
    /// `unsigned`
    U32,
    /// `long long`
    I64,
    /// `unsigned long long`
    U64,
    /// `float`
    F32,
    /// [`Axes`], by value.
    Axes,
}

/// An argument of a launch. The axes are large beside the others and rare; launches make a few of
/// these on the stack.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Argument {
    /// A device address, or 0 for null.
    Pointer(u64),
    /// `int`
    I32(i32),
    /// `unsigned`
    U32(u32),
    /// `long long`
    I64(i64),
    /// `unsigned long long`
    U64(u64),
    /// `float`
    F32(f32),
    /// The walk of a strided copy.
    Axes(Axes),
}

impl Argument {
    /// Where the value lies, as `cuLaunchKernel` wants it.
    pub fn address(&self) -> *const std::ffi::c_void {
        match self {
            Argument::Pointer(x) | Argument::U64(x) => (&raw const *x).cast(),
            Argument::I32(x) => (&raw const *x).cast(),
            Argument::U32(x) => (&raw const *x).cast(),
            Argument::I64(x) => (&raw const *x).cast(),
            Argument::F32(x) => (&raw const *x).cast(),
            Argument::Axes(x) => (&raw const *x).cast(),
        }
    }

    fn fits(&self, parameter: &Parameter) -> bool {
        matches!(
            (self, parameter),
            (Argument::Pointer(_), Parameter::Pointer { .. })
                | (Argument::I32(_), Parameter::I32)
                | (Argument::U32(_), Parameter::U32)
                | (Argument::I64(_), Parameter::I64)
                | (Argument::U64(_), Parameter::U64)
                | (Argument::F32(_), Parameter::F32)
                | (Argument::Axes(_), Parameter::Axes)
        )
    }
}

/// Axes that a walk may have: two for each dimension of a tensor.
pub const AXES_MAX: usize = 12;

/// A walk over two strided layouts, outermost axis first; laid out as the `Axes` of the sources.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Axes {
    /// Number of axes.
    pub count: i64,
    /// Positions of each.
    pub len: [i64; AXES_MAX],
    /// Elements from one position to the next in the source; 0 repeats.
    pub source: [i64; AXES_MAX],
    /// The same in the target.
    pub target: [i64; AXES_MAX],
}

impl Kernel {
    /// The parameters with their names, in order.
    pub fn parameters(&self) -> Vec<(&'static str, Parameter)> {
        self.signature.split(',').map(|parameter| parse(parameter.trim())).collect()
    }

    /// Checks the arguments; the error names the fault.
    pub fn check(&self, arguments: &[Argument]) -> Result<(), String> {
        let parameters = self.parameters();
        if parameters.len() != arguments.len() {
            return Err(format!("{}: {} arguments for ({})", self.name, arguments.len(), self.signature));
        }
        match parameters.iter().zip(arguments).find(|((_, parameter), argument)| !argument.fits(parameter)) {
            None => Ok(()),
            Some(((name, parameter), argument)) => {
                Err(format!("{}: `{name}` is {parameter:?}, not {argument:?}", self.name))
            }
        }
    }
}

/// `const T* x` and the like; the table is tested against the sources, so that anything else is a
/// mistake here.
fn parse(parameter: &'static str) -> (&'static str, Parameter) {
    let (kind, name) = parameter.rsplit_once(' ').unwrap_or((parameter, ""));
    let kind = match kind {
        "int" => Parameter::I32,
        "unsigned" => Parameter::U32,
        "long long" => Parameter::I64,
        "unsigned long long" => Parameter::U64,
        "float" => Parameter::F32,
        "Axes" => Parameter::Axes,
        pointer => {
            let element = pointer.strip_suffix('*').unwrap_or(pointer);
            match element.strip_prefix("const ") {
                Some(element) => Parameter::Pointer { element, written: false },
                None => Parameter::Pointer { element, written: true },
            }
        }
    };
    (name, kind)
}

/// The kernels of one attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionKernels {
    /// `attention` or one of its forms on tensor cores.
    pub forward: &'static Kernel,
    /// The gradient of the queries.
    pub backward_queries: &'static Kernel,
    /// The gradients of keys and values.
    pub backward_keys: &'static Kernel,
}

/// The kernels of attention with numbers by distance added to scores.
#[derive(Clone, Copy, Debug)]
pub struct BiasedAttentionKernels {
    /// Attention itself.
    pub attention: AttentionKernels,
    /// The sums of which the gradient of the numbers is made, and the tiles that it walks.
    pub gradient: (&'static Kernel, BiasTile),
}

/// Tiles of queries and keys whose diagonals the gradient of numbers by distance is summed over; as
/// `Shifts` in `mask.cuh`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BiasTile {
    /// Queries of a tile.
    pub rows: usize,
    /// Keys of a tile.
    pub columns: usize,
}

impl BiasTile {
    /// By multiply-adds.
    pub const SMALL: BiasTile = BiasTile { rows: 16, columns: 32 };
    /// On tensor cores.
    pub const LARGE: BiasTile = BiasTile { rows: 128, columns: 64 };

    /// Parts into which `queries` queries are cut, so that more blocks share the work.
    pub const fn parts(queries: usize) -> usize {
        queries.div_ceil(4096)
    }

    /// Places of tiles along distances of less than `reach`.
    pub const fn shifts(self, reach: usize) -> usize {
        (reach + self.rows - 2) / self.columns + (reach + self.columns - 2) / self.columns + 1
    }

    /// Numbers of `partials`.
    pub const fn partials(self, heads: usize, queries: usize, reach: usize) -> usize {
        heads * BiasTile::parts(queries) * self.shifts(reach) * (self.rows + self.columns - 1)
    }
}

/// The largest head that any attention kernel takes.
pub const HEAD_DIM_MAX: usize = 256;

/// By which instructions attention multiplies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum AttentionForm {
    /// Multiply-adds: every dtype, alignment and head.
    MultiplyAdds,
    /// Products of a warp on tensor cores (`mma.sync`).
    Warps,
    /// Products of a warpgroup out of shared memory (`wgmma`), which Hopper alone has.
    Warpgroups,
}

impl AttentionForm {
    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            AttentionForm::MultiplyAdds => "multiply-adds",
            AttentionForm::Warps => "mma.sync",
            AttentionForm::Warpgroups => "wgmma",
        }
    }

    /// True if it takes heads of `head_dim` columns. Tensor cores take bf16 and f16, heads of up to
    /// 128 columns that are a multiple of 8, tensors that start at multiples of 16 bytes
    /// (`aligned`), and positive scales, because they look for the largest score before it is
    /// scaled. Multiply-adds take heads of up to [`HEAD_DIM_MAX`] columns.
    pub const fn takes(self, float: Float, head_dim: usize, scale: f32, aligned: bool) -> bool {
        match self {
            AttentionForm::MultiplyAdds => head_dim >= 1 && head_dim <= HEAD_DIM_MAX,
            AttentionForm::Warps | AttentionForm::Warpgroups => {
                !matches!(float, Float::F32)
                    && aligned
                    && scale > 0.0
                    && head_dim >= 8
                    && head_dim <= 128
                    && head_dim.is_multiple_of(8)
            }
        }
    }

    /// Its kernels for heads of `head_dim` columns, which it takes.
    pub const fn kernels(self, head_dim: usize) -> AttentionKernels {
        match (self, head_dim <= 64) {
            (AttentionForm::MultiplyAdds, _) => AttentionKernels {
                forward: &ATTENTION,
                backward_queries: &ATTENTION_BACKWARD_QUERIES,
                backward_keys: &ATTENTION_BACKWARD_KEYS,
            },
            (AttentionForm::Warps, true) => AttentionKernels {
                forward: &ATTENTION_MMA_64,
                backward_queries: &ATTENTION_BACKWARD_QUERIES_MMA_64,
                backward_keys: &ATTENTION_BACKWARD_KEYS_MMA_64,
            },
            (AttentionForm::Warps, false) => AttentionKernels {
                forward: &ATTENTION_MMA_128,
                backward_queries: &ATTENTION_BACKWARD_QUERIES_MMA_128,
                backward_keys: &ATTENTION_BACKWARD_KEYS_MMA_128,
            },
            (AttentionForm::Warpgroups, true) => AttentionKernels {
                forward: &ATTENTION_WARPGROUP_64,
                backward_queries: &ATTENTION_BACKWARD_QUERIES_WARPGROUP_64,
                backward_keys: &ATTENTION_BACKWARD_KEYS_WARPGROUP_64,
            },
            (AttentionForm::Warpgroups, false) => AttentionKernels {
                forward: &ATTENTION_WARPGROUP_128,
                backward_queries: &ATTENTION_BACKWARD_QUERIES_WARPGROUP_128,
                backward_keys: &ATTENTION_BACKWARD_KEYS_WARPGROUP_128,
            },
        }
    }

    /// The same with numbers by distance. Warpgroups have none, and take those of warps.
    pub const fn biased_kernels(self, head_dim: usize) -> BiasedAttentionKernels {
        match (self, head_dim <= 64) {
            (AttentionForm::MultiplyAdds, _) => BiasedAttentionKernels {
                attention: AttentionKernels {
                    forward: &ATTENTION_BIASED,
                    backward_queries: &ATTENTION_BIASED_BACKWARD_QUERIES,
                    backward_keys: &ATTENTION_BIASED_BACKWARD_KEYS,
                },
                gradient: (&ATTENTION_BIAS_GRADIENT, BiasTile::SMALL),
            },
            (AttentionForm::Warps | AttentionForm::Warpgroups, true) => BiasedAttentionKernels {
                attention: AttentionKernels {
                    forward: &ATTENTION_BIASED_MMA_64,
                    backward_queries: &ATTENTION_BIASED_BACKWARD_QUERIES_MMA_64,
                    backward_keys: &ATTENTION_BIASED_BACKWARD_KEYS_MMA_64,
                },
                gradient: (&ATTENTION_BIAS_GRADIENT_MMA_64, BiasTile::LARGE),
            },
            (AttentionForm::Warps | AttentionForm::Warpgroups, false) => BiasedAttentionKernels {
                attention: AttentionKernels {
                    forward: &ATTENTION_BIASED_MMA_128,
                    backward_queries: &ATTENTION_BIASED_BACKWARD_QUERIES_MMA_128,
                    backward_keys: &ATTENTION_BIASED_BACKWARD_KEYS_MMA_128,
                },
                gradient: (&ATTENTION_BIAS_GRADIENT_MMA_128, BiasTile::LARGE),
            },
        }
    }
}
