// Multiplies 16 rows of quantised activations with one packed panel by Intel's tile registers.
//
// A panel's chunks lie as a tile product wants its unsigned factor, and records as it wants its
// signed one, so nothing is rearranged: a block is one product of [16][32] and [32][16] bytes,
// exact in 32 bits. The sums are scaled and added by add_piece(), as everywhere: all levels' bits
// agree. Tested on emulated tiles; no processor that has them has run it yet.
#pragma once

#include "quantized_tile.h"
#include "tile_unit.h"

namespace ambidex::AMBIDEX_LEVEL {

// Tiles, by what they hold: 16 rows' activations of a block or of half of one, its codes, and the
// sums of the halves (of the whole block: as of the first), for low and high bytes of codes.
constexpr int kActivationTile[] = {0, 1}, kCodeTile[] = {2, 3};
constexpr int sum_tile(int piece, int plane) { return 4 + 2 * piece + plane; }

// While it lives, this thread's tiles have the shapes that multiply_tiles() needs.
class TileSession {
  public:
    // Does nothing where there are too few rows for a tile.
    explicit TileSession(int64_t rows) : is_open_(tile_rows(rows) == kMaxTile) {
        if (!is_open_) return;
        TileShapes shapes;
        for (int half = 0; half < 2; ++half) {
            shapes.rows[kActivationTile[half]] = kMaxTile;
            shapes.row_bytes[kActivationTile[half]] = uint16_t(kBlock >> half);
            shapes.rows[kCodeTile[half]] = uint8_t(kBlock / 4 >> half);
            shapes.row_bytes[kCodeTile[half]] = 4 * kPanelRows;
        }
        for (int tile = sum_tile(0, 0); tile <= sum_tile(1, 1); ++tile) {
            shapes.rows[tile] = kMaxTile;
            shapes.row_bytes[tile] = 4 * kPanelRows;
        }
        tile_configure(shapes);
    }
    ~TileSession() {
        if (is_open_) tile_release();
    }
    TileSession(const TileSession&) = delete;
    TileSession& operator=(const TileSession&) = delete;

  private:
    const bool is_open_;
};

// A Multiply of 16 rows. A row has at least one block.
template <CodeKind kKind, bool kHalves, Offset kOffset>
static void multiply_tiles(const PackedForm& form, const Codebook* codebook, const uint8_t* panel,
                           const Record* records, float* sums) {
    static_assert(kParts == 1 && kMaxTile == 16);
    constexpr int kPieces = kHalves ? 2 : 1, kChunks = 8 / kPieces;
    constexpr int kPlanes = kKind == CodeKind::kTable16 ? 2 : 1;
    constexpr int kActivations = kActivationTile[kHalves], kCodes = kCodeTile[kHalves];
    constexpr int64_t kStep = PackedForm::block_bytes(kKind);
    constexpr int64_t kPieceBytes = kBlock / kPieces;  // Record::q comes first
    const int64_t ahead_step = form.panel_bytes / form.blocks;
    const Tables<kKind> tables(codebook);
    // Of two blocks: what a tile has stored is read a block later, when it has arrived.
    Ints products[2][kPieces][kPlanes][kMaxTile];
    Floats totals[kMaxTile];
    for (Floats& total : totals) total = Floats{};

    auto multiply_block = [&](int64_t block) __attribute__((always_inline)) {
        using Codes = Words[8];
        using Records = Record[kMaxTile];
        const uint8_t* packed = panel + block * kStep;
        Codes unpacked[kPlanes];
        if constexpr (kKind != CodeKind::k8) {
            unpack<kKind>(packed, tables.low, tables.high, unpacked[0], unpacked[kPlanes - 1]);
        }
        const auto& record = reinterpret_cast<const Records&>(records[block * kMaxTile]);
        auto piece = [&]<int kPiece>() __attribute__((always_inline)) {
            tile_load<kActivations>(record, kPiece * kPieceBytes, sizeof(Record));
            auto plane = [&]<int kPlane>(const Codes& codes) __attribute__((always_inline)) {
                constexpr int kSum = sum_tile(kPiece, kPlane);
                tile_zero<kSum>();
                tile_load<kCodes>(codes, kPiece * kChunks * sizeof(Words), sizeof(Words));
                tile_dot<kSum, kActivations, kCodes>();
                tile_store<kSum>(products[block % 2][kPiece][kPlane], sizeof(Ints));
            };
            if constexpr (kKind == CodeKind::k8) {
                plane.template operator()<0>(reinterpret_cast<const Codes&>(*packed));
            } else {
                plane.template operator()<0>(unpacked[0]);
            }
            if constexpr (kPlanes == 2) plane.template operator()<1>(unpacked[kPlanes - 1]);
        };
        piece.template operator()<0>();
        if constexpr (kHalves) piece.template operator()<1>();
    };
    auto add_block = [&](int64_t block) __attribute__((always_inline)) {
        auto piece = [&]<int kPiece>() __attribute__((always_inline)) {
            const auto& planes = products[block % 2][kPiece];
            add_piece<kKind, kOffset, kPiece, kMaxTile>(
                form, panel, block, 0, records + block * kMaxTile, totals,
                [&](Ints sum, int r) __attribute__((always_inline)) {
                    sum += planes[0][r];
                    if constexpr (kPlanes == 2) sum += planes[kPlanes - 1][r] << 8;
                    return sum;
                });
        };
        piece.template operator()<0>();
        if constexpr (kHalves) piece.template operator()<1>();
    };

    multiply_block(0);
    for (int64_t block = 1; block < form.blocks; ++block) {
        fetch_ahead<kStep>(panel + block * ahead_step);
        multiply_block(block);
        add_block(block - 1);
    }
    add_block(form.blocks - 1);
    for (int r = 0; r < kMaxTile; ++r) store_floats(sums + r * kPanelRows, totals[r]);
}

}  // namespace ambidex::AMBIDEX_LEVEL
