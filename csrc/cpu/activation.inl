// The activation operator for one instruction set. Included inside that unit's target region and anonymous namespace,
// after activations.inl; includes nothing itself.

template <class S, class Fn> inline void map(const S* a, const S* p, S* out, int64_t n, Fn fn) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        store(out + i, fn(load(a + i), load(p + i)));
    if (i == n)
        return;
    S left[kLanes] = {}, right[kLanes] = {}, made[kLanes];
    for (int64_t k = 0; k < n - i; ++k) {
        left[k] = a[i + k];
        right[k] = p[i + k];
    }
    store(made, fn(load(left), load(right)));
    for (int64_t k = 0; k < n - i; ++k)
        out[i + k] = made[k];
}

// How many of fn(p) are not 0; NaN is not.
template <class S, class Fn> inline int64_t count(const S* p, int64_t n, Fn fn) {
    Ints found = {};
    int64_t i = 0, total = 0;
    for (; i + kLanes <= n; i += kLanes)
        found -= fn(load(p + i)) != 0.f;
    if (i < n) {
        S part[kLanes] = {};
        for (int64_t k = 0; k < n - i; ++k)
            part[k] = p[i + k];
        const Ints last = fn(load(part)) != 0.f;
        for (int64_t k = 0; k < n - i; ++k)
            total -= last[k];
    }
    for (int k = 0; k < kLanes; ++k)
        total += found[k];
    return total;
}

template <class S>
void run_forward(const void* p, void* out, int64_t n, Activation activation, const float* params, int64_t* counts) {
    const S* in = static_cast<const S*>(p);
    S* result = static_cast<S*>(out);
    with_activation(activation, params, [=](auto fn) { map(in, result, n, fn); });
    if (counts == nullptr)
        return;
    // The block is in the first-level cache now.
    counts[0] += count(result, n, [=](Lanes v) { return v; });
    with_derivative(activation, params, [=](auto fn) { counts[1] += count(in, n, fn); });
}

template <class S>
void run_backward(const void* grad, const void* p, void* out, int64_t n, Activation activation, const float* params) {
    const S *g = static_cast<const S*>(grad), *in = static_cast<const S*>(p);
    S* result = static_cast<S*>(out);
    with_derivative(activation, params, [=](auto fn) {
        map(g, in, result, n, [=](Lanes left, Lanes right) {
            const Lanes slope = fn(right);
            return select(slope == 0.f, Lanes{}, left * slope);
        });
    });
}

#define SPARSEMLP_ACTIVATION_TABLE                                                                                     \
    {                                                                                                                  \
        {run_forward<float>, run_backward<float>}, {run_forward<bf16>, run_backward<bf16>}, {                          \
            run_forward<f16>, run_backward<f16>                                                                        \
        }                                                                                                              \
    }
