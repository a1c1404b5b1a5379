//! The compiler of kernels. It needs no GPU and no driver.

use super::library::Loaded;
use crate::error::{CudaError, Result};
use crate::find::{NVRTC, Places};
use std::ffi::{CString, c_char, c_int, c_void};

/// The options of every module, beside its architecture.
const OPTIONS: [&str; 1] = ["--std=c++17"];

type Program = *mut c_void;
type Status = c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> Status;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> Status;

/// The compiler, loaded.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log: (Size, Text),
    image: (Size, Text),
    version: (c_int, c_int),
    /// Keeps the functions where they are.
    _library: Loaded,
}

/// A module.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code.
    pub image: Vec<u8>,
    /// Warnings, and what `--ptxas-options=-v` said, if it was asked for.
    pub log: String,
}

impl Nvrtc {
    /// Finds and loads it; `driver` is the driver's major version of CUDA.
    pub fn open(places: &Places, driver: u32) -> Result<Nvrtc> {
        let library = Loaded::open(&NVRTC, places, driver)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the types are those of nvrtc.h, which have not changed since CUDA 11.1.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status = library.function("nvrtcVersion")?;
            version(&mut major, &mut minor);
            Ok(Nvrtc {
                create: library.function("nvrtcCreateProgram")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                compile: library.function("nvrtcCompileProgram")?,
                log: (library.function("nvrtcGetProgramLogSize")?, library.function("nvrtcGetProgramLog")?),
                image: (library.function("nvrtcGetCUBINSize")?, library.function("nvrtcGetCUBIN")?),
                version: (major, minor),
                _library: library,
            })
        }
    }

    /// `12.8`
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Compiles a module for one architecture, e.g. `sm_90a`.
    pub fn compile(&self, name: &str, source: &str, architecture: &str) -> Result<Compiled> {
        self.compile_with(name, source, architecture, &[])
    }

    /// As [`Nvrtc::compile`], with more options.
    pub fn compile_with(&self, name: &str, source: &str, architecture: &str, more: &[&str]) -> Result<Compiled> {
        let text = |text: &str| CString::new(text).expect("sources and options have no NUL");
        let (source, file) = (text(source), text(name));
        let mut program: Program = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: two strings that outlive the program, and no headers.
        let status = unsafe { (self.create)(&mut program, source.as_ptr(), file.as_ptr(), 0, none, none) };
        if status != 0 {
            let code = format!("status {status}");
            return Err(CudaError::Call { call: "nvrtcCreateProgram", code, hint: "" });
        }
        let architecture_option = format!("--gpu-architecture={architecture}");
        let options = [architecture_option.as_str()].into_iter().chain(OPTIONS).chain(more.iter().copied());
        let options: Vec<CString> = options.map(text).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: as many strings as are said.
        let status = unsafe { (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let log = String::from_utf8_lossy(&self.bytes(program, self.log)).trim_end_matches('\0').to_owned();
        let result = if status == 0 {
            Ok(Compiled { image: self.bytes(program, self.image), log })
        } else {
            let (source_name, architecture) = (name.to_owned(), architecture.to_owned());
            Err(CudaError::Compile { source_name, architecture, log })
        };
        // SAFETY: created above.
        unsafe { (self.destroy)(&mut program) };
        result
    }

    fn bytes(&self, program: Program, (size, get): (Size, Text)) -> Vec<u8> {
        let mut len = 0;
        // SAFETY: the program exists, and the buffer is as long as it says.
        unsafe {
            size(program, &mut len);
            let mut bytes = vec![0u8; len];
            get(program, bytes.as_mut_ptr().cast());
            bytes
        }
    }
}
