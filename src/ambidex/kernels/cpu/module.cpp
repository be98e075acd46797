#include <stdexcept>
#include <utility>

#include "bind.h"
#include "tile_permission.h"

namespace ambidex {

#define AMBIDEX_FAMILY(name) void bind_##name(nb::module_& module);
#include "families.inc"
#undef AMBIDEX_FAMILY

void refuse_second_caller() {
    throw std::runtime_error(
        "Two threads use one kernel table at once: each call has to wait for the one before.");
}

static Level level_named(const std::string& name) {
    if (name == "generic") return Level::kGeneric;
    if (name == "v3") return Level::kV3;
    if (name == "v4") return Level::kV4;
    if (name == "v4_vnni") return Level::kV4Vnni;
    if (name == "amx") {
        if (!permit_tiles()) {
            throw std::invalid_argument("this process is not permitted to use tile registers");
        }
        return Level::kAmx;
    }
    throw std::invalid_argument("unknown level: " + name);
}

// Levels in this build that this processor can run, the plainest first.
static std::vector<std::string> supported_levels() {
    std::vector<std::string> names{"generic"};
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512cd");
    bool vnni = v4 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    AMBIDEX_IF_V3(if (v3) names.push_back("v3");)
    AMBIDEX_IF_V4(if (v4) names.push_back("v4");)
    AMBIDEX_IF_V4_VNNI(if (vnni) names.push_back("v4_vnni");)
    AMBIDEX_IF_AMX(if (vnni && have_tiles()) names.push_back("amx");)
#endif
    return names;
}

}  // namespace ambidex

NB_MODULE(_native, module) {
    using namespace ambidex;
    nb::class_<Program>(module, "Program").def_prop_ro("num_calls", [](const Program& program) {
        return program.calls.size();
    });
    nb::class_<Context>(module, "Context")
        .def("__init__",
             [](Context* self, const std::string& level, int num_threads, std::vector<int> cpus) {
                 new (self) Context(level_named(level), num_threads, std::move(cpus));
             })
        .def_prop_ro("num_threads", [](Context& self) { return self.threads.size(); })
        .def_prop_ro("memory_bytes", [](Context& self) { return self.threads.memory_bytes(); })
        .def_ro("num_runs", &Context::num_runs)
        .def("begin_recording",
             [](Context& self) { self.recording = std::make_shared<Program>(); })
        .def("end_recording", [](Context& self) { return std::exchange(self.recording, nullptr); })
        .def("replay",
             [](Context& self, const Program& program) {
                 nb::gil_scoped_release release;
                 self.replay(program);
             })
        .def("replay_timed",
             [](Context& self, const Program& program) {
                 nb::gil_scoped_release release;
                 return self.replay_timed(program);
             })
        .def("set_condition",
             [](Context& self, Address address) {
                 self.condition = pointer<const int64_t>(address);
             })
        .def("set_tokens",
             [](Context& self, int64_t num_tokens, Address token_ids, Address positions) {
                 self.step.num_tokens = num_tokens;
                 self.step.token_ids = pointer<const int64_t>(token_ids);
                 self.step.positions = pointer<const int64_t>(positions);
             })
        .def("set_sequences",
             [](Context& self, int64_t count, Address query_starts, Address context_lens) {
                 self.step.num_sequences = count;
                 self.step.query_starts = pointer<const int32_t>(query_starts);
                 self.step.context_lens = pointer<const int32_t>(context_lens);
             })
        .def("set_group",
             [](Context& self, int group, Address tables, int64_t stride) {
                 if (group < 0 || group >= kMaxGroups) {
                     throw std::out_of_range("too many KV groups");
                 }
                 self.step.groups[group] = {pointer<const int32_t>(tables), stride};
             })
        .def("set_logit_rows", [](Context& self, int64_t count, Address rows) {
            self.step.num_logit_rows = count;
            self.step.logit_rows = pointer<const int32_t>(rows);
        });
    module.def("supported_levels", &supported_levels);
    module.def("permit_tiles", &permit_tiles);
#if defined(AMBIDEX_EMULATED_TILES)
    module.attr("EMULATED_TILES") = true;
#else
    module.attr("EMULATED_TILES") = false;
#endif
    module.attr("ROWS_TOKENS") = Rows::kTokens;
    module.attr("ROWS_LOGITS") = Rows::kLogits;
#define AMBIDEX_FAMILY(name) bind_##name(module);
#include "families.inc"
#undef AMBIDEX_FAMILY
}
