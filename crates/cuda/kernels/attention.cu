// Attention by multiply-adds in f32: every dtype, heads of up to 256 columns; decoding over a
// cache; and what both forms of attention need.
//
// A block of four warps owns 16 rows, four a warp (see attention_mma.cu for what rows and columns
// are); columns come in tiles of 32, one a lane, in shared memory as f32. A lane makes the scores
// of its column with the warp's four rows; sums over columns are kept with the columns of the head
// across the lanes.

#define ROWS 16
#define OWN 4
#define COLUMNS 32
// Columns of the head that a lane holds: 32 apart, 256 in all.
#define PARTS 8

// `count` rows from `first` on to shared memory, `pitch` apart; zeros before row 0, at `last` and
// beyond.
DEVICE void copy_rows(float *target, int pitch, int count, const T *source, i64 stride, int first, int last, int columns) {
    for (int i = threadIdx.x; i < count * columns; i += blockDim.x) {
        int row = i / columns, column = i % columns;
        target[row * pitch + column] = (unsigned)(first + row) < (unsigned)last ? widen(source[(first + row) * stride + column]) : 0.0f;
    }
}

// s[r] = row r of the warp's four rows of `left` times the lane's row of `right`.
DEVICE void multiply(float (&s)[OWN], const float *left, const float *right, int columns) {
#pragma unroll
    for (int r = 0; r < OWN; r++) s[r] = 0.0f;
    const float *l = left + warp_of() * OWN * columns, *mine = right + lane_of() * (columns + 1);
    for (int c = 0; c < columns; c++) {
        float v = mine[c];
#pragma unroll
        for (int r = 0; r < OWN; r++) s[r] = fmaf(l[r * columns + c], v, s[r]);
    }
}

// sum[r] += the sum over lanes of their p[r] times their row of `right`.
DEVICE void add_product(float (&sum)[OWN][PARTS], const float (&p)[OWN], const float *right, int columns) {
    for (int k = 0; k < COLUMNS; k++) {
        float each[OWN];
#pragma unroll
        for (int r = 0; r < OWN; r++) each[r] = __shfl_sync(FULL_WARP, p[r], k);
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            int column = (int)lane_of() + 32 * j;
            if (column < columns) {
                float v = right[k * (columns + 1) + column];
#pragma unroll
                for (int r = 0; r < OWN; r++) sum[r][j] = fmaf(each[r], v, sum[r][j]);
            }
        }
    }
}

DEVICE void clear(float (&sum)[OWN][PARTS]) {
#pragma unroll
    for (int r = 0; r < OWN; r++)
#pragma unroll
        for (int j = 0; j < PARTS; j++) sum[r][j] = 0.0f;
}

DEVICE void store_rows(const float (&sum)[OWN][PARTS], T *target, i64 stride, int row, int last, int columns, const float (&factor)[OWN]) {
#pragma unroll
    for (int r = 0; r < OWN; r++)
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            int column = (int)lane_of() + 32 * j;
            if (row + r < last && column < columns) target[(row + r) * stride + column] = narrow(sum[r][j] * factor[r]);
        }
}

// A score with the number of its distance, if there are any.
DEVICE float with_distance(float score, const Distances &d, int head, int query, int key) {
    return d.all ? score + distances_of(d, head)[d.reach - 1 + query - key] : score;
}

