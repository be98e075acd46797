#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ambidex::AMBIDEX_LEVEL {

constexpr int kLanes = 16;

struct f32x16 {
    __m256 a, b;
};
struct i32x16 {
    __m256i a, b;
};
struct mask16 {
    __m256i a, b;
};

inline mask16 first_lanes(int n) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i count = _mm256_set1_epi32(n);
    return {_mm256_cmpgt_epi32(count, lane),
            _mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8)))};
}

inline f32x16 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline f32x16 load(const float* p, mask16 m) {
    return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}
inline void store(float* p, f32x16 x, mask16 m) {
    _mm256_maskstore_ps(p, m.a, x.a);
    _mm256_maskstore_ps(p + 8, m.b, x.b);
}

inline __m128i load_128(const void* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline f32x16 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))};
}
inline __m256 widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline f32x16 load_bf16(const uint16_t* p) {
    return {widen_bf16(load_128(p)), widen_bf16(load_128(p + 8))};
}
inline f32x16 load_i8(const int8_t* p) {
    __m128i bytes = load_128(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline f32x16 load_u8(const uint8_t* p) {
    __m128i bytes = load_128(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void store_f16(uint16_t* p, f32x16 x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, kMode));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, kMode));
}

inline __m256i round_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
}
inline void store_bf16(uint16_t* p, f32x16 x) {
    __m256i words = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xD8));
}
inline f32x16 load_pair(const float* p, const float* q) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(q)};
}
inline f32x16 load_pair_f16(const uint16_t* p, const uint16_t* q) {
    return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(q))};
}
inline f32x16 load_pair_bf16(const uint16_t* p, const uint16_t* q) {
    return {widen_bf16(load_128(p)), widen_bf16(load_128(q))};
}
inline __m256 load_8_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline f32x16 load_pair_i8(const int8_t* p, const int8_t* q) {
    return {load_8_i8(p), load_8_i8(q)};
}

inline f32x16 operator+(f32x16 x, f32x16 y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline f32x16 operator-(f32x16 x, f32x16 y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline f32x16 operator*(f32x16 x, f32x16 y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline f32x16 operator/(f32x16 x, f32x16 y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline f32x16 max(f32x16 x, f32x16 y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline f32x16 min(f32x16 x, f32x16 y) {
    return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline f32x16 abs(f32x16 x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline f32x16 or_bits(f32x16 x, f32x16 y) {
    return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)};
}
inline f32x16 sqrt(f32x16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline f32x16 round(f32x16 x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline f32x16 select(mask16 m, f32x16 x, f32x16 y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m.a)),
            _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m.b))};
}
inline f32x16 select_less(f32x16 x, f32x16 y, f32x16 p, f32x16 q) {
    return {_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}

inline bool all_finite(f32x16 x) {
    // A difference with itself is zero for finite numbers alone, and NaN for others.
    __m256 a = _mm256_sub_ps(x.a, x.a), b = _mm256_sub_ps(x.b, x.b);
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) == 0;
}

inline float sum(f32x16 x) {
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lane(f32x16 x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline i32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline i32x16 broadcast_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline i32x16 operator+(i32x16 x, i32x16 y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline i32x16 operator-(i32x16 x, i32x16 y) {
    return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
inline f32x16 to_f32(i32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline i32x16 to_i32(f32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline f32x16 power_of_two(i32x16 n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline void store_i8(int8_t* p, i32x16 x) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

}  // namespace ambidex::AMBIDEX_LEVEL
