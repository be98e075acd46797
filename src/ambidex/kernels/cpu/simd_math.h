// Functions on vectors that more than one kernel needs. Each has one version, for whole vectors, so
// an element's result does not depend on where it lies.
#pragma once

#include "simd.h"

namespace ambidex::AMBIDEX_LEVEL {

// e^x to 3 units in the last place; 0 below -87.33, infinity above 88.73. NaN gives NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial of degree 6 for e^r (its Taylor series).
inline f32x16 exp(f32x16 x) {
    // Below this results are no normal numbers, which some processors multiply slowly.
    const f32x16 lowest = broadcast(-87.33f);
    // max and min give their second operand where one is NaN.
    f32x16 clamped = min(broadcast(89.0f), max(lowest, x));
    f32x16 n = round(clamped * broadcast(1.44269504f));
    f32x16 r = fma(n, broadcast(-0.693359375f), clamped);
    r = fma(n, broadcast(2.12194440e-4f), r);
    f32x16 p = broadcast(1.0f / 720);
    p = fma(p, r, broadcast(1.0f / 120));
    p = fma(p, r, broadcast(1.0f / 24));
    p = fma(p, r, broadcast(1.0f / 6));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    // Two factors, since 2^128 alone is none.
    i32x16 whole = to_i32(n);
    i32x16 half = to_i32(round(n * broadcast(0.5f)));
    f32x16 result = p * power_of_two(half) * power_of_two(whole - half);
    return select_less(x, lowest, zero_f32(), result);
}

inline f32x16 sigmoid(f32x16 x) {
    return broadcast(1.0f) / (broadcast(1.0f) + exp(zero_f32() - x));
}
inline f32x16 tanh(f32x16 x) {
    // 2 sigmoid(2x) - 1 loses the digits of small x: there the odd series is exact enough.
    f32x16 large = fma(broadcast(2.0f), sigmoid(x + x), broadcast(-1.0f));
    f32x16 square = x * x;
    f32x16 series = fma(square, broadcast(-17.0f / 315), broadcast(2.0f / 15));
    series = fma(series, square, broadcast(-1.0f / 3));
    series = fma(series * square, x, x);
    return select_less(abs(x), broadcast(0.15f), series, large);
}
inline f32x16 silu(f32x16 x) { return x * sigmoid(x); }
// sqrt(8 / pi) (x + 0.044715 x^3) in a sigmoid: GELU's tanh form.
inline f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = fma(x * x * x, broadcast(0.044715f), x);
    return x * sigmoid(inner * broadcast(1.5957691216f));
}

}  // namespace ambidex::AMBIDEX_LEVEL
