// The plain operations: elementwise functions with broadcasting and their derivatives, masks, walks
// over strided layouts. Functions are numbered as the enums of the CPU's kernels list them, and
// give what those give where arguments are not finite.

DEVICE float unary_value(int f, float x) {
    switch (f) {
    case 0: return -x;
    case 1: return fabsf(x);
    case 2: return expf(x);
    case 3: return logf(x);
    case 4: return sqrtf(x);
    case 5: return 1.0f / sqrtf(x);
    case 6: return x * x;
    case 7: return 1.0f / x;
    case 8: return tanhf(x);
    case 9: return 1.0f / (1.0f + expf(-x));
    case 10: return erff(x);
    default: return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x * 0.0f;
    }
}

// Of the derivative times dy; z is the argument of abs, ln, square and erf, the result of the
// others.
DEVICE float unary_slope(int f, float dy, float z) {
    switch (f) {
    case 0: return -dy;
    case 1: return z > 0.0f ? dy : z < 0.0f ? -dy : z * dy;
    case 2: return dy * z;
    case 3: return dy / z;
    case 4: return dy * 0.5f / z;
    case 5: return dy * -0.5f * (z * (z * z));
    case 6: return dy * (z + z);
    case 7: return -(dy * (z * z));
    case 8: return dy * (1.0f - z * z);
    case 9: return dy * (z * (1.0f - z));
    case 10: return dy * 1.1283792f * expf(-(z * z));
    default: return 0.0f;
    }
}

KERNEL(unary)(const T* x, T* y, long long n, int f) {
    map(x, y, n, [=](float x) { return unary_value(f, x); });
}

KERNEL(unary_backward)(const T* dy, const T* z, T* dx, long long n, int f) {
    map(dy, z, dx, n, [=](float dy, float z) { return unary_slope(f, dy, z); });
}

// An operand: [rows, columns], [columns], [rows], [1], or the number.
DEVICE float operand(const T *x, int form, i64 row, i64 column, i64 columns, float number) {
    switch (form) {
    case 0: return widen(x[row * columns + column]);
    case 1: return widen(x[column]);
    case 2: return widen(x[row]);
    case 3: return widen(x[0]);
    default: return number;
    }
}

// The larger and the smaller are NaN where b is.
DEVICE float binary_value(int f, float a, float b) {
    switch (f) {
    case 0: return a + b;
    case 1: return a - b;
    case 2: return a * b;
    case 3: return a / b;
    case 4: return a > b ? a : b;
    case 5: return a < b ? a : b;
    default: return powf(a, b);
    }
}

// The derivatives of a^b by a and by b; those of a constant are 0.
DEVICE float power_by_base(float a, float b) { return b == 0.0f ? 0.0f : b * powf(a, b - 1.0f); }
DEVICE float power_by_exponent(float a, float b) { return a == 0.0f ? 0.0f : powf(a, b) * logf(a); }

DEVICE void binary_slopes(int f, float dy, float a, float b, float &da, float &db) {
    switch (f) {
    case 0: da = dy, db = dy; return;
    case 1: da = dy, db = -dy; return;
    case 2: da = dy * b, db = dy * a; return;
    case 3: da = dy / b, db = -(da * (a / b)); return;
    case 4:
    case 5: {
        bool first = f == 4 ? a > b : a < b, second = f == 4 ? b > a : b < a;
        da = first ? dy : second ? 0.0f : 0.5f * dy;
        db = first ? 0.0f : second ? dy : 0.5f * dy;
        return;
    }
    default: da = dy * power_by_base(a, b), db = dy * power_by_exponent(a, b);
    }
}

KERNEL(binary)(const T* a, const T* b, T* y, long long rows, long long columns, int f, int form_a, int form_b, float number) {
    i64 first = pack_start(), n = rows * columns;
    if (first >= n) return;
    i64 row = first / columns, column = first % columns;
    float v[PACK];
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        if (first + k < n)
            v[k] = binary_value(f, operand(a, form_a, row, column, columns, number), operand(b, form_b, row, column, columns, number));
        if (++column == columns) row++, column = 0;
    }
    store_pack(y, first, n, aligned(y), v);
}

KERNEL(binary_backward)(const T* dy, const T* a, const T* b, T* da, T* db, long long rows, long long columns, int f, int form_a, int form_b, float number) {
    i64 first = pack_start(), n = rows * columns;
    if (first >= n) return;
    i64 row = first / columns, column = first % columns;
    for (int k = 0; k < PACK && first + k < n; k++) {
        float by_a, by_b;
        binary_slopes(f, widen(dy[first + k]), operand(a, form_a, row, column, columns, number), operand(b, form_b, row, column, columns, number), by_a, by_b);
        if (da) da[first + k] = narrow(by_a);
        if (db) db[first + k] = narrow(by_b);
        if (++column == columns) row++, column = 0;
    }
}

KERNEL(power_backward)(const T* dy, const T* x, T* dx, long long n, float p) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) dx[i] = narrow(widen(dy[i]) * power_by_base(widen(x[i]), p));
}

KERNEL(clamp)(const T* x, T* y, long long n, float low, float high) {
    map(x, y, n, [=](float x) {
        float above = low > x ? low : x;
        return high < above ? high : above;
    });
}

KERNEL(clamp_backward)(const T* dy, const T* x, T* dx, long long n, float low, float high) {
    map(dy, x, dx, n, [=](float dy, float x) { return low <= x && x <= high ? dy : 0.0f; });
}

KERNEL(compare)(const T* a, const T* b, unsigned* mask, long long n, int how) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) {
        float x = widen(a[i]), y = widen(b[i]);
        mask[i] = how == 0 ? x > y : how == 1 ? x >= y : x == y;
    }
}

KERNEL(select)(const unsigned* mask, const T* a, const T* b, T* y, long long n) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) y[i] = mask[i] ? a[i] : b[i];
}

KERNEL(masked_fill)(const T* x, const unsigned* mask, T* y, long long n, int set, float value) {
    i64 first = pack_start();
    T filled = narrow(value);
    for (i64 i = first; i < first + PACK && i < n; i++) y[i] = (mask[i] != 0) == (set != 0) ? filled : x[i];
}

KERNEL(logic)(const unsigned* a, const unsigned* b, unsigned* y, long long n, int f) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) {
        bool x = a[i] != 0, z = f < 3 && b[i] != 0;
        y[i] = f == 0 ? x && z : f == 1 ? x || z : f == 2 ? x != z : !x;
    }
}

KERNEL(causal_mask)(unsigned* y, long long queries, long long keys) {
    i64 first = pack_start(), n = queries * keys;
    for (i64 i = first; i < first + PACK && i < n; i++) y[i] = i % keys <= keys - queries + i / keys;
}

#define AXES_MAX 12
struct Axes {
    i64 count, len[AXES_MAX], source[AXES_MAX], target[AXES_MAX];
};

KERNEL(strided)(const T* source, T* target, Axes axes, long long n, int add) {
    i64 first = pack_start();
    for (i64 i = first; i < first + PACK && i < n; i++) {
        i64 rest = i, from = 0, to = 0;
        for (int axis = (int)axes.count - 1; axis >= 0; axis--) {
            i64 at = rest % axes.len[axis];
            rest /= axes.len[axis];
            from += at * axes.source[axis];
            to += at * axes.target[axis];
        }
        target[to] = add ? narrow(widen(target[to]) + widen(source[from])) : source[from];
    }
}
