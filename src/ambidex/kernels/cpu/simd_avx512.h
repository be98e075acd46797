#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ambidex::AMBIDEX_LEVEL {

constexpr int kLanes = 16;

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};
// Which lanes count: the first n.
struct mask16 {
    __mmask16 m;
};

inline mask16 first_lanes(int n) { return {__mmask16((1u << n) - 1u)}; }  // 0 <= n <= 16

inline f32x16 zero_f32() { return {_mm512_setzero_ps()}; }
inline f32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
// Lanes that do not count read as zero, are not written, and may lie outside the memory.
inline f32x16 load(const float* p, mask16 m) { return {_mm512_maskz_loadu_ps(m.m, p)}; }
inline void store(float* p, f32x16 x, mask16 m) { _mm512_mask_storeu_ps(p, m.m, x.v); }

inline f32x16 load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline f32x16 load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline f32x16 load_i8(const int8_t* p) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline f32x16 load_u8(const uint8_t* p) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
}
inline void store_f16(uint16_t* p, f32x16 x) {
    __m256i half = _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

// Rounds to nearest even; NaN stays NaN.
inline void store_bf16(uint16_t* p, f32x16 x) {
    __m512i bits = _mm512_castps_si512(x.v), high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
// Eight numbers from `p`, then eight from `q`.
inline f32x16 load_pair(const float* p, const float* q) {
    __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(p));
    return {_mm512_insertf32x8(low, _mm256_loadu_ps(q), 1)};
}
inline __m256i load_pair_16(const uint16_t* p, const uint16_t* q) {
    __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_inserti128_si256(low, _mm_loadu_si128(reinterpret_cast<const __m128i*>(q)), 1);
}
inline f32x16 load_pair_f16(const uint16_t* p, const uint16_t* q) {
    return {_mm512_cvtph_ps(load_pair_16(p, q))};
}
inline f32x16 load_pair_bf16(const uint16_t* p, const uint16_t* q) {
    __m512i wide = _mm512_cvtepu16_epi32(load_pair_16(p, q));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline f32x16 load_pair_i8(const int8_t* p, const int8_t* q) {
    __m128i bytes = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)),
                                       _mm_loadl_epi64(reinterpret_cast<const __m128i*>(q)));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}

inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where either is NaN.
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
// The bits of either: the other one where one is +0.
inline f32x16 or_bits(f32x16 a, f32x16 b) { return {_mm512_or_ps(a.v, b.v)}; }
inline f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline f32x16 round(f32x16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// `a` in the lanes that count, `b` in the others.
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) {
    return {_mm512_mask_blend_ps(m.m, b.v, a.v)};
}
// `a` where x < y, else `b`.
inline f32x16 select_less(f32x16 x, f32x16 y, f32x16 a, f32x16 b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}

// Whether no lane is NaN or infinite.
inline bool all_finite(f32x16 a) { return _mm512_fpclass_ps_mask(a.v, 0x99) == 0; }

// Sums and maxima of all lanes, always in the same order.
inline float sum(f32x16 x) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lane(f32x16 x) {
    __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline i32x16 zero_i32() { return {_mm512_setzero_si512()}; }
inline i32x16 broadcast_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline i32x16 operator-(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline i32x16 to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }  // rounds to nearest even
// 2^n for whole n in -126 .. 127.
inline f32x16 power_of_two(i32x16 n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)),
                                                  23))};
}
// Saturated to -128 .. 127.
inline void store_i8(int8_t* p, i32x16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v));
}

}  // namespace ambidex::AMBIDEX_LEVEL