DEVICE void forward(const T *q, const T *kv, T *out, float *lse, Mask mask, Shape h, float scale, Distances d) {
    const int rows = h.rows, head_dim = h.head_dim;
    DYNAMIC_SHARED(tiles);
    float *queries = (float *)tiles, *keys = queries + ROWS * head_dim, *values = keys + COLUMNS * (head_dim + 1);
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, last = min(first + ROWS, rows), head = (int)blockIdx.y;
    const T *k = kv + (i64)(head / (h.heads / h.kv_heads)) * head_dim, *v = k + (i64)h.kv_heads * head_dim;
    int row = first + (int)warp_of() * OWN, from = keys_of(mask, first).first, to = keys_of(mask, last - 1).last;
    Bounds mine[OWN];
    float sum[OWN][PARTS], most[OWN], total[OWN], inverse[OWN];
    clear(sum);
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        mine[r] = keys_of(mask, min(row + r, rows - 1));
        most[r] = NEGATIVE_INFINITY;
        total[r] = 0.0f;
    }
    copy_rows(queries, head_dim, ROWS, q + (i64)head * head_dim, h.q_stride, first, last, head_dim);
    for (int column = from; column < to; column += COLUMNS) {
        __syncthreads();
        copy_rows(keys, head_dim + 1, COLUMNS, k, h.kv_stride, column, to, head_dim);
        copy_rows(values, head_dim + 1, COLUMNS, v, h.kv_stride, column, to, head_dim);
        __syncthreads();
        float s[OWN];
        multiply(s, queries, keys, head_dim);
        int at = column + (int)lane_of();
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            bool seen = at >= mine[r].first && at < mine[r].last;
            s[r] = seen ? with_distance(s[r] * scale, d, head, min(row + r, rows - 1), at) : NEGATIVE_INFINITY;
            float top = larger(most[r], warp_max(s[r]));
            float shift = top == NEGATIVE_INFINITY ? 0.0f : top, keep = expf(most[r] - shift);
            most[r] = top;
            s[r] = expf(s[r] - shift);
            total[r] = total[r] * keep + s[r];
#pragma unroll
            for (int j = 0; j < PARTS; j++) sum[r][j] *= keep;
        }
        add_product(sum, s, values, head_dim);
    }
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        total[r] = warp_sum(total[r]);
        // A sum of 0 where something is seen is an infinite score: it shall not look like a result.
        inverse[r] = mine[r].first < mine[r].last ? 1.0f / total[r] : 0.0f;
        if (lane_of() == 0 && row + r < last) lse[(i64)head * rows + row + r] = most[r] + logf(total[r]);
    }
    store_rows(sum, out + (i64)head * head_dim, (i64)h.heads * head_dim, row, last, head_dim, inverse);
}

KERNEL(attention)(const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    forward(q, kv, out, lse, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{nullptr, 0});
}

KERNEL(attention_biased)(const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    forward(q, kv, out, lse, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{bias, reach});
}

KERNEL(attention_delta)(const T* dout, const T* out, const float* dlse, float* delta, int tokens, int heads, int head_dim) {
    i64 unit = (i64)blockIdx.x * (blockDim.x / 32) + warp_of();
    if (unit >= (i64)tokens * heads) return;
    float sum = 0.0f;
    for (int i = lane_of(); i < head_dim; i += 32) sum = fmaf(widen(dout[unit * head_dim + i]), widen(out[unit * head_dim + i]), sum);
    sum = warp_sum(sum);
    if (lane_of() == 0) delta[unit % heads * tokens + unit / heads] = dlse ? sum - dlse[unit] : sum;
}

// A warp a query and head. `own` has seen a key at least: the query's.
KERNEL(attention_join)(const T* own, const float* own_lse, T* out, float* lse, int units, int head_dim) {
    i64 unit = (i64)blockIdx.x * (blockDim.x / 32) + warp_of();
    if (unit >= units) return;
    // All lanes have read it before one writes it.
    float of_own = own_lse[unit], of_rest = __shfl_sync(FULL_WARP, lse[unit], 0), most = larger(of_own, of_rest);
    of_own = expf(of_own - most);
    of_rest = expf(of_rest - most);
    float sum = of_own + of_rest;
    for (i64 i = unit * head_dim + lane_of(); i < (unit + 1) * head_dim; i += 32) out[i] = narrow(of_own / sum * widen(own[i]) + of_rest / sum * widen(out[i]));
    if (lane_of() == 0) lse[unit] = most + logf(sum);
}

KERNEL(attention_join_backward)(const T* dout, const T* out, const float* lse, const T* own, const float* own_lse, T* down, float* dlse, int units, int head_dim) {
    i64 unit = (i64)blockIdx.x * (blockDim.x / 32) + warp_of();
    if (unit >= units) return;
    float weight = expf(own_lse[unit] - lse[unit]), sum = 0.0f;
    for (i64 i = unit * head_dim + lane_of(); i < (unit + 1) * head_dim; i += 32) {
        float d = widen(dout[i]);
        down[i] = narrow(weight * d);
        sum = fmaf(d, widen(own[i]) - widen(out[i]), sum);
    }
    sum = warp_sum(sum);
    if (lane_of() == 0) dlse[unit] = weight * sum;
}

