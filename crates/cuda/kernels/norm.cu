// Root-mean-square and layer norm, forward and backward, and that of query and key heads.
//
// Forward takes a block a row; the row is read again from the first-level cache when it is scaled.
// Backward takes some consecutive rows a block, short rows a warp each and long ones one after
// another, and sums the parameters' gradients over them in shared memory, where a thread has
// columns of its own: no step of the sum waits for another thread. The warps' sums are added up in
// their order, the blocks' in theirs by `sum_partials`.

// Columns up to which backward gives a row to a warp: `SHORT_ROW` of kernels/launch.rs, which sizes
// the shared memory.
#define SHORT_ROW 1024

DEVICE float row_sum_of_squares(const T *x, int dim, bool vectors, float centre) {
    float sum = 0.0f;
    for (int i = threadIdx.x * PACK; i < dim; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(x, i, dim, vectors, v, centre);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += (v[k] - centre) * (v[k] - centre);
    }
    return block_sum(sum);
}

// y = (x - mean) inv weight + bias
DEVICE void scale_row(const T *x, const T *weight, const T *bias, T *y, int dim, bool vectors, float mean, float inv) {
    for (int i = threadIdx.x * PACK; i < dim; i += blockDim.x * PACK) {
        float v[PACK], w[PACK], b[PACK];
        load_pack(x, i, dim, vectors, v);
        load_pack(weight, i, dim, vectors, w);
        if (bias) load_pack(bias, i, dim, vectors, b);
#pragma unroll
        for (int k = 0; k < PACK; k++) v[k] = (v[k] - mean) * inv * w[k] + (bias ? b[k] : 0.0f);
        store_pack(y, i, dim, vectors, v);
    }
}

KERNEL(rms_norm)(const T* x, const T* weight, T* y, float* inv_rms, int rows, int dim, float eps) {
    i64 at = (i64)blockIdx.x * dim;
    bool vectors = all_aligned(x + at, y + at, weight);
    float inv = rsqrtf(row_sum_of_squares(x + at, dim, vectors, 0.0f) / dim + eps);
    if (threadIdx.x == 0) inv_rms[blockIdx.x] = inv;
    scale_row(x + at, weight, nullptr, y + at, dim, vectors, 0.0f, inv);
}

KERNEL(layer_norm)(const T* x, const T* weight, const T* bias, T* y, float* mean, float* inv_std, int rows, int dim, float eps) {
    i64 at = (i64)blockIdx.x * dim;
    bool vectors = all_aligned(x + at, y + at, weight, bias);
    float sum = 0.0f;
    for (int i = threadIdx.x * PACK; i < dim; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(x + at, i, dim, vectors, v);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += v[k];
    }
    float centre = block_sum(sum) / dim;
    float inv = rsqrtf(row_sum_of_squares(x + at, dim, vectors, centre) / dim + eps);
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = centre;
        inv_std[blockIdx.x] = inv;
    }
    scale_row(x + at, weight, bias, y + at, dim, vectors, centre, inv);
}

// Where the gradient of a parameter lies among those of a row's `packs`: lanes, which have
// neighbouring packs, then are at neighbouring addresses and so in different banks.
DEVICE int spot(int column, int packs) { return column % PACK * packs + column / PACK; }

