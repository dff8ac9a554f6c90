// A decoder's layers one after another in one call: what their operators compute, in the same order, and nothing of a
// caller's between them.
#include <algorithm>
#include <vector>

#include "operators.h"

namespace {

// The structs are those of kernels/decoder.py, field by field.

struct Layer {
  const void *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two null: heads are not normalised
  Weight qkv, out, gate_up, down;
  Weight router;            // of a sparse MLP, whose gate_up and down are those of all experts
  int64_t experts, chosen;  // 0 experts: a dense MLP
  int64_t first, here;      // which of them are here
  int64_t window;           // of attention, see vs_attention
};

struct Cache {
  void *keys, *values;
  float *key_scales, *value_scales;  // or null
};

struct Decoder {
  const Layer* layers;
  int64_t hidden, heads, kv_heads, dim;
  float eps, scale;  // of all norms; of scores
  int32_t narrow, act;
  const void* group;  // whose processes have a part of each layer, to be added up; or null
};

struct Step {
  int64_t tokens, requests;
  const void *cos, *sin;
  const int64_t *slots, *plan;  // plan: vs_attention's requests
  const int32_t* table;
  int64_t table_stride;
  const int64_t* window_slots;  // of layers with windows, and their table
  const int32_t* window_table;
  const Cache* caches;
  int32_t narrow_turns, cache_kind;
  // whose adapter each row has, see vs_lora; null: none has one. factors: [layers, 4, adapters], of qkv, out, gate_up
  // and down
  const int32_t* of_row;
  const Factors* factors;
  int64_t adapters;
};

// What adapters add to one product.
struct Adapted {
  const Step& step;
  const Factors* factors;  // of each adapter, or null
};

void multiply(const Decoder& d, int64_t rows, const void* x, const Weight& w, Adapted adapted, void* y,
              const void* residual = nullptr, bool gated = false) {
  const int64_t blocks = w.panels * 4, adapters = adapted.step.adapters;
  float* added = nullptr;
  if (adapted.factors && std::any_of(adapted.factors, adapted.factors + adapters, [](auto& f) { return f.a; })) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < rows * blocks * 16) memory.resize(size_t(rows * blocks * 16));
    added = memory.data();
    vs_lora(d.narrow, x, rows, w.inner, w.inner, adapted.step.of_row, adapted.factors, adapters, blocks, added);
  }
  vs_linear(w.kind, d.narrow, d.narrow, x, rows, w.inner, w.inner, w.data, w.panels, w.outputs, w.group, w.shifted,
            w.bias, added, gated ? d.act : 0, gated, residual, y, w.outputs);
}

void normalise(const Decoder& d, int64_t rows, const void* x, const void* weight, void* out) {
  vs_rms_norm(d.narrow, x, weight, rows, d.hidden, d.eps, out);
}

// x += what all processes of the group have in `part`: 0, or see exchange.cpp.
int64_t add_parts(const Decoder& d, int64_t rows, const void* part, void* x) {
  return vs_all_reduce(d.group, part, rows * d.hidden, d.narrow, x, x);
}

// out = residual + the MLP of `normed`; residual may be null, or out.
void dense_mlp(const Decoder& d, const Layer& l, const Step& s, const Factors* factors, int64_t n, const void* normed,
               const void* residual, void* out, void* scratch) {
  multiply(d, n, normed, l.gate_up, {s, factors ? factors + 2 * s.adapters : nullptr}, scratch, nullptr, true);
  multiply(d, n, scratch, l.down, {s, factors ? factors + 3 * s.adapters : nullptr}, out, residual);
}

// Adapters that change routers or experts do not come here.
void sparse_mlp(const Decoder& d, const Layer& l, const Step& s, const Factors*, int64_t n, const void* normed,
                const void* residual, void* out, void* scratch) {
  const int64_t element = d.narrow ? 2 : 4;
  std::vector<int64_t> ids(n * l.chosen);
  char* scores = (char*)scratch + n * l.experts * element;
  multiply(d, n, normed, l.router, {s, nullptr}, scratch);
  vs_route(d.narrow, scratch, n, l.experts, l.chosen, ids.data(), scores);
  for (int64_t& id : ids) id = id < l.first || id >= l.first + l.here ? -1 : id - l.first;
  vs_experts(d.narrow, &l.gate_up, &l.down, l.here, l.chosen, d.act, normed, n, ids.data(), scores, residual, out,
             scores + n * l.chosen * element);
}

}  // namespace

// Layers first .. last - 1 of x [tokens, hidden], in place. scratch: for each token hidden + max(qkv + heads * dim,
// gates, experts + chosen * (1 + hidden + gates)) elements of x's type. A product may add to the memory that it reads
// its residual from: each element is read by who writes it, just before. What a part of a layer makes takes the place
// of what it was made of. Returns 0, or what the group's exchange says of who is gone.
extern "C" int64_t vs_decoder_layers(const void* decoder, const void* step, int64_t first, int64_t last, void* x,
                                     void* scratch) {
  const auto& d = *(const Decoder*)decoder;
  const auto& s = *(const Step*)step;
  const int64_t n = s.tokens, element = d.narrow ? 2 : 4, all_heads = d.heads + 2 * d.kv_heads;
  void* normed = scratch;
  char* qkv = (char*)scratch + n * d.hidden * element;
  void* attended = qkv + n * all_heads * d.dim * element;
  void* inside = qkv;  // of the MLP: attention is over by then
  const void* residual = d.group ? nullptr : x;
  void* made = d.group ? normed : x;
  for (int64_t i = first; i < last; ++i) {
    const Layer& l = d.layers[i];
    const Cache& c = s.caches[i];
    normalise(d, n, x, l.attention_norm, normed);
    const Factors* factors = s.of_row ? s.factors + i * 4 * s.adapters : nullptr;
    multiply(d, n, normed, l.qkv, {s, factors}, qkv);
    vs_qkv(d.narrow, s.narrow_turns, s.cache_kind, qkv, n, d.heads, d.kv_heads, d.dim, l.q_norm, l.k_norm, d.eps, s.cos,
           s.sin, l.window ? s.window_slots : s.slots, c.keys, c.values, c.key_scales, c.value_scales);
    vs_attention(d.narrow, s.cache_kind, qkv, all_heads * d.dim, attended, c.keys, c.values, c.key_scales,
                 c.value_scales, d.heads, d.kv_heads, d.dim, d.scale, l.window ? s.window_table : s.table,
                 s.table_stride, s.plan, s.requests, l.window);
    multiply(d, n, attended, l.out, {s, factors ? factors + s.adapters : nullptr}, made, residual);
    if (d.group)
      if (int64_t lost = add_parts(d, n, made, x)) return lost;
    normalise(d, n, x, l.mlp_norm, normed);
    (l.experts ? sparse_mlp : dense_mlp)(d, l, s, factors, n, normed, residual, made, inside);
    if (d.group)
      if (int64_t lost = add_parts(d, n, made, x)) return lost;
  }
  return 0;
}
