// Vectors of AVX2 + FMA + F16C.

struct V {
    static constexpr int W = 8;
    static constexpr int kRowTile = 4;
    static constexpr int kRowTileOne = 8;
    static constexpr int kTokTile = 2;
    static constexpr int kAxpyVecs = 4;
    using F = __m256;
    static F zero() { return _mm256_setzero_ps(); }
    static F set1(float a) { return _mm256_set1_ps(a); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum(F a) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load(const bf16* p) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    }
    static F load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    // The first n < W elements, zeros behind: through the stack, so that nothing past the row is read.
    template <class S> static F load_n(const S* p, int64_t n) {
        S part[W] = {};
        for (int64_t i = 0; i < n; ++i)
            part[i] = p[i];
        return load(part);
    }
    static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
    static void store(f16* p, F a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
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
