// CUDA C++ on the host, for tests: a launch runs its blocks one after another, and each thread of a block is a fiber that gives way at barriers and
// warp collectives. Nothing is fast here; what is checked is indexing, masks, arithmetic and synchronisation.
//
// Stricter than a GPU: every collective needs all 32 lanes, a barrier all threads of the block, none of which may have ended; asynchronous copies
// happen when they are waited for and not before; shared memory starts as NaN. Threads run in rising or in falling order (`emulation_order`), so that a
// result which depends on the order, because a barrier is missing, differs between two runs.
//
// Not emulated: memory models, divergence inside a warp collective, and time.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define TRAINYARD_EMULATION 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) alignas(n)
#define __shared__ static thread_local

struct uint4 {
    alignas(16) unsigned x;
    unsigned y, z, w;
};
struct uint2 {
    alignas(8) unsigned x;
    unsigned y;
};
struct float4 {
    alignas(16) float x;
    float y, z, w;
};

namespace emulation {

constexpr unsigned WARP = 32;
constexpr unsigned THREADS_MAX = 1024;
constexpr size_t STACK = 128 << 10;
constexpr size_t SHARED_MAX = 227 << 10;
constexpr size_t MESSAGE = 32;
constexpr int COPIES_MAX = 512;
constexpr int PRODUCTS_MAX = 64;
constexpr int SUMS_MAX = 8;

struct Index {
    unsigned x, y, z;
};

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Copy {
    void *target;
    const void *source;
    bool valid;
    int group;
    unsigned bytes;
};

// A product of a warpgroup that was asked for: its right operand, and the left one, of which the thread has rows in registers or looks in shared memory.
struct Product {
    uint64_t a, b;
    bool in_registers, add;
    float rows[2][16];
    float (*widen)(unsigned short);
    int sum, group;
};
// Registers that products write to: what they hold, as long as some are under way.
struct Sum {
    float *at, value[128];
    int count, under_way;
};

#if defined(__x86_64__)
// Saves the registers that a callee keeps on the stack, and goes on with another stack.
extern "C" void emulation_switch(void **save, void *load);
#define EMULATION_SWITCH                                                                                                        \
    asm(".text\n.weak emulation_switch\n.type emulation_switch,@function\nemulation_switch:\n"                                   \
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"                                                     \
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"                                                                                       \
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n")
EMULATION_SWITCH;
typedef void *Context;
#else
typedef ucontext_t Context;
#endif

struct Fiber {
    Context context;
    State state;
    // How many warp collectives the thread has taken part in: which of two message buffers is next.
    unsigned collectives;
    int group, copies;
    Copy pending[COPIES_MAX];
    // Whether copies came that the tensor cores were not shown; whether registers may be given to products; how many of them there were.
    bool hidden, begun;
    int product_group, products, sums, asked;
    Product product[PRODUCTS_MAX];
    Sum sum[SUMS_MAX];
};

struct Machine {
    Fiber fibers[THREADS_MAX];
    Context scheduler;
    char *stacks;
    unsigned char *shared;
    unsigned running, threads;
    Index thread, block, grid;
    void (*body)(void *);
    void *argument;
    unsigned char messages[2][THREADS_MAX][MESSAGE];
};

inline Machine &machine() {
    static thread_local Machine *one = nullptr;
    if (!one) {
        one = (Machine *)calloc(1, sizeof(Machine));
        void *memory = mmap(nullptr, THREADS_MAX * STACK + SHARED_MAX, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (!one || memory == MAP_FAILED) {
            fprintf(stderr, "emulation: no memory for the stacks of threads\n");
            abort();
        }
        one->stacks = (char *)memory;
        one->shared = (unsigned char *)memory + THREADS_MAX * STACK;
    }
    return *one;
}

[[noreturn]] inline void fail(const char *what) {
    Machine &m = machine();
    fprintf(stderr, "emulation: %s (block %u %u %u, thread %u)\n", what, m.block.x, m.block.y, m.block.z, m.running);
    abort();
}

inline void give_way(State state) {
    Machine &m = machine();
    Fiber &fiber = m.fibers[m.running];
    fiber.state = state;
#if defined(__x86_64__)
    emulation_switch(&fiber.context, m.scheduler);
#else
    swapcontext(&fiber.context, &m.scheduler);
#endif
}

inline void start() {
    Machine &m = machine();
    m.body(m.argument);
    if (m.fibers[m.running].products) fail("a product that was never waited for");
    give_way(DONE);
}

inline void prepare(unsigned index) {
    Machine &m = machine();
    Fiber &fiber = m.fibers[index];
    fiber.state = READY;
    fiber.collectives = fiber.group = fiber.copies = 0;
    fiber.hidden = fiber.begun = false;
    fiber.product_group = fiber.products = fiber.sums = fiber.asked = 0;
    char *stack = m.stacks + index * STACK;
#if defined(__x86_64__)
    // Aligned so that `start` finds the stack as after a call.
    void **top = (void **)(stack + STACK - 64);
    *--top = nullptr;
    *--top = (void *)start;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.context = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, (void (*)())start, 0);
#endif
}

inline void resume(unsigned index) {
    Machine &m = machine();
    m.running = index;
    m.thread = {index, 0, 0};
#if defined(__x86_64__)
    emulation_switch(&m.scheduler, m.fibers[index].context);
#else
    swapcontext(&m.scheduler, &m.fibers[index].context);
#endif
}

static thread_local bool falling = false;

// Runs a warp until all its lanes are at the block's barrier or have ended.
inline void run_warp(unsigned first) {
    Machine &m = machine();
    for (;;) {
        unsigned count[4] = {0, 0, 0, 0};
        for (unsigned i = 0; i < WARP; i++) {
            unsigned lane = first + (falling ? WARP - 1 - i : i);
            if (m.fibers[lane].state == READY) resume(lane);
            count[m.fibers[lane].state]++;
        }
        if (count[AT_BLOCK] == WARP || count[DONE] == WARP) return;
        if (count[AT_WARP] != WARP) {
            m.running = first;
            fail("lanes of a warp are at different places: not all of them take part in a collective or barrier");
        }
        for (unsigned i = 0; i < WARP; i++) m.fibers[first + i].state = READY;
    }
}

inline void run_block() {
    Machine &m = machine();
    for (unsigned i = 0; i < m.threads; i++) prepare(i);
    unsigned warps = m.threads / WARP;
    for (;;) {
        unsigned ended = 0;
        for (unsigned i = 0; i < warps; i++) {
            unsigned first = (falling ? warps - 1 - i : i) * WARP;
            run_warp(first);
            ended += m.fibers[first].state == DONE;
        }
        if (ended == warps) {
            for (unsigned i = 0; i < m.threads; i++)
                if (m.fibers[i].asked != m.fibers[i / 128 * 128].asked) fail("the warps of a warpgroup did not multiply together");
            return;
        }
        if (ended != 0) fail("some warps ended while others wait at a barrier of the block");
        for (unsigned i = 0; i < m.threads; i++) m.fibers[i].state = READY;
    }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(A *)arguments[I]...);
}

template <class... A> void launch(void (*kernel)(A...), const unsigned *grid, unsigned threads, unsigned shared, void **arguments) {
    Machine &m = machine();
    struct Call {
        void (*kernel)(A...);
        void **arguments;
    } one = {kernel, arguments};
    m.argument = &one;
    m.body = [](void *argument) {
        Call &one = *(Call *)argument;
        call(one.kernel, one.arguments, std::index_sequence_for<A...>());
    };
    if (threads == 0 || threads % WARP != 0 || threads > THREADS_MAX) fail("a block must be whole warps, at most 1,024 threads");
    if (shared > SHARED_MAX) fail("more shared memory than any GPU has");
    m.threads = threads;
    m.grid = {grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                m.block = {x, y, z};
                memset(m.shared, 0xff, shared + 256 < SHARED_MAX ? shared + 256 : SHARED_MAX);
                run_block();
                for (unsigned i = 0; i < 256 && shared + 256 < SHARED_MAX; i++)
                    if (m.shared[shared + i] != 0xff) fail("a write beyond the dynamic shared memory");
            }
}

// Leaves a message to the warp, waits for the others', and returns theirs.
inline unsigned char (*exchange(const void *message, size_t size))[MESSAGE] {
    Machine &m = machine();
    Fiber &fiber = m.fibers[m.running];
    // A lane overwrites a buffer two collectives later, when all have read it: they have been at the one between.
    auto *buffer = m.messages[fiber.collectives++ % 2];
    memcpy(buffer[m.running], message, size);
    unsigned first = m.running / WARP * WARP;
    give_way(AT_WARP);
    return buffer + first;
}

inline unsigned lane() { return machine().running % WARP; }

inline void perform(int newest_kept) {
    Machine &m = machine();
    Fiber &fiber = m.fibers[m.running];
    int left = 0;
    for (int i = 0; i < fiber.copies; i++) {
        Copy &copy = fiber.pending[i];
        if (copy.group > fiber.group - 1 - newest_kept) {
            fiber.pending[left++] = copy;
        } else if (copy.valid) {
            memcpy(copy.target, copy.source, copy.bytes);
        } else {
            memset(copy.target, 0, copy.bytes);
        }
    }
    fiber.hidden = fiber.hidden || left != fiber.copies;
    fiber.copies = left;
}

// The number in 16 bits of shared memory at `offset` bytes, 16-byte pieces of 128 exchanged by the number of the 128 within 1,024 (PTX ISA: 128-byte swizzling).
inline unsigned short swizzled(unsigned offset) {
    offset ^= (offset >> 7 & 7) << 4;
    if (offset + 2 > SHARED_MAX) fail("an operand beyond the shared memory");
    unsigned short bits;
    memcpy(&bits, machine().shared + offset, sizeof bits);
    return bits;
}

// Element `k` of the sum and `at` of the other dimension of the operand that a descriptor describes, in its canonical layout of 128-byte swizzling: with
// `transposed` ((8 8, n), (8, k)) : ((1, leading), (8 8, stride)) in elements, else ((8, n), 64) : ((64, stride), 1).
inline unsigned short element(uint64_t descriptor, unsigned at, unsigned k, bool transposed) {
    unsigned start = (unsigned)(descriptor & 0x3fff) << 4, leading = (unsigned)(descriptor >> 16 & 0x3fff) << 4;
    unsigned stride = (unsigned)(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) fail("a descriptor of another layout");
    if (transposed) return swizzled(start + at / 64 * leading + at % 64 * 2 + k / 8 * stride + k % 8 * 128);
    return swizzled(start + at / 8 * stride + at % 8 * 128 + k * 2);
}

// Asks for a product into the registers at `d`, which hold NaN until it is waited for.
inline Product &ask(float *d, int count, uint64_t b) {
    Machine &m = machine();
    Fiber &fiber = m.fibers[m.running];
    if (m.threads % 128 != 0) fail("a product of a warpgroup that is not whole");
    if (!fiber.begun) fail("a product whose registers may still be written to");
    if (fiber.products == PRODUCTS_MAX) fail("too many products under way");
    int sum = 0;
    while (sum < fiber.sums && fiber.sum[sum].at != d) sum++;
    if (sum == SUMS_MAX) fail("too many sums under way");
    Sum &into = fiber.sum[sum];
    if (sum == fiber.sums) {
        fiber.sums++;
        into.at = d, into.count = count, into.under_way = 0;
    }
    if (into.under_way++ == 0) {
        memcpy(into.value, d, count * sizeof(float));
        memset(d, 0xff, count * sizeof(float));
    }
    fiber.asked++;
    Product &product = fiber.product[fiber.products++];
    product.b = b, product.sum = sum, product.group = fiber.product_group;
    return product;
}

inline void multiply(Fiber &fiber, Product &product) {
    Machine &m = machine();
    for (unsigned i = 0; i < m.threads; i++)
        if (m.fibers[i].hidden) fail("copies that the tensor cores were not shown");
    Sum &sum = fiber.sum[product.sum];
    unsigned lane = m.running % WARP, row = m.running / WARP % 4 * 16 + lane / 4;
    if (!product.in_registers)
        for (unsigned r = 0; r < 2; r++)
            for (unsigned k = 0; k < 16; k++) product.rows[r][k] = product.widen(element(product.a, row + 8 * r, k, false));
    for (int i = 0; i < sum.count; i++) {
        unsigned column = i / 4 * 8 + 2 * (lane % 4) + i % 2, r = i % 4 / 2;
        float x = product.add ? sum.value[i] : 0.0f;
        for (unsigned k = 0; k < 16; k++) x += product.rows[r][k] * product.widen(element(product.b, column, k, product.in_registers));
        sum.value[i] = x;
    }
    if (--sum.under_way == 0) memcpy(sum.at, sum.value, sum.count * sizeof(float));
}

} // namespace emulation

