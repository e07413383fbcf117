// What the patterns of stored p and u are, and the values at their entries. Included after hidden.inl; includes nothing
// itself.

constexpr int64_t kPatternChunk = 256;

// Up to kPatternChunk entries: a = φ(p), slope = φ'(p), u (1 without a gate), and m, which thresholds are compared
// with.
struct Chunk {
    float a[kPatternChunk], slope[kPatternChunk], u[kPatternChunk], product[kPatternChunk];

    const float* compared(Indicator indicator) const {
        return indicator == Indicator::up ? u : indicator == Indicator::product ? product : a;
    }
    // Of p in `a` and of u.
    void evaluate(const Thresholding& rule, int64_t n, bool gated) {
        with_derivative(rule.activation, rule.params, [&](auto fn) { map(a, slope, n, fn); });
        activate(a, n, rule.activation, rule.params);
        if (gated)
            for (int64_t i = 0; i < n; ++i)
                product[i] = a[i] * u[i];
    }
};

template <class S> inline void widen_all(const S* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        to[i] = widen(from[i]);
}

template <class S> void run_masks(const Stored& stored, int64_t t, uint64_t* active, uint64_t* moving) {
    const Thresholding& rule = stored.rule;
    const int64_t F = stored.neurons;
    const bool mean = rule.skipped_mean != nullptr;
    Chunk chunk = {};
    float limits[kPatternChunk];
    if (rule.threshold_step == 0)
        for (float& limit : limits)
            limit = limit_of(rule, rule.threshold[0], t);
    for (int64_t j0 = 0; j0 < F; j0 += kPatternChunk) {
        const int64_t n = F - j0 < kPatternChunk ? F - j0 : kPatternChunk;
        widen_all(static_cast<const S*>(stored.pre) + t * F + j0, chunk.a, n);
        if (stored.up != nullptr)
            widen_all(static_cast<const S*>(stored.up) + t * F + j0, chunk.u, n);
        chunk.evaluate(rule, n, stored.up != nullptr);
        if (rule.threshold_step != 0)
            for (int64_t i = 0; i < n; ++i)
                limits[i] = limit_of(rule, rule.threshold[j0 + i], t);
        const float* m = chunk.compared(rule.indicator);
        for (int64_t i = 0; i < n; i += 64) {
            uint64_t a = 0, d = 0;
            for (int64_t k = 0; k < 64 && i + k < n; k += V::W) {
                const typename V::F value = V::load(m + i + k), limit = V::load(limits + i + k);
                a |= uint64_t{V::kept(value, V::load(chunk.a + i + k), limit, mean)} << k;
                d |= uint64_t{V::kept(value, V::load(chunk.slope + i + k), limit, false)} << k;
            }
            const uint64_t real = n - i < 64 ? (uint64_t{1} << (n - i)) - 1 : ~uint64_t{0};
            active[(j0 + i) / 64] = a & real;
            moving[(j0 + i) / 64] = d & real;
        }
    }
}

template <class S>
void run_values(const Stored& stored, int64_t t, const int32_t* index, int64_t n, void* hidden, float* by_pre,
                float* by_up) {
    const Thresholding& rule = stored.rule;
    const S* pre = static_cast<const S*>(stored.pre) + t * stored.neurons;
    const S* up = stored.up != nullptr ? static_cast<const S*>(stored.up) + t * stored.neurons : nullptr;
    Chunk chunk;
    for (int64_t e0 = 0; e0 < n; e0 += kPatternChunk) {
        const int64_t some = n - e0 < kPatternChunk ? n - e0 : kPatternChunk;
        const int32_t* at = index + e0;
        for (int64_t i = 0; i < some; ++i)
            chunk.a[i] = widen(pre[at[i]]);
        if (up != nullptr)
            for (int64_t i = 0; i < some; ++i)
                chunk.u[i] = widen(up[at[i]]);
        chunk.evaluate(rule, some, up != nullptr);
        const float* h = up != nullptr ? chunk.product : chunk.a;
        for (int64_t i = 0; hidden != nullptr && i < some; ++i)
            narrow(h[i] - (rule.skipped_mean != nullptr ? rule.skipped_mean[at[i]] : 0.f),
                   static_cast<S*>(hidden) + e0 + i);
        for (int64_t i = 0; by_pre != nullptr && i < some; ++i)
            by_pre[e0 + i] = up != nullptr ? chunk.slope[i] * chunk.u[i] : chunk.slope[i];
        for (int64_t i = 0; by_up != nullptr && i < some; ++i)
            by_up[e0 + i] = chunk.a[i];
    }
}

template <class S> void run_multiply(const float* a, const float* b, int64_t n, void* out) {
    for (int64_t i = 0; i < n; ++i)
        narrow(a[i] * b[i], static_cast<S*>(out) + i);
}

// In float64: additions of equal numbers, as `.sum().backward()` makes them, all round the same way in float32.
template <class S> double run_total(const void* values, int64_t n) {
    double total = 0.;
    for (int64_t i = 0; i < n; ++i)
        total += widen(static_cast<const S*>(values)[i]);
    return total;
}

// out = what of `value` the mask's bits leave, rounded.
template <class S, class Value> inline void put_masked(void* out, int64_t n, const int32_t* mask, Value value) {
    float made[kPatternChunk];
    for (int64_t i = 0; i < n; ++i)
        made[i] = as_float(as_bits(value(i)) & static_cast<uint32_t>(mask[i]));
    for (int64_t i = 0; i < n; ++i)
        narrow(made[i], static_cast<S*>(out) + i);
}

// A chunk of the elementwise step, whose first entry is the outputs' entry `at`; g holds ∂ℓ/∂h. Masks are words of ones
// or zeros, which the compiler turns into whole vectors.
template <class S>
inline void entries_chunk(const EntriesCall& call, const Chunk& chunk, const float* limits, const float* g, int64_t at,
                          int64_t n) {
    const Thresholding& rule = call.stored.rule;
    const int zeros = rule.skipped_mean != nullptr;
    const float *m = chunk.compared(rule.indicator), *a = chunk.a, *slope = chunk.slope, *u = chunk.u;
    int32_t active[kPatternChunk], moving[kPatternChunk];
    for (int64_t i = 0; i < n; ++i) {
        const int kept = !(fabsf(m[i]) < limits[i]);
        active[i] = -(kept & (zeros | (a[i] != 0.f)));
        moving[i] = -(kept & (slope[i] != 0.f));
    }
    const auto to = [&](void* out) { return static_cast<S*>(out) + at; };
    if (call.grad_up == nullptr)
        return put_masked<S>(to(call.grad_hidden), n, moving, [=](int64_t i) { return g[i] * slope[i]; });
    put_masked<S>(to(call.grad_up), n, active, [=](int64_t i) { return g[i] * a[i]; });
    put_masked<S>(to(call.grad_hidden), n, moving, [=](int64_t i) { return g[i] * (slope[i] * u[i]); });
}

template <class S> void run_entries(const EntriesCall& call, int64_t begin, int64_t end) {
    const Stored& stored = call.stored;
    const Thresholding& rule = stored.rule;
    const int64_t F = stored.neurons;
    Chunk chunk = {};
    float limits[kPatternChunk], g[kPatternChunk];
    for (int64_t t = begin; t < end; ++t) {
        if (rule.threshold_step == 0)
            for (float& limit : limits)
                limit = limit_of(rule, rule.threshold[0], t);
        for (int64_t j0 = 0; j0 < F; j0 += kPatternChunk) {
            const int64_t n = F - j0 < kPatternChunk ? F - j0 : kPatternChunk, at = t * F + j0;
            widen_all(static_cast<const S*>(stored.pre) + at, chunk.a, n);
            if (stored.up != nullptr)
                widen_all(static_cast<const S*>(stored.up) + at, chunk.u, n);
            chunk.evaluate(rule, n, stored.up != nullptr);
            for (int64_t i = 0; rule.threshold_step != 0 && i < n; ++i)
                limits[i] = limit_of(rule, rule.threshold[j0 + i], t);
            widen_all(static_cast<const S*>(call.grad_hidden) + at, g, n);
            entries_chunk<S>(call, chunk, limits, g, at, n);
        }
    }
}
