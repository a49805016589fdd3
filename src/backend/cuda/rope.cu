// Rotary position embedding, in place on the query and key heads of qkv [N, (heads + 2 kv) d]:
//   (x_i, x_{i + d/2})  ->  (x_i cos - x_{i + d/2} sin,  x_{i + d/2} cos + x_i sin),  i < d/2,
// with (cos, sin) = table[position][i]. The inverse takes -sin.
//
// Ownership. kTokenThreads neighbouring threads share a token, and a block takes a few tokens once:
// blocks that walk the tensor drift apart, and memory is slower where it is read in many places at once.
// A thread turns one vector of eight pairs in every kTokenThreads / (d / 16)-th head, kHeads heads at a
// time, whose loads are on their way while it finds the angles. Head sizes that are not multiples of 16
// go pair by pair. No sums: the results are the CPU backend's bits.
//
// A position outside the table turns its token into NaN, which the engine's checks find: the positions
// are in device memory, and looking at them here would stall the stream.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/group_vectors.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokenThreads = 64;
constexpr int kBlocksPerMultiprocessor = 32;

struct Geometry {
  std::int64_t tokens, width, known;
  int rotated, half;  // heads that turn; pairs per head
  float sign;
};

__device__ __forceinline__ void rotate(float& a, float& b, float cosine, float sine) {
  const float first = a * cosine - b * sine;
  b = b * cosine + a * sine;
  a = first;
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads, 2)
    rope_vectors(Storage* qkv, const std::int32_t* positions, const float* table, Geometry g) {
  constexpr int kHeads = sizeof(Storage) == 2 ? 5 : 2;  // as many as registers hold
  const int thread = threadIdx.x % kTokenThreads;
  const int vectors = g.half / kVector, slots = kTokenThreads / vectors;
  const int vector = thread % vectors, slot = thread / vectors;
  const std::int64_t token =
      std::int64_t{blockIdx.x} * (kThreads / kTokenThreads) + threadIdx.x / kTokenThreads;
  await_predecessors();
  if (slot >= slots || token >= g.tokens) return;
  const std::int64_t position = positions[token];
  const bool known = position >= 0 && position < g.known;
  const float4* const angles =
      reinterpret_cast<const float4*>(table + ((known ? position : 0) * g.half + vector * kVector) * 2);
  Storage* const own = qkv + token * g.width + vector * kVector;
  for (int head = slot; head < g.rotated; head += kHeads * slots) {
    PackedVector<Storage> a[kHeads], b[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h * slots >= g.rotated) continue;
      const Storage* const first = own + std::int64_t{head + h * slots} * (2 * g.half);
      load_packed(first, a[h]);
      load_packed(first + g.half, b[h]);
    }
    float cosine[kVector], sine[kVector];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float4 two = angles[i];
      cosine[2 * i] = known ? two.x : nanf(""), sine[2 * i] = g.sign * two.y;
      cosine[2 * i + 1] = known ? two.z : nanf(""), sine[2 * i + 1] = g.sign * two.w;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h * slots >= g.rotated) continue;
      float x[kVector], y[kVector];
      widen(a[h], x);
      widen(b[h], y);
#pragma unroll
      for (int i = 0; i < kVector; ++i) rotate(x[i], y[i], cosine[i], sine[i]);
      Storage* const first = own + std::int64_t{head + h * slots} * (2 * g.half);
      store_vector(x, first);
      store_vector(y, first + g.half);
    }
  }
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads)
    rope_pairs(Storage* qkv, const std::int32_t* positions, const float* table, Geometry g) {
  await_predecessors();
  const std::int64_t per_token = std::int64_t{g.rotated} * g.half;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       index < g.tokens * per_token; index += step) {
    const std::int64_t token = index / per_token;
    const int in_token = static_cast<int>(index - token * per_token);
    const int head = in_token / g.half, i = in_token - head * g.half;
    const std::int64_t position = positions[token];
    const bool known = position >= 0 && position < g.known;
    const float* angle = table + ((known ? position : 0) * g.half + i) * 2;
    Storage* const first = qkv + token * g.width + std::int64_t{head} * (2 * g.half) + i;
    float a = load(first[0]), b = load(first[g.half]);
    rotate(a, b, known ? angle[0] : nanf(""), g.sign * angle[1]);
    store(a, first[0]);
    store(b, first[g.half]);
  }
}

}  // namespace

void CudaBackend::rope(const Context& context, const AttentionShape& shape, const Tensor& qkv,
                       const Tensor& positions, const Tensor& table, bool inverse) {
  check(shape.head_size > 0 && shape.head_size % 2 == 0,
        "rope: the head size must be even and is {}: rotation acts on pairs", shape.head_size);
  const std::int64_t tokens = qkv.rows(), width = shape.qkv_width();
  expect("rope", "qkv", qkv, qkv.type, tokens, width);
  expect("rope", "positions", positions, ElementType::kInt32, tokens);
  const std::int64_t known = table.count() / shape.head_size;
  expect("rope", "table", table, ElementType::kFp32, known * shape.head_size);
  check(known > 0, "rope: the table of angles is empty");
  if (context.workspace.is_measuring() || tokens == 0) return;
  const Geometry g{
      tokens, width, known, shape.heads + shape.kv_heads, shape.head_size / 2, inverse ? -1.0f : 1.0f};
  for_storage("rope", qkv.type, [&]<typename Storage>() {
    const cudaStream_t stream = stream_of(context.stream);
    const bool vectors = g.half % kVector == 0 && g.half / kVector <= kTokenThreads &&
                         vector_aligned<Storage>(qkv.data, g.half) &&
                         vector_aligned<Storage>(qkv.data, width) &&
                         vector_aligned<float>(table.data, kVector);
    if (vectors) {
      constexpr std::int64_t kTokens = kThreads / kTokenThreads;
      Launch{static_cast<unsigned>((tokens + kTokens - 1) / kTokens), kThreads, 0, stream}(
          rope_vectors<Storage>, qkv.as<Storage>(), positions.as<std::int32_t>(), table.as<float>(), g);
    } else {
      const std::int64_t pairs = tokens * g.rotated * g.half;
      Launch{grid_blocks((pairs + kThreads - 1) / kThreads, kBlocksPerMultiprocessor), kThreads, 0,
             stream}(rope_pairs<Storage>, qkv.as<Storage>(), positions.as<std::int32_t>(),
                     table.as<float>(), g);
    }
  });
  expect_launched("rope");
}

}  // namespace agoq::cuda
