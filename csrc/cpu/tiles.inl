// Dot products of a few weight rows with a few tokens, and sums of a few rows into the tokens' accumulators. Included
// inside a unit's target region and anonymous namespace, after its vector file; includes nothing itself.

// A loop whose sums fill the registers is a function of its own: inlined into a larger one, GCC keeps some of them in
// memory, and 32 tokens take 19 ms instead of 10.
#define SPARSEMLP_TILE static __attribute__((noinline))

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

// out[r][c] = the sum of acc[r][c]; four at a time where they lie together, with the same bits.
template <int R, int C> inline void store_sums(const typename V::F (&acc)[R][C], float* out, int64_t out_stride) {
    if constexpr (C == 4) {
        for (int r = 0; r < R; ++r)
            V::sum4(acc[r], out + r * out_stride);
    } else if constexpr (C == 1 && R % 4 == 0) {
        float sums[R];
        for (int r = 0; r < R; r += 4)
            V::sum4(acc[r], sums + r);
        for (int r = 0; r < R; ++r)
            out[r * out_stride] = sums[r];
    } else {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                out[r * out_stride + c] = V::sum(acc[r][c]);
    }
}

template <class S, int R, int C>
SPARSEMLP_TILE void dot_tile(const S* const* rows, const S* const* tokens, int64_t n, float* out, int64_t out_stride,
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
    store_sums<R, C>(acc, out, out_stride);
}

// out[i] = row i · one token, for `count` rows, a whole number of R. No function call, no choice between two tiles: at
// 30 GB/s a core every one of them is seen (the gate's rows 2.45 ms with, 2.1 without; D 4096, F 14336, bf16).
template <class S, int R>
SPARSEMLP_TILE void dot_one(const S* const* rows, int64_t count, const S* x, int64_t n, float* out,
                            const char* const* ahead) {
    constexpr int64_t kStep = Dot<S>::STEP, kLine = 64 / sizeof(S), kBlock = kLine > kStep ? kLine : kStep;
    for (int64_t i = 0; i < count; i += R) {
        const S* row[R];
        const char* soon[R];
        for (int r = 0; r < R; ++r) {
            row[r] = rows[i + r];
            soon[r] = ahead[i + r];
        }
        typename V::F acc[R][1];
        for (int r = 0; r < R; ++r)
            acc[r][0] = V::zero();
        int64_t k = 0;
        for (; k + kBlock <= n; k += kBlock) {
            for (int r = 0; r < R; ++r)
                V::prefetch(soon[r] + k * sizeof(S));
            for (int64_t s = 0; s < kBlock; s += kStep)
                dot_step<S, R, 1>(acc, row, &x, k + s, 0);
        }
        for (; k + kStep <= n; k += kStep)
            dot_step<S, R, 1>(acc, row, &x, k, 0);
        if (k < n)
            dot_step<S, R, 1>(acc, row, &x, k, n - k);
        store_sums<R, 1>(acc, out + i, 1);
    }
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

// acc[c] += Σ_r h[r][c] · row r over `count` rows, for C tokens and one stretch of columns from k on, of which `rest`
// are in the rows (the accumulator is padded). `ahead` (or null): rows to prefetch alongside.
template <int C, class S>
SPARSEMLP_TILE void axpy_tile(const S* const* rows, const float* h, int64_t h_stride, int64_t count, float* const* acc,
                              int64_t k, int64_t rest, const char* const* ahead) {
    constexpr int N = V::kAxpyVecs;
    constexpr int64_t kLine = 64 / sizeof(S);
    if (rest >= N * V::W) {
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
        return;
    }
    for (const int64_t end = k + rest; k < end; k += V::W) {
        for (int c = 0; c < C; ++c) {
            typename V::F sum = V::load(acc[c] + k);
            for (int64_t r = 0; r < count; ++r) {
                const typename V::F w = end - k >= V::W ? V::load(rows[r] + k) : V::load_n(rows[r] + k, end - k);
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
inline void axpy_pair(__m512 (&low)[C], __m512 (&high)[C], __m512i first, __m512i second, const uint32_t* h) {
    const __m512i lows = _mm512_unpacklo_epi16(second, first), highs = _mm512_unpackhi_epi16(second, first);
    for (int c = 0; c < C; ++c) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(h[c]));
        low[c] = Dot<bf16>::mac(low[c], lows, a);
        high[c] = Dot<bf16>::mac(high[c], highs, a);
    }
}

template <int C>
SPARSEMLP_TILE void axpy_pairs(const bf16* const* rows, const uint32_t* h, int64_t h_stride, int64_t count,
                               float* const* acc, int64_t k, int64_t rest, const char* const* ahead) {
    using D = Dot<bf16>;
    __m512 low[C], high[C];
    for (int c = 0; c < C; ++c) {
        low[c] = _mm512_loadu_ps(acc[c] + k);
        high[c] = _mm512_loadu_ps(acc[c] + k + 16);
    }
    int64_t r = 0;
    if (rest >= 32)
        for (; r + 2 <= count; r += 2) {
            if (ahead != nullptr) {
                V::prefetch(ahead[r] + k * 2);
                V::prefetch(ahead[r + 1] + k * 2);
            }
            axpy_pair<C>(low, high, D::load(rows[r] + k), D::load(rows[r + 1] + k), h + r / 2 * h_stride);
        }
    for (; r < count; r += 2) { // the rows' ends, and a row without a partner
        const int64_t n = rest >= 32 ? 32 : rest;
        const __m512i second = r + 1 < count ? D::load_n(rows[r + 1] + k, n) : _mm512_setzero_si512();
        axpy_pair<C>(low, high, D::load_n(rows[r] + k, n), second, h + r / 2 * h_stride);
    }
    for (int c = 0; c < C; ++c) {
        _mm512_storeu_ps(acc[c] + k, low[c]);
        _mm512_storeu_ps(acc[c] + k + 16, high[c]);
    }
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

// Columns worked on for all tokens before the next ones: their sums stay in the first cache level while a group's rows,
// which come from the second, are read once for every tile of tokens.
constexpr int64_t kStretch = 256;

// What is prefetched with a stretch of columns from k on: the same rows' next stretch, or with the last one `ahead`,
// which was made for it. Where rows are added whole, all is one stretch.
struct Soon {
    const char* rows[kGroup];
    template <class W> Soon(const W* const* from, int64_t count, int64_t k, bool last, const char* const* ahead) {
        for (int64_t r = 0; r < count; ++r)
            rows[r] = last ? ahead[r] - k * static_cast<int64_t>(sizeof(W))
                           : reinterpret_cast<const char*>(from[r] + kStretch);
    }
};
inline int64_t stretch_end(int64_t k, int64_t n, bool whole) { return whole || n - k < kStretch ? n : k + kStretch; }

// acc_of[t] += Σ_r h[r][t] · row r for T ≤ kMaxTokens tokens; h is [count][T], count ≤ kGroup. `ahead`: what to
// prefetch with the last columns, count places.
template <class W>
inline void axpy_tokens(const W* const* rows, const float* h, int64_t T, int64_t count, float* const* acc_of, int64_t n,
                        bool whole, const char* const* ahead) {
    constexpr int64_t kStep = V::kAxpyVecs * V::W;
    static_assert(kStretch % kStep == 0);
    for (int64_t k0 = 0, end; k0 < n; k0 = end) {
        end = stretch_end(k0, n, whole);
        const Soon soon(rows, count, k0, end == n, ahead);
        for (int64_t t = 0; t < T;) {
            const int64_t left = T - t;
            const char* const* once = t == 0 ? soon.rows : nullptr;
            const int64_t size = left >= V::kAxpyTile ? V::kAxpyTile : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int64_t k = k0; k < end; k += kStep) {
                if (size == V::kAxpyTile)
                    axpy_tile<V::kAxpyTile>(rows, h + t, T, count, acc_of + t, k, n - k, once);
                else if (V::kAxpyTile > 4 && size == 4)
                    axpy_tile<4>(rows, h + t, T, count, acc_of + t, k, n - k, once);
                else if (size == 2)
                    axpy_tile<2>(rows, h + t, T, count, acc_of + t, k, n - k, once);
                else
                    axpy_tile<1>(rows, h + t, T, count, acc_of + t, k, n - k, once);
            }
            t += size;
        }
    }
}

#if defined(SPARSEMLP_DPBF16)
template <int C>
inline int64_t axpy_stretch(const bf16* const* rows, const uint32_t* pairs, int64_t T, int64_t count, float* const* acc,
                            int64_t begin, int64_t end, int64_t n, const char* const* ahead) {
    for (int64_t k = begin; k < end; k += 32)
        axpy_pairs<C>(rows, pairs, T, count, acc, k, n - k, ahead);
    return C;
}

inline void axpy_tokens(const bf16* const* rows, const float* h, int64_t T, int64_t count, float* const* acc_of,
                        int64_t n, bool whole, const char* const* ahead) {
    uint32_t pairs[kGroup / 2 * kMaxTokens];
    for (int64_t r = 0; r < count; r += 2)
        for (int64_t t = 0; t < T; ++t) {
            bf16 first, second{0};
            narrow(h[r * T + t], &first);
            if (r + 1 < count)
                narrow(h[(r + 1) * T + t], &second);
            pairs[r / 2 * T + t] = static_cast<uint32_t>(first.bits) << 16 | second.bits;
        }
    for (int64_t k = 0, end; k < n; k = end) {
        end = stretch_end(k, n, whole);
        const Soon soon(rows, count, k, end == n, ahead);
        for (int64_t t = 0; t < T;) {
            const int64_t left = T - t;
            const char* const* once = t == 0 ? soon.rows : nullptr;
            if (left >= 12)
                t += axpy_stretch<12>(rows, pairs + t, T, count, acc_of + t, k, end, n, once);
            else if (left >= 8)
                t += axpy_stretch<8>(rows, pairs + t, T, count, acc_of + t, k, end, n, once);
            else if (left >= 4)
                t += axpy_stretch<4>(rows, pairs + t, T, count, acc_of + t, k, end, n, once);
            else if (left == 3)
                t += axpy_stretch<3>(rows, pairs + t, T, count, acc_of + t, k, end, n, once);
            else if (left == 2)
                t += axpy_stretch<2>(rows, pairs + t, T, count, acc_of + t, k, end, n, once);
            else
                t += axpy_stretch<1>(rows, pairs + t, T, count, acc_of + t, k, end, n, once);
        }
    }
}
#endif

// What a group of `count` rows prefetches with its last columns, at(i) being row i of what is read next, of `more`
// rows: the first columns of `each` of as many rows, for more additions; else of a few of them, further ones too, for
// dots.
template <class W, class At> inline void next_rows(bool each, int64_t count, int64_t more, At at, const char** ahead) {
    constexpr int64_t kFew = 8;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = each ? i : i % kFew;
        const W* place = row < more ? at(row) : at(0);
        ahead[i] = reinterpret_cast<const char*>(each ? place : place + i / kFew * kStretch);
    }
}

// A few values to a place before them, or their own. No call: there is one for every neuron.
inline void move_values(const float* from, int64_t n, float* to) {
    int64_t i = 0;
    for (float part[4]; i + 4 <= n; i += 4) {
        memcpy(part, from + i, sizeof part);
        memcpy(to + i, part, sizeof part);
    }
    for (; i < n; ++i) {
        const float value = from[i];
        to[i] = value;
    }
}
