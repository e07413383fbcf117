// The screen for any CPU.
#include <cmath>
#include <cstring>

#include "screen.h"

namespace sparsemlp {
namespace {
#include "scalar.inl"

#include "vec_portable.inl"

#include "tiles.inl"

#include "lanes_portable.inl"

#include "activations.inl"

#include "screen.inl"
} // namespace

const ScreenTable screen_portable = SPARSEMLP_SCREEN_TABLE;
} // namespace sparsemlp
