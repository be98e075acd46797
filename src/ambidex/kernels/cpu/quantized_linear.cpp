#include "quantized_linear.h"

#include "level.h"
#include "quantized_tile.h"
#include "simd_math.h"
#if defined(AMBIDEX_TILES)
#include "quantized_amx.h"
#endif

namespace ambidex::AMBIDEX_LEVEL {

#if defined(AMBIDEX_TILES)
template <CodeKind kKind, bool kHalves, Offset kOffset>
constexpr Multiply multiply_sixteen = multiply_tiles<kKind, kHalves, kOffset>;
#else
template <CodeKind kKind, bool kHalves, Offset kOffset>
constexpr Multiply multiply_sixteen = multiply<kKind, kHalves, kOffset, 16>;
// Nothing has to be prepared for vectors.
struct TileSession {
    explicit TileSession(int64_t) {}
};
#endif

template <CodeKind kKind, bool kHalves, Offset kOffset>
static Multiply multiply_for(int rows) {
    switch (rows) {
        case 1: return multiply<kKind, kHalves, kOffset, 1>;
#if defined(AMBIDEX_DOT_AVX512) || defined(AMBIDEX_DOT_AVX2)
        case 2: return multiply<kKind, kHalves, kOffset, 2>;
        case 8: return multiply<kKind, kHalves, kOffset, 8>;
#endif
#if defined(AMBIDEX_DOT_AVX512)
        case 12: return multiply<kKind, kHalves, kOffset, 12>;
        case 16: return multiply_sixteen<kKind, kHalves, kOffset>;
#endif
        default: return multiply<kKind, kHalves, kOffset, 4>;
    }
}
template <CodeKind kKind, bool kHalves>
static Multiply multiply_for(const PackedForm& form, int rows) {
    if constexpr (kKind != CodeKind::kTable8 && kKind != CodeKind::kTable16) {
        if (form.has_minimum()) return multiply_for<kKind, kHalves, Offset::kMinimum>(rows);
        if (form.zero_kind == ZeroKind::kCodes) {
            return multiply_for<kKind, kHalves, Offset::kCodes>(rows);
        }
    }
    return multiply_for<kKind, kHalves, Offset::kConstant>(rows);
}
template <CodeKind kKind>
static Multiply multiply_of(const PackedForm& form, int rows) {
    return form.halves() ? multiply_for<kKind, true>(form, rows)
                         : multiply_for<kKind, false>(form, rows);
}
// The function for a form and a tile's number of rows.
static Multiply multiply_of(const PackedForm& form, int rows) {
    switch (form.code) {
        case CodeKind::k4: return multiply_of<CodeKind::k4>(form, rows);
        case CodeKind::k5: return multiply_of<CodeKind::k5>(form, rows);
        case CodeKind::k6: return multiply_of<CodeKind::k6>(form, rows);
        case CodeKind::k8: return multiply_of<CodeKind::k8>(form, rows);
        case CodeKind::kTable8: return multiply_of<CodeKind::kTable8>(form, rows);
        default: return multiply_of<CodeKind::kTable16>(form, rows);
    }
}

static f32x16 activated(Activation activation, f32x16 gate) {
    switch (activation) {
        case Activation::kSilu: return silu(gate);
        case Activation::kGeluTanh: return gelu_tanh(gate);
        default: return max(zero_f32(), gate);
    }
}

// Writes a tile's sums of one panel.
static void finish(const QuantizedLinearArgs& args, const float* sums, int64_t row, int64_t rows,
                   int64_t panel) {
    int64_t column = panel * kPanelRows;
    int64_t width = args.form.rows - column;
    mask16 lanes = first_lanes(width < kLanes ? int(width) : kLanes);
    f32x16 bias = args.bias == nullptr ? zero_f32() : load(args.bias + column, lanes);
    for (int64_t r = 0; r < rows; ++r) {
        f32x16 out = load(sums + r * kPanelRows);
        if (args.bias != nullptr) out = out + bias;
        if (args.residual != nullptr) {
            out = out + load(args.residual + (row + r) * args.residual_stride + column, lanes);
        }
        store(args.out + (row + r) * args.out_stride + column, out, lanes);
    }
}

// The same for a panel of the gate and one of the same columns' other factor.
static void finish_gated(const QuantizedLinearArgs& args, const float* gates, const float* ups,
                         int64_t row, int64_t rows, int64_t panel) {
    int64_t column = panel * kPanelRows;
    const float* bias = args.bias;
    for (int64_t r = 0; r < rows; ++r) {
        f32x16 gate = load(gates + r * kPanelRows), up = load(ups + r * kPanelRows);
        if (bias != nullptr) {
            gate = gate + load(bias + column);
            up = up + load(bias + args.form.rows / 2 + column);
        }
        store(args.out + (row + r) * args.out_stride + column,
              activated(args.activation, gate) * up);
    }
}

// How a group of rows' product is cut: chunks of about equally many panels, and of about equally
// many blocks of 16 rows where there are few panels for the workers.
struct Chunks {
    int64_t panels, panel_chunks;
    int64_t row_blocks, row_chunks;

    Chunks(int64_t num_panels, int64_t panel_bytes, int64_t rows, int64_t workers)
        : panels(num_panels), row_blocks((rows + 15) / 16) {
        constexpr int64_t kChunkBytes = 1 << 17;  // stay in the second cache while rows pass
        constexpr int64_t kRounds = 4;
        int64_t rounds = panels * panel_bytes / (kChunkBytes * workers) + 1;
        if (rounds < kRounds) rounds = kRounds;
        panel_chunks = rounds * workers;
        if (panel_chunks > panels) panel_chunks = panels;
        row_chunks = (kRounds * workers + panel_chunks - 1) / panel_chunks;
        if (row_chunks > row_blocks) row_chunks = row_blocks;
    }
    int64_t count() const { return panel_chunks * row_chunks; }
    int64_t first_panel(int64_t chunk) const {
        return panels * (chunk / row_chunks) / panel_chunks;
    }
    int64_t end_panel(int64_t chunk) const {
        return panels * (chunk / row_chunks + 1) / panel_chunks;
    }
    int64_t first_row(int64_t chunk) const {
        return row_blocks * (chunk % row_chunks) / row_chunks * 16;
    }
    int64_t end_row(int64_t chunk) const {
        return row_blocks * (chunk % row_chunks + 1) / row_chunks * 16;
    }
};

template <bool kGated>
static void multiply_rows(const QuantizedLinearArgs& args, const Record* records, int64_t first,
                          int64_t rows, Worker& worker) {
    const PackedForm& form = args.form;
    const int64_t panels = kGated ? form.rows / 2 / kPanelRows : form.panels();
    const int64_t panel_bytes = form.panel_bytes;
    const Chunks chunks(panels, kGated ? 2 * panel_bytes : panel_bytes, rows, worker.count());
    alignas(64) float sums[2][16 * kPanelRows];
    const TileSession session(rows);
    while (true) {
        int64_t chunk = worker.next(chunks.count());
        if (chunk < 0) return;
        int64_t panel = chunks.first_panel(chunk), panel_end = chunks.end_panel(chunk);
        int64_t row = chunks.first_row(chunk), row_end = chunks.end_row(chunk);
        if (row_end > rows) row_end = rows;
        while (row < row_end) {
            int tile = tile_rows(rows - row);
            int64_t filled = tile < rows - row ? tile : rows - row;
            Multiply function = multiply_of(form, tile);
            const Record* tile_records = records + row * form.blocks;
            for (int64_t i = panel; i < panel_end; ++i) {
                function(form, args.codebook, args.panels + i * panel_bytes, tile_records, sums[0]);
                if constexpr (kGated) {
                    function(form, args.codebook, args.panels + (panels + i) * panel_bytes,
                             tile_records, sums[1]);
                    finish_gated(args, sums[0], sums[1], first + row, filled, i);
                } else {
                    finish(args, sums[0], first + row, filled, i);
                }
            }
            row += filled;
        }
    }
}

template <bool kGated>
static void linear(const QuantizedLinearArgs& args, const StepParams& step, Worker& worker) {
    // Up to this many blocks every worker quantises for itself: that is sooner done than a barrier.
    constexpr int64_t kAlone = 96;
    const PackedForm& form = args.form;
    const int64_t rows = form.rows == 0 ? 0 : args.rows.count(step);
    for (int64_t first = 0; first < rows; first += QuantizedLinearArgs::kGroupRows) {
        int64_t count = rows - first;
        if (count > QuantizedLinearArgs::kGroupRows) count = QuantizedLinearArgs::kGroupRows;
        const float* x = args.x + first * args.x_stride;
        if (first > 0) worker.barrier();
        Record* records;
        if (count * form.blocks <= kAlone) {
            size_t bytes = size_t(padded_rows(count) * form.blocks) * sizeof(Record);
            records = reinterpret_cast<Record*>(worker.scratch(bytes));
            quantise_rows(form, args.permutation, x, args.x_stride, count, records, 0, 1);
        } else {
            records = reinterpret_cast<Record*>(worker.shared());
            quantise_rows(form, args.permutation, x, args.x_stride, count, records, worker.id(),
                          worker.count());
            worker.barrier();
        }
        multiply_rows<kGated>(args, records, first, count, worker);
    }
}

static void linear_quantized(const QuantizedLinearArgs& args, const StepParams& step,
                             Worker& worker) {
    linear<false>(args, step, worker);
}
static void gated_quantized(const QuantizedLinearArgs& args, const StepParams& step,
                            Worker& worker) {
    linear<true>(args, step, worker);
}

// Where the codes of chunk c of a block lie, and how far up in their bytes.
static int code_at(CodeKind kind, const uint8_t* block, int chunk, int byte) {
    if (kind == CodeKind::k8) return block[chunk * 64 + byte];
    int code = (block[chunk % 4 * 64 + byte] >> (chunk < 4 ? 0 : 4)) & 15;
    if (kind == CodeKind::k5) code |= ((block[256 + byte] >> chunk) & 1) << 4;
    if (kind == CodeKind::k6) {
        code |= ((block[256 + chunk / 4 * 64 + byte] >> (chunk % 4 * 2)) & 3) << 4;
    }
    return code;
}

static void set_code(CodeKind kind, uint8_t* block, int chunk, int byte, int code) {
    if (kind == CodeKind::k8) {
        block[chunk * 64 + byte] = uint8_t(code);
        return;
    }
    block[chunk % 4 * 64 + byte] |= uint8_t((code & 15) << (chunk < 4 ? 0 : 4));
    if (kind == CodeKind::k5) block[256 + byte] |= uint8_t((code >> 4 & 1) << chunk);
    if (kind == CodeKind::k6) {
        block[256 + chunk / 4 * 64 + byte] |= uint8_t((code >> 4 & 3) << (chunk % 4 * 2));
    }
}

// The values of one half-block of row `lane` of a panel.
static f32x16 half_block(const QuantizedEmbeddingArgs& args, const uint8_t* panel, int64_t half,
                         int lane) {
    const PackedForm& form = args.form;
    const uint8_t* block = panel + half / 2 * PackedForm::block_bytes(form.code);
    int64_t group = half >> form.group_shift;
    // One row is wanted of the part's that these load.
    Floats scales = load_scale(form, panel, group, half / 2, lane / kPart * kPart);
    f32x16 scale = broadcast(scales[lane % kPart]);
    float numbers[16];
    for (int i = 0; i < 16; ++i) {
        int code = code_at(form.code, block, int(half % 2) * 4 + i / 4, 4 * lane + i % 4);
        numbers[i] = args.codebook != nullptr ? args.codebook->values[code] : float(code);
    }
    f32x16 values = load(numbers);
    if (args.codebook == nullptr && form.zero_kind == ZeroKind::kConstant) {
        values = values - broadcast(float(form.zero));
    }
    if (form.zero_kind == ZeroKind::kCodes) {
        values = values - broadcast(float(panel[form.zeros + group * kPanelRows + lane]));
    }
    values = scale * values;
    if (form.has_minimum()) {
        Floats minima = load_minimum(form, panel, group, half / 2, lane / kPart * kPart);
        values = values + broadcast(minima[lane % kPart]);
    }
    return values * broadcast(args.scale);
}

static void embedding_quantized(const QuantizedEmbeddingArgs& args, const StepParams& step,
                                Worker& worker) {
    const PackedForm& form = args.form;
    const int64_t* token_ids = args.token_ids == nullptr ? step.token_ids : args.token_ids;
    const int64_t rows = args.rows.count(step);
    const int64_t end = rows * (worker.id() + 1) / worker.count();
    for (int64_t i = rows * worker.id() / worker.count(); i < end; ++i) {
        int64_t row = token_ids[i];
        bool known = row >= 0 && row < form.rows;
        const uint8_t* panel = args.panels + (known ? row / kPanelRows : 0) * form.panel_bytes;
        float* out = args.out + i * args.out_stride;
        for (int64_t column = 0; column < form.columns; column += 16) {
            f32x16 values = known ? half_block(args, panel, column / 16, int(row % kPanelRows))
                                  : broadcast(__builtin_nanf(""));
            int count = form.columns - column < 16 ? int(form.columns - column) : 16;
            if (args.permutation == nullptr) {
                store(out + column, values, first_lanes(count));
                continue;
            }
            float ordered[16];
            store(ordered, values);
            for (int j = 0; j < count; ++j) out[args.permutation[column + j]] = ordered[j];
        }
    }
}

// Copies a panel's rows of [rows][groups] numbers to [groups][16].
static void interleave(const void* from, int64_t size, int64_t groups, int64_t first, int64_t rows,
                       uint8_t* to) {
    if (from == nullptr) return;
    const uint8_t* source = static_cast<const uint8_t*>(from);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t g = 0; g < groups; ++g) {
            const uint8_t* in = source + ((first + r) * groups + g) * size;
            for (int64_t i = 0; i < size; ++i) to[(g * kPanelRows + r) * size + i] = in[i];
        }
    }
}

