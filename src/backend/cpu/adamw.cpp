// One AdamW step with decoupled decay (Loshchilov & Hutter, 2019), in one pass over the rows:
//
//   g = gradient_scale * decode(gradient)
//   m = m + (1 - beta1) (g - m)                v = beta2 v + (1 - beta2) g^2
//   p = (1 - lr decay) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
//
// The update uses m and v before they are encoded. A thread holds one row of each operand at a time:
// decoded into scratch, or in place where the row is stored in the compute type.
//
// Invariant: rows are independent and random numbers are keyed by element, so the bytes written do not
// depend on the number of threads.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "backend/cpu/row_codec.h"
#include "backend/cpu/storage.h"
#include "core/master_weight.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

// The smallest non-zero level of the unsigned dynamic map: 10^-6 times the first of the two midpoints
// of {.1, .55, 1}.
constexpr float kSmallestUnsignedLevel = 0.325e-6f;

template <typename T>
struct Scalars {
  T gradient_scale, one_minus_beta1, beta2, one_minus_beta2, keep, rate, second_correction, epsilon;

  explicit Scalars(const AdamwStep& step)
      : gradient_scale(static_cast<T>(step.gradient_scale)),
        one_minus_beta1(static_cast<T>(1.0 - step.beta1)),
        beta2(static_cast<T>(step.beta2)),
        one_minus_beta2(static_cast<T>(1.0 - step.beta2)),
        keep(static_cast<T>(1.0 - step.learning_rate * step.weight_decay)),
        rate(static_cast<T>(step.learning_rate /
                            (1.0 - std::pow(step.beta1, static_cast<double>(step.step))))),
        second_correction(
            static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(step.beta2, static_cast<double>(step.step))))),
        epsilon(static_cast<T>(step.epsilon)) {}
};

template <typename T>
void update_row(const Scalars<T>& s, std::int64_t count, const T* __restrict gradient,
                T* __restrict first, T* __restrict second, T* __restrict master) {
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = s.gradient_scale * gradient[i];
    const T m = first[i] + s.one_minus_beta1 * (g - first[i]);
    const T v = s.beta2 * second[i] + s.one_minus_beta2 * g * g;
    first[i] = m;
    second[i] = v;
    master[i] = s.keep * master[i] - s.rate * (m / (std::sqrt(v) * s.second_correction + s.epsilon));
  }
}

// Lifts non-zero elements of a row that would be stored as zero to the smallest level of their block.
// A second moment of zero beside a first moment that is not divides by epsilon alone: where the next
// gradient is zero (an embedding row whose token is absent) that one weight would leap by many times
// the learning rate. Rounding the denominator up can only shorten a step.
template <typename T>
void lift_underflow(const QuantTensor& second, T* row) {
  const std::int64_t segment = second.grid.segment_length();
  for (std::int64_t begin = 0; begin < second.width(); begin += segment) {
    for (std::int64_t block = 0; block < segment; block += second.format.block) {
      const std::int64_t count = std::min<std::int64_t>(second.format.block, segment - block);
      T* const x = row + begin + block;
      // Non-negative FP32 numbers are ordered like their bits, whose maximum the compiler vectorises.
      std::int32_t absmax_bits = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        absmax_bits = std::max(absmax_bits, std::bit_cast<std::int32_t>(static_cast<float>(x[i])));
      }
      const T least = static_cast<T>(std::bit_cast<float>(absmax_bits) * kSmallestUnsignedLevel);
      for (std::int64_t i = 0; i < count; ++i) x[i] = x[i] > T{0} && x[i] < least ? least : x[i];
    }
  }
}

// The row as it is stored, if it is stored in T; else null.
template <typename T>
T* stored_row(const QuantTensor& tensor, std::int64_t row) {
  if (!tensor.format.is_exact() || element_type_of(tensor.format) != ElementTypeOf<T>::value)
    return nullptr;
  return reinterpret_cast<T*>(tensor.codes) + row * tensor.width();
}

void round_stochastically(const float* master, std::int64_t count, const RandomKey& key,
                          std::int64_t first_index, Bf16* weight) {
  const std::int64_t end_index = first_index + count;
  const RandomWords mixed = mixed_key(key);
  for (std::int64_t block = first_index / 4; block * 4 < end_index; ++block) {
    const RandomWords words = random_words(mixed, static_cast<std::uint64_t>(block));
    const std::int64_t end = std::min(block * 4 + 4, end_index);
    for (std::int64_t index = std::max(block * 4, first_index); index < end; ++index) {
      weight[index - first_index] =
          to_bf16_stochastic(master[index - first_index], words.word[index - block * 4]);
    }
  }
}

void load_master(const AdamwTensors& tensors, MasterKind kind, std::int64_t row, std::int64_t width,
                 float* __restrict master) {
  const Bf16* __restrict weight = tensors.weight.as<Bf16>() + row * width;
  if (kind == MasterKind::kRemainder) {
    const std::int16_t* __restrict remainder = tensors.master.as<std::int16_t>() + row * width;
    for (std::int64_t i = 0; i < width; ++i) master[i] = join_master(weight[i], remainder[i]);
  } else {
    for (std::int64_t i = 0; i < width; ++i) master[i] = to_float(weight[i]);
  }
}

