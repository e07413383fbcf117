// 16 neurons side by side, for the screen, in pairs of AVX2 vectors.

struct L {
    struct Codes {
        __m256i v[2];
    };
    using I = Codes;
    struct F {
        __m256 v[2];
    };
    static F zero() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
    static I set1(int32_t a) { return {{_mm256_set1_epi32(a), _mm256_set1_epi32(a)}}; }
    static Codes load(const uint8_t* p) {
        const __m256i* q = reinterpret_cast<const __m256i*>(p);
        return {{_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)}};
    }
    static __m256 widened(const bf16* p) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    }
    static F load(const bf16* p) { return {{widened(p), widened(p + 8)}}; }
    template <int SHIFT, int MASK> static Codes bits_of(Codes c) {
        for (__m256i& v : c.v)
            v = _mm256_and_si256(_mm256_srli_epi16(v, SHIFT), _mm256_set1_epi8(MASK));
        return c;
    }
    static Codes low(Codes c) { return bits_of<0, 15>(c); }
    static Codes high(Codes c) { return bits_of<4, 15>(c); }
    template <int S, int B> static Codes three(Codes two, Codes one) {
        const Codes rest = bits_of<B, 1>(one);
        two = bits_of<S, 3>(two);
        for (int i = 0; i < 2; ++i)
            two.v[i] = _mm256_or_si256(two.v[i], _mm256_slli_epi16(rest.v[i], 2));
        return two;
    }
    // Of codes up to 15: two products of them fit the 16 bits in which they are added.
    static __m256i small(__m256i w, __m256i x) {
        return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
    }
    template <int BITS> static I dot(I acc, Codes w, const int8_t* p) {
        int32_t four;
        memcpy(&four, p, sizeof four);
        const __m256i x = _mm256_set1_epi32(four);
        if constexpr (BITS < 8) {
            for (int i = 0; i < 2; ++i)
                acc.v[i] = _mm256_add_epi32(acc.v[i], small(w.v[i], x));
        } else {
            const Codes few = low(w), more = high(w);
            for (int i = 0; i < 2; ++i)
                acc.v[i] = _mm256_add_epi32(
                    acc.v[i], _mm256_add_epi32(small(few.v[i], x), _mm256_slli_epi32(small(more.v[i], x), 4)));
        }
        return acc;
    }
    static F add(F sum, I acc, F factor, float unit) {
        for (int i = 0; i < 2; ++i)
            sum.v[i] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(acc.v[i]), factor.v[i]), _mm256_set1_ps(unit),
                                       sum.v[i]);
        return sum;
    }
    // 16 values · factor as integers, to nearest, ties to even, into out; returns total + each of them.
    static I integers(I total, const float* x, float factor, int8_t* out) {
        __m256i whole[2];
        for (int i = 0; i < 2; ++i) {
            whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(factor)));
            total.v[i] = _mm256_add_epi32(total.v[i], whole[i]);
        }
        const __m256i half = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[0], whole[1]), 0xd8);
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
        return total;
    }
    static int32_t sum(I a) {
        int32_t lanes[8], total = 0;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(a.v[0], a.v[1]));
        for (const int32_t lane : lanes)
            total += lane;
        return total;
    }
    static void store(float* p, F a) {
        _mm256_storeu_ps(p, a.v[0]);
        _mm256_storeu_ps(p + 8, a.v[1]);
    }
};
