// Dot products of int8 rows with tokens held as 16-bit integers: products and sums are exact in int32, closed into a
// float sum before they can overflow. Included after tiles.inl; includes nothing itself.

// Integer steps in one int32 sum: 128 · 2 · 127 · 32767 < 2^31.
constexpr int64_t kIntegerSteps = 128;

template <int R, int C>
inline void integer_step(typename Q::I (&acc)[R][C], const int8_t* const* rows, const int16_t* const* tokens, int64_t k,
                         int64_t rest) {
    typename Q::I x[C];
    for (int c = 0; c < C; ++c)
        x[c] = rest > 0 ? Q::load_n(tokens[c] + k, rest) : Q::load(tokens[c] + k);
    for (int r = 0; r < R; ++r) {
        const typename Q::I w = rest > 0 ? Q::load_n(rows[r] + k, rest) : Q::load(rows[r] + k);
        for (int c = 0; c < C; ++c)
            acc[r][c] = Q::mac(acc[r][c], w, x[c]);
    }
}

// out[r][c] = row r · column c.
template <int R, int C>
SPARSEMLP_TILE void integer_tile(const int8_t* const* rows, const int16_t* const* tokens, int64_t n, float* out,
                                 int64_t out_stride, Ahead ahead) {
    constexpr int64_t kLine = 64;
    typename V::F sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            sum[r][c] = V::zero();
    int64_t line = ahead.first;
    for (int64_t k = 0, end; k < n;) {
        end = n - k < kIntegerSteps * Q::STEP ? n : k + kIntegerSteps * Q::STEP;
        typename Q::I acc[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                acc[r][c] = Q::zero();
        // Nothing but whole lines in this loop: with the rows' ends inside, GCC moved every sum twice a step (8 %).
        for (; k + kLine <= end; k += kLine) {
            if (ahead.rows != nullptr && line-- == 0) {
                line = ahead.every - 1;
                for (int r = 0; r < R; ++r)
                    V::prefetch(ahead.rows[r] + k);
            }
            for (int64_t s = 0; s < kLine; s += Q::STEP)
                integer_step<R, C>(acc, rows, tokens, k + s, 0);
        }
        for (; k + Q::STEP <= end; k += Q::STEP)
            integer_step<R, C>(acc, rows, tokens, k, 0);
        if (k < end)
            integer_step<R, C>(acc, rows, tokens, k, end - k);
        k = end;
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                sum[r][c] = Q::add_to(sum[r][c], acc[r][c]);
    }
    store_sums<R, C>(sum, out, out_stride);
}

// R rows against `count` columns, in tiles of at most two: an AVX-512 unit keeps 8 rows · 2 columns in registers.
template <int R>
inline void integer_rows(const int8_t* const* rows, const int16_t* const* columns, int64_t count, int64_t n, float* out,
                         int64_t out_stride, const char* const* ahead) {
    const int64_t tiles = (count + 1) / 2;
    for (int64_t c = 0, tile = 0; c < count; c += 2, ++tile) {
        const Ahead share{ahead, tiles, tile};
        if (count - c >= 2)
            integer_tile<R, 2>(rows, columns + c, n, out + c, out_stride, share);
        else
            integer_tile<R, 1>(rows, columns + c, n, out + c, out_stride, share);
    }
}

template <class S> bool run_quantize(const void* x, int64_t n, int64_t parts, int16_t* values, float* unit) {
    const S* row = static_cast<const S*>(x);
    float most = 0.f;
    bool finite = true;
    for (int64_t k = 0; k < n; ++k) {
        const float a = fabsf(widen(row[k]));
        finite &= a <= 3.402823466e38f;
        most = a > most ? a : most;
    }
    if (!finite)
        return false;
    const float step = most / kLevels;
    *unit = step;
    if (most == 0.f) {
        memset(values, 0, parts * n * sizeof *values);
        return true;
    }
    if (step < 1.17549435e-38f) // a subnormal unit does not divide exactly
        return false;
    for (int64_t k = 0; k < n; ++k) {
        const float ratio = widen(row[k]) / step;
        const float whole = rintf(ratio < -kLevels ? -kLevels : ratio > kLevels ? kLevels : ratio);
        values[k] = static_cast<int16_t>(whole);
        if (parts > 1) {
            const double rest = (static_cast<double>(widen(row[k])) / step - whole) * kRest;
            const float r = static_cast<float>(rest);
            values[n + k] = static_cast<int16_t>(rintf(r < -kLevels ? -kLevels : r > kLevels ? kLevels : r));
        }
    }
    return true;
}
