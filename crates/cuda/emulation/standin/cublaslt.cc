// Products.

#include "numbers.h"
#include "standin.h"

enum : Status { BLAS_INVALID_VALUE = 7, BLAS_NOT_SUPPORTED = 15 };

struct Matmul {
    int compute, scale_type, transa = 0, transb = 0;
    unsigned epilogue = 1;
    const void *bias = nullptr;
    void *aux = nullptr;
    int64_t aux_ld = 0;
    const float *a_scale = nullptr, *b_scale = nullptr;
};
struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t ld;
    int batch = 1;
    int64_t stride = 0;
};
struct Preference {
    size_t workspace = 0;
    unsigned reduction = 0xff, alignments[4] = {256, 256, 256, 256};
};
struct Algorithm {
    uint64_t data[8];
};
struct Proposal {
    Algorithm algorithm;
    size_t workspace;
    Status state;
    float waves;
    int reserved[4];
};

template <class V> static Status take(V &into, const void *value, size_t size) {
    if (size != sizeof(V)) return BLAS_INVALID_VALUE;
    memcpy(&into, value, size);
    return 0;
}

API size_t cublasLtGetVersion() { return 120804; }
API Status cublasLtCreate(void **handle) {
    *handle = current;
    return current ? 0 : 1;
}
API Status cublasLtMatmulDescCreate(Matmul **desc, int compute, int scale_type) {
    if ((compute != 68 && compute != 77) || scale_type != F32) return BLAS_NOT_SUPPORTED;
    *desc = new Matmul{compute, scale_type};
    return 0;
}
API Status cublasLtMatmulDescSetAttribute(Matmul *desc, int attribute, const void *value, size_t size) {
    switch (attribute) {
    case 3: return take(desc->transa, value, size);
    case 4: return take(desc->transb, value, size);
    case 7: return take(desc->epilogue, value, size);
    case 8: return take(desc->bias, value, size);
    case 11: return take(desc->aux, value, size);
    case 12: return take(desc->aux_ld, value, size);
    case 17: return take(desc->a_scale, value, size);
    case 18: return take(desc->b_scale, value, size);
    default: return BLAS_INVALID_VALUE;
    }
}
API Status cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    if (!rows || !columns || ld < (int64_t)rows) return BLAS_INVALID_VALUE;
    *layout = new Layout{type, rows, columns, ld};
    return 0;
}
API Status cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t size) {
    switch (attribute) {
    case 5: return take(layout->batch, value, size);
    case 6: return take(layout->stride, value, size);
    default: return BLAS_INVALID_VALUE;
    }
}
API Status cublasLtMatmulPreferenceCreate(Preference **preference) {
    *preference = new Preference;
    return 0;
}
API Status cublasLtMatmulPreferenceDestroy(Preference *preference) {
    delete preference;
    return 0;
}
API Status cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t size) {
    if (attribute >= 5 && attribute <= 8) return take(preference->alignments[attribute - 5], value, size);
    switch (attribute) {
    case 1: return take(preference->workspace, value, size);
    case 3: return take(preference->reduction, value, size);
    default: return BLAS_INVALID_VALUE;
    }
}

// Whether these can be multiplied at all: `m x k` by `k x n`, column by column.
static Status multiplies(const Matmul *desc, const Layout *a, const Layout *b, const Layout *c, const Layout *d) {
    uint64_t m = desc->transa ? a->columns : a->rows, k = desc->transa ? a->rows : a->columns;
    uint64_t inner = desc->transb ? b->columns : b->rows, n = desc->transb ? b->rows : b->columns;
    if (inner != k || d->rows != m || d->columns != n || c->rows != m || c->columns != n) return BLAS_INVALID_VALUE;
    if (a->batch != b->batch || a->batch != d->batch || c->type != d->type) return BLAS_INVALID_VALUE;
    unsigned known = 1 | 2 | 4 | 32 | 128;
    if (desc->epilogue & ~known || (desc->epilogue & 1 && desc->epilogue != 1)) return BLAS_NOT_SUPPORTED;
    if (size_of(a->type) == 1) {
        bool sixteen = m % 16 == 0 && n % 16 == 0 && k % 16 == 0;
        bool both_e5m2 = a->type == E5M2 && b->type == E5M2;
        if (!desc->transa || desc->transb || !sixteen || both_e5m2 || size_of(b->type) != 1) return BLAS_NOT_SUPPORTED;
    } else if (a->type != b->type) {
        return BLAS_NOT_SUPPORTED;
    }
    return 0;
}

API Status cublasLtMatmulAlgoGetHeuristic(void *handle, Matmul *desc, Layout *a, Layout *b, Layout *c, Layout *d, Preference *preference,
                                          int wanted, Proposal *found, int *count) {
    *count = 0;
    if (!handle || preference->reduction != 2) return BLAS_INVALID_VALUE;
    if (Status status = multiplies(desc, a, b, c, d)) return status;
    for (; *count < wanted && *count < 2; ++*count)
        found[*count] = Proposal{{{(uint64_t)*count + 1, 0x5a, 0, 0, 0, 0, 0, 0}}, *count * preference->workspace, 0, 1.0f, {}};
    return 0;
}

// Rounded to TF32 where that is asked for.
static float operand(const void *data, int type, size_t at, int compute) {
    float value = load(data, type, at);
    return compute == 77 ? from_bits((to_bits(value) + 0xfff + (to_bits(value) >> 13 & 1)) & ~0x1fffu) : value;
}

API Status cublasLtMatmul(void *handle, Matmul *made, const float *alpha_at, const void *a_at, Layout *a, const void *b_at, Layout *b,
                          const float *beta_at, const void *c_at, Layout *c, void *d_at, Layout *d, const Algorithm *algorithm,
                          void *workspace, size_t bytes, Stream *stream) {
    if (!handle || on(stream)) return 1;
    if (Status status = multiplies(made, a, b, c, d)) return status;
    // As cuBLASLt 13.1 did on an H100; its documentation does not say it.
    if (((Address)made->a_scale | (Address)made->b_scale) % 16) return BLAS_NOT_SUPPORTED;
    if (algorithm->data[1] != 0x5a || (bytes && !current->holds((Address)workspace, bytes))) return BLAS_INVALID_VALUE;
    auto extent = [](const Layout *layout) { return (layout->stride * (layout->batch - 1) + layout->ld * (layout->columns - 1) + layout->rows) * size_of(layout->type); };
    for (auto [at, layout] : {std::pair<const void *, Layout *>{a_at, a}, {b_at, b}, {d_at, d}})
        if (!current->holds((Address)at, extent(layout))) return BLAS_INVALID_VALUE;
    float alpha = *alpha_at, beta = *beta_at;
    if (beta != 0 && !current->holds((Address)c_at, extent(c))) return BLAS_INVALID_VALUE;
    Matmul desc = *made;
    Layout left = *a, right = *b, result = *d;
    uint64_t k = desc.transa ? a->rows : a->columns;
    stream->compute([=] {
        float scale = alpha * (desc.a_scale ? *desc.a_scale : 1.0f) * (desc.b_scale ? *desc.b_scale : 1.0f);
        for (int batch = 0; batch < result.batch; batch++)
            for (uint64_t j = 0; j < result.columns; j++)
                for (uint64_t i = 0; i < result.rows; i++) {
                    float sum = 0;
                    for (uint64_t p = 0; p < k; p++) {
                        size_t x = batch * left.stride + (desc.transa ? p + i * left.ld : i + p * left.ld);
                        size_t y = batch * right.stride + (desc.transb ? j + p * right.ld : p + j * right.ld);
                        sum += operand(a_at, left.type, x, desc.compute) * operand(b_at, right.type, y, desc.compute);
                    }
                    size_t at = batch * result.stride + i + j * result.ld;
                    float value = scale * sum + (beta != 0 ? beta * load(c_at, result.type, at) : 0.0f);
                    if (desc.epilogue & 4) value += load(desc.bias, result.type, i);
                    if (desc.epilogue & 128) store(desc.aux, result.type, i + j * desc.aux_ld, value);
                    if (desc.epilogue & 2) value = fmaxf(value, 0.0f);
                    if (desc.epilogue & 32) value = 0.5f * value * (1.0f + tanhf(0.7978845608f * (value + 0.044715f * value * value * value)));
                    store(d_at, result.type, at, value);
                }
    });
    return 0;
}