#define threadIdx (emulation::machine().thread)
#define blockIdx (emulation::machine().block)
#define gridDim (emulation::machine().grid)
#define blockDim (emulation::Index{emulation::machine().threads, 1, 1})

// Whether threads run in falling order from now on.
extern "C" __attribute__((used)) void emulation_order(int falling) { emulation::falling = falling; }

// Entry points whose arguments come as in cuLaunchKernel; appended to each module.
#define EMULATION_LAUNCHER(name)                                                                                                \
    extern "C" void launch_##name(const unsigned *grid, unsigned threads, unsigned shared, void **arguments) {                  \
        emulation::launch(kernel_##name, grid, threads, shared, arguments);                                                              \
    }
#define DYNAMIC_SHARED(name) unsigned char *name = emulation::machine().shared
#define OPERANDS_SHARED(name) DYNAMIC_SHARED(name)

inline void __syncthreads() { emulation::give_way(emulation::AT_BLOCK); }
inline void __syncwarp() { emulation::give_way(emulation::AT_WARP); }

template <class V> V __shfl_sync(unsigned, V value, unsigned lane) {
    auto *all = emulation::exchange(&value, sizeof value);
    memcpy(&value, all[lane % emulation::WARP], sizeof value);
    return value;
}
template <class V> V __shfl_xor_sync(unsigned mask, V value, unsigned bits) {
    return __shfl_sync(mask, value, emulation::lane() ^ bits);
}
template <class V> V __shfl_up_sync(unsigned mask, V value, unsigned by) {
    unsigned lane = emulation::lane();
    return __shfl_sync(mask, value, lane < by ? lane : lane - by);
}
inline unsigned __ballot_sync(unsigned, bool set) {
    auto *all = emulation::exchange(&set, sizeof set);
    unsigned bits = 0;
    for (unsigned i = 0; i < emulation::WARP; i++) bits |= (unsigned)(all[i][0] != 0) << i;
    return bits;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline int __float_as_int(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class V> V atomicMin(V *at, V x) {
    V old = *at;
    if (x < old) *at = x;
    return old;
}
template <class V> V atomicMax(V *at, V x) {
    V old = *at;
    if (x > old) *at = x;
    return old;
}
template <class V> V atomicAdd(V *at, V x) {
    V old = *at;
    *at = old + x;
    return old;
}
template <class A, class B> auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B> auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }

// The conversions that are instructions on a GPU: round to nearest even.
inline unsigned short f32_to_bf16(float x) {
    unsigned bits = (unsigned)__float_as_int(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline unsigned short f32_to_f16(float x) {
    unsigned bits = (unsigned)__float_as_int(x), sign = bits >> 16 & 0x8000;
    float a = fabsf(x);
    if (x != x) return 0x7fff;
    if (a >= 65520.0f) return (unsigned short)(sign | 0x7c00);
    if (a < 6.103515625e-05f) {
        // Subnormal: a whole number of 2^-24, rounded by the addition of a number whose last place that is.
        return (unsigned short)(sign | (unsigned)(__float_as_int(a + 0.5f) - __float_as_int(0.5f)));
    }
    unsigned magnitude = (bits & 0x7fffffff) - 0x38000000;
    return (unsigned short)(sign | (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13);
}
inline float f16_to_f32(unsigned short h) {
    unsigned sign = (unsigned)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 31) return __int_as_float((int)(sign | 0x7f800000 | mantissa << 13));
    if (exponent == 0) {
        float x = mantissa * 5.9604644775390625e-08f;
        return sign ? -x : x;
    }
    return __int_as_float((int)(sign | (exponent + 112) << 23 | mantissa << 13));
}

// Asynchronous copies, and the tensor cores' instructions; see tensor_cores.cuh for what they do.
inline void copy_async(void *target, const void *source, bool valid, unsigned bytes) {
    auto &m = emulation::machine();
    auto &fiber = m.fibers[m.running];
    if ((uintptr_t)target % bytes != 0 || (valid && (uintptr_t)source % bytes != 0)) emulation::fail("an asynchronous copy that is not aligned");
    if (fiber.copies == emulation::COPIES_MAX) emulation::fail("too many asynchronous copies in flight");
    fiber.pending[fiber.copies++] = {target, source, valid, fiber.group, bytes};
}
inline void copy16_async(void *target, const void *source, bool valid) { copy_async(target, source, valid, 16); }
inline void copy4_async(float *target, const float *source, bool valid) { copy_async(target, source, valid, 4); }
inline void commit_copies() {
    auto &m = emulation::machine();
    m.fibers[m.running].group++;
}
template <int N> void wait_copies() { emulation::perform(N); }

inline void load_matrices(unsigned (&r)[4], const void *row, bool transposed) {
    if ((uintptr_t)row % 16 != 0) emulation::fail("a row of a matrix that is not aligned");
    auto *all = emulation::exchange(&row, sizeof row);
    unsigned lane = emulation::lane();
    for (unsigned i = 0; i < 4; i++) {
        unsigned short pair[2];
        for (unsigned j = 0; j < 2; j++) {
            unsigned at = transposed ? 2 * (lane % 4) + j : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + j;
            const unsigned short *line;
            memcpy(&line, all[8 * i + at], sizeof line);
            pair[j] = line[column];
        }
        r[i] = pair[0] | (unsigned)pair[1] << 16;
    }
    // The rows may be overwritten only when every lane has read them.
    __syncwarp();
}

template <class E> float emulation_widen(unsigned short bits);

// Products of warpgroups; see warpgroup.cuh. They happen when they are waited for, with what is in shared memory then.
inline unsigned shared_address(const void *at) { return (unsigned)((const unsigned char *)at - emulation::machine().shared); }
inline void show_copies() {
    auto &m = emulation::machine();
    m.fibers[m.running].hidden = false;
}
inline void begin_products() {
    auto &m = emulation::machine();
    m.fibers[m.running].begun = true;
    __syncwarp();
}
inline void commit_products() {
    auto &m = emulation::machine();
    m.fibers[m.running].product_group++;
}
template <int N> void wait_products() {
    auto &m = emulation::machine();
    auto &fiber = m.fibers[m.running];
    int done = 0;
    while (done < fiber.products && fiber.product[done].group <= fiber.product_group - 1 - N) emulation::multiply(fiber, fiber.product[done++]);
    fiber.products -= done;
    memmove(fiber.product, fiber.product + done, fiber.products * sizeof *fiber.product);
    if (fiber.products == 0) fiber.sums = 0;
    fiber.begun = false;
}
template <class R> void settle(R &) {}

template <class E> void emulation_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    unsigned message[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto *all = emulation::exchange(message, sizeof message);
    unsigned lane = emulation::lane();
    float rows[2][16], columns[2][16];
    auto half = [](unsigned pair, unsigned which) { return emulation_widen<E>((unsigned short)(which ? pair >> 16 : pair)); };
    for (unsigned k = 0; k < 16; k++) {
        unsigned holder = k % 8 / 2, high = k / 8;
        for (unsigned i = 0; i < 2; i++) {
            unsigned words[6];
            memcpy(words, all[4 * (lane / 4) + holder], sizeof words);
            rows[i][k] = half(words[2 * high + i], k % 2);
            memcpy(words, all[4 * (2 * (lane % 4) + i) + holder], sizeof words);
            columns[i][k] = half(words[4 + high], k % 2);
        }
    }
    for (unsigned i = 0; i < 4; i++)
        for (unsigned k = 0; k < 16; k++) c[i] += rows[i / 2][k] * columns[i % 2][k];
}

template <class E, int M> void emulation_product(float (&d)[M][4], uint64_t a, uint64_t b, bool add) {
    auto &product = emulation::ask(&d[0][0], 4 * M, b);
    product.in_registers = false, product.a = a, product.add = add, product.widen = emulation_widen<E>;
    __syncwarp();
}
template <class E, int M> void emulation_product(float (&d)[M][4], const unsigned (&a)[4], uint64_t b) {
    auto *all = emulation::exchange(a, sizeof a);
    auto &product = emulation::ask(&d[0][0], 4 * M, b);
    product.in_registers = product.add = true, product.widen = emulation_widen<E>;
    for (unsigned k = 0; k < 16; k++) {
        unsigned words[4];
        memcpy(words, all[emulation::lane() / 4 * 4 + k % 8 / 2], sizeof words);
        for (unsigned r = 0; r < 2; r++)
            product.rows[r][k] = emulation_widen<E>((unsigned short)(words[k / 8 * 2 + r] >> (k % 2 ? 16 : 0)));
    }
}
