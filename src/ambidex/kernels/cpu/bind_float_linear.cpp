#include "bind.h"
#include "float_linear.h"

AMBIDEX_TABLES(FloatLinearTable, float_linear)

namespace ambidex {

void bind_float_linear(nb::module_& module) {
    module.def("pack_float", [](Context& context, Address weight, int64_t row_bytes,
                                Address panels, int64_t out, int64_t in, int type) {
        PackFloatArgs args{pointer<const void>(weight), pointer<void>(panels), row_bytes, out, in,
                           FloatType(type)};
        submit(context, float_linear_table(context.level).pack_float, args);
    });
    module.def("linear_float", [](Context& context, Address x, int64_t x_stride, Address panels,
                                  int64_t out_rows, int64_t in, int type, Address bias,
                                  Address residual, int64_t residual_stride, Address out,
                                  int64_t out_stride, int64_t rows, int gate) {
        FloatLinearArgs args{
            FloatMatrix{pointer<const void>(panels), out_rows, in, FloatType(type)},
            pointer<const float>(x),
            pointer<const float>(bias),
            pointer<const float>(residual),
            pointer<float>(out),
            x_stride,
            residual_stride,
            out_stride,
            Rows{rows},
            GateFunction(gate)};
        submit(context, float_linear_table(context.level).linear_float, args);
    });
    module.def("embedding_float", [](Context& context, Address token_ids, Address panels,
                                     int64_t vocabulary, int64_t in, int type, Address out,
                                     int64_t out_stride, int64_t rows, float scale) {
        FloatEmbeddingArgs args{
            FloatMatrix{pointer<const void>(panels), vocabulary, in, FloatType(type)},
            pointer<const int64_t>(token_ids),
            pointer<float>(out),
            out_stride,
            Rows{rows},
            scale};
        submit(context, float_linear_table(context.level).embedding_float, args);
    });
}

}  // namespace ambidex
