//! The counters of the machine and the process, and the rates between two readings.

use super::{Cpu, Disk, Memory, Network, Pressure, Sample, unix_s};
use procfs::process::Process;
use procfs::{Current, CurrentSI};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// One reading of the counters. Those that cannot be read are zero, or absent.
#[derive(Clone, Debug)]
pub struct Counters {
    at: Instant,
    took_s: f64,
    cores: Vec<CoreTicks>,
    ticks_s: f64,
    process_ticks: u64,
    steal_ticks: u64,
    iowait_ticks: u64,
    run_delay_ns: u64,
    major_faults: u64,
    swapped_pages: i64,
    /// Bytes read and written, milliseconds reading, writing and busy, and reads and writes.
    disks: Vec<[u64; 7]>,
    process_io: [u64; 2],
    network: [u64; 4],
    /// Microseconds of pressure: CPU, memory, IO.
    pressure: [Option<u64>; 3],
    /// Periods of the control group, those in which it was stopped, and the nanoseconds for which
    /// its cores were.
    periods: Option<[u64; 3]>,
    /// The numbers that are no rates.
    now: Sample,
}

#[derive(Clone, Copy, Debug)]
struct CoreTicks {
    busy: u64,
    all: u64,
}

impl Counters {
    /// Reads all counters.
    pub fn now() -> Counters {
        let at = Instant::now();
        let mut now = Sample { unix_s: unix_s(), ..Sample::default() };
        let mut counters = Counters {
            at,
            took_s: 0.0,
            cores: Vec::new(),
            ticks_s: procfs::ticks_per_second() as f64,
            process_ticks: 0,
            steal_ticks: 0,
            iowait_ticks: 0,
            run_delay_ns: 0,
            major_faults: 0,
            swapped_pages: 0,
            disks: Vec::new(),
            process_io: [0; 2],
            network: [0; 4],
            pressure: [None; 3],
            periods: None,
            now: Sample::default(),
        };
        counters.read_cores(&mut now.cpu);
        counters.read_process(&mut now);
        counters.read_machine(&mut now);
        counters.took_s = at.elapsed().as_secs_f64();
        counters.now = now;
        counters
    }

    fn read_cores(&mut self, cpu: &mut Cpu) {
        if let Ok(stat) = procfs::KernelStats::current() {
            self.cores = stat
                .cpu_time
                .iter()
                .map(|core| {
                    let iowait = core.iowait.unwrap_or(0);
                    let steal = core.steal.unwrap_or(0);
                    let busy = core.user + core.nice + core.system + core.irq.unwrap_or(0) + core.softirq.unwrap_or(0);
                    CoreTicks { busy, all: busy + core.idle + iowait + steal }
                })
                .collect();
            self.steal_ticks = stat.total.steal.unwrap_or(0);
            self.iowait_ticks = stat.total.iowait.unwrap_or(0);
            cpu.runnable = stat.procs_running.unwrap_or(0);
        }
        cpu.mhz = mean_mhz();
        if let Some(group) = control_group() {
            cpu.limit = group.limit;
            self.periods = Some(group.periods);
        }
    }

    fn read_process(&mut self, now: &mut Sample) {
        let Ok(own) = Process::myself() else { return };
        if let Ok(stat) = own.stat() {
            self.process_ticks = stat.utime + stat.stime;
            self.major_faults = stat.majflt;
        }
        if let Ok(status) = own.status() {
            now.memory.rss_bytes = 1024 * status.vmrss.unwrap_or(0);
            now.memory.rss_file_bytes = 1024 * (status.rssfile.unwrap_or(0) + status.rssshmem.unwrap_or(0));
        }
        if let Ok(tasks) = own.tasks() {
            let delays = tasks.flatten().filter_map(|task| task.schedstat().ok());
            self.run_delay_ns = delays.map(|stat| stat.run_delay).sum();
        }
        if let Ok(io) = own.io() {
            self.process_io = [io.read_bytes, io.write_bytes];
        }
    }

    fn read_machine(&mut self, now: &mut Sample) {
        if let Ok(memory) = procfs::Meminfo::current() {
            now.memory.available_bytes = memory.mem_available.unwrap_or(memory.mem_free);
            now.memory.swap_used_bytes = memory.swap_total.saturating_sub(memory.swap_free);
        }
        if let Ok(pages) = procfs::vmstat() {
            self.swapped_pages = ["pswpin", "pswpout"].iter().filter_map(|name| pages.get(*name)).sum();
        }
        if let Ok(disks) = procfs::diskstats() {
            const SECTOR: u64 = 512;
            // Partitions and loop devices would count the same bytes again.
            let whole = |name: &str| Path::new("/sys/block").join(name).exists() && !name.starts_with("loop");
            self.disks = disks
                .iter()
                .filter(|disk| whole(&disk.name))
                .map(|disk| {
                    [
                        SECTOR * disk.sectors_read,
                        SECTOR * disk.sectors_written,
                        disk.time_reading,
                        disk.time_writing,
                        disk.time_in_progress,
                        disk.reads,
                        disk.writes,
                    ]
                })
                .collect();
        }
        if let Ok(devices) = procfs::net::dev_status() {
            for (name, device) in devices {
                if name == "lo" {
                    self.network[2] += device.recv_bytes;
                    continue;
                }
                self.network[0] += device.recv_bytes;
                self.network[1] += device.sent_bytes;
                self.network[3] += device.recv_errs + device.recv_drop + device.sent_errs + device.sent_drop;
            }
        }
        self.pressure = [
            procfs::CpuPressure::current().ok().map(|pressure| pressure.some.total),
            procfs::MemoryPressure::current().ok().map(|pressure| pressure.some.total),
            procfs::IoPressure::current().ok().map(|pressure| pressure.some.total),
        ];
        now.temperature_c = temperature();
    }

    /// The rates between an earlier reading and this one.
    pub fn since(&self, before: &Counters) -> Sample {
        let seconds = (self.at - before.at).as_secs_f64().max(1e-9);
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let in_cores = |now: u64, before: u64| rate(now, before) / self.ticks_s.max(1.0);
        let pairs = || self.cores.iter().zip(&before.cores);
        let share = |now: &CoreTicks, before: &CoreTicks| {
            let all = now.all.saturating_sub(before.all);
            if all == 0 { 0.0 } else { (now.busy.saturating_sub(before.busy) as f64 / all as f64).min(1.0) }
        };
        let process = in_cores(self.process_ticks, before.process_ticks);
        let all = pairs().map(|(now, before)| in_cores(now.busy, before.busy)).sum::<f64>();
        let mut sample = self.now.clone();
        (sample.seconds, sample.cost_s) = (seconds, self.took_s);
        sample.cpu = Cpu {
            busy: pairs().map(|(now, before)| round(share(now, before))).collect(),
            process: round(process),
            others: round((all - process).max(0.0)),
            steal: round(in_cores(self.steal_ticks, before.steal_ticks)),
            iowait: round(in_cores(self.iowait_ticks, before.iowait_ticks)),
            run_delay: round(rate(self.run_delay_ns, before.run_delay_ns) / 1e9),
            throttled: self.periods.zip(before.periods).and_then(|(now, before)| {
                let periods = now[0].saturating_sub(before[0]);
                (periods > 0).then(|| round(now[1].saturating_sub(before[1]) as f64 / periods as f64))
            }),
            throttled_cores: self.periods.zip(before.periods).map(|(now, before)| round(rate(now[2], before[2]) / 1e9)),
            ..sample.cpu
        };
        sample.memory = Memory {
            major_faults: round(rate(self.major_faults, before.major_faults)),
            swapped_pages: round((self.swapped_pages - before.swapped_pages).max(0) as f64 / seconds),
            ..sample.memory
        };
        sample.disk = self.disk_since(before, seconds);
        let [received, sent, loopback, lost] = [0, 1, 2, 3].map(|n| rate(self.network[n], before.network[n]).round());
        sample.network = Network { received, sent, loopback, lost };
        let [cpu, memory, io] = [0, 1, 2].map(|n| {
            let (now, before) = self.pressure[n].zip(before.pressure[n])?;
            Some(round((rate(now, before) / 1e6).min(1.0)))
        });
        sample.pressure = Pressure { cpu, memory, io };
        sample
    }

