// Dot products of a few weight rows with a few tokens, and sums of a few rows into the tokens' accumulators. Included
// inside a unit's target region and anonymous namespace, after its vector file; includes nothing itself.

// out[r][c] = row r · token c. `ahead` (or null) are R rows to prefetch along the way, from byte `from` on, one line
// in `every` lines: several passes over the same rows share the work.
struct Ahead {
    const char* const* rows = nullptr;
    int64_t every = 1, first = 0;
};

// acc[r][c] += the products of elements [k, k + STEP), or of [k, k + rest) where rest > 0. Plain functions, no lambdas:
// GCC does not give a lambda the target region's instruction set.
template <class S, int R, int C>
inline void dot_step(typename V::F (&acc)[R][C], const S* const* rows, const S* const* tokens, int64_t k,
                     int64_t rest) {
    using D = Dot<S>;
    typename D::X x[C];
    for (int c = 0; c < C; ++c)
        x[c] = rest > 0 ? D::load_n(tokens[c] + k, rest) : D::load(tokens[c] + k);
    for (int r = 0; r < R; ++r) {
        const typename D::X w = rest > 0 ? D::load_n(rows[r] + k, rest) : D::load(rows[r] + k);
        for (int c = 0; c < C; ++c)
            acc[r][c] = D::mac(acc[r][c], w, x[c]);
    }
}

template <class S, int R, int C>
inline void dot_tile(const S* const* rows, const S* const* tokens, int64_t n, float* out, int64_t out_stride,
                     Ahead ahead) {
    constexpr int64_t kStep = Dot<S>::STEP;
    constexpr int64_t kLine = 64 / sizeof(S); // elements in a cache line
    constexpr int64_t kSteps = kLine >= kStep ? kLine / kStep : 1;
    typename V::F acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            acc[r][c] = V::zero();
    int64_t k = 0, line = ahead.first;
    for (; k + kSteps * kStep <= n; k += kSteps * kStep) {
        if (ahead.rows != nullptr && line-- == 0) {
            line = ahead.every - 1;
            for (int r = 0; r < R; ++r)
                V::prefetch(ahead.rows[r] + k * sizeof(S));
        }
        for (int64_t s = 0; s < kSteps; ++s)
            dot_step<S, R, C>(acc, rows, tokens, k + s * kStep, 0);
    }
    for (; k + kStep <= n; k += kStep)
        dot_step<S, R, C>(acc, rows, tokens, k, 0);
    if (k < n)
        dot_step<S, R, C>(acc, rows, tokens, k, n - k);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            out[r * out_stride + c] = V::sum(acc[r][c]);
}

// R rows against any number of tokens, in tiles of at most V::kTokTile.
template <class S, int R>
inline void dot_rows(const S* const* rows, const S* const* tokens, int64_t count, int64_t n, float* out,
                     int64_t out_stride, const char* const* ahead) {
    const int64_t tiles = (count + V::kTokTile - 1) / V::kTokTile;
    for (int64_t c = 0, tile = 0; c < count; ++tile) {
        const Ahead share{ahead, tiles, tile};
        const int64_t left = count - c;
        if constexpr (V::kTokTile >= 4) {
            if (left >= 4) {
                dot_tile<S, R, 4>(rows, tokens + c, n, out + c, out_stride, share);
                c += 4;
                continue;
            }
            if (left == 3) {
                dot_tile<S, R, 3>(rows, tokens + c, n, out + c, out_stride, share);
                c += 3;
                continue;
            }
        }
        if (left >= 2) {
            dot_tile<S, R, 2>(rows, tokens + c, n, out + c, out_stride, share);
            c += 2;
        } else {
            dot_tile<S, R, 1>(rows, tokens + c, n, out + c, out_stride, share);
            c += 1;
        }
    }
}

