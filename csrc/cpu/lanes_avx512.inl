// 16 neurons side by side, for the screen, in the lanes of an AVX-512 vector; SPARSEMLP_VNNI: products by VPDPBUSD.

struct L {
    using Codes = __m512i;
    using I = __m512i;
    using F = __m512;
    static F zero() { return _mm512_setzero_ps(); }
    static I set1(int32_t a) { return _mm512_set1_epi32(a); }
    static Codes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static F load(const bf16* p) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
    template <int SHIFT, int MASK> static Codes bits_of(Codes c) {
        return _mm512_and_si512(SHIFT > 0 ? _mm512_srli_epi32(c, SHIFT) : c, _mm512_set1_epi8(MASK));
    }
    static Codes low(Codes c) { return bits_of<0, 15>(c); }
    static Codes high(Codes c) { return bits_of<4, 15>(c); }
    // (two >> S & 3) | (one >> B & 1) << 2: one instruction chooses between the shifted words, one clears the rest.
    template <int S, int B> static Codes three(Codes two, Codes one) {
        const Codes few = S > 0 ? _mm512_srli_epi32(two, S) : two;
        const Codes bit = B > 2 ? _mm512_srli_epi32(one, B - 2) : B < 2 ? _mm512_slli_epi32(one, 2 - B) : one;
        const Codes both = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), few, bit, 0xca); // mask ? few : bit
        return _mm512_and_si512(both, _mm512_set1_epi8(7));
    }
    template <int BITS> static I dot(I acc, Codes w, const int8_t* p) {
#if defined(SPARSEMLP_VNNI)
        // Not the intrinsic, around which GCC 12 copies sums and loads inputs apart.
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(p)));
        return acc;
#else
        int32_t four;
        memcpy(&four, p, sizeof four);
        const __m512i x = _mm512_set1_epi32(four);
        if constexpr (BITS < 8)
            return _mm512_add_epi32(acc, small(w, x));
        const I more = _mm512_slli_epi32(small(high(w), x), 4);
        return _mm512_add_epi32(acc, _mm512_add_epi32(small(low(w), x), more));
#endif
    }
    // Of codes up to 15: two products of them fit the 16 bits in which they are added.
    static I small(Codes w, __m512i x) { return _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)); }
    static F add(F sum, I acc, F factor, float unit) {
        return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc), factor), _mm512_set1_ps(unit), sum);
    }
    // 16 values · factor as integers, to nearest, ties to even, into out; returns total + each of them.
    static I integers(I total, const float* x, float factor, int8_t* out) {
        const I whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(whole));
        return _mm512_add_epi32(total, whole);
    }
    static int32_t sum(I a) { return _mm512_reduce_add_epi32(a); }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
};
