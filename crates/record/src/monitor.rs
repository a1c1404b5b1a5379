//! Samples of the machine while a run goes on: `monitor.jsonl`, about one a second.
//!
//! A [`Monitor`] is a thread that reads `/proc`, the control group of the process and, where there
//! are some, NVIDIA's GPUs. Rates are
//! over the time since the sample before. A number that the machine does not tell is absent. The
//! last sample is taken when the run ends, so that the whole run is covered.

use crate::{RecordError, read_lines};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use trainyard_base::lock;

mod gpus;
mod system;
pub use gpus::Gpus;
use system::Counters;

/// Time between two samples.
pub const INTERVAL: Duration = Duration::from_secs(1);
/// The shortest last sample, in intervals. The kernel counts in ticks of 10 ms, so shorter ones
/// would be noise.
const SHORTEST: f64 = 0.2;

/// The machine and the process, over the time since the sample before.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Seconds since the Unix epoch, at the end.
    pub unix_s: f64,
    /// Seconds that the sample is about.
    pub seconds: f64,
    /// The last step that was finished.
    pub step: u64,
    /// Seconds that taking this sample took.
    pub cost_s: f64,
    /// Cores.
    pub cpu: Cpu,
    /// Memory.
    pub memory: Memory,
    /// Disks.
    pub disk: Disk,
    /// Network, without the loopback.
    pub network: Network,
    /// Share of the time in which something waited (PSI).
    pub pressure: Pressure,
    /// The warmest sensor, in degrees Celsius.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// NVIDIA's GPUs of the machine, at the end, if the run computes on one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
}

/// A GPU.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Its number in the driver's order.
    pub index: u32,
    /// The product's name.
    pub name: String,
    /// Share of the last moments in which a kernel ran on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Share of the last moments in which its memory was read or written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_busy: Option<f64>,
    /// Memory that all programs use.
    pub memory_used_bytes: u64,
    /// All of its memory.
    pub memory_total_bytes: u64,
    /// Degrees Celsius.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// Power drawn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// The most power that it may draw.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_limit_w: Option<f64>,
    /// The clock of its multiprocessors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mhz: Option<f64>,
    /// Their highest clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mhz_max: Option<f64>,
    /// The reasons that keep the clock low, in words: power, temperature. Empty if nothing does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slowed: Vec<String>,
}

impl Gpu {
    /// The share of its highest clock that it lost for one of the reasons in `slowed`.
    pub fn clock_lost(&self) -> f64 {
        match (self.mhz, self.mhz_max) {
            (Some(mhz), Some(max)) if max > 0.0 && !self.slowed.is_empty() => (1.0 - mhz / max).max(0.0),
            _ => 0.0,
        }
    }
}

/// Cores. Times are in cores: 1 is one core all the time.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Cpu {
    /// Share of the time in which each core was busy.
    pub busy: Vec<f64>,
    /// Cores that this process used.
    pub process: f64,
    /// Cores that other processes used.
    pub others: f64,
    /// Cores that the hypervisor gave to other machines.
    pub steal: f64,
    /// Cores that waited for a disk.
    pub iowait: f64,
    /// Threads of this process that could have run and waited for a core, on average.
    pub run_delay: f64,
    /// Threads of the machine that could run, at the end.
    pub runnable: u32,
    /// Mean clock of the cores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mhz: Option<f64>,
    /// Cores that the control group may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    /// Share of the scheduling periods in which the control group was stopped before their end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttled: Option<f64>,
    /// Cores that the control group withheld from threads that could have run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttled_cores: Option<f64>,
}

/// Memory.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Bytes that could be allocated without swapping.
    pub available_bytes: u64,
    /// Bytes in swap, of the whole machine.
    pub swap_used_bytes: u64,
    /// Resident bytes of this process.
    pub rss_bytes: u64,
    /// The part of them that maps files, e.g. token files.
    pub rss_file_bytes: u64,
    /// Page faults of this process that waited for a disk, a second.
    pub major_faults: f64,
    /// Pages that the machine moved to or from swap, a second.
    pub swapped_pages: f64,
    /// Live bytes of this rank's memory pool, by purpose.
    pub pool_bytes: BTreeMap<String, u64>,
    /// Bytes that the pool keeps for later use, live ones included.
    pub pool_reserved_bytes: u64,
}

/// Disks, all together.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// Bytes read a second, by everybody.
    pub read: f64,
    /// Bytes written a second, by everybody.
    pub write: f64,
    /// Share of the time in which the busiest disk was busy.
    pub busy: f64,
    /// Mean seconds of a read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_s: Option<f64>,
    /// Mean seconds of a write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_s: Option<f64>,
    /// Bytes that this process read from disks a second.
    pub process_read: f64,
    /// Bytes that this process wrote to disks a second.
    pub process_write: f64,
}

/// Network, without the loopback.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// Bytes received a second.
    pub received: f64,
    /// Bytes sent a second.
    pub sent: f64,
    /// Bytes through the loopback a second: ranks of one host.
    pub loopback: f64,
    /// Errors and dropped packets a second.
    pub lost: f64,
}

/// Share of the time in which some task of the machine waited.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Pressure {
    /// For a core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<f64>,
    /// For memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<f64>,
    /// For a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io: Option<f64>,
}

/// The part of a sample that the program itself knows.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Inside {
    /// The last finished step.
    pub step: u64,
    /// Live bytes of the memory pool, by purpose.
    pub pool_bytes: BTreeMap<String, u64>,
    /// Bytes that the pool keeps.
    pub pool_reserved_bytes: u64,
}

