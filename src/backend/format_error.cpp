#include "backend/format_error.h"

#include <cmath>

namespace agoq {
namespace {

/// What quantize and dequantize take from the workspace.
std::size_t workspace_bytes(Backend& backend, const QuantFormat& format, const BlockGrid& grid) {
  Arena workspace = Arena::measuring("format error");
  Arena tensors = Arena::measuring("format error tensors");
  const Context context{backend, {}, workspace, {}};
  const Tensor values = tensors.take(ElementType::kFp32, Shape{grid.rows, grid.row_length});
  const QuantTensor quantised = take(tensors, format, grid);
  backend.quantize(context, values, quantised, {}, {});
  backend.dequantize(context, quantised, values);
  return workspace.high_water() + kArenaAlignment;
}

}  // namespace

std::string_view name_of(TestDistribution distribution) {
  return distribution == TestDistribution::kNormal ? "normal" : "student-t4";
}

std::vector<float> draw_samples(TestDistribution distribution, std::int64_t count) {
  const RandomKey key{
      .seed = 1, .purpose = RandomPurpose::kTest, .tensor = static_cast<std::uint32_t>(distribution)};
  std::vector<float> samples(static_cast<std::size_t>(count));
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<std::uint64_t>(i);
    samples[static_cast<std::size_t>(i)] =
        static_cast<float>(distribution == TestDistribution::kNormal ? random_normal(key, index)
                                                                     : random_student_t4(key, index));
  }
  return samples;
}

FormatError measure_format_error(Backend& backend, const QuantFormat& format,
                                 std::span<const float> samples, std::int64_t row_length) {
  const auto count = static_cast<std::int64_t>(samples.size());
  check(row_length > 0 && count % row_length == 0 && count > 0,
        "format error: {} samples do not fill rows of {}: give a multiple", count, row_length);
  std::vector<float> original(samples.begin(), samples.end());
  if (!traits_of(format.code).is_signed) {
    for (float& x : original) x = std::abs(x);
  }

  const BlockGrid grid{count / row_length, row_length, 1};
  const std::size_t float_bytes = original.size() * sizeof(float);
  Arena arena("format error", backend.allocator(),
              float_bytes + storage_bytes(format, grid) + 2 * kArenaAlignment);
  Arena workspace("format error workspace", backend.allocator(), workspace_bytes(backend, format, grid));
  const Context context{backend, {}, workspace, {}};
  const Tensor values = arena.take(ElementType::kFp32, Shape{grid.rows, grid.row_length});
  const QuantTensor quantised = take(arena, format, grid);
  backend.upload(context, original.data(), values.data, float_bytes);
  backend.quantize(context, values, quantised, RandomKey{.seed = 1}, {});
  backend.dequantize(context, quantised, values);
  std::vector<float> decoded(original.size());
  backend.read(context, values.data, decoded.data(), float_bytes);

  double error = 0, size = 0;
  for (std::size_t i = 0; i < original.size(); ++i) {
    const double difference = static_cast<double>(decoded[i]) - original[i];
    error += difference * difference;
    size += static_cast<double>(original[i]) * original[i];
  }
  const double relative = std::sqrt(error / size);
  return {relative, -20 * std::log10(relative)};
}

}  // namespace agoq
