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

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias.
struct LayerNormArgs {
    const float* x;
    const float* weight;  // or null
    const float* bias;    // or null
    float* out;
    int64_t x_stride, out_stride;
    int64_t width;
    int64_t heads;
    Rows rows;
    float eps;
};

enum class Function : int32_t { kSilu, kGelu, kGeluTanh, kRelu, kSoftcap };

// out = function(x), times y where there is one.
struct ApplyArgs {
    const float* x;
    const float* y;  // or null
    float* out;
    int64_t x_stride, y_stride, out_stride, width;
    Rows rows;
    Function function;
    float cap;  // of kSoftcap: cap * tanh(x / cap)
};

// Copies the rows of x that the step's logit_rows name; NaN where x has no such row.
struct TakeRowsArgs {
    const float* x;
    const int64_t* positions;  // or null: the step's, if `by_position`
    bool by_position;          // else the step's logit rows are taken
    float* out;
    int64_t x_stride, out_stride, width;
    Rows x_rows, rows;
};

// The largest number of each row, the lowest column of equals, and whether all are finite.
struct GreedyArgs {
    const float* logits;
    int64_t* ids;
    bool* is_finite;
    int64_t stride, width;
    Rows rows;
};

// The k largest numbers of each row, falling, lower columns first among equals. NaN is largest.
struct TopKArgs {
    const float* logits;
    float* values;  // [num_rows, k]
    int64_t* ids;   // [num_rows, k]
    int64_t stride, num_rows, width, k;
};

// Columns of a row that one worker looks through at a time.
constexpr int64_t kPieceColumns = 8192;

static inline int64_t num_pieces(int64_t width) {
    return (width + kPieceColumns - 1) / kPieceColumns;
}

struct PieceMaximum {
    float value;
    bool is_finite;
};

#define AMBIDEX_SMALL_KERNELS(X)  \
    X(rms_norm, RmsNormArgs)      \
    X(add, AddArgs)               \
    X(layer_norm, LayerNormArgs)  \
    X(apply, ApplyArgs)           \
    X(take_rows, TakeRowsArgs)    \
    X(greedy, GreedyArgs)         \
    X(top_k, TopKArgs)

struct SmallTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_SMALL_KERNELS(X)
#undef X
};

}  // namespace ambidex
