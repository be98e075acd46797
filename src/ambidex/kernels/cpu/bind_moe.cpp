#include <nanobind/stl/pair.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "bind.h"
#include "moe.h"

AMBIDEX_TABLES(MoeTable, moe)

namespace ambidex {

// Sorts choices by expert, rows rising within one: fills `order` with choice indices, and returns
// the experts that are chosen, each with the end of its part of `order`.
static std::vector<std::pair<int64_t, int64_t>> group_by_expert(Address experts, int64_t count,
                                                                int64_t num_experts,
                                                                Address order) {
    const int64_t* chosen = pointer<const int64_t>(experts);
    std::vector<int64_t> ends(size_t(num_experts) + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
        if (chosen[i] < 0 || chosen[i] >= num_experts) {
            throw std::out_of_range("there is no expert " + std::to_string(chosen[i]));
        }
        ++ends[size_t(chosen[i]) + 1];
    }
    for (int64_t expert = 0; expert < num_experts; ++expert) ends[expert + 1] += ends[expert];
    int64_t* sorted = pointer<int64_t>(order);
    for (int64_t i = 0; i < count; ++i) sorted[ends[chosen[i]]++] = i;
    std::vector<std::pair<int64_t, int64_t>> groups;
    for (int64_t expert = 0, begin = 0; expert < num_experts; begin = ends[expert++]) {
        if (ends[expert] > begin) groups.emplace_back(expert, ends[expert]);
    }
    return groups;
}

void bind_moe(nb::module_& module) {
    module.def("route_experts", [](Context& context, Address logits, int64_t stride,
                                   int64_t num_rows, int64_t num_experts, int64_t top_k,
                                   bool softmax_first, bool normalise, Address weights,
                                   Address experts) {
        RouteArgs args{pointer<const float>(logits),
                       pointer<float>(weights),
                       pointer<int64_t>(experts),
                       stride,
                       num_rows,
                       num_experts,
                       top_k,
                       softmax_first,
                       normalise};
        submit(context, moe_table(context.level).route, args);
    });
    module.def("group_by_expert", &group_by_expert);
    module.def("gather_rows", [](Context& context, Address x, int64_t x_stride, Address order,
                                 int64_t num_out, int64_t width, int64_t top_k, Address out) {
        GatherArgs args{pointer<const float>(x), pointer<const int64_t>(order),
                        pointer<float>(out), x_stride, num_out, width, top_k};
        submit(context, moe_table(context.level).gather, args);
    });
    // `results`: address and end in `order` of each group's rows, one after the other.
    module.def("scatter_experts", [](Context& context,
                                     const std::vector<std::pair<Address, int64_t>>& results,
                                     Address order, Address weights, Address experts,
                                     int64_t num_rows, int64_t width, int64_t top_k, Address out) {
        std::vector<const float*> places(size_t(num_rows * top_k));
        const int64_t* sorted = pointer<const int64_t>(order);
        int64_t at = 0;
        for (auto [address, end] : results) {
            for (const float* place = pointer<const float>(address); at < end; place += width) {
                places[size_t(sorted[at++])] = place;
            }
        }
        ScatterArgs args{places.data(),
                         pointer<const float>(weights),
                         pointer<const int64_t>(experts),
                         pointer<float>(out),
                         num_rows,
                         width,
                         top_k};
        submit(context, moe_table(context.level).scatter, args);
    });
}

}  // namespace ambidex
