// The elementwise step between the products of an MLP for many tokens: h = C(φ(p)) ⊙ u of stored p and u. Included
// before mlp.inl.

inline bool kept_at(float m, float limit) { return !(fabsf(m) < limit); }

inline float limit_of(const Thresholding& rule, float threshold, int64_t token) {
    if (rule.token_scale == nullptr)
        return threshold;
    const float s = rule.token_scale[token];
    return s == 0.f ? 0.f : s * threshold; // s = 0 is dense even where the threshold is inf
}

// One token's neurons [j0, j0 + n): a holds φ(p); u is null for an ungated MLP, and scores but by the screen.
template <class S>
bool hidden_entries(const Thresholding& rule, int64_t t, int64_t j0, int64_t n, const float* a, const S* u,
                    const float* scores, S* out, int64_t* active) {
    const bool mean = rule.skipped_mean != nullptr;
    bool valid = true;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t j = j0 + i;
        const float threshold = rule.threshold[j * rule.threshold_step];
        valid &= threshold >= 0.f;
        const float up = u != nullptr ? widen(u[i]) : 1.f, product = u != nullptr ? a[i] * up : a[i];
        const float m = scores != nullptr                      ? scores[i]
                        : rule.indicator == Indicator::up      ? up
                        : rule.indicator == Indicator::product ? product
                                                               : a[i];
        const bool on = kept_at(m, limit_of(rule, threshold, t)) && (mean || a[i] != 0.f);
        *active += on;
        narrow(on ? product - (mean ? rule.skipped_mean[j] : 0.f) : 0.f, out + i);
    }
    return valid;
}

template <class S> bool run_hidden(const HiddenCall& call, int64_t begin, int64_t end, int64_t* active) {
    constexpr int64_t kChunk = 256;
    const Thresholding& rule = call.rule;
    const int64_t F = call.neurons;
    const bool plain = rule.threshold_step == 0 && rule.skipped_mean == nullptr &&
                       (rule.indicator == Indicator::gate || rule.indicator == Indicator::none);
    float a[kChunk];
    bool valid = true;
    for (int64_t t = begin; t < end; ++t) {
        for (int64_t j0 = 0; j0 < F; j0 += kChunk) {
            const int64_t n = F - j0 < kChunk ? F - j0 : kChunk;
            const S* pre = static_cast<const S*>(call.pre) + t * F + j0;
            const S* up = call.up != nullptr ? static_cast<const S*>(call.up) + t * F + j0 : nullptr;
            const float* scores = call.scores != nullptr ? call.scores + t * F + j0 : nullptr;
            S* out = static_cast<S*>(call.out) + t * F + j0;
            for (int64_t i = 0; i < n; ++i)
                a[i] = widen(pre[i]);
            activate(a, n, rule.activation, rule.params);
            if (!plain) {
                valid &= hidden_entries(rule, t, j0, n, a, up, scores, out, active);
                continue;
            }
            const float limit = limit_of(rule, rule.threshold[0], t); // the common case, simple enough to vectorise
            valid &= rule.threshold[0] >= 0.f;
            int32_t count = 0;
            for (int64_t i = 0; i < n; ++i) {
                const bool on = !(fabsf(a[i]) < limit) & (a[i] != 0.f);
                a[i] = on ? (up != nullptr ? a[i] * widen(up[i]) : a[i]) : 0.f;
                count += on;
            }
            *active += count;
            for (int64_t i = 0; i < n; ++i)
                narrow(a[i], out + i);
        }
    }
    return valid;
}
