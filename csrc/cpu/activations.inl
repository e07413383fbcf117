// Activations over a run of floats, in place; float32 throughout, NaN in gives NaN out. Branch-free bodies, so that
// the compiler vectorises each loop for the instruction set of the unit that includes this.

// e^x with about 1 ulp: x = n·ln2 + r, a degree-7 polynomial for e^r, then 2^n in two factors, so that the result
// overflows to inf and underflows gradually. The sum with 1.5·2^23 rounds to an integer without a conversion, whose
// result for NaN would be undefined.
inline float exp_f32(float x) {
    x = x > 104.f ? 104.f : x;
    x = x < -104.f ? -104.f : x;
    const float shifted = x * 1.44269504f + 12582912.f;
    const float n = shifted - 12582912.f;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float e = 1.f / 5040;
    e = e * r + 1.f / 720;
    e = e * r + 1.f / 120;
    e = e * r + 1.f / 24;
    e = e * r + 1.f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.f;
    e = e * r + 1.f;
    const int32_t whole = static_cast<int32_t>(as_bits(shifted) - as_bits(12582912.f));
    const int32_t half = whole >> 1;
    const float low = as_float(static_cast<uint32_t>(half + 127) << 23);
    const float high = as_float(static_cast<uint32_t>(whole - half + 127) << 23);
    return e * low * high;
}

inline float relu_f32(float p) { return p <= 0.f ? 0.f : p; } // NaN <= 0 is false

inline float jsrelu_f32(float p) {
    const float q = relu_f32(p);
    return q * (1.f + 0.5f * q);
}

template <class Fn> inline void map(float* p, int64_t n, Fn fn) {
    for (int64_t i = 0; i < n; ++i)
        p[i] = fn(p[i]);
}

inline void activate(float* p, int64_t n, Activation activation, const float* params) {
    switch (activation) {
    case Activation::relu:
        return map(p, n, relu_f32);
    case Activation::relu2:
        return map(p, n, [](float v) { return relu_f32(v) * relu_f32(v); });
    case Activation::jsrelu:
        return map(p, n, jsrelu_f32);
    case Activation::weird: {
        const float dx = params[0], dy = params[1], w = params[2];
        return map(p, n, [=](float v) {
            const float q = v - dx;
            return jsrelu_f32(q - w) - jsrelu_f32(-q - w) + dy;
        });
    }
    case Activation::fatrelu: {
        const float tau = params[0];
        return map(p, n, [=](float v) { return v < tau ? 0.f : v; });
    }
    case Activation::mix: {
        const float lam = params[0];
        return map(p, n, [=](float v) { return (1.f - lam) * relu_f32(v) + lam * jsrelu_f32(v); });
    }
    case Activation::silu:
        return map(p, n, [](float v) { return v / (1.f + exp_f32(-v)); });
    case Activation::gelu: // the error function comes from libm: a call an element, rare in gated models
        return map(p, n, [](float v) { return 0.5f * v * (1.f + erff(v * 0.707106781f)); });
    case Activation::gelu_tanh: // ½v(1 + tanh z) = v / (1 + e^(−2z)): no cancellation for negative v
        return map(p, n, [](float v) {
            const float z2 = 1.59576912f * (v + 0.044715f * v * v * v);
            return v / (1.f + exp_f32(-z2));
        });
    case Activation::identity:
    case Activation::count:
        return;
    }
}