void store_master(const AdamwTensors& tensors, MasterKind kind, std::int64_t row, std::int64_t width,
                  const float* __restrict master, const RandomKey& key) {
  Bf16* __restrict weight = tensors.weight.as<Bf16>() + row * width;
  switch (kind) {
    case MasterKind::kFp32:
      for (std::int64_t i = 0; i < width; ++i) weight[i] = to_bf16_half_away(master[i]);
      return;
    case MasterKind::kRemainder: {
      std::int16_t* __restrict remainder = tensors.master.as<std::int16_t>() + row * width;
      for (std::int64_t i = 0; i < width; ++i) {
        const SplitMaster split = split_master(master[i]);
        weight[i].bits = split.weight.bits;  // whole structs are not vectorised
        remainder[i] = split.remainder;
      }
      return;
    }
    case MasterKind::kNone:
      round_stochastically(master, width, key.with(RandomPurpose::kWeightRounding, key.tensor),
                           (tensors.first_moment.first_row + row) * width, weight);
      return;
  }
}

template <typename T>
void update(const Context& context, const AdamwTensors& tensors, const AdamwStep& step,
            const RandomKey& key) {
  constexpr int kRows = 4;  // gradient, first moment, second moment, master
  const std::int64_t rows = tensors.gradient.rows();
  const std::int64_t width = tensors.gradient.width();
  const int threads = omp_get_max_threads();
  const Arena::Scope scope(context.workspace);
  const Tensor scratch = context.workspace.take(ElementTypeOf<T>::value, Shape{threads, kRows, width});
  if (context.workspace.is_measuring()) return;

  const Scalars<T> scalars(step);
  const bool lift = tensors.second_moment.format.code == Code::kDynamic8Unsigned;
  // The two moments of one element must not be rounded with the same number.
  const RandomKey first_key = key.with(RandomPurpose::kMomentRounding, key.tensor);
  RandomKey second_key = first_key;
  second_key.micro_batch = first_key.micro_batch + 1;

#pragma omp parallel for schedule(static) \
    num_threads(threads) if (rows > 1 && rows * width > kSerialElements)
  for (std::int64_t row = 0; row < rows; ++row) {
    T* const own = scratch.as<T>() + omp_get_thread_num() * kRows * width;
    const auto load = [&](const QuantTensor& tensor, T* buffer) {
      T* const stored = stored_row<T>(tensor, row);
      if (stored != nullptr) return stored;
      decode_row(tensor, row, buffer);
      return buffer;
    };
    const T* const gradient = load(tensors.gradient, own);
    T* const first = load(tensors.first_moment, own + width);
    T* const second = load(tensors.second_moment, own + 2 * width);

    if (tensors.weight.type == ElementTypeOf<T>::value) {
      update_row(scalars, width, gradient, first, second, tensors.weight.as<T>() + row * width);
    } else if constexpr (std::is_same_v<T, float>) {
      float* master = own + 3 * width;
      if (step.master == MasterKind::kFp32) {
        master = tensors.master.as<float>() + row * width;
      } else {
        load_master(tensors, step.master, row, width, master);
      }
      update_row(scalars, width, gradient, first, second, master);
      store_master(tensors, step.master, row, width, master, key);
    }

    QuantCounts counts;  // finite by MainGradients::norm, which refuses gradients that are not
    if (first == own + width) encode_row(tensors.first_moment, row, first, first_key, counts);
    if (second == own + 2 * width) {
      if (lift) lift_underflow(tensors.second_moment, second);
      encode_row(tensors.second_moment, row, second, second_key, counts);
    }
  }
}

void check_operands(const AdamwTensors& tensors, const AdamwStep& step) {
  const BlockGrid& grid = tensors.gradient.grid;
  check(tensors.weight.count() == grid.count() && tensors.first_moment.rows() == grid.rows &&
            tensors.first_moment.width() == grid.row_length &&
            tensors.second_moment.rows() == grid.rows &&
            tensors.second_moment.width() == grid.row_length,
        "adamw_update: weight, gradient and moments must have one shape; the gradient has [{}, {}], the "
        "weight {}, the moments [{}, {}] and [{}, {}]",
        grid.rows, grid.row_length, tensors.weight.shape.to_string(), tensors.first_moment.rows(),
        tensors.first_moment.width(), tensors.second_moment.rows(), tensors.second_moment.width());
  const ElementType type = tensors.weight.type;
  check(type == ElementType::kBf16 || type == ElementType::kFp32 || type == ElementType::kFp64,
        "adamw_update: weights are bf16, fp32 or fp64; these are {}", name_of(type));
  check(step.master == MasterKind::kNone || type == ElementType::kBf16,
        "adamw_update: a {} weight is its own master: give MasterKind::kNone", name_of(type));
  if (step.master == MasterKind::kNone) return;
  const ElementType expected =
      step.master == MasterKind::kFp32 ? ElementType::kFp32 : ElementType::kInt16;
  check(tensors.master && tensors.master.type == expected && tensors.master.count() == grid.count(),
        "adamw_update: the master must be {} with {} elements; it is {} with {}", name_of(expected),
        grid.count(), name_of(tensors.master.type), tensors.master ? tensors.master.count() : 0);
}

}  // namespace

void CpuBackend::adamw_update(const Context& context, const AdamwTensors& tensors, const AdamwStep& step,
                              const RandomKey& key) {
  check_operands(tensors, step);
  if (tensors.weight.type == ElementType::kFp64) {
    update<double>(context, tensors, step, key);
  } else {
    update<float>(context, tensors, step, key);
  }
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA
