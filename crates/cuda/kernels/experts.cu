// Mixtures of experts: routing, the way of rows to experts and back, and the products of ragged
// groups of rows. No size depends on what is routed where, so the host waits for nothing.

// ---- routing ----

#define SOFTMAX 0

// What a warp knows of one token: scores are computed again from these wherever they are needed.
struct Scores {
    const float *logits;
    float most, total;
    int gate;
    DEVICE float of(const Scores &s, int expert) {
        float logit = s.logits[expert];
        return s.gate == SOFTMAX ? expf(logit - s.most) / s.total : 1.0f / (1.0f + expf(-logit));
    }
};

// The largest logit and the sum of exponentials relative to it, known to all lanes.
DEVICE Scores scores_of(const float *logits, int count, int gate) {
    float most = NEGATIVE_INFINITY, total = 0.0f;
    for (int e = (int)lane_of(); e < count; e += 32) most = larger(most, logits[e]);
    most = warp_max(most);
    for (int e = (int)lane_of(); e < count; e += 32) total += expf(logits[e] - most);
    return Scores{logits, most, warp_sum(total), gate};
}

DEVICE int warp_max_int(int x) {
#pragma unroll
    for (int bits = 16; bits > 0; bits >>= 1) x = max(x, __shfl_xor_sync(FULL_WARP, x, bits));
    return x;
}

// A warp a token. Of equal scores the first expert is chosen; one that is no number is chosen when
// nothing else is left. A lane has at most 64 experts.
KERNEL(route_choose)(const float* logits, const T* bias, int* experts, float* weights, int tokens, int count, int top_k, int gate, int normalise, float scale) {
    int token = (int)blockIdx.x * 4 + (int)warp_of();
    if (token >= tokens) return;
    Scores scores = scores_of(logits + (i64)token * count, count, gate);
    u64 taken = 0;
    float sum = 0.0f;
    for (int choice = 0; choice < top_k; choice++) {
        float best = NEGATIVE_INFINITY;
        int expert = -1, left = -1;
        for (int e = (int)lane_of(), bit = 0; e < count; e += 32, bit++) {
            if (taken >> bit & 1) continue;
            float rank = Scores::of(scores, e) + (bias ? widen(bias[e]) : 0.0f);
            if (left < 0) left = e;
            if (rank == rank && (expert < 0 || rank > best)) best = rank, expert = e;
        }
        float top = warp_max(expert < 0 ? NEGATIVE_INFINITY : best);
        // The lowest number is the largest when negated.
        int mine = expert >= 0 && best == top ? -expert : -0x7fffffff;
        int chosen = -warp_max_int(mine);
        if (chosen == 0x7fffffff) chosen = -warp_max_int(left < 0 ? -0x7fffffff : -left);
        if (chosen % 32 == (int)lane_of()) taken |= 1ull << chosen / 32;
        float score = Scores::of(scores, chosen);
        sum += score;
        if (lane_of() == 0) {
            experts[(i64)token * top_k + choice] = chosen;
            weights[(i64)token * top_k + choice] = score;
        }
    }
    if (lane_of() == 0) {
        float factor = normalise ? scale / sum : scale;
        for (int choice = 0; choice < top_k; choice++) weights[(i64)token * top_k + choice] *= factor;
    }
}

// A block an expert.
KERNEL(expert_counts)(const int* experts, int* counts, int choices) {
    int found = 0;
    for (int i = (int)threadIdx.x; i < choices; i += 256) found += experts[i] == (int)blockIdx.x;
    found = block_sum(found);
    if (threadIdx.x == 0) counts[blockIdx.x] = found;
}

// A block an expert: the rows of its choices, in the order of tokens. Each expert keeps `capacity`
// of them.
KERNEL(expert_places)(const int* experts, const int* counts, int* places, int* tokens, int* bounds, int choices, int count, int top_k, int capacity) {
    __shared__ int before_warp[8];
    int expert = (int)blockIdx.x, begin = 0;
    for (int e = (int)threadIdx.x; e < expert; e += 256) begin += min(counts[e], capacity);
    begin = block_sum(begin);
    int end = begin + min(counts[expert], capacity), next = begin;
    for (int start = 0; start < choices; start += 256) {
        int choice = start + (int)threadIdx.x;
        int mine = choice < choices && experts[choice] == expert, up_to = mine;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            int before = __shfl_up_sync(FULL_WARP, up_to, by);
            if ((int)lane_of() >= by) up_to += before;
        }
        if (lane_of() == 31) before_warp[warp_of()] = up_to;
        __syncthreads();
        int place = next + up_to - mine;
        for (int warp = 0; warp < 8; warp++) {
            if (warp < (int)warp_of()) place += before_warp[warp];
            next += before_warp[warp];
        }
        if (mine) {
            places[choice] = place < end ? place : -1;
            if (place < end) tokens[place] = choice / top_k;
        }
        // The counts are read before the next are written.
        __syncthreads();
    }
    if (threadIdx.x == 0) bounds[expert] = begin;
    if (expert == count - 1) {
        if (threadIdx.x == 0) bounds[count] = end;
        for (int i = end + (int)threadIdx.x; i < choices; i += 256) tokens[i] = -1;
    }
}

