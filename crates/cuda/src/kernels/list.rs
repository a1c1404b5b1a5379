//! The list of kernels: for each its function, the shapes of its pointers, its launch rule and its
//! parameters.

use super::{File, Kernel, Rule};

macro_rules! kernels {
    ($($(#[$doc:meta])* $constant:ident = $name:literal, $file:ident, $rule:expr, $signature:expr;)*) => {
        $($(#[$doc])* pub static $constant: Kernel =
            Kernel { name: $name, file: File::$file, rule: $rule, signature: $signature };)*
        /// All of them.
        pub static ALL: &[&Kernel] = &[$(&$constant),*];
    };
}

/// Tiles of 128 rows for tensor cores.
const fn tiles(shared: u32) -> Rule {
    Rule::Tiles { rows: 128, threads: 256, shared, shared_a_column: 0 }
}

/// Tiles of 16 rows and 32 columns, one or two of rows and two of columns, in f32; a number more in
/// each row of the latter.
const fn small_tiles(of_rows: u32) -> Rule {
    Rule::Tiles { rows: 16, threads: 128, shared: 2 * 32 * 4, shared_a_column: (16 * of_rows + 2 * 32) * 4 }
}

/// A block for each shift and part of the gradient of distances' numbers, and for each head.
const fn shifts(threads: u32, shared: u32, shared_a_column: u32) -> Rule {
    Rule::Tiles { rows: 1, threads, shared, shared_a_column }
}

/// Elements of dropout whose random bits come from one group of counters.
pub const DROPOUT_GROUP: usize = 128;

// Attention reads queries q and keys and values kv, side by side; both may be parts of one fused
// matrix of query heads, key heads, value heads. Rows are `q_stride` and `kv_stride` elements
// apart. `starts` and `ends` [rows] are the first key of each query's segment and the one after its
// last; for the gradients of keys, the queries of each key's. With `causal` (and a `window` that is
// not 0) queries and keys are the same rows. Without, segments are all that pairs them, and both
// bounds rise with the row. `lse` and `delta` are [heads, queries]; out and dout are
// [queries, heads head_dim]. Sizes of the launch: rows; query heads (key heads for the gradients of
// keys); head_dim.
const FORWARD: &str = "const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window";
const BACKWARD_QUERIES: &str = "const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window";
const BACKWARD_KEYS: &str = "const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window";

// With numbers by distance, `bias` [heads, 2 reach - 1], added to scores: of column
// reach - 1 + query - key, both rows of one fused matrix.
const FORWARD_BIASED: &str = "const T* q, const T* kv, T* out, float* lse, const int* starts, const int* ends, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach";
const BACKWARD_QUERIES_BIASED: &str = "const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dq, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach";
const BACKWARD_KEYS_BIASED: &str = "const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, T* dkv, int rows, int columns, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach";
const BIAS_GRADIENT: &str = "const T* q, const T* kv, const T* dout, const float* lse, const float* delta, const int* starts, const int* ends, float* partials, int rows, int q_stride, int kv_stride, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach, int parts";

kernels! {
    /// out and lse, by multiply-adds: any dtype, head_dim up to 256.
    ATTENTION = "attention", Attention, small_tiles(1), FORWARD;
    /// delta [heads, tokens] = sum over columns of dout out, less the gradient of the log-sum-exp,
    /// dlse [tokens, heads]?. Sizes: tokens times heads.
    ATTENTION_DELTA = "attention_delta", Attention, Rule::Warps,
        "const T* dout, const T* out, const float* dlse, float* delta, int tokens, int heads, int head_dim";
    /// out [units, head_dim] and lse [units], of attention over some keys, become those over these
    /// and the keys of `own` and `own_lse`. Sizes: units, which are queries times heads.
    ATTENTION_JOIN = "attention_join", Attention, Rule::Warps,
        "const T* own, const float* own_lse, T* out, float* lse, int units, int head_dim";
    /// The gradients of `own` and `own_lse`, of the joined out and lse.
    ATTENTION_JOIN_BACKWARD = "attention_join_backward", Attention, Rule::Warps,
        "const T* dout, const T* out, const float* lse, const T* own, const float* own_lse, T* down, float* dlse, int units, int head_dim";
    /// The gradients of queries.
    ATTENTION_BACKWARD_QUERIES = "attention_backward_queries", Attention, small_tiles(2), BACKWARD_QUERIES;
    /// The gradients of keys and values, of `columns` queries. Sizes: rows, kv_heads, head_dim.
    ATTENTION_BACKWARD_KEYS = "attention_backward_keys", Attention, small_tiles(2), BACKWARD_KEYS;
    /// As `attention`, with numbers by distance.
    ATTENTION_BIASED = "attention_biased", Attention, small_tiles(1), FORWARD_BIASED;
    /// As `attention_backward_queries`, with numbers by distance.
    ATTENTION_BIASED_BACKWARD_QUERIES = "attention_biased_backward_queries", Attention, small_tiles(2), BACKWARD_QUERIES_BIASED;
    /// As `attention_backward_keys`, with numbers by distance.
    ATTENTION_BIASED_BACKWARD_KEYS = "attention_biased_backward_keys", Attention, small_tiles(2), BACKWARD_KEYS_BIASED;
    /// Sums over diagonals of tiles of 16 queries and 32 keys, of which the gradient of `bias` is
    /// made: partials [heads, parts, shifts, 47] ([`BiasTile`](super::BiasTile)). Sizes: parts
    /// times shifts, heads, head_dim.
    ATTENTION_BIAS_GRADIENT = "attention_bias_gradient", Attention, shifts(128, 2 * 32 * 4 + 16 * 32 * 4, (16 * 2 + 2 * 32) * 4), BIAS_GRADIENT;
    /// dbias [heads, 2 reach - 1] from the partials of tiles of `rows` queries and `columns` keys.
    /// Sizes: heads (2 reach - 1).
    ATTENTION_BIAS_SUM = "attention_bias_sum", Attention, Rule::Elements,
        "const float* partials, float* dbias, int heads, int reach, int parts, int rows, int columns";
    /// New tokens over a cache: qkv [n, ..], keys and values
    /// [at least start + n, kv_heads head_dim], which hold the new tokens' too; out
    /// [n, heads head_dim]. Sizes: n, heads, head_dim.
    ATTENTION_DECODE = "attention_decode", Attention, Rule::Queries,
        "const T* qkv, const T* keys, const T* values, T* out, int n, int start, int heads, int kv_heads, int head_dim, float scale, int causal, int window";
    /// As `attention_decode`, with numbers by distance.
    ATTENTION_DECODE_BIASED = "attention_decode_biased", Attention, Rule::Queries,
        "const T* qkv, const T* keys, const T* values, T* out, int n, int start, int heads, int kv_heads, int head_dim, float scale, int causal, int window, const float* bias, int reach";
    /// Writes the key and value columns of qkv [n, ..] to rows `start ..` of the caches. Sizes: n
    /// kv_heads head_dim.
    CACHE_APPEND = "cache_append", Attention, Rule::Elements,
        "const T* qkv, T* keys, T* values, int n, int start, int heads, int kv_heads, int head_dim";

    /// As `attention`, for heads of up to 64 columns on tensor cores.
    ATTENTION_MMA_64 = "attention_mma_64", AttentionMma, tiles(48 << 10), FORWARD;
    /// As `attention`, for heads of up to 128 columns on tensor cores.
    ATTENTION_MMA_128 = "attention_mma_128", AttentionMma, tiles(96 << 10), FORWARD;
    /// As `attention_backward_queries`, for heads of up to 64 columns on tensor cores.
    ATTENTION_BACKWARD_QUERIES_MMA_64 = "attention_backward_queries_mma_64", AttentionMma, tiles(64 << 10), BACKWARD_QUERIES;
    /// As `attention_backward_queries`, for heads of up to 128 columns on tensor cores.
    ATTENTION_BACKWARD_QUERIES_MMA_128 = "attention_backward_queries_mma_128", AttentionMma, tiles(96 << 10), BACKWARD_QUERIES;
    /// As `attention_backward_keys`, for heads of up to 64 columns on tensor cores.
    ATTENTION_BACKWARD_KEYS_MMA_64 = "attention_backward_keys_mma_64", AttentionMma, tiles(64 << 10), BACKWARD_KEYS;
    /// As `attention_backward_keys`, for heads of up to 128 columns on tensor cores.
    ATTENTION_BACKWARD_KEYS_MMA_128 = "attention_backward_keys_mma_128", AttentionMma, tiles(96 << 10), BACKWARD_KEYS;

    /// As `attention_biased`, for heads of up to 64 columns on tensor cores.
    ATTENTION_BIASED_MMA_64 = "attention_biased_mma_64", AttentionMma, tiles(48 << 10), FORWARD_BIASED;
    /// As `attention_biased`, for heads of up to 128 columns on tensor cores.
    ATTENTION_BIASED_MMA_128 = "attention_biased_mma_128", AttentionMma, tiles(96 << 10), FORWARD_BIASED;
    /// As `attention_biased_backward_queries`, for heads of up to 64 columns on tensor cores.
    ATTENTION_BIASED_BACKWARD_QUERIES_MMA_64 = "attention_biased_backward_queries_mma_64", AttentionMma, tiles(64 << 10), BACKWARD_QUERIES_BIASED;
    /// As `attention_biased_backward_queries`, for heads of up to 128 columns on tensor cores.
    ATTENTION_BIASED_BACKWARD_QUERIES_MMA_128 = "attention_biased_backward_queries_mma_128", AttentionMma, tiles(96 << 10), BACKWARD_QUERIES_BIASED;
    /// As `attention_biased_backward_keys`, for heads of up to 64 columns on tensor cores.
    ATTENTION_BIASED_BACKWARD_KEYS_MMA_64 = "attention_biased_backward_keys_mma_64", AttentionMma, tiles(48 << 10), BACKWARD_KEYS_BIASED;
    /// As `attention_biased_backward_keys`, for heads of up to 128 columns on tensor cores.
    ATTENTION_BIASED_BACKWARD_KEYS_MMA_128 = "attention_biased_backward_keys_mma_128", AttentionMma, tiles(80 << 10), BACKWARD_KEYS_BIASED;
    /// As `attention_bias_gradient`, for heads of up to 64 columns on tensor cores: tiles of 128
    /// queries and 64 keys.
    ATTENTION_BIAS_GRADIENT_MMA_64 = "attention_bias_gradient_mma_64", AttentionMma, shifts(256, 48 << 10, 0), BIAS_GRADIENT;
    /// As `attention_bias_gradient`, for heads of up to 128 columns on tensor cores: tiles of 128
    /// queries and 64 keys.
    ATTENTION_BIAS_GRADIENT_MMA_128 = "attention_bias_gradient_mma_128", AttentionMma, shifts(256, 96 << 10, 0), BIAS_GRADIENT;

    /// As `attention`, for heads of up to 64 columns by warpgroups on the tensor cores of Hopper.
    ATTENTION_WARPGROUP_64 = "attention_warpgroup_64", AttentionWarpgroup, tiles(48 << 10), FORWARD;
    /// As `attention`, for heads of up to 128 columns by warpgroups on the tensor cores of Hopper.
    ATTENTION_WARPGROUP_128 = "attention_warpgroup_128", AttentionWarpgroup, tiles(160 << 10), FORWARD;
    /// As `attention_backward_queries`, for heads of up to 64 columns by warpgroups on the tensor
    /// cores of Hopper.
    ATTENTION_BACKWARD_QUERIES_WARPGROUP_64 = "attention_backward_queries_warpgroup_64", AttentionWarpgroup, tiles(96 << 10), BACKWARD_QUERIES;
    /// As `attention_backward_queries`, for heads of up to 128 columns by warpgroups on the tensor
    /// cores of Hopper.
    ATTENTION_BACKWARD_QUERIES_WARPGROUP_128 = "attention_backward_queries_warpgroup_128", AttentionWarpgroup, tiles(192 << 10), BACKWARD_QUERIES;
    /// As `attention_backward_keys`, for heads of up to 64 columns by warpgroups on the tensor
    /// cores of Hopper.
    ATTENTION_BACKWARD_KEYS_WARPGROUP_64 = "attention_backward_keys_warpgroup_64", AttentionWarpgroup, tiles(98 << 10), BACKWARD_KEYS;
    /// As `attention_backward_keys`, for heads of up to 128 columns by warpgroups on the tensor
    /// cores of Hopper.
    ATTENTION_BACKWARD_KEYS_WARPGROUP_128 = "attention_backward_keys_warpgroup_128", AttentionWarpgroup, tiles(129 << 10), BACKWARD_KEYS;

    /// y = x / rms(x) weight: x, y [rows, dim], inv_rms [rows].
    RMS_NORM = "rms_norm", Norm, Rule::Rows,
        "const T* x, const T* weight, T* y, float* inv_rms, int rows, int dim, float eps";
    /// dx = base + the gradient of x; base [rows, dim]? may be dx itself. partials
    /// [row_blocks(rows), dim]?: the weight's gradient, to be summed by `sum_partials`.
    RMS_NORM_BACKWARD = "rms_norm_backward", Norm, Rule::NormBackward(1),
        "const T* dy, const T* x, const T* weight, const float* inv_rms, const T* base, T* dx, float* partials, int rows, int dim";
    /// y = (x - mean) inv_std weight + bias: bias [dim]?, mean and inv_std [rows].
    LAYER_NORM = "layer_norm", Norm, Rule::Rows,
        "const T* x, const T* weight, const T* bias, T* y, float* mean, float* inv_std, int rows, int dim, float eps";
    /// As `rms_norm_backward`; weight_partials and bias_partials [row_blocks(rows), dim]?.
    LAYER_NORM_BACKWARD = "layer_norm_backward", Norm, Rule::NormBackward(2),
        "const T* dy, const T* x, const T* weight, const float* mean, const float* inv_std, const T* base, T* dx, float* weight_partials, float* bias_partials, int rows, int dim";
    /// RMS norm of each query and key head of qkv, values copied; inv_rms: queries' [rows, heads],
    /// then keys' [rows, kv_heads]. Sizes: rows times (heads + 2 kv_heads).
    QK_NORM = "qk_norm", Norm, Rule::Warps,
        "const T* x, const T* wq, const T* wk, T* y, float* inv_rms, int rows, int heads, int kv_heads, int head_dim, float eps";
    /// Turns the gradient of y into that of x, in place; q_partials and k_partials
    /// [row_blocks(rows), head_dim]?. Sizes: rows, 8 head_dim.
    QK_NORM_BACKWARD = "qk_norm_backward", Norm, Rule::RowBlocks(2),
        "T* gradient, const T* x, const T* wq, const T* wk, const float* inv_rms, float* q_partials, float* k_partials, int rows, int heads, int kv_heads, int head_dim";

    /// y = curve(x). `curve`: 0 none, 1 relu, 2 silu, 3 gelu, 4 gelu's tanh form,
    /// 5 relu squared.
    ACTIVATE = "activate", Pointwise, Rule::Elements, "const T* x, T* y, long long n, int curve";
    /// dx = dy curve'(x).
    ACTIVATION_BACKWARD = "activation_backward", Pointwise, Rule::Elements,
        "const T* dy, const T* x, T* dx, long long n, int curve";
    /// y = silu(gate) up: gate_up [rows, 2 width], y [rows, width]. Sizes: rows width.
    SWIGLU = "swiglu", Pointwise, Rule::Elements, "const T* gate_up, T* y, long long rows, int width";
    /// dgate_up from dy. Sizes: rows width.
    SWIGLU_BACKWARD = "swiglu_backward", Pointwise, Rule::Elements,
        "const T* dy, const T* gate_up, T* dgate_up, long long rows, int width";
    /// y = curve(gate) up, as `swiglu` with any curve of `activate`. Sizes: rows width.
    GLU = "glu", Pointwise, Rule::Elements, "const T* gate_up, T* y, long long rows, int width, int curve";
    /// dgate_up from dy. Sizes: rows width.
    GLU_BACKWARD = "glu_backward", Pointwise, Rule::Elements,
        "const T* dy, const T* gate_up, T* dgate_up, long long rows, int width, int curve";
    /// pre = x + bias, y = curve(pre) + residual: bias [columns]?, residual and pre
    /// [rows, columns]?; y may be x. Sizes: rows columns.
    EPILOGUE = "epilogue", Pointwise, Rule::Elements,
        "const T* x, const T* bias, const T* residual, T* pre, T* y, long long rows, int columns, int curve";
    /// y = a + b; y may be one of them.
    ADD = "add", Pointwise, Rule::Elements, "const T* a, const T* b, T* y, long long n";
    /// y (+)= x in f32.
    ACCUMULATE = "accumulate", Pointwise, Rule::Elements, "const T* x, float* y, long long n, int overwrite";
    /// y *= alpha.
    SCALE = "scale", Pointwise, Rule::Elements, "T* y, long long n, float alpha";
    /// y = x.
    CAST_TO_F32 = "cast_to_f32", Pointwise, Rule::Elements, "const T* x, float* y, long long n";
    /// y = x, rounded to nearest even.
    CAST_TO_BF16 = "cast_to_bf16", Pointwise, Rule::Elements, "const T* x, bf16* y, long long n";
    /// y = x, rounded to nearest even.
    CAST_TO_F16 = "cast_to_f16", Pointwise, Rule::Elements, "const T* x, f16* y, long long n";
    /// y = x, of i32 where `is_signed` else of u32, rounded to nearest.
    TO_FLOAT = "to_float", Pointwise, Rule::Elements, "const unsigned* x, T* y, long long n, int is_signed";
    /// y = value.
    FILL = "fill", Pointwise, Rule::Elements, "T* y, long long n, float value";
    /// y = value.
    FILL_U32 = "fill_u32", Pointwise, Rule::Elements, "unsigned* y, long long n, unsigned value";
    /// y = residual + (kept ? x scale : 0), residual [n]?; kept where the element's 16 Philox bits
    /// are at least `threshold`: the bits of the CPU. The elements are those from `first` on.
    /// step_at [1]? stands for `step`. Sizes: n + first % DROPOUT_GROUP.
    DROPOUT = "dropout", Pointwise, Rule::Elements,
        "const T* x, const T* residual, T* y, long long n, long long first, unsigned long long seed, unsigned step, const unsigned* step_at, unsigned site, unsigned threshold, float scale";
    /// Turns head columns of x [rows, row_stride] in place, heads from column `first` on; cos and
    /// sin [positions, rotary_dim / 2]; sign 1 forward, -1 back. Sizes: rows heads rotary_dim / 2.
    ROPE = "rope", Pointwise, Rule::Elements,
        "T* x, const int* positions, const float* cos, const float* sin, int rows, int row_stride, int first, int heads, int head_dim, int rotary_dim, float sign";

    /// partials [outer, row_blocks(rows), columns]: sums over blocks of rows of x
    /// [outer, rows, columns].
    COLUMN_SUMS = "column_sums", Reduce, Rule::Columns, "const T* x, float* partials, int outer, int rows, int columns";
    /// sums [outer, n] = (add ? sums : 0) + factor times the sum over b of partials
    /// [outer, blocks, n], in order of b. Sizes: outer n.
    SUM_PARTIALS = "sum_partials", Reduce, Rule::Narrow,
        "const float* partials, float* sums, int blocks, long long n, long long outer, float factor, int add";
    /// sums [ceil(n / chunk)], each the sum of a chunk, in f64.
    CHUNK_SUMS = "chunk_sums", Reduce, Rule::Chunks, "const T* x, double* sums, long long n, long long chunk";
    /// sums [ceil(n / chunk)], each the sum of squares of a chunk, in f64: not finite exactly when
    /// an element is not.
    CHUNK_SQUARES = "chunk_squares", Reduce, Rule::Chunks, "const T* x, double* sums, long long n, long long chunk";
    /// sums [ceil(n / chunk)], each the sum of (a - b)^2 of a chunk, in f64.
    SQUARED_ERROR = "squared_error", Reduce, Rule::Chunks, "const T* a, const T* b, double* sums, long long n, long long chunk";
    /// y [1] = the sum of x, in a fixed order.
    SUM_F64 = "sum_f64", Reduce, Rule::One, "const double* x, double* y, long long n";
    /// mean [1] = the sum of sums [count] over n, in a fixed order.
    MEAN_F64 = "mean_f64", Reduce, Rule::One, "const double* sums, float* mean, long long count, long long n";
    /// Adds to count [1] how many elements are not finite.
    NONFINITE = "nonfinite", Reduce, Rule::Elements, "const T* x, unsigned* count, long long n";
    /// y [rows] of x [rows, columns]: how 0 factor times the sum, 1 the largest, NaN passed over.
    REDUCE_ROWS = "reduce_rows", Reduce, Rule::Rows, "const T* x, T* y, int rows, int columns, int how, float factor";
    /// y [rows]: the index of the largest, the first of equals; NaN counts as smallest.
    ARGMAX_ROWS = "argmax_rows", Reduce, Rule::Rows, "const T* x, unsigned* y, int rows, int columns";
    /// y = softmax(x) on rows, or its logarithm.
    SOFTMAX = "softmax", Reduce, Rule::Rows, "const T* x, T* y, int rows, int columns, int logarithm";
    /// dx from dy and the result y of `softmax`.
    SOFTMAX_BACKWARD = "softmax_backward", Reduce, Rule::Rows,
        "const T* dy, const T* y, T* dx, int rows, int columns, int logarithm";
    /// variance [rows] = sum((x - mean)^2) / divisor, mean [rows].
    VARIANCE = "variance", Reduce, Rule::Rows, "const T* x, T* variance, float* mean, int rows, int columns, float divisor";
    /// dx = 2 dy (x - mean) / divisor: dy [rows].
    VARIANCE_BACKWARD = "variance_backward", Reduce, Rule::Rows,
        "const T* dy, const T* x, const float* mean, T* dx, int rows, int columns, float divisor";
    /// dx: dy [rows] in equal parts to the elements of x that are y [rows].
    MAX_BACKWARD = "max_backward", Reduce, Rule::Rows, "const T* dy, const T* x, const T* y, T* dx, int rows, int columns";
    /// Sums up to each element, or from each on.
    CUMULATIVE_SUM = "cumulative_sum", Reduce, Rule::Rows, "const T* x, T* y, int rows, int columns, int backward";
    /// The k largest of rows, largest first, the earlier of equals first: values and indices
    /// [rows, k].
    TOP_K = "top_k", Reduce, Rule::Rows, "const T* x, T* values, unsigned* indices, int rows, int columns, int k";
    /// y = factor dy (a - b): dy [1].
    SCALED_DIFFERENCE = "scaled_difference", Reduce, Rule::Elements,
        "const T* a, const T* b, const float* dy, T* y, long long n, float factor";

    /// The codes of eight bits nearest to scale [1] times x [rows, columns], of E5M2 or E4M3: y
    /// [rows, columns]?, transposed [columns, rows]?; amax [1], the bits of an f32, is raised to
    /// the largest magnitude of x.
    FP8_ROUND = "fp8_round", Fp8, Rule::Squares,
        "const T* x, const float* scale, unsigned char* y, unsigned char* transposed, unsigned* amax, int rows, int columns, int e5m2";
    /// amax alone.
    FP8_AMAX = "fp8_amax", Fp8, Rule::Elements, "const T* x, unsigned* amax, long long n";

    /// loss, lse [rows] and hit [rows]? of logits [rows, stride], of which vocab columns count;
    /// target -100 gives loss 0.
    CROSS_ENTROPY = "cross_entropy", Loss, Rule::Rows,
        "const T* logits, const int* targets, float* loss, float* lse, unsigned* hit, int rows, int vocab, int stride";
    /// The same, lse [rows]?, and logits turned into scale (softmax - onehot), 0 in rows that do
    /// not count.
    CROSS_ENTROPY_IN_PLACE = "cross_entropy_in_place", Loss, Rule::Rows,
        "T* logits, const int* targets, float* loss, float* lse, unsigned* hit, int rows, int vocab, int stride, float scale, const float* scale_at";
    /// dx = dy [1] / max(counted [1]?, 1) (softmax - onehot).
    CROSS_ENTROPY_BACKWARD = "cross_entropy_backward", Loss, Rule::Rows,
        "const T* logits, const int* targets, const float* lse, const float* dy, const unsigned* counted, T* dx, int rows, int vocab, int stride";
    /// statistics [rows, 3] of rows of logits that are those of the classes from `first` on: the
    /// largest, the sum of exponentials of the differences from it, and the target's logit or 0.
    /// All 0 in rows that do not count.
    CROSS_ENTROPY_STATISTICS = "cross_entropy_statistics", Loss, Rule::Rows,
        "const T* logits, const int* targets, float* statistics, int rows, int vocab, int stride, int first";
    /// loss and lse [rows] from statistics [parts, rows, 3], 0 in rows that do not count. Sizes:
    /// rows.
    MERGE_STATISTICS = "merge_statistics", Loss, Rule::Elements,
        "const float* statistics, const int* targets, float* loss, float* lse, int rows, int parts";
    /// Logits of the classes from `first` on turned into scale (softmax - onehot), given lse [rows]
    /// of all classes; 0 in rows that do not count. scale_at [1]? stands for `scale`.
    CROSS_ENTROPY_PART_GRADIENT = "cross_entropy_part_gradient", Loss, Rule::Rows,
        "T* logits, const int* targets, const float* lse, int rows, int vocab, int stride, int first, float scale, const float* scale_at";
    /// sum [1]: of losses [n], f64, in a fixed order; counts [2]: rows that count, and hits [n]?
    /// among them; loss [1]? = scale sum, over the count where `mean`; scale_at [1]? stands for
    /// `scale`.
    LOSS_SUMMARY = "loss_summary", Loss, Rule::One,
        "const float* losses, const unsigned* hits, const int* targets, int n, double* sum, unsigned* counts, float* loss, float scale, const float* scale_at, int mean";

    /// y [n, dim] = rows of table [rows, dim], which holds the rows from `first_row` on, and zeros
    /// for other rows; plus rows of position_table [.., dim]? by positions [n]?. Sizes: n dim.
    EMBEDDING = "embedding", Index, Rule::Elements,
        "const int* tokens, const T* table, const int* positions, const T* position_table, T* y, int n, int dim, int first_row, int rows, int position_count";
    /// first_bad [1] = the least entry whose index is outside 0..limit, and not -100 where
    /// `ignore`; it must hold u32::MAX before. Unsigned indices as their bits.
    CHECK_INDICES = "check_indices", Index, Rule::Elements,
        "const int* indices, unsigned* first_bad, long long n, int limit, int ignore";
    /// first [limit] = the least entry that is each index from `least` on; it must hold i32::MAX
    /// before.
    FIRST_USE = "first_use", Index, Rule::Elements, "const int* indices, int* first, int n, int least, int limit";
    /// sums [outer, n, inner] += dy [outer, k, inner] at indices [k] less `least`, in order of k;
    /// `first` from `first_use`. The gradient of an embedding: outer 1.
    INDEX_ADD = "index_add", Index, Rule::Indices,
        "const T* dy, const int* indices, const int* first, float* sums, int outer, int least, int n, int k, int inner";
    /// y [outer, k, inner] of x [outer, n, inner]. Sizes: outer k inner.
    INDEX_SELECT = "index_select", Index, Rule::Elements,
        "const T* x, const int* indices, T* y, long long outer, int n, int k, int inner";
    /// y [rows, k] of x [rows, n] at indices [rows, k]. Sizes: rows k.
    GATHER = "gather", Index, Rule::Elements, "const T* x, const int* indices, T* y, long long rows, int n, int k";
    /// sums [rows, n] += dy [rows, k] at indices [rows, k], in order of k. Sizes: rows, n.
    SCATTER_ADD = "scatter_add", Index, Rule::Rows, "const T* dy, const int* indices, float* sums, int rows, int n, int k";
    /// y [rows, classes]. Sizes: rows classes.
    ONE_HOT = "one_hot", Index, Rule::Elements, "const int* indices, T* y, long long rows, int classes";

    /// One step: step_size = lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t), keep = 1 - lr
    /// weight_decay; copy [n]? of T.
    ADAMW = "adamw", Optim, Rule::Elements,
        "float* p, const float* g, float* m, float* v, T* copy, long long n, float gradient_scale, float beta1, float beta2, float eps, float keep, float step_size, float root";
    /// One step: keep = 1 - lr weight_decay and coupled 0, or 1 and weight_decay; m [n]?, copy
    /// [n]?.
    SGD = "sgd", Optim, Rule::Elements,
        "float* p, const float* g, float* m, T* copy, long long n, float gradient_scale, float lr, float momentum, int nesterov, float keep, float coupled";
    /// p -= lr sign(g); copy [n]?.
    SIGN_STEP = "sign_step", Optim, Rule::Elements, "float* p, const float* g, T* copy, long long n, float lr";
    /// One step; copy [n]?.
    LION = "lion", Optim, Rule::Elements,
        "float* p, const float* g, float* m, T* copy, long long n, float gradient_scale, float lr, float beta1, float beta2, float keep";
    /// m = momentum m + (1 - momentum) g, and what is orthogonalised, in T, to x.
    MUON_AVERAGE = "muon_average", Optim, Rule::Elements,
        "const float* g, float* m, T* x, long long n, float gradient_scale, float momentum, int nesterov";
    /// x over its norm, of which `squares` [1] is the square, or over `least` where that is larger.
    MUON_NORMALISE = "muon_normalise", Optim, Rule::Elements, "T* x, const double* squares, long long n, float least";
    /// p = keep p - step update.
    MUON_APPLY = "muon_apply", Optim, Rule::Elements, "const T* update, float* p, long long n, float keep, float step";
    /// row_moment [rows], from g [rows, columns].
    ADAFACTOR_ROWS = "adafactor_rows", Optim, Rule::Rows,
        "const float* g, float* row_moment, int rows, int columns, float gradient_scale, float eps1, float beta2";
    /// partials [row_blocks(rows), columns]: sums of squares plus eps1. Sizes: 1, rows, columns.
    ADAFACTOR_COLUMN_SUMS = "adafactor_column_sums", Optim, Rule::Columns,
        "const float* g, float* partials, int rows, int columns, float gradient_scale, float eps1";
    /// column_moment [columns] and inverse [columns], its inverse root, from sums [columns] of the
    /// partials.
    ADAFACTOR_COLUMNS = "adafactor_columns", Optim, Rule::Elements,
        "const float* sums, float* column_moment, float* inverse, int rows, int columns, float beta2";
    /// row_mean [1]: the mean of row_moment.
    ADAFACTOR_ROW_MEAN = "adafactor_row_mean", Optim, Rule::One, "const float* row_moment, float* row_mean, int rows";
    /// sums [rows]: of the squared unclipped update.
    ADAFACTOR_SQUARES = "adafactor_squares", Optim, Rule::Rows,
        "const float* g, const float* row_moment, const float* row_mean, const float* inverse, double* sums, int rows, int columns, float gradient_scale";
    /// length [1] of the step, from sums [count] of squared updates and weights_squares [1], over n
    /// elements; relative: lr is min(lr, 1 / sqrt(t)).
    ADAFACTOR_LENGTH = "adafactor_length", Optim, Rule::One,
        "const double* sums, int count, const double* weights_squares, long long n, float* length, float clip_threshold, float lr, float eps2, int relative";
    /// p and copy [rows, columns]?. Sizes: rows columns.
    ADAFACTOR_APPLY = "adafactor_apply", Optim, Rule::Elements,
        "const float* g, const float* row_moment, const float* row_mean, const float* inverse, const float* length, float* p, T* copy, long long rows, int columns, float gradient_scale, float keep";
    /// moment [n], and sums [ceil(n / chunk)] of the squared unclipped update.
    ADAFACTOR_VECTOR_MOMENT = "adafactor_vector_moment", Optim, Rule::Chunks,
        "const float* g, float* moment, double* sums, long long n, long long chunk, float gradient_scale, float eps1, float beta2";
    /// p and copy [n]?.
    ADAFACTOR_VECTOR_APPLY = "adafactor_vector_apply", Optim, Rule::Elements,
        "const float* g, const float* moment, const float* length, float* p, T* copy, long long n, float gradient_scale, float keep";

    /// y = f(x); `f` counts `cpu::elementwise::Unary::ALL`.
    UNARY = "unary", Plain, Rule::Elements, "const T* x, T* y, long long n, int f";
    /// dx = dy f'; z is the argument, or the result where `derivative::needs` says so.
    UNARY_BACKWARD = "unary_backward", Plain, Rule::Elements, "const T* dy, const T* z, T* dx, long long n, int f";
    /// y [rows, columns] = f(a, b); `f` counts `cpu::elementwise::Binary::ALL`; forms: 0
    /// [rows, columns], 1 [columns], 2 [rows], 3 [1], 4 `number`, pointer unused. Sizes: rows
    /// columns.
    BINARY = "binary", Plain, Rule::Elements,
        "const T* a, const T* b, T* y, long long rows, long long columns, int f, int form_a, int form_b, float number";
    /// da and db [rows, columns]?: dy times the derivatives.
    BINARY_BACKWARD = "binary_backward", Plain, Rule::Elements,
        "const T* dy, const T* a, const T* b, T* da, T* db, long long rows, long long columns, int f, int form_a, int form_b, float number";
    /// dx = dy p x^(p - 1).
    POWER_BACKWARD = "power_backward", Plain, Rule::Elements, "const T* dy, const T* x, T* dx, long long n, float p";
    /// y = min(max(x, low), high), NaN stays.
    CLAMP = "clamp", Plain, Rule::Elements, "const T* x, T* y, long long n, float low, float high";
    /// dx = dy where low <= x <= high, else 0.
    CLAMP_BACKWARD = "clamp_backward", Plain, Rule::Elements,
        "const T* dy, const T* x, T* dx, long long n, float low, float high";
    /// mask: `how` 0 a > b, 1 a >= b, 2 a == b.
    COMPARE = "compare", Plain, Rule::Elements, "const T* a, const T* b, unsigned* mask, long long n, int how";
    /// y = mask ? a : b.
    SELECT = "select", Plain, Rule::Elements, "const unsigned* mask, const T* a, const T* b, T* y, long long n";
    /// y = value where (mask != 0) == set, else x.
    MASKED_FILL = "masked_fill", Plain, Rule::Elements,
        "const T* x, const unsigned* mask, T* y, long long n, int set, float value";
    /// y: `f` 0 and, 1 or, 2 xor, 3 not a (b unused).
    LOGIC = "logic", Plain, Rule::Elements, "const unsigned* a, const unsigned* b, unsigned* y, long long n, int f";
    /// y [queries, keys]. Sizes: queries keys.
    CAUSAL_MASK = "causal_mask", Plain, Rule::Elements, "unsigned* y, long long queries, long long keys";
    /// target = source along the axes, or added to it; elements by their bits when not added, so
    /// f32 modules copy any 4 bytes, bf16 ones any 2. Sizes: the product of the axes' lengths.
    STRIDED = "strided", Plain, Rule::Elements, "const T* source, T* target, Axes axes, long long n, int add";

    /// Each token's `top_k` best experts by score + bias, and their weights: logits
    /// [tokens, count], bias [count]?, experts and weights [tokens, top_k]. `gate`: 0 softmax, 1
    /// sigmoid. At most [`EXPERTS_MAX`] experts. Sizes: tokens.
    ROUTE_CHOOSE = "route_choose", Experts, Rule::Warps,
        "const float* logits, const T* bias, int* experts, float* weights, int tokens, int count, int top_k, int gate, int normalise, float scale";
    /// counts [count]: the choices of each expert. Sizes: 1, count, 1.
    EXPERT_COUNTS = "expert_counts", Experts, Rule::Indices, "const int* experts, int* counts, int choices";
    /// The rows of choices sorted by expert: places [choices], tokens [choices], bounds
    /// [count + 1]; -1 where there is none. Sizes: 1, count, 1.
    EXPERT_PLACES = "expert_places", Experts, Rule::Indices,
        "const int* experts, const int* counts, int* places, int* tokens, int* bounds, int choices, int count, int top_k, int capacity";
    /// dlogits [tokens, count] from dweights [tokens, top_k]? and the factors of the balance
    /// losses. Sizes: tokens.
    ROUTE_BACKWARD = "route_backward", Experts, Rule::Warps,
        "const float* logits, const int* experts, const int* counts, const float* dweights, float* dlogits, int tokens, int count, int top_k, int gate, int normalise, float scale, float auxiliary, float z";
    /// terms [2, tokens]: of each token sum_e share_e counts_e, and (log sum_e e^logit)^2. Sizes:
    /// tokens.
    BALANCE_TERMS = "balance_terms", Experts, Rule::Warps,
        "const float* logits, const int* counts, float* terms, int tokens, int count, int gate";
    /// excess [count] = (counts - their mean) unit, or added to it.
    EXPERT_EXCESS = "expert_excess", Experts, Rule::One,
        "const int* counts, float* excess, int count, float unit, int add";
    /// y [tokens, dim] = residual? + sum_j weights?[j] rows[places[j]]: places and weights
    /// [tokens, top_k].
    COMBINE_ROWS = "combine_rows", Experts, Rule::Rows,
        "const T* rows, const int* places, const float* weights, const T* residual, T* y, int tokens, int top_k, int dim";
    /// drows[places[j]] = weights[j] dy and dweights[j] = dy . rows[places[j]].
    COMBINE_ROWS_BACKWARD = "combine_rows_backward", Experts, Rule::Rows,
        "const T* dy, const T* rows, const int* places, const float* weights, T* drows, float* dweights, int tokens, int top_k, int dim";
    /// y [rows, n] = x [rows, k] w[e]^T by group: bounds [groups + 1], group g has weight
    /// g % weights of w [weights n, k]; zeros behind the last bound. Sizes: rows, n, groups.
    RAGGED_LINEAR = "ragged_linear", Experts, Rule::Ragged(40 << 10),
        "const T* x, const T* w, const int* bounds, T* y, int rows, int n, int k, int groups, int weights";
    /// dx [rows, k] = dy [rows, n] w[e], as `ragged_linear`. Sizes: rows, k, groups.
    RAGGED_INPUT_GRADIENT = "ragged_input_gradient", Experts, Rule::Ragged(40 << 10),
        "const T* dy, const T* w, const int* bounds, T* dx, int rows, int n, int k, int groups, int weights";
    /// dw [weights n, k] (+)= dy^T x over the rows of each group: bounds [weights + 1]. Sizes: n,
    /// k, weights.
    RAGGED_WEIGHT_GRADIENT = "ragged_weight_gradient", Experts, Rule::RaggedSquares(40 << 10),
        "const T* dy, const T* x, const int* bounds, float* dw, int n, int k, int weights, int add";
}

/// The most experts that `route_choose` takes: a lane remembers 64.
pub const EXPERTS_MAX: usize = 64 * 32;
