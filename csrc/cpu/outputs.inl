// The outputs of the MLPs from their sums. Included inside a unit's target region and anonymous namespace; includes
// nothing itself. Plain loops that the compiler makes vectors of: a call of four tokens spent 8 µs in one that was not
// (D 768).

// Columns [d, d + n) of one token's output: what is added to the sums, and rounding. False when a sum is inf or NaN.
template <class S> bool finish_columns(const MlpCall& call, float* sum, int64_t d, int64_t n, S* out) {
    const S* bias = static_cast<const S*>(call.down.bias);
    int wrong = 0;
    for (int64_t i = 0; i < n; ++i)
        wrong |= (as_bits(sum[i]) & 0x7fffffff) >= 0x7f800000;
    if (call.down.scale != nullptr)
        for (int64_t i = 0; i < n; ++i)
            sum[i] *= call.down.scale[d + i];
    if (bias != nullptr)
        for (int64_t i = 0; i < n; ++i)
            sum[i] += widen(bias[d + i]);
    if (call.skipped_out != nullptr)
        for (int64_t i = 0; i < n; ++i)
            sum[i] += call.skipped_out[d + i];
    for (int64_t i = 0; i < n; ++i)
        narrow(sum[i], out + i);
    return wrong == 0;
}

// Outputs [begin, end) of the flat [T, D] from the slots' partial sums, added in slot order.
template <class S> bool run_reduce(const MlpCall& call, int64_t begin, int64_t end) {
    constexpr int64_t kColumns = 64;
    const int64_t D = call.width, step = slot_floats(call.tokens, D);
    bool finite = true;
    for (int64_t i = begin, n; i < end; i += n) {
        const int64_t t = i / D, d = i % D, most = D - d < end - i ? D - d : end - i;
        n = most < kColumns ? most : kColumns;
        const float* part = call.scratch + t * padded(D) + d;
        float sum[kColumns];
        memcpy(sum, part, n * sizeof(float));
        for (int64_t s = 1; s < call.slots; ++s)
            for (int64_t k = 0; k < n; ++k)
                sum[k] += part[s * step + k];
        finite &= finish_columns<S>(call, sum, d, n, static_cast<S*>(call.out) + i);
    }
    return finite;
}
