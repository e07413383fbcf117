// Lists of a pattern's entries, exact at any density: counted, then filled. Storage for what train.h's kernels read.
#pragma once

#include <algorithm>
#include <vector>

#include "tensors.h"
#include "train.h"

namespace sparsemlp {

// The entries of [rows, columns], row by row inside blocks of kListBlock columns.
struct EntryLists {
    int64_t rows, columns, blocks;
    std::vector<int64_t> start;
    Tensor index; // int32
    int64_t count() const { return start.back(); }
    Lists view() const {
        return {rows, columns, blocks, start.data(), static_cast<const int32_t*>(index.const_data_ptr())};
    }
};

// The neurons of every token whose bit is set; `bits` is [tokens, words_of(neurons)].
EntryLists lists_of(const uint64_t* bits, int64_t tokens, int64_t neurons);

// Values that go along when lists are transposed, one an entry, of 2 or 4 bytes.
struct Moved {
    const void* from;
    void* to;
    int64_t bytes;
};

// The same entries by columns, in the order of their rows.
EntryLists transposed(const EntryLists& lists, const std::vector<Moved>& values);

// Edges of `shares` runs of the lists' rows, about equal in entries.
std::vector<int64_t> shares_of(const EntryLists& lists, int64_t shares);

} // namespace sparsemlp
