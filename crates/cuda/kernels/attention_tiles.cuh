// What both forms of attention on tensor cores share: a warp owns sixteen rows of its block's 128,
// and its lanes hold scores, probabilities and sums in the fragments of a result: of fragment n
// columns 8 n + 2 (lane % 4) and the next, in rows lane / 4 and that + 8.

#define ROWS 128
#define THREADS 256
#define LOG2E 1.4426950408889634f

// Begins to copy COUNT rows of D columns from row `first` on, zeros for those before row 0, at
// `last` and beyond, and for columns that the head does not have. A thread has one piece of every
// THREADS / (D / 8)-th row, so that what it computes of addresses is the same for all of them: `to`
// is where the first piece lies, `apart` elements further the next. UNROLLED at a time: more take
// more registers.
template <int D, int COUNT, int UNROLLED> DEVICE void copy_pieces(T *to, int apart, const T *source, i64 stride, int first, int last, int head_dim) {
    const int step = THREADS / (D / 8);
    static_assert(COUNT % step == 0 && step % 8 == 0, "threads keep their piece of a row");
    int row = first + (int)threadIdx.x / (D / 8), column = (int)threadIdx.x % (D / 8) * 8;
    if (column >= head_dim) last = 0;
    const T *from = source + (i64)row * stride + column;
#pragma unroll UNROLLED
    for (int i = 0; i < COUNT / step; i++) {
        bool valid = (unsigned)(row + i * step) < (unsigned)last;
        copy16_async(to + i * apart, valid ? from : source, valid);
        from += step * stride;
    }
}

template <int N> DEVICE void clear(float (&sum)[N / 8][4]) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
}

// Writes the lane's two rows, each times its factor; head_dim is even, so that pairs are whole.
template <int D> DEVICE void store_rows(const float (&sum)[D / 8][4], T *target, i64 stride, int row, int last, int head_dim, float low, float high) {
    int first = row + (int)(lane_of() >> 2);
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
        int column = 8 * d + 2 * (int)(lane_of() & 3);
        if (column >= head_dim) continue;
        if (first < last) *(unsigned *)(target + first * stride + column) = pair_of(sum[d][0] * low, sum[d][1] * low);
        if (first + 8 < last) *(unsigned *)(target + (first + 8) * stride + column) = pair_of(sum[d][2] * high, sum[d][3] * high);
    }
}

// The left operand that is 16 columns of a result: two fragments.
DEVICE void to_operand(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pair_of(left[0], left[1]);
    a[1] = pair_of(left[2], left[3]);
    a[2] = pair_of(right[0], right[1]);
    a[3] = pair_of(right[2], right[3]);
}

// Of a tile of N columns from `column` on: whether a warp's rows have anything in it, and whether
// they have all of it.
struct Part {
    bool none, all;
};
template <int N> DEVICE Part part_of(Bounds first_row, Bounds last_row, int column) {
    return Part{column >= last_row.last || column + N <= first_row.first, column >= last_row.first && column + N <= first_row.last};
}

// Sets what is outside of the rows' bounds. Almost all tiles have nothing of it: callers ask first,
// because these comparisons take longer than everything else that is done with an element.
template <int N> DEVICE void hide(float (&s)[N / 8][4], const Bounds (&mine)[2], int column, float value) {
    int lane_column = column + 2 * (int)(lane_of() & 3);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int first = mine[r].first - lane_column, last = mine[r].last - lane_column;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (8 * n + i < first || 8 * n + i >= last) s[n][2 * r + i] = value;
    }
}

// The softmax of a lane's two rows as far as they have been walked (Milakov and Gimelshein 2018):
// the largest score, in powers of two, and the sum of exponentials.
struct Softmax {
    float most[2], total[2];
};

// Turns a tile's scores into probabilities that are yet to be divided by `total`; what was summed
// before is to be multiplied by `keep`. `factor` is positive.
template <int N>
DEVICE void soften(Softmax &soft, float (&s)[N / 8][4], float (&keep)[2], float factor, bool all, const Bounds (&mine)[2], int column) {
    if (!all) hide<N>(s, mine, column, NEGATIVE_INFINITY);
    // A NaN among the scores is no largest one; it stays what it is below.
    float top[2] = {s[0][0], s[0][2]};
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) top[i / 2] = fmaxf(top[i / 2], s[n][i]);
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
        top[r] = fmaxf(soft.most[r], top[r] * factor);
        // A row that has seen nothing yet keeps zeros, and no NaN of infinities' difference.
        shift[r] = top[r] == NEGATIVE_INFINITY ? 0.0f : top[r];
        keep[r] = power_of_two(soft.most[r] - shift[r]);
        soft.most[r] = top[r];
        soft.total[r] *= keep[r];
    }
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = power_of_two(fmaf(s[n][i], factor, -shift[i / 2]));
            soft.total[i / 2] += s[n][i];
        }
}

template <int D> DEVICE void scale_rows(float (&sum)[D / 8][4], const float (&factor)[2]) {
#pragma unroll
    for (int d = 0; d < D / 8; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[d][i] *= factor[i / 2];
}

// Writes the log-sum-exp of the lane's rows, of those from `row` on, and gives what their sums are
// to be multiplied by.
DEVICE void finish(Softmax &soft, float (&inverse)[2], float *lse, const Bounds (&mine)[2], int row, int last) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        soft.total[r] += __shfl_xor_sync(FULL_WARP, soft.total[r], 1);
        soft.total[r] += __shfl_xor_sync(FULL_WARP, soft.total[r], 2);
        // A sum of 0 where something is seen is an infinite score: it shall not look like a result.
        inverse[r] = mine[r].first < mine[r].last ? 1.0f / soft.total[r] : 0.0f;
        int query = row + 8 * r + (int)(lane_of() >> 2);
        if ((lane_of() & 3) == 0 && query < last) lse[query] = (soft.most[r] + log2f(soft.total[r])) * (1.0f / LOG2E);
    }
}
