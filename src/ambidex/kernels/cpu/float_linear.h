// Products with weights that are plain numbers: float32, float16 or bfloat16.
#pragma once

#include "context.h"

namespace ambidex {

enum class FloatType : int32_t { kFloat32, kFloat16, kBFloat16 };

// Applied to the gate of a gated product.
enum class GateFunction : int32_t { kNone, kSilu, kGeluTanh, kRelu };

constexpr int64_t kPanelRows = 16;

// [panel][in][16 rows of the weight]; rows that a last panel lacks are zero.
struct FloatMatrix {
    const void* panels;
    int64_t out, in;
    FloatType type;

    int64_t num_panels() const { return (out + kPanelRows - 1) / kPanelRows; }
};

struct PackFloatArgs {
    const void* weight;
    void* panels;
    int64_t row_bytes;  // from one row to the next
    int64_t out, in;
    FloatType type;
};

// out = x weight^T + bias + residual, or with a gate function
// out[:, i] = function((x weight^T + bias)[:, i]) * (x weight^T + bias)[:, i + out / 2].
struct FloatLinearArgs {
    FloatMatrix weight;
    const float* x;
    const float* bias;      // or null
    const float* residual;  // or null
    float* out;
    int64_t x_stride, residual_stride, out_stride;
    Rows rows;
    GateFunction gate;
};

struct FloatEmbeddingArgs {
    FloatMatrix weight;
    const int64_t* token_ids;  // null: the step's
    float* out;
    int64_t out_stride;
    Rows rows;
    float scale;
};

#define AMBIDEX_FLOAT_LINEAR_KERNELS(X) \
    X(pack_float, PackFloatArgs)        \
    X(linear_float, FloatLinearArgs)    \
    X(embedding_float, FloatEmbeddingArgs)

struct FloatLinearTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_FLOAT_LINEAR_KERNELS(X)
#undef X
};

}  // namespace ambidex
