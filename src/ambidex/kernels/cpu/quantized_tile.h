// Quantises activations and multiplies a tile of up to 16 rows of them with one packed panel. Other
// kernels with low-bit weights may use it, too.
//
// Per 32 inputs of a row (16 where the form is fine): scale = largest magnitude / 127, and each
// input becomes the whole number nearest to input / scale. Per output: one float32 accumulator, over blocks in rising order,
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
    float scale[2];  // of the halves, times the codebook's unit; alike where blocks have one
    // Of the whole block, or of its two halves: what the product starts from, or is the minimum's
    // factor.
    union {
        int32_t start[2];
        float sum[2];
    };
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
// Returns the first one of a row, and how many lie between two of its blocks.
inline Record* records_of(Record* records, int64_t rows, int64_t blocks, int64_t row,
                          int64_t* stride) {
    int64_t first = row / kMaxTile * kMaxTile;
    int64_t rest = rows - first;
    while (row - first >= tile_rows(rest)) {
        first += tile_rows(rest);
        rest -= tile_rows(rest);
    }
    *stride = tile_rows(rest);
    return records + first * blocks + (row - first);
}

// What the sum of a block's numbers is multiplied by, where there are no minima.
inline int32_t start_factor(const PackedForm& form) {
    if (form.zero_kind != ZeroKind::kConstant) return 1;
    int32_t offset = code_offset(form.code, false);
    if (form.code == CodeKind::kTable16) offset += offset * 256;
    return offset - form.zero;
}

// 32 inputs in the order of the columns; zeros beyond the last.
struct Inputs {
    f32x16 a, b;
};
inline Inputs load_block(const PackedForm& form, const int32_t* permutation, const float* row,
                         int64_t block) {
    int64_t column = block * kBlock;
    int64_t count = form.columns - column;
    if (permutation != nullptr) {
        float gathered[kBlock] = {};
        for (int64_t i = 0; i < kBlock && i < count; ++i) {
            gathered[i] = row[permutation[column + i]];
        }
        return {load(gathered), load(gathered + 16)};
    }
    if (count >= kBlock) return {load(row + column), load(row + column + 16)};
    Inputs in{load(row + column, first_lanes(count < 16 ? int(count) : 16)), zero_f32()};
    if (count > 16) in.b = load(row + column + 16, first_lanes(int(count) - 16));
    return in;
}

// 16 inputs over their scale, as whole numbers.
inline f32x16 whole_numbers(f32x16 in, float scale) {
    if (!(scale > 0)) return zero_f32();  // NaN, too
    // A scale too small for all its digits can leave quotients beyond 127.
    f32x16 low = broadcast(-127.0f), high = broadcast(127.0f);
    return min(high, max(low, round(in / broadcast(scale))));
}

inline void quantise_block(const PackedForm& form, int32_t factor, Inputs in, float first_scale,
                           float second_scale, Record* record) {
    f32x16 a = whole_numbers(in.a, first_scale), b = whole_numbers(in.b, second_scale);
    store_i8(record->q, to_i32(a));
    store_i8(record->q + 16, to_i32(b));
    // Whole numbers of this size add up exactly in float32.
    float sums[2] = {0, 0};
    if (!form.halves()) {
        sums[0] = sum(a + b);
    } else {
        sums[0] = sum(a);
        sums[1] = sum(b);
    }
    if (form.has_minimum()) {
        record->sum[0] = first_scale * sums[0];
        record->sum[1] = second_scale * sums[1];
    } else {
        record->start[0] = factor * int32_t(sums[0]);
        record->start[1] = factor * int32_t(sums[1]);
    }
    record->scale[0] = first_scale * form.unit;
    record->scale[1] = second_scale * form.unit;
}

// Blocks of one row. Scales come first, of several blocks: each one waits long for its division,
// so they had better wait together.
inline void quantise_blocks(const PackedForm& form, const int32_t* permutation, const float* row,
                            int64_t block, int64_t block_end, Record* records, int64_t stride) {
    const int64_t parts = form.fine ? 2 : 1, kBatch = kLanes / parts;
    const int32_t factor = start_factor(form);
    for (; block < block_end; block += kBatch) {
        int64_t count = block_end - block < kBatch ? block_end - block : kBatch;
        float scales[kLanes] = {};
        for (int64_t i = 0; i < count; ++i) {
            Inputs in = load_block(form, permutation, row, block + i);
            f32x16 a = abs(in.a), b = abs(in.b);
            // What is not finite spoils its whole block.
            bool finite = all_finite(in.a) && all_finite(in.b);
            if (form.fine) {
                scales[2 * i] = finite ? max_lane(a) : __builtin_nanf("");
                scales[2 * i + 1] = finite ? max_lane(b) : __builtin_nanf("");
            } else {
                scales[i] = finite ? max_lane(max(a, b)) : __builtin_nanf("");
            }
        }
        store(scales, load(scales) / broadcast(127.0f));
        for (int64_t i = 0; i < count; ++i) {
            Inputs in = load_block(form, permutation, row, block + i);
            quantise_block(form, factor, in, scales[parts * i], scales[parts * i + parts - 1],
                           records + (block + i) * stride);
        }
    }
}