// Of a row with x^ = (x - mean) inv and g = dy weight: dx = base + inv (g - m0 - x^ m1), m1 the
// mean of g x^ and m0 that of g (0 for RMS norm). SHORT: a warp takes a row, else the block does.
template <bool CENTRED, bool SHORT>
DEVICE void norm_rows_backward(const T *dy, const T *x, const T *weight, const float *mean, const float *inv_std, const T *base, T *dx,
                               float *weight_partials, float *bias_partials, int rows, int dim) {
    DYNAMIC_SHARED(gradients);
    int teams = SHORT ? (int)blockDim.x / 32 : 1, team = SHORT ? (int)warp_of() : 0;
    int first = (SHORT ? (int)lane_of() : (int)threadIdx.x) * PACK, step = (SHORT ? 32 : (int)blockDim.x) * PACK;
    int packs = (dim + PACK - 1) / PACK, size = packs * PACK;
    float *all_dw = (float *)gradients, *all_db = all_dw + (CENTRED ? teams * size : 0);
    float *dw = all_dw + team * size, *db = all_db + team * size;
    for (int i = first; i < dim; i += step)
#pragma unroll
        for (int k = 0; k < PACK; k++) dw[spot(i + k, packs)] = db[spot(i + k, packs)] = 0.0f;
    Span span = span_of(blockIdx.x, gridDim.x, rows);
    for (int row = span.first + team; row < span.last; row += teams) {
        i64 at = (i64)row * dim;
        bool vectors = all_aligned(dy + at, x + at, dx + at, weight, base ? base + at : base);
        float centre = CENTRED ? mean[row] : 0.0f, inv = inv_std[row];
        float sum = 0.0f, dot = 0.0f;
        for (int i = first; i < dim; i += step) {
            float g[PACK], v[PACK], w[PACK];
            load_pack(dy + at, i, dim, vectors, g);
            load_pack(x + at, i, dim, vectors, v, centre);
            load_pack(weight, i, dim, vectors, w);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                if (CENTRED) sum += g[k] * w[k];
                dot += g[k] * w[k] * (v[k] - centre);
            }
        }
        if (CENTRED) sum = (SHORT ? warp_sum(sum) : block_sum(sum)) / dim;
        dot = (SHORT ? warp_sum(dot) : block_sum(dot)) / dim * inv * inv;
        for (int i = first; i < dim; i += step) {
            float g[PACK], v[PACK], w[PACK], b[PACK];
            load_pack(dy + at, i, dim, vectors, g);
            load_pack(x + at, i, dim, vectors, v, centre);
            load_pack(weight, i, dim, vectors, w);
            if (base) load_pack(base + at, i, dim, vectors, b);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                v[k] -= centre;
                // Beyond the last column are sums that nobody reads.
                dw[spot(i + k, packs)] += g[k] * v[k] * inv;
                if (CENTRED) db[spot(i + k, packs)] += g[k];
                v[k] = inv * (g[k] * w[k] - sum - v[k] * dot) + (base ? b[k] : 0.0f);
            }
            store_pack(dx + at, i, dim, vectors, v);
        }
    }
    __syncthreads();
    i64 at = (i64)blockIdx.x * dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float w = 0.0f, b = 0.0f;
        for (int t = 0; t < teams; t++) {
            w += all_dw[t * size + spot(i, packs)];
            if (CENTRED) b += all_db[t * size + spot(i, packs)];
        }
        if (weight_partials) weight_partials[at + i] = w;
        if (CENTRED && bias_partials) bias_partials[at + i] = b;
    }
}

template <bool CENTRED>
DEVICE void norm_backward(const T *dy, const T *x, const T *weight, const float *mean, const float *inv_std, const T *base, T *dx,
                          float *weight_partials, float *bias_partials, int rows, int dim) {
    if (dim <= SHORT_ROW)
        norm_rows_backward<CENTRED, true>(dy, x, weight, mean, inv_std, base, dx, weight_partials, bias_partials, rows, dim);
    else
        norm_rows_backward<CENTRED, false>(dy, x, weight, mean, inv_std, base, dx, weight_partials, bias_partials, rows, dim);
}

KERNEL(rms_norm_backward)(const T* dy, const T* x, const T* weight, const float* inv_rms, const T* base, T* dx, float* partials, int rows, int dim) {
    norm_backward<false>(dy, x, weight, nullptr, inv_rms, base, dx, partials, nullptr, rows, dim);
}

