// The MLPs for one instruction set. Included inside that unit's target region and anonymous namespace, after its vector
// file; includes nothing itself.
//
// One slot (a static share of the neurons) does, for a batch of its neurons at a time:
//   dots that every neuron needs, for all tokens (by the indicator: gate, or up, or both; activation) -> token mask ->
//   branch-free compaction into a list of active rows
//   for groups of kGroup active rows: the other weight's dots, then h · down row added to the slot's fp32 partial
//   output, prefetching the rows that come next.
// Order of additions: each dot is one chain over D; each output is a chain over the slot's rows in ascending order,
// closed every kChain blocks of neurons so that rounding errors grow with the chain and not with F. It depends on the
// neurons alone, for every number of tokens, so a token's result has the same bits whatever its batch mates are.

// A slot's view of the call: typed pointers, scratch, and the batch of active rows being worked on. S: x's type, W: the
// weights'.
template <class S, class W> struct Slot {
    static constexpr bool kInt8 = sizeof(W) == 1;
    const MlpCall& call;
    const Indicator indicator;
    const int64_t slot, T, D;
    const bool whole;    // whether the down rows are added whole
    float* const acc;    // [T][padded(D)]: the open chain
    float* const closed; // [T][padded(D)]: the sum of the closed ones
    float* const act;    // [batch][T]: what the indicator computes for every neuron; compacted in place
    int32_t* const index;
    uint32_t* const mask;
    const S* tokens[kMaxTokens];
    const int16_t* parts[2 * kMaxTokens]; // the tokens as integers, for int8 weights
    float* acc_of[kMaxTokens];
    int64_t chain = -1;      // which chain acc holds, -1 before the first
    bool any_closed = false; // whether `closed` holds anything
    int64_t active = 0;      // of (token, neuron)
    bool valid = true;

    Slot(const MlpCall& c, int64_t s)
        : call(c), indicator(c.rule.indicator), slot(s), T(c.tokens), D(c.width), whole(whole_rows(T, D)),
          acc(c.scratch + s * slot_floats(T, D)), closed(acc + T * padded(D)), act(closed + T * padded(D)),
          index(reinterpret_cast<int32_t*>(act + kBatchValues)),
          mask(reinterpret_cast<uint32_t*>(index + batch_neurons(T))) {
        for (int64_t t = 0; t < T; ++t) {
            tokens[t] = static_cast<const S*>(call.x) + t * call.x_stride;
            acc_of[t] = acc + t * padded(D);
        }
        if (kInt8 && call.lanes == nullptr)
            for (int64_t i = 0; i < T * call.quantized.parts; ++i)
                parts[i] = call.quantized.values + i * D;
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

    static const W* row(const Matrix& m, int64_t j) { return static_cast<const W*>(m.rows) + j * m.stride; }
    // The weight that only active neurons need (by the screen the last one), or null: with rows null, its values are
    // given in `pre`.
    const Matrix* other() const {
        if (indicator == Indicator::gate || indicator == Indicator::screen)
            return &call.up;
        return indicator == Indicator::up ? &call.gate : nullptr;
    }

    // out[i][T] = row i of R · tokens.
    template <int R> void dots_of(const W* const* rows, float* out, const char* const* soon) {
        if constexpr (kInt8) {
            const int64_t count = call.quantized.parts;
            float sums[R * 2 * kMaxTokens];
            integer_rows<R>(rows, parts, T * count, D, sums, T * count, soon);
            for (int64_t i = 0; i < R * T; ++i) {
                const float* s = sums + i * count;
                out[i] = call.quantized.unit[i % T] * (count > 1 ? s[0] + s[1] * (1.f / kRest) : s[0]);
            }
        } else {
            dot_rows<W, R>(rows, tokens, T, D, out, T, soon);
        }
    }

    // The same for n rows, R at a time; `ahead` gives the row to prefetch meanwhile.
    template <int R, class Row, class Next> void dots(int64_t n, Row row, Next next, float* out) {
        const W* rows[R];
        const char* soon[R];
        int64_t i = 0;
        for (; i + R <= n; i += R) {
            for (int r = 0; r < R; ++r) {
                rows[r] = row(i + r);
                soon[r] = reinterpret_cast<const char*>(next(i + r));
            }
            dots_of<R>(rows, out + i * T, soon);
        }
        for (; i < n; ++i) {
            rows[0] = row(i);
            soon[0] = reinterpret_cast<const char*>(next(i));
            dots_of<1>(rows, out + i * T, soon);
        }
    }

    template <int R> void dot_all(const W* const* rows, int64_t n, float* out, const char* const* soon) {
        dot_one<W, R>(rows, n / R * R, tokens[0], D, out, soon);
        dot_one<W, 1>(rows + n / R * R, n % R, tokens[0], D, out + n / R * R, soon + n / R * R);
    }

    template <class Row, class Next> void dots_one(int64_t n, Row row, Next next, float* out) {
        if constexpr (!kInt8) {
            const W* rows[kBlock];
            const char* soon[kBlock];
            for (int64_t i = 0; i < n; ++i) {
                rows[i] = row(i);
                soon[i] = reinterpret_cast<const char*>(next(i));
            }
            // Short rows one after another, which is what the hardware prefetches (D 576, bf16: 28 GB/s four at a time,
            // 32 so).
            if (D * static_cast<int64_t>(sizeof(W)) < 2048)
                dot_all<1>(rows, n, out, soon);
            else
                dot_all<V::kRowTileOne>(rows, n, out, soon);
        }
    }

    // More rows at a time for one token: memory then has more streams to serve at once (measured on two Zen 4 cores:
    // 80 % of the read bandwidth with 8 rows, 68 % with 4, where a core gets 27 GB/s). Accumulators limit it for more.
    template <class Row, class Next> void dots_any(int64_t n, Row row, Next next, float* out) {
        if (call.lanes != nullptr)
            lane_dots<S, W>(call, n, row, next, out);
        else if (T == 1 && !kInt8)
            dots_one(n, row, next, out);
        else if (T == 1)
            dots<4>(n, row, next, out); // of int8 rows, 2 % faster than 8
        else
            dots<V::kRowTile>(n, row, next, out);
    }

    int64_t tile_rows() const {
        if (call.lanes != nullptr)
            return V::kLaneRows;
        return T == 1 ? V::kRowTileOne : V::kRowTile;
    }

    // out[i][t] = out[i][t] · the row's scale + its bias, for neuron j(i).
    template <class At> void scale_and_bias(const Matrix& m, int64_t n, At j, float* out) {
        const S* bias = static_cast<const S*>(m.bias);
        const float* scale = m.rows != nullptr ? m.scale : nullptr;
        if (bias == nullptr && scale == nullptr)
            return;
        for (int64_t i = 0; i < n; ++i) {
            const float s = scale != nullptr ? scale[j(i)] : 1.f, b = bias != nullptr ? widen(bias[j(i)]) : 0.f;
            for (int64_t t = 0; t < T; ++t)
                out[i * T + t] = scale != nullptr ? out[i * T + t] * s + b : out[i * T + t] + b;
        }
    }

    // What is given instead of dots: the gate's pre-activations of neurons j(i).
    template <class At> void given(int64_t n, At j, float* out) {
        for (int64_t i = 0; i < n; ++i)
            for (int64_t t = 0; t < T; ++t)
                out[i * T + t] = call.pre[t * call.neurons + j(i)];
    }

    // One weight's values of neurons [j0, j0 + n) for all tokens, into out[n][T]; the rows of the slot's next block are
    // prefetched behind this one's.
    void values(const Matrix& m, int64_t j0, int64_t n, float* out) {
        const int64_t ahead = tile_rows();
        const int64_t jump = (call.slots - 1) * kBlock;
        const auto at = [=](int64_t i) { return j0 + i; };
        if (m.rows == nullptr)
            given(n, at, out);
        else
            dots_any(
                n, [&](int64_t i) { return row(m, j0 + i); },
                [&](int64_t i) {
                    const int64_t j = j0 + i + ahead + (i + ahead < n ? 0 : jump);
                    return row(m, j < call.neurons ? j : j0 + i);
                },
                out);
        scale_and_bias(m, n, at, out);
    }

    // What every one of neurons [j0, j0 + n) needs: out[n][T] is a, u (indicator up), a beside `also` = u (product) or
    // the screen's scores.
    void block(int64_t j0, int64_t n, float* out, float* also) {
        if (indicator == Indicator::screen) {
            for (int64_t t = 0; t < T; ++t)
                for (int64_t i = 0; i < n; ++i)
                    out[i * T + t] = call.scores[t * call.neurons + j0 + i];
            return;
        }
        values(indicator == Indicator::up ? call.up : call.gate, j0, n, out);
        if (indicator == Indicator::product)
            values(call.up, j0, n, also);
        if (indicator != Indicator::up)
            activate(out, n * T, call.rule.activation, call.rule.params);
    }

    // Appends the active ones of neurons [j0, j0 + n), whose values are at act[(at + i) * T], to the list. By the
    // product, what is listed is a·u.
    int64_t compact(int64_t j0, int64_t n, int64_t at, int64_t found, const float* also) {
        const Thresholding& rule = call.rule;
        // Whether a zero activation is active: with means it is; by up and by the screen, the activations are not known
        // yet.
        const bool zeros = rule.skipped_mean != nullptr || indicator == Indicator::up || indicator == Indicator::screen;
        uint32_t wanted[kBlock];
        float* const values = act + at * T;
        if (T <= kTogether && rule.threshold_step == 0 && (T == 1 || rule.token_scale == nullptr)) {
            valid &= rule.threshold[0] >= 0.f;
            want_together(T, n, values, also, limit_of(rule, rule.threshold[0], 0), zeros, wanted);
        } else {
            for (int64_t i = 0; i < n; ++i) {
                const float threshold = rule.threshold[(j0 + i) * rule.threshold_step];
                valid &= threshold >= 0.f;
                wanted[i] = want(rule, T, values + i * T, also != nullptr ? also + i * T : nullptr, threshold, zeros);
            }
        }
        if (also != nullptr)
            for (int64_t i = 0; i < n * T; ++i)
                values[i] *= also[i];
        for (int64_t i = 0; i < n; ++i) {
            move_values(values + i * T, T, act + found * T); // never ahead of what is still to be read
            index[found] = static_cast<int32_t>(j0 + i);
            mask[found] = wanted[i];
            found += wanted[i] != 0;
            active += __builtin_popcount(wanted[i]);
        }
        return found;
    }

    // The list's entries [g, g + count) become h: zero where a token does not want the neuron. `second`: the other
    // weight's values (a or u) where there is one.
    void finish_hidden(int64_t g, int64_t count, const float* second) {
        const float* mean = call.rule.skipped_mean;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t j = index[g + i];
            const float mu = mean != nullptr ? mean[j] : 0.f;
            float* h = act + (g + i) * T;
            const float* v = second != nullptr ? second + i * T : nullptr;
            if (indicator == Indicator::up && mean == nullptr)
                drop_zeros(g + i, v);
            if (v != nullptr)
                for (int64_t t = 0; t < T; ++t)
                    h[t] *= v[t];
            const uint32_t wanted = mask[g + i];
            for (int64_t t = 0; t < T; ++t)
                h[t] = (wanted >> t) & 1 ? h[t] - mu : 0.f;
        }
    }

    // How many rows of the list from g on go together: at most group_rows, of one chain. For one token only 8 where
    // they are neighbours in memory (nothing skipped: 3 to 4 %; of rows further apart 16 are 3 % faster).
    int64_t group_size(int64_t g, int64_t found) const {
        const bool neighbours = T == 1 && g + 8 <= found && index[g + 7] - index[g] == 7;
        const int64_t most = neighbours ? 8 : group_rows(T, D, sizeof(W), whole);
        int64_t count = 1;
        while (count < most && g + count < found && chain_of(index[g + count]) == chain)
            ++count;
        return count;
    }

    // A weight's values of the listed neurons [g, g + count), prefetching the rows `then` that are read after them.
    void listed_values(const Matrix& m, int64_t g, int64_t count, const W* const* then, float* out) {
        const auto at = [&](int64_t i) { return static_cast<int64_t>(index[g + i]); };
        const int64_t ahead = tile_rows();
        if (m.rows == nullptr)
            given(count, at, out);
        else
            dots_any(
                count, [&](int64_t i) { return row(m, at(i)); },
                [&](int64_t i) { // those, if they are read whole next, else the rows of the next tile
                    return !whole && i + ahead < count ? row(m, at(i + ahead)) : then[i];
                },
                out);
        scale_and_bias(m, count, at, out);
    }

    // By the screen the listed neurons' activations, which come before all else; returns how many have one that is not
    // 0, and only these stay on the list.
    int64_t activations(int64_t g, int64_t count, const W** downs) {
        const W* ups[kGroup];
        for (int64_t i = 0; i < count; ++i)
            ups[i] = row(call.up, index[g + i]);
        float* const a = act + g * T;
        listed_values(call.gate, g, count, ups, a);
        activate(a, count * T, call.rule.activation, call.rule.params);
        if (call.rule.skipped_mean != nullptr)
            return count;
        for (int64_t i = 0; i < count; ++i)
            drop_zeros(g + i, a + i * T);
        return drop_unwanted(g, count, downs);
    }

    // A token does not want a neuron whose activation turned out to be 0.
    void drop_zeros(int64_t at, const float* a) {
        const uint32_t before = mask[at];
        for (int64_t t = 0; t < T; ++t)
            mask[at] &= ~(static_cast<uint32_t>(a[t] == 0.f) << t);
        active -= __builtin_popcount(before) - __builtin_popcount(mask[at]);
    }

    // Rows that no token wants any more leave the group.
    int64_t drop_unwanted(int64_t g, int64_t count, const W** downs) {
        int64_t left = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (mask[g + i] == 0)
                continue;
            downs[left] = downs[i];
            index[g + left] = index[g + i];
            mask[g + left] = mask[g + i];
            if (left < i)
                memcpy(act + (g + left) * T, act + (g + i) * T, T * sizeof(float));
            ++left;
        }
        return left;
    }

    // The list's rows, a group at a time: the other weight's dots, hidden values, down rows.
    void active_rows(int64_t found) {
        float second[kGroup * kMaxTokens];
        const W* downs[kGroup];
        const char* soon[kGroup];
        const Matrix* const m = other();
        const bool dots_next = m != nullptr && m->rows != nullptr;
        const bool screened = indicator == Indicator::screen;
        const Matrix& next_read = screened ? call.gate : dots_next ? *m : call.down;
        for (int64_t g = 0, count; g < found; g += count) {
            if (const int64_t next = chain_of(index[g]); next != chain) {
                if (chain >= 0)
                    close_chain();
                chain = next;
            }
            count = group_size(g, found);
            for (int64_t i = 0; i < count; ++i)
                downs[i] = row(call.down, index[g + i]);
            const int64_t next = g + count < found ? g + count : g;
            next_rows<W>(
                whole || !dots_next, count, found - next, [&](int64_t i) { return row(next_read, index[next + i]); },
                soon);
            int64_t left = screened ? activations(g, count, downs) : count;
            if (m != nullptr)
                listed_values(*m, g, left, downs, second);
            if (indicator == Indicator::up)
                activate(second, left * T, call.rule.activation, call.rule.params);
            finish_hidden(g, left, m != nullptr ? second : nullptr);
            if (indicator == Indicator::up)
                left = drop_unwanted(g, left, downs);
            axpy_tokens(downs, act + g * T, T, left, acc_of, D, whole, soon);
        }
    }

    bool run() {
        const int64_t capacity = batch_neurons(T);
        float also[kBlock * kMaxTokens + V::W]; // a vector past the last value is read
        int64_t at = 0, found = 0;              // rows of act in use, and how many of them are active
        for (int64_t j0 = slot * kBlock; j0 < call.neurons; j0 += call.slots * kBlock) {
            const int64_t n = call.neurons - j0 < kBlock ? call.neurons - j0 : kBlock;
            if (found + n > capacity) {
                active_rows(found);
                found = 0;
            }
            at = found;
            block(j0, n, act + at * T, also);
            found = compact(j0, n, at, found, indicator == Indicator::product ? also : nullptr);
        }
        active_rows(found);
        call.active[slot] += active;
        if (any_closed)
            for (int64_t i = 0; i < T * padded(D); ++i)
                acc[i] += closed[i];
#if defined(SPARSEMLP_DPBF16)
        if constexpr (sizeof(W) == 2 && Dot<W>::STEP == 32)
            unpermute(acc, T * padded(D));
#endif
        return valid;
    }
};

template <class S, class W> bool run_slot(const MlpCall& call, int64_t slot) { return Slot<S, W>(call, slot).run(); }

#define SPARSEMLP_MLP_KERNELS(S)                                                                                       \
    {{run_slot<S, S>, run_slot<S, int8_t>},                                                                            \
     run_reduce<S>,                                                                                                    \
     run_hidden<S>,                                                                                                    \
     run_quantize<S>,                                                                                                  \
     SPARSEMLP_LANES(S),                                                                                               \
     SPARSEMLP_DENSE_KERNELS(S)}
#define SPARSEMLP_MLP_TABLE {SPARSEMLP_MLP_KERNELS(float), SPARSEMLP_MLP_KERNELS(bf16), SPARSEMLP_MLP_KERNELS(f16)}
