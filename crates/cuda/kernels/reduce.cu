// Sums over columns and whole buffers, and what works on rows: every reduction in an order that the
// shape fixes.

// A thread has a column of the band and walks the rows of its block of rows.
KERNEL(column_sums)(const T* x, float* partials, int outer, int rows, int columns) {
    int bands = (columns + 255) / 256;
    int column = (int)(blockIdx.x % bands) * 256 + (int)threadIdx.x;
    i64 o = blockIdx.x / bands;
    if (column >= columns) return;
    Span span = span_of(blockIdx.y, gridDim.y, rows);
    const T *from = x + o * rows * columns + column;
    float sum = 0.0f;
    int row = span.first;
    // Eight rows in flight, added in order.
    for (; row + 8 <= span.last; row += 8) {
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = widen(from[(i64)(row + k) * columns]);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += v[k];
    }
    for (; row < span.last; row++) sum += widen(from[(i64)row * columns]);
    partials[(o * gridDim.y + blockIdx.y) * columns + column] = sum;
}

// Each of the block's eight warps has an eighth of the blocks' partials of the same 32 elements;
// the eight sums are added in order.
KERNEL(sum_partials)(const float* partials, float* sums, int blocks, long long n, long long outer, float factor, int add) {
    __shared__ float parts[8][32];
    i64 i = (i64)blockIdx.x * 32 + lane_of();
    bool inside = i < outer * n;
    Span span = span_of(warp_of(), 8, blocks);
    float sum = 0.0f;
    if (inside) {
        const float *from = partials + i / n * blocks * n + i % n;
#pragma unroll 8
        for (int block = span.first; block < span.last; block++) sum += from[block * n];
    }
    parts[warp_of()][lane_of()] = sum;
    __syncthreads();
    if (warp_of() != 0 || !inside) return;
    sum = 0.0f;
    for (int part = 0; part < 8; part++) sum += parts[part][lane_of()];
    sums[i] = (add ? sums[i] : 0.0f) + factor * sum;
}

struct Identity {
    DEVICE double of(float x) { return x; }
};
struct Square {
    DEVICE double of(float x) { return (double)x * x; }
};

