//! Causes that are the machine: cores that others take or that are slowed, memory that runs short
//! or leaks, neighbours.

use super::{Findings, computes, verdict};
use crate::verdict::{Advice, Cause, Evidence, Severity, Unit, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use trainyard_base::{format_bytes, median};
use trainyard_record::monitor::{Gpu, Sample};

/// The share of its cores that a process must lose before this is reported.
const LOST_MIN: f64 = 0.02;

/// The number of cores that other programs or other virtual machines took. It counts the time in
/// which threads of the run waited for a core that others used. Time that threads of the run take
/// from each other does not count.
fn stolen(sample: &Sample) -> f64 {
    let cpu = &sample.cpu;
    let others = cpu.run_delay.min(cpu.others);
    let all = cpu.process + cpu.others;
    let hypervisor = if all > 0.0 { cpu.steal * cpu.process / all } else { cpu.steal };
    // A run that mostly sleeps loses no more time than its threads waited.
    share(others + hypervisor, cpu.process).min(others + hypervisor)
}

fn share(lost: f64, used: f64) -> f64 {
    if lost + used > 0.0 { lost / (lost + used) } else { 0.0 }
}

/// Cores that the control group withheld.
fn withheld(sample: &Sample) -> f64 {
    share(sample.cpu.throttled_cores.unwrap_or(0.0), sample.cpu.process)
}

/// Steps as they would have been if compute had not lost its share of the cores.
fn without(findings: &Findings<'_>, lost: impl Fn(&Sample) -> f64) -> Option<crate::verdict::Saving> {
    findings.saving(|index, site, own| {
        if computes(site.instruction) {
            let kept = 1.0 - findings.steps[index].sample.map_or(0.0, &lost);
            own.took_s *= kept;
            own.late_s *= kept;
        }
    })
}

/// The samples that belong to measured steps.
fn samples<'f>(findings: &'f Findings<'_>) -> impl Iterator<Item = &'f Sample> {
    let mut seen: BTreeMap<u64, &Sample> = BTreeMap::new();
    for sample in findings.steps.iter().filter_map(|step| step.sample) {
        seen.insert(sample.unix_s.to_bits(), sample);
    }
    seen.into_values()
}

/// Mean over samples, because a cause may come and go.
fn mean_of_samples(findings: &Findings<'_>, value: impl Fn(&Sample) -> f64) -> f64 {
    let count = samples(findings).count().max(1) as f64;
    samples(findings).map(value).sum::<f64>() / count
}

/// Other programs, or other machines on the same host, use the cores that the run counts on.
pub fn stolen_cores(findings: &Findings<'_>) -> Option<Verdict> {
    if mean_of_samples(findings, stolen) < LOST_MIN {
        return None;
    }
    let evidence = vec![
        Evidence::new("cores that other programs used", mean_of_samples(findings, |s| s.cpu.others), Unit::Count),
        Evidence::new("cores that the hypervisor gave away", mean_of_samples(findings, |s| s.cpu.steal), Unit::Count),
        Evidence::new(
            "threads of the run that waited for a core",
            mean_of_samples(findings, |s| s.cpu.run_delay),
            Unit::Count,
        ),
        Evidence::new("cores that the run got", mean_of_samples(findings, |s| s.cpu.process), Unit::Count),
        Evidence::new("share of its cores that it lost", mean_of_samples(findings, stolen), Unit::Share),
    ];
    let advice = vec![
        Advice::new("end the other programs, or keep them off these cores (cpusets, taskset)"),
        Advice::set("or count on fewer cores", "compute.threads"),
    ];
    let summary = "Other programs take cores from the run.";
    verdict(Cause::StolenCores, without(findings, stolen), summary, evidence, advice)
}

/// The share of its clock that the slowest GPU lost to a limit of power or temperature.
fn slowed_gpu(sample: &Sample) -> f64 {
    sample.gpus.iter().map(Gpu::clock_lost).fold(0.0, f64::max)
}

/// Cores are withheld by a limit of the control group, or run below their clock; or GPUs do.
pub fn throttled(findings: &Findings<'_>) -> Option<Verdict> {
    if samples(findings).any(|sample| !sample.gpus.is_empty()) {
        return throttled_gpu(findings);
    }
    let clocks = || samples(findings).filter_map(|sample| sample.cpu.mhz);
    let fastest = findings.run.samples.iter().filter_map(|sample| sample.cpu.mhz).fold(0.0, f64::max);
    let slowed = move |sample: &Sample| match sample.cpu.mhz {
        Some(mhz) if fastest > 0.0 && mhz < 0.95 * fastest => 1.0 - mhz / fastest,
        _ => 0.0,
    };
    let lost = |sample: &Sample| 1.0 - (1.0 - withheld(sample)) * (1.0 - slowed(sample));
    if mean_of_samples(findings, lost) < LOST_MIN {
        return None;
    }
    let mut evidence =
        vec![Evidence::new("share of its cores that the run lost", mean_of_samples(findings, lost), Unit::Share)];
    let mut advice = Vec::new();
    let limit = median(samples(findings).filter_map(|sample| sample.cpu.limit));
    if mean_of_samples(findings, withheld) >= LOST_MIN {
        let stopped = mean_of_samples(findings, |sample| sample.cpu.throttled.unwrap_or(0.0));
        evidence.push(Evidence::new("scheduling periods in which the limit was reached", stopped, Unit::Share));
        evidence.push(Evidence::new(
            "cores that the run used",
            mean_of_samples(findings, |s| s.cpu.process),
            Unit::Count,
        ));
        if let Some(limit) = limit {
            evidence.push(Evidence::new("cores that the control group allows", limit, Unit::Count));
            let threads = (limit.floor() as u64).max(1);
            advice.push(Advice::set("count on the cores that the limit allows", format!("compute.threads={threads}")));
        }
        advice.insert(0, Advice::new("raise the CPU limit of the control group (container, slice, job)"));
    }
    if mean_of_samples(findings, slowed) >= LOST_MIN {
        let mean = clocks().sum::<f64>() / clocks().count().max(1) as f64;
        evidence.push(Evidence::new("clock of the cores over the fastest that was seen", mean / fastest, Unit::Ratio));
        advice.push(Advice::new("look at cooling, power limits and the frequency governor"));
    }
    verdict(Cause::Throttled, without(findings, lost), "Cores are slowed or withheld.", evidence, advice)
}

/// GPUs run below their clock, for the reasons that their driver gives.
fn throttled_gpu(findings: &Findings<'_>) -> Option<Verdict> {
    let slowed = || samples(findings).flat_map(|sample| &sample.gpus).filter(|gpu| !gpu.slowed.is_empty());
    let worst = slowed().max_by(|a, b| a.clock_lost().total_cmp(&b.clock_lost()))?;
    let lost = mean_of_samples(findings, slowed_gpu);
    if lost < LOST_MIN {
        return None;
    }
    let of_worst = Evidence::new(
        format!("clock of GPU {} that is slowed by: {}", worst.index, worst.slowed.join(", ")),
        1.0 - worst.clock_lost(),
        Unit::Ratio,
    );
    let mut evidence =
        vec![Evidence::new("share of its highest clock that the slowest GPU lost", lost, Unit::Share), of_worst];
    let hottest = slowed().filter_map(|gpu| gpu.temperature_c).fold(f64::NEG_INFINITY, f64::max);
    if hottest.is_finite() {
        evidence.push(Evidence::new("degrees Celsius of the hottest of them", hottest, Unit::Count));
    }
    let advice = vec![
        Advice::new("look at the power limit and the cooling of the named GPU (nvidia-smi -q -d PERFORMANCE)"),
        Advice::new("leave the host out if others of the same kind run faster"),
    ];
    verdict(Cause::Throttled, without(findings, slowed_gpu), "GPUs run below their clock.", evidence, advice)
}

/// Compute is slower while others are active, though they take no core: they use memory bandwidth,
/// caches or disks.
pub fn noisy_neighbour(findings: &Findings<'_>) -> Option<Verdict> {
    let active = |sample: &Sample| {
        let disk = (sample.disk.read + sample.disk.write) - (sample.disk.process_read + sample.disk.process_write);
        sample.cpu.others > 0.3 || (disk > 50e6 && sample.disk.busy > 0.3)
    };
    let crowded = |sample: &Sample| stolen(sample) > 0.1 || withheld(sample) > LOST_MIN;
    let busy = |quiet: bool| {
        let steps = findings.steps.iter().filter(|step| step.sample.is_some_and(|s| active(s) != quiet && !crowded(s)));
        let all: Vec<f64> = steps.map(|step| step.replay.own[0].iter().map(|own| own.took_s).sum()).collect();
        (median(all.iter().copied()), all.len())
    };
    let ((noisy, noisy_steps), (quiet, quiet_steps)) = (busy(false), busy(true));
    let ratio = noisy? / quiet?;
    if ratio < 1.05 || noisy_steps < 3 || quiet_steps < 3 {
        return None;
    }
    let saving = findings.saving(|index, _, own| {
        if findings.steps[index].sample.is_some_and(|sample| active(sample) && !crowded(sample)) {
            own.took_s /= ratio;
        }
    });
    let evidence = vec![
        Evidence::new("work of a step while others are active, over that while they are not", ratio, Unit::Ratio),
        Evidence::new(
            "steps while others were active",
            noisy_steps as f64 / (noisy_steps + quiet_steps) as f64,
            Unit::Share,
        ),
        Evidence::new("cores that they used", mean_of_samples(findings, |s| s.cpu.others), Unit::Count),
        Evidence::new(
            "disk traffic of everybody",
            mean_of_samples(findings, |s| s.disk.read + s.disk.write),
            Unit::BytesPerSecond,
        ),
    ];
    let advice =
        vec![Advice::new("move the other programs to another memory node, disk or machine, or to other hours")];
    verdict(Cause::NoisyNeighbour, saving, "The run is slower while other programs are active.", evidence, advice)
}

/// The machine runs out of memory: pages go to swap or are read again.
pub fn memory_pressure(findings: &Findings<'_>) -> Option<Verdict> {
    let pressure = |sample: &Sample| match sample.memory.swapped_pages > 0.0 || sample.memory.major_faults > 100.0 {
        true => sample.pressure.memory.unwrap_or(0.0),
        false => 0.0,
    };
    if mean_of_samples(findings, pressure) < LOST_MIN {
        return None;
    }
    let saving = findings.saving(|index, _, own| {
        let kept = 1.0 - findings.steps[index].sample.map_or(0.0, pressure);
        own.took_s *= kept;
        own.late_s *= kept;
    });
    let available = median(samples(findings).map(|sample| sample.memory.available_bytes as f64)).unwrap_or(0.0);
    let evidence = vec![
        Evidence::new("time in which tasks waited for memory (PSI)", mean_of_samples(findings, pressure), Unit::Share),
        Evidence::new(
            "pages to or from swap, a second",
            mean_of_samples(findings, |s| s.memory.swapped_pages),
            Unit::Count,
        ),
        Evidence::new(
            "page faults that waited for a disk, a second",
            mean_of_samples(findings, |s| s.memory.major_faults),
            Unit::Count,
        ),
        Evidence::new("memory that was available", available, Unit::Bytes),
    ];
    let advice = vec![
        Advice::set("keep fewer activations", "memory.activation_checkpointing=\"full\""),
        Advice::set("smaller micro-batches, more of them", "training.micro_batch_size"),
        Advice::set("shard state over more ranks", "parallel.zero_stage=3"),
    ];
    verdict(Cause::MemoryPressure, saving, "The machine runs out of memory and waits for swap.", evidence, advice)
}

/// Memory of the process grows from step to step.
pub fn leak(findings: &Findings<'_>) -> Option<Verdict> {
    let samples = &findings.run.samples;
    // A resumed run is another process, whose memory begins anew.
    let begin =
        samples.windows(2).rposition(|pair| pair[1].step < pair[0].step || pair[1].unix_s - pair[0].unix_s > 30.0);
    let samples = &samples[begin.map_or(0, |at| at + 1)..];
    let samples = &samples[samples.len() / 4..];
    if samples.len() < 12 {
        return None;
    }
    let outside = |sample: &Sample| {
        let known = sample.memory.rss_file_bytes + sample.memory.pool_reserved_bytes;
        sample.memory.rss_bytes as f64 - known as f64
    };
    let growth = Growth::of(samples, outside);
    let purposes: BTreeSet<&String> = samples.iter().flat_map(|sample| sample.memory.pool_bytes.keys()).collect();
    let of_purpose = |name: &String| {
        let growth = Growth::of(samples, |sample| sample.memory.pool_bytes.get(name).copied().unwrap_or(0) as f64);
        (name.clone(), growth)
    };
    let of_pool = purposes.into_iter().map(of_purpose).max_by(|a, b| a.1.bytes.total_cmp(&b.1.bytes));
    let (what, growth) = match of_pool {
        Some((name, pool)) if pool.is_leak() && pool.bytes > growth.bytes => (format!("the pool's {name}"), pool),
        _ if growth.is_leak() => ("memory outside of the pool".to_owned(), growth),
        _ => return None,
    };
    let last = samples.last()?;
    let left = last.memory.available_bytes as f64 / growth.per_second.max(1.0);
    let evidence = vec![
        Evidence::new(format!("growth of {what}, a step"), growth.per_step, Unit::Bytes),
        Evidence::new("growth while it was watched", growth.bytes, Unit::Bytes),
        Evidence::new("share of the samples in which it grew", growth.rising, Unit::Share),
        Evidence::new("until memory is full at this pace", left, Unit::Seconds),
    ];
    // Before the memory is full a leak costs no time, so it has no saving.
    let severity = if left < 24.0 * 3600.0 { Severity::Critical } else { Severity::Warning };
    let summary = format!("{what} grows by {} a step.", format_bytes(growth.per_step as u64));
    let summary = summary[..1].to_uppercase() + &summary[1..];
    let advice = vec![
        Advice::new("restart from the last checkpoint before the memory is full"),
        Advice::new("if you wrote code of your own for this run, look there for what is kept from step to step"),
    ];
    Some(Verdict { cause: Cause::Leak, severity, summary, evidence, saving: None, advice })
}

/// The growth of a number of bytes over samples.
struct Growth {
    bytes: f64,
    per_step: f64,
    per_second: f64,
    /// Share of the pairs of neighbouring windows in which it grew.
    rising: f64,
}

impl Growth {
    fn of(samples: &[Sample], bytes: impl Fn(&Sample) -> f64) -> Growth {
        // Twelve windows, each with its least value: what a step takes and gives back is left out.
        let windows: Vec<f64> = (0..12)
            .map(|n| {
                let window = &samples[n * samples.len() / 12..(n + 1) * samples.len() / 12];
                window.iter().map(&bytes).fold(f64::INFINITY, f64::min)
            })
            .collect();
        let grown = windows[11] - windows[0];
        let rising = windows.windows(2).filter(|pair| pair[1] > pair[0]).count() as f64 / 11.0;
        let (first, last) = (&samples[0], &samples[samples.len() - 1]);
        let steps = last.step.saturating_sub(first.step).max(1) as f64;
        Growth {
            bytes: grown,
            per_step: grown / steps,
            per_second: grown / (last.unix_s - first.unix_s).max(1e-9),
            rising,
        }
    }

    /// A leak grows in nearly every window, by more than what allocators keep.
    fn is_leak(&self) -> bool {
        self.bytes > f64::from(8 << 20) && self.rising >= 0.8
    }
}