// A warp a token: the gradient of its logits from that of its choices' weights and of the losses
// that balance experts.
KERNEL(route_backward)(const float* logits, const int* experts, const int* counts, const float* dweights, float* dlogits, int tokens, int count, int top_k, int gate, int normalise, float scale, float auxiliary, float z) {
    int token = (int)blockIdx.x * 4 + (int)warp_of();
    if (token >= tokens) return;
    Scores scores = scores_of(logits + (i64)token * count, count, gate);
    const int *chosen = experts + (i64)token * top_k;
    float per_token = 1.0f / (float)tokens, of_count = auxiliary * (float)count * per_token * per_token;
    // Of the auxiliary loss: shares are scores over their sum, which a softmax has already.
    float all = 1.0f, mean_share = 0.0f;
    if (auxiliary != 0.0f && gate != SOFTMAX) {
        float sum = 0.0f, weighted = 0.0f;
        for (int e = (int)lane_of(); e < count; e += 32) {
            float score = Scores::of(scores, e);
            sum += score, weighted += score * of_count * (float)counts[e];
        }
        all = warp_sum(sum);
        mean_share = warp_sum(weighted) / all;
    }
    // Of the weights: chosen scores over their sum, if they are normalised.
    float sum = 1.0f, mean_weight = 0.0f;
    if (dweights && normalise) {
        sum = 0.0f;
        for (int j = 0; j < top_k; j++) {
            float score = Scores::of(scores, chosen[j]);
            sum += score, mean_weight += score * dweights[(i64)token * top_k + j];
        }
        mean_weight /= sum;
    }
    auto dscore = [&](int e) {
        float d = auxiliary != 0.0f ? (of_count * (float)counts[e] - mean_share) / all : 0.0f;
        if (dweights)
            for (int j = 0; j < top_k; j++)
                if (chosen[j] == e) d += scale * (dweights[(i64)token * top_k + j] - mean_weight) / sum;
        return d;
    };
    float mean = 0.0f;
    if (gate == SOFTMAX) {
        for (int e = (int)lane_of(); e < count; e += 32) mean += Scores::of(scores, e) * dscore(e);
        mean = warp_sum(mean);
    }
    float of_z = 2.0f * z * per_token * (scores.most + logf(scores.total));
    for (int e = (int)lane_of(); e < count; e += 32) {
        float score = Scores::of(scores, e), d = dscore(e);
        d = gate == SOFTMAX ? score * (d - mean) : d * score * (1.0f - score);
        if (z != 0.0f) d += of_z * expf(scores.logits[e] - scores.most) / scores.total;
        dlogits[(i64)token * count + e] = d;
    }
}

// A warp a token: its terms of the sums of both losses, terms [2, tokens].
KERNEL(balance_terms)(const float* logits, const int* counts, float* terms, int tokens, int count, int gate) {
    int token = (int)blockIdx.x * 4 + (int)warp_of();
    if (token >= tokens) return;
    Scores scores = scores_of(logits + (i64)token * count, count, gate);
    float sum = 0.0f, weighted = 0.0f;
    for (int e = (int)lane_of(); e < count; e += 32) {
        float score = Scores::of(scores, e);
        sum += score, weighted += score * (float)counts[e];
    }
    sum = warp_sum(sum), weighted = warp_sum(weighted);
    float about = scores.most + logf(scores.total);
    if (lane_of() == 0) terms[token] = gate == SOFTMAX ? weighted : weighted / sum, terms[tokens + token] = about * about;
}

// By how many choices each expert is ahead of the mean, in `unit`s.
KERNEL(expert_excess)(const int* counts, float* excess, int count, float unit, int add) {
    double sum = 0.0;
    for (int e = (int)threadIdx.x; e < count; e += 256) sum += (double)counts[e];
    double mean = block_sum(sum) / (double)count;
    for (int e = (int)threadIdx.x; e < count; e += 256)
        excess[e] = (add ? excess[e] : 0.0f) + (float)((double)counts[e] - mean) * unit;
}

