// Activations and their derivatives over vectors of floats; float32 throughout, NaN in gives NaN out, derivatives are 0
// where they do not exist. Included after scalar.inl and a vector file. The vectors are the compiler's own (GCC,
// Clang), as wide as the unit's registers: left to itself, it leaves many of these loops scalar.

#if defined(SPARSEMLP_F16C)
constexpr int kLanes = V::W;
#else
constexpr int kLanes = 4; // the portable unit: SSE2, NEON
#endif
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes))); // what a comparison gives: 0 or -1 a lane
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Lanes splat(float a) { return a - Lanes{}; }
inline Lanes select(Ints condition, Lanes yes, Lanes no) { return condition ? yes : no; }
inline Lanes absolute(Lanes p) { return (Lanes)((Words)p & 0x7fffffffu); }

inline Lanes load(const float* p) {
    Lanes r;
    __builtin_memcpy(&r, p, sizeof r);
    return r;
}
inline Lanes load(const bf16* p) {
    Halves raw;
    __builtin_memcpy(&raw, p, sizeof raw);
    return (Lanes)(__builtin_convertvector(raw, Words) << 16);
}
inline Lanes load(const f16* p) {
#if defined(SPARSEMLP_F16C)
    return (Lanes)V::load(p);
#else
    Lanes r;
    for (int i = 0; i < kLanes; ++i)
        r[i] = widen(p[i]);
    return r;
#endif
}
inline void store(float* p, Lanes a) { __builtin_memcpy(p, &a, sizeof a); }
inline void store(bf16* p, Lanes a) {
    const Words bits = (Words)a;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; // to nearest, ties to even
    const Words kept = a == a ? rounded : (bits >> 16) | 0x40u;
    const Halves raw = __builtin_convertvector(kept, Halves);
    __builtin_memcpy(p, &raw, sizeof raw);
}
inline void store(f16* p, Lanes a) {
#if defined(SPARSEMLP_F16C)
    V::store(p, (V::F)a);
#else
    for (int i = 0; i < kLanes; ++i)
        narrow(a[i], p + i);
#endif
}

// e^x with about 1 ulp: x = n·ln2 + r, a degree-7 polynomial for e^r, then 2^n in two factors, so that the result
// overflows to inf and underflows gradually. The sum with 1.5·2^23 rounds to an integer without a conversion, whose
// result for NaN would be undefined.
inline Lanes exp_f32(Lanes x) {
    x = select(x > 104.f, splat(104.f), x);
    x = select(x < -104.f, splat(-104.f), x);
    const Lanes shifted = x * 1.44269504f + 12582912.f;
    const Lanes n = shifted - 12582912.f;
    const Lanes r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Lanes e = r * (1.f / 5040) + 1.f / 720;
    e = e * r + 1.f / 120;
    e = e * r + 1.f / 24;
    e = e * r + 1.f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.f;
    e = e * r + 1.f;
    const Ints whole = (Ints)((Words)shifted - as_bits(12582912.f));
    const Ints half = whole >> 1;
    const Lanes low = (Lanes)((Words)(half + 127) << 23);
    const Lanes high = (Lanes)((Words)(whole - half + 127) << 23);
    return e * low * high;
}

// The logistic function and its derivative, neither with cancellation.
struct Logistic {
    Lanes value, slope;
};
inline Logistic logistic_f32(Lanes p) {
    const Lanes e = exp_f32(-absolute(p));
    const Lanes inverse = 1.f / (1.f + e);
    const Lanes low = e * inverse;
    return {select(p > 0.f, inverse, low), low * inverse};
}

// The normal distribution: its density times √(2π) and its upper tail at a ≥ 0. The tail over the density is a
// polynomial in 1 / (1 + 0.325·a), fitted to a relative error of 4e-9 for a ≤ 5 and 8e-8 up to 14.5, where the tail
// underflows.
struct Normal {
    Lanes density, tail;
};
inline Normal normal_f32(Lanes a) {
    const Lanes density = exp_f32(-0.5f * a * a);
    const Lanes t = 1.f / (1.f + 0.325f * a);
    Lanes q = -0.0258533295f * t + 0.153678172f;
    q = q * t - 0.349591259f;
    q = q * t + 0.343635533f;
    q = q * t - 0.146581764f;
    q = q * t + 0.166515255f;
    q = q * t + 0.0959288626f;
    q = q * t + 0.132899593f;
    q = q * t + 0.129356987f;
    q = q * t + 1.19505974e-05f;
    return {density, density * q};
}

// Comparisons are written so that NaN, for which each is false, falls through to p.
inline Lanes relu_f32(Lanes p) { return select(p <= 0.f, Lanes{}, p); }
inline Lanes step_f32(Lanes p, Lanes edge) { return select(p <= edge, Lanes{}, select(p == p, splat(1.f), p)); }

inline Lanes jsrelu_f32(Lanes p) {
    const Lanes q = relu_f32(p);
    return q * (1.f + 0.5f * q);
}
inline Lanes d_jsrelu_f32(Lanes p) { return select(p <= 0.f, Lanes{}, p + 1.f); }

inline Lanes gelu_f32(Lanes p) { // relu minus what the tail takes: no cancellation for negative p
    const Lanes a = absolute(p);
    return select(p > 20.f, p, relu_f32(p) - a * normal_f32(a).tail);
}
inline Lanes d_gelu_f32(Lanes p) {
    const Normal normal = normal_f32(absolute(p));
    return select(p > 0.f, 1.f - normal.tail, normal.tail) + p * normal.density * 0.398942280f;
}

// ½p(1 + tanh z) = p / (1 + e^(−2z)): no cancellation for negative p
inline Lanes gelu_tanh_f32(Lanes p) {
    const Lanes z2 = 1.59576912f * (p + 0.044715f * p * p * p);
    return p / (1.f + exp_f32(-z2));
}
// with s = ½(1 + tanh z): ½(1 − tanh² z) = 2·s'; where that is 0, p² may have overflowed
inline Lanes d_gelu_tanh_f32(Lanes p) {
    const Lanes square = p * p;
    const Logistic s = logistic_f32(1.59576912f * p * (1.f + 0.044715f * square));
    const Lanes rest = p * s.slope * 1.59576912f * (1.f + 0.134145f * square);
    return s.value + select(s.slope == 0.f, Lanes{}, rest);
}

inline Lanes d_silu_f32(Lanes p) {
    const Logistic s = logistic_f32(p);
    return s.value + p * s.slope;
}

// use(φ) with φ as a function of Lanes. [=] everywhere: a lambda without captures would also become a plain function,
// which GCC compiles outside of the target region.
template <class Use> inline void with_activation(Activation activation, const float* params, Use use) {
    switch (activation) {
    case Activation::relu:
        return use([=](Lanes v) { return relu_f32(v); });
    case Activation::relu2:
        return use([=](Lanes v) { return relu_f32(v) * relu_f32(v); });
    case Activation::jsrelu:
        return use([=](Lanes v) { return jsrelu_f32(v); });
    case Activation::weird: {
        const float dx = params[0], dy = params[1], w = params[2];
        return use([=](Lanes v) {
            const Lanes q = v - dx;
            return jsrelu_f32(q - w) - jsrelu_f32(-q - w) + dy;
        });
    }
    case Activation::fatrelu: {
        const float tau = params[0];
        return use([=](Lanes v) { return select(v < tau, Lanes{}, v); });
    }
    case Activation::mix: { // (1 − λ)·relu + λ·jsrelu without 0·inf for large v where λ is 0
        const float half = 0.5f * params[0];
        return use([=](Lanes v) { return relu_f32(v) * (1.f + half * relu_f32(v)); });
    }
    case Activation::silu:
        return use([=](Lanes v) { return v / (1.f + exp_f32(-v)); });
    case Activation::gelu:
        return use([=](Lanes v) { return gelu_f32(v); });
    case Activation::gelu_tanh:
        return use([=](Lanes v) { return gelu_tanh_f32(v); });
    case Activation::identity:
    case Activation::count:
        return use([=](Lanes v) { return v; });
    }
}

// use(φ') likewise.
template <class Use> inline void with_derivative(Activation activation, const float* params, Use use) {
    switch (activation) {
    case Activation::relu:
        return use([=](Lanes v) { return step_f32(v, Lanes{}); });
    case Activation::relu2:
        return use([=](Lanes v) { return 2.f * relu_f32(v); });
    case Activation::jsrelu:
        return use([=](Lanes v) { return d_jsrelu_f32(v); });
    case Activation::weird: {
        const float dx = params[0], w = params[2];
        return use([=](Lanes v) {
            const Lanes q = v - dx;
            return d_jsrelu_f32(q - w) + d_jsrelu_f32(-q - w);
        });
    }
    case Activation::fatrelu: {
        const float tau = params[0];
        return use([=](Lanes v) { return step_f32(v, splat(tau)); });
    }
    case Activation::mix: {
        const float lam = params[0];
        return use([=](Lanes v) { return select(v <= 0.f, Lanes{}, 1.f + lam * v); });
    }
    case Activation::silu:
        return use([=](Lanes v) { return d_silu_f32(v); });
    case Activation::gelu:
        return use([=](Lanes v) { return d_gelu_f32(v); });
    case Activation::gelu_tanh:
        return use([=](Lanes v) { return d_gelu_tanh_f32(v); });
    case Activation::identity:
    case Activation::count:
        return use([=](Lanes v) { return select(v == v, splat(1.f), v); });
    }
}

// fn over a run of values; the last vector is filled up with zeros, so that a result does not depend on its place.
template <class S, class Fn> inline void map(const S* p, S* out, int64_t n, Fn fn) {
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) { // loads of four vectors before the first store
        const Lanes a = load(p + i), b = load(p + i + kLanes);
        const Lanes c = load(p + i + 2 * kLanes), d = load(p + i + 3 * kLanes);
        store(out + i, fn(a));
        store(out + i + kLanes, fn(b));
        store(out + i + 2 * kLanes, fn(c));
        store(out + i + 3 * kLanes, fn(d));
    }
    for (; i + kLanes <= n; i += kLanes)
        store(out + i, fn(load(p + i)));
    if (i == n)
        return;
    S part[kLanes] = {}, made[kLanes];
    for (int64_t k = 0; k < n - i; ++k)
        part[k] = p[i + k];
    store(made, fn(load(part)));
    for (int64_t k = 0; k < n - i; ++k)
        out[i + k] = made[k];
}

// φ over a run of floats, in place.
inline void activate(float* p, int64_t n, Activation activation, const float* params) {
    if (activation != Activation::identity)
        with_activation(activation, params, [=](auto fn) { map(p, p, n, fn); });
}
