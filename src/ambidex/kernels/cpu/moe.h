// Mixtures of experts: who computes what, and the sum of it. The products between are the weights'.
#pragma once

#include "context.h"

namespace ambidex {

// Chooses top_k experts a row by the largest numbers, the lower expert of equals.
struct RouteArgs {
    const float* logits;
    float* weights;    // [rows, top_k]
    int64_t* experts;  // [rows, top_k], by falling weight
    int64_t stride, num_experts, top_k;
    Rows rows;
    bool softmax_first;  // weights are shares of all experts, not of the chosen
    bool normalise;      // shares are divided by their sum
};

// Sorts the choices of all rows by expert, rows rising within one. Expert e's choices are
// order[starts[e]] .. order[starts[e] + counts[e] - 1]; choice / top_k is the row.
struct GroupArgs {
    const int64_t* experts;  // [rows, top_k]
    int64_t* order;          // [rows * top_k]
    int64_t* starts;         // [num_experts]
    int64_t* counts;         // [num_experts]
    int64_t num_experts, top_k;
    Rows rows;
};

// The rows of one expert: out[i] = x[order[*start + i] / top_k].
struct GatherArgs {
    const float* x;
    const int64_t* order;
    const int64_t* start;
    float* out;
    int64_t x_stride, width, top_k;
    Rows rows;
};

// out[row] += weight * result, for each row of one expert.
struct ScatterArgs {
    const float* results;
    const int64_t* order;
    const int64_t* start;
    const float* weights;  // [rows, top_k]
    float* out;
    int64_t out_stride, width, top_k;
    Rows rows;
};

// out[order[*start + i]] = result i: every choice has a row of its own.
struct SpreadArgs {
    const float* results;
    const int64_t* order;
    const int64_t* start;
    float* out;  // [rows * top_k, width]
    int64_t width;
    Rows rows;
};

// What scatter adds up, from results that lie apart: a choice's result is in one of the parts, and
// the others are zero there.
struct CombineArgs {
    static constexpr int64_t kMaxParts = 8;
    const float* parts[kMaxParts];  // [rows, top_k, width] each
    const float* weights;           // [rows, top_k]
    const int64_t* experts;         // [rows, top_k]
    float* out;
    int64_t num_parts, out_stride, width, top_k;
    Rows rows;
};

struct ClearArgs {
    float* out;
    int64_t stride, width;
    Rows rows;
};

#define AMBIDEX_MOE_KERNELS(X) \
    X(route, RouteArgs)        \
    X(group, GroupArgs)        \
    X(gather, GatherArgs)      \
    X(scatter, ScatterArgs)    \
    X(spread, SpreadArgs)      \
    X(combine, CombineArgs)    \
    X(clear, ClearArgs)

struct MoeTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_MOE_KERNELS(X)
#undef X
};

}  // namespace ambidex
