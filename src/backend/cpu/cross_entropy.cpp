// Cross-entropy of logits [C, V] against targets [C], weighted per token:
//   loss_c = w_c (L_c - logits_c[target_c]),   L_c = m + log sum exp(logits_c - m),  m = max logits_c
//   dlogits_c[v] = w_c (exp(logits_c[v] - L_c) - [v = target_c]); dlogits may lie over logits.
// A row belongs to one thread. A row of weight 0 is not read: its loss and gradient are exact zeros.
#include <algorithm>
#include <limits>

#include "backend/cpu/exponential.h"
#include "backend/cpu/storage.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

template <typename T>
T largest(const T* x, std::int64_t count) {
  T lanes[kLanes<T>];
  std::fill_n(lanes, kLanes<T>, -std::numeric_limits<T>::infinity());
  std::int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
    for (std::int64_t lane = 0; lane < kLanes<T>; ++lane) {
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    }
  }
  for (std::int64_t lane = 0; i + lane < count; ++lane) lanes[lane] = std::max(lanes[lane], x[i + lane]);
  return *std::max_element(lanes, lanes + kLanes<T>);
}

/// dlogits may be null.
template <typename T, typename Gradient>
T cross_entropy_row(const T* logits, std::int64_t width, std::int64_t target, T weight,
                    Gradient* dlogits) {
  if (weight == T{0}) {
    if (dlogits != nullptr) std::fill_n(dlogits, width, Gradient{});
    return T{0};
  }
  const T most = largest(logits, width);
  const T total = lane_sum<T>(width, [=](std::int64_t i) { return exponential(logits[i] - most); });
  const T log_sum_exp = most + std::log(total);
  const T of_target = logits[target];
  if (dlogits != nullptr) {
    for (std::int64_t i = 0; i < width; ++i) {
      store(weight * exponential(logits[i] - log_sum_exp), dlogits[i]);
    }
    store(weight * exponential(of_target - log_sum_exp) - weight, dlogits[target]);
  }
  return weight * (log_sum_exp - of_target);
}

}  // namespace

void CpuBackend::cross_entropy(const Context& context, const Tensor& logits, const Tensor& targets,
                               const Tensor& weights, const Tensor& token_loss, const Tensor& dlogits) {
  const std::int64_t rows = logits.rows(), width = logits.width();
  expect("cross_entropy", "logits", logits, statistics_type(logits.type), rows, width);
  expect("cross_entropy", "targets", targets, ElementType::kInt32, rows);
  expect("cross_entropy", "weights", weights, ElementType::kFp32, rows);
  expect("cross_entropy", "token_loss", token_loss, logits.type, rows);
  if (dlogits) expect("cross_entropy", "dlogits", dlogits, dlogits.type, rows, width);
  if (context.workspace.is_measuring()) return;
  const std::int32_t* target = targets.as<std::int32_t>();
  const float* weight = weights.as<float>();
  for (std::int64_t row = 0; row < rows; ++row) {
    check_input(weight[row] == 0.0f || (target[row] >= 0 && target[row] < width),
                "cross_entropy: the target at position {} is {} and the vocabulary has {} tokens: give "
                "positions without a target the weight 0",
                row, target[row], width);
  }
  const auto run = [&]<typename T, typename Gradient>() {
    const T* data = logits.as<T>();
    Gradient* gradient = dlogits ? dlogits.as<Gradient>() : nullptr;
    T* loss = token_loss.as<T>();
#pragma omp parallel for schedule(static) if (rows * width > kSerialElements)
    for (std::int64_t row = 0; row < rows; ++row) {
      loss[row] = cross_entropy_row(data + row * width, width, target[row], static_cast<T>(weight[row]),
                                    gradient == nullptr ? nullptr : gradient + row * width);
    }
  };
  if (logits.type == ElementType::kFp64) {
    check(!dlogits || dlogits.type == ElementType::kFp64,
          "cross_entropy: dlogits is {} and logits fp64: give both as fp64", name_of(dlogits.type));
    run.template operator()<double, double>();
  } else if (dlogits && dlogits.type == ElementType::kBf16) {
    run.template operator()<float, Bf16>();
  } else {
    run.template operator()<float, float>();
  }
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA
