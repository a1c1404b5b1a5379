// What all kernels share: the float types, loads and stores of eight elements, sums over warps and
// blocks, random numbers.
//
// No header of CUDA is included, so that NVRTC needs none. Everything that is an instruction
// without a C++ name stands here and in tensor_cores.cuh behind a small function, which
// `emulation/cuda.h` replaces where TRAINYARD_EMULATION is defined.

#define DEVICE static __device__ __forceinline__

#ifdef TRAINYARD_EMULATION
#define KERNEL(name) static void kernel_##name
#define KERNEL_BOUNDS(name, threads, blocks) static void kernel_##name
#else
#define KERNEL(name) extern "C" __global__ void name
#define KERNEL_BOUNDS(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

DEVICE unsigned short f32_to_bf16(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE unsigned short f32_to_f16(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE float f16_to_f32(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
#endif

#define FULL_WARP 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define IGNORE (-100)

typedef long long i64;
typedef unsigned long long u64;

struct bf16 {
    unsigned short bits;
};
struct f16 {
    unsigned short bits;
};

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return __int_as_float((int)x.bits << 16); }
DEVICE float widen(f16 x) { return f16_to_f32(x.bits); }
DEVICE float widen(int x) { return (float)x; }

template <class E> struct Narrow;
template <> struct Narrow<float> {
    DEVICE float of(float x) { return x; }
};
template <> struct Narrow<bf16> {
    DEVICE bf16 of(float x) { return bf16{f32_to_bf16(x)}; }
};
template <> struct Narrow<f16> {
    DEVICE f16 of(float x) { return f16{f32_to_f16(x)}; }
};

#if defined(TRAINYARD_F32)
typedef float T;
#elif defined(TRAINYARD_BF16)
typedef bf16 T;
#else
typedef f16 T;
#endif

// Rounded to nearest even.
DEVICE T narrow(float x) { return Narrow<T>::of(x); }

template <class A, class B> struct Same {
    static const bool value = false;
};
template <class A> struct Same<A, A> {
    static const bool value = true;
};

// Elements that a thread takes at a time: 16 bytes of 16-bit ones, twice that of f32.
#define PACK 8

DEVICE bool aligned(const void *x) { return ((u64)x & 15) == 0; }

// Pointers that are null do not stand in the way of vectors.
template <class... P> DEVICE bool all_aligned(P... x) {
    u64 bits = 0;
    const void *list[] = {(const void *)x...};
    for (unsigned i = 0; i < sizeof...(x); i++) bits |= (u64)list[i];
    return (bits & 15) == 0;
}

DEVICE void unpack(uint4 raw, float (&v)[PACK], bf16) {
    unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = __int_as_float((int)(words[i] << 16));
        v[2 * i + 1] = __int_as_float((int)(words[i] & 0xffff0000u));
    }
}
DEVICE void unpack(uint4 raw, float (&v)[PACK], f16) {
    unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = f16_to_f32((unsigned short)words[i]);
        v[2 * i + 1] = f16_to_f32((unsigned short)(words[i] >> 16));
    }
}
template <class E> DEVICE uint4 packed(const float (&v)[PACK]) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = Narrow<E>::of(v[2 * i]).bits | (unsigned)Narrow<E>::of(v[2 * i + 1]).bits << 16;
    return uint4{words[0], words[1], words[2], words[3]};
}

