// Sixty-four bytes at a time, on every instruction set; see simd.h.
#pragma once

#include "simd.h"

namespace ambidex::AMBIDEX_LEVEL {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

struct u8x64 {
    __m512i v;
};

inline u8x64 zero_u8() { return {_mm512_setzero_si512()}; }
inline u8x64 broadcast_u8(uint8_t x) { return {_mm512_set1_epi8(char(x))}; }
inline u8x64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline u8x64 operator&(u8x64 x, u8x64 y) { return {_mm512_and_si512(x.v, y.v)}; }
inline u8x64 operator|(u8x64 x, u8x64 y) { return {_mm512_or_si512(x.v, y.v)}; }
// `value` where a bit of `bits` is set, the lowest being the first byte's; else zero.
inline u8x64 where_bits(uint64_t bits, uint8_t value) {
    return {_mm512_maskz_set1_epi8(__mmask64(bits), char(value))};
}
// Whether each byte has a bit of `bit`: the first byte's is the lowest.
inline uint64_t set_bits(u8x64 x, uint8_t bit) {
    return _mm512_test_epi8_mask(x.v, _mm512_set1_epi8(char(bit)));
}
// Sixteen entries for look_up.
inline u8x64 load_table(const uint8_t* p) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// The entries with those numbers, each below 16.
inline u8x64 look_up(u8x64 table, u8x64 numbers) {
    return {_mm512_shuffle_epi8(table.v, numbers.v)};
}
// Sixty-four words, each of a low and a high byte.
inline void store_words(uint16_t* p, u8x64 low, u8x64 high) {
    __m512i even = _mm512_unpacklo_epi8(low.v, high.v), odd = _mm512_unpackhi_epi8(low.v, high.v);
    __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi64(even, first, odd));
    _mm512_storeu_si512(p + 32, _mm512_permutex2var_epi64(even, second, odd));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct u8x64 {
    __m256i a, b;
};

inline __m256i load_256(const void* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline u8x64 zero_u8() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline u8x64 broadcast_u8(uint8_t x) {
    return {_mm256_set1_epi8(char(x)), _mm256_set1_epi8(char(x))};
}
inline u8x64 load_bytes(const uint8_t* p) { return {load_256(p), load_256(p + 32)}; }
inline u8x64 operator&(u8x64 x, u8x64 y) {
    return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
inline u8x64 operator|(u8x64 x, u8x64 y) {
    return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
inline __m256i where_bits_32(uint32_t bits, __m256i value) {
    // Each byte gets the eight bits that its own is among, then keeps that one.
    __m256i bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                       0x0303030303030303);
    __m256i own = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), bytes);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own), value);
}
inline u8x64 where_bits(uint64_t bits, uint8_t value) {
    __m256i all = _mm256_set1_epi8(char(value));
    return {where_bits_32(uint32_t(bits), all), where_bits_32(uint32_t(bits >> 32), all)};
}
inline uint32_t set_bits_32(__m256i x, uint8_t bit) {
    __m256i of_bit = _mm256_and_si256(x, _mm256_set1_epi8(char(bit)));
    return ~uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(of_bit, _mm256_setzero_si256())));
}
inline uint64_t set_bits(u8x64 x, uint8_t bit) {
    return set_bits_32(x.a, bit) | uint64_t(set_bits_32(x.b, bit)) << 32;
}
inline u8x64 load_table(const uint8_t* p) {
    __m256i twice = _mm256_broadcastsi128_si256(load_128(p));
    return {twice, twice};
}
inline u8x64 look_up(u8x64 table, u8x64 numbers) {
    return {_mm256_shuffle_epi8(table.a, numbers.a), _mm256_shuffle_epi8(table.b, numbers.b)};
}
inline void store_words_32(uint16_t* p, __m256i low, __m256i high) {
    __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
    auto* out = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
}
inline void store_words(uint16_t* p, u8x64 low, u8x64 high) {
    store_words_32(p, low.a, high.a);
    store_words_32(p + 32, low.b, high.b);
}

#else

typedef uint8_t u8_vector __attribute__((vector_size(64), aligned(1)));

struct u8x64 {
    u8_vector v;
};

inline u8x64 zero_u8() { return {u8_vector{}}; }
inline u8x64 broadcast_u8(uint8_t x) { return {u8_vector{} + x}; }
inline u8x64 load_bytes(const uint8_t* p) {
    u8x64 out;
    __builtin_memcpy(&out.v, p, 64);
    return out;
}
inline u8x64 operator&(u8x64 x, u8x64 y) { return {x.v & y.v}; }
inline u8x64 operator|(u8x64 x, u8x64 y) { return {x.v | y.v}; }
inline u8x64 where_bits(uint64_t bits, uint8_t value) {
    uint64_t out[8];
    for (int i = 0; i < 8; ++i) {
        // Byte k keeps bit k alone; what is not zero then gets its highest bit set, without a
        // carry into the next byte.
        uint64_t eight = (bits >> 8 * i & 0xff) * 0x0101010101010101u & 0x8040201008040201u;
        out[i] = ((eight + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u) * value;
    }
    return load_bytes(reinterpret_cast<const uint8_t*>(out));
}
inline uint64_t set_bits(u8x64 x, uint8_t bit) {
    uint64_t eights[8], out = 0;
    __builtin_memcpy(eights, &x.v, 64);
    for (int i = 0; i < 8; ++i) {
        uint64_t own = eights[i] & bit * 0x0101010101010101u;
        // To each byte's highest bit, as above, but for that bit itself; then all side by side:
        // the factor moves bit 8 k to bit 56 + k, and no two terms meet.
        own = (((own & 0x7f7f7f7f7f7f7f7fu) + 0x7f7f7f7f7f7f7f7fu) | own) >> 7;
        out |= (own & 0x0101010101010101u) * 0x0102040810204080u >> 56 << 8 * i;
    }
    return out;
}
inline u8x64 load_table(const uint8_t* p) {
    uint8_t all[64] = {};
    __builtin_memcpy(all, p, 16);
    return load_bytes(all);
}
inline u8x64 look_up(u8x64 table, u8x64 numbers) {
    uint8_t entries[64], of[64], out[64];
    __builtin_memcpy(entries, &table.v, 64);
    __builtin_memcpy(of, &numbers.v, 64);
    for (int i = 0; i < 64; ++i) out[i] = entries[of[i]];
    return load_bytes(out);
}
inline void store_words(uint16_t* p, u8x64 low, u8x64 high) {
    uint8_t lows[64], highs[64];
    __builtin_memcpy(lows, &low.v, 64);
    __builtin_memcpy(highs, &high.v, 64);
    for (int i = 0; i < 64; ++i) p[i] = uint16_t(lows[i] | highs[i] << 8);
}

#endif

}  // namespace ambidex::AMBIDEX_LEVEL
