#include "float_linear.h"

#include "level.h"
#include "simd_math.h"

namespace ambidex::AMBIDEX_LEVEL {

// Numbers of one product's output are each one chain of fused multiply-adds over rising inputs,
// however rows, panels and inputs are blocked: so a row's bits depend on that row alone.

// As many rows as fit are multiplied in one part; more are cut into parts of equal size.
#if defined(__AVX512F__)
constexpr int kMaxRows = 16;
constexpr int kPartRows = 12;
constexpr int panels_at_once(int rows) {
    return rows == 1 ? 8 : rows <= 6 ? 4 : rows <= 14 ? 2 : 1;
}
#else
constexpr int kMaxRows = 6;
constexpr int kPartRows = 6;
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif
// Inputs of one block: the block of a few panels stays in the second-level cache while all rows
// of a row block pass over it.
constexpr int64_t kBlockInputs = 512;
// From one row of a block of x to the next: not a multiple of a page, which would let the rows
// push each other out of the first-level cache.
constexpr int64_t kBlockStride = kBlockInputs + 16;
constexpr int64_t kBlockRows = 12 * kPartRows;
constexpr int64_t kMaxGroupPanels = 16;
// Inputs ahead of those multiplied whose weights are fetched.
constexpr int64_t kAhead = 32;

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
inline f32x16 widen(const float* p) { return load(p); }
inline f32x16 widen(const Float16* p) { return load_f16(&p->bits); }
inline f32x16 widen(const BFloat16* p) { return load_bf16(&p->bits); }

// Adds the products of `count` inputs to a tile: panel p, row r at tile + p * tile_stride + 16 r.
template <class T, int kRows, int kPanels>
static void multiply(const float* x, const T* const* panels, int64_t count, float* tile,
                     int64_t tile_stride, bool is_first) {
    f32x16 sums[kRows][kPanels];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
            sums[r][p] = is_first ? zero_f32() : load(tile + p * tile_stride + r * kLanes);
        }
    }
    const T* at[kPanels];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) at[p] = panels[p];
    for (int64_t k = 0; k < count; ++k) {
        f32x16 weights[kPanels];
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
            weights[p] = widen(at[p] + k * kLanes);
            // Hardware stops fetching ahead at the end of a page. With few rows the panels are so
            // many that it keeps up.
            if constexpr (kRows > 4) __builtin_prefetch(at[p] + (k + kAhead) * kLanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            f32x16 input = broadcast(x[r * kBlockStride + k]);
#pragma GCC unroll 8
            for (int p = 0; p < kPanels; ++p) sums[r][p] = fma(input, weights[p], sums[r][p]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
            store(tile + p * tile_stride + r * kLanes, sums[r][p]);
        }
    }
}

// The same for any number of panels.
template <class T, int kRows>
static void multiply_rows(const float* x, const T* const* panels, int64_t num_panels,
                          int64_t count, float* tile, int64_t tile_stride, bool is_first) {
    constexpr int kPanels = panels_at_once(kRows);
    int64_t p = 0;
    for (; p + kPanels <= num_panels; p += kPanels) {
        multiply<T, kRows, kPanels>(x, panels + p, count, tile + p * tile_stride, tile_stride,
                                    is_first);
    }
    if constexpr (kPanels > 4) {
        for (; p + 4 <= num_panels; p += 4) {
            multiply<T, kRows, 4>(x, panels + p, count, tile + p * tile_stride, tile_stride,
                                  is_first);
        }
    }
    if constexpr (kPanels > 2) {
        for (; p + 2 <= num_panels; p += 2) {
            multiply<T, kRows, 2>(x, panels + p, count, tile + p * tile_stride, tile_stride,
                                  is_first);
        }
    }
    for (; p < num_panels; ++p) {
        multiply<T, kRows, 1>(x, panels + p, count, tile + p * tile_stride, tile_stride, is_first);
    }
}

template <class T>
using MultiplyRows = void (*)(const float*, const T* const*, int64_t, int64_t, float*, int64_t,
                              bool);

