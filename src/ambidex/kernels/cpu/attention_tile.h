// Attention of a few query rows over one tile of 64 tokens: the inner loops.
//
// Exactness: a score is one chain of fma over rising channels, a weighted sum one chain over rising
// tokens, whatever rows and columns are blocked together; a token that a row does not see has a
// weight of zero, which leaves the sum as it is.
#pragma once

#include "attention.h"
#include "simd_math.h"

#if defined(__clang__)
#define AMBIDEX_UNROLL _Pragma("clang loop unroll(full)")
#else
#define AMBIDEX_UNROLL _Pragma("GCC unroll 8")
#endif

namespace ambidex::AMBIDEX_LEVEL {

// Rows of queries (heads) that are computed together.
constexpr int kMaxRows = 6;
constexpr int kTileVectors = kTile / kLanes;
constexpr float kLowest = -3.402823466e38f;
constexpr float kInfinity = __builtin_inff();

// Vectors of columns beside `rows` rows, so that the sums fit into the registers.
constexpr int num_vectors(int rows) {
#if defined(__AVX512F__)
    return rows > 0 ? 4 : 0;
#else
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#endif
}

// How numbers of a cache are read.
struct ReadF32 {
    using Type = float;
    static constexpr bool kScaled = false;
    static f32x16 read(const float* p) { return load(p); }
    static f32x16 read_pair(const float* p, const float* q) { return load_pair(p, q); }
};
struct ReadF16 {
    using Type = uint16_t;
    static constexpr bool kScaled = false;
    static f32x16 read(const uint16_t* p) { return load_f16(p); }
    static f32x16 read_pair(const uint16_t* p, const uint16_t* q) { return load_pair_f16(p, q); }
};
struct ReadBF16 {
    using Type = uint16_t;
    static constexpr bool kScaled = false;
    static f32x16 read(const uint16_t* p) { return load_bf16(p); }
    static f32x16 read_pair(const uint16_t* p, const uint16_t* q) { return load_pair_bf16(p, q); }
};
struct ReadI8 {
    using Type = int8_t;
    static constexpr bool kScaled = true;
    static f32x16 read(const int8_t* p) { return load_i8(p); }
    static f32x16 read_pair(const int8_t* p, const int8_t* q) { return load_pair_i8(p, q); }
};

// A tile where it lies in the cache. The head's size is a multiple of 16.
template <class Read>
struct CachedTile {
    const typename Read::Type* keys[kTile / kUnit];
    const typename Read::Type* values[kTile / kUnit];
    const float* key_scales[kTile / kUnit];  // int8 only
    const float* value_scales[kTile / kUnit];
    int64_t head_dim;
    const CachedTile* next = nullptr;  // what is read after this
    static constexpr int kLine = 64 / sizeof(typename Read::Type);
    static constexpr int kRowsPerLine = kLine / kUnit;

    f32x16 key(int vector, int64_t channel) const {
        return Read::read_pair(keys[2 * vector] + channel * kUnit,
                               keys[2 * vector + 1] + channel * kUnit);
    }
    bool has_next() const { return next != nullptr; }
    // Fetches a share of the next tile's keys while scores are computed, and of its values while
    // values are summed up, so that the memory is never idle.
    void fetch_keys(int64_t channel) const {
        if (channel % kRowsPerLine != 0) return;
        AMBIDEX_UNROLL
        for (int i = 0; i < kTile / kUnit; ++i) fetch(next->keys[i] + channel * kUnit);
    }
    void fetch_values(int token) const {
        const auto* first = next->values[token / kUnit] + (token % kUnit) * head_dim;
        for (int64_t i = 0; i < head_dim; i += kLine) fetch(first + i);
    }
    // To the second cache: the first one is full of this tile.
    static void fetch(const typename Read::Type* p) { __builtin_prefetch(p, 0, 2); }
    const typename Read::Type* value_row(int token) const {
        return values[token / kUnit] + (token % kUnit) * head_dim;
    }
    int64_t value_stride() const { return head_dim; }
    static f32x16 value(const typename Read::Type* p) { return Read::read(p); }
};

// A tile that was copied and widened, so that many rows read it.
struct PackedTile {
    const float* keys;    // [head_dim, 64]
    const float* values;  // [64, padded head_dim]
    int64_t head_dim_padded;

    f32x16 key(int vector, int64_t channel) const {
        return load(keys + channel * kTile + vector * kLanes);
    }
    static bool has_next() { return false; }
    static void fetch_keys(int64_t) {}
    static void fetch_values(int) {}
    const float* value_row(int token) const { return values + token * head_dim_padded; }
    int64_t value_stride() const { return head_dim_padded; }
    static f32x16 value(const float* p) { return load(p); }
};

// Some rows of a block and what they have summed up so far.
struct RowGroup {
    const float* query;  // [rows, head_dim], scaled
    float* sums;         // [rows, sums_stride]: weighted values
    float* max;          // [rows]; null: `sums` receives this tile's results, max and sum behind
    float* total;        // [rows]
    int64_t head_dim, head_dim_padded, sums_stride;
    const int* first_seen;  // [rows] tokens of the tile that a row sees; may be empty
    const int* end_seen;
    const float* key_scales;  // [64], int8 only
    const float* value_scales;
    float softcap;
};

template <int R, int V, class Tile>
inline void scores(const Tile& tile, const RowGroup& rows, int vector, float* out) {
    f32x16 sums[R][V];
    AMBIDEX_UNROLL
    for (int r = 0; r < R; ++r) {
        AMBIDEX_UNROLL
        for (int v = 0; v < V; ++v) sums[r][v] = zero_f32();
    }
    const float* query = rows.query;
    int64_t stride = rows.head_dim;
    bool fetches = V == num_vectors(R) && vector == 0 && tile.has_next();
    for (int64_t channel = 0; channel < rows.head_dim; ++channel) {
        if (fetches) tile.fetch_keys(channel);
        f32x16 key[V];
        AMBIDEX_UNROLL
        for (int v = 0; v < V; ++v) key[v] = tile.key(vector + v, channel);
        AMBIDEX_UNROLL
        for (int r = 0; r < R; ++r) {
            f32x16 q = broadcast(query[r * stride + channel]);
            AMBIDEX_UNROLL
            for (int v = 0; v < V; ++v) sums[r][v] = fma(q, key[v], sums[r][v]);
        }
    }
    AMBIDEX_UNROLL
    for (int r = 0; r < R; ++r) {
        AMBIDEX_UNROLL
        for (int v = 0; v < V; ++v) store(out + r * kTile + (vector + v) * kLanes, sums[r][v]);
    }
}

// From a row's scores to its weights, in place. `kWhole`: all 64 tokens are seen and nothing else
// is to be done; else `num` vectors hold tokens that are seen.
template <bool kWhole>
inline void weigh(float* scores, int first_seen, int end_seen, int num, const RowGroup& rows,
                  float* max_out, float* total_out) {
    f32x16 largest = broadcast(kLowest);
    f32x16 score[kTileVectors];
    AMBIDEX_UNROLL
    for (int v = 0; v < (kWhole ? kTileVectors : num); ++v) {
        f32x16 x = load(scores + v * kLanes);
        if (!kWhole) {
            if (rows.key_scales != nullptr) x = x * load(rows.key_scales + v * kLanes);
            if (rows.softcap != 0.0f) {
                x = tanh(x / broadcast(rows.softcap)) * broadcast(rows.softcap);
            }
            f32x16 hidden = broadcast(-kInfinity);
            int first = first_seen - v * kLanes, end = end_seen - v * kLanes;
            if (end < kLanes) x = select(first_lanes(end < 0 ? 0 : end), x, hidden);
            if (first > 0) x = select(first_lanes(first > kLanes ? kLanes : first), hidden, x);
        }
        score[v] = x;
        largest = max(x, largest);
    }
    float top = max_lane(largest);
    f32x16 total = zero_f32();
    AMBIDEX_UNROLL
    for (int v = 0; v < (kWhole ? kTileVectors : num); ++v) {
        f32x16 weight = exp_nonpositive(score[v] - broadcast(top));
        total = total + weight;
        if (!kWhole && rows.value_scales != nullptr) {
            // What is not seen may be anything, and its weight stays zero.
            f32x16 scaled = weight * load(rows.value_scales + v * kLanes);
            weight = select_less(zero_f32(), weight, scaled, weight);
        }
        store(scores + v * kLanes, weight);
    }
    *max_out = top;
    *total_out = sum(total);
}

// One copy for all row groups; the code is long.
static void weigh_rows(float* scores, int count, int num, const RowGroup& rows, float* max_out,
                       float* total_out) {
    bool plain = rows.softcap == 0.0f && rows.key_scales == nullptr;
    for (int r = 0; r < count; ++r) {
        int first = rows.first_seen[r], end = rows.end_seen[r];
        if (plain && first == 0 && end == kTile) {
            weigh<true>(scores + r * kTile, first, end, num, rows, &max_out[r], &total_out[r]);
        } else {
            weigh<false>(scores + r * kTile, first, end, num, rows, &max_out[r], &total_out[r]);
        }
    }
}

// How much of the sums so far, and of a tile's, goes into both together.
inline void merge_factors(f32x16 max_so_far, f32x16 max_tile, f32x16& largest, f32x16& keep,
                          f32x16& add) {
    largest = max(max_so_far, max_tile);
    keep = exp_nonpositive(max_so_far - largest);
    add = exp_nonpositive(max_tile - largest);
}

template <int R, int W, class Tile>
inline void weighted_values(const Tile& tile, const RowGroup& rows, const float* weights,
                            int first, int end, int64_t column, const float* keep,
                            const float* add) {
    f32x16 sums[R][W];
    AMBIDEX_UNROLL
    for (int r = 0; r < R; ++r) {
        AMBIDEX_UNROLL
        for (int w = 0; w < W; ++w) sums[r][w] = zero_f32();
    }
    int64_t stride = tile.value_stride();
    bool fetches = column == 0 && tile.has_next();
    for (int token = first; token < end;) {
        const auto* p = tile.value_row(token) + column;
        int unit_end = token - token % kUnit + kUnit;
        if (unit_end > end) unit_end = end;
        for (; token < unit_end; ++token, p += stride) {
            if (fetches) tile.fetch_values(token);
            f32x16 value[W];
            AMBIDEX_UNROLL
            for (int w = 0; w < W; ++w) value[w] = tile.value(p + w * kLanes);
            AMBIDEX_UNROLL
            for (int r = 0; r < R; ++r) {
                f32x16 weight = broadcast(weights[r * kTile + token]);
                AMBIDEX_UNROLL
                for (int w = 0; w < W; ++w) sums[r][w] = fma(weight, value[w], sums[r][w]);
            }
        }
    }
    AMBIDEX_UNROLL
    for (int r = 0; r < R; ++r) {
        float* out = rows.sums + r * rows.sums_stride + column;
        AMBIDEX_UNROLL
        for (int w = 0; w < W; ++w) {
            f32x16 value = sums[r][w];
            if (keep != nullptr) {
                value = fma(load(out + w * kLanes), broadcast(keep[r]), value * broadcast(add[r]));
            }
            store(out + w * kLanes, value);
        }
    }
}

template <int R, class Tile>
inline void attend_rows(const Tile& tile, const RowGroup& rows) {
    constexpr int kVectors = num_vectors(R);
    int first = kTile, end = 0;
    for (int r = 0; r < R; ++r) {
        if (rows.first_seen[r] >= rows.end_seen[r]) continue;
        if (rows.first_seen[r] < first) first = rows.first_seen[r];
        if (rows.end_seen[r] > end) end = rows.end_seen[r];
    }
    if (end == 0 && rows.max != nullptr) return;
    int num = (end + kLanes - 1) / kLanes;
    alignas(64) float weights[R * kTile];
    int vector = 0;
    for (; vector + kVectors <= num; vector += kVectors) {
        scores<R, kVectors>(tile, rows, vector, weights);
    }
    for (; vector < num; ++vector) scores<R, 1>(tile, rows, vector, weights);
    alignas(64) float max_tile[kLanes] = {}, total_tile[kLanes] = {};
    alignas(64) float keep[kLanes], add[kLanes];
    weigh_rows(weights, R, num, rows, max_tile, total_tile);
    bool merging = rows.max != nullptr;
    if (merging) {
        mask16 mask = first_lanes(R);
        f32x16 largest, kept, added;
        merge_factors(load(rows.max, mask), load(max_tile), largest, kept, added);
        f32x16 total = fma(load(rows.total, mask), kept, load(total_tile) * added);
        store(rows.max, largest, mask);
        store(rows.total, total, mask);
        store(keep, kept);
        store(add, added);
    } else {
        for (int r = 0; r < R; ++r) {
            float* behind = rows.sums + r * rows.sums_stride + rows.head_dim_padded;
            behind[0] = max_tile[r];
            behind[1] = total_tile[r];
        }
    }
    int64_t column = 0;
    for (; column + kVectors * kLanes <= rows.head_dim_padded; column += kVectors * kLanes) {
        weighted_values<R, kVectors>(tile, rows, weights, first, end, column,
                                     merging ? keep : nullptr, add);
    }
    for (; column < rows.head_dim_padded; column += kLanes) {
        weighted_values<R, 1>(tile, rows, weights, first, end, column, merging ? keep : nullptr,
                              add);
    }
}

template <class Tile>
static void attend(const Tile& tile, const RowGroup& rows, int num_rows) {
    switch (num_rows) {
        case 1: return attend_rows<1>(tile, rows);
        case 2: return attend_rows<2>(tile, rows);
        case 3: return attend_rows<3>(tile, rows);
        case 4: return attend_rows<4>(tile, rows);
        case 5: return attend_rows<5>(tile, rows);
        default: return attend_rows<6>(tile, rows);
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL
