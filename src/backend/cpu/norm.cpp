// Normalisation of the rows of x [N, H].
//   RMSNorm    r = 1 / sqrt(mean(x^2) + eps)            y = x r w
//   LayerNorm  r = 1 / sqrt(mean((x - mean)^2) + eps)   y = (x - mean) r
// Backward, with the normalised row n = x r or (x - mean) r and g = dy w or dy:
//   RMSNorm    dx += r (g - n mean(g n))                dw += sum over rows of dy n
//   LayerNorm  dx += r (g - mean(g) - n mean(g n))
// A row belongs to one thread. The sum over rows in dw is cut into chunks of kRowsPerPartial rows,
// whatever the number of threads, and the chunks are added in order.
#include <algorithm>

#include "backend/cpu/storage.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

constexpr std::int64_t kRowsPerPartial = 64;

template <typename T>
struct RowStatistics {
  T mean;  // 0 for RMSNorm
  T rstd;
};

template <typename Storage>
AGOQ_HD Compute<Storage> mean_of_row(NormKind kind, const Storage* x, std::int64_t width) {
  using T = Compute<Storage>;
  if (kind == NormKind::kRmsNorm) return T{0};
  return lane_sum<T>(width, [=](std::int64_t i) { return load(x[i]); }) / static_cast<T>(width);
}

template <typename Storage>
AGOQ_HD RowStatistics<Compute<Storage>> statistics_of_row(NormKind kind, const Storage* x,
                                                          std::int64_t width, double epsilon) {
  using T = Compute<Storage>;
  const T mean = mean_of_row(kind, x, width);
  const T squares = lane_sum<T>(width, [=](std::int64_t i) {
    const T deviation = load(x[i]) - mean;
    return deviation * deviation;
  });
  return {mean, T{1} / std::sqrt(squares / static_cast<T>(width) + static_cast<T>(epsilon))};
}

template <typename Storage>
void forward(NormKind kind, const Tensor& x, const Tensor& weight, double epsilon, const Tensor& y,
             const Tensor& rstd) {
  using T = Compute<Storage>;
  const std::int64_t rows = x.rows(), width = x.width();
  const Storage* x_data = x.as<Storage>();
  const Storage* w = kind == NormKind::kRmsNorm ? weight.as<Storage>() : nullptr;
  Storage* y_data = y.as<Storage>();
  T* rstd_data = rstd ? rstd.as<T>() : nullptr;
#pragma omp parallel for schedule(static) if (rows * width > kSerialElements)
  for (std::int64_t row = 0; row < rows; ++row) {
    const Storage* in = x_data + row * width;
    Storage* out = y_data + row * width;
    const auto [mean, r] = statistics_of_row(kind, in, width, epsilon);
    if (rstd_data != nullptr) rstd_data[row] = r;
    if (kind == NormKind::kRmsNorm) {
      for (std::int64_t i = 0; i < width; ++i) store(load(in[i]) * r * load(w[i]), out[i]);
    } else {
      for (std::int64_t i = 0; i < width; ++i) store((load(in[i]) - mean) * r, out[i]);
    }
  }
}

// dx of one row, and its share of dw added to `partial` (RMSNorm).
template <typename Storage, typename T>
void backward_row(NormKind kind, const Storage* dy, const Storage* x, const Storage* w,
                  RowStatistics<T> row, std::int64_t width, Storage* dx, T* partial) {
  const T mean = row.mean, r = row.rstd;  // clang captures no structured binding under OpenMP
  const T per_element = T{1} / static_cast<T>(width);
  if (kind == NormKind::kRmsNorm) {
    const T mean_gn = per_element * r * lane_sum<T>(width, [=](std::int64_t i) {
                        return load(dy[i]) * load(w[i]) * load(x[i]);
                      });
    for (std::int64_t i = 0; i < width; ++i) {
      const T normalised = load(x[i]) * r;
      store(load(dx[i]) + r * (load(dy[i]) * load(w[i]) - normalised * mean_gn), dx[i]);
    }
    for (std::int64_t i = 0; i < width; ++i) partial[i] += load(dy[i]) * (load(x[i]) * r);
  } else {
    const T mean_g = per_element * lane_sum<T>(width, [=](std::int64_t i) { return load(dy[i]); });
    const T mean_gn = per_element * r * lane_sum<T>(width, [=](std::int64_t i) {
                        return load(dy[i]) * (load(x[i]) - mean);
                      });
    for (std::int64_t i = 0; i < width; ++i) {
      const T normalised = (load(x[i]) - mean) * r;
      store(load(dx[i]) + r * (load(dy[i]) - mean_g - normalised * mean_gn), dx[i]);
    }
  }
}

template <typename Storage>
void backward(NormKind kind, const Tensor& dy, const Tensor& x, const Tensor& weight, double epsilon,
              const Tensor& rstd, const Tensor& dx, const Tensor& dweight, const Tensor& partials) {
  using T = Compute<Storage>;
  const std::int64_t rows = x.rows(), width = x.width();
  const std::int64_t chunks = (rows + kRowsPerPartial - 1) / kRowsPerPartial;
  const bool has_weight = kind == NormKind::kRmsNorm;
  const Storage* dy_data = dy.as<Storage>();
  const Storage* x_data = x.as<Storage>();
  const Storage* w = has_weight ? weight.as<Storage>() : nullptr;
  const T* rstd_data = rstd ? rstd.as<T>() : nullptr;
  Storage* dx_data = dx.as<Storage>();
  T* partial_data = has_weight ? partials.as<T>() : nullptr;
#pragma omp parallel for schedule(static) if (rows * width > kSerialElements)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    T* partial = has_weight ? partial_data + chunk * width : nullptr;
    if (has_weight) std::fill_n(partial, width, T{0});
    const std::int64_t end = std::min(rows, (chunk + 1) * kRowsPerPartial);
    for (std::int64_t row = chunk * kRowsPerPartial; row < end; ++row) {
      const Storage* in = x_data + row * width;
      const RowStatistics<T> statistics =
          rstd_data != nullptr ? RowStatistics<T>{mean_of_row(kind, in, width), rstd_data[row]}
                               : statistics_of_row(kind, in, width, epsilon);
      backward_row(kind, dy_data + row * width, in, w, statistics, width, dx_data + row * width,
                   partial);
    }
  }
  if (!has_weight) return;
  T* dw = dweight.as<T>();
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (std::int64_t i = 0; i < width; ++i) dw[i] += partial_data[chunk * width + i];
  }
}

}  // namespace

void CpuBackend::norm_forward(const Context& context, NormKind kind, const Tensor& x,
                              const Tensor& weight, double epsilon, const Tensor& y,
                              const Tensor& rstd) {
  expect_norm_weight("norm_forward", kind, weight, x.type, x.width());
  expect("norm_forward", "y", y, x.type, x.rows(), x.width());
  if (rstd) expect("norm_forward", "rstd", rstd, statistics_type(x.type), x.rows());
  if (context.workspace.is_measuring()) return;
  for_storage("norm_forward", x.type,
              [&]<typename Storage>() { forward<Storage>(kind, x, weight, epsilon, y, rstd); });
}

void CpuBackend::norm_backward(const Context& context, NormKind kind, const Tensor& dy, const Tensor& x,
                               const Tensor& weight, double epsilon, const Tensor& rstd,
                               const Tensor& dx, const Tensor& dweight) {
  expect_norm_weight("norm_backward", kind, weight, x.type, x.width());
  expect("norm_backward", "dy", dy, x.type, x.rows(), x.width());
  expect("norm_backward", "dx", dx, x.type, x.rows(), x.width());
  const ElementType compute = statistics_type(x.type);
  if (rstd) expect("norm_backward", "rstd", rstd, compute, x.rows());
  expect_norm_weight_gradient("norm_backward", kind, dweight, compute, x.width());
  const Arena::Scope scope(context.workspace);
  Tensor partials;
  if (kind == NormKind::kRmsNorm) {
    const std::int64_t chunks = (x.rows() + kRowsPerPartial - 1) / kRowsPerPartial;
    partials = context.workspace.take(compute, Shape{chunks, x.width()});
  }
  if (context.workspace.is_measuring()) return;
  for_storage("norm_backward", x.type, [&]<typename Storage>() {
    backward<Storage>(kind, dy, x, weight, epsilon, rstd, dx, dweight, partials);
  });
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA
