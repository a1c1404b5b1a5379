// What works element by element and belongs to transformers. Each thread takes eight elements in
// 16-byte pieces where the pointers allow it.

KERNEL(activate)(const T* x, T* y, long long n, int curve) {
    map(x, y, n, [=](float x) { return curve_value(curve, x); });
}

KERNEL(activation_backward)(const T* dy, const T* x, T* dx, long long n, int curve) {
    map(dy, x, dx, n, [=](float dy, float x) { return dy * curve_slope(curve, x); });
}

// y = value(gate) up. Where rows are whole packs, a pack lies in one row; else elements are taken
// one by one.
template <class Value>
DEVICE void gated(const T *gate_up, T *y, i64 rows, int width, Value value) {
    i64 first = pack_start(), n = rows * width;
    if (first >= n) return;
    if (width % PACK == 0 && all_aligned(gate_up, y)) {
        i64 row = first / width, at = first + row * width;
        float gate[PACK], up[PACK];
        load_pack(gate_up, at, 2 * n, true, gate);
        load_pack(gate_up, at + width, 2 * n, true, up);
#pragma unroll
        for (int k = 0; k < PACK; k++) gate[k] = value(gate[k]) * up[k];
        store_pack(y, first, n, true, gate);
        return;
    }
    for (i64 i = first; i < first + PACK && i < n; i++) {
        i64 at = i + i / width * width;
        y[i] = narrow(value(widen(gate_up[at])) * widen(gate_up[at + width]));
    }
}

// Turns gate and up into their gradients, `slopes(dy, gate, up)` in place.
template <class Slopes>
DEVICE void gated_backward(const T *dy, const T *gate_up, T *dgate_up, i64 rows, int width, Slopes slopes) {
    i64 first = pack_start(), n = rows * width;
    if (first >= n) return;
    if (width % PACK == 0 && all_aligned(dy, gate_up, dgate_up)) {
        i64 row = first / width, at = first + row * width;
        float d[PACK], gate[PACK], up[PACK];
        load_pack(dy, first, n, true, d);
        load_pack(gate_up, at, 2 * n, true, gate);
        load_pack(gate_up, at + width, 2 * n, true, up);
#pragma unroll
        for (int k = 0; k < PACK; k++) slopes(d[k], gate[k], up[k]);
        store_pack(dgate_up, at, 2 * n, true, gate);
        store_pack(dgate_up, at + width, 2 * n, true, up);
        return;
    }
    for (i64 i = first; i < first + PACK && i < n; i++) {
        i64 at = i + i / width * width;
        float gate = widen(gate_up[at]), up = widen(gate_up[at + width]);
        slopes(widen(dy[i]), gate, up);
        dgate_up[at] = narrow(gate);
        dgate_up[at + width] = narrow(up);
    }
}

KERNEL(swiglu)(const T* gate_up, T* y, long long rows, int width) {
    gated(gate_up, y, rows, width, [](float gate) { return gate * sigmoid(gate); });
}

KERNEL(swiglu_backward)(const T* dy, const T* gate_up, T* dgate_up, long long rows, int width) {
    gated_backward(dy, gate_up, dgate_up, rows, width, [](float dy, float &gate, float &up) {
        float s = sigmoid(gate), value = gate * s;
        gate = dy * up * (s * (1.0f + gate * (1.0f - s)));
        up = dy * value;
    });
}

KERNEL(glu)(const T* gate_up, T* y, long long rows, int width, int curve) {
    gated(gate_up, y, rows, width, [=](float gate) { return curve_value(curve, gate); });
}

KERNEL(glu_backward)(const T* dy, const T* gate_up, T* dgate_up, long long rows, int width, int curve) {
    gated_backward(dy, gate_up, dgate_up, rows, width, [=](float dy, float &gate, float &up) {
        float value = curve_value(curve, gate);
        gate = dy * up * curve_slope(curve, gate);
        up = dy * value;
    });
}

KERNEL(epilogue)(const T* x, const T* bias, const T* residual, T* pre, T* y, long long rows, int columns, int curve) {
    i64 first = pack_start(), n = rows * columns;
    if (first >= n) return;
    bool vectors = columns % PACK == 0 && all_aligned(x, bias, residual, pre, y);
    i64 column = first % columns;
    float v[PACK], b[PACK], r[PACK];
    load_pack(x, first, n, vectors, v);
    if (bias && vectors) load_pack(bias, column, columns, true, b);
    if (residual) load_pack(residual, first, n, vectors, r);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        if (bias && !vectors) b[k] = widen(bias[(first + k) % columns]);
        if (bias) v[k] += b[k];
    }
    if (pre) store_pack(pre, first, n, vectors, v);
#pragma unroll
    for (int k = 0; k < PACK; k++) v[k] = curve_value(curve, v[k]) + (residual ? r[k] : 0.0f);
    store_pack(y, first, n, vectors, v);
}

