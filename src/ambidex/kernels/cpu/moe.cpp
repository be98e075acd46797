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

static void route(const RouteArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    size_t num_bytes = size_t(args.num_experts) * sizeof(float);
    float* values = reinterpret_cast<float*>(worker.scratch(num_bytes));
    int64_t end = rows * (worker.id() + 1) / worker.count();
    for (int64_t row = rows * worker.id() / worker.count(); row < end; ++row) {
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

static void group(const GroupArgs& args, const StepParams& step, Worker& worker) {
    if (worker.id() != 0) return;
    int64_t count = args.rows.count(step) * args.top_k;
    for (int64_t e = 0; e < args.num_experts; ++e) args.counts[e] = 0;
    for (int64_t i = 0; i < count; ++i) ++args.counts[args.experts[i]];
    int64_t begin = 0;
    for (int64_t e = 0; e < args.num_experts; ++e) {
        args.starts[e] = begin;
        begin += args.counts[e];
        args.counts[e] = 0;
    }
    for (int64_t i = 0; i < count; ++i) {
        int64_t e = args.experts[i];
        args.order[args.starts[e] + args.counts[e]++] = i;
    }
}

static void gather(const GatherArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    const int64_t* order = args.order + *args.start;
    int64_t first = rows * worker.id() / worker.count();
    int64_t end = rows * (worker.id() + 1) / worker.count();
    for (int64_t i = first; i < end; ++i) {
        const float* from = args.x + order[i] / args.top_k * args.x_stride;
        float* out = args.out + i * args.width;
        for (int64_t c = 0; c < args.width; c += kLanes) {
            mask16 mask = first_lanes(int(args.width - c < kLanes ? args.width - c : kLanes));
            store(out + c, load(from + c, mask), mask);
        }
    }
}

static void scatter(const ScatterArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    const int64_t* order = args.order + *args.start;
    int64_t first = rows * worker.id() / worker.count();
    int64_t end = rows * (worker.id() + 1) / worker.count();
    for (int64_t i = first; i < end; ++i) {
        const float* result = args.results + i * args.width;
        float* out = args.out + order[i] / args.top_k * args.out_stride;
        f32x16 weight = broadcast(args.weights[order[i]]);
        for (int64_t c = 0; c < args.width; c += kLanes) {
            mask16 mask = first_lanes(int(args.width - c < kLanes ? args.width - c : kLanes));
            store(out + c, fma(load(result + c, mask), weight, load(out + c, mask)), mask);
        }
    }
}

static void spread(const SpreadArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    const int64_t* order = args.order + *args.start;
    int64_t first = rows * worker.id() / worker.count();
    int64_t end = rows * (worker.id() + 1) / worker.count();
    for (int64_t i = first; i < end; ++i) {
        const float* result = args.results + i * args.width;
        float* out = args.out + order[i] * args.width;
        for (int64_t c = 0; c < args.width; c += kLanes) {
            mask16 mask = lanes_before(args.width, c);
            store(out + c, load(result + c, mask), mask);
        }
    }
}

// A row's choices by rising expert, as group sorts them.
static void sort_choices(const int64_t* experts, int64_t top_k, int64_t* order) {
    for (int64_t choice = 0; choice < top_k; ++choice) {
        int64_t at = choice;
        for (; at > 0 && experts[order[at - 1]] > experts[choice]; --at) order[at] = order[at - 1];
        order[at] = choice;
    }
}

static void combine(const CombineArgs& args, const StepParams& step, Worker& worker) {
    size_t num_bytes = size_t(args.top_k) * sizeof(int64_t);
    int64_t* order = reinterpret_cast<int64_t*>(worker.scratch(num_bytes));
    int64_t pieces = (args.width + kLanes - 1) / kLanes;
    int64_t count = args.rows.count(step) * pieces;
    int64_t end = count * (worker.id() + 1) / worker.count();
    int64_t sorted_row = -1;
    for (int64_t i = count * worker.id() / worker.count(); i < end; ++i) {
        int64_t row = i / pieces, c = i % pieces * kLanes;
        if (row != sorted_row) sort_choices(args.experts + row * args.top_k, args.top_k, order);
        sorted_row = row;
        mask16 mask = lanes_before(args.width, c);
        f32x16 total = zero_f32();
        for (int64_t k = 0; k < args.top_k; ++k) {
            int64_t choice = row * args.top_k + order[k];
            f32x16 result = load(args.parts[0] + choice * args.width + c, mask);
            for (int64_t part = 1; part < args.num_parts; ++part) {
                result = or_bits(result, load(args.parts[part] + choice * args.width + c, mask));
            }
            total = fma(result, broadcast(args.weights[choice]), total);
        }
        store(args.out + row * args.out_stride + c, total, mask);
    }
}

static void clear(const ClearArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    int64_t first = rows * worker.id() / worker.count();
    int64_t end = rows * (worker.id() + 1) / worker.count();
    for (int64_t row = first; row < end; ++row) {
        float* out = args.out + row * args.stride;
        for (int64_t c = 0; c < args.width; c += kLanes) {
            mask16 mask = first_lanes(int(args.width - c < kLanes ? args.width - c : kLanes));
            store(out + c, zero_f32(), mask);
        }
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(MoeTable, moe, AMBIDEX_MOE_KERNELS)
