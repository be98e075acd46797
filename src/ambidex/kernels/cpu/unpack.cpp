#include "unpack.h"

#include "level.h"

namespace ambidex::AMBIDEX_LEVEL {

// A type says how many columns and bytes a block has, and unpacks block number `block` of the
// whole matrix. Loops have fixed lengths, so that the compiler makes vectors of them.

static inline uint16_t half_at(const uint8_t* in) {
    uint16_t value;
    __builtin_memcpy(&value, in, sizeof value);
    return value;
}

// kRun bytes: the low halves, then the high ones.
template <int kRun>
static inline void nibbles(const uint8_t* __restrict in, uint8_t* __restrict codes) {
    for (int i = 0; i < kRun; ++i) {
        codes[i] = in[i] & 15;
        codes[kRun + i] = in[i] >> 4;
    }
}

// Bit i of 32 becomes the fifth bit of code i.
static inline void fifth_bits(const uint8_t* __restrict in, uint8_t* __restrict codes) {
    for (int i = 0; i < 4; ++i) {
        // Byte k keeps bit k alone; what is not zero then gets its highest bit set, without a
        // carry into the next byte.
        uint64_t bits = in[i] * 0x0101010101010101u & 0x8040201008040201u;
        bits = (bits + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
        uint64_t eight;
        __builtin_memcpy(&eight, codes + 8 * i, sizeof eight);
        eight |= bits;
        __builtin_memcpy(codes + 8 * i, &eight, sizeof eight);
    }
}

// Eight scales and eight minima of 6 bits in twelve bytes.
static inline void k_scales(const uint8_t* in, int64_t block, const UnpackArgs& args) {
    args.super_scale[block] = half_at(in);
    args.super_minimum[block] = half_at(in + 2);
    uint8_t* scales = args.scale_codes + 8 * block;
    uint8_t* minima = args.minimum_codes + 8 * block;
    const uint8_t *first = in + 4, *second = in + 8, *rest = in + 12;
    for (int i = 0; i < 4; ++i) {
        scales[i] = first[i] & 63;
        minima[i] = second[i] & 63;
        scales[4 + i] = uint8_t((rest[i] & 15) | (first[i] >> 2 & 48));
        minima[4 + i] = uint8_t(rest[i] >> 4 | (second[i] >> 2 & 48));
    }
}

struct Q4_0 {
    static constexpr int kColumns = 32, kBytes = 18;
    static void block(const uint8_t* in, uint8_t* codes, int64_t block, const UnpackArgs& args) {
        args.scale[block] = half_at(in);
        nibbles<16>(in + 2, codes);
    }
};

struct Q4_1 {
    static constexpr int kColumns = 32, kBytes = 20;
    static void block(const uint8_t* in, uint8_t* codes, int64_t block, const UnpackArgs& args) {
        args.scale[block] = half_at(in);
        args.minimum[block] = half_at(in + 2);
        nibbles<16>(in + 4, codes);
    }
};

struct Q5_0 {
    static constexpr int kColumns = 32, kBytes = 22;
    static void block(const uint8_t* in, uint8_t* codes, int64_t block, const UnpackArgs& args) {
        args.scale[block] = half_at(in);
        nibbles<16>(in + 6, codes);
        fifth_bits(in + 2, codes);
    }
};

struct Q5_1 {
    static constexpr int kColumns = 32, kBytes = 24;
    static void block(const uint8_t* in, uint8_t* codes, int64_t block, const UnpackArgs& args) {
        args.scale[block] = half_at(in);
        args.minimum[block] = half_at(in + 2);
        nibbles<16>(in + 8, codes);
        fifth_bits(in + 4, codes);
    }
};

struct Q8_0 {
    static constexpr int kColumns = 32, kBytes = 34;
    static void block(const uint8_t* __restrict in, uint8_t* __restrict codes, int64_t block,
                      const UnpackArgs& args) {
        args.scale[block] = half_at(in);
        for (int i = 0; i < 32; ++i) codes[i] = in[2 + i] ^ 128;
    }
};

struct Q4_K {
    static constexpr int kColumns = 256, kBytes = 144;
    static void block(const uint8_t* in, uint8_t* codes, int64_t block, const UnpackArgs& args) {
        k_scales(in, block, args);
        for (int i = 0; i < 4; ++i) nibbles<32>(in + 16 + 32 * i, codes + 64 * i);
    }
};

struct Q5_K {
    static constexpr int kColumns = 256, kBytes = 176;
    static void block(const uint8_t* __restrict in, uint8_t* __restrict codes, int64_t block,
                      const UnpackArgs& args) {
        k_scales(in, block, args);
        for (int i = 0; i < 4; ++i) nibbles<32>(in + 48 + 32 * i, codes + 64 * i);
        for (int plane = 0; plane < 8; ++plane) {
            for (int i = 0; i < 32; ++i) {
                codes[32 * plane + i] |= uint8_t((in[16 + i] >> plane & 1) << 4);
            }
        }
    }
};

struct Q6_K {
    static constexpr int kColumns = 256, kBytes = 210;
    static void block(const uint8_t* __restrict in, uint8_t* __restrict codes, int64_t block,
                      const UnpackArgs& args) {
        args.super_scale[block] = half_at(in + 208);
        __builtin_memcpy(args.scale_codes + 16 * block, in + 192, 16);
        for (int half = 0; half < 2; ++half) {
            uint8_t* out = codes + 128 * half;
            const uint8_t* high = in + 128 + 32 * half;
            nibbles<64>(in + 64 * half, out);
            for (int plane = 0; plane < 4; ++plane) {
                for (int i = 0; i < 32; ++i) {
                    out[32 * plane + i] |= uint8_t((high[i] >> 2 * plane & 3) << 4);
                }
            }
        }
    }
};

template <class Type>
static void unpack_rows(const UnpackArgs& args, Worker& worker) {
    int64_t first = args.num_rows * worker.id() / worker.count();
    int64_t end = args.num_rows * (worker.id() + 1) / worker.count();
    for (int64_t row = first; row < end; ++row) {
        const uint8_t* in = args.rows + row * args.row_bytes;
        for (int64_t i = 0; i < args.blocks; ++i) {
            int64_t block = row * args.blocks + i;
            Type::block(in + i * Type::kBytes, args.codes + block * Type::kColumns, block, args);
        }
    }
}

static void unpack_blocks(const UnpackArgs& args, const StepParams&, Worker& worker) {
    switch (args.type) {
        case BlockType::kQ4_0: return unpack_rows<Q4_0>(args, worker);
        case BlockType::kQ4_1: return unpack_rows<Q4_1>(args, worker);
        case BlockType::kQ5_0: return unpack_rows<Q5_0>(args, worker);
        case BlockType::kQ5_1: return unpack_rows<Q5_1>(args, worker);
        case BlockType::kQ8_0: return unpack_rows<Q8_0>(args, worker);
        case BlockType::kQ4_K: return unpack_rows<Q4_K>(args, worker);
        case BlockType::kQ5_K: return unpack_rows<Q5_K>(args, worker);
        case BlockType::kQ6_K: return unpack_rows<Q6_K>(args, worker);
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(UnpackTable, unpack, AMBIDEX_UNPACK_KERNELS)
