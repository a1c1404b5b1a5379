//! NVIDIA's GPUs of this machine, by the driver's management library (NVML), where there is one.
//!
//! The library is looked for when the program runs, so that it builds and runs without. A number
//! that a GPU does not tell is absent.

use super::Gpu;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use std::ffi::OsStr;

/// The name under which the driver installs it; the name without a version comes with development
/// packages only.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Reasons for a lower clock that are no choice of anybody, in words.
const SLOWED: [(ThrottleReasons, &str); 6] = [
    (ThrottleReasons::SW_POWER_CAP, "power limit"),
    (ThrottleReasons::HW_SLOWDOWN, "slowed by the hardware"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature, by the hardware"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
    (ThrottleReasons::SYNC_BOOST, "synchronised with a slower GPU"),
];

/// The management library; None where there is none, or no GPU.
#[derive(Debug)]
pub struct Gpus(Option<Nvml>);

impl Gpus {
    /// No GPU: for a run that computes on the processor.
    pub fn none() -> Gpus {
        Gpus(None)
    }

    /// Looks for the library.
    pub fn find() -> Gpus {
        Gpus(Nvml::builder().lib_path(OsStr::new(LIBRARY)).init().ok())
    }

    /// Every GPU, now. One that does not answer any more is left out.
    pub fn now(&self) -> Vec<Gpu> {
        let Some(library) = &self.0 else { return Vec::new() };
        (0..library.device_count().unwrap_or(0)).filter_map(|index| read(library, index)).collect()
    }
}

fn read(library: &Nvml, index: u32) -> Option<Gpu> {
    const PERCENT: f64 = 0.01;
    let device = library.device_by_index(index).ok()?;
    let rates = device.utilization_rates().ok();
    let memory = device.memory_info().ok();
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
    let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::NONE);
    Some(Gpu {
        index,
        name: device.name().unwrap_or_default(),
        busy: rates.as_ref().map(|rates| PERCENT * f64::from(rates.gpu)),
        memory_busy: rates.as_ref().map(|rates| PERCENT * f64::from(rates.memory)),
        memory_used_bytes: memory.as_ref().map_or(0, |memory| memory.used),
        memory_total_bytes: memory.as_ref().map_or(0, |memory| memory.total),
        temperature_c: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
        power_w: device.power_usage().ok().map(watts),
        power_limit_w: device.enforced_power_limit().ok().map(watts),
        mhz: device.clock_info(Clock::SM).ok().map(f64::from),
        mhz_max: device.max_clock_info(Clock::SM).ok().map(f64::from),
        slowed: SLOWED
            .iter()
            .filter(|(reason, _)| reasons.contains(*reason))
            .map(|(_, why)| (*why).to_owned())
            .collect(),
    })
}
