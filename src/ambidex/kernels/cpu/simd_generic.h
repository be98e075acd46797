// For instruction sets without a file of their own: the compiler's vectors. NEON comes from here.
#pragma once

#include <cstdint>

namespace ambidex::AMBIDEX_LEVEL {

constexpr int kLanes = 16;

typedef float f32_vector __attribute__((vector_size(64), aligned(4)));
typedef int32_t i32_vector __attribute__((vector_size(64), aligned(4)));

struct f32x16 {
    f32_vector v;
};
struct i32x16 {
    i32_vector v;
};
struct mask16 {
    int n;
};

inline mask16 first_lanes(int n) { return {n}; }

inline f32x16 zero_f32() { return {f32_vector{}}; }
inline f32x16 broadcast(float x) { return {x - f32_vector{}}; }  // 0 + x would lose -0
inline f32x16 load(const float* p) { return {*reinterpret_cast<const f32_vector*>(p)}; }
inline void store(float* p, f32x16 x) { *reinterpret_cast<f32_vector*>(p) = x.v; }
inline f32x16 load(const float* p, mask16 m) {
    f32x16 x = zero_f32();
    for (int i = 0; i < m.n; ++i) x.v[i] = p[i];
    return x;
}
inline void store(float* p, f32x16 x, mask16 m) {
    for (int i = 0; i < m.n; ++i) p[i] = x.v[i];
}

inline float f16_to_f32(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, part = h & 1023u;
    union {
        uint32_t bits;
        float value;
    } out;
    if (exponent == 0) {
        out.value = float(part) * 0x1p-24f;
        out.bits |= sign;
    } else if (exponent == 31) {
        out.bits = sign | 0x7f800000u | (part << 13);
    } else {
        out.bits = sign | ((exponent + 112u) << 23) | (part << 13);
    }
    return out.value;
}
inline uint16_t f32_to_f16(float x) {
    union {
        float value;
        uint32_t bits;
    } in{x};
    uint32_t sign = (in.bits >> 16) & 0x8000u, magnitude = in.bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Adding 0.5 leaves the half's digits, rounded, in the lowest bits.
        in.bits = magnitude;
        in.value += 0.5f;
        return uint16_t(sign | (in.bits - 0x3f000000u));
    }
    uint32_t odd = (magnitude >> 13) & 1u;
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}
inline f32x16 load_f16(const uint16_t* p) {
    f32x16 x = zero_f32();
    for (int i = 0; i < kLanes; ++i) x.v[i] = f16_to_f32(p[i]);
    return x;
}
inline f32x16 load_bf16(const uint16_t* p) {
    i32_vector bits{};
    for (int i = 0; i < kLanes; ++i) bits[i] = int32_t(uint32_t(p[i]) << 16);
    return {reinterpret_cast<f32_vector>(bits)};
}
inline f32x16 load_i8(const int8_t* p) {
    f32x16 x = zero_f32();
    for (int i = 0; i < kLanes; ++i) x.v[i] = float(p[i]);
    return x;
}
inline f32x16 load_u8(const uint8_t* p) {
    f32x16 x = zero_f32();
    for (int i = 0; i < kLanes; ++i) x.v[i] = float(p[i]);
    return x;
}
inline void store_f16(uint16_t* p, f32x16 x) {
    for (int i = 0; i < kLanes; ++i) p[i] = f32_to_f16(x.v[i]);
}

