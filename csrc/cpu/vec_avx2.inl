// Vectors of AVX2 + FMA + F16C.

struct V {
    static constexpr int W = 8;
    static constexpr int kRowTile = 4;
    static constexpr int kRowTileOne = 8;
    static constexpr int kTokTile = 2;
    static constexpr int kAxpyVecs = 4;
    static constexpr int kAxpyTile = 2;  // tokens in one axpy tile
    static constexpr int kPanelVecs = 2; // vectors across a panel of weights
    static constexpr int kPanelTile = 6; // tokens multiplied with a panel at a time
    static constexpr int kLaneVecs = 2;  // vectors of tokens that a row's values are multiplied with at a time
    static constexpr int kLaneRows = 6;  // rows at a time, where that is two vectors; six where it is more
    static constexpr int kLanesFrom = 5; // fewer tokens are multiplied by whole rows
    using F = __m256;
    static F zero() { return _mm256_setzero_ps(); }
    static F set1(float a) { return _mm256_set1_ps(a); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    // Sums of four vectors, in the order of `sum`: inside each 128-bit lane, then across them.
    static void sum4(const F* a, float* out) {
        const F ab = _mm256_add_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
        const F cd = _mm256_add_ps(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
        const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        const F lanes = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
    }
    static float sum(F a) {
        const F two = _mm256_add_ps(a, _mm256_permute_ps(a, 0x4e));
        const F lanes = _mm256_add_ps(two, _mm256_permute_ps(two, 0xb1));
        return _mm_cvtss_f32(_mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
    }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load(const bf16* p) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    }
    static F load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static F load(const int8_t* p) {
        int64_t raw;
        __builtin_memcpy(&raw, p, sizeof raw);
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(raw)));
    }
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
    // r[i][k] and r[k][i] change places.
    static void transpose(F* rows) {
        F t[8], u[8];
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            rows[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
            rows[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
        }
    }
    // Bits of the lanes that are kept: not |m| < limit, and a ≠ 0 unless zeros count.
    static uint32_t kept(F m, F a, F limit, bool zeros) {
        const F size = _mm256_andnot_ps(_mm256_set1_ps(-0.f), m);
        const int on = _mm256_movemask_ps(_mm256_cmp_ps(size, limit, _CMP_NLT_UQ));
        return static_cast<uint32_t>(zeros ? on : on & _mm256_movemask_ps(_mm256_cmp_ps(a, zero(), _CMP_NEQ_UQ)));
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

// 16-bit integers, multiplied and added in pairs to int32.
struct Q {
    static constexpr int STEP = 16;
    using I = __m256i;
    static I zero() { return _mm256_setzero_si256(); }
    static I load(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static I load(const int8_t* p) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    template <class S> static I load_n(const S* p, int64_t n) {
        S part[STEP] = {};
        for (int64_t i = 0; i < n; ++i)
            part[i] = p[i];
        return load(part);
    }
    static I mac(I acc, I w, I x) { return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x)); }
    static V::F add_to(V::F sum, I acc) { return _mm256_add_ps(sum, _mm256_cvtepi32_ps(acc)); }
};
