//! From tensors to the arguments of kernels.

use super::{Cuda, float, lock};
use crate::error::Result;
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::CudaError;
use trainyard_cuda::driver::{Call, Function, Region};
use trainyard_cuda::kernels::{Argument, Axes, Kernel, Parameter};

/// The kernels of one source, loaded for one float type.
pub(super) struct Module {
    /// By name, with what they take.
    kernels: Vec<(&'static str, Function, Vec<Parameter>)>,
}

/// An argument of a kernel, before its parameter decides the type.
#[derive(Clone, Copy)]
pub(super) enum Arg<'a> {
    Tensor(&'a Tensor),
    /// Bytes from an offset on.
    Part(&'a Tensor, usize, usize),
    Null,
    Size(usize),
    Int(i32),
    Unsigned(u32),
    Long(u64),
    Float(f32),
    Axes(&'a Axes),
}

macro_rules! from {
    ($($variant:ident $type:ty),*) => { $(
        impl<'a> From<$type> for Arg<'a> {
            fn from(x: $type) -> Arg<'a> {
                Arg::$variant(x)
            }
        }
    )* };
}
from!(Tensor &'a Tensor, Size usize, Int i32, Unsigned u32, Long u64, Float f32, Axes &'a Axes);

impl<'a> From<&'a mut Tensor> for Arg<'a> {
    fn from(x: &'a mut Tensor) -> Arg<'a> {
        Arg::Tensor(x)
    }
}

impl<'a> From<Option<&'a Tensor>> for Arg<'a> {
    fn from(x: Option<&'a Tensor>) -> Arg<'a> {
        x.map_or(Arg::Null, Arg::Tensor)
    }
}

/// A list of [`Arg`]s.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::cuda::launch::Arg::from($arg)),*] };
}
pub(super) use args;

impl Cuda {
    /// Puts a kernel on this thread's stream, in the module for `dtype`; nothing when a size is 0.
    /// `sizes` are those of the kernel's rule.
    pub(super) fn launch(
        self: &Arc<Cuda>,
        kernel: &'static Kernel,
        dtype: DType,
        sizes: [usize; 3],
        args: &[Arg<'_>],
    ) -> Result<()> {
        let Some(launch) = kernel.rule.launch(sizes) else { return Ok(()) };
        let module = self.module(kernel, dtype)?;
        let found = module.kernels.iter().find(|(name, ..)| *name == kernel.name);
        let (_, function, parameters) = found.expect("a module has the kernels of its file");
        assert_eq!(args.len(), parameters.len(), "arguments of {} ({})", kernel.name, kernel.signature);
        let mut regions = Vec::with_capacity(args.len());
        let mut arguments = Vec::with_capacity(args.len());
        for (arg, parameter) in args.iter().zip(parameters) {
            arguments.push(argument(kernel, arg, parameter, &mut regions)?);
        }
        let call = Call { function: *function, name: kernel.name, launch, arguments: &arguments, regions: &regions };
        // SAFETY: the arguments have the types of the table's parameters, which are those of the
        // source (a test of `trainyard-cuda` holds them together); operations give tensors of the
        // sizes that stand there, and the regions are theirs.
        Ok(unsafe { self.driver.launch(self.stream()?, &call) }?)
    }

    fn module(&self, kernel: &'static Kernel, dtype: DType) -> Result<Arc<Module>> {
        let key = (kernel.file, float(kernel.name, dtype)?);
        let mut modules = lock(&self.modules);
        if let Some(module) = modules.get(&key) {
            return Ok(Arc::clone(module));
        }
        let functions = self.driver.load(key.0, key.1)?;
        let kinds = |kernel: &Kernel| kernel.parameters().into_iter().map(|(_, kind)| kind).collect();
        let kernels = key.0.kernels().zip(functions).map(|(kernel, f)| (kernel.name, f, kinds(kernel))).collect();
        Ok(Arc::clone(modules.entry(key).or_insert(Arc::new(Module { kernels }))))
    }
}

fn argument(
    kernel: &'static Kernel,
    arg: &Arg<'_>,
    parameter: &Parameter,
    regions: &mut Vec<Region>,
) -> Result<Argument, CudaError> {
    let size = |size: usize| {
        let what = || CudaError::Launch { kernel: kernel.name.to_owned(), what: format!("{size} is no int") };
        i32::try_from(size).map_err(|_| what())
    };
    let mut pointer = |region: Region| {
        regions.push(region);
        Argument::Pointer(region.address)
    };
    Ok(match (*arg, *parameter) {
        (Arg::Tensor(tensor), Parameter::Pointer { written, .. }) => pointer(tensor.region(written)),
        (Arg::Part(tensor, offset, bytes), Parameter::Pointer { written, .. }) => {
            pointer(super::part(tensor.region(written), offset, bytes))
        }
        (Arg::Null, Parameter::Pointer { .. }) => Argument::Pointer(0),
        (Arg::Size(x), Parameter::I32) => Argument::I32(size(x)?),
        (Arg::Size(x), Parameter::I64) => Argument::I64(x as i64),
        (Arg::Int(x), Parameter::I32) => Argument::I32(x),
        (Arg::Unsigned(x), Parameter::U32) => Argument::U32(x),
        (Arg::Long(x), Parameter::U64) => Argument::U64(x),
        (Arg::Float(x), Parameter::F32) => Argument::F32(x),
        (Arg::Axes(x), Parameter::Axes) => Argument::Axes(*x),
        (_, parameter) => panic!("{} takes {parameter:?} ({})", kernel.name, kernel.signature),
    })
}
