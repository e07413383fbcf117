// The MLPs for any CPU.
#include <cmath>
#include <cstring>

#include "mlp.h"

namespace sparsemlp {
namespace {
#include "scalar.inl"

#include "vec_portable.inl"

#include "kernels.inl"
} // namespace

const MlpTable mlp_portable = SPARSEMLP_MLP_TABLE;
} // namespace sparsemlp
