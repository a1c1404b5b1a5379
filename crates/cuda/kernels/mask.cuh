// Which rows and columns of the scores are paired: both forms of attention ask here.

// Of each token the first and the end of its segment; a window of 0 is none.
struct Mask {
    const int *starts, *ends;
    int causal, window;
};

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
