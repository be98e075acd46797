// Intel's tile registers (AMX): eight matrices of up to 16 rows of 64 bytes, and a product of them.
//
// Kernels use the five functions below, which exist twice: as instructions, and (with
// AMBIDEX_EMULATED_TILES) as plain C++ that does what Intel's manual says of each instruction, so
// that kernels can be tested, and watched by sanitizers, on processors without tiles.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ambidex::AMBIDEX_LEVEL {

// What LDTILECFG reads: the shape of each tile. All tiles that a thread uses must be in it.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if !defined(AMBIDEX_EMULATED_TILES)

// Own assembly, since compilers' intrinsics say too little about memory, or that all of it changes:
// then totals could not stay in registers.
inline void tile_configure(const TileShapes& shapes) {
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}
// A thread that holds no tiles is switched sooner.
inline void tile_release() { asm volatile("tilerelease"); }

template <int kTile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// `memory` is the whole object that the rows lie in, so that the compiler knows what is read.
template <int kTile, class Memory>
inline void tile_load(const Memory& memory, int64_t offset, int64_t stride) {
    const uint8_t* first_row = reinterpret_cast<const uint8_t*>(&memory) + offset;
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(first_row), "r"(stride), "i"(kTile), "m"(memory));
}
template <int kTile, class Memory>
inline void tile_store(Memory& memory, int64_t stride) {
    asm volatile("tilestored %%tmm%c3, (%1,%2,1)"
                 : "=m"(memory)
                 : "r"(&memory), "r"(stride), "i"(kTile));
}
// Adds to each 32-bit number of kSum [m][n] the products of four signed bytes of kSigned's row m
// with four unsigned ones of kUnsigned's column n, for all k: kUnsigned holds bytes 4k to 4k + 3 of
// column n in row k, at 4n.
template <int kSum, int kSigned, int kUnsigned>
inline void tile_dot() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kSigned), "i"(kUnsigned));
}

#else

// One thread's tiles. What the processor answers with an invalid-opcode or protection fault ends
// the process with a message here.
struct TileUnit {
    static constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

    bool is_configured = false;
    TileShapes shapes;
    uint8_t tiles[kTiles][kRows][kRowBytes];

    static void check(bool condition, const char* what) {
        if (condition) return;
        std::fprintf(stderr, "emulated tiles: %s\n", what);
        std::abort();
    }
    void check_tile(int tile) const {
        check(is_configured, "no shapes are configured");
        check(tile >= 0 && tile < kTiles, "there is no such tile");
        check(shapes.rows[tile] > 0, "the tile has no shape");
    }
};
inline thread_local TileUnit tile_unit;

inline void tile_configure(const TileShapes& shapes) {
    TileUnit& unit = tile_unit;
    unit.check(shapes.palette == 1, "palette is not 1");
    unit.check(shapes.start_row == 0, "start_row is not 0");
    for (uint8_t byte : shapes.reserved) unit.check(byte == 0, "reserved bytes are not 0");
    for (int i = 0; i < 16; ++i) {
        if (i < TileUnit::kTiles) {
            unit.check(shapes.rows[i] <= TileUnit::kRows, "a tile has too many rows");
            unit.check(shapes.row_bytes[i] <= TileUnit::kRowBytes, "a tile's rows are too long");
            bool has_rows = shapes.rows[i] > 0, has_bytes = shapes.row_bytes[i] > 0;
            unit.check(has_rows == has_bytes, "a tile has half a shape");
        } else {
            unit.check(shapes.rows[i] == 0 && shapes.row_bytes[i] == 0, "a ninth tile has a shape");
        }
    }
    unit.is_configured = true;
    unit.shapes = shapes;
    std::memset(unit.tiles, 0, sizeof unit.tiles);
}
inline void tile_release() { tile_unit.is_configured = false; }

template <int kTile>
inline void tile_zero() {
    tile_unit.check_tile(kTile);
    std::memset(tile_unit.tiles[kTile], 0, sizeof tile_unit.tiles[kTile]);
}
template <int kTile, class Memory>
inline void tile_load(const Memory& memory, int64_t offset, int64_t stride) {
    tile_zero<kTile>();
    const uint8_t* from = reinterpret_cast<const uint8_t*>(&memory) + offset;
    const int rows = tile_unit.shapes.rows[kTile], row_bytes = tile_unit.shapes.row_bytes[kTile];
    const int64_t end = offset + (rows - 1) * stride + row_bytes;
    tile_unit.check(end <= int64_t(sizeof memory), "a load reads beyond the named memory");
    for (int r = 0; r < rows; ++r) {
        std::memcpy(tile_unit.tiles[kTile][r], from + r * stride, row_bytes);
    }
}
template <int kTile, class Memory>
inline void tile_store(Memory& memory, int64_t stride) {
    tile_unit.check_tile(kTile);
    uint8_t* to = reinterpret_cast<uint8_t*>(&memory);
    const int rows = tile_unit.shapes.rows[kTile], row_bytes = tile_unit.shapes.row_bytes[kTile];
    const int64_t end = (rows - 1) * stride + row_bytes;
    tile_unit.check(end <= int64_t(sizeof memory), "a store writes beyond the named memory");
    for (int r = 0; r < rows; ++r) {
        std::memcpy(to + r * stride, tile_unit.tiles[kTile][r], row_bytes);
    }
}
template <int kSum, int kSigned, int kUnsigned>
inline void tile_dot() {
    TileUnit& unit = tile_unit;
    const TileShapes& shapes = unit.shapes;
    for (int tile : {kSum, kSigned, kUnsigned}) unit.check_tile(tile);
    unit.check(kSum != kSigned && kSum != kUnsigned && kSigned != kUnsigned, "a tile twice");
    unit.check(shapes.row_bytes[kSum] % 4 == 0 && shapes.row_bytes[kSigned] % 4 == 0, "half a sum");
    unit.check(shapes.rows[kSum] == shapes.rows[kSigned], "rows of sum and factor differ");
    unit.check(shapes.row_bytes[kSum] == shapes.row_bytes[kUnsigned], "columns differ");
    unit.check(shapes.row_bytes[kSigned] == 4 * shapes.rows[kUnsigned], "inner sizes differ");
    for (int m = 0; m < shapes.rows[kSum]; ++m) {
        for (int n = 0; n < shapes.row_bytes[kSum] / 4; ++n) {
            uint32_t sum;  // wraps around, as the processor's does
            std::memcpy(&sum, &unit.tiles[kSum][m][4 * n], 4);
            for (int k = 0; k < shapes.rows[kUnsigned]; ++k) {
                for (int i = 0; i < 4; ++i) {
                    sum += uint32_t(int32_t(int8_t(unit.tiles[kSigned][m][4 * k + i])) *
                                    int32_t(unit.tiles[kUnsigned][k][4 * n + i]));
                }
            }
            std::memcpy(&unit.tiles[kSum][m][4 * n], &sum, 4);
        }
    }
}

#endif

}  // namespace ambidex::AMBIDEX_LEVEL
