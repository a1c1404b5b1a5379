//! `cargo xtask gpu --compile`: compiles every kernel of `crates/cuda` with NVRTC for every
//! architecture, without a GPU.
//!
//! For each source, dtype and architecture, the machine code is made and the assembler's report on
//! each kernel is recorded: registers, spills, stack, static shared memory. A kernel that spills
//! registers fails the chore. NVRTC is found as at run time (`CUDA_HOME`, the system, Python's
//! packages). If there is none, PyPI's `nvidia-cuda-nvrtc` is installed into a virtual environment
//! in the target folder.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use trainyard_base::lock;

use crate::bench::target_folder;
use crate::test::Check;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use trainyard_cuda::find::Places;
use trainyard_cuda::kernels::{File, Float};
use trainyard_cuda::nvidia::Nvrtc;

/// Ampere, Hopper with its own instructions, Blackwell.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];
/// The one for which a test compiles them unless it is asked for all: Hopper has every kernel.
const OF_A_TEST: [&str; 1] = ["sm_90a"];

/// The assembler's report on one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Usage {
    kernel: String,
    dtype: &'static str,
    architecture: &'static str,
    registers: u32,
    spill_bytes: u32,
    stack_bytes: u32,
    shared_bytes: u32,
}

/// `cargo xtask gpu --compile`; the list goes to `json` too.
pub fn run(root: &Path, json: Option<&Path>) -> Result<bool> {
    let (nvrtc, found) = nvrtc(root)?;
    println!("NVRTC {} ({found})", nvrtc.version());
    let list = compile_all(&nvrtc, &ARCHITECTURES)?;
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&list)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    print_registers(&list);
    Ok(none_spills(&list))
}

/// The step of `cargo xtask test`: that everything compiles, for one architecture or, with `all`,
/// for every one, and nothing spills. Skipped where NVRTC cannot be had.
pub fn compiles(root: &Path, all: bool) -> Result<Check> {
    match nvrtc(root) {
        Ok((nvrtc, found)) => {
            let architectures = if all { &ARCHITECTURES[..] } else { &OF_A_TEST };
            println!("NVRTC {} ({found}) for {}", nvrtc.version(), architectures.join(", "));
            Ok(none_spills(&compile_all(&nvrtc, architectures)?).into())
        }
        Err(error) => Ok(Check::Skipped(format!("no NVRTC: {error:#}"))),
    }
}