// By number of rows less one.
template <class T>
static MultiplyRows<T> multiply_for(int64_t rows) {
    static constexpr MultiplyRows<T> kAll[] = {
        multiply_rows<T, 1>,  multiply_rows<T, 2>,  multiply_rows<T, 3>, multiply_rows<T, 4>,
        multiply_rows<T, 5>,  multiply_rows<T, 6>,
#if defined(__AVX512F__)
        multiply_rows<T, 7>,  multiply_rows<T, 8>,  multiply_rows<T, 9>, multiply_rows<T, 10>,
        multiply_rows<T, 11>, multiply_rows<T, 12>, multiply_rows<T, 13>, multiply_rows<T, 14>,
        multiply_rows<T, 15>, multiply_rows<T, 16>,
#endif
    };
    return kAll[rows - 1];
}

inline f32x16 apply_gate(GateFunction function, f32x16 x) {
    switch (function) {
        case GateFunction::kSilu:
            return silu(x);
        case GateFunction::kGeluTanh:
            return gelu_tanh(x);
        default:
            return relu(x);
    }
}

// A block of rows times a group of output panels.
template <class T>
class Block {
  public:
    Block(const FloatLinearArgs& args, int64_t first_row, int64_t num_rows, int64_t first_panel,
          int64_t num_panels, Worker& worker)
        : args_(args),
          first_row_(first_row),
          num_rows_(num_rows),
          first_panel_(first_panel),
          num_panels_(num_panels),
          tile_stride_(num_rows * kLanes) {
        const FloatMatrix& weight = args.weight;
        bool is_gated = args.gate != GateFunction::kNone;
        const T* panels = static_cast<const T*>(weight.panels);
        int64_t half = is_gated ? weight.num_panels() / 2 : 0;
        for (int64_t p = 0; p < num_panels; ++p) {
            panels_[p] = panels + (first_panel + p) * weight.in * kLanes;
            if (is_gated) {
                panels_[num_panels + p] = panels + (first_panel + p + half) * weight.in * kLanes;
            }
        }
        num_products_ = is_gated ? 2 * num_panels : num_panels;
        std::byte* memory = worker.scratch(kTileBytes + kInputBytes + kWideBytes);
        tile_ = reinterpret_cast<float*>(memory);
        inputs_ = reinterpret_cast<float*>(memory + kTileBytes);
        wide_ = reinterpret_cast<float*>(memory + kTileBytes + kInputBytes);
    }

    void compute() {
        int64_t in = args_.weight.in;
        if (num_rows_ == 1) {
            const float* x = args_.x + first_row_ * args_.x_stride;
            multiply_rows<T, 1>(x, panels_, num_products_, in, tile_, tile_stride_, true);
        } else {
            for (int64_t first = 0; first < in || first == 0; first += kBlockInputs) {
                int64_t count = in - first < kBlockInputs ? in - first : kBlockInputs;
                copy_inputs(first, count);
                multiply_inputs(first, count);
            }
        }
        finish();
    }

  private:
    static constexpr size_t kTileBytes = 2 * kMaxGroupPanels * kBlockRows * kLanes * sizeof(float);
    static constexpr size_t kInputBytes = kBlockRows * kBlockStride * sizeof(float);
    static constexpr int64_t kPartsToWiden = 8;
    static constexpr int64_t kWidePanels = 4;
    static constexpr size_t kWideBytes =
        sizeof(T) == 4 ? 0 : kWidePanels * kBlockInputs * kLanes * sizeof(float);

    void copy_inputs(int64_t first, int64_t count) {
        for (int64_t r = 0; r < num_rows_; ++r) {
            const float* from = args_.x + (first_row_ + r) * args_.x_stride + first;
            float* to = inputs_ + r * kBlockStride;
            int64_t k = 0;
            for (; k + kLanes <= count; k += kLanes) store(to + k, load(from + k));
            if (k < count) {
                mask16 rest = first_lanes(int(count - k));
                store(to + k, load(from + k, rest), rest);
            }
        }
    }

    void multiply_inputs(int64_t first, int64_t count) {
        int64_t parts = num_rows_ <= kMaxRows ? 1 : (num_rows_ + kPartRows - 1) / kPartRows;
        int64_t most = (num_rows_ + parts - 1) / parts;
        int64_t step = panels_at_once(int(most));
        for (int64_t p = 0; p < num_products_; p += step) {
            int64_t panels = num_products_ - p < step ? num_products_ - p : step;
            const T* from[8];
            for (int64_t i = 0; i < panels; ++i) from[i] = panels_[p + i] + first * kLanes;
            if (sizeof(T) == 4 || parts < kPartsToWiden) {
                multiply_parts<T>(from, p, panels, count, parts, first == 0);
            } else {
                // Several passes: widened once, which changes no bits.
                const float* wide[8];
                for (int64_t i = 0; i < panels; ++i) {
                    float* to = wide_ + i * kBlockInputs * kLanes;
                    for (int64_t k = 0; k < count; ++k) {
                        store(to + k * kLanes, widen(from[i] + k * kLanes));
                    }
                    wide[i] = to;
                }
                multiply_parts<float>(wide, p, panels, count, parts, first == 0);
            }
        }
    }

    template <class U>
    void multiply_parts(const U* const* from, int64_t p, int64_t panels, int64_t count,
                        int64_t parts, bool is_first) {
        for (int64_t part = 0; part < parts; ++part) {
            int64_t row = num_rows_ * part / parts;
            int64_t rows = num_rows_ * (part + 1) / parts - row;
            float* tile = tile_ + p * tile_stride_ + row * kLanes;
            multiply_for<U>(rows)(inputs_ + row * kBlockStride, from, panels, count, tile,
                                  tile_stride_, is_first);
        }
    }

    void finish() {
        bool is_gated = args_.gate != GateFunction::kNone;
        int64_t width = is_gated ? args_.weight.out / 2 : args_.weight.out;
        for (int64_t p = 0; p < num_panels_; ++p) {
            int64_t column = (first_panel_ + p) * kLanes;
            int64_t lanes = width - column < kLanes ? width - column : kLanes;
            mask16 mask = first_lanes(int(lanes));
            f32x16 bias = zero_f32(), up_bias = zero_f32();
            if (args_.bias != nullptr) {
                bias = load(args_.bias + column, mask);
                if (is_gated) up_bias = load(args_.bias + width + column, mask);
            }
            const float* tile = tile_ + p * tile_stride_;
            for (int64_t r = 0; r < num_rows_; ++r) {
                f32x16 value = load(tile + r * kLanes) + bias;
                if (is_gated) {
                    const float* up = tile + num_panels_ * tile_stride_ + r * kLanes;
                    value = apply_gate(args_.gate, value) * (load(up) + up_bias);
                }
                int64_t row = first_row_ + r;
                if (args_.residual != nullptr) {
                    value = value + load(args_.residual + row * args_.residual_stride + column,
                                         mask);
                }
                store(args_.out + row * args_.out_stride + column, value, mask);
            }
        }
    }

    const FloatLinearArgs& args_;
    const int64_t first_row_, num_rows_, first_panel_, num_panels_, tile_stride_;
    int64_t num_products_;
    const T* panels_[2 * kMaxGroupPanels];
    float *tile_, *inputs_, *wide_;
};

template <class T>
static void linear_of(const FloatLinearArgs& args, const StepParams& step, Worker& worker) {
    int64_t rows = args.rows.count(step);
    if (rows == 0) return;
    int64_t panels = args.weight.num_panels();
    int64_t most = kMaxGroupPanels;
    if (args.gate != GateFunction::kNone) {
        panels /= 2;
        most /= 2;
    }
    int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows;
    // Large groups copy x less often; several chunks a worker even out the work.
    int64_t unit = rows == 1 ? panels_at_once(1) : 4;
    if (args.gate != GateFunction::kNone) unit /= 2;
    int64_t wanted = panels * row_blocks / (worker.count() * 4);
    int64_t size = wanted / unit * unit;
    size = size < unit ? unit : size > most ? most : size;
    int64_t groups = (panels + size - 1) / size;
    for (int64_t chunk; (chunk = worker.next(groups * row_blocks)) >= 0;) {
        // All row blocks of one group after each other: the group's weights are in the cache.
        int64_t group = chunk / row_blocks, block = chunk % row_blocks;
        int64_t first_row = rows * block / row_blocks;
        int64_t num_rows = rows * (block + 1) / row_blocks - first_row;
        int64_t first_panel = panels * group / groups;
        int64_t num_panels = panels * (group + 1) / groups - first_panel;
        Block<T>(args, first_row, num_rows, first_panel, num_panels, worker).compute();
    }
}

