// Sixteen numbers at a time, on every instruction set. Kernels are written once on these types and
// compiled once a level; a level is named by AMBIDEX_LEVEL, a namespace.
//
// Compiled with wider instructions than the host may have: nothing in here, and nothing in a
// kernel's file, may be an inline function of the standard library (the linker keeps one copy of
// those, and it could be this one).
#pragma once

#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif
