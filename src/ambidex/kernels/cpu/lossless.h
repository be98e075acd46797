// bfloat16 words in fewer bits, without loss. kernels/lossless.py defines the format.
#pragma once

#include "context.h"

namespace ambidex {

constexpr int64_t kFrameWords = 32768;  // of a frame, at most
constexpr int64_t kBlockWords = 256;
constexpr int64_t kBlocksPerFrame = kFrameWords / kBlockWords;
constexpr int64_t kHeaderBytes = 64;
constexpr int kMaxCodeBits = 4;
constexpr int kMaxEscapes = 128;  // that a block lists
constexpr int kAllEscape = 255;   // the exponents of all words are listed

struct FrameHeader {
    static constexpr uint32_t kMagic = 0x31464241;  // "ABF1"

    uint32_t magic, num_bytes, num_words;
    uint8_t width;
    uint8_t zero[3];
    uint8_t exponents[1 << kMaxCodeBits];
    uint8_t rest[32];
};
static_assert(sizeof(FrameHeader) == kHeaderBytes);

// How words are cut into frames; see FrameGrid in kernels/lossless.py.
struct FrameGrid {
    int64_t num_words, unit_words, frame_words, frames_per_unit, num_frames;
};

// Writes the header of every frame, from which follows how large it is.
struct PlanFramesArgs {
    const uint16_t* words;
    FrameHeader* headers;  // [num_frames]
    FrameGrid grid;
};

// Writes every frame behind its header's copy, at its place.
struct EncodeFramesArgs {
    const uint16_t* words;
    const FrameHeader* headers;  // [num_frames]
    const int64_t* starts;       // [num_frames] bytes
    uint8_t* payload;
    FrameGrid grid;
};

// Every number in the payload is checked before it is believed.
struct DecompressArgs {
    const uint8_t* payload;
    int64_t num_bytes;
    uint16_t* out;
    int64_t num_words;
    int64_t* damage;  // the offset of the first frame that cannot be there; left as it is if none
};

#define AMBIDEX_LOSSLESS_KERNELS(X)    \
    X(plan_frames, PlanFramesArgs)     \
    X(encode_frames, EncodeFramesArgs) \
    X(decompress, DecompressArgs)

struct LosslessTable {
#define X(name, Args) Kernel<Args> name;
    AMBIDEX_LOSSLESS_KERNELS(X)
#undef X
};

}  // namespace ambidex
