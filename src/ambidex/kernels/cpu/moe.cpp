#include "moe.h"

#include "level.h"
#include "simd_math.h"

namespace ambidex::AMBIDEX_LEVEL {

inline mask16 lanes_before(int64_t end, int64_t i) {
    return first_lanes(end - i < kLanes ? int(end - i) : kLanes);
}

// values = e^(values - largest), divided by their sum.
static void softmax(float* values, int64_t size) {
    f32x16 lowest = broadcast(-__builtin_inff()), best = lowest, total = zero_f32();
    bool has_nan = false;
    for (int64_t i = 0; i < size; ++i) has_nan = has_nan || values[i] != values[i];
    for (int64_t i = 0; i < size; i += kLanes) {
        mask16 mask = lanes_before(size, i);
        best = max(best, select(mask, load(values + i, mask), lowest));
    }
    f32x16 largest = broadcast(has_nan ? __builtin_nanf("") : max_lane(best));
    for (int64_t i = 0; i < size; i += kLanes) {
        mask16 mask = lanes_before(size, i);
        f32x16 value = exp(load(values + i, mask) - largest);
        total = total + select(mask, value, zero_f32());
        store(values + i, value, mask);
    }
    f32x16 sum_of_all = broadcast(sum(total));
    for (int64_t i = 0; i < size; i += kLanes) {
        mask16 mask = lanes_before(size, i);
        store(values + i, load(values + i, mask) / sum_of_all, mask);
    }
}

// Whether expert a goes before b: NaN first, then larger, then lower index.
inline bool goes_before(const float* values, int64_t a, int64_t b) {
    float x = values[a], y = values[b];
    if (x != x || y != y) return x != x && (y == y || a < b);
    return x > y || (x == y && a < b);
}

static void route(const RouteArgs& args, const StepParams&, Worker& worker) {
    size_t num_bytes = size_t(args.num_experts) * sizeof(float);
    float* values = reinterpret_cast<float*>(worker.scratch(num_bytes));
    int64_t end = args.num_rows * (worker.id() + 1) / worker.count();
    for (int64_t row = args.num_rows * worker.id() / worker.count(); row < end; ++row) {
        const float* logits = args.logits + row * args.stride;
        for (int64_t i = 0; i < args.num_experts; ++i) values[i] = logits[i];
        if (args.softmax_first) softmax(values, args.num_experts);
        float* weights = args.weights + row * args.top_k;
        int64_t* chosen = args.experts + row * args.top_k;
        // Insertion into a short sorted list.
        int64_t size = 0;
        for (int64_t expert = 0; expert < args.num_experts; ++expert) {
            if (size == args.top_k && !goes_before(values, expert, chosen[size - 1])) continue;
            int64_t at = size < args.top_k ? size++ : size - 1;
            for (; at > 0 && goes_before(values, expert, chosen[at - 1]); --at) {
                chosen[at] = chosen[at - 1];
            }
            chosen[at] = expert;
        }
        for (int64_t i = 0; i < args.top_k; ++i) weights[i] = values[chosen[i]];
        if (!args.softmax_first) {
            softmax(weights, args.top_k);
        } else if (args.normalise) {
            float total = 0.0f;
            for (int64_t i = 0; i < args.top_k; ++i) total += weights[i];
            for (int64_t i = 0; i < args.top_k; ++i) weights[i] /= total;
        }
    }
}

static void gather(const GatherArgs& args, const StepParams&, Worker& worker) {
    int64_t end = args.num_out * (worker.id() + 1) / worker.count();
    for (int64_t at = args.num_out * worker.id() / worker.count(); at < end; ++at) {
        const float* x = args.x + args.order[at] / args.top_k * args.x_stride;
        float* out = args.out + at * args.width;
        for (int64_t i = 0; i < args.width; i += kLanes) {
            mask16 mask = lanes_before(args.width, i);
            store(out + i, load(x + i, mask), mask);
        }
    }
}

static void scatter(const ScatterArgs& args, const StepParams&, Worker& worker) {
    constexpr int64_t kColumns = 512;
    int64_t pieces = (args.width + kColumns - 1) / kColumns;
    int64_t units = args.num_rows * pieces;
    auto* choices = reinterpret_cast<int64_t*>(worker.scratch(size_t(args.top_k) * 8));
    int64_t end_unit = units * (worker.id() + 1) / worker.count();
    for (int64_t unit = units * worker.id() / worker.count(); unit < end_unit; ++unit) {
        int64_t first = unit / pieces * args.top_k, column = unit % pieces * kColumns;
        int64_t end = args.width - column < kColumns ? args.width : column + kColumns;
        for (int64_t c = 0; c < args.top_k; ++c) {
            int64_t at = c;
            const int64_t* experts = args.experts + first;
            for (; at > 0 && experts[choices[at - 1]] > experts[c]; --at) {
                choices[at] = choices[at - 1];
            }
            choices[at] = c;
        }
        float* out = args.out + unit / pieces * args.width;
        for (int64_t i = column; i < end; i += kLanes) {
            mask16 mask = lanes_before(end, i);
            f32x16 total = zero_f32();
            for (int64_t c = 0; c < args.top_k; ++c) {
                int64_t choice = first + choices[c];
                f32x16 result = load(args.results[choice] + i, mask);
                total = fma(result, broadcast(args.weights[choice]), total);
            }
            store(out + i, total, mask);
        }
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(MoeTable, moe, AMBIDEX_MOE_KERNELS)
