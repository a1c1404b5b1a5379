//! Loads a library from the place where it is found.

use crate::error::{CudaError, Result};
use crate::find::{Library, Places};
use std::path::PathBuf;

/// A library that was loaded, and from where.
pub struct Loaded {
    library: libloading::Library,
    path: PathBuf,
}

impl Loaded {
    /// The first candidate that loads.
    pub fn open(library: &Library, places: &Places, driver: u32) -> Result<Loaded> {
        for path in places.candidates(library, driver) {
            // SAFETY: NVIDIA's library under its own name; its initialisers are those of the C
            // library and CUDA.
            if let Ok(library) = unsafe { libloading::Library::new(&path) } {
                return Ok(Loaded { library, path });
            }
        }
        let Library { name, package, shipped, .. } = *library;
        Err(CudaError::NoLibrary { library: name, looked: places.describe(), package, shipped })
    }

    /// Where it was found.
    pub fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// A function, as the type that its header says.
    ///
    /// # Safety
    /// `F` is a pointer to a function of that type.
    pub unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F> {
        // SAFETY: the caller's promise.
        match unsafe { self.library.get::<F>(symbol.as_bytes()) } {
            Ok(function) => Ok(*function),
            Err(_) => Err(CudaError::NoSymbol { path: self.path.display().to_string(), symbol: symbol.to_owned() }),
        }
    }
}
