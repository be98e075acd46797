#include "small.h"

#include "level.h"
#include "simd_math.h"

namespace ambidex::AMBIDEX_LEVEL {

static void rms_norm_row(const RmsNormArgs& args, const float* x, const float* residual,
                         float* out) {
    int64_t whole = args.width / kLanes * kLanes;
    mask16 rest = first_lanes(int(args.width - whole));
    f32x16 total = zero_f32();
    for (int64_t i = 0; i < whole; i += kLanes) {
        f32x16 value = load(x + i);
        total = fma(value, value, total);
    }
    if (whole < args.width) {
        f32x16 value = load(x + whole, rest);
        total = fma(value, value, total);
    }
    float mean = sum(total) / float(args.width);
    f32x16 scale = broadcast(1.0f / __builtin_sqrtf(mean + args.eps));
    f32x16 offset = broadcast(args.offset);
    for (int64_t i = 0; i < whole; i += kLanes) {
        f32x16 value = load(x + i) * scale * (load(args.weight + i) + offset);
        if (residual != nullptr) value = value + load(residual + i);
        store(out + i, value);
    }
    if (whole < args.width) {
        f32x16 value = load(x + whole, rest) * scale * (load(args.weight + whole, rest) + offset);
        if (residual != nullptr) value = value + load(residual + whole, rest);
        store(out + whole, value, rest);
    }
}

static void rms_norm(const RmsNormArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    int64_t first = rows * worker.id() / worker.count();
    int64_t end = rows * (worker.id() + 1) / worker.count();
    for (int64_t row = first; row < end; ++row) {
        for (int64_t head = 0; head < args.heads; ++head) {
            int64_t column = head * args.width;
            const float* residual = args.residual == nullptr
                                        ? nullptr
                                        : args.residual + row * args.residual_stride + column;
            rms_norm_row(args, args.x + row * args.x_stride + column, residual,
                         args.out + row * args.out_stride + column);
        }
    }
}

static void add(const AddArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    int64_t first = rows * worker.id() / worker.count();
    int64_t end = rows * (worker.id() + 1) / worker.count();
    int64_t whole = args.width / kLanes * kLanes;
    mask16 rest = first_lanes(int(args.width - whole));
    for (int64_t row = first; row < end; ++row) {
        const float* x = args.x + row * args.x_stride;
        const float* y = args.y + row * args.y_stride;
        float* out = args.out + row * args.out_stride;
        for (int64_t i = 0; i < whole; i += kLanes) store(out + i, load(x + i) + load(y + i));
        if (whole < args.width) {
            store(out + whole, load(x + whole, rest) + load(y + whole, rest), rest);
        }
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(SmallTable, small, AMBIDEX_SMALL_KERNELS)
