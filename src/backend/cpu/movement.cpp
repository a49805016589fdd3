// Data movement: zero, copy with conversion, upload, read, add, gather and scatter of rows. Bytes and
// elements in order; every element is converted, added or moved by itself, so nothing depends on the
// partition over threads.
#include <algorithm>
#include <cstring>

#include "backend/cpu/storage.h"
#include "backend/operand_checks.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

// FP64 to FP32 rounded to odd: when a second rounding to 16 bits follows, the two together are the
// direct rounding to nearest (Boldo and Melquiond, 2008); nearest after nearest is not.
float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value) return nearest;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;  // towards zero
  return std::bit_cast<float>(bits | 1u);
}

template <typename Destination>
AGOQ_HD Destination convert(double value) {
  if constexpr (std::is_same_v<Destination, Bf16>)
    return to_bf16(round_to_odd(value));
  else if constexpr (std::is_same_v<Destination, Fp16>)
    return to_fp16(round_to_odd(value));
  else
    return static_cast<Destination>(value);
}
template <typename Destination>
AGOQ_HD Destination convert(float value) {
  if constexpr (std::is_same_v<Destination, Bf16>)
    return to_bf16(value);
  else if constexpr (std::is_same_v<Destination, Fp16>)
    return to_fp16(value);
  else
    return static_cast<Destination>(value);
}
template <typename Destination>
AGOQ_HD Destination convert(Bf16 value) {
  return convert<Destination>(to_float(value));
}
template <typename Destination>
AGOQ_HD Destination convert(Fp16 value) {
  return convert<Destination>(to_float(value));
}

template <typename Source, typename Destination>
void copy_elements(const Source* source, Destination* destination, std::int64_t count) {
#pragma omp parallel for schedule(static) if (count > kSerialElements)
  for (std::int64_t i = 0; i < count; ++i) destination[i] = convert<Destination>(source[i]);
}

template <typename Source>
void copy_from(const Tensor& source, const Tensor& destination) {
  const Source* from = source.as<Source>();
  switch (destination.type) {
    case ElementType::kFp64: return copy_elements(from, destination.as<double>(), source.count());
    case ElementType::kFp32: return copy_elements(from, destination.as<float>(), source.count());
    case ElementType::kBf16: return copy_elements(from, destination.as<Bf16>(), source.count());
    case ElementType::kFp16: return copy_elements(from, destination.as<Fp16>(), source.count());
    default:
      fail("copy: {} cannot be converted to {}: only floating-point types convert", name_of(source.type),
           name_of(destination.type));
  }
}

// Large enough that a thread's piece hides the cost of waking it.
constexpr std::int64_t kPieceBytes = 1 << 20;

template <typename Move>
void in_pieces(std::size_t bytes, Move move) {
  const auto total = static_cast<std::int64_t>(bytes);
#pragma omp parallel for schedule(static) if (total > kPieceBytes)
  for (std::int64_t begin = 0; begin < total; begin += kPieceBytes) {
    move(begin, static_cast<std::size_t>(std::min(kPieceBytes, total - begin)));
  }
}

void copy_bytes(const std::byte* source, std::byte* destination, std::size_t bytes) {
  if (source == destination) return;
  in_pieces(bytes, [=](std::int64_t begin, std::size_t size) {
    std::memcpy(destination + begin, source + begin, size);
  });
}

/// move(row of the whole, row of some) for every one of `rows`, which number rows of a tensor of
/// `whole`.
template <typename Move>
void for_each_numbered(std::string_view operation, const Tensor& rows, std::int64_t whole,
                       std::int64_t row_bytes, Move move) {
  const auto* const number = rows.as<std::int32_t>();
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    check(0 <= number[i] && number[i] < whole, "{}: row {} was asked for of {}", operation, number[i],
          whole);
  }
#pragma omp parallel for schedule(static) if (rows.count() * row_bytes > kPieceBytes)
  for (std::int64_t i = 0; i < rows.count(); ++i) move(std::int64_t{number[i]}, i);
}

