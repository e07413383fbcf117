// Vectors of AVX-512 (F, BW, VL, DQ); with SPARSEMLP_DPBF16, bf16 dot products by VDPBF16PS.

struct V {
    static constexpr int W = 16;
    static constexpr int kRowTile = 4;
    static constexpr int kRowTileOne = 8;
    static constexpr int kTokTile = 4;
    static constexpr int kAxpyVecs = 4;
    using F = __m512;
    static F zero() { return _mm512_setzero_ps(); }
    static F set1(float a) { return _mm512_set1_ps(a); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(F a) { return _mm512_reduce_add_ps(a); }
    static F from_bf16(__m256i raw) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16)); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load(const bf16* p) { return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static F load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
    static F load_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static F load_n(const bf16* p, int64_t n) { return from_bf16(_mm256_maskz_loadu_epi16(first(n), p)); }
    static F load_n(const f16* p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
    static void store(f16* p, F a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
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
