//! Products by cuBLASLt.
//!
//! The library's matrices are column-major, so it gets a row-major product as that of the
//! transposes: `dᵀ = bᵀ aᵀ`. A bias [n] then runs along the columns of its result, as its epilogues
//! require.

use super::algorithms::{self, Algorithm};
use super::library::Loaded;
use crate::cache::Cache;
use crate::driver::{Activation, Driver, Operands, Precision, Product, Region, Stream};
use crate::error::{CudaError, Result};
use crate::find::{CUBLASLT, Places};
use crate::fp8::Fp8;
use crate::kernels::Float;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use trainyard_base::lock;

type Status = c_int;
type Handle = *mut c_void;
type Set = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status;
type Destroy = unsafe extern "C" fn(Handle) -> Status;

// Of cublasLt.h and library_types.h.
const COMPUTE_F32: c_int = 68;
const COMPUTE_F32_FAST_TF32: c_int = 77;
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const DESC_AUX_POINTER: c_int = 11;
const DESC_AUX_LD: c_int = 12;
const DESC_A_SCALE_POINTER: c_int = 17;
const DESC_B_SCALE_POINTER: c_int = 18;
const LAYOUT_BATCH_COUNT: c_int = 5;
const LAYOUT_BATCH_STRIDE: c_int = 6;
const PREFERENCE_WORKSPACE: c_int = 1;
/// The allowed ways, beside none, of summing parts of a product: those in f32. By default the
/// library also sums parts that are rounded to the result's dtype.
const PREFERENCE_REDUCTION: c_int = 3;
const REDUCTION_IN_F32: u32 = 2;
/// Of A, B, C and D.
const PREFERENCE_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
const OP_TRANSPOSE: c_int = 1;
const EPILOGUE_DEFAULT: u32 = 1;
const EPILOGUE_RELU: u32 = 2;
const EPILOGUE_BIAS: u32 = 4;
const EPILOGUE_GELU: u32 = 32;
const EPILOGUE_AUX: u32 = 128;

/// Algorithms that the library proposes and that are measured.
const PROPOSALS: usize = 8;
/// Runs of each, of which the fastest counts; the first is not measured.
const RUNS: usize = 4;

#[repr(C)]
#[derive(Clone, Copy)]
struct Proposal {
    algorithm: Algorithm,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

struct Functions {
    create_desc: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status,
    set_desc: Set,
    create_layout: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status,
    set_layout: Set,
    create_preference: unsafe extern "C" fn(*mut Handle) -> Status,
    set_preference: Set,
    destroy_preference: Destroy,
    heuristic: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Proposal,
        *mut c_int,
    ) -> Status,
    matmul: unsafe extern "C" fn(
        Handle,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *const c_void,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *mut c_void,
        Handle,
        *const Algorithm,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> Status,
}

/// The library with what was prepared for each form.
pub struct Lt {
    functions: Functions,
    handle: Handle,
    version: usize,
    device: String,
    cache: Cache,
    plans: Mutex<BTreeMap<Product, Plan>>,
    /// Keeps the functions where they are.
    _library: Loaded,
}

/// Descriptors of one form, for the life of the process, and its algorithm.
struct Plan {
    desc: Handle,
    a: Handle,
    b: Handle,
    d: Handle,
    algorithm: Option<Algorithm>,
}

fn called(call: &'static str, status: Status) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    let code = match status {
        1 => "CUBLAS_STATUS_NOT_INITIALIZED".to_owned(),
        3 => "CUBLAS_STATUS_ALLOC_FAILED".to_owned(),
        7 => "CUBLAS_STATUS_INVALID_VALUE".to_owned(),
        8 => "CUBLAS_STATUS_ARCH_MISMATCH".to_owned(),
        13 => "CUBLAS_STATUS_EXECUTION_FAILED".to_owned(),
        14 => "CUBLAS_STATUS_INTERNAL_ERROR".to_owned(),
        15 => "CUBLAS_STATUS_NOT_SUPPORTED".to_owned(),
        other => format!("status {other}"),
    };
    Err(CudaError::Call { call, code, hint: "" })
}

fn data_type(float: Float) -> c_int {
    match float {
        Float::F32 => 0,
        Float::F16 => 2,
        Float::Bf16 => 14,
    }
}

fn data_type_of_eight(format: Fp8) -> c_int {
    match format {
        Fp8::E4M3 => 28,
        Fp8::E5M2 => 29,
    }
}