// ---- rows to experts and back ----

// A block a token: the sum of its choices' rows, in their order.
KERNEL(combine_rows)(const T* rows, const int* places, const float* weights, const T* residual, T* y, int tokens, int top_k, int dim) {
    i64 token = blockIdx.x;
    bool vectors = dim % PACK == 0 && all_aligned(rows, residual, y);
    for (int i = (int)threadIdx.x * PACK; i < dim; i += (int)blockDim.x * PACK) {
        float sum[PACK] = {}, v[PACK];
        for (int j = 0; j < top_k; j++) {
            int place = places[token * top_k + j];
            if (place < 0) continue;
            float weight = weights ? weights[token * top_k + j] : 1.0f;
            load_pack(rows + (i64)place * dim, i, dim, vectors, v);
#pragma unroll
            for (int k = 0; k < PACK; k++) sum[k] = fmaf(weight, v[k], sum[k]);
        }
        if (residual) {
            load_pack(residual + token * dim, i, dim, vectors, v);
#pragma unroll
            for (int k = 0; k < PACK; k++) sum[k] += v[k];
        }
        store_pack(y + token * dim, i, dim, vectors, sum);
    }
}

// A block a token. Rows of drows that are nobody's place stay as they are.
KERNEL(combine_rows_backward)(const T* dy, const T* rows, const int* places, const float* weights, T* drows, float* dweights, int tokens, int top_k, int dim) {
    i64 token = blockIdx.x;
    bool vectors = dim % PACK == 0 && all_aligned(dy, rows, drows);
    for (int j = 0; j < top_k; j++) {
        int place = places[token * top_k + j];
        float dot = 0.0f;
        if (place >= 0) {
            float weight = weights[token * top_k + j];
            for (int i = (int)threadIdx.x * PACK; i < dim; i += (int)blockDim.x * PACK) {
                float d[PACK], v[PACK];
                load_pack(dy + token * dim, i, dim, vectors, d);
                load_pack(rows + (i64)place * dim, i, dim, vectors, v);
#pragma unroll
                for (int k = 0; k < PACK; k++) dot = fmaf(d[k], v[k], dot), d[k] *= weight;
                store_pack(drows + (i64)place * dim, i, dim, vectors, d);
            }
        }
        dot = block_sum(dot);
        if (threadIdx.x == 0) dweights[token * top_k + j] = dot;
    }
}

// ---- products of ragged groups ----

// A block makes 128 x 128 results with 256 threads: in f32 by multiply-adds, eight by eight a
// thread; else on tensor cores, a warp 64 rows of 32 columns, the next 32 of the depth being copied
// to shared memory while these are multiplied.

#define SIDE 128

// One operand of a product: SIDE rows from `row` on, of which `rows` and beyond are none. With
// ALONG the neighbours in memory are along the depth, else along the rows.
template <bool ALONG> struct Operand {
    const T *source;
    i64 stride;
    int row, rows;
    DEVICE T at(const Operand &o, int row, int depth) {
        return ALONG ? o.source[(i64)row * o.stride + depth] : o.source[(i64)depth * o.stride + row];
    }
};

#ifdef TRAINYARD_F32

#define DEPTH 16
#define LINE (SIDE + 4)

template <bool ALONG> DEVICE void load_operand(float *tile, const Operand<ALONG> &o, int depth, int last) {
    for (int i = (int)threadIdx.x; i < DEPTH * SIDE; i += 256) {
        int row = ALONG ? i / DEPTH : i % SIDE, k = ALONG ? i % DEPTH : i / SIDE;
        bool valid = o.row + row < o.rows && depth + k < last;
        tile[k * LINE + row] = valid ? Operand<ALONG>::at(o, o.row + row, depth + k) : 0.0f;
    }
}

