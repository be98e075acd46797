#include "bind.h"
#include "small.h"

AMBIDEX_TABLES(SmallTable, small)

namespace ambidex {

void bind_small(nb::module_& module) {
    module.def("rms_norm", [](Context& context, Address x, int64_t x_stride, Address weight,
                              Address residual, int64_t residual_stride, Address out,
                              int64_t out_stride, int64_t rows, int64_t heads, int64_t width,
                              float eps, float offset) {
        RmsNormArgs args{pointer<const float>(x),
                         pointer<const float>(weight),
                         pointer<const float>(residual),
                         pointer<float>(out),
                         x_stride,
                         residual_stride,
                         out_stride,
                         width,
                         heads,
                         Rows{rows},
                         eps,
                         offset};
        submit(context, small_table(context.level).rms_norm, args);
    });
    module.def("add", [](Context& context, Address x, int64_t x_stride, Address y,
                         int64_t y_stride, Address out, int64_t out_stride, int64_t rows,
                         int64_t width) {
        AddArgs args{pointer<const float>(x), pointer<const float>(y), pointer<float>(out),
                     x_stride, y_stride, out_stride, width, Rows{rows}};
        submit(context, small_table(context.level).add, args);
    });
}

}  // namespace ambidex
