// Products with the rows that lists name: sums of them, and dots with one row. Included after a vector file; includes
// nothing itself.

// Entries in one chain of additions: a row with more of them is the sum of several chains.
constexpr int64_t kEntryChain = 128;

// A tile of columns of the rows that a block's entries name: in place, or copied together. Rows of a matrix that lie a
// multiple of 1 KB apart share few sets of the caches, and each is in a page of its own: copied, products of 1,024 x
// 4,096 entries of which 5 % are there take 22 instead of 37 ms at D 4096, in float32.
template <class S> struct Slab {
    const S* rows;
    int64_t stride, origin; // of row 0
    const S* row(int32_t index) const { return rows + (index - origin) * stride; }
};

// Times that a row must be read for the copy to be worth it.
constexpr int64_t kPacked = 2;

// Columns [c0, c0 + n) of rows [origin, origin + count), copied to `room` where `entries` of them are read.
template <class S>
inline Slab<S> slab_of(const S* w, int64_t stride, int64_t origin, int64_t count, int64_t c0, int64_t n, int64_t pitch,
                       int64_t entries, S* room) {
    const S* from = w + origin * stride + c0;
    if (entries < kPacked * count)
        return {from, stride, origin};
    for (int64_t j = 0; j < count; ++j)
        memcpy(room + j * pitch, from + j * stride, n * sizeof(S));
    return {room, pitch, origin};
}

// Sums of a tile of columns over some of a row's entries, in float32.
template <class S, int N> struct Tile {
    static constexpr int kColumns = N * V::W;
    static void add(const Slab<S>& slab, const int32_t* index, const S* values, int64_t count, int64_t n, float* out) {
        typename V::F sum[N];
        for (auto& s : sum)
            s = V::zero();
        for (int64_t e = 0; e < count; ++e) {
            const S* row = slab.row(index[e]);
            const typename V::F value = V::set1(widen(values[e]));
            if (N == 1 && n < V::W) {
                sum[0] = V::fma(value, V::load_n(row, n), sum[0]);
                continue;
            }
            for (int i = 0; i < N; ++i)
                sum[i] = V::fma(value, V::load(row + i * V::W), sum[i]);
        }
        for (int i = 0; i < N; ++i)
            V::store(out + i * V::W, sum[i]);
    }
};

#if defined(SPARSEMLP_DPBF16)
// Two rows at a time: their values interleaved are the pairs that VDPBF16PS multiplies and adds.
template <int N> struct Tile<bf16, N> {
    static constexpr int kUnits = N > 1 ? N / 2 : 1; // of 32 columns
    static constexpr int kColumns = kUnits * 32;
    static __m512i load(const bf16* row, int64_t n) {
        return n >= 32 ? _mm512_loadu_si512(row)
                       : _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), row);
    }
    static void add(const Slab<bf16>& slab, const int32_t* index, const bf16* values, int64_t count, int64_t n,
                    float* out) {
        const int64_t part = N > 1 ? 32 : n;
        __m512 low[kUnits], high[kUnits];
        for (int i = 0; i < kUnits; ++i)
            low[i] = high[i] = _mm512_setzero_ps();
        const auto both = [&](int i, __m512i a, __m512i b, __m512i pair) {
            const __m512bh v = (__m512bh)pair;
            low[i] = _mm512_dpbf16_ps(low[i], (__m512bh)_mm512_unpacklo_epi16(a, b), v);
            high[i] = _mm512_dpbf16_ps(high[i], (__m512bh)_mm512_unpackhi_epi16(a, b), v);
        };
        int64_t e = 0;
        for (; e + 2 <= count; e += 2) {
            const bf16 *left = slab.row(index[e]), *right = slab.row(index[e + 1]);
            int32_t pair;
            memcpy(&pair, values + e, sizeof pair);
            for (int i = 0; i < kUnits; ++i)
                both(i, load(left + 32 * i, part), load(right + 32 * i, part), _mm512_set1_epi32(pair));
        }
        if (e < count)
            for (int i = 0; i < kUnits; ++i)
                both(i, load(slab.row(index[e]) + 32 * i, part), _mm512_setzero_si512(),
                     _mm512_set1_epi32(values[e].bits));
        // In each 128-bit lane `low` has the first four of eight columns and `high` the others.
        const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int i = 0; i < kUnits; ++i) {
            _mm512_storeu_ps(out + 32 * i, _mm512_permutex2var_ps(low[i], front, high[i]));
            _mm512_storeu_ps(out + 32 * i + 16, _mm512_permutex2var_ps(low[i], back, high[i]));
        }
    }
};
#endif

template <class S, int N>
inline void chains(const Slab<S>& slab, const int32_t* index, const S* values, int64_t count, int64_t n, float* out) {
    constexpr int64_t kColumns = Tile<S, N>::kColumns;
    if (count <= kEntryChain)
        return Tile<S, N>::add(slab, index, values, count, n, out);
    float more[kColumns];
    for (int64_t e = 0; e < count; e += kEntryChain) {
        const int64_t some = e + kEntryChain < count ? kEntryChain : count - e;
        Tile<S, N>::add(slab, index + e, values + e, some, n, e == 0 ? out : more);
        for (int64_t i = 0; e != 0 && i < kColumns; ++i)
            out[i] += more[i];
    }
}

constexpr int kTileVecs = V::kPanelVecs > 1 ? 8 : 4; // accumulators of a tile

