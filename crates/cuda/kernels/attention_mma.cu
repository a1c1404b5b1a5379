// Flash attention on tensor cores (Dao 2023, "FlashAttention-2"), bf16 or f16 operands, f32 sums
// and softmax.
//
// A block of eight warps owns 128 rows, sixteen a warp: queries, or keys for the gradients of keys
// and values. It walks the columns that any of its rows is paired with, tile by tile, the next tile
// being copied to shared memory while this one is multiplied. Scores exist only in registers; as
// the fragments of a result are those of a left operand, probabilities go from one product into the
// next without leaving them. For the gradients of keys the scores are computed transposed, so that
// there too the rows are a warp's own.
//
// A row is paired with the columns [first, last) that segments, causality and the window leave it.
// Both bounds rise with the row, so that those of a block of rows go from its first row's first to
// its last row's last. Packed sequences need nothing else: no list of tiles, and one launch
// whatever the bounds. Queries may be some of a sequence and their keys those of other ranks, in
// rows of their own: then the bounds are given, and a row may be paired with nothing.
//
// The gradients are made by two kernels, one for the queries and one for keys and values, each
// recomputing the probabilities from the log-sum-exp: seven products instead of five, but no sum is
// taken by atomic additions, whose order changes from run to run. Grouped heads are added up in the
// block of their keys, in the order of the heads.

// Where eight columns of a row lie in a tile of D columns: turned within eight rows, so that a
// matrix's rows lie in different banks.
template <int D> DEVICE T *place(T *tile, int row, int chunk) { return tile + (row * (D / 8) + (chunk ^ (row & 7))) * 8; }

// Begins to copy COUNT rows from `first` on, as `copy_pieces` says.
template <int D, int COUNT> DEVICE void copy_tile(T *tile, const T *source, i64 stride, int first, int last, int head_dim) {
    T *to = place<D>(tile, (int)threadIdx.x / (D / 8), (int)threadIdx.x % (D / 8));
    copy_pieces<D, COUNT, 4>(to, THREADS / (D / 8) * D, source, stride, first, last, head_dim);
}

// The 16 x 16 left operand: rows from `row` on, columns from 16 `step` on.
template <int D> DEVICE void load_left(unsigned (&a)[4], T *tile, int row, int step) {
    unsigned lane = lane_of();
    load_matrices(a, place<D>(tile, row + (int)(lane & 15), 2 * step + (int)(lane >> 4)), false);
}

// s += (16 rows of columns `step`) (N rows of `tile`)^T
template <int D, int N> DEVICE void multiply_step(float (&s)[N / 8][4], const unsigned (&a)[4], T *tile, int step) {
    unsigned lane = lane_of();
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
        unsigned b[4];
        load_matrices(b, place<D>(tile, 16 * n + (int)(lane >> 4) * 8 + (int)(lane & 7), 2 * step + (int)(lane >> 3 & 1)), false);
        mma(s[2 * n], a, b[0], b[1]);
        mma(s[2 * n + 1], a, b[2], b[3]);
    }
}

// s = (16 rows of `left` from `row` on) (N rows of `right`)^T
template <int D, int N> DEVICE void multiply(float (&s)[N / 8][4], T *left, int row, T *right) {
    clear<N>(s);
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        unsigned a[4];
        load_left<D>(a, left, row, step);
        multiply_step<D, N>(s, a, right, step);
    }
}

// sum += p (N rows of `tile`), p being 16 x N in the fragments of a result.
template <int D, int N> DEVICE void add_product(float (&sum)[D / 8][4], const float (&p)[N / 8][4], T *tile) {
    unsigned lane = lane_of();
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        unsigned a[4];
        to_operand(a, p[2 * k], p[2 * k + 1]);
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            unsigned b[4];
            load_matrices(b, place<D>(tile, 16 * k + (int)(lane & 15), 2 * d + (int)(lane >> 4)), true);
            mma(sum[2 * d], a, b[0], b[1]);
            mma(sum[2 * d + 1], a, b[2], b[3]);
        }
    }
}

