#include "tile_permission.h"

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ambidex {

#if defined(AMBIDEX_EMULATED_TILES)

bool have_tiles() { return true; }
bool permit_tiles() { return true; }

#elif defined(__x86_64__) && defined(__linux__)

namespace {

// Parts of a thread's state, as bits of XCR0 and of what the system grants on request.
constexpr int kTileShapes = 17, kTileData = 18;

// `saves`: CPUID 1's ECX; `features`: CPUID 7's EDX; `saved`: XCR0; `grantable`: ARCH_GET_XCOMP_SUPP.
constexpr bool can_have_tiles(uint32_t saves, uint32_t features, uint64_t saved,
                              uint64_t grantable) {
    constexpr uint32_t kSavedBySystem = 1u << 27;  // OSXSAVE: XCR0 may be read
    constexpr uint32_t kTiles = 1u << 24, kBytes = 1u << 25;
    constexpr uint64_t kBoth = 1ull << kTileShapes | 1ull << kTileData;
    return (saves & kSavedBySystem) != 0 && (features & kTiles) != 0 && (features & kBytes) != 0 &&
           (saved & kBoth) == kBoth && (grantable >> kTileData & 1) != 0;
}
static_assert(can_have_tiles(1u << 27, 3u << 24, 0x60007, 0x60007));
static_assert(!can_have_tiles(0, 3u << 24, 0x60007, 0x60007));
static_assert(!can_have_tiles(1u << 27, 1u << 24, 0x60007, 0x60007));
static_assert(!can_have_tiles(1u << 27, 2u << 24, 0x60007, 0x60007));
static_assert(!can_have_tiles(1u << 27, 3u << 24, 0x20007, 0x60007));
static_assert(!can_have_tiles(1u << 27, 3u << 24, 0x40007, 0x60007));
static_assert(!can_have_tiles(1u << 27, 3u << 24, 0x60007, 0x7));

uint64_t read_xcr0() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

// Linux before 5.16 knows neither question, and refuses it.
bool arch_prctl(int question, uint64_t argument) {
    return syscall(SYS_arch_prctl, question, argument) == 0;
}

bool ask_for_tiles() {
    constexpr int kRequest = 0x1023, kGet = 0x1022;  // ARCH_REQ_XCOMP_PERM, ARCH_GET_XCOMP_PERM
    if (!have_tiles() || !arch_prctl(kRequest, kTileData)) return false;
    uint64_t granted = 0;
    return arch_prctl(kGet, reinterpret_cast<uintptr_t>(&granted)) && (granted >> kTileData & 1);
}

}  // namespace

bool have_tiles() {
    constexpr int kGetSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP
    uint32_t a, b, c, d, saves, features;
    if (!__get_cpuid(1, &a, &b, &saves, &d) || !__get_cpuid_count(7, 0, &a, &b, &c, &features)) {
        return false;
    }
    // Reading XCR0 where the system does not use it is an invalid instruction.
    uint64_t saved = (saves >> 27 & 1) != 0 ? read_xcr0() : 0;
    uint64_t grantable = 0;
    if (!arch_prctl(kGetSupported, reinterpret_cast<uintptr_t>(&grantable))) return false;
    return can_have_tiles(saves, features, saved, grantable);
}

bool permit_tiles() {
    static const bool permitted = ask_for_tiles();
    return permitted;
}

#else

bool have_tiles() { return false; }
bool permit_tiles() { return false; }

#endif

}  // namespace ambidex
