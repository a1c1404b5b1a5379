//! Finds NVIDIA's libraries: in the toolkit, the system, or Python's packages.
//!
//! The order is: the folder named by `CUDA_HOME` or `CUDA_PATH`; the loader's own search and the
//! usual folders; the `nvidia-*` packages of the Python environment that is active, or of the
//! `python3` on the path. A library with a later major version than the driver's is tried last.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Library {
    /// Name in messages.
    pub name: &'static str,
    /// Its file is `lib{stem}.so.{major}`.
    pub stem: &'static str,
    /// Its package on PyPI.
    pub package: &'static str,
    /// Its other sources.
    pub shipped: &'static str,
    /// Its major versions, those of CUDA if it is a part of that; latest first.
    pub majors: &'static [u32],
}

/// The compiler of kernels.
pub const NVRTC: Library =
    Library { name: "NVRTC", stem: "nvrtc", package: "nvidia-cuda-nvrtc", shipped: TOOLKIT, majors: &[13, 12] };
/// Products.
pub const CUBLASLT: Library =
    Library { name: "cuBLASLt", stem: "cublasLt", package: "nvidia-cublas", shipped: TOOLKIT, majors: &[13, 12] };
/// Collectives. Its versions are its own; each is built for one major version of CUDA, which its
/// name does not say.
pub const NCCL: Library = Library {
    name: "NCCL",
    stem: "nccl",
    package: "nvidia-nccl-cu12 or nvidia-nccl-cu13",
    shipped: "with NVIDIA's package libnccl2 of the system",
    majors: &[2],
};

const TOOLKIT: &str = "with the CUDA toolkit (set CUDA_HOME)";

/// Folders to look in.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Places {
    toolkit: Vec<PathBuf>,
    system: Vec<PathBuf>,
    python: Vec<PathBuf>,
}

impl Places {
    /// Those of this process.
    pub fn of_this_process() -> Places {
        Places::from_variables(|name| std::env::var_os(name), Path::new("/"))
    }

    /// Those that environment variables and the folders below `root` say.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>, root: &Path) -> Places {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let list = |name: &str| {
            let paths = variable(name).unwrap_or_default();
            std::env::split_paths(&paths).filter(|path| !path.as_os_str().is_empty()).collect::<Vec<_>>()
        };
        let homes: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(set).collect();
        let mut system = list("LD_LIBRARY_PATH");
        let mut installed = entries(&root.join("usr/local"));
        installed.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda")));
        system.extend(libraries_of(&installed));
        system.extend(["usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib"].map(|folder| root.join(folder)));
        let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(set).collect();
        let with_python = list("PATH").into_iter().filter(|path| path.join("python3").exists());
        prefixes.extend(with_python.filter_map(|path| path.parent().map(Path::to_owned)));
        prefixes.extend(set("HOME").map(|home| home.join(".local")));
        let mut python = Vec::new();
        for prefix in &prefixes {
            for version in entries(&prefix.join("lib")) {
                let packages = ["site-packages", "dist-packages"].map(|name| version.join(name).join("nvidia"));
                python.extend(packages.iter().flat_map(|folder| entries(folder)).map(|package| package.join("lib")));
            }
        }
        python.dedup();
        Places { toolkit: libraries_of(&homes), system, python }
    }

    /// The files to try for a library with a driver of major version `driver`, best first. The
    /// loader searches for a name without a folder.
    pub fn candidates(&self, library: &Library, driver: u32) -> Vec<PathBuf> {
        let within = |folders: &[PathBuf]| folders.iter().flat_map(|folder| files(folder, library)).collect::<Vec<_>>();
        let mut all = within(&self.toolkit);
        all.extend(library.majors.iter().map(|major| (*major, format!("lib{}.so.{major}", library.stem).into())));
        all.extend(within(&self.system));
        all.extend(within(&self.python));
        all.sort_by_key(|(major, _)| *major > driver);
        all.into_iter().map(|(_, path)| path).collect()
    }

    /// The places in words.
    pub fn describe(&self) -> String {
        let list = |name: &str, folders: &[PathBuf], none: &str| {
            let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
            if folders.is_empty() { none.to_owned() } else { format!("{name} {}", folders.join(", ")) }
        };
        let python = match self.python.len() {
            0 => "no nvidia-* packages of a Python environment".to_owned(),
            1..=8 => list("Python's packages", &self.python, ""),
            more => format!("{more} nvidia-* packages of Python"),
        };
        format!(
            "{}; the loader's path; {}; {python}",
            list("CUDA_HOME", &self.toolkit, "no CUDA_HOME"),
            list("the system's", &self.system, "no folder of the system")
        )
    }
}

/// The files that a toolkit keeps its libraries in.
fn libraries_of(homes: &[PathBuf]) -> Vec<PathBuf> {
    let below = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];
    homes.iter().flat_map(|home| below.map(|folder| home.join(folder))).filter(|folder| folder.is_dir()).collect()
}

/// The entries of a folder, in order; none if it does not exist.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The library's files in a folder with their major versions, latest first; a file without one
/// counts as the first.
fn files(folder: &Path, library: &Library) -> Vec<(u32, PathBuf)> {
    let start = format!("lib{}.so", library.stem);
    let version = |path: &PathBuf| {
        let name = path.file_name()?.to_string_lossy().into_owned();
        let rest = name.strip_prefix(&start)?;
        match rest.strip_prefix('.') {
            Some(version) => version.split('.').next()?.parse().ok(),
            None => rest.is_empty().then_some(0),
        }
    };
    let mut found: Vec<(u32, PathBuf)> =
        entries(folder).into_iter().filter_map(|path| version(&path).map(|major| (major, path))).collect();
    found.sort_by_key(|(major, _)| std::cmp::Reverse(*major));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_where_they_lie_and_the_drivers_version_first() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let touch = |path: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        };
        let nvidia = "venv/lib/python3.12/site-packages/nvidia";
        touch("home/lib64/libnvrtc.so.12.8.93");
        touch("usr/local/cuda-13/lib64/libnvrtc.so.13");
        touch("usr/local/cuda-13/lib64/libnvrtc-builtins.so.13.2");
        touch("usr/local/bin/python3");
        touch("usr/local/lib/python3.12/dist-packages/nvidia/cu13/lib/libcublasLt.so.13");
        touch(&format!("{nvidia}/cuda_nvrtc/lib/libnvrtc.so.12"));
        touch(&format!("{nvidia}/cublas/lib/libcublasLt.so.12"));
        let variables = |name: &str| {
            let path = match name {
                "CUDA_HOME" => "home",
                "VIRTUAL_ENV" => "venv",
                "PATH" => "usr/local/bin",
                _ => return None,
            };
            Some(root.join(path).into_os_string())
        };
        let places = Places::from_variables(variables, root);
        let found = |library, driver| -> Vec<String> {
            let relative = |path: PathBuf| path.strip_prefix(root).unwrap_or(&path).display().to_string();
            places.candidates(library, driver).into_iter().map(relative).collect()
        };
        let (home, package) = ("home/lib64/libnvrtc.so.12.8.93", format!("{nvidia}/cuda_nvrtc/lib/libnvrtc.so.12"));
        let (toolkit, names) = ("usr/local/cuda-13/lib64/libnvrtc.so.13", ["libnvrtc.so.13", "libnvrtc.so.12"]);
        assert_eq!(found(&NVRTC, 13), [home, names[0], names[1], toolkit, &package]);
        assert_eq!(found(&NVRTC, 12), [home, names[1], &package, names[0], toolkit]);
        let cublas = found(&CUBLASLT, 13);
        touch("venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
        let places = Places::from_variables(variables, root);
        let nccl = places.candidates(&NCCL, 12);
        assert!(nccl.len() == 2 && nccl[0] == Path::new("libnccl.so.2") && nccl[1].starts_with(root), "{nccl:?}");
        assert!(cublas[2..].iter().all(|path| path.contains("nvidia/cu")) && cublas.len() == 4, "{cublas:?}");
        let words = places.describe();
        assert!(words.contains("home/lib64") && words.contains("cuda_nvrtc/lib"), "{words}");
        assert!(Places::default().describe().starts_with("no CUDA_HOME; the loader's path; no folder"));
    }
}
