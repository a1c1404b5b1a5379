// Products of a warpgroup on the tensor cores of sm_90a: 128 threads, whose warps have sixteen rows
// of 64 each, multiply out of shared memory and do not wait (PTX ISA, "Asynchronous Warpgroup Level
// Matrix Instructions"). No other architecture has them.
//
// Tiles lie in slabs of 64 columns, 128 bytes a row, the 16-byte pieces of a row exchanged by the
// number of the row within eight: the layout that the instructions call 128-byte swizzling. A tile
// starts at a multiple of 1,024 bytes, as OPERANDS_SHARED does. One layout serves a product along
// its rows and one across them.
//
// What is copied to shared memory is shown to the tensor cores by `show_copies`. Between
// `begin_products` and `wait_products` registers that products read or write are theirs; the
// compiler does not know that, so `settle` stands where values go over to them or come back.

#ifndef TRAINYARD_EMULATION
#define OPERANDS_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
DEVICE unsigned shared_address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }
DEVICE void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups are under way.
template <int N> DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int M> DEVICE void settle(float (&d)[M][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[m][i])::"memory");
}
template <int M> DEVICE void settle(unsigned (&a)[M][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[m][i])::"memory");
}
#endif

// Where eight columns of a row lie in a tile of `rows` rows, eight of `chunk` to a slab.
DEVICE T *slot(T *tile, int rows, int row, int chunk) { return tile + (((chunk >> 3) * rows + row) * 8 + ((chunk ^ row) & 7)) * 8; }

// The operand that starts at `at` in the first row of a slab, or of eight of its rows: 64 rows of
// 16 columns and more, summed over columns, `stride` bytes from eight rows to the next; or 16 rows
// of 64 columns and more, summed over rows, `leading` bytes from slab to slab.
DEVICE u64 operand(const T *at, int leading) {
    const unsigned eight_rows = 1024, swizzle = 1;
    return (u64)((shared_address(at) & 0x3ffff) >> 4) | (u64)((unsigned)leading >> 4) << 16 | (u64)(eight_rows >> 4) << 32 | (u64)swizzle << 62;
}
// Sixteen columns from 16 `step` on of the rows from `row` on, a multiple of 8; sums run over the
// columns.
DEVICE u64 along(const T *tile, int rows, int row, int step) { return operand(tile + ((step >> 2) * rows + row) * 64 + (step & 3) * 16, 16); }
// Sixteen rows from 16 `step` on, all columns; sums run over the rows.
DEVICE u64 across(const T *tile, int rows, int step) { return operand(tile + step * 16 * 64, rows * 128); }

// d = a b^T, or with `add` d += a b^T: a 64 x 16 and b (8 M) x 16 in shared memory, both `along`; d
// as `mma` has it, the warp's sixteen rows by fragments of 8 columns. d += a b: a in registers as
// `mma` takes it, b 16 x (8 M) in shared memory, `across`.
#if defined(TRAINYARD_EMULATION)
template <int M> DEVICE void product(float (&d)[M][4], u64 a, u64 b, bool add) { emulation_product<T>(d, a, b, add); }
template <int M> DEVICE void add_product(float (&d)[M][4], const unsigned (&a)[4], u64 b) { emulation_product<T>(d, a, b); }
#else
#if defined(TRAINYARD_BF16)
#define OPERANDS "bf16.bf16 "
#else
#define OPERANDS "f16.f16 "
#endif
#define FRAGMENT(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FRAGMENTS_8(d) \
    FRAGMENT(d[0]), FRAGMENT(d[1]), FRAGMENT(d[2]), FRAGMENT(d[3]), \
    FRAGMENT(d[4]), FRAGMENT(d[5]), FRAGMENT(d[6]), FRAGMENT(d[7])
#define FRAGMENTS_16(d) \
    FRAGMENT(d[0]), FRAGMENT(d[1]), FRAGMENT(d[2]), FRAGMENT(d[3]), \
    FRAGMENT(d[4]), FRAGMENT(d[5]), FRAGMENT(d[6]), FRAGMENT(d[7]), \
    FRAGMENT(d[8]), FRAGMENT(d[9]), FRAGMENT(d[10]), FRAGMENT(d[11]), \
    FRAGMENT(d[12]), FRAGMENT(d[13]), FRAGMENT(d[14]), FRAGMENT(d[15])
DEVICE void product(float (&d)[8][4], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." OPERANDS "{" REGISTERS_32 "}, %32, %33, add, 1, 1, 0, 0;}"
                 : FRAGMENTS_8(d)
                 : "l"(a), "l"(b), "r"((int)add));
}
DEVICE void product(float (&d)[16][4], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERANDS "{" REGISTERS_64 "}, %64, %65, add, 1, 1, 0, 0;}"
                 : FRAGMENTS_16(d)
                 : "l"(a), "l"(b), "r"((int)add));
}
DEVICE void add_product(float (&d)[8][4], const unsigned (&a)[4], u64 b) {
    asm volatile("{.reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." OPERANDS "{" REGISTERS_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;}"
                 : FRAGMENTS_8(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void add_product(float (&d)[16][4], const unsigned (&a)[4], u64 b) {
    asm volatile("{.reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERANDS "{" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;}"
                 : FRAGMENTS_16(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
