// The MLPs for many tokens: dense products, and what is not active masked between them, decided from the unrounded
// sums. Included after panels.inl, hidden.inl and outputs.inl; includes nothing itself.
//
// Order of additions: every sum is closed after kPanelSteps steps and the parts are added in ascending order; it
// depends on nothing but the sizes.

template <class S> int64_t hidden_steps(int64_t neurons) { return (neurons + Product<S>::PER - 1) / Product<S>::PER; }
template <class S> int64_t run_hidden_floats(int64_t tokens, int64_t neurons) {
    return tokens * hidden_steps<S>(neurons);
}

// sums[n][stride] = rows [j0, j0 + n) of a weight · T tokens from t0 on. `next`: the rows that are read after them.
template <class S, class W>
void dense_rows(const MlpCall& call, const Matrix& m, int64_t t0, int64_t T, int64_t j0, int64_t n, const W* next,
                int64_t next_stride, float* sums) {
    constexpr int64_t kDepth = Product<S>::CHAIN * Product<S>::PER;
    const int64_t D = call.width;
    const W* rows[kDenseRows];
    const char* ahead[kDenseRows];
    for (int64_t i = 0; i < n; ++i)
        rows[i] = static_cast<const W*>(m.rows) + (j0 + i) * m.stride;
    for (int64_t k = 0; k < D || k == 0; k += kDepth) {
        const bool last = k + kDepth >= D; // prefetched are the same rows' next values, or the next rows' first
        for (int64_t i = 0; i < n; ++i) {
            const W* soon = last ? (next != nullptr ? next + i * next_stride - k : rows[i]) : rows[i] + kDepth;
            ahead[i] = reinterpret_cast<const char*>(soon);
        }
        for (int64_t t = 0; t < T; t += kLaneTokens) {
            const int64_t panel = (t0 + t) / kLaneTokens, vecs = panel_vecs(call.tokens, panel);
            const float* tokens = call.lanes + panel * lane_floats<S>(D) + k / Product<S>::PER * vecs * V::W;
            lane_product<S, W>(rows, n, vecs, k, D - k < kDepth ? D - k : kDepth, tokens, sums + t, kDenseTokens,
                               t == 0 ? ahead : nullptr);
        }
    }
}

// values[t] of neuron j for T tokens: · the weight's scale + its bias, or the given pre-activation + bias.
template <class S>
void finished(const MlpCall& call, const Matrix& m, int64_t t0, int64_t T, int64_t j, float* values) {
    const float bias = m.bias != nullptr ? widen(static_cast<const S*>(m.bias)[j]) : 0.f;
    if (m.rows == nullptr)
        for (int64_t t = 0; t < T; ++t)
            values[t] = call.pre[(t0 + t) * call.neurons + j];
    else if (m.scale != nullptr)
        for (int64_t t = 0; t < T; ++t)
            values[t] *= m.scale[j];
    if (m.bias != nullptr)
        for (int64_t t = 0; t < T; ++t)
            values[t] += bias;
}

// p[t] of neuron j becomes h, for T tokens; u is null for an ungated MLP.
inline bool hidden_of(const MlpCall& call, int64_t t0, int64_t T, int64_t j, float* p, const float* u,
                      int64_t* active) {
    const Thresholding& rule = call.rule;
    const bool mean = rule.skipped_mean != nullptr;
    const float threshold = rule.threshold[j * rule.threshold_step], mu = mean ? rule.skipped_mean[j] : 0.f;
    const float* scores = call.scores != nullptr ? call.scores + t0 * call.neurons + j : nullptr;
    activate(p, T, rule.activation, rule.params);
    int32_t count = 0;
    for (int64_t t = 0; t < T; ++t) {
        const float a = p[t], product = u != nullptr ? a * u[t] : a;
        const float m = scores != nullptr                      ? scores[t * call.neurons]
                        : rule.indicator == Indicator::up      ? u[t]
                        : rule.indicator == Indicator::product ? product
                                                               : a;
        const float limit = rule.token_scale != nullptr ? limit_of(rule, threshold, t0 + t) : threshold;
        const bool on = kept_at(m, limit) & (mean | (a != 0.f));
        p[t] = on ? product - mu : 0.f;
        count += on;
    }
    *active += count;
    return threshold >= 0.f;
}

