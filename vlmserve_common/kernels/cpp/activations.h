// Activation functions of a product's outputs.
#pragma once
#include "simd.h"

enum Act : int32_t { ACT_NONE = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_QUICK_GELU = 3, ACT_SILU = 4 };

// x times the sigmoid of z.
INLINE f32x16 gated(f32x16 x, f32x16 z) { return x / (splat(1.0f) + exp16(-z)); }

// The error function by Abramowitz and Stegun's 7.1.26: 1.5e-7 off at the most.
INLINE f32x16 erf16(f32x16 x) {
  f32x16 positive = select(x < splat(0.0f), -x, x);
  f32x16 t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * positive);
  f32x16 p = splat(1.061405429f);
  p = p * t + splat(-1.453152027f);
  p = p * t + splat(1.421413741f);
  p = p * t + splat(-0.284496736f);
  p = p * t + splat(0.254829592f);
  f32x16 result = splat(1.0f) - p * t * exp16(-positive * positive);
  return select(x < splat(0.0f), -result, result);
}

INLINE f32x16 activate(f32x16 x, int32_t act) {
  switch (act) {
    case ACT_GELU: return splat(0.5f) * x * (splat(1.0f) + erf16(x * splat(0.70710678118654752f)));
    case ACT_GELU_TANH: {
      f32x16 inner = splat(0.7978845608028654f) * (x + splat(0.044715f) * x * x * x);
      // (1 + tanh(z)) / 2 = sigmoid(2 z)
      return gated(x, splat(2.0f) * inner);
    }
    case ACT_QUICK_GELU: return gated(x, splat(1.702f) * x);
    case ACT_SILU: return gated(x, x);
    default: return x;
  }
}
