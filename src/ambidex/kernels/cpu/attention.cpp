#include "attention.h"

#include "attention_tile.h"
#include "level.h"

namespace ambidex::AMBIDEX_LEVEL {

// ------------------------------------------------------------------------------------------ rope

static void rotate(float* x, const float* cos, const float* sin, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes) {
        mask16 mask = first_lanes(int(width - i < kLanes ? width - i : kLanes));
        f32x16 first = load(x + i, mask), second = load(x + width + i, mask);
        f32x16 c = load(cos + i, mask), s = load(sin + i, mask);
        store(x + i, fma(first, c, zero_f32() - second * s), mask);
        store(x + width + i, fma(second, c, first * s), mask);
    }
}

static void rope(const RopeArgs& args, const StepParams& step, Worker& worker) {
    int64_t heads = args.query_heads + args.key_heads;
    int64_t items = args.rows.count(step) * heads;
    int64_t end = items * (worker.id() + 1) / worker.count();
    const int64_t* positions = args.positions != nullptr ? args.positions : step.positions;
    for (int64_t item = items * worker.id() / worker.count(); item < end; ++item) {
        int64_t row = item / heads, head = item % heads;
        float* x = head < args.query_heads
                       ? args.query + row * args.query_stride + head * args.head_dim
                       : args.key + row * args.key_stride +
                             (head - args.query_heads) * args.head_dim;
        int64_t position = positions[row];
        if (position < 0 || position >= args.max_positions) {
            for (int64_t i = 0; i < 2 * args.width; ++i) x[i] = __builtin_nanf("");
            continue;
        }
        rotate(x, args.cos + position * args.width, args.sin + position * args.width, args.width);
    }
}

// -------------------------------------------------------------------------------------- the cache

// Where blocks of a sequence lie.
struct Blocks {
    const int32_t* table;
    int64_t size;
    int64_t num_blocks;
    int shift;

    Blocks(const KvCacheArgs& cache, const StepParams& step, int64_t sequence)
        : table(step.groups[cache.group].tables + sequence * step.groups[cache.group].stride),
          size(step.groups[cache.group].stride),
          num_blocks(cache.num_blocks),
          shift(cache.block_shift) {}

    // The slot of a token, or -1 when it has no block.
    int64_t slot(int64_t position) const {
        int64_t index = position >> shift;
        if (index >= size) return -1;
        int64_t block = table[index];
        if (block < 0 || block >= num_blocks) return -1;
        return (block << shift) + (position & ((int64_t(1) << shift) - 1));
    }
    // The same; what has no block lies in the zero block.
    int64_t slot_or_zero(int64_t position) const {
        int64_t found = slot(position);
        if (found >= 0) return found;
        return (num_blocks << shift) + (position & ((int64_t(1) << shift) - 1));
    }
};

// NaN becomes 0 and infinity the largest number: a weight of zero times either would be NaN, and
// others read whole tiles.
static f32x16 make_finite(f32x16 x, float limit) {
    f32x16 positive = min(max(x, zero_f32()), broadcast(limit));
    f32x16 negative = max(min(x, zero_f32()), broadcast(-limit));
    return positive + negative;
}

static f32x16 load_some(const float* p, int64_t count) {
    return count >= kLanes ? load(p) : load(p, first_lanes(int(count)));
}