// Adds the numbers of their distances to scores that are yet to be multiplied by the scale: of
// `unit`, its inverse, each. SIGN is 1 where rows are queries and -1 where they are keys. Pairs that
// are hidden later may be further apart than distances reach.
template <int N, int SIGN> DEVICE void add_distances(float (&s)[N / 8][4], const Distances &d, int head, int row, int column, float unit) {
    const float *of_head = distances_of(d, head);
    int first = d.reach - 1 + SIGN * (row + (int)(lane_of() >> 2) - column - 2 * (int)(lane_of() & 3)), most = 2 * d.reach - 2;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = first + SIGN * (8 * (i / 2) - 8 * n - i % 2);
            s[n][i] = fmaf(of_head[min(max(at, 0), most)], unit, s[n][i]);
        }
}

template <int D, int N>
DEVICE void forward(const T *q, const T *kv, T *out, float *lse, Mask mask, Shape h, float scale, Distances d) {
    DYNAMIC_SHARED(memory);
    T *queries = (T *)memory, *keys = queries + ROWS * D, *values = keys + 2 * N * D;
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, last = min(first + ROWS, h.rows), head = (int)blockIdx.y;
    const T *k = kv + (i64)(head / (h.heads / h.kv_heads)) * h.head_dim, *v = k + (i64)h.kv_heads * h.head_dim;
    int row = first + (int)warp_of() * 16;
    // Rows beyond the last take its bounds; what they come to is not stored.
    auto bounds = [&](int query) { return keys_of(mask, min(query, h.rows - 1)); };
    Bounds warp_first = bounds(row), warp_last = bounds(row + 15);
    Bounds mine[2] = {bounds(row + (int)(lane_of() >> 2)), bounds(row + 8 + (int)(lane_of() >> 2))};
    int from = bounds(first).first, to = bounds(last - 1).last;

    copy_tile<D, ROWS>(queries, q + (i64)head * h.head_dim, h.q_stride, first, last, h.head_dim);
    copy_tile<D, N>(keys, k, h.kv_stride, from, to, h.head_dim);
    copy_tile<D, N>(values, v, h.kv_stride, from, to, h.head_dim);
    commit_copies();
    float sum[D / 8][4];
    clear<D>(sum);
    Softmax soft = {{NEGATIVE_INFINITY, NEGATIVE_INFINITY}, {0.0f, 0.0f}};
    unsigned a[D / 16][4];
    float factor = scale * LOG2E;
    for (int column = from, stage = 0; column < to; column += N, stage ^= 1) {
        wait_copies<0>();
        __syncthreads();
        if (column == from) {
#pragma unroll
            for (int step = 0; step < D / 16; step++) load_left<D>(a[step], queries, (int)warp_of() * 16, step);
        }
        if (column + N < to) {
            copy_tile<D, N>(keys + (stage ^ 1) * N * D, k, h.kv_stride, column + N, to, h.head_dim);
            copy_tile<D, N>(values + (stage ^ 1) * N * D, v, h.kv_stride, column + N, to, h.head_dim);
            commit_copies();
        }
        Part part = part_of<N>(warp_first, warp_last, column);
        if (part.none) continue;
        float s[N / 8][4];
        clear<N>(s);
#pragma unroll
        for (int step = 0; step < D / 16; step++) multiply_step<D, N>(s, a[step], keys + stage * N * D, step);
        if (d.all) add_distances<N, 1>(s, d, head, row, column, 1.0f / scale);
        float keep[2];
        soften<N>(soft, s, keep, factor, part.all, mine, column);
        scale_rows<D>(sum, keep);
        add_product<D, N>(sum, s, values + stage * N * D);
    }
    float inverse[2];
    finish(soft, inverse, lse + (i64)head * h.rows, mine, row, last);
    store_rows<D>(sum, out + (i64)head * h.head_dim, (i64)h.heads * h.head_dim, row, last, h.head_dim, inverse[0], inverse[1]);
}

// dS = P (dP - delta), dQ = scale dS K, with P from the log-sum-exp and dP = dO V^T.
template <int D, int N>
DEVICE void backward_queries(const T *q, const T *kv, const T *dout, const float *lse, const float *delta, T *dq, Mask mask, Shape h, float scale, Distances d) {
    DYNAMIC_SHARED(memory);
    T *queries = (T *)memory, *outs = queries + ROWS * D, *keys = outs + ROWS * D, *values = keys + 2 * N * D;
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, last = min(first + ROWS, h.rows), head = (int)blockIdx.y;
    i64 out_stride = (i64)h.heads * h.head_dim;
    const T *k = kv + (i64)(head / (h.heads / h.kv_heads)) * h.head_dim, *v = k + (i64)h.kv_heads * h.head_dim;
    int row = first + (int)warp_of() * 16;
    auto bounds = [&](int query) { return keys_of(mask, min(query, h.rows - 1)); };
    Bounds warp_first = bounds(row), warp_last = bounds(row + 15);
    Bounds mine[2];
    float about[2], deltas[2], factor = scale * LOG2E;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int query = min(row + 8 * r + (int)(lane_of() >> 2), h.rows - 1);
        mine[r] = bounds(query);
        about[r] = lse[(i64)head * h.rows + query] * LOG2E;
        deltas[r] = delta[(i64)head * h.rows + query];
    }
    int from = bounds(first).first, to = bounds(last - 1).last;

    copy_tile<D, ROWS>(queries, q + (i64)head * h.head_dim, h.q_stride, first, last, h.head_dim);
    copy_tile<D, ROWS>(outs, dout + (i64)head * h.head_dim, out_stride, first, last, h.head_dim);
    copy_tile<D, N>(keys, k, h.kv_stride, from, to, h.head_dim);
    copy_tile<D, N>(values, v, h.kv_stride, from, to, h.head_dim);
    commit_copies();
    float sum[D / 8][4];
    clear<D>(sum);
    for (int column = from, stage = 0; column < to; column += N, stage ^= 1) {
        wait_copies<0>();
        __syncthreads();
        if (column + N < to) {
            copy_tile<D, N>(keys + (stage ^ 1) * N * D, k, h.kv_stride, column + N, to, h.head_dim);
            copy_tile<D, N>(values + (stage ^ 1) * N * D, v, h.kv_stride, column + N, to, h.head_dim);
            commit_copies();
        }
        Part part = part_of<N>(warp_first, warp_last, column);
        if (part.none) continue;
        float s[N / 8][4], ds[N / 8][4];
        multiply<D, N>(s, queries, (int)warp_of() * 16, keys + stage * N * D);
        multiply<D, N>(ds, outs, (int)warp_of() * 16, values + stage * N * D);
        if (d.all) add_distances<N, 1>(s, d, head, row, column, 1.0f / scale);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float p = power_of_two(s[n][i] * factor - about[i / 2]);
                ds[n][i] = p * (ds[n][i] - deltas[i / 2]);
            }
        if (!part.all) hide<N>(ds, mine, column, 0.0f);
        add_product<D, N>(sum, ds, keys + stage * N * D);
    }
    store_rows<D>(sum, dq + (i64)head * h.head_dim, h.q_stride, row, last, h.head_dim, scale, scale);
}

