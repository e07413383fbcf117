// Scores from low-bit copies for one instruction set. Included inside that unit's target region and anonymous
// namespace, after its vector file, its lanes file and activations.inl; includes nothing itself.
//
// L, of the lanes file, has 16 neurons in its 32-bit lanes. 64 bytes of codes are 4 inputs of each, multiplied with the
// same 4 inputs of a token. A group's sum is an exact integer; then it is scaled and added to a chain over the groups
// in ascending order, whatever the batch: a token's scores have the same bits in every call.

// How many bytes ahead codes are prefetched: without, 4 tokens take 3.5 ms instead of 2.0 (D 4096, F 14336), one
// token 1.9 instead of 1.75; from 4096 to 8192 it makes no difference.
constexpr int64_t kScreenAhead = 6144;

// acc[c] += codes · 4 inputs of token c at x[c] + k.
template <int BITS, int C>
inline void screen_quad(typename L::I (&acc)[C], typename L::Codes codes, const int8_t* const* x, int64_t k) {
    for (int c = 0; c < C; ++c)
        acc[c] = L::template dot<BITS>(acc[c], codes, x[c] + k);
}

// A group's codes · its inputs; returns what follows the codes.
template <int BITS, int C>
inline const uint8_t* screen_group(typename L::I (&acc)[C], const uint8_t* codes, const int8_t* const* x, int64_t k,
                                   int64_t group) {
    if constexpr (BITS == 8) {
        for (int64_t i = 0; i < group; i += 4, codes += 64) {
            V::prefetch(codes + kScreenAhead);
            screen_quad<BITS, C>(acc, L::load(codes), x, k + i);
        }
    } else if constexpr (BITS == 4) {
        for (int64_t i = 0; i < group; i += 8, codes += 64) {
            V::prefetch(codes + kScreenAhead);
            const typename L::Codes both = L::load(codes);
            screen_quad<BITS, C>(acc, L::low(both), x, k + i);
            screen_quad<BITS, C>(acc, L::high(both), x, k + i + 4);
        }
    } else {
        for (int64_t i = 0; i < group; i += 32, codes += 192) {
            for (int64_t line = 0; line < 192; line += 64)
                V::prefetch(codes + kScreenAhead + line);
            const typename L::Codes first = L::load(codes), second = L::load(codes + 64), third = L::load(codes + 128);
            screen_quad<BITS, C>(acc, L::template three<0, 0>(first, third), x, k + i);
            screen_quad<BITS, C>(acc, L::template three<2, 1>(first, third), x, k + i + 4);
            screen_quad<BITS, C>(acc, L::template three<4, 2>(first, third), x, k + i + 8);
            screen_quad<BITS, C>(acc, L::template three<6, 3>(first, third), x, k + i + 12);
            screen_quad<BITS, C>(acc, L::template three<0, 4>(second, third), x, k + i + 16);
            screen_quad<BITS, C>(acc, L::template three<2, 5>(second, third), x, k + i + 20);
            screen_quad<BITS, C>(acc, L::template three<4, 6>(second, third), x, k + i + 24);
            screen_quad<BITS, C>(acc, L::template three<6, 7>(second, third), x, k + i + 28);
        }
    }
    return codes;
}

// out[c][16] = tokens t0 + c · one block's neurons.
template <int BITS, int C>
SPARSEMLP_TILE void screen_tile(const ScreenCall& call, const LowBits& w, int64_t block, int64_t t0, float* out) {
    const int64_t groups = call.groups, group = call.group;
    const uint8_t* codes = w.codes + block * groups * group * BITS * 2;
    const bf16* scale = w.scale + block * groups * kScreenRows;
    const int8_t* x[C];
    typename L::F sum[C];
    for (int c = 0; c < C; ++c) {
        x[c] = call.values + (t0 + c) * groups * group;
        sum[c] = L::zero();
    }
    for (int64_t g = 0; g < groups; ++g) {
        typename L::I acc[C];
        for (int c = 0; c < C; ++c)
            acc[c] = L::set1(call.offset[(t0 + c) * groups + g]);
        if (group == 32) // the usual one, unrolled
            codes = screen_group<BITS, C>(acc, codes, x, g * 32, 32);
        else
            codes = screen_group<BITS, C>(acc, codes, x, g * group, group);
        V::prefetch(scale + (g + 24) * kScreenRows); // as far ahead as the codes
        const typename L::F factor = L::load(scale + g * kScreenRows);
        for (int c = 0; c < C; ++c)
            sum[c] = L::add(sum[c], acc[c], factor, call.unit[(t0 + c) * groups + g]);
    }
    for (int c = 0; c < C; ++c)
        L::store(out + c * kScreenRows, sum[c]);
}