// A head of one token in the cache's type, padded to whole vectors; its scale for int8. Keys keep
// what is not finite.
static float convert(const float* x, int64_t head_dim, KvType type, bool is_value, void* out) {
    float scale = 0.0f;
    f32x16 inverse = zero_f32();
    if (type == KvType::kI8) {
        f32x16 largest = zero_f32(), check = zero_f32();
        for (int64_t i = 0; i < head_dim; i += kLanes) {
            f32x16 value = load_some(x + i, head_dim - i);
            if (is_value) value = make_finite(value, -kLowest);
            largest = max(abs(value), largest);
            check = fma(value, zero_f32(), check);
        }
        float top = max_lane(largest);
        // Beside the smallest numbers the inverse would be infinite.
        if (top > 1e-30f) {
            scale = top / 127.0f;
            inverse = broadcast(127.0f / top);
        }
        if (sum(check) != 0.0f) {
            scale = __builtin_nanf("");
            inverse = zero_f32();
        }
    }
    for (int64_t i = 0; i < head_dim; i += kLanes) {
        f32x16 value = load_some(x + i, head_dim - i);
        if (is_value) value = make_finite(value, type == KvType::kF16    ? 65504.0f
                                                 : type == KvType::kBF16 ? 3.3895314e38f
                                                                         : -kLowest);
        switch (type) {
            case KvType::kF32: store(static_cast<float*>(out) + i, value); break;
            case KvType::kF16: store_f16(static_cast<uint16_t*>(out) + i, value); break;
            case KvType::kBF16: store_bf16(static_cast<uint16_t*>(out) + i, value); break;
            case KvType::kI8:
                // A key that is not finite has a scale of NaN, and its numbers do not matter.
                value = scale == scale ? value * inverse : zero_f32();
                store_i8(static_cast<int8_t*>(out) + i, to_i32(value));
                break;
        }
    }
    return scale;
}

// `count` tokens, neighbours in one unit, of which the first has the place `slot`.
template <class T>
static void write_tokens(const WriteKvArgs& args, int64_t row, int count, int64_t slot,
                         std::byte* scratch) {
    const KvCacheArgs& cache = args.cache;
    int64_t head_dim = cache.head_dim, padded = (head_dim + kLanes - 1) / kLanes * kLanes;
    T* converted = reinterpret_cast<T*>(scratch);
    for (int64_t head = 0; head < cache.kv_heads; ++head) {
        int64_t place = head * cache.num_slots + slot;
        for (int j = 0; j < count; ++j) {
            const float* value = args.value + (row + j) * args.value_stride + head * head_dim;
            float scale = convert(value, head_dim, cache.type, true, converted);
            if (cache.value_scales != nullptr) cache.value_scales[place + j] = scale;
            T* out = static_cast<T*>(cache.values) + (place + j) * head_dim;
            __builtin_memcpy(out, converted, size_t(head_dim) * sizeof(T));
        }
        for (int j = 0; j < count; ++j) {
            const float* key = args.key + (row + j) * args.key_stride + head * head_dim;
            float scale = convert(key, head_dim, cache.type, false, converted + j * padded);
            if (cache.key_scales != nullptr) cache.key_scales[place + j] = scale;
        }
        T* out = static_cast<T*>(cache.keys) + (place - slot % kUnit) * head_dim + slot % kUnit;
        if (count == kUnit) {
            for (int64_t i = 0; i < head_dim; ++i) {
                for (int j = 0; j < kUnit; ++j) out[i * kUnit + j] = converted[j * padded + i];
            }
        } else {
            for (int j = 0; j < count; ++j) {
                for (int64_t i = 0; i < head_dim; ++i) {
                    out[i * kUnit + j] = converted[j * padded + i];
                }
            }
        }
    }
}

static void write_kv(const WriteKvArgs& args, const StepParams& step, Worker& worker) {
    if (step.num_sequences == 0) return;
    const KvCacheArgs& cache = args.cache;
    int64_t rows = step.query_starts[step.num_sequences];
    int64_t given = args.rows.count(step);
    if (rows > given) rows = given;
    int64_t row = rows * worker.id() / worker.count();
    int64_t end = rows * (worker.id() + 1) / worker.count();
    int64_t padded = (cache.head_dim + kLanes - 1) / kLanes * kLanes;
    std::byte* scratch = worker.scratch(size_t(padded) * kUnit * sizeof(float));
    int64_t sequence = 0;
    while (row < end) {
        while (step.query_starts[sequence + 1] <= row) ++sequence;
        int64_t sequence_end = step.query_starts[sequence + 1];
        Blocks blocks(cache, step, sequence);
        int64_t stop = sequence_end < end ? sequence_end : end;
        int64_t shift = step.context_lens[sequence] - sequence_end;  // from row to position
        while (row < stop) {
            int64_t position = row + shift;
            int64_t count = kUnit - position % kUnit;
            if (count > stop - row) count = stop - row;
            int64_t slot = position < 0 ? -1 : blocks.slot(position);
            if (slot >= 0) {
                switch (cache.type) {
                    case KvType::kF32:
                        write_tokens<float>(args, row, int(count), slot, scratch);
                        break;
                    case KvType::kI8:
                        write_tokens<int8_t>(args, row, int(count), slot, scratch);
                        break;
                    default: write_tokens<uint16_t>(args, row, int(count), slot, scratch);
                }
            }
            row += count;
        }
    }
}

// -------------------------------------------------------------------------------------- attention

// Query rows times heads of a block are about this many: so often is a packed tile read.
constexpr int64_t kBlockRows = 96;
// Rows times heads up to which a tile is read where it lies; always where nothing is to be widened.
constexpr int64_t kMaxDirectRows = 12;

static int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}
static int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// How the work of a step is cut. Every worker comes to the same plan.
struct Plan {
    const AttentionArgs& args;
    const StepParams& step;
    int64_t block_rows;       // query rows of a sequence that are computed together
    bool cuts_tiles = false;  // sequences with few rows are cut by tiles, too
    int64_t chunk_tiles = 0;
    int64_t wave_tiles = 0;  // tiles of a sequence whose results find room
    int64_t num_cut_rows = 0;
    int64_t num_waves = 1;

    int64_t num_rows(int64_t i) const { return step.query_starts[i + 1] - step.query_starts[i]; }
    int64_t first_position(int64_t i) const { return step.context_lens[i] - num_rows(i); }
    int64_t first_tile(int64_t position) const {
        int64_t first = args.window > 0 ? position - args.window + 1 : 0;
        return first > 0 ? first / kTile : 0;
    }
    int64_t num_tiles(int64_t i) const {
        return divide_up(step.context_lens[i], kTile) - first_tile(first_position(i));
    }
    int64_t num_blocks(int64_t i) const { return divide_up(num_rows(i), block_rows); }
    bool is_cut(int64_t i) const {
        int64_t rows = num_rows(i);
        return cuts_tiles && (rows == 1 || (rows > 0 && num_blocks(i) == 1 &&
                                            rows * args.heads_per_kv_head <= kMaxCutRows));
    }
    // Chunks of a sequence and KV head in a wave.
    int64_t chunks_per_head(int64_t i, int64_t wave) const {
        if (!is_cut(i)) return wave == 0 ? num_blocks(i) : 0;
        return divide_up(wave_size(i, wave), chunk_tiles);
    }
    int64_t wave_size(int64_t i, int64_t wave) const {
        int64_t left = num_tiles(i) - wave * wave_tiles;
        return left < 0 ? 0 : left < wave_tiles ? left : wave_tiles;
    }
    int64_t num_chunks(int64_t wave) const {
        int64_t count = 0;
        for (int64_t i = 0; i < step.num_sequences; ++i) count += chunks_per_head(i, wave);
        return count * args.cache.kv_heads;
    }
    int64_t cut_rows(int64_t i) const {
        return is_cut(i) ? num_rows(i) * args.heads_per_kv_head * args.cache.kv_heads : 0;
    }

    // One result of each row that is cut by tiles.
    int64_t row_floats() const { return num_cut_rows * partial_stride(args.cache.head_dim); }

    Plan(const AttentionArgs& args, const StepParams& step, int64_t num_workers)
        : args(args), step(step) {
        int64_t enough = num_workers * kChunksPerWorker;
        block_rows = args.heads_per_kv_head < kBlockRows ? kBlockRows / args.heads_per_kv_head : 1;
        if (num_workers == 1) return;
        while (block_rows > 1 && block_rows * args.heads_per_kv_head > 2 * kMaxRows &&
               num_chunks(0) < enough) {
            block_rows = (block_rows + 1) / 2;
        }
        if (num_chunks(0) >= enough) return;
        cuts_tiles = true;
        int64_t tiles = 0, most = 0;
        for (int64_t i = 0; i < step.num_sequences; ++i) {
            if (!is_cut(i)) continue;
            num_cut_rows += cut_rows(i);
            tiles += num_tiles(i) * args.cache.kv_heads;
            if (num_tiles(i) > most) most = num_tiles(i);
        }
        if (most <= 1) {
            cuts_tiles = false;
            return;
        }
        chunk_tiles = divide_up(tiles, enough);
        wave_tiles = args.shared_floats / row_floats() - 1;
        if (wave_tiles > most) wave_tiles = most;
        num_waves = divide_up(most, wave_tiles);
    }
};

// Finds the sequence of a chunk; fast while chunks come in rising order. Sequences with many rows
// come last in a batch: their chunks, the heavy ones, are first.
struct Cursor {
    const Plan* plan;
    int64_t wave;
    int64_t sequence;
    int64_t begin = 0;    // its first chunk
    int64_t cut_row = 0;  // its first row among those of sequences that are cut by tiles

    Cursor(const Plan& plan, int64_t wave)
        : plan(&plan), wave(wave), sequence(plan.step.num_sequences - 1) {}

    int64_t size() const {
        return plan->chunks_per_head(sequence, wave) * plan->args.cache.kv_heads;
    }
    void advance() {
        begin += size();
        cut_row += plan->cut_rows(sequence);
        --sequence;
    }
    void find(int64_t chunk) {
        if (chunk < begin) *this = Cursor(*plan, wave);
        while (chunk >= begin + size()) advance();
    }
};

// Memory of one worker: a block of query rows, and a packed tile.
struct Scratch {
    float* query;         // [rows, head_dim]
    float* sums;          // [rows, head_dim_padded]
    float* max;           // [rows]
    float* total;         // [rows]
    int* first_seen;      // [rows]
    int* end_seen;        // [rows]
    float* keys;          // [head_dim, 64]
    float* values;        // [64, head_dim_padded]
    float* key_scales;    // [64]
    float* value_scales;  // [64]

    Scratch(int64_t rows, int64_t head_dim, Worker& worker) {
        int64_t padded = round_up(head_dim, kLanes);
        rows = round_up(rows, kLanes);
        int64_t floats = rows * (2 * padded + 4) + 2 * kTile * padded + 2 * kTile;
        float* next = reinterpret_cast<float*>(worker.scratch(size_t(floats) * sizeof(float)));
        auto take = [&next](int64_t count) {
            float* taken = next;
            next += count;
            return taken;
        };
        keys = take(kTile * padded);
        values = take(kTile * padded);
        query = take(rows * padded);
        sums = take(rows * padded);
        max = take(rows);
        total = take(rows);
        key_scales = take(kTile);
        value_scales = take(kTile);
        first_seen = reinterpret_cast<int*>(take(rows));
        end_seen = reinterpret_cast<int*>(take(rows));
    }
};

template <class Read>
static void locate(const Blocks& blocks, const KvCacheArgs& cache, int64_t kv_head, int64_t number,
                   CachedTile<Read>& tile) {
    using Type = typename Read::Type;
    tile.head_dim = cache.head_dim;
    for (int unit = 0; unit < kTile / kUnit; ++unit) {
        int64_t slot = blocks.slot_or_zero(number * kTile + unit * kUnit);
        int64_t place = kv_head * cache.num_slots + slot;
        tile.keys[unit] = static_cast<const Type*>(cache.keys) + place * cache.head_dim;
        tile.values[unit] = static_cast<const Type*>(cache.values) + place * cache.head_dim;
        if (Read::kScaled) {
            tile.key_scales[unit] = cache.key_scales + place;
            tile.value_scales[unit] = cache.value_scales + place;
        }
    }
}

template <class Read>
static f32x16 read_some(const typename Read::Type* p, int64_t count) {
    if (count >= kLanes) return Read::read(p);
    typename Read::Type padded[kLanes] = {};
    __builtin_memcpy(padded, p, size_t(count) * sizeof *p);
    return Read::read(padded);
}

// Widens tokens `first` to `end` of a tile.
template <class Read>
static PackedTile pack(const CachedTile<Read>& tile, int first, int end, Scratch& scratch) {
    int64_t head_dim = tile.head_dim, padded = round_up(head_dim, kLanes);
    for (int v = 0; v * kLanes < end; ++v) {
        float* out = scratch.keys + v * kLanes;
        for (int64_t i = 0; i < head_dim; ++i) store(out + i * kTile, tile.key(v, i));
    }
    for (int token = first; token < end; ++token) {
        const auto* row = tile.value_row(token);
        for (int64_t i = 0; i < head_dim; i += kLanes) {
            store(scratch.values + token * padded + i, read_some<Read>(row + i, head_dim - i));
        }
    }
    return {scratch.keys, scratch.values, padded};
}

// What one worker computes in one go.
struct Chunk {
    int64_t sequence, kv_head;
    int64_t first_row, end_row;  // of the sequence
    int64_t first_tile, end_tile;
    // Where results of each tile go, [tile, row, head]; null: they are merged and written out.
    float* partials;
    int64_t tile_stride;
};

static void write_out(const float* sums, float total, int64_t head_dim, float* out) {
    f32x16 inverse = broadcast(1.0f / total);
    for (int64_t i = 0; i < head_dim; i += kLanes) {
        mask16 mask = first_lanes(int(head_dim - i < kLanes ? head_dim - i : kLanes));
        // Adding zero leaves one kind of zero only.
        store(out + i, fma(load(sums + i), inverse, zero_f32()), mask);
    }
}

// `likely_next`: what this worker will probably do then; null if that is unknown.
template <class Read>
static void attend_chunk(const Plan& plan, const Chunk& chunk, const Chunk* likely_next,
                         Scratch& scratch) {
    const AttentionArgs& args = plan.args;
    const KvCacheArgs& cache = args.cache;
    int64_t head_dim = cache.head_dim, padded = round_up(head_dim, kLanes);
    int64_t heads = args.heads_per_kv_head;
    int64_t num_rows = (chunk.end_row - chunk.first_row) * heads;
    int64_t first_position = plan.first_position(chunk.sequence) + chunk.first_row;
    int64_t query_row = plan.step.query_starts[chunk.sequence] + chunk.first_row;
    bool merging = chunk.partials == nullptr;
    for (int64_t row = 0; row < num_rows; ++row) {
        const float* query = args.query + (query_row + row / heads) * args.query_stride +
                             (chunk.kv_head * heads + row % heads) * head_dim;
        for (int64_t i = 0; i < head_dim; i += kLanes) {
            // What is written behind a row is overwritten by the next.
            store(scratch.query + row * head_dim + i,
                  load_some(query + i, head_dim - i) * broadcast(args.scale));
        }
        scratch.max[row] = kLowest;
        scratch.total[row] = 0.0f;
    }
    if (merging) {
        for (int64_t i = 0; i < num_rows * padded; i += kLanes) store(scratch.sums + i, zero_f32());
    }
    Blocks blocks(cache, plan.step, chunk.sequence);
    bool direct = head_dim % kLanes == 0 &&
                  (num_rows <= kMaxDirectRows || cache.type == KvType::kF32);
    int64_t num_groups = divide_up(num_rows, kMaxRows);
    CachedTile<Read> tiles[2];
    locate(blocks, cache, chunk.kv_head, chunk.first_tile, tiles[chunk.first_tile % 2]);
    for (int64_t tile = chunk.first_tile; tile < chunk.end_tile; ++tile) {
        int64_t start = tile * kTile;
        CachedTile<Read>& cached = tiles[tile % 2];
        cached.next = nullptr;
        CachedTile<Read>& next = tiles[(tile + 1) % 2];
        if (tile + 1 < chunk.end_tile) {
            locate(blocks, cache, chunk.kv_head, tile + 1, next);
            cached.next = &next;
        } else if (likely_next != nullptr) {
            locate(Blocks(cache, plan.step, likely_next->sequence), cache, likely_next->kv_head,
                   likely_next->first_tile, next);
            cached.next = &next;
        }
        if (Read::kScaled) {
            for (int v = 0; v < kTileVectors; ++v) {
                store(scratch.key_scales + v * kLanes,
                      load_pair(cached.key_scales[2 * v], cached.key_scales[2 * v + 1]));
                store(scratch.value_scales + v * kLanes,
                      load_pair(cached.value_scales[2 * v], cached.value_scales[2 * v + 1]));
            }
        }
        int first = kTile, end = 0;
        for (int64_t row = 0; row < num_rows; ++row) {
            int64_t last = first_position + row / heads - start;
            int64_t begin = args.window > 0 ? last - args.window + 1 : 0;
            scratch.first_seen[row] = int(begin < 0 ? 0 : begin > kTile ? kTile : begin);
            scratch.end_seen[row] = int(last < 0 ? 0 : last >= kTile ? kTile : last + 1);
            if (scratch.first_seen[row] >= scratch.end_seen[row]) continue;
            if (scratch.first_seen[row] < first) first = scratch.first_seen[row];
            if (scratch.end_seen[row] > end) end = scratch.end_seen[row];
        }
        PackedTile packed{};
        if (!direct) packed = pack(cached, first, end, scratch);
        for (int64_t group = 0; group < num_groups; ++group) {
            int64_t row = num_rows * group / num_groups;
            int count = int(num_rows * (group + 1) / num_groups - row);
            RowGroup rows{scratch.query + row * head_dim,
                          scratch.sums + row * padded,
                          scratch.max + row,
                          scratch.total + row,
                          head_dim,
                          padded,
                          padded,
                          scratch.first_seen + row,
                          scratch.end_seen + row,
                          Read::kScaled ? scratch.key_scales : nullptr,
                          Read::kScaled ? scratch.value_scales : nullptr,
                          args.softcap};
            if (!merging) {
                rows.sums_stride = partial_stride(head_dim);
                rows.sums = chunk.partials + (tile - chunk.first_tile) * chunk.tile_stride +
                            row * rows.sums_stride;
                rows.max = nullptr;
            }
            if (direct) {
                attend(cached, rows, count);
                cached.next = nullptr;  // it has been fetched
            } else {
                attend(packed, rows, count);
            }
        }
    }
    if (!merging) return;
    for (int64_t row = 0; row < num_rows; ++row) {
        float* out = args.out + (query_row + row / heads) * args.out_stride +
                     (chunk.kv_head * heads + row % heads) * head_dim;
        write_out(scratch.sums + row * padded, scratch.total[row], head_dim, out);
    }
}

// Chunk `index` of a wave.
static Chunk chunk_at(const Plan& plan, Cursor& cursor, int64_t index, float* partials) {
    cursor.find(index);
    const AttentionArgs& args = plan.args;
    int64_t i = cursor.sequence, per_head = plan.chunks_per_head(i, cursor.wave);
    int64_t part = (index - cursor.begin) % per_head, rows = plan.num_rows(i);
    Chunk chunk{};
    chunk.sequence = i;
    chunk.kv_head = (index - cursor.begin) / per_head;
    if (plan.is_cut(i)) {
        int64_t in_wave = part * plan.chunk_tiles, size = plan.wave_size(i, cursor.wave);
        int64_t left = size - in_wave;
        chunk.end_row = rows;
        chunk.first_tile = plan.first_tile(plan.first_position(i)) +
                           cursor.wave * plan.wave_tiles + in_wave;
        chunk.end_tile = chunk.first_tile + (left < plan.chunk_tiles ? left : plan.chunk_tiles);
        chunk.tile_stride = plan.row_floats();
        int64_t row = cursor.cut_row + chunk.kv_head * rows * args.heads_per_kv_head;
        chunk.partials = partials + in_wave * chunk.tile_stride +
                         row * partial_stride(args.cache.head_dim);
    } else {
        // The last rows see most.
        chunk.first_row = (per_head - 1 - part) * plan.block_rows;
        chunk.end_row = chunk.first_row + plan.block_rows;
        if (chunk.end_row > rows) chunk.end_row = rows;
        int64_t start = plan.first_position(i);
        chunk.first_tile = plan.first_tile(start + chunk.first_row);
        chunk.end_tile = divide_up(start + chunk.end_row, kTile);
    }
    return chunk;
}

static void attend_wave(const Plan& plan, int64_t wave, float* partials, Scratch& scratch,
                        Worker& worker) {
    Cursor cursor(plan, wave), ahead(plan, wave);
    int64_t num_chunks = plan.num_chunks(wave);
    for (int64_t index; (index = worker.next(num_chunks)) >= 0;) {
        Chunk chunk = chunk_at(plan, cursor, index, partials), next{};
        const Chunk* likely_next = nullptr;
        if (index + 1 < num_chunks) {
            next = chunk_at(plan, ahead, index + 1, partials);
            likely_next = &next;
        }
        switch (plan.args.cache.type) {
            case KvType::kF32:
                attend_chunk<ReadF32>(plan, chunk, likely_next, scratch);
                break;
            case KvType::kF16:
                attend_chunk<ReadF16>(plan, chunk, likely_next, scratch);
                break;
            case KvType::kBF16:
                attend_chunk<ReadBF16>(plan, chunk, likely_next, scratch);
                break;
            case KvType::kI8: attend_chunk<ReadI8>(plan, chunk, likely_next, scratch); break;
        }
    }
}

// Adds the results of a wave's tiles, in rising order, to what earlier waves gave.
static void merge_wave(const Plan& plan, int64_t wave, float* sums, const float* partials,
                       const Worker& worker) {
    const AttentionArgs& args = plan.args;
    int64_t head_dim = args.cache.head_dim, padded = round_up(head_dim, kLanes);
    int64_t stride = partial_stride(head_dim), heads = args.heads_per_kv_head;
    int64_t first_row = 0;
    for (int64_t i = plan.step.num_sequences - 1; i >= 0; --i) {
        int64_t rows = plan.cut_rows(i), tiles = rows > 0 ? plan.wave_size(i, wave) : 0;
        bool is_last = wave * plan.wave_tiles + tiles == plan.num_tiles(i);
        for (int64_t row = 0; row < rows && tiles > 0; ++row) {
            if ((first_row + row) % worker.count() != worker.id()) continue;
            float* sum = sums + (first_row + row) * stride;
            const float* partial = partials + (first_row + row) * stride;
            if (wave == 0) {
                for (int64_t c = 0; c < padded; c += kLanes) store(sum + c, zero_f32());
                sum[padded] = kLowest;
                sum[padded + 1] = 0.0f;
            }
            f32x16 max_so_far = broadcast(sum[padded]), total = broadcast(sum[padded + 1]);
            for (int64_t tile = 0; tile < tiles; ++tile, partial += plan.row_floats()) {
                f32x16 largest, keep, add;
                merge_factors(max_so_far, broadcast(partial[padded]), largest, keep, add);
                total = fma(total, keep, broadcast(partial[padded + 1]) * add);
                max_so_far = largest;
                for (int64_t c = 0; c < padded; c += kLanes) {
                    store(sum + c, fma(load(sum + c), keep, load(partial + c) * add));
                }
            }
            store(sum + padded, max_so_far, first_lanes(1));
            store(sum + padded + 1, total, first_lanes(1));
            if (!is_last) continue;
            // Rows lie as [kv_head, query row, head].
            int64_t per_head = plan.num_rows(i) * heads;
            int64_t query_row = plan.step.query_starts[i] + row % per_head / heads;
            int64_t head = row / per_head * heads + row % heads;
            write_out(sum, sum[padded + 1], head_dim,
                      args.out + query_row * args.out_stride + head * head_dim);
        }
        first_row += rows;
    }
}

static void attention(const AttentionArgs& args, const StepParams& step, Worker& worker) {
    int64_t given = args.rows.count(step);
    int64_t used = step.num_sequences > 0 ? step.query_starts[step.num_sequences] : 0;
    int64_t width = args.cache.kv_heads * args.heads_per_kv_head * args.cache.head_dim;
    for (int64_t row = used + worker.id(); row < given; row += worker.count()) {
        float* out = args.out + row * args.out_stride;
        for (int64_t i = 0; i < width; ++i) out[i] = 0.0f;
    }
    if (used == 0) return;
    Plan plan(args, step, worker.count());
    int64_t most_rows = plan.block_rows * args.heads_per_kv_head;
    Scratch scratch(most_rows > kMaxCutRows ? most_rows : kMaxCutRows, args.cache.head_dim,
                    worker);
    float* sums = reinterpret_cast<float*>(worker.shared());
    float* partials = sums + plan.row_floats();
    for (int64_t wave = 0; wave < plan.num_waves; ++wave) {
        if (wave > 0) worker.barrier();
        attend_wave(plan, wave, partials, scratch, worker);
        if (!plan.cuts_tiles) continue;
        worker.barrier();
        merge_wave(plan, wave, sums, partials, worker);
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(AttentionTable, attention, AMBIDEX_ATTENTION_KERNELS)
