// Optimizer steps, fused: every state is read and written once, and the compute copy, in T, is
// written in the same pass.
//
// Masters, gradients and states are f32. Formulas are those of `cpu::optim` and `cpu::muon`; what a
// step's number enters is computed by the host.

struct States {
    bool vectors;
    i64 i, n;
};

DEVICE void store_weights(const States &s, float *p, T *copy, const float (&v)[PACK]) {
    store_pack(p, s.i, s.n, s.vectors, v);
    if (copy) store_pack(copy, s.i, s.n, s.vectors, v);
}

KERNEL(adamw)(float* p, const float* g, float* m, float* v, T* copy, long long n, float gradient_scale, float beta1, float beta2, float eps, float keep, float step_size, float root) {
    States s = {all_aligned(p, g, m, v, copy), pack_start(), n};
    if (s.i >= n) return;
    float ps[PACK], gs[PACK], ms[PACK], vs[PACK];
    load_pack(p, s.i, n, s.vectors, ps);
    load_pack(g, s.i, n, s.vectors, gs);
    load_pack(m, s.i, n, s.vectors, ms);
    load_pack(v, s.i, n, s.vectors, vs);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        float gk = gs[k] * gradient_scale;
        ms[k] = fmaf(ms[k], beta1, gk * (1.0f - beta1));
        vs[k] = fmaf(vs[k], beta2, gk * gk * (1.0f - beta2));
        ps[k] = fmaf(ms[k] / fmaf(sqrtf(vs[k]), root, eps), -step_size, ps[k] * keep);
    }
    store_pack(m, s.i, n, s.vectors, ms);
    store_pack(v, s.i, n, s.vectors, vs);
    store_weights(s, p, copy, ps);
}

KERNEL(sgd)(float* p, const float* g, float* m, T* copy, long long n, float gradient_scale, float lr, float momentum, int nesterov, float keep, float coupled) {
    States s = {all_aligned(p, g, m, copy), pack_start(), n};
    if (s.i >= n) return;
    float ps[PACK], gs[PACK], ms[PACK];
    load_pack(p, s.i, n, s.vectors, ps);
    load_pack(g, s.i, n, s.vectors, gs);
    if (m) load_pack(m, s.i, n, s.vectors, ms);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        float update = fmaf(ps[k], coupled, gs[k] * gradient_scale);
        if (m) {
            ms[k] = fmaf(ms[k], momentum, update);
            update = nesterov ? fmaf(ms[k], momentum, update) : ms[k];
        }
        ps[k] = fmaf(update, -lr, ps[k] * keep);
    }
    if (m) store_pack(m, s.i, n, s.vectors, ms);
    store_weights(s, p, copy, ps);
}

KERNEL(lion)(float* p, const float* g, float* m, T* copy, long long n, float gradient_scale, float lr, float beta1, float beta2, float keep) {
    States s = {all_aligned(p, g, m, copy), pack_start(), n};
    if (s.i >= n) return;
    float ps[PACK], gs[PACK], ms[PACK];
    load_pack(p, s.i, n, s.vectors, ps);
    load_pack(g, s.i, n, s.vectors, gs);
    load_pack(m, s.i, n, s.vectors, ms);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        float gk = gs[k] * gradient_scale;
        float direction = fmaf(ms[k], beta1, gk * (1.0f - beta1));
        // lr sign(direction); a NaN goes through the product.
        float step = direction > 0.0f ? lr : direction < 0.0f ? -lr : direction * 0.0f;
        ms[k] = fmaf(ms[k], beta2, gk * (1.0f - beta2));
        ps[k] = ps[k] * keep - step;
    }
    store_pack(m, s.i, n, s.vectors, ms);
    store_weights(s, p, copy, ps);
}

// The step of a bias that balances experts; a gradient of 0 moves nothing.
KERNEL(sign_step)(float* p, const float* g, T* copy, long long n, float lr) {
    States s = {all_aligned(p, g, copy), pack_start(), n};
    if (s.i >= n) return;
    float ps[PACK], gs[PACK];
    load_pack(p, s.i, n, s.vectors, ps);
    load_pack(g, s.i, n, s.vectors, gs);
#pragma unroll
    for (int k = 0; k < PACK; k++) ps[k] -= gs[k] > 0.0f ? lr : gs[k] < 0.0f ? -lr : gs[k] * 0.0f;
    store_weights(s, p, copy, ps);
}

KERNEL(muon_average)(const float* g, float* m, T* x, long long n, float gradient_scale, float momentum, int nesterov) {
    States s = {all_aligned(g, m, x), pack_start(), n};
    if (s.i >= n) return;
    float gs[PACK], ms[PACK];
    load_pack(g, s.i, n, s.vectors, gs);
    load_pack(m, s.i, n, s.vectors, ms);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        gs[k] = gs[k] * gradient_scale * (1.0f - momentum);
        ms[k] = fmaf(ms[k], momentum, gs[k]);
        gs[k] = nesterov ? fmaf(ms[k], momentum, gs[k]) : ms[k];
    }
    store_pack(m, s.i, n, s.vectors, ms);
    store_pack(x, s.i, n, s.vectors, gs);
}

