// Functions on vectors that more than one kernel needs. Each has one version, for whole vectors, so
// an element's result does not depend on where it lies.
#pragma once

#include "simd.h"

namespace ambidex::AMBIDEX_LEVEL {

// e^r - 1 - r for |r| <= ln 2 / 2, divided by r^2: fitted for the least largest relative error of
// e^r, which is 3e-9.
inline f32x16 exp_polynomial(f32x16 r) {
    f32x16 p = broadcast(1.381463569e-3f);
    p = fma(p, r, broadcast(8.368709786e-3f));
    p = fma(p, r, broadcast(4.166838667e-2f));
    p = fma(p, r, broadcast(1.666652071e-1f));
    return fma(p, r, broadcast(4.999999346e-1f));
}

// What is left of `x` without n ln 2.
inline f32x16 exp_rest(f32x16 x, f32x16 n) {
    return fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
}

// The logarithm of the smallest normal number, rounded up.
constexpr float kLeastExponent = -87.3365f;

// e^x to about 1 unit in the last place; 0 below -87.3365, infinity above 88.7. NaN gives NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2.
inline f32x16 exp(f32x16 x) {
    // max and min give their second operand where one is NaN.
    f32x16 clamped = min(broadcast(89.0f), max(broadcast(kLeastExponent), x));
    f32x16 n = round(clamped * broadcast(1.44269504f));
    f32x16 r = exp_rest(clamped, n);
    f32x16 p = fma(exp_polynomial(r) * r, r, r) + broadcast(1.0f);
    // Two factors, since 2^128 alone is none.
    i32x16 whole = to_i32(n);
    i32x16 half = to_i32(round(n * broadcast(0.5f)));
    f32x16 result = p * power_of_two(half) * power_of_two(whole - half);
    return select_less(x, broadcast(kLeastExponent), zero_f32(), result);
}

// The same for x <= 0, with less work.
inline f32x16 exp_nonpositive(f32x16 x) {
    f32x16 n = round(x * broadcast(1.44269504f));
    f32x16 r = exp_rest(x, n);
    f32x16 p = fma(exp_polynomial(r) * r, r, r) + broadcast(1.0f);
    f32x16 result = p * power_of_two(to_i32(n));
    return select_less(x, broadcast(kLeastExponent), zero_f32(), result);
}

inline f32x16 sigmoid(f32x16 x) {
    return broadcast(1.0f) / (broadcast(1.0f) + exp(zero_f32() - x));
}
// To 3 units in the last place. Near zero 1 - 2 / (e^2x + 1) loses the digits of x: there an odd
// polynomial, fitted for the least largest relative error.
inline f32x16 tanh(f32x16 x) {
    f32x16 one = broadcast(1.0f), two = broadcast(2.0f);
    f32x16 large = one - two / (exp(x + x) + one);
    f32x16 square = x * x;
    f32x16 p = fma(square, broadcast(-5.721638317e-3f), broadcast(2.065522663e-2f));
    p = fma(p, square, broadcast(-5.374514739e-2f));
    p = fma(p, square, broadcast(1.333151521e-1f));
    p = fma(p, square, broadcast(-3.333328508e-1f));
    f32x16 small = fma(p * square, x, x);
    return select_less(abs(x), broadcast(0.625f), small, large);
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