DEVICE void backward_queries(const T *q, const T *kv, const T *dout, const float *lse, const float *delta, T *dq, Mask mask, Shape h, float scale, Distances d) {
    const int rows = h.rows, head_dim = h.head_dim;
    DYNAMIC_SHARED(tiles);
    float *queries = (float *)tiles, *outs = queries + ROWS * head_dim, *keys = outs + ROWS * head_dim, *values = keys + COLUMNS * (head_dim + 1);
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, last = min(first + ROWS, rows), head = (int)blockIdx.y;
    i64 out_stride = (i64)h.heads * head_dim;
    const T *k = kv + (i64)(head / (h.heads / h.kv_heads)) * head_dim, *v = k + (i64)h.kv_heads * head_dim;
    int row = first + (int)warp_of() * OWN, from = keys_of(mask, first).first, to = keys_of(mask, last - 1).last;
    float sum[OWN][PARTS], factor[OWN];
    clear(sum);
    copy_rows(queries, head_dim, ROWS, q + (i64)head * head_dim, h.q_stride, first, last, head_dim);
    copy_rows(outs, head_dim, ROWS, dout + (i64)head * head_dim, out_stride, first, last, head_dim);
    for (int column = from; column < to; column += COLUMNS) {
        __syncthreads();
        copy_rows(keys, head_dim + 1, COLUMNS, k, h.kv_stride, column, to, head_dim);
        copy_rows(values, head_dim + 1, COLUMNS, v, h.kv_stride, column, to, head_dim);
        __syncthreads();
        float s[OWN], ds[OWN];
        multiply(s, queries, keys, head_dim);
        multiply(ds, outs, values, head_dim);
        int at = column + (int)lane_of();
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            int query = min(row + r, rows - 1);
            Bounds b = keys_of(mask, query);
            i64 place = (i64)head * rows + query;
            ds[r] = at >= b.first && at < b.last ? expf(with_distance(s[r] * scale, d, head, query, at) - lse[place]) * (ds[r] - delta[place]) : 0.0f;
        }
        add_product(sum, ds, keys, head_dim);
    }
#pragma unroll
    for (int r = 0; r < OWN; r++) factor[r] = scale;
    store_rows(sum, dq + (i64)head * head_dim, h.q_stride, row, last, head_dim, factor);
}

KERNEL(attention_backward_queries)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_queries(q, kv, dout, lse, delta, dq, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{nullptr, 0});
}

KERNEL(attention_biased_backward_queries)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    backward_queries(q, kv, dout, lse, delta, dq, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, scale, Distances{bias, reach});
}

DEVICE void backward_keys(const T *q, const T *kv, const T *dout, const float *lse, const float *delta, T *dkv, Mask mask, Shape h, int columns, float scale, Distances d) {
    const int rows = h.rows, head_dim = h.head_dim;
    DYNAMIC_SHARED(tiles);
    float *keys = (float *)tiles, *values = keys + ROWS * head_dim, *queries = values + ROWS * head_dim, *outs = queries + COLUMNS * (head_dim + 1);
    int first = (int)blockIdx.x * ROWS, last = min(first + ROWS, rows), kv_head = (int)blockIdx.y, group = h.heads / h.kv_heads;
    i64 out_stride = (i64)h.heads * head_dim, k_columns = (i64)kv_head * head_dim, v_columns = k_columns + (i64)h.kv_heads * head_dim;
    int row = first + (int)warp_of() * OWN, from = queries_of(mask, first).first, to = queries_of(mask, last - 1).last;
    float dk[OWN][PARTS], dv[OWN][PARTS], factor[OWN], one[OWN];
    clear(dk);
    clear(dv);
    copy_rows(keys, head_dim, ROWS, kv + k_columns, h.kv_stride, first, last, head_dim);
    copy_rows(values, head_dim, ROWS, kv + v_columns, h.kv_stride, first, last, head_dim);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int column = from; column < to; column += COLUMNS) {
            __syncthreads();
            copy_rows(queries, head_dim + 1, COLUMNS, q + (i64)head * head_dim, h.q_stride, column, to, head_dim);
            copy_rows(outs, head_dim + 1, COLUMNS, dout + (i64)head * head_dim, out_stride, column, to, head_dim);
            __syncthreads();
            float p[OWN], ds[OWN];
            multiply(p, keys, queries, head_dim);
            multiply(ds, values, outs, head_dim);
            int query = column + (int)lane_of();
            i64 place = (i64)head * columns + min(query, columns - 1);
#pragma unroll
            for (int r = 0; r < OWN; r++) {
                int key = min(row + r, rows - 1);
                Bounds b = queries_of(mask, key);
                p[r] = query >= b.first && query < b.last ? expf(with_distance(p[r] * scale, d, head, query, key) - lse[place]) : 0.0f;
                ds[r] = p[r] * (ds[r] - delta[place]);
            }
            add_product(dv, p, outs, head_dim);
            add_product(dk, ds, queries, head_dim);
        }