// acc[c] += Σ_r h[r][c] · row r over `count` rows, for C tokens. `ahead` (or null): rows to prefetch alongside.
template <int C, class S>
inline void axpy_tile(const S* const* rows, const float* h, int64_t h_stride, int64_t count, float* const* acc,
                      int64_t n, const char* const* ahead) {
    constexpr int N = V::kAxpyVecs;
    constexpr int64_t kLine = 64 / sizeof(S);
    int64_t k = 0;
    for (; k + N * V::W <= n; k += N * V::W) {
        typename V::F sum[C][N];
        for (int c = 0; c < C; ++c)
            for (int v = 0; v < N; ++v)
                sum[c][v] = V::load(acc[c] + k + v * V::W);
        for (int64_t r = 0; r < count; ++r) {
            typename V::F w[N];
            for (int v = 0; v < N; ++v)
                w[v] = V::load(rows[r] + k + v * V::W);
            if (ahead != nullptr)
                for (int64_t line = 0; line < N * V::W; line += kLine)
                    V::prefetch(ahead[r] + (k + line) * sizeof(S));
            for (int c = 0; c < C; ++c) {
                const typename V::F a = V::set1(h[r * h_stride + c]);
                for (int v = 0; v < N; ++v)
                    sum[c][v] = V::fma(a, w[v], sum[c][v]);
            }
        }
        for (int c = 0; c < C; ++c)
            for (int v = 0; v < N; ++v)
                V::store(acc[c] + k + v * V::W, sum[c][v]);
    }
    for (; k < n; k += V::W) { // the accumulator is padded; the rows are not
        const int64_t rest = n - k;
        for (int c = 0; c < C; ++c) {
            typename V::F sum = V::load(acc[c] + k);
            for (int64_t r = 0; r < count; ++r) {
                const typename V::F w = rest >= V::W ? V::load(rows[r] + k) : V::load_n(rows[r] + k, rest);
                sum = V::fma(V::set1(h[r * h_stride + c]), w, sum);
            }
            V::store(acc[c] + k, sum);
        }
    }
}

#if defined(SPARSEMLP_DPBF16)
// The same for bf16 by VDPBF16PS, two rows at a time: h is rounded to bf16 (as PyTorch rounds it before its own down
// GEMM), half the instructions of widening every row. The instruction adds the product of the high halves first, then
// that of the low halves, each with one rounding: with the earlier row in the high half, pairs of rows add up exactly
// like single rows one after another, so the bits do not depend on which rows are paired. The accumulator is kept in
// the order that interleaving leaves; `unpermute` puts it right at the end.
template <int C>
inline void axpy_pairs(const bf16* const* rows, const uint32_t* h, int64_t h_stride, int64_t count, float* const* acc,
                       int64_t k, int64_t rest, const char* const* ahead) {
    __m512 low[C], high[C];
    for (int c = 0; c < C; ++c) {
        low[c] = _mm512_loadu_ps(acc[c] + k);
        high[c] = _mm512_loadu_ps(acc[c] + k + 16);
    }
    for (int64_t r = 0; r < count; r += 2) {
        const bool pair = r + 1 < count; // else the low half is 0 · 0
        const __m512i first = rest >= 32 ? Dot<bf16>::load(rows[r] + k) : Dot<bf16>::load_n(rows[r] + k, rest);
        const __m512i second = !pair        ? _mm512_setzero_si512()
                               : rest >= 32 ? Dot<bf16>::load(rows[r + 1] + k)
                                            : Dot<bf16>::load_n(rows[r + 1] + k, rest);
        if (ahead != nullptr) {
            V::prefetch(ahead[r] + k * 2);
            if (pair)
                V::prefetch(ahead[r + 1] + k * 2);
        }
        const __m512i lows = _mm512_unpacklo_epi16(second, first), highs = _mm512_unpackhi_epi16(second, first);
        for (int c = 0; c < C; ++c) {
            const __m512i a = _mm512_set1_epi32(static_cast<int>(h[(r / 2) * h_stride + c]));
            low[c] = Dot<bf16>::mac(low[c], lows, a);
            high[c] = Dot<bf16>::mac(high[c], highs, a);
        }
    }
    for (int c = 0; c < C; ++c) {
        _mm512_storeu_ps(acc[c] + k, low[c]);
        _mm512_storeu_ps(acc[c] + k + 16, high[c]);
    }
}

template <int C>
inline void axpy_tile(const bf16* const* rows, const float* h, int64_t h_stride, int64_t count, float* const* acc,
                      int64_t n, const char* const* ahead) {
    uint32_t pairs[kGroup / 2 * C];
    for (int64_t r = 0; r < count; r += 2)
        for (int c = 0; c < C; ++c) {
            bf16 first, second{0};
            narrow(h[r * h_stride + c], &first);
            if (r + 1 < count)
                narrow(h[(r + 1) * h_stride + c], &second);
            pairs[r / 2 * C + c] = static_cast<uint32_t>(first.bits) << 16 | second.bits;
        }
    for (int64_t k = 0; k < n; k += 32)
        axpy_pairs<C>(rows, pairs, C, count, acc, k, n - k, ahead);
}

inline void unpermute(float* acc, int64_t n) {
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t k = 0; k < n; k += 32) {
        const __m512 low = _mm512_loadu_ps(acc + k), high = _mm512_loadu_ps(acc + k + 16);
        _mm512_storeu_ps(acc + k, _mm512_permutex2var_ps(low, front, high));
        _mm512_storeu_ps(acc + k + 16, _mm512_permutex2var_ps(low, back, high));
    }
}
#endif