// Each thread's elements are 8 blockDim apart; its sums in f64, which no square of an f32
// overflows.
template <class F> DEVICE void chunk_sum(const T *x, double *sums, i64 n, i64 chunk) {
    i64 first = (i64)blockIdx.x * chunk, last = min(first + chunk, n);
    const T *from = x + first;
    bool vectors = aligned(from);
    double sum = 0.0;
    for (i64 i = threadIdx.x * PACK; i < last - first; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(from, i, last - first, vectors, v);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += F::of(v[k]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

KERNEL(chunk_sums)(const T* x, double* sums, long long n, long long chunk) { chunk_sum<Identity>(x, sums, n, chunk); }
KERNEL(chunk_squares)(const T* x, double* sums, long long n, long long chunk) { chunk_sum<Square>(x, sums, n, chunk); }

KERNEL(squared_error)(const T* a, const T* b, double* sums, long long n, long long chunk) {
    i64 first = (i64)blockIdx.x * chunk, last = min(first + chunk, n);
    double sum = 0.0;
    for (i64 i = first + threadIdx.x; i < last; i += blockDim.x) {
        float difference = widen(a[i]) - widen(b[i]);
        sum += (double)difference * difference;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

KERNEL(sum_f64)(const double* x, double* y, long long n) {
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *y = sum;
}

KERNEL(mean_f64)(const double* sums, float* mean, long long count, long long n) {
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *mean = (float)(sum / n);
}

// Counts are integers, whose sum has no order.
KERNEL(nonfinite)(const T* x, unsigned* count, long long n) {
    i64 i = pack_start();
    unsigned found = 0;
    if (i < n) {
        float v[PACK];
        load_pack(x, i, n, aligned(x), v);
#pragma unroll
        for (int k = 0; k < PACK; k++) found += (__float_as_int(v[k]) & 0x7f800000) == 0x7f800000;
    }
    found = warp_sum(found);
    if (lane_of() == 0 && found > 0) atomicAdd(count, found);
}

KERNEL(reduce_rows)(const T* x, T* y, int rows, int columns, int how, float factor) {
    const T *row = x + (i64)blockIdx.x * columns;
    bool vectors = aligned(row);
    float result = how ? NEGATIVE_INFINITY : 0.0f;
    for (int i = threadIdx.x * PACK; i < columns; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(row, i, columns, vectors, v);
#pragma unroll
        for (int k = 0; k < PACK; k++)
            if (how) {
                if (i + k < columns) result = larger(result, v[k]);
            } else {
                result += v[k];
            }
    }
    result = how ? block_max(result) : block_sum(result) * factor;
    if (threadIdx.x == 0) y[blockIdx.x] = narrow(result);
}

struct Best {
    float value;
    unsigned index;
};

// Whether b comes before a: larger, or as large and earlier.
DEVICE bool precedes(Best b, Best a) { return b.value > a.value || (b.value == a.value && b.index < a.index); }

// The first of the block's candidates; UINT_MAX stands for none.
DEVICE Best block_best(Best mine) {
    __shared__ Best found[32];
#pragma unroll
    for (int bits = 16; bits > 0; bits >>= 1) {
        Best other = {__shfl_xor_sync(FULL_WARP, mine.value, bits), __shfl_xor_sync(FULL_WARP, mine.index, bits)};
        if (precedes(other, mine)) mine = other;
    }
    __syncthreads();
    if (lane_of() == 0) found[warp_of()] = mine;
    __syncthreads();
    Best best = found[0];
    for (unsigned i = 1; i < blockDim.x / 32; i++)
        if (precedes(found[i], best)) best = found[i];
    return best;
}

// NaN counts as smallest.
DEVICE float rank_of(T x) {
    float v = widen(x);
    return v == v ? v : NEGATIVE_INFINITY;
}

KERNEL(argmax_rows)(const T* x, unsigned* y, int rows, int columns) {
    const T *row = x + (i64)blockIdx.x * columns;
    Best mine = {NEGATIVE_INFINITY, 0xffffffffu};
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        Best next = {rank_of(row[i]), (unsigned)i};
        if (precedes(next, mine)) mine = next;
    }
    mine = block_best(mine);
    if (threadIdx.x == 0) y[blockIdx.x] = mine.index;
}

// The j-th round finds the first that comes after what the round before found.
KERNEL(top_k)(const T* x, T* values, unsigned* indices, int rows, int columns, int k) {
    const T *row = x + (i64)blockIdx.x * columns;
    Best last = {0.0f, 0};
    for (int j = 0; j < k; j++) {
        Best mine = {NEGATIVE_INFINITY, 0xffffffffu};
        for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            Best next = {rank_of(row[i]), (unsigned)i};
            if ((j == 0 || precedes(last, next)) && precedes(next, mine)) mine = next;
        }
        last = block_best(mine);
        if (threadIdx.x == 0) {
            values[(i64)blockIdx.x * k + j] = row[last.index];
            indices[(i64)blockIdx.x * k + j] = last.index;
        }
    }
}

// The log-sum-exp of a row.
DEVICE float row_lse(const T *row, int columns, bool vectors) {
    float most = NEGATIVE_INFINITY, sum = 0.0f;
    for (int i = threadIdx.x * PACK; i < columns; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(row, i, columns, vectors, v, NEGATIVE_INFINITY);
#pragma unroll
        for (int k = 0; k < PACK; k++) most = larger(most, v[k]);
    }
    most = block_max(most);
    for (int i = threadIdx.x * PACK; i < columns; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(row, i, columns, vectors, v, NEGATIVE_INFINITY);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += i + k < columns ? expf(v[k] - most) : 0.0f;
    }
    return most + logf(block_sum(sum));
}

KERNEL(softmax)(const T* x, T* y, int rows, int columns, int logarithm) {
    i64 at = (i64)blockIdx.x * columns;
    bool vectors = all_aligned(x + at, y + at);
    float lse = row_lse(x + at, columns, vectors);
    for (int i = threadIdx.x * PACK; i < columns; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(x + at, i, columns, vectors, v);
#pragma unroll
        for (int k = 0; k < PACK; k++) v[k] = logarithm ? v[k] - lse : expf(v[k] - lse);
        store_pack(y + at, i, columns, vectors, v);
    }
}

KERNEL(softmax_backward)(const T* dy, const T* y, T* dx, int rows, int columns, int logarithm) {
    i64 at = (i64)blockIdx.x * columns;
    bool vectors = all_aligned(dy + at, y + at, dx + at);
    float sum = 0.0f;
    for (int i = threadIdx.x * PACK; i < columns; i += blockDim.x * PACK) {
        float d[PACK], v[PACK];
        load_pack(dy + at, i, columns, vectors, d);
        load_pack(y + at, i, columns, vectors, v);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += logarithm ? d[k] : d[k] * v[k];
    }
    sum = block_sum(sum);
    for (int i = threadIdx.x * PACK; i < columns; i += blockDim.x * PACK) {
        float d[PACK], v[PACK];
        load_pack(dy + at, i, columns, vectors, d);
        load_pack(y + at, i, columns, vectors, v);
#pragma unroll
        for (int k = 0; k < PACK; k++) d[k] = logarithm ? fmaf(expf(v[k]), -sum, d[k]) : v[k] * (d[k] - sum);
        store_pack(dx + at, i, columns, vectors, d);
    }
}

KERNEL(variance)(const T* x, T* variance, float* mean, int rows, int columns, float divisor) {
    const T *row = x + (i64)blockIdx.x * columns;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += widen(row[i]);
    float centre = block_sum(sum) / columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float v = widen(row[i]) - centre;
        squares = fmaf(v, v, squares);
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = centre;
        variance[blockIdx.x] = narrow(squares / divisor);
    }
}

KERNEL(variance_backward)(const T* dy, const T* x, const float* mean, T* dx, int rows, int columns, float divisor) {
    i64 at = (i64)blockIdx.x * columns;
    float factor = 2.0f * widen(dy[blockIdx.x]) / divisor, centre = mean[blockIdx.x];
    for (int i = threadIdx.x; i < columns; i += blockDim.x) dx[at + i] = narrow((widen(x[at + i]) - centre) * factor);
}

KERNEL(max_backward)(const T* dy, const T* x, const T* y, T* dx, int rows, int columns) {
    i64 at = (i64)blockIdx.x * columns;
    float most = widen(y[blockIdx.x]);
    int count = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) count += widen(x[at + i]) == most;
    count = block_sum(count);
    T part = narrow(widen(dy[blockIdx.x]) / (float)count), zero = narrow(0.0f);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) dx[at + i] = widen(x[at + i]) == most ? part : zero;
}

