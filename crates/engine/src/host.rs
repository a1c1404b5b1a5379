//! The host memory available to this process: the machine's, or less if a container, a batch system
//! or a service limits it.
//!
//! Only Linux is supported. The machine's memory is in `/proc/meminfo`. Limits are in the control
//! groups of the process and all their ancestors. Both versions of control groups are read, at the
//! places where systems and containers mount them.

use std::path::Path;

/// Upper limit for the bytes that a process holds beside the predicted memory of a step: code,
/// tokenizer, panels of products, the loader's queue, and memory that the pool keeps for reuse. 80
/// to 130 MiB were measured (docs/LOG.md, 2026-11-23).
pub const ASIDE: usize = 192 << 20;

/// The host's memory, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostMemory {
    /// The installed memory, or the limit of the process if that is lower.
    pub total: usize,
    /// Swap space beyond that.
    pub swap: usize,
    /// Memory available without swapping.
    pub available: usize,
    /// True if `total` is a limit of the process below the installed memory.
    pub is_limit: bool,
}

impl HostMemory {
    /// The origin of `total`, in words.
    pub fn name(&self) -> &'static str {
        if self.is_limit { "the memory limit of this container or job" } else { "this machine's memory" }
    }

    /// The memory for steps: `total` without [`ASIDE`].
    pub fn for_steps(&self) -> usize {
        self.total.saturating_sub(ASIDE)
    }

    fn bound(&mut self, group: Group) {
        if group.limit < self.total {
            *self = HostMemory { total: group.limit, is_limit: true, ..*self };
        }
        self.swap = self.swap.min(group.swap);
        self.available = self.available.min(group.limit.saturating_sub(group.held));
    }
}

/// The host's memory; None if the system does not say (Linux does).
pub fn memory() -> Option<HostMemory> {
    memory_of(Path::new("/"))
}

fn memory_of(root: &Path) -> Option<HostMemory> {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok()? << 10)
    };
    let swap = bytes("SwapTotal").unwrap_or(0);
    let mut memory = HostMemory { total: bytes("MemTotal")?, swap, available: bytes("MemAvailable")?, is_limit: false };
    groups(root).into_iter().for_each(|group| memory.bound(group));
    Some(memory)
}

/// One control group with a limit.
struct Group {
    limit: usize,
    /// Swap beyond the limit.
    swap: usize,
    /// Memory that its processes hold, without cached files that the system drops first.
    held: usize,
}

/// File names of one version of control groups.
struct Files {
    limit: &'static str,
    held: &'static str,
    /// Key in `memory.stat` of the cached files that were not used lately.
    droppable: &'static str,
}

const V1: Files =
    Files { limit: "memory.limit_in_bytes", held: "memory.usage_in_bytes", droppable: "total_inactive_file" };
const V2: Files = Files { limit: "memory.max", held: "memory.current", droppable: "inactive_file" };

/// The groups that limit this process, including ancestors.
fn groups(root: &Path) -> Vec<Group> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mount, files) = match controllers {
            "" => ("sys/fs/cgroup", V2),
            _ if controllers.split(',').any(|controller| controller == "memory") => ("sys/fs/cgroup/memory", V1),
            _ => continue,
        };
        // Inside a container the path may be the host's; the container's own group is at the mount
        // point.
        for ancestor in Path::new(path.trim_start_matches('/')).ancestors() {
            groups.extend(group(&root.join(mount).join(ancestor), &files));
        }
    }
    groups
}

fn group(folder: &Path, files: &Files) -> Option<Group> {
    let read = |name: &str| -> Option<String> { std::fs::read_to_string(folder.join(name)).ok() };
    let number = |name: &str| -> Option<usize> { read(name)?.trim().parse().ok() };
    // Without a limit the file has "max", or, in version 1, a number beyond all memory.
    let limit = number(files.limit)?;
    let swap = match number("memory.memsw.limit_in_bytes") {
        Some(both) => both.saturating_sub(limit),
        None => number("memory.swap.max").unwrap_or(usize::MAX),
    };
    let stat = read("memory.stat").unwrap_or_default();
    let droppable = stat.lines().find_map(|line| line.strip_prefix(files.droppable)?.trim().parse().ok()).unwrap_or(0);
    let held = number(files.held).unwrap_or(0).saturating_sub(droppable);
    Some(Group { limit, swap, held })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// A root folder with the given files.
    fn root(files: &[(&str, String)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let meminfo =
            "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\nSwapTotal:       2097152 kB\n";
        for (name, text) in files.iter().chain(&[("proc/meminfo", meminfo.to_owned())]) {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    fn memory(files: &[(&str, String)]) -> HostMemory {
        memory_of(root(files).path()).unwrap()
    }

    #[test]
    fn a_process_without_limits_has_the_machine() {
        let machine = HostMemory { total: 16384 * MIB, swap: 2048 * MIB, available: 8192 * MIB, is_limit: false };
        assert_eq!(memory(&[]), machine);
        let unlimited = [
            ("proc/self/cgroup", "4:memory:/a\n0::/b\n".to_owned()),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n".to_owned()),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", format!("{}\n", 100 * MIB)),
            ("sys/fs/cgroup/b/memory.max", "max\n".to_owned()),
            ("sys/fs/cgroup/b/memory.current", "1\n".to_owned()),
        ];
        assert_eq!(memory(&unlimited), machine);
        assert_eq!(memory_of(Path::new("/nowhere")), None);
    }

    #[test]
    fn a_container_of_version_2_has_its_limit_less_what_it_holds() {
        let limited = [
            ("proc/self/cgroup", "0::/\n".to_owned()),
            ("sys/fs/cgroup/memory.max", format!("{}\n", 4096 * MIB)),
            ("sys/fs/cgroup/memory.swap.max", "0\n".to_owned()),
            ("sys/fs/cgroup/memory.current", format!("{}\n", 1536 * MIB)),
            ("sys/fs/cgroup/memory.stat", format!("anon 5\ninactive_file {}\nactive_file 7\n", 512 * MIB)),
        ];
        let expected = HostMemory { total: 4096 * MIB, swap: 0, available: 3072 * MIB, is_limit: true };
        assert_eq!(memory(&limited), expected);
    }

    #[test]
    fn a_job_is_limited_by_every_group_above_it() {
        // Nested as by Slurm: the step's own group is unlimited, the job's is limited, and the
        // host's holds much.
        let limited = [
            ("proc/self/cgroup", "7:cpu,cpuacct:/\n4:memory:/slurm/job_1/step_0\n1:name=systemd:/\n".to_owned()),
            ("sys/fs/cgroup/memory/slurm/job_1/step_0/memory.limit_in_bytes", "9223372036854771712\n".to_owned()),
            ("sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes", format!("{}\n", 6144 * MIB)),
            ("sys/fs/cgroup/memory/slurm/job_1/memory.memsw.limit_in_bytes", format!("{}\n", 7168 * MIB)),
            ("sys/fs/cgroup/memory/slurm/job_1/memory.usage_in_bytes", format!("{}\n", 1024 * MIB)),
            ("sys/fs/cgroup/memory/slurm/job_1/memory.stat", format!("total_inactive_file {}\n", 256 * MIB)),
            ("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", format!("{}\n", 12288 * MIB)),
            ("sys/fs/cgroup/memory/slurm/memory.usage_in_bytes", format!("{}\n", 10240 * MIB)),
        ];
        let expected = HostMemory { total: 6144 * MIB, swap: 1024 * MIB, available: 2048 * MIB, is_limit: true };
        assert_eq!(memory(&limited), expected);
    }

    #[test]
    fn a_container_that_sees_its_hosts_path_finds_its_own_group() {
        let limited = [
            ("proc/self/cgroup", "4:memory:/docker/0123abcd\n".to_owned()),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", format!("{}\n", 1024 * MIB)),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", format!("{}\n", 2048 * MIB)),
        ];
        let expected = HostMemory { total: 1024 * MIB, swap: 2048 * MIB, available: 0, is_limit: true };
        assert_eq!(memory(&limited), expected);
    }
}
