// Operators that other files call. The files that define them include this, too, so the compiler finds differences.
#pragma once
#include <cstdint>

// A packed weight, or several of one shape in a row; kernels/packed_linear.py has the same struct, field by field.
struct Weight {
  const void* data;
  const float* bias;  // or null
  int64_t inner, panels, outputs, group, bytes;  // bytes: of one
  int32_t kind, shifted;
};

// The factors of an adapter for one product, or none (a is null); kernels/lora.py has the same struct.
struct Factors {
  const void *a, *b;     // [whole, inner]; [blocks of 16 outputs, rank, 16], in the order of the packed outputs
  const int32_t* parts;  // which part of a each block takes, `rank` rows each; null: the first
  int64_t rank, whole;
};

void grouped_linear(const Weight& w, bool narrow, int64_t count, const int64_t* starts, const void* x, int32_t act,
                    bool gated, void* y);

extern "C" {
void vs_rms_norm(int32_t narrow, const void* x, const void* weight, int64_t rows, int64_t size, float eps, void* out);
void vs_linear(int32_t kind, int32_t x_bf16, int32_t y_bf16, const void* x, int64_t rows, int64_t inner,
               int64_t row_stride, const void* weights, int64_t panels, int64_t outputs, int64_t group, int32_t shifted,
               const float* bias, const float* added, int32_t act, int32_t gated, const void* residual, void* y,
               int64_t y_stride);
void vs_lora(int32_t narrow, const void* x, int64_t rows, int64_t inner, int64_t stride, const int32_t* of_row,
             const void* factors, int64_t adapters, int64_t blocks, float* added);
void vs_qkv(int32_t narrow, int32_t narrow_turns, int32_t kind, void* qkv, int64_t tokens, int64_t heads,
            int64_t kv_heads, int64_t dim, const void* q_weight, const void* k_weight, float eps, const void* cos,
            const void* sin, const int64_t* slots, void* keys, void* values, float* key_scales, float* value_scales);
void vs_attention(int32_t narrow, int32_t kind, const void* q, int64_t q_stride, void* out, const void* keys,
                  const void* values, const float* key_scales, const float* value_scales, int64_t heads,
                  int64_t kv_heads, int64_t dim, float scale, const int32_t* table, int64_t table_stride,
                  const int64_t* requests, int64_t count, int64_t window);
void vs_route(int32_t narrow, const void* logits, int64_t rows, int64_t experts, int64_t chosen, int64_t* ids,
              void* scores);
void vs_experts(int32_t narrow, const void* gate_up, const void* down, int64_t experts, int64_t chosen, int32_t act,
                const void* x, int64_t rows, const int64_t* ids, const void* scores, const void* residual, void* out,
                void* scratch);
int64_t vs_all_reduce(const void* group, const void* x, int64_t count, int32_t narrow, const void* residual, void* out);
}

// x [rows, w.inner] times a weight, without gaps; gated: through `act`.
inline void multiply(int32_t narrow, const void* x, int64_t rows, const Weight& w, void* y, int32_t act = 0,
                     bool gated = false) {
  vs_linear(w.kind, narrow, narrow, x, rows, w.inner, w.inner, w.data, w.panels, w.outputs, w.group, w.shifted, w.bias,
            nullptr, act, gated, nullptr, y, w.outputs);
}