static void linear_float(const FloatLinearArgs& args, const StepParams& step, Worker& worker) {
    switch (args.weight.type) {
        case FloatType::kFloat32:
            return linear_of<float>(args, step, worker);
        case FloatType::kFloat16:
            return linear_of<Float16>(args, step, worker);
        case FloatType::kBFloat16:
            return linear_of<BFloat16>(args, step, worker);
    }
}

// Copies one panel: `rows` rows of numbers of type U, turned.
template <class U>
static void pack_panel(const std::byte* from, int64_t row_bytes, int64_t rows, int64_t in, U* to) {
    for (int64_t k = 0; k < in; ++k) {
        for (int64_t r = 0; r < kPanelRows; ++r) {
            U value = 0;
            if (r < rows) {
                // The mapped file need not be aligned.
                __builtin_memcpy(&value, from + r * row_bytes + k * int64_t(sizeof(U)), sizeof(U));
            }
            to[k * kPanelRows + r] = value;
        }
    }
}

static void pack_float(const PackFloatArgs& args, const StepParams&, Worker& worker) {
    int64_t panels = (args.out + kPanelRows - 1) / kPanelRows;
    for (int64_t panel; (panel = worker.next(panels)) >= 0;) {
        int64_t row = panel * kPanelRows;
        int64_t rows = args.out - row < kPanelRows ? args.out - row : kPanelRows;
        const std::byte* from = static_cast<const std::byte*>(args.weight) + row * args.row_bytes;
        int64_t first = panel * args.in * kPanelRows;
        if (args.type == FloatType::kFloat32) {
            pack_panel(from, args.row_bytes, rows, args.in,
                       static_cast<uint32_t*>(args.panels) + first);
        } else {
            pack_panel(from, args.row_bytes, rows, args.in,
                       static_cast<uint16_t*>(args.panels) + first);
        }
    }
}

template <class T>
static void embed(const FloatEmbeddingArgs& args, int64_t token, int64_t first, int64_t end,
                  float* out) {
    const T* from = static_cast<const T*>(args.weight.panels) +
                    token / kPanelRows * args.weight.in * kPanelRows + token % kPanelRows;
    T sixteen[kLanes];
    for (int64_t k = first; k < end; k += kLanes) {
        int64_t lanes = end - k < kLanes ? end - k : kLanes;
        for (int64_t i = 0; i < lanes; ++i) sixteen[i] = from[(k + i) * kPanelRows];
        for (int64_t i = lanes; i < kLanes; ++i) sixteen[i] = T{};
        store(out + k, widen(sixteen) * broadcast(args.scale), first_lanes(int(lanes)));
    }
}

static void embedding_float(const FloatEmbeddingArgs& args, const StepParams& step,
                            Worker& worker) {
    constexpr int64_t kPiece = 256;
    int64_t in = args.weight.in;
    int64_t pieces = (in + kPiece - 1) / kPiece;
    const int64_t* token_ids = args.token_ids == nullptr ? step.token_ids : args.token_ids;
    int64_t units = args.rows.count(step) * pieces;
    int64_t end_unit = units * (worker.id() + 1) / worker.count();
    for (int64_t unit = units * worker.id() / worker.count(); unit < end_unit; ++unit) {
        int64_t row = unit / pieces, first = unit % pieces * kPiece;
        int64_t end = in - first < kPiece ? in : first + kPiece;
        int64_t token = token_ids[row];
        float* out = args.out + row * args.out_stride;
        if (token < 0 || token >= args.weight.out) {
            for (int64_t k = first; k < end; ++k) out[k] = __builtin_nanf("");
        } else if (args.weight.type == FloatType::kFloat32) {
            embed<float>(args, token, first, end, out);
        } else if (args.weight.type == FloatType::kFloat16) {
            embed<Float16>(args, token, first, end, out);
        } else {
            embed<BFloat16>(args, token, first, end, out);
        }
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(FloatLinearTable, float_linear, AMBIDEX_FLOAT_LINEAR_KERNELS)
