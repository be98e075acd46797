#include "bind.h"
#include "quantized_linear.h"

AMBIDEX_TILE_TABLES(QuantizedLinearTable, quantized_linear)

namespace ambidex {

static int64_t number_bytes(ScaleKind kind) {
    return kind == ScaleKind::kF32 ? 4 : kind == ScaleKind::kF16 ? 2 : 1;
}
static int64_t number_bytes(ZeroKind kind) {
    switch (kind) {
        case ZeroKind::kConstant: return 0;
        case ZeroKind::kMinF32: return 4;
        case ZeroKind::kMinF16: return 2;
        default: return 1;
    }
}

// Lays out a panel. `group`: columns a group, any number for a whole row.
static PackedForm make_form(int64_t rows, int64_t columns, CodeKind code, int64_t group,
                            ScaleKind scale, ZeroKind zero_kind, int32_t zero, float unit,
                            bool fine) {
    PackedForm form{};
    form.rows = rows;
    form.columns = columns;
    form.blocks = (columns + kBlock - 1) / kBlock;
    form.group_shift = group == 16 ? 0 : group == 32 ? 1 : group == 64 ? 2 : group == 128 ? 3 : 62;
    form.groups = form.blocks == 0 ? 0 : int32_t(((2 * form.blocks - 1) >> form.group_shift) + 1);
    form.zero = zero;
    form.unit = unit;
    form.code = code;
    form.scale = scale;
    form.zero_kind = zero_kind;
    form.fine = fine;
    int64_t supers = (form.blocks + kSuperBlocks - 1) / kSuperBlocks;
    bool coded = scale == ScaleKind::kI8 || scale == ScaleKind::kU8;
    int64_t end = form.code_bytes();
    form.scales = int32_t(end);
    end += number_bytes(scale) * form.groups * kPanelRows;
    form.zeros = int32_t(end);
    end += number_bytes(zero_kind) * form.groups * kPanelRows;
    form.super_scales = int32_t(end);
    if (coded) end += 2 * supers * kPanelRows;
    form.super_zeros = int32_t(end);
    if (zero_kind == ZeroKind::kMinCodes) end += 2 * supers * kPanelRows;
    if (end > INT32_MAX) throw std::invalid_argument("rows of a packed matrix are too long");
    form.panel_bytes = (end + 63) / 64 * 64;
    return form;
}

void bind_quantized_linear(nb::module_& module) {
    nb::enum_<CodeKind>(module, "CodeKind")
        .value("BITS4", CodeKind::k4)
        .value("BITS5", CodeKind::k5)
        .value("BITS6", CodeKind::k6)
        .value("BITS8", CodeKind::k8)
        .value("TABLE8", CodeKind::kTable8)
        .value("TABLE16", CodeKind::kTable16);
    nb::enum_<ScaleKind>(module, "ScaleKind")
        .value("F16", ScaleKind::kF16)
        .value("F32", ScaleKind::kF32)
        .value("I8", ScaleKind::kI8)
        .value("U8", ScaleKind::kU8);
    nb::enum_<ZeroKind>(module, "ZeroKind")
        .value("CONSTANT", ZeroKind::kConstant)
        .value("CODES", ZeroKind::kCodes)
        .value("MIN_F16", ZeroKind::kMinF16)
        .value("MIN_F32", ZeroKind::kMinF32)
        .value("MIN_CODES", ZeroKind::kMinCodes);
    nb::enum_<Activation>(module, "GatedActivation")
        .value("SILU", Activation::kSilu)
        .value("GELU_TANH", Activation::kGeluTanh)
        .value("RELU", Activation::kRelu);
    nb::class_<PackedForm>(module, "PackedForm")
        .def("__init__",
             [](PackedForm* self, int64_t rows, int64_t columns, CodeKind code, int64_t group,
                ScaleKind scale, ZeroKind zero_kind, int32_t zero, float unit, bool fine) {
                 new (self) PackedForm(
                     make_form(rows, columns, code, group, scale, zero_kind, zero, unit, fine));
             })
        .def_ro("panel_bytes", &PackedForm::panel_bytes)
        .def_prop_ro("num_panels", [](const PackedForm& form) { return form.panels(); })
        .def("with_rows", [](const PackedForm& form, int64_t rows) {
            PackedForm cut = form;
            cut.rows = rows;
            return cut;
        });
    module.attr("CODEBOOK_BYTES") = sizeof(Codebook);
    module.def("pack_quantized",
               [](Context& context, const PackedForm& form, Address codes, Address scale,
                  Address zero, Address super_scale, Address super_zero, int64_t groups,
                  int64_t super_groups, Address panels) {
                   QuantizedPackArgs args{pointer<const uint8_t>(codes),
                                          pointer<const void>(scale),
                                          pointer<const void>(zero),
                                          pointer<const void>(super_scale),
                                          pointer<const void>(super_zero),
                                          groups,
                                          super_groups,
                                          pointer<uint8_t>(panels),
                                          form};
                   submit(context, quantized_linear_table(context.level).pack_quantized, args);
               });
    module.def("linear_quantized", [](Context& context, const PackedForm& form, Address panels,
                                      Address codebook, Address permutation, Address x,
                                      int64_t x_stride, Address bias, Address residual,
                                      int64_t residual_stride, Address out, int64_t out_stride,
                                      int64_t rows, int64_t max_rows) {
        QuantizedLinearArgs args{pointer<const float>(x),
                                 pointer<const uint8_t>(panels),
                                 pointer<const Codebook>(codebook),
                                 pointer<const int32_t>(permutation),
                                 pointer<const float>(bias),
                                 pointer<const float>(residual),
                                 pointer<float>(out),
                                 x_stride,
                                 residual_stride,
                                 out_stride,
                                 Rows{rows},
                                 form,
                                 Activation::kSilu};
        submit(context, quantized_linear_table(context.level).linear_quantized, args,
               QuantizedLinearArgs::shared_bytes(form, max_rows));
    });
    module.def("gated_quantized", [](Context& context, const PackedForm& form, Address panels,
                                     Address codebook, Address permutation, Address x,
                                     int64_t x_stride, Activation activation, Address bias,
                                     Address out, int64_t out_stride, int64_t rows,
                                     int64_t max_rows) {
        QuantizedLinearArgs args{pointer<const float>(x),
                                 pointer<const uint8_t>(panels),
                                 pointer<const Codebook>(codebook),
                                 pointer<const int32_t>(permutation),
                                 pointer<const float>(bias),
                                 nullptr,
                                 pointer<float>(out),
                                 x_stride,
                                 0,
                                 out_stride,
                                 Rows{rows},
                                 form,
                                 activation};
        submit(context, quantized_linear_table(context.level).gated_quantized, args,
               QuantizedLinearArgs::shared_bytes(form, max_rows));
    });
    module.def("embedding_quantized",
               [](Context& context, const PackedForm& form, Address panels, Address codebook,
                  Address permutation, Address token_ids, float scale, Address out,
                  int64_t out_stride, int64_t rows) {
                   QuantizedEmbeddingArgs args{pointer<const int64_t>(token_ids),
                                               pointer<const uint8_t>(panels),
                                               pointer<const Codebook>(codebook),
                                               pointer<const int32_t>(permutation),
                                               pointer<float>(out),
                                               out_stride,
                                               Rows{rows},
                                               form,
                                               scale};
                   submit(context, quantized_linear_table(context.level).embedding_quantized, args);
               });
}

}  // namespace ambidex
