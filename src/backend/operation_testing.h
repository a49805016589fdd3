// What the tests of operations share: memory for tensors, values as doubles, the builds of the CPU
// backend, and finite differences.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace agoq {
namespace cpu::baseline {
Backend& backend();
}
#if defined(__x86_64__)
namespace cpu::x86_64_v3 {
Backend& backend();
}
#endif

namespace testing_operations {

struct Build {
  std::string name;
  Backend* backend;
};

/// The builds of backend/cpu that this machine can run.
inline std::vector<Build> builds() {
  std::vector<Build> all{{"baseline", &cpu::baseline::backend()}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    all.push_back({"x86_64_v3", &cpu::x86_64_v3::backend()});
  }
#endif
  return all;
}

using Values = std::vector<double>;

/// Owns tensors and a context on one backend.
class Bench {
 public:
  explicit Bench(Backend& backend = cpu_backend(), std::size_t bytes = std::size_t{64} << 20)
      : memory_("test tensors", host_allocator(), bytes),
        workspace_("test workspace", host_allocator(), bytes),
        context{backend, {}, workspace_, {}} {}

  Tensor empty(ElementType type, Shape shape) { return memory_.take(type, shape); }

  Tensor of(ElementType type, Shape shape, const Values& values) {
    const Tensor tensor = empty(type, shape);
    set(tensor, values);
    return tensor;
  }

  Tensor integers(const std::vector<std::int32_t>& values) {
    const Tensor tensor = empty(ElementType::kInt32, Shape{static_cast<std::int64_t>(values.size())});
    std::copy(values.begin(), values.end(), tensor.as<std::int32_t>());
    return tensor;
  }

  Documents documents(const std::vector<std::int32_t>& lengths) {
    std::vector<std::int32_t> starts{0};
    std::int64_t longest = 0;
    for (const std::int32_t length : lengths) {
      starts.push_back(starts.back() + length);
      longest = std::max<std::int64_t>(longest, length);
    }
    return {integers(starts), static_cast<std::int64_t>(lengths.size()), longest};
  }

  Arena& workspace() { return workspace_; }

  static void set(const Tensor& tensor, const Values& values) {
    ASSERT_EQ(static_cast<std::int64_t>(values.size()), tensor.count());
    for (std::size_t i = 0; i < values.size(); ++i) {
      switch (tensor.type) {
        case ElementType::kFp64: tensor.as<double>()[i] = values[i]; break;
        case ElementType::kFp32: tensor.as<float>()[i] = static_cast<float>(values[i]); break;
        case ElementType::kBf16: tensor.as<Bf16>()[i] = to_bf16(static_cast<float>(values[i])); break;
        case ElementType::kFp16: tensor.as<Fp16>()[i] = to_fp16(static_cast<float>(values[i])); break;
        default: FAIL() << "not a floating-point tensor";
      }
    }
  }

  static Values get(const Tensor& tensor) {
    Values values(static_cast<std::size_t>(tensor.count()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      switch (tensor.type) {
        case ElementType::kFp64: values[i] = tensor.as<double>()[i]; break;
        case ElementType::kFp32: values[i] = tensor.as<float>()[i]; break;
        case ElementType::kBf16: values[i] = to_float(tensor.as<Bf16>()[i]); break;
        case ElementType::kFp16: values[i] = to_float(tensor.as<Fp16>()[i]); break;
        default: ADD_FAILURE() << "not a floating-point tensor";
      }
    }
    return values;
  }

 private:
  Arena memory_;
  Arena workspace_;

 public:
  Context context;
};

/// `count` normal numbers that BF16 holds exactly, so that every element type starts from the same ones.
inline Values normal(std::int64_t count, std::uint32_t tensor, double deviation = 1.0) {
  const RandomKey key = RandomKey{.seed = 7}.with(RandomPurpose::kTest, tensor);
  Values values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const double drawn = deviation * random_normal(key, static_cast<std::uint64_t>(i));
    values[static_cast<std::size_t>(i)] = to_float(to_bf16(static_cast<float>(drawn)));
  }
  return values;
}

inline double dot(const Values& a, const Values& b) {
  double total = 0;
  for (std::size_t i = 0; i < a.size(); ++i) total += a[i] * b[i];
  return total;
}

/// |a - b| / |b| in L2; NaN when either holds one.
inline double relative_error(const Values& a, const Values& b) {
  double difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference += (a[i] - b[i]) * (a[i] - b[i]);
  const double size = dot(b, b);
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

/// d loss / d x by central differences, x an FP64 tensor that `loss` reads.
inline Values finite_differences(const Tensor& x, const std::function<double()>& loss) {
  constexpr double kStep = 1e-5;  // balances kStep^2 against 2^-53 / kStep
  Values gradient(static_cast<std::size_t>(x.count()));
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    double& element = x.as<double>()[i];
    const double kept = element;
    element = kept + kStep;
    const double above = loss();
    element = kept - kStep;
    const double below = loss();
    element = kept;
    gradient[i] = (above - below) / (2 * kStep);
  }
  return gradient;
}

}  // namespace testing_operations
}  // namespace agoq
