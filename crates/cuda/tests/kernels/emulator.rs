//! The emulation's own tests: what it is there to notice, it notices.

use super::device::{Buffer, both_orders, load, run};
use trainyard_cuda::kernels::Launch;

const HEAD: &str = "#define KERNEL(name) static void kernel_##name\n";

/// The result of a kernel of two warps that takes 64 floats and writes 64, in both orders of threads.
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