// Quantises share `part` of `parts` of x's rows.
static void quantise_rows(const PackedForm& form, const int32_t* permutation, const float* x,
                          int64_t stride, int64_t rows, Record* records, int64_t part,
                          int64_t parts) {
    const int64_t blocks = form.blocks;
    const int64_t total = padded_rows(rows) * blocks;
    const int64_t end = total * (part + 1) / parts;
    for (int64_t unit = total * part / parts; unit < end;) {
        int64_t row = unit / blocks, block = unit % blocks;
        int64_t block_end = blocks < block + (end - unit) ? blocks : block + (end - unit);
        unit += block_end - block;
        int64_t tile;
        Record* record = records_of(records, rows, blocks, row, &tile);
        if (row < rows) {
            quantise_blocks(form, permutation, x + row * stride, block, block_end, record, tile);
            continue;
        }
        for (; block < block_end; ++block) {
            __builtin_memset(static_cast<void*>(record + block * tile), 0, sizeof *record);
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

// A codebook's numbers, where there is one.
template <CodeKind kKind>
struct Tables {
    Words low{}, high{};

    explicit Tables(const Codebook* codebook) {
        if constexpr (kKind == CodeKind::kTable8 || kKind == CodeKind::kTable16) {
            low = table_of(codebook->low);
            high = table_of(codebook->high);
        }
        (void)codebook;
    }
};

// Fetches weights into the second and the first cache ahead of their use, front to back and in step
// with it, so that a panel's scales are fetched as well. Else even 16 rows wait.
template <int64_t kStep>
AMBIDEX_INLINE void fetch_ahead(const uint8_t* now) {
    constexpr int64_t kFar = 12288, kNear = 1536, kLines = kStep / 64 + 1;
    const uint8_t* near = now + kNear;
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) {
        __builtin_prefetch(near + (kFar - kNear) + i * 64, 0, 2);
        __builtin_prefetch(near + i * 64, 0, 3);
    }
}

// Adds a block's products, or those of one of its halves, to the rows' totals.
// `add_products(sum, r)` gives `sum` plus the sums of row r's products, for the panel's rows from
// `lane` on.
template <CodeKind kKind, Offset kOffset, int kPiece, int kRows, class AddProducts>
AMBIDEX_INLINE void add_piece(const PackedForm& form, const uint8_t* panel, int64_t block, int lane,
                              const Record* record, Floats (&totals)[kRows],
                              AddProducts add_products) {
    constexpr bool kMinimum = kOffset == Offset::kMinimum;
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
        sum = add_products(sum, r);
        totals[r] = multiply_add(to_floats(sum), scale * all(in.scale[kPiece]), totals[r]);
        if constexpr (kMinimum) totals[r] = multiply_add(minimum, all(in.sum[kPiece]), totals[r]);
    }
}

template <CodeKind kKind, bool kHalves, Offset kOffset, int kRows>
static void multiply(const PackedForm& form, const Codebook* codebook, const uint8_t* panel,
                     const Record* records, float* sums) {
    constexpr bool kMinimum = kOffset == Offset::kMinimum;
    constexpr int kPieces = kHalves ? 2 : 1, kChunks = 8 / kPieces;
    constexpr int64_t kStep = PackedForm::block_bytes(kKind);
    constexpr int kTogether = kRows <= 2 ? kParts : 1;
    const int64_t ahead_step = form.panel_bytes / form.blocks;
    const Tables<kKind> tables(codebook);
    for (int first_part = 0; first_part < kParts; first_part += kTogether) {
        const Record* record = records;
        Floats totals[kTogether][kRows];
        for (auto& part : totals) {
            for (Floats& total : part) total = Floats{};
        }
        for (int64_t block = 0; block < form.blocks; ++block, record += kRows) {
            if (first_part == 0) fetch_ahead<kStep>(panel + block * ahead_step);
#pragma GCC unroll 2
            for (int part = 0; part < kTogether; ++part) {
                const int lane = (first_part + part) * kPart;
                Words codes[8], high[8];
                unpack<kKind>(panel + block * kStep + 4 * lane, tables.low, tables.high, codes,
                              high);
                auto piece = [&]<int kPiece>() {
                    add_piece<kKind, kOffset, kPiece, kRows>(
                        form, panel, block, lane, record, totals[part],
                        [&](Ints sum, int r) __attribute__((always_inline)) {
                            constexpr int kFirst = kPiece * kChunks;
                            const int8_t* q = record[r].q;
                            sum = dot<kKind, kMinimum, kFirst, kChunks>(sum, codes, q);
                            if constexpr (kKind == CodeKind::kTable16) {
                                sum += dot<kKind, kMinimum, kFirst, kChunks>(Ints{}, high, q) << 8;
                            }
                            return sum;
                        });
                };
                piece.template operator()<0>();
                if constexpr (kHalves) piece.template operator()<1>();
            }
        }
        for (int part = 0; part < kTogether; ++part) {
            float* out = sums + (first_part + part) * kPart;
            for (int r = 0; r < kRows; ++r) store_floats(out + r * kPanelRows, totals[part][r]);
        }
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL
