// Tensor cores of sm_80 and later: matrix fragments, products of 16 x 8 x 16, and copies to shared
// memory that do not wait.

#ifndef TRAINYARD_EMULATION
// 16 bytes to shared memory; zeros where not `valid`. Done when the group that it is committed to
// has been waited for.
DEVICE void copy16_async(void *target, const void *source, bool valid) {
    unsigned at = (unsigned)__cvta_generic_to_shared(target);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(source), "r"(valid ? 16 : 0));
}
// Likewise a number.
DEVICE void copy4_async(float *target, const float *source, bool valid) {
    unsigned at = (unsigned)__cvta_generic_to_shared(target);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(source), "r"(valid ? 4 : 0));
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until at most N of this thread's groups are under way.
template <int N> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four 8 x 8 matrices: lane i gives the address of row i % 8 of matrix i / 8; of each matrix it
// receives row lane / 4, columns 2 (lane % 4) and the next, or with `transposed` that of the
// transpose.
DEVICE void load_matrices(unsigned (&r)[4], const void *row, bool transposed) {
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
}
#endif

// Two numbers as T, the first in the lower half; and 2^x to 2 units in the last place.
#if defined(TRAINYARD_EMULATION)
template <class E> inline unsigned emulation_pair(E low, E high) { return low.bits | (unsigned)high.bits << 16; }
inline unsigned emulation_pair(float, float) { return 0; }
DEVICE unsigned pair_of(float low, float high) { return emulation_pair(narrow(low), narrow(high)); }
DEVICE float power_of_two(float x) { return exp2f(x); }
#else
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#if defined(TRAINYARD_BF16)
DEVICE unsigned pair_of(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#elif defined(TRAINYARD_F16)
DEVICE unsigned pair_of(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif
#endif

// c += a b, a 16 x 16, b 16 x 8: the lane holds of c rows lane / 4 and that + 8, columns 2 (lane %
// 4) and the next; of a the same two rows, the same columns and those + 8 (in the order row, row +
// 8, row at + 8, row + 8 at + 8); of b column lane / 4, rows as a's columns.
#if defined(TRAINYARD_EMULATION)
template <> inline float emulation_widen<bf16>(unsigned short bits) { return widen(bf16{bits}); }
template <> inline float emulation_widen<f16>(unsigned short bits) { return widen(f16{bits}); }
template <> inline float emulation_widen<float>(unsigned short) { return 0.0f; }
DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { emulation_mma<T>(c, a, b0, b1); }
#elif defined(TRAINYARD_BF16)
DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#elif defined(TRAINYARD_F16)
DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
