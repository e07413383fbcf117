// Products of weight rows with many tokens, the tokens side by side in the vectors' lanes: a step multiplies one value
// (or pair) of a row, broadcast, with the same of every token. The weights are read as they lie, the tokens are laid
// out once. Included after tiles.inl; includes nothing itself.

// How x's type S is multiplied: as float32, one value a step.
template <class S> struct Product {
    using X = float; // what tokens are held as
    using Vector = V::F;
    static constexpr int64_t PER = 1;    // values of a row in one step
    static constexpr int64_t CHAIN = 32; // steps in one chain of additions by lanes, which have a single sum a row
    static Vector weights(const float* panel) { return V::load(panel); }
    static Vector token(const X* x) { return V::set1(*x); }
    static V::F mac(V::F acc, Vector w, Vector x) { return V::fma(w, x, acc); }
    // Steps [k, k + V::W) of a row, of which `rest` values exist.
    template <class W> static V::F row(const W* row, int64_t k, int64_t rest) {
        return rest >= V::W ? V::load(row + k) : V::load_n(row + k, rest);
    }
    // One step of V::W columns from n on, of which `rest` exist; two rows where a step has two.
    template <class W> static void columns(const W* first, const W*, int64_t n, int64_t rest, float* out) {
        V::store(out, rest >= V::W ? V::load(first + n) : V::load_n(first + n, rest));
    }
};

#if defined(SPARSEMLP_DPBF16)
inline __m512i top_halves(V::F low, V::F high) { // of floats that bf16 holds exactly: low in the lower half
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16),
                           _mm512_and_si512(_mm512_castps_si512(high), upper));
}

// bf16 by VDPBF16PS, pairs of values.
template <> struct Product<bf16> {
    using X = bf16;
    using Vector = __m512i;
    static constexpr int64_t PER = 2;
    static constexpr int64_t CHAIN = 256; // sums in float32 of what bf16 has rounded: longer, and quicker
    static Vector weights(const float* panel) { return _mm512_loadu_si512(panel); }
    static Vector token(const X* x) {
        int32_t pair;
        __builtin_memcpy(&pair, x, sizeof pair);
        return _mm512_set1_epi32(pair);
    }
    static V::F mac(V::F acc, Vector w, Vector x) { return Dot<bf16>::mac(acc, w, x); }
    static V::F row(const bf16* row, int64_t k, int64_t rest) {
        return _mm512_castsi512_ps(rest >= 32 ? Dot<bf16>::load(row + k) : Dot<bf16>::load_n(row + k, rest));
    }
    static V::F row(const int8_t* row, int64_t k, int64_t rest) {
        const auto bytes = rest >= 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k))
                                      : _mm256_maskz_loadu_epi8(Q::first(rest), row + k);
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
        return _mm512_castsi512_ps(top_halves(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(even)),
                                              _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(odd))));
    }
    static __m256i half_row(const bf16* row, int64_t n, int64_t rest) {
        return rest >= 16 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + n))
                          : _mm256_maskz_loadu_epi16(V::first(rest), row + n);
    }
    static void columns(const bf16* first, const bf16* second, int64_t n, int64_t rest, float* out) {
        const __m512i low = _mm512_cvtepu16_epi32(half_row(first, n, rest));
        const __m512i high =
            second != nullptr ? _mm512_cvtepu16_epi32(half_row(second, n, rest)) : _mm512_setzero_si512();
        _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    static void columns(const int8_t* first, const int8_t* second, int64_t n, int64_t rest, float* out) {
        const V::F low = rest >= 16 ? V::load(first + n) : V::load_n(first + n, rest);
        const V::F high = second == nullptr ? V::zero()
                          : rest >= 16      ? V::load(second + n)
                                            : V::load_n(second + n, rest);
        _mm512_storeu_si512(out, top_halves(low, high));
    }
};
#endif

