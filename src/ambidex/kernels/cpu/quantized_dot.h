// Products of packed codes and 8-bit activations, exact in 32 bits: the part of the quantised
// product that each instruction set does its own way. All give the same numbers.
#pragma once

#include "quantized_linear.h"
#include "simd.h"

namespace ambidex::AMBIDEX_LEVEL {

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define AMBIDEX_DOT_AVX512
constexpr int kPart = 16;  // rows of a panel in one vector
#elif defined(__AVX2__)
#define AMBIDEX_DOT_AVX2
constexpr int kPart = 8;
#else
constexpr int kPart = 16;
#endif
constexpr int kParts = int(kPanelRows) / kPart;

typedef uint16_t Words __attribute__((vector_size(4 * kPart)));
typedef uint8_t Bytes __attribute__((vector_size(4 * kPart)));
typedef int32_t Ints __attribute__((vector_size(4 * kPart)));
typedef float Floats __attribute__((vector_size(4 * kPart)));

inline Words load_words(const uint8_t* p) {
    typedef uint16_t Anywhere __attribute__((vector_size(4 * kPart), aligned(1), may_alias));
    return (Words) * reinterpret_cast<const Anywhere*>(p);
}
inline void store_floats(float* p, Floats x) {
    typedef float Anywhere __attribute__((vector_size(4 * kPart), aligned(4), may_alias));
    *reinterpret_cast<Anywhere*>(p) = x;
}
inline Ints all(int32_t x) { return Ints{} + x; }
inline Floats all(float x) {
    // Adding to zero would lose -0, and not be a broadcast.
#if defined(AMBIDEX_DOT_AVX512)
    return (Floats)_mm512_set1_ps(x);
#elif defined(AMBIDEX_DOT_AVX2)
    return (Floats)_mm256_set1_ps(x);
#else
    return broadcast(x).v;
#endif
}

// Activation bytes 4c .. 4c + 3, for every row.
inline Ints chunk(const int8_t* q, int c) {
    int32_t four;
    __builtin_memcpy(&four, q + 4 * c, 4);
    return all(four);
}

#if defined(AMBIDEX_DOT_AVX512)

inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
inline Floats to_floats(Ints x) { return (Floats)_mm512_cvtepi32_ps((__m512i)x); }
inline Floats load_floats(const float* p) { return (Floats)_mm512_loadu_ps(p); }
inline Floats load_halves(const uint16_t* p) { return (Floats)load_f16(p).v; }
inline Ints load_ints_u8(const uint8_t* p) {
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_ints_i8(const uint8_t* p) {
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Words table_of(const uint8_t* p) {
    __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (Words)_mm512_maskz_broadcast_i32x4(0xffff, table);
}
inline Words look_up(Words table, Words index) {
    return (Words)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
}

#elif defined(AMBIDEX_DOT_AVX2)

inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline Floats to_floats(Ints x) { return (Floats)_mm256_cvtepi32_ps((__m256i)x); }
inline Floats load_floats(const float* p) { return (Floats)_mm256_loadu_ps(p); }
inline Floats load_halves(const uint16_t* p) { return (Floats)_mm256_cvtph_ps(load_128(p)); }
inline Ints load_ints_u8(const uint8_t* p) {
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_ints_i8(const uint8_t* p) {
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Words table_of(const uint8_t* p) {
    return (Words)_mm256_broadcastsi128_si256(load_128(p));
}
inline Words look_up(Words table, Words index) {
    return (Words)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
}

#else

inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return fma(f32x16{a}, f32x16{b}, f32x16{c}).v;
}
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Floats load_floats(const float* p) { return load(p).v; }
inline Floats load_halves(const uint16_t* p) { return load_f16(p).v; }
inline Ints load_ints_u8(const uint8_t* p) {
    Ints x;
    for (int i = 0; i < kPart; ++i) x[i] = p[i];
    return x;
}
inline Ints load_ints_i8(const uint8_t* p) {
    Ints x;
    for (int i = 0; i < kPart; ++i) x[i] = int8_t(p[i]);
    return x;
}
inline Words table_of(const uint8_t* p) {
    Bytes table;
    for (int i = 0; i < 4 * kPart; ++i) table[i] = p[i % 16];
    return (Words)table;
}
inline Words look_up(Words table, Words index) {
    Bytes out, from = (Bytes)table, at = (Bytes)index;
    for (int i = 0; i < 4 * kPart; ++i) out[i] = from[at[i] & 15];
    return (Words)out;
}

#endif

constexpr bool is_byte(CodeKind kind) {
    return kind == CodeKind::k8 || kind == CodeKind::kTable8 || kind == CodeKind::kTable16;
}

// dot() multiplies code - code_offset: without VNNI, bytes have to be signed.
constexpr int32_t code_offset(CodeKind kind, bool has_minimum) {
#if defined(AMBIDEX_DOT_AVX2) || (defined(AMBIDEX_DOT_AVX512) && !defined(__AVX512VNNI__))
    return is_byte(kind) && !has_minimum ? 128 : 0;
#else
    (void)kind, (void)has_minimum;
    return 0;
#endif
}

// Adds to each row of `sum` its codes of kCount chunks, from kFirst on, times the activations.
#if defined(AMBIDEX_DOT_AVX512) && defined(__AVX512VNNI__)

template <CodeKind kKind, bool kHasMinimum, int kFirst, int kCount>
inline Ints dot(Ints sum, const Words* codes, const int8_t* q) {
    __m512i total = (__m512i)sum;
#pragma GCC unroll 8
    for (int c = kFirst; c < kFirst + kCount; ++c) {
        total = _mm512_dpbusd_epi32(total, (__m512i)codes[c], (__m512i)chunk(q, c));
    }
    return (Ints)total;
}

#elif defined(AMBIDEX_DOT_AVX512) || defined(AMBIDEX_DOT_AVX2)

#if defined(AMBIDEX_DOT_AVX512)
inline Words multiply_pairs(Words codes, Ints q) {
    return (Words)_mm512_maddubs_epi16((__m512i)codes, (__m512i)q);
}
inline Ints add_pairs(Words x, Words y) {
    return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
}
inline Words magnitude(Words x) { return (Words)_mm512_abs_epi8((__m512i)x); }
inline Ints with_sign_of(Ints x, Words y) {
    __mmask64 negative = _mm512_movepi8_mask((__m512i)y);
    return (Ints)_mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
}
#else
inline Words multiply_pairs(Words codes, Ints q) {
    return (Words)_mm256_maddubs_epi16((__m256i)codes, (__m256i)q);
}
inline Ints add_pairs(Words x, Words y) {
    return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
}
inline Words magnitude(Words x) { return (Words)_mm256_abs_epi8((__m256i)x); }
inline Ints with_sign_of(Ints x, Words y) {
    return (Ints)_mm256_sign_epi8((__m256i)x, (__m256i)y);
}
#endif

template <CodeKind kKind, bool kHasMinimum, int kFirst, int kCount>
inline Ints dot(Ints sum, const Words* codes, const int8_t* q) {
    typedef int16_t Shorts __attribute__((vector_size(4 * kPart)));
    if constexpr (!is_byte(kKind)) {
        // How many chunks' products of two surely add up within 16 bits.
        constexpr int kRun = kKind == CodeKind::k4 ? 8 : kKind == CodeKind::k5 ? 4 : 2;
        constexpr int kStep = kRun < kCount ? kRun : kCount;
#pragma GCC unroll 8
        for (int c = kFirst; c < kFirst + kCount; c += kStep) {
            Words pairs = multiply_pairs(codes[c], chunk(q, c));
#pragma GCC unroll 8
            for (int i = 1; i < kStep; ++i) pairs += multiply_pairs(codes[c + i], chunk(q, c + i));
            sum += add_pairs(pairs, Words{} + 1);
        }
    } else if constexpr (!kHasMinimum) {
#pragma GCC unroll 8
        for (int c = kFirst; c < kFirst + kCount; ++c) {
            Words code = codes[c] ^ 0x8080;  // code - 128 as a signed byte
            Ints signed_q = with_sign_of(chunk(q, c), code);
            sum += add_pairs(multiply_pairs(magnitude(code), signed_q), Words{} + 1);
        }
    } else {
#pragma GCC unroll 8
        for (int c = kFirst; c < kFirst + kCount; ++c) {
            Shorts both = (Shorts)chunk(q, c);
            sum += add_pairs(codes[c] & 0xff, (Words)((Shorts)(both << 8) >> 8));
            sum += add_pairs(codes[c] >> 8, (Words)(both >> 8));
        }
    }
    return sum;
}

#else

template <CodeKind kKind, bool kHasMinimum, int kFirst, int kCount>
[[gnu::noinline]] Ints dot(Ints sum, const Words* codes, const int8_t* q) {
    for (int c = kFirst; c < kFirst + kCount; ++c) {
        Bytes code = (Bytes)codes[c];
        for (int i = 0; i < kPart; ++i) {
            for (int j = 0; j < 4; ++j) sum[i] += int32_t(code[4 * i + j]) * q[4 * c + j];
        }
    }
    return sum;
}

#endif

// The codes of one block, a vector a chunk; `high` gets the second byte of 16-bit tables. `block`
// points at this part's bytes of the block's first vector.
template <CodeKind kKind>
inline void unpack(const uint8_t* block, Words table, Words high_table, Words* codes,
                   Words* high) {
    constexpr int64_t kVector = 64;
    if constexpr (kKind == CodeKind::k8) {
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) codes[c] = load_words(block + c * kVector);
        return;
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        Words both = load_words(block + c * kVector);
        codes[c] = both & 0x0f0f;
        codes[c + 4] = (both >> 4) & 0x0f0f;
    }
    if constexpr (kKind == CodeKind::k5) {
        Words bits = load_words(block + 4 * kVector);
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) {
            Words moved = c < 4 ? bits << (4 - c) : bits >> (c - 4);
            codes[c] |= moved & 0x1010;
        }
    }
    if constexpr (kKind == CodeKind::k6) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            Words bits = load_words(block + (4 + h) * kVector);
            codes[4 * h] |= (bits << 4) & 0x3030;
            codes[4 * h + 1] |= (bits << 2) & 0x3030;
            codes[4 * h + 2] |= bits & 0x3030;
            codes[4 * h + 3] |= (bits >> 2) & 0x3030;
        }
    }
    if constexpr (kKind == CodeKind::kTable8 || kKind == CodeKind::kTable16) {
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) {
            if constexpr (kKind == CodeKind::kTable16) high[c] = look_up(high_table, codes[c]);
            codes[c] = look_up(table, codes[c]);
        }
    }
    (void)table, (void)high_table, (void)high;
}

}  // namespace ambidex::AMBIDEX_LEVEL
