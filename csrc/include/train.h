// The MLPs' training kernels: the functions every instruction set provides, and what they are called with.
#pragma once

#include "mlp.h"

namespace sparsemlp {

// Columns of a list's block: the rows that its entries name, a tile of columns at a time (a slab), stay in the second
// cache level. A sum of products is closed after every block.
constexpr int64_t kListBlock = 1024;
constexpr int64_t kSlabBytes = 512; // of a row, at most
constexpr int64_t kSlabFloats = kListBlock * kSlabBytes / 4;

// Stored p and u, [T, F] contiguous, and the rule: what the patterns are made from. u is null for an ungated MLP.
struct Stored {
    int64_t tokens, neurons;
    const void *pre, *up;
    Thresholding rule;
};

// Bits of one token's neurons: j is bit j % 64 of word j / 64.
inline int64_t words_of(int64_t neurons) { return (neurons + 63) / 64; }

// Which entries of each row there are, by blocks of columns.
struct Lists {
    int64_t rows, columns, blocks;
    const int64_t* start; // [blocks * rows + 1]: the entries of block b and row r begin at start[b * rows + r]
    const int32_t* index; // the entries' columns
    int64_t width(int64_t block) const {
        return columns - block * kListBlock < kListBlock ? columns - block * kListBlock : kListBlock;
    }
};

// out[r] += Σ over the list's entries of row r: values[e] · w[index[e]].
struct Term {
    Lists lists;
    const void* values; // one an entry, of out's dtype
    const void* w;
    int64_t stride;
};
struct GatherCall {
    Term terms[2];
    int count; // of terms
    int64_t width;
    const float* bias; // [width], added, or null
    void* out;         // [rows, width]
};
constexpr int64_t kGatherMost = 128; // columns of a tile, at most

// out[e] = left[row of e] · w[index[e]] for every entry of a list.
struct DotsCall {
    Lists lists;
    const void* left;
    int64_t left_stride;
    const void* w;
    int64_t stride, width;
    float* out;
};

// The elementwise step between dense products: ∂ℓ/∂h becomes ∂ℓ/∂p where it stands, and gives ∂ℓ/∂u; both [T, F].
struct EntriesCall {
    Stored stored;
    void *grad_hidden, *grad_up; // the latter null without a gate
};

struct TrainKernels {
    // Bits of the neurons that are active, and of those that are kept and have φ'(p) ≠ 0.
    void (*masks)(const Stored&, int64_t token, uint64_t* active, uint64_t* moving);
    // Of n entries of a token, where not null: h, rounded; ∂h/∂p = φ'(p) · u; ∂h/∂u = a.
    void (*values)(const Stored&, int64_t token, const int32_t* index, int64_t n, void* hidden, float* by_pre,
                   float* by_up);
    // out[i] = a[i] · b[i], rounded.
    void (*multiply)(const float* a, const float* b, int64_t n, void* out);
    double (*total)(const void* values, int64_t n);
    // How many tiles so many columns are.
    int64_t (*tiles)(int64_t width);
    // A tile of rows [begin, end), with scratch for a slab and kGatherMost floats a row.
    void (*gather)(const GatherCall&, int64_t tile, int64_t begin, int64_t end, float* scratch);
    // Rows [begin, end), with scratch for a slab.
    void (*dots)(const DotsCall&, int64_t begin, int64_t end, float* scratch);
    void (*entries)(const EntriesCall&, int64_t begin, int64_t end);
};

// By instruction set, then by element type; defined in csrc/cpu/train_<isa>.cpp.
using TrainTable = TrainKernels[static_cast<int>(Dtype::count)];
extern const TrainTable train_portable;
#if defined(__x86_64__)
extern const TrainTable train_avx2;
extern const TrainTable train_avx512;
extern const TrainTable train_avx512bf16;
#endif

} // namespace sparsemlp
