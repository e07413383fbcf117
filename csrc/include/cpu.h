// What this CPU can run.
#pragma once

// The best instruction set, as an index into sparsemlp._env.ISA_NAMES: portable, avx2, avx512, avx512bf16.
extern "C" __attribute__((visibility("default"))) int sparsemlp_cpu_isa();
