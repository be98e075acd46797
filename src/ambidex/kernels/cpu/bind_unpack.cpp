#include "bind.h"
#include "unpack.h"

AMBIDEX_TABLES(UnpackTable, unpack)

namespace ambidex {

void bind_unpack(nb::module_& module) {
    module.def("unpack_blocks", [](Context& context, int64_t type, Address rows, int64_t row_bytes,
                                   int64_t num_rows, int64_t blocks, Address codes, Address scale,
                                   Address minimum, Address scale_codes, Address minimum_codes,
                                   Address super_scale, Address super_minimum) {
        UnpackArgs args{pointer<const uint8_t>(rows),
                        pointer<uint8_t>(codes),
                        pointer<uint16_t>(scale),
                        pointer<uint16_t>(minimum),
                        pointer<uint8_t>(scale_codes),
                        pointer<uint8_t>(minimum_codes),
                        pointer<uint16_t>(super_scale),
                        pointer<uint16_t>(super_minimum),
                        row_bytes,
                        num_rows,
                        blocks,
                        BlockType(type)};
        submit(context, unpack_table(context.level).unpack_blocks, args);
    });
}

}  // namespace ambidex
