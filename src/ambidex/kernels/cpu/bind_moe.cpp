#include "bind.h"
#include "moe.h"

AMBIDEX_TABLES(MoeTable, moe)

namespace ambidex {

void bind_moe(nb::module_& module) {
    module.def("route_experts", [](Context& context, Address logits, int64_t stride, int64_t rows,
                                   int64_t num_experts, int64_t top_k, bool softmax_first,
                                   bool normalise, Address weights, Address experts) {
        RouteArgs args{pointer<const float>(logits),
                       pointer<float>(weights),
                       pointer<int64_t>(experts),
                       stride,
                       num_experts,
                       top_k,
                       Rows{rows},
                       softmax_first,
                       normalise};
        submit(context, moe_table(context.level).route, args);
    });
    module.def("group_experts", [](Context& context, Address experts, Address order,
                                   Address starts, Address counts, int64_t num_experts,
                                   int64_t top_k, int64_t rows) {
        GroupArgs args{pointer<const int64_t>(experts),
                       pointer<int64_t>(order),
                       pointer<int64_t>(starts),
                       pointer<int64_t>(counts),
                       num_experts,
                       top_k,
                       Rows{rows}};
        submit(context, moe_table(context.level).group, args);
    });
    module.def("gather_rows", [](Context& context, Address x, int64_t x_stride, Address order,
                                 Address start, Address out, int64_t rows, int64_t width,
                                 int64_t top_k) {
        GatherArgs args{pointer<const float>(x),
                        pointer<const int64_t>(order),
                        pointer<const int64_t>(start),
                        pointer<float>(out),
                        x_stride,
                        width,
                        top_k,
                        Rows{rows}};
        submit(context, moe_table(context.level).gather, args);
    });
    module.def("scatter_rows", [](Context& context, Address results, Address order, Address start,
                                  Address weights, Address out, int64_t out_stride, int64_t rows,
                                  int64_t width, int64_t top_k) {
        ScatterArgs args{pointer<const float>(results),
                         pointer<const int64_t>(order),
                         pointer<const int64_t>(start),
                         pointer<const float>(weights),
                         pointer<float>(out),
                         out_stride,
                         width,
                         top_k,
                         Rows{rows}};
        submit(context, moe_table(context.level).scatter, args);
    });
    module.def("spread_rows", [](Context& context, Address results, Address order, Address start,
                                 Address out, int64_t rows, int64_t width) {
        SpreadArgs args{pointer<const float>(results),
                        pointer<const int64_t>(order),
                        pointer<const int64_t>(start),
                        pointer<float>(out),
                        width,
                        Rows{rows}};
        submit(context, moe_table(context.level).spread, args);
    });
    module.attr("MAX_PARTS") = CombineArgs::kMaxParts;
    module.def("combine_experts", [](Context& context, const std::vector<Address>& parts,
                                     Address weights, Address experts, Address out,
                                     int64_t out_stride, int64_t rows, int64_t width,
                                     int64_t top_k) {
        CombineArgs args{{},
                         pointer<const float>(weights),
                         pointer<const int64_t>(experts),
                         pointer<float>(out),
                         int64_t(parts.size()),
                         out_stride,
                         width,
                         top_k,
                         Rows{rows}};
        for (size_t i = 0; i < parts.size() && i < size_t(CombineArgs::kMaxParts); ++i) {
            args.parts[i] = pointer<const float>(parts[i]);
        }
        submit(context, moe_table(context.level).combine, args);
    });
    module.def("clear_rows", [](Context& context, Address out, int64_t stride, int64_t rows,
                                int64_t width) {
        ClearArgs args{pointer<float>(out), stride, width, Rows{rows}};
        submit(context, moe_table(context.level).clear, args);
    });
}

}  // namespace ambidex
