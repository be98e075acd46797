// Tile registers, real or emulated, against plain loops. Prints how many numbers were compared, or
// the first that is wrong; ends with 77 where this process has no tiles.
#define AMBIDEX_LEVEL tiles
#include "tile_unit.h"

#include <cstdio>
#include <random>
#include <vector>

#include "tile_permission.h"

using namespace ambidex::tiles;

namespace {

constexpr int kSum = 0, kSigned = 1, kUnsigned = 2;
std::mt19937 rng(1);
int compared = 0;

// [rows][stride] bytes, of which a tile takes the first ones of each row.
struct Memory {
    uint8_t bytes[16 * 96];
};

void fill(Memory& memory, bool only_extremes) {
    for (uint8_t& byte : memory.bytes) {
        uint32_t x = rng();
        byte = only_extremes ? (x & 1 ? 0xff : 0x80) : uint8_t(x);
    }
}

bool check_product(int rows, int columns, int inner, bool only_extremes) {
    TileShapes shapes;
    shapes.rows[kSum] = shapes.rows[kSigned] = uint8_t(rows);
    shapes.row_bytes[kSum] = shapes.row_bytes[kUnsigned] = uint16_t(4 * columns);
    shapes.row_bytes[kSigned] = uint16_t(4 * inner);
    shapes.rows[kUnsigned] = uint8_t(inner);
    Memory a, b, before, out;
    for (Memory* memory : {&a, &b, &before, &out}) fill(*memory, only_extremes);
    const Memory untouched = out;
    const int64_t a_stride = 48 + 16 * (inner > 8), b_stride = 64, c_stride = 80;
    const int64_t a_offset = inner <= 8 ? 16 : 0;
    tile_configure(shapes);
    tile_load<kSum>(before, 0, c_stride);
    tile_load<kSigned>(a, a_offset, a_stride);
    tile_load<kUnsigned>(b, 0, b_stride);
    tile_dot<kSum, kSigned, kUnsigned>();
    tile_dot<kSum, kSigned, kUnsigned>();
    tile_store<kSum>(out, c_stride);
    tile_release();
    for (int m = 0; m < rows; ++m) {
        for (int n = 0; n < columns; ++n) {
            uint32_t want, found;
            std::memcpy(&want, before.bytes + m * c_stride + 4 * n, 4);
            std::memcpy(&found, out.bytes + m * c_stride + 4 * n, 4);
            for (int k = 0; k < 4 * inner; ++k) {
                int x = int8_t(a.bytes[a_offset + m * a_stride + k]);
                int y = b.bytes[k / 4 * b_stride + 4 * n + k % 4];
                want += 2 * uint32_t(x * y);
            }
            ++compared;
            if (found == want) continue;
            std::printf("[%d][%d] of %d x %d x %d: %d, and must be %d\n", m, n, rows, columns,
                        inner, int(found), int(want));
            return false;
        }
        for (int64_t i = 4 * columns; i < c_stride && m + 1 < rows; ++i) {
            if (out.bytes[m * c_stride + i] == untouched.bytes[m * c_stride + i]) continue;
            std::printf("a store wrote beyond its row\n");
            return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    if (!ambidex::permit_tiles()) {
        std::puts("no tiles");
        return 77;
    }
    for (bool only_extremes : {false, true}) {
        for (int rows : {1, 3, 16}) {
            for (int columns : {1, 7, 16}) {
                for (int inner : {1, 4, 8, 16}) {
                    if (!check_product(rows, columns, inner, only_extremes)) return 1;
                }
            }
        }
    }
    std::printf("%d numbers\n", compared);
}
