#include "attention.h"
#include "bind.h"

AMBIDEX_TABLES(AttentionTable, attention)

namespace ambidex {

void bind_attention(nb::module_& module) {
    nb::class_<KvCacheArgs>(module, "KvCache")
        .def("__init__", [](KvCacheArgs* self, Address keys, Address values, Address key_scales,
                            Address value_scales, int64_t kv_heads, int64_t head_dim,
                            int64_t num_blocks, int32_t block_shift, int32_t group, int32_t type) {
            if (group < 0 || group >= kMaxGroups) throw std::out_of_range("too many KV groups");
            new (self) KvCacheArgs{pointer<void>(keys),
                                   pointer<void>(values),
                                   pointer<float>(key_scales),
                                   pointer<float>(value_scales),
                                   kv_heads,
                                   head_dim,
                                   num_blocks,
                                   (num_blocks + 1) << block_shift,
                                   block_shift,
                                   group,
                                   KvType(type)};
        });
    module.def("rope", [](Context& context, Address query, int64_t query_stride,
                          int64_t query_heads, Address key, int64_t key_stride, int64_t key_heads,
                          int64_t head_dim, Address cos, Address sin, int64_t width,
                          int64_t max_positions, Address positions, int64_t rows) {
        RopeArgs args{pointer<float>(query),
                      pointer<float>(key),
                      pointer<const float>(cos),
                      pointer<const float>(sin),
                      pointer<const int64_t>(positions),
                      query_stride,
                      key_stride,
                      query_heads,
                      key_heads,
                      head_dim,
                      width,
                      max_positions,
                      Rows{rows}};
        submit(context, attention_table(context.level).rope, args);
    });
    module.def("write_kv", [](Context& context, Address key, int64_t key_stride, Address value,
                              int64_t value_stride, const KvCacheArgs& cache, int64_t rows) {
        WriteKvArgs args{pointer<const float>(key), pointer<const float>(value), key_stride,
                         value_stride, cache, Rows{rows}};
        submit(context, attention_table(context.level).write_kv, args);
    });
    module.def("attention", [](Context& context, Address query, int64_t query_stride, Address out,
                               int64_t out_stride, int64_t heads_per_kv_head, int64_t window,
                               const KvCacheArgs& cache, int64_t rows, float scale,
                               float softcap) {
        int64_t shared = attention_shared_floats(context.threads.size(), heads_per_kv_head,
                                                 cache.head_dim);
        AttentionArgs args{pointer<const float>(query),
                           pointer<float>(out),
                           query_stride,
                           out_stride,
                           heads_per_kv_head,
                           window,
                           cache,
                           Rows{rows},
                           scale,
                           softcap,
                           shared};
        submit(context, attention_table(context.level).attention, args,
               size_t(shared) * sizeof(float));
    });
}

}  // namespace ambidex
