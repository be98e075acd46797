// Products with a low-bit matrix: weights stay packed, activations are quantised to 8 bits.
//
// A packed matrix is a row of panels of 16 matrix rows each (the last one padded with zeros), all
// of the same size, a multiple of 64 bytes. A panel holds, one after the other:
//   codes        of every block of 32 columns: 4 to 8 vectors of 64 bytes. A vector holds 4
//                neighbouring columns (a "chunk") of 16 rows: row r at bytes 4r .. 4r + 3.
//                8 bits: vector j holds chunk j. 4 bits: vector j (of 4) holds chunk j in the low
//                halves of its bytes and chunk j + 4 in the high ones. 5 bits: those four vectors,
//                then one whose bit j is the highest bit of chunk j. 6 bits: those four, then
//                two whose bits 2 (j % 4) and up are the two highest of chunk j; vector j / 4.
//   scales       [groups][16]
//   zeros        [groups][16]: zero codes, minima or minimum codes, where there are any
//   super-scales [super-groups][16], super-minima likewise, where scales are codes
#pragma once

#include "context.h"

namespace ambidex {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kBlock = 32;       // columns that share an activation scale, or its halves do
constexpr int64_t kSuperBlocks = 8;  // blocks that share a super-scale

// How a code becomes a whole number: as it is, or through a table of 8- or 16-bit numbers.
enum class CodeKind : uint8_t { k4, k5, k6, k8, kTable8, kTable16 };
enum class ScaleKind : uint8_t { kF16, kF32, kI8, kU8 };  // the last two times a super-scale
enum class ZeroKind : uint8_t { kConstant, kCodes, kMinF16, kMinF32, kMinCodes };

struct PackedForm {
    int64_t rows, columns;
    int64_t blocks;
    int64_t panel_bytes;
    int32_t scales, zeros, super_scales, super_zeros;  // where they start in a panel, in bytes
    int32_t groups;                                    // stored a row, whole blocks' worth
    int32_t group_shift;  // half-block h (16 columns) is in group h >> group_shift
    int32_t zero;         // the number that stands for zero
    float unit;           // a table's numbers times this are the codebook's
    CodeKind code;
    ScaleKind scale;
    ZeroKind zero_kind;
    bool fine;  // each half-block of activations has a scale

    // Whether the halves of a block are scaled apart.
    AMBIDEX_INLINE bool halves() const { return fine || group_shift == 0; }
    AMBIDEX_INLINE int64_t panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
    AMBIDEX_INLINE int64_t code_bytes() const { return block_bytes(code) * blocks; }
    AMBIDEX_INLINE static constexpr int64_t block_bytes(CodeKind code) {
        return code == CodeKind::k8   ? 512
               : code == CodeKind::k6 ? 384
               : code == CodeKind::k5 ? 320
                                      : 256;
    }
    AMBIDEX_INLINE bool has_minimum() const { return zero_kind >= ZeroKind::kMinF16; }
};

// What a code means, where it is an index: values for embedding, numbers for products.
struct Codebook {
    float values[16];
    uint8_t low[16];   // table number + 2^7, or the low byte of the number + 2^15
    uint8_t high[16];  // the high byte of the number + 2^15
};

enum class Activation : int32_t { kSilu, kGeluTanh, kRelu };

// out = x times the matrix transposed, plus bias, plus residual, where there are any. Strides are
// in elements.
struct QuantizedLinearArgs {
    const float* x;
    const uint8_t* panels;
    const Codebook* codebook;    // or null
    const int32_t* permutation;  // or null: column c multiplies input permutation[c]
    const float* bias;
    const float* residual;
    float* out;
    int64_t x_stride, residual_stride, out_stride;
    Rows rows;
    PackedForm form;
    // Of gated_quantized alone: out = activation(gate) * up, the matrix being [gate; up].
    Activation activation;

    // A row group's activations are quantised together, then multiplied.
    static constexpr int64_t kGroupRows = 256;
    static constexpr int64_t kRecordBytes = 48;  // of a block of a row
    static size_t shared_bytes(const PackedForm& form, int64_t max_rows) {
        int64_t rows = max_rows < kGroupRows ? max_rows : kGroupRows;
        return size_t((rows + 3) * form.blocks * kRecordBytes);
    }
};

// out = the matrix' rows token_ids times scale; NaN where there is no such row.
struct QuantizedEmbeddingArgs {
    const int64_t* token_ids;  // null: the step's
    const uint8_t* panels;
    const Codebook* codebook;
    const int32_t* permutation;
    float* out;
    int64_t out_stride;
    Rows rows;
    PackedForm form;
    float scale;
};

// Matrices one row after the other; null where the form has none.
struct QuantizedPackArgs {
    const uint8_t* codes;
    const void* scale;
    const void* zero;
    const void* super_scale;
    const void* super_zero;
    int64_t groups, super_groups;  // a row of the sources
    uint8_t* panels;
    PackedForm form;
};

#define AMBIDEX_QUANTIZED_KERNELS(X)            \
    X(linear_quantized, QuantizedLinearArgs)    \
    X(gated_quantized, QuantizedLinearArgs)     \
    X(embedding_quantized, QuantizedEmbeddingArgs) \
    X(pack_quantized, QuantizedPackArgs)

struct QuantizedLinearTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_QUANTIZED_KERNELS(X)
#undef X
};

}  // namespace ambidex
