#include "lossless.h"

#include "level.h"
#include "simd_bytes.h"

namespace ambidex::AMBIDEX_LEVEL {

static inline int64_t rounded_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}
static inline uint8_t exponent_of(uint16_t word) { return uint8_t(word >> 7); }
static inline uint8_t low_byte_of(uint16_t word) {
    return uint8_t((word >> 8 & 0x80) | (word & 0x7f));
}
static inline uint16_t word_of(uint8_t low_byte, uint8_t exponent) {
    return uint16_t((low_byte & 0x80) << 8 | exponent << 7 | (low_byte & 0x7f));
}
// Bytes of the part that is as long for any words: header, low bytes, codes, numbers of escapes.
static inline int64_t fixed_bytes(int64_t num_blocks, int width) {
    return kHeaderBytes + num_blocks * (kBlockWords + width * kBlockWords / 8 + 1);
}

// ------------------------------------------------------------------------------ writing

// First word and number of words of a frame.
struct Span {
    int64_t first, count;
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static Span frame_span(const FrameGrid& grid, int64_t frame) {
    int64_t in_unit = frame % grid.frames_per_unit * grid.frame_words;
    int64_t first = frame / grid.frames_per_unit * grid.unit_words + in_unit;
    int64_t count = least(grid.frame_words, grid.unit_words - in_unit);
    return {first, least(count, grid.num_words - first)};
}

// The code of each exponent; kNoCode where it has none.
constexpr uint8_t kNoCode = 255;

struct Codes {
    uint8_t of[256];
};

// How often each exponent occurs.
static void count_exponents(const uint16_t* words, int64_t count, uint32_t* total) {
    // Four at a time: one counter that is raised twice in a row waits for itself.
    uint32_t part[4][256];
    __builtin_memset(part, 0, sizeof part);
    int64_t whole = count / 4 * 4;
    for (int64_t i = 0; i < whole; i += 4) {
        for (int k = 0; k < 4; ++k) ++part[k][exponent_of(words[i + k])];
    }
    for (int64_t i = whole; i < count; ++i) ++part[0][exponent_of(words[i])];
    for (int i = 0; i < 256; ++i) total[i] = part[0][i] + part[1][i] + part[2][i] + part[3][i];
}

// Chooses the codes that make the shortest frame: writes width and exponents, returns the codes.
static Codes choose_codes(uint32_t* counts, int64_t num_words, int64_t num_blocks,
                          FrameHeader& header) {
    uint8_t ranked[1 << kMaxCodeBits];
    int num_ranked = 0;
    int64_t listed = num_words, best_cost = INT64_MAX;
    int best_width = 0, best_codes = 0;
    for (int width = 0; width <= kMaxCodeBits; ++width) {
        while (num_ranked < 1 << width) {
            int most = 0;
            for (int i = 1; i < 256; ++i) {
                if (counts[i] > counts[most]) most = i;
            }
            if (counts[most] == 0) break;
            listed -= counts[most];
            counts[most] = 0;
            ranked[num_ranked++] = uint8_t(most);
        }
        int64_t cost = num_blocks * width * kBlockWords / 8 +
                       least(2 * listed, num_blocks * kBlockWords);
        if (cost < best_cost) {
            best_cost = cost;
            best_width = width;
            best_codes = num_ranked;
        }
    }
    Codes codes;
    __builtin_memset(codes.of, kNoCode, sizeof codes.of);
    header.width = uint8_t(best_width);
    for (int code = 0; code < best_codes; ++code) {
        header.exponents[code] = ranked[code];
        codes.of[ranked[code]] = uint8_t(code);
    }
    return codes;
}

static inline int count_escapes(const uint16_t* words, int64_t count, const Codes& codes) {
    int escapes = 0;
    for (int64_t i = 0; i < count; ++i) escapes += codes.of[exponent_of(words[i])] == kNoCode;
    return escapes;
}

static void plan_frames(const PlanFramesArgs& args, const StepParams&, Worker& worker) {
    const FrameGrid& grid = args.grid;
    int64_t end = grid.num_frames * (worker.id() + 1) / worker.count();
    for (int64_t frame = grid.num_frames * worker.id() / worker.count(); frame < end; ++frame) {
        Span span = frame_span(grid, frame);
        const uint16_t* words = args.words + span.first;
        int64_t num_blocks = (span.count + kBlockWords - 1) / kBlockWords;
        FrameHeader header;
        __builtin_memset(&header, 0, sizeof header);
        uint32_t counts[256];
        count_exponents(words, span.count, counts);
        Codes codes = choose_codes(counts, span.count, num_blocks, header);
        int64_t num_bytes = fixed_bytes(num_blocks, header.width);
        for (int64_t i = 0; i < span.count; i += kBlockWords) {
            int escapes = count_escapes(words + i, least(kBlockWords, span.count - i), codes);
            num_bytes += escapes > kMaxEscapes ? kBlockWords : 2 * escapes;
        }
        header.magic = FrameHeader::kMagic;
        header.num_bytes = uint32_t(rounded_up(num_bytes, 64));
        header.num_words = uint32_t(span.count);
        args.headers[frame] = header;
    }
}

// Where the next parts of a frame are written.
struct Encoder {
    uint8_t *low_bytes, *planes, *number, *escapes;
    const Codes* codes;
    int width;

