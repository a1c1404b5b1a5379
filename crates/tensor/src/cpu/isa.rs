//! The ladder of instruction sets, chosen at run time.
//!
//! Each rung includes the ones below. Kernels that gain nothing from a rung use the highest one
//! below it: an elementwise kernel has `Portable`, `Avx2` and `Avx512` forms only. Setting
//! `TRAINYARD_ISA` (or `compute.isa`) to a lower rung forces it, which is how every rung is tested
//! on one machine; asking for a rung the machine lacks is an error.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// A rung of the CPU kernel ladder; comparison is by capability.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Isa {
    /// Plain Rust, any CPU.
    Portable,
    /// AVX2, FMA and F16C (Haswell and later, Zen and later).
    Avx2,
    /// AVX-512 F, BW, VL, DQ (Skylake-SP and later, Zen 4 and later).
    Avx512,
    /// AVX-512 with `vdpbf16ps` and `vcvtneps2bf16` (Cooper Lake, Sapphire Rapids, Zen 4).
    Avx512Bf16,
    /// AMX tiles with `tdpbf16ps` (Sapphire Rapids and later).
    AmxBf16,
}

/// Why an instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The name is none of the ladder's.
    #[error("unknown instruction set `{0}`: known ones are portable, avx2, avx512, avx512-bf16, amx-bf16, and auto")]
    Unknown(String),
    /// The machine does not have it.
    #[error(
        "instruction set `{asked}` was asked for, but this CPU's best is `{best}`: choose that or a lower one, or `auto`"
    )]
    Unsupported {
        /// The rung that was asked for.
        asked: Isa,
        /// The best rung of the machine.
        best: Isa,
    },
}

impl Isa {
    /// Every rung, lowest first.
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::AmxBf16];

    /// The rungs that this machine can run, lowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect())
    }

    /// The rungs that tests can run here. Those up to `highest` that they cannot are said.
    #[cfg(test)]
    pub(crate) fn tested(highest: Isa) -> impl Iterator<Item = Isa> {
        let missing = Isa::ALL.into_iter().filter(|isa| (Isa::detect()..=highest).contains(isa)).skip(1);
        let missing: Vec<&str> = missing.map(Isa::name).collect();
        if !missing.is_empty() {
            trainyard_testing::skip_part(format!("this processor has no {}", missing.join(", ")));
        }
        Isa::available()
    }

    /// The highest rung that this CPU and operating system support; detected once.
    pub fn detect() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(detect)
    }

    /// The rung named by `choice` (`auto` = the highest), or an error that says what the machine
    /// has.
    pub fn choose(choice: &str) -> Result<Isa, IsaError> {
        if choice == "auto" {
            return Ok(Isa::detect());
        }
        let asked: Isa = choice.parse()?;
        let best = Isa::detect();
        if asked > best { Err(IsaError::Unsupported { asked, best }) } else { Ok(asked) }
    }

    /// The name used in settings and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::AmxBf16 => "amx-bf16",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Isa, IsaError> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| IsaError::Unknown(name.to_owned()))
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")) {
        return Isa::Portable;
    }
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq");
    if !avx512 {
        return Isa::Avx2;
    }
    if !is_x86_feature_detected!("avx512bf16") {
        return Isa::Avx512;
    }
    if amx_bf16() { Isa::AmxBf16 } else { Isa::Avx512Bf16 }
}

/// True if AMX bf16 is present and the kernel lets this process use tile data.
///
/// The standard macro does not know AMX on stable Rust, so CPUID is read directly: leaf 7, EDX bit
/// 22 (amx-bf16) and bit 24 (amx-tile). Linux then wants permission to be asked for once per
/// process, because the tile state is 8 KiB per thread:
/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`, Documentation/arch/x86/xstate.rst.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_bf16() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    if __cpuid(0).eax < 7 {
        return false;
    }
    let edx = __cpuid_count(7, 0).edx;
    let present = edx & (1 << 22) != 0 && edx & (1 << 24) != 0;
    // SAFETY: the call takes two integers and touches no memory of ours; it fails with an error on
    // older kernels.
    present && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_bf16() -> bool {
    false
}

/// True if this CPU has `vpdpbusd` on vectors of AVX-512 (Cascade Lake and later, Zen 4 and later).
/// Some CPUs without `vdpbf16ps` have it, so it is no rung of the ladder.
pub(super) fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        Isa::detect() >= Isa::Avx512 && is_x86_feature_detected!("avx512vnni")
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// True if this CPU has AMX with products of 8-bit integers, `tdpbssd`, beside those of bf16.
pub(super) fn has_amx_int8() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // CPUID leaf 7, EDX bit 25.
        Isa::detect() >= Isa::AmxBf16 && std::arch::x86_64::__cpuid_count(7, 0).edx & (1 << 25) != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// True if `vdpbf16ps` does more multiply-adds a cycle than `vfmadd231ps` on this CPU: AMD's do,
/// Intel's do not.
pub(super) fn pairs_are_fast() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::sync::OnceLock;
        static AMD: OnceLock<bool> = OnceLock::new();
        *AMD.get_or_init(|| std::arch::x86_64::__cpuid(0).ebx == u32::from_le_bytes(*b"Auth"))
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_order_by_capability() {
        for pair in Isa::ALL.windows(2) {
            assert!(pair[0] < pair[1]);
        }
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        assert!(matches!(Isa::choose("sse9"), Err(IsaError::Unknown(_))));
        assert_eq!(Isa::choose("auto"), Ok(Isa::detect()));
    }
}
