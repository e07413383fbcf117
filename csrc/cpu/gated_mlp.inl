// The gated MLP for one instruction set. Included inside that unit's target region and anonymous namespace, after its
// vector file; includes nothing itself.
//
// One slot (a static share of the neurons) does, for a batch of its neurons at a time:
//   gate dots for all tokens -> activation -> token mask -> branch-free compaction into a list of active rows
//   for groups of kGroup active rows: up dots, then h · down row added to the slot's fp32 partial output,
//   prefetching the rows that come next.
// Order of additions: each dot is one chain over D; each output is a chain over the slot's rows in ascending order,
// closed every kChain blocks of neurons so that rounding errors grow with the chain and not with F. It depends on the
// neurons alone, for every number of tokens, so a token's result has the same bits whatever its batch mates are.

inline bool active_at(float a, float limit, bool mean) { return !(fabsf(a) < limit) && (mean || a != 0.f); }

inline float limit_of(const Thresholding& rule, float threshold, int64_t token) {
    if (rule.token_scale == nullptr)
        return threshold;
    const float s = rule.token_scale[token];
    return s == 0.f ? 0.f : s * threshold; // s = 0 is dense even where the threshold is inf
}

// A slot's view of the call: typed pointers, scratch, and the batch of active rows being worked on.
template <class S> struct Slot {
    const GatedMlpCall& call;
    const int64_t slot, T, D;
    float* const acc;    // [T][padded(D)]: the open chain
    float* const closed; // [T][padded(D)]: the sum of the closed ones
    float* const act;    // [batch][T]; compacted in place
    int32_t* const index;
    uint32_t* const mask;
    const S* tokens[kMaxTokens];
    float* acc_of[kMaxTokens];
    int64_t chain = -1;      // which chain acc holds, -1 before the first
    bool any_closed = false; // whether `closed` holds anything
    bool valid = true;

    Slot(const GatedMlpCall& c, int64_t s)
        : call(c), slot(s), T(c.tokens), D(c.width), acc(c.scratch + s * slot_floats(T, D)),
          closed(acc + T * padded(D)), act(closed + T * padded(D)),
          index(reinterpret_cast<int32_t*>(act + kBatchValues)),
          mask(reinterpret_cast<uint32_t*>(index + batch_neurons(T))) {
        for (int64_t t = 0; t < T; ++t) {
            tokens[t] = static_cast<const S*>(call.x) + t * call.x_stride;
            acc_of[t] = acc + t * padded(D);
        }
        memset(acc, 0, T * padded(D) * sizeof(float));
    }

    int64_t chain_of(int64_t j) const { return j / (kBlock * kChain * call.slots); }

    // Ends the open chain and begins the next one.
    void close_chain() {
        const int64_t n = T * padded(D);
        if (any_closed)
            for (int64_t i = 0; i < n; ++i)
                closed[i] += acc[i];
        else
            memcpy(closed, acc, n * sizeof(float));
        any_closed = true;
        memset(acc, 0, n * sizeof(float));
    }

    const S* gate_row(int64_t j) const { return static_cast<const S*>(call.w_gate) + j * call.gate_stride; }
    const S* up_row(int64_t j) const { return static_cast<const S*>(call.w_up) + j * call.up_stride; }
    const S* down_row(int64_t j) const { return static_cast<const S*>(call.w_down) + j * call.down_stride; }

    // out[i][T] = row(first + i) · tokens for i < n, R rows at a time; `ahead` gives the row to prefetch meanwhile.
    template <int R, class Row, class Next> void dots(int64_t n, Row row, Next next, float* out) {
        const S* rows[R];
        const char* soon[R];
        int64_t i = 0;
        for (; i + R <= n; i += R) {
            for (int r = 0; r < R; ++r) {
                rows[r] = row(i + r);
                soon[r] = reinterpret_cast<const char*>(next(i + r));
            }
            dot_rows<S, R>(rows, tokens, T, D, out + i * T, T, soon);
        }
        for (; i < n; ++i) {
            rows[0] = row(i);
            soon[0] = reinterpret_cast<const char*>(next(i));
            dot_rows<S, 1>(rows, tokens, T, D, out + i * T, T, soon);
        }
    }

    // More rows at a time for one token: memory then has more streams to serve at once (measured on two Zen 4 cores:
    // 80 % of the read bandwidth with 8 rows, 68 % with 4, where a core gets 27 GB/s). Accumulators limit it for more.
    template <class Row, class Next> void dots_any(int64_t n, Row row, Next next, float* out) {
        if (T == 1)
            dots<V::kRowTileOne>(n, row, next, out);
        else
            dots<V::kRowTile>(n, row, next, out);
    }

    // Activations of neurons [j0, j0 + n) for all tokens, into out[n][T]; the rows of the slot's next block are
    // prefetched behind this one's.
    void gate(int64_t j0, int64_t n, float* out) {
        const int64_t ahead = T == 1 ? V::kRowTileOne : V::kRowTile;
        const int64_t jump = (call.slots - 1) * kBlock;
        dots_any(
            n, [=, this](int64_t i) { return gate_row(j0 + i); },
            [=, this](int64_t i) {
                const int64_t j = j0 + i + ahead + (i + ahead < n ? 0 : jump);
                return gate_row(j < call.neurons ? j : j0 + i);
            },
            out);
        if (call.b_gate != nullptr) {
            const S* b = static_cast<const S*>(call.b_gate) + j0;
            for (int64_t i = 0; i < n; ++i)
                for (int64_t t = 0; t < T; ++t)
                    out[i * T + t] += widen(b[i]);
        }
        activate(out, n * T, call.rule.activation, call.rule.params);
    }

    // Appends the active ones of neurons [j0, j0 + n), whose activations are at act[(at + i) * T], to the list.
    int64_t compact(int64_t j0, int64_t n, int64_t at, int64_t found) {
        const Thresholding& rule = call.rule;
        const bool mean = rule.skipped_mean != nullptr;
        for (int64_t i = 0; i < n; ++i) {
            const float threshold = rule.threshold[(j0 + i) * rule.threshold_step];
            valid &= threshold >= 0.f;
            const float* a = act + (at + i) * T;
            uint32_t wanted = 0;
            for (int64_t t = 0; t < T; ++t)
                wanted |= static_cast<uint32_t>(active_at(a[t], limit_of(rule, threshold, t), mean)) << t;
            for (int64_t t = 0; t < T; ++t)
                act[found * T + t] = a[t]; // found <= at + i: never ahead of what is still to be read
            index[found] = static_cast<int32_t>(j0 + i);
            mask[found] = wanted;
            found += wanted != 0;
        }
        return found;
    }

    // act[g..g+count) becomes h: zero where the mask is not set.
    void finish_hidden(int64_t g, int64_t count, const float* up) {
        const float* mean = call.rule.skipped_mean;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t j = index[g + i];
            const float bias = call.b_up != nullptr ? widen(static_cast<const S*>(call.b_up)[j]) : 0.f;
            const float mu = mean != nullptr ? mean[j] : 0.f;
            for (int64_t t = 0; t < T; ++t) {
                float& a = act[(g + i) * T + t];
                const float h = a * (up[i * T + t] + bias) - mu;
                a = (mask[g + i] >> t) & 1 ? h : 0.f;
            }
        }
    }

    void down(int64_t g, int64_t count, const S* const* rows, const char* const* ahead) {
        const float* h = act + g * T;
        for (int64_t t = 0; t < T;) {
            const int64_t left = T - t;
            const char* const* once = t == 0 ? ahead : nullptr;
            if (V::kTokTile >= 4 && left >= 4) {
                axpy_tile<V::kTokTile>(rows, h + t, T, count, acc_of + t, D, once);
                t += V::kTokTile;
            } else if (left >= 2) {
                axpy_tile<2>(rows, h + t, T, count, acc_of + t, D, once);
                t += 2;
            } else {
                axpy_tile<1>(rows, h + t, T, count, acc_of + t, D, once);
                t += 1;
            }
        }
    }

    // How many rows of the list from g on go together: at most kGroup, of one chain.
    int64_t group_size(int64_t g, int64_t found) const {
        int64_t count = 1;
        while (count < kGroup && g + count < found && chain_of(index[g + count]) == chain)
            ++count;
        return count;
    }

    // The list's rows, a group at a time: up dots, hidden values, down rows.
    void active_rows(int64_t found) {
        float up[kGroup * kMaxTokens];
        const S *ups[kGroup], *downs[kGroup];
        const char* ups_ahead[kGroup];
        for (int64_t g = 0, count; g < found; g += count) {
            if (const int64_t next = chain_of(index[g]); next != chain) {
                if (chain >= 0)
                    close_chain();
                chain = next;
            }
            count = group_size(g, found);
            for (int64_t i = 0; i < count; ++i) {
                ups[i] = up_row(index[g + i]);
                downs[i] = down_row(index[g + i]);
                const int64_t next = g + count + i < found ? g + count + i : g + i;
                ups_ahead[i] = reinterpret_cast<const char*>(up_row(index[next]));
            }
            dots_any(count, [&](int64_t i) { return ups[i]; }, [&](int64_t i) { return downs[i]; }, up);
            finish_hidden(g, count, up);
            down(g, count, downs, ups_ahead);
        }
    }

    bool run() {
        const int64_t capacity = batch_neurons(T);
        int64_t at = 0, found = 0; // rows of act in use, and how many of them are active
        for (int64_t j0 = slot * kBlock; j0 < call.neurons; j0 += call.slots * kBlock) {
            const int64_t n = call.neurons - j0 < kBlock ? call.neurons - j0 : kBlock;
            if (found + n > capacity) {
                active_rows(found);
                found = 0;
            }
            at = found;
            gate(j0, n, act + at * T);
            found = compact(j0, n, at, found);
        }
        active_rows(found);
        if (any_closed)
            for (int64_t i = 0; i < T * padded(D); ++i)
                acc[i] += closed[i];
#if defined(SPARSEMLP_DPBF16)
        if constexpr (sizeof(S) == 2 && Dot<S>::STEP == 32)
            unpermute(acc, T * padded(D));
#endif
        return valid;
    }
};

template <class S> bool run_slot(const GatedMlpCall& call, int64_t slot) { return Slot<S>(call, slot).run(); }

template <class S> bool run_reduce(const GatedMlpCall& call, int64_t begin, int64_t end) {
    const int64_t D = call.width, step = slot_floats(call.tokens, D);
    S* out = static_cast<S*>(call.out);
    const S* bias = static_cast<const S*>(call.b_down);
    bool finite = true;
    for (int64_t i = begin; i < end;) {
        const int64_t t = i / D, d0 = i % D, n = D - d0 < end - i ? D - d0 : end - i;
        for (int64_t k = 0; k < n; ++k) {
            const int64_t d = d0 + k;
            const float* part = call.scratch + t * padded(D) + d;
            float sum = part[0];
            for (int64_t s = 1; s < call.slots; ++s)
                sum += part[s * step];
            finite &= fabsf(sum) <= 3.402823466e38f; // false for NaN too
            if (bias != nullptr)
                sum += widen(bias[d]);
            if (call.skipped_out != nullptr)
                sum += call.skipped_out[d];
            narrow(sum, out + i + k);
        }
        i += n;
    }
    return finite;
}

template <class S> bool run_hidden(const HiddenCall& call, int64_t begin, int64_t end) {
    constexpr int64_t kChunk = 256;
    const Thresholding& rule = call.rule;
    const bool mean = rule.skipped_mean != nullptr;
    const int64_t F = call.neurons;
    float a[kChunk];
    bool valid = true;
    for (int64_t t = begin; t < end; ++t) {
        for (int64_t j0 = 0; j0 < F; j0 += kChunk) {
            const int64_t n = F - j0 < kChunk ? F - j0 : kChunk;
            const S* pre = static_cast<const S*>(call.pre) + t * F + j0;
            const S* up = static_cast<const S*>(call.up) + t * F + j0;
            S* out = static_cast<S*>(call.out) + t * F + j0;
            for (int64_t i = 0; i < n; ++i)
                a[i] = widen(pre[i]);
            activate(a, n, rule.activation, rule.params);
            if (rule.threshold_step == 0 && !mean) { // the common case, kept simple enough to vectorise
                const float limit = limit_of(rule, rule.threshold[0], t);
                valid &= rule.threshold[0] >= 0.f;
                for (int64_t i = 0; i < n; ++i) {
                    const bool on = !(fabsf(a[i]) < limit) & (a[i] != 0.f);
                    narrow(on ? a[i] * widen(up[i]) : 0.f, out + i);
                }
                continue;
            }
            for (int64_t i = 0; i < n; ++i) {
                const int64_t j = j0 + i;
                const float threshold = rule.threshold[j * rule.threshold_step];
                valid &= threshold >= 0.f;
                const float h = a[i] * widen(up[i]) - (mean ? rule.skipped_mean[j] : 0.f);
                narrow(active_at(a[i], limit_of(rule, threshold, t), mean) ? h : 0.f, out + i);
            }
        }
    }
    return valid;
}

#define SPARSEMLP_GATED_MLP_TABLE                                                                                      \
    {                                                                                                                  \
        {run_slot<float>, run_reduce<float>, run_hidden<float>}, {run_slot<bf16>, run_reduce<bf16>, run_hidden<bf16>}, \
        {                                                                                                              \
            run_slot<f16>, run_reduce<f16>, run_hidden<f16>                                                            \
        }                                                                                                              \
    }