// Elements i .. i + 8 of the n of x, `fill` beyond; `vectors` says that x is aligned to 16 bytes,
// and i is a multiple of 8.
template <class E> DEVICE void load_pack(const E *x, i64 i, i64 n, bool vectors, float (&v)[PACK], float fill = 0.0f) {
    if (vectors && i + PACK <= n) {
        unpack(*(const uint4 *)(x + i), v, E());
        return;
    }
#pragma unroll
    for (int k = 0; k < PACK; k++) v[k] = i + k < n ? widen(x[i + k]) : fill;
}
template <> __device__ __forceinline__ void load_pack<float>(const float *x, i64 i, i64 n, bool vectors, float (&v)[PACK], float fill) {
    if (vectors && i + PACK <= n) {
        float4 a = *(const float4 *)(x + i), b = *(const float4 *)(x + i + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
#pragma unroll
    for (int k = 0; k < PACK; k++) v[k] = i + k < n ? x[i + k] : fill;
}

template <class E> DEVICE void store_pack(E *y, i64 i, i64 n, bool vectors, const float (&v)[PACK]) {
    if (vectors && i + PACK <= n) {
        *(uint4 *)(y + i) = packed<E>(v);
        return;
    }
#pragma unroll
    for (int k = 0; k < PACK; k++)
        if (i + k < n) y[i + k] = Narrow<E>::of(v[k]);
}
template <> __device__ __forceinline__ void store_pack<float>(float *y, i64 i, i64 n, bool vectors, const float (&v)[PACK]) {
    if (vectors && i + PACK <= n) {
        *(float4 *)(y + i) = float4{v[0], v[1], v[2], v[3]};
        *(float4 *)(y + i + 4) = float4{v[4], v[5], v[6], v[7]};
        return;
    }
#pragma unroll
    for (int k = 0; k < PACK; k++)
        if (i + k < n) y[i + k] = v[k];
}

// The first of a thread's eight elements.
DEVICE i64 pack_start() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) * PACK; }

// y = f(x), each thread its eight elements; y may be x.
template <class X, class Y, class F> DEVICE void map(const X *x, Y *y, i64 n, F f) {
    i64 i = pack_start();
    if (i >= n) return;
    bool vectors = all_aligned(x, y);
    float v[PACK];
    load_pack(x, i, n, vectors, v);
#pragma unroll
    for (int k = 0; k < PACK; k++) v[k] = f(v[k]);
    store_pack(y, i, n, vectors, v);
}
// y = f(a, b) likewise.
template <class F> DEVICE void map(const T *a, const T *b, T *y, i64 n, F f) {
    i64 i = pack_start();
    if (i >= n) return;
    bool vectors = all_aligned(a, b, y);
    float v[PACK], w[PACK];
    load_pack(a, i, n, vectors, v);
    load_pack(b, i, n, vectors, w);
#pragma unroll
    for (int k = 0; k < PACK; k++) v[k] = f(v[k], w[k]);
    store_pack(y, i, n, vectors, v);
}

DEVICE unsigned lane_of() { return threadIdx.x & 31; }
DEVICE unsigned warp_of() { return threadIdx.x >> 5; }

template <class V> DEVICE V warp_sum(V x) {
#pragma unroll
    for (int bits = 16; bits > 0; bits >>= 1) x += __shfl_xor_sync(FULL_WARP, x, bits);
    return x;
}
DEVICE float larger(float a, float b) { return b > a ? b : a; }
DEVICE float warp_max(float x) {
#pragma unroll
    for (int bits = 16; bits > 0; bits >>= 1) x = larger(x, __shfl_xor_sync(FULL_WARP, x, bits));
    return x;
}

// The sum over the block, known to all its threads: within warps by halves, then the warps in
// order.
template <class V> DEVICE V block_sum(V x) {
    __shared__ V sums[32];
    x = warp_sum(x);
    __syncthreads();
    if (lane_of() == 0) sums[warp_of()] = x;
    __syncthreads();
    V total = sums[0];
    for (unsigned i = 1; i < blockDim.x / 32; i++) total += sums[i];
    return total;
}
DEVICE float block_max(float x) {
    __shared__ float values[32];
    x = warp_max(x);
    __syncthreads();
    if (lane_of() == 0) values[warp_of()] = x;
    __syncthreads();
    float most = values[0];
    for (unsigned i = 1; i < blockDim.x / 32; i++) most = larger(most, values[i]);
    return most;
}

// The rows of this block, where rows are cut into gridDim.x (or .y) even parts.
struct Span {
    int first, last;
};
DEVICE Span span_of(unsigned block, unsigned blocks, int rows) {
    int each = (rows + (int)blocks - 1) / (int)blocks;
    int first = min((i64)block * each, (i64)rows);
    return Span{first, min(first + each, rows)};
}

// Ten rounds of Philox4x32 (Salmon et al. 2011).
DEVICE void philox(u64 seed, unsigned (&c)[4]) {
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xd2511f53u, c[0]), low0 = 0xd2511f53u * c[0];
        unsigned high1 = __umulhi(0xcd9e8d57u, c[2]), low1 = 0xcd9e8d57u * c[2];
        c[0] = high1 ^ c[1] ^ k0, c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
}
