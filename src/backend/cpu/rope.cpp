// Rotary position embedding, in place on the query and key heads of qkv [N, (heads + 2 kv) d]:
//   (x_i, x_{i + d/2})  ->  (x_i cos - x_{i + d/2} sin,  x_{i + d/2} cos + x_i sin),  i < d/2,
// with (cos, sin) = table[position][i]. The inverse takes -sin. A token belongs to one thread.
#include "backend/cpu/storage.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

template <typename Storage, typename T>
void rotate_head(Storage* __restrict first, Storage* __restrict second, const T* __restrict angles,
                 std::int64_t half, T sign) {
  for (std::int64_t i = 0; i < half; ++i) {
    const T cosine = angles[2 * i], sine = sign * angles[2 * i + 1];
    const T a = load(first[i]), b = load(second[i]);
    store(a * cosine - b * sine, first[i]);
    store(b * cosine + a * sine, second[i]);
  }
}

}  // namespace

void CpuBackend::rope(const Context& context, const AttentionShape& shape, const Tensor& qkv,
                      const Tensor& positions, const Tensor& table, bool inverse) {
  check(shape.head_size > 0 && shape.head_size % 2 == 0,
        "rope: the head size must be even and is {}: rotation acts on pairs", shape.head_size);
  const std::int64_t tokens = qkv.rows(), width = shape.qkv_width(), half = shape.head_size / 2;
  expect("rope", "qkv", qkv, qkv.type, tokens, width);
  expect("rope", "positions", positions, ElementType::kInt32, tokens);
  const std::int64_t known = table.count() / shape.head_size;
  expect("rope", "table", table, statistics_type(qkv.type), known * shape.head_size);
  if (context.workspace.is_measuring()) return;
  const std::int32_t* position = positions.as<std::int32_t>();
  for (std::int64_t token = 0; token < tokens; ++token) {
    check(position[token] >= 0 && position[token] < known,
          "rope: token {} has position {} and the table ends at {}: build it for longer sequences",
          token, position[token], known);
  }
  for_storage("rope", qkv.type, [&]<typename Storage>() {
    using T = Compute<Storage>;
    Storage* data = qkv.as<Storage>();
    const T* angles = table.as<T>();
    const T sign = inverse ? T{-1} : T{1};
    const int rotated = shape.heads + shape.kv_heads;
#pragma omp parallel for schedule(static) if (tokens * width > kSerialElements)
    for (std::int64_t token = 0; token < tokens; ++token) {
      for (int head = 0; head < rotated; ++head) {
        Storage* first = data + token * width + head * 2 * half;
        rotate_head(first, first + half, angles + position[token] * 2 * half, half, sign);
      }
    }
  });
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA
