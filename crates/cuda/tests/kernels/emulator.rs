//! The emulation's own tests: it notices every kind of fault that it exists for.

use super::device::{Buffer, both_orders, load, run};
use trainyard_cuda::kernels::{File, Float, Launch};

const HEAD: &str = "#define KERNEL(name) static void kernel_##name\n";

/// The result of a kernel of two warps that takes 64 floats and writes 64, in both orders of
/// threads.
fn results(name: &str, text: &str) -> [Vec<f32>; 2] {
    let library = load(name, &format!("{HEAD}{text}"), &[name]);
    let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let results = std::cell::RefCell::new(Vec::new());
    both_orders(|| {
        let (x, y) = (Buffer::new(&x), Buffer::new(&[0.0f32; 64]));
        run(&library, name, Launch { grid: [1, 1, 1], block: 64, shared: 256 }, &[x.at(), y.at()]);
        results.borrow_mut().push(y.get());
    });
    results.into_inner().try_into().unwrap()
}

fn reversed() -> Vec<f32> {
    (0..64).rev().map(|i| i as f32).collect()
}

#[test]
fn a_missing_barrier_changes_the_result() {
    let body = |barrier: &str| {
        format!(
            "(const float* x, float* y) {{
                __shared__ float shared[64];
                shared[threadIdx.x] = 0.0f;
                __syncthreads();
                shared[threadIdx.x] = x[threadIdx.x];
                {barrier}
                y[threadIdx.x] = shared[63 - threadIdx.x];
            }}"
        )
    };
    let whole = results("whole", &format!("KERNEL(whole){}", body("__syncthreads();")));
    assert!(whole.iter().all(|result| *result == reversed()));
    // A warp's barrier does not hold back the other warp.
    for (name, barrier) in [("none", ""), ("warp", "__syncwarp();")] {
        let [rising, falling] = results(name, &format!("KERNEL({name}){}", body(barrier)));
        assert!(rising != falling, "{name}: both orders give {rising:?}");
    }
}

#[test]
fn a_copy_that_is_not_waited_for_has_not_happened() {
    let body = |wait: &str| {
        format!(
            "(const float* x, float* y) {{
                DYNAMIC_SHARED(memory);
                float *shared = (float *)memory;
                copy16_async(shared + threadIdx.x / 4 * 4, x + threadIdx.x / 4 * 4, threadIdx.x < 32);
                commit_copies();
                {wait}
                __syncthreads();
                y[threadIdx.x] = shared[63 - threadIdx.x];
            }}"
        )
    };
    let [waited, _] = results("waited", &format!("KERNEL(waited){}", body("wait_copies<0>();")));
    let want: Vec<f32> = reversed().into_iter().map(|x| if x < 32.0 { x } else { 0.0 }).collect();
    assert_eq!(waited, want);
    let [early, _] = results("early", &format!("KERNEL(early){}", body("wait_copies<1>();")));
    assert!(early.iter().all(|x| x.is_nan()), "{early:?}");
}

#[test]
fn warps_exchange_and_vote() {
    let text = "KERNEL(exchange)(const float* x, float* y) {
        float v = x[threadIdx.x];
        float other = __shfl_xor_sync(0xffffffffu, v, 5), below = __shfl_up_sync(0xffffffffu, v, 3);
        unsigned even = __ballot_sync(0xffffffffu, (int)v % 2 == 0);
        y[threadIdx.x] = even == 0x55555555u ? other * 100 + below : -1;
    }";
    let want: Vec<f32> =
        (0..64).map(|i: i32| (i ^ 5) as f32 * 100.0 + if i % 32 < 3 { i as f32 } else { (i - 3) as f32 }).collect();
    assert!(results("exchange", text).iter().all(|result| *result == want));
}

/// a b^T of 64 x 16 operands that lie as the tensor cores of Hopper want them, by a warpgroup that
/// then does `wait`.
fn product_of_a_warpgroup(name: &str, wait: &str) -> Vec<f32> {
    let text = format!(
        "{}
        KERNEL({name})(const float* x, float* y) {{
            OPERANDS_SHARED(memory);
            T *a = (T *)memory, *b = a + 64 * 64;
            for (int i = threadIdx.x; i < 64 * 16; i += 128) {{
                int row = i / 16, bytes = row * 128 + (i % 16 * 2 ^ (row & 7) << 4);
                a[bytes / 2] = narrow(x[i]);
                b[bytes / 2] = narrow(x[64 * 16 + i]);
            }}
            show_copies();
            __syncthreads();
            float d[8][4], kept[8][4];
            begin_products();
            product(d, operand(a, 16), operand(b, 16), false);
            commit_products();
            {wait}
            for (int n = 0; n < 8; n++)
                for (int e = 0; e < 4; e++) kept[n][e] = d[n][e];
            wait_products<0>();
            int row = (int)warp_of() * 16 + (int)lane_of() / 4, column = 2 * ((int)lane_of() & 3);
            for (int n = 0; n < 8; n++)
                for (int e = 0; e < 4; e++) y[(row + e / 2 * 8) * 64 + 8 * n + column + (e & 1)] = kept[n][e];
        }}",
        File::AttentionWarpgroup.source(Float::Bf16)
    );
    let library = load(name, &text, &[name]);
    let (x, y) = (Buffer::new(&operands()), Buffer::new(&[0.0f32; 64 * 64]));
    both_orders(|| run(&library, name, Launch { grid: [1, 1, 1], block: 128, shared: 16 << 10 }, &[x.at(), y.at()]));
    y.get()
}

/// Whole numbers, whose products bf16 and f32 hold exactly: 64 rows of 16, and 64 others.
fn operands() -> Vec<f32> {
    (0..2 * 64 * 16).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 27) as f32 - 16.0).collect()
}

#[test]
fn a_warpgroups_product_that_is_not_waited_for_has_not_happened() {
    let (a, b) = (&operands()[..64 * 16], &operands()[64 * 16..]);
    let element = |i: usize| (0..16).map(|k| a[i / 64 * 16 + k] * b[i % 64 * 16 + k]).sum();
    let want: Vec<f32> = (0..64 * 64).map(element).collect();
    assert_eq!(product_of_a_warpgroup("product_waited", "wait_products<0>();"), want);
    let early = product_of_a_warpgroup("product_early", "wait_products<1>();");
    assert!(early.iter().all(|x| x.is_nan()), "{early:?}");
}
