// Which rows and columns of the scores are paired, and what is added to scores: all forms of
// attention ask here.

// Rows that blocks own, elements from one query to the next and from one key to the next, heads.
struct Shape {
    int rows, q_stride, kv_stride, heads, kv_heads, head_dim;
};

// Of each token the first and the end of its segment; a window of 0 is none.
struct Mask {
    const int *starts, *ends;
    int causal, window;
};

// Numbers that are added to scores by the query's row less the key's: for each head those from
// 1 - reach to reach - 1 (Raffel et al. 2020, section 2.1). None if null.
struct Distances {
    const float *all;
    int reach;
};
DEVICE const float *distances_of(const Distances &d, int head) { return d.all + (i64)head * (2 * d.reach - 1); }

// The gradient of these numbers is made by blocks that own tiles of `rows` queries and `columns`
// keys: those whose first query lies `shift` rows after their first key, a multiple of `columns`.
// So a place of a tile has one distance in all tiles of a block, and its sum stays with the thread
// that makes it. The first shift is -before columns, and there are `count`.
struct Shifts {
    int before, count;
};
DEVICE Shifts shifts_of(int reach, int rows, int columns) {
    int before = (reach + rows - 2) / columns;
    return Shifts{before, before + (reach + columns - 2) / columns + 1};
}

// Columns that a row is paired with.
struct Bounds {
    int first, last;
};

DEVICE Bounds keys_of(const Mask &mask, int query) {
    Bounds b = {mask.starts[query], mask.causal ? query + 1 : mask.ends[query]};
    if (mask.window > 0) b.first = max(b.first, query - mask.window + 1);
    return b;
}
DEVICE Bounds queries_of(const Mask &mask, int key) {
    Bounds b = {mask.causal ? key : mask.starts[key], mask.ends[key]};
    if (mask.window > 0) b.last = (int)min((i64)b.last, (i64)key + mask.window);
    return b;
}

// The sum of each diagonal of a tile in shared memory, from the one of its first row's last column
// to the one of its last row's first.
template <int R, int C> DEVICE void sum_diagonals(const float *tile, int pitch, float *sums) {
    for (int i = threadIdx.x; i < R + C - 1; i += blockDim.x) {
        float sum = 0.0f;
        for (int row = max(0, i - C + 1); row <= min(R - 1, i); row++) sum += tile[row * pitch + row + C - 1 - i];
        sums[i] = sum;
    }
}
