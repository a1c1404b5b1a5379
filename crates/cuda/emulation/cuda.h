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

struct Index {
    unsigned x, y, z;
};

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Copy {
    void *target;
    const void *source;
    bool valid;
    int group;
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
    give_way(DONE);
}

inline void prepare(unsigned index) {
    Machine &m = machine();
    Fiber &fiber = m.fibers[index];
    fiber.state = READY;
    fiber.collectives = fiber.group = fiber.copies = 0;
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
        if (ended == warps) return;
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
            memcpy(copy.target, copy.source, 16);
        } else {
            memset(copy.target, 0, 16);
        }
    }
    fiber.copies = left;
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
inline void copy16_async(void *target, const void *source, bool valid) {
    auto &m = emulation::machine();
    auto &fiber = m.fibers[m.running];
    if ((uintptr_t)target % 16 != 0 || (valid && (uintptr_t)source % 16 != 0)) emulation::fail("an asynchronous copy that is not aligned");
    if (fiber.copies == emulation::COPIES_MAX) emulation::fail("too many asynchronous copies in flight");
    fiber.pending[fiber.copies++] = {target, source, valid, fiber.group};
}
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