static void pack_panel(const QuantizedPackArgs& args, int64_t index) {
    const PackedForm& form = args.form;
    uint8_t* panel = args.panels + index * form.panel_bytes;
    __builtin_memset(panel, 0, size_t(form.panel_bytes));
    int64_t first = index * kPanelRows;
    int64_t rows = form.rows - first < kPanelRows ? form.rows - first : kPanelRows;
    for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* codes = args.codes + (first + r) * form.columns;
        for (int64_t column = 0; column < form.columns; ++column) {
            uint8_t* block = panel + column / kBlock * PackedForm::block_bytes(form.code);
            int within = int(column % kBlock);
            set_code(form.code, block, within / 4, int(4 * r) + within % 4, codes[column]);
        }
    }
    int64_t scale_size = form.scale == ScaleKind::kF32 ? 4 : form.scale == ScaleKind::kF16 ? 2 : 1;
    int64_t zero_size = form.zero_kind == ZeroKind::kMinF32   ? 4
                        : form.zero_kind == ZeroKind::kMinF16 ? 2
                                                              : 1;
    interleave(args.scale, scale_size, args.groups, first, rows, panel + form.scales);
    interleave(args.zero, zero_size, args.groups, first, rows, panel + form.zeros);
    interleave(args.super_scale, 2, args.super_groups, first, rows, panel + form.super_scales);
    interleave(args.super_zero, 2, args.super_groups, first, rows, panel + form.super_zeros);
}

static void pack_quantized(const QuantizedPackArgs& args, const StepParams&, Worker& worker) {
    while (true) {
        int64_t panel = worker.next(args.form.panels());
        if (panel < 0) return;
        pack_panel(args, panel);
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(QuantizedLinearTable, quantized_linear, AMBIDEX_QUANTIZED_KERNELS)
