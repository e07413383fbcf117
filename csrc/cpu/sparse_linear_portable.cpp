// The input-sparse linear layer for any CPU.
#include <cmath>
#include <cstring>

#include "sparse_linear.h"

namespace sparsemlp {
namespace {
#include "scalar.inl"

#include "vec_portable.inl"

#include "tiles.inl"

#include "sparse_linear.inl"
} // namespace

const SparseLinearTable sparse_linear_portable = SPARSEMLP_LINEAR_TABLE;
} // namespace sparsemlp
