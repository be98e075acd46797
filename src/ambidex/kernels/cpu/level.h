// Included last by a file that is compiled once a level: exports the family's table.
#pragma once

#include "context.h"

#define AMBIDEX_ENTRY(name, Args) AMBIDEX_LEVEL::name,
#define AMBIDEX_CAT_(a, b) a##_##b
#define AMBIDEX_CAT(a, b) AMBIDEX_CAT_(a, b)
// namespace-scope constants have internal linkage unless declared extern first.
#define AMBIDEX_EXPORT(Table, family, LIST)                                          \
    namespace ambidex {                                                              \
    extern const Table AMBIDEX_CAT(family, AMBIDEX_LEVEL);                           \
    const Table AMBIDEX_CAT(family, AMBIDEX_LEVEL) = {LIST(AMBIDEX_ENTRY)};          \
    }