/// The compiler and its origin. It is installed if missing.
fn nvrtc(root: &Path) -> Result<(Nvrtc, &'static str)> {
    // No driver limits the version here.
    if let Ok(nvrtc) = Nvrtc::open(&Places::of_this_process(), u32::MAX) {
        return Ok((nvrtc, "of this machine"));
    }
    let environment = target_folder(root).join("nvrtc");
    let places = || {
        let variable = |name: &str| -> Option<OsString> { (name == "VIRTUAL_ENV").then(|| environment.clone().into()) };
        Places::from_variables(variable, Path::new("/"))
    };
    if Nvrtc::open(&places(), u32::MAX).is_err() {
        succeeds(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        let pip = environment.join("bin/pip");
        succeeds(Command::new(pip).args(["install", "--quiet", "--no-deps", "nvidia-cuda-nvrtc"]))?;
    }
    Ok((Nvrtc::open(&places(), u32::MAX)?, "of a virtual environment in the target folder"))
}

fn succeeds(command: &mut Command) -> Result<()> {
    let said = format!("{command:?}");
    let output =
        command.output().with_context(|| format!("cannot run {said}; NVRTC is in the CUDA toolkit and on PyPI"))?;
    if !output.status.success() {
        bail!("{said}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Every kernel, in the order of files, dtypes and architectures.
fn compile_all(nvrtc: &Nvrtc, architectures: &[&'static str]) -> Result<Vec<Usage>> {
    let mut jobs = Vec::new();
    for file in File::ALL {
        for float in Float::ALL.into_iter().filter(|float| file.supports(*float)) {
            let on = architectures.iter().copied().filter(|architecture| file.runs_on(architecture));
            jobs.extend(on.map(|architecture| (file, float, architecture)));
        }
    }
    let next = AtomicUsize::new(0);
    let results = Mutex::new(BTreeMap::new());
    let work = || {
        while let Some((file, float, architecture)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
            let at = (file, float, architecture);
            let compiled = nvrtc.compile_with(file.name(), &file.source(float), architecture, &["--ptxas-options=-v"]);
            lock(&results).insert(at, compiled);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut list = Vec::new();
    for ((file, float, architecture), compiled) in results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
    {
        let log = compiled.with_context(|| format!("{} for {} and {architecture}", file.name(), float.name()))?.log;
        let found = usages(&log, float.name(), architecture);
        let missing: Vec<&str> = file
            .kernels()
            .map(|kernel| kernel.name)
            .filter(|name| !found.iter().any(|usage| usage.kernel == *name))
            .collect();
        if !missing.is_empty() {
            bail!(
                "{} for {} and {architecture}: nothing is said of {}: {log}",
                file.name(),
                float.name(),
                missing.join(", ")
            );
        }
        list.extend(found);
    }
    Ok(list)
}

/// Parses a log. For each entry function it has the name on one line, and stack, spills, registers
/// and shared memory on later ones.
fn usages(log: &str, dtype: &'static str, architecture: &'static str) -> Vec<Usage> {
    let mut list: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            list.push(Usage { kernel, dtype, architecture, ..Usage::default() });
        }
        let Some(usage) = list.last_mut() else { continue };
        let words: Vec<&str> = line.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        for at in 1..words.len() {
            let Ok(number) = words[at - 1].parse::<u32>() else { continue };
            match words[at..] {
                ["bytes", "stack", ..] => usage.stack_bytes = number,
                ["bytes", "spill", ..] => usage.spill_bytes += number,
                ["bytes", "smem", ..] => usage.shared_bytes = number,
                ["registers", ..] => usage.registers = number,
                _ => {}
            }
        }
    }
    list
}

/// Prints for each kernel and architecture the most registers of any dtype.
fn print_registers(list: &[Usage]) {
    let mut most: BTreeMap<&str, BTreeMap<&str, u32>> = BTreeMap::new();
    for usage in list {
        let registers = most.entry(&usage.kernel).or_default().entry(usage.architecture).or_default();
        *registers = usage.registers.max(*registers);
    }
    println!("registers, the most of any dtype\n{:<40}{}", "", ARCHITECTURES.map(|a| format!("{a:>8}")).concat());
    for (kernel, registers) in &most {
        println!(
            "{kernel:<40}{}",
            ARCHITECTURES
                .map(|a| registers.get(a).map_or_else(|| format!("{:>8}", "-"), |n| format!("{n:>8}")))
                .concat()
        );
    }
}

/// Prints the kernels that spill, and how many there are. Returns true if there are none.
fn none_spills(list: &[Usage]) -> bool {
    let spilled: Vec<&Usage> = list.iter().filter(|usage| usage.spill_bytes > 0).collect();
    for usage in &spilled {
        println!("{} ({}, {}) spills {} bytes", usage.kernel, usage.dtype, usage.architecture, usage.spill_bytes);
    }
    println!("{} kernels compiled, {} of them spill", list.len(), spilled.len());
    spilled.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_read() {
        let log = "norm.cu(62): warning: 12 bytes\n\
            ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'qk_norm' for 'sm_80'\n\
            ptxas info    : Function properties for qk_norm\n\
            ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 56 registers, used 1 barriers, 128 bytes smem, 424 bytes cmem[0]\n\
            ptxas info    : Compiling entry function 'rms_norm' for 'sm_80'\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 31 registers, used 0 barriers\n";
        let usage = |kernel: &str| Usage {
            kernel: kernel.to_owned(),
            dtype: "bf16",
            architecture: "sm_80",
            ..Usage::default()
        };
        let first = Usage { registers: 56, spill_bytes: 12, stack_bytes: 16, shared_bytes: 128, ..usage("qk_norm") };
        let list = usages(log, "bf16", "sm_80");
        assert_eq!(list, [first, Usage { registers: 31, ..usage("rms_norm") }]);
        assert!(!none_spills(&list) && none_spills(&list[1..]));
    }
}
