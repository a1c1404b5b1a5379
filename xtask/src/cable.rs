//! Two hosts on one machine: network namespaces that a virtual cable (veth) joins, whose rate `tc …
//! tbf`
//! limits. It needs root on Linux, and the programs `ip` and `tc` (iproute2).

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The network of the cable.
pub const NETWORK: &str = "10.99.0";

/// The name of the namespace at an end of the cable.
pub fn namespace(end: usize) -> String {
    format!("trainyard{end}")
}

/// The address there.
pub fn address(end: usize) -> String {
    format!("{NETWORK}.{}", end + 1)
}

/// Two namespaces and the cable between them. They are removed on drop.
pub struct Cable;

impl Cable {
    /// Lays the cable, as fast as the kernel allows or limited to `bits_per_s` in each direction.
    pub fn new(bits_per_s: Option<u64>) -> Result<Cable> {
        // Removes the remains of an interrupted measurement.
        Cable::remove();
        let cable = Cable;
        let ip = |arguments: &str| run_command(Command::new("ip").args(arguments.split(' ')));
        for end in 0..2 {
            ip(&format!("netns add {}", namespace(end))).context(
                "no network namespace can be made: this measurement needs root on Linux with CAP_NET_ADMIN and CAP_SYS_ADMIN, and iproute2",
            )?;
        }
        let [first, second] = [0, 1].map(namespace);
        ip(&format!("link add cable netns {first} type veth peer name cable netns {second}"))?;
        for end in 0..2 {
            let name = namespace(end);
            ip(&format!("-n {name} addr add {}/24 dev cable", address(end)))?;
            ip(&format!("-n {name} link set cable up"))?;
            ip(&format!("-n {name} link set lo up"))?;
            if let Some(rate) = bits_per_s {
                // A bucket of ten milliseconds: the kernel's clock is coarser than a packet.
                let bucket = (rate / 8 / 100).max(64 << 10);
                let shape = format!(
                    "netns exec {name} tc qdisc add dev cable root tbf rate {rate}bit burst {bucket} latency 20ms"
                );
                ip(&shape).context("the cable cannot be slowed (kernel module sch_tbf, program tc)")?;
            }
        }
        Ok(cable)
    }

    /// Bytes that the first end has sent so far.
    pub fn bytes_sent(&self) -> Result<u64> {
        let file = "/sys/class/net/cable/statistics/tx_bytes";
        let said = run_command(Command::new("ip").args(["netns", "exec", &namespace(0), "cat", file]))?;
        said.trim().parse().with_context(|| format!("{file}: {said}"))
    }

    fn remove() {
        for end in 0..2 {
            // It may not exist.
            let _ = Command::new("ip").args(["netns", "del", &namespace(end)]).stderr(Stdio::null()).status();
        }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        Cable::remove();
    }
}

/// Runs a command and returns its output.
pub fn run_command(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let tail: Vec<&str> = said.lines().rev().take(8).collect();
        bail!("{command:?}: {}\n{}", output.status, tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
