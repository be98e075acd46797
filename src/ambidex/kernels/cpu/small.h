// Norms, activations and other kernels that touch every number once.
#pragma once

#include "context.h"

namespace ambidex {

// out = x / sqrt(mean(x^2) + eps) * (weight + offset), plus residual where there is one.
// Strides are in elements.
struct RmsNormArgs {
    const float* x;
    const float* weight;
    const float* residual;  // or null
    float* out;
    int64_t x_stride, residual_stride, out_stride;
    int64_t width;
    int64_t heads;  // each row of x holds this many vectors of `width`, one after the other
    Rows rows;
    float eps, offset;
};

struct AddArgs {
    const float* x;
    const float* y;
    float* out;
    int64_t x_stride, y_stride, out_stride, width;
    Rows rows;
};

#define AMBIDEX_SMALL_KERNELS(X) \
    X(rms_norm, RmsNormArgs)     \
    X(add, AddArgs)

struct SmallTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_SMALL_KERNELS(X)
#undef X
};

}  // namespace ambidex
