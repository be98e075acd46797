#include "bind.h"
#include "lossless.h"

AMBIDEX_TABLES(LosslessTable, lossless)

namespace ambidex {

void bind_lossless(nb::module_& module) {
    module.def("plan_frames", [](Context& context, Address words, Address headers,
                                 int64_t num_words, int64_t unit_words, int64_t frame_words,
                                 int64_t frames_per_unit, int64_t num_frames) {
        PlanFramesArgs args{
            pointer<const uint16_t>(words),
            pointer<FrameHeader>(headers),
            FrameGrid{num_words, unit_words, frame_words, frames_per_unit, num_frames}};
        submit(context, lossless_table(context.level).plan_frames, args);
    });
    module.def("encode_frames", [](Context& context, Address words, Address headers,
                                   Address starts, Address payload, int64_t num_words,
                                   int64_t unit_words, int64_t frame_words,
                                   int64_t frames_per_unit, int64_t num_frames) {
        EncodeFramesArgs args{
            pointer<const uint16_t>(words),
            pointer<const FrameHeader>(headers),
            pointer<const int64_t>(starts),
            pointer<uint8_t>(payload),
            FrameGrid{num_words, unit_words, frame_words, frames_per_unit, num_frames}};
        submit(context, lossless_table(context.level).encode_frames, args);
    });
    module.def("decompress", [](Context& context, Address payload, int64_t num_bytes, Address out,
                                int64_t num_words, Address damage) {
        DecompressArgs args{pointer<const uint8_t>(payload), num_bytes, pointer<uint16_t>(out),
                            num_words, pointer<int64_t>(damage)};
        submit(context, lossless_table(context.level).decompress, args);
    });
}

}  // namespace ambidex
