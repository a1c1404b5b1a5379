// Numbers of eight bits: operands of products, rounded with a tensor's scale, as they lie and
// transposed, with the largest magnitude in the same pass.
//
// From sm_89 on the conversion is an instruction, which on sm_89 NVRTC knows since 12.1; before,
// and in the emulation, it is arithmetic on the bits of f32 that gives the same codes. Magnitudes
// are compared as integers: their order is that of the numbers, with infinity and NaN above all,
// and the largest of a set does not depend on the order, so that an atomic maximum is reproducible.

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900 || (__CUDA_ARCH__ >= 890 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201))
#define TRAINYARD_CONVERTS
#endif

// Sides of a block's tile, and bytes from one of its transposed rows to the next: a multiple of 8,
// and not of 128.
#define TILE 64
#define STRIDE 72

// The code nearest to x, ties to even; too large is the largest number.
template <int MANTISSA, int BIAS, unsigned LARGEST> DEVICE unsigned code_of(float x) {
    const int dropped = 23 - MANTISSA;
    unsigned all = (unsigned)__float_as_int(x), bits = all & 0x7fffffffu, sign = all >> 31 << 7;
    if (bits > 0x7f800000u) return 0x7f;
    if (bits < (128u - BIAS) << 23) {
        // Adding a number whose last place is that of the small ones rounds to it.
        float rounder = __int_as_float((128 + dropped - BIAS) << 23);
        return sign | (unsigned)(__float_as_int(__int_as_float((int)bits) + rounder) - __float_as_int(rounder));
    }
    unsigned rounded = (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
    unsigned code = rounded - ((127u - BIAS) << MANTISSA);
    return sign | (code < LARGEST ? code : LARGEST);
}

// Both codes, that of `low` below.
template <int MANTISSA, int BIAS, unsigned LARGEST> DEVICE unsigned codes_of(float low, float high) {
#if defined(TRAINYARD_CONVERTS)
    unsigned short codes;
    if (MANTISSA == 2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return code_of<MANTISSA, BIAS, LARGEST>(low) | code_of<MANTISSA, BIAS, LARGEST>(high) << 8;
#endif
}

DEVICE unsigned magnitude(float x) { return (unsigned)__float_as_int(x) & 0x7fffffffu; }

// The largest of the block's magnitudes, into the tensor's.
DEVICE void note_largest(unsigned most, unsigned *amax) {
#pragma unroll
    for (int bits = 16; bits > 0; bits >>= 1) {
        unsigned other = __shfl_xor_sync(FULL_WARP, most, bits);
        most = other > most ? other : most;
    }
    if (lane_of() == 0 && most > 0) atomicMax(amax, most);
}

DEVICE uint2 eight(const unsigned char (&codes)[PACK]) {
    unsigned words[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < PACK; k++) words[k / 4] |= (unsigned)codes[k] << 8 * (k % 4);
    return uint2{words[0], words[1]};
}

template <int MANTISSA, int BIAS, unsigned LARGEST>
DEVICE unsigned round_tile(const T *x, float scale, unsigned char *y, unsigned char *transposed, int rows, int columns) {
    __shared__ uint2 words[TILE * STRIDE / 8];
    unsigned char *tile = (unsigned char *)words;
    int bands = (columns + TILE - 1) / TILE;
    int row0 = (int)(blockIdx.x / bands) * TILE, column0 = (int)(blockIdx.x % bands) * TILE;
    bool vectors = columns % PACK == 0 && aligned(x) && ((u64)y & 7) == 0;
    unsigned most = 0;
    int place = (int)threadIdx.x % (TILE / PACK) * PACK, column = column0 + place;
    for (int r = (int)threadIdx.x / (TILE / PACK); r < TILE; r += (int)blockDim.x / (TILE / PACK)) {
        int row = row0 + r;
        float v[PACK];
        unsigned char codes[PACK];
        // Beyond the matrix all is zero: no magnitude is below it, and what is not stored does not
        // matter.
        i64 first = (i64)row * columns + column, end = row < rows ? (i64)(row + 1) * columns : first;
        load_pack(x, first, end, vectors, v);
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            unsigned m = magnitude(v[k]);
            most = m > most ? m : most;
        }
#pragma unroll
        for (int k = 0; k < PACK; k += 2) {
            unsigned both = codes_of<MANTISSA, BIAS, LARGEST>(v[k] * scale, v[k + 1] * scale);
            codes[k] = (unsigned char)both;
            codes[k + 1] = (unsigned char)(both >> 8);
            tile[(place + k) * STRIDE + r] = codes[k];
            tile[(place + k + 1) * STRIDE + r] = codes[k + 1];
        }
        if (!y) continue;
        if (vectors && first + PACK <= end) {
            *(uint2 *)(y + first) = eight(codes);
            continue;
        }
#pragma unroll
        for (int k = 0; k < PACK; k++)
            if (first + k < end) y[first + k] = codes[k];
    }
    if (!transposed) return most;
    __syncthreads();
    bool whole = rows % PACK == 0 && ((u64)transposed & 7) == 0;
    for (int c = (int)threadIdx.x / (TILE / PACK); c < TILE && column0 + c < columns; c += (int)blockDim.x / (TILE / PACK)) {
        i64 at = (i64)(column0 + c) * rows + row0 + place;
        if (whole && row0 + place + PACK <= rows) {
            *(uint2 *)(transposed + at) = *(const uint2 *)(tile + c * STRIDE + place);
            continue;
        }
        for (int k = 0; k < PACK && row0 + place + k < rows; k++) transposed[at + k] = tile[c * STRIDE + place + k];
    }
    return most;
}

KERNEL(fp8_round)(const T* x, const float* scale, unsigned char* y, unsigned char* transposed, unsigned* amax, int rows, int columns, int e5m2) {
    unsigned most = e5m2 ? round_tile<2, 15, 0x7b>(x, *scale, y, transposed, rows, columns)
                         : round_tile<3, 7, 0x7e>(x, *scale, y, transposed, rows, columns);
    note_largest(most, amax);
}

KERNEL(fp8_amax)(const T* x, unsigned* amax, long long n) {
    i64 i = pack_start();
    float v[PACK];
    unsigned most = 0;
    load_pack(x, i, n, aligned(x), v);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        unsigned m = magnitude(v[k]);
        most = m > most ? m : most;
    }
    note_largest(most, amax);
}
