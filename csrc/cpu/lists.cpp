// Lists of entries: two passes over bits, and their transposition.
#include "lists.h"

#include <algorithm>
#include <bit>

namespace sparsemlp {
namespace {

int64_t blocks_of(int64_t columns) { return std::max<int64_t>(1, (columns + kListBlock - 1) / kListBlock); }

EntryLists empty_lists(int64_t rows, int64_t columns) {
    EntryLists lists{rows, columns, blocks_of(columns), {}, torch::stable::empty({0}, ScalarType::Int)};
    lists.start.assign(lists.blocks * rows + 1, 0);
    return lists;
}

// Counts, written one place late, become starts; then there is room for the entries.
int32_t* close(EntryLists& lists) {
    for (size_t i = 1; i < lists.start.size(); ++i)
        lists.start[i] += lists.start[i - 1];
    lists.index = torch::stable::empty({lists.count()}, ScalarType::Int);
    return static_cast<int32_t*>(lists.index.mutable_data_ptr());
}

} // namespace

EntryLists lists_of(const uint64_t* bits, int64_t tokens, int64_t neurons) {
    EntryLists lists = empty_lists(tokens, neurons);
    const int64_t words = words_of(neurons), block = kListBlock / 64;
    const auto each = [&](const auto& body) { // of a token's blocks: (place in start, first word, behind the last)
        torch::stable::parallel_for(0, tokens, 16, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t)
                for (int64_t b = 0; b < lists.blocks; ++b)
                    body(b * tokens + t, t, b * block, std::min((b + 1) * block, words));
        });
    };
    each([&](int64_t at, int64_t t, int64_t first, int64_t last) {
        int64_t count = 0;
        for (int64_t w = first; w < last; ++w)
            count += std::popcount(bits[t * words + w]);
        lists.start[at + 1] = count;
    });
    int32_t* index = close(lists);
    each([&](int64_t at, int64_t t, int64_t first, int64_t last) {
        int32_t* out = index + lists.start[at];
        for (int64_t w = first; w < last; ++w)
            for (uint64_t left = bits[t * words + w]; left != 0; left &= left - 1)
                *out++ = static_cast<int32_t>(w * 64 + std::countr_zero(left));
    });
    return lists;
}

EntryLists transposed(const EntryLists& lists, const std::vector<Moved>& values) {
    EntryLists out = empty_lists(lists.columns, lists.rows);
    const Lists from = lists.view();
    // One task is a block of rows and a block of columns: its columns' cursors stay in the first cache level.
    const auto each = [&](const auto& body) {
        torch::stable::parallel_for(0, out.blocks * lists.blocks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) {
                const int64_t rows = task / lists.blocks, columns = task % lists.blocks;
                const int64_t* start = from.start + columns * lists.rows;
                const int64_t row = rows * kListBlock, behind = std::min(row + kListBlock, lists.rows);
                body(start, row, behind, rows * out.rows + columns * kListBlock, columns * kListBlock);
            }
        });
    };
    each([&](const int64_t* start, int64_t row, int64_t behind, int64_t at, int64_t column) {
        int64_t* counts = out.start.data() + 1 + at - column;
        for (int64_t e = start[row]; e < start[behind]; ++e)
            ++counts[from.index[e]];
    });
    int32_t* index = close(out);
    each([&](const int64_t* start, int64_t row, int64_t behind, int64_t at, int64_t column) {
        int64_t cursors[kListBlock];
        const int64_t most = std::min(kListBlock, lists.columns - column);
        std::copy_n(out.start.data() + at, most, cursors);
        for (int64_t r = row; r < behind; ++r)
            for (int64_t e = start[r]; e < start[r + 1]; ++e) {
                const int64_t place = cursors[from.index[e] - column]++;
                index[place] = static_cast<int32_t>(r);
                for (const Moved& v : values) {
                    if (v.bytes == 2)
                        static_cast<uint16_t*>(v.to)[place] = static_cast<const uint16_t*>(v.from)[e];
                    else
                        static_cast<uint32_t*>(v.to)[place] = static_cast<const uint32_t*>(v.from)[e];
                }
            }
    });
    return out;
}

std::vector<int64_t> shares_of(const EntryLists& lists, int64_t shares) {
    constexpr int64_t kRow = 8; // an empty row takes time, too
    std::vector<int64_t> before(lists.rows + 1, 0), edges(shares + 1, lists.rows);
    for (int64_t r = 0; r < lists.rows; ++r) {
        before[r + 1] = before[r] + kRow;
        for (int64_t b = 0; b < lists.blocks; ++b)
            before[r + 1] += lists.start[b * lists.rows + r + 1] - lists.start[b * lists.rows + r];
    }
    for (int64_t s = 0; s < shares; ++s)
        edges[s] = std::lower_bound(before.begin(), before.end(), before.back() / shares * s) - before.begin();
    return edges;
}

} // namespace sparsemlp
