// Embeddings, and reading and adding by indices. Where several entries share an index they are
// added in the order of the entries, by one thread a column: sums are the same on every run.
// Entries with an index outside 0..n are passed over; `check_indices` is what reports them.

KERNEL(embedding)(const int* tokens, const T* table, const int* positions, const T* position_table, T* y, int n, int dim, int first_row, int rows, int position_count) {
    i64 first = pack_start(), size = (i64)n * dim;
    if (first >= size) return;
    bool vectors = dim % PACK == 0 && all_aligned(table, position_table, y);
    for (i64 i = first; i < first + PACK && i < size; i += vectors ? PACK : 1) {
        int row = (int)(i / dim), column = (int)(i % dim), token = tokens[row] - first_row;
        i64 at = token >= 0 && token < rows ? (i64)token * dim + column : -1, place = -1;
        if (positions && positions[row] >= 0 && positions[row] < position_count) place = (i64)positions[row] * dim + column;
        if (vectors) {
            float v[PACK] = {}, p[PACK];
            if (at >= 0) load_pack(table, at, at + PACK, true, v);
            if (place >= 0) {
                load_pack(position_table, place, place + PACK, true, p);
#pragma unroll
                for (int k = 0; k < PACK; k++) v[k] += p[k];
            }
            store_pack(y, i, size, true, v);
        } else {
            float v = at >= 0 ? widen(table[at]) : 0.0f;
            y[i] = narrow(place >= 0 ? v + widen(position_table[place]) : v);
        }
    }
}

KERNEL(check_indices)(const int* indices, unsigned* first_bad, long long n, int limit, int ignore) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) {
        int index = indices[i];
        if ((index < 0 || index >= limit) && !(ignore && index == IGNORE)) {
            atomicMin(first_bad, (unsigned)i);
            return;
        }
    }
}

KERNEL(first_use)(const int* indices, int* first, int n, int least, int limit) {
    i64 start = pack_start();
    for (i64 i = start; i < start + PACK && i < n; i++) {
        int index = indices[i] - least;
        if (index >= 0 && index < limit) atomicMin(first + index, (int)i);
    }
}

// The block of an index's first entry sums all of them: it looks for the others among 2,048 entries
// at a time, eight a thread, writes their places down in order where there are any, and every
// thread adds its columns of each.
KERNEL(index_add)(const T* dy, const int* indices, const int* first, float* sums, int outer, int least, int n, int k, int inner) {
    __shared__ int places[2048];
    // Two sets in turn: a warp may count the next entries while another still reads these counts.
    __shared__ unsigned counts[2][8];
    int mine = (int)(blockIdx.x % k);
    i64 o = blockIdx.x / k;
    int index = indices[mine] - least;
    if (index < 0 || index >= n || first[index] != mine) return;
    float *target = sums + (o * n + index) * inner;
    for (int start = mine, turn = 0; start < k; start += 2048, turn ^= 1) {
        int entry = start + 8 * (int)threadIdx.x;
        unsigned same = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) same |= (unsigned)(entry + j < k && indices[entry + j] - least == index) << j;
        unsigned up_to = (unsigned)__popc(same);
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            unsigned before = __shfl_up_sync(FULL_WARP, up_to, by);
            if ((int)lane_of() >= by) up_to += before;
        }
        if (lane_of() == 31) counts[turn][warp_of()] = up_to;
        __syncthreads();
        unsigned place = up_to - (unsigned)__popc(same), total = 0;
        for (unsigned warp = 0; warp < 8; warp++) {
            if (warp < warp_of()) place += counts[turn][warp];
            total += counts[turn][warp];
        }
        if (total == 0) continue;
        for (; same != 0; same &= same - 1) places[place++] = entry + __ffs(same) - 1;
        __syncthreads();
        for (int column = threadIdx.x; column < inner; column += 256) {
            const T *from = dy + o * k * inner + column;
            float sum = target[column];
            unsigned i = 0;
            // Of a frequent entry so many are on their way at once.
            for (; i + 16 <= total; i += 16) {
                float v[16];
#pragma unroll
                for (int j = 0; j < 16; j++) v[j] = widen(from[(i64)places[i + j] * inner]);
#pragma unroll
                for (int j = 0; j < 16; j++) sum += v[j];
            }
            for (; i < total; i++) sum += widen(from[(i64)places[i] * inner]);
            target[column] = sum;
        }
        // The places are read before the next are written.
        __syncthreads();
    }
}

KERNEL(index_select)(const T* x, const int* indices, T* y, long long outer, int n, int k, int inner) {
    i64 first = pack_start(), size = outer * k * inner;
    for (i64 i = first; i < first + PACK && i < size; i++) {
        i64 row = i / inner, o = row / k;
        int index = indices[row % k];
        y[i] = index >= 0 && index < n ? x[(o * n + index) * inner + i % inner] : narrow(0.0f);
    }
}

KERNEL(gather)(const T* x, const int* indices, T* y, long long rows, int n, int k) {
    i64 first = pack_start(), size = rows * k;
    for (i64 i = first; i < first + PACK && i < size; i++) {
        int index = indices[i];
        y[i] = index >= 0 && index < n ? x[i / k * n + index] : narrow(0.0f);
    }
}

// A thread has targets of its own in the block's row and looks at every entry for them.
KERNEL(scatter_add)(const T* dy, const int* indices, float* sums, int rows, int n, int k) {
    i64 row = blockIdx.x;
    for (int target = threadIdx.x; target < n; target += blockDim.x) {
        float sum = sums[row * n + target];
        for (int j = 0; j < k; j++)
            if (indices[row * k + j] == target) sum += widen(dy[row * k + j]);
        sums[row * n + target] = sum;
    }
}

KERNEL(one_hot)(const int* indices, T* y, long long rows, int classes) {
    i64 first = pack_start(), size = rows * classes;
    for (i64 i = first; i < first + PACK && i < size; i++) y[i] = narrow(indices[i / classes] == (int)(i % classes) ? 1.0f : 0.0f);
}