/// Row `from` of `source` to row `to` of `target`, which has rows of the same bytes.
void copy_row(const RowBytes& bytes, const QuantTensor& source, std::int64_t from,
              const QuantTensor& target, std::int64_t to) {
  const auto copy_plane = [=](const std::byte* in, std::byte* out, std::int64_t of_row) {
    if (of_row > 0) std::memcpy(out + to * of_row, in + from * of_row, static_cast<std::size_t>(of_row));
  };
  copy_plane(source.codes, target.codes, bytes.codes);
  copy_plane(source.bits, target.bits, bytes.bits);
  copy_plane(source.scales, target.scales, bytes.scales);
  copy_plane(source.super, target.super, bytes.super);
}

}  // namespace

void CpuBackend::zero(const Context& context, std::byte* memory, std::size_t bytes) {
  if (context.workspace.is_measuring()) return;
  in_pieces(bytes, [=](std::int64_t begin, std::size_t size) { std::memset(memory + begin, 0, size); });
}

void CpuBackend::copy(const Context& context, const Tensor& source, const Tensor& destination) {
  check(source.count() == destination.count(), "copy: source has {} elements and destination {}",
        source.count(), destination.count());
  const bool same_type = source.type == destination.type;
  const auto is_float = [](ElementType type) {
    return type == ElementType::kFp64 || type == ElementType::kFp32 || type == ElementType::kBf16 ||
           type == ElementType::kFp16;
  };
  check(same_type || (is_float(source.type) && is_float(destination.type)),
        "copy: {} cannot be converted to {}: only floating-point types convert", name_of(source.type),
        name_of(destination.type));
  if (context.workspace.is_measuring()) return;
  if (same_type) return copy_bytes(source.data, destination.data, source.bytes());
  switch (source.type) {
    case ElementType::kFp64: return copy_from<double>(source, destination);
    case ElementType::kFp32: return copy_from<float>(source, destination);
    case ElementType::kBf16: return copy_from<Bf16>(source, destination);
    default: return copy_from<Fp16>(source, destination);
  }
}

void CpuBackend::upload(const Context& context, const void* source, std::byte* destination,
                        std::size_t bytes) {
  if (context.workspace.is_measuring()) return;
  copy_bytes(static_cast<const std::byte*>(source), destination, bytes);
}

void CpuBackend::read(const Context& context, const std::byte* source, void* destination,
                      std::size_t bytes) {
  // What a plan reads has no value yet: zeros keep it deterministic.
  if (context.workspace.is_measuring()) {
    std::memset(destination, 0, bytes);
    return;
  }
  copy_bytes(source, static_cast<std::byte*>(destination), bytes);
}

void CpuBackend::add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum) {
  expect("add", "b", b, a.type, a.rows(), a.width());
  expect("add", "sum", sum, a.type, a.rows(), a.width());
  if (context.workspace.is_measuring()) return;
  for_storage("add", a.type, [&]<typename Storage>() {
    const Storage* left = a.as<Storage>();
    const Storage* right = b.as<Storage>();
    Storage* total = sum.as<Storage>();
    const std::int64_t count = a.count();
#pragma omp parallel for schedule(static) if (count > kSerialElements)
    for (std::int64_t i = 0; i < count; ++i) store(load(left[i]) + load(right[i]), total[i]);
  });
}

void CpuBackend::gather_rows(const Context& context, const QuantTensor& source, const Tensor& rows,
                             const QuantTensor& destination) {
  expect_rows_of("gather_rows", source, rows, destination);
  if (context.workspace.is_measuring()) return;
  const RowBytes bytes = row_bytes(source.format, source.grid);
  for_each_numbered(
      "gather_rows", rows, source.rows(), bytes.total(),
      [&](std::int64_t whole, std::int64_t some) { copy_row(bytes, source, whole, destination, some); });
}

void CpuBackend::scatter_rows(const Context& context, const QuantTensor& source, const Tensor& rows,
                              const QuantTensor& destination) {
  expect_rows_of("scatter_rows", destination, rows, source);
  if (context.workspace.is_measuring()) return;
  const RowBytes bytes = row_bytes(source.format, source.grid);
  for_each_numbered(
      "scatter_rows", rows, destination.rows(), bytes.total(),
      [&](std::int64_t whole, std::int64_t some) { copy_row(bytes, source, some, destination, whole); });
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA
