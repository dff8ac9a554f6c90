// One token of gated delta nets for each of some requests, from the products before to the norm behind:
// compute/delta_rule.py says what is computed.
#include <cmath>
#include <cstring>

#include "activations.h"
#include "operators.h"
#include "pool.h"

namespace {

constexpr int64_t MOST = 256;  // elements of a head

// Arguments of a call; kernels/delta_step.py has the same struct, field by field.
struct Step {
  const void *mixed, *gate;  // [tokens, channels], [tokens, value_heads * value_dim]
  const void *b, *a;         // [tokens, value_heads]
  const int64_t *tokens, *states;
  const void *conv_weight, *a_log, *dt_bias, *norm;
  void* conv;        // [states, width - 1, channels], `conv_stride` elements from one state to the next
  float* recurrent;  // [states, value_heads, key_dim, value_dim], `state_stride` elements from one to the next
  void* out;         // [tokens, value_heads * value_dim]
  int64_t count, mixed_stride, gate_stride, ba_stride, conv_stride, state_stride;
  int64_t key_heads, value_heads, key_dim, value_dim, width;
  float eps;
  int32_t narrow, sigmoid_gate;
};

template <class T>
float rounded(float x) {
  T value;
  from_float(&value, x);
  return to_float(value);
}

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// x[i] = round(x[i] * factor[i]), the factor being the sigmoid of z[i], times z[i] if `silu`.
template <class T, class Z>
void gate_with(float* x, const Z* z, bool silu, int64_t size) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    f32x16 v = load_floats(x + i), by = load_floats(z + i);
    T made[16];
    store_floats(made, gated(silu ? v * by : v, by));
    store_floats(x + i, load_floats(made));
  }
  for (; i < size; ++i) {
    float by = to_float(z[i]);
    x[i] = rounded<T>((silu ? x[i] * by : x[i]) * sigmoid(by));
  }
}

// The convolution of channels [first, first + size), with the last inputs moved on by one token.
template <class T>
void convolve(const Step& s, const T* x, T* inputs, int64_t channels, int64_t first, int64_t size, float* out) {
  const T* weight = (const T*)s.conv_weight;
  for (int64_t i = 0; i < size; ++i) {
    int64_t channel = first + i;
    const T* taps = weight + channel * s.width;
    float total = 0;
    for (int64_t tap = 0; tap + 1 < s.width; ++tap) {
      T* input = inputs + tap * channels + channel;
      total += to_float(*input) * to_float(taps[tap]);
      *input = tap + 2 < s.width ? input[channels] : x[channel];
    }
    out[i] = rounded<T>(total + to_float(x[channel]) * to_float(taps[s.width - 1]));
  }
  gate_with<T>(out, out, false, size);
}

void make_unit(float* x, int64_t size, float scale) {
  float squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
  scale /= std::sqrt(squares + 1e-6f);
  for (int64_t i = 0; i < size; ++i) x[i] *= scale;
}

// The delta rule over 16 * N columns of a state, whose rows lie `stride` apart.
template <int N>
void advance(float* rule, int64_t stride, int64_t rows, const float* q, const float* k, const float* v, float decay,
             float beta, float* made) {
  f32x16 known[N] = {}, total[N] = {};
  for (int64_t i = 0; i < rows; ++i)
    for (int n = 0; n < N; ++n) {
      float* at = rule + i * stride + 16 * n;
      f32x16 row = load<f32x16>(at) * splat(decay);
      store(at, row);
      known[n] += splat(k[i]) * row;
    }
  for (int n = 0; n < N; ++n) known[n] = (load<f32x16>(v + 16 * n) - known[n]) * splat(beta);
  for (int64_t i = 0; i < rows; ++i)
    for (int n = 0; n < N; ++n) {
      float* at = rule + i * stride + 16 * n;
      f32x16 row = load<f32x16>(at) + splat(k[i]) * known[n];
      store(at, row);
      total[n] += splat(q[i]) * row;
    }
  for (int n = 0; n < N; ++n) store(made + 16 * n, total[n]);
}

template <class T>
void run_head(const Step& s, int64_t request, int64_t head) {
  int64_t token = s.tokens ? s.tokens[request] : request, state = s.states[request];
  int64_t keys = s.key_heads * s.key_dim, channels = 2 * keys + s.value_heads * s.value_dim;
  int64_t each = s.value_heads / s.key_heads;
  const T* x = (const T*)s.mixed + token * s.mixed_stride;
  T* inputs = (T*)s.conv + state * s.conv_stride;
  float q[MOST], k[MOST], v[MOST], made[MOST];
  convolve(s, x, inputs, channels, head * s.key_dim, s.key_dim, q);
  convolve(s, x, inputs, channels, keys + head * s.key_dim, s.key_dim, k);
  make_unit(q, s.key_dim, 1 / std::sqrt(float(s.key_dim)));
  make_unit(k, s.key_dim, 1);
  for (int64_t own = head * each; own < (head + 1) * each; ++own) {
    int64_t dim = s.value_dim;
    convolve(s, x, inputs, channels, 2 * keys + own * dim, dim, v);
    float beta = rounded<T>(sigmoid(to_float(((const T*)s.b)[token * s.ba_stride + own])));
    float a = to_float(((const T*)s.a)[token * s.ba_stride + own]) + to_float(((const T*)s.dt_bias)[own]);
    float softplus = a > 20 ? a : std::log1p(std::exp(a));
    float decay = std::exp(-std::exp(to_float(((const T*)s.a_log)[own])) * softplus);
    float* rule = s.recurrent + state * s.state_stride + own * s.key_dim * dim;
    int64_t j = 0;
    for (; j + 64 <= dim; j += 64) advance<4>(rule + j, dim, s.key_dim, q, k, v + j, decay, beta, made + j);
    for (; j + 16 <= dim; j += 16) advance<1>(rule + j, dim, s.key_dim, q, k, v + j, decay, beta, made + j);
    for (; j < dim; ++j) {
      float known = 0, total = 0;
      for (int64_t i = 0; i < s.key_dim; ++i) known += k[i] * (rule[i * dim + j] *= decay);
      known = (v[j] - known) * beta;
      for (int64_t i = 0; i < s.key_dim; ++i) total += q[i] * (rule[i * dim + j] += k[i] * known);
      made[j] = total;
    }
    float squares = 0;
    for (int64_t j = 0; j < dim; ++j) {
      made[j] = rounded<T>(made[j]);
      squares += made[j] * made[j];
    }
    float scale = 1 / std::sqrt(squares / float(dim) + s.eps);
    const T *gate = (const T*)s.gate + token * s.gate_stride + own * dim, *norm = (const T*)s.norm;
    T* out = (T*)s.out + (token * s.value_heads + own) * dim;
    for (int64_t j = 0; j < dim; ++j) made[j] = rounded<T>(rounded<T>(made[j] * scale) * to_float(norm[j]));
    gate_with<T>(made, gate, !s.sigmoid_gate, dim);
    for (int64_t j = 0; j < dim; ++j) from_float(out + j, made[j]);
  }
}

}  // namespace

extern "C" void vs_delta_step(const void* step) {
  const Step& s = *(const Step*)step;
  pool::parallel_for(s.count * s.key_heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last; ++at) {
      if (s.narrow) run_head<bf16>(s, at / s.key_heads, at % s.key_heads);
      else run_head<float>(s, at / s.key_heads, at % s.key_heads);
    }
  });
}