/// The library's epilogue for a product of this form.
fn epilogue(form: &Product) -> u32 {
    let activation = match form.activation {
        Activation::None => 0,
        Activation::Relu => EPILOGUE_RELU,
        Activation::Gelu => EPILOGUE_GELU,
    };
    let aux = if form.keeps_argument { EPILOGUE_AUX } else { 0 };
    match (if form.bias { EPILOGUE_BIAS } else { 0 }) | activation | aux {
        0 => EPILOGUE_DEFAULT,
        other => other,
    }
}

/// From the library's number: 10000 major + 100 minor + patch.
fn version(number: usize) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

impl Lt {
    /// `12.8.5`
    pub fn version(&self) -> String {
        version(self.version)
    }

    /// Finds and loads it, in the context of this thread.
    pub fn open(places: &Places, driver: u32, device: String, cache: Cache) -> Result<Lt> {
        let library = Loaded::open(&CUBLASLT, places, driver)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the types are those of cublasLt.h, the same from CUDA 12 to 13.
        let (functions, number) = unsafe {
            let create: unsafe extern "C" fn(*mut Handle) -> Status = library.function("cublasLtCreate")?;
            called("cublasLtCreate", create(&mut handle))?;
            let version: unsafe extern "C" fn() -> usize = library.function("cublasLtGetVersion")?;
            let functions = Functions {
                create_desc: library.function("cublasLtMatmulDescCreate")?,
                set_desc: library.function("cublasLtMatmulDescSetAttribute")?,
                create_layout: library.function("cublasLtMatrixLayoutCreate")?,
                set_layout: library.function("cublasLtMatrixLayoutSetAttribute")?,
                create_preference: library.function("cublasLtMatmulPreferenceCreate")?,
                set_preference: library.function("cublasLtMatmulPreferenceSetAttribute")?,
                destroy_preference: library.function("cublasLtMatmulPreferenceDestroy")?,
                heuristic: library.function("cublasLtMatmulAlgoGetHeuristic")?,
                matmul: library.function("cublasLtMatmul")?,
            };
            (functions, version())
        };
        Ok(Lt { functions, handle, version: number, device, cache, plans: Mutex::default(), _library: library })
    }

    /// Puts a product on a stream. The first of a form measures algorithms, for which the host
    /// waits.
    ///
    /// # Safety
    /// As [`Driver::product`], in the context of this thread.
    pub unsafe fn product(
        &self,
        driver: &dyn Driver,
        stream: Stream,
        form: &Product,
        operands: &Operands,
    ) -> Result<()> {
        let mut plans = lock(&self.plans);
        if !plans.contains_key(form) {
            plans.insert(*form, self.plan(form)?);
        }
        let plan = plans.get_mut(form).expect("just made");
        self.point(plan, form, operands)?;
        if plan.algorithm.is_none() {
            plan.algorithm = algorithms::known(&self.cache, form, &self.device, self.version);
        }
        if let Some(algorithm) = plan.algorithm {
            // SAFETY: the caller's promise.
            let done = unsafe { self.matmul(plan, form, operands, &algorithm, stream) };
            if done.is_ok() {
                return done;
            }
        }
        if super::graph::is_capturing(stream)? {
            // Measuring would wait for the stream, which a capture forbids.
            let what = "its algorithm is not chosen yet, and cannot be while a step is captured".to_owned();
            return Err(CudaError::Product { product: format!("{form:?}"), what });
        }
        let algorithm = self.search(driver, stream, form, plan, operands)?;
        plan.algorithm = Some(algorithm);
        algorithms::keep(&self.cache, form, &self.device, self.version, &algorithm);
        // SAFETY: as above.
        unsafe { self.matmul(plan, form, operands, &algorithm, stream) }
    }

    fn plan(&self, form: &Product) -> Result<Plan> {
        let Product { m, n, k, .. } = *form;
        let compute = match (form.operands, form.precision) {
            (Float::F32, Precision::Tf32) => COMPUTE_F32_FAST_TF32,
            _ => COMPUTE_F32,
        };
        let mut desc = std::ptr::null_mut();
        // SAFETY: writes a handle.
        called("cublasLtMatmulDescCreate", unsafe {
            (self.functions.create_desc)(&mut desc, compute, data_type(Float::F32))
        })?;
        let transpose = |attribute, yes: bool| match yes {
            true => self.set(self.functions.set_desc, desc, attribute, &OP_TRANSPOSE),
            false => Ok(()),
        };
        transpose(DESC_TRANSA, form.b_transposed)?;
        transpose(DESC_TRANSB, form.a_transposed)?;
        self.set(self.functions.set_desc, desc, DESC_EPILOGUE, &epilogue(form))?;
        if form.keeps_argument {
            self.set(self.functions.set_desc, desc, DESC_AUX_LD, &(n as i64))?;
        }
        let layout = |data_type, rows, columns| self.layout(data_type, rows, columns, form.batch);
        let [of_a, of_b] = match form.fp8 {
            None => [data_type(form.operands); 2],
            Some(formats) => formats.map(data_type_of_eight),
        };
        let b = if form.b_transposed { layout(of_b, k, n) } else { layout(of_b, n, k) }?;
        let a = if form.a_transposed { layout(of_a, m, k) } else { layout(of_a, k, m) }?;
        Ok(Plan { desc, a, b, d: layout(data_type(form.result), n, m)?, algorithm: None })
    }

    /// A dense matrix, its columns one after the other.
    fn layout(&self, data_type: c_int, rows: usize, columns: usize, batch: usize) -> Result<Handle> {
        let mut layout = std::ptr::null_mut();
        let (height, width) = (rows as u64, columns as u64);
        // SAFETY: writes a handle.
        called("cublasLtMatrixLayoutCreate", unsafe {
            (self.functions.create_layout)(&mut layout, data_type, height, width, rows as i64)
        })?;
        if batch > 1 {
            self.set(self.functions.set_layout, layout, LAYOUT_BATCH_COUNT, &(batch as i32))?;
            self.set(self.functions.set_layout, layout, LAYOUT_BATCH_STRIDE, &((rows * columns) as i64))?;
        }
        Ok(layout)
    }

    fn set<T>(&self, set: Set, handle: Handle, attribute: c_int, value: &T) -> Result<()> {
        // SAFETY: a value of the attribute's type, which is read before the call returns.
        called("cublasLt*SetAttribute", unsafe { set(handle, attribute, (&raw const *value).cast(), size_of::<T>()) })
    }

    /// Tells the epilogue where its operands are, and where the scales.
    fn point(&self, plan: &Plan, form: &Product, operands: &Operands) -> Result<()> {
        if form.bias {
            self.set(self.functions.set_desc, plan.desc, DESC_BIAS_POINTER, &operands.bias.address)?;
        }
        if form.keeps_argument {
            self.set(self.functions.set_desc, plan.desc, DESC_AUX_POINTER, &operands.argument.address)?;
        }
        if form.fp8.is_some() {
            // Its A is b here.
            let [a, b] = operands.scales.map(|scale| scale.address);
            self.set(self.functions.set_desc, plan.desc, DESC_A_SCALE_POINTER, &b)?;
            self.set(self.functions.set_desc, plan.desc, DESC_B_SCALE_POINTER, &a)?;
        }
        Ok(())
    }

    /// Enqueues the product on `stream`.
    ///
    /// # Safety
    /// The operands must be regions of the form's sizes that live until the stream has passed the
    /// product.
    unsafe fn matmul(
        &self,
        plan: &Plan,
        form: &Product,
        operands: &Operands,
        algorithm: &Algorithm,
        stream: Stream,
    ) -> Result<()> {
        let (alpha, beta) = (operands.scale, if form.adds { operands.adding } else { 0.0 });
        let at = |region: Region| region.address as *mut c_void;
        let c = if form.adds { operands.c } else { operands.d };
        // SAFETY: the caller's promise about the operands; descriptors are those of the form.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle,
                plan.desc,
                (&raw const alpha).cast(),
                at(operands.b),
                plan.b,
                at(operands.a),
                plan.a,
                (&raw const beta).cast(),
                at(c),
                plan.d,
                at(operands.d),
                plan.d,
                algorithm,
                at(operands.workspace),
                operands.workspace.bytes,
                stream.0 as *mut c_void,
            )
        };
        called("cublasLtMatmul", status)
    }

    /// The fastest of the library's proposals, measured on the operands; the result goes elsewhere
    /// where it would be added to itself.
    fn search(
        &self,
        driver: &dyn Driver,
        stream: Stream,
        form: &Product,
        plan: &Plan,
        operands: &Operands,
    ) -> Result<Algorithm> {
        let proposals = self.proposals(form, plan, operands.workspace.bytes)?;
        let in_place = form.adds && operands.c.address == operands.d.address;
        let scratch = if in_place { driver.allocate(operands.d.bytes).ok() } else { None };
        if proposals.len() == 1 || (in_place && scratch.is_none()) {
            return Ok(proposals[0].algorithm);
        }
        let d = scratch.map_or(operands.d, |address| Region { address, ..operands.d });
        let times = self.times(driver, stream, form, plan, &Operands { d, ..*operands }, &proposals);
        if let Some(address) = scratch {
            driver.free(address);
        }
        let (times, failure) = times?;
        let failed = || {
            let last = failure.map_or(String::new(), |error| format!(", the last with {error}"));
            CudaError::Product { product: format!("{form:?}"), what: format!("every proposal failed{last}") }
        };
        Ok(proposals[algorithms::fastest(&times).ok_or_else(failed)?].algorithm)
    }

    /// The seconds of each proposal's runs, none of one that failed, and the last failure.
    fn times(
        &self,
        driver: &dyn Driver,
        stream: Stream,
        form: &Product,
        plan: &Plan,
        operands: &Operands,
        proposals: &[Proposal],
    ) -> Result<(Vec<Vec<f64>>, Option<CudaError>)> {
        let (start, end) = (driver.event()?, driver.event()?);
        let (mut all, mut failure) = (Vec::new(), None);
        for proposal in proposals {
            let mut times = Vec::new();
            for run in 0..RUNS {
                driver.record(start, stream)?;
                // SAFETY: the operands are those of the product that is asked for, or scratch of
                // the same size.
                if let Err(error) = unsafe { self.matmul(plan, form, operands, &proposal.algorithm, stream) } {
                    failure = Some(error);
                    break;
                }
                driver.record(end, stream)?;
                driver.synchronize(stream)?;
                if run > 0 {
                    times.push(driver.seconds_between(start, end)?);
                }
            }
            all.push(times);
        }
        driver.destroy(start);
        driver.destroy(end);
        Ok((all, failure))
    }

    fn proposals(&self, form: &Product, plan: &Plan, workspace: usize) -> Result<Vec<Proposal>> {
        let mut preference = std::ptr::null_mut();
        // SAFETY: writes a handle.
        called("cublasLtMatmulPreferenceCreate", unsafe { (self.functions.create_preference)(&mut preference) })?;
        self.set(self.functions.set_preference, preference, PREFERENCE_WORKSPACE, &workspace)?;
        self.set(self.functions.set_preference, preference, PREFERENCE_REDUCTION, &REDUCTION_IN_F32)?;
        for attribute in PREFERENCE_ALIGNMENTS {
            self.set(self.functions.set_preference, preference, attribute, &form.alignment)?;
        }
        let none = Proposal { algorithm: [0; 8], workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let (mut found, mut count) = ([none; PROPOSALS], 0);
        // SAFETY: room for as many as are asked for; descriptors are those of the form.
        let status = unsafe {
            let Plan { desc, a, b, d, .. } = *plan;
            let (room, wanted) = (found.as_mut_ptr(), PROPOSALS as c_int);
            (self.functions.heuristic)(self.handle, desc, b, a, d, d, preference, wanted, room, &mut count)
        };
        // SAFETY: created above.
        unsafe { (self.functions.destroy_preference)(preference) };
        let product = || format!("{form:?}");
        called("cublasLtMatmulAlgoGetHeuristic", status)
            .map_err(|error| CudaError::Product { product: product(), what: error.to_string() })?;
        let good: Vec<Proposal> =
            found[..count as usize].iter().filter(|proposal| proposal.state == 0).copied().collect();
        if good.is_empty() {
            return Err(CudaError::Product { product: product(), what: "the library proposes none".to_owned() });
        }
        Ok(good)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epilogues_are_those_of_the_header() {
        let form = super::super::tests::form();
        let with = |bias, activation, keeps_argument| epilogue(&Product { bias, activation, keeps_argument, ..form });
        assert_eq!(with(false, Activation::None, false), 1);
        assert_eq!(with(true, Activation::None, false), 4);
        assert_eq!((with(false, Activation::Relu, false), with(true, Activation::Relu, false)), (2, 6));
        assert_eq!((with(false, Activation::Gelu, false), with(true, Activation::Gelu, false)), (32, 36));
        assert_eq!((with(false, Activation::Gelu, true), with(true, Activation::Gelu, true)), (160, 164));
    }

    #[test]
    fn proposals_are_laid_out_as_in_the_header() {
        assert_eq!((size_of::<Proposal>(), std::mem::offset_of!(Proposal, state)), (96, 72));
    }
}
