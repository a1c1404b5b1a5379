// Softmax cross-entropy over rows of logits, a block a row.
//
// The log-sum-exp is made in one pass: each thread keeps a running maximum and the sum about it
// (Milakov and Gimelshein 2018), and these are brought to the maximum of the block, in the order of
// the threads of a warp and of the warps. Logits are read again for the gradient. A NaN among the
// logits makes the row's loss NaN.

struct RowLoss {
    float most, lse;
};

struct RowSum {
    float most, sum;
};

DEVICE RowSum row_sum(const T *x, int vocab, bool vectors) {
    float most = NEGATIVE_INFINITY, sum = 0.0f;
    for (int i = threadIdx.x * PACK; i < vocab; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(x, i, vocab, vectors, v, NEGATIVE_INFINITY);
        float top = most;
#pragma unroll
        for (int k = 0; k < PACK; k++) top = larger(top, v[k]);
        // Before anything is seen the sum is 0 and its factor must not be NaN.
        if (top > most) sum *= expf(most - top);
        most = top;
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += v[k] == NEGATIVE_INFINITY ? 0.0f : expf(v[k] - most);
    }
    float top = block_max(most);
    // A thread that saw nothing, and rows of nothing but minus infinity, have 0 here; a NaN stays
    // in the sum.
    if (most > NEGATIVE_INFINITY) sum *= expf(most - top);
    return RowSum{top, block_sum(sum)};
}

DEVICE RowLoss row_loss(const T *x, int vocab, bool vectors) {
    RowSum found = row_sum(x, vocab, vectors);
    return RowLoss{found.most, found.most + logf(found.sum)};
}

DEVICE void write_row(const RowLoss &found, const T *x, int target, int row, float *loss, float *lse, unsigned *hit) {
    if (threadIdx.x != 0) return;
    bool counts = target != IGNORE;
    float logit = counts ? widen(x[target]) : 0.0f;
    loss[row] = counts ? found.lse - logit : 0.0f;
    if (lse) lse[row] = found.lse;
    if (hit) hit[row] = counts && logit >= found.most;
}

// Writes factor (softmax(x) - onehot) to y, which may be x.
DEVICE void write_gradient(const T *x, T *y, int vocab, bool vectors, int target, float lse, float factor) {
    for (int i = threadIdx.x * PACK; i < vocab; i += blockDim.x * PACK) {
        float v[PACK];
        load_pack(x, i, vocab, vectors, v);
#pragma unroll
        for (int k = 0; k < PACK; k++) v[k] = (expf(v[k] - lse) - (i + k == target ? 1.0f : 0.0f)) * factor;
        store_pack(y, i, vocab, vectors, v);
    }
}

DEVICE void write_zeros(T *y, int vocab, bool vectors) {
    float zeros[PACK] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = threadIdx.x * PACK; i < vocab; i += blockDim.x * PACK) store_pack(y, i, vocab, vectors, zeros);
}

// A target that is no class was reported by `check_indices`; it must not be read.
DEVICE int target_of(const int *targets, int row, int vocab) {
    int target = targets[row];
    return target >= 0 && target < vocab ? target : IGNORE;
}

KERNEL(cross_entropy)(const T* logits, const int* targets, float* loss, float* lse, unsigned* hit, int rows, int vocab, int stride) {
    int row = (int)blockIdx.x;
    const T *x = logits + (i64)row * stride;
    write_row(row_loss(x, vocab, aligned(x)), x, target_of(targets, row, vocab), row, loss, lse, hit);
}

KERNEL(cross_entropy_in_place)(T* logits, const int* targets, float* loss, float* lse, unsigned* hit, int rows, int vocab, int stride, float scale, const float* scale_at) {
    if (scale_at) scale = *scale_at;
    int row = (int)blockIdx.x, target = target_of(targets, row, vocab);
    T *x = logits + (i64)row * stride;
    bool vectors = aligned(x);
    if (target == IGNORE) {
        write_row(RowLoss{0.0f, 0.0f}, x, target, row, loss, lse, hit);
        write_zeros(x, vocab, vectors);
        return;
    }
    RowLoss found = row_loss(x, vocab, vectors);
    write_row(found, x, target, row, loss, lse, hit);
    // The target's logit has been read.
    __syncthreads();
    write_gradient(x, x, vocab, vectors, target, found.lse, scale);
}

KERNEL(cross_entropy_backward)(const T* logits, const int* targets, const float* lse, const float* dy, const unsigned* counted, T* dx, int rows, int vocab, int stride) {
    int row = (int)blockIdx.x, target = target_of(targets, row, vocab);
    const T *x = logits + (i64)row * stride;
    T *y = dx + (i64)row * stride;
    bool vectors = all_aligned(x, y);
    if (target == IGNORE) {
        write_zeros(y, vocab, vectors);
        return;
    }
    float factor = counted ? *dy / (float)(*counted > 0 ? *counted : 1) : *dy;
    write_gradient(x, y, vocab, vectors, target, lse[row], factor);
}

// A target among the classes first .. first + vocab, from 0; -1 if it is elsewhere.
DEVICE int local_target(int target, int first, int vocab) {
    int at = target - first;
    return at >= 0 && at < vocab ? at : -1;
}

KERNEL(cross_entropy_statistics)(const T* logits, const int* targets, float* statistics, int rows, int vocab, int stride, int first) {
    int row = (int)blockIdx.x, target = targets[row];
    const T *x = logits + (i64)row * stride;
    RowSum found = {0.0f, 0.0f};
    if (target != IGNORE) found = row_sum(x, vocab, aligned(x));
    if (threadIdx.x != 0) return;
    int at = local_target(target, first, vocab);
    statistics[3 * row] = found.most;
    statistics[3 * row + 1] = found.sum;
    statistics[3 * row + 2] = at >= 0 ? widen(x[at]) : 0.0f;
}

KERNEL(merge_statistics)(const float* statistics, const int* targets, float* loss, float* lse, int rows, int parts) {
    i64 start = pack_start();
    for (i64 row = start; row < start + PACK && row < rows; row++) {
        float most = NEGATIVE_INFINITY, sum = 0.0f, logit = 0.0f;
        for (int part = 0; part < parts; part++) most = larger(most, statistics[3 * (part * (i64)rows + row)]);
        for (int part = 0; part < parts; part++) {
            const float *of = statistics + 3 * (part * (i64)rows + row);
            sum += of[1] * expf(of[0] - most);
            logit += of[2];
        }
        bool counts = targets[row] != IGNORE;
        float total = most + logf(sum);
        lse[row] = counts ? total : 0.0f;
        loss[row] = counts ? total - logit : 0.0f;
    }
}

KERNEL(cross_entropy_part_gradient)(T* logits, const int* targets, const float* lse, int rows, int vocab, int stride, int first, float scale, const float* scale_at) {
    if (scale_at) scale = *scale_at;
    int row = (int)blockIdx.x, target = targets[row];
    T *x = logits + (i64)row * stride;
    bool vectors = aligned(x);
    if (target == IGNORE) {
        write_zeros(x, vocab, vectors);
        return;
    }
    write_gradient(x, x, vocab, vectors, local_target(target, first, vocab), lse[row], scale);
}

KERNEL(loss_summary)(const float* losses, const unsigned* hits, const int* targets, int n, double* sum, unsigned* counts, float* loss, float scale, const float* scale_at, int mean) {
    if (scale_at) scale = *scale_at;
    double total = 0.0;
    unsigned counted = 0, hit = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        total += losses[i];
        counted += targets[i] != IGNORE;
        if (hits) hit += hits[i];
    }
    total = block_sum(total);
    counted = block_sum(counted);
    hit = block_sum(hit);
    if (threadIdx.x != 0) return;
    *sum = total;
    counts[0] = counted;
    counts[1] = hit;
    if (loss) *loss = (float)(total * scale / (mean && counted > 0 ? counted : 1));
}