// dV = P^T dO, dK = scale dS^T Q: rows are keys, columns queries, of each head of the group in
// turn.
template <int D, int N>
DEVICE void backward_keys(const T *q, const T *kv, const T *dout, const float *lse, const float *delta, T *dkv, Mask mask, Shape h, int columns, float scale, Distances d) {
    DYNAMIC_SHARED(memory);
    T *keys = (T *)memory, *values = keys + ROWS * D, *queries = values + ROWS * D, *outs = queries + 2 * N * D;
    int first = (int)blockIdx.x * ROWS, last = min(first + ROWS, h.rows), kv_head = (int)blockIdx.y, group = h.heads / h.kv_heads;
    i64 out_stride = (i64)h.heads * h.head_dim, k_columns = (i64)kv_head * h.head_dim, v_columns = k_columns + (i64)h.kv_heads * h.head_dim;
    int row = first + (int)warp_of() * 16;
    auto bounds = [&](int key) { return queries_of(mask, min(key, h.rows - 1)); };
    Bounds warp_first = bounds(row), warp_last = bounds(row + 15);
    Bounds mine[2] = {bounds(row + (int)(lane_of() >> 2)), bounds(row + 8 + (int)(lane_of() >> 2))};
    int from = bounds(first).first, to = bounds(last - 1).last, steps = max((to - from + N - 1) / N, 1);
    float factor = scale * LOG2E;

    // Tile `i` of the walk over all heads of the group and their queries.
    auto copy = [&](int i) {
        i64 head = (i64)(kv_head * group + i / steps) * h.head_dim;
        int column = from + i % steps * N;
        copy_tile<D, N>(queries + (i & 1) * N * D, q + head, h.q_stride, column, to, h.head_dim);
        copy_tile<D, N>(outs + (i & 1) * N * D, dout + head, out_stride, column, to, h.head_dim);
        commit_copies();
    };
    copy_tile<D, ROWS>(keys, kv + k_columns, h.kv_stride, first, last, h.head_dim);
    copy_tile<D, ROWS>(values, kv + v_columns, h.kv_stride, first, last, h.head_dim);
    copy(0);
    float dk[D / 8][4], dv[D / 8][4];
    clear<D>(dk);
    clear<D>(dv);
    for (int i = 0; i < group * steps; i++) {
        wait_copies<0>();
        __syncthreads();
        if (i + 1 < group * steps) copy(i + 1);
        int column = from + i % steps * N;
        Part part = part_of<N>(warp_first, warp_last, column);
        if (part.none) continue;
        const float *lses = lse + (i64)(kv_head * group + i / steps) * columns, *deltas = delta + (lses - lse);
        T *q_tile = queries + (i & 1) * N * D, *o_tile = outs + (i & 1) * N * D;
        float p[N / 8][4], ds[N / 8][4];
        multiply<D, N>(p, keys, (int)warp_of() * 16, q_tile);
        if (d.all) add_distances<N, -1>(p, d, kv_head * group + i / steps, row, column, 1.0f / scale);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int query = min(column + 8 * n + 2 * (int)(lane_of() & 3) + j, columns - 1);
                float about = lses[query] * LOG2E;
#pragma unroll
                for (int e = j; e < 4; e += 2) p[n][e] = power_of_two(p[n][e] * factor - about);
            }
        // Asked of every tile here: a branch would take more registers than there are.
        hide<N>(p, mine, column, 0.0f);
        add_product<D, N>(dv, p, o_tile);
        multiply<D, N>(ds, values, (int)warp_of() * 16, o_tile);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int query = min(column + 8 * n + 2 * (int)(lane_of() & 3) + (e & 1), columns - 1);
                ds[n][e] = p[n][e] * (ds[n][e] - deltas[query]);
            }
        add_product<D, N>(dk, ds, q_tile);
    }
    store_rows<D>(dk, dkv + k_columns, h.kv_stride, row, last, h.head_dim, scale, scale);
    store_rows<D>(dv, dkv + v_columns, h.kv_stride, row, last, h.head_dim, 1.0f, 1.0f);
}

KERNEL_BOUNDS(attention_mma_64, THREADS, 1)(const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    forward<64, 64>(q, kv, out, lse, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{nullptr, 0});
}
KERNEL_BOUNDS(attention_mma_128, THREADS, 1)(const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    forward<128, 64>(q, kv, out, lse, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{nullptr, 0});
}
KERNEL_BOUNDS(attention_backward_queries_mma_64, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_queries<64, 64>(q, kv, dout, lse, delta, dq, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{nullptr, 0});
}
KERNEL_BOUNDS(attention_backward_queries_mma_128, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_queries<128, 32>(q, kv, dout, lse, delta, dq, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{nullptr, 0});
}
KERNEL_BOUNDS(attention_backward_keys_mma_64, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_keys<64, 64>(q, kv, dout, lse, delta, dkv, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, columns, scale, Distances{nullptr, 0});
}
KERNEL_BOUNDS(attention_backward_keys_mma_128, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_keys<128, 32>(q, kv, dout, lse, delta, dkv, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, columns, scale, Distances{nullptr, 0});
}

