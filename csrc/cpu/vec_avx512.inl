// Vectors of AVX-512 (F, BW, VL, DQ); with SPARSEMLP_DPBF16, bf16 dot products by VDPBF16PS.

struct V {
    static constexpr int W = 16;
    static constexpr int kRowTile = 6;
    static constexpr int kRowTileOne = 8;
    static constexpr int kTokTile = 4;
    static constexpr int kAxpyVecs = 4;
    static constexpr int kAxpyTile = 6;  // tokens in one axpy tile
    static constexpr int kPanelVecs = 4; // vectors across a panel of weights
    static constexpr int kPanelTile = 6; // tokens multiplied with a panel at a time
    static constexpr int kLaneVecs = 4;  // vectors of tokens that a row's values are multiplied with at a time
    static constexpr int kLaneRows = 8;  // rows at a time, where that is two vectors; six where it is more
    static constexpr int kLanesFrom = 9; // fewer tokens are multiplied by whole rows
    using F = __m512;
    static F zero() { return _mm512_setzero_ps(); }
    static F set1(float a) { return _mm512_set1_ps(a); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    // Sums of four vectors, in the order of `sum`: inside each 128-bit lane, then across them.
    static void sum4(const F* a, float* out) {
        const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        const F cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const F lanes = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }
    static float sum(F a) {
        const F two = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e));
        const F lanes = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
        return _mm_cvtss_f32(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }
    static F from_bf16(__m256i raw) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16)); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load(const bf16* p) { return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static F load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static F load(const int8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
    static F load_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static F load_n(const bf16* p, int64_t n) { return from_bf16(_mm256_maskz_loadu_epi16(first(n), p)); }
    static F load_n(const f16* p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
    static F load_n(const int8_t* p, int64_t n) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
    }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
    static void store(f16* p, F a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    }
    // r[i][k] and r[k][i] change places.
    static void transpose(F* rows) {
        __m512i r[16], t[16];
        for (int i = 0; i < 16; ++i)
            r[i] = _mm512_castps_si512(rows[i]);
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
            t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
            t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        }
        for (int i = 0; i < 4; ++i) {
            rows[i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
            rows[i + 8] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
            rows[i + 4] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
            rows[i + 12] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
        }
    }
    // Bits of the lanes that are kept: not |m| < limit, and a ≠ 0 unless zeros count.
    static uint32_t kept(F m, F a, F limit, bool zeros) {
        const uint32_t on = _mm512_cmp_ps_mask(_mm512_abs_ps(m), limit, _CMP_NLT_UQ);
        return zeros ? on : on & _mm512_cmp_ps_mask(a, zero(), _CMP_NEQ_UQ);
    }
    static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
};

template <class S> struct Dot {
    using X = V::F;
    static constexpr int STEP = V::W;
    static X load(const S* p) { return V::load(p); }
    static X load_n(const S* p, int64_t n) { return V::load_n(p, n); }
    static V::F mac(V::F acc, X w, X x) { return V::fma(w, x, acc); }
};

#if defined(SPARSEMLP_DPBF16)
// Products of bf16 pairs are exact in fp32 and added with one rounding each; subnormal bf16 inputs count as 0.
template <> struct Dot<bf16> {
    using X = __m512i;
    static constexpr int STEP = 32;
    static X load(const bf16* p) { return _mm512_loadu_si512(p); }
    static X load_n(const bf16* p, int64_t n) {
        return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
    }
    static V::F mac(V::F acc, X w, X x) {
        return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
    }
};
#endif

// 16-bit integers, multiplied and added in pairs to int32.
struct Q {
    static constexpr int STEP = 32;
    using I = __m512i;
    static I zero() { return _mm512_setzero_si512(); }
    static __mmask32 first(int64_t n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1); }
    static I load(const int16_t* p) { return _mm512_loadu_si512(p); }
    static I load_n(const int16_t* p, int64_t n) { return _mm512_maskz_loadu_epi16(first(n), p); }
    static I load(const int8_t* p) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I load_n(const int8_t* p, int64_t n) { return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first(n), p)); }
#if defined(SPARSEMLP_VNNI)
    // Not the intrinsic, around which GCC 12 copies every sum twice (1 % of a call).
    static I mac(I acc, I w, I x) {
        __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
        return acc;
    }
#else
    static I mac(I acc, I w, I x) { return _mm512_add_epi32(acc, _mm512_madd_epi16(w, x)); }
#endif
    static V::F add_to(V::F sum, I acc) { return _mm512_add_ps(sum, _mm512_cvtepi32_ps(acc)); }
};