// words[t] of PER neurons' h for T tokens. `second` is null past the last neuron.
template <class S> void hidden_words(int64_t T, const float* first, const float* second, uint32_t* words) {
    if constexpr (Product<S>::PER == 2) {
        for (int64_t t = 0; t < T; ++t) {
            bf16 low;
            narrow(first[t], &low);
            words[t] = low.bits;
        }
        if (second != nullptr)
            for (int64_t t = 0; t < T; ++t) {
                bf16 high;
                narrow(second[t], &high);
                words[t] |= static_cast<uint32_t>(high.bits) << 16;
            }
    } else {
        memcpy(words, first, T * sizeof(float));
    }
}

// The words of tokens [t0, t0 + T) at one step into the tiles of `hidden`; a block may begin inside a tile.
template <class S>
void store_hidden(const DenseCall& call, int64_t t0, int64_t T, int64_t step, const uint32_t* words) {
    const int64_t steps = hidden_steps<S>(call.mlp.neurons), M = V::kPanelTile;
    for (int64_t token = t0; token < t0 + T;) {
        const int64_t inside = token % M, tile = token - inside, count = tile_tokens(call.mlp.tokens, tile);
        const int64_t n = count - inside < t0 + T - token ? count - inside : t0 + T - token;
        memcpy(call.hidden + tile * steps + step * count + inside, words + (token - t0), n * sizeof(float));
        token += n;
    }
}

template <class S, class W>
bool run_dense_hidden(const DenseCall& call, int64_t begin, int64_t end, float* scratch, int64_t* active) {
    constexpr int64_t PER = Product<S>::PER;
    const MlpCall& mlp = call.mlp;
    const bool gated = mlp.rule.indicator != Indicator::none, given = mlp.gate.rows == nullptr;
    float *const gates = scratch, *const ups = gates + kDenseRows * kDenseTokens;
    uint32_t words[kDenseTokens];
    bool valid = true;
    const auto row = [&](const Matrix& m, int64_t j) { return static_cast<const W*>(m.rows) + j * m.stride; };
    for (int64_t t0 = 0; t0 < mlp.tokens; t0 += kDenseTokens) {
        const int64_t T = mlp.tokens - t0 < kDenseTokens ? mlp.tokens - t0 : kDenseTokens;
        for (int64_t j0 = begin; j0 < end; j0 += kDenseRows) {
            const int64_t n = end - j0 < kDenseRows ? end - j0 : kDenseRows;
            const int64_t after = j0 + 2 * kDenseRows <= end ? j0 + kDenseRows : j0;
            const Matrix& then = given ? mlp.up : mlp.gate; // what the next neurons begin with
            if (!given)
                dense_rows<S, W>(mlp, mlp.gate, t0, T, j0, n, gated ? row(mlp.up, j0) : row(then, after),
                                 gated ? mlp.up.stride : then.stride, gates);
            if (gated)
                dense_rows<S, W>(mlp, mlp.up, t0, T, j0, n, row(then, after), then.stride, ups);
            for (int64_t i = 0; i < n; ++i) {
                float *p = gates + i * kDenseTokens, *u = gated ? ups + i * kDenseTokens : nullptr;
                finished<S>(mlp, mlp.gate, t0, T, j0 + i, p);
                if (gated)
                    finished<S>(mlp, mlp.up, t0, T, j0 + i, u);
                valid &= hidden_of(mlp, t0, T, j0 + i, p, u, active);
                if (i % PER == PER - 1 || i + 1 == n) {
                    hidden_words<S>(T, p - i % PER * kDenseTokens, i % PER == 1 ? p : nullptr, words);
                    store_hidden<S>(call, t0, T, (j0 + i) / PER, words);
                }
            }
        }
    }
    return valid;
}