#pragma unroll
    for (int r = 0; r < OWN; r++) factor[r] = scale, one[r] = 1.0f;
    store_rows(dk, dkv + k_columns, h.kv_stride, row, last, head_dim, factor);
    store_rows(dv, dkv + v_columns, h.kv_stride, row, last, head_dim, one);
}

KERNEL(attention_backward_keys)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    backward_keys(q, kv, dout, lse, delta, dkv, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, columns, scale, Distances{nullptr, 0});
}

KERNEL(attention_biased_backward_keys)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    backward_keys(q, kv, dout, lse, delta, dkv, Mask{starts, ends, causal, window}, Shape{rows, q_stride, kv_stride, heads, kv_heads, head_dim}, columns, scale, Distances{bias, reach});
}

// The gradient of the numbers of distances: a block walks the tiles of one shift, of one of `parts`
// parts of the queries, and leaves the sum of each diagonal (see `Shifts`) in `partials`.
KERNEL(attention_bias_gradient)(const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, float* partials, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach, int parts) {
    DYNAMIC_SHARED(tiles);
    float *queries = (float *)tiles, *outs = queries + ROWS * head_dim, *keys = outs + ROWS * head_dim, *values = keys + COLUMNS * (head_dim + 1), *found = values + COLUMNS * (head_dim + 1);
    Mask mask = {starts, ends, causal, window};
    Distances d = {bias, reach};
    Shifts shifts = shifts_of(reach, ROWS, COLUMNS);
    int head = (int)blockIdx.y, part = (int)blockIdx.x / shifts.count, shift = ((int)blockIdx.x % shifts.count - shifts.before) * COLUMNS;
    i64 out_stride = (i64)heads * head_dim;
    const T *k = kv + (i64)(head / (heads / kv_heads)) * head_dim, *v = k + (i64)kv_heads * head_dim;
    float sum[OWN];
#pragma unroll
    for (int r = 0; r < OWN; r++) sum[r] = 0.0f;
    for (int first = part * ROWS; first < rows; first += parts * ROWS) {
        int last = min(first + ROWS, rows), column = first - shift, row = first + (int)warp_of() * OWN;
        int from = keys_of(mask, first).first, to = keys_of(mask, last - 1).last;
        if (column + COLUMNS <= from || column >= to) continue;
        __syncthreads();
        copy_rows(queries, head_dim, ROWS, q + (i64)head * head_dim, q_stride, first, last, head_dim);
        copy_rows(outs, head_dim, ROWS, dout + (i64)head * head_dim, out_stride, first, last, head_dim);
        copy_rows(keys, head_dim + 1, COLUMNS, k, kv_stride, column, to, head_dim);
        copy_rows(values, head_dim + 1, COLUMNS, v, kv_stride, column, to, head_dim);
        __syncthreads();
        float s[OWN], ds[OWN];
        multiply(s, queries, keys, head_dim);
        multiply(ds, outs, values, head_dim);
        int at = column + (int)lane_of();
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            int query = min(row + r, rows - 1);
            Bounds b = keys_of(mask, query);
            i64 place = (i64)head * rows + query;
            // Rows beyond the last have a row's bounds, and are nobody's.
            bool seen = row + r < last && at >= b.first && at < b.last;
            sum[r] += seen ? expf(with_distance(s[r] * scale, d, head, query, at) - lse[place]) * (ds[r] - delta[place]) : 0.0f;
        }
    }
#pragma unroll
    for (int r = 0; r < OWN; r++) found[((int)warp_of() * OWN + r) * COLUMNS + (int)lane_of()] = sum[r];
    __syncthreads();
    sum_diagonals<ROWS, COLUMNS>(found, COLUMNS, partials + (((i64)head * parts + part) * shifts.count + (int)blockIdx.x % shifts.count) * (ROWS + COLUMNS - 1));
}