KERNEL(add)(const T* a, const T* b, T* y, long long n) {
    map(a, b, y, n, [](float a, float b) { return a + b; });
}

KERNEL(accumulate)(const T* x, float* y, long long n, int overwrite) {
    i64 i = pack_start();
    if (i >= n) return;
    bool vectors = all_aligned(x, y);
    float v[PACK], w[PACK];
    load_pack(x, i, n, vectors, v);
    if (!overwrite) {
        load_pack(y, i, n, vectors, w);
#pragma unroll
        for (int k = 0; k < PACK; k++) v[k] += w[k];
    }
    store_pack(y, i, n, vectors, v);
}

KERNEL(scale)(T* y, long long n, float alpha) {
    map(y, y, n, [=](float x) { return x * alpha; });
}

KERNEL(cast_to_f32)(const T* x, float* y, long long n) { map(x, y, n, [](float x) { return x; }); }
KERNEL(cast_to_bf16)(const T* x, bf16* y, long long n) { map(x, y, n, [](float x) { return x; }); }
KERNEL(cast_to_f16)(const T* x, f16* y, long long n) { map(x, y, n, [](float x) { return x; }); }

KERNEL(to_float)(const unsigned* x, T* y, long long n, int is_signed) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) y[i] = narrow(is_signed ? (float)(int)x[i] : (float)x[i]);
}

KERNEL(fill)(T* y, long long n, float value) {
    i64 i = pack_start();
    if (i >= n) return;
    float v[PACK];
#pragma unroll
    for (int k = 0; k < PACK; k++) v[k] = value;
    store_pack(y, i, n, aligned(y), v);
}

KERNEL(fill_u32)(unsigned* y, long long n, unsigned value) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) y[i] = value;
}

// A thread has one counter of a group of 128 elements, which serves eight of them, 16 apart, with
// 16 bits each (`cpu::dropout`); neighbouring threads have neighbouring elements. Element 0 of x is
// number `first`, which may lie inside a group.
KERNEL(dropout)(const T* x, const T* residual, T* y, long long n, long long first, unsigned long long seed, unsigned step, const unsigned* step_at, unsigned site, unsigned threshold, float scale) {
    u64 counter = (u64)first / 128 * 16 + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 start = (i64)(counter / 16 * 128 + counter % 16) - first;
    if (start >= n) return;
    unsigned words[4] = {(unsigned)counter, (unsigned)(counter >> 32), site, step_at ? *step_at : step};
    philox(seed, words);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        i64 i = start + 16 * k;
        if (i < 0) continue;
        if (i >= n) break;
        unsigned bits = k % 2 == 0 ? words[k / 2] & 0xffff : words[k / 2] >> 16;
        float kept = bits >= threshold ? widen(x[i]) * scale : 0.0f;
        y[i] = narrow(residual ? kept + widen(residual[i]) : kept);
    }
}

KERNEL(rope)(T* x, const int* positions, const float* cos, const float* sin, int rows, int row_stride, int first, int heads, int head_dim, int rotary_dim, float sign) {
    int half = rotary_dim / 2;
    i64 start = pack_start(), n = (i64)rows * heads * half;
    if (start >= n) return;
    // Eight pairs of one head, where heads are whole packs.
    bool vectors = half % PACK == 0 && row_stride % PACK == 0 && first % PACK == 0 && head_dim % PACK == 0 && all_aligned(x, cos, sin);
    if (vectors) {
        i64 unit = start / half;
        int pair = (int)(start % half), row = (int)(unit / heads);
        i64 at = (i64)row * row_stride + first + unit % heads * head_dim + pair, angle = (i64)positions[row] * half + pair;
        float a[PACK], b[PACK], c[PACK], s[PACK];
        load_pack(x, at, at + PACK, true, a);
        load_pack(x, at + half, at + half + PACK, true, b);
        load_pack(cos, angle, angle + PACK, true, c);
        load_pack(sin, angle, angle + PACK, true, s);
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            float low = a[k] * c[k] - b[k] * (s[k] * sign);
            b[k] = fmaf(a[k], s[k] * sign, b[k] * c[k]);
            a[k] = low;
        }
        store_pack(x, at, at + PACK, true, a);
        store_pack(x, at + half, at + half + PACK, true, b);
        return;
    }
    for (i64 i = start; i < start + PACK && i < n; i++) {
        i64 unit = i / half;
        int pair = (int)(i % half), row = (int)(unit / heads);
        i64 at = (i64)row * row_stride + first + unit % heads * head_dim + pair, angle = (i64)positions[row] * half + pair;
        float a = widen(x[at]), b = widen(x[at + half]), c = cos[angle], s = sin[angle] * sign;
        x[at] = narrow(a * c - b * s);
        x[at + half] = narrow(fmaf(a, s, b * c));
    }
}