KERNEL(muon_normalise)(T* x, const double* squares, long long n, float least) {
    double norm = sqrt(*squares);
    float factor = (float)(1.0 / (norm > least ? norm : (double)least));
    map(x, x, n, [=](float v) { return v * factor; });
}

KERNEL(muon_apply)(const T* update, float* p, long long n, float keep, float step) {
    States s = {all_aligned(update, p), pack_start(), n};
    if (s.i >= n) return;
    float us[PACK], ps[PACK];
    load_pack(update, s.i, n, s.vectors, us);
    load_pack(p, s.i, n, s.vectors, ps);
#pragma unroll
    for (int k = 0; k < PACK; k++) ps[k] = fmaf(us[k], -step, ps[k] * keep);
    store_pack(p, s.i, n, s.vectors, ps);
}

KERNEL(adafactor_rows)(const float* g, float* row_moment, int rows, int columns, float gradient_scale, float eps1, float beta2) {
    const float *row = g + (i64)blockIdx.x * columns;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float v = row[i] * gradient_scale;
        sum += fmaf(v, v, eps1);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) row_moment[blockIdx.x] = beta2 * row_moment[blockIdx.x] + (1.0f - beta2) * (sum / columns);
}

KERNEL(adafactor_column_sums)(const float* g, float* partials, int rows, int columns, float gradient_scale, float eps1) {
    int column = (int)(blockIdx.x * 256 + threadIdx.x);
    if (column >= columns) return;
    Span span = span_of(blockIdx.y, gridDim.y, rows);
    float sum = 0.0f;
    for (int row = span.first; row < span.last; row++) {
        float v = g[(i64)row * columns + column] * gradient_scale;
        sum += fmaf(v, v, eps1);
    }
    partials[(i64)blockIdx.y * columns + column] = sum;
}

KERNEL(adafactor_columns)(const float* sums, float* column_moment, float* inverse, int rows, int columns, float beta2) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < columns; i++) {
        float moment = beta2 * column_moment[i] + (1.0f - beta2) * (sums[i] / rows);
        column_moment[i] = moment;
        inverse[i] = 1.0f / sqrtf(moment);
    }
}

KERNEL(adafactor_row_mean)(const float* row_moment, float* row_mean, int rows) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) sum += row_moment[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *row_mean = (float)(sum / rows);
}

KERNEL(adafactor_squares)(const float* g, const float* row_moment, const float* row_mean, const float* inverse, double* sums, int rows, int columns, float gradient_scale) {
    const float *row = g + (i64)blockIdx.x * columns;
    float scale = gradient_scale * sqrtf(*row_mean / row_moment[blockIdx.x]), sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float u = row[i] * scale * inverse[i];
        sum = fmaf(u, u, sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

KERNEL(adafactor_length)(const double* sums, int count, const double* weights_squares, long long n, float* length, float clip_threshold, float lr, float eps2, int relative) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    double clip = sqrt(sum / n) / clip_threshold, alpha = lr;
    if (relative) {
        double size = sqrt(*weights_squares / n);
        alpha *= size > eps2 ? size : (double)eps2;
    }
    *length = (float)(alpha / (clip > 1.0 ? clip : 1.0));
}

KERNEL(adafactor_apply)(const float* g, const float* row_moment, const float* row_mean, const float* inverse, const float* length, float* p, T* copy, long long rows, int columns, float gradient_scale, float keep) {
    i64 first = pack_start(), n = rows * columns;
    for (i64 i = first; i < first + PACK && i < n; i++) {
        float scale = *length * gradient_scale * sqrtf(*row_mean / row_moment[i / columns]);
        float value = fmaf(p[i], keep, -(g[i] * scale * inverse[i % columns]));
        p[i] = value;
        if (copy) copy[i] = narrow(value);
    }
}

KERNEL(adafactor_vector_moment)(const float* g, float* moment, double* sums, long long n, long long chunk, float gradient_scale, float eps1, float beta2) {
    i64 first = (i64)blockIdx.x * chunk, last = min(first + chunk, n);
    double sum = 0.0;
    for (i64 i = first + threadIdx.x; i < last; i += blockDim.x) {
        float v = g[i] * gradient_scale, square = v * v;
        float next = fmaf(moment[i], beta2, (square + eps1) * (1.0f - beta2));
        moment[i] = next;
        sum += square / next;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

KERNEL(adafactor_vector_apply)(const float* g, const float* moment, const float* length, float* p, T* copy, long long n, float gradient_scale, float keep) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) {
        float value = fmaf(p[i], keep, -(*length * gradient_scale * g[i] / sqrtf(moment[i])));
        p[i] = value;
        if (copy) copy[i] = narrow(value);
    }
}
