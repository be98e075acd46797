// Every function of simd.h, simd_math.h and simd_bytes.h against plain loops. Built once a level
// (-DAMBIDEX_TESTS=ON); prints what differs and ends with 1, or prints the number of checks.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "simd_bytes.h"
#include "simd_math.h"

using namespace ambidex::AMBIDEX_LEVEL;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kEdges[] = {0.0f,     -0.0f,     1.0f,     -1.0f,   0.5f,    1.5f,  2.5f,
                            -2.5f,    65504.0f,  65520.0f, 1e-8f,   -6e-8f,  1e-5f, 6.1e-5f,
                            -126.5f,  3.0e38f,   -87.0f,   88.0f,   kInf,    -kInf, kNan,
                            1.00049f, -0.14999f, 0.15001f, 127.5f,  -128.5f, 20.0f, -20.0f};
constexpr int kRounds = 400;

std::mt19937 random_bits(7);
long num_checks = 0, num_failed = 0;

float random_float(float scale) {
    if (random_bits() % 8 == 0) return kEdges[random_bits() % std::size(kEdges)];
    return scale * (float(random_bits()) / 2147483648.0f - 1.0f);
}

void fill(float* x, float scale = 100.0f) {
    for (int i = 0; i < kLanes; ++i) x[i] = random_float(scale);
}
// Without infinities and NaN.
void fill_finite(float* x, float scale) {
    for (int i = 0; i < kLanes; ++i) x[i] = scale * (float(random_bits()) / 2147483648.0f - 1.0f);
}

template <class T>
bool same_bits(T a, T b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
}
bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || same_bits(a, b); }

void check(bool is_right, const char* what, double got, double want) {
    ++num_checks;
    if (is_right || ++num_failed > 20) return;
    std::printf("%s: %.9g, and not %.9g\n", what, got, want);
}
void check_same(const char* what, float got, float want) {
    check(same(got, want), what, got, want);
}
void check_int(const char* what, int64_t got, int64_t want) {
    check(got == want, what, double(got), double(want));
}
// Equal within `ulps` units of the last place of `want`, or both below the smallest normal number.
void check_near(const char* what, float got, double want, double ulps) {
    if (std::isnan(want)) return check(std::isnan(got), what, got, want);
    if (std::fabs(want) > 3.4028235e38) {
        return check(std::isinf(got) && (got > 0) == (want > 0), what, got, want);
    }
    double unit = std::ldexp(1.0, std::ilogb(std::fmax(std::fabs(want), 1.2e-38)) - 23);
    check(std::fabs(got - want) <= ulps * unit, what, got, want);
}

template <class Vector, class Plain>
void check_unary(const char* what, Vector vector, Plain plain, float scale = 100.0f) {
    float x[kLanes], got[kLanes];
    for (int round = 0; round < kRounds; ++round) {
        fill(x, scale);
        store(got, vector(load(x)));
        for (int i = 0; i < kLanes; ++i) check_same(what, got[i], plain(x[i]));
    }
}
template <class Vector, class Plain>
void check_binary(const char* what, Vector vector, Plain plain) {
    float x[kLanes], y[kLanes], got[kLanes];
    for (int round = 0; round < kRounds; ++round) {
        fill(x);
        fill(y);
        store(got, vector(load(x), load(y)));
        for (int i = 0; i < kLanes; ++i) check_same(what, got[i], plain(x[i], y[i]));
    }
}
template <class Vector, class Plain>
void check_function(const char* what, Vector vector, Plain plain, float scale, double ulps) {
    float x[kLanes], got[kLanes];
    for (int round = 0; round < 4 * kRounds; ++round) {
        fill(x, scale);
        store(got, vector(load(x)));
        for (int i = 0; i < kLanes; ++i) check_near(what, got[i], plain(double(x[i])), ulps);
    }
}

