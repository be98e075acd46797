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
    module.def("layer_norm", [](Context& context, Address x, int64_t x_stride, Address weight,
                                Address bias, Address out, int64_t out_stride, int64_t rows,
                                int64_t heads, int64_t width, float eps) {
        LayerNormArgs args{pointer<const float>(x),
                           pointer<const float>(weight),
                           pointer<const float>(bias),
                           pointer<float>(out),
                           x_stride,
                           out_stride,
                           width,
                           heads,
                           Rows{rows},
                           eps};
        submit(context, small_table(context.level).layer_norm, args);
    });
    module.def("apply", [](Context& context, Address x, int64_t x_stride, Address y,
                           int64_t y_stride, Address out, int64_t out_stride, int64_t rows,
                           int64_t width, int function, float cap) {
        ApplyArgs args{pointer<const float>(x),
                       pointer<const float>(y),
                       pointer<float>(out),
                       x_stride,
                       y_stride,
                       out_stride,
                       width,
                       Rows{rows},
                       Function(function),
                       cap};
        submit(context, small_table(context.level).apply, args);
    });
    module.def("take_rows", [](Context& context, Address x, int64_t x_stride, Address out,
                               int64_t out_stride, int64_t x_rows, int64_t rows, int64_t width) {
        TakeRowsArgs args{pointer<const float>(x), nullptr,    false,        pointer<float>(out),
                          x_stride,                out_stride, width,        Rows{x_rows},
                          Rows{rows}};
        submit(context, small_table(context.level).take_rows, args);
    });
    module.def("position_rows", [](Context& context, Address table, int64_t stride,
                                   int64_t num_positions, Address positions, Address out,
                                   int64_t out_stride, int64_t rows, int64_t width) {
        TakeRowsArgs args{pointer<const float>(table), pointer<const int64_t>(positions),
                          true,                        pointer<float>(out),
                          stride,                      out_stride,
                          width,                       Rows{num_positions},
                          Rows{rows}};
        submit(context, small_table(context.level).take_rows, args);
    });
    module.def("greedy", [](Context& context, Address logits, int64_t stride, int64_t rows,
                            int64_t max_rows, int64_t width, Address ids, Address is_finite) {
        GreedyArgs args{pointer<const float>(logits), pointer<int64_t>(ids),
                        pointer<bool>(is_finite), stride, width, Rows{rows}};
        size_t shared = size_t(max_rows * num_pieces(width)) * sizeof(PieceMaximum);
        submit(context, small_table(context.level).greedy, args, shared);
    });
    module.def("top_k", [](Context& context, Address logits, int64_t stride, int64_t rows,
                           int64_t width, int64_t k, Address values, Address ids) {
        TopKArgs args{pointer<const float>(logits), pointer<float>(values), pointer<int64_t>(ids),
                      stride, rows, width, k};
        size_t shared = size_t(rows * num_pieces(width) * k) * sizeof(uint64_t);
        submit(context, small_table(context.level).top_k, args, shared);
    });
}

}  // namespace ambidex
