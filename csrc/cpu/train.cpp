// The MLPs' training operators for CPU tensors, beside PyTorch's dense products: patterns as bits, lists of entries,
// and products with what they name. Checks what could make a kernel read out of bounds.
#include "train.h"

#include <algorithm>
#include <atomic>
#include <tuple>

#include "cpu.h"
#include "lists.h"
#include "mlp_run.h"

namespace sparsemlp {
namespace {

const TrainKernels& kernels(int64_t isa, Dtype dtype) {
#if defined(__x86_64__)
    static const TrainTable* const tables[] = {&train_portable, &train_avx2, &train_avx512, &train_avx512bf16};
#else
    static const TrainTable* const tables[] = {&train_portable};
#endif
    STD_TORCH_CHECK(isa >= 0 && isa <= sparsemlp_cpu_isa(), "isa ", isa, " is not one this CPU runs");
    return (*tables[isa])[static_cast<int>(dtype)];
}

void check_matrix(const Tensor& t, const char* name, int64_t count, int64_t width, ScalarType type) {
    int64_t stride = 0;
    rows(t, name, count, width, type, &stride);
    STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

Stored stored(const Tensor& pre, const OptionalTensor& up, const MlpOptions& options, int64_t indicator) {
    STD_TORCH_CHECK(pre.dim() == 2, "pre must be (T, F)");
    Stored s{pre.size(0), pre.size(1), nullptr, nullptr, {}};
    check_matrix(pre, "pre", s.tokens, s.neurons, pre.scalar_type());
    STD_TORCH_CHECK(s.tokens <= INT32_MAX && s.neurons <= INT32_MAX, "at most 2^31 - 1 tokens and neurons");
    STD_TORCH_CHECK(indicator >= 0 && indicator <= static_cast<int64_t>(Indicator::product), "unknown indicator");
    s.pre = pre.const_data_ptr();
    if (up.has_value()) {
        check_matrix(*up, "up", s.tokens, s.neurons, pre.scalar_type());
        s.up = up->const_data_ptr();
    }
    const auto by = up.has_value() ? static_cast<Indicator>(indicator) : Indicator::none;
    s.rule = thresholding(options, by, s.tokens, s.neurons);
    bool valid = true;
    for (int64_t j = 0; j < (s.rule.threshold_step == 0 ? 1 : s.neurons); ++j)
        valid &= s.rule.threshold[j] >= 0.f;
    STD_TORCH_CHECK(valid, kBadThreshold);
    return s;
}

const uint64_t* bits_of(const Tensor& bits, const Stored& s) {
    STD_TORCH_CHECK(bits.is_cpu() && bits.scalar_type() == ScalarType::Long && bits.is_contiguous() &&
                        bits.numel() == 2 * s.tokens * words_of(s.neurons),
                    "bits must be those of pre");
    return static_cast<const uint64_t*>(bits.const_data_ptr());
}

// What a thread found in its tokens: entries that are active, moving and both, and which neurons have any.
struct Found {
    int64_t counts[3] = {0, 0, 0};
    std::vector<uint64_t> any;
    void add(const uint64_t* a, const uint64_t* d, int64_t words) {
        for (int64_t w = 0; w < words; ++w) {
            counts[0] += __builtin_popcountll(a[w]);
            counts[1] += __builtin_popcountll(d[w]);
            counts[2] += __builtin_popcountll(a[w] & d[w]);
            any[w] |= a[w];
            any[words + w] |= d[w];
        }
    }
};

// The patterns of every `step`th token, as bits where there is room for them.
Found find(const TrainKernels& kernel, const Stored& s, int64_t step, uint64_t* bits) {
    const int64_t words = words_of(s.neurons), slots = torch::stable::get_num_threads();
    const int64_t tokens = (s.tokens + step - 1) / step;
    std::vector<Found> found(slots);
    torch::stable::parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t slot = begin; slot < end; ++slot) {
            found[slot].any.assign(2 * words, 0);
            std::vector<uint64_t> own(2 * words);
            for (int64_t i = tokens * slot / slots; i < tokens * (slot + 1) / slots; ++i) {
                const int64_t t = i * step;
                uint64_t* a = bits != nullptr ? bits + t * words : own.data();
                uint64_t* d = bits != nullptr ? bits + (s.tokens + t) * words : own.data() + words;
                kernel.masks(s, t, a, d);
                found[slot].add(a, d, words);
            }
        }
    });
    for (int64_t slot = 1; slot < slots; ++slot) {
        for (int i = 0; i < 3; ++i)
            found[0].counts[i] += found[slot].counts[i];
        for (int64_t w = 0; w < 2 * words; ++w)
            found[0].any[w] |= found[slot].any[w];
    }
    return found[0];
}

constexpr int64_t kSampled = 16; // every such token is looked at first

// The bits [2, T, words] of active and moving entries; how many there are of each and of both at once; and which
// neurons have any, [2, F]. Where a sample of tokens has more than `enough` of all entries both active and moving, and
// of every neuron some, the bits are empty and the counts those of the sample, times what it stands for: 0.1 instead of
// 1.1 ms for 2,048 tokens of 3,072 neurons.
std::tuple<Tensor, Tensor, Tensor> masks(Tensor pre, OptionalTensor up, Tensor threshold, OptionalTensor token_scale,
                                         OptionalTensor skipped_mean, OptionalTensor activation_params,
                                         int64_t activation, int64_t indicator, double enough, int64_t isa) {
    const Stored s = stored(pre, up, {threshold, token_scale, skipped_mean, activation_params, activation}, indicator);
    const TrainKernels& kernel = kernels(isa, dtype_of(pre));
    const int64_t words = words_of(s.neurons);
    const Tensor counts = torch::stable::empty({3}, ScalarType::Long);
    const Tensor living = torch::stable::empty({2, s.neurons}, ScalarType::Bool);
    const auto result = [&](const Tensor& bits, const Found& found, int64_t times) {
        for (int i = 0; i < 3; ++i)
            static_cast<int64_t*>(counts.mutable_data_ptr())[i] = found.counts[i] * times;
        bool* lives = static_cast<bool*>(living.mutable_data_ptr());
        for (int64_t i = 0; i < 2 * s.neurons; ++i)
            lives[i] = found.any[i / s.neurons * words + i % s.neurons / 64] >> (i % s.neurons % 64) & 1;
        return std::tuple{bits, counts, living};
    };
    const auto all = [&](const Found& found) {
        int64_t living = 0;
        for (const uint64_t word : found.any)
            living += __builtin_popcountll(word);
        return living == 2 * s.neurons;
    };
    if (s.tokens >= 8 * kSampled) {
        const Found some = find(kernel, s, kSampled, nullptr);
        const int64_t tokens = (s.tokens + kSampled - 1) / kSampled;
        if (static_cast<double>(some.counts[2]) > enough * static_cast<double>(tokens * s.neurons) && all(some))
            return result(torch::stable::empty({0}, ScalarType::Long), some, kSampled);
    }
    const Tensor bits = torch::stable::empty({2, s.tokens, words}, ScalarType::Long);
    return result(bits, find(kernel, s, 1, static_cast<uint64_t*>(bits.mutable_data_ptr())), 1);
}

// Whether all entries of a contiguous tensor are finite.
bool finite(Tensor t) {
    STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous(), "t must be a contiguous CPU tensor");
    constexpr int64_t kRow = 1024;
    const Dtype dtype = dtype_of(t);
    const int64_t whole = t.numel() / kRow, rest = t.numel() % kRow, bytes = dtype == Dtype::f32 ? 4 : 2;
    const char* data = static_cast<const char*>(t.const_data_ptr());
    return !any_not_finite(data, whole, kRow, kRow, dtype) &&
           !any_not_finite(data + whole * kRow * bytes, 1, rest, rest, dtype);
}

// A list with values of its entries, computed for every token.
struct Valued {
    EntryLists lists;
    Tensor hidden, by_pre, by_up; // empty where not wanted
};

Valued valued(const TrainKernels& kernel, const Stored& s, EntryLists lists, ScalarType type, bool hidden, bool by_pre,
              bool by_up) {
    const auto room = [&](bool wanted, ScalarType t) {
        return torch::stable::empty({wanted ? lists.count() : int64_t{0}}, t);
    };
    Valued v{lists, room(hidden, type), room(by_pre, ScalarType::Float), room(by_up, ScalarType::Float)};
    const Lists from = v.lists.view();
    const int64_t bytes = type == ScalarType::Float ? 4 : 2;
    char* h = hidden ? static_cast<char*>(v.hidden.mutable_data_ptr()) : nullptr;
    float* pre = by_pre ? static_cast<float*>(v.by_pre.mutable_data_ptr()) : nullptr;
    float* up = by_up ? static_cast<float*>(v.by_up.mutable_data_ptr()) : nullptr;
    torch::stable::parallel_for(0, s.tokens, 16, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t b = 0; b < from.blocks; ++b) {
                const int64_t e = from.start[b * from.rows + t], n = from.start[b * from.rows + t + 1] - e;
                kernel.values(s, t, from.index + e, n, h != nullptr ? h + e * bytes : nullptr,
                              pre != nullptr ? pre + e : nullptr, up != nullptr ? up + e : nullptr);
            }
    });
    return v;
}

Term term(const EntryLists& lists, const Tensor& values, const Tensor& w, const char* name, int64_t width) {
    Term t{lists.view(), values.const_data_ptr(), nullptr, 0};
    t.w = rows(w, name, lists.columns, width, values.scalar_type(), &t.stride);
    return t;
}

// Σ over the entries of every row of the first term's lists, (rows, width).
Tensor gathered(const TrainKernels& kernel, const EntryLists& lists, GatherCall call, ScalarType type) {
    const Tensor out = torch::stable::empty({lists.rows, call.width}, type);
    call.out = out.mutable_data_ptr();
    const Tensor scratch = torch::stable::empty({lists.rows * kGatherMost}, ScalarType::Float);
    float* held = static_cast<float*>(scratch.mutable_data_ptr());
    each_share(lists, [&](int64_t, int64_t begin, int64_t end) {
        kernel.gather(call, begin, end, held + begin * kGatherMost);
    });
    return out;
}

Tensor gathered(const TrainKernels& kernel, const EntryLists& lists, const Term& one, int64_t width, ScalarType type) {
    GatherCall call{};
    call.terms[0] = one;
    call.count = 1;
    call.width = width;
    return gathered(kernel, lists, call, type);
}

// h's product with w_out_t, and what is added to it.
Tensor forward(Tensor bits, Tensor pre, OptionalTensor up, Tensor threshold, OptionalTensor token_scale,
               OptionalTensor skipped_mean, OptionalTensor activation_params, int64_t activation, int64_t indicator,
               Tensor w_out_t, OptionalTensor b_out, OptionalTensor skipped_out, int64_t isa) {
    const Stored s = stored(pre, up, {threshold, token_scale, skipped_mean, activation_params, activation}, indicator);
    const ScalarType type = pre.scalar_type();
    const TrainKernels& kernel = kernels(isa, dtype_of(pre));
    STD_TORCH_CHECK(w_out_t.dim() == 2, "w_out_t must be (F, D)");
    const int64_t width = w_out_t.size(1);
    const Valued v = valued(kernel, s, lists_of(bits_of(bits, s), s.tokens, s.neurons), type, true, false, false);
    GatherCall call{};
    call.terms[0] = term(v.lists, v.hidden, w_out_t, "w_out_t", width);
    call.count = 1;
    call.width = width;
    const float *b = floats(b_out, "b_out", width), *shift = floats(skipped_out, "skipped_out", width);
    std::vector<float> bias(width, 0.f);
    for (int64_t d = 0; d < width; ++d)
        bias[d] = (b != nullptr ? b[d] : 0.f) + (shift != nullptr ? shift[d] : 0.f);
    call.bias = bias.data();
    return gathered(kernel, v.lists, call, type);
}

// ∂ℓ/∂h at every entry of a token's list, unrounded.
Tensor dots(const TrainKernels& kernel, const EntryLists& lists, const Tensor& grad, const Tensor& w_out_t) {
    const Tensor out = torch::stable::empty({lists.count()}, ScalarType::Float);
    DotsCall call{lists.view(), nullptr, 0, nullptr, 0, w_out_t.size(1), static_cast<float*>(out.mutable_data_ptr())};
    call.left = rows(grad, "grad", lists.rows, call.width, grad.scalar_type(), &call.left_stride);
    call.w = rows(w_out_t, "w_out_t", lists.columns, call.width, grad.scalar_type(), &call.stride);
    if (call.width == 0)
        std::fill_n(call.out, lists.count(), 0.f);
    each_share(lists, [&](int64_t, int64_t begin, int64_t end) { kernel.dots(call, begin, end); });
    return out;
}

Tensor multiplied(const TrainKernels& kernel, const Tensor& a, const Tensor& b, ScalarType type) {
    const Tensor out = torch::stable::empty({a.numel()}, type);
    const int64_t bytes = type == ScalarType::Float ? 4 : 2;
    const float *left = static_cast<const float*>(a.const_data_ptr()),
                *right = static_cast<const float*>(b.const_data_ptr());
    char* to = static_cast<char*>(out.mutable_data_ptr());
    torch::stable::parallel_for(0, a.numel(), 4096, [&](int64_t begin, int64_t end) {
        kernel.multiply(left + begin, right + begin, end - begin, to + begin * bytes);
    });
    return out;
}

// Σ over the entries of every row, times a sign: (rows), of `type`, float32 or that of the values.
Tensor totals(const TrainKernels& kernel, const EntryLists& lists, const Tensor& values, const TrainKernels& rounding,
              ScalarType type, float sign) {
    const Tensor out = torch::stable::empty({lists.rows}, type);
    const int64_t size = values.scalar_type() == ScalarType::Float ? 4 : 2, bytes = type == ScalarType::Float ? 4 : 2;
    const char* from = static_cast<const char*>(values.const_data_ptr());
    char* to = static_cast<char*>(out.mutable_data_ptr());
    torch::stable::parallel_for(0, lists.rows, 64, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float sum = 0.f;
            for (int64_t b = 0; b < lists.blocks; ++b) {
                const int64_t e = lists.start[b * lists.rows + r], n = lists.start[b * lists.rows + r + 1] - e;
                sum += kernel.total(from + e * size, n);
            }
            rounding.multiply(&sum, &sign, 1, to + r * bytes);
        }
    });
    return out;
}

// What `wanted` asks for, a bit each; the order of the results.
enum Wanted : int64_t { kX, kGate, kUp, kOut, kGateBias, kUpBias, kMean, kWanted };

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct Backward {
    const TrainKernels& kernel;
    const TrainKernels& floats;
    const Stored& s;
    const Tensor &grad, &x, &w_gate, &w_out_t;
    const OptionalTensor& w_up;
    ScalarType type;
    int64_t wanted, width;
    std::vector<Tensor> made;

    bool asks(int64_t what) const { return (wanted >> what & 1) != 0; }
    bool asks_up() const { return s.up != nullptr && (asks(kX) || asks(kUp) || asks(kUpBias)); }
    bool asks_moving() const { return asks(kX) || asks(kGate) || asks(kGateBias); }
    int64_t bytes() const { return type == ScalarType::Float ? 4 : 2; }
    Tensor room(const Tensor& like) const { return torch::stable::empty({like.numel()}, like.scalar_type()); }

    // The moving entries' ∂ℓ/∂p and the active ones' h and ∂ℓ/∂u; one list where they are the same.
    void run(const uint64_t* bits, bool same) {
        const bool active = asks(kOut) || asks(kMean) || asks_up();
        const uint64_t* moving_bits = bits + s.tokens * words_of(s.neurons);
        std::optional<Valued> a, d;
        if (active || (same && asks_moving()))
            a = valued(kernel, s, lists_of(bits, s.tokens, s.neurons), type, asks(kOut), same && asks_moving(),
                       asks_up());
        if (!same && asks_moving())
            d = valued(kernel, s, lists_of(moving_bits, s.tokens, s.neurons), type, false, true, false);
        std::optional<Tensor> dots_a;
        if (a.has_value() && (asks(kMean) || asks_up() || (same && asks_moving())))
            dots_a = dots(kernel, a->lists, grad, w_out_t);
        std::optional<Tensor> to_up, to_pre;
        if (asks_up())
            to_up = multiplied(kernel, *dots_a, a->by_up, type);
        if (asks_moving())
            to_pre = same ? multiplied(kernel, *dots_a, a->by_pre, type)
                          : multiplied(kernel, dots(kernel, d->lists, grad, w_out_t), d->by_pre, type);
        const EntryLists* moving = !asks_moving() ? nullptr : same ? &a->lists : &d->lists;
        if (asks(kX))
            by_token(*moving, *to_pre, a.has_value() ? &a->lists : nullptr, to_up);
        if (same || !asks_moving())
            by_neuron(a.has_value() ? &a->lists : nullptr, asks(kOut) ? &a->hidden : nullptr, to_up, to_pre, dots_a);
        else {
            by_neuron(a.has_value() ? &a->lists : nullptr, asks(kOut) ? &a->hidden : nullptr, to_up, {}, dots_a);
            by_neuron(moving, nullptr, {}, to_pre, {});
        }
    }

    void by_token(const EntryLists& moving, const Tensor& to_pre, const EntryLists* active,
                  const std::optional<Tensor>& to_up) {
        GatherCall call{};
        call.width = width;
        call.terms[call.count++] = term(moving, to_pre, w_gate, "w_gate", width);
        if (to_up.has_value())
            call.terms[call.count++] = term(*active, *to_up, *w_up, "w_up", width);
        made[kX] = gathered(kernel, moving, call, type);
    }

    void by_neuron(const EntryLists* lists, const Tensor* hidden, const std::optional<Tensor>& to_up,
                   const std::optional<Tensor>& to_pre, const std::optional<Tensor>& dots) {
        std::vector<Moved> moves;
        std::vector<Tensor> kept;
        const auto moved = [&](const Tensor* from) -> Tensor {
            kept.push_back(room(*from));
            const int64_t size = from->scalar_type() == ScalarType::Float ? 4 : 2;
            moves.push_back({from->const_data_ptr(), kept.back().mutable_data_ptr(), size});
            return kept.back();
        };
        std::optional<Tensor> h, up, pre, mean;
        if (hidden != nullptr)
            h = moved(hidden);
        if (to_up.has_value() && (asks(kUp) || asks(kUpBias)))
            up = moved(&*to_up);
        if (to_pre.has_value() && (asks(kGate) || asks(kGateBias)))
            pre = moved(&*to_pre);
        if (dots.has_value() && asks(kMean))
            mean = moved(&*dots);
        if (moves.empty())
            return;
        const EntryLists columns = transposed(*lists, moves);
        const auto product = [&](int64_t what, const std::optional<Tensor>& values, const Tensor& w, const char* name) {
            if (values.has_value() && asks(what))
                made[what] = gathered(kernel, columns, term(columns, *values, w, name, width), width, type);
        };
        product(kOut, h, grad, "grad");
        product(kUp, up, x, "x");
        product(kGate, pre, x, "x");
        if (pre.has_value() && asks(kGateBias))
            made[kGateBias] = totals(kernel, columns, *pre, kernel, type, 1.f);
        if (up.has_value() && asks(kUpBias))
            made[kUpBias] = totals(kernel, columns, *up, kernel, type, 1.f);
        if (mean.has_value())
            made[kMean] = totals(floats, columns, *mean, floats, ScalarType::Float, -1.f);
    }
};

// Gradients of x, w_gate, w_up, w_out_t, b_gate, b_up, skipped_mean; an ungated MLP's w_in and b_in are the gate's.
Gradients backward(Tensor bits, bool same, Tensor grad, Tensor x, Tensor w_gate, OptionalTensor w_up, Tensor w_out_t,
                   Tensor pre, OptionalTensor up, Tensor threshold, OptionalTensor token_scale,
                   OptionalTensor skipped_mean, OptionalTensor activation_params, int64_t activation, int64_t indicator,
                   int64_t wanted, int64_t isa) {
    const Stored s = stored(pre, up, {threshold, token_scale, skipped_mean, activation_params, activation}, indicator);
    const ScalarType type = pre.scalar_type();
    STD_TORCH_CHECK(x.dim() == 2 && grad.scalar_type() == type && x.scalar_type() == type &&
                        w_up.has_value() == up.has_value(),
                    "grad, x and pre must be of one dtype");
    const Tensor none = torch::stable::empty({0}, type), no_mean = torch::stable::empty({0}, ScalarType::Float);
    Backward work{kernels(isa, dtype_of(pre)),
                  kernels(isa, Dtype::f32),
                  s,
                  grad,
                  x,
                  w_gate,
                  w_out_t,
                  w_up,
                  type,
                  wanted,
                  x.size(1),
                  {none, none, none, none, none, none, no_mean}};
    work.run(bits_of(bits, s), same);
    auto& made = work.made;
    return {made[kX], made[kGate], made[kUp], made[kOut], made[kGateBias], made[kUpBias], made[kMean]};
}

// Between dense products: ∂ℓ/∂h in `grad_hidden` becomes ∂ℓ/∂p; returns ∂ℓ/∂u (empty without a gate) and, where wanted,
// h.
std::tuple<Tensor, Tensor> entries(Tensor grad_hidden, Tensor pre, OptionalTensor up, Tensor threshold,
                                   OptionalTensor token_scale, OptionalTensor skipped_mean,
                                   OptionalTensor activation_params, int64_t activation, int64_t indicator, bool hidden,
                                   int64_t isa) {
    const Stored s = stored(pre, up, {threshold, token_scale, skipped_mean, activation_params, activation}, indicator);
    const ScalarType type = pre.scalar_type();
    check_matrix(grad_hidden, "grad_hidden", s.tokens, s.neurons, type);
    const auto room = [&](bool wanted) {
        return torch::stable::empty(wanted ? std::vector<int64_t>{s.tokens, s.neurons} : std::vector<int64_t>{0}, type);
    };
    const Tensor grad_up = room(s.up != nullptr), h = room(hidden);
    EntriesCall call{s, grad_hidden.const_data_ptr(), grad_hidden.mutable_data_ptr(),
                     s.up != nullptr ? grad_up.mutable_data_ptr() : nullptr, hidden ? h.mutable_data_ptr() : nullptr};
    const TrainKernels& kernel = kernels(isa, dtype_of(pre));
    torch::stable::parallel_for(0, s.tokens, 4, [&](int64_t begin, int64_t end) { kernel.entries(call, begin, end); });
    return {grad_up, h};
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) {
    m.impl("_finite_native", TORCH_BOX(&sparsemlp::finite));
    m.impl("_train_masks_native", TORCH_BOX(&sparsemlp::masks));
    m.impl("_train_forward_native", TORCH_BOX(&sparsemlp::forward));
    m.impl("_train_backward_native", TORCH_BOX(&sparsemlp::backward));
    m.impl("_train_entries_native", TORCH_BOX(&sparsemlp::entries));
}