// Columns [c0, c0 + n) of rows [begin, end).
template <class S, int N>
void gather_columns(const GatherCall& call, int64_t begin, int64_t end, int64_t c0, int64_t n, float* scratch) {
    constexpr int64_t kColumns = Tile<S, N>::kColumns;
    static_assert(kColumns * sizeof(S) <= kSlabBytes && kColumns <= kGatherMost);
    float found[kColumns];
    S* room = static_cast<S*>(static_cast<void*>(scratch));
    float* sums = scratch + kSlabFloats;
    for (int k = 0; k < call.count; ++k) {
        const Term& term = call.terms[k];
        const Lists& lists = term.lists;
        const S* values = static_cast<const S*>(term.values);
        for (int64_t b = 0; b < lists.blocks; ++b) {
            const bool first = k == 0 && b == 0, last = k + 1 == call.count && b + 1 == lists.blocks;
            const int64_t* start = lists.start + b * lists.rows;
            const Slab<S> slab = slab_of(static_cast<const S*>(term.w), term.stride, b * kListBlock, lists.width(b), c0,
                                         n, kColumns, start[end] - start[begin], room);
            for (int64_t r = begin; r < end; ++r) {
                float* held = sums + (r - begin) * kColumns;
                if (start[r] == start[r + 1] && !first && !last)
                    continue;
                chains<S, N>(slab, lists.index + start[r], values + start[r], start[r + 1] - start[r], n, found);
                if (first && call.bias != nullptr)
                    for (int64_t i = 0; i < n; ++i)
                        found[i] += call.bias[c0 + i];
                if (!first)
                    for (int64_t i = 0; i < kColumns; ++i)
                        found[i] += held[i];
                if (!last) {
                    memcpy(held, found, sizeof found);
                    continue;
                }
                S* out = static_cast<S*>(call.out) + r * call.width + c0;
                for (int64_t i = 0; i < n; ++i)
                    narrow(found[i], out + i);
            }
        }
    }
}

template <class S> int64_t run_tiles(int64_t width) {
    constexpr int64_t kWide = Tile<S, kTileVecs>::kColumns;
    return (width + kWide - 1) / kWide;
}

template <class S> void run_gather(const GatherCall& call, int64_t tile, int64_t begin, int64_t end, float* scratch) {
    constexpr int64_t kWide = Tile<S, kTileVecs>::kColumns, kOne = Tile<S, 1>::kColumns;
    int64_t c = tile * kWide;
    const int64_t stop = c + kWide < call.width ? c + kWide : call.width;
    if (stop - c == kWide)
        return gather_columns<S, kTileVecs>(call, begin, end, c, kWide, scratch);
    for (; c < stop; c += kOne)
        gather_columns<S, 1>(call, begin, end, c, stop - c < kOne ? stop - c : kOne, scratch);
}

// Dots of columns [c0, c0 + N steps), or of the last n of a row, are added to what is there, or are the first.
template <class S, int N>
void dot_columns(const DotsCall& call, int64_t b, int64_t begin, int64_t end, int64_t c0, int64_t n, float* scratch) {
    using D = Dot<S>;
    static_assert(N * D::STEP * sizeof(S) <= kSlabBytes);
    const int64_t* start = call.lists.start + b * call.lists.rows;
    const int32_t* index = call.lists.index;
    const Slab<S> slab = slab_of(static_cast<const S*>(call.w), call.stride, b * kListBlock, call.lists.width(b), c0, n,
                                 N * D::STEP, start[end] - start[begin], static_cast<S*>(static_cast<void*>(scratch)));
    const auto row_dot = [&](const S* row, const typename D::X* left) {
        typename V::F sum = V::zero();
        if (N == 1 && n < D::STEP)
            return D::mac(sum, D::load_n(row, n), left[0]);
        for (int i = 0; i < N; ++i)
            sum = D::mac(sum, D::load(row + i * D::STEP), left[i]);
        return sum;
    };
    for (int64_t r = begin; r < end; ++r) {
        if (start[r] == start[r + 1])
            continue;
        const S* from = static_cast<const S*>(call.left) + r * call.left_stride + c0;
        typename D::X left[N];
        for (int i = 0; i < N; ++i)
            left[i] = N == 1 && n < D::STEP ? D::load_n(from, n) : D::load(from + i * D::STEP);
        int64_t e = start[r];
        const int64_t last = start[r + 1];
        for (; e + 4 <= last; e += 4) {
            typename V::F sums[4];
            for (int k = 0; k < 4; ++k)
                sums[k] = row_dot(slab.row(index[e + k]), left);
            float found[4];
            V::sum4(sums, found);
            for (int k = 0; k < 4; ++k)
                call.out[e + k] = c0 == 0 ? found[k] : call.out[e + k] + found[k];
        }
        for (; e < last; ++e) {
            const float found = V::sum(row_dot(slab.row(index[e]), left));
            call.out[e] = c0 == 0 ? found : call.out[e] + found;
        }
    }
}

template <class S> void run_dots(const DotsCall& call, int64_t begin, int64_t end, float* scratch) {
    constexpr int64_t kStep = Dot<S>::STEP, kWide = kTileVecs * kStep;
    for (int64_t b = 0; b < call.lists.blocks; ++b) {
        int64_t c = 0;
        for (; c + kWide <= call.width; c += kWide)
            dot_columns<S, kTileVecs>(call, b, begin, end, c, kWide, scratch);
        for (; c < call.width; c += kStep)
            dot_columns<S, 1>(call, b, begin, end, c, call.width - c < kStep ? call.width - c : kStep, scratch);
    }
}

#define SPARSEMLP_TRAIN_KERNELS(S)                                                                                     \
    {run_masks<S>, run_values<S>, run_multiply<S>, run_total<S>,                                                       \
     run_tiles<S>, run_gather<S>, run_dots<S>,     run_entries<S>}