// Thirty-two at a time within the first warp, each such piece's total carried on.
KERNEL(cumulative_sum)(const T* x, T* y, int rows, int columns, int backward) {
    if (warp_of() != 0) return;
    i64 at = (i64)blockIdx.x * columns;
    float carried = 0.0f;
    for (int first = 0; first < columns; first += 32) {
        int i = first + (int)lane_of();
        int place = backward ? columns - 1 - i : i;
        float sum = i < columns ? widen(x[at + place]) : 0.0f;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            float before = __shfl_up_sync(FULL_WARP, sum, by);
            if ((int)lane_of() >= by) sum += before;
        }
        sum += carried;
        if (i < columns) y[at + place] = narrow(sum);
        carried = __shfl_sync(FULL_WARP, sum, 31);
    }
}

KERNEL(scaled_difference)(const T* a, const T* b, const float* dy, T* y, long long n, float factor) {
    i64 i = pack_start();
    if (i >= n) return;
    bool vectors = all_aligned(a, b, y);
    float v[PACK], w[PACK], scale = factor * *dy;
    load_pack(a, i, n, vectors, v);
    load_pack(b, i, n, vectors, w);
#pragma unroll
    for (int k = 0; k < PACK; k++) v[k] = scale * (v[k] - w[k]);
    store_pack(y, i, n, vectors, v);
}
