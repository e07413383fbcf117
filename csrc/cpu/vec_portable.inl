// Vectors of the portable instruction set: plain loops that the compiler may vectorise for the baseline CPU.

struct V {
    static constexpr int W = 8;           // lanes
    static constexpr int kRowTile = 2;    // weight rows in one dot tile
    static constexpr int kRowTileOne = 4; // rows for a single token
    static constexpr int kTokTile = 2;    // tokens in one dot or axpy tile
    static constexpr int kAxpyVecs = 2;   // vectors of a row in one axpy tile
    struct F {
        float v[W];
    };
    static F zero() { return F{}; }
    static F set1(float a) {
        F r;
        for (float& e : r.v)
            e = a;
        return r;
    }
    static F fma(F a, F b, F c) {
        for (int i = 0; i < W; ++i)
            c.v[i] += a.v[i] * b.v[i];
        return c;
    }
    static float sum(F a) {
        float s = 0;
        for (float e : a.v)
            s += e;
        return s;
    }
    template <class S> static F load(const S* p) {
        F r;
        for (int i = 0; i < W; ++i)
            r.v[i] = widen(p[i]);
        return r;
    }
    template <class S> static F load_n(const S* p, int64_t n) {
        F r{};
        for (int i = 0; i < n; ++i)
            r.v[i] = widen(p[i]);
        return r;
    }
    static void store(float* p, F a) {
        for (int i = 0; i < W; ++i)
            p[i] = a.v[i];
    }
    static void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
};

template <class S> struct Dot {
    using X = V::F;
    static constexpr int STEP = V::W;
    static X load(const S* p) { return V::load(p); }
    static X load_n(const S* p, int64_t n) { return V::load_n(p, n); }
    static V::F mac(V::F acc, X w, X x) { return V::fma(w, x, acc); }
};