inline void store_bf16(uint16_t* p, f32x16 x) {
    for (int i = 0; i < kLanes; ++i) {
        float lane = x.v[i];
        uint32_t bits;
        __builtin_memcpy(&bits, &lane, sizeof bits);
        bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        p[i] = is_nan ? uint16_t(bits >> 16 | 0x40u)
                      : uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
}
inline f32x16 load_pair(const float* p, const float* q) {
    f32x16 x;
    __builtin_memcpy(&x.v, p, 32);
    __builtin_memcpy(reinterpret_cast<char*>(&x.v) + 32, q, 32);
    return x;
}
inline f32x16 load_pair_f16(const uint16_t* p, const uint16_t* q) {
    uint16_t both[kLanes];
    __builtin_memcpy(both, p, 16);
    __builtin_memcpy(both + 8, q, 16);
    return load_f16(both);
}
inline f32x16 load_pair_bf16(const uint16_t* p, const uint16_t* q) {
    uint16_t both[kLanes];
    __builtin_memcpy(both, p, 16);
    __builtin_memcpy(both + 8, q, 16);
    return load_bf16(both);
}
inline f32x16 load_pair_i8(const int8_t* p, const int8_t* q) {
    int8_t both[kLanes];
    __builtin_memcpy(both, p, 8);
    __builtin_memcpy(both + 8, q, 8);
    return load_i8(both);
}

inline f32x16 operator+(f32x16 x, f32x16 y) { return {x.v + y.v}; }
inline f32x16 operator-(f32x16 x, f32x16 y) { return {x.v - y.v}; }
inline f32x16 operator*(f32x16 x, f32x16 y) { return {x.v * y.v}; }
inline f32x16 operator/(f32x16 x, f32x16 y) { return {x.v / y.v}; }
inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    f32x16 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = __builtin_fmaf(x.v[i], y.v[i], z.v[i]);
    return out;
}
inline f32x16 max(f32x16 x, f32x16 y) { return {x.v > y.v ? x.v : y.v}; }
inline f32x16 min(f32x16 x, f32x16 y) { return {x.v < y.v ? x.v : y.v}; }
inline f32x16 abs(f32x16 x) {
    return {reinterpret_cast<f32_vector>(reinterpret_cast<i32_vector>(x.v) & 0x7fffffff)};
}
inline f32x16 or_bits(f32x16 x, f32x16 y) {
    i32_vector bits = reinterpret_cast<i32_vector>(x.v) | reinterpret_cast<i32_vector>(y.v);
    return {reinterpret_cast<f32_vector>(bits)};
}
inline f32x16 sqrt(f32x16 x) {
    f32x16 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = __builtin_sqrtf(x.v[i]);
    return out;
}
inline f32x16 round(f32x16 x) {
    f32x16 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = __builtin_rintf(x.v[i]);
    return out;
}
inline f32x16 select(mask16 m, f32x16 x, f32x16 y) {
    f32x16 out = y;
    for (int i = 0; i < m.n; ++i) out.v[i] = x.v[i];
    return out;
}
inline f32x16 select_less(f32x16 x, f32x16 y, f32x16 p, f32x16 q) {
    return {x.v < y.v ? p.v : q.v};
}

inline bool all_finite(f32x16 x) {
    f32_vector difference = x.v - x.v;  // zero for finite numbers alone
    for (int i = 0; i < kLanes; ++i) {
        if (difference[i] != 0) return false;
    }
    return true;
}

inline float sum(f32x16 x) {
    float eight[8];
    for (int i = 0; i < 8; ++i) eight[i] = x.v[i] + x.v[i + 8];
    for (int i = 0; i < 4; ++i) eight[i] += eight[i + 4];
    return (eight[0] + eight[2]) + (eight[1] + eight[3]);
}
inline float max_lane(f32x16 x) {
    float largest = x.v[0];
    for (int i = 1; i < kLanes; ++i) largest = largest > x.v[i] ? largest : x.v[i];
    return largest;
}

inline i32x16 zero_i32() { return {i32_vector{}}; }
inline i32x16 broadcast_i32(int32_t x) { return {i32_vector{} + x}; }
inline i32x16 operator+(i32x16 x, i32x16 y) { return {x.v + y.v}; }
inline i32x16 operator-(i32x16 x, i32x16 y) { return {x.v - y.v}; }
inline f32x16 to_f32(i32x16 x) { return {__builtin_convertvector(x.v, f32_vector)}; }
inline i32x16 to_i32(f32x16 x) {
    i32x16 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = int32_t(__builtin_rintf(x.v[i]));
    return out;
}
inline f32x16 power_of_two(i32x16 n) {
    return {reinterpret_cast<f32_vector>((n.v + 127) << 23)};
}
inline void store_i8(int8_t* p, i32x16 x) {
    for (int i = 0; i < kLanes; ++i) {
        int32_t value = x.v[i];
        p[i] = int8_t(value > 127 ? 127 : value < -128 ? -128 : value);
    }
}

}  // namespace ambidex::AMBIDEX_LEVEL