float half_to_float(uint16_t h) {
    int exponent = (h >> 10) & 31, part = h & 1023;
    float sign = (h & 0x8000) ? -1.0f : 1.0f;
    if (exponent == 31) return part ? kNan : sign * kInf;
    if (exponent == 0) return sign * std::ldexp(float(part), -24);
    return sign * std::ldexp(float(part + 1024), exponent - 25);
}
// The half that is nearest, the even one of two: found by search, since halves are ordered.
uint16_t float_to_half(float x) {
    uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    double size = std::fabs(double(x));
    if (size >= 65520.0) return sign | 0x7c00;
    uint16_t low = 0, high = 0x7bff;
    while (low < high) {
        uint16_t middle = (low + high + 1) / 2;
        if (half_to_float(middle) <= size) {
            low = middle;
        } else {
            high = uint16_t(middle - 1);
        }
    }
    if (low == 0x7bff) return sign | low;
    double below = size - half_to_float(low), above = half_to_float(low + 1) - size;
    if (above < below || (above == below && (low & 1))) ++low;
    return sign | low;
}

void test_conversions() {
    uint16_t words[kLanes];
    float got[kLanes], x[kLanes];
    for (int first = 0; first < 65536; first += kLanes) {
        for (int i = 0; i < kLanes; ++i) words[i] = uint16_t(first + i);
        store(got, load_f16(words));
        for (int i = 0; i < kLanes; ++i) check_same("load_f16", got[i], half_to_float(words[i]));
        store(got, load_bf16(words));
        for (int i = 0; i < kLanes; ++i) {
            uint32_t bits = uint32_t(words[i]) << 16;
            float want;
            std::memcpy(&want, &bits, sizeof want);
            check_same("load_bf16", got[i], want);
        }
        // Each half, and what lies half-way to the next.
        for (int i = 0; i < kLanes; ++i) {
            x[i] = half_to_float(words[i]);
            if (i % 2) x[i] = (x[i] + half_to_float(uint16_t(words[i] + 1))) / 2;
        }
        uint16_t halves[kLanes];
        store_f16(halves, load(x));
        for (int i = 0; i < kLanes; ++i) {
            if (std::isnan(x[i])) {
                check(std::isnan(half_to_float(halves[i])), "store_f16 of NaN", halves[i], x[i]);
            } else {
                check_int("store_f16", halves[i], float_to_half(x[i]));
            }
        }
    }
    int8_t bytes[kLanes];
    uint8_t unsigned_bytes[kLanes];
    for (int first = 0; first < 256; first += kLanes) {
        for (int i = 0; i < kLanes; ++i) {
            unsigned_bytes[i] = uint8_t(first + i);
            bytes[i] = int8_t(unsigned_bytes[i]);
        }
        store(got, load_i8(bytes));
        for (int i = 0; i < kLanes; ++i) check_same("load_i8", got[i], float(bytes[i]));
        store(got, load_u8(unsigned_bytes));
        for (int i = 0; i < kLanes; ++i) check_same("load_u8", got[i], float(unsigned_bytes[i]));
    }
}

// Eight numbers from each of two places.
void test_pairs() {
    float x[2 * kLanes], got[kLanes];
    uint16_t words[2 * kLanes];
    int8_t bytes[2 * kLanes];
    for (int round = 0; round < kRounds; ++round) {
        fill(x);
        fill(x + kLanes);
        for (int i = 0; i < 2 * kLanes; ++i) {
            words[i] = uint16_t(random_bits());
            bytes[i] = int8_t(random_bits());
        }
        int second = 8 + int(random_bits() % 17);
        float want[kLanes];
        auto expect = [&](const char* what, auto&& load_one, const auto* from) {
            float low[kLanes], high[kLanes];
            store(low, load_one(from));
            store(high, load_one(from + second - 8));
            for (int i = 0; i < kLanes; ++i) want[i] = i < 8 ? low[i] : high[i];
            for (int i = 0; i < kLanes; ++i) check_same(what, got[i], want[i]);
        };
        store(got, load_pair(x, x + second));
        expect("load_pair", [](const float* p) { return load(p); }, x);
        store(got, load_pair_f16(words, words + second));
        expect("load_pair_f16", [](const uint16_t* p) { return load_f16(p); }, words);
        store(got, load_pair_bf16(words, words + second));
        expect("load_pair_bf16", [](const uint16_t* p) { return load_bf16(p); }, words);
        store(got, load_pair_i8(bytes, bytes + second));
        expect("load_pair_i8", [](const int8_t* p) { return load_i8(p); }, bytes);
    }
}