    void block(const uint16_t* __restrict words, int64_t count) {
        uint16_t padded[kBlockWords];
        uint8_t code[kBlockWords];
        if (count < kBlockWords) {
            __builtin_memset(padded, 0, sizeof padded);
            __builtin_memcpy(padded, words, size_t(count) * sizeof(uint16_t));
            words = padded;
        }
        uint8_t* __restrict low = low_bytes;
        for (int i = 0; i < kBlockWords; ++i) low[i] = low_byte_of(words[i]);
        low_bytes += kBlockWords;
        for (int i = 0; i < kBlockWords; ++i) code[i] = codes->of[exponent_of(words[i])];
        // What is behind the last word has a code, whatever it is.
        for (int64_t i = count; i < kBlockWords; ++i) code[i] = 0;

        uint64_t escaped[kBlockWords / 64];
        int num_escapes = 0;
        for (int i = 0; i < kBlockWords / 64; ++i) {
            u8x64 all = load_bytes(code + 64 * i);
            // No code has its highest bit, and kNoCode has all.
            escaped[i] = set_bits(all, 0x80);
            num_escapes += __builtin_popcountll(escaped[i]);
            for (int plane = 0; plane < width; ++plane) {
                uint64_t bits = set_bits(all, uint8_t(1 << plane)) & ~escaped[i];
                __builtin_memcpy(planes, &bits, sizeof bits);
                planes += sizeof bits;
            }
        }
        if (num_escapes > kMaxEscapes) {
            *number++ = kAllEscape;
            for (int i = 0; i < kBlockWords; ++i) escapes[i] = exponent_of(words[i]);
            escapes += kBlockWords;
            return;
        }
        *number++ = uint8_t(num_escapes);
        for (int i = 0; i < kBlockWords / 64; ++i) {
            for (uint64_t rest = escaped[i]; rest != 0; rest &= rest - 1) {
                int position = 64 * i + __builtin_ctzll(rest);
                *escapes++ = uint8_t(position);
                *escapes++ = exponent_of(words[position]);
            }
        }
    }
};

static void encode_frames(const EncodeFramesArgs& args, const StepParams&, Worker& worker) {
    const FrameGrid& grid = args.grid;
    int64_t end = grid.num_frames * (worker.id() + 1) / worker.count();
    for (int64_t frame = grid.num_frames * worker.id() / worker.count(); frame < end; ++frame) {
        Span span = frame_span(grid, frame);
        const FrameHeader& header = args.headers[frame];
        int64_t num_blocks = (span.count + kBlockWords - 1) / kBlockWords;
        uint8_t* start = args.payload + args.starts[frame];
        __builtin_memcpy(start, &header, sizeof header);

        Codes codes;
        __builtin_memset(codes.of, kNoCode, sizeof codes.of);
        // Downwards: entries that are not used are zero, which may also be an exponent.
        for (int code = (1 << header.width) - 1; code >= 0; --code) {
            codes.of[header.exponents[code]] = uint8_t(code);
        }
        Encoder encoder;
        encoder.codes = &codes;
        encoder.width = header.width;
        encoder.low_bytes = start + kHeaderBytes;
        encoder.planes = encoder.low_bytes + num_blocks * kBlockWords;
        encoder.number = encoder.planes + num_blocks * header.width * (kBlockWords / 8);
        encoder.escapes = encoder.number + num_blocks;
        const uint16_t* words = args.words + span.first;
        for (int64_t i = 0; i < span.count; i += kBlockWords) {
            encoder.block(words + i, least(kBlockWords, span.count - i));
        }
        uint8_t* frame_end = start + header.num_bytes;
        __builtin_memset(encoder.escapes, 0, size_t(frame_end - encoder.escapes));
    }
}

// ------------------------------------------------------------------------------ reading

struct Tables {
    u8x64 high, low;  // what each code's exponent puts into a word's bytes
};

template <int kWidth>
static inline void decode_block(const uint8_t* low_bytes, const uint8_t* planes,
                                const Tables& tables, uint16_t* out) {
    const u8x64 sign = broadcast_u8(0x80), mantissa = broadcast_u8(0x7f);
    for (int i = 0; i < kBlockWords; i += 64) {
        u8x64 codes = zero_u8();
        for (int plane = 0; plane < kWidth; ++plane) {
            uint64_t bits;
            __builtin_memcpy(&bits, planes, sizeof bits);
            planes += sizeof bits;
            codes = codes | where_bits(bits, uint8_t(1 << plane));
        }
        u8x64 byte = load_bytes(low_bytes + i);
        store_words(out + i, (byte & mantissa) | look_up(tables.low, codes),
                    (byte & sign) | look_up(tables.high, codes));
    }
}

// Writes what the codes cannot tell; returns where the next block's escapes begin. `number` has
// been checked.
static inline const uint8_t* place_escapes(const uint8_t* low_bytes, const uint8_t* escapes,
                                           int number, uint16_t* out) {
    if (number == kAllEscape) {
        for (int i = 0; i < kBlockWords; ++i) out[i] = word_of(low_bytes[i], escapes[i]);
        return escapes + kBlockWords;
    }
    for (int i = 0; i < number; ++i) {
        uint8_t position = escapes[2 * i];
        out[position] = word_of(low_bytes[position], escapes[2 * i + 1]);
    }
    return escapes + 2 * number;
}

template <int kWidth>
static void decode_blocks(const FrameHeader& header, const uint8_t* low_bytes, uint16_t* out) {
    uint8_t high[16], low[16];
    for (int i = 0; i < 16; ++i) {
        high[i] = header.exponents[i] >> 1;
        low[i] = uint8_t(header.exponents[i] << 7);
    }
    Tables tables{load_table(high), load_table(low)};
    int64_t num_words = header.num_words;
    int64_t num_blocks = (num_words + kBlockWords - 1) / kBlockWords;
    const uint8_t* planes = low_bytes + num_blocks * kBlockWords;
    const uint8_t* numbers = planes + num_blocks * kWidth * (kBlockWords / 8);
    const uint8_t* escapes = numbers + num_blocks;
    for (int64_t block = 0; block < num_blocks; ++block) {
        int64_t count = num_words - block * kBlockWords;
        uint16_t part[kBlockWords];
        uint16_t* to = count < kBlockWords ? part : out;
        decode_block<kWidth>(low_bytes, planes, tables, to);
        escapes = place_escapes(low_bytes, escapes, numbers[block], to);
        if (count < kBlockWords) __builtin_memcpy(out, part, size_t(count) * sizeof(uint16_t));
        low_bytes += kBlockWords;
        planes += kWidth * (kBlockWords / 8);
        out += kBlockWords;
    }
}

// Whether a frame can begin at `at`. What it says of itself is then within both.
static bool read_header(const uint8_t* at, int64_t bytes_left, int64_t words_left,
                        FrameHeader& header) {
    if (bytes_left < kHeaderBytes) return false;
    __builtin_memcpy(&header, at, sizeof header);
    int64_t num_words = header.num_words, num_bytes = header.num_bytes;
    if (header.magic != FrameHeader::kMagic || header.width > kMaxCodeBits) return false;
    if (num_words < 1 || num_words > kFrameWords || num_words > words_left) return false;
    int64_t num_blocks = (num_words + kBlockWords - 1) / kBlockWords;
    return num_bytes % 64 == 0 && num_bytes <= bytes_left &&
           num_bytes >= fixed_bytes(num_blocks, header.width);
}

// Whether the escapes of a frame end where it does.
static bool has_its_escapes(const FrameHeader& header, const uint8_t* at) {
    int64_t num_blocks = (int64_t(header.num_words) + kBlockWords - 1) / kBlockWords;
    int64_t end = fixed_bytes(num_blocks, header.width);
    const uint8_t* numbers = at + end - num_blocks;
    for (int64_t block = 0; block < num_blocks; ++block) {
        int number = numbers[block];
        if (number > kMaxEscapes && number != kAllEscape) return false;
        end += number == kAllEscape ? kBlockWords : 2 * number;
    }
    return rounded_up(end, 64) == header.num_bytes;
}

static bool decode_frame(const FrameHeader& header, const uint8_t* at, uint16_t* out) {
    if (!has_its_escapes(header, at)) return false;
    const uint8_t* low_bytes = at + kHeaderBytes;
    switch (header.width) {
        case 0: decode_blocks<0>(header, low_bytes, out); break;
        case 1: decode_blocks<1>(header, low_bytes, out); break;
        case 2: decode_blocks<2>(header, low_bytes, out); break;
        case 3: decode_blocks<3>(header, low_bytes, out); break;
        default: decode_blocks<4>(header, low_bytes, out); break;
    }
    return true;
}

// Keeps the lowest offset that any worker reports, which is the first in the payload; -1 is none.
static void report(const DecompressArgs& args, int64_t offset) {
    int64_t known = __atomic_load_n(args.damage, __ATOMIC_RELAXED);
    while (known < 0 || offset < known) {
        if (__atomic_compare_exchange_n(args.damage, &known, offset, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
            return;
        }
    }
}

// A worker reads the headers up to the end of its share, and decodes the frames that begin in it.
static void decompress(const DecompressArgs& args, const StepParams&, Worker& worker) {
    int64_t first = args.num_words * worker.id() / worker.count();
    int64_t end = args.num_words * (worker.id() + 1) / worker.count();
    int64_t offset = 0, word = 0;
    while (word < end) {
        FrameHeader header;
        const uint8_t* at = args.payload + offset;
        bool is_sound = read_header(at, args.num_bytes - offset, args.num_words - word, header);
        if (is_sound && word >= first) is_sound = decode_frame(header, at, args.out + word);
        if (!is_sound) return report(args, offset);
        offset += header.num_bytes;
        word += header.num_words;
    }
    // Whoever reads the last header knows whether more follows.
    if (word == args.num_words && offset != args.num_bytes) report(args, offset);
}

}  // namespace ambidex::AMBIDEX_LEVEL

AMBIDEX_EXPORT(LosslessTable, lossless, AMBIDEX_LOSSLESS_KERNELS)