// sums[T][2 · kPanel] = tokens [t0, t0 + T) · columns [d0, d0 + n) of the down projection.
template <class S, class W>
void dense_columns(const DenseCall& call, int64_t t0, int64_t T, int64_t d0, int64_t n, float* panels, float* sums) {
    using G = Product<S>;
    constexpr int64_t kDepth = kPanelSteps * G::PER, kWide = 2 * kPanel, M = V::kPanelTile;
    const MlpCall& mlp = call.mlp;
    const Matrix& m = mlp.down;
    const int64_t F = mlp.neurons, steps_all = hidden_steps<S>(F), bytes = sizeof(W);
    for (int64_t k = 0; k < F || k == 0; k += kDepth) {
        const int64_t depth = F - k < kDepth ? F - k : kDepth, steps = (depth + G::PER - 1) / G::PER;
        const W* w = static_cast<const W*>(m.rows) + k * m.stride + d0;
        for (int64_t i = 0; i < n; i += kPanel)
            pack_columns<S, W>(w + i, m.stride, n - i < kPanel ? n - i : kPanel, depth, panels + i * kPanelSteps);
        Prefetch next;
        if (const int64_t left = F - k - kDepth; left > 0)
            next = {reinterpret_cast<const char*>(w + kDepth * m.stride), m.stride * bytes,
                    left < kDepth ? left : kDepth, (n * bytes + 63) / 64};
        const int64_t calls = (n + kPanel - 1) / kPanel * ((T + M - 1) / M) * ((steps + 15) / 16);
        const int64_t lines = calls > 0 ? (next.total() + calls - 1) / calls : 0;
        // A tile's hidden values stay in the first cache level for all panels, the panels in the second for all tiles.
        for (int64_t t = 0; t < T; t += M) {
            const int64_t tile = tile_tokens(mlp.tokens, t0 + t);
            const float* h = call.hidden + (t0 + t) * steps_all + k / G::PER * tile;
            for (int64_t i = 0; i < n; i += kPanel)
                panel_tokens<S>(tile, panels + i * kPanelSteps, h, sums + t * kWide + i, kWide, steps, k == 0, &next,
                                lines);
        }
    }
}

template <class S, class W>
void run_dense_down(const DenseCall& call, int64_t begin, int64_t end, float* scratch, uint8_t* finite) {
    constexpr int64_t kWide = 2 * kPanel, kTokens = kDenseTokens / V::kPanelTile * V::kPanelTile;
    float *const panels = scratch, *const sums = scratch + kWide * kPanelSteps;
    for (int64_t t0 = 0; t0 < call.mlp.tokens; t0 += kTokens) {
        const int64_t T = call.mlp.tokens - t0 < kTokens ? call.mlp.tokens - t0 : kTokens;
        for (int64_t d0 = begin; d0 < end; d0 += kWide) {
            const int64_t n = end - d0 < kWide ? end - d0 : kWide;
            dense_columns<S, W>(call, t0, T, d0, n, panels, sums);
            for (int64_t t = 0; t < T; ++t)
                finite[t0 + t] &= finish_columns<S>(call.mlp, sums + t * kWide, d0, n,
                                                    static_cast<S*>(call.mlp.out) + (t0 + t) * call.mlp.width + d0);
        }
    }
}

#define SPARSEMLP_DENSE_KERNELS(S)                                                                                     \
    {                                                                                                                  \
        kPanel,                                                                                                        \
        run_hidden_floats<S>,                                                                                          \
        {run_dense_hidden<S, S>, run_dense_hidden<S, int8_t>},                                                         \
        {run_dense_down<S, S>, run_dense_down<S, int8_t>},                                                             \
    }
