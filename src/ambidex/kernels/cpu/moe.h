// Mixtures of experts: who computes what, and the sum of it. The products between are the weights'.
#pragma once

#include "context.h"

namespace ambidex {

// Chooses top_k experts a row by the largest numbers, the lower expert of equals.
struct RouteArgs {
    const float* logits;
    float* weights;    // [num_rows, top_k]
    int64_t* experts;  // [num_rows, top_k], by falling weight
    int64_t stride, num_rows, num_experts, top_k;
    bool softmax_first;  // weights are shares of all experts, not of the chosen
    bool normalise;      // shares are divided by their sum
};

// out[i] = x[order[i] / top_k].
struct GatherArgs {
    const float* x;
    const int64_t* order;
    float* out;
    int64_t x_stride, num_out, width, top_k;
};

// out[row] = the sum, by rising expert, of weights[row, c] times the result for choice c of row.
struct ScatterArgs {
    const float* const* results;  // [num_rows * top_k] where each choice's result lies
    const float* weights;         // [num_rows, top_k]
    const int64_t* experts;       // [num_rows, top_k]
    float* out;
    int64_t num_rows, width, top_k;
};

#define AMBIDEX_MOE_KERNELS(X) \
    X(route, RouteArgs)        \
    X(gather, GatherArgs)      \
    X(scatter, ScatterArgs)

struct MoeTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_MOE_KERNELS(X)
#undef X
};

}  // namespace ambidex
