// 16 neurons side by side, for the screen, in plain C++.

struct L {
    struct Codes {
        uint8_t v[64];
    };
    struct I {
        int32_t v[16];
    };
    struct F {
        float v[16];
    };
    static F zero() { return F{}; }
    static I set1(int32_t a) {
        I r;
        for (int i = 0; i < 16; ++i)
            r.v[i] = a;
        return r;
    }
    static Codes load(const uint8_t* p) {
        Codes r;
        memcpy(r.v, p, 64);
        return r;
    }
    static F load(const bf16* p) {
        F r;
        for (int i = 0; i < 16; ++i)
            r.v[i] = widen(p[i]);
        return r;
    }
    static Codes low(Codes c) {
        for (int i = 0; i < 64; ++i)
            c.v[i] &= 15;
        return c;
    }
    static Codes high(Codes c) {
        for (int i = 0; i < 64; ++i)
            c.v[i] >>= 4;
        return c;
    }
    template <int S, int B> static Codes three(Codes two, const Codes& one) {
        for (int i = 0; i < 64; ++i)
            two.v[i] = static_cast<uint8_t>((two.v[i] >> S & 3) | (one.v[i] >> B & 1) << 2);
        return two;
    }
    template <int BITS> static I dot(I acc, const Codes& w, const int8_t* x) {
        for (int i = 0; i < 64; ++i)
            acc.v[i / 4] += w.v[i] * x[i % 4];
        return acc;
    }
    static F add(F sum, const I& acc, const F& factor, float unit) {
        for (int i = 0; i < 16; ++i)
            sum.v[i] += static_cast<float>(acc.v[i]) * factor.v[i] * unit;
        return sum;
    }
    // 16 values · factor as integers, to nearest, ties to even, into out; returns total + each of them.
    static I integers(I total, const float* x, float factor, int8_t* out) {
        for (int i = 0; i < 16; ++i) {
            const int32_t whole = static_cast<int32_t>(rintf(x[i] * factor));
            out[i] = static_cast<int8_t>(whole);
            total.v[i] += whole;
        }
        return total;
    }
    static int32_t sum(const I& a) {
        int32_t total = 0;
        for (const int32_t lane : a.v)
            total += lane;
        return total;
    }
    static void store(float* p, const F& a) { memcpy(p, a.v, sizeof a.v); }
};
