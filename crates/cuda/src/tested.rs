//! The device of a suite of tests: kernels emulated on the fake driver, or a GPU. The suites are
//! the same.

use crate::driver::Driver;
use crate::emulated::Emulated;
use crate::fake::{Fake, Options};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The variable that says which: `emulated`, which is the default, or `cuda`, `cuda:1` for a GPU,
/// which needs the feature `nvidia`.
pub const VARIABLE: &str = "TRAINYARD_TEST_DEVICE";

/// A device under test.
#[derive(Clone)]
pub struct Tested {
    /// The interface of the device.
    pub driver: Arc<dyn Driver>,
    /// The fake behind it; None on a GPU.
    pub fake: Option<Arc<Fake>>,
}

impl Tested {
    /// The device that [`VARIABLE`] names. Emulated kernels are compiled into `folder`, once in a
    /// process, and `seed` chooses among the fake's streams; the tests of a process share a GPU.
    ///
    /// # Errors
    /// A value that names no device, no C++ compiler, no GPU: in a sentence.
    pub fn new(folder: &Path, seed: u64) -> Result<Tested, String> {
        let value = std::env::var(VARIABLE).unwrap_or_default();
        match ordinal(&value)? {
            None => Tested::emulated(folder, seed),
            Some(ordinal) => {
                static GPU: OnceLock<Result<Arc<dyn Driver>, String>> = OnceLock::new();
                let open = || crate::open(ordinal).map_err(|error| format!("{VARIABLE}={value}: {error}"));
                Ok(Tested { driver: GPU.get_or_init(open).clone()?, fake: None })
            }
        }
    }

    /// A fake that computes, whatever the variable says.
    ///
    /// # Errors
    /// No C++ compiler.
    pub fn emulated(folder: &Path, seed: u64) -> Result<Tested, String> {
        let kernels = kernels(folder)?;
        let fake = Arc::new(Fake::new(Options { seed, kernels: Some(Box::new(kernels)), ..Options::default() }));
        Ok(Tested { driver: fake.clone(), fake: Some(fake) })
    }

    /// The problems that the fake found. A GPU reports nothing but failures.
    pub fn problems(&self) -> Vec<String> {
        self.fake.as_ref().map_or_else(Vec::new, |fake| fake.problems())
    }
}

/// The emulated kernels of this process, compiled into the first folder that was asked for.
///
/// # Errors
/// No C++ compiler.
pub fn kernels(folder: &Path) -> Result<&'static Emulated, String> {
    static KERNELS: OnceLock<Option<Emulated>> = OnceLock::new();
    KERNELS.get_or_init(|| Emulated::new(folder)).as_ref().ok_or_else(|| {
        "kernels are emulated by the host's C++ compiler, and none of $CXX, c++, g++, clang++ runs: install one (on Debian: apt-get install g++)"
            .to_owned()
    })
}

/// The GPU that a value names; None is emulation.
fn ordinal(value: &str) -> Result<Option<usize>, String> {
    let number = match value {
        "" | "emulated" => return Ok(None),
        "cuda" => Some(0),
        other => other.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
    };
    number.map(Some).ok_or_else(|| format!("{VARIABLE}={value:?} is neither emulated nor cuda nor cuda:N"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        assert_eq!((ordinal(""), ordinal("emulated")), (Ok(None), Ok(None)));
        assert_eq!((ordinal("cuda"), ordinal("cuda:3")), (Ok(Some(0)), Ok(Some(3))));
        assert!(ordinal("gpu").unwrap_err().contains("neither emulated nor cuda"));
    }
}