    fn disk_since(&self, before: &Counters, seconds: f64) -> Disk {
        let mut sums = [0u64; 7];
        let mut busy = 0u64;
        for (now, before) in self.disks.iter().zip(&before.disks) {
            let changes: [u64; 7] = std::array::from_fn(|n| now[n].saturating_sub(before[n]));
            sums.iter_mut().zip(changes).for_each(|(sum, change)| *sum += change);
            busy = busy.max(changes[4]);
        }
        let mean = |milliseconds: u64, count: u64| (count > 0).then(|| milliseconds as f64 / 1e3 / count as f64);
        let io = |n: usize| (self.process_io[n].saturating_sub(before.process_io[n]) as f64 / seconds).round();
        Disk {
            read: (sums[0] as f64 / seconds).round(),
            write: (sums[1] as f64 / seconds).round(),
            busy: round((busy as f64 / 1e3 / seconds).min(1.0)),
            read_s: mean(sums[2], sums[5]),
            write_s: mean(sums[3], sums[6]),
            process_read: io(0),
            process_write: io(1),
        }
    }
}

/// Three places after the point are enough, and keep a line short.
fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn mean_mhz() -> Option<f64> {
    let info = procfs::CpuInfo::current().ok()?;
    let clocks: Vec<f64> =
        (0..info.num_cores()).filter_map(|core| info.get_field(core, "cpu MHz")?.parse().ok()).collect();
    (!clocks.is_empty()).then(|| (clocks.iter().sum::<f64>() / clocks.len() as f64).round())
}

/// The warmest thermal zone.
fn temperature() -> Option<f64> {
    let zones = std::fs::read_dir("/sys/class/thermal").ok()?;
    let degrees = zones.flatten().filter_map(|zone| {
        let text = std::fs::read_to_string(zone.path().join("temp")).ok()?;
        Some(text.trim().parse::<f64>().ok()? / 1e3)
    });
    degrees.max_by(f64::total_cmp)
}

struct ControlGroup {
    limit: Option<f64>,
    /// Scheduling periods so far, those in which the group used up its time, and the nanoseconds
    /// for which its cores were then stopped.
    periods: [u64; 3],
}

/// The group of this process, or the one above it, that limits its cores most.
fn control_group() -> Option<ControlGroup> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let groups = own.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let root = match controllers {
            "" => PathBuf::from("/sys/fs/cgroup"),
            _ if controllers.split(',').any(|name| name == "cpu") => Path::new("/sys/fs/cgroup").join(controllers),
            _ => return None,
        };
        let path = root.join(path.trim_start_matches('/'));
        Some(path.ancestors().take_while(|above| above.starts_with(&root)).map(Path::to_owned).collect::<Vec<_>>())
    });
    let read = groups.flatten().filter_map(|folder| read_group(&folder));
    read.min_by(|a, b| a.limit.unwrap_or(f64::INFINITY).total_cmp(&b.limit.unwrap_or(f64::INFINITY)))
}

/// The limit and the statistics of a control group, of version 1 or 2.
fn read_group(folder: &Path) -> Option<ControlGroup> {
    let stat = std::fs::read_to_string(folder.join("cpu.stat")).ok()?;
    let field = |name: &str| {
        let value = stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or(0)
    };
    let number = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<f64>().ok();
    let limit = match std::fs::read_to_string(folder.join("cpu.max")) {
        Ok(text) => {
            let mut words = text.split_whitespace().map(str::parse::<f64>);
            words.next().and_then(Result::ok).zip(words.next().and_then(Result::ok))
        }
        Err(_) => number("cpu.cfs_quota_us").zip(number("cpu.cfs_period_us")),
    };
    // Version 1 counts nanoseconds, version 2 microseconds.
    let stopped_ns = field("throttled_time").max(1000 * field("throttled_usec"));
    let limit = limit.filter(|(quota, period)| *quota > 0.0 && *period > 0.0).map(|(quota, period)| quota / period);
    Some(ControlGroup { limit, periods: [field("nr_periods"), field("nr_throttled"), stopped_ns] })
}