template <int BITS>
void screen_tokens(const ScreenCall& call, const LowBits& w, int64_t block, int64_t t0, int64_t count, float* out) {
    switch (count) {
    case 1:
        return screen_tile<BITS, 1>(call, w, block, t0, out);
    case 2:
        return screen_tile<BITS, 2>(call, w, block, t0, out);
    case 3:
        return screen_tile<BITS, 3>(call, w, block, t0, out);
    default:
        return screen_tile<BITS, 4>(call, w, block, t0, out);
    }
}

// out[count][16]: one weight's outputs, bias added.
template <class S>
void screen_values(const ScreenCall& call, const LowBits& w, int64_t block, int64_t t0, int64_t count, float* out) {
    if (call.bits == 4)
        screen_tokens<4>(call, w, block, t0, count, out);
    else if (call.bits == 8)
        screen_tokens<8>(call, w, block, t0, count, out);
    else
        screen_tokens<3>(call, w, block, t0, count, out);
    if (w.bias == nullptr)
        return;
    const S* bias = static_cast<const S*>(w.bias) + block * kScreenRows;
    const int64_t left = call.neurons - block * kScreenRows, n = left < kScreenRows ? left : kScreenRows;
    for (int64_t c = 0; c < count; ++c)
        for (int64_t i = 0; i < n; ++i)
            out[c * kScreenRows + i] += widen(bias[i]);
}

template <class S> void run_screen_blocks(const ScreenCall& call, int64_t begin, int64_t end) {
    float a[kScreenTokens * kScreenRows], u[kScreenTokens * kScreenRows];
    for (int64_t block = begin; block < end; ++block) {
        const int64_t j0 = block * kScreenRows;
        const int64_t n = call.neurons - j0 < kScreenRows ? call.neurons - j0 : kScreenRows;
        for (int64_t t0 = 0; t0 < call.tokens; t0 += kScreenTokens) {
            const int64_t count = call.tokens - t0 < kScreenTokens ? call.tokens - t0 : kScreenTokens;
            screen_values<S>(call, call.gate, block, t0, count, a);
            screen_values<S>(call, call.up, block, t0, count, u);
            activate(a, count * kScreenRows, call.activation, call.params);
            for (int64_t c = 0; c < count; ++c)
                for (int64_t i = 0; i < n; ++i)
                    call.out[(t0 + c) * call.neurons + j0 + i] = a[c * kScreenRows + i] * u[c * kScreenRows + i];
        }
    }
}

// The largest magnitude of a group, NaN where one is inf or NaN.
inline float screen_largest(const float* x, int64_t group) {
    Lanes most{};
    Ints odd{};
    for (int64_t i = 0; i < group; i += kLanes) {
        const Lanes size = absolute(load(x + i));
        most = select(size > most, size, most);
        odd |= ~(Ints)(size <= splat(3.402823466e38f));
    }
    float largest = 0.f;
    int32_t any = 0;
    for (int i = 0; i < kLanes; ++i) {
        largest = most[i] > largest ? most[i] : largest;
        any |= odd[i];
    }
    return any != 0 ? __builtin_nanf("") : largest;
}

// A token as integers: 127 steps up to a group's largest magnitude. Not a number where that is inf or NaN.
template <class S> void run_screen_quantize(const ScreenCall& call, int64_t token) {
    const S* x = static_cast<const S*>(call.x) + token * call.x_stride;
    float wide[kMostGroup];
    for (int64_t g = 0; g < call.groups; ++g) {
        const int64_t at = token * call.groups + g, k0 = g * call.group;
        const int64_t n = call.width - k0 < call.group ? call.width - k0 : call.group;
        int8_t* values = call.values + at * call.group;
        for (int64_t i = 0; i < n; ++i)
            wide[i] = widen(x[k0 + i]);
        for (int64_t i = n; i < call.group; ++i)
            wide[i] = 0.f;
        const float most = screen_largest(wide, call.group);
        if (!(most >= 7.88860905e-31f)) { // 2^-100
            memset(values, 0, call.group);
            call.offset[at] = 0;
            call.unit[at] = most == most ? 0.f : most;
            continue;
        }
        const float factor = 127.f / most;
        typename L::I total = L::set1(0);
        for (int64_t i = 0; i < call.group; i += 16)
            total = L::integers(total, wide + i, factor, values + i);
        call.offset[at] = -L::sum(total) * (1 << (call.bits - 1));
        call.unit[at] = most / 127.f;
    }
}

#define SPARSEMLP_SCREEN_TABLE                                                                                         \
    {                                                                                                                  \
        {run_screen_quantize<float>, run_screen_blocks<float>}, {run_screen_quantize<bf16>, run_screen_blocks<bf16>},  \
        {                                                                                                              \
            run_screen_quantize<f16>, run_screen_blocks<f16>                                                           \
        }                                                                                                              \
    }