// store(row, column, two results), for all rows and columns of the block.
template <bool A, bool B, class F> DEVICE void ragged_product(const Operand<A> &a, const Operand<B> &b, int first, int last, F store) {
    DYNAMIC_SHARED(memory);
    float *left = (float *)memory, *right = left + DEPTH * LINE;
    int row = (int)threadIdx.x / 16 * 8, column = (int)threadIdx.x % 16 * 8;
    float sum[8][8] = {};
    for (int depth = first; depth < last; depth += DEPTH) {
        __syncthreads();
        load_operand(left, a, depth, last);
        load_operand(right, b, depth, last);
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] = fmaf(left[k * LINE + row + i], right[k * LINE + column + j], sum[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j += 2) store(a.row + row + i, b.row + column + j, sum[i][j], sum[i][j + 1]);
}

#else

#define DEPTH 32
// Eight elements more a line, so that the rows of a matrix lie in different banks.
#define TILE_ELEMENTS (SIDE * (DEPTH + 8))

template <bool ALONG> DEVICE constexpr int line_of() { return (ALONG ? DEPTH : SIDE) + 8; }

template <bool ALONG> DEVICE void load_operand(T *tile, const Operand<ALONG> &o, int depth, int last) {
    bool vectors = aligned(o.source) && o.stride % 8 == 0 && (ALONG ? last : o.rows) % 8 == 0;
    const int across = (ALONG ? DEPTH : SIDE) / 8;
#pragma unroll
    for (int i = (int)threadIdx.x; i < SIDE * DEPTH / 8; i += 256) {
        int line = i / across, piece = i % across * 8;
        int row = o.row + (ALONG ? line : piece), at = depth + (ALONG ? piece : line);
        T *to = tile + line * line_of<ALONG>() + piece;
        bool valid = row < o.rows && at < last;
        if (vectors) {
            const T *from = ALONG ? o.source + (i64)row * o.stride + at : o.source + (i64)at * o.stride + row;
            copy16_async(to, valid ? from : o.source, valid);
            continue;
        }
        for (int k = 0; k < 8; k++) {
            int r = row + (ALONG ? 0 : k), d = at + (ALONG ? k : 0);
            to[k] = r < o.rows && d < last ? Operand<ALONG>::at(o, r, d) : narrow(0.0f);
        }
    }
}

// The 16 x 16 left operand from `row` and `depth` of the tile on.
template <bool ALONG> DEVICE void left_of(unsigned (&a)[4], T *tile, int row, int depth) {
    int lane = (int)lane_of();
    if (ALONG)
        load_matrices(a, tile + (row + (lane & 15)) * line_of<ALONG>() + depth + (lane >> 4) * 8, false);
    else
        load_matrices(a, tile + (depth + (lane >> 4) * 8 + (lane & 7)) * line_of<ALONG>() + row + (lane >> 3 & 1) * 8, true);
}

// The right operands of two times eight columns.
template <bool ALONG> DEVICE void right_of(unsigned (&b)[4], T *tile, int column, int depth) {
    int lane = (int)lane_of();
    if (ALONG)
        load_matrices(b, tile + (column + (lane >> 4) * 8 + (lane & 7)) * line_of<ALONG>() + depth + (lane >> 3 & 1) * 8, false);
    else
        load_matrices(b, tile + (depth + (lane & 15)) * line_of<ALONG>() + column + (lane >> 4) * 8, true);
}

// store(row, column, two results), for all rows and columns of the block.
template <bool A, bool B, class F> DEVICE void ragged_product(const Operand<A> &a, const Operand<B> &b, int first, int last, F store) {
    DYNAMIC_SHARED(memory);
    T *tiles = (T *)memory;
    int row = (int)(warp_of() >> 2) * 64, column = (int)(warp_of() & 3) * 32;
    auto load = [&](int depth, int stage) {
        load_operand(tiles + 2 * stage * TILE_ELEMENTS, a, depth, last);
        load_operand(tiles + (2 * stage + 1) * TILE_ELEMENTS, b, depth, last);
        commit_copies();
    };
    float sum[4][4][4] = {};
    if (first < last) load(first, 0);
    for (int depth = first, stage = 0; depth < last; depth += DEPTH, stage ^= 1) {
        wait_copies<0>();
        __syncthreads();
        if (depth + DEPTH < last) load(depth + DEPTH, stage ^ 1);
        T *left = tiles + 2 * stage * TILE_ELEMENTS, *right = left + TILE_ELEMENTS;
#pragma unroll
        for (int step = 0; step < DEPTH; step += 16) {
            unsigned of_rows[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) left_of<A>(of_rows[i], left, row + 16 * i, step);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                unsigned of_columns[4];
                right_of<B>(of_columns, right, column + 16 * j, step);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    mma(sum[i][2 * j], of_rows[i], of_columns[0], of_columns[1]);
                    mma(sum[i][2 * j + 1], of_rows[i], of_columns[2], of_columns[3]);
                }
            }
        }
    }
    int to_row = a.row + row + (int)(lane_of() >> 2), to_column = b.row + column + 2 * (int)(lane_of() & 3);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            store(to_row + 16 * i, to_column + 8 * j, sum[i][j][0], sum[i][j][1]);
            store(to_row + 16 * i + 8, to_column + 8 * j, sum[i][j][2], sum[i][j][3]);
        }
}

