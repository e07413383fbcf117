// Products of many tokens' hidden values with a neuron-major weight: a stretch of rows is laid out a panel of columns
// at a time, and every step multiplies them with one value (or pair) of each of a tile of tokens. Included after
// lanes.inl; includes nothing itself.

constexpr int64_t kPanel = V::kPanelVecs * V::W;

// Weights that are read next, prefetched a line at a time while a panel is multiplied: reading and computing overlap.
struct Prefetch {
    const char* base = nullptr; // null: nothing
    int64_t stride = 0, rows = 0, lines = 0, row = 0, line = 0;
    int64_t total() const { return base != nullptr ? rows * lines : 0; }
    void go(int64_t count) {
        for (; count > 0 && row < rows; --count) {
            V::prefetch(base + row * stride + line * 64);
            if (++line == lines) {
                line = 0;
                ++row;
            }
        }
    }
};

// panel[step][kPanel] from rows [k0, k0 + n) of a weight whose columns these are: `count` ≤ kPanel of them, zeros
// behind.
template <class S, class W>
inline void pack_columns(const W* w, int64_t stride, int64_t count, int64_t n, float* panel) {
    using G = Product<S>;
    for (int64_t k = 0; k < n; k += G::PER) {
        const W* const first = w + k * stride;
        const W* const second = G::PER > 1 && k + 1 < n ? first + stride : nullptr;
        for (int64_t i = 0; i < kPanel; i += V::W) {
            float* out = panel + k / G::PER * kPanel + i;
            if (i < count)
                G::columns(first, second, i, count - i, out);
            else
                V::store(out, V::zero());
        }
    }
}

// sums[m][kPanel] += panel · token m of a tile of M: hidden values [step][M] words.
template <class S, int M>
SPARSEMLP_TILE void panel_tile(const float* panel, const float* hidden, float* sums, int64_t sums_stride, int64_t steps,
                               bool first, Prefetch* next, int64_t lines) {
    using G = Product<S>;
    constexpr int N = V::kPanelVecs;
    typename V::F acc[M][N];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < N; ++v)
            acc[m][v] = V::zero();
    for (int64_t block = 0; block < steps; block += 16) {
        next->go(lines);
        const int64_t end = steps - block < 16 ? steps : block + 16;
        for (int64_t k = block; k < end; ++k) {
            typename G::Vector w[N];
            for (int v = 0; v < N; ++v)
                w[v] = G::weights(panel + k * kPanel + v * V::W);
            for (int m = 0; m < M; ++m) {
                const auto value = G::token(reinterpret_cast<const typename G::X*>(hidden + k * M + m));
                for (int v = 0; v < N; ++v)
                    acc[m][v] = G::mac(acc[m][v], w[v], value);
            }
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < N; ++v) {
            float* p = sums + m * sums_stride + v * V::W;
            if (!first) {
                const typename V::F one = V::set1(1.f);
                acc[m][v] = V::fma(V::load(p), one, acc[m][v]); // an exact product: an addition
            }
            V::store(p, acc[m][v]);
        }
}

// Hidden values are held in tiles of kPanelTile tokens, [tile][step][tokens of the tile]: the last one has the rest.
inline int64_t tile_tokens(int64_t tokens, int64_t t) {
    return tokens - t < V::kPanelTile ? tokens - t : V::kPanelTile;
}

template <class S>
inline void panel_tokens(int64_t count, const float* panel, const float* hidden, float* sums, int64_t sums_stride,
                         int64_t steps, bool first, Prefetch* next, int64_t lines) {
    constexpr int M = V::kPanelTile;
    switch (count) {
    case 1:
        return panel_tile<S, 1>(panel, hidden, sums, sums_stride, steps, first, next, lines);
    case 2:
        return panel_tile<S, 2>(panel, hidden, sums, sums_stride, steps, first, next, lines);
    case 3:
        return panel_tile<S, 3>(panel, hidden, sums, sums_stride, steps, first, next, lines);
    case 4:
        return panel_tile<S, 4>(panel, hidden, sums, sums_stride, steps, first, next, lines);
    case 5:
        return panel_tile < S, M<5 ? M : 5>(panel, hidden, sums, sums_stride, steps, first, next, lines);
    default:
        return panel_tile<S, M>(panel, hidden, sums, sums_stride, steps, first, next, lines);
    }
}