KERNEL(layer_norm_backward)(const T* dy, const T* x, const T* weight, const float* mean, const float* inv_std, const T* base, T* dx, float* weight_partials, float* bias_partials, int rows, int dim) {
    norm_backward<true>(dy, x, weight, mean, inv_std, base, dx, weight_partials, bias_partials, rows, dim);
}

// A warp a head; where its inverse rms lies: the queries' heads of all rows first, then the keys'.
DEVICE i64 head_statistic(int row, int head, int rows, int heads, int kv_heads) {
    return head < heads ? (i64)row * heads + head : (i64)rows * heads + (i64)row * kv_heads + head - heads;
}

KERNEL(qk_norm)(const T* x, const T* wq, const T* wk, T* y, float* inv_rms, int rows, int heads, int kv_heads, int head_dim, float eps) {
    int all = heads + 2 * kv_heads;
    i64 unit = (i64)blockIdx.x * (blockDim.x / 32) + warp_of();
    if (unit >= (i64)rows * all) return;
    int row = (int)(unit / all), head = (int)(unit % all);
    i64 at = unit * head_dim;
    if (head >= heads + kv_heads) {
        for (int i = lane_of(); i < head_dim; i += 32) y[at + i] = x[at + i];
        return;
    }
    const T *weight = head < heads ? wq : wk;
    float sum = 0.0f;
    for (int i = lane_of(); i < head_dim; i += 32) {
        float v = widen(x[at + i]);
        sum += v * v;
    }
    float inv = rsqrtf(warp_sum(sum) / head_dim + eps);
    if (lane_of() == 0) inv_rms[head_statistic(row, head, rows, heads, kv_heads)] = inv;
    for (int i = lane_of(); i < head_dim; i += 32) y[at + i] = narrow(widen(x[at + i]) * inv * widen(weight[i]));
}

// Warps take the heads of the block's rows in turn; each sums the weights' gradients of its own
// heads, and the eight sums are added in order.
KERNEL(qk_norm_backward)(T* gradient, const T* x, const T* wq, const T* wk, const float* inv_rms, float* q_partials, float* k_partials, int rows, int heads, int kv_heads, int head_dim) {
    DYNAMIC_SHARED(head_gradients);
    unsigned warps = blockDim.x / 32;
    float *q_sums = (float *)head_gradients, *k_sums = q_sums + warps * head_dim;
    for (int i = threadIdx.x; i < 2 * (int)warps * head_dim; i += blockDim.x) q_sums[i] = 0.0f;
    __syncthreads();
    Span span = span_of(blockIdx.x, gridDim.x, rows);
    int normed = heads + kv_heads, all = heads + 2 * kv_heads;
    for (i64 unit = warp_of(); unit < (i64)(span.last - span.first) * normed; unit += warps) {
        int row = span.first + (int)(unit / normed), head = (int)(unit % normed);
        i64 at = ((i64)row * all + head) * head_dim;
        const T *weight = head < heads ? wq : wk;
        float *sums = (head < heads ? q_sums : k_sums) + warp_of() * head_dim;
        float inv = inv_rms[head_statistic(row, head, rows, heads, kv_heads)], dot = 0.0f;
        for (int i = lane_of(); i < head_dim; i += 32) dot += widen(gradient[at + i]) * widen(weight[i]) * widen(x[at + i]);
        dot = warp_sum(dot) / head_dim * inv * inv;
        for (int i = lane_of(); i < head_dim; i += 32) {
            float g = widen(gradient[at + i]), v = widen(x[at + i]);
            sums[i] += g * v * inv;
            gradient[at + i] = narrow(inv * (g * widen(weight[i]) - v * dot));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
        float q = 0.0f, k = 0.0f;
        for (unsigned warp = 0; warp < warps; warp++) {
            q += q_sums[warp * head_dim + i];
            k += k_sums[warp * head_dim + i];
        }
        if (q_partials) q_partials[(i64)blockIdx.x * head_dim + i] = q;
        if (k_partials) k_partials[(i64)blockIdx.x * head_dim + i] = k;
    }
}
