// Which instruction set to use, and the read-bandwidth probe that benchmarks compare kernels with.
#include <cstdint>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cpu.h"

extern "C" int sparsemlp_cpu_isa() {
#if defined(__x86_64__)
    static const int best = [] {
        __builtin_cpu_init();
        if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
            return 0;
        if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
            !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
            return 1;
        return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? 3 : 2;
    }();
    return best;
#else
    return 0;
#endif
}

namespace sparsemlp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The xor of all words, read once by all threads: nothing but the reading takes time.
Tensor read(Tensor words) {
    STD_TORCH_CHECK(words.is_cpu() && words.is_contiguous() && words.scalar_type() == ScalarType::Long,
                    "words must be a contiguous int64 CPU tensor");
    const int64_t* data = static_cast<const int64_t*>(words.const_data_ptr());
    const int64_t slots = torch::stable::get_num_threads(), n = words.numel();
    const Tensor parts = torch::stable::empty({slots}, ScalarType::Long);
    int64_t* out = static_cast<int64_t*>(parts.mutable_data_ptr());
    torch::stable::parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t slot = begin; slot < end; ++slot) {
            const int64_t first = n * slot / slots, last = n * (slot + 1) / slots;
            int64_t lanes[32] = {}; // independent chains: the loop must wait for memory only
            int64_t i = first;
            for (; i + 32 <= last; i += 32)
                for (int64_t l = 0; l < 32; ++l)
                    lanes[l] ^= data[i + l];
            for (; i < last; ++i)
                lanes[0] ^= data[i];
            int64_t value = 0;
            for (const int64_t lane : lanes)
                value ^= lane;
            out[slot] = value;
        }
    });
    return parts;
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) { m.impl("_read_native", TORCH_BOX(&sparsemlp::read)); }