#endif

// A block's group, and its rows. The blocks of groups come in their order; those behind them have
// the rows that are in no group.
struct Rows {
    int group, first, last;
};
DEVICE Rows rows_of(const int *bounds, int groups, int rows) {
    int tile = (int)blockIdx.x, before = 0;
    for (int base = 0; base < groups; base += 32) {
        int group = base + (int)lane_of();
        int mine = group < groups ? (bounds[group + 1] - bounds[group] + SIDE - 1) / SIDE : 0, up_to = mine;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            int more = __shfl_up_sync(FULL_WARP, up_to, by);
            if ((int)lane_of() >= by) up_to += more;
        }
        int begin = before + up_to - mine;
        int found = warp_max_int(tile >= begin && tile < begin + mine ? group : -1);
        if (found >= 0) {
            int first = bounds[found] + (tile - warp_max_int(group == found ? begin : -1)) * SIDE;
            return Rows{found, first, min(first + SIDE, bounds[found + 1])};
        }
        before += warp_max_int(up_to);
    }
    int first = bounds[groups] + (tile - before) * SIDE;
    return Rows{-1, first, min(first + SIDE, rows)};
}

DEVICE void store_pair(T *y, int column, int columns, float low, float high) {
#ifndef TRAINYARD_F32
    if (columns % 2 == 0 && ((u64)y & 3) == 0) {
        if (column < columns) *(unsigned *)(y + column) = pair_of(low, high);
        return;
    }
#endif
    if (column < columns) y[column] = narrow(low);
    if (column + 1 < columns) y[column + 1] = narrow(high);
}

DEVICE void store_zeros(T *y, Rows rows, int columns) {
    int width = min(SIDE, columns - (int)blockIdx.y * SIDE);
    for (int i = (int)threadIdx.x; i < (rows.last - rows.first) * width; i += 256)
        y[(i64)(rows.first + i / width) * columns + (int)blockIdx.y * SIDE + i % width] = narrow(0.0f);
}

// y [rows, columns] = x [rows, depth] times the transpose of the weight of each group: with ALONG
// weights are [columns, depth], else [depth, columns].
template <bool ALONG> DEVICE void ragged_rows(const T *x, const T *w, const int *bounds, T *y, int rows, int columns, int depth, int groups, int weights) {
    Rows mine = rows_of(bounds, groups, rows);
    if (mine.group < 0) return store_zeros(y, mine, columns);
    Operand<true> left = {x, depth, mine.first, mine.last};
    const T *weight = w + (i64)(mine.group % weights) * columns * depth;
    Operand<ALONG> right = {weight, ALONG ? depth : columns, (int)blockIdx.y * SIDE, columns};
    ragged_product(left, right, 0, depth, [&](int row, int column, float low, float high) {
        if (row < mine.last) store_pair(y + (i64)row * columns, column, columns, low, high);
    });
}

// y = x w[e]^T: x [rows, k], w [weights n, k], y [rows, n].
KERNEL_BOUNDS(ragged_linear, 256, 1)(const T* x, const T* w, const int* bounds, T* y, int rows, int n, int k, int groups, int weights) {
    ragged_rows<true>(x, w, bounds, y, rows, n, k, groups, weights);
}

// dx = dy w[e]: dy [rows, n], w [weights n, k], dx [rows, k].
KERNEL_BOUNDS(ragged_input_gradient, 256, 1)(const T* dy, const T* w, const int* bounds, T* dx, int rows, int n, int k, int groups, int weights) {
    ragged_rows<false>(dy, w, bounds, dx, rows, k, n, groups, weights);
}

// dw[e] (+)= dy^T x over the rows of group e: dy [.., n], x [.., k], dw [weights n, k].
KERNEL_BOUNDS(ragged_weight_gradient, 256, 1)(const T* dy, const T* x, const int* bounds, float* dw, int n, int k, int weights, int add) {
    int group = (int)blockIdx.z;
    Operand<false> left = {dy, n, (int)blockIdx.x * SIDE, n}, right = {x, k, (int)blockIdx.y * SIDE, k};
    float *target = dw + (i64)group * n * k;
    ragged_product(left, right, bounds[group], bounds[group + 1], [&](int row, int column, float low, float high) {
        if (row >= n) return;
        float *to = target + (i64)row * k + column;
        if (column < k) to[0] = add ? to[0] + low : low;
        if (column + 1 < k) to[1] = add ? to[1] + high : high;
    });
}
