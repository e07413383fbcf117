// Vectors of the portable instruction set: plain loops that the compiler may vectorise for the baseline CPU.

struct V {
    static constexpr int W = 8;           // lanes
    static constexpr int kRowTile = 2;    // weight rows in one dot tile
    static constexpr int kRowTileOne = 4; // rows for a single token
    static constexpr int kTokTile = 2;    // tokens in one dot or axpy tile
    static constexpr int kAxpyVecs = 2;   // vectors of a row in one axpy tile
    static constexpr int kAxpyTile = 2;   // tokens in one axpy tile
    static constexpr int kPanelVecs = 1;  // vectors across a panel of weights
    static constexpr int kPanelTile = 4;  // tokens multiplied with a panel at a time
    static constexpr int kLaneVecs = 1;   // vectors of tokens that a row's values are multiplied with at a time
    static constexpr int kLaneRows = 4;   // rows at a time, where that is two vectors; six where it is more
    static constexpr int kLanesFrom = 9;  // fewer tokens are multiplied by whole rows
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
    static void sum4(const F* a, float* out) {
        for (int i = 0; i < 4; ++i)
            out[i] = sum(a[i]);
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
    // r[i][k] and r[k][i] change places.
    static void transpose(F* rows) {
        for (int i = 0; i < W; ++i)
            for (int k = 0; k < i; ++k) {
                const float v = rows[i].v[k];
                rows[i].v[k] = rows[k].v[i];
                rows[k].v[i] = v;
            }
    }
    // Bits of the lanes that are kept: not |m| < limit, and a ≠ 0 unless zeros count.
    static uint32_t kept(F m, F a, F limit, bool zeros) {
        uint32_t on = 0;
        for (int i = 0; i < W; ++i)
            on |= static_cast<uint32_t>(!(fabsf(m.v[i]) < limit.v[i]) && (zeros || a.v[i] != 0.f)) << i;
        return on;
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

// 16-bit integers, multiplied and added to int32.
struct Q {
    static constexpr int STEP = V::W;
    struct I {
        int32_t v[V::W];
    };
    static I zero() { return I{}; }
    template <class S> static I load(const S* p) {
        I r;
        for (int i = 0; i < V::W; ++i)
            r.v[i] = p[i];
        return r;
    }
    template <class S> static I load_n(const S* p, int64_t n) {
        I r{};
        for (int i = 0; i < n; ++i)
            r.v[i] = p[i];
        return r;
    }
    static I mac(I acc, I w, I x) {
        for (int i = 0; i < V::W; ++i)
            acc.v[i] += w.v[i] * x.v[i];
        return acc;
    }
    static V::F add_to(V::F sum, I acc) {
        for (int i = 0; i < V::W; ++i)
            sum.v[i] += static_cast<float>(acc.v[i]);
        return sum;
    }
};