// To the nearest bfloat16, the even one of two; NaN stays NaN.
void test_store_bf16() {
    float x[kLanes];
    uint16_t words[kLanes];
    for (int round = 0; round < 4 * kRounds; ++round) {
        for (int i = 0; i < kLanes; ++i) {
            uint32_t bits = random_bits();
            // Half-way cases often.
            if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u;
            std::memcpy(&x[i], &bits, sizeof bits);
            if (i % 4 == 1) x[i] = random_float(100.0f);
            // Processors differ in whether they keep what is smaller than a normal number.
            if (x[i] != 0.0f && std::fabs(x[i]) < 1.2e-38f) x[i] = 1.0f;
        }
        store_bf16(words, load(x));
        for (int i = 0; i < kLanes; ++i) {
            uint32_t bits = uint32_t(words[i]) << 16, from;
            float got;
            std::memcpy(&got, &bits, sizeof bits);
            std::memcpy(&from, &x[i], sizeof from);
            if (std::isnan(x[i])) {
                check(std::isnan(got), "store_bf16 of NaN", got, x[i]);
                continue;
            }
            uint32_t low = from >> 16, part = from & 0xffffu;
            bool is_up = part > 0x8000u || (part == 0x8000u && (low & 1u));
            check_int("store_bf16", words[i], uint16_t(low + is_up));
        }
    }
}