/// The path of the samples that the process of `rank` takes. Ranks that are threads of rank 0's
/// process have none of their own.
pub fn path(run: &Path, rank: u32) -> PathBuf {
    match rank {
        0 => run.join("monitor.jsonl"),
        rank => run.join(format!("monitor-{rank}.jsonl")),
    }
}

/// The samples in a file, oldest first; none if there is no file.
///
/// # Errors
/// A file that cannot be read.
pub fn read(path: &Path) -> Result<Vec<Sample>, RecordError> {
    read_lines(path)
}

/// A thread that takes samples until it is dropped.
#[derive(Debug)]
pub struct Monitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    ended: Mutex<bool>,
    changed: Condvar,
    /// The first failure; the thread ends with it.
    failure: Mutex<Option<RecordError>>,
}

impl Monitor {
    /// Begins to append samples to the file at `path`, with those of `gpus`. `inside` is called for
    /// each of them.
    ///
    /// # Errors
    /// A file that cannot be written, or a thread that cannot be started.
    pub fn start(
        path: &Path,
        interval: Duration,
        gpus: Gpus,
        inside: impl Fn() -> Inside + Send + 'static,
    ) -> Result<Monitor, RecordError> {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .read(true)
            .open(path)
            .map_err(RecordError::io("write", path))?;
        // A process that died may have left half a line.
        let mut last = [b'\n'];
        if file.seek(SeekFrom::End(-1)).is_ok() {
            file.read_exact(&mut last).map_err(RecordError::io("read", path))?;
        }
        if last != *b"\n" {
            file.write_all(b"\n").map_err(RecordError::io("write", path))?;
        }
        let shared = Arc::new(Shared::default());
        let (own, file_path) = (Arc::clone(&shared), path.to_owned());
        let run = move || {
            let mut before = Counters::now();
            let mut ended = lock(&own.ended);
            while !*ended {
                ended = own.changed.wait_timeout(ended, interval).unwrap_or_else(std::sync::PoisonError::into_inner).0;
                let now = Counters::now();
                let mut sample = now.since(&before);
                if *ended && sample.seconds < SHORTEST * interval.as_secs_f64() {
                    return;
                }
                before = now;
                let asked = Instant::now();
                sample.gpus = gpus.now();
                sample.cost_s += asked.elapsed().as_secs_f64();
                let Inside { step, pool_bytes, pool_reserved_bytes } = inside();
                sample.step = step;
                (sample.memory.pool_bytes, sample.memory.pool_reserved_bytes) = (pool_bytes, pool_reserved_bytes);
                let mut line = serde_json::to_vec(&sample).expect("plain data is JSON");
                line.push(b'\n');
                if let Err(error) = file.write_all(&line) {
                    *lock(&own.failure) = Some(RecordError::io("write", &file_path)(error));
                    return;
                }
            }
        };
        let started = std::thread::Builder::new().name("monitor".to_owned()).spawn(run);
        let thread = started.map_err(|source| RecordError::Io {
            what: "start the thread that writes",
            path: path.display().to_string(),
            source,
        })?;
        Ok(Monitor { shared, thread: Some(thread) })
    }

    /// The failure that ended the samples, if there was one.
    pub fn failure(&self) -> Option<RecordError> {
        lock(&self.shared.failure).take()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        *lock(&self.shared.ended) = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has printed its message already.
            let _ = thread.join();
        }
    }
}

fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_say_what_the_process_does() {
        let before = Counters::now();
        let until = Instant::now() + Duration::from_millis(120);
        let mut spun = 0u64;
        while Instant::now() < until {
            spun = spun.wrapping_add(1);
        }
        let held = vec![1u8; 32 << 20];
        let sample = Counters::now().since(&before);
        assert!(spun > 0 && held[spun as usize % held.len()] == 1);
        assert!((0.1..5.0).contains(&sample.seconds), "{sample:?}");
        assert!(sample.cpu.process > 0.1 && !sample.cpu.busy.is_empty(), "{sample:?}");
        assert!(sample.memory.rss_bytes > 32 << 20 && sample.memory.available_bytes > 0, "{sample:?}");
        assert!(sample.cpu.busy.iter().all(|busy| (0.0..=1.0).contains(busy)), "{sample:?}");
    }

    #[test]
    fn a_run_that_is_shorter_than_the_interval_has_a_sample() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(folder.path(), 0);
        let interval = Duration::from_secs(3600);
        drop(Monitor::start(&path, interval, Gpus::none(), Inside::default).unwrap());
        assert_eq!(read(&path).unwrap(), [], "too short to tell anything");
        let monitor = Monitor::start(&path, Duration::from_millis(250), Gpus::none(), Inside::default).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        drop(monitor);
        assert!(!read(&path).unwrap().is_empty());
    }

    #[test]
    fn samples_are_appended_after_what_a_dead_process_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(folder.path(), 0);
        std::fs::write(&path, "{\"step\": 3}\n{\"st").unwrap();
        let (said, hear) = std::sync::mpsc::channel();
        let monitor = Monitor::start(&path, Duration::from_millis(1), Gpus::none(), move || {
            said.send(()).ok();
            Inside { step: 7, ..Inside::default() }
        });
        let monitor = monitor.unwrap();
        // The second sample is taken after the first was written.
        hear.recv().unwrap();
        hear.recv().unwrap();
        assert!(monitor.failure().is_none());
        drop(monitor);
        let steps: Vec<u64> = read(&path).unwrap().into_iter().map(|sample| sample.step).collect();
        assert!(steps.len() >= 2 && steps[..2] == [3, 7], "{steps:?}");
        assert_eq!(read(&folder.path().join("none")).unwrap(), []);
    }
}
