// Quantises activations and multiplies a tile of up to 16 rows of them with one packed panel. Other
// kernels with low-bit weights may use it, too.
//
// Per 32 inputs of a row: scale = largest magnitude / 127, and each input becomes the whole number
// nearest to input / scale. Per output: one float32 accumulator, over blocks in rising order,
//   acc = fma(float(sum of (code - zero) * number), weight scale * scale, acc)
//   acc = fma(minimum, scale * float(sum of numbers), acc)          where there are minima,
// with the sums exact in 32 bits. Groups of 16: the same for each half of a block. So an output's
// bits depend on its row of inputs and its row of weights alone.
#pragma once

#include "quantized_dot.h"

namespace ambidex::AMBIDEX_LEVEL {

// 32 quantised inputs of one row.
struct Record {
    int8_t q[32];
    float scale;  // times the codebook's unit
    // Of the whole block, or of its two halves: what the product starts from, or is the minimum's
    // factor.
    union {
        int32_t start[2];
        float sum[2];
    };
    int32_t unused;
};
static_assert(sizeof(Record) == QuantizedLinearArgs::kRecordBytes);

// Rows of the largest tile, and of the first tile of fewer rows (its last rows may be empty). Sizes
// are those that the vector registers hold sums for, and few, since each is a function of its own.
#if defined(AMBIDEX_DOT_AVX512)
constexpr int kMaxTile = 16;
constexpr int kTileSizes[] = {0, 1, 2, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 16};
#elif defined(AMBIDEX_DOT_AVX2)
constexpr int kMaxTile = 8;
constexpr int kTileSizes[] = {0, 1, 2, 4, 4, 4, 4, 8};
#else
constexpr int kMaxTile = 4;
constexpr int kTileSizes[] = {0, 1, 4, 4};
#endif
inline int tile_rows(int64_t rows) { return rows < kMaxTile ? kTileSizes[rows] : kMaxTile; }

// Rows of all tiles of `rows` rows.
inline int64_t padded_rows(int64_t rows) {
    int64_t padded = rows / kMaxTile * kMaxTile;
    int64_t rest = rows - padded;
    while (rest > 0) {
        padded += tile_rows(rest);
        rest -= tile_rows(rest);
    }
    return padded;
}

// A group of rows' records: tile after tile, in each block after block, in each row after row.
inline Record* record_at(Record* records, int64_t rows, int64_t blocks, int64_t row,
                         int64_t block) {
    int64_t first = row / kMaxTile * kMaxTile;
    int64_t rest = rows - first;
    while (row - first >= tile_rows(rest)) {
        first += tile_rows(rest);
        rest -= tile_rows(rest);
    }
    return records + first * blocks + block * tile_rows(rest) + (row - first);
}

static void quantise_block(const PackedForm& form, f32x16 a, f32x16 b, Record* record) {
    float largest = max_lane(max(abs(a), abs(b)));
    float scale = largest / 127.0f;
    if (!all_finite(a) || !all_finite(b)) {
        scale = __builtin_nanf("");
        a = b = zero_f32();
    } else if (scale == 0) {
        a = b = zero_f32();
    } else {
        // A scale without all its digits can leave quotients beyond 127.
        f32x16 divisor = broadcast(scale), low = broadcast(-127.0f), high = broadcast(127.0f);
        a = min(high, max(low, round(a / divisor)));
        b = min(high, max(low, round(b / divisor)));
    }
    store_i8(record->q, to_i32(a));
    store_i8(record->q + 16, to_i32(b));
    // Whole numbers of this size add up exactly in float32.
    float sums[2] = {sum(a), sum(b)};
    if (form.group_shift > 0) {
        sums[0] += sums[1];
        sums[1] = 0;
    }
    if (form.has_minimum()) {
        record->sum[0] = scale * sums[0];
        record->sum[1] = scale * sums[1];
    } else {
        int32_t factor = 1;
        if (form.zero_kind == ZeroKind::kConstant) {
            factor = code_offset(form.code, false) - form.zero;
            if (form.code == CodeKind::kTable16) factor += code_offset(form.code, false) * 256;
        }
        record->start[0] = factor * int32_t(sums[0]);
        record->start[1] = factor * int32_t(sums[1]);
    }
    record->scale = scale * form.unit;
}

// Quantises share `part` of `parts` of x's rows.
static void quantise_rows(const PackedForm& form, const int32_t* permutation, const float* x,
                          int64_t stride, int64_t rows, Record* records, int64_t part,
                          int64_t parts) {
    int64_t units = padded_rows(rows) * form.blocks;
    int64_t first = units * part / parts, end = units * (part + 1) / parts;
    for (int64_t unit = first; unit < end; ++unit) {
        int64_t row = unit / form.blocks, block = unit % form.blocks;
        Record* record = record_at(records, rows, form.blocks, row, block);
        if (row >= rows) {
            __builtin_memset(static_cast<void*>(record), 0, sizeof *record);
            continue;
        }
        const float* in = x + row * stride;
        int64_t column = block * kBlock;
        int64_t count = form.columns - column;
        if (permutation != nullptr) {
            float gathered[kBlock] = {};
            for (int64_t i = 0; i < kBlock && i < count; ++i) {
                gathered[i] = in[permutation[column + i]];
            }
            quantise_block(form, load(gathered), load(gathered + 16), record);
        } else if (count >= kBlock) {
            quantise_block(form, load(in + column), load(in + column + 16), record);
        } else {
            f32x16 a = load(in + column, first_lanes(count < 16 ? int(count) : 16));
            f32x16 b = zero_f32();
            if (count > 16) b = load(in + column + 16, first_lanes(int(count) - 16));
            quantise_block(form, a, b, record);
        }
    }
}

// Scales, minima and zeros of a group, for the rows from `lane` on.
inline Floats load_scale(const PackedForm& form, const uint8_t* panel, int64_t group,
                         int64_t block, int lane) {
    int64_t i = group * kPanelRows + lane;
    const uint8_t* scales = panel + form.scales;
    if (form.scale == ScaleKind::kF16) {
        return load_halves(reinterpret_cast<const uint16_t*>(scales) + i);
    }
    if (form.scale == ScaleKind::kF32) {
        return load_floats(reinterpret_cast<const float*>(scales) + i);
    }
    Ints code = form.scale == ScaleKind::kU8 ? load_ints_u8(scales + i) : load_ints_i8(scales + i);
    const uint8_t* super = panel + form.super_scales;
    int64_t at = block / kSuperBlocks * kPanelRows + lane;
    return to_floats(code) * load_halves(reinterpret_cast<const uint16_t*>(super) + at);
}
inline Floats load_minimum(const PackedForm& form, const uint8_t* panel, int64_t group,
                           int64_t block, int lane) {
    int64_t i = group * kPanelRows + lane;
    const uint8_t* minima = panel + form.zeros;
    if (form.zero_kind == ZeroKind::kMinF16) {
        return load_halves(reinterpret_cast<const uint16_t*>(minima) + i);
    }
    if (form.zero_kind == ZeroKind::kMinF32) {
        return load_floats(reinterpret_cast<const float*>(minima) + i);
    }
    const uint8_t* super = panel + form.super_zeros;
    int64_t at = block / kSuperBlocks * kPanelRows + lane;
    return -(to_floats(load_ints_u8(minima + i)) *
             load_halves(reinterpret_cast<const uint16_t*>(super) + at));
}

enum class Offset { kConstant, kCodes, kMinimum };

// sums[row][16] = the tile's rows times the panel's.
using Multiply = void (*)(const PackedForm& form, const Codebook* codebook, const uint8_t* panel,
                          const Record* records, float* sums);

template <CodeKind kKind, bool kHalves, Offset kOffset, int kRows>
static void multiply(const PackedForm& form, const Codebook* codebook, const uint8_t* panel,
                     const Record* records, float* sums) {
    constexpr bool kMinimum = kOffset == Offset::kMinimum;
    // One row reads weights faster than the processor fetches them by itself.
    constexpr bool kPrefetch = kRows <= 4;
    constexpr int64_t kAhead = 2048;
    constexpr int kPieces = kHalves ? 2 : 1, kChunks = 8 / kPieces;
    const int64_t step = PackedForm::block_bytes(kKind);
    const int64_t ahead_step = form.panel_bytes / form.blocks;
    Words table{}, high_table{};
    if constexpr (kKind == CodeKind::kTable8 || kKind == CodeKind::kTable16) {
        table = table_of(codebook->low);
        high_table = table_of(codebook->high);
    }
    for (int part = 0; part < kParts; ++part) {
        const int lane = part * kPart;
        const Record* record = records;
        Floats totals[kRows];
        for (int r = 0; r < kRows; ++r) totals[r] = Floats{};
        for (int64_t block = 0; block < form.blocks; ++block, record += kRows) {
            if (kPrefetch && part == 0) {
                const uint8_t* ahead = panel + block * ahead_step + kAhead;
                for (int64_t i = 0; i < ahead_step; i += 64) __builtin_prefetch(ahead + i);
            }
            Words codes[8], high[8];
            unpack<kKind>(panel + block * step + 4 * lane, table, high_table, codes, high);
            auto piece = [&]<int kPiece>() {
                const int64_t group = (2 * block + kPiece) >> form.group_shift;
                Floats scale = load_scale(form, panel, group, block, lane);
                Floats minimum{};
                Ints zero{};
                if constexpr (kMinimum) minimum = load_minimum(form, panel, group, block, lane);
                if constexpr (kOffset == Offset::kCodes) {
                    zero = code_offset(kKind, false) -
                           load_ints_u8(panel + form.zeros + group * kPanelRows + lane);
                }
#pragma GCC unroll 16
                for (int r = 0; r < kRows; ++r) {
                    const Record& in = record[r];
                    Ints sum{};
                    if constexpr (kOffset == Offset::kConstant) sum = all(in.start[kPiece]);
                    if constexpr (kOffset == Offset::kCodes) sum = zero * in.start[kPiece];
                    sum = dot<kKind, kMinimum, kPiece * kChunks, kChunks>(sum, codes, in.q);
                    if constexpr (kKind == CodeKind::kTable16) {
                        sum += dot<kKind, kMinimum, kPiece * kChunks, kChunks>(Ints{}, high, in.q)
                               << 8;
                    }
                    totals[r] = multiply_add(to_floats(sum), scale * all(in.scale), totals[r]);
                    if constexpr (kMinimum) {
                        totals[r] = multiply_add(minimum, all(in.sum[kPiece]), totals[r]);
                    }
                }
            };
            piece.template operator()<0>();
            if constexpr (kHalves) piece.template operator()<1>();
        }
        for (int r = 0; r < kRows; ++r) store_floats(sums + r * kPanelRows + lane, totals[r]);
    }
}

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
        case 16: return multiply<kKind, kHalves, kOffset, 16>;
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
    return form.group_shift == 0 ? multiply_for<kKind, true>(form, rows)
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

}  // namespace ambidex::AMBIDEX_LEVEL
