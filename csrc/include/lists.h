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
    Lists view() const { return {rows, blocks, start.data(), static_cast<const int32_t*>(index.const_data_ptr())}; }
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

// run(slot, begin, end) over contiguous shares of the lists' rows, about equal in entries, one a thread.
template <class Run> void each_share(const EntryLists& lists, Run run) {
    const int64_t slots = std::min<int64_t>(torch::stable::get_num_threads(), std::max<int64_t>(1, lists.rows));
    std::vector<int64_t> before(lists.rows + 1, 0);
    for (int64_t r = 0; r < lists.rows; ++r) {
        before[r + 1] = before[r] + 8; // an empty row takes time, too
        for (int64_t b = 0; b < lists.blocks; ++b)
            before[r + 1] += lists.start[b * lists.rows + r + 1] - lists.start[b * lists.rows + r];
    }
    std::vector<int64_t> edges(slots + 1, lists.rows);
    for (int64_t s = 0; s < slots; ++s)
        edges[s] = std::lower_bound(before.begin(), before.end(), before.back() / slots * s) - before.begin();
    torch::stable::parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s)
            run(s, std::min(edges[s], lists.rows), edges[s + 1]);
    });
}

} // namespace sparsemlp