// dbias [heads, 2 reach - 1] from the sums of blocks, of tiles of `rows` queries and `columns`
// keys.
KERNEL(attention_bias_sum)(const float* partials, float* dbias, int heads, int reach, int parts, int rows, int columns) {
    Shifts shifts = shifts_of(reach, rows, columns);
    int distances = 2 * reach - 1;
    i64 start = pack_start(), size = (i64)heads * distances;
    for (i64 i = start; i < start + PACK && i < size; i++) {
        // The distance, counted from the first tile's corner.
        int from_first = (int)(i % distances) - (reach - 1) + shifts.before * columns;
        int first = (from_first - rows + columns) / columns, last = (from_first + columns - 1) / columns;
        float sum = 0.0f;
        for (int part = 0; part < parts; part++)
            for (int at = first; at <= last; at++)
                sum += partials[((i / distances * parts + part) * shifts.count + at) * (rows + columns - 1) + from_first - at * columns + columns - 1];
        dbias[i] = sum;
    }
}

// Four warps take the cache's rows in turn; what each has found is put together in the order of the
// warps.
DEVICE void decode(const T *qkv, const T *keys, const T *values, T *out, int n, int start, int heads, int kv_heads, int head_dim, float scale, int causal, int window, Distances d) {
    __shared__ float sums[4][32 * PARTS], mosts[4], totals[4];
    int token = (int)blockIdx.x, head = (int)blockIdx.y, kv = head / (heads / kv_heads), lane = (int)lane_of(), warp = (int)warp_of();
    int last = causal ? start + token + 1 : start + n, first = window > 0 ? max(0, start + token - window + 1) : 0;
    i64 pitch = (i64)kv_heads * head_dim;
    const T *q = qkv + (i64)token * (heads + 2 * kv_heads) * head_dim + (i64)head * head_dim;
    float query[PARTS], sum[PARTS], most = NEGATIVE_INFINITY, total = 0.0f;
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        query[j] = lane + 32 * j < head_dim ? widen(q[lane + 32 * j]) * scale : 0.0f;
        sum[j] = 0.0f;
    }
    for (int key = first + warp; key < last; key += 4) {
        i64 at = key * pitch + (i64)kv * head_dim + lane;
        float s = 0.0f;
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (lane + 32 * j < head_dim) s = fmaf(query[j], widen(keys[at + 32 * j]), s);
        s = with_distance(warp_sum(s), d, head, start + token, key);
        float top = larger(most, s), shift = top == NEGATIVE_INFINITY ? 0.0f : top, keep = expf(most - shift), p = expf(s - shift);
        most = top;
        total = total * keep + p;
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (lane + 32 * j < head_dim) sum[j] = fmaf(p, widen(values[at + 32 * j]), sum[j] * keep);
    }
#pragma unroll
    for (int j = 0; j < PARTS; j++) sums[warp][lane + 32 * j] = sum[j];
    if (lane == 0) mosts[warp] = most, totals[warp] = total;
    __syncthreads();
    float top = NEGATIVE_INFINITY, all = 0.0f, factor[4];
    for (int w = 0; w < 4; w++) top = larger(top, mosts[w]);
    for (int w = 0; w < 4; w++) {
        factor[w] = mosts[w] == NEGATIVE_INFINITY && totals[w] == 0.0f ? 0.0f : expf(mosts[w] - top);
        all += totals[w] * factor[w];
    }
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
        float value = 0.0f;
        for (int w = 0; w < 4; w++) value = fmaf(sums[w][column], factor[w], value);
        out[((i64)token * heads + head) * head_dim + column] = narrow(value / all);
    }
}

KERNEL(attention_decode)(const T* qkv, const T* keys, const T* values, T* out, int n, int start, int heads, int kv_heads, int head_dim, float scale, int causal, int window) {
    decode(qkv, keys, values, out, n, start, heads, kv_heads, head_dim, scale, causal, window, Distances{nullptr, 0});
}

KERNEL(attention_decode_biased)(const T* qkv, const T* keys, const T* values, T* out, int n, int start, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach) {
    decode(qkv, keys, values, out, n, start, heads, kv_heads, head_dim, scale, causal, window, Distances{bias, reach});
}

KERNEL(cache_append)(const T* qkv, T* keys, T* values, int n, int start, int heads, int kv_heads, int head_dim) {
    int columns = kv_heads * head_dim;
    i64 first = pack_start(), size = (i64)n * columns;
    for (i64 i = first; i < first + PACK && i < size; i++) {
        i64 row = i / columns, column = i % columns;
        const T *from = qkv + row * (heads + 2 * kv_heads) * head_dim + (i64)heads * head_dim + column;
        keys[(i64)start * columns + i] = from[0];
        values[(i64)start * columns + i] = from[columns];
    }
}