// out[step][vecs · V::W] from `count` rows (tokens): their values [0, n), zeros behind.
template <class S>
inline void pack_rows(const S* w, int64_t stride, int64_t count, int64_t n, int64_t vecs, float* out) {
    using G = Product<S>;
    const int64_t steps = (n + G::PER - 1) / G::PER, width = vecs * V::W;
    for (int64_t i = 0; i < width; i += V::W)
        for (int64_t s = 0; s < steps; s += V::W) {
            typename V::F r[V::W];
            for (int64_t j = 0; j < V::W; ++j)
                r[j] = i + j < count ? G::row(w + (i + j) * stride, s * G::PER, n - s * G::PER) : V::zero();
            V::transpose(r);
            for (int64_t j = 0; j < V::W && s + j < steps; ++j)
                V::store(out + (s + j) * width + i, r[j]);
        }
}

// Steps [0, count) of a block of V::W: `rows` are read directly, as 32-bit words.
template <class S, int R, int N>
inline void lane_steps(typename V::F (&acc)[R][N], const float* const* rows, const float* tokens, int64_t count) {
    using G = Product<S>;
    for (int64_t q = 0; q < count; ++q) {
        typename G::Vector x[N];
        for (int v = 0; v < N; ++v)
            x[v] = G::weights(tokens + (q * N + v) * V::W);
        for (int r = 0; r < R; ++r) {
            const typename G::Vector w = G::token(reinterpret_cast<const typename G::X*>(rows[r] + q));
            for (int v = 0; v < N; ++v)
                acc[r][v] = G::mac(acc[r][v], x[v], w);
        }
    }
}

// out[r][N · V::W] = row r · tokens over values [k0, k0 + n), added to what is there unless k0 is 0. `tokens` are the
// panel's steps from k0 on. `ahead`: R rows to prefetch, at the same place, or null.
template <class S, class W, int R, int N>
SPARSEMLP_TILE void lane_tile(const W* const* rows, int64_t k0, int64_t n, const float* tokens, float* out,
                              int64_t out_stride, const char* const* ahead) {
    using G = Product<S>;
    constexpr int64_t kValues = V::W * G::PER; // of a row in one block of steps
    constexpr bool kDirect = sizeof(W) * G::PER == 4;
    constexpr int64_t kLines = (kValues * sizeof(W) + 63) / 64;
    typename V::F acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v)
            acc[r][v] = V::zero();
    for (int64_t k = 0; k < n; k += kValues, tokens += V::W * N * V::W) {
        if (ahead != nullptr && (kLines * 64 == kValues * sizeof(W) || k * sizeof(W) % 64 == 0))
            for (int r = 0; r < R; ++r)
                V::prefetch(ahead[r] + (k0 + k) * sizeof(W));
        if (kDirect && n - k >= kValues) {
            const float* words[R];
            for (int r = 0; r < R; ++r)
                words[r] = reinterpret_cast<const float*>(rows[r] + k0 + k);
            lane_steps<S, R, N>(acc, words, tokens, V::W);
        } else { // converted, and zeros behind the row's end
            float staged[R][V::W];
            const float* words[R];
            for (int r = 0; r < R; ++r) {
                V::store(staged[r], G::row(rows[r], k0 + k, n - k));
                words[r] = staged[r];
            }
            lane_steps<S, R, N>(acc, words, tokens, n - k < kValues ? (n - k + G::PER - 1) / G::PER : V::W);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) {
            float* p = out + r * out_stride + v * V::W;
            if (k0 > 0) {
                const typename V::F one = V::set1(1.f);
                acc[r][v] = V::fma(V::load(p), one, acc[r][v]); // an exact product: an addition
            }
            V::store(p, acc[r][v]);
        }
}

// The same for R rows or one, and `vecs` vectors of tokens of at most N.
template <class S, class W, int R, int N>
inline void lane_rows(const W* const* rows, int64_t count, int64_t vecs, int64_t k0, int64_t n, const float* tokens,
                      float* out, int64_t out_stride, const char* const* ahead) {
    const auto next = [=](int64_t r) { return ahead != nullptr ? ahead + r : nullptr; };
    int64_t r = 0;
    for (; r + R <= count; r += R)
        if (vecs == N)
            lane_tile<S, W, R, N>(rows + r, k0, n, tokens, out + r * out_stride, out_stride, next(r));
        else
            lane_tile<S, W, R, (N > 1 ? N - 1 : 1)>(rows + r, k0, n, tokens, out + r * out_stride, out_stride, next(r));
    for (; r < count; ++r)
        if (vecs == N)
            lane_tile<S, W, 1, N>(rows + r, k0, n, tokens, out + r * out_stride, out_stride, next(r));
        else
            lane_tile<S, W, 1, (N > 1 ? N - 1 : 1)>(rows + r, k0, n, tokens, out + r * out_stride, out_stride, next(r));
}

