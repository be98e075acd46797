// From a family's list of kernels to its table of functions, one a level.
//
// A family `small` has small.h (argument structs, the list AMBIDEX_SMALL_KERNELS), small.cpp
// (compiled once a level, with AMBIDEX_LEVEL and AMBIDEX_NAME defined) and bind_small.cpp.
#pragma once

#include <stdexcept>

#include "context.h"


#if defined(AMBIDEX_HAS_V3)
#define AMBIDEX_IF_V3(...) __VA_ARGS__
#else
#define AMBIDEX_IF_V3(...)
#endif
#if defined(AMBIDEX_HAS_V4)
#define AMBIDEX_IF_V4(...) __VA_ARGS__
#else
#define AMBIDEX_IF_V4(...)
#endif
#if defined(AMBIDEX_HAS_V4_VNNI)
#define AMBIDEX_IF_V4_VNNI(...) __VA_ARGS__
#else
#define AMBIDEX_IF_V4_VNNI(...)
#endif
// Only where there is v4_vnni, too.
#if defined(AMBIDEX_HAS_AMX)
#define AMBIDEX_IF_AMX(...) __VA_ARGS__
#else
#define AMBIDEX_IF_AMX(...)
#endif

// Declares `Table family_table(Level)`, to be used in one file only. Level amx has functions of its
// own in families that use tiles, and v4_vnni's in the others.
#define AMBIDEX_TABLES(Table, family) AMBIDEX_TABLES_(Table, family, v4_vnni)
#define AMBIDEX_TILE_TABLES(Table, family) AMBIDEX_TABLES_(Table, family, amx)
#define AMBIDEX_TABLES_(Table, family, with_amx)                             \
    namespace ambidex {                                                      \
    extern const Table family##_generic;                                     \
    AMBIDEX_IF_V3(extern const Table family##_v3;)                           \
    AMBIDEX_IF_V4(extern const Table family##_v4;)                           \
    AMBIDEX_IF_V4_VNNI(extern const Table family##_v4_vnni;)                 \
    AMBIDEX_IF_AMX(extern const Table family##_##with_amx;)                  \
    static const Table& family##_table(Level level) {                        \
        switch (level) {                                                     \
            AMBIDEX_IF_V3(case Level::kV3 : return family##_v3;)             \
            AMBIDEX_IF_V4(case Level::kV4 : return family##_v4;)             \
            AMBIDEX_IF_V4_VNNI(case Level::kV4Vnni : return family##_v4_vnni;) \
            AMBIDEX_IF_AMX(case Level::kAmx : return family##_##with_amx;)   \
            case Level::kGeneric:                                            \
                return family##_generic;                                     \
            default:                                                         \
                throw std::invalid_argument("this build lacks that level");  \
        }                                                                    \
    }                                                                        \
    }
