//! Runs AMX instructions on CPUs that lack them, so that the machine code of the tile kernels is
//! tested everywhere.
//!
//! An instruction that the CPU does not know raises SIGILL. The handler decodes the one at fault
//! (VEX encoding, Intel SDM volume 2), does what the manual's pseudocode says on tiles in memory,
//! and steps over it. Each costs a microsecond or so.

use std::cell::UnsafeCell;
use std::sync::Once;

const ROWS: usize = 16;
const BYTES: usize = 64;

#[derive(Clone, Copy)]
struct State {
    configured: bool,
    rows: [u8; 8],
    bytes_per_row: [u16; 8],
    tiles: [[[u8; BYTES]; ROWS]; 8],
}

const RELEASED: State =
    State { configured: false, rows: [0; 8], bytes_per_row: [0; 8], tiles: [[[0; BYTES]; ROWS]; 8] };

thread_local! {
    static STATE: UnsafeCell<State> = const { UnsafeCell::new(RELEASED) };
}

/// From now on, AMX instructions work in this process.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler has the signature that SA_SIGINFO asks for.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()), 0);
        }
    });
}

extern "C" fn handler(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a `ucontext_t`; the state is this thread's, and the handler does
    // not interrupt itself.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let done = STATE.with(|state| execute(&mut *state.get(), registers));
        if !done {
            // Not ours: die of it.
            libc::signal(libc::SIGILL, libc::SIG_DFL);
        }
    }
}

/// `gregs` index of each general register by its number in encodings.
const REGISTERS: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Executes the instruction at the instruction pointer if it is one of AMX's.
///
/// # Safety
/// The instruction pointer must point at code; memory operands must be valid, as for the
/// instruction itself.
unsafe fn execute(state: &mut State, registers: &mut [i64; 23]) -> bool {
    let ip = registers[libc::REG_RIP as usize] as *const u8;
    // SAFETY: instructions are at most 15 bytes, of which only decoded ones are read; operands are
    // the program's own.
    unsafe {
        if *ip != 0xc4 {
            return false;
        }
        let (vex1, vex2, opcode, modrm) = (*ip.add(1), *ip.add(2), *ip.add(3), *ip.add(4));
        let prefix = vex2 & 3;
        let (mode, reg, rm) = (modrm >> 6, (modrm >> 3 & 7) as usize, (modrm & 7) as usize);
        if vex1 & 0x1f != 2 || vex2 & 0x84 != 0 {
            return false;
        }
        let mut length = 5;
        // Memory operands: base plus displacement, and the index register with its scale.
        let (mut address, mut stride) = (0i64, 0i64);
        if mode != 3 {
            let extend = |low: usize, bit: u8| low | usize::from(vex1 >> bit & 1 == 0) << 3;
            let mut base = extend(rm, 5);
            if rm == 4 {
                let sib = *ip.add(5);
                length += 1;
                base = extend((sib & 7) as usize, 5);
                let index = extend((sib >> 3 & 7) as usize, 6);
                if index != 4 {
                    stride = registers[REGISTERS[index] as usize] << (sib >> 6);
                }
            }
            if mode == 0 && base & 7 == 5 {
                return false;
            }
            address = registers[REGISTERS[base] as usize];
            if mode == 1 {
                address += *ip.add(length).cast::<i8>() as i64;
                length += 1;
            } else if mode == 2 {
                address += ip.add(length).cast::<i32>().read_unaligned() as i64;
                length += 4;
            }
        }
        match (opcode, prefix, mode) {
            // ldtilecfg
            (0x49, 0, 0..=2) => {
                let config = address as *const u8;
                *state = RELEASED;
                state.configured = *config == 1;
                for tile in 0..8 {
                    state.bytes_per_row[tile] = config.add(16 + 2 * tile).cast::<u16>().read_unaligned();
                    state.rows[tile] = *config.add(48 + tile);
                }
            }
            // tilerelease
            (0x49, 0, 3) => *state = RELEASED,
            _ if !state.configured => return false,
            // tilezero
            (0x49, 3, 3) => state.tiles[reg] = [[0; BYTES]; ROWS],
            // tileloadd, tileloaddt1
            (0x4b, 3 | 1, 0..=2) => {
                let bytes = state.bytes_per_row[reg] as usize;
                state.tiles[reg] = [[0; BYTES]; ROWS];
                for row in 0..state.rows[reg] as usize {
                    let from = (address + row as i64 * stride) as *const u8;
                    from.copy_to_nonoverlapping(state.tiles[reg][row].as_mut_ptr(), bytes);
                }
            }
            // tilestored
            (0x4b, 2, 0..=2) => {
                for row in 0..state.rows[reg] as usize {
                    let to = (address + row as i64 * stride) as *mut u8;
                    let bytes = state.bytes_per_row[reg] as usize;
                    to.copy_from_nonoverlapping(state.tiles[reg][row].as_ptr(), bytes);
                }
            }
            // tdpbssd
            (0x5e, 3, 3) => multiply_add_integers(state, reg, rm, (!vex2 >> 3 & 15) as usize),
            // tdpbf16ps
            (0x5c, 2, 3) => multiply_add(state, reg, rm, (!vex2 >> 3 & 15) as usize),
            _ => return false,
        }
        registers[libc::REG_RIP as usize] += length as i64;
        true
    }
}

/// `sums += a b`: even and odd products are summed apart, then together, then to the sums, as the
/// manual's pseudocode does.
fn multiply_add(state: &mut State, sums: usize, a: usize, b: usize) {
    let wide = |bytes: &[u8], i: usize| f32::from_bits((bytes[2 * i] as u32) << 16 | (bytes[2 * i + 1] as u32) << 24);
    let (a_tile, b_tile) = (state.tiles[a], state.tiles[b]);
    for m in 0..state.rows[sums] as usize {
        let mut products = [0f32; 32];
        for k in 0..state.bytes_per_row[a] as usize / 4 {
            let pair = [wide(&a_tile[m], 2 * k), wide(&a_tile[m], 2 * k + 1)];
            for (i, sum) in products.iter_mut().enumerate() {
                *sum += pair[i % 2] * wide(&b_tile[k], i);
            }
        }
        for n in 0..state.bytes_per_row[sums] as usize / 4 {
            let at = &mut state.tiles[sums][m][4 * n..4 * n + 4];
            let sum = f32::from_le_bytes([at[0], at[1], at[2], at[3]]) + (products[2 * n] + products[2 * n + 1]);
            at.copy_from_slice(&sum.to_le_bytes());
        }
    }
}

/// `sums += a b` in `i32`, of four neighbours that are `i8` at a time.
fn multiply_add_integers(state: &mut State, sums: usize, a: usize, b: usize) {
    let (a_tile, b_tile) = (state.tiles[a], state.tiles[b]);
    for m in 0..state.rows[sums] as usize {
        for n in 0..state.bytes_per_row[sums] as usize / 4 {
            let at = &mut state.tiles[sums][m][4 * n..4 * n + 4];
            let mut sum = i32::from_le_bytes([at[0], at[1], at[2], at[3]]);
            for k in 0..state.bytes_per_row[a] as usize / 4 {
                for i in 0..4 {
                    let [a, b] = [a_tile[m][4 * k + i], b_tile[k][4 * n + i]].map(|byte| i32::from(byte as i8));
                    sum = sum.wrapping_add(a * b);
                }
            }
            at.copy_from_slice(&sum.to_le_bytes());
        }
    }
}
