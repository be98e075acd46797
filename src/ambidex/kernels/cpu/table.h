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

// Declares `Table family_table(Level)`, to be used in one file only.
#define AMBIDEX_TABLES(Table, family)                                        \
    namespace ambidex {                                                      \
    extern const Table family##_generic;                                     \
    AMBIDEX_IF_V3(extern const Table family##_v3;)                           \
    AMBIDEX_IF_V4(extern const Table family##_v4;)                           \
    AMBIDEX_IF_V4_VNNI(extern const Table family##_v4_vnni;)                 \
    static const Table& family##_table(Level level) {                        \
        switch (level) {                                                     \
            AMBIDEX_IF_V3(case Level::kV3 : return family##_v3;)             \
            AMBIDEX_IF_V4(case Level::kV4 : return family##_v4;)             \
            AMBIDEX_IF_V4_VNNI(case Level::kV4Vnni : return family##_v4_vnni;) \
            case Level::kGeneric:                                            \
                return family##_generic;                                     \
            default:                                                         \
                throw std::invalid_argument("this build lacks that level");  \
        }                                                                    \
    }                                                                        \
    }
