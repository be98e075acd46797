// Rotary embedding, writing keys and values to the paged cache, and attention over it.
//
// The cache of one layer: values [kv_heads, slots, head_dim]; keys [kv_heads, slots / 8, head_dim,
// 8], so that a vector holds one channel of neighbouring tokens and a score needs no sum over
// lanes. With int8 each token and head has a scale beside it, [kv_heads, slots].
#pragma once

#include "context.h"

namespace ambidex {

enum class KvType : int32_t { kF32, kF16, kBF16, kI8 };

// Attention reduces over tiles of this many tokens at absolute positions.
constexpr int kTile = 64;
// Tokens whose keys lie together.
constexpr int kUnit = 8;

// Channel i < width turns with i + width; the others pass. In place.
struct RopeArgs {
    float* query;
    float* key;
    const float* cos;  // [max_positions, width]
    const float* sin;
    const int64_t* positions;  // [rows]; null: those of the step
    int64_t query_stride, key_stride;
    int64_t query_heads, key_heads, head_dim;
    int64_t width, max_positions;
    Rows rows;
};

// One layer's cache.
struct KvCacheArgs {
    void* keys;
    void* values;
    float* key_scales;  // int8 only
    float* value_scales;
    int64_t kv_heads, head_dim;
    int64_t num_blocks;  // without the zero block, which comes last
    int64_t num_slots;
    int32_t block_shift;  // the block size is 2 to this power
    int32_t group;        // which of the step's block tables
    KvType type;
};

struct WriteKvArgs {
    const float* key;
    const float* value;
    int64_t key_stride, value_stride;
    KvCacheArgs cache;
    Rows rows;
};

struct AttentionArgs {
    const float* query;
    float* out;
    int64_t query_stride, out_stride;
    int64_t heads_per_kv_head;
    int64_t window;  // 0: none
    KvCacheArgs cache;
    Rows rows;
    float scale, softcap;  // softcap 0: none
    int64_t shared_floats;  // in the memory that workers share: see attention_shared_floats
};

// A head's row in the memory that workers share: the weighted sum, then the maximum and the sum of
// weights.
static inline int64_t partial_stride(int64_t head_dim) { return (head_dim + 15) / 16 * 16 + 16; }

// Work is cut until there are this many chunks for each worker.
constexpr int64_t kChunksPerWorker = 4;
// Rows times heads of one sequence and KV head that may be cut by tiles; more if they are heads of
// one row.
constexpr int64_t kMaxCutRows = 12;
// Results of at least this many tiles find room between two barriers.
constexpr int64_t kMinWaveTiles = 32;

// Sequences are cut by tiles only while there are too few chunks, which bounds the rows.
static inline int64_t attention_shared_floats(int64_t num_threads, int64_t heads_per_kv_head,
                                              int64_t head_dim) {
    int64_t rows = heads_per_kv_head > kMaxCutRows ? heads_per_kv_head : kMaxCutRows;
    return num_threads * kChunksPerWorker * rows * partial_stride(head_dim) * (1 + kMinWaveTiles);
}

#define AMBIDEX_ATTENTION_KERNELS(X) \
    X(rope, RopeArgs)                \
    X(write_kv, WriteKvArgs)         \
    X(attention, AttentionArgs)

struct AttentionTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_ATTENTION_KERNELS(X)
#undef X
};

}  // namespace ambidex
