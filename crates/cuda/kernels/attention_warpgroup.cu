// Flash attention by products of warpgroups (Shah et al. 2024, "FlashAttention-3"), bf16 or f16
// operands, f32 sums and softmax: for Hopper, where `mma.sync` leaves a third of the tensor cores'
// rate. As in attention_mma.cu a block of two warpgroups owns 128 rows, sixteen a warp, walks the
// columns that any of them is paired with, and computes the gradients of queries and of keys by two
// kernels.
//
// What differs: operands come from shared memory by descriptor, only probabilities and their
// gradients from registers; products run while their warps compute. Forward asks for the next
// tile's scores before the last tile's values are added, so that exponentials and products overlap.
// All warps walk all of a block's tiles, because the four of a warpgroup must multiply together.

// Begins to copy COUNT rows from `first` on, as `copy_pieces` says.
template <int D, int COUNT> DEVICE void copy_tile(T *tile, const T *source, i64 stride, int first, int last, int head_dim) {
    T *to = slot(tile, COUNT, (int)threadIdx.x / (D / 8), (int)threadIdx.x % (D / 8));
    copy_pieces<D, COUNT, COUNT>(to, THREADS / (D / 8) * 64, source, stride, first, last, head_dim);
}

// All copies of all threads have come, and nobody is at what was before.
DEVICE void arrive() {
    wait_copies<0>();
    show_copies();
    __syncthreads();
}

// The first of the warpgroup's 64 rows in the block's.
DEVICE int group_row() { return (int)(warp_of() >> 2) * 64; }

// Begins s = (the warpgroup's rows of `left`) (N rows of `right`)^T.
template <int D, int N> DEVICE void begin_scores(float (&s)[N / 8][4], const T *left, const T *right) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) product(s, along(left, ROWS, group_row(), step), along(right, N, 0, step), step > 0);
    commit_products();
}

template <int N> DEVICE void to_operands(unsigned (&a)[N / 16][4], const float (&p)[N / 8][4]) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) to_operand(a[k], p[2 * k], p[2 * k + 1]);
}

// Begins sum += p (N rows of `tile`).
template <int D, int N> DEVICE void begin_sum(float (&sum)[D / 8][4], const unsigned (&p)[N / 16][4], const T *tile) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) add_product(sum, p[k], across(tile, N, k));
    commit_products();
}

template <int D, int N>
DEVICE void forward(const T *q, const T *kv, T *out, float *lse, Mask mask, Shape h, float scale) {
    OPERANDS_SHARED(memory);
    T *queries = (T *)memory, *keys = queries + ROWS * D, *values = keys + 2 * N * D;
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, last = min(first + ROWS, h.rows), head = (int)blockIdx.y;
    const T *k = kv + (i64)(head / (h.heads / h.kv_heads)) * h.head_dim, *v = k + (i64)h.kv_heads * h.head_dim;
    int row = first + (int)warp_of() * 16;
    // Rows beyond the last take its bounds; what they come to is not stored.
    auto bounds = [&](int query) { return keys_of(mask, min(query, h.rows - 1)); };
    Bounds warp_first = bounds(row), warp_last = bounds(row + 15);
    Bounds mine[2] = {bounds(row + (int)(lane_of() >> 2)), bounds(row + 8 + (int)(lane_of() >> 2))};
    int from = bounds(first).first, to = bounds(last - 1).last, steps = max((to - from + N - 1) / N, 1);
    float factor = scale * LOG2E, keep[2];
    float sum[D / 8][4], s[N / 8][4];
    unsigned p[N / 16][4];
    clear<D>(sum);
    Softmax soft = {{NEGATIVE_INFINITY, NEGATIVE_INFINITY}, {0.0f, 0.0f}};

    // While tile i's keys are multiplied, those of i + 1 and the values of i are on their way.
    auto copy = [&](int i) {
        if (i + 1 < steps) copy_tile<D, N>(keys + (i + 1 & 1) * N * D, k, h.kv_stride, from + (i + 1) * N, to, h.head_dim);
        copy_tile<D, N>(values + (i & 1) * N * D, v, h.kv_stride, from + i * N, to, h.head_dim);
        commit_copies();
    };
    copy_tile<D, ROWS>(queries, q + (i64)head * h.head_dim, h.q_stride, first, last, h.head_dim);
    copy_tile<D, N>(keys, k, h.kv_stride, from, to, h.head_dim);
    commit_copies();
    arrive();
    copy(0);
    begin_products();
    begin_scores<D, N>(s, queries, keys);
    wait_products<0>();
    settle(s);
    soften<N>(soft, s, keep, factor, part_of<N>(warp_first, warp_last, from).all, mine, from);
    to_operands<N>(p, s);
    for (int i = 1; i < steps; i++) {
        int column = from + i * N;
        arrive();
        copy(i);
        settle(sum);
        settle(p);
        begin_products();
        begin_scores<D, N>(s, queries, keys + (i & 1) * N * D);
        begin_sum<D, N>(sum, p, values + (i - 1 & 1) * N * D);
        wait_products<1>();
        settle(s);
        soften<N>(soft, s, keep, factor, part_of<N>(warp_first, warp_last, column).all, mine, column);
        wait_products<0>();
        settle(sum);
        scale_rows<D>(sum, keep);
        to_operands<N>(p, s);
    }
    arrive();
    settle(sum);
    settle(p);
    begin_products();
    begin_sum<D, N>(sum, p, values + (steps - 1 & 1) * N * D);
    wait_products<0>();
    settle(sum);
    float inverse[2];
    finish(soft, inverse, lse + (i64)head * h.rows, mine, row, last);
    store_rows<D>(sum, out + (i64)head * h.head_dim, (i64)h.heads * h.head_dim, row, last, h.head_dim, inverse[0], inverse[1]);
}

// dS = P (dP - delta), dQ = scale dS K, with P from the log-sum-exp and dP = dO V^T.
template <int D, int N>
DEVICE void backward_queries(const T *q, const T *kv, const T *dout, const float *lse, const float *delta, T *dq, Mask mask, Shape h, float scale) {
    OPERANDS_SHARED(memory);
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
    int from = bounds(first).first, to = bounds(last - 1).last, steps = max((to - from + N - 1) / N, 1);

    auto copy = [&](int i) {
        copy_tile<D, N>(keys + (i & 1) * N * D, k, h.kv_stride, from + i * N, to, h.head_dim);
        copy_tile<D, N>(values + (i & 1) * N * D, v, h.kv_stride, from + i * N, to, h.head_dim);
        commit_copies();
    };
    copy_tile<D, ROWS>(queries, q + (i64)head * h.head_dim, h.q_stride, first, last, h.head_dim);
    copy_tile<D, ROWS>(outs, dout + (i64)head * h.head_dim, out_stride, first, last, h.head_dim);
    copy(0);
    float sum[D / 8][4], s[N / 8][4], ds[N / 8][4];
    unsigned a[N / 16][4];
    clear<D>(sum);
    for (int i = 0; i < steps; i++) {
        int column = from + i * N;
        T *k_tile = keys + (i & 1) * N * D, *v_tile = values + (i & 1) * N * D;
        arrive();
        if (i + 1 < steps) copy(i + 1);
        begin_products();
        begin_scores<D, N>(s, queries, k_tile);
        begin_scores<D, N>(ds, outs, v_tile);
        wait_products<1>();
        settle(s);
        bool all = part_of<N>(warp_first, warp_last, column).all;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = power_of_two(s[n][e] * factor - about[e / 2]);
        wait_products<0>();
        settle(ds);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) ds[n][e] = s[n][e] * (ds[n][e] - deltas[e / 2]);
        if (!all) hide<N>(ds, mine, column, 0.0f);
        to_operands<N>(a, ds);
        settle(sum);
        settle(a);
        begin_products();
        begin_sum<D, N>(sum, a, k_tile);
        wait_products<0>();
        settle(sum);
    }
    store_rows<D>(sum, dq + (i64)head * h.head_dim, h.q_stride, row, last, h.head_dim, scale, scale);
}

