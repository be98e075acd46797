// From the blocks of a GGUF file to plain codes and scales, while a model is loaded.
#pragma once

#include "context.h"

namespace ambidex {

// Numbers are those of GGUF.
enum class BlockType : int64_t {
    kQ4_0 = 2,
    kQ4_1 = 3,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kQ8_0 = 8,
    kQ4_K = 12,
    kQ5_K = 13,
    kQ6_K = 14,
};

// Results are dense, in the order of the rows; what a type does not have is null. Halves are
// copied as they are.
struct UnpackArgs {
    const uint8_t* rows;
    uint8_t* codes;
    uint16_t* scale;
    uint16_t* minimum;
    uint8_t* scale_codes;
    uint8_t* minimum_codes;
    uint16_t* super_scale;
    uint16_t* super_minimum;
    int64_t row_bytes;  // from one row to the next
    int64_t num_rows, blocks;
    BlockType type;
};

#define AMBIDEX_UNPACK_KERNELS(X) X(unpack_blocks, UnpackArgs)

struct UnpackTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_UNPACK_KERNELS(X)
#undef X
};

}  // namespace ambidex
