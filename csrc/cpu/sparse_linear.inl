// The input-sparse linear layer for one instruction set. Included inside that unit's target region and anonymous
// namespace, after tiles.inl; includes nothing itself.
//
// `select` lists the channels that some token wants; `columns` adds their rows, a group at a time, to a stretch of
// the output held in the first cache levels. Every output is one chain over the channels in ascending order, closed
// every kLinearChain channels: its bits depend neither on the threads nor on the batch.

template <class S> bool run_select(const SparseLinearCall& call, int64_t segment) {
    const int64_t begin = call.begin(segment), end = call.begin(segment + 1), T = call.tokens;
    const S* x = static_cast<const S*>(call.x);
    int64_t found = begin;
    bool valid = true;
    for (int64_t k = begin; k < end; ++k) {
        const float threshold = call.threshold[k * call.threshold_step];
        valid &= threshold >= 0.f;
        uint32_t wanted = 0;
        for (int64_t t = 0; t < T; ++t) {
            const float v = widen(x[t * call.x_stride + k]);
            float limit = threshold;
            if (call.token_scale != nullptr)
                limit = call.token_scale[t] == 0.f ? 0.f : call.token_scale[t] * threshold;
            const bool on = !(fabsf(v) < limit) & (v != 0.f);
            wanted |= static_cast<uint32_t>(on) << t;
            call.values[found * T + t] = on ? v : 0.f;
        }
        call.index[found] = static_cast<int32_t>(k);
        call.mask[found] = wanted;
        found += wanted != 0;
    }
    call.counts[segment] = found - begin;
    return valid;
}

// The rows of one segment's active channels, added to columns [d0, d0 + n).
template <class W> struct ColumnSums {
    const SparseLinearCall& call;
    const int64_t d0, n, step; // step: floats between two tokens' sums
    float *const acc, *const closed;
    const bool whole; // rows are pieces of larger ones here: with more tokens, stretches are faster
    float* acc_of[kMaxTokens];
    int64_t chain = -1;
    bool any_closed = false;

    ColumnSums(const SparseLinearCall& c, int64_t from, int64_t count, float* scratch)
        : call(c), d0(from), n(count), step((count + 63) / 64 * 64 + 32), acc(scratch), closed(scratch + kLinearSums),
          whole(call.tokens <= 4 && whole_rows(call.tokens, n)) {
        for (int64_t t = 0; t < call.tokens; ++t)
            acc_of[t] = acc + t * step;
        memset(acc, 0, call.tokens * step * sizeof(float));
    }

    void close_chain() {
        const int64_t count = call.tokens * step;
        for (int64_t i = 0; i < count; ++i)
            closed[i] = any_closed ? closed[i] + acc[i] : acc[i];
        any_closed = true;
        memset(acc, 0, count * sizeof(float));
    }

    const W* row(int64_t at) const {
        return static_cast<const W*>(call.weight) + call.index[at] * call.weight_stride + d0;
    }

    void add(int64_t segment) {
        const int64_t begin = call.begin(segment), end = begin + call.counts[segment];
        const int64_t most = group_rows(call.tokens, n, sizeof(W), whole);
        const W* rows[kGroup];
        const char* ahead[kGroup];
        for (int64_t g = begin, count; g < end; g += count) {
            if (const int64_t next = call.index[g] / kLinearChain; next != chain) {
                if (chain >= 0)
                    close_chain();
                chain = next;
            }
            for (count = 0; count < most && g + count < end && call.index[g + count] / kLinearChain == chain;)
                ++count;
            for (int64_t i = 0; i < count; ++i)
                rows[i] = row(g + i);
            const int64_t next = g + count < end ? g + count : g;
            next_rows<W>(true, count, end - next, [&](int64_t i) { return row(next + i); }, ahead);
            axpy_tokens(rows, call.values + g * call.tokens, call.tokens, count, acc_of, n, whole, ahead);
        }
    }

    void finish() {
        if (any_closed)
            for (int64_t i = 0; i < call.tokens * step; ++i)
                acc[i] += closed[i];
#if defined(SPARSEMLP_DPBF16)
        if constexpr (sizeof(W) == 2 && Dot<W>::STEP == 32)
            unpermute(acc, call.tokens * step);
#endif
    }
};

template <class S, class W>
uint32_t run_columns(const SparseLinearCall& call, int64_t begin, int64_t end, float* scratch) {
    const int64_t T = call.tokens, room = (kLinearSums / T - 32) / 64 * 64; // two lines a token, as in the MLPs
    const int64_t most = room < kLinearColumns ? room : kLinearColumns;
    const int64_t stretches = (end - begin + most - 1) / most;
    const int64_t width = stretches > 0 ? ((end - begin + stretches - 1) / stretches + 63) / 64 * 64 : 0;
    const S* bias = static_cast<const S*>(call.bias);
    uint32_t wrong = 0;
    for (int64_t d0 = begin; d0 < end; d0 += width) {
        const int64_t n = end - d0 < width ? end - d0 : width;
        ColumnSums<W> sums(call, d0, n, scratch);
        for (int64_t segment = 0; segment < call.segments; ++segment)
            sums.add(segment);
        sums.finish();
        for (int64_t t = 0; t < T; ++t) {
            bool finite = true;
            for (int64_t i = 0; i < n; ++i) {
                float sum = sums.acc_of[t][i];
                finite &= fabsf(sum) <= 3.402823466e38f; // false for NaN too
                if (call.scale != nullptr)
                    sum *= call.scale[d0 + i];
                if (bias != nullptr)
                    sum += widen(bias[d0 + i]);
                if (call.wide)
                    static_cast<float*>(call.out)[t * call.width + d0 + i] = sum;
                else
                    narrow(sum, static_cast<S*>(call.out) + t * call.width + d0 + i);
            }
            wrong |= static_cast<uint32_t>(!finite) << t;
        }
    }
    return wrong;
}

#define SPARSEMLP_LINEAR_KERNELS(S)                                                                                    \
    {                                                                                                                  \
        run_select<S>, { run_columns<S, S>, run_columns<S, int8_t> }                                                   \
    }
#define SPARSEMLP_LINEAR_TABLE                                                                                         \
    {SPARSEMLP_LINEAR_KERNELS(float), SPARSEMLP_LINEAR_KERNELS(bf16), SPARSEMLP_LINEAR_KERNELS(f16)}