void test_masks() {
    size_t page = size_t(sysconf(_SC_PAGESIZE));
    char* memory = static_cast<char*>(
        mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    // What lies behind the lanes that count must not be touched.
    if (memory == MAP_FAILED || mprotect(memory + page, page, PROT_NONE) != 0) {
        check(false, "mmap", 0, 1);
        return;
    }
    float* end = reinterpret_cast<float*>(memory + page);
    float x[kLanes], y[kLanes], got[kLanes];
    for (int n = 0; n <= kLanes; ++n) {
        fill(x);
        fill(y);
        float* p = end - n;
        std::memcpy(p, x, n * sizeof(float));
        store(got, load(p, first_lanes(n)));
        for (int i = 0; i < kLanes; ++i) {
            check_same("load of first lanes", got[i], i < n ? x[i] : 0.0f);
        }
        store(p, load(y), first_lanes(n));
        for (int i = 0; i < n; ++i) check_same("store of first lanes", p[i], y[i]);
        store(got, select(first_lanes(n), load(x), load(y)));
        for (int i = 0; i < kLanes; ++i) check_same("select", got[i], i < n ? x[i] : y[i]);
    }
    munmap(memory, 2 * page);
}

void test_arithmetic() {
    check_binary("+", [](auto a, auto b) { return a + b; },
                 [](float a, float b) { return a + b; });
    check_binary("-", [](auto a, auto b) { return a - b; },
                 [](float a, float b) { return a - b; });
    check_binary("*", [](auto a, auto b) { return a * b; },
                 [](float a, float b) { return a * b; });
    check_binary("/", [](auto a, auto b) { return a / b; },
                 [](float a, float b) { return a / b; });
    // The second operand where either is NaN.
    auto is_nan = [](float a, float b) { return std::isnan(a) || std::isnan(b); };
    check_binary("max", [](f32x16 a, f32x16 b) { return max(a, b); },
                 [=](float a, float b) { return is_nan(a, b) ? b : (a > b ? a : b); });
    check_binary("min", [](f32x16 a, f32x16 b) { return min(a, b); },
                 [=](float a, float b) { return is_nan(a, b) ? b : (a < b ? a : b); });
    check_unary("abs", [](f32x16 a) { return abs(a); }, [](float a) { return std::fabs(a); });
    check_binary("or_bits", [](f32x16 a, f32x16 b) { return or_bits(a, b); },
                 [](float a, float b) {
                     uint32_t bits, more;
                     std::memcpy(&bits, &a, sizeof bits);
                     std::memcpy(&more, &b, sizeof more);
                     bits |= more;
                     std::memcpy(&a, &bits, sizeof bits);
                     return a;
                 });
    check_unary("sqrt", [](f32x16 a) { return sqrt(a); }, [](float a) { return std::sqrt(a); });
    check_unary("round", [](f32x16 a) { return round(a); },
                [](float a) { return std::nearbyint(a); });
    float x[kLanes], y[kLanes], p[kLanes], q[kLanes], got[kLanes];
    for (int round = 0; round < kRounds; ++round) {
        fill(x);
        fill(y);
        fill(p);
        fill(q);
        store(got, fma(load(x), load(y), load(p)));
        for (int i = 0; i < kLanes; ++i) check_same("fma", got[i], std::fma(x[i], y[i], p[i]));
        store(got, select_less(load(x), load(y), load(p), load(q)));
        for (int i = 0; i < kLanes; ++i) {
            check_same("select_less", got[i], x[i] < y[i] ? p[i] : q[i]);
        }
        store(got, broadcast(x[0]));
        for (int i = 0; i < kLanes; ++i) check_same("broadcast", got[i], x[0]);
    }
    store(got, zero_f32());
    for (int i = 0; i < kLanes; ++i) check_same("zero_f32", got[i], 0.0f);
}

void test_reductions() {
    float x[kLanes];
    for (int round = 0; round < kRounds; ++round) {
        fill_finite(x, 1000.0f);
        float part[kLanes];
        std::memcpy(part, x, sizeof x);
        for (int half = 8; half >= 1; half /= 2) {
            for (int i = 0; i < half; ++i) part[i] += part[i + half];
        }
        check_same("sum", sum(load(x)), part[0]);
        float largest = x[0];
        for (int i = 1; i < kLanes; ++i) largest = std::fmax(largest, x[i]);
        check_same("max_lane", max_lane(load(x)), largest);
        x[random_bits() % kLanes] = kNan;
        check(std::isnan(sum(load(x))), "sum of NaN", sum(load(x)), kNan);
    }
}

void test_integers() {
    float x[kLanes], y[kLanes], got[kLanes];
    int8_t bytes[kLanes];
    for (int round = 0; round < kRounds; ++round) {
        fill_finite(x, round % 2 ? 200.0f : 100000.0f);
        fill_finite(y, 100000.0f);
        if (round % 4 == 0) {
            for (int i = 0; i < kLanes; ++i) x[i] = std::nearbyint(x[i]) + 0.5f;
        }
        store(got, to_f32(to_i32(load(x))));
        for (int i = 0; i < kLanes; ++i) {
            check(got[i] == std::nearbyint(x[i]), "to_i32", got[i], x[i]);
        }
        store(got, to_f32(to_i32(load(x)) + to_i32(load(y))));
        for (int i = 0; i < kLanes; ++i) {
            float want = float(int32_t(std::nearbyint(x[i])) + int32_t(std::nearbyint(y[i])));
            check(got[i] == want, "+ of integers", got[i], want);
        }
        store(got, to_f32(to_i32(load(x)) - to_i32(load(y))));
        for (int i = 0; i < kLanes; ++i) {
            float want = float(int32_t(std::nearbyint(x[i])) - int32_t(std::nearbyint(y[i])));
            check(got[i] == want, "- of integers", got[i], want);
        }
        store_i8(bytes, to_i32(load(x)));
        for (int i = 0; i < kLanes; ++i) {
            float whole = std::nearbyint(x[i]);
            check_int("store_i8", bytes[i], int8_t(std::fmin(127.0f, std::fmax(-128.0f, whole))));
        }
    }
    for (int n = -126; n <= 127; ++n) {
        store(got, power_of_two(broadcast_i32(n)));
        for (int i = 0; i < kLanes; ++i) check_same("power_of_two", got[i], std::ldexp(1.0f, n));
    }
    store(got, to_f32(zero_i32()));
    for (int i = 0; i < kLanes; ++i) check_same("zero_i32", got[i], 0.0f);
}

void test_functions() {
    constexpr float kLeast = -87.3365f;
    auto plain_exp = [](double a) { return a < kLeast ? 0.0 : std::exp(a); };
    auto sigmoid_of = [](double a) { return 1.0 / (1.0 + std::exp(-a)); };
    auto normal = [](double a) { return std::erfc(-a * std::sqrt(0.5)) / 2; };
    check_function("exp", [](f32x16 a) { return exp(a); }, plain_exp, 90.0f, 1.5);
    check_function("exp_nonpositive",
                   [](f32x16 a) { return exp_nonpositive(min(zero_f32(), a)); },
                   [=](double a) { return plain_exp(a > 0 ? 0.0 : a); }, 90.0f, 1.5);
    check_function("sigmoid", [](f32x16 a) { return sigmoid(a); }, sigmoid_of, 80.0f, 4.0);
    for (float scale : {4.0f, 0.7f, 0.01f}) {
        check_function("tanh", [](f32x16 a) { return tanh(a); },
                       [](double a) { return std::tanh(a); }, scale, 3.0);
    }
    check_function("silu", [](f32x16 a) { return silu(a); },
                   [=](double a) { return a == -kInf ? kNan : a * sigmoid_of(a); }, 20.0f, 6.0);
    check_unary("relu", [](f32x16 a) { return relu(a); },
                [](float a) { return a < 0 ? 0.0f : a; });
    float x[kLanes], got[kLanes];
    for (int round = 0; round < 4 * kRounds; ++round) {
        fill_finite(x, 6.0f);
        store(got, gelu(load(x)));
        for (int i = 0; i < kLanes; ++i) {
            double want = double(x[i]) * normal(double(x[i]));
            check(std::fabs(got[i] - want) <= 1e-5 * std::fabs(want), "gelu", got[i], want);
        }
        store(got, gelu_tanh(load(x)));
        for (int i = 0; i < kLanes; ++i) {
            double a = x[i], inner = std::sqrt(8 / M_PI) * (a + 0.044715 * a * a * a);
            double want = a * sigmoid_of(inner);
            check(std::fabs(got[i] - want) <= 1e-5 * std::fabs(want), "gelu_tanh", got[i], want);
        }
    }
}

void test_bytes() {
    uint8_t x[64], y[64], numbers[64], table[16];
    uint16_t words[64];
    // What a vector holds, as the low bytes of words.
    auto expect = [&](const char* what, u8x64 got, auto&& want) {
        store_words(words, got, zero_u8());
        for (int i = 0; i < 64; ++i) check_int(what, words[i], uint8_t(want(i)));
    };
    for (int round = 0; round < kRounds; ++round) {
        for (int i = 0; i < 64; ++i) {
            x[i] = uint8_t(random_bits());
            y[i] = uint8_t(random_bits());
            numbers[i] = uint8_t(random_bits() % 16);
        }
        for (int i = 0; i < 16; ++i) table[i] = uint8_t(random_bits());
        uint64_t bits = uint64_t(random_bits()) << 32 | random_bits();
        uint8_t value = uint8_t(random_bits());
        expect("load_bytes", load_bytes(x), [&](int i) { return x[i]; });
        expect("broadcast_u8", broadcast_u8(value), [&](int) { return value; });
        expect("zero_u8", zero_u8(), [](int) { return 0; });
        expect("& of bytes", load_bytes(x) & load_bytes(y), [&](int i) { return x[i] & y[i]; });
        expect("| of bytes", load_bytes(x) | load_bytes(y), [&](int i) { return x[i] | y[i]; });
        expect("where_bits", where_bits(bits, value),
               [&](int i) { return (bits >> i & 1) != 0 ? value : 0; });
        for (int bit = 1; bit < 256; bit *= 2) {
            uint64_t want = 0;
            for (int i = 0; i < 64; ++i) want |= uint64_t((x[i] & bit) != 0) << i;
            check(set_bits(load_bytes(x), uint8_t(bit)) == want, "set_bits", bit, bit);
        }
        expect("look_up", look_up(load_table(table), load_bytes(numbers)),
               [&](int i) { return table[numbers[i]]; });
        store_words(words, load_bytes(x), load_bytes(y));
        for (int i = 0; i < 64; ++i) check_int("store_words", words[i], x[i] | y[i] << 8);
    }
}

}  // namespace

int main() {
    test_conversions();
    test_pairs();
    test_store_bf16();
    test_masks();
    test_arithmetic();
    test_reductions();
    test_integers();
    test_functions();
    test_bytes();
    std::printf("%ld checks, %ld failed\n", num_checks, num_failed);
    return num_failed == 0 ? 0 : 1;
}