// The gradient of the numbers of distances, as `attention_bias_gradient`.
template <int D, int N>
DEVICE void bias_gradient(const T *q, const T *kv, const T *dout, const float *lse, const float *delta, float *partials, Mask mask, Shape h, float scale, Distances d, int parts) {
    DYNAMIC_SHARED(memory);
    T *queries = (T *)memory, *outs = queries + ROWS * D, *keys = outs + ROWS * D, *values = keys + N * D;
    Shifts shifts = shifts_of(d.reach, ROWS, N);
    int head = (int)blockIdx.y, part = (int)blockIdx.x / shifts.count, shift = ((int)blockIdx.x % shifts.count - shifts.before) * N;
    const T *k = kv + (i64)(head / (h.heads / h.kv_heads)) * h.head_dim, *v = k + (i64)h.kv_heads * h.head_dim;
    auto bounds = [&](int query) { return keys_of(mask, min(query, h.rows - 1)); };
    float sum[N / 8][4], factor = scale * LOG2E;
    clear<N>(sum);
    for (int first = part * ROWS; first < h.rows; first += parts * ROWS) {
        int last = min(first + ROWS, h.rows), column = first - shift, row = first + (int)warp_of() * 16;
        int from = bounds(first).first, to = bounds(last - 1).last;
        if (column + N <= from || column >= to) continue;
        __syncthreads();
        copy_tile<D, ROWS>(queries, q + (i64)head * h.head_dim, h.q_stride, first, last, h.head_dim);
        copy_tile<D, ROWS>(outs, dout + (i64)head * h.head_dim, (i64)h.heads * h.head_dim, first, last, h.head_dim);
        copy_tile<D, N>(keys, k, h.kv_stride, column, to, h.head_dim);
        copy_tile<D, N>(values, v, h.kv_stride, column, to, h.head_dim);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        Part of_warp = part_of<N>(bounds(row), bounds(row + 15), column);
        if (of_warp.none || row >= last) continue;
        Bounds mine[2];
        float about[2], deltas[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int query = row + 8 * r + (int)(lane_of() >> 2);
            // Rows beyond the last are paired with nothing.
            mine[r] = query < last ? bounds(query) : Bounds{0, 0};
            query = min(query, h.rows - 1);
            about[r] = lse[(i64)head * h.rows + query] * LOG2E;
            deltas[r] = delta[(i64)head * h.rows + query];
        }
        float s[N / 8][4], ds[N / 8][4];
        multiply<D, N>(s, queries, (int)warp_of() * 16, keys);
        multiply<D, N>(ds, outs, (int)warp_of() * 16, values);
        add_distances<N, 1>(s, d, head, row, column, 1.0f / scale);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float p = power_of_two(s[n][i] * factor - about[i / 2]);
                ds[n][i] = p * (ds[n][i] - deltas[i / 2]);
            }
        hide<N>(ds, mine, column, 0.0f);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] += ds[n][i];
    }
    __syncthreads();
    float *found = (float *)memory;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = (int)warp_of() * 16 + 8 * (i / 2) + (int)(lane_of() >> 2);
            found[row * N + 8 * n + 2 * (int)(lane_of() & 3) + i % 2] = sum[n][i];
        }
    __syncthreads();
    sum_diagonals<ROWS, N>(found, N, partials + (((i64)head * parts + part) * shifts.count + (int)blockIdx.x % shifts.count) * (ROWS + N - 1));
}

KERNEL_BOUNDS(attention_biased_mma_64, THREADS, 1)(const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    forward<64, 64>(q, kv, out, lse, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{bias, reach});
}
KERNEL_BOUNDS(attention_biased_mma_128, THREADS, 1)(const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    forward<128, 64>(q, kv, out, lse, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{bias, reach});
}
KERNEL_BOUNDS(attention_biased_backward_queries_mma_64, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    backward_queries<64, 64>(q, kv, dout, lse, delta, dq, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{bias, reach});
}
KERNEL_BOUNDS(attention_biased_backward_queries_mma_128, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    backward_queries<128, 32>(q, kv, dout, lse, delta, dq, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{bias, reach});
}
KERNEL_BOUNDS(attention_biased_backward_keys_mma_64, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    backward_keys<64, 32>(q, kv, dout, lse, delta, dkv, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, columns, scale, Distances{bias, reach});
}
KERNEL_BOUNDS(attention_biased_backward_keys_mma_128, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    backward_keys<128, 16>(q, kv, dout, lse, delta, dkv, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, columns, scale, Distances{bias, reach});
}
KERNEL_BOUNDS(attention_bias_gradient_mma_64, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, float* partials, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach, int parts) {
    bias_gradient<64, 64>(q, kv, dout, lse, delta, partials, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{bias, reach}, parts);
}
KERNEL_BOUNDS(attention_bias_gradient_mma_128, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, float* partials, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach, int parts) {
    bias_gradient<128, 64>(q, kv, dout, lse, delta, partials, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{bias, reach}, parts);
}
