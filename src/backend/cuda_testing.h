// What the tests of the CUDA backend share: the same tensors on both backends. The CPU backend judges.
// Where no GPU can be used the tests are skipped and say why.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "backend/operation_testing.h"

namespace agoq::testing_cuda {

using testing_operations::dot;
using testing_operations::normal;
using testing_operations::relative_error;
using testing_operations::Values;

/// Why no GPU can be used here; nothing when one can.
inline const std::optional<std::string>& unavailable() {
  static const std::optional<std::string> reason = []() -> std::optional<std::string> {
    try {
      cuda_backend().description();
      return std::nullopt;
    } catch (const Error& error) {
      return error.what();
    }
  }();
  return reason;
}

#define AGOQ_NEEDS_GPU() \
  if (::agoq::testing_cuda::unavailable()) GTEST_SKIP() << *::agoq::testing_cuda::unavailable()

/// Fills a tensor of the GPU with normal numbers, drawn there: of large ones the host takes seconds.
inline void fill_normal(const Context& cuda, const Tensor& tensor, std::uint32_t drawn,
                        double deviation = 1.0) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 22;
  const Arena::Scope scope(cuda.workspace);
  const std::int64_t count = tensor.count();
  const Tensor piece = cuda.workspace.take(ElementType::kFp32, Shape{std::min(kPiece, count)});
  RandomKey key = RandomKey{.seed = 7}.with(RandomPurpose::kTest, drawn);
  for (std::int64_t begin = 0; begin < count; begin += kPiece, ++key.step) {
    const Shape part{std::min(kPiece, count - begin)};
    const Tensor from{piece.data, piece.type, part};
    cuda.backend.fill_normal(cuda, key, deviation, from);
    cuda.backend.copy(
        cuda, from,
        {tensor.data + static_cast<std::size_t>(begin) * size_of(tensor.type), tensor.type, part});
  }
}

/// The same tensor on both backends.
struct Twin {
  Tensor cpu, cuda;
};
struct QuantTwin {
  QuantTensor cpu, cuda;
};

class Pair {
 public:
  /// `bytes` for the tensors and as much again for workspace, on each backend.
  explicit Pair(std::size_t bytes = std::size_t{256} << 20)
      : cpu_memory_("test tensors", host_allocator(), bytes),
        cpu_workspace_("test workspace", host_allocator(), bytes),
        cuda_memory_("test tensors", cuda_backend().allocator(), bytes),
        cuda_workspace_("test workspace", cuda_backend().allocator(), bytes),
        cpu{cpu_backend(), {}, cpu_workspace_, {}},
        cuda{cuda_backend(), {}, cuda_workspace_, {}} {}

  /// Uninitialised on the CPU; on the GPU filled with NaN patterns, so that an element that an operation
  /// does not write shows.
  Twin empty(ElementType type, Shape shape) {
    const Twin twin{cpu_memory_.take(type, shape), cuda_memory_.take(type, shape)};
    const std::vector<std::byte> poison(twin.cuda.bytes(), std::byte{0xFF});
    cuda_backend().upload(cuda, poison.data(), twin.cuda.data, poison.size());
    return twin;
  }
  Twin of(ElementType type, Shape shape, const Values& values) {
    const Twin twin{cpu_memory_.take(type, shape), cuda_memory_.take(type, shape)};
    testing_operations::Bench::set(twin.cpu, values);
    upload(twin);
    return twin;
  }
  /// Normal numbers that BF16 holds exactly; fresh ones at each call.
  Twin random(ElementType type, Shape shape, double deviation = 1.0) {
    return of(type, shape, normal(shape.count(), ++drawn_, deviation));
  }
  /// Normal numbers drawn on the GPU, for large tensors; in FP32 BF16 does not hold them.
  Twin drawn(ElementType type, Shape shape, double deviation = 1.0) {
    const Twin twin{cpu_memory_.take(type, shape), cuda_memory_.take(type, shape)};
    fill_normal(cuda, twin.cuda, ++drawn_, deviation);
    cuda_backend().read(cuda, twin.cuda.data, twin.cpu.data, twin.cpu.bytes());
    return twin;
  }
  Twin integers(const std::vector<std::int32_t>& values) {
    const Shape shape{static_cast<std::int64_t>(values.size())};
    const Twin twin{cpu_memory_.take(ElementType::kInt32, shape),
                    cuda_memory_.take(ElementType::kInt32, shape)};
    std::copy(values.begin(), values.end(), twin.cpu.as<std::int32_t>());
    upload(twin);
    return twin;
  }
  /// A row of quantisation counters, zero.
  Twin counters() {
    const Twin twin{cpu_memory_.take(ElementType::kInt64, Shape{kQuantCounters}),
                    cuda_memory_.take(ElementType::kInt64, Shape{kQuantCounters})};
    std::fill_n(twin.cpu.as<std::int64_t>(), kQuantCounters, 0);
    upload(twin);
    return twin;
  }
  /// Zeroed planes, so that padding between them compares equal.
  QuantTwin quant(const QuantFormat& format, const BlockGrid& grid) {
    const std::size_t bytes = storage_bytes(format, grid);
    const QuantTwin twin{place(format, grid, cpu_memory_.take(bytes)),
                         place(format, grid, cuda_memory_.take(bytes))};
    const std::vector<std::byte> zeros(bytes);
    cpu_backend().upload(cpu, zeros.data(), twin.cpu.codes, bytes);
    cuda_backend().upload(cuda, zeros.data(), twin.cuda.codes, bytes);
    return twin;
  }
  /// A quantised twin that holds the codes of random numbers, made on the CPU.
  QuantTwin random_quant(const QuantFormat& format, const BlockGrid& grid, double deviation = 1.0) {
    const Twin source = random(ElementType::kFp32, Shape{grid.rows, grid.row_length}, deviation);
    const QuantTwin twin = quant(format, grid);
    cpu_backend().quantize(cpu, source.cpu, twin.cpu, key(), {});
    cuda_backend().upload(cuda, twin.cpu.codes, twin.cuda.codes, storage_bytes(format, grid));
    return twin;
  }
  /// Copies the CPU's tensor to the GPU's.
  void upload(const Twin& twin) {
    cuda_backend().upload(cuda, twin.cpu.data, twin.cuda.data, twin.cpu.bytes());
  }

  /// A tensor of the GPU on the host.
  Values values(const Tensor& tensor) {
    std::vector<std::byte> bytes(tensor.bytes());
    cuda_backend().read(cuda, tensor.data, bytes.data(), bytes.size());
    Tensor host = tensor;
    host.data = bytes.data();
    if (tensor.type == ElementType::kInt64) {
      const auto* integers = host.as<std::int64_t>();
      return Values(integers, integers + host.count());
    }
    return testing_operations::Bench::get(host);
  }
  /// All planes, of either backend.
  std::vector<std::byte> bytes(const QuantTwin& twin, bool of_cuda) {
    std::vector<std::byte> bytes(storage_bytes(twin.cpu.format, twin.cpu.grid));
    if (of_cuda) {
      cuda_backend().read(cuda, twin.cuda.codes, bytes.data(), bytes.size());
    } else {
      cpu_backend().read(cpu, twin.cpu.codes, bytes.data(), bytes.size());
    }
    return bytes;
  }
  /// Bytes that differ between the two: 0 where the quantiser's input was the same.
  std::int64_t differing_bytes(const QuantTwin& twin) {
    const std::vector<std::byte> a = bytes(twin, false), b = bytes(twin, true);
    std::int64_t differing = 0;
    for (std::size_t i = 0; i < a.size(); ++i) differing += a[i] == b[i] ? 0 : 1;
    return differing;
  }
  /// |cuda - cpu| / |cpu| in L2; NaN when either holds one.
  double error(const Twin& twin) {
    return relative_error(values(twin.cuda), testing_operations::Bench::get(twin.cpu));
  }

  RandomKey key() const {
    return RandomKey{.seed = 11, .step = 3, .micro_batch = 2}.with(RandomPurpose::kTest, drawn_);
  }

 private:
  Arena cpu_memory_, cpu_workspace_, cuda_memory_, cuda_workspace_;
  std::uint32_t drawn_ = 100;

 public:
  Context cpu, cuda;
};

}  // namespace agoq::testing_cuda
