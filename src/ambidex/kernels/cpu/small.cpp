#include "small.h"

#include "level.h"
#include "simd_math.h"

namespace ambidex::AMBIDEX_LEVEL {

// The lanes of a vector that begins `rest` numbers before the end.
inline mask16 first_lanes_of(int64_t rest) {
    return first_lanes(rest < kLanes ? int(rest) : kLanes);
}

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

static void layer_norm_row(const LayerNormArgs& args, const float* x, float* out) {
    int64_t width = args.width;
    f32x16 total = zero_f32();
    for (int64_t i = 0; i < width; i += kLanes) {
        total = total + load(x + i, first_lanes_of(width - i));
    }
    f32x16 mean = broadcast(sum(total) / float(width));
    total = zero_f32();
    for (int64_t i = 0; i < width; i += kLanes) {
        mask16 mask = first_lanes_of(width - i);
        f32x16 centred = select(mask, load(x + i, mask) - mean, zero_f32());
        total = fma(centred, centred, total);
    }
    f32x16 scale = broadcast(1.0f / __builtin_sqrtf(sum(total) / float(width) + args.eps));
    for (int64_t i = 0; i < width; i += kLanes) {
        mask16 mask = first_lanes_of(width - i);
        f32x16 value = (load(x + i, mask) - mean) * scale;
        if (args.weight != nullptr) value = value * load(args.weight + i, mask);
        if (args.bias != nullptr) value = value + load(args.bias + i, mask);
        store(out + i, value, mask);
    }
}

static void layer_norm(const LayerNormArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    int64_t end = rows * (worker.id() + 1) / worker.count();
    for (int64_t row = rows * worker.id() / worker.count(); row < end; ++row) {
        for (int64_t head = 0; head < args.heads; ++head) {
            int64_t column = head * args.width;
            layer_norm_row(args, args.x + row * args.x_stride + column,
                           args.out + row * args.out_stride + column);
        }
    }
}

// Calls `piece(row, first, end)` for this worker's share of the pieces of all rows, so that one
// long row is work for all.
template <class Piece>
static void for_pieces(int64_t rows, int64_t width, Worker& worker, Piece piece) {
    constexpr int64_t kColumns = 1024;
    int64_t pieces = (width + kColumns - 1) / kColumns;
    int64_t end_unit = rows * pieces * (worker.id() + 1) / worker.count();
    for (int64_t unit = rows * pieces * worker.id() / worker.count(); unit < end_unit; ++unit) {
        int64_t first = unit % pieces * kColumns;
        piece(unit / pieces, first, width - first < kColumns ? width : first + kColumns);
    }
}

template <class F>
static void apply_function(const ApplyArgs& args, const StepParams& step, Worker& worker,
                           F function) {
    auto piece = [&](int64_t row, int64_t first, int64_t end) {
        const float* x = args.x + row * args.x_stride;
        const float* y = args.y == nullptr ? nullptr : args.y + row * args.y_stride;
        float* out = args.out + row * args.out_stride;
        for (int64_t i = first; i < end; i += kLanes) {
            mask16 mask = first_lanes_of(end - i);
            f32x16 value = function(load(x + i, mask));
            if (y != nullptr) value = value * load(y + i, mask);
            store(out + i, value, mask);
        }
    };
    for_pieces(args.rows.count(step), args.width, worker, piece);
}

static void apply(const ApplyArgs& args, const StepParams& step, Worker& worker) {
    switch (args.function) {
        case Function::kSilu:
            return apply_function(args, step, worker, [](f32x16 x) { return silu(x); });
        case Function::kGelu:
            return apply_function(args, step, worker, [](f32x16 x) { return gelu(x); });
        case Function::kGeluTanh:
            return apply_function(args, step, worker, [](f32x16 x) { return gelu_tanh(x); });
        case Function::kRelu:
            return apply_function(args, step, worker, [](f32x16 x) { return relu(x); });
        case Function::kSoftcap: {
            f32x16 cap = broadcast(args.cap);
            return apply_function(args, step, worker,
                                  [cap](f32x16 x) { return cap * tanh(x / cap); });
        }
    }
}

static void take_rows(const TakeRowsArgs& args, const StepParams& step, Worker& worker) {
    int64_t num_x = args.x_rows.count(step);
    const int64_t* positions = args.positions != nullptr ? args.positions : step.positions;
    for_pieces(args.rows.count(step), args.width, worker,
               [&](int64_t row, int64_t first, int64_t end) {
                   int64_t from = args.by_position ? positions[row] : step.logit_rows[row];
                   bool exists = from >= 0 && from < num_x;
                   const float* x = args.x + (exists ? from : 0) * args.x_stride;
                   float* out = args.out + row * args.out_stride;
                   f32x16 value = broadcast(__builtin_nanf(""));
                   for (int64_t i = first; i < end; i += kLanes) {
                       mask16 mask = first_lanes_of(end - i);
                       if (exists) value = load(x + i, mask);
                       store(out + i, value, mask);
                   }
               });
}

static PieceMaximum piece_maximum(const float* x, int64_t size) {
    constexpr int kChains = 4;
    f32x16 best[kChains], zeros[kChains];  // NaN and infinity times zero are NaN
    for (int c = 0; c < kChains; ++c) {
        best[c] = broadcast(-__builtin_inff());
        zeros[c] = zero_f32();
    }
    int64_t i = 0;
    for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
            f32x16 value = load(x + i + c * kLanes);
            best[c] = max(best[c], value);
            zeros[c] = fma(value, zero_f32(), zeros[c]);
        }
    }
    for (; i < size; i += kLanes) {
        mask16 mask = first_lanes_of(size - i);
        f32x16 value = load(x + i, mask);
        best[0] = max(best[0], select(mask, value, broadcast(-__builtin_inff())));
        zeros[0] = fma(value, zero_f32(), zeros[0]);
    }
    float largest = max_lane(max(max(best[0], best[1]), max(best[2], best[3])));
    float zero = sum((zeros[0] + zeros[1]) + (zeros[2] + zeros[3]));
    return {largest, zero == 0.0f};
}

static void greedy(const GreedyArgs& args, const StepParams& step, Worker& worker) {
    const int64_t num_rows = args.rows.count(step);
    int64_t pieces = num_pieces(args.width);
    auto* maxima = reinterpret_cast<PieceMaximum*>(worker.shared());
    for (int64_t unit; (unit = worker.next(num_rows * pieces)) >= 0;) {
        int64_t first = unit % pieces * kPieceColumns;
        int64_t size = args.width - first < kPieceColumns ? args.width - first : kPieceColumns;
        maxima[unit] = piece_maximum(args.logits + unit / pieces * args.stride + first, size);
    }
    worker.barrier();
    int64_t end = num_rows * (worker.id() + 1) / worker.count();
    for (int64_t row = num_rows * worker.id() / worker.count(); row < end; ++row) {
        const PieceMaximum* of_row = maxima + row * pieces;
        int64_t best = 0;
        bool is_finite = true;
        for (int64_t piece = 0; piece < pieces; ++piece) {
            if (of_row[piece].value > of_row[best].value) best = piece;
            is_finite = is_finite && of_row[piece].is_finite;
        }
        const float* logits = args.logits + row * args.stride;
        int64_t id = best * kPieceColumns;
        int64_t last = args.width - id < kPieceColumns ? args.width : id + kPieceColumns;
        while (id + 1 < last && !(logits[id] == of_row[best].value)) ++id;
        args.ids[row] = id;
        args.is_finite[row] = is_finite;
    }
}

// A number and its column in one: a larger key is a larger number, or the lower column of equals.
inline uint64_t sort_key(float value, int64_t column) {
    float positive = value + 0.0f;  // no -0, which equals 0
    uint32_t bits;
    __builtin_memcpy(&bits, &positive, sizeof bits);
    if (value != value) {
        bits = 0xffffffffu;
    } else {
        bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    }
    return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(column));
}
inline int64_t key_column(uint64_t key) { return 0xffffffffu - uint32_t(key); }

// The `capacity` largest keys so far, the smallest of them first.
class KeyHeap {
  public:
    KeyHeap(uint64_t* keys, int64_t capacity) : keys_(keys), capacity_(capacity) {}

    int64_t size() const { return size_; }
    bool is_full() const { return size_ == capacity_; }
    uint64_t smallest() const { return keys_[0]; }

    void offer(uint64_t key) {
        if (size_ < capacity_) {
            int64_t at = size_++;
            for (; at > 0 && keys_[(at - 1) / 2] > key; at = (at - 1) / 2) {
                keys_[at] = keys_[(at - 1) / 2];
            }
            keys_[at] = key;
        } else if (key > keys_[0]) {
            sink(key);
        }
    }

    // Leaves the keys falling; nothing can be offered afterwards.
    void sort() {
        while (size_ > 1) {
            uint64_t key = keys_[--size_];
            keys_[size_] = keys_[0];
            sink(key);
        }
    }

  private:
    // Puts `key` in place of the smallest.
    void sink(uint64_t key) {
        int64_t at = 0;
        for (int64_t child; (child = 2 * at + 1) < size_; at = child) {
            if (child + 1 < size_ && keys_[child + 1] < keys_[child]) ++child;
            if (keys_[child] >= key) break;
            keys_[at] = keys_[child];
        }
        keys_[at] = key;
    }

    uint64_t* keys_;
    int64_t capacity_;
    int64_t size_ = 0;
};

// Offers the columns first to end of a row.
static void offer_piece(const float* row, int64_t first, int64_t end, KeyHeap& heap) {
    constexpr int64_t kStep = 4 * kLanes;
    for (int64_t i = first; i < end; i += kStep) {
        int64_t last = end - i < kStep ? end : i + kStep;
        if (heap.is_full() && last - i == kStep) {
            f32x16 a = load(row + i), b = load(row + i + kLanes);
            f32x16 c = load(row + i + 2 * kLanes), d = load(row + i + 3 * kLanes);
            float zero = sum(((a + b) + (c + d)) * zero_f32());
            float threshold = row[key_column(heap.smallest())];
            // Nothing above the threshold, and no NaN that the maximum hides.
            if (zero == 0.0f && !(max_lane(max(max(a, b), max(c, d))) > threshold)) continue;
        }
        for (int64_t column = i; column < last; ++column) heap.offer(sort_key(row[column], column));
    }
}

static void top_k(const TopKArgs& args, const StepParams&, Worker& worker) {
    int64_t pieces = num_pieces(args.width);
    int64_t k = args.k;
    auto* candidates = reinterpret_cast<uint64_t*>(worker.shared());
    for (int64_t unit; (unit = worker.next(args.num_rows * pieces)) >= 0;) {
        int64_t first = unit % pieces * kPieceColumns;
        int64_t end = args.width - first < kPieceColumns ? args.width : first + kPieceColumns;
        KeyHeap heap(candidates + unit * k, k);
        offer_piece(args.logits + unit / pieces * args.stride, first, end, heap);
        for (int64_t i = heap.size(); i < k; ++i) candidates[unit * k + i] = 0;
    }
    worker.barrier();
    auto* keys = reinterpret_cast<uint64_t*>(worker.scratch(size_t(k) * sizeof(uint64_t)));
    int64_t end = args.num_rows * (worker.id() + 1) / worker.count();
    for (int64_t row = args.num_rows * worker.id() / worker.count(); row < end; ++row) {
        const uint64_t* of_row = candidates + row * pieces * k;
        KeyHeap heap(keys, k);
        for (int64_t i = 0; i < pieces * k; ++i) {
            if (of_row[i] != 0) heap.offer(of_row[i]);
        }
        heap.sort();
        for (int64_t i = 0; i < k; ++i) {
            int64_t id = key_column(keys[i]);
            args.ids[row * k + i] = id;
            args.values[row * k + i] = args.logits[row * args.stride + id];
        }
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(SmallTable, small, AMBIDEX_SMALL_KERNELS)
