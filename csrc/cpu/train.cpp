// The MLPs' training operators for CPU tensors, beside PyTorch's dense products: patterns as bits, lists of entries,
// and products with what they name. Checks what could make a kernel read out of bounds.
#include "train_run.h"

#include <algorithm>
#include <tuple>

#include "lists.h"

namespace sparsemlp {
namespace {

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
    // A task is a tile of columns and a share of the rows. Whole columns, if there are enough: then a slab is copied
    // once.
    const int64_t tiles = kernel.tiles(call.width), threads = torch::stable::get_num_threads();
    int64_t shares = 1;
    while (shares < threads && tiles * shares % threads != 0 && tiles * shares < 4 * threads)
        ++shares;
    const std::vector<int64_t> edges = shares_of(lists, shares);
    torch::stable::parallel_for(0, tiles * shares, 1, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
            const int64_t first = edges[task % shares], last = edges[task % shares + 1];
            const Tensor scratch =
                torch::stable::empty({kSlabFloats + (last - first) * kGatherMost}, ScalarType::Float);
            kernel.gather(call, task / shares, first, last, static_cast<float*>(scratch.mutable_data_ptr()));
        }
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
    const TrainKernels& kernel = train_kernels(isa, dtype_of(pre));
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
    const int64_t shares = torch::stable::get_num_threads();
    const std::vector<int64_t> edges = shares_of(lists, shares);
    const Tensor scratch = torch::stable::empty({shares * kSlabFloats}, ScalarType::Float);
    float* slabs = static_cast<float*>(scratch.mutable_data_ptr());
    torch::stable::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s)
            kernel.dots(call, edges[s], edges[s + 1], slabs + s * kSlabFloats);
    });
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
            double sum = 0.;
            for (int64_t b = 0; b < lists.blocks; ++b) {
                const int64_t e = lists.start[b * lists.rows + r], n = lists.start[b * lists.rows + r + 1] - e;
                sum += kernel.total(from + e * size, n);
            }
            const float rounded = static_cast<float>(sum);
            rounding.multiply(&rounded, &sign, 1, to + r * bytes);
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
    const uint64_t* first; // bits, those of active entries
    std::vector<Tensor> made;

    bool asks(int64_t what) const { return (wanted >> what & 1) != 0; }
    bool asks_up() const { return s.up != nullptr && (asks(kX) || asks(kUp) || asks(kUpBias)); }
    bool asks_moving() const { return asks(kX) || asks(kGate) || asks(kGateBias); }

    // What is known of a list's entries; its parts are let go as soon as they are used.
    struct Known {
        EntryLists lists;
        std::optional<Tensor> hidden, to_pre, to_up, dots;
    };

    // The active entries' h and ∂ℓ/∂u and the moving ones' ∂ℓ/∂p; in one list where they are the same.
    void run(bool same) {
        const bool active = asks(kOut) || asks(kMean) || asks_up(), moving = asks_moving();
        const uint64_t* moving_bits = first + s.tokens * words_of(s.neurons);
        std::optional<Known> a, d;
        if (active || (same && moving))
            a = known(first, asks(kOut), same && moving, asks_up());
        if (!same && moving)
            d = known(moving_bits, false, true, false);
        Known* moves = !moving ? nullptr : same ? &*a : &*d;
        if (asks(kX))
            by_token(*moves, asks_up() ? &*a : nullptr);
        if (a.has_value())
            by_neuron(std::move(*a));
        if (d.has_value())
            by_neuron(std::move(*d));
    }

    Known known(const uint64_t* bits, bool hidden, bool pre, bool up) const {
        Valued v = valued(kernel, s, lists_of(bits, s.tokens, s.neurons), type, hidden, pre, up);
        Known k{std::move(v.lists), {}, {}, {}, {}};
        if (hidden)
            k.hidden = v.hidden;
        if (pre || up || asks(kMean))
            k.dots = dots(kernel, k.lists, grad, w_out_t);
        if (pre)
            k.to_pre = multiplied(kernel, *k.dots, v.by_pre, type);
        if (up)
            k.to_up = multiplied(kernel, *k.dots, v.by_up, type);
        if (!asks(kMean) || bits != first)
            k.dots.reset();
        return k;
    }

    void by_token(const Known& moving, const Known* active) {
        GatherCall call{};
        call.width = width;
        call.terms[call.count++] = term(moving.lists, *moving.to_pre, w_gate, "w_gate", width);
        if (active != nullptr)
            call.terms[call.count++] = term(active->lists, *active->to_up, *w_up, "w_up", width);
        made[kX] = gathered(kernel, moving.lists, call, type);
    }

    void by_neuron(Known k) {
        std::vector<Moved> moves;
        const auto moved = [&](std::optional<Tensor>& values, bool wanted) {
            if (!values.has_value() || !wanted) {
                values.reset();
                return std::optional<Tensor>{};
            }
            const Tensor to = torch::stable::empty({values->numel()}, values->scalar_type());
            moves.push_back({values->const_data_ptr(), to.mutable_data_ptr(),
                             values->scalar_type() == ScalarType::Float ? int64_t{4} : int64_t{2}});
            return std::optional<Tensor>{to};
        };
        const auto h = moved(k.hidden, asks(kOut)), up = moved(k.to_up, asks(kUp) || asks(kUpBias));
        const auto pre = moved(k.to_pre, asks(kGate) || asks(kGateBias)), mean = moved(k.dots, asks(kMean));
        if (moves.empty())
            return;
        const EntryLists columns = transposed(k.lists, moves);
        k = Known{{0, 0, 0, {}, columns.index}, {}, {}, {}, {}};
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
    Backward work{train_kernels(isa, dtype_of(pre)),
                  train_kernels(isa, Dtype::f32),
                  s,
                  grad,
                  x,
                  w_gate,
                  w_out_t,
                  w_up,
                  type,
                  wanted,
                  x.size(1),
                  bits_of(bits, s),
                  {none, none, none, none, none, none, no_mean}};
    work.run(same);
    auto& made = work.made;
    return {made[kX], made[kGate], made[kUp], made[kOut], made[kGateBias], made[kUpBias], made[kMean]};
}

// Between dense products: ∂ℓ/∂h in `grad_hidden` becomes ∂ℓ/∂p; returns ∂ℓ/∂u (empty without a gate).
Tensor entries(Tensor grad_hidden, Tensor pre, OptionalTensor up, Tensor threshold, OptionalTensor token_scale,
               OptionalTensor skipped_mean, OptionalTensor activation_params, int64_t activation, int64_t indicator,
               int64_t isa) {
    const Stored s = stored(pre, up, {threshold, token_scale, skipped_mean, activation_params, activation}, indicator);
    check_matrix(grad_hidden, "grad_hidden", s.tokens, s.neurons, pre.scalar_type());
    const Tensor grad_up = up.has_value() ? torch::stable::empty({s.tokens, s.neurons}, pre.scalar_type())
                                          : torch::stable::empty({0}, pre.scalar_type());
    EntriesCall call{s, grad_hidden.mutable_data_ptr(), s.up != nullptr ? grad_up.mutable_data_ptr() : nullptr};
    const TrainKernels& kernel = train_kernels(isa, dtype_of(pre));
    torch::stable::parallel_for(0, s.tokens, 4, [&](int64_t begin, int64_t end) { kernel.entries(call, begin, end); });
    return grad_up;
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) {
    m.impl("_train_forward_native", TORCH_BOX(&sparsemlp::forward));
    m.impl("_train_backward_native", TORCH_BOX(&sparsemlp::backward));
    m.impl("_train_entries_native", TORCH_BOX(&sparsemlp::entries));
}
