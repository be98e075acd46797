// Functions on vectors that more than one kernel needs. Each has one version, for whole vectors, so
// an element's result does not depend on where it lies.
#pragma once

#include "simd.h"

namespace ambidex::AMBIDEX_LEVEL {

// e^x to 1 unit in the last place; 0 below -104, infinity above 88.73. NaN gives NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2, and e^r = 1 + r + r^2 P(r) with P fitted for relative error.
inline f32x16 exp(f32x16 x) {
    // max and min give their second operand where one is NaN.
    f32x16 clamped = min(broadcast(89.0f), max(broadcast(-104.0f), x));
    f32x16 n = round(clamped * broadcast(1.44269504f));
    f32x16 r = fma(n, broadcast(-0.693359375f), clamped);
    r = fma(n, broadcast(2.12194440e-4f), r);
    f32x16 p = broadcast(1.381443400e-3f);
    p = fma(p, r, broadcast(8.368796643e-3f));
    p = fma(p, r, broadcast(4.166839578e-2f));
    p = fma(p, r, broadcast(1.666651997e-1f));
    p = fma(p, r, broadcast(4.999999340e-1f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    // Two factors, since neither 2^128 nor 2^-150 alone is a float.
    i32x16 whole = to_i32(n);
    i32x16 half = to_i32(round(n * broadcast(0.5f)));
    f32x16 result = p * power_of_two(half) * power_of_two(whole - half);
    return result;
}

inline f32x16 sigmoid(f32x16 x) {
    return broadcast(1.0f) / (broadcast(1.0f) + exp(zero_f32() - x));
}
inline f32x16 tanh(f32x16 x) {
    // 2 sigmoid(2x) - 1 loses the digits of small x: there x + x^3 P(x^2), fitted.
    f32x16 large = fma(broadcast(2.0f), sigmoid(x + x), broadcast(-1.0f));
    f32x16 square = x * x;
    f32x16 p = fma(square, broadcast(-5.666982689e-3f), broadcast(2.060618164e-2f));
    p = fma(p, square, broadcast(-5.373000862e-2f));
    p = fma(p, square, broadcast(1.333133102e-1f));
    p = fma(p, square, broadcast(-3.333327806e-1f));
    return select_less(abs(x), broadcast(0.625f), fma(p * square, x, x), large);
}
// erfc(z) / 2 for z >= 0, given z^2: e^(-z^2) times a polynomial in 1 / (1 + 0.3 z), fitted.
inline f32x16 half_erfc(f32x16 z, f32x16 square) {
    f32x16 t = broadcast(1.0f) / fma(z, broadcast(0.3f), broadcast(1.0f));
    f32x16 p = broadcast(-6.476189547e-2f);
    p = fma(p, t, broadcast(2.427838449e-1f));
    p = fma(p, t, broadcast(-2.561438756e-1f));
    p = fma(p, t, broadcast(2.738658106e-1f));
    p = fma(p, t, broadcast(-4.732958459e-2f));
    p = fma(p, t, broadcast(1.074649367e-1f));
    p = fma(p, t, broadcast(7.416906398e-2f));
    p = fma(p, t, broadcast(8.535769206e-2f));
    p = fma(p, t, broadcast(8.459399761e-2f));
    return p * t * exp(zero_f32() - square);
}
inline f32x16 silu(f32x16 x) { return x * sigmoid(x); }
// NaN stays.
inline f32x16 relu(f32x16 x) { return max(zero_f32(), x); }
// x times the normal distribution's share below x: no digits are lost where x is far below 0.
inline f32x16 gelu(f32x16 x) {
    f32x16 tail = half_erfc(abs(x) * broadcast(0.70710678f), x * x * broadcast(0.5f));
    return x * select_less(x, zero_f32(), tail, broadcast(1.0f) - tail);
}
// sqrt(8 / pi) (x + 0.044715 x^3) in a sigmoid: GELU's tanh form.
inline f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = fma(x * x * x, broadcast(0.044715f), x);
    return x * sigmoid(inner * broadcast(1.5957691216f));
}

}  // namespace ambidex::AMBIDEX_LEVEL