// dV = P^T dO, dK = scale dS^T Q: rows are keys, columns queries, of each head of the group in
// turn.
template <int D, int N>
DEVICE void backward_keys(const T *q, const T *kv, const T *dout, const float *lse, const float *delta, T *dkv, Mask mask, Shape h, int columns, float scale) {
    OPERANDS_SHARED(memory);
    T *keys = (T *)memory, *values = keys + ROWS * D, *queries = values + ROWS * D, *outs = queries + 2 * N * D;
    float *abouts = (float *)(outs + 2 * N * D), *deltas = abouts + 2 * N;
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
        int head = kv_head * group + i / steps, column = from + i % steps * N, stage = i & 1;
        copy_tile<D, N>(queries + stage * N * D, q + (i64)head * h.head_dim, h.q_stride, column, to, h.head_dim);
        copy_tile<D, N>(outs + stage * N * D, dout + (i64)head * h.head_dim, out_stride, column, to, h.head_dim);
        int at = (int)threadIdx.x % N;
        if (threadIdx.x < 2 * N) {
            const float *source = (threadIdx.x < N ? lse : delta) + (i64)head * columns + column + at;
            copy4_async((threadIdx.x < N ? abouts : deltas) + stage * N + at, source, column + at < to);
        }
        commit_copies();
    };
    copy_tile<D, ROWS>(keys, kv + k_columns, h.kv_stride, first, last, h.head_dim);
    copy_tile<D, ROWS>(values, kv + v_columns, h.kv_stride, first, last, h.head_dim);
    copy(0);
    float dk[D / 8][4], dv[D / 8][4], p[N / 8][4], ds[N / 8][4];
    unsigned a[N / 16][4], b[N / 16][4];
    clear<D>(dk);
    clear<D>(dv);
    for (int i = 0; i < group * steps; i++) {
        int column = from + i % steps * N;
        T *q_tile = queries + (i & 1) * N * D, *o_tile = outs + (i & 1) * N * D;
        // Of the lane's columns.
        const float *about = abouts + (i & 1) * N + 2 * (lane_of() & 3), *delta = deltas + (i & 1) * N + 2 * (lane_of() & 3);
        arrive();
        if (i + 1 < group * steps) copy(i + 1);
        begin_products();
        begin_scores<D, N>(p, keys, q_tile);
        begin_scores<D, N>(ds, values, o_tile);
        wait_products<1>();
        settle(p);
        bool all = part_of<N>(warp_first, warp_last, column).all;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) p[n][e] = power_of_two(p[n][e] * factor - about[8 * n + (e & 1)] * LOG2E);
        if (!all) hide<N>(p, mine, column, 0.0f);
        wait_products<0>();
        settle(ds);
        to_operands<N>(a, p);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) ds[n][e] = p[n][e] * (ds[n][e] - delta[8 * n + (e & 1)]);
        to_operands<N>(b, ds);
        settle(dv);
        settle(dk);
        settle(a);
        settle(b);
        begin_products();
        begin_sum<D, N>(dv, a, o_tile);
        begin_sum<D, N>(dk, b, q_tile);
        wait_products<0>();
        settle(dv);
        settle(dk);
    }
    store_rows<D>(dk, dkv + k_columns, h.kv_stride, row, last, h.head_dim, scale, scale);
    store_rows<D>(dv, dkv + v_columns, h.kv_stride, row, last, h.head_dim, 1.0f, 1.0f);
}

// Two blocks run on a multiprocessor: one multiplies while the other computes exponentials.
KERNEL_BOUNDS(attention_warpgroup_64, THREADS, 2)(const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    forward<64, 64>(q, kv, out, lse, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale);
}
KERNEL_BOUNDS(attention_warpgroup_128, THREADS, 1)(const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    forward<128, 128>(q, kv, out, lse, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale);
}
KERNEL_BOUNDS(attention_backward_queries_warpgroup_64, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_queries<64, 128>(q, kv, dout, lse, delta, dq, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale);
}
KERNEL_BOUNDS(attention_backward_queries_warpgroup_128, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_queries<128, 128>(q, kv, dout, lse, delta, dq, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale);
}
KERNEL_BOUNDS(attention_backward_keys_warpgroup_64, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_keys<64, 128>(q, kv, dout, lse, delta, dkv, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, columns, scale);
}
KERNEL_BOUNDS(attention_backward_keys_warpgroup_128, THREADS, 1)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_keys<128, 64>(q, kv, dout, lse, delta, dkv, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, columns, scale);
}
