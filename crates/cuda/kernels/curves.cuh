// Activation functions and their derivatives, in f32; numbered as `curve` in the table.

#define RELU 1
#define SILU 2
#define GELU 3
#define GELU_TANH 4
#define RELU_SQUARED 5

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float curve_value(int curve, float x) {
    switch (curve) {
    case RELU: return x > 0.0f || x != x ? x : 0.0f;
    case RELU_SQUARED: return x > 0.0f || x != x ? x * x : 0.0f;
    case SILU: return x * sigmoid(x);
    // x P(x), by erfc, which keeps the digits of its lower tail.
    case GELU: return x * 0.5f * erfcf(x * -0.70710678f);
    // x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): 2 sqrt(2 / pi) and that times 0.044715.
    case GELU_TANH: return x * sigmoid(x * (1.5957691f + 0.071354814f * x * x));
    default: return x;
    }
}

DEVICE float curve_slope(int curve, float x) {
    switch (curve) {
    case RELU: return x > 0.0f ? 1.0f : 0.0f;
    case RELU_SQUARED: return x > 0.0f ? 2.0f * x : 0.0f;
    case SILU: {
        float g = sigmoid(x);
        return g * (1.0f + x * (1.0f - g));
    }
    case GELU: return 0.5f * erfcf(x * -0.70710678f) + x * 0.3989423f * expf(-0.5f * x * x);
    case GELU_TANH: {
        float xx = x * x, g = sigmoid(x * (1.5957691f + 0.071354814f * xx));
        return g + x * (g * (1.0f - g)) * (1.5957691f + 3.0f * 0.071354814f * xx);
    }
    default: return 1.0f;
    }
}
