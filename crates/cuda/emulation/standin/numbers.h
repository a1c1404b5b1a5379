// Numbers of all dtypes, as floats.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// Of library_types.h.
enum Type { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28, E5M2 = 29 };

inline size_t size_of(int type) { return type == F32 ? 4 : type == F16 || type == BF16 ? 2 : 1; }

inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// A number of `exponent` and `mantissa` bits.
inline float small(unsigned bits, int exponent, int mantissa, bool has_infinity) {
    unsigned sign = bits >> (exponent + mantissa) & 1, e = bits >> mantissa & ((1u << exponent) - 1), m = bits & ((1u << mantissa) - 1);
    int bias = (1 << (exponent - 1)) - 1;
    float value;
    if (e == (1u << exponent) - 1 && (has_infinity || m == (1u << mantissa) - 1))
        value = m && (!has_infinity || m) ? NAN : INFINITY;
    else
        value = e ? ldexpf(1.0f + ldexpf((float)m, -mantissa), (int)e - bias) : ldexpf((float)m, 1 - bias - mantissa);
    return sign ? -value : value;
}

inline float load(const void *data, int type, size_t at) {
    switch (type) {
    case F32: return ((const float *)data)[at];
    case BF16: return from_bits((uint32_t)((const uint16_t *)data)[at] << 16);
    case F16: return small(((const uint16_t *)data)[at], 5, 10, true);
    case E4M3: return small(((const uint8_t *)data)[at], 4, 3, false);
    default: return small(((const uint8_t *)data)[at], 5, 2, true);
    }
}

inline void store(void *data, int type, size_t at, float value) {
    if (type == F32) {
        ((float *)data)[at] = value;
    } else if (type == BF16) {
        uint32_t bits = to_bits(value);
        ((uint16_t *)data)[at] = std::isnan(value) ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
        _Float16 half = (_Float16)value;
        memcpy((uint16_t *)data + at, &half, 2);
    }
}