// Any number of rows, values and vectors: out[r][vecs · V::W] = row r · tokens over values [k0, k0 + n).
template <class S, class W>
inline void lane_product(const W* const* rows, int64_t count, int64_t vecs, int64_t k0, int64_t n, const float* tokens,
                         float* out, int64_t out_stride, const char* const* ahead) {
    if (vecs <= 2)
        lane_rows<S, W, V::kLaneRows, (V::kLaneVecs < 2 ? 1 : 2)>(rows, count, vecs, k0, n, tokens, out, out_stride,
                                                                  ahead);
    else
        lane_rows<S, W, 6, (V::kLaneVecs < 4 ? 1 : 4)>(rows, count, vecs, k0, n, tokens, out, out_stride, ahead);
}

// Tokens as lanes: panels of V::kLaneVecs vectors, the last one as narrow as it may be. A panel begins every
// lane_floats<S>(D) floats.
constexpr int64_t kLaneTokens = V::kLaneVecs * V::W;
inline int64_t panel_vecs(int64_t tokens, int64_t panel) {
    const int64_t left = tokens - panel * kLaneTokens;
    return left >= kLaneTokens ? V::kLaneVecs : (left + V::W - 1) / V::W;
}
template <class S> int64_t lane_floats(int64_t width) {
    return (width + Product<S>::PER - 1) / Product<S>::PER * kLaneTokens;
}

template <class S>
void run_pack(const void* x, int64_t stride, int64_t tokens, int64_t width, int64_t panel, float* out) {
    const int64_t first = panel * kLaneTokens, left = tokens - first;
    pack_rows<S>(static_cast<const S*>(x) + first * stride, stride, left < kLaneTokens ? left : kLaneTokens, width,
                 panel_vecs(tokens, panel), out + panel * lane_floats<S>(width));
}

// out[i][T] = rows i · tokens for `count` rows, a few at a time: those of `next` are prefetched meanwhile.
template <class S, class W, class Row, class Next>
inline void lane_dots(const MlpCall& call, int64_t count, Row row, Next next, float* out) {
    constexpr int64_t kRows = V::kLaneRows, kDepth = Product<S>::CHAIN * Product<S>::PER;
    const int64_t T = call.tokens, D = call.width;
    float sums[kRows * kLaneTokens];
    const W* rows[kRows];
    const char* soon[kRows];
    for (int64_t i = 0; i < count; i += kRows) {
        const int64_t n = count - i < kRows ? count - i : kRows;
        for (int64_t r = 0; r < n; ++r) {
            rows[r] = row(i + r);
            soon[r] = reinterpret_cast<const char*>(next(i + r));
        }
        for (int64_t t0 = 0, panel = 0; t0 < T; t0 += kLaneTokens, ++panel) {
            const int64_t vecs = panel_vecs(T, panel), width = vecs * V::W, left = T - t0 < width ? T - t0 : width;
            const float* tokens = call.lanes + panel * lane_floats<S>(D);
            for (int64_t k = 0; k < D || k == 0; k += kDepth)
                lane_product<S, W>(rows, n, vecs, k, D - k < kDepth ? D - k : kDepth,
                                   tokens + k / Product<S>::PER * width, sums, width, panel == 0 ? soon : nullptr);
            for (int64_t r = 0; r < n; ++r)
                memcpy(out + (i + r) * T + t0, sums + r * width, left * sizeof(float));
        }
    }
}

#define SPARSEMLP_LANES(S) {V::kLanesFrom, kLaneTokens, lane_floats<S>, run_pack<S>}
